"""The state of Megatron's distributed optimizer in a checkpoint, carried to the form that any grid loads.

That form has a tensor of the shape of the model's for each state ("fully_sharded_model_space"). With experts
dealt out (EP above 1) Megatron has two optimizers, one of them for experts, and keys for each.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional, Union

import torch

from torch_dcp_backport.dist_checkpointing import (
    CheckpointingException,
    Damaged,
    Opened,
    RecordReader,
    ShardedTensor,
    Stored,
    covered,
    load_object,
)
from torch_dcp_backport.megatron._src.buckets import (
    WEIGHTS,
    Buffer,
    Guess,
    Placed,
    Reached,
    Weights,
    guesses,
    is_expert,
    is_trained,
    lead_of,
    located,
    segments_of,
    values_of,
    why_not,
)
from torch_dcp_backport.megatron._src.stored import MODEL, Naming, naming_of
from torch_dcp_backport.transfer import Box, Problem, TensorInfo, part_of, whole

IN_MODEL_SPACE = "fully_sharded_model_space"
IN_BUCKETS = ("dp_zero_gather_scatter", "fully_sharded_bucket_space")
SHARDING = "param_state_sharding_type"
#: A state of a tensor of the model.
STATE = re.compile(r"(?:chained_(\d+)\.)?optimizer\.state\.([^.]+)\.(.+)")
#: A thing of the ranks of one TP x PP (of experts: one ETP x EP x PP).
OF_A_GROUP = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.(.+)")
BUCKET = re.compile(r"gbuf_idx_(\d+)\.dtype_\((torch\.\w+), torch\.\w+\)\.bucket_idx_(\d+)\.(\w+)")
GATHERED, LENGTHS = "param_state", "per_bucket_numel_unpadded"
#: Things of a group that are about its buckets alone.
ABOUT_BUCKETS = (GATHERED, LENGTHS, "per_bucket_numel")
#: Names of states in buckets -> in the other form.
RENAMED = {WEIGHTS: "fp32_param"}

#: (state, key of the model).
Slot = tuple[str, str]


class GroupId(NamedTuple):
    """The ranks that shared out one part of the optimizer."""

    #: Of the two optimizers of a model with experts dealt out; None where there is one.
    chained: Optional[int]
    number: int

    def __str__(self) -> str:
        prefix = "" if self.chained is None else f"chained_{self.chained}."
        return f"{prefix}optimizer.distributed.dp_group_idx_{self.number}"


@dataclass
class Source:
    """An optimizer as a checkpoint has it."""

    opened: Opened
    reader: RecordReader
    naming: Naming
    #: The model's tensors that are trained.
    weights: dict[str, Stored]
    #: Path of the optimizer in the common state -> what is there, by number for the two optimizers.
    path: tuple[Any, ...]
    common: dict[Optional[int], dict[str, Any]]

    @property
    def experts(self) -> int:
        """The number of experts of a layer; 0 of a dense model."""
        return max(
            (stored.shape[lead_of(key) - 1] for key, stored in self.weights.items() if is_expert(key)),
            default=0,
        )

    @property
    def is_split(self) -> bool:
        return None not in self.common

    @property
    def form(self) -> str:
        (form,) = {node[SHARDING] for node in self.common.values()}
        return str(form)


def source_of(opened: Opened, common: Mapping[str, Any]) -> Source:
    """Return the optimizer of a checkpoint.

    Raises:
        CheckpointingException: it has none that can be carried.
    """
    where = f"{opened.folder} has"
    nodes = dict(nodes_of(common, ()))
    if not nodes:
        raise CheckpointingException(
            f"{where} no state of Megatron's distributed optimizer (nothing named {SHARDING}); the model in "
            "it loads at any EP as it is"
        )
    numbers = [path[-1] if path and isinstance(path[-1], int) else None for path in nodes]
    if numbers not in ([None], [0, 1]) or len({path[:-1] for path in nodes}) > 1:
        raise CheckpointingException(
            f"{where} optimizers at {sorted(map(str, nodes))}: one is known, or 0 and 1"
        )
    forms = {str(node[SHARDING]) for node in nodes.values()}
    if len(forms) > 1 or not forms <= {IN_MODEL_SPACE, *IN_BUCKETS}:
        known = ", ".join((IN_MODEL_SPACE, *IN_BUCKETS))
        raise CheckpointingException(
            f"{where} an optimizer with {SHARDING} {sorted(forms)}; known are {known}"
        )
    naming = naming_of(opened.holds.tensors)
    starts = tuple(naming.prefix + name for name in MODEL)
    weights = {
        key: stored
        for key, stored in opened.holds.tensors.items()
        if key.startswith(starts) and is_trained(key)
    }
    path = next(iter(nodes))
    return Source(
        opened,
        RecordReader(opened.folder, opened.holds.is_ours),
        naming,
        weights,
        path if numbers == [None] else path[:-1],
        dict(zip(numbers, nodes.values())),
    )


def nodes_of(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield (path, dict) of the optimizers in a common state."""
    if not isinstance(value, dict):
        return
    if SHARDING in value:
        yield path, value
        return
    for name in value:
        yield from nodes_of(value[name], (*path, name))


