"""What has changed since the last export: bit for bit what a whole export has, and no element more."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import small
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from torch_dcp_backport import compat, engine
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


def bare(folder: Path, module: Any, mesh: Any = None) -> Any:
    """An engine with a module of the test's own, in FSDP2."""
    made = small.Engine({"path": str(folder)}, {"max_token_len_per_gpu": 9}, device="cpu")
    made.module = module
    small.cpu_fsdp.install()
    compat.fsdp2().fully_shard(module, mesh=mesh or init_device_mesh("cpu", (dist.get_world_size(),)))
    return made


def plain() -> Any:
    module = torch.nn.Linear(3, 5)
    module.register_buffer("scale", torch.ones(5))
    return module


def other_dtypes(made: Any, rank: int) -> None:
    made.prime_delta_snapshots(dtype=torch.float16 if rank == 1 else None)


def own_dtype_of_one(made: Any, rank: int) -> None:
    made.module.scale = torch.ones(5, dtype=torch.int32 if rank == 1 else torch.int64)
    made.prime_delta_snapshots()


def another_order(made: Any, rank: int) -> None:
    for name in ("b", "a") if rank == 1 else ("a", "b"):
        made.module.register_buffer(name, torch.ones(2))
    made.prime_delta_snapshots()


def another_moment(made: Any, rank: int) -> None:
    made.prime_delta_snapshots()
    if rank == 1:
        made.module.scale += 1
        made.prime_delta_snapshots()


def another_shape(made: Any, rank: int) -> None:
    made.prime_delta_snapshots()
    made.module.scale = torch.ones(7)


def from_one_element(made: Any, rank: int) -> None:
    """A shape that would be broadcast."""
    made.module.scale = torch.ones(1)
    made.prime_delta_snapshots()
    made.module.scale = torch.ones(7)


def another_dtype(made: Any, rank: int) -> None:
    made.prime_delta_snapshots(dtype=None)
    made.module.scale = torch.ones(5, dtype=torch.float64 if rank == 1 else torch.float32)


def a_new_one(made: Any, rank: int) -> None:
    made.prime_delta_snapshots()
    made.module.register_buffer("later", torch.ones(2))


def one_gone(made: Any, rank: int) -> None:
    made.prime_delta_snapshots()
    del made.module.scale


def primed_in_half(made: Any, rank: int) -> None:
    made.prime_delta_snapshots()
    made.module.scale += 1
    made.module.register_buffer("broken", torch.ones(2, device="meta"))
    with pytest.raises(NotImplementedError):
        made.prime_delta_snapshots()
    del made.module.broken


NOT_THE_SAME = "rank 1: not the same on every rank: "
SINCE = re.escape("not as it was primed (prime_delta_snapshots() has to be called again): ")
#: What happens before the export, and what its error says on every rank.
REFUSALS = {
    other_dtypes: rf"{NOT_THE_SAME}weight \(expected \(5, 3\) torch.float32 .* as on rank 0, got .*float16",
    own_dtype_of_one: rf"{NOT_THE_SAME}scale \(expected \(5,\) torch.int64 as .* 0, got \(5,\) torch.int32\)",
    another_order: r"rank 1: the same keys in another order \(expected a in place 4 as rank 0, got b\)",
    another_moment: rf"{NOT_THE_SAME}calls of prime_.* the last export \(expected 1 as on rank 0, got 2\)",
    another_shape: rf"ranks 0-1: {SINCE}scale \(expected \(5,\) torch.bfloat16, got \(7,\) torch.bfloat16\)",
    from_one_element: rf"ranks 0-1: {SINCE}scale \(expected \(1,\) .*, got \(7,\) torch.bfloat16\)",
    another_dtype: rf"rank 1: {SINCE}scale \(expected \(5,\) torch.float32, got \(5,\) torch.float64\)",
    a_new_one: rf"ranks 0-1: {SINCE}later \(expected nothing, got \(2,\) torch.bfloat16\)",
    one_gone: rf"ranks 0-1: {SINCE}scale \(expected \(5,\) torch.bfloat16, got nothing\)",
    primed_in_half: "ranks 0-1: the last prime_delta_snapshots\\(\\) did not come to its end",
}


