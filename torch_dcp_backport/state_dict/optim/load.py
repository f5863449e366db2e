"""Load optimizer state: prepare every optimizer first, write last.

The caller's dict is never changed. An optimizer is changed by its own load_state_dict() alone; where states
must exist before that, `undo` takes them back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from torch_dcp_backport import compat
from torch_dcp_backport.state_dict.collect import Path
from torch_dcp_backport.state_dict.fqn import Names
from torch_dcp_backport.state_dict.load import guarded
from torch_dcp_backport.state_dict.model import own_method
from torch_dcp_backport.state_dict.optim.flat import unflatten_optim_state
from torch_dcp_backport.state_dict.optim.form import GROUPS, PARAMS, STATE, is_numbered
from torch_dcp_backport.state_dict.optim.full import NAMES, Boxed, OptimizerLoad, paths_of
from torch_dcp_backport.state_dict.optim.get import fsdp1_group
from torch_dcp_backport.state_dict.optim.initial import Beginning, params_of
from torch_dcp_backport.state_dict.optim.split import split_optim_state
from torch_dcp_backport.state_dict.options import StateDictInfo
from torch_dcp_backport.transfer import Problem


class Prepared(NamedTuple):
    """The load of full tensors into one optimizer, of which nothing is written yet."""

    load: OptimizerLoad
    #: path -> value, what this rank has to give.
    given: Mapping[Path, Any]
    #: Takes back states that were made for the load; what load_state_dict() wrote stays.
    undo: Callable[[], None]


class PreparedPart(NamedTuple):
    """What one optimizer's own load_state_dict() gets, where nothing has to travel."""

    optim: Optimizer
    part: dict[str, Any]
    #: As above.
    undo: Callable[[], None]

    def apply(self) -> None:
        own_method(self.optim, "load_state_dict")(state_dict=self.part)


def prepare_full(
    model: nn.Module,
    optim: Optimizer,
    state_dict: Mapping[str, Any],
    info: StateDictInfo,
    problems: list[Problem],
) -> Prepared:
    """Find out what one optimizer wants and gives; what is wrong on this rank goes into `problems`.

    `problems` may be shared by the loads of several optimizers. Raises nothing but interrupts where other
    ranks take part: they come to the agreement and wait there.
    """
    sharded = any(isinstance(param, compat.DTensor) for param in params_of(optim))
    others_wait = info.broadcast_from_rank0 or (sharded and dist.is_initialized())
    beginning = Beginning(optim)
    load = OptimizerLoad(model, optim, beginning, problems, info.strict)
    given: dict[Path, Any] = {}
    try:
        with guarded(problems, others_wait):
            try:
                load.look()
            except (RuntimeError, MemoryError) as error:
                problems.append(Problem("could not make the optimizer's states", got=str(error)))
        if not problems and holds_source(info):
            try:
                if not state_dict and sharded and not info.broadcast_from_rank0:
                    raise RuntimeError("the optimizer state dict is empty")
                if state_dict and STATE in state_dict and is_numbered(state_dict):
                    state_dict = by_name(state_dict, load.names)
                part = own_part(state_dict, info, beginning, fill=False)
                given = paths_of(part)
                if part:
                    every = (fqn for names in load.names for fqn in names)
                    given[NAMES] = Boxed([fqn for fqn in every if fqn not in part[STATE]])
            except Exception as error:
                missing = isinstance(error, KeyError)
                problems.append(Problem(f"missing key {error}" if missing else str(error)))
    except BaseException:
        beginning.undo()
        raise
    return Prepared(load, given, beginning.undo)


def prepare_parts(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    state_dict: Mapping[str, Any],
    info: StateDictInfo,
    complaint: Optional[str] = None,
) -> list[PreparedPart]:
    """The parts of all optimizers of a call, before the first is written.

    Raises:
        RuntimeError: `complaint`, or missing states (strict).
        KeyError: a value of a flat dict that is not there, a parameter that the model does not have.
    """
    prepared: list[PreparedPart] = []
    begun: list[Beginning] = []
    try:
        for optim in optimizers:
            beginning = Beginning(optim)
            begun.append(beginning)
            beginning.make_states(always=bool(info.fsdp_modules))
            if complaint:
                raise RuntimeError(complaint)
            part = own_part(state_dict, info, beginning)
            if info.fsdp_modules:
                part = fsdp1_to_load(model, optim, part, info)
            prepared.append(PreparedPart(optim, part, beginning.undo))
    except BaseException:
        for beginning in begun:
            beginning.undo()
        raise
    return prepared


def load_parts(prepared: Sequence[PreparedPart]) -> None:
    """Load the parts, one optimizer after the other."""
    done = 0
    try:
        for one in prepared:
            one.apply()
            done += 1
    except BaseException:
        for one in prepared[done:]:
            one.undo()
        raise


def holds_source(info: StateDictInfo) -> bool:
    return not info.broadcast_from_rank0 or dist.get_rank() == 0


def own_part(
    state_dict: Mapping[str, Any], info: StateDictInfo, beginning: Beginning, fill: bool = True
) -> dict[str, Any]:
    """What one optimizer gets of a state dict, nested or flat; `fill` as in `unflatten_optim_state`."""
    if not state_dict:
        return {}
    if STATE in state_dict:
        return split_optim_state(beginning.optim, state_dict, info, beginning)
    return unflatten_optim_state(beginning.optim, state_dict, info, beginning, fill)


def by_name(state: Mapping[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """A state dict with parameter numbers, by the FQNs that stand at the same places."""
    numbers = [number for group in state[GROUPS] for number in group[PARAMS]]
    flat = [name for group in names for name in group]
    if len(numbers) != len(flat):
        raise RuntimeError(
            f"the state dict numbers {len(numbers)} parameters, but the optimizer has {len(flat)}; use FQNs"
        )
    sizes, own_sizes = [len(group[PARAMS]) for group in state[GROUPS]], [len(group) for group in names]
    if sizes != own_sizes:
        raise RuntimeError(
            f"the state dict has groups of {sizes} numbered parameters, but the optimizer of {own_sizes}; "
            "use FQNs"
        )
    fqn_of = dict(zip(numbers, flat))
    return {
        **state,
        STATE: {fqn_of[number]: value for number, value in state[STATE].items()},
        GROUPS: [{**group, PARAMS: own} for group, own in zip(state[GROUPS], names)],
    }


def fsdp1_to_load(
    model: nn.Module, optim: Optimizer, state: dict[str, Any], info: StateDictInfo
) -> dict[str, Any]:
    """FSDP1 maps the states to its FlatParameters itself, under names with the compiler's prefix."""
    prefixed: dict[str, str] = {}
    every = Names(model)
    for name, _ in model.named_parameters():
        plain, compiled = every.fqns(name), every.fqns(name, skip_compiler_prefix=False)
        if plain != compiled:
            (fqn,), (with_prefix,) = plain, compiled
            prefixed[fqn] = with_prefix
    if state:
        state = {
            **state,
            STATE: {prefixed.get(fqn, fqn): value for fqn, value in state[STATE].items()},
            GROUPS: [
                {**group, PARAMS: [prefixed.get(fqn, fqn) for fqn in group[PARAMS]]}
                for group in state[GROUPS]
            ],
        }
    with info.fsdp_context():
        return FullyShardedDataParallel.optim_state_dict_to_load(model, optim, state, group=fsdp1_group(info))
