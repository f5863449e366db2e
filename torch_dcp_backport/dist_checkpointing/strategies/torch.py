"""Megatron's names for the one format, torch DCP's on disk: strategies, planners, and who writes behind.

`save` and `load` need none of them. A strategy's own `save` writes what this rank's main replicas are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, Optional

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan

from torch_dcp_backport.dist_checkpointing import serialization
from torch_dcp_backport.dist_checkpointing._src.offers import refusing
from torch_dcp_backport.dist_checkpointing._src.options import LoadOptions, SaveOptions
from torch_dcp_backport.dist_checkpointing.core import SHARDED_BACKEND, CheckpointingException, Folder
from torch_dcp_backport.dist_checkpointing.dict_utils import nested_values
from torch_dcp_backport.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
)
from torch_dcp_backport.dist_checkpointing.storage import CheckedReader
from torch_dcp_backport.dist_checkpointing.strategies.async_utils import AsyncRequest
from torch_dcp_backport.dist_checkpointing.strategies.base import (
    LoadShardedStrategy,
    SaveShardedStrategy,
    refuse_strategies,
    say_once,
)
from torch_dcp_backport.dist_checkpointing.strategies.checkpointable import (
    CheckpointableShardedTensor,
    LocalShardsContainer,
)
from torch_dcp_backport.dist_checkpointing.validation import UNEXPECTED

MCORE, NVRX = "mcore", "nvrx"
#: Each main replica is written by the rank that has it.
OPTIONS = SaveOptions(balanced=False)
#: Name -> the module below that has it.
OWN = {
    "AsyncCallsQueue": "async_utils",
    "AsyncRequest": "async_utils",
    "CachedMetadataFileSystemReader": "cached_metadata_filesystem_reader",
    "FileSystemWriterAsync": "filesystem_async",
}
NVRX_OWN = {
    "AsyncCallsQueue": "core",
    "AsyncRequest": "core",
    "CachedMetadataFileSystemReader": "cached_metadata_filesystem_reader",
    "CheckpointMetadataCache": "state_dict_saver",
    "FileSystemWriterAsync": "filesystem_async",
    "_results_queue": "filesystem_async",
    "get_write_results_queue": "filesystem_async",
    "save_state_dict_async_finalize": "state_dict_saver",
    "save_state_dict_async_plan": "state_dict_saver",
}

__getattr__ = refusing(
    __name__,
    "CheckpointMetadataCache NVRxAsyncRequest _get_filesystem_reader _import_mcore_async "
    "flatten_state_dict get_reformulation_metadata mcore_to_pyt_state_dict register_default_torch_strategies "
    "sharded_tensor_to_torch_sharded_tensor MCoreMetadata MCoreSavePlan",
)


class TorchDistSaveShardedStrategy(SaveShardedStrategy):
    """A strategy with Megatron's arguments.

    Args:
        backend: "torch_dist".
        version: the version of the format.
        keep_only_main_replica, thread_count, cached_metadata, cpu_shm_mode: make no difference: a rank writes
            one file, and plans are kept and compared in any case.
        separation_hint: makes no difference, which is said once: `remove_sharded_tensors` works by keys.

    Example:
        >>> import os, torch
        >>> from torch_dcp_backport.dist_checkpointing import ShardedTensor, load_plain_tensors
        >>> from torch_dcp_backport.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
        >>> os.mkdir("step_1")
        >>> weight = ShardedTensor.from_rank_offsets("w", torch.arange(4))
        >>> TorchDistSaveShardedStrategy().save({"w": weight}, "step_1")
        >>> load_plain_tensors("step_1")["w"]
        tensor([0, 1, 2, 3])
    """

    def __init__(
        self,
        backend: str = SHARDED_BACKEND,
        version: int = 1,
        keep_only_main_replica: bool = True,
        thread_count: int = 1,
        cached_metadata: bool = False,
        separation_hint: Optional[str] = None,
        cpu_shm_mode: bool = False,
    ) -> None:
        super().__init__(backend, version)
        self.keep_only_main_replica = keep_only_main_replica
        self.thread_count = thread_count
        self.use_cached_ckpt_structure = cached_metadata
        self.separation_hint = separation_hint
        self.cpu_shm_mode = cpu_shm_mode
        #: As Megatron's programs pass it from a load on; a plan is kept without it.
        self.cached_global_metadata: Optional[Metadata] = None
        if separation_hint is not None:
            say_once(
                f"separation_hint={separation_hint!r} makes no difference: a rank writes one file; "
                "remove_sharded_tensors removes tensors by their keys"
            )

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Folder) -> None:
        """Save the parts of a state dict, each main replica by the rank that has it. Collective.

        Unlike Megatron's, the folder is a checkpoint afterwards: it has its marker.

        Raises:
            CheckpointingException: as `dist_checkpointing.save`; the same on every rank.
        """
        with serialization.saving(checkpoint_dir, OPTIONS) as state:
            refuse_strategies((self.backend, self.version))
            state.set(sharded_state_dict)

    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Folder, async_strategy: str = MCORE
    ) -> AsyncRequest:
        """Begin `save` in the background; return a request for an `AsyncCallsQueue`. Collective.

        Raises:
            CheckpointingException: as `save`; or "nvrx", which writes in another process.
        """
        requests: list[AsyncRequest] = []
        with serialization.saving(checkpoint_dir, OPTIONS, requests) as state:
            refuse_strategies((self.backend, self.version))
            serialization.refuse_processes(async_strategy)
            state.set(sharded_state_dict)
        return requests[0]


class TorchDistLoadShardedStrategy(LoadShardedStrategy):
    """A strategy with Megatron's arguments.

    Args:
        cache_metadata: makes no difference: the small files are read by each call.
        checkpoint_name, stream_ckpt_dequant: make no difference.
    """

    def __init__(
        self,
        cache_metadata: bool = False,
        checkpoint_name: Optional[Folder] = None,
        *,
        stream_ckpt_dequant: bool = True,
    ) -> None:
        super().__init__()
        self.cache_metadata = cache_metadata
        self.checkpoint_name = checkpoint_name
        #: Always None; Megatron's programs pass it on to a save.
        self.cached_global_metadata: Optional[Metadata] = None

    def load(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Folder, async_strategy: str = MCORE
    ) -> StateDict:
        """Load the parts of a state dict on this rank; no other rank takes part, as in Megatron's.

        A program that has put a function of its own into `MCoreLoadPlanner.create_local_plan`, to see what is
        read from which file, is called with torch's plan; the plan that it returns makes no difference.

        Returns:
            The loaded values, without the checkpoint's common state.

        Raises:
            CheckpointingException: as `dist_checkpointing.load`, on this rank.
        """
        if MCoreLoadPlanner.create_local_plan is not OWN_PLAN:
            show_plan(sharded_state_dict, checkpoint_dir)
        options = LoadOptions(validate_access_integrity=False, is_alone=True, has_common=False)
        with serialization.loading(checkpoint_dir, options) as load:
            load.ask(sharded_state_dict)
        return load.result  # type: ignore[no-any-return]

    def load_tensors_metadata(
        self, checkpoint_dir: Folder, metadata: Optional[Metadata] = None
    ) -> dict[str, ShardedTensor]:
        """Return what `dist_checkpointing.load_tensors_metadata` does.

        Args:
            metadata: makes no difference; the folder is read.
        """
        return serialization.tensors_in(serialization.open_alone(checkpoint_dir))

    def load_sharded_metadata(self, checkpoint_dir: Folder) -> dict[str, ShardedBase]:
        """Return what `dist_checkpointing.load_sharded_metadata` does."""
        return serialization.parts_in(serialization.open_alone(checkpoint_dir))

    def remove_sharded_tensors(self, checkpoint_dir: Folder, key_prefix: str) -> None:
        """Do what `dist_checkpointing.remove_sharded_tensors` does."""
        serialization.remove_sharded_tensors(checkpoint_dir, key_prefix)


class MCoreSavePlanner(DefaultSavePlanner):
    """torch's planner with Megatron's arguments, for programs that call `dcp.save`."""

    def __init__(
        self,
        *args: Any,
        dedup_replicated_tensors: Optional[bool] = None,
        nd_flattened_global_shapes: Optional[Mapping[str, tuple[int, ...]]] = None,
        can_run_decentralized_global_plan: bool = True,
        **kwargs: Any,
    ) -> None:
        if nd_flattened_global_shapes:
            raise CheckpointingException(
                "nd_flattened_global_shapes: flattened tensors are saved by dist_checkpointing.save"
            )
        if dedup_replicated_tensors is not None:
            kwargs["dedup_replicated_tensors"] = dedup_replicated_tensors
        super().__init__(*args, **kwargs)
        self.can_run_decentralized_global_plan = can_run_decentralized_global_plan


class MCoreLoadPlanner(DefaultLoadPlanner):
    """torch's planner, which compares global shapes first; for programs that call `dcp.load`.

    Args:
        shapes_validation_sharded_tensors: the tensors that have to be stored in the same global shape.
        allow_shape_mismatch_sharded_tensors: has to be empty: `dist_checkpointing.load` serves these.
    """

    def __init__(
        self,
        *args: Any,
        shapes_validation_sharded_tensors: Iterable[ShardedTensor] = (),
        allow_shape_mismatch_sharded_tensors: Optional[Mapping[str, ShardedTensor]] = None,
        **kwargs: Any,
    ) -> None:
        if allow_shape_mismatch_sharded_tensors:
            keys = ", ".join(sorted(allow_shape_mismatch_sharded_tensors))
            raise CheckpointingException(f"allow_shape_mismatch is served by dist_checkpointing.load: {keys}")
        super().__init__(*args, **kwargs)
        self.shapes_validation_sharded_tensors = shapes_validation_sharded_tensors

    def _validate_global_shapes(self, metadata: Any, sharded_tensors: Iterable[ShardedTensor]) -> None:
        for part in sharded_tensors:
            entry = metadata.state_dict_metadata.get(part.key)
            if entry is None:
                raise CheckpointingException(f"{UNEXPECTED}: {part.key}")
            if tuple(entry.size) != tuple(part.global_shape):
                got, expected = tuple(part.global_shape), tuple(entry.size)
                raise CheckpointingException(
                    f"wrong global shape: {part.key} (expected {expected} as saved, got {got})"
                )

    def create_local_plan(self) -> LoadPlan:
        self._validate_global_shapes(self.metadata, self.shapes_validation_sharded_tensors)
        return super().create_local_plan()


OWN_PLAN = MCoreLoadPlanner.create_local_plan


def show_plan(sharded_state_dict: ShardedStateDict, checkpoint_dir: Folder) -> None:
    """Plan as torch does, for a program that looks on; boxes that torch has no kind for are left out."""
    boxes: dict[str, list[CheckpointableShardedTensor]] = {}
    parts = [part for part in nested_values(sharded_state_dict) if isinstance(part, ShardedTensor)]
    for part in parts:
        if part.data is not None and not part.prepend_axis_num and part.flattened_range is None:
            boxes.setdefault(part.key, []).append(CheckpointableShardedTensor.from_sh_ten(part))
    rigid = [part for part in parts if not part.allow_shape_mismatch and part.key in boxes]
    planner = MCoreLoadPlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, shapes_validation_sharded_tensors=rigid
    )
    state = {key: LocalShardsContainer(shards) for key, shards in boxes.items()}
    planner.set_up_planner(state, CheckedReader(checkpoint_dir).read_metadata(), False)
    planner.create_local_plan()


def get_async_strategy(async_strategy: str = NVRX, module: Optional[str] = None) -> tuple[str, Any]:
    """Return (the strategy, its classes by name; or the class that `module` names).

    Args:
        async_strategy: "mcore" for this package's, "nvrx" for those of nvidia-resiliency-ext, which work with
            its own saves alone.
        module: the name of a class; None returns all.

    Raises:
        ModuleNotFoundError: "nvrx", and no such package is installed, or an older one.
        TypeError: another strategy.
    """
    if async_strategy == MCORE:
        places, package = OWN, __package__
    elif async_strategy == NVRX:
        places, package = NVRX_OWN, "nvidia_resiliency_ext.checkpointing.async_ckpt"
    else:
        raise TypeError(f"async_strategy={async_strategy!r}: expected {MCORE} or {NVRX}")
    classes = {}
    try:
        for name, place in places.items():
            classes[name] = getattr(import_module(f"{package}.{place}"), name)
    except (ImportError, AttributeError) as error:
        raise ModuleNotFoundError(
            f'async_strategy="{NVRX}" needs a nvidia-resiliency-ext that fits ({error}); '
            f'"{MCORE}" needs nothing'
        ) from error
    if module is not None:
        return async_strategy, classes[module]
    return async_strategy, classes
