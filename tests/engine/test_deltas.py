"""What has changed since the last export: bit for bit what a whole export has, and no element more."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import small
import torch
import torch.distributed as dist

from torch_dcp_backport.engine._src import deltas
from torch_dcp_backport.transfer import Box


def whole(made: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in made.get_per_tensor_param()[0]}


def arriving(made: Any) -> list[Any]:
    """What the first rank gets of an export: from its groups, and its own of what it holds whole."""
    rank, sent = dist.get_rank(), []
    for slots, dtype, counts, positions, values, group in made.get_per_tensor_param_delta_shard()[0]:
        assert counts.tolist() == [len(positions)] == [len(values)]
        assert str(values.dtype) == f"torch.{dtype}"
        ranks = [rank] if group is None else dist.get_process_group_ranks(group)
        sent.append((*slots[0], positions, values) if 0 in ranks else None)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, sent)
    assert len({len(each) for each in found}) == 1
    return [change for each in found for change in each if change is not None]


def run(api: Any, folder: Path, options: Any, build: Any) -> list[int]:
    made = build(folder, options)
    rollout, numbers = whole(made), []
    made.prime_delta_snapshots()
    for step in (0, 1, None):
        before = {name: tensor.clone() for name, tensor in rollout.items()}
        if step is not None:
            small.trained(made, range(step, step + 1))
        seen: set[tuple[str, int]] = set()
        for name, shape, positions, values in arriving(made):
            assert shape == tuple(rollout[name].shape)
            rollout[name].view(-1)[positions.long()] = values
            seen |= {(name, position) for position in positions.tolist()}
        expected = whole(made)
        assert list(expected) == list(rollout)
        assert all(torch.equal(tensor, rollout[name]) for name, tensor in expected.items())
        # Signs of zeros count: the bits are compared.
        others = {
            (name, place)
            for name, tensor in expected.items()
            for place in (tensor.view(torch.int16) != before[name].view(torch.int16)).view(-1).nonzero()
        }
        assert len(seen) == len(others)
        numbers.append(len(seen))
    return numbers


def decoder(folder: Path, options: Any) -> Any:
    return small.made(folder, frozen=True, **options)


def cut_by_tp(folder: Path, options: Any) -> Any:
    import test_tensor_parallel

    return test_tensor_parallel.made(folder)


@pytest.mark.parametrize(
    "options",
    [{}, {"fsdp_size": 2}, {"fsdp_size": 1}, {"param_offload": True, "optimizer_offload": True}],
    ids=str,
)
def test_a_rollout_gets_what_a_whole_export_has(ranks, tmp_path: Path, options: Any) -> None:
    """With weights that are not trained, and others that are tied."""
    small.write(tmp_path)
    size = sum(value.numel() for value in small.model().state_dict().values())
    for first, second, third in ranks(run, tmp_path, options, decoder):
        assert 0 < first < size
        assert 0 < second < size
        assert third == 0


def test_a_rollout_gets_what_ranks_of_tensor_parallelism_have(ranks, tmp_path: Path) -> None:
    pytest.importorskip("test_tensor_parallel")
    pytest.importorskip("tiny").write(tmp_path, "qwen2")
    for *changed, last in ranks(run, tmp_path, {}, cut_by_tp):
        assert all(changed)
        assert last == 0


def refused(api: Any, folder: Path) -> list[str]:
    made = small.made(folder)
    texts = []

    def read(most: Any = None) -> None:
        try:
            list(itertools.islice(made.get_per_tensor_param_delta_shard()[0], most))
        except RuntimeError as error:
            texts.append(str(error))

    read()
    if dist.get_rank():
        made.prime_delta_snapshots()
    read()
    made.prime_delta_snapshots()
    read(2)
    assert len(texts) == 2
    read()
    made.prime_delta_snapshots()
    read()
    return texts


def test_an_export_that_has_nothing_to_compare_with_is_an_error_on_every_rank(ranks, tmp_path: Path) -> None:
    small.write(tmp_path)
    texts = ranks(refused, tmp_path)
    assert all(found == texts[0] for found in texts)
    never, on_one, cut_off = texts[0]
    assert "prime_delta_snapshots() was not called" in never
    assert "rank 0: " in on_one
    assert "rank 1: " not in on_one
    assert "the last export was not read to its end" in cut_off


def test_what_every_rank_holds_whole_is_in_it() -> None:
    """Buffers, which are not of DTensors; their numbers are whole ones."""
    tensors = {"scale": torch.ones(2, 3), "count": torch.tensor(5), "none": torch.empty(0)}

    def found() -> Any:
        return deltas.shards(tensors, torch.bfloat16, torch.device("cpu"))

    kept = deltas.Deltas(is_pinned=False)
    kept.prime(found())
    tensors["scale"][1, 2] = 7
    tensors["count"] += 1
    read = [
        (*slots[0], dtype, positions.tolist(), values.tolist(), group)
        for slots, dtype, _, positions, values, group in kept.changes(tensors, found())
    ]
    assert read == [
        ("scale", (2, 3), "bfloat16", [5], [7.0], None),
        ("count", (), "int64", [0], [6], None),
        ("none", (0,), "bfloat16", [], [], None),
    ]


def test_places_in_a_part_are_places_in_the_whole() -> None:
    whole = torch.arange(4 * 5 * 6).view(4, 5, 6)
    for box in (Box((1, 0, 0), (2, 5, 6)), Box((0, 2, 0), (4, 3, 6)), Box((1, 2, 3), (2, 2, 3))):
        part = whole[box.within(Box((0, 0, 0), (4, 5, 6)))]
        places = torch.arange(part.numel())
        found = deltas.within_whole(places, box, tuple(whole.shape))
        assert found.dtype == torch.int32
        assert torch.equal(found.long(), part.flatten())
    assert deltas.within_whole(torch.tensor([0]), Box((), ()), ()).tolist() == [0]
    assert deltas.within_whole(torch.tensor([3]), Box((1,), (4,)), (2**32,)).dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128])
def test_what_differs_is_told_by_the_bytes(dtype: torch.dtype) -> None:
    values = torch.tensor([0, 1, 1, 0]).to(dtype)
    last = torch.tensor([0, 0, 1, 1]).to(dtype)
    assert deltas.differing(values, last).tolist() == [1, 3]
    if dtype.is_floating_point:
        bad = torch.full((2,), float("nan"), dtype=dtype)
        assert deltas.differing(bad, bad.clone()).tolist() == []
        assert deltas.differing(torch.zeros(1, dtype=dtype), -torch.zeros(1, dtype=dtype)).tolist() == [0]
