"""What of torch's private members the package stands on, and the check that this torch has them.

A room asks for its own when it is imported, so that a release without them is one error at start. Must never
import a room, nor torch before it is asked.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any, NamedTuple

FSDP2 = "torch.distributed.fsdp._fully_shard"
OWN = "FSDPModule", "FSDPState", "FSDPStateContext", "FSDPParamGroup", "FSDPParam"
EVERYWHERE = "every room"
RESET = "`FSDPModule.reset_iter_state`, 2.13; used from 2.15 on, which drops what was not reduced"
ZEROS = (
    "`FSDPModule.set_reduce_scatter_unused_params`, 2.13; used from 2.15 on, as zeros have the sums' dtype"
)
CLOSED = "none; FSDP1 and ShardedTensor, which torch gives up for DTensor"


class Member(NamedTuple):
    """A private member of torch, or one of torch's private objects."""

    #: Its dotted name; one of FSDP2's objects has the name of its class alone.
    name: str
    #: The rooms that stand on it, with blanks between.
    rooms: str
    #: What it is used for.
    use: str
    #: The public way, the first release of our lanes that has it, and why it is not used; or "none".
    public: str = "none"
    #: The last release that it is used on; empty where that is the newest.
    until: str = ""
    #: Whether it is not asked for at start: the code looks first, or only an object of FSDP1 has it.
    is_not_asked: bool = False


