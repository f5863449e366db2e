"""docs/reliability.md, from the table of faults.

    make reliability

Every row is held to by tests/ranks/test_faults.py, one test for each case.
"""

from __future__ import annotations

from pathlib import Path

from faults import BROKEN, FAULTS, LOADED, REFUSED, TIMEOUT, TOLD, WORLD, Fault

PATH = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"

HEAD = f"""# Reliability

What does every rank see if one rank fails in a load or a save of a full state dict? For this page one of {WORLD} ranks (gloo,
CPU) makes each of the mistakes below. What a checkpoint on disk survives: [guarantees](guarantees.md).
`make reliability` writes the page from `tests/ranks/faults.py`, and
`python3 tools/lanes.py test 2.6 -- tests/ranks/test_faults.py` tests every line of it.

On each rank that survives, the caller's dict, the garbage collector's state and the hooks of modules and optimizers are as
before. At most 64 KiB of new tensors stay alive there (a shard has 1 MiB).

| call | is |
|---|---|
| `load`, `meta`, `optimizer` | a load from rank 0 into a model in memory, a model on the meta device, and AdamW |
| `local` | a load of a model where every rank has the dict |
| `save`, `save optimizer` | a full get with `cpu_offload` |
"""

SECTIONS = {
    REFUSED: (
        "Refused",
        "Every rank raises the same error, which names key and ranks. Nothing was written, and the process group can be used again.",
    ),
    LOADED: ("Done all the same", "Every value is right, on every rank."),
    TOLD: (
        "Too late to refuse",
        "The rank with the fault raises its own error. Every other rank raises an error that names this rank and its "
        "error, and says: do not use what was being loaded. The process group can be used again. Ranks agree on this "
        "only if code outside torch takes part.",
    ),
    BROKEN: (
        "Broken off",
        "Ranks that wait raise a [`TransferError`](troubleshooting.md#transfererror) within the group's timeout "
        f"({TIMEOUT:.0f} s in the tests). A rank that needed nothing more may have finished, with right values. Restart the "
        "job after a timeout: torch's process group is unusable then.",
    ),
}

TAIL = """These tests do not cover options that differ between ranks (they end in the timeout), FSDP1's own hooks and
collectives, and faults on accelerators.

## What ranks believe each other

**A rank can make another rank run code, as always with torch.distributed.** So do not connect ranks that you do not trust.
Ranks pickle the inventory (names, shapes, dtypes, small values), as torch's `broadcast_object_list` does. If ranks differ,
they also pickle lists of problems and layouts. Apart from that:

- Values of a wrong type are an error. An inventory above 2 GiB is refused before memory is taken for it.
- Memory follows from the staging budget and from this rank's own layout. A peer decides only for values that have no shape
  in the model (extra state, and tensors behind custom loading code).
- No files are read or written, and torch.distributed is the only network.

## Threads

Call from one thread, and in the same order on every rank: ranks tell transfers apart only by their order. If a second
thread uses the same process group at the same time, it gets a `RuntimeError`, and nothing is changed.
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
