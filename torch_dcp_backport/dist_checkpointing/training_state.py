"""A model and its optimizers as one sharded state dict, and back.

The only module of this room that knows what a model is; nothing else here imports it.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from torch_dcp_backport import compat
from torch_dcp_backport.dist_checkpointing._src import param_groups
from torch_dcp_backport.dist_checkpointing._src.calls import begin
from torch_dcp_backport.dist_checkpointing._src.common import digest_of, values_of
from torch_dcp_backport.dist_checkpointing._src.load import Opened
from torch_dcp_backport.dist_checkpointing._src.metadata import Stored
from torch_dcp_backport.dist_checkpointing._src.options import LOADS_THE_REST, LoadOptions, SaveOptions
from torch_dcp_backport.dist_checkpointing._src.values import naming_too_deep, resolved
from torch_dcp_backport.dist_checkpointing.core import CheckpointingException, Folder
from torch_dcp_backport.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, StateDict
from torch_dcp_backport.dist_checkpointing.serialization import (
    CANNOT_LOAD,
    full_tensor_of,
    loading,
    saving,
)
from torch_dcp_backport.dist_checkpointing.validation import StrictHandling
from torch_dcp_backport.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch_dcp_backport.state_dict.destination import local_of
from torch_dcp_backport.state_dict.optim.get import Params, named_state
from torch_dcp_backport.state_dict.optim.initial import StatesUnknown, kind_of, params_of
from torch_dcp_backport.state_dict.tree import ListIndex, place
from torch_dcp_backport.transfer import Attempt, Call, Group

__all__ = ["load_training_state", "save_training_state", "sharded_state_dict"]

Optimizers = Union[torch.optim.Optimizer, Iterable[torch.optim.Optimizer]]
#: The names under which the two halves stand, as in `dcp.save({"model": ..., "optimizer": ...})`.
MODEL, OPTIMIZER = "model", "optimizer"
STATE, GROUPS = "state", "param_groups"
#: Top-level key of a checkpoint: FQN -> form of its states (`form_of`).
FORMS = "optimizer_forms"
NUMBER = re.compile(r"0|[1-9][0-9]*", re.ASCII)
#: Top-level key of a load alone: options of param groups that earlier saves have as tensors of their own.
RATES = "tensors of param_groups"
COMPARING = "comparing the ranks' parts of the model"
TOGETHER = "putting the ranks' parts of the model together"


def sharded_state_dict(
    model: nn.Module, optimizers: Optimizers = (), *, process_group: Group = None
) -> ShardedStateDict:
    """Return a model's and its optimizers' state for `save` and `load`. Collective.

    Every tensor is a ShardedTensor whose key is its path, "model.layers.0.weight" or
    "optimizer.state.layers.0.weight.exp_avg"; its data is the local tensor itself. Learning rates and the
    like are common state, tensors among them too. Ranks may have different parts of the model, such as the
    stages of a pipeline: the common state has the values of all.

    Args:
        model: plain, or parallelised by FSDP2, TP, DDP or several of them; or this rank's stage of it.
        optimizers: all of them; states that do not exist yet are made as the first step would find them.
        process_group: the ranks that save or load together, as it is passed to `save` and `load`.

    Returns:
        {"model": ..., "optimizer": ...}; without "optimizer" where no optimizer was passed.

    Raises:
        CheckpointingException: ranks have the same parameter with different options.

    Example:
        >>> import torch
        >>> from torch_dcp_backport.dist_checkpointing.training_state import sharded_state_dict
        >>> state = sharded_state_dict(torch.nn.Linear(2, 1))
        >>> state["model"]["weight"].key, state["model"]["weight"].global_shape
        ('model.weight', (1, 2))
    """
    with begin("cannot describe the training state", "save", process_group) as call:
        with call.guard() as made:
            made.set(state_of(model, optimizers))
        halves = united(call, made)
        with call.guard() as state, naming_too_deep(halves):
            state.set(described(halves, process_group))
        call.barrier("describing")
    return state.value  # type: ignore[no-any-return]


def save_training_state(
    checkpoint_dir: Folder,
    model: nn.Module,
    optimizers: Optimizers = (),
    *,
    extra: Optional[Mapping[str, Any]] = None,
    process_group: Group = None,
    torch_metadata: bool = True,
) -> None:
    """Save a model, its optimizers and the values of `extra`. Collective.

    Args:
        checkpoint_dir: a folder that every rank sees; it has to be there.
        model: plain, or parallelised by FSDP2, TP, DDP or several of them; or this rank's stage of it.
        optimizers: all optimizers of the model, or none.
        extra: a further (sharded) state dict: step, scheduler, ShardedObjects of each rank.
        torch_metadata: as of `save`.
        process_group: the ranks that save together; None for all.

    Raises:
        CheckpointingException: as `save`.

    Example:
        >>> import os, torch
        >>> from torch_dcp_backport.dist_checkpointing import training_state
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> os.mkdir("step_7")
        >>> training_state.save_training_state("step_7", model, optimizer, extra={"step": 7})
    """
    options = SaveOptions(process_group=process_group, torch_metadata=torch_metadata)
    with options.begin() as call:
        with call.guard() as made:
            made.set(state_of(model, optimizers))
        halves = united(call, made)
    with saving(checkpoint_dir, options) as state:
        clash = sorted({MODEL, OPTIMIZER} & set(extra or {}))
        if clash:
            raise CheckpointingException(f"extra may not have {' and '.join(clash)}, which are written here")
        state.set({**dict(extra or {}), **described(halves, process_group)})


def load_training_state(
    checkpoint_dir: Folder,
    model: nn.Module,
    optimizers: Optimizers = (),
    *,
    extra: Optional[Mapping[str, Any]] = None,
    strict: Union[str, StrictHandling] = StrictHandling.RAISE_ALL,
    trust: bool = False,
    process_group: Group = None,
) -> StateDict:
    """Load what `save_training_state` wrote, on any number of ranks and any mesh. Collective.

    Parameters and states are written in place.

    Args:
        checkpoint_dir: the folder of the checkpoint; of a step of a `CheckpointHandler`, its `dist_ckpt`.
        model: as of `save_training_state`; its parameters and buffers are overwritten.
        optimizers: the optimizers whose states and options are loaded.
        extra: further sharded parts to load; common values are returned in any case.
        strict: what to do about keys that only the model or only the checkpoint has. Pass
            "raise_unexpected" to load a part of a checkpoint: a model without its optimizer, or a step of a
            `CheckpointHandler`, which also has random states.
        trust: make objects of any class, which runs what the file says.
        process_group: the ranks that load together; None for all.

    Returns:
        Everything beside the model and the optimizers: common values, and the parts of `extra`.

    Raises:
        CheckpointingException: as `load`.

    Example:
        >>> import os, torch
        >>> from torch_dcp_backport.dist_checkpointing import training_state
        >>> model = torch.nn.Linear(2, 1)
        >>> os.mkdir("step_7")
        >>> training_state.save_training_state("step_7", model, extra={"step": 7})
        >>> training_state.load_training_state("step_7", model)
        {'step': 7}
    """
    options = LoadOptions(strict=strict, trust=trust, process_group=process_group, advice=LOADS_THE_REST)
    with begin(CANNOT_LOAD, "load", process_group) as call:
        with call.guard() as made:
            made.set(state_of(model, optimizers))
        others = names_of_others(call, made)
    state = made.value
    with loading(checkpoint_dir, options) as load:
        state.pop(FORMS, None)
        if OPTIMIZER in state:
            states = state[OPTIMIZER][STATE]
            take_states_of_checkpoint(states, model, optimizers, load.checkpoint, trust)
        load.ask({**dict(extra or {}), **asked_of(state, load.checkpoint, process_group, trust)})
    loaded = load.result
    if isinstance(loaded, tuple):
        loaded = loaded[0]
    restored = restored_from(state, loaded, others.plain)
    if OPTIMIZER in state:
        halves = {"model_state_dict": restored[MODEL], "optim_state_dict": restored[OPTIMIZER]}
        set_state_dict(model, optimizers, **halves)
    else:
        set_model_state_dict(model, restored[MODEL])
    return {key: value for key, value in loaded.items() if key not in (MODEL, OPTIMIZER, FORMS)}


def state_of(model: nn.Module, optimizers: Optimizers) -> dict[str, Any]:
    """Return the two state dicts, with DTensors; and the forms of states, where a checkpoint needs them."""
    all_optimizers = (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else tuple(optimizers)
    if not all_optimizers:
        return {MODEL: get_model_state_dict(model)}
    try:
        model_state, optimizer_state = get_state_dict(model, all_optimizers)
    except StatesUnknown:
        if FullyShardedDataParallel.fsdp_modules(model):
            raise
        # A load takes their states from the checkpoint (`take_states_of_checkpoint`).
        model_state, optimizer_state = get_model_state_dict(model), known_states(model, all_optimizers)
    if GROUPS in optimizer_state:
        # verl's trainers hand on lists of their configuration: betas.
        optimizer_state[GROUPS] = resolved(optimizer_state[GROUPS], GROUPS)
    forms = forms_of(model, all_optimizers, optimizer_state)
    more = {} if forms is None else {FORMS: forms}
    return {MODEL: model_state, OPTIMIZER: optimizer_state, **more}


def known_states(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return the optimizers' state dict without the states that only a step with a closure can make."""
    result: dict[str, Any] = {STATE: {}, GROUPS: []}
    params = Params(model)
    for optimizer in optimizers:
        try:
            part = get_optimizer_state_dict(model, optimizer)
        except StatesUnknown:
            part = named_state(params, optimizer)
        result[STATE].update(part[STATE])
        result[GROUPS].extend(part[GROUPS])
    return result