MEMBERS: tuple[Member, ...] = (
    # DTensors, meshes and process groups.
    Member(
        "torch.distributed.tensor.DTensor._local_tensor",
        EVERYWHERE,
        "a rank's part",
        "`DTensor.to_local`, 2.4; goes through autograd and costs 100 times as much",
    ),
    Member(
        "torch.distributed.tensor.DTensor._spec",
        EVERYWHERE,
        "a part on another device than its mesh's",
        "`DTensor.from_local`, 2.4; moves the part to the mesh's device",
    ),
    Member(
        "torch.distributed._functional_collectives.AsyncCollectiveTensor",
        EVERYWHERE,
        "a part that a collective still fills",
    ),
    Member(
        "torch.utils._python_dispatch._disable_current_modes", EVERYWHERE, "a mesh's ranks in FakeTensorMode"
    ),
    Member(
        "torch.distributed.tensor.placement_types._StridedShard",
        EVERYWHERE,
        "FSDP2 over TP",
        is_not_asked=True,
    ),
    Member(
        "torch.distributed._tensor", EVERYWHERE, "DTensor", "`torch.distributed.tensor`, 2.5", "2.4", True
    ),
    Member(
        "torch.distributed._composable.fsdp",
        EVERYWHERE,
        "FSDP2",
        "`torch.distributed.fsdp`, 2.6",
        "2.5",
        True,
    ),
    Member("torch.distributed.ProcessGroup._device_types", "transfer", "the devices that messages can be on"),
    Member(
        "torch.distributed.ProcessGroup._get_backend",
        "transfer",
        "the backend of a device",
        "`torch.distributed.get_backend_config`, 2.4; what the call asked for, used where there is no object",
    ),
    Member("torch.distributed.distributed_c10d._get_default_store", "transfer", "the default group's store"),
    Member(
        "torch._C._get_privateuse1_backend_name",
        "transfer",
        "the name of a plugin's device",
        "`torch.accelerator.current_accelerator`, 2.6; names one, not one beside it",
    ),
    # FSDP2's own records. The engine asks for these of its units, before it trains.
    Member("FSDPModule._get_fsdp_state", "state_dict engine checkpoint", "FSDP2's record of a module"),
    Member(
        "FSDPState._fsdp_param_group",
        "state_dict engine checkpoint",
        "the unit's parameters; None without any",
    ),
    Member("FSDPParamGroup.fsdp_params", "state_dict engine checkpoint", "FSDP2's record of each parameter"),
    Member("FSDPParamGroup.post_backward", "engine", "the moment before a unit's gradients are reduced"),
    Member(
        "FSDPParamGroup.reduce_grads",
        "engine",
        "whether this pass reduces",
        "`FSDPModule.set_requires_gradient_sync`, 2.4; sets, and does not tell",
    ),
    Member(
        "FSDPParamGroup.all_reduce_grads",
        "engine",
        "whether this pass adds up replicas",
        "`FSDPModule.set_requires_all_reduce`, 2.4; sets, and does not tell",
    ),
    Member(
        "FSDPParamGroup._training_state",
        "engine checkpoint",
        "whether the unit has a part in the backward pass",
    ),
    Member(
        "FSDPParam.sharded_param",
        "state_dict engine checkpoint",
        "the parameter of a record",
        "`Module.parameters`, 2.4; of a unit in the middle of a pass they are the whole ones",
    ),
    Member("FSDPParam._unsharded_param", "engine checkpoint", "the gradients that a pass has left"),
    Member("FSDPParam.offload_to_cpu", "state_dict engine", "shards that stay on the host"),
    Member("FSDPState._is_root", "engine checkpoint", "whether a model has run a pass"),
    Member("FSDPState._comm_ctx", "engine checkpoint", "a pass that failed", RESET, "2.14"),
    Member("FSDPState._state_ctx", "engine checkpoint", "a pass that failed", RESET, "2.14"),
    Member("FSDPState._training_state", "engine checkpoint", "a pass that failed", RESET, "2.14"),
    Member("FSDPStateContext.iter_forward_root", "engine checkpoint", "a pass that failed", RESET, "2.14"),
    Member(
        "FSDPStateContext.post_backward_final_callback_queued",
        "engine checkpoint",
        "a pass that failed",
        RESET,
        "2.14",
    ),
    Member("FSDPParamGroup._post_forward_indices", "engine checkpoint", "a pass that failed", RESET, "2.14"),
    Member("FSDPParamGroup._partial_reduce_output", "engine checkpoint", "a pass that failed", RESET, "2.14"),
    Member("FSDPParamGroup.wait_for_unshard", "engine checkpoint", "a pass that failed", RESET, "2.14"),
    Member(
        "FSDPParam.unsharded_accumulated_grad",
        "engine checkpoint",
        "gradients that were not reduced",
        ZEROS,
        "2.14",
    ),
    Member("FSDPParam.accumulate_unsharded_grad_if_needed", "engine", "zeros beside sums", ZEROS, "2.14"),
    Member("FSDPParam.to_accumulated_grad_if_needed", "engine", "zeros beside sums", ZEROS, "2.14"),
    # Tensors.
    Member("torch.Tensor._version", "engine checkpoint", "writes into a tensor"),
    Member("torch.Tensor._is_view", "engine", "a view's storage is not its own"),
    Member("torch.Tensor._is_zerotensor", "engine transfer", "a tensor without memory"),
    Member("torch.Tensor._backward_hooks", "dist_checkpointing", "what a pickle keeps of a parameter"),
    Member("torch.Tensor._make_wrapper_subclass", "dist_checkpointing", "boxes of torch's DCP"),
    Member(
        "torch.UntypedStorage._cdata",
        "engine",
        "which storage it is",
        "`UntypedStorage.data_ptr`, 2.4; 0 for each that is empty",
    ),
    Member(
        "torch._foreach_mul_",
        "engine",
        "the clip of gradients",
        "`torch.nn.utils.clip_grads_with_norm_`, 2.6; takes parameters, and this takes local parts",
    ),
    Member("torch.utils._pytree.tree_flatten", "engine", "the tensors of an output"),
    Member("torch.utils._pytree.tree_unflatten", "engine", "the tensors of an output"),
    # Modules.
    Member("torch.nn.Module._apply", "engine", "moves a model's tensors"),
    Member(
        "torch.nn.Module._parameters",
        "engine state_dict",
        "a module's own parameters",
        "`Module.named_parameters(recurse=False)`, 2.4; leaves out None, and names tied ones once",
    ),
    Member(
        "torch.nn.Module._buffers",
        "state_dict",
        "a module's own buffers",
        "`Module.named_buffers(recurse=False)`, 2.4; leaves out None, and names tied ones once",
    ),
    Member(
        "torch.nn.Module._modules",
        "state_dict",
        "a module's own modules",
        "`Module.named_children`, 2.4; leaves out None, and names one of several names once",
    ),
    Member("torch.nn.Module._non_persistent_buffers_set", "engine state_dict", "buffers that no state has"),
    Member("torch.nn.Module._load_from_state_dict", "state_dict", "whether a module loads by itself"),
    Member("torch.nn.modules.batchnorm._NormBase", "state_dict", "torch's own loading code"),
    Member("torch.nn.modules.instancenorm._InstanceNorm", "state_dict", "torch's own loading code"),
    Member("torch.nn.Module._load_state_dict_pre_hooks", "state_dict", "whether hooks change what is loaded"),
    Member(
        "torch.nn.Module._load_state_dict_post_hooks", "state_dict", "whether hooks change what is loaded"
    ),
    Member("torch.nn.modules.module._IncompatibleKeys", "state_dict", "what a load returns"),
    Member("torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX", "state_dict", "the key of `get_extra_state`"),
    Member("torch._dynamo.eval_frame", "state_dict", "whether a module is compiled", is_not_asked=True),
    Member(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "state_dict",
        "the names that `checkpoint_wrapper` adds",
    ),
    Member(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper._CHECKPOINT_PREFIX",
        "state_dict",
        "the names that `checkpoint_wrapper` adds",
    ),
    # Optimizers.
    Member(
        "torch.optim.Optimizer._process_value_according_to_param_policy",
        "state_dict",
        "whether an optimizer loads as torch's",
        is_not_asked=True,
    ),
    Member(
        "torch.optim.Optimizer._optimizer_load_state_dict_pre_hooks",
        "state_dict",
        "whether hooks change what is loaded",
        is_not_asked=True,
    ),
    Member(
        "torch.optim.Optimizer._optimizer_load_state_dict_post_hooks",
        "state_dict",
        "whether hooks change what is loaded",
        is_not_asked=True,
    ),
    Member("torch._compile", "state_dict", "the wrapper of `Optimizer.load_state_dict`", is_not_asked=True),
    # Files.
    Member("torch._utils", "dist_checkpointing checkpoint", "the functions that files of `torch.save` call"),
    Member("torch._utils._rebuild_tensor_v2", "dist_checkpointing", "tensors in files of `torch.save`"),
    Member("torch._utils._rebuild_tensor_v3", "dist_checkpointing", "tensors in files of `torch.save`"),
    Member("torch._utils._rebuild_parameter", "dist_checkpointing", "parameters in files of `torch.save`"),
    Member("torch._utils._rebuild_wrapper_subclass", "checkpoint", "verl's files", is_not_asked=True),
    Member("torch.storage._get_dtype_from_pickle_storage_type", "dist_checkpointing", "dtypes in such files"),
    Member("torch._C", "dist_checkpointing", "`PyTorchFileReader`, which reads such files"),
    Member("torch._C.PyTorchFileReader", "dist_checkpointing", "the parts of such a file"),
    Member(
        "torch.serialization._open_zipfile_reader",
        "dist_checkpointing",
        "a load with classes of ours",
        "`torch.serialization.safe_globals`, 2.5; one list for all threads, with one class for each name",
    ),
    Member("torch.serialization._load", "dist_checkpointing", "as above", "as above"),
    Member("torch.serialization._weights_only_unpickler", "dist_checkpointing", "as above", "as above"),
    Member(
        "torch.serialization._weights_only_unpickler._get_user_allowed_globals",
        "dist_checkpointing",
        "classes that the user allows",
        "`torch.serialization.get_safe_globals`, 2.4; tells, and adds none to a copy",
    ),
    Member("torch.distributed.checkpoint.filesystem._StorageInfo", "dist_checkpointing", "DCP's `.metadata`"),
    Member(
        "torch.distributed._checkpointable", "dist_checkpointing", "boxes of torch's DCP", is_not_asked=True
    ),
    Member(
        "torch.distributed.checkpoint.state_dict._patched_state_dict",
        "state_dict",
        "models of `_patch_model_state_dict`",
        is_not_asked=True,
    ),
    # FSDP1 and ShardedTensor.
    Member(
        "torch.distributed._shard.sharded_tensor.api.ShardedTensor", "state_dict", "states of FSDP1", CLOSED
    ),
    Member("torch.distributed._shard.sharded_tensor.shard.Shard", "state_dict", "states of FSDP1", CLOSED),
    Member(
        "torch.distributed._shard.sharded_tensor.api.ShardedTensor._init_from_local_shards_and_global_metadata",
        "state_dict",
        "a copy on the host",
        CLOSED,
    ),
    Member(
        "torch.distributed._shard.sharded_tensor.api.ShardedTensor._process_group",
        "state_dict checkpoint",
        "the group of a state",
        CLOSED,
        is_not_asked=True,
    ),
    Member(
        "torch.distributed._shard.sharded_tensor.api.ShardedTensor._init_rrefs",
        "state_dict",
        "a copy on the host",
        CLOSED,
        is_not_asked=True,
    ),
    Member(
        "torch.distributed._remote_device._device",
        "state_dict",
        "a copy on the host",
        CLOSED,
        is_not_asked=True,
    ),
    Member(
        "torch.distributed._state_dict_utils.CompanionMismatch", "state_dict", "the error of a copy", CLOSED
    ),
    Member(
        "torch.distributed._state_dict_utils._all_gather_sharded_tensor", "state_dict", "a full state", CLOSED
    ),
    Member(
        "torch.distributed.fsdp._common_utils.FSDP_WRAPPED_MODULE",
        "state_dict",
        "the names that FSDP1 adds",
        CLOSED,
    ),
    Member(
        "torch.distributed.fsdp.ShardingStrategy._HYBRID_SHARD_ZERO2", "state_dict", "HSDP of FSDP1", CLOSED
    ),
    Member(
        "torch.distributed.fsdp.FullyShardedDataParallel._use_orig_params",
        "state_dict",
        "FSDP1's flat parameters",
        CLOSED,
        is_not_asked=True,
    ),
    Member(
        "torch.distributed.fsdp.FullyShardedDataParallel._inter_node_pg",
        "state_dict checkpoint",
        "HSDP of FSDP1",
        CLOSED,
        is_not_asked=True,
    ),
    Member(
        "torch.distributed.fsdp._flat_param.FlatParameter._fqns",
        "state_dict",
        "FSDP1's flat parameters",
        CLOSED,
        is_not_asked=True,
    ),
)


