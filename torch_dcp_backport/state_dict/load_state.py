"""Load a model, optimizers, or both in one call: find out what is wrong first, write last.

The caller's dicts are never changed.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional, TypeVar, cast

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer

from torch_dcp_backport import compat
from torch_dcp_backport.state_dict.form import model_problem, optim_problem
from torch_dcp_backport.state_dict.load import Planner, normal_mode
from torch_dcp_backport.state_dict.model.apply import load_shards
from torch_dcp_backport.state_dict.model.load import TITLE, ModelPlanner, outline_for_load
from torch_dcp_backport.state_dict.model.outline import outline_of
from torch_dcp_backport.state_dict.model.straight import copies_of, copy_all
from torch_dcp_backport.state_dict.optim.absent import missing_states
from torch_dcp_backport.state_dict.optim.get import Params
from torch_dcp_backport.state_dict.optim.initial import Beginning, undone_if_failed
from torch_dcp_backport.state_dict.optim.load import load_parts, prepare_full, prepare_parts
from torch_dcp_backport.state_dict.options import StateDictInfo
from torch_dcp_backport.state_dict.run import run
from torch_dcp_backport.state_dict.source import Sources, StateSource
from torch_dcp_backport.state_dict.together import PlannerTogether
from torch_dcp_backport.transfer import Problem, warn_on_first

logger = logging.getLogger("torch_dcp_backport.state_dict.optimizer")

Loader = TypeVar("Loader", bound=Callable[..., Any])


def in_normal_mode(load: Loader) -> Loader:
    """Make a load into a model, or into optimizers of its parameters, leave `torch.inference_mode()`."""

    @functools.wraps(load)
    def loader(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Of optimizers nothing is written in place.
        with normal_mode(itertools.chain(model.parameters(), model.buffers())):
            return load(model, *args, **kwargs)

    return cast(Loader, loader)


@torch.no_grad()
@in_normal_mode
def load_state(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    model_dict: Mapping[str, Any],
    optim_dict: Mapping[str, Any],
    info: StateDictInfo,
) -> _IncompatibleKeys:
    """Load both state dicts, or neither.

    Raises:
        RuntimeError: all missing or unexpected keys and states (strict), wrong shapes and types of either.
            With `full_state_dict` the same on every rank and before anything was written; an error of the
            user's loading code comes later, and says what was.
    """
    of_model, of_optimizers = model_problem(model_dict, info), optim_problem(optim_dict, info)
    if info.full_state_dict and not info.fsdp_modules:
        problems = [problem for problem in (of_model, of_optimizers) if problem]
        return load_full_state(model, optimizers, model_dict, optim_dict, info, problems)
    # FSDP1 and shards: torch's own loading code writes, the optimizers' first. Under FSDP1 that code
    # communicates, so a bad dict of one rank is an error on all of them.
    problem = of_optimizers if info.full_state_dict else of_model or of_optimizers
    if problem and not (info.handle_optim and info.fsdp_modules):
        raise RuntimeError(str(problem))
    prepared = prepare_parts(model, optimizers, optim_dict, info, problem) if info.handle_optim else []
    load_parts(prepared)
    try:
        return load_model_state(model, model_dict, info, of_model)
    except Exception as error:
        if prepared:
            compat.add_note(error, "the states of the optimizers were written before")
        raise


def load_full_state(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    model_dict: Mapping[str, Any],
    optim_dict: Mapping[str, Any],
    info: StateDictInfo,
    problems: list[Problem],
) -> _IncompatibleKeys:
    """Load whole tensors into a model and its optimizers, in one agreement.

    Args:
        problems: this rank's so far.
    """
    parts: dict[str, tuple[Planner, StateSource]] = {}
    copies = None
    optimizers = optimizers if info.handle_optim else ()
    held: dict[str, nn.Parameter] = {}
    if info.handle_model:
        held = held_on_meta(model, optimizers)
        outline = outline_for_load(model, info, problems)
        copies = copies_of(outline, model_dict) if not problems else None
        if copies is None:
            source = StateSource(model_dict, metadata=True)
            planner = ModelPlanner(outline, source, problems, optional=info.broadcast_from_rank0)
            parts["the model"] = planner, source
        elif not info.handle_optim:
            return copy_all(TITLE, copies)
    # The copies of a plain model come between the check of the optimizers' states and the first write to
    # them: what is wrong with the states is found before the model changes.
    copy = (lambda: None) if copies is None else functools.partial(copy_all, TITLE, copies)
    keys = load_together(model, optimizers, optim_dict, info, problems, parts, copy)
    warn_of_replaced(model, held)
    return keys


def held_on_meta(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
    """Return name -> parameter of a model that is on the meta device, and that an optimizer holds."""
    held = {param for optim in optimizers for group in optim.param_groups for param in group["params"]}
    return {name: param for name, param in model.named_parameters() if param.is_meta and param in held}


def warn_of_replaced(model: nn.Module, held: Mapping[str, nn.Parameter]) -> None:
    """Warn of optimizers that hold parameters which a load has replaced: they train nothing.

    Args:
        model: the model, loaded.
        held: name -> parameter on the meta device that an optimizer held before the load.
    """
    now = dict(model.named_parameters()) if held else {}
    replaced = [name for name, param in held.items() if now.get(name) is not param]
    if replaced:
        warn_on_first(
            logger,
            f"set_state_dict made {len(replaced)} parameter(s) in the place of those on the meta device "
            f"({replaced[0]}, ...), and the optimizer still holds those: its steps train nothing. Load the "
            "model first, make the optimizer after it, then load its states",
        )


@torch.no_grad()
@in_normal_mode
def load_model_state(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    info: StateDictInfo,
    problem: Optional[Problem] = None,
) -> _IncompatibleKeys:
    """Load `state_dict` into `model`; `problem` is that of its form. Errors are those of `load_state`."""
    if not info.handle_model:
        return _IncompatibleKeys([], [])
    problems = [problem] if problem else []
    is_alone = True
    if info.full_state_dict:
        outline = outline_for_load(model, info, problems)
        is_alone = outline.is_alone
    if is_alone:
        # No other rank waits, so none needs the problem.
        if problem:
            raise RuntimeError(str(problem))
        if not state_dict:
            return _IncompatibleKeys([], [])
    if not info.full_state_dict:
        return load_shards(outline_of(model, info), state_dict)
    copies = copies_of(outline, state_dict) if is_alone else None
    if copies is not None:
        return copy_all(TITLE, copies)
    source = StateSource(state_dict, metadata=True)
    planner = ModelPlanner(outline, source, problems)
    return run(planner, source, broadcast=info.broadcast_from_rank0).keys


@torch.no_grad()
@in_normal_mode
def load_optim_state(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    state_dict: Mapping[str, Any],
    info: StateDictInfo,
    problem: Optional[Problem] = None,
) -> None:
    """Load `state_dict` into the optimizers. The rest is as in `load_model_state`."""
    if not info.handle_optim:
        return
    if not info.full_state_dict or info.fsdp_modules:
        load_parts(prepare_parts(model, optimizers, state_dict, info, problem))
        return
    load_together(model, optimizers, state_dict, info, [problem] if problem else [], {})


def load_together(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    optim_dict: Mapping[str, Any],
    info: StateDictInfo,
    problems: list[Problem],
    last: Mapping[str, tuple[Planner, StateSource]],
    once_agreed: Callable[[], object] = lambda: None,
) -> _IncompatibleKeys:
    """Load full tensors into the optimizers, and then into the objects of `last`, in one transfer.

    Args:
        problems: the problems of this rank so far; those of all parts are added.
        last: name for errors -> the planner of an object, and the source of its tensors; loaded after the
            optimizers.
        once_agreed: called once all ranks know that nothing is wrong, before anything is written.
    """
    parts: dict[str, tuple[Planner, StateSource]] = {}
    begun: list[Beginning] = []
    params = Params(model)
    with undone_if_failed(begun):
        for number, optim in enumerate(optimizers):
            begun.append(Beginning(optim))
            of_optim, values = prepare_full(params, begun[-1], optim_dict, info, problems)
            parts[f"optimizer {number} ({type(optim).__name__})"] = of_optim, StateSource(values)
        missing = missing_states(begun)
        if missing:
            problems.append(Problem(missing))
        parts.update(last)
        planner: Planner
        source: StateSource
        if len(parts) == 1:
            ((planner, source),) = parts.values()
        else:
            sources = [source for _, source in parts.values()]
            planners = {name: planner for name, (planner, _) in parts.items()}
            planner, source = PlannerTogether(planners, problems), Sources(sources)
        return run(planner, source, broadcast=info.broadcast_from_rank0, once_agreed=once_agreed).keys
