"""Files under the names of a model: of another layout, and tensors that are made of several."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import families
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_dcp_backport import hf
from torch_dcp_backport.hf._src.classes import Origin
from torch_dcp_backport.hf._src.opening import made_of
from torch_dcp_backport.transfer import Box, TensorInfo


def step(name: str, **settings: Any) -> Any:
    """As an operation of transformers 5, as far as it is looked at."""
    return type(name, (SimpleNamespace,), {})(**settings)


def merge(dim: int) -> Any:
    return step("MergeModulelist", dim=dim)


def concatenate(dim: int) -> Any:
    return step("Concatenate", dim=dim)


def chunk(dim: int) -> Any:
    return step("Chunk", dim=dim)


def split(dim: int) -> Any:
    return step("Split", dim=dim)


def transpose(first: int, second: int) -> Any:
    return step("Transpose", dim0=first, dim1=second, check_dims=False)


#: (shapes of the tensors by pattern, operations, torch's own of all of them; of what comes out the second)
WAYS: dict[str, tuple[list[list[tuple[int, ...]]], list[Any], Any]] = {
    "experts": ([[(3, 4)] * 5], [merge(0)], lambda a: [torch.stack(a[0])]),
    "experts of two layers": (
        [[(3, 4)] * 5, [(3, 4)] * 5],
        [merge(0), concatenate(1)],
        lambda a: [torch.cat([torch.stack(a[0]), torch.stack(a[1])], 1)],
    ),
    "rows of several": (
        [[(2, 4)], [(3, 4)], [(1, 4)]], [concatenate(0)], lambda a: [torch.cat([part for (part,) in a])]
    ),
    "turned experts": (
        [[(3, 4)] * 2], [merge(0), transpose(1, 2)], lambda a: [torch.stack(a[0]).transpose(1, 2)]
    ),
    "a part of rows": ([[(6, 4)]], [chunk(0)], lambda a: a[0][0].chunk(3)),
    "a part of columns, turned": ([[(6, 4)]], [transpose(0, 1), chunk(1)], lambda a: a[0][0].T.chunk(3, 1)),
    "parts of different sizes": ([[(6, 4)]], [split(0)], lambda a: a[0][0].split([1, 3, 2])),
}  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_a_part_of_what_several_tensors_make_is_read_of_their_parts(data: Any) -> None:
    shapes, steps, made_by_torch = WAYS[data.draw(st.sampled_from(list(WAYS)))]
    draw = torch.Generator().manual_seed(1)
    lists = [[torch.randn(shape, generator=draw) for shape in same] for same in shapes]
    keys = [[f"{place}.{number}" for number in range(len(same))] for place, same in enumerate(lists)]
    files = {key: value for same, values in zip(keys, lists) for key, value in zip(same, values)}
    infos = {key: TensorInfo(tuple(value.shape), value.dtype) for key, value in files.items()}
    every = made_by_torch(lists)
    place = min(1, len(every) - 1)
    expected = every[place]
    outcome = tuple(tuple(value.shape) for value in every)
    route = Origin(tuple(map(tuple, keys)), tuple(steps), outcome, place)
    made = made_of(route, infos)
    assert made is not None
    assert made.shape == tuple(expected.shape)
    starts = [data.draw(st.integers(0, extent - 1)) for extent in made.shape]
    sizes = [data.draw(st.integers(1, extent - start)) for extent, start in zip(made.shape, starts)]
    read = 0

    def part(key: str, box: Box) -> torch.Tensor:
        nonlocal read
        read += box.numel
        return files[key][tuple(slice(a, a + n) for a, n in zip(box.offset, box.size))]

    found = made.part(part, Box(tuple(starts), tuple(sizes)))
    assert torch.equal(found, expected[tuple(slice(a, a + n) for a, n in zip(starts, sizes))])
    assert read == found.numel()


def test_what_is_made_in_another_way_is_not_known() -> None:
    infos = {"a": TensorInfo((4, 4), torch.float32), "b": TensorInfo((4, 4), torch.bfloat16)}
    for keys, steps in (
        (("a",), [step("PermuteForRope")]),
        (("a",), [step("Transpose", dim0=0, dim1=1, check_dims=True)]),
        # Parts of two dtypes.
        (("a", "b"), [merge(0)]),
    ):
        assert made_of(Origin((keys,), tuple(steps)), infos) is None


@pytest.mark.parametrize(
    "name", ["no head", "a tied head", "experts", "buffers", "pictures", "turned matrices"]
)
def test_files_fill_a_model_as_from_pretrained_does(tmp_path: Path, name: str) -> None:
    """As `save_pretrained` writes them, which is not always as the model names them."""
    library = pytest.importorskip("transformers")
    model = families.made(name)
    model.save_pretrained(tmp_path)
    expected = families.opened(tmp_path, getattr(library, families.FAMILIES[name][0]))
    other = families.made(name, 1)
    assert not families.same(other, expected)
    hf.load_state_dict(other.state_dict(), hf.opened(tmp_path, other))
    assert families.same(other, expected)


def test_a_language_model_of_files_without_its_head(tmp_path: Path) -> None:
    library = pytest.importorskip("transformers")
    families.made("no head", tie_word_embeddings=True).save_pretrained(tmp_path)
    other = families.made("a tied head", 1)
    with pytest.raises(RuntimeError) as caught:
        hf.load_state_dict(other.state_dict(), tmp_path)
    text = (
        "not in the files: model.embed_tokens.weight (there is embed_tokens.weight: hf.opened(folder, model)"
    )
    assert text in str(caught.value)
    hf.load_state_dict(other.state_dict(), hf.opened(tmp_path, other))
    assert families.same(other, library.AutoModelForCausalLM.from_pretrained(tmp_path))
    # Without a tied head there is none, and nothing is drawn for it.
    lone = families.made("a language model", 1)
    with pytest.raises(RuntimeError, match=r"not in the files: lm_head\.weight"):
        hf.load_state_dict(lone.state_dict(), hf.opened(tmp_path, lone))
