"""An optimizer step that is right whatever the backend averages, on any mixture of meshes.

Works on any model of DTensors and whole tensors; must never trust a backend's word for its average.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import nn

from torch_dcp_backport import compat
from torch_dcp_backport.engine._src import reach
from torch_dcp_backport.engine._src.build import Sharding
from torch_dcp_backport.engine._src.checks import clip
from torch_dcp_backport.engine._src.mesh import TITLE, Grid
from torch_dcp_backport.transfer import device_for, layout_of


def divisor_of(grid: Grid, sharding: Optional[Sharding] = None) -> float:
    """Measure by what FSDP2 divides the sum of the ranks' gradients, on a small parameter. Collective.

    gloo, up to torch 2.7 at least, takes `reduce_scatter_tensor(AVG)` for a sum: gradients are as many times
    too large as there are shards, which AdamW hides. Scale the loss by `divisor_of(grid) / grid.dp_size` and
    the gradient is the mean over ranks wherever it runs.

    Args:
        grid: the arrangement of ranks, of `arrange`.
        sharding: the settings of FSDP2; None is `Sharding()`.

    Raises:
        RuntimeError: the backend cannot reduce gradients on this mesh, or FSDP2 cannot train on the CPU; on
            every rank.

    Example:
        Within a process group; on the CPU FSDP2 needs torch 2.7 for it:

        >>> from torch_dcp_backport import engine
        >>> engine.divisor_of(engine.arrange("cpu"))  # doctest: +SKIP
        1.0
    """
    sharding = (sharding or Sharding())._replace(offload=False)
    device = compat.current_device(grid.mesh.device_type)
    probe = nn.Linear(1, grid.sizes.shard, bias=False, device=device)
    compat.fsdp2().fully_shard(probe, **sharding.arguments(grid))
    try:
        probe(torch.ones(1, 1, device=device)).sum().backward()
    except (AttributeError, RuntimeError, ValueError, AssertionError) as error:
        # FSDP2 of torch 2.7 has an assertion where its CPU streams make no events. Those of 2.6 cannot be
        # asked for one, and up to 2.5 it takes CUDA's.
        replicas = grid.sizes.replicate
        instead = ""
        if device.type == "cpu" and not compat.TRAINS_ON_CPU:
            instead = (
                ". On the CPU FSDP2 trains with torch >= 2.7; with forward_only=True an engine loads and "
                "exports"
            )
        elif replicas > 1:
            instead = ". One copy of the model (fsdp_size=-1) needs less of the backend"
        raise RuntimeError(
            f"{TITLE}: FSDP2 of torch {torch.__version__} with {dist.get_backend()} cannot reduce gradients "
            f"over {replicas} replicas of {grid.sizes.shard} shards: {type(error).__name__} {error}{instead}"
        ) from error
    gradient: Any = probe.weight.grad
    return grid.reduced / float(compat.local_part(gradient))


def local_gradients(params: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, float]]:
    """Return this rank's part of each gradient, and the share of its square that counts.

    Of n replicas each counts an nth, and not the first alone: a number that is not finite is seen wherever it
    is. A tensor whose mesh is a part of the ranks is taken to be on as many such meshes as there is room for.
    """
    world = dist.get_world_size()
    parts = []
    for param in params:
        gradient: Any = param.grad
        if gradient is None:
            continue
        layout = layout_of(gradient)
        local = compat.arrived(compat.local_part(gradient)) if layout.mesh is not None else gradient
        holders = world
        if layout.mesh is not None:
            holders = math.prod(layout.mesh.shape[dim] for dim in layout.replica_dims)
            holders *= world // len(layout.mesh.ranks)
        parts.append((local, 1 / holders))
    return parts


@torch.no_grad()
def grad_norm(params: Iterable[torch.Tensor]) -> float:
    """Return the norm of all gradients, the same on every rank. Collective: an all-reduce of one number.

    The gradients may be on different meshes, or on the host, where torch's own helpers give up. Meshes of a
    part of the ranks count as replicas of each other: pipeline stages are not offered.

    Args:
        params: parameters, of which those without a gradient are left out; the same ones on every rank.

    Example:
        Within a process group:

        >>> import torch
        >>> from torch_dcp_backport import engine
        >>> param = torch.nn.Parameter(torch.zeros(2))
        >>> param.grad = torch.tensor([3.0, 4.0])
        >>> engine.grad_norm([param])
        5.0
    """
    return _norm_of(local_gradients(params))[0]


def _norm_of(gradients: Sequence[tuple[torch.Tensor, float]], unreached: int = 0) -> tuple[float, bool]:
    """Return the norm, and whether a rank has gradients of parameters that its tokens did not reach."""
    total = torch.zeros((), dtype=torch.float64)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for local, part in gradients:
        if local.numel():
            # The norm of half-precision numbers overflows in their own; the squares of norms in float32.
            kind = torch.float32 if local.dtype.itemsize < 4 else local.dtype
            norm = torch.linalg.vector_norm(local, dtype=kind)
            by_device.setdefault(local.device, []).append(norm.double().square() * part)
    for squares in by_device.values():
        total += torch.stack(squares).sum().cpu()
    sums = torch.stack([total, total.new_tensor(unreached)])
    if dist.get_world_size() > 1:
        sums = sums.to(device_for(None))
        dist.all_reduce(sums)
    square, count = sums.tolist()
    return math.sqrt(square), count > 0


class Stepped(NamedTuple):
    """The result of a step.

    Args:
        grad_norm: the norm of the gradients before they were clipped.
        is_skipped: whether no rank stepped, since a gradient was not finite.
    """

    grad_norm: float
    is_skipped: bool


@torch.no_grad()
def step(optimizer: torch.optim.Optimizer, max_norm: Optional[float] = None) -> Stepped:
    """Clip the gradients by their norm and step; with any that is not finite no rank does. Collective.

    A skipped step leaves parameters and states as they were, and drops the gradients. Parameters that no
    token of any rank has reached are left alone, as by a step in one process.

    Args:
        optimizer: the optimizer, with the same parameters on every rank.
        max_norm: above 0; None clips nothing.

    Returns:
        The norm before the clipping, and whether the step was skipped.

    Raises:
        ValueError: another `max_norm`.

    Example:
        Within a process group:

        >>> import torch
        >>> from torch_dcp_backport import engine
        >>> param = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = torch.optim.SGD([param], lr=1.0)
        >>> param.grad = torch.tensor([3.0, 4.0])
        >>> engine.step(optimizer, max_norm=1.0)
        Stepped(grad_norm=5.0, is_skipped=False)
        >>> param.grad = torch.tensor([torch.inf, 4.0])
        >>> engine.step(optimizer, max_norm=1.0).is_skipped
        True
        >>> param.data
        tensor([-0.6000, -0.8000])
    """
    max_norm = None if max_norm is None else clip("max_norm", max_norm)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    gradients = local_gradients(params)
    norm, is_unreached = _norm_of(gradients, sum(reach.is_unreached(param.grad) for param in params))
    if not math.isfinite(norm):
        optimizer.zero_grad()
        return Stepped(norm, True)
    if is_unreached:
        reach.drop_unreached(params)
    if gradients and max_norm is not None and norm + 1e-6 > max_norm:
        torch._foreach_mul_([local for local, _ in gradients], max_norm / (norm + 1e-6))
    optimizer.step()
    return Stepped(norm, False)


#: Kinds of schedules, and those that need the number of all steps.
SCHEDULES, BY_TOTAL = ("constant", "cosine", "linear", "wsd", "inverse_sqrt"), ("cosine", "linear", "wsd")
#: Megatron's names of the ways down at the end of "wsd": part of the decay that is done -> part that is left.
WSD_DECAYS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "minus_sqrt": lambda done: 1 - math.sqrt(done),
    "exponential": lambda done: 2 * 0.5**done - 1,
}


def check_schedule(
    kind: str, total: int, warmup: int = 0, decay: int = 0, decay_style: str = "linear"
) -> None:
    """Refuse a schedule that is not offered.

    Raises:
        ValueError: another kind, one that lacks its total, or a "wsd" without a decay that fits.
    """
    if kind not in SCHEDULES:
        raise ValueError(f"lr_scheduler_type={kind!r} is none of {', '.join(map(repr, SCHEDULES))}")
    if kind in BY_TOTAL and total <= 0:
        raise ValueError(f"lr_scheduler_type={kind!r} needs total_training_steps, got {total}")
    if kind != "wsd":
        return
    if decay_style not in WSD_DECAYS:
        raise ValueError(f"lr_wsd_decay_style={decay_style!r} is none of {', '.join(map(repr, WSD_DECAYS))}")
    if decay <= 0:
        raise ValueError(f"lr_scheduler_type='wsd' needs lr_wsd_decay_steps, got {decay}")
    if warmup + decay > total:
        raise ValueError(
            f"lr_wsd_decay_steps={decay} and a warm-up of {warmup} steps are more than "
            f"total_training_steps={total}"
        )


def schedule(
    optimizer: torch.optim.Optimizer,
    kind: str = "constant",
    *,
    warmup: int = 0,
    total: int = 0,
    least: float = 0.0,
    cycles: float = 0.5,
    decay: int = 0,
    decay_style: str = "linear",
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a schedule: linear warm-up to the optimizer's rate, then a way on that `kind` names.

    "constant" keeps the rate. "cosine" and "linear" go down to `least` at step `total`. "wsd"
    (warmup-stable-decay) keeps the rate and goes down to `least` in the last `decay` steps. "inverse_sqrt" is
    the root of `warmup / step`, where a warm-up of 0 counts as 1, and at least `least`.

    Each parameter group gets the same part of its own rate. The `state_dict()` is the number of steps: save
    it with the optimizer's.

    Args:
        optimizer: the optimizer, whose rate is the one after the warm-up.
        kind: "constant", "cosine", "linear", "wsd" or "inverse_sqrt".
        warmup: the number of steps of the warm-up.
        total: the number of steps of the training; "cosine", "linear" and "wsd" need it.
        least: the smallest part of the rate after the warm-up.
        cycles: waves of a cosine until the last step; a half ends at the bottom.
        decay: the number of steps of the decay of "wsd", which are the last of `total`.
        decay_style: the way down of "wsd", by Megatron's names: "linear", "cosine", "minus_sqrt" or
            "exponential".

    Raises:
        ValueError: another kind or `decay_style`; a kind without the total or the decay that it needs; a
            warm-up and a decay that are longer than the total.

    Example:
        >>> import torch
        >>> from torch_dcp_backport import engine
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        >>> schedule = engine.schedule(optimizer, warmup=4)
        >>> rates = []
        >>> for _ in range(6):
        ...     rates.append(schedule.get_last_lr()[0])
        ...     optimizer.step()
        ...     schedule.step()
        >>> rates
        [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    """
    check_schedule(kind, total, warmup, decay, decay_style)

    def after_warmup(done: int) -> float:
        if kind == "constant":
            return 1.0
        if kind == "inverse_sqrt":
            return max(least, math.sqrt(max(1, warmup) / max(1, done)))
        if kind == "wsd":
            left = WSD_DECAYS[decay_style](min(1.0, max(0.0, (done - (total - decay)) / decay)))
            return least + (1 - least) * left
        progress = (done - warmup) / max(1, total - warmup)
        if kind == "linear":
            return least + (1 - least) * (1 - min(1.0, progress))
        wave = 0.5 * (1 + math.cos(2 * math.pi * cycles * progress))
        return max(0.0, least + (1 - least) * wave)

    def part(done: int) -> float:
        return done / max(1, warmup) if done < warmup else after_warmup(done)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, part)
