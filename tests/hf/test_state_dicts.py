"""State dicts of DTensors and whole tensors, as safetensors files and back, bit for bit."""

from __future__ import annotations

import contextlib
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from test_safetensors_files import model as write_model
from torch.distributed.device_mesh import init_device_mesh
from values import Failing

from torch_dcp_backport import hf
from torch_dcp_backport.hf._src.comparing import equal_in
from torch_dcp_backport.hf._src.moving import turns_of
from torch_dcp_backport.transfer import Box, Call, TransferError, last_report, spread_of
from torch_dcp_backport.transfer._src.spread import Boxes

try:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
except ImportError:  # torch 2.4
    from torch.distributed._tensor import Replicate, Shard, distribute_tensor

CONFIG = {"model_type": "made"}
VALUES = {
    "matrix": torch.arange(70, dtype=torch.float32).view(10, 7),
    "odd": torch.arange(5, dtype=torch.bfloat16),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "counts": torch.arange(3),
    "nan": torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.float16),
}
MESHES: dict[str, Any] = {
    "rows": ((4,), ("Shard(0)",)),
    "columns": ((4,), ("Shard(1)",)),
    "replicas of shards": ((2, 2), ("Replicate()", "Shard(0)")),
    "both dimensions": ((2, 2), ("Shard(0)", "Shard(1)")),
}


def state_of(name: str, *, blank: bool = False) -> dict[str, torch.Tensor]:
    """VALUES as DTensors, where their dimensions allow it; zeros of the same kind for `blank`."""
    shape, written = MESHES[name]
    mesh = init_device_mesh("cpu", shape)
    placements = [eval(text, {"Shard": Shard, "Replicate": Replicate}) for text in written]
    state: dict[str, torch.Tensor] = {}
    for key, value in VALUES.items():
        value = torch.zeros_like(value) if blank else value.clone()
        fits = all(not isinstance(one, Shard) or one.dim < value.dim() for one in placements)
        state[key] = distribute_tensor(value, mesh, placements) if fits else value
    return state


def bits(value: torch.Tensor) -> torch.Tensor:
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.contiguous().reshape(-1).view(torch.uint8)


def save(api: Any, folder: Path, name: str, **options: Any) -> Any:
    return api.save_state_dict(state_of(name), folder, like=CONFIG, how=api.Export(**options))


def load(api: Any, folder: Path, name: str, files: str = "auto") -> tuple[Any, bool]:
    state = state_of(name, blank=True)
    filled = api.load_state_dict(state, folder, files=files)
    return filled, all(torch.equal(bits(state[key]), bits(value)) for key, value in VALUES.items())


@pytest.mark.parametrize("name", MESHES)
def test_files_have_what_the_ranks_hold(ranks, tmp_path: Path, name: str) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    saved = ranks(save, tmp_path / "m", name)
    assert {one.keys for one in saved} == {tuple(VALUES)}
    found = safetensors.load_file(tmp_path / "m" / "model.safetensors")
    assert set(found) == set(VALUES)
    assert all(torch.equal(bits(found[key]), bits(value)) for key, value in VALUES.items())
    assert all(found[key].shape == value.shape for key, value in VALUES.items())
    assert json.loads((tmp_path / "m" / "config.json").read_text()) == CONFIG


@pytest.mark.parametrize("files", ["shared", "rank0"])
@pytest.mark.parametrize("name", MESHES)
def test_files_fill_what_the_ranks_hold(ranks, tmp_path: Path, name: str, files: str) -> None:
    write_model(tmp_path / "m", {**VALUES, "unknown": torch.ones(2)})
    for rank, (filled, same) in enumerate(ranks(load, tmp_path / "m", name, files)):
        assert same
        assert filled.keys == tuple(VALUES)
        assert filled.left == ("unknown",)
        if files == "shared":
            assert filled.bytes_read <= sum(value.nbytes for value in VALUES.values())
        else:
            assert bool(filled.bytes_read) == (rank == 0)


def relayed(api: Any, folder: Path, name: str) -> tuple[int, int, bool]:
    """(bytes sent, bytes received, whether all is right) of a load in another dtype."""
    state = (
        state_of(name, blank=True) if name else {key: torch.zeros_like(one) for key, one in VALUES.items()}
    )
    state["matrix"] = state["matrix"].to(torch.bfloat16)
    api.load_state_dict(state, folder, files="rank0")
    report = last_report()
    assert report is not None
    wanted = {**VALUES, "matrix": VALUES["matrix"].to(torch.bfloat16)}
    same = all(torch.equal(bits(state[key]), bits(value)) for key, value in wanted.items())
    return report.bytes_sent, report.bytes_received, same


