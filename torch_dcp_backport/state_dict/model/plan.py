"""The plan of a model's load of a full state dict, as data.

Values that loading code of the model can look at go through the model's own `load_state_dict()`, one such
module at a time; all others are written straight into their places. Nothing is written here.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from torch_dcp_backport import compat
from torch_dcp_backport.state_dict.destination import FIRST, Becomes, fresh, local_of, unsharded
from torch_dcp_backport.state_dict.fqn import ExtraState
from torch_dcp_backport.state_dict.load import Inventory, LoadPlan
from torch_dcp_backport.state_dict.model.outline import KeyEntry, Outline, is_meta, is_sliceable
from torch_dcp_backport.state_dict.model.places import (
    COUNT,
    ModulePlace,
    has_loader,
    hooks_over,
    is_norm,
    makes_up,
    refuses_statistics,
    renamed_metadata,
    statistics_of,
    tensors_of,
)
from torch_dcp_backport.state_dict.source import About, Carried, StateSource, Unusable
from torch_dcp_backport.transfer import Problem, TensorInfo, has_slices, is_same_view, source_of

#: The stage of values that the root's loading code looks at. Other stages are FQN prefixes, which end with a
#: point; none is FIRST.
ROOT = "the model"
#: The owner of a value: entries, or its key for loading code, where no entry has it.
Owner = Union[Sequence[KeyEntry], str]


class EntryLoad(NamedTuple):
    """The way in which the value of one entry is loaded."""

    #: When it moves: FIRST, or when the hook of the stage is about to see it.
    stage: str = FIRST
    #: Whether a loading hook sees it, and judges its name and shape.
    is_hooked: bool = False
    #: Whether it is loaded whole, for its own sake or for that of the offer.
    is_whole: bool = False

    @property
    def is_in_place(self) -> bool:
        """Whether it is written straight into its place."""
        return self.stage == FIRST and not self.is_whole


IN_PLACE = EntryLoad()


class LoadingHooks(NamedTuple):
    """The loading hooks of a model, for one inventory."""

    #: Place -> FQN prefix of the topmost module with a hook over it; places without one are not in it.
    by_place: Mapping[ModulePlace, str]
    #: The FQN prefixes, also those of other ranks, in load order.
    prefixes: Sequence[str]
    #: The entries that are not written in place.
    entries: Mapping[KeyEntry, EntryLoad]


class ModelPlan(LoadPlan):
    """The destinations of a model's values, its loading code's share, and the values that have arrived."""

    def __init__(
        self,
        problems: list[Problem],
        outline: Outline,
        source: StateSource,
        inventory: Inventory,
        hooks: LoadingHooks,
    ) -> None:
        super().__init__(problems)
        self.applied.append("what no loading code looks at")
        self.outline = outline
        self.source = source
        self.inventory = {key: offer for key, offer in inventory.items() if key is not About.METADATA}
        metadata = inventory.get(About.METADATA)
        #: Of the modules by their names inside wrappers, too.
        self.metadata = None if metadata is None else renamed_metadata(metadata, outline.places)
        self.hooks = hooks
        self.stages = [prefix or ROOT for prefix in hooks.prefixes]
        # FSDP1's own code talks to the other ranks: one that fails in it must not wait for them.
        self.user_code = not outline.info.fsdp_modules and (
            not self.is_plain or any(place.user_code for place in outline.places)
        )
        #: Keys of the state dict that are not the model's: the load key, where loading code can look at it.
        self.unexpected: dict[Any, Optional[str]] = {}
        #: Stage -> (key, owner) of values that are read as they are when their stage comes.
        self.raw: dict[str, list[tuple[Any, Owner]]] = {}
        #: load keys that may be missing: of frozen parameters, and of tensors that have another name.
        self.forgiven: set[str] = set()
        #: All names of a tensor on meta, and those in the checkpoint: each gets its own, then one stays.
        self.untied: list[tuple[list[KeyEntry], list[KeyEntry]]] = []
        #: The values that have arrived: of entries, and by load key of keys that are not the model's.
        self.values: dict[KeyEntry, Any] = {}
        self.extra: dict[str, Any] = {}

    @property
    def is_plain(self) -> bool:
        """Whether load_state_dict() would do nothing with a tensor that is in place but copy it to itself.

        With many small DTensors that costs more than the transfer. Nothing can see the difference: the
        keys were judged before, and no loading code but torch's plain one takes part.
        """
        return not self.hooks.prefixes and not self.outline.user_loader

    def load_of(self, entry: KeyEntry) -> EntryLoad:
        return self.hooks.entries.get(entry, IN_PLACE)

    def stage_of_key(self, key: Any) -> str:
        """The stage of a key that is not the model's."""
        text = str(key)
        return next(prefix or ROOT for prefix in self.hooks.prefixes if text.startswith(prefix))

    def load_key_of(self, key: Any) -> Optional[str]:
        """The load key of a key that is not the model's; None where no loading code looks at it."""
        text = str(key)
        for place, prefix in self.hooks.by_place.items():
            if prefix == place.fqn and text.startswith(place.fqn):
                # A norm of torch knows no others: that is an error before anything is written.
                judged = self.outline.judges_keys and place in self.norms
                return None if judged else place.prefix + text[len(place.fqn) :]
        return None

    @functools.cached_property
    def norms(self) -> set[ModulePlace]:
        """The norms of torch that look at what they hold, and no other code does."""
        by_place = self.hooks.by_place
        others = {prefix for place, prefix in by_place.items() if place.has_hook or place.renames}
        return {
            place
            for place, prefix in by_place.items()
            if prefix == place.fqn and prefix not in others and is_norm(place.module)
        }

    def version_of(self, place: ModulePlace) -> Optional[int]:
        """The version of a module in the checkpoint; None where that does not say."""
        return ((self.metadata or {}).get(place.path[:-1]) or {}).get("version")

    def gets_itself(self, key: Any, live: Any) -> bool:
        value = self.source.value(key) if key in self.source else None
        if not torch.is_tensor(value) or not torch.is_tensor(live):
            return False
        local, given = local_of(live), local_of(value)
        return has_slices(local) and has_slices(given) and is_same_view(given, local)

    def may_be_made_up(self, entry: KeyEntry) -> bool:
        """Whether loading code may find a value for a name that the checkpoint lacks."""
        if not self.load_of(entry).is_hooked:
            return False
        place = entry.place
        return place not in self.norms or makes_up(place, entry.name, self.version_of(place))

    def is_copied(self, entry: KeyEntry) -> bool:
        """Whether a value that is loaded whole is copied into the live tensor, which no code can replace."""
        place, outline = entry.place, self.outline
        if not is_sliceable(entry.value) or has_loader(place.module) or outline.info.fsdp_modules:
            return False
        # With tensors on meta beside it, a tensor may be replaced.
        replaced = outline.assigns and any(map(is_meta, tensors_of(place.module)))
        return outline.loads_as_torch and not replaced and not place.below_user_code

    def forgive(self, entries: Iterable[KeyEntry]) -> None:
        """Let names be missing. Loading code finds them missing, as they are."""
        self.forgiven |= {entry.load_key for entry in entries}

    def read_as_it_is(self, stage: str, key: Any, owner: Owner) -> None:
        self.raw.setdefault(stage, []).append((key, owner))

    def take(self, owner: Owner, value: Any) -> None:
        """Give an owner its value."""
        if isinstance(owner, str):
            self.extra[owner] = value
        else:
            # One object for all names of a shared parameter, so that it stays shared.
            self.values.update(dict.fromkeys(owner, value))


