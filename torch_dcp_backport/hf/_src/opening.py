"""Files under the names that a model has for their tensors, as `from_pretrained` opens them.

Files of a model without its head, of an older layout, or with a tensor for each expert. One rank's view;
reads slice by slice, and must never make a full tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import torch

from torch_dcp_backport.hf._src import classes
from torch_dcp_backport.hf._src.classes import Origin
from torch_dcp_backport.hf._src.dequantised import as_held
from torch_dcp_backport.hf._src.source import Source, copied_of, digest_of, source_of
from torch_dcp_backport.transfer import Box, Problem, TensorInfo, intersection, part_of

#: Reads a box of a tensor of the files.
Read = Callable[[str, Box], torch.Tensor]


def opened(
    folder: Union[str, Path, Source],
    model: torch.nn.Module,
    held: Optional[Mapping[str, tuple[int, ...]]] = None,
) -> Source:
    """Return a folder's tensors under the names of a model of transformers, as `from_pretrained` maps them.

    Only the headers of the files are read. Files of another model than `model` keep their names.

    Args:
        folder: a folder with config.json and safetensors files, or an `hf.Source`.
        model: a model of transformers, on any device, with parameters of any sharding. A module without
            `base_model_prefix` is no such model: nothing is mapped for it.
        held: name -> shape of the tensors that are looked for; None is the model's state dict.

    Returns:
        A source for `load_state_dict`.

    Raises:
        TypeError: `folder` is neither a folder nor a source.

    Example:
        The files have the names of the model that is asked for, so they are read as they are:

        >>> import torch
        >>> from torch import nn
        >>> from torch_dcp_backport import hf
        >>> model = nn.Linear(2, 2)
        >>> _ = hf.save_state_dict(model.state_dict(), "model", like={"model_type": "linear"})
        >>> source = hf.opened("model", model)
        >>> sorted(source.tensors)
        ['bias', 'weight']
        >>> hf.load_state_dict(model.state_dict(), source).bytes_read
        24
    """
    source = source_of(folder)
    held = classes.tensors_in(model) if held is None else held
    if source.absent or source.problems or not hasattr(model, "base_model_prefix"):
        return source
    source = as_held(source, {**dict.fromkeys(held), **{key: p.dtype for key, p in model.named_parameters()}})
    if all(name in source.tensors and source.tensors[name].shape == shape for name, shape in held.items()):
        return source
    routes = classes.reading(model, source.tensors, held).routes
    if all(not route.steps and route.key == name for name, route in routes.items()):
        return source
    return Mapped(source, routes)


def with_prefix(source: Source, prefix: str, sign: str) -> Source:
    """Return a source whose names begin with a prefix; files of a model without its head lack it.

    Args:
        sign: a name, behind the prefix, by which such files are known.
    """
    if sign not in source.tensors or prefix + sign in source.tensors:
        return source
    return Mapped(source, {prefix + key: Origin(((key,),)) for key in source.tensors})


def renamed(source: Source, names: Mapping[str, str]) -> Source:
    """Return a source in which some tensors have another name.

    Args:
        names: key of the files -> its new name; others keep theirs.
    """
    return Mapped(source, {names.get(key, key): Origin(((key,),)) for key in source.tensors})


def viewed(source: Source, shapes: Mapping[str, tuple[int, ...]]) -> Source:
    """Return a source in which some tensors have another shape, of the same elements in the same order.

    Args:
        shapes: key -> shape. A tensor that has another number of elements keeps its shape.
    """
    return Viewed(source, shapes)


class Transpose(NamedTuple):
    """The exchange of two dimensions, under the names of transformers' operation."""

    dim0: int
    dim1: int
    check_dims: bool = False


def turned(source: Source, keys: AbstractSet[str], dims: tuple[int, int]) -> Source:
    """Return a source in which some tensors have two of their dimensions exchanged.

    Args:
        keys: of the tensors that are turned; others stay as they are.
        dims: the two dimensions.
    """
    step = Transpose(*dims)
    return Mapped(
        source,
        {key: Origin(((key,),), (step,) if key in keys else ()) for key in source.tensors},
    )


