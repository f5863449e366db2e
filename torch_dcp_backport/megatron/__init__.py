"""Megatron models from Hugging Face files and back: fused, padded and cut parameters, by duck type.

Never imports megatron.
"""

from torch_dcp_backport.hf import Export, Saved
from torch_dcp_backport.megatron._src.bridge import Loaded, gather_hf, load_hf, save_hf
from torch_dcp_backport.megatron._src.model import Parallel
from torch_dcp_backport.megatron._src.stages import stages
from torch_dcp_backport.megatron._src.verl import (
    load_state_dict_to_megatron_gptmodel,
    load_state_dict_to_megatron_qwen2,
    merge_megatron_ckpt_gptmodel,
    merge_megatron_ckpt_gptmodel_dpskv3,
    merge_megatron_ckpt_gptmodel_mixtral,
    merge_megatron_ckpt_gptmodel_qwen2_5_vl,
    merge_megatron_ckpt_gptmodel_qwen_moe,
    merge_megatron_ckpt_qwen2,
)
from torch_dcp_backport.megatron.families import add_family, family_of
from torch_dcp_backport.megatron.families.table import Family, row

__all__ = [
    "Export",
    "Family",
    "Loaded",
    "Parallel",
    "Saved",
    "add_family",
    "family_of",
    "gather_hf",
    "load_hf",
    "load_state_dict_to_megatron_gptmodel",
    "load_state_dict_to_megatron_qwen2",
    "merge_megatron_ckpt_gptmodel",
    "merge_megatron_ckpt_gptmodel_dpskv3",
    "merge_megatron_ckpt_gptmodel_mixtral",
    "merge_megatron_ckpt_gptmodel_qwen2_5_vl",
    "merge_megatron_ckpt_gptmodel_qwen_moe",
    "merge_megatron_ckpt_qwen2",
    "row",
    "save_hf",
    "stages",
]
