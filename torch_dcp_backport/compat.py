"""Every difference between torch 2.4 and the newest that the library has to know, and nothing else.

No other module below `activation` may ask which torch this is. A gate names the pull request that ends it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any, Optional, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from torch_dcp_backport import private_members
from torch_dcp_backport.private_members import has

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor as DTensor
    from torch.distributed.tensor import Replicate as Replicate
    from torch.distributed.tensor import Shard as Shard
    from torch.distributed.tensor import placement_types
else:
    try:
        from torch.distributed.tensor import DTensor, Replicate, Shard, placement_types
    except ImportError:  # torch 2.4, https://github.com/pytorch/pytorch/pull/134203
        from torch.distributed._tensor import DTensor, Replicate, Shard, placement_types
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:  # torch 2.4 and 2.5, https://github.com/pytorch/pytorch/pull/141868
        from torch.distributed._composable.fsdp import FSDPModule

Made = TypeVar("Made")
#: Tensors with no behaviour of their own. torch 2.4 has no `Buffer`:
#: https://github.com/pytorch/pytorch/pull/125971
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.nn.Parameter))
#: torch 2.4 has no strided shards: https://github.com/pytorch/pytorch/pull/126697
HAS_STRIDED = hasattr(placement_types, "_StridedShard")
#: FSDP2 trains on the CPU: CPU streams record events, since torch 2.7,
#: https://github.com/pytorch/pytorch/pull/145935
TRAINS_ON_CPU = hasattr(torch.cpu.Stream, "record_event")
#: What safetensors calls a dtype -> that dtype, of those that this torch has.
STORED_DTYPES: dict[str, torch.dtype] = {
    code: getattr(torch, name)
    for code, name in {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "C64": "complex64",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "I8": "int8",
        "U64": "uint64",
        "U32": "uint32",
        "U16": "uint16",
        "U8": "uint8",
        "BOOL": "bool",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E8M0": "float8_e8m0fnu",
    }.items()
    if hasattr(torch, name)
}
#: Device type -> the package that brings it to torch. torch >= 2.5 imports such packages itself:
#: https://github.com/pytorch/pytorch/pull/127074
PLUGINS = {"npu": "torch_npu", "hpu": "habana_frameworks.torch"}


def split_of(placement: object) -> Optional[tuple[int, int]]:
    """(tensor dim, split factor) of a sharding placement, None for Replicate.

    The factor is 1 except for a strided shard (FSDP2 over TP), which is no subclass of `Shard` any more since
    https://github.com/pytorch/pytorch/pull/167887

    Raises:
        NotImplementedError: a placement that does not say where elements live (Partial and the like).
    """
    if isinstance(placement, Replicate):
        return None
    if isinstance(placement, Shard) or type(placement).__name__ == "_StridedShard":
        dim = cast("Shard", placement).dim
        return dim, int(getattr(placement, "split_factor", 1))
    raise NotImplementedError(f"placement {placement!r} is neither a shard nor a replica")


class AmbiguousLayout(NotImplementedError):
    """Placements that say the same of two different layouts."""


def check_placements(placements: tuple[object, ...]) -> None:
    """Raise where this torch cannot say in which order mesh dimensions cut one tensor dimension.

    torch 2.4 has no strided shard: FSDP2 over TP is written as if FSDP cut first, and does not.

    Raises:
        AmbiguousLayout: two mesh dimensions shard one tensor dimension, on such a torch.
    """
    if HAS_STRIDED:
        return
    dims = [cut[0] for cut in map(split_of, placements) if cut is not None]
    if len(set(dims)) < len(dims):
        raise AmbiguousLayout(
            f"placements {placements}: this torch does not tell FSDP2 over TP from a tensor that is cut from "
            "left to right; use torch >= 2.5"
        )


def local_part(tensor: DTensor) -> torch.Tensor:
    """The local tensor itself. `to_local()` goes through autograd and costs 100 times as much."""
    return tensor._local_tensor


def arrived(local: torch.Tensor) -> torch.Tensor:
    """The tensor itself where a collective (`redistribute(async_op=True)`) may still be filling it."""
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def from_local(local: torch.Tensor, like: DTensor) -> DTensor:
    """`local` as a DTensor of `like`'s global shape, stride, mesh and placements, without traffic.

    `local` stays on its device: from_local() would move an offloaded tensor back to the mesh's.
    """
    if local.device.type != like.device_mesh.device_type:
        return wrap_local(local, like)
    return as_dtensor(local, like.device_mesh, like.placements, like.shape, like.stride())


def as_dtensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Any],
    shape: torch.Size,
    stride: tuple[int, ...],
) -> DTensor:
    """`local` as this rank's part of a DTensor of a global shape and stride, without traffic.

    Uneven shards need the global shape. torch 2.4 broadcasts by default:
    https://github.com/pytorch/pytorch/pull/130289
    """
    wrapped = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    return cast(DTensor, wrapped)


def wrap_local(local: torch.Tensor, like: DTensor) -> DTensor:
    """As `from_local`, but `local` stays on its device, which need not be the mesh's."""
    return wrapper(like)(local)


