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
        ALONE: Promise(
            (1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 1968, "broadcast": 226432}
        ),
        BESIDE: Promise((1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"broadcast": 95364}),
    },
    "load_from_device": {
        ALONE: Promise(
            (1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 1968, "broadcast": 226432}
        ),
        BESIDE: Promise((1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"broadcast": 95364}),
    },
    "load_from_both": {
        ALONE: Promise(
            (1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 1968, "broadcast": 226432}
        ),
        BESIDE: Promise((1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"broadcast": 95364}),
    },
    "load_hsdp": {
        ALONE: Promise(
            (1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 1968, "broadcast": 226432}
        ),
        BESIDE: Promise((1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"broadcast": 95364}),
    },
    "load_hsdp_from_device": {
        ALONE: Promise(
            (1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 1968, "broadcast": 226432}
        ),
        BESIDE: Promise((1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"broadcast": 95364}),
    },
    "load_on_every_rank": {
        ALONE: Promise((1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 328}),
        BESIDE: Promise((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), {}),
    },
    "load_ddp": {
        ALONE: Promise(
            (1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 984, "broadcast": 119552}
        ),
        BESIDE: Promise((1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"broadcast": 54018}),
    },
    "load_ddp_without_set_device": {
        ALONE: Promise((1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 492, "broadcast": 56608}),
        BESIDE: Promise((1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"broadcast": 23841}),
    },
    "load_offloaded": {
        ALONE: Promise(
            (1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 117856, "broadcast": 226432}
        ),
        BESIDE: Promise((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), {}),
    },
    "load_in_a_group": {
        ALONE: Promise(
            (1, 1, 1, 0), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 28221, "broadcast": 59776}
        ),
        BESIDE: Promise(
            (1, 1, 1, 0), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 27360, "broadcast": 27010}
        ),
    },
    "load_with_split_groups": {
        ALONE: Promise((1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 492, "broadcast": 56608}),
        BESIDE: Promise((1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"broadcast": 23841}),
    },
    "tensor_parallel": {
        ALONE: Promise(
            (3, 2, 3, 2), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 10328, "broadcast": 131072}
        ),
        BESIDE: Promise((3, 2, 3, 2), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 6720, "broadcast": 8}),
    },
    "get_to_one": {
        ALONE: Promise((1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 57944}),
        BESIDE: Promise((1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 56960, "broadcast": 2}),
    },
    "get_to_all": {
        ALONE: Promise((1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 57944}),
        BESIDE: Promise((1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 56960, "broadcast": 2}),
    },
    "get_to_all_hsdp": {
        ALONE: Promise((1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 110104}),
        BESIDE: Promise((1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 109120, "broadcast": 4}),
    },
    "get_shards": {
        ALONE: Promise((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), {}),
        BESIDE: Promise((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), {}),
    },
    "optimizer_adamw": {
        ALONE: Promise(
            (1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 364136, "broadcast": 531360}
        ),
        BESIDE: Promise(
            (1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 357248, "broadcast": 334766}
        ),
    },
    "optimizer_sgd": {
        ALONE: Promise(
            (1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 102720, "broadcast": 131072}
        ),
        BESIDE: Promise((1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 100096, "broadcast": 4}),
    },
    "optimizer_hsdp": {
        ALONE: Promise(
            (2, 2, 2, 2), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 291540, "broadcast": 322432}
        ),
        BESIDE: Promise(
            (2, 2, 2, 2), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 288096, "broadcast": 191370}
        ),
    },
    "reshard": {
        ALONE: Promise((1, 1, 1, 1), (3, 3, 3, 3), (3, 3, 3, 3), {"allgather_base": 5248, "messages": 34928}),
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
        ALONE: Promise(
            (1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 40960, "broadcast": 327680}
        ),
        BESIDE: Promise((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), {}),
    },
    "hf_load": {
        ALONE: Promise(
            (1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 6064, "broadcast": 187811}
        ),
        BESIDE: Promise((1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"broadcast": 23825}),
    },
    "whole_tensors": {
        ALONE: Promise((1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 117840}),
        BESIDE: Promise(
            (1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 111936, "broadcast": 12}
        ),
    },
    "engine_moves_and_steps": {
        ALONE: Promise((1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allreduce": 128}),
        BESIDE: Promise((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), {}),
    },
    "engine_trains_with_activations_on_the_host": {
        ALONE: Promise(
            (1, 1, 1, 1),
            (0, 0, 0, 0),
            (0, 0, 0, 0),
            {
                "allgather_base": 4329092,
                "allreduce": 256,
                "broadcast": 753664,
                "reduce_scatter_base": 8651008,
            },
        ),
        BESIDE: Promise(
            (1, 1, 1, 1),
            (0, 0, 0, 0),
            (0, 0, 0, 0),
            {"allgather_base": 4288576, "reduce_scatter_base": 8651008},
        ),
    },
    "manager": {
        ALONE: Promise(
            (2, 2, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 370612, "broadcast": 950272}
        ),
        BESIDE: Promise((2, 2, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 228480, "broadcast": 6}),
    },
    "nearby_nodes": {
        ALONE: Promise(
            (1, 1, 1, 1),
            (0, 0, 0, 0),
            (0, 0, 0, 0),
            {"allgather_base": 69632, "barrier": 32, "broadcast": 557056},
        ),
        BESIDE: Promise((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), {}),
    },
    "errors_on_every_rank": {
        ALONE: Promise(
            (1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 9012, "broadcast": 154912}
        ),
        BESIDE: Promise((1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"broadcast": 23841}),
    },
    "a_dict_that_fails_while_it_is_sent": {
        ALONE: Promise(
            (1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 5080, "broadcast": 12648448}
        ),
        BESIDE: Promise((1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"broadcast": 12582914}),
    },
    "counters_stay_on_the_host": {
        ALONE: Promise(
            (1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 492, "broadcast": 432512}
        ),
        BESIDE: Promise((1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"broadcast": 399745}),
    },
    "little_memory_on_a_rank": {
        ALONE: Promise(
            (1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 984, "broadcast": 16842752}
        ),
        BESIDE: Promise((1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"broadcast": 16777218}),
    },
    "with_a_default_device": {
        ALONE: Promise(
            (1, 1, 1, 1),
            (0, 0, 0, 0),
            (0, 0, 0, 0),
            {"allgather_base": 497560, "allreduce": 128, "broadcast": 911616},
        ),
        BESIDE: Promise(
            (1, 1, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 325952, "broadcast": 95384}
        ),
    },
    "rooms_with_a_default_device": {
        ALONE: Promise(
            (2, 2, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 376676, "broadcast": 1138083}
        ),
        BESIDE: Promise(
            (2, 2, 1, 1), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 228480, "broadcast": 23831}
        ),
    },
}

OTHERWISE: dict[str, Promises] = {
    "2.7": {
        "load_in_a_group": {
            ALONE: Promise((1, 1, 1, 0), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 27852}),
            BESIDE: Promise(
                (1, 1, 1, 0), (0, 0, 0, 0), (0, 0, 0, 0), {"allgather_base": 27360, "broadcast": 1}
            ),
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
    },
}
