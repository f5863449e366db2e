"""Random states of ranks, and their assignment where another number of ranks loads them.

Must never draw a random number: that would change the states that it reads.
"""

from __future__ import annotations

import contextlib
import logging
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from torch_dcp_backport import compat
from torch_dcp_backport.dist_checkpointing import ShardedObject

logger = logging.getLogger("torch_dcp_backport.checkpoint")

#: Key of the random states in a checkpoint; each rank has its own.
RNG = "rng"


def rng_state(kind: str = "cpu") -> dict[str, Any]:
    """Return the states of the generators of Python, torch, this rank's device, and numpy if it is loaded."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {"cpu": torch.get_rng_state(), "random": [version, list(words), gauss]}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [name, keys.tolist(), int(position), int(has_gauss), float(cached)]
    module = device_rng(kind)
    if module is not None:
        state["device"] = module.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, Any], kind: str = "cpu") -> None:
    """Set the generators to the states that `rng_state` returned."""
    torch.set_rng_state(state["cpu"])
    version, words, gauss = state["random"]
    random.setstate((version, tuple(words), gauss))
    if "numpy" in state:
        import numpy

        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    module = device_rng(kind)
    if module is not None and "device" in state:
        module.set_rng_state(state["device"])


@contextlib.contextmanager
def kept(kind: str = "cpu") -> Iterator[None]:
    """Have the generators afterwards as they are now."""
    state = rng_state(kind)
    try:
        yield
    finally:
        set_rng_state(state, kind)


def device_rng(kind: str) -> Any:
    """Return the module with the generator of an accelerator; None for the CPU."""
    module = compat.device_module(kind) if kind not in ("cpu", "meta") else None
    return module if module is not None and hasattr(module, "get_rng_state") else None


def device_type_of(model: nn.Module) -> str:
    """Return the device type of a model's parameters; the CPU where it has none."""
    return next((parameter.device.type for parameter in model.parameters()), "cpu")


def own_object(state: Mapping[str, Any], rank: int, world: int) -> ShardedObject:
    """Return the random states of a rank as its entry in the grid of all ranks."""
    return ShardedObject(RNG, dict(state), (world,), (rank,))


def wanted_objects(rank: int, world: int, saved_world: int) -> list[ShardedObject]:
    """Return the random states that a rank loads: its own first, then its share of the surplus."""
    own = rank % saved_world
    return [
        ShardedObject(RNG, None, (saved_world,), (place,), replica_id=rank // saved_world)
        for place in (own, *range(rank + world, saved_world, world))
    ]


def warn_of_other_world(world: int, saved_world: int) -> None:
    if world != saved_world:
        logger.warning(
            "saved by %d ranks, loaded by %d: rank r goes on with the random state of rank r %% %d, so that "
            "random numbers are not those of an undisturbed run",
            saved_world,
            world,
            saved_world,
        )
