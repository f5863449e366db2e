"""The modules and entries of a model as a load finds them, before anything is known of the state dict.

Nothing is written here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Optional, Union

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from torch_dcp_backport import compat
from torch_dcp_backport.state_dict.destination import local_of
from torch_dcp_backport.state_dict.fqn import CHECKPOINT_PREFIX, FSDP_PREFIX, ExtraState, ModelNames
from torch_dcp_backport.state_dict.model.places import ModulePlace, places_of, values_of
from torch_dcp_backport.state_dict.options import StateDictInfo
from torch_dcp_backport.state_dict.patched import original_method
from torch_dcp_backport.transfer import comm_device_type, has_slices, span_of


@dataclass(eq=False)
class KeyEntry:
    """One checkpoint key of this model."""

    fqn: str
    value: Union[torch.Tensor, ExtraState]
    #: The key that the model's own load_state_dict() knows it by (with DDP's and the compiler's prefixes).
    load_key: str
    #: The module that holds it, and its name there.
    place: ModulePlace
    name: str


@dataclass(eq=False)
class Outline:
    """The modules and entries of a model, from one walk; whatever is derived from them is derived once."""

    model: nn.Module
    info: StateDictInfo
    places: Sequence[ModulePlace] = ()
    entries: Sequence[KeyEntry] = ()

    @functools.cached_property
    def ties(self) -> list[list[KeyEntry]]:
        """The entries, those of one tensor together, in the order in which load_state_dict() loads them."""
        ties: dict[int, list[KeyEntry]] = {}
        for entry in self.entries:
            ties.setdefault(id(entry.value), []).append(entry)
        return list(ties.values())

    @functools.cached_property
    def overlapping(self) -> set[int]:
        """The ids of tensors that share memory with others: load_state_dict()'s order decides what stays."""
        values = {id(entry.value): entry.value for entry in self.entries if torch.is_tensor(entry.value)}
        return overlapping(
            value
            for value in values.values()
            if is_sliceable(value) and not (self.assigns and is_meta(value))
        )

    @functools.cached_property
    def assigns(self) -> bool:
        """Whether load_state_dict() puts tensors into the modules instead of copying them."""
        return any(is_meta(entry.value) for entry in self.entries)

    @functools.cached_property
    def fqns(self) -> dict[str, str]:
        """Load key -> FQN."""
        return {entry.load_key: entry.fqn for entry in self.entries}

    def fqn_of(self, load_key: str) -> str:
        """The FQN of a name in what load_state_dict() returns, also of one that loading code made up."""
        for name in (load_key, without_wrappers(load_key)):
            if name in self.fqns:
                return self.fqns[name]
        load_key = without_wrappers(load_key)
        holders = [place for place in self.places if load_key.startswith(place.prefix)]
        holder = max(holders, key=lambda place: len(place.prefix), default=None)
        return load_key if holder is None else holder.fqn + load_key[len(holder.prefix) :]

    @property
    def is_alone(self) -> bool:
        """Whether no other rank takes part in a load of full tensors."""
        if self.info.broadcast_from_rank0:
            return False
        return not dist.is_initialized() or not any(
            isinstance(entry.value, compat.DTensor) for entry in self.entries
        )

    # --- code outside torch ---

    @functools.cached_property
    def loads_as_torch(self) -> bool:
        """Whether the model's `load_state_dict` is torch's."""
        method = original_method(self.model, "load_state_dict")
        return getattr(method, "func", getattr(method, "__func__", None)) is nn.Module.load_state_dict

    @functools.cached_property
    def user_loader(self) -> bool:
        """Whether loading code outside torch sees keys of the state dict."""
        return any(place.user_loader for place in self.places) or not self.loads_as_torch

    @property
    def judges_keys(self) -> bool:
        """Whether a missing or unexpected key is an error whatever loading code says."""
        # Code outside torch may know keys that nothing else knows, and may do without others.
        return self.info.strict and not self.user_loader and not self.info.fsdp_modules

    # --- new tensors ---

    def device_for(self, live: Optional[torch.Tensor]) -> torch.device:
        """The device of a new value in place of `live`, or of a value that has no place in the model."""
        if isinstance(live, compat.DTensor):
            if not live.is_meta:
                return compat.local_part(live).device
            if self.info.cpu_offload or id(live) in self.offloaded:
                return torch.device("cpu")
            return compat.current_device(live.device_mesh.device_type)
        if self.info.cpu_offload:
            return torch.device("cpu")
        if live is not None and not is_meta(live):
            return live.device
        return self.device

    @functools.cached_property
    def offloaded(self) -> set[int]:
        """The ids of parameters that FSDP2 keeps on the CPU."""
        return compat.offloaded_parameters(self.model)

    @functools.cached_property
    def device(self) -> torch.device:
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


def without_wrappers(load_key: str) -> str:
    """A name without the modules that checkpointing and FSDP1 put around others."""
    hidden = (CHECKPOINT_PREFIX.rstrip("."), FSDP_PREFIX.rstrip("."))
    return ".".join(part for part in load_key.split(".") if part not in hidden)


def outline_of(model: nn.Module, info: StateDictInfo) -> Outline:
    places = places_of(model, info.dsd_fqn_modifiers)
    return Outline(model, info, places, entries_of(model, info, places))


def entries_of(model: nn.Module, info: StateDictInfo, places: Iterable[ModulePlace]) -> list[KeyEntry]:
    """Everything that a state dict of `model` holds, in the order in which load_state_dict() loads it."""
    entries = []
    places = list(places)
    names = None
    if info.fsdp_modules or any(place.renames for place in places):
        names = ModelNames(model, info.dsd_fqn_modifiers)
    for place in places:
        for name, value in values_of(place):
            value = ExtraState() if value is None else value
            if names is None:
                entries.append(KeyEntry(place.fqn + name, value, place.prefix + name, place, name))
                continue
            fqns, load_keys = names.fqns(place.path + name), names.fqns(place.path + name, False, False)
            if len(fqns) > 1:
                # An FSDP1 FlatParameter: FSDP1's own hooks take the FQNs.
                entries += [KeyEntry(fqn, value, fqn, place, name) for fqn in sorted(fqns)]
                continue
            entries.append(KeyEntry(fqns.pop(), value, load_keys.pop(), place, name))
    return entries


def is_sliceable(value: object) -> bool:
    """Whether load_state_dict() does nothing with a dense tensor but copy it to `value`.

    Subclasses (quantized weights), sparse tensors and parameters without a shape yet take whole tensors.
    """
    if isinstance(value, compat.DTensor):
        return True
    return isinstance(value, torch.Tensor) and type(value) in compat.PLAIN_TENSORS and has_slices(value)


def is_meta(value: object) -> bool:
    return torch.is_tensor(value) and not is_lazy(value) and value.is_meta


def overlapping(values: Iterable[torch.Tensor]) -> set[int]:
    """The ids of those of these (different) tensors that share memory with another one."""
    spans: list[tuple[str, int, int, int]] = []
    values = list(values)
    for value in values if len(values) > 1 else ():
        local = local_of(value)
        if type(local) in compat.PLAIN_TENSORS and local.data_ptr():
            spans.append((local.device.type, *span_of(local), id(value)))
    ids: set[int] = set()
    last_device, last_end, last_id = "", 0, 0
    for device, start, end, tensor_id in sorted(spans):
        if device == last_device and start < last_end:
            ids |= {last_id, tensor_id}
        if device != last_device or end > last_end:
            last_device, last_end, last_id = device, end, tensor_id
    return ids
