"""Further objects of a training in a step, `CheckpointHandler(..., state={"ema": ema})`, and back.

Knows an object by its `state_dict()` and `load_state_dict()` alone. Must never change an object before all
ranks have read what they need for all objects.
"""

from __future__ import annotations

import functools
import logging
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch

from torch_dcp_backport import compat
from torch_dcp_backport.checkpoint._src.extra import has_state
from torch_dcp_backport.checkpoint._src.together import CANNOT_LOAD, CANNOT_SAVE, place_in, writing_in
from torch_dcp_backport.dist_checkpointing import (
    CheckpointingException,
    LoadOptions,
    SaveOptions,
    ShardedObject,
    ShardedTensor,
    begin,
    digest_of,
    load_common_state_dict,
    part_of_this_rank,
    values,
    values_of,
)
from torch_dcp_backport.dist_checkpointing.serialization import loading, saving
from torch_dcp_backport.transfer import Call, Group, Problem, as_bytes, groups_of

logger = logging.getLogger("torch_dcp_backport.checkpoint")

#: Folder of a step.
USER_STATE = "user_state"
#: Keys of its common state: name -> number of ranks whose states differ, 0 where all have the same one; the
#: states that are the same on all ranks, packed.
WORLDS, STATES = "worlds", "states"
#: Keys of its tensors, and of the states of ranks that differ.
TENSORS, OWN = "tensors", "own"

#: The keys that lead to a value in nested dicts and lists.
Keys = tuple[Any, ...]


class UsersError(CheckpointingException):
    """An error of what the program asks for, or of an object of its own: no step is at fault."""


class Parts(NamedTuple):
    """The state of an object, taken apart."""

    #: The state with None for each tensor that is saved as a tensor.
    rest: Any
    #: Key of a tensor -> where it stands, and the tensor itself.
    tensors: dict[str, tuple[Keys, torch.Tensor]]

    @property
    def places(self) -> list[tuple[str, Keys, bool]]:
        """The key of each tensor, the keys that lead to it, and whether it is a DTensor."""
        return [(key, path, is_sharded(tensor)) for key, (path, tensor) in self.tensors.items()]

    def packed(self) -> bytes:
        """Return the rest, and the places of the tensors, as bytes: their structure comes back as it was."""
        return values.dumps([self.rest, self.places])


def check_names(state: object) -> dict[str, Any]:
    """Return the objects by name.

    Raises:
        ValueError: not a mapping of names to objects with `state_dict()` and `load_state_dict()`.
    """
    if state is None:
        return {}
    if not isinstance(state, Mapping):
        raise ValueError(f"state={type(state).__name__}: expected a mapping of names to objects")
    for name, value in state.items():
        if not isinstance(name, str) or not name:
            raise ValueError(f"state has the name {name!r}: expected a text")
        if not has_state(value):
            raise ValueError(
                f"state[{name!r}], a {type(value).__name__}, has no state_dict() and load_state_dict()"
            )
    return dict(state)


# --- Taking a state apart, and putting it together ---


def is_sharded(value: object) -> bool:
    return isinstance(value, compat.DTensor)


def ranks_of(value: Any) -> list[int]:
    """Return the ranks of a DTensor's mesh."""
    return sorted(value.device_mesh.mesh.flatten().tolist())


def is_plain(value: Any) -> bool:
    """Return whether a value is a tensor that a sharded checkpoint can have, the same on every rank."""
    is_known = type(value) in (torch.Tensor, torch.nn.Parameter)
    return is_known and value.layout is torch.strided and not (value.is_meta or value.is_quantized)


