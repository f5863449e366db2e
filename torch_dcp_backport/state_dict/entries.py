"""What a state dict of a model holds, and where each of it lives. Only `tie` writes anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Union

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torch_dcp_backport import compat
from torch_dcp_backport.state_dict.fqn import ExtraState, Names
from torch_dcp_backport.state_dict.govern import Place, names_of
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
    #: What to pass to load_state_dict().
    result: Any = None
    has_result: bool = False

    def settle(self, result: Any) -> None:
        self.result, self.has_result = result, True


def entries_of(model: nn.Module, info: StateDictInfo, places: Iterable[Place]) -> list[Entry]:
    """Everything that a state dict of `model` holds, in the order in which load_state_dict() loads it."""
    found = []
    places = list(places)
    names = None
    if info.fsdp_modules or any(place.renames for place in places):
        names = Names(model, info.dsd_fqn_modifiers)
    for place in places:
        for name, value in names_of(place):
            value = ExtraState() if value is None else value
            if names is None:
                found.append(Entry(place.fqn + name, value, place.prefix + name, place, name))
                continue
            fqns, load_keys = names.fqns(place.path + name), names.fqns(place.path + name, False, False)
            if len(fqns) > 1:
                # An FSDP1 FlatParameter: FSDP1's own hooks take the FQNs.
                found += [Entry(fqn, value, fqn, place, name) for fqn in sorted(fqns)]
                continue
            found.append(Entry(fqns.pop(), value, load_keys.pop(), place, name))
    return found


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
    """The ids of those of these (different) tensors that lie on one another's memory."""
    spans: list[tuple[str, int, int, int]] = []
    values = list(values)
    for value in values if len(values) > 1 else ():
        local = compat.local_part(value) if isinstance(value, compat.DTensor) else value
        if type(local) in compat.PLAIN_TENSORS and local.data_ptr():
            spans.append((local.device.type, *span_of(local), id(value)))
    found: set[int] = set()
    device, end, holder = "", 0, 0
    for where, start, stop, name in sorted(spans):
        if where == device and start < end:
            found |= {holder, name}
        if where != device or stop > end:
            device, end, holder = where, stop, name
    return found


def tie(entries: Sequence[Entry], present: Sequence[Entry]) -> None:
    """One Parameter for all names of a tensor again: the first name's object, the last loaded one's values.

    FSDP2 holds on to the first name's.
    """
    first, last = (getattr(entry.place.module, entry.name) for entry in (entries[0], present[-1]))
    if first.is_meta or first.dtype != last.dtype:
        first = last
    elif first is not last:
        first.copy_(last)
    for entry in entries:
        if getattr(entry.place.module, entry.name) is not first:
            setattr(entry.place.module, entry.name, first)
