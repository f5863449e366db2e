"""Tensors of files that are parts of a model's, as experts that a model holds in a single tensor.

Finds the names and parts that `save_pretrained` would write, and views of them. Must never copy a tensor.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from torch_dcp_backport.hf._src import classes
from torch_dcp_backport.hf._src.blocks import Part, Share
from torch_dcp_backport.hf._src.opening import Cat, FileTensor, Made, Stack, Turned, made_of
from torch_dcp_backport.transfer import Along, Box, Boxes, TensorInfo, part_of, spread_of, whole


class Cutout(NamedTuple):
    """The place of a tensor of the files in one of the model's.

    Args:
        key: the model's tensor.
        box: the elements of it that are the tensor.
        dims: the dimensions of the model's tensor that the tensor has, in its own order. The box has one
            element along the others.
    """

    key: str
    box: Box
    dims: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.box.size[dim] for dim in self.dims)

    @property
    def lost(self) -> tuple[int, ...]:
        """The dimensions that the tensor of the files does not have."""
        return tuple(dim for dim in range(len(self.box.size)) if dim not in self.dims)

    def outer(self, box: Box) -> Box:
        """Return a box of the tensor of the files as a box of the model's tensor."""
        offset, size = list(self.box.offset), [1] * len(self.box.size)
        for place, dim in enumerate(self.dims):
            offset[dim] += box.offset[place]
            size[dim] = box.size[place]
        return Box(tuple(offset), tuple(size))

    def inner(self, box: Box) -> Box:
        """Return a box of the model's tensor, which lies in this one, as a box of the tensor of the files."""
        offset = tuple(box.offset[dim] - self.box.offset[dim] for dim in self.dims)
        return Box(offset, tuple(box.size[dim] for dim in self.dims))

    def taken(self, part: torch.Tensor) -> torch.Tensor:
        """Return a part of the model's tensor as the part of the tensor of the files: a view."""
        part = part.permute(*self.dims, *self.lost)
        for _ in self.lost:
            part = part.squeeze(-1)
        return part

    def put_back(self, part: torch.Tensor) -> torch.Tensor:
        """Return a part of the tensor of the files as a part of the model's: a view."""
        for _ in self.lost:
            part = part.unsqueeze(-1)
        order = (*self.dims, *self.lost)
        return part.permute(*(order.index(dim) for dim in range(len(order))))


class Written(NamedTuple):
    """The names under which a model's tensors are written, where these are not its own.

    Args:
        renamed: the model's tensor -> its name in the files.
        apart: the model's tensor -> the tensors of the files that are its parts, in their order.
        left: tensors that keep their names, although `save_pretrained` writes others.
        unknown: why all tensors keep their names where `left` does not say it; "" where nothing is unknown.
    """

    renamed: Mapping[str, str]
    apart: Mapping[str, Mapping[str, Cutout]]
    left: Sequence[str] = ()
    unknown: str = ""


AS_IT_IS = Written({}, {})


def written(model: Any, tensors: Mapping[str, TensorInfo], found: classes.Reading) -> Written:
    """Return how `save_pretrained` writes the tensors of a model, as far as `from_pretrained` reads it back.

    Args:
        model: a model of transformers.
        tensors: those that are to be written. Where they do not have the model's own names, they have those
            of files already.
        found: the result of a look at how they are read.
    """
    plain = {name: route.key for name, route in found.routes.items() if not route.steps}
    try:
        saved = classes.saved(model, {name: tensors[key] for name, key in plain.items()})
    except classes.CannotTell as error:
        return AS_IT_IS._replace(unknown=str(error))
    left = [key for name, key in plain.items() if name not in saved and key not in saved]
    as_it_is = AS_IT_IS._replace(left=left)
    if plain != {name: name for name in found.routes}:
        # Some have names of files, or all lack the head's prefix.
        return as_it_is
    own = {name: info for name, info in tensors.items() if name in plain}
    if set(saved) == set(own):
        return AS_IT_IS
    others = {key: info for key, info in tensors.items() if key not in own}
    back = classes.reading(model, {**saved, **others})
    renamed: dict[str, str] = {}
    apart: dict[str, dict[str, Cutout]] = {}
    for name, route in back.routes.items():
        made = made_of(route, saved) if name in own else None
        parts = cutouts(made, name) if made is not None else {}
        if isinstance(made, FileTensor):
            renamed[name] = made.key
        elif parts:
            apart[name] = parts
        else:
            return as_it_is._replace(unknown=f"{name} is not made of whole tensors of the files")
    used = [*renamed.values(), *(key for parts in apart.values() for key in parts)]
    # All of them, each once, and nothing else: then the files are read as the same tensors.
    if {*renamed, *apart} != set(own) or sorted(used) != sorted(saved) or others.keys() & saved.keys():
        return as_it_is._replace(unknown="from_pretrained reads other tensors than those")
    return Written({name: key for name, key in renamed.items() if name != key}, apart)


