"""The fixed `torch.distributed.checkpoint.state_dict`: upstream's names and signatures.

An ordinary library on any torch >= 2.4. It knows nothing of patching; `torch_dcp_backport` puts
these functions into torch's module where torch's own are broken.
"""

from torch_dcp_backport.private_members import require

require("state_dict")

from torch_dcp_backport.state_dict.api import (
    DictValueType,
    ListDictValueType,
    OptimizerStateType,
    PrimitiveType,
    ValueType,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch_dcp_backport.state_dict.api import verify_state_dict as _verify_state_dict
from torch_dcp_backport.state_dict.collect import full_or_cpu as _maybe_full_or_cpu_state_dict
from torch_dcp_backport.state_dict.cpu_copy import check_state_dict_similarity as _check_state_dict_similarity
from torch_dcp_backport.state_dict.cpu_copy import copy_state_dict as _copy_state_dict
from torch_dcp_backport.state_dict.cpu_copy import create_cpu_state_dict as _create_cpu_state_dict
from torch_dcp_backport.state_dict.cpu_copy import offload_state_dict_to_cpu as _offload_state_dict_to_cpu
from torch_dcp_backport.state_dict.form import unflatten_model_state as _unflatten_model_state_dict
from torch_dcp_backport.state_dict.fqn import ExtraState as _EXTRA_STATE
from torch_dcp_backport.state_dict.fqn import get_fqns as _get_fqns
from torch_dcp_backport.state_dict.fqn import walk_model_state as _iterate_valid_model_state
from torch_dcp_backport.state_dict.helpers import broadcast_state_dict as _broadcast_state_dict
from torch_dcp_backport.state_dict.helpers import distribute_state_dict as _distribute_state_dict
from torch_dcp_backport.state_dict.helpers import distribute_tensors as _distribute_tensors
from torch_dcp_backport.state_dict.helpers import gather_state_dict as _gather_state_dict
from torch_dcp_backport.state_dict.load_state import load_model_state as _load_model_state_dict
from torch_dcp_backport.state_dict.load_state import load_optim_state as _load_optim_state_dict
from torch_dcp_backport.state_dict.model.get import get_model_state as _get_model_state_dict
from torch_dcp_backport.state_dict.optim.flat import flatten_optim_state as _flatten_optim_state_dict
from torch_dcp_backport.state_dict.optim.get import get_optim_state as _get_optim_state_dict
from torch_dcp_backport.state_dict.optim.initial import init_optim_state as _init_optim_state
from torch_dcp_backport.state_dict.options import FQNS_T, StateDictOptions
from torch_dcp_backport.state_dict.options import StateDictInfo as _StateDictInfo
from torch_dcp_backport.state_dict.patched import original_method as _state_dict_fn
from torch_dcp_backport.state_dict.seams import patch_model_state_dict as _patch_model_state_dict
from torch_dcp_backport.state_dict.seams import patch_optimizer_state_dict as _patch_optimizer_state_dict
from torch_dcp_backport.state_dict.seams import split_optim_state_dict as _split_optim_state_dict
from torch_dcp_backport.state_dict.seams import unflatten_optim_state_dict as _unflatten_optim_state_dict
from torch_dcp_backport.state_dict.verify import verify_options as _verify_options
from torch_dcp_backport.transfer import gc_context as _gc_context

__all__ = [
    "StateDictOptions",
    "get_model_state_dict",
    "set_model_state_dict",
    "get_optimizer_state_dict",
    "set_optimizer_state_dict",
    "get_state_dict",
    "set_state_dict",
    "OptimizerStateType",
    "ValueType",
    "PrimitiveType",
    "ListDictValueType",
    "DictValueType",
    "FQNS_T",
]