def plan_model(
    outline: Outline,
    source: StateSource,
    inventory: Inventory,
    stages: Sequence[str],
    problems: list[Problem],
) -> ModelPlan:
    """Plan the load of a full state dict; `stages` as in `Planner.plan`."""
    plan = ModelPlan(problems, outline, source, inventory, find_hooks(outline, inventory, stages))
    fqns = {entry.fqn for entry in outline.entries}
    for key in plan.inventory:
        if key not in fqns:
            plan_unexpected(plan, key)
    problems += problems_of_norms(plan, fqns)
    for entries in outline.ties:
        present = [entry for entry in entries if entry.fqn in plan.inventory]
        if not present:
            plan_missing(plan, entries, may_be=all(map(plan.may_be_made_up, entries)))
        elif all(plan.load_of(entry).is_in_place for entry in entries):
            plan_tied(plan, entries, present)
        else:
            plan_for_loader(plan, entries, present)
    return plan


# --- loading code ----------------------------------------------------------------------------


def find_hooks(outline: Outline, inventory: Inventory, stages: Sequence[str]) -> LoadingHooks:
    """Find the loading hooks that see values, for this inventory, and the entries that they see."""
    elsewhere = topmost("" if stage == ROOT else stage for stage in stages)
    also = set(elsewhere)
    if outline.info.fsdp_modules or not outline.loads_as_torch:
        also.add("")
    by_place = hooks_over(outline.places, inventory, also)
    whole = {entry for entry in outline.entries if needs_whole(outline, entry, inventory.get(entry.fqn))}
    # Whole tensors move one module at a time, so a module without others below it is a stage of its own. It
    # has no hook: nothing but the plan judges its tensors. A module with others below it gets its whole
    # tensors first, with everything that is written in place.
    of_whole: set[str] = set()
    before = set(also)
    for entries in outline.ties:
        # A hook may change a value after it is loaded, and it may be loaded again under a later name.
        is_hooked = any(entry.place in by_place for entry in entries)
        if is_hooked or (len(entries) > 1 and any(entry.place.has_post_hook for entry in entries)):
            also |= {entry.place.fqn for entry in entries if entry.place not in by_place}
        else:
            leaves = (entry for entry in entries if not entry.place.module._modules)
            of_whole |= {entry.place.fqn for entry in leaves if entry in whole}
    also |= of_whole
    if also != before:
        by_place = hooks_over(outline.places, inventory, also)
    prefixes = list(dict.fromkeys(by_place.values()))
    if elsewhere:
        prefixes = topmost([*elsewhere, *prefixes])
    loads: dict[KeyEntry, EntryLoad] = {}
    for entry in outline.entries if by_place or whole else ():
        prefix = by_place.get(entry.place)
        if prefix is not None:
            loads[entry] = EntryLoad(prefix or ROOT, entry.place.fqn not in of_whole, entry in whole)
        elif entry in whole:
            loads[entry] = EntryLoad(is_whole=True)
    return LoadingHooks(by_place, prefixes, loads)