class MissingMember(ImportError, RuntimeError):
    """This torch lacks private members that a room stands on."""


def lacking(room: str, names: list[str]) -> MissingMember:
    """Return the error of a torch without some members that a room stands on."""
    import torch

    return MissingMember(
        f"torch_dcp_backport's {room} cannot be used: torch {torch.__version__} has no {', '.join(names)}, "
        "on which it stands; use an earlier torch or a later torch-dcp-backport"
    )


def asked_by(room: str) -> Iterator[Member]:
    """Yield the members that a room asks for at its start."""
    for member in MEMBERS:
        if not member.is_not_asked and (member.rooms == EVERYWHERE or room in member.rooms.split()):
            yield member


def require(room: str) -> None:
    """Check that this torch has what a room stands on.

    Raises:
        MissingMember: it lacks members; all of them are named.
    """
    names = [member.name for member in asked_by(room) if member.name.partition(".")[0] not in OWN]
    missing = [name for name in names if not is_there(name)]
    if missing:
        raise lacking(room, missing)


def is_there(name: str) -> bool:
    """Return whether this torch has a module, or a member of a module or class, of a dotted name."""
    # torch 2.4: https://github.com/pytorch/pytorch/pull/134203
    old = name.replace("torch.distributed.tensor.", "torch.distributed._tensor.")
    return any(map(_found, dict.fromkeys((name, old))))


def _found(name: str) -> bool:
    *path, last = name.split(".")
    owner: Any = importlib.import_module(path[0])
    for number, part in enumerate(path[1:], 2):
        try:
            owner = getattr(owner, part)
        except AttributeError:
            try:
                owner = importlib.import_module(".".join(path[:number]))
            except ImportError:
                return False
    if has(owner, last):
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # the owner is no package
        return False


def has(owner: Any, name: str) -> bool:
    """Return whether a module, class or object has a member, of a class also one that `__init__` sets."""
    kinds = getattr(owner if isinstance(owner, type) else type(owner), "__mro__", ())
    return hasattr(owner, name) or any(name in getattr(kind, "__annotations__", {}) for kind in kinds)
