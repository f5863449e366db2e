"""Give what was loaded to a model, through its own `load_state_dict()`.

Tensors that loading code of the model can look at are fetched right before that code runs, one such module at
a time.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from torch_dcp_backport.state_dict.destination import FIRST
from torch_dcp_backport.state_dict.model.outline import KeyEntry, Outline, is_meta, without_wrappers
from torch_dcp_backport.state_dict.model.places import renamed_metadata, tensors_of
from torch_dcp_backport.state_dict.model.plan import ROOT, ModelPlan
from torch_dcp_backport.state_dict.options import StateDictInfo
from torch_dcp_backport.state_dict.patched import original_method
from torch_dcp_backport.state_dict.source import metadata_of

MISSING = object()


class Awaited(NamedTuple):
    """A placeholder in a state dict, until the loading code that can look at the value is about to run."""

    load_key: str
    stage: str


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
        result = original_method(model, "load_state_dict")(
            state_dict=state_dict, strict=strict, assign=assign
        )
    return result  # type: ignore[no-any-return]


class ModelLoad:
    """One model's part of a load, once every rank agreed."""

    def __init__(self, plan: ModelPlan, fetch: Callable[[str], None]) -> None:
        """`fetch(stage)` brings the tensors of a stage."""
        self.plan = plan
        self.outline = plan.outline
        self.fetch = fetch
        self.by_stage: dict[str, list[KeyEntry]] = {}
        #: Unexpected keys that are what the model's own load_state_dict() calls another tensor.
        self.homonyms: list[Any] = []

    def run(self) -> _IncompatibleKeys:
        """Load the model, and return its missing and unexpected keys."""
        plan, outline = self.plan, self.outline
        strict = outline.info.strict
        self.take_raw(FIRST)
        for entry in outline.entries:
            self.by_stage.setdefault(plan.load_of(entry).stage, []).append(entry)
        skipped: set[str] = set()
        if plan.is_plain:
            skipped = {entry.load_key for entry in outline.entries if plan.values.get(entry) is entry.value}
        loaded = self.loadable(skipped)
        if plan.metadata is not None:
            loaded._metadata = plan.metadata  # type: ignore[attr-defined]
        if "" in plan.hooks.prefixes:
            self.bring(ROOT, loaded)
        # Names that may be missing are no error: where the model loads as torch, its keys are judged here.
        forgiven = skipped | plan.forgiven if outline.loads_as_torch else skipped
        with self.brought_when_needed():
            result = call_load_state_dict(
                outline.model, loaded, outline.info, assign=outline.assigns, strict=strict and not forgiven
            )
        for entries, present in plan.untied:
            tie(entries, present)
        missing = [key for key in result.missing_keys if without_wrappers(key) not in forgiven]
        given = {key if load_key is None else load_key: key for key, load_key in plan.unexpected.items()}
        keys = by_fqn(outline, _IncompatibleKeys(missing, result.unexpected_keys), given)
        if self.homonyms and isinstance(keys, _IncompatibleKeys):
            keys.unexpected_keys.extend(self.homonyms)
        if strict and (forgiven or self.homonyms):
            raise_incompatible(outline.model, keys)
        return keys

    def loadable(self, skipped: set[str]) -> OrderedDict[str, Any]:
        """The state dict for the model's own load_state_dict(), in the checkpoint's order.

        A tensor that is in place already is its own value. Tensors below a loading hook follow later.
        """
        plan, values = self.plan, self.plan.values
        by_fqn: dict[str, list[KeyEntry]] = {}
        for entry in self.outline.entries:
            by_fqn.setdefault(entry.fqn, []).append(entry)
        own = {entry.load_key for entry in self.outline.entries}
        loaded: OrderedDict[str, Any] = OrderedDict()
        for key in plan.inventory:
            for entry in by_fqn.pop(key, ()):
                if entry.load_key in skipped:
                    continue
                if entry in values or plan.load_of(entry).stage == FIRST:
                    loaded[entry.load_key] = values.get(entry)
                else:
                    loaded[entry.load_key] = Awaited(entry.load_key, plan.load_of(entry).stage)
            if key in plan.unexpected:
                load_key = plan.unexpected[key]
                if load_key is None and key in own:
                    # "module.weight" in a dict for DDP: the model's own code would take it for "weight".
                    self.homonyms.append(key)
                elif load_key is None:
                    # No code looks at the value; torch counts the key.
                    loaded[key] = None
                elif not self.outline.info.fsdp_modules:
                    loaded[load_key] = Awaited(load_key, plan.stage_of_key(key))
                elif load_key in plan.extra:
                    loaded[load_key] = plan.extra[load_key]
        # Names that the checkpoint does not have, of tensors that are made of what it has under others.
        for entries in by_fqn.values():
            for entry in entries:
                if entry.load_key not in skipped and values.get(entry, entry.value) is not entry.value:
                    loaded[entry.load_key] = values[entry]
        return loaded

    @contextlib.contextmanager
    def brought_when_needed(self) -> Iterator[None]:
        """Give every module with a hook its tensors when its loading begins; they go when it is done."""
        replaced: dict[nn.Module, Any] = {}
        try:
            for place, prefix in self.plan.hooks.by_place.items():
                module = place.module
                if module not in replaced and ((prefix and prefix == place.fqn) or self.outline.assigns):
                    loader = module._load_from_state_dict
                    replaced[module] = vars(module).get("_load_from_state_dict", MISSING)
                    vars(module)["_load_from_state_dict"] = functools.partial(
                        self.load_module, module, loader
                    )
            yield
        finally:
            for module, loader in replaced.items():
                if loader is MISSING:
                    del vars(module)["_load_from_state_dict"]
                else:
                    vars(module)["_load_from_state_dict"] = loader

    def load_module(
        self,
        module: nn.Module,
        loader: Callable[..., None],
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *rest: Any,
        **more: Any,
    ) -> None:
        """Load a module, in place of its `_load_from_state_dict`: first its stages, then that."""
        stages = dict.fromkeys(value.stage for value in state_dict.values() if isinstance(value, Awaited))
        for stage in stages:
            self.bring(stage, state_dict)
        if not any(map(is_meta, tensors_of(module))):
            # Parameters that exist stay the objects that they are, whatever else is on meta.
            local_metadata.pop("assign_to_params_buffers", None)
        loader(state_dict, prefix, local_metadata, *rest, **more)

    def bring(self, stage: str, state_dict: dict[str, Any]) -> None:
        """Put the values of a stage into the dict that loading code is about to see."""
        self.fetch(stage)
        self.take_raw(stage)
        plan, entries = self.plan, {entry.load_key: entry for entry in self.by_stage.get(stage, ())}
        for key, value in list(state_dict.items()):
            if not isinstance(value, Awaited) or value.stage != stage:
                continue
            if value.load_key in plan.extra:
                state_dict[key] = plan.extra.pop(value.load_key)
            elif value.load_key in entries:
                state_dict[key] = plan.values.pop(entries[value.load_key], None)
        plan.applied.append(stage.rstrip("."))

    def take_raw(self, stage: str) -> None:
        for key, owner in self.plan.raw.pop(stage, ()):
            self.plan.take(owner, self.plan.source.tensor(key))


