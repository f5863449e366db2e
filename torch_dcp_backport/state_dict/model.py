"""Get and load a model's state.

The caller's dict is never changed, and nothing of the model is written before every rank agreed.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Optional, Union

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.parameter import is_lazy

from torch_dcp_backport import compat
from torch_dcp_backport.state_dict.collect import full_or_cpu
from torch_dcp_backport.state_dict.fqn import (
    CHECKPOINT_PREFIX,
    FLAT_PARAM,
    ExtraState,
    Names,
    get_fqns,
    walk_with_owner,
)
from torch_dcp_backport.state_dict.load import Load, problem_of, run, snapshot
from torch_dcp_backport.state_dict.options import StateDictInfo
from torch_dcp_backport.transfer import Problem, TensorInfo

TITLE = "cannot load this model state dict"
#: Their own loading code does nothing where a key is not there.
NORMS = (nn.modules.batchnorm._NormBase, nn.modules.instancenorm._InstanceNorm)


def own_method(obj: Union[nn.Module, torch.optim.Optimizer], api: str) -> Callable[..., Any]:
    """`obj.state_dict` or the like, even where torch's `_patch_model_state_dict` replaced it.

    What it replaced stands in a set in torch's own module; calling that from here would not end.
    """
    call = getattr(obj, api)
    stock = sys.modules.get("torch.distributed.checkpoint.state_dict")
    if stock is not None and call in stock._patched_state_dict:
        return functools.partial(getattr(type(obj), api), self=obj)
    return call  # type: ignore[no-any-return]


# --- get -------------------------------------------------------------------------------------


@torch.no_grad()
def get_model_state(model: nn.Module, info: StateDictInfo) -> dict[str, Any]:
    if not info.handle_model:
        return {}
    with info.fsdp_context():
        state: dict[str, Any] = own_method(model, "state_dict")()
    names = Names(model, info.dsd_fqn_modifiers)
    for key in list(state):
        # Hooks may have added keys that are no names.
        fqn = key if names.are_plain and key in info.fqn_param_mapping else canonical(model, key, info)
        if fqn != key:
            state[fqn] = state.pop(key)
    if info.submodule_prefixes:
        state = below(state, info.submodule_prefixes, keep=info.keep_submodule_prefixes)
    if info.ignore_frozen_params:
        for name, param in model.named_parameters():
            if not param.requires_grad:
                for fqn in get_fqns(model, name):
                    state.pop(fqn, None)
    for key in [key for key, value in state.items() if torch.is_tensor(value) and value.is_meta]:
        del state[key]
    result: dict[str, Any] = full_or_cpu(state, info)
    return result


def canonical(model: nn.Module, key: str, info: StateDictInfo) -> str:
    """The FQN of a key of `model.state_dict()`.

    Raises:
        RuntimeError: a key that differs from its FQN by more than DDP's and the compiler's prefixes.
    """
    (fqn,) = get_fqns(model, key, dsd_fqn_modifiers=info.dsd_fqn_modifiers)
    if fqn != key and [part for part in key.split(".") if part not in ("module", "_orig_mod")] != [
        part for part in fqn.split(".") if part not in ("module", "_orig_mod")
    ]:
        raise RuntimeError(f"the state dict has an unexpected key {key}; its FQN would be {fqn}")
    return fqn


def below(state: Mapping[str, Any], prefixes: Iterable[str], keep: bool) -> dict[str, Any]:
    """The entries of the submodules with these prefixes."""
    return {
        fqn if keep else fqn[len(prefix) :]: value
        for fqn, value in state.items()
        for prefix in prefixes
        if fqn.startswith(prefix)
    }


def complaint_about(state: Mapping[Any, Any], info: StateDictInfo) -> Optional[str]:
    """Why a model state dict cannot be one that this call gives or takes; None where it can."""
    if not isinstance(state, Mapping):
        return f"not a state dict but a {type(state).__name__}"
    may_be_empty = (
        info.submodule_prefixes
        or info.ignore_frozen_params
        or (info.cpu_offload and info.full_state_dict)
        or not info.strict
        or info.broadcast_from_rank0
    )
    if info.handle_model and not state and not may_be_empty:
        return "the model state dict is empty" + (
            ". If only rank 0 holds it, set broadcast_from_rank0=True" if info.full_state_dict else ""
        )
    for key in state:
        if FLAT_PARAM in str(key):
            return f"{key} contains {FLAT_PARAM}, which happens where the model is not the root FSDP module"
    return None


# --- load ------------------------------------------------------------------------------------


@dataclass
class Entry:
    """One checkpoint key of this model, and everything that shares its tensor."""

    fqn: str
    value: Union[torch.Tensor, ExtraState]
    #: The key that the model's own load_state_dict() knows it by (with DDP's and the compiler's prefixes).
    load_key: str
    #: Whether the tensor may be written in place: nothing between the checkpoint and it.
    direct: bool = True
    #: What to pass to load_state_dict().
    result: Any = None
    has_result: bool = False


def entries_of(model: nn.Module, info: StateDictInfo) -> list[Entry]:
    found = []
    names = Names(model, info.dsd_fqn_modifiers)
    for name, value, owner in walk_with_owner(model, info.dsd_fqn_modifiers, every_name=True):
        fqns, load_keys = names.fqns(name), names.fqns(name, False, False)
        if len(fqns) > 1:
            # An FSDP1 FlatParameter: FSDP1's own hooks take the FQNs.
            found += [Entry(fqn, value, fqn, direct=False) for fqn in sorted(fqns)]
            continue
        direct = torch.is_tensor(value) and is_direct(value, owner, info)
        found.append(Entry(fqns.pop(), value, load_keys.pop(), direct=direct))
    return found


def is_direct(value: torch.Tensor, owner: nn.Module, info: StateDictInfo) -> bool:
    """Whether load_state_dict() would do nothing with a checkpoint's tensor but copy it to `value`.

    FSDP1, custom loading code and tensor subclasses (quantized weights) do more; they get whole
    tensors through load_state_dict().
    """
    if isinstance(value, compat.DTensor):
        return type(compat.local_part(value)) is torch.Tensor
    if info.fsdp_modules or is_lazy(value) or has_custom_loading(owner):
        return False
    return type(value) in compat.PLAIN_TENSORS


def has_custom_loading(module: nn.Module) -> bool:
    """Whether code outside torch takes part in loading this very module."""
    if not type(module)._load_from_state_dict.__module__.startswith("torch."):
        return True
    hooks = module._load_state_dict_pre_hooks.values()
    return any(not hook_module(hook).startswith("torch.") for hook in hooks)


def hook_module(hook: Any) -> str:
    hook = getattr(hook, "hook", hook)
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__module__", None) or type(hook).__module__


@torch.no_grad()
def load_model_state(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    info: StateDictInfo,
    complaint: Optional[str] = None,
    optional: bool = False,
) -> _IncompatibleKeys:
    """Load `state_dict` into `model`; `complaint` is what is already known to be wrong with it.

    `optional`: where the source's dict is empty, there is nothing to load.

    Raises:
        RuntimeError: missing or unexpected keys (strict), wrong shapes, wrong types. With
            `full_state_dict` the same on every rank and before anything was written.
    """
    if not info.full_state_dict:
        if complaint:
            raise RuntimeError(complaint)
        if not info.handle_model or not state_dict:
            return _IncompatibleKeys([], [])
        return call_load_state_dict(model, renamed(entries_of(model, info), state_dict), info)
    problems = [Problem(complaint)] if complaint else []
    entries: list[Entry] = []
    try:
        if info.handle_model:
            entries = entries_of(model, info)
    except Exception as error:
        if not info.broadcast_from_rank0:
            raise
        # The other ranks wait.
        problems.append(problem_of(error))
    shards = any(isinstance(entry.value, compat.DTensor) for entry in entries)
    if not info.broadcast_from_rank0 and not (shards and dist.is_initialized()):
        # Nobody else takes part, so nobody else needs to hear of it.
        if complaint:
            raise RuntimeError(complaint)
        if not state_dict:
            return _IncompatibleKeys([], [])
    if not info.handle_model:
        return _IncompatibleKeys([], [])
    load = ModelLoad(model, entries, state_dict, info, problems, optional)
    run(load, load.given, broadcast=info.broadcast_from_rank0)
    return load.keys


def renamed(entries: Iterable[Entry], state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """`state_dict` under the keys of the model's own load_state_dict()."""
    names = {entry.fqn: entry.load_key for entry in entries}
    result = OrderedDict((names.get(key, key), value) for key, value in state_dict.items())
    if hasattr(state_dict, "_metadata"):
        # Versions of the modules that wrote it, by module name; load_state_dict() reads them.
        result._metadata = state_dict._metadata  # type: ignore[attr-defined]
    return result


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
        entries: list[Entry],
        state_dict: Mapping[str, Any],
        info: StateDictInfo,
        problems: list[Problem],
        optional: bool,
    ) -> None:
        super().__init__(problems)
        self.optional = optional
        self.nothing = False
        self.model = model
        self.entries = entries
        self.given = snapshot(state_dict)
        self.info = info
        self.unexpected: list[str] = []
        #: Missing and unexpected keys, once it is applied.
        self.keys = _IncompatibleKeys([], [])

    def plan(self, inventory: Mapping[Any, Any]) -> None:
        if self.optional and not inventory:
            self.nothing = True
            return
        known = {entry.fqn for entry in self.entries}
        self.unexpected = [key for key in inventory if key not in known]
        custom = self.loads_customly
        # Custom loading code may know keys that nothing else knows, and may do without others.
        if self.info.strict and not custom and not self.info.fsdp_modules:
            self.problems += [Problem("Unexpected key(s) in state_dict", key) for key in self.unexpected]
        position = {key: index for index, key in enumerate(inventory)}
        for aliases in self.tied():
            present = [entry for entry in aliases if entry.fqn in inventory]
            if not present:
                if self.info.strict and not custom:
                    self.problems += [Problem("Missing key(s) in state_dict", one.fqn) for one in aliases]
                continue
            # Several names of one tensor: one of them in the checkpoint is enough (safetensors keep
            # only one), and the last one loaded is what stays.
            entry = max(present, key=lambda one: position[one.fqn])
            self.plan_entry(entry, aliases, inventory[entry.fqn])

    def tied(self) -> Iterable[list[Entry]]:
        """The entries, those of one shared parameter together."""
        groups: dict[Any, list[Entry]] = {}
        for entry in self.entries:
            own = id(entry.value) if entry.direct else entry.fqn
            groups.setdefault(own, []).append(entry)
        return groups.values()

    def plan_entry(self, entry: Entry, aliases: list[Entry], offered: Any) -> None:
        def settle(result: Any) -> None:
            for one in aliases:
                one.result, one.has_result = result, True

        live, key = entry.value, entry.fqn
        if isinstance(live, ExtraState):
            if isinstance(offered, TensorInfo):
                self.want_whole(key, offered, self.fresh_device(None), settle)
            elif not self.info.broadcast_from_rank0:
                # Of whatever kind: it does not travel.
                settle(self.given[key])
            elif self.usable(key, offered):
                settle(offered)
        elif not entry.direct and not isinstance(live, compat.DTensor):
            # Its own loading code judges the shape.
            if isinstance(offered, TensorInfo) or self.accepts(key, offered, tuple(live.shape)):
                self.want_whole(key, offered, self.fresh_device(live), settle)
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

    def live(self) -> Iterable[object]:
        return (entry.value for entry in self.entries)

    def settle_fresh(self, live: torch.Tensor, settle: Callable[[Any], None], value: torch.Tensor) -> None:
        if self.info.cpu_offload and isinstance(value, compat.DTensor):
            value = value.cpu()
        # One Parameter object for all names of a shared parameter, so that it stays shared.
        settle(nn.Parameter(value, live.requires_grad) if isinstance(live, nn.Parameter) else value)

    def fresh_device(self, live: Optional[torch.Tensor]) -> torch.device:
        """Where a value that the model has no memory for yet is made."""
        if isinstance(live, compat.DTensor):
            return compat.current_device(live.device_mesh.device_type)
        if self.info.cpu_offload:
            return torch.device("cpu")
        if live is not None and not live.is_meta:
            return live.device
        return self.device_of_model

    @functools.cached_property
    def device_of_model(self) -> torch.device:
        for entry in self.entries:
            value = entry.value
            if torch.is_tensor(value) and not value.is_meta and value.dim():
                return value.device
        for entry in self.entries:
            if isinstance(entry.value, compat.DTensor):
                return compat.current_device(entry.value.device_mesh.device_type)
        if dist.is_initialized():
            return compat.current_device(compat.comm_device_type(None, "cpu"))
        return torch.device("cpu")

    def apply(self) -> None:
        if self.nothing:
            return
        done: set[str] = set()
        if self.is_plain:
            done = {entry.load_key for entry in self.entries if entry.result is entry.value}
        loaded = {
            entry.load_key: entry.result
            for entry in self.entries
            if entry.has_result and entry.load_key not in done
        }
        # What nothing in the model is known by goes to load_state_dict() too: it may be known to hooks.
        loaded.update((key, self.given[key]) for key in self.unexpected if key in self.given)
        assign = any(torch.is_tensor(entry.value) and entry.value.is_meta for entry in self.entries)
        strict = self.info.strict and not done
        result = call_load_state_dict(self.model, loaded, self.info, assign=assign, strict=strict)
        # A rank that was given nothing has not told load_state_dict() of them.
        told = set(result.unexpected_keys)
        result.unexpected_keys.extend(
            key for key in self.unexpected if key not in self.given and key not in told
        )
        missing = [key for key in result.missing_keys if key.replace(CHECKPOINT_PREFIX, "") not in done]
        self.keys = _IncompatibleKeys(missing, result.unexpected_keys)

    @property
    def is_custom(self) -> bool:
        # FSDP1's own code talks to the other ranks: one that fails in it must not wait for them.
        return not self.is_plain and not self.info.fsdp_modules

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether load_state_dict() would do nothing with a tensor that is in place but copy it to itself.

        With many small DTensors that costs more than the transfer. Nobody can see the difference: the
        keys were judged before, and no code outside torch takes part.
        """
        return (
            not self.loads_customly
            and not self.info.fsdp_modules
            and type(self.model).load_state_dict is nn.Module.load_state_dict
            and "load_state_dict" not in vars(self.model)
            and all(map(loads_plainly, self.model.modules()))
        )

    @functools.cached_property
    def loads_customly(self) -> bool:
        return any(has_custom_loading(module) for module in self.model.modules())


def loads_plainly(module: nn.Module) -> bool:
    """Whether nothing but torch's own code, which does nothing for a key that is not there, loads it."""
    own = type(module)._load_from_state_dict is nn.Module._load_from_state_dict or isinstance(module, NORMS)
    before = map(hook_module, module._load_state_dict_pre_hooks.values())
    after = map(hook_module, module._load_state_dict_post_hooks.values())
    return (
        own
        and "_load_from_state_dict" not in vars(module)
        # torch.nn's (spectral_norm) compute keys from others.
        and all(name.startswith("torch.distributed.") for name in before)
        and all(name.startswith("torch.") for name in after)
    )


def unflatten_model_state(model: nn.Module, state_dict: Optional[Mapping[Any, Any]]) -> Mapping[str, Any]:
    """The deprecated form {submodule: its state dict} as one state dict with FQNs; None as an empty one."""
    if state_dict is None:
        return {}
    if not isinstance(state_dict, Mapping) or not any(isinstance(key, nn.Module) for key in state_dict):
        return state_dict
    warnings.warn(
        "A model state dict with modules as keys is deprecated: use one state dict with FQNs as keys.",
        FutureWarning,
        stacklevel=3,
    )
    names = {module: name for name, module in model.named_modules()}
    result: dict[str, Any] = {}
    for module, part in state_dict.items():
        if module in names:
            (prefix,) = get_fqns(model, names[module])
            result.update({f"{prefix}.{key}": value for key, value in part.items()})
    return result