def leaves(value: Any, path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield the values of nested dicts and lists, with their paths. A tuple is a value."""
    if type(value) in (dict, OrderedDict):
        for key, part in value.items():
            yield from leaves(part, (*path, key))
    elif type(value) is list:
        for number, part in enumerate(value):
            yield from leaves(part, (*path, number))
    else:
        yield path, value


def with_values(value: Any, replaced: Mapping[Keys, Any], path: Keys = ()) -> Any:
    """Return nested dicts and lists with other values at some paths; dicts and lists are new ones."""
    if type(value) in (dict, OrderedDict):
        return type(value)((key, with_values(part, replaced, (*path, key))) for key, part in value.items())
    if type(value) is list:
        return [with_values(part, replaced, (*path, number)) for number, part in enumerate(value)]
    return replaced.get(path, value)


def parts_of(name: str, state: Any, *, sharded_alone: bool, is_of_mesh: bool = False) -> Parts:
    """Take a state apart.

    Args:
        name: the name of the object.
        state: the result of its `state_dict()`.
        sharded_alone: leave plain tensors in the rest.
        is_of_mesh: a DTensor of another mesh is another tensor, and has the ranks of its mesh in its key.
    """
    tensors: dict[str, tuple[Keys, torch.Tensor]] = {}
    # A name ends at the first dot: "a" with "b.c" is no other object's, such as "a.b" with "c".
    first = name.replace("%", "%25").replace(".", "%2E")
    for path, value in leaves(state):
        if is_sharded(value) or (not sharded_alone and is_plain(value)):
            key = ".".join(map(str, (first, *path)))
            if is_of_mesh and is_sharded(value):
                key = f"{key}@{'-'.join(map(str, ranks_of(value)))}"
            stem = key
            # Two paths may be spelled alike: ("a.b",) and ("a", "b"), or the keys 0 and "0".
            while key in tensors:
                stem, key = key, f"{stem}'"
            tensors[key] = path, value.detach()
    return Parts(with_values(state, {path: None for path, _ in tensors.values()}), tensors)


# --- Saving ---


def save(objects: Mapping[str, Any], draft: Path, trust: bool, group: Group) -> None:
    """Save the states of objects into a step. Collective.

    A DTensor is saved by its shards. All else that is the same on every rank is saved once, and loads on any
    number of ranks; where it differs, each rank's is saved, and loads on as many ranks. DTensors of one name
    on meshes of other ranks are copies if they hold the same values, as under DDP, and else each a tensor of
    its own, as of the stages of a pipeline.

    Args:
        objects: name -> object; the same names on every rank, as the save has compared them.
        draft: the folder of the step, which is being written.
        trust: save objects of any class within states.
        group: the ranks that save together.

    Raises:
        CheckpointingException: an object's code failed, or its state would not load again; on every rank.
    """
    rank, world = place_in(group)
    if not objects:
        return
    with begin(CANNOT_SAVE, "save", group) as call:
        # Before any code of the objects, which may be collective: a rank that failed does not come there.
        call.barrier("waiting to save the user's state")
        states = call.attempt(states_of, objects)
        with call.guard() as own, values.naming_too_deep({"state": states.value}):
            own.set({name: marks_of(name, state, group) for name, state in states.value.items()})
        kinds = call.gather_object("comparing the user's state", own, kinds_of)
        is_alike = {name: alike for name, (alike, _) in kinds.items()}
        is_of_mesh = {name: differs for name, (_, differs) in kinds.items()}
    writing = writing_in(draft)
    path = draft / USER_STATE
    options = SaveOptions(
        must_load=not trust,
        process_group=group,
        written=functools.partial(writing.note, path),
        torch_metadata=writing.torch_metadata,
    )
    # Where there are requests, the engine saves in the background, on every rank.
    with saving(path, options, writing.requests or None) as state:
        writing.make_folder(path)
        alike, differing, tensors = dict[str, bytes](), dict[str, Any](), dict[str, Any]()
        for name in sorted(objects):
            parts = parts_of(
                name,
                states.value[name],
                sharded_alone=not is_alike[name],
                is_of_mesh=is_of_mesh[name],
            )
            packed = parts.packed()
            reason = "" if trust else values.why_not_loadable(packed)
            if reason:
                key = values.key_of(parts.rest, values.cannot_be_loaded)
                where = f"{key}: " if key else ""
                raise CheckpointingException(f"state[{name!r}] would not load again: {where}{reason}")
            if is_alike[name]:
                alike[name] = packed
            else:
                differing[name] = ShardedObject(f"{OWN}.{name}", packed, (world,), (rank,))
            for key, (_, tensor) in parts.tensors.items():
                tensors[key] = ShardedTensor.from_dtensor(f"{TENSORS}.{key}", tensor, process_group=group)
        worlds = {name: 0 if is_alike[name] else world for name in objects}
        state.set({WORLDS: worlds, STATES: alike, OWN: differing, TENSORS: tensors})


def states_of(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of objects, in the order of their names: their code may run collectives.

    So it is called once for each object, on every rank: also of those behind one that fails.
    """
    states, failures = dict[str, Any](), list[Exception]()
    for name in sorted(objects):
        try:
            states[name] = objects[name].state_dict()
        except Exception as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return states


def names_of(objects: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of objects as ranks compare them."""
    return {"state": ", ".join(sorted(objects))}


def digest(name: str, state: Any) -> bytes:
    """Return the digest of a state, in which a DTensor stands for its place alone."""
    parts = parts_of(name, state, sharded_alone=True)
    return digest_of(values_of([parts.rest, parts.places]))


class Marks(NamedTuple):
    """What ranks compare of an object's state."""

    #: Of the state, in which a DTensor stands for its place alone.
    digest: bytes
    #: Key, layout and box of this rank's shards -> a checksum: of DTensors whose mesh lacks a rank.
    shards: Mapping[tuple[Any, ...], int]


def marks_of(name: str, state: Any, group: Group) -> Marks:
    """Return what ranks compare of an object's state."""
    _, world = place_in(group)
    shards: dict[tuple[Any, ...], int] = {}
    tensors: Mapping[str, tuple[Keys, Any]] = parts_of(name, state, sharded_alone=True).tensors
    for key, (_, tensor) in tensors.items():
        if len(ranks_of(tensor)) < world:
            part = part_of_this_rank(key, tensor, group)
            crc = zlib.crc32(as_bytes(part.local.contiguous().cpu()).numpy().data)
            layout = tuple(tensor.shape), tuple(tensor.device_mesh.mesh.shape), str(tensor.placements)
            shards[key, layout, tuple(part.box.offset), tuple(part.box.size)] = crc
    return Marks(digest(name, state), shards)


def differ(shards_by_rank: Iterable[Mapping[tuple[Any, ...], int]]) -> bool:
    """Return whether ranks have other values, or another layout, under the same key."""
    crcs: dict[tuple[Any, ...], int] = {}
    layouts: dict[str, Any] = {}
    for shards in shards_by_rank:
        for place, crc in shards.items():
            key, layout, *_ = place
            if crcs.setdefault(place, crc) != crc or layouts.setdefault(key, layout) != layout:
                return True
    return False


# --- Loading ---


def kinds_of(marks_by_rank: Mapping[int, Mapping[str, Marks]]) -> dict[str, tuple[bool, bool]]:
    """Return for each name whether all ranks have the same state, and whether copies in it differ."""
    every = list(marks_by_rank.values())
    kinds = {}
    for name in every[0]:
        is_same = all(own[name].digest == every[0][name].digest for own in every)
        is_differing = differ([own[name].shards for own in every])
        kinds[name] = is_same and not is_differing, is_differing
    return kinds


class Saved(NamedTuple):
    """What a step has of the objects, once it is known to fit them."""

    folder: Path
    #: Name -> number of ranks whose states differ; 0 where all have the same.
    worlds: Mapping[str, int]
    #: The objects to load, and their states of today.
    objects: Mapping[str, Any]
    states: Mapping[str, Any]


def begin_users(group: Group) -> Call:
    """Begin a call whose errors are the program's own."""
    return Call(CANNOT_LOAD, "load", groups_of(group), kind=UsersError)


def saved_worlds(step: Path) -> dict[str, int]:
    """Return name -> the number of ranks with states of their own, 0 where all have one, of a step's objects.

    Raises:
        CheckpointingException: the folder is damaged.
    """
    folder = step / USER_STATE
    return dict(load_common_state_dict(folder)[WORLDS]) if folder.is_dir() else {}


def opened(
    objects: Mapping[str, Any],
    step: Path,
    worlds: Mapping[str, int],
    group: Group,
    left_out: Sequence[str] = (),
) -> Saved:
    """Compare the objects with what a step has of them, before anything is loaded. Collective.

    Args:
        objects: name -> object; on every rank there are some, or on none.
        step: the folder of the step.
        worlds: `saved_worlds` of the step.
        group: the ranks that load together.
        left_out: names that are not to be loaded.

    Raises:
        UsersError: the step lacks an object, or has states of another number of ranks.
    """
    folder = step / USER_STATE
    wanted = {name: value for name, value in objects.items() if name not in left_out}
    with begin_users(group) as call:
        _, world = place_in(group)
        held = f"it has {', '.join(sorted(worlds)) or 'none'}"
        for name in sorted(wanted):
            saved_by = worlds.get(name)
            if saved_by is None:
                what = f"{step.name} has no state of it ({held}); leave it out of state= for this load"
                call.problems.append(Problem(what, f"state[{name!r}]"))
            elif saved_by not in (0, world):
                what = "saved with states that differ between ranks, and loaded by another number of ranks"
                call.problems.append(Problem(what, f"state[{name!r}]", f"{world} ranks", f"{saved_by} ranks"))
        if objects:
            # As in a save.
            call.barrier("comparing the names of the user's state", must_agree=names_of(wanted))
        states = call.attempt(states_of, wanted)
        if wanted:
            call.barrier("comparing the user's state")
    surplus = sorted(set(worlds) - set(wanted))
    if surplus:
        logger.warning(
            "%s: not loaded, as state= does not have it, or exclude has it: %s", step, ", ".join(surplus)
        )
    return Saved(folder, worlds, wanted, states.value)


def load(saved: Saved, trust: bool, group: Group) -> None:
    """Load the objects. Collective.

    Raises:
        CheckpointingException: the files are damaged; on every rank. No object was changed.
        UsersError: an object's code failed, or there is no saying where a tensor is to live.
    """
    if not saved.objects:
        return
    rank, world = place_in(group)
    options = LoadOptions(strict="raise_unexpected", trust=trust, process_group=group)
    differing = [name for name in sorted(saved.objects) if saved.worlds[name]]
    with loading(saved.folder, options) as load:
        load.ask(
            {name: ShardedObject(f"{OWN}.{name}", None, (saved.worlds[name],), (rank,)) for name in differing}
        )
    loaded = load.result
    rests: dict[str, Any] = {}
    targets: dict[str, dict[Keys, torch.Tensor]] = {name: {} for name in saved.objects}
    misfits: list[Problem] = []
    with loading(saved.folder, options) as load:
        checkpoint, asked = load.checkpoint, {}
        for name in sorted(saved.objects):
            packed = loaded[name] if saved.worlds[name] else loaded[STATES][name]
            rests[name], places = values.loads(packed, trust)
            today = dict(leaves(saved.states[name]))
            for key, path, was_sharded in places:
                stored, now = checkpoint.holds.tensors.get(f"{TENSORS}.{key}"), today.get(tuple(path))
                if stored is None:
                    raise CheckpointingException(f"{saved.folder} has no tensor {key}")
                misfit = misfit_of(key, now, tuple(stored.shape), was_sharded and world > 1)
                if misfit is not None:
                    misfits.append(misfit)
                    continue
                made = made_like(now, stored.shape, stored.dtype)
                targets[name][tuple(path)] = made
                asked[key] = ShardedTensor.from_dtensor(f"{TENSORS}.{key}", made, process_group=group)
        load.ask(asked)
    with begin_users(group) as call:
        call.problems += misfits
        call.barrier("placing the user's state")
        for name in sorted(saved.objects):
            # One that fails keeps no rank from the others.
            with call.guard(), torch.no_grad():
                saved.objects[name].load_state_dict(with_values(rests[name], targets[name]))
        call.barrier("loading the user's state", so_far="values may have been loaded in part")


def misfit_of(key: str, now: Any, shape: tuple[int, ...], was_sharded: bool) -> Optional[Problem]:
    """Return why a saved tensor has no place in an object of today; None where it has.

    Args:
        was_sharded: whether it was a DTensor, and is loaded by several ranks.
    """
    if is_sharded(now) and tuple(now.shape) != shape:
        what = "a DTensor of another shape than the tensor in the checkpoint"
        return Problem(what, key, f"{tuple(now.shape)}", f"{shape}")
    if was_sharded and not isinstance(now, torch.Tensor):
        # An optimizer without states yet would take whole tensors on every rank.
        what = "saved in shards, and the object has no tensor there yet that says where they go"
        return Problem(f"{what}: make its state before the load", key)
    return None


def made_like(now: Any, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return memory for a saved tensor, spread as today's value is; whole where that is no DTensor."""
    if is_sharded(now):
        return torch.empty_like(now, dtype=dtype)
    device = now.device if isinstance(now, torch.Tensor) and not now.is_meta else torch.device("cpu")
    return torch.empty(tuple(shape), dtype=dtype, device=device)
