"""The states of data loaders in a step, and their assignment where another number of ranks loads them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

from torch_dcp_backport.dist_checkpointing import CheckpointingException
from torch_dcp_backport.dist_checkpointing.engine import files, values

logger = logging.getLogger("torch_dcp_backport.checkpoint")

#: The most bytes of a data loader's state.
MOST = 8 * 2**30


def has_state(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def data_state(folder: Path, rank: int, world: int, on_data: str, trust: bool) -> Optional[Mapping[str, Any]]:
    """Return the state of a rank's data loader; of another number of ranks only if all saved the same.

    Raises:
        CheckpointingException: there is none, or none that is known to be this rank's.
    """
    paths = sorted(folder.glob("data_*.pt"))
    reason = f"{folder} has no state of a data loader"
    if len(paths) == world:
        return loaded(folder / f"data_{rank}.pt", trust)
    if paths:
        contents = {files.read_whole(path, MOST) for path in paths}
        if len(contents) == 1:
            return loaded(paths[0], trust)
        reason = f"{len(paths)} data loaders were saved with states that differ, and {world} are loaded"
    if on_data == "restart":
        logger.warning("%s: the data starts from the beginning", reason)
        return None
    raise CheckpointingException(f"{reason} (on_data='restart' starts the data from the beginning)")


def at_next_epoch(state: Mapping[str, Any], loader: Any) -> Mapping[str, Any]:
    """Return a state with which the next epoch begins, where the epoch was over at the save.

    A save in the loop's last step has all batches of an epoch, and the loader was not yet asked for another:
    restored so, it gives none, and a loop that goes on with epoch `step // steps_per_epoch` (as verl's does)
    trains on nothing for that epoch. The state is marked as torchdata marks it once the loop has asked.

    Args:
        state: of torchdata's StatefulDataLoader; any other is returned as it is.
    """
    try:
        epoch = len(loader)
        snapshot = state.get("_snapshot")
        if snapshot is None:
            yielded = state["_num_yielded"]
        else:
            # With workers: the batches up to the workers' last snapshot, and those since.
            yielded = snapshot["_snapshot_step"] + state["_steps_since_snapshot"]
        is_over = not state["_iterator_finished"] and 0 < epoch <= yielded
    except (AttributeError, KeyError, TypeError):
        return state
    if is_over:
        logger.info("the data loader's epoch was over at the save: the next epoch begins")
    return {**state, "_iterator_finished": True} if is_over else state


def loaded(path: Path, trust: bool) -> Mapping[str, Any]:
    try:
        state: Mapping[str, Any] = values.loads(files.read_whole(path, MOST), trust)
    except (OSError, values.Unloadable) as error:
        raise CheckpointingException(f"{path}: {error}") from error
    return state