def needs_whole(outline: Outline, entry: KeyEntry, offer: Any) -> bool:
    """Whether a value is loaded whole, for its own sake or for that of the offer."""
    value = entry.value
    if isinstance(value, ExtraState):
        return False
    if not is_sliceable(value) or id(value) in outline.overlapping:
        return True
    # A wrapper may know how to become a dense tensor; torch copies no sparse or quantized one into it.
    is_wrapper = isinstance(offer, Carried) and type(offer.value) not in compat.PLAIN_TENSORS
    return is_wrapper and not isinstance(value, compat.DTensor)


def topmost(prefixes: Iterable[str]) -> list[str]:
    """The prefixes that are not below another one."""
    prefixes = list(dict.fromkeys(prefixes))
    return [
        prefix
        for prefix in prefixes
        if not any(prefix != other and prefix.startswith(other) for other in prefixes)
    ]


def problems_of_norms(plan: ModelPlan, fqns: Collection[str]) -> Iterator[Problem]:
    """Yield the errors of the loading code of torch's norms, which it finds when others are written.

    Args:
        fqns: of the model.
    """
    for place in filter(plan.norms.__contains__, plan.hooks.by_place):
        version, count = plan.version_of(place), place.fqn + COUNT
        if refuses_statistics(place, version):
            for key in statistics_of(place, plan.inventory):
                yield Problem("Unexpected running stats buffer(s) with track_running_stats=False", key)
        is_known = count in fqns or count in plan.inventory
        if plan.outline.judges_keys and not is_known and makes_up(place, COUNT, version):
            # Also where the buffer is None, or not persistent: then nothing takes it.
            yield Problem("Unexpected key(s) in state_dict", count)


# --- destinations ----------------------------------------------------------------------------


def plan_unexpected(plan: ModelPlan, key: Any) -> None:
    """Plan a key that is not the model's: for loading code that may know it, on every rank."""
    load_key = plan.unexpected[key] = plan.load_key_of(key)
    if load_key is None:
        if plan.outline.judges_keys:
            plan.problems.append(Problem("Unexpected key(s) in state_dict", key))
    elif not plan.outline.info.fsdp_modules:
        plan_value(plan, key, None, plan.stage_of_key(key), load_key)
    elif key in plan.source:
        # FSDP1 looks at the dict of the caller.
        plan.take(load_key, plan.source.tensor(key))


def plan_missing(plan: ModelPlan, entries: list[KeyEntry], may_be: bool) -> None:
    """Plan a tensor that the checkpoint has under none of its names."""
    value, outline = entries[0].value, plan.outline
    frozen = isinstance(value, nn.Parameter) and not value.requires_grad
    if outline.info.ignore_frozen_params and frozen and not is_meta(value):
        # `get` leaves it out with the same options.
        plan.forgive(entries)
    elif outline.judges_keys and not may_be:
        plan.problems += [Problem("Missing key(s) in state_dict", entry.fqn) for entry in entries]


def plan_tied(plan: ModelPlan, entries: list[KeyEntry], present: list[KeyEntry]) -> None:
    """Plan a tensor that is written in place, or made.

    Of several names each has to fit, and the value of the last one loaded stays. One of them in the
    checkpoint is enough: safetensors keep only one.
    """
    for entry in present:
        plan_direct(plan, entry, entries)
    last = present[-1]
    if len(present) > 1 and not plan.outline.info.broadcast_from_rank0:
        # A name whose value is the live tensor itself changes nothing that another name brought.
        moved = [entry for entry in present if not plan.gets_itself(entry.fqn, entry.value)]
        last = moved[-1] if moved else last
    for entry in present:
        if entry is not last:
            plan.destinations.pop(entry.fqn, None)
    if not (plan.outline.assigns and is_meta(present[-1].value)):
        plan.forgive(entry for entry in entries if entry not in present)


