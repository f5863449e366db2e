"""What a room uses of a room beside it: named here, and handed to it, for no room imports another.

Nothing is loaded before it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

#: What is handed out -> the room that offers it, and its name there.
OFFERS = {
    # The engine saves through the manager; with another one, `engine.checkpoint_manager` may be replaced.
    "the manager of FSDP2 models": ("checkpoint", "FSDPCheckpointManager"),
    # The manager of Megatron models writes them for transformers.
    "the export of Megatron models": ("megatron", "save_hf"),
    "a rank's place in Megatron's grid": ("megatron", "Parallel"),
}


def offered(what: str) -> Any:
    """Return what a room offers, loading the room where it is not yet.

    Args:
        what: a key of `OFFERS`.
    """
    room, name = OFFERS[what]
    return getattr(import_module(f"torch_dcp_backport.{room}"), name)
