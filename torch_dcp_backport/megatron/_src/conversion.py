"""The result of a conversion, the source that it was made of, and what all conversions need of a checkpoint.

One process, no model, no GPU. Nothing is written here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Optional

from torch_dcp_backport.dist_checkpointing import CheckpointingException, Opened
from torch_dcp_backport.dist_checkpointing.core import HUGGING_FACE, SHARDED
from torch_dcp_backport.hf import CONFIG, nbytes_of
from torch_dcp_backport.transfer import TensorInfo

CANNOT_CONVERT = "cannot convert"


class Found(NamedTuple):
    """A source, as it was found."""

    #: "huggingface" or "checkpoint".
    form: str
    #: The model_type of config.json.
    kind: str
    tensors: int
    nbytes: int
    files: int


@dataclass(frozen=True)
class Converted:
    """The result of a conversion, or of a dry run."""

    #: "checkpoint" or "huggingface".
    to: str
    #: Tensor -> shape and dtype, as the target names them.
    tensors: Mapping[str, TensorInfo]
    #: File of a target for from_pretrained -> bytes of its tensors.
    files: Mapping[str, int]
    #: Tensor of the source that is not converted -> why.
    left: Mapping[str, str]
    source: Found
    #: Bytes that the process holds beside mapped files: buffers, and weights that are dequantised or copied.
    memory: int

    @property
    def nbytes(self) -> int:
        return sum(map(nbytes_of, self.tensors.values()))


def sharded_in(folder: Path) -> Path:
    """Return the folder of the sharded checkpoint in a folder: itself, or the one that managers make in it.

    Raises:
        CheckpointingException: there is no such folder.
    """
    if not folder.is_dir():
        raise CheckpointingException(f"{CANNOT_CONVERT}: {folder} is no folder")
    return folder / SHARDED if (folder / SHARDED).is_dir() else folder


def model_folder(folder: Path) -> Optional[Path]:
    """Return the folder with config.json that is in a checkpoint, or beside it; None where there is none."""
    places = (folder / HUGGING_FACE, folder.parent / HUGGING_FACE)
    return next((place for place in places if (place / CONFIG).is_file()), None)


def found_in(checkpoint: Opened, kind: str) -> Found:
    """Return what was found in a checkpoint of a model of a kind (its model_type)."""
    tensors = [TensorInfo(stored.shape, stored.dtype) for stored in checkpoint.holds.tensors.values()]
    files = sum(path.suffix == ".distcp" for path in checkpoint.folder.iterdir())
    return Found("checkpoint", kind, len(tensors), bytes_of(tensors), files)


def bytes_of(infos: Iterable[TensorInfo]) -> int:
    return sum(map(nbytes_of, infos))
