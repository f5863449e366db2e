"""The parameters in the flat buckets of Megatron's distributed optimizer: found by the values of the weights.

A checkpoint does not say which parameters a bucket has. But its float32 weights, cast, are the weights of the
model in the same checkpoint, bit for bit; so every place that is returned was compared.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Optional, Union

import torch

from torch_dcp_backport.dist_checkpointing import CheckpointingException, Damaged, Read, RecordReader, Stored
from torch_dcp_backport.transfer import Box, Problem, as_bytes

#: The float32 weights among the states of a bucket.
WEIGHTS = "param"
#: A parameter begins at a multiple of so many elements in its bucket.
ALIGNED = 64
#: How many such multiples may be left out before the bucket of a tied embedding.
MOST_GAPS = 128
#: Elements of a parameter that are compared at a time.
MOST_AT_A_TIME = 2**22

LAYER = re.compile(r"(?:^|\.)(decoder|mtp)\.layers\.(?:(\d+)\.)?(.+)")
EXPERTS = "mlp.experts.experts."
#: Of the model's tensors those that no gradient is made for.
BUFFERS = ("expert_bias", "local_tokens_per_expert")
#: The modules of a layer in the order in which they are made, and so in which its parameters are listed.
MODULES = (
    "enorm",
    "hnorm",
    "eh_proj",
    "input_layernorm",
    "self_attention.linear_proj",
    "self_attention.linear_q_proj",
    "self_attention.linear_q_down_proj",
    "self_attention.linear_q_up_proj",
    "self_attention.linear_kv_down_proj",
    "self_attention.linear_kv_up_proj",
    "self_attention.linear_qkv",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "self_attention.kv_layernorm",
    "pre_mlp_layernorm",
    "mlp.router",
    "mlp.experts.experts.linear_fc1",
    "mlp.experts.experts.linear_fc2",
    "mlp.shared_experts",
    "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.linear_fc2",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
    "final_layernorm",
)
#: The parameters of a module, likewise.
ENDS = ("layer_norm_weight", "layer_norm_bias", "gate_weight", "weight", "bias")
#: Names of a norm that is a module of its own, made before attention, if TransformerEngine does not fuse it.
FUSED_NORM = "self_attention.linear_qkv.layer_norm_"
#: The norm before the MLP has this name in sparse layers, too, where it is never fused.
MLP_NORM = "mlp.linear_fc1.layer_norm_"
#: (group of segments, number in it) of the head.
OUTPUT = (4, 0)
EMBEDDINGS = ("embedding.word_embeddings.weight", "embedding.position_embeddings.weight")


class BucketParam(NamedTuple):
    """A parameter of the full model: a stored tensor, or a layer or an expert of it."""

    key: str
    #: Its place along the axes in front of its own.
    lead: tuple[int, ...]
    #: How its place among the parameters of its segment is found.
    rank: tuple[int, ...]


class Order(NamedTuple):
    """An order in which a model may list its parameters."""

    #: Whether the norm before attention is fused with it (TransformerEngine).
    is_fused: bool = False
    #: Whether all experts' first matrices come before their second ones.
    is_grouped: bool = False


class Guess(NamedTuple):
    """What a bucket may hold: parameters in an order, cut among the ranks of a grid."""

    order: Order
    tp: int
    tp_rank: int
    ep: int = 1
    ep_rank: int = 0


class Buffer(NamedTuple):
    """A flat buffer of states, as it was saved: the buckets behind one another."""

    name: str
    #: Of the parameters.
    dtype: torch.dtype
    #: Without the padding at its end.
    numel: int
    #: Where buckets begin; None where that is not known, and buckets have no padding at their ends.
    starts: Optional[tuple[int, ...]]
    #: Where what is not padding ends in each bucket; none where that is not known.
    ends: tuple[int, ...]
    #: Name -> dtype.
    states: Mapping[str, torch.dtype]
    #: (state, start, stop) -> its elements.
    read: Callable[[str, int, int], torch.Tensor]

    def places(self, at: int, base: int, has_gap: bool) -> Iterator[int]:
        """Yield where the next parameter may begin, behind `at` in a bucket that begins at `base`.

        Args:
            has_gap: whether the bucket before it may end with padding, as before a tied embedding.
        """
        first = base + -(-(at - base) // ALIGNED) * ALIGNED
        most = MOST_GAPS * ALIGNED if has_gap and at else 0
        if self.starts is None:
            if self.is_padding(at, first):
                yield first
            yield at
            for start in range(first + ALIGNED, min(first + most, self.numel), ALIGNED):
                if not self.is_padding(at, start):
                    return
                yield start
            return
        yield first
        for start, end in zip(self.starts[1:], self.ends):
            if start >= at and at <= end <= at + most:
                yield start
                return

    def is_padding(self, start: int, stop: int) -> bool:
        """Return whether elements of a gathered buffer are zeros in all states, as Megatron pads it.

        A parameter that is zero fits in padding, too; but then its moments are left over.
        """
        return not any(self.read(state, start, stop).any() for state in self.states)

    def holds(self, start: int, stop: int) -> bool:
        """Return whether elements are all of one bucket, and before its padding."""
        if self.starts is None:
            return stop <= self.numel
        return any(begin <= start and stop <= end for begin, end in zip(self.starts, self.ends))

    def base(self, start: int, before: int) -> int:
        """Return where the bucket of a parameter at `start` begins; the one before it began at `before`."""
        if self.starts is None:
            return start if (start - before) % ALIGNED else before
        return max(begin for begin in self.starts if begin <= start)


class Placed(NamedTuple):
    """A box of a parameter, and where its elements begin in the buffer."""

    key: str
    box: Box
    start: int


class Reached(NamedTuple):
    """How far a guess holds."""

    at: int
    #: The parameter that is expected there.
    key: str


class Weights:
    """The weights of the model in a checkpoint, read as they are needed."""

    def __init__(self, reader: RecordReader, tensors: Mapping[str, Stored]) -> None:
        self.reader = reader
        self.tensors = tensors
        # A guess begins with the first row of its first parameter, again and again.
        self.first_row = functools.lru_cache(maxsize=64)(self.values)
        self.cuts = functools.lru_cache(maxsize=None)(self._cuts)

    def values(self, key: str, box: Box) -> torch.Tensor:
        return values_of(self.reader, key, self.tensors[key], box)

    def _cuts(self, key: str, tp: int, axes: int) -> tuple[Union[int, str], ...]:
        """Return how a tensor may be cut among `tp` ranks, as its stored boxes show: the finest cut first.

        Args:
            axes: the number of axes in front of the parameter's own.

        Returns:
            Axes of the parameter; "halves" if each rank has a part of the first half of the rows, and then
            one of the second; "whole".
        """
        stored = self.tensors[key]
        shape = stored.shape[axes:]
        spans = {(chunk.box.offset[axes:], chunk.box.size[axes:]) for chunk in stored.chunks}

        def fits(axis: int, parts: int) -> bool:
            extent = shape[axis] // parts
            return shape[axis] % parts == 0 and all(
                start[axis] // extent == (start[axis] + size[axis] - 1) // extent for start, size in spans
            )

        cuts: list[Union[int, str]] = []
        if tp > 1:
            cuts += ["halves"] if shape and fits(0, 2 * tp) else []
            cuts += [axis for axis in range(len(shape)) if fits(axis, tp)]
        return (*cuts, "whole")

    def boxes(self, param: BucketParam, tp: int, tp_rank: int) -> Iterator[tuple[Box, ...]]:
        """Yield the boxes that a rank may hold of a parameter, in the order of their elements there."""
        shape, axes = self.tensors[param.key].shape, len(param.lead)
        full = Box((*param.lead, *(0 for _ in shape[axes:])), (*(1 for _ in param.lead), *shape[axes:]))
        for cut in self.cuts(param.key, tp, axes):
            if cut == "whole":
                yield (full,)
            elif cut == "halves":
                extent = shape[axes] // (2 * tp)
                yield tuple(
                    full.tail(axes, (half * tp + tp_rank) * extent).head(axes, extent) for half in (0, 1)
                )
            else:
                axis = axes + int(cut)
                extent = shape[axis] // tp
                yield (full.tail(axis, tp_rank * extent).head(axis, extent),)


def values_of(reader: RecordReader, key: str, stored: Stored, box: Box) -> torch.Tensor:
    """Return a box of a stored tensor.

    Raises:
        CheckpointingException: it cannot be read, or is damaged.
    """
    values = torch.empty(box.size, dtype=stored.dtype)
    try:
        reader.read(
            [Read(key, chunk, part, stored.dtype, values, box) for chunk, part in stored.parts_of(box)]
        )
    except (Damaged, OSError) as error:
        raise CheckpointingException(f"{reader.files.folder}: {error}") from error
    return values


# --- the parameters of a model, in order ---


def lead_of(key: str) -> int:
    """Return the number of axes that a stored tensor has in front of its own: those of layers and experts."""
    found = LAYER.search(key)
    if found is None:
        return 0
    return (found[2] is None) + found[3].startswith(EXPERTS)


def is_expert(key: str) -> bool:
    found = LAYER.search(key)
    return found is not None and EXPERTS in found[3]


def is_trained(key: str) -> bool:
    return not key.endswith(BUFFERS)


def segments_of(
    tensors: Mapping[str, Stored], order: Order, keep: Callable[[BucketParam], bool]
) -> list[tuple[BucketParam, ...]]:
    """Return the parameters in the order of the model, in the segments that pipeline stages have or have not.

    Args:
        keep: whether a parameter is among them.

    Raises:
        ValueError: a parameter of which it is not known where it is among the others.
    """
    by_place: dict[tuple[int, int], list[BucketParam]] = {}
    for key, stored in tensors.items():
        for place, param in _params_of(key, stored, order):
            if keep(param):
                by_place.setdefault(place, []).append(param)
    if OUTPUT not in by_place:
        # The last stage has a copy of a tied embedding.
        by_place[OUTPUT] = [param for param in by_place.get((0, 0), ()) if param.key.endswith(EMBEDDINGS[0])]
    return [tuple(sorted(by_place[place], key=lambda param: param.rank)) for place in sorted(by_place)]


def _params_of(key: str, stored: Stored, order: Order) -> Iterator[tuple[tuple[int, int], BucketParam]]:
    """Yield ((group of segments, number in it), parameter) for what a stored tensor has."""
    found = LAYER.search(key)
    end = key.rpartition(".")[2]
    if found is None:
        embedding = next((number for number, name in enumerate(EMBEDDINGS) if key.endswith(name)), None)
        if embedding is not None:
            yield (0, 0), BucketParam(key, (), (embedding,))
        elif ".final_layernorm." in key and end in ENDS:
            yield (2, 0), BucketParam(key, (), (ENDS.index(end),))
        elif ".output_layer." in f".{key}" and end in ENDS:
            yield OUTPUT, BucketParam(key, (), (ENDS.index(end),))
        else:
            raise ValueError(key)
        return
    rest = found[3].replace("transformer_layer.", "")
    module, _, end = rest.rpartition(".")
    if module not in MODULES or end not in ENDS:
        raise ValueError(key)
    rank: tuple[int, ...] = (MODULES.index(module), ENDS.index(end))
    if rest.startswith(FUSED_NORM) and not order.is_fused:
        rank = (MODULES.index("input_layernorm"), *rank)
    if rest.startswith(MLP_NORM):
        rank = (MODULES.index("pre_mlp_layernorm"), *rank)
    group = 1 if found[1] == "decoder" else 3
    for layer in range(stored.shape[0]) if found[2] is None else [int(found[2])]:
        lead = (layer,) if found[2] is None else ()
        if not is_expert(key):
            yield (group, layer), BucketParam(key, lead, rank)
            continue
        first = MODULES.index("mlp.experts.experts.linear_fc1")
        for expert in range(stored.shape[len(lead)]):
            inner = (*rank, expert) if order.is_grouped else (first, expert, *rank)
            yield (group, layer), BucketParam(key, (*lead, expert), inner)


# --- buckets ---


def located(
    buffer: Buffer, segments: Sequence[tuple[BucketParam, ...]], guess: Guess, weights: Weights
) -> Union[list[Placed], Reached]:
    """Return where parameters are in a buffer if a guess holds in all of it; else how far it holds.

    Args:
        segments: in the order of the model, which is the opposite of the buffer's.
    """
    ours = [
        tuple(param for param in segment if weights.tensors[param.key].dtype == buffer.dtype)
        for segment in segments
    ]
    placed: list[Placed] = []
    at = base = 0
    best, last = Reached(0, ""), len(ours)
    while at != buffer.numel:
        # The segment before the last one is nearest; pipeline stages leave out some.
        for number in reversed(range(last)):
            walked = _walk(buffer, ours[number], guess, weights, at, base) if ours[number] else None
            if isinstance(walked, Reached):
                best = max(best, walked, key=lambda reached: reached.at)
            elif walked is not None:
                places, at, base = walked
                placed += places
                last = number
                break
        else:
            return best
    return placed


def _walk(
    buffer: Buffer, segment: tuple[BucketParam, ...], guess: Guess, weights: Weights, at: int, base: int
) -> Union[tuple[list[Placed], int, int], Reached]:
    """Return (places of a segment, where it ends, where its last bucket begins), or how far it goes."""
    placed: list[Placed] = []
    for param in reversed(segment):
        step = _fitting(buffer, param, guess, weights, at, base)
        if step is None:
            return Reached(at, param.key)
        start, boxes, base = step
        at = start
        for box in boxes:
            placed.append(Placed(param.key, box, at))
            at += box.numel
    return placed, at, base


def _fitting(
    buffer: Buffer, param: BucketParam, guess: Guess, weights: Weights, at: int, base: int
) -> Optional[tuple[int, tuple[Box, ...], int]]:
    """Return (start, boxes, start of the bucket) of a parameter whose values are behind `at`."""
    for start in buffer.places(at, base, param.key.endswith(EMBEDDINGS[0])):
        for boxes in weights.boxes(param, guess.tp, guess.tp_rank):
            if _is_at(buffer, param.key, boxes, weights, start):
                return start, boxes, buffer.base(start, base)
    return None


def _is_at(buffer: Buffer, key: str, boxes: Sequence[Box], weights: Weights, start: int) -> bool:
    if not buffer.holds(start, start + sum(box.numel for box in boxes)):
        return False
    for box in boxes:
        if not _is_equal(buffer, start, weights.first_row(key, _first(box))):
            return False
        for part in _pieces(box):
            if not _is_equal(buffer, start, weights.values(key, part)):
                return False
            start += part.numel
    return True


def _pieces(box: Box) -> Iterator[Box]:
    """Yield the rows of a box, so many at a time that they have about `MOST_AT_A_TIME` elements."""
    axis = next((axis for axis, extent in enumerate(box.size) if extent > 1), None)
    rows = 1 if axis is None else max(MOST_AT_A_TIME * box.size[axis] // box.numel, 1)
    while axis is not None and box.size[axis] > rows:
        yield box.head(axis, rows)
        box = box.tail(axis, rows)
    yield box


def _first(box: Box) -> Box:
    """Return the first row of a box, which differs from most others."""
    for axis in range(len(box.size) - 1):
        box = box.head(axis, 1)
    return box


def _is_equal(buffer: Buffer, start: int, values: torch.Tensor) -> bool:
    own = buffer.read(WEIGHTS, start, start + values.numel()).to(values.dtype)
    return torch.equal(as_bytes(own), as_bytes(values.reshape(-1)))


def guesses(
    groups: int, number: int, experts: int, is_of_experts: bool, last: Optional[Guess]
) -> Iterator[Guess]:
    """Yield what the buffers of a group may hold, the likeliest first.

    Args:
        groups: the number of groups of ranks that have buffers of their own.
        number: of this group; ranks of TP are next to each other.
        experts: of a layer; 0 of a dense model.
        is_of_experts: whether the buffers have experts alone.
        last: the guess that holds for the group before.
    """
    orders = [
        Order(fused, grouped)
        for grouped in ((False, True) if experts else (False,))
        for fused in (False, True)
    ]
    sizes = [size for size in range(1, groups + 1) if groups % size == 0]
    parts = [size for size in sizes if experts % size == 0] if is_of_experts else [1]
    every = [
        Guess(order, tp, rank, ep, ep_rank)
        for order, tp, ep in itertools.product(orders, sizes, parts)
        if groups % (tp * ep) == 0
        for rank in sorted(range(tp), key=lambda rank: rank != number % tp)
        for ep_rank in sorted(range(ep), key=lambda rank: rank != number // tp % ep)
    ]
    if last is not None:
        # A sort is stable: the same grid and order first.
        every.sort(key=lambda guess: (guess.order, guess.tp, guess.ep) != (last.order, last.tp, last.ep))
    yield from every


def why_not(buffer: Buffer, reached: Reached) -> Problem:
    """Return the problem of a buffer that no guess explains."""
    return Problem(
        f"the order of parameters in {buffer.name} is not known: up to element {max(reached.at, 0)} of "
        f"{buffer.numel} its float32 weights are those of the model; behind that are others than those of",
        reached.key or f"any parameter in {buffer.dtype}",
    )
