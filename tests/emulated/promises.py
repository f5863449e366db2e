"""What each case may open and send on an accelerator's process group, exactly.

For NCCL a communicator and a peer cost device memory outside of torch's allocator. `record.py` prints this
table as it is now; a change of it is a change of what users get.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

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

    def is_kept(self, seen: Promise, margin: int) -> bool:
        """Whether no more and no less was opened and sent; bytes may differ by a margin."""
        is_near = set(seen.sent) == set(self.sent) and all(
            abs(size - self.sent[kind]) <= margin for kind, size in seen.sent.items()
        )
        return is_near and replace(seen, sent=self.sent) == self


#: Cases in whose agreements are times and process ids, of various lengths: so many bytes more or less.
MARGINS = {"manager": 128, "rooms_with_a_default_device": 128}

Promises = dict[str, dict[str, Promise]]


def promised(case: str, backend: str) -> Promise:
    """On this release of torch."""
    release = ".".join(torch.__version__.split(".")[:2])
    return OTHERWISE.get(release, {}).get(case, PROMISED[case])[backend]


PROMISED: Promises = {
    "load_from_host": {
        ALONE: Promise((1, 1, 1, 1), (3, 1, 1, 1), (3, 1, 1, 1), {"broadcast": 131200, "messages": 72984}),
        BESIDE: Promise((1, 1, 1, 1), (3, 0, 0, 0), (0, 1, 1, 1), {"broadcast": 132, "messages": 72000}),
    },
    "load_from_device": {
        ALONE: Promise((1, 1, 1, 1), (3, 1, 1, 1), (3, 1, 1, 1), {"broadcast": 131200, "messages": 72984}),
        BESIDE: Promise((1, 1, 1, 1), (3, 0, 0, 0), (0, 1, 1, 1), {"broadcast": 132, "messages": 72000}),
    },
    "load_from_both": {
        ALONE: Promise((1, 1, 1, 1), (3, 1, 1, 1), (3, 1, 1, 1), {"broadcast": 131200, "messages": 72984}),
        BESIDE: Promise((1, 1, 1, 1), (3, 0, 0, 0), (0, 1, 1, 1), {"broadcast": 132, "messages": 72000}),
    },
    "load_hsdp": {
        ALONE: Promise((2, 2, 2, 2), (3, 1, 1, 1), (3, 1, 1, 1), {"broadcast": 227584, "messages": 48984}),
        BESIDE: Promise((2, 2, 2, 2), (1, 0, 0, 0), (0, 1, 0, 0), {"broadcast": 96516, "messages": 48000}),
    },
    "load_hsdp_from_device": {
        ALONE: Promise((2, 2, 2, 2), (3, 1, 1, 1), (3, 1, 1, 1), {"broadcast": 227584, "messages": 48984}),
        BESIDE: Promise((2, 2, 2, 2), (1, 0, 0, 0), (0, 1, 0, 0), {"broadcast": 96516, "messages": 48000}),
    },
    "load_on_every_rank": {
        ALONE: Promise((1, 1, 1, 1), (3, 1, 1, 1), (3, 1, 1, 1), {"messages": 492}),
        BESIDE: Promise((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), {}),
    },
    "load_ddp": {
        ALONE: Promise((1, 1, 1, 1), (3, 1, 1, 1), (3, 1, 1, 1), {"broadcast": 119936, "messages": 492}),
        BESIDE: Promise((1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"broadcast": 54402}),
    },
    "load_offloaded": {
        ALONE: Promise((1, 1, 1, 1), (3, 1, 1, 1), (3, 1, 1, 1), {"broadcast": 131200, "messages": 155184}),
        BESIDE: Promise((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), {}),
    },
    "load_in_a_group": {
        ALONE: Promise(
            (1, 1, 1, 0),
            (2, 1, 1, 0),
            (2, 1, 1, 0),
            {"allgather": 27360, "broadcast": 32800, "messages": 18444},
        ),
        BESIDE: Promise(
            (1, 1, 1, 0), (2, 0, 0, 0), (0, 1, 1, 0), {"allgather": 27360, "broadcast": 34, "messages": 17952}
        ),
    },
    "load_with_split_groups": {
        ALONE: Promise((2, 2, 2, 2), (3, 1, 1, 1), (3, 1, 1, 1), {"broadcast": 56704, "messages": 12150}),
        BESIDE: Promise((1, 1, 1, 1), (3, 0, 0, 0), (0, 1, 1, 1), {"broadcast": 33, "messages": 35808}),
    },
    "tensor_parallel": {
        ALONE: Promise((3, 2, 3, 2), (4, 1, 2, 1), (4, 1, 2, 1), {"broadcast": 131072, "messages": 7288}),
        BESIDE: Promise((3, 2, 3, 2), (0, 1, 2, 1), (4, 0, 0, 0), {"broadcast": 8, "messages": 4992}),
    },
    "get_to_one": {
        ALONE: Promise((1, 1, 1, 1), (3, 1, 1, 1), (3, 1, 1, 1), {"messages": 41100}),
        BESIDE: Promise((1, 1, 1, 1), (0, 1, 1, 1), (3, 0, 0, 0), {"broadcast": 2, "messages": 40608}),
    },
    "get_to_all": {
        ALONE: Promise((1, 1, 1, 1), (3, 1, 1, 1), (3, 1, 1, 1), {"allgather": 57216, "messages": 492}),
        BESIDE: Promise((1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather": 57216, "broadcast": 2}),
    },
    "get_to_all_hsdp": {
        ALONE: Promise((1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1), {"allgather": 111104, "messages": 328}),
        BESIDE: Promise((1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather": 111104, "broadcast": 4}),
    },
    "get_shards": {
        ALONE: Promise((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), {}),
        BESIDE: Promise((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), {}),
    },
    "optimizer_adamw": {
        ALONE: Promise(
            (1, 1, 1, 1),
            (3, 1, 1, 1),
            (3, 1, 1, 1),
            {"allgather": 100224, "broadcast": 197920, "messages": 440052},
        ),
        BESIDE: Promise(
            (1, 1, 1, 1),
            (3, 1, 1, 1),
            (3, 1, 1, 1),
            {"allgather": 100224, "broadcast": 1326, "messages": 436608},
        ),
    },
    "optimizer_sgd": {
        ALONE: Promise(
            (1, 1, 1, 1),
            (3, 1, 1, 1),
            (3, 1, 1, 1),
            {"allgather": 50304, "broadcast": 131072, "messages": 37968},
        ),
        BESIDE: Promise(
            (1, 1, 1, 1), (0, 1, 1, 1), (3, 0, 0, 0), {"allgather": 50304, "broadcast": 4, "messages": 36000}
        ),
    },
    "optimizer_hsdp": {
        ALONE: Promise(
            (3, 3, 3, 3),
            (4, 2, 2, 2),
            (4, 2, 2, 2),
            {"allgather": 196288, "broadcast": 324672, "messages": 145220},
        ),
        BESIDE: Promise(
            (3, 3, 3, 3),
            (1, 1, 0, 0),
            (1, 1, 0, 0),
            {"allgather": 196288, "broadcast": 193610, "messages": 143744},
        ),
    },
    "reshard": {
        ALONE: Promise((1, 1, 1, 1), (3, 3, 3, 3), (3, 3, 3, 3), {"messages": 42800}),
        BESIDE: Promise((1, 1, 1, 1), (3, 3, 3, 3), (3, 3, 3, 3), {"broadcast": 32, "messages": 34928}),
    },
    "copies_on_the_host": {
        ALONE: Promise((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), {}),
        BESIDE: Promise((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), {}),
    },
    "dcp_save_and_load": {
        ALONE: Promise(
            (1, 1, 1, 1),
            (3, 1, 1, 1),
            (3, 1, 1, 1),
            {"allgather": 268, "broadcast": 10695, "gather": 22587, "scatter": 17427},
        ),
        BESIDE: Promise((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), {}),
    },
    "dcp_async_save_and_load": {
        ALONE: Promise((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), {}),
        BESIDE: Promise((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), {}),
    },
    "dist_checkpointing_save_and_load": {
        ALONE: Promise((1, 1, 1, 1), (3, 1, 1, 1), (3, 1, 1, 1), {"messages": 20474}),
        BESIDE: Promise((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), {}),
    },
    "hf_load": {
        ALONE: Promise(
            (1, 1, 1, 1),
            (3, 2, 1, 2),
            (3, 1, 2, 2),
            {"allgather": 176, "broadcast": 98453, "messages": 20673},
        ),
        BESIDE: Promise((1, 1, 1, 1), (3, 1, 0, 1), (0, 1, 2, 2), {"broadcast": 3, "messages": 17904}),
    },
    "whole_tensors": {
        ALONE: Promise((1, 1, 1, 1), (3, 2, 2, 1), (3, 1, 1, 3), {"allgather": 37312, "messages": 57816}),
        BESIDE: Promise(
            (1, 1, 1, 1), (1, 2, 2, 1), (3, 0, 0, 3), {"allgather": 37312, "broadcast": 12, "messages": 54864}
        ),
    },
    "engine_moves_and_steps": {
        ALONE: Promise((1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allreduce": 128}),
        BESIDE: Promise((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), {}),
    },
    "manager": {
        ALONE: Promise((2, 2, 1, 1), (4, 2, 1, 1), (4, 2, 1, 1), {"messages": 308936}),
        BESIDE: Promise((2, 2, 1, 1), (0, 2, 1, 1), (4, 0, 0, 0), {"broadcast": 6, "messages": 130368}),
    },
    "errors_on_every_rank": {
        ALONE: Promise(
            (1, 1, 1, 1),
            (3, 1, 1, 1),
            (3, 1, 1, 1),
            {"allgather": 1088, "broadcast": 131104, "messages": 18594},
        ),
        BESIDE: Promise((1, 1, 1, 1), (3, 0, 0, 0), (0, 1, 1, 1), {"broadcast": 33, "messages": 17856}),
    },
    "little_memory_on_a_rank": {
        ALONE: Promise((1, 1, 1, 1), (3, 1, 1, 1), (3, 1, 1, 1), {"broadcast": 65536, "messages": 12583896}),
        BESIDE: Promise((1, 1, 1, 1), (3, 0, 0, 0), (0, 1, 1, 1), {"broadcast": 2, "messages": 12582912}),
    },
    "with_a_default_device": {
        ALONE: Promise(
            (1, 1, 1, 1),
            (3, 2, 2, 1),
            (3, 1, 1, 3),
            {"allgather": 144832, "allreduce": 128, "broadcast": 393472, "messages": 386510},
        ),
        BESIDE: Promise(
            (1, 1, 1, 1),
            (3, 2, 2, 1),
            (3, 1, 1, 3),
            {"allgather": 144832, "broadcast": 152, "messages": 203472},
        ),
    },
    "rooms_with_a_default_device": {
        ALONE: Promise(
            (2, 2, 1, 1),
            (4, 3, 1, 2),
            (4, 2, 2, 2),
            {"allgather": 176, "broadcast": 98453, "messages": 329609},
        ),
        BESIDE: Promise((2, 2, 1, 1), (3, 3, 1, 2), (4, 1, 2, 2), {"broadcast": 9, "messages": 148272}),
    },
}

#: On another release, where it differs: what torch itself sends, and the length of agreements.
OTHERWISE: dict[str, Promises] = {
    "2.7": {
        "load_in_a_group": {
            ALONE: Promise((1, 1, 1, 0), (2, 1, 1, 0), (2, 1, 1, 0), {"allgather": 27360, "messages": 328}),
            BESIDE: Promise((1, 1, 1, 0), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather": 27360, "broadcast": 1}),
        },
        "dcp_save_and_load": {
            ALONE: Promise(
                (1, 1, 1, 1),
                (3, 1, 1, 1),
                (3, 1, 1, 1),
                {"allgather": 144, "broadcast": 10707, "gather": 22617, "scatter": 17457},
            ),
            BESIDE: Promise((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), {}),
        },
        "dist_checkpointing_save_and_load": {
            ALONE: Promise((1, 1, 1, 1), (3, 1, 1, 1), (3, 1, 1, 1), {"messages": 22928}),
            BESIDE: Promise((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), {}),
        },
        "manager": {
            ALONE: Promise((2, 2, 1, 1), (4, 2, 1, 1), (4, 2, 1, 1), {"messages": 311766}),
            BESIDE: Promise((2, 2, 1, 1), (0, 2, 1, 1), (4, 0, 0, 0), {"broadcast": 6, "messages": 130368}),
        },
        "with_a_default_device": {
            ALONE: Promise(
                (1, 1, 1, 1),
                (3, 2, 2, 1),
                (3, 1, 1, 3),
                {"allgather": 144832, "allreduce": 128, "broadcast": 393472, "messages": 388964},
            ),
            BESIDE: Promise(
                (1, 1, 1, 1),
                (3, 2, 2, 1),
                (3, 1, 1, 3),
                {"allgather": 144832, "broadcast": 152, "messages": 203472},
            ),
        },
        "rooms_with_a_default_device": {
            ALONE: Promise(
                (2, 2, 1, 1),
                (4, 3, 1, 2),
                (4, 2, 2, 2),
                {"allgather": 176, "broadcast": 98453, "messages": 332439},
            ),
            BESIDE: Promise((2, 2, 1, 1), (3, 3, 1, 2), (4, 1, 2, 2), {"broadcast": 9, "messages": 148272}),
        },
    },
}
