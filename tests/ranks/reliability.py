"""docs/reliability.md, from the table of faults.

    make reliability

Every row is held to by tests/ranks/test_faults.py, one test for each case.
"""

from __future__ import annotations

from pathlib import Path

from faults import BROKEN, FAULTS, LOADED, REFUSED, TIMEOUT, TOLD, WORLD, Fault

PATH = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"

HEAD = f"""# Reliability

Made by `make reliability` from the faults that `tests/ranks/test_faults.py` puts into one of {WORLD} ranks (gloo, CPU)
on every torch that the suite runs on; `python3 tools/lanes.py test 2.6 -- tests/ranks/test_faults.py` runs them alone.

In every case, on every rank that lives: the caller's dict, the garbage collector's state and the hooks of modules
and optimizers are as before, and less than 64 KiB of tensors stays alive that was not (a shard has 1 MiB).

"""

SECTIONS = {
    REFUSED: (
        "Refused",
        "Every rank raises the same error, which names the key and the ranks; nothing was written, and the process "
        "group goes on.",
    ),
    LOADED: ("Done all the same", "Every value is right, on every rank."),
    TOLD: (
        "Too late to refuse",
        "The rank with the fault raises its own error; every other rank raises one that names the rank and the error, "
        "and says that what was being loaded must not be used. The process group goes on. Ranks ask each other only "
        "where code outside torch takes part on one of them.",
    ),
    BROKEN: (
        "Broken off",
        "Every rank that waits for the one with the fault raises a `TransferError` within the group's timeout "
        f"({TIMEOUT:.0f} s in the tests; torch's default is 30 min for gloo, 10 for NCCL). It says what was under way, with "
        "which rank, and which tensors were written, or that nothing was. A rank that needed nothing more may have "
        "finished, with the right values. What torch leaves of the process group after a timeout cannot be used: "
        "restart the job.",
    ),
}

TAIL = """
## What ranks believe each other

Between ranks travel, besides the bytes of tensors: one inventory of names, shapes and dtypes (and the small values of
the state dict), a mark of fixed size from and to each rank, and, only where something is wrong or ranks differ, lists of
problems and layouts. Inventory and lists are pickled, as in torch's own object collectives (`broadcast_object_list`,
`all_gather_object`): **a rank can make another one run code, as it always can with torch.distributed.** Do not connect
ranks that you do not trust. Beyond that:

- what arrives must have the types that were meant, or it is an error; an inventory of more than 2 GiB is refused
  before memory is taken for it;
- the memory of a transfer is bounded by the staging budget and this rank's own layout; what a peer announces decides
  about memory only for values that the model has no shape for (extra state, tensors behind custom loading code);
- values of a state dict are never executed or evaluated; nothing is read from or written to files;
- no network connection but those of torch.distributed, no telemetry, no `.pth` file, nothing at interpreter start;
- `TORCH_DCP_BACKPORT` and `TORCH_DCP_BACKPORT_STAGING_MIB` are parsed strictly: what is not understood is an error that
  names what would be.

## Threads

Ranks tell transfers apart by their order alone. Two threads of one process that transfer in the same process group at
the same time would get each other's messages: the second one is refused with a RuntimeError, and nothing is changed by
it. One after the other is fine, in the same order on every rank.

## What is not covered

- Options that differ between ranks (`full_state_dict` here and not there) make ranks call different collectives: they end
  in the group's timeout.
- `state_dict()` hooks that fail on one rank in a save: the others wait for the timeout, see above.
- FSDP1: its hooks are torch's own, with collectives of their own.
- Faults on accelerators: the tests use processes on the CPU.
"""


def page() -> str:
    lines = [HEAD, table(("", "faults", "cases"), *map(totals, SECTIONS)), "\n"]
    for ends, (title, text) in SECTIONS.items():
        lines.append(f"## {title}\n\n{text}\n\n")
        found = [fault for fault in FAULTS if fault.ends == ends]
        lines.append(table(("one rank ...", "call and rank", "cases"), *map(row, found)) + "\n")
    return "".join(lines).rstrip("\n") + "\n" + TAIL


def totals(ends: str) -> tuple[object, ...]:
    found = [fault for fault in FAULTS if fault.ends == ends]
    return SECTIONS[ends][0].lower(), len(found), sum(len(fault.where) for fault in found)


def row(fault: Fault) -> tuple[object, ...]:
    calls: dict[str, list[int]] = {}
    for call, rank in fault.where:
        calls.setdefault(call, []).append(rank)
    where = "; ".join(f"{call} {', '.join(map(str, ranks))}" for call, ranks in calls.items())
    return fault.what, where, len(fault.where)


def table(*rows: tuple[object, ...]) -> str:
    head, *body = rows
    return "".join("| " + " | ".join(map(str, one)) + " |\n" for one in (head, ["---"] * len(head), *body))


if __name__ == "__main__":
    PATH.write_text(page())
