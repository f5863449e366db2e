"""Sharded checkpoints by a map of boxes: saved by any number of ranks, loaded by any other.

Megatron's names (`megatron.core.dist_checkpointing`), torch DCP's format on disk. Knows tensors and files;
must never know a model, but for `training_state`, which nothing here imports.
"""

from torch_dcp_backport.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    check_is_distributed_checkpoint,
)
from torch_dcp_backport.dist_checkpointing.inspection import verify
from torch_dcp_backport.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch_dcp_backport.dist_checkpointing.report import StorageReport, storage_report
from torch_dcp_backport.dist_checkpointing.serialization import (
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
    remove_sharded_tensors,
    save,
)

__all__ = [
    "CheckpointingConfig",
    "CheckpointingException",
    "LocalNonpersistentObject",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StorageReport",
    "check_is_distributed_checkpoint",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "remove_sharded_tensors",
    "save",
    "storage_report",
    "verify",
]
