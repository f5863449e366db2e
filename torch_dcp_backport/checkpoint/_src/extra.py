"""States of a step beside tensors: random states and data loaders, also on other numbers of ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Optional

import torch
from torch import nn

from torch_dcp_backport import compat
from torch_dcp_backport.checkpoint._src import manifest
from torch_dcp_backport.dist_checkpointing import CheckpointingException, ShardedObject, values
from torch_dcp_backport.publish import disk

logger = logging.getLogger("torch_dcp_backport.checkpoint")

# --- random states ---
#
# Must never draw a random number: that would change the states that it reads.


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


# --- data loaders ---

#: The most bytes of a data loader's state.
MOST = 8 * 2**30
#: The file of the data loader of a rank.
STATE = re.compile(r"data_\d+\.pt")


def has_state(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def data_state(folder: Path, rank: int, world: int, on_data: str, trust: bool) -> Optional[Mapping[str, Any]]:
    """Return the state of a rank's data loader; of another number of ranks only if all saved the same.

    Raises:
        CheckpointingException: there is none, or none that is known to be this rank's.
    """
    paths = states_in(folder)
    reason = f"{folder} has no state of a data loader"
    if len(paths) == world:
        return loaded(folder / f"data_{rank}.pt", trust)
    if paths:
        contents = {disk.read_whole(path, MOST) for path in paths}
        if len(contents) == 1:
            return loaded(paths[0], trust)
        reason = f"{len(paths)} data loaders were saved with states that differ, and {world} are loaded"
    if on_data == "restart":
        logger.warning("%s: the data starts from the beginning", reason)
        return None
    raise CheckpointingException(f"{reason} (on_data='restart' starts the data from the beginning)")


def states_in(folder: Path) -> list[Path]:
    """Return the states of data loaders in a step; a user's files beside them are not among them."""
    listed = None
    with contextlib.suppress(manifest.BadManifest):
        listed = manifest.read(folder).files
    names = os.listdir(folder) if listed is None else listed
    return [folder / name for name in sorted(names) if STATE.fullmatch(name)]


def resume(loader: Any, state: Mapping[str, Any], at_epoch_end: str) -> None:
    """Set a loader to a state; with "next", to the begin of the next epoch where the epoch was over.

    A save in the loop's last step has all batches of an epoch, and the loader was not yet asked for another:
    restored so, it gives none, and a loop that goes on with epoch `step // steps_per_epoch` (as verl's does)
    trains on nothing for that epoch. The loader is asked for the batch that is not there, as the loop would
    have done: its sampler, too, hears that the epoch is over.
    """
    loader.load_state_dict(state)
    if at_epoch_end != "next" or not is_over(loader, state):
        return
    # What the run draws from here on are the numbers that it would have drawn.
    # Of torchdata's iterators some raise StopIteration when they are made so: the loop will hear of it.
    with kept(), contextlib.suppress(StopIteration):
        iterator, none = iter(loader), object()
        if next(iterator, none) is none:
            logger.info("the data loader's epoch was over at the save: the next epoch begins")
            return
    loader.load_state_dict(state)


def is_over(loader: Any, state: Mapping[str, Any]) -> bool:
    """Return whether a state of torchdata's StatefulDataLoader is that at the last batch of an epoch."""
    try:
        epoch = len(loader)
        snapshot = state.get("_snapshot")
        if snapshot is None:
            yielded = state["_num_yielded"]
        else:
            # With workers: the batches up to the workers' last snapshot, and those since.
            yielded = snapshot["_snapshot_step"] + state["_steps_since_snapshot"]
        return bool(not state["_iterator_finished"] and 0 < epoch <= yielded)
    except (AttributeError, KeyError, TypeError):
        return False


def loaded(path: Path, trust: bool) -> Mapping[str, Any]:
    try:
        state: Mapping[str, Any] = values.loads(disk.read_whole(path, MOST), trust)
    except (OSError, values.Unloadable) as error:
        raise CheckpointingException(f"{path}: {error}") from error
    return state
