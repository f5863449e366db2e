"""Load optimizer states: prepare every optimizer first, write last.

The caller's dict is never changed. An optimizer is changed by its own load_state_dict() alone; where states
must exist before that, `Beginning.undo` takes them back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Optional

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from torch_dcp_backport import compat
from torch_dcp_backport.state_dict import fsdp1
from torch_dcp_backport.state_dict.form import GROUPS, PARAMS, STATE, is_numbered, renamed_params
from torch_dcp_backport.state_dict.load import Inventory, guarded
from torch_dcp_backport.state_dict.optim.absent import raise_missing
from torch_dcp_backport.state_dict.optim.flat import unflatten_optim_state
from torch_dcp_backport.state_dict.optim.get import Params
from torch_dcp_backport.state_dict.optim.initial import Beginning, params_of, undone_if_failed
from torch_dcp_backport.state_dict.optim.own import call_load, load_into, restore_texts
from torch_dcp_backport.state_dict.optim.plan import (
    STATELESS,
    GroupValue,
    OptimOutline,
    OptimPlan,
    outline_of,
    paths_of,
    plan_optimizer,
)
from torch_dcp_backport.state_dict.optim.split import split_optim_state
from torch_dcp_backport.state_dict.options import StateDictInfo
from torch_dcp_backport.state_dict.patched import original_method
from torch_dcp_backport.state_dict.tree import Path
from torch_dcp_backport.transfer import Call, Problem, source_of

TITLE = "cannot load this optimizer state dict"


def prepare_full(
    params: Params,
    beginning: Beginning,
    state_dict: Mapping[str, Any],
    info: StateDictInfo,
    problems: list[Problem],
) -> tuple[OptimPlanner, dict[Path, Any]]:
    """Prepare a load into one optimizer: its planner, and path -> value that this rank has for it.

    `problems` of this rank may be shared by the loads of several optimizers. Raises nothing but interrupts
    where other ranks take part: they wait in the agreement.
    """
    sharded = any(isinstance(param, compat.DTensor) for param in params_of(beginning.optim))
    others_wait = info.broadcast_from_rank0 or (sharded and dist.is_initialized())
    outline = OptimOutline(beginning, info.strict)
    values: dict[Path, Any] = {}
    with guarded(problems, others_wait):
        try:
            outline = outline_of(params, beginning, info.strict)
        except (RuntimeError, MemoryError) as error:
            problems.append(Problem("could not make the optimizer's states", got=str(error)))
    if not problems and (not info.broadcast_from_rank0 or dist.get_rank() == source_of(None)):
        try:
            if not state_dict and sharded and not info.broadcast_from_rank0:
                raise RuntimeError("the optimizer state dict is empty")
            values = values_for(outline, state_dict, info)
        except Exception as error:
            missing = isinstance(error, KeyError)
            problems.append(Problem(f"missing key {error}" if missing else str(error)))
    return OptimPlanner(outline, problems), values


class OptimPlanner:
    """The load of full tensors into one optimizer, which stays as it is until the plan is applied."""

    title = TITLE

    def __init__(self, outline: OptimOutline, problems: list[Problem]) -> None:
        self.outline = outline
        self.problems = problems

    def live(self) -> Iterable[object]:
        yield from params_of(self.outline.optim)
        yield from (value for value in self.outline.values.values() if isinstance(value, compat.DTensor))

    def plan(self, inventory: Inventory, stages: Sequence[str]) -> OptimPlan:
        return plan_optimizer(self.outline, inventory, self.problems)

    def apply(self, plan: OptimPlan, fetch: Callable[[str], None]) -> None:
        load_into(self.outline.optim, plan.result())
        plan.applied.append("its states")


def values_for(outline: OptimOutline, state_dict: Mapping[str, Any], info: StateDictInfo) -> dict[Path, Any]:
    """path -> value, of the part of a state dict for one optimizer."""
    numbered = bool(state_dict) and STATE in state_dict and is_numbered(state_dict)
    if numbered:
        state_dict = by_fqn(state_dict, outline.groups)
    # The optimizer's own state_dict() has no states of parameters without gradients.
    part = part_of(state_dict, info, outline.beginning, fill=False, left_out=numbered or None)
    values = paths_of(part)
    if part:
        fqns = (fqn for group in outline.groups for fqn in group)
        values[STATELESS] = GroupValue([fqn for fqn in fqns if fqn not in part[STATE]])
    return values


#: Optimizers, each with the part of a state dict for its own load_state_dict(), where nothing has to travel.
PreparedParts = list[tuple[Beginning, dict[str, Any]]]


def prepare_parts(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    state_dict: Mapping[str, Any],
    info: StateDictInfo,
    problem: Optional[Problem] = None,
) -> PreparedParts:
    """The parts of all optimizers of a call, before the first is written.

    Raises:
        RuntimeError: `problem`, or missing states (strict); under FSDP1 on all ranks, whichever has them.
        KeyError: a value of a flat dict that is not there, a parameter that the model does not have.
    """
    begun: list[Beginning] = []
    with undone_if_failed(begun):
        if not info.fsdp_modules:
            return parts_of(optimizers, state_dict, info, begun, problem)
        # FSDP1's own code communicates: a rank that left before it would keep the others waiting.
        with Call(TITLE, "slice", fsdp1.groups_of(info), plain=(RuntimeError,)) as call:
            made = call.attempt(parts_of, optimizers, state_dict, info, begun, problem)
            call.agree_on_outcome()
        return [
            (beginning, fsdp1.state_to_load(model, beginning.optim, part, info))
            for beginning, part in made.value
        ]


def parts_of(
    optimizers: Sequence[Optimizer],
    state_dict: Mapping[str, Any],
    info: StateDictInfo,
    begun: list[Beginning],
    problem: Optional[Problem],
) -> PreparedParts:
    """The parts of all optimizers, and in `begun` their beginnings; it raises what `prepare_parts` raises."""
    prepared: PreparedParts = []
    for optim in optimizers:
        beginning = Beginning(optim)
        begun.append(beginning)
        beginning.make_states(always=bool(info.fsdp_modules))
        if problem:
            raise RuntimeError(str(problem))
        prepared.append((beginning, part_of(state_dict, info, beginning)))
    raise_missing(begun)
    return prepared


def load_parts(prepared: PreparedParts) -> None:
    """Load the parts, one optimizer after the other."""
    begun = [beginning for beginning, _ in prepared]
    with undone_if_failed(begun):
        for beginning, part in prepared:
            call_load(original_method(beginning.optim, "load_state_dict"), part)
            restore_texts(beginning.optim, part)
            begun.remove(beginning)


def part_of(
    state_dict: Mapping[str, Any],
    info: StateDictInfo,
    beginning: Beginning,
    fill: bool = True,
    left_out: Optional[bool] = None,
) -> dict[str, Any]:
    """The part of a state dict, nested or flat, that is one optimizer's.

    Args:
        fill: as in `unflatten_optim_state`.
        left_out: as of `split_optim_state`.
    """
    if not state_dict:
        return {}
    if STATE in state_dict:
        return split_optim_state(beginning, state_dict, info, left_out)
    return unflatten_optim_state(beginning, state_dict, info, fill)


def by_fqn(state: Mapping[str, Any], fqns_of_groups: Sequence[Sequence[str]]) -> dict[str, Any]:
    """A state dict with parameter numbers, by the FQNs at the same places."""
    numbers = [number for group in state[GROUPS] for number in group[PARAMS]]
    fqns = [fqn for group in fqns_of_groups for fqn in group]
    if len(numbers) != len(fqns):
        raise RuntimeError(
            f"the state dict numbers {len(numbers)} parameters, but the optimizer has {len(fqns)}; use FQNs"
        )
    sizes, expected_sizes = [len(group[PARAMS]) for group in state[GROUPS]], list(map(len, fqns_of_groups))
    if sizes != expected_sizes:
        raise RuntimeError(
            f"the state dict has groups of {sizes} numbered parameters, but the optimizer of "
            f"{expected_sizes}; use FQNs"
        )
    return renamed_params(state, dict(zip(numbers, fqns)).__getitem__)
