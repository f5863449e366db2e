"""What cannot be saved or loaded: one error on every rank, before any file or tensor was touched."""

from __future__ import annotations

import contextlib
import pickle
import re
import weakref
from collections import UserDict, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from damaging import flip

from torch_dcp_backport.dist_checkpointing import (
    CheckpointingException,
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    serialization,
)
from torch_dcp_backport.dist_checkpointing._src.options import LoadOptions, SaveOptions
from torch_dcp_backport.transfer import gc_context
from torch_dcp_backport.transfer._src import object_collectives, wire


def rows(rank: int, world: int = 4, **kwargs: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("w", torch.ones(2, 3), (0, rank, world), **kwargs)


def box(offset: int, size: int, key: str = "w", replica: Any = 0) -> ShardedTensor:
    return ShardedTensor(
        key, torch.ones(size, 3), torch.float32, (size, 3), (8, 3), (offset, 0), None, replica
    )


def shrunk(tensor: torch.Tensor, is_freed: bool) -> torch.Tensor:
    if is_freed:
        tensor.untyped_storage().resize_(0)
    return tensor


def another_dtype(rank: int) -> Any:
    data = torch.ones(2, 3, dtype=torch.float64 if rank == 2 else torch.float32)
    return ShardedTensor.from_rank_offsets("w", data, (0, rank, 4))


def another_shape(rank: int) -> Any:
    return ShardedTensor.from_rank_offsets("w", torch.ones(2, 3), (0, rank, 5 if rank == 1 else 4))


def unpicklable(rank: int) -> Any:
    return ShardedObject("rng", (lambda: 0) if rank == 3 else 1, (4,), (rank,))


#: What each rank passes -> words of the error.
SAVES: dict[str, tuple[Callable[[int], Any], str]] = {
    "two main replicas": (
        lambda rank: rows(rank // 2, 2),
        r"rank 1: 2 main replicas of \[0:2, 0:3\]: w \(expected one, got replica_id 0 on ranks \[0, 1\]\)",
    ),
    "no main replica": (
        lambda rank: rows(rank, replica_id=int(rank == 1)),
        r"rank 1: no main replica of \[2:4, 0:3\]: w",
    ),
    "a gap": (lambda rank: box(2 * rank, 1 if rank == 1 else 2), "expected 24 elements, got 21 elements"),
    "an overlap": (
        lambda rank: box(2 * rank, 3 if rank == 1 else 2),
        r"rank 2: boxes overlap: \[4:6, 0:3\] and \[2:5, 0:3\] of rank 1: w",
    ),
    "dtypes": (
        another_dtype,
        r"rank 2: another dtype .* w \(expected torch.float32 as rank 0, got torch.float64",
    ),
    "shapes": (
        another_shape,
        r"rank 1: another global shape .* \(expected \(8, 3\) as rank 0, got \(10, 3\)\)",
    ),
    "no data": (
        lambda rank: rows(rank).without_data() if rank == 1 else rows(rank),
        "rank 1: .*without data: w",
    ),
    "an object that is there twice": (
        lambda rank: ShardedObject("rng", 1, (4,), (min(rank, 2),)),
        "rank 3: 2 main replicas of an object: rng/shard_2_4",
    ),
    "an object that is missing": (
        lambda rank: ShardedObject("rng", 1, (5,), (rank,)),
        r"objects are missing from the grid: rng \(expected 5 objects, got 4 objects\)",
    ),
    "a slash": (lambda rank: ShardedObject("a/b", 1, (4,), (rank,)), 'whose key has a "/": a/b'),
    "unpicklable": (unpicklable, "rank 3: .*(pickle|lambda).*: rng/shard_3_4"),
    "a tuple": (lambda rank: (rows(rank),), "w is in a tuple at value; put it in a list"),
    "a deque": (lambda rank: deque([rows(rank)]), "w is in a deque at value; put it in a list or a dict"),
    "a mapping that is no dict": (lambda rank: UserDict(a=[rows(rank)]), "w is in a UserDict at value"),
    "a tuple in a tuple": (lambda rank: [((rows(rank), 1),)], "w is in a tuple at value.0"),
    "a namespace": (lambda rank: SimpleNamespace(part=rows(rank)), "w is in a SimpleNamespace at value"),
    "a local value in a set": (
        lambda rank: {LocalNonpersistentObject(1)},
        "a LocalNonpersistentObject is in a set at value",
    ),
    "meta": (
        lambda rank: ShardedTensor.from_rank_offsets("w", torch.ones(2, device="meta"), (0, rank, 4)),
        r"without values in memory: w \(on the meta device\)",
    ),
    "freed": (
        lambda rank: ShardedTensor.from_rank_offsets("w", shrunk(torch.ones(2), rank == 2), (0, rank, 4)),
        r"rank 2: a tensor without values in memory: w \(its memory was freed\)",
    ),
    "an offset that is no multiple": (
        lambda rank: ShardedTensor(
            "w", torch.ones(2, 3), torch.float32, (2, 3), (8, 3), (2 * rank + (rank == 3) * -1, 0), (4, 1)
        ),
        "rank 3: an offset that is no multiple of the local shape",
    ),
    "an axis too few": (
        lambda rank: ShardedTensor("w", torch.ones(2, 3), torch.float32, (2, 3), (8,), (0,), (4,)),
        "wrong number of axes",
    ),
}


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(CheckpointingException) as caught:
        call()
    return str(caught.value)


def refused_save(room: Any, folder: str, case: str) -> str:
    part, _ = SAVES[case]
    state = {"value": part(dist.get_rank())}
    return error_of(lambda: room.save(state, folder))


def good_save(room: Any, folder: str) -> None:
    room.save({"value": rows(dist.get_rank()), "step": 1}, folder)


@pytest.mark.parametrize("case", SAVES)
def test_a_save_that_cannot_be(ranks: Any, tmp_path: Path, case: str) -> None:
    ranks(good_save, str(tmp_path))
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.iterdir()}
    texts = ranks(refused_save, str(tmp_path), case)
    assert len(set(texts)) == 1, texts
    assert re.search(SAVES[case][1], texts[0]), texts[0]
    assert "nothing was changed" in texts[0]
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.iterdir()} == before