def united(call: Call, made: Attempt[dict[str, Any]]) -> dict[str, Any]:
    """Return the two state dicts with the plain values of all ranks. Collective.

    The common state is saved by the first rank alone: a stage of a pipeline would lose its param groups and
    the extra state of its modules. Where all ranks have the same values, only a digest travels.

    Args:
        made: this rank's state dicts; an error in making them is raised on every rank.

    Raises:
        CheckpointingException: ranks have the same parameter with different options.
    """
    with call.guard() as plain:
        plain.set(plain_of(made.value))
    if are_alike(call, plain, COMPARING):
        return made.value
    return put_together(call, made.value, plain.value)


def put_together(call: Call, halves: dict[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the two state dicts with the plain values of all ranks, which differ. Collective.

    Args:
        halves: this rank's state dicts.
        plain: `plain_of` them.

    Raises:
        CheckpointingException: ranks have the same parameter with different options.
    """

    def union(plain_by_rank: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for rank in sorted(plain_by_rank):
            result = filled(result, plain_by_rank[rank])
        if OPTIMIZER in result:
            groups = {rank: own[OPTIMIZER].get(GROUPS, []) for rank, own in plain_by_rank.items()}
            result[OPTIMIZER][GROUPS] = param_groups.united(groups)
        return result

    everything = call.gather_object(TOGETHER, plain, union)
    together = filled(halves, everything)
    if OPTIMIZER in together:
        together[OPTIMIZER] = {**together[OPTIMIZER], GROUPS: everything[OPTIMIZER][GROUPS]}
    return together


def are_alike(call: Call, value: Attempt[Any], doing: str) -> bool:
    """Return whether all ranks have the same value: nested dicts and lists of others. Collective.

    Args:
        value: the attempt to make it.
        doing: the step under way, for errors.
    """
    with call.guard() as digest, naming_too_deep(value.value):
        digest.set(digest_of(values_of(value.value)))
    return call.gather_object(doing, digest, lambda digests: len(set(digests.values())) == 1)


def plain_of(halves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the two state dicts that are no tensors, and the param groups with theirs."""
    plain = _without_tensors(halves)
    if OPTIMIZER in halves:
        plain.setdefault(OPTIMIZER, {})[GROUPS] = halves[OPTIMIZER].get(GROUPS, [])
    return plain


def _without_tensors(value: Any) -> dict[Any, Any]:
    kept: dict[Any, Any] = {}
    for key, part in value.items():
        if type(part) in (dict, OrderedDict):
            below = _without_tensors(part)
            if below or not part:
                kept[key] = below
        elif not isinstance(part, torch.Tensor) and key != GROUPS:
            kept[key] = part
    return kept


def filled(value: Mapping[Any, Any], more: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return nested dicts with the values of others that they lack."""
    result = dict(value)
    for key, part in more.items():
        if key not in result:
            result[key] = part
        elif isinstance(result[key], dict) and isinstance(part, dict):
            result[key] = filled(result[key], part)
    return result


class RankNames(NamedTuple):
    """What a rank has of the two state dicts, and of the parameters: names alone."""

    #: Paths of tensors, as `described` spells them.
    tensors: frozenset[str] = frozenset()
    #: Keys of the model's values that are no tensors.
    plain: frozenset[str] = frozenset()
    #: Parameters that are not trained.
    frozen: frozenset[str] = frozenset()


def names_of_others(call: Call, halves: Attempt[dict[str, Any]], frozen: Collection[str] = ()) -> RankNames:
    """Return what other ranks have, and this rank has not: the stages of a pipeline. Collective.

    A load leaves it to these; what no rank has is missing.
    """
    own = call.attempt(names_held, halves, frozen)
    names = call.attempt(lambda held: [sorted(part) for part in held], own)
    if are_alike(call, names, COMPARING):
        return RankNames()
    return names_lacking(call, own.value)


def names_held(halves: Mapping[str, Any], frozen: Collection[str] = ()) -> RankNames:
    """Return what this rank has: the names in its two state dicts, and those of parameters."""
    plain = frozenset(_without_tensors(halves.get(MODEL, {})))
    return RankNames(frozenset(_tensor_paths(halves, "")), plain, frozenset(frozen))


def names_lacking(call: Call, held: RankNames) -> RankNames:
    """Return what other ranks have, and this rank has not, where ranks differ. Collective."""

    def lacking(held_by_rank: Mapping[int, RankNames]) -> dict[int, RankNames]:
        every = RankNames(*(frozenset().union(*sets) for sets in zip(*held_by_rank.values())))
        return {
            rank: RankNames(*(all_of - own for all_of, own in zip(every, names)))
            for rank, names in held_by_rank.items()
        }

    others: RankNames = call.scatter_object(COMPARING, held, lacking)
    return others


def _tensor_paths(value: Any, path: str) -> Iterator[str]:
    """Yield the paths that `described` gives to tensors."""
    return (key for key, _ in _tensors(value, path))


def _tensors(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a state dict, each with its path."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif path != f"{OPTIMIZER}.{GROUPS}":
        parts = value.items() if type(value) in (dict, OrderedDict) else ()
        parts = enumerate(value) if type(value) is list else parts
        for name, part in parts:
            yield from _tensors(part, joined(path, name))


def asked_of(state: Mapping[str, Any], checkpoint: Opened, group: Group, trust: bool) -> ShardedStateDict:
    """Return what a load of the two state dicts asks of a checkpoint.

    Raises:
        CheckpointingException: the options of param groups cannot be given to the groups of today.
    """
    asked: ShardedStateDict = described(state, group)
    prefix = f"{OPTIMIZER}.{GROUPS}."
    rates = [key for key in checkpoint.holds.tensors if OPTIMIZER in state and key.startswith(prefix)]
    if rates:
        # Earlier saves have a learning rate that is a tensor among the tensors.
        asked[RATES] = {key: full_tensor_of(key, checkpoint.holds.tensors[key]) for key in rates}
    if OPTIMIZER in state:
        common = checkpoint.common_state(trust)
        saved = common.get(OPTIMIZER, {}) if isinstance(common, dict) else {}
        param_groups.check(saved.get(GROUPS, []), state[OPTIMIZER][GROUPS])
    return asked


def form_of(states: Any) -> Any:
    """Return nested dicts and lists of a parameter's states, with True for tensors and None for others."""
    if type(states) in (dict, OrderedDict):
        return {key: form_of(part) for key, part in states.items()}
    if type(states) is list:
        return [form_of(part) for part in states]
    return True if isinstance(states, torch.Tensor) else None


def forms_of(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], named: Mapping[str, Any]) -> Any:
    """Return FQN -> form of its states, of optimizers whose states only their own code knows; None if none.

    A checkpoint has tensors by dotted keys, which do not tell a list from a dict, nor that a state is gone.

    Args:
        named: the optimizers' state dict.
    """
    params = open_ended(model, optimizers)
    if params is None:
        return None
    return {fqn: form_of(named[STATE][fqn]) for fqn in params if named[STATE].get(fqn)}


def open_ended(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> Optional[dict[str, torch.Tensor]]:
    """Return FQN -> parameter, of optimizers that are none of torch's usual ones; None without any.

    Of FSDP1 none is returned: its state dicts have tensors of their own.
    """
    others = [optimizer for optimizer in optimizers if kind_of(optimizer) is None]
    if not others or FullyShardedDataParallel.fsdp_modules(model):
        return None
    fqns = Params(model).fqns
    return {fqns[param]: param for optimizer in others for param in params_of(optimizer) if param in fqns}


def take_states_of_checkpoint(
    states: dict[str, Any],
    model: nn.Module,
    optimizers: Optimizers,
    checkpoint: Opened,
    trust: bool,
) -> None:
    """Replace states that the checkpoint has in another form than an optimizer by new tensors for them.

    Only a step makes the states of an optimizer that is not one of torch's usual ones: it may fail without a
    closure (LBFGS, SAM), and later steps may make others (a history). The checkpoint says what there is, as a
    state dict says it to `load_state_dict()`. A state of its parameter's shape is cut as the parameter is.

    Args:
        states: FQN -> states, of a state dict of `state_of`; changed.
    """
    all_optimizers = (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else tuple(optimizers)
    params = open_ended(model, all_optimizers)
    if params is None:
        return
    common = checkpoint.common_state(trust)
    forms = common.get(FORMS) if isinstance(common, dict) else None
    if forms is None:
        forms = {
            **{fqn: form_of(states[fqn]) for fqn in params if fqn in states},
            **guessed(params, checkpoint),
        }
    prefix = f"{OPTIMIZER}.{STATE}."
    stored = checkpoint.holds.tensors
    for fqn, param in params.items():
        own, form = states.get(fqn, {}), forms.get(fqn, {})
        shapes = {key: value.shape for key, value in _tensors(own, f"{prefix}{fqn}")}
        is_alike = all(key in stored and shape == tuple(stored[key].shape) for key, shape in shapes.items())
        if form_of(own) == form and is_alike:
            continue
        states.pop(fqn, None)
        if form:
            states[fqn] = _wanted(form, f"{prefix}{fqn}", param, stored)


def _wanted(form: Any, path: str, param: torch.Tensor, stored: Mapping[str, Stored]) -> Any:
    """Return a form with new tensors, and None for values that come from the common state."""
    if isinstance(form, dict):
        return {key: _wanted(part, joined(path, key), param, stored) for key, part in form.items()}
    if isinstance(form, list):
        return [_wanted(part, joined(path, number), param, stored) for number, part in enumerate(form)]
    if form is not True:
        return None
    if path not in stored:
        raise CheckpointingException(f"the checkpoint has no {path}, which its optimizer's states name")
    return _like(param, torch.Size(stored[path].shape), stored[path].dtype)


def guessed(params: Collection[str], checkpoint: Opened) -> dict[str, Any]:
    """Return FQN -> form of its states by their keys alone, where these tell more than the optimizer does.

    Of a checkpoint of release 0.1, which has no forms: numbers from 0 on are the places of a list.
    """
    prefix = f"{OPTIMIZER}.{STATE}."
    forms: dict[str, Any] = {}
    for key in checkpoint.holds.tensors:
        parts = key[len(prefix) :].split(".") if key.startswith(prefix) else []
        for length in range(len(parts) - 1, 0, -1):
            fqn = ".".join(parts[:length])
            if fqn in params:
                steps = (ListIndex(step) if NUMBER.fullmatch(step) else step for step in parts[length:])
                place(forms.setdefault(fqn, {}), tuple(steps), True)
                break
    return forms


def _like(param: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    if param.shape != shape:
        # On the CPU: the optimizer's own load_state_dict() moves it, or leaves it there (a count of steps).
        return torch.empty(shape, dtype=dtype, device="cpu")
    local = torch.empty_like(local_of(param), dtype=dtype, requires_grad=False)
    return compat.wrap_local(local, param) if isinstance(param, compat.DTensor) else local


def restored_from(state: Mapping[str, Any], loaded: StateDict, others: Collection[str]) -> dict[str, Any]:
    """Return the two state dicts after a load: tensors filled in place, other values from the checkpoint.

    Args:
        others: keys of the model's plain values that other ranks have, of `names_of_others`.
    """
    rates = loaded.pop(RATES, {})
    restored = {key: restored_of(part, loaded[key]) for key, part in state.items()}
    if MODEL in restored and others:
        restored[MODEL] = {key: part for key, part in restored[MODEL].items() if key not in others}
    if OPTIMIZER in restored:
        groups = loaded[OPTIMIZER].get(GROUPS, [])
        for key, value in rates.items():
            number, _, name = key[len(f"{OPTIMIZER}.{GROUPS}.") :].partition(".")
            groups[int(number)][name] = value
        restored[OPTIMIZER][GROUPS] = list(param_groups.placed(groups, state[OPTIMIZER][GROUPS]))
    return restored


def described(value: Any, group: Group, path: str = "") -> Any:
    """Return the same structure with a ShardedTensor for every tensor, but those of param groups.

    A learning rate may be a number at the save and a tensor at the load, or the other way round.
    """
    if isinstance(value, torch.Tensor):
        return ShardedTensor.from_dtensor(path, value, process_group=group)
    if path == f"{OPTIMIZER}.{GROUPS}":
        return value
    if type(value) in (dict, OrderedDict):
        return {key: described(part, group, joined(path, key)) for key, part in value.items()}
    if type(value) is list:
        return [described(part, group, joined(path, number)) for number, part in enumerate(value)]
    return value


def joined(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def restored_of(asked: Any, loaded: Any) -> Any:
    """Return the loaded values, with the tensors that were asked for: they were filled in place.

    Values that only the checkpoint has, such as those of another release's optimizer, are there too.
    """
    if isinstance(asked, torch.Tensor):
        return asked
    if type(asked) in (dict, OrderedDict) and isinstance(loaded, dict):
        parts = {key: restored_of(asked[key], loaded[key]) for key in asked if key in loaded}
        restored = {**parts, **{key: value for key, value in loaded.items() if key not in asked}}
        # Of a form that was guessed.
        if any(isinstance(key, ListIndex) for key in asked) and set(restored) == set(range(len(restored))):
            return [restored[number] for number in range(len(restored))]
        return restored
    if type(asked) is list and isinstance(loaded, list) and len(asked) == len(loaded):
        return [restored_of(part, other) for part, other in zip(asked, loaded)]
    return loaded
