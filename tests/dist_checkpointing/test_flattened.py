"""Flattened ranges: saved, loaded on any other grid, as boxes, as plain torch has them; faults told."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from flattening import TENSORS, Grid, parts, wrong
from hypothesis import given, settings
from hypothesis import strategies as st
from values import value_of

from torch_dcp_backport import dist_checkpointing as room
from torch_dcp_backport.dist_checkpointing import CheckpointingException, ShardedTensor, optimizer
from torch_dcp_backport.dist_checkpointing._src import sharded_tensor
from torch_dcp_backport.dist_checkpointing.state_dict_utils import filter_out_empty_flatten_tensor
from torch_dcp_backport.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from torch_dcp_backport.transfer._src.layout import whole


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
@settings(max_examples=300, deadline=None)
def test_a_run_is_a_few_boxes(size: list[int], data: Any) -> None:
    shape = tuple(size)
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    places = torch.arange(numel).view(shape)
    found = list(sharded_tensor.runs(whole(shape), start, stop))
    assert len(found) <= max(2 * len(shape) - 1, 1)
    at = start
    for box, first in found:
        assert first == at
        inside = places[tuple(slice(low, low + extent) for low, extent in zip(box.offset, box.size))]
        assert inside.reshape(-1).tolist() == list(range(at, at + box.numel))
        at += box.numel
    assert at == stop


def saved(room: Any, folder: Path, grid: Grid) -> None:
    room.save(parts(ShardedTensor, grid, True), folder)


def loaded(room: Any, folder: Path, grid: Grid, together: bool = False) -> list[str]:
    state = parts(ShardedTensor, grid, False)
    held = {name: part.data for name, part in state.items() if part.data is not None}
    strategy = FullyParallelLoadStrategyWrapper() if together else None
    result = room.load(state, folder, strategy, strict="raise_all")
    assert all(result[name] is data for name, data in held.items())
    return wrong(result, grid)


ROWS, HALVES, ONE, BOXES = Grid(4), Grid(2), Grid(1), Grid(2, False)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((4, HALVES), (4, HALVES)),
        ((4, HALVES), (4, ROWS)),
        ((4, ROWS), (4, ONE)),
        ((4, ONE), (3, ONE)),  # other ranges of the same boxes
        ((3, ONE), (4, HALVES)),
        ((4, HALVES), (4, BOXES)),
        ((4, BOXES), (4, HALVES)),
        ((4, ROWS), (1, ONE)),
    ],
)
@pytest.mark.parametrize("together", [False, True], ids=["each", "together"])
def test_any_grid_to_any_other(ranks: Any, tmp_path: Path, old: Any, new: Any, together: bool) -> None:
    ranks(saved, tmp_path, old[1], world=old[0])
    assert room.verify(tmp_path) == []
    assert ranks(loaded, tmp_path, new[1], together, world=new[0]) == [[]] * new[0]


def test_torch_loads_them_folded(ranks: Any, tmp_path: Path) -> None:
    ranks(saved, tmp_path, HALVES)
    target = {"exp_avg.matrix": torch.zeros(2, 1, 60), "exp_avg.stack": torch.zeros(2, 2, 1, 16).double()}
    dcp.load(target, checkpoint_id=str(tmp_path))
    matrix, stack = (value_of(key, *TENSORS[key][::2][:1]) for key in ("matrix", "stack"))
    assert torch.equal(target["exp_avg.matrix"], matrix.view(2, 1, 60))
    assert torch.equal(target["exp_avg.stack"], stack.double().view(2, 2, 1, 16))
    # And so do we, where somebody asks for that.
    plain = ShardedTensor.from_rank_offsets("exp_avg.matrix", torch.zeros(2, 1, 60))
    assert torch.equal(room.load({"a": plain}, tmp_path)["a"], target["exp_avg.matrix"])


def test_what_a_checkpoint_of_them_holds(ranks: Any, tmp_path: Path) -> None:
    ranks(saved, tmp_path, HALVES)
    known = room.load_tensors_metadata(tmp_path)["exp_avg.matrix"]
    assert (known.global_shape, known.flattened_range) == ((12, 10), slice(0, 120))
    values = room.load_plain_tensors(tmp_path)["exp_avg.matrix"]
    assert torch.equal(values, value_of("matrix", (12, 10)).view(-1))


def run_of(start: int, stop: int, rank: int = 0, **fields: Any) -> ShardedTensor:
    """A range of the box of 2 x 5 that is row `rank` of two of them."""
    data = torch.arange(float(start), float(stop))
    return ShardedTensor.from_rank_offsets_flat(
        "w", data, (2, 5), (0, rank, 2), flattened_range=slice(start, stop), **fields
    )


def bad_save(room: Any, folder: Path, fault: str) -> str:
    rank = dist.get_rank()
    ranges = [(0, 4), (4, 10)]
    if fault == "gap":
        ranges[1] = (5, 10)
    if fault == "overlap":
        ranges[1] = (3, 10)
    part: Any = run_of(*ranges[rank // 2], rank % 2)
    if fault == "two mains":
        part = run_of(0, 10, rank % 2)
    if fault == "a box among ranges" and rank == 3:
        part = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 5), (0, 1, 2))
    if fault == "outside" and rank == 3:
        part = replace(part, data=None)
        part.flattened_range = slice(4, 11)
        part.data = torch.zeros(7)
    if fault == "wrong data" and rank == 3:
        part.data = torch.zeros(2, 3)
    with pytest.raises(CheckpointingException) as caught:
        room.save({"w": part}, folder)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("gap", "no rank has all of shape (2, 1, 10): w"),
        ("overlap", "boxes overlap: "),
        ("two mains", "2 main replicas of [0:1, 0:1, 0:10]: w"),
        ("a box among ranges", "rank 3: another global shape than on another rank: w"),
        ("outside", "rank 3: a flattened range outside the local shape: w"),
        ("wrong data", "rank 3: another local shape than its data's: w"),
    ],
)
def test_bad_ranges_are_refused_on_every_rank(ranks: Any, tmp_path: Path, fault: str, words: str) -> None:
    (text,) = set(ranks(bad_save, tmp_path, fault))
    assert words in text
    assert list(tmp_path.iterdir()) == []


def asked_two_ways(room: Any, folder: Path) -> str:
    if dist.get_rank():
        part = run_of(0, 10, 1, replica_id=1)
    else:
        part = ShardedTensor.from_rank_offsets("w", torch.zeros(1, 1, 20))
    with pytest.raises(CheckpointingException) as caught:
        room.load({"w": part}, folder, validate_access_integrity=False)
    return str(caught.value)


def test_a_tensor_asked_for_as_stored_and_as_it_was(ranks: Any, tmp_path: Path) -> None:
    flat_whole = ShardedTensor.from_rank_offsets_flat(
        "w", torch.arange(20.0), (4, 5), flattened_range=slice(0, 20)
    )
    room.save({"w": flat_whole}, tmp_path)
    (text,) = set(ranks(asked_two_ways, tmp_path))
    assert "rank 0: asked for as it is stored, and by another rank as it was before: w" in text


def test_wrong_shape_and_other_sizes(tmp_path: Path) -> None:
    value = torch.arange(20.0)
    made = ShardedTensor.from_rank_offsets_flat("w", value, (4, 5), flattened_range=slice(0, 20))
    room.save({"w": made}, tmp_path)
    asked = ShardedTensor.from_rank_offsets_flat(
        "w", torch.full((30,), 7.0), (6, 5), flattened_range=slice(0, 30)
    )
    with pytest.raises(CheckpointingException, match=r"wrong global shape: w \(expected \(4, 5\) as saved"):
        room.load({"w": asked}, tmp_path)
    # A vocabulary that is padded to another size.
    asked.allow_shape_mismatch = True
    room.load({"w": asked}, tmp_path)
    assert torch.equal(asked.data, torch.cat([value, torch.zeros(10)]))


def test_fields() -> None:
    part = run_of(3, 9, 1)
    assert (part.global_shape, part.global_offset, part.local_shape) == ((4, 5), (2, 0), (2, 5))
    rows, columns = part.local_coordinates()
    assert (rows.tolist(), columns.tolist()) == ([0, 0, 1, 1, 1, 1], [3, 4, 0, 1, 2, 3])
    assert part.global_coordinates()[0].tolist() == [2, 2, 3, 3, 3, 3]
    empty = part.without_data()
    empty.init_data("cpu")
    assert empty.data.shape == (6,)
    (row,) = part.narrow(0, 1, 1)
    assert (row.global_shape, row.global_offset, row.local_shape) == ((2, 5), (1, 0), (1, 5))
    assert (row.flattened_range, row.data.tolist()) == (slice(0, 4), [5.0, 6.0, 7.0, 8.0])
    assert run_of(0, 4).narrow(0, 1, 1) == []
    with pytest.raises(CheckpointingException, match="along the first axis alone"):
        part.narrow(1, 0, 2)
    with pytest.raises(CheckpointingException, match="no flattened range: w"):
        ShardedTensor.from_rank_offsets_flat("w", torch.ones(3), (3,))
    none = replace(run_of(0, 10), data=None, flattened_range=slice(4, 4))
    kept = filter_out_empty_flatten_tensor({"a": part, "b": [none, 1]})
    assert kept == {"a": part, "b": [1]}


def test_states_of_flattened_parameters() -> None:
    parameter = torch.nn.Parameter(torch.ones(6))
    part = replace(run_of(0, 6), data=parameter)
    parts_by_id = optimizer.get_param_id_to_sharded_param_map({"w": part}, [parameter])
    state: dict[str, Any] = {"state": {0: {"exp_avg": torch.zeros(6)}}, "param_groups": [{"params": [0]}]}
    optimizer.optim_state_to_sharding_state(state, parts_by_id)
    made = state["state"][0]["exp_avg"]
    assert (made.key, made.flattened_range) == ("optimizer.state.exp_avg.w", slice(0, 6))
    with pytest.raises(CheckpointingException, match=r"expected \(6,\) as the parameter has, got \(5,\)"):
        optimizer.make_sharded_optimizer_tensor(part, torch.zeros(5), "s")