def cutouts(made: Made, key: str) -> dict[str, Cutout]:
    """Return the tensors of the files that make up a model's -> their places in it; {} where one is cut."""
    if not all(isinstance(part, (FileTensor, Stack, Cat, Turned)) for part in _all_of(made)):
        return {}
    found = {file_key: Cutout(key, box, dims) for file_key, box, dims in _places(made)}
    return dict(sorted(found.items(), key=lambda item: item[1].box.offset))


def _all_of(made: Any) -> Iterator[Any]:
    yield made
    inner = made.parts if isinstance(made, (Stack, Cat)) else (made.inner,) if hasattr(made, "inner") else ()
    for part in inner:
        yield from _all_of(part)


def _places(made: Any) -> Iterator[tuple[str, Box, tuple[int, ...]]]:
    """Yield (key, its box in what is made, the dimensions of it that the tensor has)."""
    if isinstance(made, FileTensor):
        yield made.key, whole(made.shape), tuple(range(len(made.shape)))
    elif isinstance(made, Turned):
        swap = {made.first: made.second, made.second: made.first}
        for key, box, dims in _places(made.inner):
            order = [swap.get(dim, dim) for dim in range(len(box.size))]
            turned = Box(tuple(box.offset[dim] for dim in order), tuple(box.size[dim] for dim in order))
            yield key, turned, tuple(swap.get(dim, dim) for dim in dims)
    else:
        start, at = 0, made.dim
        for part in made.parts:
            for key, box, dims in _places(part):
                if isinstance(made, Stack):
                    offset = (*box.offset[:at], start, *box.offset[at:])
                    size = (*box.size[:at], 1, *box.size[at:])
                    yield key, Box(offset, size), tuple(dim + (dim >= at) for dim in dims)
                else:
                    offset = (*box.offset[:at], box.offset[at] + start, *box.offset[at + 1 :])
                    yield key, Box(offset, box.size), dims
            start += 1 if isinstance(made, Stack) else part.shape[at]


@dataclass(frozen=True)
class SharedParts(Share):
    """A `Share` of the tensors of files, out of the parts of a model's tensors that ranks hold."""

    model: Share = field(default_factory=lambda: Share({}, {}, {}))
    cuts: Mapping[str, Cutout] = field(default_factory=dict)

    def view(self, key: str, box: Box) -> torch.Tensor:
        cut = self.cuts.get(key)
        if cut is None:
            return self.model.view(key, box)
        return cut.taken(self.model.view(cut.key, cut.outer(box)))


def taken_apart(share: Share, tensors: Mapping[str, TensorInfo], cuts: Mapping[str, Cutout]) -> Share:
    """Return the tensors of files as ranks hold them.

    Args:
        share: the model's tensors.
        tensors: the tensors of the files.
        cuts: tensor of the files -> its place in a model's tensor; others have the same name in both.
    """
    by_key: dict[str, list[tuple[str, Cutout]]] = {}
    for name, cut in cuts.items():
        by_key.setdefault(cut.key, []).append((name, cut))
    spreads = {name: share.spreads[name] for name in tensors if name not in cuts}
    parts: dict[str, list[Part]] = {}
    # Layers are alike: the blocks of each are those of the first.
    seen: dict[Hashable, list[Boxes]] = {}
    for key, inside in by_key.items():
        row = Along(inside, lambda item: item[1].box)
        places = share.spreads[key].by_rank, tuple((cut.box, cut.dims) for _, cut in inside)
        if places not in seen:
            blocks: dict[str, dict[int, list[Box]]] = {name: {} for name, _ in inside}
            for rank, boxes in share.spreads[key].by_rank:
                for box in boxes:
                    for (name, cut), common in row.common(box):
                        blocks[name].setdefault(rank, []).append(cut.inner(common))
            seen[places] = [spread_of(cut.shape, blocks[name]) for name, cut in inside]
        spreads.update(zip((name for name, _ in inside), seen[places]))
        for box, into in share.parts.get(key, ()):
            for (name, cut), common in row.common(box):
                part = Part(cut.inner(common), cut.taken(part_of(into, box, common)))
                parts.setdefault(name, []).append(part)
    parts.update((name, list(share.parts[name])) for name in tensors if name in share.parts)
    relayed = {name: cuts[name].key if name in cuts else name for name in tensors}
    dtypes = {name: share.relayed[key] for name, key in relayed.items() if key in share.relayed}
    return SharedParts(tensors, spreads, parts, dtypes, share, cuts)
