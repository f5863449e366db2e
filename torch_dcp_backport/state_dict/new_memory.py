"""Which device a tensor goes to that a model has no memory for yet."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from torch_dcp_backport import compat
from torch_dcp_backport.state_dict.entries import Entry, is_meta
from torch_dcp_backport.transfer.groups import comm_device_type


class NewMemory:
    """Where one load makes new tensors of a model."""

    def __init__(self, model: nn.Module, entries: Sequence[Entry], cpu_offload: bool) -> None:
        self.model = model
        self.entries = entries
        self.cpu_offload = cpu_offload

    def device_for(self, live: Optional[torch.Tensor]) -> torch.device:
        """The device of a new value in place of `live`, or of one that has no place in the model."""
        if isinstance(live, compat.DTensor):
            if not live.is_meta:
                return compat.local_part(live).device
            if self.cpu_offload or id(live) in self.offloaded:
                return torch.device("cpu")
            return compat.current_device(live.device_mesh.device_type)
        if self.cpu_offload:
            return torch.device("cpu")
        if live is not None and not is_meta(live):
            return live.device
        return self.device_of_model

    @functools.cached_property
    def offloaded(self) -> set[int]:
        return compat.offloaded_parameters(self.model)

    @functools.cached_property
    def device_of_model(self) -> torch.device:
        values = [entry.value for entry in self.entries if torch.is_tensor(entry.value)]
        for value in values:
            if not is_lazy(value) and not value.is_meta and value.dim():
                return value.device
        for value in values:
            if isinstance(value, compat.DTensor):
                return compat.current_device(value.device_mesh.device_type)
        if dist.is_initialized():
            return compat.current_device(comm_device_type(None, "cpu"))
        return torch.device("cpu")
