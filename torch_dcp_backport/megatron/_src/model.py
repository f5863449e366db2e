"""The parameters that this rank's modules hold, by duck type. Megatron is never imported.

Must never talk to other ranks, and never write into a parameter.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import nn

from torch_dcp_backport import compat
from torch_dcp_backport.megatron._src.cuts import Place
from torch_dcp_backport.megatron._src.names import STYLES, Role, Style, role_of
from torch_dcp_backport.megatron._src.shape import Shape
from torch_dcp_backport.megatron.families.table import Family
from torch_dcp_backport.transfer import Call, Problem, has_slices, why_not_writable

logger = logging.getLogger("torch_dcp_backport.megatron")
Models = Union[nn.Module, Sequence[nn.Module]]
#: [chunk] -> numbers of its layers, from 0.
Layers = Sequence[Sequence[int]]
#: Parameter of a GroupedMLP -> its dimensions, once it is viewed.
GROUPED_SHAPES = {"weight1": ("experts", "hidden", "own"), "weight2": ("experts", "own", "hidden")}
#: A buffer that is trained: the router's bias of each expert.
ROUTER_BUFFER = ".mlp.router.expert_bias"
PARALLEL_STATE = "megatron.core.parallel_state"


class Parallel(NamedTuple):
    """This rank's place in its tensor parallel group, and in the groups of experts.

    Args:
        tp_rank: the rank in the TP group, from 0.
        tp_size: the number of ranks of the TP group.
        ep_rank: which of the equal parts of all experts are here, from 0.
        ep_size: the number of parts that all experts are dealt out to.
        etp_rank: the rank in the TP group of experts; None is that of the TP group.
        etp_size: the number of ranks of the TP group of experts; None is that of the TP group.

    Example:
        >>> from torch_dcp_backport import megatron
        >>> megatron.Parallel(tp_rank=1, tp_size=2).experts
        (1, 2)
        >>> megatron.Parallel(tp_rank=0, tp_size=2, ep_rank=4, ep_size=4).problem
        'there is no EP rank 4 of 4'
    """

    tp_rank: int
    tp_size: int
    ep_rank: int = 0
    ep_size: int = 1
    etp_rank: Optional[int] = None
    etp_size: Optional[int] = None

    @staticmethod
    def of_megatron() -> Optional[Parallel]:
        """Return the place that megatron-core says; None where it is not loaded and initialised."""
        state = sys.modules.get(PARALLEL_STATE)
        if state is None or not state.model_parallel_is_initialized():
            return None
        rank, size = state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()
        place = Parallel(rank, size)
        # Megatron before 0.9 has no TP of experts.
        if hasattr(state, "get_expert_model_parallel_rank"):
            ep_size = state.get_expert_model_parallel_world_size()
            place = place._replace(ep_rank=state.get_expert_model_parallel_rank(), ep_size=ep_size)
        if hasattr(state, "get_expert_tensor_parallel_rank"):
            etp_size = state.get_expert_tensor_parallel_world_size()
            place = place._replace(etp_rank=state.get_expert_tensor_parallel_rank(), etp_size=etp_size)
        return place

    @property
    def problem(self) -> str:
        """The ranks that cannot exist, in words; empty where all can."""
        pairs = [
            (what, rank, size)
            for what, rank, size in (
                ("TP", self.tp_rank, self.tp_size),
                ("EP", self.ep_rank, self.ep_size),
                ("expert TP", self.experts[0], self.experts[1]),
            )
            if not 0 <= rank < size
        ]
        return "; ".join(f"there is no {what} rank {rank} of {size}" for what, rank, size in pairs)

    @property
    def experts(self) -> tuple[int, int]:
        """(rank, size) of the TP of experts."""
        if self.etp_size is None:
            return self.tp_rank, self.tp_size
        return self.etp_rank or 0, self.etp_size


class Param(NamedTuple):
    """A parameter, as other ranks know it. Plain data: it travels between ranks."""

    name: str
    role: Role
    #: Its number in the full model, from 0; None outside the layers.
    layer: Optional[int]
    shape: tuple[int, ...]
    dtype: torch.dtype


class ModelShard(NamedTuple):
    """A rank's parameters, and its place. Replicas are ranks with equal shards."""

    place: Place
    params: tuple[Param, ...]


