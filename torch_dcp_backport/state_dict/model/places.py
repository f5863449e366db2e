"""The modules of a model as load_state_dict() comes to them, and the loading hooks over each.

Only looks at modules: nothing is called, nothing is written. The rule: a tensor may be written straight into
its place only if nothing on the way from the root to its owner can see, change, rename, drop or judge it.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Optional

from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE
from torch.nn.parallel import DistributedDataParallel

from torch_dcp_backport.state_dict.fqn import CHECKPOINT_PREFIX, compiled_modules, declares

#: Loading code of an InstanceNorm, and of all norms of torch: it reads no value if the state dict has all
#: keys of the module, and no others.
OF_INSTANCE_NORM = nn.modules.instancenorm._InstanceNorm._load_from_state_dict
NORMS = (nn.modules.batchnorm._NormBase._load_from_state_dict, OF_INSTANCE_NORM)
#: The name of the batches that a norm has counted.
COUNT = "num_batches_tracked"
#: Hooks of torch's that rename a wrapper's keys, or look at the parameters alone: they see no value.
KEY_HOOKS = "torch.distributed."


@dataclass(eq=False)
class ModulePlace:
    """A module as load_state_dict() comes to it."""

    module: nn.Module
    parent: Optional[ModulePlace]
    #: Its path by the model's own attributes, with a point behind it; "" for the root.
    path: str
    #: The same as the keys of load_state_dict() have it, and as FQNs do.
    prefix: str
    fqn: str
    #: Whether FQNs leave its name for its child out; whether it declares children that its hooks rename.
    wraps: bool
    renames: bool
    #: Whether it has a loading hook: code that sees the state dict, whatever the keys.
    has_hook: bool
    #: Whether hooks or loading code outside torch see its keys; whether any code outside torch takes part.
    user_loader: bool
    user_code: bool
    #: Whether code outside torch takes part in loading this module, or one that it is part of.
    below_user_code: bool
    #: Whether a hook outside torch runs after everything here is loaded.
    has_post_hook: bool


def places_of(model: nn.Module, modifiers: str) -> list[ModulePlace]:
    """The modules of a model in the order of load_state_dict(); those with several names under each."""
    wrappers: tuple[type[nn.Module], ...] = (DistributedDataParallel, *compiled_modules())
    places: list[ModulePlace] = []
    pending = [place_of(model, None, "", modifiers, wrappers)]
    while pending:
        place = pending.pop()
        places.append(place)
        # A renamed child's state is under its parent's own name.
        hidden = set(getattr(place.module, modifiers)().values()) if place.renames else ()
        children = [
            place_of(child, place, "" if name in hidden else f"{name}.", modifiers, wrappers)
            for name, child in place.module._modules.items()
            if child is not None
        ]
        pending += reversed(children)
    return places


def place_of(
    module: nn.Module,
    parent: Optional[ModulePlace],
    step: str,
    modifiers: str,
    wrappers: tuple[type[nn.Module], ...],
) -> ModulePlace:
    """The place of a child; `step`: its name with a point behind it."""
    path = prefix = fqn = ""
    if parent is not None:
        prefix_step = "" if step == CHECKPOINT_PREFIX else step
        path, prefix = parent.path + step, parent.prefix + prefix_step
        fqn = parent.fqn if parent.wraps else parent.fqn + prefix_step
    user_loader = has_user_loader(module)
    user_code = user_loader or (sets_extra_state(module) and is_user_code(type(module).set_extra_state))
    after = user_loader and any(map(is_user_code, module._load_state_dict_post_hooks.values()))
    return ModulePlace(
        module,
        parent,
        path,
        prefix,
        fqn,
        isinstance(module, wrappers),
        declares(module, modifiers),
        has_loading_hook(module),
        user_loader,
        user_code,
        user_code or (parent is not None and parent.below_user_code),
        after or (parent is not None and parent.has_post_hook),
    )


def hooks_over(
    places: Iterable[ModulePlace], keys: Collection[object], also: Collection[str]
) -> dict[ModulePlace, str]:
    """Place -> FQN prefix of the topmost module, itself or above it, with a loading hook.

    Args:
        places: as `places_of` gives them.
        keys: the FQNs in the state dict.
        also: FQN prefixes of modules that count as if they had a hook.

    Returns:
        those that have one, in the order of load_state_dict().
    """
    hooks: dict[ModulePlace, str] = {}
    for place in places:
        prefix = None if place.parent is None else hooks.get(place.parent)
        if prefix is None and (
            place.has_hook
            or place.renames
            or place.fqn in also
            or (is_norm(place.module) and not is_complete(place, keys))
        ):
            prefix = place.fqn
        if prefix is not None:
            hooks[place] = prefix
    return hooks


def has_loading_hook(module: nn.Module) -> bool:
    """Whether loading code of this module sees the state dict, or what is below. Norms are another case."""
    if has_loader(module):
        return True
    if sets_extra_state(module) and any(child is not None for child in module._modules.values()):
        # It runs before the children are loaded, and may make or change them.
        return True
    hooks = module._load_state_dict_pre_hooks.values()
    return any(not module_of(hook).startswith(KEY_HOOKS) for hook in hooks)


def has_loader(module: nn.Module) -> bool:
    """Whether its `_load_from_state_dict` is neither torch's plain one nor that of a norm."""
    if "_load_from_state_dict" in vars(module):
        return True
    return type(module)._load_from_state_dict is not nn.Module._load_from_state_dict and not is_norm(module)


