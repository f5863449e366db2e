"""docs/reliability.md, from the table of faults.

    make reliability

Every row is held to by tests/ranks/test_faults.py, one test for each case.
"""

from __future__ import annotations

from pathlib import Path

from faults import BROKEN, FAULTS, LOADED, REFUSED, TIMEOUT, TOLD, WORLD, Fault

PATH = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"

HEAD = f"""# Reliability

A fault in one of {WORLD} ranks (gloo, CPU), as every rank sees it. Made by `make reliability` from `tests/ranks/faults.py`;
tested by `python3 tools/lanes.py test 2.6 -- tests/ranks/test_faults.py`.

On every rank that lives the caller's dict, the garbage collector's state and the hooks of modules and optimizers are as
before, and less than 64 KiB of new tensors stays alive (a shard has 1 MiB).

Calls: `load`, `meta`, `optimizer` are a model in memory, a model on the meta device and AdamW, loaded from rank 0;
`local` is a model where every rank has the dict; `save`, `save optimizer` are full gets with `cpu_offload`.
"""

SECTIONS = {
    REFUSED: (
        "Refused",
        "Every rank raises the same error, with key and ranks. Nothing was written, the process group goes on.",
    ),
    LOADED: ("Done all the same", "Every value is right, on every rank."),
    TOLD: (
        "Too late to refuse",
        "The rank with the fault raises its own error, every other rank one that names both: do not use what was being "
        "loaded. The process group goes on. Ranks ask each other only where code outside torch takes part.",
    ),
    BROKEN: (
        "Broken off",
        "Ranks that wait raise a [`TransferError`](troubleshooting.md#transfererror) within the group's timeout "
        f"({TIMEOUT:.0f} s in the tests). A rank that needed nothing more may have finished, with right values. After a "
        "timeout restart the job: torch's process group is unusable.",
    ),
}

TAIL = """Not covered: options that differ between ranks (they end in the timeout), FSDP1's own hooks and collectives,
faults on accelerators.

## What ranks believe each other

**A rank can make another one run code, as always with torch.distributed:** do not connect ranks that you do not trust.
The inventory (names, shapes, dtypes, small values) and, where ranks differ, lists of problems and layouts are pickled,
as in torch's `broadcast_object_list`. Otherwise:

- wrong types are an error; an inventory above 2 GiB is refused before memory is taken for it;
- memory follows from the staging budget and this rank's own layout; a peer decides only for values without a shape in the
  model (extra state, tensors behind custom loading code);
- no files are read or written, no network but torch.distributed is used.

## Threads

Call from one thread, in the same order on every rank: ranks tell transfers apart by their order alone. A second thread
in one process group at the same time gets a `RuntimeError`, and nothing is changed.
"""


def page() -> str:
    parts = [HEAD, f"{len(FAULTS)} faults, {cases(FAULTS)} cases: {', '.join(map(total, SECTIONS))}.\n"]
    for ends, (title, text) in SECTIONS.items():
        parts.append(f"## {title}\n\n{text}\n")
        parts.append("".join(map(line, faults_of(ends))))
    return "\n".join([*parts, TAIL])


def faults_of(ends: str) -> list[Fault]:
    return [fault for fault in FAULTS if fault.ends == ends]


def cases(faults: list[Fault]) -> int:
    return sum(len(fault.where) for fault in faults)


def total(ends: str) -> str:
    return f"{cases(faults_of(ends))} {SECTIONS[ends][0].lower()}"


def line(fault: Fault) -> str:
    calls = dict.fromkeys(call for call, _ in fault.where)
    return f"- {fault.what}: {', '.join(calls)}\n"


if __name__ == "__main__":
    PATH.write_text(page())
