"""The states of data loaders in a step, and their assignment where another number of ranks loads them."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

from torch_dcp_backport.checkpoint._src import extra, manifest
from torch_dcp_backport.dist_checkpointing import CheckpointingException, values
from torch_dcp_backport.publish import disk

logger = logging.getLogger("torch_dcp_backport.checkpoint")

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
    with extra.kept(), contextlib.suppress(StopIteration):
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
