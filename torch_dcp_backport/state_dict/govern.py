"""Which loading code stands between a state dict and the tensors of a model.

Only looks at modules: nothing is called, nothing is written. The rule: a tensor may be written straight into
its place only if nothing on the way from the root to its owner can see, change, rename, drop or judge it.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Optional

from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE
from torch.nn.parallel import DistributedDataParallel

from torch_dcp_backport.state_dict.fqn import CHECKPOINT_PREFIX, compiled_modules, declares

#: Their own loading code looks at nothing where every key of theirs is there, and no other.
NORMS = (nn.modules.batchnorm._NormBase, nn.modules.instancenorm._InstanceNorm)
#: Loading hooks of torch's that rename a wrapper's keys, or look at the parameters alone.
BLIND_HOOKS = "torch.distributed."


@dataclass(eq=False)
class Place:
    """A module as load_state_dict() comes to it."""

    module: nn.Module
    #: Its path by the model's own attributes, with a point behind it; "" for the root.
    path: str
    #: The same as the keys of load_state_dict() have it, and as FQNs do.
    prefix: str
    fqn: str
    parent: Optional[Place]
    #: Whether FQNs leave its own name for its child out; whether it declares children that its hooks rename.
    wraps: bool
    renames: bool
    #: Whether its loading code sees the state dict, whatever the keys.
    looks: bool
    #: Whether hooks or loading code outside torch see its keys; whether code outside torch takes part at all.
    is_users: bool
    can_fail: bool
    #: Whether a hook of the user's runs after everything here is loaded.
    looked_at_after: bool
    #: The FQN prefix of the topmost module whose loading code looks at what is loaded here, if any.
    governor: Optional[str] = None


def places_of(model: nn.Module, modifiers: str) -> list[Place]:
    """The modules of a model in the order of load_state_dict(); those with several names under each."""
    wrappers: tuple[type[nn.Module], ...] = (DistributedDataParallel, *compiled_modules())
    return list(_visit(_place(model, "", "", "", None, modifiers, wrappers), modifiers, wrappers))


def _place(
    module: nn.Module,
    path: str,
    prefix: str,
    fqn: str,
    parent: Optional[Place],
    modifiers: str,
    wrappers: tuple[type[nn.Module], ...],
) -> Place:
    users = is_users(module)
    after = any(map(is_users_hook, module._load_state_dict_post_hooks.values())) if users else False
    return Place(
        module,
        path,
        prefix,
        fqn,
        parent,
        isinstance(module, wrappers),
        declares(module, modifiers),
        looks(module),
        users,
        users or (sets_extra_state(module) and is_users_hook(type(module).set_extra_state)),
        after or (parent is not None and parent.looked_at_after),
    )


def _visit(place: Place, modifiers: str, wrappers: tuple[type[nn.Module], ...]) -> Iterator[Place]:
    yield place
    module = place.module
    # A renamed child's state stands under its parent's own name.
    hidden = set(getattr(module, modifiers)().values()) if place.renames else ()
    for name, child in module._modules.items():
        if child is None:
            continue
        step = "" if name in hidden else f"{name}."
        prefix_step = "" if step == CHECKPOINT_PREFIX else step
        path, prefix = place.path + step, place.prefix + prefix_step
        fqn = place.fqn if place.wraps else place.fqn + prefix_step
        below = _place(child, path, prefix, fqn, place, modifiers, wrappers)
        yield from _visit(below, modifiers, wrappers)


def govern(places: Iterable[Place], keys: Collection[object], also: Collection[str]) -> list[str]:
    """Find every place's governor for a state dict with these keys. Their FQN prefixes, in load order.

    Args:
        places: as `places_of` gives them.
        keys: the FQNs in the state dict.
        also: FQN prefixes that count as governors whatever stands there.
    """
    found: dict[str, None] = {}
    for place in places:
        above = place.parent
        place.governor = above.governor if above is not None else None
        if place.governor is None and (
            place.looks
            or place.renames
            or place.fqn in also
            or (isinstance(place.module, NORMS) and not is_complete(place, keys))
        ):
            place.governor = place.fqn
            found[place.fqn] = None
    return list(found)


def looks(module: nn.Module) -> bool:
    """Whether loading code of this module sees the state dict, or what is below. Norms are another case."""
    if has_own_loader(module):
        return True
    if sets_extra_state(module) and any(child is not None for child in module._modules.values()):
        # It runs before the children are loaded, and may make or change them.
        return True
    hooks = module._load_state_dict_pre_hooks.values()
    return any(not hook_module(hook).startswith(BLIND_HOOKS) for hook in hooks)


def has_own_loader(module: nn.Module) -> bool:
    if "_load_from_state_dict" in vars(module):
        return True
    loader = type(module)._load_from_state_dict
    if loader is nn.Module._load_from_state_dict:
        return False
    return all(loader is not kind._load_from_state_dict for kind in NORMS)


def is_complete(place: Place, keys: Collection[object]) -> bool:
    """Whether a norm finds each of its keys: old checkpoints lack some, and it makes them up."""
    module: Any = place.module
    if "num_batches_tracked" in module._buffers and place.fqn + "num_batches_tracked" not in keys:
        return False
    # An InstanceNorm without statistics complains of a checkpoint that has them.
    extra = ("running_mean", "running_var")
    return all(module._buffers.get(name) is not None or place.fqn + name not in keys for name in extra)


def is_users(module: nn.Module) -> bool:
    """Whether hooks or loading code outside torch see this very module's keys."""
    if has_own_loader(module):
        loader = vars(module).get("_load_from_state_dict", type(module)._load_from_state_dict)
        if is_users_hook(loader):
            return True
    hooks = (*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values())
    return bool(hooks) and any(map(is_users_hook, hooks))


def is_users_hook(hook: Any) -> bool:
    return not hook_module(hook).startswith("torch.")


def hook_module(hook: Any) -> str:
    hook = getattr(hook, "hook", hook)
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__module__", None) or type(hook).__module__


def sets_extra_state(module: nn.Module) -> bool:
    return type(module).set_extra_state is not nn.Module.set_extra_state


def names_of(place: Place) -> Iterator[tuple[str, Any]]:
    """(name, value) of what a module holds itself, in the order in which load_state_dict() loads it.

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