def said_after(api: Any, folder: Path, before: Any) -> tuple[str, str, str, int]:
    """Errors of an export, of the next, of that after one rank has primed; then all prime."""
    made, rank, texts = bare(folder, plain()), dist.get_rank(), []
    before(made, rank)
    for number in range(3):
        if number == 2 and rank == 1:
            made.prime_delta_snapshots()
        with pytest.raises(RuntimeError) as caught:
            list(made.get_per_tensor_param_delta_shard()[0])
        texts.append(str(caught.value))
    if hasattr(made.module, "scale"):
        # What one rank alone had otherwise.
        made.module.scale = torch.ones(5)
    if hasattr(made.module, "a"):
        del made.module.a
    made.prime_delta_snapshots()
    changes = list(made.get_per_tensor_param_delta_shard()[0])
    return (*texts, sum(len(change.values) for change in changes))


@pytest.mark.parametrize("before", REFUSALS, ids=lambda before: before.__name__)
def test_an_export_that_would_lose_changes_is_an_error_on_every_rank(
    ranks, tmp_path: Path, before: Any
) -> None:
    """Which no rank goes on from alone, and which a prime on all of them ends."""
    first, *others = ranks(said_after, tmp_path, before, world=2)
    assert others == [first]
    refused, again, on_one, changes = first
    assert re.search(REFUSALS[before], refused)
    assert "ranks 0-1: the last export was refused" in again
    assert "rank 0: the last export was refused" in on_one
    assert changes == 0


def said_of_a_part_of_the_ranks(api: Any, folder: Path) -> list[str]:
    made = bare(folder, plain(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "cut"))["cut"])
    made.prime_delta_snapshots()
    texts = []
    for read in (made.get_per_tensor_param, made.get_per_tensor_param_delta_shard):
        with pytest.raises(RuntimeError) as caught:
            list(read()[0])
        texts.append(str(caught.value))
    return texts


def test_each_half_of_the_ranks_with_a_mesh_of_its_own_is_refused(ranks, tmp_path: Path) -> None:
    first, *others = ranks(said_of_a_part_of_the_ranks, tmp_path)
    assert all(found == first for found in others)
    for text in first:
        assert "ranks 2-3: " in text
        assert re.search(
            r"weight \(expected .* on mesh \(2,\)\(0, 1\) as .*got .* on mesh \(2,\)\(2, 3\)\)", text
        )


def said_of_order(api: Any) -> str:
    names = ["first", "second", *(("y", "x") if dist.get_rank() == 1 else ("x", "y"))]
    with pytest.raises(RuntimeError) as caught:
        list(engine.whole_tensors({name: torch.ones(2) for name in names}))
    return str(caught.value)


def test_a_whole_export_says_where_another_order_begins(ranks) -> None:
    first, second = ranks(said_of_order, world=2)
    assert first == second
    assert "rank 1: the same keys in another order (expected x in place 3 as rank 0, got y)" in first


def primed_meanwhile(api: Any, folder: Path) -> list[Any]:
    made = bare(folder, plain())
    made.prime_delta_snapshots(dtype=torch.float32)
    # Read only after the next prime: it has the dtype of that.
    export = made.get_per_tensor_param_delta_shard()[0]
    made.prime_delta_snapshots()
    dtypes = {change.dtype for change in export}
    export = made.get_per_tensor_param_delta_shard()[0]
    next(export)
    made.module.scale += 1
    made.prime_delta_snapshots()
    with pytest.raises(RuntimeError, match=r"prime_delta_snapshots\(\) was called before its end"):
        list(export)
    return [dtypes, sum(len(change.values) for change in made.get_per_tensor_param_delta_shard()[0])]