# --- where its values are ---


class Gathered:
    """The states of a group in memory, as its first rank gathered them."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self.state = state

    def read(self, state: str, start: int, stop: int) -> torch.Tensor:
        return self.state[state][start:stop]


class InFiles:
    """The states of a buffer in stored buckets."""

    def __init__(
        self, reader: RecordReader, buckets: Sequence[Mapping[str, tuple[str, Stored]]], starts: Sequence[int]
    ) -> None:
        self.reader = reader
        self.buckets = buckets
        self.starts = starts

    def read(self, state: str, start: int, stop: int) -> torch.Tensor:
        number = max(place for place, begin in enumerate(self.starts) if begin <= start)
        key, stored = self.buckets[number][state]
        base = self.starts[number]
        box = whole(stored.shape)
        return values_of(
            self.reader,
            key,
            stored,
            box.tail(0, start - base).head(0, min(stop, base + stored.shape[0]) - start),
        )


def groups_of(source: Source) -> dict[GroupId, dict[str, str]]:
    """Return the groups of an optimizer in buckets: what each has -> the key of it."""
    groups: dict[GroupId, dict[str, str]] = {}
    holds = source.opened.holds
    for key in (*holds.tensors, *holds.objects):
        found = OF_A_GROUP.fullmatch(key.partition("/shard_")[0])
        if found is not None:
            chained = None if found[1] is None else int(found[1])
            groups.setdefault(GroupId(chained, int(found[2])), {})[found[3]] = key
    return dict(sorted(groups.items(), key=lambda item: (item[0].chained or 0, item[0].number)))


def object_of(source: Source, key: str) -> Any:
    """Return an object of a checkpoint.

    Raises:
        CheckpointingException: it cannot be read.
    """
    try:
        record = source.reader.read_object(source.opened.holds.objects[key])
        return load_object(record, key, trust=False)
    except (Damaged, OSError) as error:
        raise CheckpointingException(f"{source.opened.folder}: {error}") from error


def buffers_of(source: Source, group: GroupId, things: Mapping[str, str]) -> Iterator[Buffer]:
    """Yield the buffers of a group.

    Raises:
        CheckpointingException: they are not as Megatron saves them.
    """
    where = f"{group} of {source.opened.folder}"
    try:
        if GATHERED in things:
            yield from _gathered_buffers(group, object_of(source, things[GATHERED]))
        elif LENGTHS in things:
            yield from _stored_buffers(source, group, things)
        else:
            raise CheckpointingException(f"{where} has neither {GATHERED} nor {LENGTHS}")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointingException(
            f"{where} is not in a form of Megatron's buckets that is read: {type(error).__name__}: {error}"
        ) from error


def _gathered_buffers(group: GroupId, gathered: Any) -> Iterator[Buffer]:
    if not gathered.get("buckets_coalesced"):
        raise CheckpointingException(f"{group} is in the form of before 2024, which is not read")
    for number in sorted(key for key in gathered if isinstance(key, int)):
        for (dtype, _), state in gathered[number].items():
            tensors = {name: value for name, value in state.items() if torch.is_tensor(value)}
            name = f"{group}, buffer {number}"
            _check_lengths(name, {key: tuple(value.shape) for key, value in tensors.items()})
            states = {key: value.dtype for key, value in tensors.items()}
            yield Buffer(name, dtype, tensors[WEIGHTS].numel(), None, (), states, Gathered(tensors).read)


def _stored_buffers(source: Source, group: GroupId, things: Mapping[str, str]) -> Iterator[Buffer]:
    buffers: dict[tuple[int, str], dict[int, dict[str, str]]] = {}
    for name, key in things.items():
        found = BUCKET.fullmatch(name)
        if found is not None:
            buckets = buffers.setdefault((int(found[1]), found[2]), {})
            buckets.setdefault(int(found[3]), {})[found[4]] = key
    lengths = object_of(source, things[LENGTHS])
    for (number, dtype), buckets in sorted(buffers.items()):
        (unpadded,) = lengths[number].values()
        if sorted(buckets) != list(range(len(unpadded))):
            raise ValueError(f"buckets {sorted(buckets)} of buffer {number}, and {len(unpadded)} lengths")
        stored = [
            {
                state: (key, source.opened.holds.tensors[key].unfolded())
                for state, key in buckets[bucket].items()
            }
            for bucket in sorted(buckets)
        ]
        starts = [0]
        states = {state: bucket.dtype for state, (_, bucket) in stored[0].items()}
        for place, bucket in enumerate(stored):
            name = f"bucket {place} of buffer {number}"
            _check_lengths(name, {state: entry.shape for state, (_, entry) in bucket.items()})
            _check_states(name, states, {state: entry.dtype for state, (_, entry) in bucket.items()})
            starts.append(starts[-1] + bucket[WEIGHTS][1].shape[0])
        del starts[-1]
        yield Buffer(
            f"{group}, buffer {number}",
            getattr(torch, dtype.partition(".")[2]),
            starts[-1] + unpadded[-1],
            tuple(starts),
            tuple(start + length for start, length in zip(starts, unpadded)),
            states,
            InFiles(source.reader, stored, starts).read,
        )


def _check_lengths(name: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise a ValueError if the states of a buffer, or of a bucket, are not flat and equally long."""
    if WEIGHTS not in shapes:
        raise ValueError(f"{name} has no {WEIGHTS}, the float32 weights: it has {sorted(shapes)}")
    for state, shape in shapes.items():
        if len(shape) != 1 or shape != shapes[WEIGHTS]:
            raise ValueError(f"in {name} {state} has the shape {shape}, and {WEIGHTS} {shapes[WEIGHTS]}")


