"""`metadata.json`, which makes a folder a checkpoint and is written last; and the room's exception.

Must never read a tensor.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Optional, Union

from torch_dcp_backport.publish import disk
from torch_dcp_backport.transfer import CollectiveError

CONFIG_FNAME = "metadata.json"
#: The only backends that are read and written: torch's records, and one file of plain values.
SHARDED_BACKEND, COMMON_BACKEND = "torch_dist", "torch"
#: Folders of a step, as verl's managers name them: the sharded checkpoint, and the files for transformers.
SHARDED, HUGGING_FACE = "dist_ckpt", "huggingface"

Folder = Union[str, "os.PathLike[str]"]


class CheckpointingException(CollectiveError):
    """An error of a checkpoint that cannot be saved or loaded: the same text on every rank."""


@dataclass
class CheckpointingConfig:
    """The content of `metadata.json`.

    Args:
        sharded_backend: the format of tensors and objects; "torch_dist" is the only one.
        sharded_backend_version: the version of that format.
        common_backend: the format of the common state; "torch" is the only one.
        common_backend_version: the version of that format.
    """

    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = COMMON_BACKEND
    common_backend_version: int = 1


def check_is_distributed_checkpoint(checkpoint_dir: Folder) -> bool:
    """Return whether a folder holds a complete sharded checkpoint: its marker is there and readable.

    Args:
        checkpoint_dir: the folder; it need not be there.

    Raises:
        CheckpointingException: the marker cannot be read, or is not JSON of the known form.

    Example:
        >>> import os, torch
        >>> from torch_dcp_backport import dist_checkpointing
        >>> os.mkdir("step_1")
        >>> weight = dist_checkpointing.ShardedTensor.from_rank_offsets("w", torch.arange(4))
        >>> dist_checkpointing.save({"w": weight, "step": 1}, "step_1")
        >>> [dist_checkpointing.check_is_distributed_checkpoint(name) for name in ("step_1", "step_2")]
        [True, False]
    """
    return maybe_load_config(checkpoint_dir) is not None


def maybe_load_config(checkpoint_dir: Folder) -> Optional[CheckpointingConfig]:
    """Return the marker of a checkpoint; None where there is none.

    Raises:
        CheckpointingException: it cannot be read, or is not JSON of the known form.
    """
    path = Path(checkpoint_dir) / CONFIG_FNAME
    try:
        text = disk.read_whole(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointingException(f"{path} cannot be read: {error.strerror}") from error
    return parse_config(text, str(path))


def no_folder(folder: Folder) -> str:
    """Return the text of an error; programs look for Megatron's words, which are the second half."""
    if os.path.exists(folder):
        return f"{folder} is a file, and no folder of a checkpoint"
    return f"{folder} is no folder (directory {folder} does not exist)"


def no_checkpoint(folder: Folder) -> str:
    """Return the text of an error, with Megatron's words in it."""
    sharded = os.path.join(folder, SHARDED)
    hint = f"; that of the step is in {sharded}" if os.path.isdir(sharded) else ""
    return (
        f"{folder} holds no distributed checkpoint: it has no {CONFIG_FNAME}{hint} "
        f"({folder} is not a distributed checkpoint)"
    )


def parse_config(text: bytes, name: str) -> CheckpointingConfig:
    """Return the marker from its bytes. Fields of later releases of Megatron are passed over.

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
    disk.publish(Path(checkpoint_dir) / CONFIG_FNAME, config_bytes(config))


def config_bytes(config: CheckpointingConfig) -> bytes:
    return json.dumps(asdict(config)).encode()
