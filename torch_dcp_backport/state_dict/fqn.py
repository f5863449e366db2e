"""Names: from a module's own attribute paths to canonical FQNs, without wrappers' prefixes.

Nothing is cached: torch 2.4 to 2.7 cache these names per model, which keeps every model alive
after `del` (pytorch#149354).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Union

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import FSDP_WRAPPED_MODULE
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE
from torch.nn.parallel import DistributedDataParallel

FLAT_PARAM = "_flat_param"
CHECKPOINT_PREFIX: str = checkpoint_wrapper._CHECKPOINT_PREFIX
FSDP_PREFIX = f"{FSDP_WRAPPED_MODULE}."
COMPILED_PREFIX = "_orig_mod."
#: The method by which a module declares children that its state dict hooks rename (pytorch#146053).
FQN_MODIFIERS = "_fqn_modifiers"


class ExtraState:
    """A placeholder for a module's extra state: only the module itself can make the value."""


def get_fqns(
    model: nn.Module,
    name: str,
    skip_ddp_prefix: bool = True,
    skip_compiler_prefix: bool = True,
    *,
    dsd_fqn_modifiers: str = FQN_MODIFIERS,
) -> set[str]:
    """The canonical FQNs of a parameter, buffer or submodule of `model`.

    One name, except for a FlatParameter of FSDP1, which has several.

    Args:
        model: the root model.
        name: as `model.named_parameters()` and the like give it.
        skip_ddp_prefix: leave DDP's "module" out.
        skip_compiler_prefix: leave torch.compile's "_orig_mod" out.
        dsd_fqn_modifiers: name of the method with a module's renamed children.
    """
    name = name.replace(CHECKPOINT_PREFIX, "")
    path = name.split(".")
    if len(path) == 1:
        return {name}
    kept: list[str] = []
    compiled = compiled_modules()
    module: Any = model
    for depth, step in enumerate(path):
        if isinstance(module, DistributedDataParallel):
            module = child(module, step, "module")
            if not skip_ddp_prefix:
                kept.append(step)
            continue
        if isinstance(module, compiled):
            module = child(module, step, "_orig_mod")
            if not skip_compiler_prefix:
                kept.append(step)
            continue
        if isinstance(module, FullyShardedDataParallel):
            if path[depth + 1 : depth + 2] == [FLAT_PARAM]:
                return {".".join([*kept, fqn]) for fqn in getattr(module, FLAT_PARAM)._fqns}
            module = getattr(module, FSDP_WRAPPED_MODULE)
            if step == FSDP_WRAPPED_MODULE:
                continue
        kept.append(step)
        if step == EXTRA_STATE:
            if depth != len(path) - 1:
                raise RuntimeError(
                    f"{EXTRA_STATE} must be the last part of a name, but it is not in {name!r}"
                )
            continue
        if hasattr(module, dsd_fqn_modifiers):
            renamed = getattr(module, dsd_fqn_modifiers)().get(step)
            if renamed and hasattr(module, renamed):
                module = getattr(module, renamed)
        module = getattr(module, step)
    return {".".join(kept).replace(CHECKPOINT_PREFIX, "")}


class ModelNames:
    """`get_fqns` for many names that a model has; its modules are looked at once."""

    def __init__(self, model: nn.Module, dsd_fqn_modifiers: str = FQN_MODIFIERS) -> None:
        self.model = model
        self.dsd_fqn_modifiers = dsd_fqn_modifiers
        wrappers: tuple[type[nn.Module], ...] = (DistributedDataParallel, FullyShardedDataParallel)
        wrappers += compiled_modules()
        #: Whether a name is its FQN, apart from activation checkpointing's prefix.
        self.are_plain = not any(
            isinstance(module, wrappers) or declares(module, dsd_fqn_modifiers) for module in model.modules()
        )

    def fqns(self, name: str, skip_ddp_prefix: bool = True, skip_compiler_prefix: bool = True) -> set[str]:
        if self.are_plain:
            return {name.replace(CHECKPOINT_PREFIX, "")}
        modifiers = self.dsd_fqn_modifiers
        return get_fqns(self.model, name, skip_ddp_prefix, skip_compiler_prefix, dsd_fqn_modifiers=modifiers)


def declares(module: nn.Module, method: str) -> bool:
    """`hasattr`, without the error that nn.Module spells out for a module that plainly lacks the method."""
    kind = type(module)
    if (
        kind.__getattr__ is nn.Module.__getattr__
        and kind.__getattribute__ is object.__getattribute__
        and not hasattr(kind, method)
        and not any(
            method in names for names in (vars(module), module._modules, module._parameters, module._buffers)
        )
    ):
        return False
    return hasattr(module, method)


def compiled_modules() -> tuple[type[nn.Module], ...]:
    """The class of torch.compile's modules; nothing where it was not used.

    Importing torch._dynamo fails while another thread imports it: its imports are circular.
    """
    optimized = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    return () if optimized is None else (optimized,)


def child(wrapper: nn.Module, step: str, expected: str) -> Any:
    if step != expected:
        raise RuntimeError(
            f"{type(wrapper).__name__} holds its module as {expected!r}, but the name says {step!r}"
        )
    return getattr(wrapper, expected)


def walk_model_state(
    model: nn.Module, dsd_fqn_modifiers: str = FQN_MODIFIERS
) -> Iterator[tuple[str, Union[torch.Tensor, ExtraState]]]:
    """Yield (name, value) of everything a state dict of `model` holds; each module once, children first."""
    # A nested function that calls itself would be a cycle, which keeps the model alive.
    yield from visit(model, "", set(), dsd_fqn_modifiers)


def visit(module: nn.Module, prefix: str, seen: set[nn.Module], modifiers: str) -> Iterator[tuple[str, Any]]:
    seen.add(module)
    hidden = set(getattr(module, modifiers)().values()) if declares(module, modifiers) else set()
    for name, submodule in module._modules.items():
        if submodule is not None and submodule not in seen:
            # A renamed child's state is under its parent's own name.
            below = prefix if name in hidden else f"{prefix}{name}."
            yield from visit(submodule, below, seen, modifiers)
    transient = module._non_persistent_buffers_set
    for name, buffer in module.named_buffers(recurse=False):
        if name not in transient:
            yield prefix + name, buffer
    for name, param in module.named_parameters(recurse=False):
        yield prefix + name, param
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        yield prefix + EXTRA_STATE, ExtraState()