#: (What rank 1 says in a save, and in a load) -> words of the error.
UNLIKE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "SHA-256, saved": (
        {"verify_integrity": True},
        {},
        r"rank 1: not the same on every rank: verify_integrity \(expected False as on rank 0, got True\)",
    ),
    "SHA-256, loaded": (
        {},
        {"verify_integrity": True},
        r"rank 1: not the same on every rank: verify_integrity \(expected False as on rank 0, got True\)",
    ),
    "strictness": (
        {},
        {"strict": "raise_all"},
        r"strict \(expected assume_ok_unexpected as on rank 0, got raise_all\)",
    ),
    "content metadata that is no dict": (
        {"content_metadata": 3},
        {},
        "rank 1: content_metadata=3: expected a dict, got a int",
    ),
}


def unlike(room: Any, folder: str, case: str) -> str:
    saves, loads, _ = UNLIKE[case]
    rank = dist.get_rank()

    def there_and_back() -> None:
        room.save({"w": rows(rank)}, folder, **(saves if rank == 1 else {}))
        room.load({"w": rows(rank)}, folder, **(loads if rank == 1 else {}))

    return error_of(there_and_back)


@pytest.mark.parametrize("case", UNLIKE)
def test_what_one_rank_alone_says(ranks: Any, tmp_path: Path, case: str) -> None:
    errors = ranks(unlike, str(tmp_path), case)
    assert len(set(errors)) == 1
    assert re.search(UNLIKE[case][2], errors[0])


def outside(rank: int, start: int, size: int) -> ShardedTensor:
    return ShardedTensor(
        "w", torch.ones(size, 3), torch.float32, (size, 3), (8, 3), (start, 0), None, 0, 0, True
    )


