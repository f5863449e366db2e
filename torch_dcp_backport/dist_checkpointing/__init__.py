"""Sharded checkpoints by a map of boxes: saved by any number of ranks, loaded by any other.

Megatron's names (`megatron.core.dist_checkpointing`), torch DCP's format on disk. Knows tensors and files;
must never know a model, but for `training_state`, which nothing here imports.
"""

from torch_dcp_backport.private_members import require

require("dist_checkpointing")

from torch_dcp_backport.dist_checkpointing._src.report import StorageReport, storage_report
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

# For the rooms beside it, and not public: each as itself, so that type checkers see it here.
# isort: off
from torch_dcp_backport.dist_checkpointing._src import (
    param_groups as param_groups,
    values as values,
)
from torch_dcp_backport.dist_checkpointing._src.calls import begin as begin
from torch_dcp_backport.dist_checkpointing._src.common import digest_of as digest_of, values_of as values_of
from torch_dcp_backport.dist_checkpointing._src.table import covered as covered
from torch_dcp_backport.dist_checkpointing._src.files import Damaged as Damaged, OpenFiles as OpenFiles
from torch_dcp_backport.dist_checkpointing._src.load import (
    Opened as Opened,
    Opening as Opening,
    load_object as load_object,
)
from torch_dcp_backport.dist_checkpointing._src.loading import Loading as Loading
from torch_dcp_backport.dist_checkpointing._src.metadata import Stored as Stored
from torch_dcp_backport.dist_checkpointing._src.options import (
    LoadOptions as LoadOptions,
    SaveOptions as SaveOptions,
    checked_bool as checked_bool,
)
from torch_dcp_backport.dist_checkpointing._src.param_groups import (
    PARAMS as PARAMS,
    assigned as assigned,
    check as check,
)
from torch_dcp_backport.dist_checkpointing._src.sharded_tensor import part_of_this_rank as part_of_this_rank
from torch_dcp_backport.dist_checkpointing._src.reader import Read as Read, RecordReader as RecordReader
from torch_dcp_backport.dist_checkpointing._src.values import resolved as resolved
from torch_dcp_backport.dist_checkpointing._src.body import Output as Output
from torch_dcp_backport.dist_checkpointing._src.worker import (
    Worker as Worker,
    checked_seconds as checked_seconds,
)
# isort: on

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
