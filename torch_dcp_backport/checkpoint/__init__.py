"""Checkpoints of a training run: steps appear complete or not at all, and the newest good step is resumed.

verl's names (`verl.utils.checkpoint`) on `dist_checkpointing`. Knows a trainer's parts; must never train.
"""

from torch_dcp_backport.private_members import require

require("checkpoint")

from torch_dcp_backport.checkpoint._src.expiry import SaveSignals, should_save_ckpt_esi
from torch_dcp_backport.checkpoint._src.exporting import export_checkpoint
from torch_dcp_backport.checkpoint._src.fsdp import FSDPCheckpointManager
from torch_dcp_backport.checkpoint._src.handler import (
    CheckpointHandler,
    OrchestrationMode,
    extract_step,
    get_checkpoint_tracker_filename,
)
from torch_dcp_backport.checkpoint._src.latest import find_latest_ckpt_path
from torch_dcp_backport.checkpoint._src.manager import BaseCheckpointManager
from torch_dcp_backport.checkpoint._src.megatron import MegatronCheckpointManager
from torch_dcp_backport.checkpoint._src.nearby import NearbyCheckpoints, NearbyStep
from torch_dcp_backport.checkpoint._src.policies import PreservationPolicy, SavePolicy

__all__ = [
    "BaseCheckpointManager",
    "CheckpointHandler",
    "FSDPCheckpointManager",
    "MegatronCheckpointManager",
    "NearbyCheckpoints",
    "NearbyStep",
    "OrchestrationMode",
    "PreservationPolicy",
    "SavePolicy",
    "SaveSignals",
    "export_checkpoint",
    "extract_step",
    "find_latest_ckpt_path",
    "get_checkpoint_tracker_filename",
    "should_save_ckpt_esi",
]