#: As above, where the ranks' parts are not compared.
UNCHECKED: dict[str, tuple[Callable[[int], Any], str]] = {
    "a box that reaches outside": (
        lambda rank: outside(rank, 2 * rank, 2 + (rank == 3)),
        r"rank 3: a box outside the global tensor: w \(expected shape \(8, 3\), got \[6:9, 0:3\]\)",
    ),
    "a box before the start": (
        lambda rank: outside(rank, 2 * rank - (rank == 0), 2),
        r"rank 0: a box outside the global tensor: w \(expected shape \(8, 3\), got \[-1:1, 0:3\]\)",
    ),
    "dtypes": (another_dtype, "rank 2: another dtype than on another rank: w"),
    "boxes at one place": (
        lambda rank: box(0, 2 + rank),
        r"rank 1: different boxes that begin at one place: w "
        r"\(expected \[0:2, 0:3\] as rank 0, got \[0:3, 0:3\]\)",
    ),
}


def refused_unchecked_save(room: Any, folder: str, case: str) -> str:
    state = {"value": UNCHECKED[case][0](dist.get_rank())}
    return error_of(lambda: room.save(state, folder, validate_access_integrity=False))


@pytest.mark.parametrize("case", UNCHECKED)
def test_what_no_load_could_read_is_not_saved_unchecked(ranks: Any, tmp_path: Path, case: str) -> None:
    texts = ranks(refused_unchecked_save, str(tmp_path), case)
    assert len(set(texts)) == 1, texts
    assert re.search(UNCHECKED[case][1], texts[0]), texts[0]
    assert list(tmp_path.iterdir()) == []


def doubled(room: Any, folder: str) -> list[float]:
    """Two boxes with two main replicas each, and one of them twice on each rank."""
    rank = dist.get_rank()
    part = rows(rank % 2, 2)
    state = {"value": [part, rows(rank % 2, 2)]}
    room.save(state, folder, validate_access_integrity=False)
    asked = ShardedTensor("w", None, torch.float32, (4, 3), (4, 3), (0, 0), None, rank)
    loaded: torch.Tensor = room.load({"value": asked}, folder)["value"]
    return loaded.flatten().tolist()


def test_a_box_that_is_there_twice_has_one_writer(ranks: Any, tmp_path: Path) -> None:
    assert ranks(doubled, str(tmp_path)) == [[1.0] * 12] * 4
    with open(tmp_path / ".metadata", "rb") as file:
        assert len(pickle.load(file).storage_data) == 2


def missing_folder(room: Any, folder: str) -> str:
    where = folder if dist.get_rank() != 1 else f"{folder}/no"
    return error_of(lambda: room.save({"value": rows(dist.get_rank())}, where))


def test_a_folder_that_a_rank_does_not_see(ranks: Any, tmp_path: Path) -> None:
    texts = ranks(missing_folder, str(tmp_path))
    assert len(set(texts)) == 1
    assert "rank 1: no such folder" in texts[0]
    assert list(tmp_path.iterdir()) == []


def failing_write(room: Any, folder: str, number: int) -> str:
    """One rank's disk is full: before the first byte, or in the middle."""
    import errno

    from torch_dcp_backport.publish import disk

    real = disk.reserve, disk.write_all

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if dist.get_rank() == 2:
        setattr(disk, ("reserve", "write_all")[number], full)
    try:
        return error_of(lambda: room.save({"value": rows(dist.get_rank())}, folder))
    finally:
        disk.reserve, disk.write_all = real


@pytest.mark.parametrize("number", [0, 1])
def test_a_full_disk(ranks: Any, tmp_path: Path, number: int) -> None:
    texts = ranks(failing_write, str(tmp_path), number)
    assert len(set(texts)) == 1
    assert "rank 2: OSError: [Errno 28] No space left on device: __2_0.distcp" in texts[0]
    assert "the folder holds no checkpoint now" in texts[0]
    assert list(tmp_path.iterdir()) == []


def zeros(offset: int = 0, size: int = 8, **kwargs: Any) -> ShardedTensor:
    dtype = kwargs.pop("dtype", torch.float32)
    shape = kwargs.pop("shape", (8, 3))
    data = torch.zeros(size, 3, dtype=dtype)
    return ShardedTensor("w", data, dtype, (size, 3), shape, (offset, 0), None, dist.get_rank(), **kwargs)