def _check_states(name: str, wanted: Mapping[str, torch.dtype], got: Mapping[str, torch.dtype]) -> None:
    """Raise a ValueError if a buffer, or a bucket, has other states than the first one."""
    if got != wanted:
        raise ValueError(f"{name} has the states {_listed(got)}, and the first one {_listed(wanted)}")


def _listed(states: Mapping[str, torch.dtype]) -> str:
    return ", ".join(f"{state} ({dtype})" for state, dtype in sorted(states.items()))


class BucketStates(NamedTuple):
    """The places of parameters in the buffers of a group, in the order of its buffers."""

    group: GroupId
    things: Mapping[str, str]
    placed: list[list[Placed]]
    #: State -> its dtype.
    states: Mapping[str, torch.dtype]


def found_in_buckets(source: Source) -> Union[list[BucketStates], Problem]:
    """Return the places of all parameters in all buckets, each compared with the weights of the model."""
    weights = Weights(source.reader, source.weights)
    groups = groups_of(source)
    if {group.chained for group in groups} != set(source.common):
        what = f"the buckets of {', '.join(map(str, groups)) or 'no group'} are not those of the optimizers"
        return Problem(what, "/".join(map(str, source.path)), expected=f"{len(source.common)} of them")
    experts = source.experts
    found: list[BucketStates] = []
    last: Optional[Guess] = None
    states: dict[str, torch.dtype] = {}
    for group, things in groups.items():
        number_of_groups = sum(other.chained == group.chained for other in groups)
        placed: list[list[Placed]] = []
        for buffer in buffers_of(source, group, things):
            states = states or dict(buffer.states)
            try:
                _check_states(buffer.name, states, buffer.states)
            except ValueError as error:
                raise CheckpointingException(f"{source.opened.folder}: {error}") from None
            best = Reached(-1, "")
            is_of_experts = group.chained == 1
            for guess in guesses(number_of_groups, group.number, experts, is_of_experts, last):
                result = located(buffer, _segments(source, guess, group), guess, weights)
                if not isinstance(result, Reached):
                    placed.append(result)
                    last = guess
                    break
                best = max(best, result, key=lambda reached: reached.at)
            else:
                return why_not(buffer, best)
        found.append(BucketStates(group, things, placed, states))
    return found


