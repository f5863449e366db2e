"""Hand what was loaded to a model, through its own `load_state_dict()`.

What loading code of the model can look at comes when that code is about to run, one such module at a time.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Optional

from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from torch_dcp_backport.state_dict.destination import FIRST
from torch_dcp_backport.state_dict.entries import Entry, is_meta, tie
from torch_dcp_backport.state_dict.fqn import CHECKPOINT_PREFIX
from torch_dcp_backport.state_dict.govern import Place
from torch_dcp_backport.state_dict.model import own_method
from torch_dcp_backport.state_dict.model_plan import ROOT, Awaited, ModelPlan, stage_of
from torch_dcp_backport.state_dict.options import StateDictInfo
from torch_dcp_backport.state_dict.source import Source

MISSING = object()


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


class Handover:
    """One model's part of a load, once every rank agreed."""

    def __init__(
        self,
        model: nn.Module,
        info: StateDictInfo,
        plan: ModelPlan,
        source: Source,
        fetch: Callable[[str], None],
    ) -> None:
        """`fetch(stage)` brings what belongs to a stage."""
        self.model = model
        self.info = info
        self.plan = plan
        self.source = source
        self.fetch = fetch
        self.by_stage: dict[str, list[Entry]] = {}

    def run(self, is_plain: bool, forgives: bool) -> _IncompatibleKeys:
        """Load the model; its missing and unexpected keys.

        Args:
            is_plain: nothing can notice whether what is in place already goes through load_state_dict().
            forgives: names that may be missing are no error; they are judged here.
        """
        plan = self.plan
        self.take_raw(FIRST)
        for entry in plan.entries:
            self.by_stage.setdefault(stage_of(entry), []).append(entry)
        skipped: set[str] = set()
        if is_plain:
            skipped = {entry.load_key for entry in plan.entries if entry.result is entry.value}
        loaded = self.loadable(skipped)
        if plan.metadata is not None:
            loaded._metadata = renamed_metadata(plan.metadata, plan.places)  # type: ignore[attr-defined]
        if "" in plan.governors:
            self.bring(ROOT, loaded)
        forgiven = skipped | plan.forgiven if forgives else skipped
        with self.brought_when_needed():
            result = call_load_state_dict(
                self.model, loaded, self.info, assign=plan.assigns, strict=self.info.strict and not forgiven
            )
        for entries, present in plan.untied:
            tie(entries, present)
        missing = [key for key in result.missing_keys if key.replace(CHECKPOINT_PREFIX, "") not in forgiven]
        keys = _IncompatibleKeys(missing, result.unexpected_keys)
        if self.info.strict and forgiven:
            raise_incompatible(self.model, keys)
        return keys

    def loadable(self, skipped: set[str]) -> OrderedDict[str, Any]:
        """The state dict for the model's own load_state_dict(), in the checkpoint's order.

        What is in place already stands for itself. What loading code looks at comes later.
        """
        by_fqn: dict[str, list[Entry]] = {}
        for entry in self.plan.entries:
            by_fqn.setdefault(entry.fqn, []).append(entry)
        loaded: OrderedDict[str, Any] = OrderedDict()
        for key in self.plan.inventory:
            for entry in by_fqn.pop(key, ()):
                if entry.load_key not in skipped:
                    loaded[entry.load_key] = self.stand_in(entry)
            if key in self.plan.unexpected:
                load_key = self.plan.unexpected[key]
                if load_key is None:
                    # Nothing looks at the value; torch counts the key.
                    loaded[key] = None
                elif not self.info.fsdp_modules:
                    loaded[load_key] = Awaited(load_key, self.plan.stage_of_key(key))
                elif load_key in self.plan.extra:
                    loaded[load_key] = self.plan.extra[load_key]
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
        return Awaited(entry.load_key, stage_of(entry))

    @contextlib.contextmanager
    def brought_when_needed(self) -> Iterator[None]:
        """Every governor gets its tensors when its loading begins, and they go when it is done."""
        replaced: dict[nn.Module, Any] = {}
        try:
            for place in self.plan.places:
                module = place.module
                if place.governor is None or module in replaced:
                    continue
                if (place.fqn and place.governor == place.fqn) or self.plan.assigns:
                    loader = module._load_from_state_dict
                    replaced[module] = vars(module).get("_load_from_state_dict", MISSING)
                    vars(module)["_load_from_state_dict"] = functools.partial(self.load_one, module, loader)
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
        loader: Callable[..., None],
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *rest: Any,
        **more: Any,
    ) -> None:
        """Stands for a module's `_load_from_state_dict` while the model is loaded."""
        for stage in dict.fromkeys(one.stage for one in state_dict.values() if isinstance(one, Awaited)):
            self.bring(stage, state_dict)
        if not any(is_meta(value) for value in (*module._parameters.values(), *module._buffers.values())):
            # Parameters that exist stay the objects that they are, whatever else is on meta.
            local_metadata.pop("assign_to_params_buffers", None)
        loader(state_dict, prefix, local_metadata, *rest, **more)

    def bring(self, stage: str, state_dict: dict[str, Any]) -> None:
        """Put the values of a stage into the dict that loading code is about to see."""
        self.fetch(stage)
        self.take_raw(stage)
        entries = {entry.load_key: entry for entry in self.by_stage.get(stage, ())}
        for key, value in list(state_dict.items()):
            if not isinstance(value, Awaited) or value.stage != stage:
                continue
            if value.load_key in self.plan.extra:
                state_dict[key] = self.plan.extra.pop(value.load_key)
            elif value.load_key in entries:
                entry = entries[value.load_key]
                state_dict[key] = entry.result
                entry.result = None
        self.plan.done.append(stage)

    def take_raw(self, stage: str) -> None:
        for key, owner in self.plan.raw.pop(stage, ()):
            self.plan.take(owner, self.source.tensor(key))


def renamed_metadata(
    metadata: Mapping[str, dict[str, Any]], places: Iterable[Place]
) -> dict[str, dict[str, Any]]:
    """Versions by the names that modules have inside wrappers, too: DDP's modules would have none."""
    renamed = dict(metadata)
    for place in places:
        own = renamed.get(place.fqn[:-1])
        if own is not None:
            renamed.setdefault(place.path[:-1], dict(own))
    return renamed


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
