"""Load a model, optimizers, or both in one call: find out what is wrong first, write last.

The caller's dicts are never changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer

from torch_dcp_backport import compat
from torch_dcp_backport.state_dict.course import run
from torch_dcp_backport.state_dict.form import model_problem, optim_problem
from torch_dcp_backport.state_dict.load import Load
from torch_dcp_backport.state_dict.model.apply import call_load_state_dict, under_load_keys
from torch_dcp_backport.state_dict.model.load import ModelLoad, model_load
from torch_dcp_backport.state_dict.model.outline import outline_of
from torch_dcp_backport.state_dict.optim.get import Params
from torch_dcp_backport.state_dict.optim.initial import Beginning, undone_if_failed
from torch_dcp_backport.state_dict.optim.load import load_parts, prepare_full, prepare_parts
from torch_dcp_backport.state_dict.options import StateDictInfo
from torch_dcp_backport.state_dict.source import Source, Sources
from torch_dcp_backport.state_dict.together import Together
from torch_dcp_backport.transfer import Problem


@torch.no_grad()
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
        into_model = None
        if info.handle_model:
            into_model = model_load(model, info, model_dict, problems, optional=info.broadcast_from_rank0)
        load_together(model, optimizers if info.handle_optim else (), optim_dict, into_model, info, problems)
        return into_model.keys if into_model is not None else _IncompatibleKeys([], [])
    if of_model and not info.full_state_dict:
        raise RuntimeError(str(of_model))
    # FSDP1 and shards: torch's own loading code writes. All ranks hear of a bad model dict of whole tensors.
    if of_optimizers:
        raise RuntimeError(str(of_optimizers))
    prepared = prepare_parts(model, optimizers, optim_dict, info) if info.handle_optim else []
    load_parts(prepared)
    try:
        return load_model_state(model, model_dict, info, of_model)
    except Exception as error:
        if prepared:
            compat.add_note(error, "the states of the optimizers were written before")
        raise


@torch.no_grad()
def load_model_state(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    info: StateDictInfo,
    problem: Optional[Problem] = None,
) -> _IncompatibleKeys:
    """Load `state_dict` into `model`; `problem` is that of its form. Errors are those of `load_state`."""
    if not info.handle_model:
        return _IncompatibleKeys([], [])
    load = model_load(model, info, state_dict, [problem] if problem else []) if info.full_state_dict else None
    if load is None or load.outline.is_alone:
        # No other rank waits, so none needs to hear of it.
        if problem:
            raise RuntimeError(str(problem))
        if not state_dict:
            return _IncompatibleKeys([], [])
    if load is None:
        return call_load_state_dict(model, under_load_keys(outline_of(model, info), state_dict), info)
    run(load, load.source, broadcast=info.broadcast_from_rank0)
    return load.keys


@torch.no_grad()
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
    load_together(model, optimizers, state_dict, None, info, [problem] if problem else [])


def load_together(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    optim_dict: Mapping[str, Any],
    into_model: Optional[ModelLoad],
    info: StateDictInfo,
    problems: list[Problem],
) -> None:
    """Load full tensors into the optimizers, and into a model; they share the list of problems."""
    parts: dict[str, Load] = {}
    sources: list[Source] = []
    begun: list[Beginning] = []
    params = Params(model)
    with undone_if_failed(begun):
        for number, optim in enumerate(optimizers):
            begun.append(Beginning(optim))
            load, values = prepare_full(params, begun[-1], optim_dict, info, problems)
            parts[f"optimizer {number} ({type(optim).__name__})"] = load
            sources.append(Source(values))
        if into_model is not None:
            parts["the model"] = into_model
            sources.append(into_model.source)
        if len(sources) == 1:
            (only_part,) = parts.values()
            run(only_part, sources[0], broadcast=info.broadcast_from_rank0)
        else:
            run(Together(parts, problems), Sources(sources), broadcast=info.broadcast_from_rank0)
