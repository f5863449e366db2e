"""What each case may open and send on an accelerator's process group, exactly.

For NCCL a communicator and a peer cost device memory outside of torch's allocator. `record.py` prints this
table as it is now; a change of it is a change of what users get.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: The accelerator's backend alone, and beside one for the CPU.
ALONE, BESIDE = "strict", "cpu:gloo,fakegpu:strict"


@dataclass(frozen=True)
class Promise:
    #: By rank: communicators, peers that it sends to, peers that it receives from.
    communicators: tuple[int, ...]
    sends_to: tuple[int, ...]
    receives_from: tuple[int, ...]
    #: Of all ranks together, by the kind of operation.
    sent: dict[str, int] = field(default_factory=dict)


PROMISED: dict[str, dict[str, Promise]] = {}