@pytest.mark.parametrize("name", ["", "replicas of shards"])
def test_replicas_pass_on_what_the_first_rank_read(ranks, tmp_path: Path, name: str) -> None:
    write_model(tmp_path / "m", VALUES)
    sent, received, same = zip(*ranks(relayed, tmp_path / "m", name))
    assert all(same)
    assert sum(sent) == sum(received)
    # Once, and no more: as the files have it.
    assert 0 < sent[0] <= sum(value.nbytes for value in VALUES.values())
    assert sum(sent[1:]) > 0


def load_into_failing(api: Any, folder: Path, on: int) -> str:
    state = {key: torch.zeros_like(value) for key, value in VALUES.items()}
    if dist.get_rank() == on:
        state["matrix"] = state["matrix"].as_subclass(Failing)
    with pytest.raises(TransferError) as caught:
        api.load_state_dict(state, folder, files="rank0")
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("on", [0, 1, 3])
def test_a_tensor_that_takes_no_values_is_told_on_every_rank(ranks, tmp_path: Path, on: int) -> None:
    write_model(tmp_path / "m", VALUES)
    (text,) = set(ranks(load_into_failing, tmp_path / "m", on))
    assert f"rank {on}: ValueError: no values are taken: matrix" in text
    assert "do not use what was being loaded" in text


def fill_twice(api: Any, by_all: bool) -> str:
    """One block that a rank holds twice, the second time in memory that takes no values."""
    source = api.Given({"w": torch.arange(4.0)}, config={})
    rank, box = dist.get_rank(), Box((0,), (4,))
    parts = [api.Part(box, torch.zeros(4))]
    if rank == 2:
        parts.append(api.Part(box, torch.zeros(4).as_subclass(Failing)))
    spread = spread_of((4,), {other: [box] for other in range(4)})
    share = api.Share(source.tensors, {"w": spread}, {"w": parts})

    def fill(call: Call) -> int:
        if by_all:
            return int(api.fill_here(call, source, share))
        return int(api.fill_from_first(call, call.agree_on_wants(), source if rank == 0 else None, share))

    with Call("cannot load", "fill") as call, pytest.raises(TransferError) as caught:
        fill(call)
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("by_all", [True, False])
def test_a_second_memory_that_takes_no_values_is_told_on_every_rank(ranks, by_all: bool) -> None:
    (text,) = set(ranks(fill_twice, by_all))
    assert "rank 2: ValueError: no values are taken: w" in text


def test_one_process_without_a_group(tmp_path: Path) -> None:
    hf.save_state_dict(VALUES, tmp_path / "m", like=CONFIG, how=hf.Export(file_bytes=100))
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 1
    state = {key: torch.zeros_like(value) for key, value in VALUES.items()}
    hf.load_state_dict(state, tmp_path / "m")
    assert all(torch.equal(bits(state[key]), bits(value)) for key, value in VALUES.items())


def test_one_memory_read_as_other_values_is_no_tie(tmp_path: Path) -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    state = {"x": value, "conj": value.conj(), "minus": value.conj().imag}
    hf.save_state_dict(state, tmp_path / "m", like=CONFIG)
    source = hf.Folder(tmp_path / "m")
    assert set(source.tensors) == set(state)
    assert all(torch.equal(source.part(key, Box((0,), (2,))), one) for key, one in state.items())


def test_one_element_of_a_larger_tensor(tmp_path: Path) -> None:
    large = torch.arange(40.0).view(4, 10)
    state = {"one": large.view(-1)[20::30], "corner": large.t()[3:4, 1:2]}
    hf.save_state_dict(state, tmp_path / "m", like=CONFIG)
    filled = {key: torch.zeros(60)[::50][:1].view(value.shape) for key, value in state.items()}
    hf.load_state_dict(filled, tmp_path / "m")
    assert [value.tolist() for value in filled.values()] == [[20.0], [[13.0]]]
    again = {"one": state["one"], "two": state["one"].clone()}
    assert equal_in(hf.Given(again, {}), "one", "two")