def _segments(source: Source, guess: Guess, group: GroupId) -> list[tuple[Any, ...]]:
    """Return the segments of the parameters that a group's optimizer may have.

    Raises:
        CheckpointingException: a parameter that has no known place.
    """
    share = source.experts // guess.ep

    def keep(param: Any) -> bool:
        if group.chained is None:
            return True
        if is_expert(param.key) != (group.chained == 1):
            return False
        return group.chained == 0 or int(param.lead[-1]) // share == guess.ep_rank

    try:
        return segments_of(source.weights, guess.order, keep)
    except ValueError as error:
        raise CheckpointingException(
            f"{error} of {source.opened.folder}: it is not known where Megatron lists this parameter, and so "
            f"not where the buckets have it; save once as {IN_MODEL_SPACE}"
        ) from None


# --- the target ---


@dataclass
class Carried:
    """An optimizer for another grid."""

    source: Source
    #: Whether experts have an optimizer of their own.
    is_split: bool
    #: Its tensors in the target.
    tensors: dict[str, TensorInfo]
    #: Where they are in buckets; None where they are in the other form.
    found: Optional[list[BucketStates]]
    #: The common state of the target.
    common: dict[str, Any]

    @property
    def held(self) -> int:
        """The most bytes of states that are in memory at a time: a group's record, and its tensors."""
        objects = self.source.opened.holds.objects
        gathered = [one.things[GATHERED] for one in self.found or () if GATHERED in one.things]
        return max((2 * objects[key].length for key in gathered), default=0)

    def fill(self, tensors: Mapping[str, torch.Tensor], moved: Callable[[int], object]) -> None:
        """Write the states into tensors of the target.

        Args:
            tensors: for each of `self.tensors` its memory.
            moved: called with the bytes that were written since the last time.
        """
        reader, stored_tensors = self.source.reader, self.source.opened.holds.tensors
        for key, state, weight in states_in(stored_tensors) if self.found is None else ():
            stored = stored_tensors[key].unfolded()
            target = tensors[key_of(state, weight, self.is_split)]
            for box in slabs_of(weight, stored.shape):
                values_in_box = values_of(reader, key, stored, box)
                part_of(target, whole(stored.shape), box).copy_(values_in_box)
                moved(values_in_box.nbytes)
        # Ranks of TP have the same of what is not cut, and two stages of a tied embedding.
        done: set[tuple[str, Box]] = set()
        for one in self.found or ():
            for buffer, places in zip(buffers_of(self.source, one.group, one.things), one.placed):
                new = [place for place in places if (place.key, place.box) not in done]
                done.update((place.key, place.box) for place in new)
                for (key, box, start), state in itertools.product(new, buffer.states):
                    target = tensors[key_of(RENAMED.get(state, state), key, self.is_split)]
                    values_in_box = buffer.read(state, start, start + box.numel).view(box.size)
                    part_of(target, whole(tuple(target.shape)), box).copy_(values_in_box)
                    moved(values_in_box.nbytes)

    def parts(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[ShardedTensor]:
        """Yield tensors of the target, as flattened boxes: so Megatron has them, and looks for them."""
        for key, info in self.tensors.items():
            weight, axes = weight_of(key), lead_of(weight_of(key))
            for box in boxes_of(weight, self.source.weights[weight]):
                tail = box.size[axes:]
                yield ShardedTensor(
                    key,
                    part_of(tensors[key], whole(info.shape), box).reshape(-1),
                    info.dtype,
                    tail,
                    info.shape,
                    box.offset,
                    tuple(extent // size for extent, size in zip(info.shape, box.size)),
                    prepend_axis_num=axes,
                    flattened_range=slice(0, box.numel),
                )


def boxes_of(key: str, stored: Stored) -> list[Box]:
    """Return the boxes that a state is saved in: those of the model's tensor, or of its layers and experts.

    Megatron loads a state from equal boxes alone, and gate and up, which it has apart, not from the same box.
    """
    boxes = [chunk.box for chunk in stored.chunks]
    size, axes, shape = boxes[0].size, lead_of(key), stored.shape
    is_regular = all(
        box.size == size and not any(start % extent for start, extent in zip(box.offset, size))
        for box in boxes
    )
    if is_regular and size[:axes] == (1,) * axes and not any(map(int.__mod__, shape, size)):
        return boxes
    slabs = list(slabs_of(key, shape))
    half, odd = divmod(shape[axes], 2) if len(shape) > axes else (0, 1)
    # A part of a tensor that was not cut in two has elements of both.
    if odd or any(box.offset[axes] < half < box.offset[axes] + box.size[axes] for box in boxes):
        return slabs
    return [part for slab in slabs for part in (slab.head(axes, half), slab.tail(axes, half))]


def slabs_of(key: str, shape: tuple[int, ...]) -> Iterator[Box]:
    """Yield the boxes of single layers and experts of a tensor with the model's key."""
    axes = lead_of(key)
    for lead in itertools.product(*map(range, shape[:axes])):
        yield Box((*lead, *(0 for _ in shape[axes:])), (*(1 for _ in lead), *shape[axes:]))


def key_of(state: str, key: str, is_split: bool) -> str:
    """Return the key of a state of a tensor of the model."""
    prefix = f"chained_{int(is_expert(key))}." if is_split else ""
    return f"{prefix}optimizer.state.{state}.{key}"


def weight_of(key: str) -> str:
    """Return the key of the model that a state's key has."""
    found = STATE.fullmatch(key)
    assert found is not None, "it was named so"
    return found[3]


def states_in(keys: Mapping[str, Stored]) -> Iterator[tuple[str, str, str]]:
    """Yield (key, state, key of the model) of an optimizer that is in the model's shapes."""
    for key in keys:
        found = STATE.fullmatch(key)
        if found is not None:
            yield key, found[2], found[3]


def is_of_an_optimizer(key: str) -> bool:
    """Return whether a key is of what is carried, and not copied."""
    return bool(STATE.fullmatch(key) or OF_A_GROUP.fullmatch(key.partition("/shard_")[0]))


def carried(opened: Opened, ep: int) -> Union[Carried, list[Problem]]:
    """Return a checkpoint's optimizer for a grid with some EP, or the problems that keep it from there.

    Raises:
        CheckpointingException: the checkpoint has none, or one that is not read.
    """
    common = opened.common_state()
    source = source_of(opened, common)
    experts = source.experts
    if ep > 1 and (not experts or experts % ep):
        what = (
            f"{experts} experts are not dealt out to equal parts" if experts else "the model has no experts"
        )
        return [Problem(what, "ep", f"{ep}")]
    is_split = ep > 1
    if source.form == IN_MODEL_SPACE and source.is_split == is_split:
        above = "above 1" if is_split else "1"
        return [
            Problem(
                f"the optimizer in it loads at any TP, PP and DP, and EP {above}, as it is", "ep", f"{ep}"
            )
        ]
    found = None
    tensors: dict[str, TensorInfo] = {}
    if source.form == IN_MODEL_SPACE:
        states: dict[str, dict[str, TensorInfo]] = {}
        for key, state, weight in states_in(opened.holds.tensors):
            stored = opened.holds.tensors[key]
            states.setdefault(state, {})[weight] = TensorInfo(stored.original or stored.shape, stored.dtype)
        problems = list(_not_of_the_model(source, states))
        if problems:
            return problems
        for state, weight in itertools.product(states, source.weights):
            tensors[key_of(state, weight, is_split)] = states[state][weight]
    else:
        result = found_in_buckets(source)
        if isinstance(result, Problem):
            return [result]
        found = result
        problems = list(_not_covered(source, found))
        if problems:
            return problems
        for (state, dtype), key in itertools.product(found[0].states.items(), source.weights):
            name = key_of(RENAMED.get(state, state), key, is_split)
            tensors[name] = TensorInfo(source.weights[key].shape, dtype)
    kept = _kept(source)
    for node in kept.values():
        groups_in(node)
    nodes = regrouped(kept, source, is_split)
    return Carried(source, is_split, tensors, found, _put(common, source.path, nodes))


def _not_of_the_model(source: Source, states: Mapping[str, Mapping[str, TensorInfo]]) -> Iterator[Problem]:
    """Yield problems of states in the model's shapes that are not those of exactly the model's weights."""
    if not states:
        yield Problem("the optimizer in it has no state at all")
    for state, infos in states.items():
        for weight in sorted({*infos, *source.weights}):
            if weight not in infos:
                yield Problem(f"the optimizer in it has no state {state}", weight)
            elif weight not in source.weights:
                yield Problem(f"the optimizer in it has a state {state} of what the model has not", weight)
            elif infos[weight].shape != source.weights[weight].shape:
                sizes = f"{infos[weight].shape}", f"{source.weights[weight].shape}"
                yield Problem(f"the optimizer's state {state} has another shape", weight, *sizes)


def _not_covered(source: Source, found: Sequence[BucketStates]) -> Iterator[Problem]:
    """Yield problems of parameters of which not every element is in some bucket."""
    boxes: dict[str, dict[Box, None]] = {}
    for place in itertools.chain.from_iterable(itertools.chain.from_iterable(one.placed for one in found)):
        boxes.setdefault(place.key, {})[place.box] = None
    for key, stored in source.weights.items():
        have, numel = covered(boxes.get(key, ())), math.prod(stored.shape)
        if have != numel:
            what = "not in the optimizer's buckets, or there with the same weights as another parameter"
            yield Problem(what, key, f"{have} elements", f"{numel}")


# --- what is beside the tensors ---


def _kept(source: Source) -> dict[Optional[int], dict[str, Any]]:
    """Return what an optimizer has beside its tensors, such as parameter groups; by number if it is two."""
    if source.form == IN_MODEL_SPACE:
        return {
            number: {name: value for name, value in node.items() if name != GATHERED}
            for number, node in source.common.items()
        }
    kept: dict[Optional[int], dict[str, Any]] = {}
    for group, things in groups_of(source).items():
        # The first group has what Megatron would have saved for all of them in the other form.
        if group.chained not in kept:
            names = [name for name in things if name not in ABOUT_BUCKETS and not BUCKET.fullmatch(name)]
            kept[group.chained] = {name: object_of(source, things[name]) for name in names}
    return kept


def regrouped(
    nodes: Mapping[Optional[int], Mapping[str, Any]], source: Source, is_split: bool
) -> dict[Optional[int], dict[str, Any]]:
    """Return the same of one optimizer, or of two: experts have parameter groups of their own there.

    Raises:
        CheckpointingException: it is not known which group experts are in, or theirs is like no other.
    """
    result = {number: {**node, SHARDING: IN_MODEL_SPACE} for number, node in nodes.items()}
    if source.is_split == is_split:
        return result
    if not is_split:
        first, second = (groups_in(nodes[number]) for number in (0, 1))
        for group in second:
            alone = {**group, "is_expert_parallel": False}
            if alone not in first:
                raise CheckpointingException(
                    f"the experts' parameters in {source.opened.folder} have a group of their own, which an "
                    f"optimizer at EP 1 has not: {group_text(alone)}; "
                    f"others have {'; '.join(map(group_text, first))}"
                )
        return {None: result[0]}
    groups = groups_in(nodes[None])
    # Norms and biases have one axis, and no weight decay.
    flat = {len(stored.shape) - lead_of(key) < 2 for key, stored in source.weights.items() if is_expert(key)}
    theirs: list[dict[str, Any]] = []
    for is_flat in sorted(flat):
        fitting = [
            group
            for group in groups
            if bool(group.get("wd_mult", 1.0)) != is_flat and not group.get("is_decoupled_lr")
        ]
        if len(fitting) != 1:
            raise CheckpointingException(
                f"it is not known which of {len(groups)} parameter groups in {source.opened.folder} experts "
                f"are in: {'; '.join(map(group_text, groups))}"
            )
        theirs.append({**fitting[0], "is_expert_parallel": True})
    inner = {**result[None]["optimizer"], "param_groups": theirs}
    return {0: result[None], 1: {**result[None], "optimizer": inner}}


def groups_in(node: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer's state dict.

    Raises:
        CheckpointingException: it has none.
    """
    try:
        return list(node["optimizer"]["param_groups"])
    except (KeyError, TypeError) as error:
        raise CheckpointingException(
            f"the optimizer in the checkpoint has no parameter groups: {error!r}"
        ) from None


def group_text(group: Mapping[str, Any]) -> str:
    names = ("wd_mult", "lr_mult", "is_decoupled_lr", "lr", "weight_decay", "step")
    return ", ".join(f"{name} {group[name]}" for name in names if name in group)


def _put(
    common: Mapping[str, Any], path: tuple[Any, ...], nodes: Mapping[Optional[int], dict[str, Any]]
) -> dict[str, Any]:
    """Return a common state with other things at the path of the optimizer."""
    if path:
        return {**common, path[0]: _put(common[path[0]], path[1:], nodes)}
    return dict(nodes[None]) if None in nodes else dict(nodes)  # type: ignore[arg-type]