def expanded() -> ShardedTensor:
    return ShardedTensor("w", torch.zeros(1, 3).expand(8, 3), torch.float32, (8, 3), (8, 3), (0, 0), None, 0)


#: What rank 1 passes, where the others want the whole tensor -> words of the error.
LOADS: dict[str, tuple[Callable[[], Any], str]] = {
    "another shape": (
        lambda: zeros(shape=(9, 3)),
        r"rank 1: wrong global shape: w \(expected \(8, 3\) as saved, got \(9, 3\)\)",
    ),
    "a dtype that would lose values": (
        lambda: zeros(dtype=torch.int32),
        r"rank 1: a dtype that would lose values: w \(expected torch.float32 as saved, got torch.int32\)",
    ),
    "an unexpected tensor": (
        lambda: ShardedTensor("v", None, torch.float32, (1,), (1,), (0,), None),
        "rank 1: Unexpected keys, not in the checkpoint: v",
    ),
    "an unexpected object": (
        lambda: ShardedObject("rng", None, (1,), (0,)),
        "rank 1: Unexpected keys, not in the checkpoint: rng",
    ),
    "memory that cannot be written": (expanded, "rank 1: a tensor cannot be written: w"),
    "another class": (lambda: {"x": (zeros(),)}, "rank 1: w is in a tuple at value.x"),
}


def refused_load(room: Any, folder: str, case: str) -> str:
    rank = dist.get_rank()
    mine = zeros()
    text = error_of(lambda: room.load({"value": LOADS[case][0]() if rank == 1 else mine}, folder))
    assert torch.equal(mine.data, torch.zeros(8, 3))
    return text


@pytest.mark.parametrize("case", LOADS)
def test_a_load_that_cannot_be(ranks: Any, tmp_path: Path, case: str) -> None:
    ranks(good_save, str(tmp_path))
    texts = ranks(refused_load, str(tmp_path), case)
    assert len(set(texts)) == 1, texts
    assert re.search(LOADS[case][1], texts[0]), texts[0]
    assert "nothing was changed" in texts[0]


def shapes_may_differ(room: Any, folder: str) -> torch.Tensor:
    size = 10 if dist.get_rank() == 0 else 5
    data = torch.full((size, 2), 9.0)
    part = ShardedTensor("w", data, torch.float32, (size, 2), (10, 2), (0, 0), None, 0, 0, True)
    room.load({"value": part}, folder, validate_access_integrity=False)
    return data


def test_what_shapes_have_in_common_is_loaded_and_the_rest_is_zero(ranks: Any, tmp_path: Path) -> None:
    ranks(good_save, str(tmp_path))
    large, small = ranks(shapes_may_differ, str(tmp_path), world=2)
    assert torch.equal(large, torch.cat([torch.ones(8, 2), torch.zeros(2, 2)]))
    assert torch.equal(small, torch.ones(5, 2))


def damaged_for_some(room: Any, folder: str) -> str:
    """Only one rank needs the damaged record."""
    rank = dist.get_rank()
    return error_of(lambda: room.load({"value": zeros(2 * rank, 2)}, folder, validate_access_integrity=False))


def test_a_damaged_record_is_told_on_ranks_that_do_not_need_it(ranks: Any, tmp_path: Path) -> None:
    ranks(good_save, str(tmp_path))
    path = tmp_path / "__2_0.distcp"
    flip(path)
    texts = ranks(damaged_for_some, str(tmp_path))
    assert len(set(texts)) == 1
    assert "rank 2: damaged (w: __2_0.distcp" in texts[0]
    assert "do not use what was being loaded" in texts[0]