class Local(NamedTuple):
    """This rank's shard, and the memory behind it."""

    shard: ModelShard
    #: Parameter name -> the tensor, detached.
    memory: dict[str, torch.Tensor]

    @property
    def device(self) -> str:
        kinds = {tensor.device.type for tensor in self.memory.values()}
        return kinds.pop() if len(kinds) == 1 else ""


def describe(
    call: Call, models: Models, shape: Shape, parallel: Optional[Parallel], layers: Optional[Layers]
) -> Local:
    """Describe what this rank's chunks hold; a parameter that does not fit becomes a problem of the call.

    Args:
        shape: the numbers of the model in config.json.
        layers: for each chunk the numbers of its layers, from 0; None takes the modules' own numbers.

    Raises:
        ValueError: no model of a known kind, or no way to find this rank's place.
    """
    chunks = [unwrapped(call, model) for model in chunks_of(models)]
    styles = {style.name: style for _, style in chunks}
    if len(styles) != 1:
        raise ValueError(f"the chunks are of {len(styles)} kinds ({', '.join(styles) or 'there are none'})")
    (style,) = styles.values()
    if layers is not None and len(layers) != len(chunks):
        raise ValueError(f"layers= has {len(layers)} chunks, and the model has {len(chunks)}")
    if layers is not None and any(isinstance(numbers, int) for numbers in layers):
        raise ValueError(f"layers={list(layers)}: expected a list for each chunk, such as [[0, 1]]")
    where = parallel or Parallel.of_megatron() or alone(call)
    if where.problem:
        raise ValueError(where.problem)
    params: list[Param] = []
    memory: dict[str, torch.Tensor] = {}
    for number, (module, _) in enumerate(chunks):
        prefix = f"[{number}]." if len(chunks) > 1 else ""
        numbers = numbers_of(module, style, None if layers is None else layers[number])
        roles = roles_of(module, style, shape.family, where)
        for name, param in parameters_of(module):
            known = roles[name]
            problem = unfit(param)
            if known is None:
                problem = f"a parameter that no {shape.kind} model has in its Hugging Face files"
            if known is None or problem:
                call.problems.append(Problem(problem, prefix + name, got=f"{tuple(param.shape)}"))
                continue
            role, index = known
            layer = index
            if index is not None:
                # Layers of multi-token prediction come behind all others.
                layer = numbers[index] if index >= 0 else shape.layers - 1 - index
            params.append(Param(prefix + name, role, layer, tuple(param.shape), param.dtype))
            memory[prefix + name] = param.detach()
    return Local(
        ModelShard(Place(style.name, where.tp_rank, where.tp_size, *where.experts), tuple(params)), memory
    )


