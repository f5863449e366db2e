#!/usr/bin/env python3
"""What planning an exchange costs one rank of a thousand: seconds and memory, without any other rank.

    python3 tools/lanes.py run current -- python benchmarks/planning.py

A plan is made of what every rank knows, so that one process can make any rank's; the ranks send each other
the digest of their routes, which has the same few bytes for any number of tensors.
"""

from __future__ import annotations

import hashlib
import time
import tracemalloc
from collections.abc import Mapping

import torch

from torch_dcp_backport.transfer import Agreement, Layout, Mesh, TensorInfo, Want
from torch_dcp_backport.transfer._src.consensus import MARK_BYTES
from torch_dcp_backport.transfer._src.delivery import Delivery
from torch_dcp_backport.transfer._src.exchange import ExchangePlan, Route, rows_of
from torch_dcp_backport.transfer._src.layout import Placement
from torch_dcp_backport.transfer._src.plan import WantTable, packed

TENSORS = 100_000
WORLD = tuple(range(1024))
DATA, STAGES, TENSOR = 8, 16, 8
#: The shapes of a transformer's layer with 8,192 features.
SHAPES = ((8192,), (8192, 8192), (1024, 8192), (28672, 8192), (8192, 28672), (8192, 1024), (1024,))


def stage_ranks(stage: int) -> tuple[int, ...]:
    """The ranks of a pipeline stage in a world of data x stages x tensor parallel ranks."""
    return tuple(
        (data * STAGES + stage) * TENSOR + tensor for data in range(DATA) for tensor in range(TENSOR)
    )


def placed(shape: tuple[int, ...], *placements: Placement) -> tuple[Placement, ...]:
    """Replicas in place of dimensions that the shape has not."""
    return tuple(None if one is not None and one[0] >= len(shape) else one for one in placements)


def routes(
    count: int, old: Mesh, new: Mesh, before: list[Placement], after: list[Placement]
) -> dict[int, Route]:
    """From one layout to another, as a model has tensors: the same shapes over and over."""
    found = {}
    for number in range(count):
        shape = SHAPES[number % len(SHAPES)]
        have = Layout(shape, old, placed(shape, *before))
        found[number] = Route(have, Layout(shape, new, placed(shape, *after)), torch.bfloat16)
    return found


def measure(title: str, found: Mapping[int, Route], ranks: tuple[int, ...], rank: int) -> None:
    began = time.perf_counter()
    hashlib.blake2b("\n".join(rows_of(found)).encode())
    plan = ExchangePlan(found, ranks, rank)
    seconds = time.perf_counter() - began
    del plan
    tracemalloc.start()
    plan = ExchangePlan(found, ranks, rank)
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    boxes = sum(1 for peer in plan.peers for way in (plan.sends(peer), plan.receives(peer)) for _ in way)
    print(
        f"{title}: rank {rank} of {len(ranks)}, {len(found):,} tensors, {boxes:,} boxes to and from "
        f"{len(plan.peers)} peers: {seconds:.2f} s, {seconds / len(found) * 1e6:.1f} us a tensor, "
        f"{memory / 2**20:.1f} MiB; sends {MARK_BYTES} bytes to agree"
    )


def measure_scatter() -> None:
    """A load from rank 0, as a rank of one pipeline stage sees it, and as rank 0 does."""
    tables, inventory = [], {}
    for stage in range(STAGES):
        ranks = stage_ranks(stage)
        mesh, wants = Mesh((DATA, TENSOR), ranks), {}
        for number in range(TENSORS // STAGES):
            shape = SHAPES[number % len(SHAPES)]
            key = f"model.layers.{stage}.{number}.weight"
            layout = Layout(shape, mesh, placed(shape, None, (0, 1)))
            wants[key] = Want(layout, torch.bfloat16)
            inventory[key] = TensorInfo(shape, torch.bfloat16)
        tables.append(WantTable(wants, ranks, True))
    sent = [len(packed(table)) for table in tables]
    for rank in (stage_ranks(3)[21], 0):
        agreement = Agreement(tables, 2**26, "cpu")
        tracemalloc.start()
        delivery = Delivery(WORLD, rank, inventory, agreement, False)
        memory = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        began = time.perf_counter()
        delivery = Delivery(WORLD, rank, inventory, agreement, False)
        nbytes = delivery.nbytes
        boxes = sum(
            1
            for way, keys in delivery.all.ways.items()
            for receiver in ([rank] if rank else delivery.receivers(way))
            for _ in delivery.boxes_of(receiver, keys)
        )
        seconds = time.perf_counter() - began
        print(
            f"load, {STAGES} stages of HSDP: rank {rank} of {len(WORLD)}, {len(inventory):,} tensors of "
            f"{nbytes >> 30} GiB, {boxes:,} boxes {'received' if rank else 'sent'}: {seconds:.2f} s, "
            f"{seconds / boxes * 1e6:.1f} us a box, {memory / 2**20:.1f} MiB; tables of "
            f"{sum(sent) // len(WORLD)} bytes sent per rank"
        )


def main() -> None:
    measure_scatter()
    stage = stage_ranks(3)
    grid = Mesh((DATA, TENSOR), stage)
    own = routes(TENSORS // STAGES, grid, grid, [(0, 1), (1, 1)], [None, (0, 1)])
    measure("pipeline stage, FSDP x TP to TP with replicas", own, stage, stage[21])
    flat, hybrid, half = Mesh((1024,), WORLD), Mesh((16, 64), WORLD), Mesh((512,), WORLD[:512])
    measure("FSDP to HSDP", routes(TENSORS, flat, hybrid, [(0, 1)], [None, (0, 1)]), WORLD, 517)
    measure("FSDP to its half", routes(TENSORS, flat, half, [(0, 1)], [(0, 1)]), WORLD, 300)


if __name__ == "__main__":
    main()