def in_a_part_of_the_world(room: Any, folder: str) -> Any:
    """Save and load by a group without global rank 0."""
    group = dist.new_group([1, 3])
    rank = dist.get_rank()
    if rank not in (1, 3):
        return None
    data = torch.full((2, 3), float(rank))
    part = ShardedTensor.from_rank_offsets("w", data, (0, rank // 2, 2))
    room.save({"w": part, "of": rank}, folder, process_group=group)
    asked = {"w": ShardedTensor("w", None, torch.float32, (4, 3), (4, 3), (0, 0), None, rank // 2)}
    result = room.load(asked, folder, process_group=group)
    assert asked["w"].data is None
    return result["w"][:, 0].tolist(), result["of"]


def test_a_group_without_rank_0(ranks: Any, tmp_path: Path) -> None:
    results = ranks(in_a_part_of_the_world, str(tmp_path))
    assert results == [None, ([1.0, 1.0, 3.0, 3.0], 1)] * 2


def outlived_failures(room: Any, folder: str) -> list[bool]:
    """Whether a tensor is there after a save, one in the background, and a load have failed."""
    rank, alive = dist.get_rank(), []

    def fails(function: Callable[..., Any], part: Any, *args: Any, **kwargs: Any) -> None:
        tensor = rows(rank)
        with contextlib.suppress(CheckpointingException):
            function({"w": tensor, "part": part}, *args, **kwargs)
            raise AssertionError("no error")
        alive.append(weakref.ref(tensor.data))

    with gc_context():
        fails(room.save, ShardedObject("a/b", 1, (4,), (rank,)), f"{folder}/new")
        fails(room.save, unpicklable(rank), f"{folder}/new", async_sharded_save=True)
        fails(room.load, ShardedObject("rng", None, (1,), (0,)), f"{folder}/old")
        return [reference() is not None for reference in alive]


def test_failed_saves_and_loads_keep_no_tensor_alive(ranks: Any, tmp_path: Path) -> None:
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
    ranks(good_save, str(tmp_path / "old"))
    assert ranks(outlived_failures, str(tmp_path)) == [[False] * 3] * 4


def test_contexts_in_which_nothing_is_said_and_loads_that_are_over(tmp_path: Path) -> None:
    with serialization.saving(tmp_path, SaveOptions()) as state:
        state.set({"step": 3})
    refused = pytest.raises(CheckpointingException, match="rank 0: RuntimeError: nothing was set")
    with refused, serialization.saving(tmp_path, SaveOptions()):
        pass
    with refused, serialization.loading(tmp_path, LoadOptions()):
        pass
    with serialization.loading(tmp_path, LoadOptions()) as load:
        assert load.checkpoint.common_state()["step"] == 3
        load.ask({})
    assert load.result == {"step": 3}
    with pytest.raises(RuntimeError, match="the load is over"):
        load.checkpoint.common_state()


def test_what_can_be_read_once_is_no_shape() -> None:
    part = ShardedTensor("w", None, torch.float32, iter((2,)), iter((4,)), iter((99,)), (2,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        part.validate_metadata_integrity()


def save_more_than_a_load_takes(room: Any, folder: str, most: int, text: int) -> tuple[str, list[str]]:
    """The error of a save where a message takes `most` bytes at a load."""
    object_collectives.MOST = object_collectives.SPARE + most
    try:
        parts = [
            ShardedTensor.from_rank_offsets(f"w{n}", torch.ones(2), (0, dist.get_rank(), 2))
            for n in range(150)
        ]
        room.save({"parts": parts, "text": "x" * text}, folder)
    except CheckpointingException as error:
        object_collectives.MOST = wire.MOST
        dist.barrier()  # each rank removes its own file
        return str(error), sorted(path.name for path in Path(folder).iterdir())
    finally:
        object_collectives.MOST = wire.MOST
    return "", sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.parametrize(
    ("text", "what"), [(7_000, "the least size is [0-9]+"), (4_000, "their size is [0-9]+")]
)
def test_an_index_that_no_load_takes_is_refused_at_the_save(
    ranks, tmp_path: Path, text: int, what: str
) -> None:
    """Also where only the finished index tells: then nothing of the save is left."""
    for error, left in ranks(save_more_than_a_load_takes, str(tmp_path), 8_000, text, world=2):
        assert re.search(rf"rank 0: an index too large to be loaded: \.metadata .*{what} bytes", error), error
        assert left == []


def test_an_index_of_the_largest_size_is_saved_and_loaded(ranks, tmp_path: Path) -> None:
    assert [error for error, _ in ranks(save_more_than_a_load_takes, str(tmp_path), 8_000, 300, world=2)] == [
        ""
    ] * 2