def test_a_prime_ends_an_export_that_is_being_read(ranks, tmp_path: Path) -> None:
    assert ranks(primed_meanwhile, tmp_path, world=2) == [[{"bfloat16"}, 0]] * 2


#: Along the first dimension cut in two: some of the parts are empty, or small.
RARE = {
    "complex": lambda: torch.tensor([[1 + 2j, 3, 4j]], dtype=torch.complex128),
    "strided complex": lambda: torch.arange(8.0).to(torch.complex128)[::2],
    "strided": lambda: torch.arange(8.0)[::2],
    "column": lambda: torch.arange(6.0).view(2, 3).t(),
    "no complex": lambda: torch.zeros(0, 3, dtype=torch.complex128),
    "conjugate": lambda: torch.tensor([1 + 2j, 3 - 1j, 2j]).conj(),
    "long conjugate": lambda: torch.tensor([1 + 2j, 3 - 1j, 2j], dtype=torch.complex128).conj(),
    "negative": lambda: torch.tensor([1 + 2j, 3 - 1j, 2j]).conj().imag,
    "float8": lambda: torch.tensor([1.0, 2, 3]).to(torch.float8_e4m3fn),
}


def bits(tensor: torch.Tensor) -> list[int]:
    dense = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return dense.flatten().view(torch.uint8).tolist() if dense.numel() else []


def of_rare(made: Any) -> tuple[list[int], list[int]]:
    """Positions and bytes that the first rank sends: pickled, floats of 8 bits do not arrive."""
    found: list[Any] = [None]
    for slots, _, _, positions, values, _ in made.get_per_tensor_param_delta_shard()[0]:
        if slots[0][0] == "rare":
            found = [(positions.tolist(), bits(values))]
    dist.broadcast_object_list(found)
    return found[0]


def changed_in(api: Any, folder: Path, kind: str, is_cut: bool) -> bool:
    module, value = plain(), RARE[kind]()
    if is_cut:
        parts = [*value.chunk(2), value[:0]]
        mesh = init_device_mesh("cpu", (2,))
        value = compat.as_dtensor(
            parts[dist.get_rank()], mesh, [compat.Shard(0)], value.shape, value.stride()
        )
    made = bare(folder, module)
    module.register_buffer("rare", value)
    rollout = dict(made.get_per_tensor_param(dtype=None)[0])["rare"].clone()
    made.prime_delta_snapshots(dtype=None)
    assert of_rare(made) == ([], [])
    local = compat.local_part(value) if is_cut else value
    if dist.get_rank() == 0 or not is_cut:
        # Operations on 8 bits are few.
        local[:1].copy_(local[:1].to(torch.complex64).real.add(5).to(local.dtype))
    places, sent = of_rare(made)
    expected = bits(dict(made.get_per_tensor_param(dtype=None)[0])["rare"])
    size, patched = value.element_size(), bits(rollout)
    for number, place in enumerate(places):
        patched[place * size : (place + 1) * size] = sent[number * size : (number + 1) * size]
    assert bool(places) is bool(patched)
    return patched == expected


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("kind", RARE)
def test_what_has_changed_of_rare_kinds_of_tensors(ranks, tmp_path: Path, kind: str, is_cut: bool) -> None:
    assert all(ranks(changed_in, tmp_path, kind, is_cut, world=2))


def test_what_every_rank_holds_whole_is_in_it() -> None:
    """Buffers, which are not of DTensors; their numbers are whole ones."""
    tensors = {"scale": torch.ones(2, 3), "count": torch.tensor(5), "none": torch.empty(0)}
    cpu, kept = torch.device("cpu"), deltas.Deltas(is_pinned=False)
    kept.prime(tensors, torch.bfloat16, cpu)
    tensors["scale"][1, 2] = 7
    tensors["count"] += 1
    read = [
        (*slots[0], dtype, positions.tolist(), values.tolist(), group)
        for slots, dtype, _, positions, values, group in kept.changes(tensors, cpu)
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
