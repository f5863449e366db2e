"""Load a model, optimizers, or both in one call: find out what is wrong first, write last.

The caller's dicts are never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer

from torch_dcp_backport import compat
from torch_dcp_backport.state_dict import model as model_state
from torch_dcp_backport.state_dict.course import run
from torch_dcp_backport.state_dict.load import Load, guarded
from torch_dcp_backport.state_dict.model_apply import call_load_state_dict
from torch_dcp_backport.state_dict.model_load import ModelLoad
from torch_dcp_backport.state_dict.optim.form import complaint_about
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
        RuntimeError: all that is wrong with either. With `full_state_dict` the same on every rank and before
            anything was written; what loading code of the user's raises comes later, and says what was.
    """
    complaints = [model_state.complaint_about(model_dict, info), complaint_about(optim_dict, info)]
    if info.full_state_dict and not info.fsdp_modules:
        problems = [Problem(complaint) for complaint in complaints if complaint]
        whole = None
        if info.handle_model:
            whole = model_load(model, info, model_dict, problems, optional=info.broadcast_from_rank0)
        load_together(model, optimizers if info.handle_optim else (), optim_dict, whole, info, problems)
        return whole.keys if whole is not None else _IncompatibleKeys([], [])
    about_model, about_optim = complaints
    if about_model and not info.full_state_dict:
        raise RuntimeError(about_model)
    # FSDP1 and shards: torch's own loading code writes. A bad dict of whole tensors is told to all ranks.
    if about_optim:
        raise RuntimeError(about_optim)
    prepared = prepare_parts(model, optimizers, optim_dict, info) if info.handle_optim else []
    load_parts(prepared)
    try:
        return load_model_state(model, model_dict, info, about_model)
    except Exception as error:
        if prepared:
            compat.add_note(error, "the states of the optimizers were written before")
        raise


@torch.no_grad()
def load_model_state(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    info: StateDictInfo,
    complaint: Optional[str] = None,
) -> _IncompatibleKeys:
    """Load `state_dict` into `model`; `complaint` is what is already known to be wrong with it.

    Raises:
        RuntimeError: missing or unexpected keys (strict), wrong shapes, wrong types. With
            `full_state_dict` the same on every rank and before anything was written.
    """
    if not info.handle_model:
        return _IncompatibleKeys([], [])
    if not info.full_state_dict:
        if complaint:
            raise RuntimeError(complaint)
        if not state_dict:
            return _IncompatibleKeys([], [])
        load = ModelLoad(model, info, Source(state_dict), [])
        return call_load_state_dict(model, load.renamed(state_dict), info)
    load = model_load(model, info, state_dict, [Problem(complaint)] if complaint else [])
    if load.is_alone:
        # No other rank takes part, so none needs to hear of it.
        if complaint:
            raise RuntimeError(complaint)
        if not state_dict:
            return _IncompatibleKeys([], [])
    run(load, load.source, broadcast=info.broadcast_from_rank0)
    return load.keys


def model_load(
    model: nn.Module,
    info: StateDictInfo,
    state_dict: Mapping[str, Any],
    problems: list[Problem],
    optional: bool = False,
) -> ModelLoad:
    """A load that knows its entries; what fails here is a problem where other ranks wait."""
    load = ModelLoad(model, info, Source(state_dict, metadata=True), problems, optional)
    with guarded(problems, info.broadcast_from_rank0):
        load.look()
    return load


@torch.no_grad()
def load_optim_state(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    state_dict: Mapping[str, Any],
    info: StateDictInfo,
    complaint: Optional[str] = None,
) -> None:
    """Load `state_dict` into the optimizers; `complaint` is what is already known to be wrong with it.

    Raises:
        RuntimeError: missing states (strict), wrong shapes, wrong types. With `full_state_dict`
            the same on every rank and before any state was written.
    """
    if not info.handle_optim:
        return
    if not info.full_state_dict or info.fsdp_modules:
        load_parts(prepare_parts(model, optimizers, state_dict, info, complaint))
        return
    load_together(model, optimizers, state_dict, None, info, [Problem(complaint)] if complaint else [])


def load_together(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    optim_dict: Mapping[str, Any],
    whole: Optional[ModelLoad],
    info: StateDictInfo,
    problems: list[Problem],
) -> None:
    """Full tensors into the optimizers, and into the model of `whole`; they share the list of problems."""
    parts: dict[str, Load] = {}
    sources: list[Source] = []
    undo: list[Callable[[], None]] = []
    try:
        for number, optim in enumerate(optimizers):
            prepared = prepare_full(model, optim, optim_dict, info, problems)
            parts[f"optimizer {number} ({type(optim).__name__})"] = prepared.load
            sources.append(Source(prepared.given))
            undo.append(prepared.undo)
        if whole is not None:
            parts["the model"] = whole
            sources.append(whole.source)
        if len(sources) == 1:
            (load,) = parts.values()
            run(load, sources[0], broadcast=info.broadcast_from_rank0)
        else:
            run(Together(parts, problems), Sources(sources), broadcast=info.broadcast_from_rank0)
    except BaseException:
        for take_back in undo:
            take_back()
        raise
