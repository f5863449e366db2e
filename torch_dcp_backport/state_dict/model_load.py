"""Plan the load of a full state dict into a model.

What loading code of the model can look at goes through the model's own `load_state_dict()`, one such module
at a time; everything else is written straight into its place.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.parameter import is_lazy

from torch_dcp_backport import compat
from torch_dcp_backport.state_dict.destination import FIRST, Becomes, fresh, whole
from torch_dcp_backport.state_dict.entries import (
    Entry,
    entries_of,
    is_meta,
    is_sliceable,
    overlapping,
)
from torch_dcp_backport.state_dict.fqn import ExtraState
from torch_dcp_backport.state_dict.govern import Place, govern, places_of
from torch_dcp_backport.state_dict.load import Load
from torch_dcp_backport.state_dict.model import own_method
from torch_dcp_backport.state_dict.model_apply import Handover, renamed_metadata
from torch_dcp_backport.state_dict.model_plan import ROOT, ModelPlan, Owner, stage_of
from torch_dcp_backport.state_dict.new_memory import NewMemory
from torch_dcp_backport.state_dict.options import StateDictInfo
from torch_dcp_backport.state_dict.source import About, Carried, Source, Unusable, metadata_of
from torch_dcp_backport.transfer import Problem, TensorInfo
from torch_dcp_backport.transfer.memory import has_slices

TITLE = "cannot load this model state dict"


class ModelLoad(Load):
    """Where a model wants the tensors of a full state dict, and what to do once they are there."""

    title = TITLE

    def __init__(
        self,
        model: nn.Module,
        info: StateDictInfo,
        source: Source,
        problems: list[Problem],
        optional: bool = False,
    ) -> None:
        """`optional`: where the source's dict is empty, there is nothing to load."""
        super().__init__(problems)
        self.model = model
        self.info = info
        self.source = source
        self.optional = optional
        self.nothing = False
        self.places: list[Place] = []
        self.entries: list[Entry] = []
        #: What is planned; made anew by every `plan`.
        self.planned = ModelPlan(self.entries, self.places)
        #: FQN prefixes of modules without loading code whose tensors are whole for their own sake.
        self.unlooked: set[str] = set()
        #: The ids of entries not written in place for their own sake, or for that of what is offered.
        self.whole: set[int] = set()
        #: FQN prefixes that count as governors because other ranks' loading code looks there.
        self.also: list[str] = []
        #: Missing and unexpected keys, once it is applied.
        self.keys = _IncompatibleKeys([], [])

    def look(self) -> None:
        """Find the model's entries; comes first."""
        self.places = places_of(self.model, self.info.dsd_fqn_modifiers)
        self.entries = entries_of(self.model, self.info, self.places)

    @property
    def is_alone(self) -> bool:
        """Whether no other rank takes part."""
        shards = any(isinstance(entry.value, compat.DTensor) for entry in self.entries)
        return not self.info.broadcast_from_rank0 and not (shards and dist.is_initialized())

    def live(self) -> Iterable[object]:
        return (entry.value for entry in self.entries)

    # --- plan ---

    def plan(self, inventory: Mapping[Any, Any]) -> None:
        self.planned = ModelPlan(
            self.entries,
            self.places,
            {key: offer for key, offer in inventory.items() if key is not About.METADATA},
            inventory.get(About.METADATA),
        )
        if self.optional and not self.planned.inventory:
            self.nothing = True
            return
        self.govern()
        unexpected = self.planned.inventory.keys() - {entry.fqn for entry in self.entries}
        for key in self.planned.inventory:
            if key not in unexpected:
                continue
            load_key = self.planned.unexpected[key] = self.load_key_of(key)
            if load_key is not None:
                self.plan_unexpected(key, load_key)
            elif self.judges_keys:
                self.problems.append(Problem("Unexpected key(s) in state_dict", key))
        for entries in self.groups:
            if any(entry.place.governor is not None or id(entry) in self.whole for entry in entries):
                self.plan_governed(entries)
            else:
                self.plan_tied(entries)

    def govern(self) -> None:
        """Find out what loading code looks at, of this inventory."""
        for entry in self.entries:
            entry.result, entry.has_result = None, False
        also = set(self.also)
        if self.info.fsdp_modules or not self.loads_as_torch:
            also.add("")
        self.find_governors(also)
        before, self.unlooked = set(also), set()
        self.whole = {id(entry) for entry in self.entries if self.needs_whole(entry)}
        for entries in self.groups:
            # What a hook changes after it is loaded may be loaded again under a later name.
            governed = any(entry.place.governor is not None for entry in entries)
            if governed or (len(entries) > 1 and any(entry.place.looked_at_after for entry in entries)):
                also |= {entry.place.fqn for entry in entries if entry.place.governor is None}
                continue
            # One owner at a time. A module with others below it gets these with all that is in place.
            leaves = {
                entry.place.fqn
                for entry in entries
                if id(entry) in self.whole and not entry.place.module._modules
            }
            self.unlooked |= leaves
            also |= leaves
        if also != before:
            self.find_governors(also)

    def find_governors(self, also: set[str]) -> None:
        governors = govern(self.places, self.planned.inventory, also)
        self.planned.governors = topmost([*self.also, *governors]) if self.also else governors

    def needs_whole(self, entry: Entry) -> bool:
        """Whether a value is not written in place for its own sake, or for that of what is offered."""
        value, offered = entry.value, self.planned.inventory.get(entry.fqn)
        if isinstance(value, ExtraState):
            return False
        if not is_sliceable(value) or id(value) in self.overlapping:
            return True
        # A wrapper may know how to become a dense tensor; torch copies no sparse or quantized one into it.
        is_wrapper = isinstance(offered, Carried) and type(offered.value) not in compat.PLAIN_TENSORS
        return is_wrapper and not isinstance(value, compat.DTensor)

    @functools.cached_property
    def overlapping(self) -> set[int]:
        """The ids of tensors that share memory with others: load_state_dict()'s order decides what stays."""
        values = {id(entry.value): entry.value for entry in self.entries if torch.is_tensor(entry.value)}
        return overlapping(value for value in values.values() if is_sliceable(value) and not is_meta(value))

    @property
    def stages(self) -> Sequence[str]:
        return [prefix or ROOT for prefix in self.planned.governors]

    def widen(self, stages: Sequence[str]) -> None:
        self.also = topmost([stage if stage != ROOT else "" for stage in stages])

    @property
    def judges_keys(self) -> bool:
        """Whether a missing or unexpected key is an error whatever loading code says."""
        # The user's code may know keys that nothing else knows, and may do without others.
        return self.info.strict and not self.has_users_code and not self.info.fsdp_modules

    def load_key_of(self, key: Any) -> Optional[str]:
        """Where loading code finds a key that is not the model's; None where none looks."""
        text = str(key)
        for place in self.places:
            if place.governor == place.fqn and text.startswith(place.fqn):
                return place.prefix + text[len(place.fqn) :]
        return None

    @functools.cached_property
    def groups(self) -> list[list[Entry]]:
        """The entries, those of one tensor together, in the order in which load_state_dict() loads them."""
        groups: dict[int, list[Entry]] = {}
        for entry in self.entries:
            groups.setdefault(id(entry.value), []).append(entry)
        return list(groups.values())

    def plan_unexpected(self, key: Any, load_key: str) -> None:
        """A key that is not the model's, for loading code that may know it: on every rank."""
        offered, stage = self.planned.inventory[key], self.planned.stage_of_key(key)
        if self.info.fsdp_modules:
            # FSDP1 looks at the dict that is given.
            if key in self.source:
                self.take(load_key, self.source.tensor(key))
        else:
            self.plan_value(key, offered, None, stage, load_key)

    def plan_tied(self, entries: list[Entry]) -> None:
        """A tensor that is written in place, or made."""
        present = [entry for entry in entries if entry.fqn in self.planned.inventory]
        if not present:
            if self.is_left_out(entries[0]):
                # As `get` gives it with ignore_frozen_params.
                self.planned.forgive(entries)
            elif self.judges_keys:
                self.miss(entries)
            return
        # Of several names each has to fit, and the last one loaded is what stays. One of them in the
        # checkpoint is enough: safetensors keep only one.
        for entry in present:
            self.plan_direct(entry, entries, self.planned.inventory[entry.fqn])
        for entry in present[:-1]:
            self.destinations.pop(entry.fqn, None)
        if not is_meta(present[-1].value):
            self.planned.forgive(entry for entry in entries if entry not in present)

    def miss(self, entries: Iterable[Entry]) -> None:
        self.problems += [Problem("Missing key(s) in state_dict", entry.fqn) for entry in entries]

    def is_left_out(self, entry: Entry) -> bool:
        """Whether `get` leaves it out with the same options."""
        return (
            self.info.ignore_frozen_params
            and isinstance(entry.value, nn.Parameter)
            and not entry.value.requires_grad
            and not entry.value.is_meta
        )

    def plan_direct(self, entry: Entry, entries: list[Entry], offered: Any) -> None:
        live, key = entry.value, entry.fqn
        if isinstance(live, ExtraState):
            self.plan_value(key, offered, None, FIRST, entries)
        elif (
            live.dim() == 0 and isinstance(offered, TensorInfo) and offered.shape == (1,) and not live.is_meta
        ):
            # load_state_dict() takes a one-element vector for a scalar; old checkpoints have them.
            self.want_in_place(key, live, entries, view=live.detach().view(1))
        elif not self.accepts(key, offered, tuple(live.shape)):
            return
        elif live.is_meta:
            device, becomes = self.new_memory.device_for(live), fresh_kind(live)
            self.destinations[key] = fresh(live, offered, device, entries, becomes=becomes)
        else:
            self.want_in_place(key, live, entries)

    def plan_governed(self, entries: list[Entry]) -> None:
        """A tensor that loading code looks at: it gets what the checkpoint holds under each name."""
        present = [entry for entry in entries if entry.fqn in self.planned.inventory]
        if not present:
            if self.is_left_out(entries[0]):
                self.planned.forgive(entries)
            elif self.judges_keys and not any(map(self.is_looked_at, entries)):
                self.miss(entries)
            return
        for entry in present:
            offered = self.planned.inventory[entry.fqn]
            if self.is_looked_at(entry) or self.fits(entry, offered):
                self.plan_value(entry.fqn, offered, entry.value, stage_of(entry), [entry])
        if not self.info.fsdp_modules:
            self.planned.forgive(entry for entry in entries if entry not in present)
            if len(entries) > 1 and is_meta(present[0].value):
                self.planned.untied.append((entries, present))

    def is_looked_at(self, entry: Entry) -> bool:
        """Whether loading code judges the shape."""
        return entry.place.governor is not None and entry.place.fqn not in self.unlooked

    def fits(self, entry: Entry, offered: Any) -> bool:
        """Whether a tensor that is loaded whole has the shape of the live one; if not, that is a problem."""
        if isinstance(entry.value, ExtraState) or is_lazy(entry.value):
            return True
        if isinstance(offered, Carried):
            offered = TensorInfo(tuple(offered.value.shape), offered.value.dtype)
        return self.accepts(entry.fqn, offered, tuple(entry.value.shape))

    def plan_value(self, key: Any, offered: Any, live: Any, stage: str, owner: Owner) -> None:
        """A value for loading code, which judges it: a shard where `live` is sharded, else whole.

        A dict that this rank holds itself is handed on as it is, as torch does.
        """
        local = not self.info.broadcast_from_rank0
        if isinstance(offered, Unusable):
            self.usable(key, offered)
        elif isinstance(offered, TensorInfo) and isinstance(live, compat.DTensor):
            device = self.new_memory.device_for(live)
            if local and key in self.source.spread:
                self.planned.read_as_it_is(stage, key, owner)
            elif offered.shape == tuple(live.shape):
                self.destinations[key] = fresh(live, offered, device, owner, stage, fresh_kind(live))
            else:
                # Whoever judges the shape finds that of the checkpoint.
                one = whole(offered, device, owner, stage)
                self.destinations[key] = one._replace(becomes=Becomes.REPLICA, like=live)
        elif local and not is_meta(live):
            self.planned.read_as_it_is(stage, key, owner)
        elif isinstance(offered, TensorInfo):
            device = self.new_memory.device_for(live if torch.is_tensor(live) else None)
            self.destinations[key] = whole(offered, device, owner, stage, self.held(key, device))
        else:
            self.take(owner, offered.value if isinstance(offered, Carried) else offered)

    def take(self, owner: Owner, value: Any) -> None:
        self.planned.take(owner, value)

    def held(self, key: Any, device: torch.device) -> Optional[torch.Tensor]:
        """The source's own tensor where loading code may get it as it is, as torch gives it."""
        if self.planned.assigns or dist.get_rank() or not self.source.is_dict or key not in self.source:
            return None
        value = self.source.value(key)
        if not torch.is_tensor(value) or not has_slices(value) or value.device != device:
            return None
        return value.detach()

    @functools.cached_property
    def new_memory(self) -> NewMemory:
        return NewMemory(self.model, self.entries, self.info.cpu_offload)

    # --- apply ---

    def apply(self, fetch: Callable[[str], None]) -> None:
        if not self.nothing:
            handover = Handover(self.model, self.info, self.planned, self.source, fetch)
            self.keys = handover.run(self.is_plain, self.loads_as_torch)

    def written(self) -> str:
        parts = ["what no loading code looks at", *(stage.rstrip(".") for stage in self.planned.done)]
        return ", ".join(parts)

    def renamed(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """`state_dict` under the keys of the model's own load_state_dict(), values as they are."""
        self.look()
        names = {entry.fqn: entry.load_key for entry in self.entries}
        result = OrderedDict((names.get(key, key), value) for key, value in state_dict.items())
        metadata = metadata_of(state_dict)
        if metadata is not None:
            result._metadata = renamed_metadata(metadata, self.places)  # type: ignore[attr-defined]
        return result

    # --- whose code takes part ---

    @property
    def is_custom(self) -> bool:
        # FSDP1's own code talks to the other ranks: one that fails in it must not wait for them.
        if self.info.fsdp_modules:
            return False
        return not self.is_plain or any(place.can_fail for place in self.places)

    @property
    def is_plain(self) -> bool:
        """Whether load_state_dict() would do nothing with a tensor that is in place but copy it to itself.

        With many small DTensors that costs more than the transfer. Nothing can see the difference: the
        keys were judged before, and no loading code but torch's plain one takes part.
        """
        return not self.planned.governors and not self.has_users_code

    @functools.cached_property
    def has_users_code(self) -> bool:
        return any(place.is_users for place in self.places) or not self.loads_as_torch

    @functools.cached_property
    def loads_as_torch(self) -> bool:
        """Whether the model's `load_state_dict` is torch's."""
        call = own_method(self.model, "load_state_dict")
        return getattr(call, "func", getattr(call, "__func__", None)) is nn.Module.load_state_dict


def fresh_kind(live: torch.Tensor) -> Becomes:
    """What a value made for a live tensor is: loading code puts a Parameter in place of one on meta."""
    return Becomes.PARAMETER if live.is_meta and isinstance(live, nn.Parameter) else Becomes.NEW


def topmost(prefixes: Iterable[str]) -> list[str]:
    """The prefixes without those that stand below another one."""
    every = list(dict.fromkeys(prefixes))
    return [one for one in every if not any(one != other and one.startswith(other) for other in every)]