class Viewed:
    """A source whose tensors may have another shape than in the files."""

    def __init__(self, source: Source, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.source = source
        self.config, self.absent, self.problems = source.config, source.absent, list(source.problems)
        self.tensors = dict(source.tensors)
        self._shapes: dict[str, tuple[int, ...]] = {}
        for key, shape in shapes.items():
            info = source.tensors[key]
            if math.prod(shape) == math.prod(info.shape):
                self._shapes[key] = shape
                self.tensors[key] = info._replace(shape=shape)

    def part(self, key: str, box: Box) -> torch.Tensor:
        if key not in self._shapes:
            return self.source.part(key, box)
        shape, stored = self._shapes[key], self.source.tensors[key].shape
        # Of the dimensions that both have, only what is asked for: a source may copy what it returns.
        same = 0
        while same < min(len(shape), len(stored)) and shape[same] == stored[same]:
            same += 1
        asked = Box(box.offset[:same] + (0,) * (len(stored) - same), box.size[:same] + stored[same:])
        holds = Box(box.offset[:same] + (0,) * (len(shape) - same), box.size[:same] + shape[same:])
        return part_of(self.source.part(key, asked).reshape(holds.size), holds, box)

    @property
    def copied(self) -> set[str]:
        """Keys of tensors that are read as copies: another shape is a view."""
        return copied_of(self.source)

    def digest(self) -> str:
        return digest_of((self.source.digest(), *(f"{key} {shape}" for key, shape in self._shapes.items())))


class Mapped:
    """A source whose tensors have other names, and may be made of several."""

    def __init__(self, source: Source, routes: Mapping[str, Origin]) -> None:
        """Remember where each tensor is read. What cannot be made of slices goes to `problems`."""
        self.source = source
        self.config = source.config
        self.absent = source.absent
        self.problems = list(source.problems)
        self.tensors: dict[str, TensorInfo] = {}
        self._made: dict[str, Made] = {}
        places = {key: place for place, key in enumerate(source.tensors)}
        for name, route in sorted(routes.items(), key=lambda item: places[item[1].key]):
            made = made_of(route, source.tensors)
            if made is None:
                steps = ", ".join(type(step).__name__ for step in route.steps)
                what = (
                    "not in the files as it is: transformers makes it of others in a way that is not offered "
                    "here (load the model with from_pretrained, and save it)"
                )
                self.problems.append(Problem(what, name, f"{steps} of {route.key}, ..."))
                continue
            self._made[name] = made
            self.tensors[name] = TensorInfo(made.shape, source.tensors[route.key].dtype)
        used = {key for route in routes.values() for keys in route.sources for key in keys}
        left = {key: info for key, info in source.tensors.items() if key not in {*used, *self.tensors}}
        for key, info in left.items():
            self._made[key] = FileTensor(key, info.shape)
            self.tensors[key] = info

    def part(self, key: str, box: Box) -> torch.Tensor:
        return self._made[key].part(self.source.part, box)

    @property
    def copied(self) -> set[str]:
        """Keys of tensors that are read as copies: those of such tensors, or of several."""
        own = copied_of(self.source)
        return {name for name, made in self._made.items() if is_copy(made, own)}

    def digest(self) -> str:
        return digest_of((self.source.digest(), *(f"{name} {made}" for name, made in self._made.items())))


class FileTensor(NamedTuple):
    """A tensor of the files."""

    key: str
    shape: tuple[int, ...]

    def part(self, read: Read, box: Box) -> torch.Tensor:
        return read(self.key, box)


class Stack(NamedTuple):
    """Tensors one behind the other, along a dimension of its own."""

    dim: int
    parts: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.parts[0].shape
        return (*shape[: self.dim], len(self.parts), *shape[self.dim :])

    def part(self, read: Read, box: Box) -> torch.Tensor:
        dim = self.dim
        inner = Box(box.offset[:dim] + box.offset[dim + 1 :], box.size[:dim] + box.size[dim + 1 :])
        chosen = self.parts[box.offset[dim] : box.offset[dim] + box.size[dim]]
        return torch.stack([part.part(read, inner) for part in chosen], dim)


class Cat(NamedTuple):
    """Tensors one behind the other, along a dimension that they have."""

    dim: int
    parts: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.parts[0].shape)
        shape[self.dim] = sum(part.shape[self.dim] for part in self.parts)
        return tuple(shape)

    def part(self, read: Read, box: Box) -> torch.Tensor:
        found, start = [], 0
        for part in self.parts:
            offset = tuple(start if dim == self.dim else 0 for dim in range(len(part.shape)))
            common = intersection(Box(offset, part.shape), box)
            if common is not None:
                place = tuple(at - base for at, base in zip(common.offset, offset))
                found.append(part.part(read, Box(place, common.size)))
            start += part.shape[self.dim]
        return torch.cat(found, self.dim) if len(found) > 1 else found[0]