@pytest.mark.parametrize("shape", [(2, 3), (4, 2), (5, 3)])
def test_a_tensor_that_changes_its_shape_while_it_is_read(shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(4, 3)
    source = hf.Given({"weight": tensor}, {})
    tensor.resize_(shape)
    with pytest.raises(
        RuntimeError, match=re.escape(f"weight was changed while it was read: it was (4, 3) and is {shape}")
    ):
        source.part("weight", Box((0, 0), (2, 2)))


@pytest.mark.parametrize("size", ["5GB", None, -1])
def test_the_size_of_a_file_is_a_number(tmp_path: Path, size: Any) -> None:
    with pytest.raises(RuntimeError, match=f"file_bytes={size!r} is no number"):
        hf.save_state_dict(VALUES, tmp_path / "m", like=CONFIG, how=hf.Export(file_bytes=size))


def test_numbers_that_are_no_weights_keep_their_dtype(tmp_path: Path) -> None:
    hf.save_state_dict(VALUES, tmp_path / "m", like=CONFIG, how=hf.Export(torch.bfloat16))
    found = hf.Folder(tmp_path / "m").tensors
    assert found["counts"].dtype == torch.int64
    assert found["matrix"].dtype == found["scalar"].dtype == torch.bfloat16


def tied_state(blank: bool = False) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (4,))
    # Three rows on four ranks: the last rank's part is empty.
    value = distribute_tensor(torch.zeros(3, 2) if blank else torch.arange(6.0).view(3, 2), mesh, [Shard(0)])
    other = distribute_tensor(torch.zeros(3, 2) if blank else torch.ones(3, 2), mesh, [Shard(0)])
    return {"embed": value, "other": other, "head": value}


def save_tied(api: Any, folder: Path) -> Any:
    return api.save_state_dict(tied_state(), folder, like=CONFIG)


def load_tied(api: Any, folder: Path) -> tuple[Any, list[list[float]]]:
    state = tied_state(blank=True)
    filled = api.load_state_dict(state, folder)
    return filled, state["head"].full_tensor().tolist()


def test_a_tensor_under_two_names_is_written_once(ranks, tmp_path: Path) -> None:
    assert {one.keys for one in ranks(save_tied, tmp_path / "m")} == {("embed", "other")}
    for filled, head in ranks(load_tied, tmp_path / "m"):
        assert filled.tied == {"head": "embed"}
        assert head == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]


def in_any_order(api: Any, folder: Path, files: str, is_tied: bool) -> bool:
    rank = dist.get_rank()

    def shuffled(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(random.Random(rank).sample(list(state.items()), len(state)))

    state, blank = (
        {**state_of("rows", blank=is_blank), **(tied_state(is_blank) if is_tied else {})}
        for is_blank in (False, True)
    )
    api.save_state_dict(shuffled(state), folder, like=CONFIG, how=api.Export(file_bytes=100))
    api.load_state_dict(shuffled(blank), folder, files=files)
    return all(torch.equal(bits(blank[key]), bits(value)) for key, value in state.items())


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("files", ["shared", "rank0"])
def test_every_rank_has_an_order_of_its_own(ranks, tmp_path: Path, files: str, is_tied: bool) -> None:
    assert all(ranks(in_any_order, tmp_path / "m", files, is_tied))
    source = hf.Folder(tmp_path / "m")
    assert not source.problems
    for key, value in VALUES.items():
        got = source.part(key, Box((0,) * value.dim(), tuple(value.shape)))
        assert torch.equal(bits(got), bits(value)), key


def differing(api: Any, folder: Path, what: str) -> str:
    rank = dist.get_rank()
    odd = rank == 2
    state = state_of("rows")
    options: dict[str, Any] = {"like": CONFIG}
    if what == "a key less" and odd:
        del state["odd"]
    if what == "a key more" and odd:
        state["more"] = torch.ones(1)
    if what == "another shape" and odd:
        state["scalar"] = torch.ones(1)
    if what == "no tensor" and odd:
        state["scalar"] = 2.5  # type: ignore[assignment]
    if what == "meta" and odd:
        state["scalar"] = torch.ones((), device="meta")
    if what == "freed" and odd:
        state["scalar"].untyped_storage().resize_(0)
    if what == "another dtype asked" and odd:
        options["how"] = api.Export(torch.bfloat16)
    if what == "another folder" and odd:
        folder = folder / "other"
    if what == "no config" and rank == 0:
        options["like"] = None
    try:
        api.save_state_dict(state, folder, **options)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("a key less", r"rank 2: not the same on every rank: odd .*got nothing"),
        ("a key more", r"not the same on every rank.*more"),
        ("another shape", r"not the same on every rank.*scalar"),
        ("no tensor", r"rank 2: .*a float, where a tensor is needed: scalar"),
        ("meta", r"rank 2: .*on meta has no plain values: scalar"),
        ("freed", r"rank 2: .*its memory was freed: scalar"),
        ("another dtype asked", r"not the same on every rank.*how"),
        ("another folder", r"not the same on every rank.*folder"),
        ("no config", r"rank 0: .*a NoneType is neither .*: like"),
    ],
)
def test_one_error_on_every_rank_and_no_file(ranks, tmp_path: Path, what: str, says: str) -> None:
    texts = ranks(differing, tmp_path / "m", what)
    assert len(set(texts)) == 1
    assert re.search(says, texts[0], re.DOTALL), texts[0]
    assert not list(tmp_path.iterdir())


