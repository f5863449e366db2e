"""A writer for `dcp.save` by Megatron's name. Saves in the background are `save(async_sharded_save=True)`."""

from __future__ import annotations

from typing import Any, Optional

from torch_dcp_backport.dist_checkpointing._src.offers import refusing
from torch_dcp_backport.dist_checkpointing.core import CheckpointingException, Folder
from torch_dcp_backport.dist_checkpointing.storage import CheckedWriter
from torch_dcp_backport.dist_checkpointing.strategies.base import say_once

WHY = ": dist_checkpointing.save(async_sharded_save=True) writes in the background, without a queue"

__getattr__ = refusing(
    __name__,
    "WriteBucket _get_write_results_queue _process_memory _split_by_separation_hint "
    "_split_by_size_and_type get_write_results_queue",
    WHY,
)


#: The queue of Megatron's writers, which programs shut down at their end where there is one.
_results_queue: Any = None


class FileSystemWriterAsync(CheckedWriter):
    """The storage writer of `dcp.save` with Megatron's arguments; it writes at once.

    Args:
        path: the folder of the checkpoint.
        separation_hint: makes no difference, which is said once.
        use_msc: has to be False.
        options, more: torch's options of files and threads; they make no difference.
    """

    def __init__(
        self,
        path: Folder,
        *options: Any,
        separation_hint: Optional[str] = None,
        use_msc: bool = False,
        **more: Any,
    ) -> None:
        if use_msc:
            raise CheckpointingException("use_msc: only folders of this machine's file systems are written")
        super().__init__(path)
        if separation_hint is not None:
            say_once("separation_hint makes no difference: a rank writes one file")

    def get_save_function_and_args(self) -> Any:
        """Refuse: a part of Megatron's own saves in the background.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(f"get_save_function_and_args{WHY}")