class Turned(NamedTuple):
    """A tensor with two of its dimensions exchanged."""

    inner: Any
    first: int
    second: int

    def _turn(self, values: Sequence[int]) -> tuple[int, ...]:
        turned = list(values)
        turned[self.first], turned[self.second] = turned[self.second], turned[self.first]
        return tuple(turned)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._turn(self.inner.shape)

    def part(self, read: Read, box: Box) -> torch.Tensor:
        inner: torch.Tensor = self.inner.part(read, Box(self._turn(box.offset), self._turn(box.size)))
        return inner.transpose(self.first, self.second)


class Narrow(NamedTuple):
    """A part of a tensor along a dimension."""

    inner: Any
    dim: int
    start: int
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.inner.shape)
        shape[self.dim] = self.size
        return tuple(shape)

    def part(self, read: Read, box: Box) -> torch.Tensor:
        offset = list(box.offset)
        offset[self.dim] += self.start
        found: torch.Tensor = self.inner.part(read, Box(tuple(offset), box.size))
        return found


Made = Union[FileTensor, Stack, Cat, Turned, Narrow]
Shapes = tuple[tuple[int, ...], ...]


def is_copy(made: Made, copied: AbstractSet[str]) -> bool:
    """Return whether parts of a tensor are copies, where those of some tensors of the files are."""
    if isinstance(made, FileTensor):
        return made.key in copied
    return isinstance(made, (Stack, Cat)) or is_copy(made.inner, copied)


def made_of(route: Origin, files: Mapping[str, TensorInfo]) -> Optional[Made]:
    """Return how a tensor is made of slices of the files; None where that is not known."""
    lists: list[list[Made]] = [[FileTensor(key, files[key].shape) for key in keys] for keys in route.sources]
    if len({files[key].dtype for keys in route.sources for key in keys}) > 1:
        return None
    for number, step in enumerate(route.steps, 1):
        taken = _after(step, lists, route.shapes if number == len(route.steps) else ())
        if taken is None:
            return None
        lists = taken
    parts = lists[route.place] if route.place < len(lists) else []
    is_right = len(parts) == 1 and (not route.shapes or parts[0].shape == route.shapes[route.place])
    return parts[0] if is_right else None


def _after(step: Any, lists: list[list[Made]], shapes: Shapes) -> Optional[list[list[Made]]]:
    """Return the tensors after an operation of transformers 5; None for an operation that is not known.

    Args:
        shapes: of what the last operation makes; none for others.
    """
    kind, every = type(step).__name__, [part for parts in lists for part in parts]
    if kind == "MergeModulelist":
        return [[Stack(step.dim, tuple(parts))] for parts in lists]
    if kind == "Concatenate":
        return [[Cat(step.dim, tuple(every))]]
    if len(every) != 1:
        return None
    (only,) = every
    if kind == "Transpose":
        # With `check_dims` a tensor that has the shape of the model's already stays as it is.
        if step.check_dims and not shapes:
            return None
        is_left = step.check_dims and only.shape == shapes[0]
        return [[only if is_left else Turned(only, step.dim0, step.dim1)]]
    if kind in ("Chunk", "Split") and shapes:
        made, start = [], 0
        for shape in shapes:
            made.append([Narrow(only, step.dim, start, shape[step.dim])])
            start += shape[step.dim]
        return [list(part) for part in made] if start == only.shape[step.dim] else None
    return None
