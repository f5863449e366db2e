"""Exchanges between memories: what is dense is sent as it lies, what is not through a buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from torch_dcp_backport.transfer import Box, Call, Failure
from torch_dcp_backport.transfer._src import staging
from torch_dcp_backport.transfer._src.exchange import Route
from torch_dcp_backport.transfer._src.layout import whole
from torch_dcp_backport.transfer._src.memories import Memories, move
from torch_dcp_backport.transfer._src.memory import part_of
from torch_dcp_backport.transfer._src.spread import Boxes

WIDTH = 64


def packed(api: Any, rows: int, dim: int, kind: str) -> int:
    """Chunks that rank 0 copied before it sent them, of a quarter for each rank along a dimension."""
    size, rank, chunks = (rows, WIDTH), dist.get_rank(), 0
    native = staging.Staging.pack

    def pack(*args: Any) -> None:
        nonlocal chunks
        chunks += 1
        native(*args)

    value = torch.randn(size, generator=torch.Generator().manual_seed(0))
    value = {"": value, "turned": value.t().contiguous().t(), "zero": torch._efficientzerotensor(size)}[kind]
    quarter = tuple(extent // 4 if axis == dim else extent for axis, extent in enumerate(size))
    boxes = [Box(tuple(part * quarter[dim] * (axis == dim) for axis in (0, 1)), quarter) for part in range(4)]
    held = Boxes(size, ((0, (whole(size),)),))
    wanted = Boxes(size, tuple((part, (box,)) for part, box in enumerate(boxes)))
    target = torch.full(quarter, -1.0)
    memories = Memories(
        lambda _, box: part_of(value, whole(size), box), lambda _, box: part_of(target, boxes[rank], box)
    )
    staging.Staging.pack = pack  # type: ignore[method-assign]
    try:
        with Call("cannot move", "move", [None]) as call:
            move(call, call.agree_on_wants(), {"w": Route(held, wanted, torch.float32)}, memories)
    finally:
        staging.Staging.pack = native  # type: ignore[method-assign]
    assert torch.equal(target, part_of(value, whole(size), boxes[rank]).clone())
    return chunks


def test_in_one_process_too_the_caller_is_told_of_a_failed_copy() -> None:
    def fails(key: str, box: Box) -> torch.Tensor:
        raise OSError("no memory")

    held = Boxes((4,), ((0, (whole((4,)),)),))
    told: list[Failure] = []
    with Call("cannot move", "move", ()) as call:
        routes = {"w": Route(held, held, torch.float32)}
        move(call, call.agree_on_wants(), routes, Memories(fails, fails, failed=told.append))
        with pytest.raises(OSError, match="no memory"):
            move(call, call.agree_on_wants(), routes, Memories(fails, fails))
    assert [(str(error), key) for error, key in told] == [("no memory", "w")]


@pytest.mark.parametrize("rows", [64, 2**16])
def test_dense_chunks_are_sent_as_they_lie_in_memory(ranks: Any, rows: int) -> None:
    assert ranks(packed, rows, 0, "") == [0] * 4
    for dim, kind in ((1, ""), (0, "turned"), (0, "zero")):
        assert ranks(packed, rows, dim, kind)[0] > 0