def wrapper(like: DTensor) -> Callable[[torch.Tensor], DTensor]:
    """Return a function that wraps as `wrap_local` does, and does not keep `like` alive."""
    spec = like._spec
    return lambda local: cast(DTensor, DTensor(local, spec, requires_grad=False))


def fsdp2_parameters(model: torch.nn.Module) -> Iterator[Any]:
    """Yield FSDP2's own record of each parameter that it shards."""
    for state in fsdp2_states(model):
        if state._fsdp_param_group is not None:
            yield from state._fsdp_param_group.fsdp_params


def offloaded_parameters(model: torch.nn.Module) -> set[int]:
    """The ids of the parameters whose shards FSDP2's CPUOffloadPolicy keeps on the host, also from meta.

    Raises:
        MissingMember: this torch's FSDP2 does not tell.
    """
    for root in _fsdp2_roots(model):
        check_fsdp2(root, "state_dict")
    return {id(param.sharded_param) for param in fsdp2_parameters(model) if param.offload_to_cpu}


def replicated(local: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """`local`, which every rank of the mesh holds, as a DTensor; without traffic."""
    placements = [Replicate()] * mesh.ndim
    return cast(DTensor, DTensor.from_local(local, mesh, placements, run_check=False))


def parted(local: torch.Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    """`local`, which every rank has another of, as its part along a dimension; without traffic."""
    return cast(DTensor, DTensor.from_local(local, mesh, [Shard(dim)], run_check=False))


def add_note(error: BaseException, note: str) -> None:
    """Add a note that the traceback shows, from Python 3.11 on: https://peps.python.org/pep-0678/"""
    if hasattr(error, "add_note"):
        error.add_note(note)


def is_cut_as(tensor: DTensor, other: DTensor) -> bool:
    """Whether two DTensors of one shape differ in their placements in nothing but the order of the cuts."""
    if [*map(type, tensor.placements)] == [*map(type, other.placements)]:
        return False
    if tensor.shape != other.shape or tensor.device_mesh != other.device_mesh:
        return False
    if local_part(tensor).shape != local_part(other).shape:
        return False
    try:
        # Not the placements themselves: a Shard equals a _StridedShard of the same dimension.
        mine, theirs = list(map(split_of, tensor.placements)), list(map(split_of, other.placements))
    except NotImplementedError:
        return False
    return mine != theirs and [cut and cut[0] for cut in mine] == [cut and cut[0] for cut in theirs]


def on_mesh_device(tensor: DTensor) -> DTensor:
    """`tensor` with its local part on the device of its mesh, where collectives find it."""
    kind = tensor.device_mesh.device_type
    return (
        tensor if local_part(tensor).device.type == kind else cast(DTensor, tensor.to(current_device(kind)))
    )


def fsdp2() -> Any:
    """The module that has `fully_shard` and its policies."""
    # Public from torch 2.6 on: https://github.com/pytorch/pytorch/pull/141868
    is_public = hasattr(torch.distributed.fsdp, "fully_shard")
    return importlib.import_module("torch.distributed." + ("fsdp" if is_public else "_composable.fsdp"))


def abandon_pass(model: torch.nn.Module) -> None:
    """Let FSDP2 begin anew after a forward or backward pass that an exception has ended.

    Else it waits for that backward pass to end, and the next one runs on what is left of whole units.
    Gradients that were not reduced yet are gone: `zero_grad` does not reach them. Reduced ones stay.
    """
    for root in _fsdp2_roots(model):
        check_fsdp2(root, "checkpoint")
    if not _accumulates_apart(model):
        # torch 2.13 has `reset_iter_state`, which leaves gradients that were not reduced to the next pass.
        # That of torch 2.15 drops them, and the reduced ones, which are the caller's.
        reduced = [(param.sharded_param, param.sharded_param.grad) for param in fsdp2_parameters(model)]
        for root in _fsdp2_roots(model):
            # Before its first pass it has no streams, which `reset_iter_state` asks for.
            if getattr(root._get_fsdp_state(), "_is_root", True) is not None:
                root.reset_iter_state()
        for sharded, gradient in reduced:
            sharded.grad = gradient
        return
    for param in fsdp2_parameters(model):
        param.unsharded_accumulated_grad = None
        unsharded = getattr(param, "_unsharded_param", None)
        if unsharded is not None:
            unsharded.grad = None
    for state in fsdp2_states(model):
        idle = type(state._training_state).IDLE
        state._training_state = idle
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        getattr(state._comm_ctx, "post_forward_order", []).clear()
        group = state._fsdp_param_group
        if group is not None:
            group._training_state = idle
            group._post_forward_indices.clear()
            group._partial_reduce_output = None
            group.wait_for_unshard()  # one that was asked for ahead
    reshard(model)


def _fsdp2_roots(module: torch.nn.Module) -> Iterator[Any]:
    """Yield the outermost modules that FSDP2 shards, whose passes are the passes of all within them."""
    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from _fsdp2_roots(child)


def _accumulates_apart(model: torch.nn.Module) -> bool:
    """Return whether FSDP2 adds up gradients in half precision beside the parameters.

    Up to torch 2.14 the sum is an attribute of FSDP2's own record, in another dtype than a new gradient.
    Since https://github.com/pytorch/pytorch/pull/197203 it is the gradient of the whole parameter.
    """
    param = next(iter(getattr(_group_within(model), "fsdp_params", ())), None)
    if param is None:  # nothing to add up: torch 2.13 has a public way to begin anew
        return not hasattr(FSDPModule, "reset_iter_state")
    # Either of two: where a release has renamed one, `check_fsdp2` misses that, not what 2.15 has instead.
    names = "accumulate_unsharded_grad_if_needed", "to_accumulated_grad_if_needed"
    return any(hasattr(param, name) for name in names)


def check_fsdp2(module: torch.nn.Module, room: str) -> None:
    """Check that FSDP2 has what a room does with a module's passes, before there is one.

    Args:
        module: a module that FSDP2 shards.
        room: the room that asks.

    Raises:
        MissingMember: a release has renamed what is not public.
    """
    asked = [member for member in private_members.asked_by(room) if member.name.startswith("FSDP")]
    missing = _missing_of(module, [member.name for member in asked if not member.until])
    older = [member.name for member in asked if member.until]
    # Which of the two ways this release has is seen in what was asked for until here.
    if older and not missing:
        public = [f"FSDPModule.{name}" for name in ("reset_iter_state", "set_reduce_scatter_unused_params")]
        missing = _missing_of(module, older if _accumulates_apart(module) else public)
    if missing:
        raise private_members.lacking(room, missing)


def _missing_of(module: torch.nn.Module, names: list[str]) -> list[str]:
    """Return which members FSDP2's objects of a module lack, of names as `FSDPParam.sharded_param`."""
    missing: list[str] = []
    for kind, owner in _fsdp2_objects(module):
        missing += [
            name for name in names if name.startswith(f"{kind}.") and not has(owner, name.partition(".")[2])
        ]
    return list(dict.fromkeys(missing))


def _fsdp2_objects(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield FSDP2's objects of a module with their classes' names, as far as one leads to the next.

    A root has no parameters where the units within it have all of them: they are then those of the first.
    """
    yield "FSDPModule", module
    state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
    if state is None:
        return
    yield "FSDPState", state
    if hasattr(state, "_state_ctx"):
        yield "FSDPStateContext", state._state_ctx
    group = _group_within(module)
    if group is not None:
        yield "FSDPParamGroup", group
        yield from (("FSDPParam", param) for param in getattr(group, "fsdp_params", ()))


def _group_within(model: torch.nn.Module) -> Any:
    """Return FSDP2's record of the first unit of a model that has parameters; None where none is found."""
    units = (unit for unit in model.modules() if isinstance(unit, FSDPModule))
    states = (getattr(unit, "_get_fsdp_state", lambda: None)() for unit in units)
    groups = (getattr(state, "_fsdp_param_group", None) for state in states)
    return next((group for group in groups if group is not None), None)


def _group_of(module: torch.nn.Module) -> Any:
    """Return FSDP2's record of the parameters of a module; None where modules within it have all of them."""
    return cast(Any, module)._get_fsdp_state()._fsdp_param_group


@torch.no_grad()
def reduce_unused(module: torch.nn.Module, is_asked: bool) -> None:
    """Let the next reduction of a module take zeros for its parameters without a gradient.

    Args:
        module: a module that FSDP2 shards.
        is_asked: whether it does; False leaves such parameters out.
    """
    if not _accumulates_apart(module):
        # torch 2.13 has it, and gives the zeros of half precision beside sums in another dtype, which it
        # refuses to reduce together: https://github.com/pytorch/pytorch/pull/170667
        cast(Any, module).set_reduce_scatter_unused_params(is_asked, recurse=False)
        return
    if not is_asked:
        return
    params = [
        param
        for param in _group_of(module).fsdp_params
        if getattr(param, "_unsharded_param", None) is not None and param._unsharded_param.requires_grad
    ]
    for param in params:
        if param.unsharded_accumulated_grad is None and param._unsharded_param.grad is None:
            param._unsharded_param.grad = torch.zeros_like(param._unsharded_param)
    if any(param.unsharded_accumulated_grad is not None for param in params):
        # Passes without a reduction leave gradients in the dtype of the reduction. FSDP2 refuses to reduce
        # them together with the gradient of a parameter that only the last pass has reached.
        for param in params:
            param.accumulate_unsharded_grad_if_needed()
            param.to_accumulated_grad_if_needed()


def replace_reduction(module: torch.nn.Module, make: Callable[[Any], Made]) -> Optional[Made]:
    """Put `make(group)` in the place of the method by which FSDP2 reduces a module's gradients; return it.

    FSDP2 calls the method after each backward pass through the module. None where FSDP2 shards all of the
    module's parameters with modules within it.
    """
    group = _group_of(module)
    if group is None:
        return None
    made = group.post_backward = make(group)
    return made


def reshard(model: torch.nn.Module) -> None:
    """FSDP2's parameters as shards again: after a forward pass alone the root keeps them whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def fsdp2_states(model: torch.nn.Module) -> list[Any]:
    """FSDP2's own record of each module that it shards."""
    modules: Any = (module for module in model.modules() if isinstance(module, FSDPModule))
    return [module._get_fsdp_state() for module in modules]


def unsharded_class(module: torch.nn.Module) -> type:
    """Return a module's class; of a module that FSDP2 shards, the class that it had before."""
    kind = type(module)
    # FSDP2 makes a class of (FSDPModule, kind), whose `__module__` is that of the code that makes it.
    return kind.__bases__[-1] if issubclass(kind, FSDPModule) else kind


def mesh_ranks(mesh: DeviceMesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(mesh shape, global ranks in row-major order)."""
    # torch 2.13 makes the tensor at each access: in a mode of the caller (FakeTensorMode) one without values.
    with _disable_current_modes():
        ranks = mesh.mesh
        return tuple(ranks.shape), tuple(int(rank) for rank in ranks.flatten().tolist())


def backend_device_types(group: dist.ProcessGroup) -> list[str]:
    """The device types that messages of `group` can be on.

    No release has a public way to ask; the attributes below are the same from 2.1 to the newest. gloo
    says that it serves accelerators too, but its point-to-point messages are on the host.
    """
    kinds = [device.type for device in cast(Any, group)._device_types]
    return [kind for kind in kinds if kind == "cpu" or backend_name(group, kind) != "gloo"]


def all_gather_rows(
    rows: torch.Tensor, row: torch.Tensor, group: Optional[dist.ProcessGroup], *, async_op: bool = False
) -> Any:
    """Gather every rank's row into one tensor, in which this rank's may lie at its place already.

    torch 2.13 gave the function another name, and warns of the old one:
    https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.all_gather_single
    """
    gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    return gather(rows, row, group=group, async_op=async_op)


def attention_registries() -> tuple[Any, Any]:
    """transformers' registries of masks and of attention functions, by the name of an implementation.

    Raises:
        ValueError: this transformers has no registry of masks: those before 4.53, see
            https://github.com/huggingface/transformers/pull/37866
    """
    import transformers

    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError:
        raise ValueError(
            f"transformers {transformers.__version__} lets no program mask its attention; 4.53 does"
        ) from None
    return AttentionMaskInterface, AttentionInterface


def whole_mask(given: Mapping[str, Any], tokens: int, device: torch.device) -> dict[str, Any]:
    """The arguments of a function of transformers' registry of masks, for one sequence without padding.

    transformers 5 has lengths and offsets in the place of `cache_position`.
    """
    whole = {"batch_size": 1, "q_length": tokens, "kv_length": tokens, "q_offset": 0, "kv_offset": 0}
    whole["cache_position"] = torch.arange(tokens, device=device)  # type: ignore[assignment]
    whole["attention_mask"] = None  # type: ignore[assignment]
    return {name: whole.get(name, value) for name, value in given.items()}


def backend_name(group: dist.ProcessGroup, kind: str) -> str:
    """The name of the backend that carries messages on a device type; "" where it has none."""
    asked: Any = group
    with contextlib.suppress(RuntimeError, ValueError):
        return str(asked._get_backend(torch.device(kind)).name())
    # Of torch's backends for tests the threaded one has no such object, and the fake one's has no name:
    # https://github.com/pytorch/pytorch/blob/v2.7.1/torch/csrc/distributed/c10d/Backend.hpp#L93
    with contextlib.suppress(RuntimeError, ValueError):
        names = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
        return str(names.get(kind, ""))
    return ""


def bound_device(group: dist.ProcessGroup) -> Optional[torch.device]:
    """The device that a group was made for (`device_id=`); None where none was given."""
    bound: Optional[torch.device] = getattr(group, "bound_device_id", None)
    return bound


def is_in_use(kind: str) -> bool:
    """Whether this process has begun to use an accelerator of a type."""
    try:
        return bool(getattr(getattr(torch, kind, None), "is_initialized", bool)())
    except Exception:  # a plugin that cannot say
        return False


def host_buffer(nbytes: int, kind: str = "") -> torch.Tensor:
    """Uninitialised bytes on the host, pinned where the accelerator in use can read them directly.

    Args:
        kind: the accelerator's type; any that this process uses by default. In a process that uses none,
            memory is not pinned: that would begin to use one, and take memory of the first device.
    """
    other = torch._C._get_privateuse1_backend_name()
    if not any(map(is_in_use, [kind] if kind else ("cuda", "xpu", *PLUGINS, other))):
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")
    except (RuntimeError, AssertionError):  # no accelerator, or one that pins in another way
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def mesh_groups(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, ...]:
    """The process groups that this rank belongs to, one per mesh dimension; none outside the mesh."""
    if mesh.get_coordinate() is None:
        return ()
    return tuple(mesh.get_group(dim) for dim in range(mesh.ndim))


def current_device(kind: str) -> torch.device:
    """This process's device of a type: the CPU, or the current index of an accelerator."""
    if kind in ("cpu", "meta"):
        return torch.device(kind)
    module = getattr(torch, kind, None)
    if module is None or not hasattr(module, "current_device"):
        return torch.device(kind)
    return torch.device(kind, module.current_device())


def vendor_of(kind: str) -> Optional[str]:
    """The maker of a type of device, by verl's names; None where it is not known."""
    makers = {
        "npu": "huawei",
        "xpu": "intel",
        "hpu": "intel",
        "cuda": "amd" if torch.version.hip else "nvidia",
    }
    return makers.get(kind)


def default_store() -> Any:
    """The `torch.distributed.Store` that the default process group was made with."""
    return dist.distributed_c10d._get_default_store()


def device_module(kind: str) -> Optional[ModuleType]:
    """`torch.cuda` for "cuda" and its like for any other accelerator; None where torch knows no such type.

    torch 2.4 and 2.5 have no torch.accelerator: https://github.com/pytorch/pytorch/pull/132204
    """
    if kind in PLUGINS and not hasattr(torch, kind):
        # Any error means that it is not there: torch_npu raises a RuntimeError beside another accelerator.
        with contextlib.suppress(Exception):
            importlib.import_module(PLUGINS[kind])
    try:
        known = torch.device(kind).type == kind != "cpu"  # torch.accelerator is no type
    except RuntimeError:
        return None
    module: Optional[ModuleType] = getattr(torch, kind, None)
    return module if known and hasattr(module, "device_count") else None


def device_counts(*more: str) -> dict[str, int]:
    """Accelerator type -> how many devices this process sees, of the usual types and of `more`."""
    other = torch._C._get_privateuse1_backend_name()
    modules = {kind: device_module(kind) for kind in ("cuda", "xpu", *PLUGINS, other, *more)}
    return {kind: int(module.device_count()) for kind, module in modules.items() if module is not None}


def set_device(kind: str, rank: int) -> None:
    """Give this process the device of its rank; ranks share where there are fewer."""
    module = device_module(kind)
    if module is not None and hasattr(module, "set_device"):
        module.set_device(rank % module.device_count())


def backends() -> dict[str, list[str]]:
    """The backends that this torch has, each with the device types that it serves."""
    # "fake" moves nothing: torch registers it for tests.
    names = [name for name in dist.Backend.backend_list if name not in (dist.Backend.UNDEFINED, "fake")]
    return {
        name: list(dist.Backend.backend_capability.get(name, ()))
        for name in names
        if dist.is_backend_available(name)
    }


def default_backends() -> dict[str, str]:
    """Device type -> the backend that torch takes for it."""
    return dict(dist.Backend.default_device_backend_map)


@functools.cache
def _unpickler(allowed: tuple[Any, ...]) -> Any:
    """Return a copy of torch's module that unpickles what is harmless, with more names than torch's own.

    `torch.serialization.add_safe_globals` changes one list for all threads: a `torch.load` of the user's
    would get these classes too, his additions could be lost, and one name with two classes gives either.
    """
    torchs: Any = torch.serialization._weights_only_unpickler  # type: ignore[attr-defined]
    copy: Any = importlib.util.module_from_spec(torchs.__spec__)
    torchs.__spec__.loader.exec_module(copy)
    ours = {f"{kind.__module__}.{kind.__name__}": kind for kind in allowed}
    copy._get_user_allowed_globals = lambda: {**torchs._get_user_allowed_globals(), **ours}
    return copy


def load_values(file: IO[bytes], allowed: tuple[Any, ...]) -> Any:
    """Return what is in a zip file of `torch.save` as `torch.load(weights_only=True)` does, on the CPU.

    Args:
        allowed: classes and functions that the file may call, besides torch's own and what the user has
            allowed; of two with one name these.
    """
    serialization: Any = torch.serialization
    with serialization._open_zipfile_reader(file) as reader:
        return serialization._load(reader, "cpu", _unpickler(allowed), encoding="utf-8")


@functools.cache
def has_checkpointables() -> bool:
    """Return whether torch's planners ask values for their boxes (torch 2.6, pytorch/pytorch#137848)."""
    return importlib.util.find_spec("torch.distributed._checkpointable") is not None
