"""Gradients for the parameters that a rank's tokens do not reach: the experts of sparse models.

FSDP2 packs the gradients of a unit's parameters in sequence, leaves out parameters without a gradient, and
lets the ranks reduce what is at the same place. Ranks whose tokens reach different experts would add up
gradients of different experts. So here each rank reduces a gradient of every parameter, which is zeros where
it has none.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from torch_dcp_backport import compat
from torch_dcp_backport.engine._src.checks import cleaning_up
from torch_dcp_backport.transfer import device_for


class Reduction:
    """The reduction of a unit's gradients, in the place of the method by which FSDP2 reduces them."""

    def __init__(self, module: nn.Module, group: Any) -> None:
        self.module = module
        #: FSDP2's record of the unit.
        self.group = group
        self.reduce_present = group.post_backward
        #: Whether this pass reaches parameters: a pass that only keeps the other ranks company does not.
        self.is_counted = True
        #: FSDP2's records of the parameters that passes have reached since the last reduction.
        self.reached: set[Any] = set()

    def trained(self) -> list[Any]:
        """Return FSDP2's records of the parameters that get gradients."""
        return [
            param
            for param in self.group.fsdp_params
            if getattr(param, "_unsharded_param", None) is not None and param._unsharded_param.requires_grad
        ]

    def __call__(self, *unused: Any) -> None:
        """Reduce the gradients of all parameters, after a backward pass through the unit."""
        group, params = self.group, self.trained()
        if self.is_counted:
            self.reached.update(param for param in params if param._unsharded_param.grad is not None)
        if not group.reduce_grads:
            self.reduce_present(*unused)
            return
        # FSDP2 also calls this for a unit that had no part in the pass, and twice for some that had.
        is_reached = group._training_state.name == "PRE_BACKWARD" or any(map(has_gradient, params))
        compat.reduce_unused(self.module, is_reached)
        new = {param for param in params if param.sharded_param.grad is None}
        self.reduce_present(*unused)
        if not group.all_reduce_grads:
            return  # replicas add up what they have in a later pass
        for param in params:
            if param.sharded_param.grad is not None and (param in self.reached or param in new):
                mark(param.sharded_param.grad, param not in self.reached)
        self.reached.clear()

    def connect(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Make the unit's output a function of its parameters for autograd: a hook of its forward pass.

        Tokens may have reached none of the parameters that are trained (some experts, the others frozen).
        FSDP2 would have no part in the backward pass on this rank, and the other ranks would wait for it.
        """
        if not torch.is_grad_enabled():
            return output
        leaves, shape = tree_flatten(output)
        floating = {
            place: leaf
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        }
        if not floating or any(leaf.requires_grad for leaf in floating.values()) or not self.trained():
            return output
        place = min(floating)
        connect: Any = Connected.apply
        leaves[place] = connect(floating[place], torch.zeros((), requires_grad=True))
        return tree_unflatten(leaves, shape)


class Connected(torch.autograd.Function):
    """A tensor that requires a gradient, and passes none on."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()  # a view that is written to would lose FSDP2's hook

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        return None, None


def has_gradient(param: Any) -> bool:
    """Return whether a pass has left a gradient in one of FSDP2's records."""
    return getattr(param, "unsharded_accumulated_grad", None) is not None or (
        param._unsharded_param.grad is not None
    )


def reduce_alike(module: nn.Module) -> None:
    """Let FSDP2 reduce the same parameters of a module, which it shards, on every rank.

    Raises:
        RuntimeError: this torch's FSDP2 lacks what that needs; on every rank.
    """
    compat.check_fsdp2(module, "engine")
    reduction = compat.replace_reduction(module, functools.partial(Reduction, module))
    if reduction is not None:
        # Before FSDP2's own hook, which looks for outputs that require gradients.
        module.register_forward_hook(reduction.connect, prepend=True)


def reductions(model: nn.Module) -> Iterator[Reduction]:
    """Yield the reductions of a model's units."""
    for state in compat.fsdp2_states(model):
        reduction = getattr(state._fsdp_param_group, "post_backward", None)
        if isinstance(reduction, Reduction):
            yield reduction


@contextlib.contextmanager
def uncounted(model: nn.Module) -> Iterator[None]:
    """Return a context: its backward passes take part in collectives, and reach no parameters."""
    units = list(reductions(model))
    for reduction in units:
        reduction.is_counted = False
    try:
        yield
    finally:
        for reduction in units:
            reduction.is_counted = True


def abandon_pass(model: nn.Module, error: BaseException) -> None:
    """Let FSDP2 begin anew after a pass that an exception has ended: see `compat.abandon_pass`.

    Args:
        model: the model.
        error: the exception.
    """
    with cleaning_up(error, "FSDP2 did not begin anew after it; make a new engine"):
        compat.abandon_pass(model)
        for reduction in reductions(model):
            reduction.reached.clear()


def mark(gradient: Any, is_unreached: bool = True) -> None:
    """Note whether no token of this rank has reached the parameter that the gradient is of."""
    gradient.is_unreached = is_unreached


def is_unreached(gradient: Any) -> bool:
    """Return whether no token of this rank has reached the parameter that the gradient is of."""
    return bool(getattr(gradient, "is_unreached", False))


@torch.no_grad()
def drop_unreached(params: Iterable[torch.Tensor]) -> int:
    """Drop the gradients of parameters that no token of any rank has reached. Collective.

    They are zeros, of which an optimizer still makes a step: it decays weights and moments. In one process
    such a parameter has no gradient, and an optimizer leaves it alone. `step` does this itself.

    Args:
        params: as many on every rank, in the same order.

    Returns:
        The number of gradients that were dropped.

    Example:
        Within a process group. A backward pass under `shard` marks gradients; here `reach.mark` does it:

        >>> import torch
        >>> from torch_dcp_backport import engine
        >>> from torch_dcp_backport.engine._src import reach
        >>> expert, other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
        >>> expert.grad, other.grad = torch.zeros(2), torch.ones(2)
        >>> reach.mark(expert.grad)
        >>> engine.drop_unreached([expert, other])
        1
        >>> expert.grad is None, other.grad is None
        (True, False)
    """
    params = list(params)
    reached = [param.grad is not None and not is_unreached(param.grad) for param in params]
    flags = torch.tensor(reached, dtype=torch.int32, device=device_for(None))
    if dist.get_world_size() > 1 and params:
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    dropped = 0
    for param, is_reached in zip(params, flags.tolist()):
        if param.grad is not None and not is_reached:
            param.grad = None
            dropped += 1
    return dropped