def parameters_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, parameter); of a GroupedMLP's two parameters each expert's part, as `weight1[0]`.

    Buffers of routers that files have are among them.
    """
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name.endswith(ROUTER_BUFFER))
    for name, param in module.named_parameters():
        path, _, last = name.rpartition(".")
        if last in GROUPED_SHAPES and path.endswith(".mlp.experts") and param.dim() == 2:
            count = getattr(module.get_submodule(path), "num_local_experts", None)
            hidden = param.shape[0 if last == "weight1" else 1]
            if isinstance(count, int) and count > 0 and param.is_contiguous() and not param.numel() % count:
                # Stacked and transposed, whatever their own shape says: the forward views them so.
                sizes = {"experts": count, "hidden": hidden, "own": param.numel() // count // hidden}
                parts = param.detach().view([sizes[size] for size in GROUPED_SHAPES[last]])
                yield from ((f"{name}[{number}]", part.t()) for number, part in enumerate(parts))
                continue
        yield name, param


def roles_of(
    module: nn.Module, style: Style, family: Family, where: Parallel
) -> dict[str, Optional[tuple[Role, Optional[int]]]]:
    """Return parameter -> (role, layer within the chunk); an expert has its number in the full model."""
    roles = {name: role_of(style, family, name) for name, _ in parameters_of(module)}
    #: Layer -> its experts here.
    counts: dict[Optional[int], int] = {}
    for known in roles.values():
        if known is not None and known[0].expert is not None:
            counts[known[1]] = max(counts.get(known[1], 0), known[0].expert + 1)
    for name, known in roles.items():
        if known is not None and known[0].expert is not None:
            role, layer = known
            number = where.ep_rank * counts[layer] + known[0].expert
            roles[name] = role._replace(expert=number), layer
    return roles


def chunks_of(models: Models) -> Sequence[nn.Module]:
    """Return a rank's chunks.

    Raises:
        TypeError: neither a module nor a sequence of modules.
    """
    chunks = [models] if isinstance(models, nn.Module) else models
    if not isinstance(chunks, Sequence) or not all(isinstance(chunk, nn.Module) for chunk in chunks):
        raise TypeError(f"models is a {type(models).__name__}, and neither a module nor a sequence of them")
    return chunks


def alone(call: Call) -> Parallel:
    if not call.groups or len(call.ranks) == 1:
        return Parallel(0, 1)
    raise ValueError("pass parallel=Parallel(tp_rank, tp_size): megatron-core is not initialised")


def unwrapped(call: Call, model: nn.Module) -> tuple[nn.Module, Style]:
    """Return a chunk without its wrappers (Float16Module, DistributedDataParallel), and its kind."""
    inner: Any = model
    while True:
        if layer_list(getattr(inner, "language_model", None), STYLES["mcore"]) is not None:
            others = [name for name, _ in inner.named_children() if name != "language_model"]
            call.warn_once(
                logger,
                f"of a {type(inner).__name__} the language_model alone is loaded and saved, not "
                f"{', '.join(others) or 'what is beside it'}",
            )
            inner = inner.language_model
        for style in STYLES.values():
            if layer_list(inner, style) is not None:
                return inner, style
        if not isinstance(getattr(inner, "module", None), nn.Module):
            raise ValueError(
                f"{type(model).__name__} has neither decoder.layers (megatron-core) nor model.layers (verl)"
            )
        inner = inner.module


def layer_list(module: Any, style: Style) -> Optional[Sequence[nn.Module]]:
    for name in style.layers.rstrip(".").split("."):
        module = getattr(module, name, None)
    return list(module) if isinstance(module, nn.ModuleList) else None


def numbers_of(module: nn.Module, style: Style, given: Optional[Sequence[int]]) -> Sequence[int]:
    """Return the number in the full model, from 0, of each layer of a chunk.

    Raises:
        ValueError: the modules have no numbers, or other numbers than `layers=`.
    """
    modules = layer_list(module, style) or ()
    own = [number - 1 for layer in modules for number in [getattr(layer, "layer_number", None)] if number]
    if len(own) == len(modules):
        if given is not None and list(given) != own:
            raise ValueError(f"layers= says {list(given)}, and the modules' layer_number {own} (from 0)")
        return own
    if given is None:
        raise ValueError("the modules have no layer_number: pass layers=[[...], ...], see megatron.stages")
    if len(given) != len(modules):
        raise ValueError(f"layers= says {list(given)}, and the chunk has {len(modules)} layers")
    return given


def unfit(param: torch.Tensor) -> str:
    """Return why a parameter cannot be read or written in place; an empty string where it can."""
    if param.is_meta:
        return "on the meta device, which holds no values"
    if isinstance(param, compat.DTensor) or not has_slices(param):
        return f"a {type(param).__name__}, which has no slices in memory"
    if not param.is_floating_point() or param.element_size() < 2:
        return f"a parameter of {param.dtype}"
    return why_not_writable(param)
