"""The options of a call, and the facts about its model that come with them once they are verified.

Data only: `verify.py` makes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Optional, Union

import torch
from torch import nn

from torch_dcp_backport.state_dict.fqn import FQN_MODIFIERS

FQNS_T = set[str]
"""The names of a parameter in the model without its wrappers (FQNs): several if it is tied."""
Submodules = Optional[set[nn.Module]]
ParamMapping = dict[Union[str, torch.Tensor], Union[FQNS_T, torch.Tensor]]


@dataclass
class StateDictOptions:
    """The options of the get and set functions: upstream's fields, in upstream's order.

    Args:
        full_state_dict: whole tensors instead of shards. A get gathers every shard. A set takes whole
            tensors, and each rank takes its own slice.
        cpu_offload: a get returns tensors on the CPU; with `full_state_dict` on global rank 0 alone, and the
            other ranks get an empty dict. A set makes parameters on the meta device on the CPU.
        ignore_frozen_params: leave parameters without `requires_grad` out of a get.
        keep_submodule_prefixes: deprecated, as `submodules` is; whether keys keep the submodule's prefix.
        strict: make a missing or an unexpected key an error.
        broadcast_from_rank0: in a set, only global rank 0 holds the state dict; the other ranks pass an empty
            one. Requires `full_state_dict`.
        flatten_optimizer_state_dict: optimizer states under flat keys ("state.FQN.exp_avg").
        dsd_fqn_modifiers: name of a method by which a module declares renamed children (upstream: since
            torch 2.7).

    Example:
        >>> from torch import nn
        >>> from torch_dcp_backport.state_dict import StateDictOptions, get_model_state_dict
        >>> model = nn.Linear(2, 3)
        >>> model.bias.requires_grad = False
        >>> list(get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True)))
        ['weight']
    """

    full_state_dict: bool = field(default=False)
    cpu_offload: bool = field(default=False)
    ignore_frozen_params: bool = field(default=False)
    keep_submodule_prefixes: bool = field(default=True)
    strict: bool = field(default=True)
    broadcast_from_rank0: bool = field(default=False)
    flatten_optimizer_state_dict: bool = field(default=False)
    dsd_fqn_modifiers: str = FQN_MODIFIERS


OPTIONS = tuple(option.name for option in fields(StateDictOptions))


@dataclass
class StateDictInfo(StateDictOptions):
    """The options of one call, and the facts about its model that `verify.verify_options` finds."""

    #: parameter or buffer -> its FQNs, and FQN -> parameter or buffer.
    fqn_param_mapping: ParamMapping = field(default_factory=dict)
    #: The same, of those that have several FQNs.
    shared_params_mapping: ParamMapping = field(default_factory=dict)
    submodule_prefixes: set[str] = field(default_factory=set)
    handle_model: bool = True
    handle_optim: bool = True
    #: Makes FSDP1's own state_dict() return the asked-for kind.
    fsdp_context: Callable[[], Any] = contextlib.nullcontext
    #: FSDP1 modules; FSDP2 has none of them.
    fsdp_modules: list[nn.Module] = field(default_factory=list)