def is_norm(module: nn.Module) -> bool:
    """Whether its `_load_from_state_dict` is that of a norm of torch."""
    return type(module)._load_from_state_dict in NORMS


def is_complete(place: ModulePlace, keys: Collection[object]) -> bool:
    """Whether a norm finds each of its keys: old checkpoints lack some, and it makes them up."""
    module: Any = place.module
    if COUNT in module._buffers and place.fqn + COUNT not in keys:
        return False
    return bool(module.track_running_stats) or not statistics_of(place, keys)


def statistics_of(place: ModulePlace, keys: Collection[object]) -> list[str]:
    """The FQNs in the state dict by which old checkpoints have a norm's statistics."""
    return [key for name in ("running_mean", "running_var") if (key := place.fqn + name) in keys]


def makes_up(place: ModulePlace, name: str, version: Optional[int]) -> bool:
    """Whether a norm finds a value for a name that the checkpoint lacks: it counts batches anew.

    Args:
        version: the norm's, in the checkpoint; None where that does not say.
    """
    module: Any = place.module
    return name == COUNT and bool(module.track_running_stats) and (version is None or version < 2)


def refuses_statistics(place: ModulePlace, version: Optional[int]) -> bool:
    """Whether a norm keeps no statistics and takes none of a checkpoint: an InstanceNorm of old ones."""
    module: Any = place.module
    is_instance_norm = type(module)._load_from_state_dict is OF_INSTANCE_NORM
    return is_instance_norm and version is None and not module.track_running_stats


def renamed_metadata(
    metadata: Mapping[str, dict[str, Any]], places: Iterable[ModulePlace]
) -> dict[str, dict[str, Any]]:
    """Versions by the names that modules have inside wrappers, too: DDP's modules would have none."""
    renamed = dict(metadata)
    for place in places:
        of_module = renamed.get(place.fqn[:-1])
        if of_module is not None:
            renamed.setdefault(place.path[:-1], dict(of_module))
    return renamed


def has_user_loader(module: nn.Module) -> bool:
    """Whether hooks or loading code outside torch see this very module's keys."""
    if has_loader(module):
        loader = vars(module).get("_load_from_state_dict", type(module)._load_from_state_dict)
        if is_user_code(loader):
            return True
    hooks = (*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values())
    return bool(hooks) and any(map(is_user_code, hooks))


def is_user_code(function: Any) -> bool:
    return not module_of(function).startswith("torch.")


def module_of(function: Any) -> str:
    """The name of the Python module that a hook or method is from."""
    function = getattr(function, "hook", function)
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", None) or type(function).__module__


def sets_extra_state(module: nn.Module) -> bool:
    return type(module).set_extra_state is not nn.Module.set_extra_state


def tensors_of(module: nn.Module) -> Iterable[object]:
    """The parameters and buffers that a module holds itself; None where one is not set."""
    return (*module._parameters.values(), *module._buffers.values())


def values_of(place: ModulePlace) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of what a module holds itself, in the order in which load_state_dict() loads it.

    Both names of a tensor that has two. The value is None for extra state.
    """
    module = place.module
    for name, param in module._parameters.items():
        if param is not None:
            yield name, param
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer
    if sets_extra_state(module):
        yield EXTRA_STATE, None