def load_shards(outline: Outline, state_dict: Mapping[str, Any]) -> _IncompatibleKeys:
    """Load values as they are, by the model's own load_state_dict()."""
    load_keys = {entry.fqn: entry.load_key for entry in outline.entries}
    loaded = OrderedDict((load_keys.get(key, key), value) for key, value in state_dict.items())
    metadata = metadata_of(state_dict)
    if metadata is not None:
        loaded._metadata = renamed_metadata(metadata, outline.places)  # type: ignore[attr-defined]
    if all(fqn == load_key for fqn, load_key in load_keys.items()):
        return call_load_state_dict(outline.model, loaded, outline.info)
    # torch's words have the names of wrappers (DDP's "module."): what its code would judge is judged here, as
    # keys of a full state dict are.
    judged_here = outline.info.strict and outline.loads_as_torch
    strict = outline.info.strict and not judged_here
    result = call_load_state_dict(outline.model, loaded, outline.info, strict=strict)
    keys = by_fqn(outline, result, {load_keys.get(key, key): key for key in state_dict})
    if judged_here:
        raise_incompatible(outline.model, keys)
    return keys


def by_fqn(outline: Outline, keys: _IncompatibleKeys, given: Mapping[Any, Any]) -> _IncompatibleKeys:
    """What load_state_dict() found, by FQN and by the caller's keys: wrappers put their prefixes before both.

    Args:
        given: load key -> key of the caller's dict.
    """
    if not isinstance(keys, _IncompatibleKeys):
        # Of a load_state_dict() that is not torch's.
        return keys
    given = {without_wrappers(str(load_key)): key for load_key, key in given.items()}
    return _IncompatibleKeys(
        list(map(outline.fqn_of, keys.missing_keys)),
        [given.get(without_wrappers(str(key)), key) for key in keys.unexpected_keys],
    )


def tie(entries: Sequence[KeyEntry], present: Sequence[KeyEntry]) -> None:
    """Put one Parameter under all names of a tensor: the first name's object, the last loaded name's values.

    FSDP2 holds on to the object of the first name.
    """
    first, last = (getattr(entry.place.module, entry.name) for entry in (entries[0], present[-1]))
    if first.is_meta or first.dtype != last.dtype:
        first = last
    elif first is not last:
        first.copy_(last)
    for entry in entries:
        if getattr(entry.place.module, entry.name) is not first:
            setattr(entry.place.module, entry.name, first)


def raise_incompatible(model: nn.Module, keys: _IncompatibleKeys) -> None:
    """Raise the error of torch's strict load_state_dict(), where it was not asked to be strict itself."""
    lines = [
        f"{what} key(s) in state_dict: " + ", ".join(f'"{key}"' for key in names) + ". "
        for what, names in (("Missing", keys.missing_keys), ("Unexpected", keys.unexpected_keys))
        if names
    ]
    if lines:
        text = "\n\t".join(lines)
        raise RuntimeError(f"Error(s) in loading state_dict for {type(model).__name__}:\n\t{text}")
