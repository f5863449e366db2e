"""The entries of a model's state dict, and where each of them lives. Nothing is written here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Union

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torch_dcp_backport import compat
from torch_dcp_backport.state_dict.destination import local_of
from torch_dcp_backport.state_dict.fqn import ExtraState, Names
from torch_dcp_backport.state_dict.model.places import Place, values_of
from torch_dcp_backport.state_dict.options import StateDictInfo
from torch_dcp_backport.transfer.memory import has_slices, span_of


@dataclass(eq=False)
class Entry:
    """One checkpoint key of this model."""

    fqn: str
    value: Union[torch.Tensor, ExtraState]
    #: The key that the model's own load_state_dict() knows it by (with DDP's and the compiler's prefixes).
    load_key: str
    #: The module that holds it, and its name there.
    place: Place
    name: str


def entries_of(model: nn.Module, info: StateDictInfo, places: Iterable[Place]) -> list[Entry]:
    """Everything that a state dict of `model` holds, in the order in which load_state_dict() loads it."""
    entries = []
    places = list(places)
    names = None
    if info.fsdp_modules or any(place.renames for place in places):
        names = Names(model, info.dsd_fqn_modifiers)
    for place in places:
        for name, value in values_of(place):
            value = ExtraState() if value is None else value
            if names is None:
                entries.append(Entry(place.fqn + name, value, place.prefix + name, place, name))
                continue
            fqns, load_keys = names.fqns(place.path + name), names.fqns(place.path + name, False, False)
            if len(fqns) > 1:
                # An FSDP1 FlatParameter: FSDP1's own hooks take the FQNs.
                entries += [Entry(fqn, value, fqn, place, name) for fqn in sorted(fqns)]
                continue
            entries.append(Entry(fqns.pop(), value, load_keys.pop(), place, name))
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
