"""Load a model's state.

The caller's dict is never changed, and nothing of the model is written before every rank agreed. What loading
code of the model can look at goes through the model's own `load_state_dict()`, one such module at a time;
everything else is written straight into its place.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.parameter import is_lazy

from torch_dcp_backport import compat
from torch_dcp_backport.state_dict.entries import (
    Entry,
    entries_of,
    is_meta,
    is_sliceable,
    overlapping,
    tie,
)
from torch_dcp_backport.state_dict.fqn import CHECKPOINT_PREFIX, ExtraState
from torch_dcp_backport.state_dict.govern import Place, govern, places_of
from torch_dcp_backport.state_dict.load import FIRST, Load, run
from torch_dcp_backport.state_dict.model import own_method
from torch_dcp_backport.state_dict.options import StateDictInfo
from torch_dcp_backport.state_dict.source import About, Carried, Source, Unusable, metadata_of
from torch_dcp_backport.transfer import Problem, TensorInfo, problem_of
from torch_dcp_backport.transfer.memory import has_slices

TITLE = "cannot load this model state dict"
#: The stage of what the root's loading code looks at. FQN prefixes end with a point; a stage is never FIRST.
ROOT = "the model"
MISSING = object()


class Awaited(NamedTuple):
    """Stands in a state dict for what comes when the loading code that can look at it is about to run."""

    load_key: str
    stage: str


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
    load = ModelLoad.guarded(model, info, state_dict, [Problem(complaint)] if complaint else [])
    if load.is_alone:
        # No other rank takes part, so none needs to hear of it.
        if complaint:
            raise RuntimeError(complaint)
        if not state_dict:
            return _IncompatibleKeys([], [])
    run(load, load.source, broadcast=info.broadcast_from_rank0)
    return load.keys


def call_load_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    info: StateDictInfo,
    *,
    assign: bool = False,
    strict: Optional[bool] = None,
) -> _IncompatibleKeys:
    strict = info.strict if strict is None else strict
    with info.fsdp_context():
        result = own_method(model, "load_state_dict")(state_dict=state_dict, strict=strict, assign=assign)
    return result  # type: ignore[no-any-return]


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
        self.governors: list[str] = []
        #: FQN prefixes of modules without loading code whose tensors are whole for their own sake.
        self.unlooked: set[str] = set()
        #: The ids of entries not written in place for their own sake, or for that of what is offered.
        self.whole: set[int] = set()
        #: FQN prefixes that count as governors because other ranks' loading code looks there.
        self.also: list[str] = []
        #: Keys of the state dict that are not the model's: the load key, where loading code can look at it.
        self.unexpected: dict[Any, Optional[str]] = {}
        self.inventory: Mapping[Any, Any] = {}
        #: load key -> what loading code is to find there, of keys that are not the model's.
        self.extra: dict[str, Any] = {}
        #: Read as they are, when their stage comes: (key, what takes the value).
        self.raw: dict[str, list[tuple[Any, Callable[[Any], None]]]] = {}
        #: load keys that may be missing: of frozen parameters, and of tensors that have another name.
        self.forgiven: set[str] = set()
        #: All names of a tensor on meta, and those in the checkpoint: each gets its own, then one stays.
        self.untied: list[tuple[list[Entry], list[Entry]]] = []
        self.by_stage: dict[str, list[Entry]] = {}
        #: Stages that loading code has seen.
        self.done: list[str] = []
        self.metadata: Optional[Mapping[str, dict[str, Any]]] = None
        #: Missing and unexpected keys, once it is applied.
        self.keys = _IncompatibleKeys([], [])

    @classmethod
    def guarded(
        cls,
        model: nn.Module,
        info: StateDictInfo,
        state_dict: Mapping[str, Any],
        problems: list[Problem],
        optional: bool = False,
    ) -> ModelLoad:
        """A load that knows its entries; what fails here is a problem where other ranks wait."""
        load = cls(model, info, Source(state_dict, metadata=True), problems, optional)
        try:
            load.look()
        except Exception as error:
            if not info.broadcast_from_rank0:
                raise
            problems.append(problem_of(error))
        return load

    def look(self) -> None:
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
        self.inventory = {key: offer for key, offer in inventory.items() if key is not About.METADATA}
        self.metadata = inventory.get(About.METADATA)
        if self.optional and not self.inventory:
            self.nothing = True
            return
        self.govern()
        for key in self.inventory.keys() - {entry.fqn for entry in self.entries}:
            self.unexpected[key] = self.load_key_of(key)
        self.unexpected = {key: self.unexpected[key] for key in self.inventory if key in self.unexpected}
        for key, load_key in self.unexpected.items():
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
        self.unexpected, self.extra, self.raw = {}, {}, {}
        self.forgiven, self.untied = set(), []
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
        governors = govern(self.places, self.inventory, also)
        self.governors = topmost([*self.also, *governors]) if self.also else governors

    def needs_whole(self, entry: Entry) -> bool:
        """Whether a value is not written in place for its own sake, or for that of what is offered."""
        value, offered = entry.value, self.inventory.get(entry.fqn)
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
        return [prefix or ROOT for prefix in self.governors]

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
        offered, stage = self.inventory[key], self.stage_of(key)

        def settle(value: Any) -> None:
            self.extra[load_key] = value

        if self.info.fsdp_modules:
            # FSDP1 looks at the dict that is given.
            if key in self.source:
                settle(self.source.tensor(key))
        else:
            self.plan_value(key, offered, None, stage, settle)

    def stage_of(self, key: Any) -> str:
        text = str(key)
        return next(prefix or ROOT for prefix in self.governors if text.startswith(prefix))

    def plan_tied(self, entries: list[Entry]) -> None:
        """A tensor that is written in place, or made."""
        present = [entry for entry in entries if entry.fqn in self.inventory]
        if not present:
            if self.is_left_out(entries[0]):
                # As `get` gives it with ignore_frozen_params.
                self.forgive(entries)
            elif self.judges_keys:
                self.miss(entries)
            return
        # Of several names each has to fit, and the last one loaded is what stays. One of them in the
        # checkpoint is enough: safetensors keep only one.
        for entry in present:
            self.plan_direct(entry, entries, self.inventory[entry.fqn])
        for entry in present[:-1]:
            self.destinations.pop(entry.fqn, None)
        if not is_meta(present[-1].value):
            self.forgive(entry for entry in entries if entry not in present)

    def forgive(self, entries: Iterable[Entry]) -> None:
        """Names that may be missing. Loading code finds them missing, as they are."""
        self.forgiven |= {entry.load_key for entry in entries}

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
        def settle(result: Any) -> None:
            for one in entries:
                one.settle(result)

        live, key = entry.value, entry.fqn
        if isinstance(live, ExtraState):
            self.plan_value(key, offered, None, FIRST, settle)
        elif (
            live.dim() == 0 and isinstance(offered, TensorInfo) and offered.shape == (1,) and not live.is_meta
        ):
            # load_state_dict() takes a one-element vector for a scalar; old checkpoints have them.
            self.want_in_place(key, live.detach().view(1), lambda: settle(live))
        elif not self.accepts(key, offered, tuple(live.shape)):
            return
        elif live.is_meta:
            finish = functools.partial(self.settle_fresh, live, settle)
            self.want_fresh(key, live, offered, self.fresh_device(live), finish)
        else:
            self.want_in_place(key, live, lambda: settle(live))

    def plan_governed(self, entries: list[Entry]) -> None:
        """A tensor that loading code looks at: it gets what the checkpoint holds under each name."""
        present = [entry for entry in entries if entry.fqn in self.inventory]
        if not present:
            if self.is_left_out(entries[0]):
                self.forgive(entries)
            elif self.judges_keys and not any(map(self.is_looked_at, entries)):
                self.miss(entries)
            return
        for entry in present:
            offered = self.inventory[entry.fqn]
            if self.is_looked_at(entry) or self.fits(entry, offered):
                self.plan_value(entry.fqn, offered, entry.value, self.stage_for(entry), entry.settle)
        if not self.info.fsdp_modules:
            self.forgive(entry for entry in entries if entry not in present)
            if len(entries) > 1 and is_meta(present[0].value):
                self.untied.append((entries, present))

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

    def stage_for(self, entry: Entry) -> str:
        governor = entry.place.governor
        return FIRST if governor is None else governor or ROOT

    def plan_value(
        self, key: Any, offered: Any, live: Any, stage: str, settle: Callable[[Any], None]
    ) -> None:
        """A value for loading code, which judges it: a shard where `live` is sharded, else whole.

        A dict that this rank holds itself is handed on as it is, as torch does.
        """
        local = not self.info.broadcast_from_rank0
        fits = isinstance(offered, TensorInfo) and isinstance(live, compat.DTensor)
        if isinstance(offered, Unusable):
            self.usable(key, offered)
        elif fits:
            if local and key in self.source.spread:
                self.raw.setdefault(stage, []).append((key, settle))
            elif offered.shape == tuple(live.shape):
                finish = functools.partial(self.settle_fresh, live, settle) if live.is_meta else settle
                self.want_fresh(key, live, offered, self.fresh_device(live), finish, stage)
            else:
                # Whoever judges the shape finds that of the checkpoint.
                mesh = live.device_mesh
                self.want_whole(
                    key,
                    offered,
                    self.fresh_device(live),
                    lambda filled: settle(compat.replicated(filled, mesh)),
                    stage,
                )
        elif local and not is_meta(live):
            self.raw.setdefault(stage, []).append((key, settle))
        elif isinstance(offered, TensorInfo):
            device = self.fresh_device(live if torch.is_tensor(live) else None)
            self.want_whole(key, offered, device, settle, stage, self.held(key, device))
        else:
            settle(offered.value if isinstance(offered, Carried) else offered)

    def held(self, key: Any, device: torch.device) -> Optional[torch.Tensor]:
        """The source's own tensor where loading code may get it as it is, as torch gives it."""
        if self.assigns or dist.get_rank() or not self.source.is_dict or key not in self.source:
            return None
        value = self.source.value(key)
        if not torch.is_tensor(value) or not has_slices(value) or value.device != device:
            return None
        return value.detach()

    @functools.cached_property
    def assigns(self) -> bool:
        """Whether load_state_dict() puts tensors into the modules instead of copying them."""
        return any(is_meta(entry.value) for entry in self.entries)

    def settle_fresh(self, live: torch.Tensor, settle: Callable[[Any], None], value: torch.Tensor) -> None:
        # One Parameter object for all names of a shared parameter, so that it stays shared.
        settle(nn.Parameter(value, live.requires_grad) if isinstance(live, nn.Parameter) else value)

    def fresh_device(self, live: Optional[torch.Tensor]) -> torch.device:
        """Where a value that the model has no memory for yet is made."""
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
            return compat.current_device(compat.comm_device_type(None, "cpu"))
        return torch.device("cpu")

    # --- apply ---

    def apply(self, fetch: Callable[[str], None]) -> None:
        if self.nothing:
            return
        self.take_raw(FIRST)
        for entry in self.entries:
            self.by_stage.setdefault(self.stage_for(entry), []).append(entry)
        skipped: set[str] = set()
        if self.is_plain:
            skipped = {entry.load_key for entry in self.entries if entry.result is entry.value}
        loaded = self.loadable(skipped)
        if self.metadata is not None:
            loaded._metadata = self.renamed_metadata(self.metadata)  # type: ignore[attr-defined]
        if "" in self.governors:
            self.bring(ROOT, fetch, loaded)
        forgiven = skipped | self.forgiven if self.loads_as_torch else skipped
        with self.brought_when_needed(fetch):
            result = call_load_state_dict(
                self.model, loaded, self.info, assign=self.assigns, strict=self.info.strict and not forgiven
            )
        for entries, present in self.untied:
            tie(entries, present)
        missing = [key for key in result.missing_keys if key.replace(CHECKPOINT_PREFIX, "") not in forgiven]
        self.keys = _IncompatibleKeys(missing, result.unexpected_keys)
        if self.info.strict and forgiven:
            raise_incompatible(self.model, self.keys)

    def loadable(self, skipped: set[str]) -> OrderedDict[str, Any]:
        """The state dict for the model's own load_state_dict(), in the checkpoint's order.

        What is in place already stands for itself. What loading code looks at comes later.
        """
        by_fqn: dict[str, list[Entry]] = {}
        for entry in self.entries:
            by_fqn.setdefault(entry.fqn, []).append(entry)
        loaded: OrderedDict[str, Any] = OrderedDict()
        for key in self.inventory:
            for entry in by_fqn.pop(key, ()):
                if entry.load_key not in skipped:
                    loaded[entry.load_key] = self.stand_in(entry)
            if key in self.unexpected:
                load_key = self.unexpected[key]
                if load_key is None:
                    # Nothing looks at the value; torch counts the key.
                    loaded[key] = None
                elif not self.info.fsdp_modules:
                    loaded[load_key] = Awaited(load_key, self.stage_of(key))
                elif load_key in self.extra:
                    loaded[load_key] = self.extra[load_key]
        # Names that the checkpoint does not have, of tensors that are made of what it has under others.
        for entries in by_fqn.values():
            for entry in entries:
                if entry.load_key not in skipped and entry.has_result and entry.result is not entry.value:
                    loaded[entry.load_key] = entry.result
        return loaded

    def stand_in(self, entry: Entry) -> Any:
        if entry.has_result or entry.place.governor is None:
            # What is in place stands for itself.
            return entry.result
        return Awaited(entry.load_key, self.stage_for(entry))

    @contextlib.contextmanager
    def brought_when_needed(self, fetch: Callable[[str], None]) -> Iterator[None]:
        """Every governor gets its tensors when its loading begins, and they go when it is done."""
        replaced: dict[nn.Module, Any] = {}
        try:
            for place in self.places:
                module = place.module
                if place.governor is None or module in replaced:
                    continue
                if (place.fqn and place.governor == place.fqn) or self.assigns:
                    loader = module._load_from_state_dict
                    replaced[module] = vars(module).get("_load_from_state_dict", MISSING)
                    vars(module)["_load_from_state_dict"] = functools.partial(
                        self.load_one, module, fetch, loader
                    )
            yield
        finally:
            for module, loader in replaced.items():
                if loader is MISSING:
                    del vars(module)["_load_from_state_dict"]
                else:
                    vars(module)["_load_from_state_dict"] = loader

    def load_one(
        self,
        module: nn.Module,
        fetch: Callable[[str], None],
        loader: Callable[..., None],
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *rest: Any,
        **more: Any,
    ) -> None:
        """Stands for a module's `_load_from_state_dict` while the model is loaded."""
        for stage in dict.fromkeys(one.stage for one in state_dict.values() if isinstance(one, Awaited)):
            self.bring(stage, fetch, state_dict)
        if not any(is_meta(value) for value in (*module._parameters.values(), *module._buffers.values())):
            # Parameters that exist stay the objects that they are, whatever else is on meta.
            local_metadata.pop("assign_to_params_buffers", None)
        loader(state_dict, prefix, local_metadata, *rest, **more)

    def bring(self, stage: str, fetch: Callable[[str], None], state_dict: dict[str, Any]) -> None:
        """Put the values of a stage into the dict that loading code is about to see."""
        fetch(stage)
        self.take_raw(stage)
        entries = {entry.load_key: entry for entry in self.by_stage.get(stage, ())}
        for key, value in list(state_dict.items()):
            if not isinstance(value, Awaited) or value.stage != stage:
                continue
            if value.load_key in self.extra:
                state_dict[key] = self.extra.pop(value.load_key)
            elif value.load_key in entries:
                entry = entries[value.load_key]
                state_dict[key] = entry.result
                entry.result = None
        self.done.append(stage)

    def take_raw(self, stage: str) -> None:
        for key, settle in self.raw.pop(stage, ()):
            settle(self.source.tensor(key))

    def written(self) -> str:
        parts = ["what no loading code looks at", *(stage.rstrip(".") for stage in self.done)]
        return ", ".join(parts)

    # --- names and versions ---

    def renamed(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """`state_dict` under the keys of the model's own load_state_dict(), values as they are."""
        self.look()
        names = {entry.fqn: entry.load_key for entry in self.entries}
        result = OrderedDict((names.get(key, key), value) for key, value in state_dict.items())
        metadata = metadata_of(state_dict)
        if metadata is not None:
            result._metadata = self.renamed_metadata(metadata)  # type: ignore[attr-defined]
        return result

    def renamed_metadata(self, metadata: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Versions by the names that modules have inside wrappers, too: DDP's modules would have none."""
        renamed = dict(metadata)
        for place in self.places:
            own = renamed.get(place.fqn[:-1])
            if own is not None:
                renamed.setdefault(place.path[:-1], dict(own))
        return renamed

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
        return not self.governors and not self.has_users_code

    @functools.cached_property
    def has_users_code(self) -> bool:
        return any(place.is_users for place in self.places) or not self.loads_as_torch

    @functools.cached_property
    def loads_as_torch(self) -> bool:
        """Whether the model's `load_state_dict` is torch's."""
        call = own_method(self.model, "load_state_dict")
        return getattr(call, "func", getattr(call, "__func__", None)) is nn.Module.load_state_dict


def raise_incompatible(model: nn.Module, keys: _IncompatibleKeys) -> None:
    """The error of torch's strict load_state_dict(), where it was not asked to be strict itself."""
    lines = [
        f"{what} key(s) in state_dict: " + ", ".join(f'"{key}"' for key in names) + ". "
        for what, names in (("Missing", keys.missing_keys), ("Unexpected", keys.unexpected_keys))
        if names
    ]
    if lines:
        text = "\n\t".join(lines)
        raise RuntimeError(f"Error(s) in loading state_dict for {type(model).__name__}:\n\t{text}")


def topmost(prefixes: Iterable[str]) -> list[str]:
    """The prefixes without those that stand below another one."""
    every = list(dict.fromkeys(prefixes))
    return [one for one in every if not any(one != other and one.startswith(other) for other in every)]
