"""What makes a folder a checkpoint: `metadata.json`, written last. And the room's one exception.

Must never read a tensor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Optional, Union

from torch_dcp_backport.dist_checkpointing.engine import files

CONFIG_FNAME = "metadata.json"
#: The only backends that are read and written: torch's records, and one file of plain values.
SHARDED_BACKEND, COMMON_BACKEND = "torch_dist", "torch"

Folder = Union[str, "os.PathLike[str]"]


class CheckpointingException(Exception):
    """A checkpoint cannot be saved or loaded: the same text on every rank."""

    #: Whether all ranks that are there have heard of it; not where the first rank itself is gone.
    is_agreed = False


@dataclass
class CheckpointingConfig:
    """The content of `metadata.json`."""

    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = COMMON_BACKEND
    common_backend_version: int = 1


def check_is_distributed_checkpoint(checkpoint_dir: Folder) -> bool:
    """Whether a folder holds a whole sharded checkpoint: its marker is there and readable."""
    return maybe_load_config(checkpoint_dir) is not None


def maybe_load_config(checkpoint_dir: Folder) -> Optional[CheckpointingConfig]:
    """The marker of a checkpoint; None where there is none.

    Raises:
        CheckpointingException: it is not JSON of the known form.
    """
    path = Path(checkpoint_dir) / CONFIG_FNAME
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return parse_config(text, str(path))


def parse_config(text: bytes, name: str) -> CheckpointingConfig:
    """The marker from its bytes. Fields of later releases of Megatron are passed over.

    Raises:
        CheckpointingException: not JSON of the known form.
    """
    try:
        known = json.loads(text)
        config = CheckpointingConfig(
            **{field.name: known[field.name] for field in fields(CheckpointingConfig) if field.name in known}
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointingException(f"{name} is damaged, or of another format: {error}") from error
    return config


def save_config(config: CheckpointingConfig, checkpoint_dir: Folder) -> None:
    """Write the marker. Only after everything else is on disk: from then on the folder is a checkpoint."""
    files.publish(Path(checkpoint_dir) / CONFIG_FNAME, config_bytes(config))


def config_bytes(config: CheckpointingConfig) -> bytes:
    return json.dumps(asdict(config)).encode()


def check_fields(key: object, numbers: Sequence[object], replica_id: object) -> None:
    """Refuse what would be saved and never be loaded again.

    Raises:
        CheckpointingException: a key that is no text, or a place or shape that are no whole numbers (numpy's
            are other objects in a file).
    """
    if not isinstance(key, str):
        raise CheckpointingException(f"a key that is no text: {key!r}")
    replicas = replica_id if isinstance(replica_id, tuple) else (replica_id,)
    if {*map(type, numbers), *map(type, replicas)} != {int}:
        for number in (number for number in (*numbers, *replicas) if type(number) is not int):
            raise CheckpointingException(f"{key}: {number!r} is a {type(number).__name__}, and not an int")