def plan_direct(plan: ModelPlan, entry: KeyEntry, entries: list[KeyEntry]) -> None:
    live, key = entry.value, entry.fqn
    offer = plan.inventory[key]
    if isinstance(live, ExtraState):
        plan_value(plan, key, None, FIRST, entries)
    elif live.dim() == 0 and isinstance(offer, TensorInfo) and offer.shape == (1,) and not live.is_meta:
        # load_state_dict() takes a one-element vector for a scalar; old checkpoints have them.
        plan.want_in_place(key, live, entries, view=live.detach().view(1))
    elif not plan.accepts(key, offer, tuple(live.shape)):
        return
    elif live.is_meta:
        device, becomes = plan.outline.device_for(live), fresh_kind(live)
        plan.destinations[key] = fresh(live, offer, device, entries, becomes=becomes)
    else:
        plan.want_in_place(key, live, entries)


def plan_for_loader(plan: ModelPlan, entries: list[KeyEntry], present: list[KeyEntry]) -> None:
    """Plan a tensor for load_state_dict(), which gets what the checkpoint holds under each name."""
    for entry in present:
        load = plan.load_of(entry)
        if load.is_hooked or fits(plan, entry):
            plan_value(plan, entry.fqn, entry.value, load.stage, [entry])
        if isinstance(entry.value, torch.Tensor) and plan.is_copied(entry):
            plan.writes(entry.fqn, entry.value)
    if not plan.outline.info.fsdp_modules:
        plan.forgive(entry for entry in entries if entry not in present)
        if len(entries) > 1 and is_meta(present[0].value):
            plan.untied.append((entries, present))


def fits(plan: ModelPlan, entry: KeyEntry) -> bool:
    """Whether a tensor that is loaded whole has the shape of the live one; if not, that is a problem."""
    if isinstance(entry.value, ExtraState) or is_lazy(entry.value):
        return True
    offer = plan.inventory[entry.fqn]
    if isinstance(offer, Carried):
        offer = TensorInfo(tuple(offer.value.shape), offer.value.dtype)
    return plan.accepts(entry.fqn, offer, tuple(entry.value.shape))


def plan_value(plan: ModelPlan, key: Any, live: Any, stage: str, owner: Owner) -> None:
    """Plan a value for loading code, which judges it: a shard where `live` is sharded, else whole.

    The value of a dict that this rank holds itself is passed on as it is, as torch does.
    """
    offer, outline = plan.inventory[key], plan.outline
    local = not outline.info.broadcast_from_rank0
    if isinstance(offer, Unusable):
        plan.usable(key, offer)
    elif isinstance(offer, TensorInfo) and isinstance(live, compat.DTensor):
        device = outline.device_for(live)
        if local and key in plan.source.spread:
            plan.read_as_it_is(stage, key, owner)
        elif offer.shape == tuple(live.shape):
            plan.destinations[key] = fresh(live, offer, device, owner, stage, fresh_kind(live))
        else:
            # Loading code that judges the shape finds that of the checkpoint.
            destination = unsharded(offer, device, owner, stage)
            plan.destinations[key] = destination._replace(becomes=Becomes.REPLICA, like=live)
    elif local and not is_meta(live):
        plan.read_as_it_is(stage, key, owner)
    elif isinstance(offer, TensorInfo):
        device = outline.device_for(live if torch.is_tensor(live) else None)
        tensor = None if outline.assigns else tensor_of_source(plan.source, key, device)
        plan.destinations[key] = unsharded(offer, device, owner, stage, tensor)
    else:
        plan.take(owner, offer.value if isinstance(offer, Carried) else offer)


def tensor_of_source(source: StateSource, key: Any, device: torch.device) -> Optional[torch.Tensor]:
    """The source's own tensor where loading code may get it as it is, as torch gives it."""
    if dist.get_rank() != source_of(None) or not source.is_dict or key not in source:
        return None
    value = source.value(key)
    if not torch.is_tensor(value) or not has_slices(value) or value.device != device:
        return None
    return value.detach()


def fresh_kind(live: torch.Tensor) -> Becomes:
    """The kind of a value made for a live tensor: loading code puts a Parameter in place of one on meta."""
    return Becomes.PARAMETER if live.is_meta and isinstance(live, nn.Parameter) else Becomes.NEW