def refused(api: Any, folder: Path, name: str) -> tuple[str, bool]:
    state = state_of(name, blank=True)
    try:
        api.load_state_dict(state, folder)
    except RuntimeError as error:
        return str(error), all(not bits(value).any() for value in state.values())
    return "", False


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"odd": None}, "odd: not in the files|not in the files.*odd"),
        ({"matrix": torch.ones(7, 10)}, "wrong shape"),
        ({"counts": torch.ones(3)}, "wrong dtype"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(ranks, tmp_path, change, says) -> None:
    tensors = {key: value for key, value in {**VALUES, **change}.items() if value is not None}
    write_model(tmp_path / "m", tensors)
    for text, untouched in ranks(refused, tmp_path / "m", "rows"):
        assert re.search(says, text), text
        assert untouched


def on_a_part(api: Any, folder: Path) -> str:
    """Ranks 0 and 1 hold the tensors; all four are asked, and then those two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    state = {"matrix": distribute_tensor(VALUES["matrix"].clone(), mesh, [Shard(0)])}
    group = mesh.get_group()
    mine = folder / str(dist.get_rank() // 2)
    with contextlib.suppress(FileExistsError):
        api.save_state_dict(state, mine, like=CONFIG, process_group=group)
    blank = {"matrix": distribute_tensor(torch.zeros(10, 7), mesh, [Shard(0)])}
    api.load_state_dict(blank, mine, process_group=group)
    assert torch.equal(blank["matrix"].full_tensor(), VALUES["matrix"])
    try:
        api.save_state_dict(state, folder / "all", like=CONFIG)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_group_that_is_a_part_of_the_world(ranks, tmp_path: Path) -> None:
    if Version(torch.__version__).release < (2, 5):
        pytest.skip("submeshes of torch 2.4 have no group of their own here")
    assert all("not the same on every rank" in text for text in ranks(on_a_part, tmp_path))


def test_other_values_under_a_second_name_are_refused(tmp_path: Path) -> None:
    value = torch.zeros(3)
    write_model(tmp_path / "m", {"a": torch.ones(3), "b": torch.full((3,), 2.0)})
    text = r"another value under a second name of the same tensor: b[\s\S]*tie_word_embeddings=False"
    with pytest.raises(RuntimeError, match=text):
        hf.load_state_dict({"a": value, "b": value}, tmp_path / "m")
    assert value.tolist() == [0, 0, 0]
    write_model(tmp_path / "same", {"a": torch.ones(3), "b": torch.ones(3)})
    assert hf.load_state_dict({"a": value, "b": value}, tmp_path / "same").tied == {"b": "a"}
    assert value.tolist() == [1, 1, 1]
    write_model(tmp_path / "last", {"b": torch.full((3,), 5.0)})
    assert hf.load_state_dict({"a": value, "b": value}, tmp_path / "last").tied == {"a": "b"}
    assert value.tolist() == [5, 5, 5]


def tied_on_one(api: Any, folder: Path) -> list[str]:
    a = torch.zeros(3)
    state = {"a": a, "b": a if dist.get_rank() == 0 else torch.zeros(3)}
    texts = []
    for call in (
        lambda: api.load_state_dict(state, folder),
        lambda: api.save_state_dict(state, folder.parent / "x", like=CONFIG),
    ):
        try:
            call()
        except RuntimeError as error:
            texts.append(str(error))
    return texts


def test_ties_of_one_rank_are_told(ranks, tmp_path: Path) -> None:
    write_model(tmp_path / "m", {"a": torch.ones(3)})
    (texts,) = {tuple(texts) for texts in ranks(tied_on_one, tmp_path / "m", world=2)}
    assert len(texts) == 2
    assert all("rank 1: tied on some ranks alone: b" in text for text in texts)


def test_a_name_that_files_need_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="a tensor cannot be called __metadata__"):
        hf.save_state_dict({"__metadata__": torch.ones(1)}, tmp_path / "m", like=CONFIG)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("count", range(1, 12))
@pytest.mark.parametrize("is_holder", [False, True])
def test_every_replica_receives_once_and_from_one_that_has_it(count: int, is_holder: bool) -> None:
    box, ranks = Box((0,), (4,)), [*([0] if is_holder else []), *range(3, 3 + count)]
    turns = turns_of(Boxes((4,), tuple((rank, (box,)) for rank in ranks)), 0)
    have: set[int] = set()
    for number, (senders, receivers) in enumerate(turns):
        sending, receiving = ({rank for rank, _ in one.by_rank} for one in (senders, receivers))
        assert sending <= have
        assert not receiving & have
        assert number == 0 or len(receiving) <= len(sending)
        have |= receiving
    assert have == set(ranks)
    assert len(turns) == 1 + (count - 1).bit_length()
    assert len([rank for rank, _ in turns[0][1].by_rank if rank]) == 1
