"""Parameters, gradients and optimizer states between device and host, one tensor at a time.

Not beside FSDP2's CPUOffloadPolicy, which moves them itself.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn

from torch_dcp_backport import compat
from torch_dcp_backport.engine._src import reach


@torch.no_grad()
def move_model(model: nn.Module, device: torch.device) -> None:
    """Move parameters, with their gradients, and buffers.

    Each is there before the next begins: `to(non_blocking=True)` pins as much memory of the host as the
    model has, and reads what may not have arrived.

    Args:
        model: the model, sharded or not.
        device: the device that everything goes to.

    Raises:
        RuntimeError: FSDP2 keeps the parameters on the host by its own policy.

    Example:
        >>> import torch
        >>> from torch_dcp_backport import engine
        >>> model = torch.nn.Linear(2, 1)
        >>> engine.move_model(model, torch.device("cpu"))
        >>> model.weight.device
        device(type='cpu')
    """
    if compat.offloaded_parameters(model):
        raise RuntimeError(
            f"cannot move the model to {device}: offload_policy=True keeps its parameters on the host, and "
            "brings them to the device itself; use either that or param_offload and to()"
        )
    unreached = [param for param in model.parameters() if reach.is_unreached(param.grad)]
    # FSDP2 looks at its shards anew in `_apply`, and nowhere else.
    apply: Any = model._apply
    apply(lambda tensor: tensor.to(device))
    for param in unreached:
        reach.mark(param.grad)
    _give_back(device)


@torch.no_grad()
def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move an optimizer's states; counters of steps stay where they are.

    Args:
        optimizer: an optimizer of torch.optim, or one with states like those.
        device: the device that the states go to.

    Example:
        >>> import torch
        >>> from torch_dcp_backport import engine
        >>> param = torch.nn.Parameter(torch.ones(2))
        >>> param.grad = torch.ones(2)
        >>> optimizer = torch.optim.SGD([param], momentum=0.9, lr=0.1)
        >>> optimizer.step()
        >>> engine.move_optimizer(optimizer, torch.device("cpu"))
        >>> optimizer.state[param]["momentum_buffer"].device
        device(type='cpu')
    """
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                state[name] = value.to(device)
    _give_back(device)


def _give_back(device: torch.device) -> None:
    """Free the memory of accelerators that nothing uses, where the move was away from them."""
    if device.type == "cpu":
        for kind, count in compat.device_counts().items():
            module = compat.device_module(kind)
            if count and module is not None and hasattr(module, "empty_cache"):
                # Half a second of a step: not where there is no such memory.
                gc.collect()
                module.empty_cache()
