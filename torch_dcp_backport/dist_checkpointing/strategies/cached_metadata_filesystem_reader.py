"""A reader for `dcp.load` by Megatron's name, which keeps the index of a checkpoint."""

from __future__ import annotations

import os
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from torch_dcp_backport.dist_checkpointing._src import metadata
from torch_dcp_backport.dist_checkpointing.core import Folder
from torch_dcp_backport.dist_checkpointing.storage import CheckedReader

#: Absolute path of a folder -> (the state of its `.metadata`, the index).
_known: dict[str, tuple[Any, Metadata]] = {}


class CachedMetadataFileSystemReader(CheckedReader):
    """A `CheckedReader` that reads `.metadata` again only where the file is another.

    Args:
        path: the folder of the checkpoint.
        cache_metadata: whether the index is kept.
    """

    def __init__(self, path: Folder, cache_metadata: bool = True) -> None:
        super().__init__(path)
        self.cache_metadata = cache_metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return torch's index of the checkpoint.

        Raises:
            CheckpointingException: no checkpoint, or a damaged one.
        """
        if not self.cache_metadata:
            return super().read_metadata(*args, **kwargs)
        folder = os.path.abspath(self.folder)
        try:
            info = os.stat(os.path.join(folder, metadata.NAME))
        except OSError:
            return super().read_metadata(*args, **kwargs)
        # Before the file is read: if it is replaced meanwhile, the next call reads it again.
        stamp = info.st_ino, info.st_size, info.st_mtime_ns
        known = _known.get(folder)
        if known is None or known[0] != stamp:
            # The reader's own copy of the index may be older than the file.
            self.reset()
            _known[folder] = known = stamp, super().read_metadata(*args, **kwargs)
        return known[1]

    @classmethod
    def clear_metadata_cache(cls) -> None:
        """Forget all indexes."""
        _known.clear()
