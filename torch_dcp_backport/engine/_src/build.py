"""A model that is sharded before it has any memory, and filled from files: each rank its own slices.

Knows modules and FSDP2; must never hold a full model.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import nn

from torch_dcp_backport import compat
from torch_dcp_backport.engine._src import reach
from torch_dcp_backport.engine._src.checks import say
from torch_dcp_backport.engine._src.mesh import Grid
from torch_dcp_backport.hf import LOAD, Filled, Source, load_state_dict, look, opened, opened_together
from torch_dcp_backport.transfer import Call, groups_of, layout_of, part_of, whole

#: Fills a full tensor with first values.
Draw = Callable[[torch.Tensor, torch.Generator], None]
#: Names of block classes, or the classes; None takes the model's own.
Blocks = Union[None, str, type, Collection[Union[str, type]]]


class Sharding(NamedTuple):
    """The settings of FSDP2.

    Args:
        reshard_after_forward: whether FSDP2 frees gathered parameters after a unit's forward pass.
        param_dtype: the dtype of all-gathered parameters; None is the parameters' own.
        reduce_dtype: the dtype of gradients while they are reduced; None is that of the whole parameters.
        offload: whether FSDP2 keeps parameters on the host, and their optimizer steps there.
    """

    reshard_after_forward: bool = True
    param_dtype: Optional[torch.dtype] = None
    reduce_dtype: Optional[torch.dtype] = None
    offload: bool = False

    def arguments(self, grid: Grid) -> dict[str, Any]:
        """Return the arguments of `fully_shard`.

        Args:
            grid: the arrangement of ranks: its `data` mesh shards.
        """
        fsdp2 = compat.fsdp2()
        # Without a dtype of its own, torch 2.15 reduces in that of the shards, and releases before it in that
        # of the whole parameters: https://github.com/pytorch/pytorch/pull/197203
        reduce_dtype = self.reduce_dtype or self.param_dtype
        policy = fsdp2.MixedPrecisionPolicy(param_dtype=self.param_dtype, reduce_dtype=reduce_dtype)
        asked = {"mesh": grid.data, "reshard_after_forward": self.reshard_after_forward, "mp_policy": policy}
        if self.offload:
            # There is nothing to pin for where the host is the device.
            asked["offload_policy"] = fsdp2.CPUOffloadPolicy(pin_memory=grid.mesh.device_type != "cpu")
        return asked


@contextlib.contextmanager
def parameters_on_meta(dtype: Optional[torch.dtype] = None) -> Iterator[None]:
    """Return a context: modules that are made in it have parameters without memory, and real buffers.

    `torch.device("meta")` takes the buffers as well, and what a model computes into them (rotary frequencies)
    is in no file.

    Args:
        dtype: the dtype of floating parameters; None is what the modules ask for.

    Example:
        >>> import torch
        >>> from torch_dcp_backport import engine
        >>> with engine.parameters_on_meta(torch.bfloat16):
        ...     model = torch.nn.BatchNorm1d(2)
        >>> model.weight.device.type, model.weight.dtype, model.running_var
        ('meta', torch.bfloat16, tensor([1., 1.]))
    """

    def emptied(module: nn.Module, name: str, param: Optional[nn.Parameter]) -> Optional[nn.Parameter]:
        if param is None or param.is_meta:
            return None
        wanted = dtype if param.is_floating_point() else None
        return nn.Parameter(param.detach().to("meta", wanted), param.requires_grad)

    hook: Any = emptied  # torch's annotation forgets that it may return a parameter
    handle = nn.modules.module.register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def outline(model: Optional[nn.Module]) -> dict[str, str]:
    """Return digests of the parameters and the configuration, which must be the same on every rank."""
    params = () if model is None else model.named_parameters()
    names = [f"{name} {tuple(param.shape)} {param.dtype}" for name, param in params]
    found = {"parameters": f"{len(names)} ({zlib.crc32(repr(names).encode()):08x})"}
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    if to_dict is not None:
        config = {name: value for name, value in to_dict().items() if name != "_name_or_path"}
        found["configuration"] = f"{zlib.crc32(json.dumps(config, sort_keys=True, default=str).encode()):08x}"
    return found


def configuration(asked: Any, dtype: Optional[torch.dtype] = None) -> Any:
    """Return transformers' configuration of a `ModelConfig`, with its overrides.

    Args:
        dtype: for the computation of buffers, as in `from_pretrained`; None is the configuration's own.

    Raises:
        FileNotFoundError: no such model here; transformers would look for it on the network.
        ValueError: an override that is not offered.
    """
    import transformers

    if asked.hf_config is not None:
        config: Any = copy.deepcopy(asked.hf_config)
        # verl asks for flash attention where nobody has said so: the choice is transformers', as from a file.
        config._attn_implementation = None
    else:
        folder = asked.hf_config_path or asked.path
        if not Path(folder, "config.json").is_file():
            raise FileNotFoundError(f"{folder} has no config.json")
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=asked.trust_remote_code)
    override(config, overrides_of(asked.override_config))
    if dtype is not None:
        setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", dtype)
    return config


def overrides_of(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides of a configuration, which verl also has within "model_config".

    Raises:
        ValueError: a setting beside "model_config", which verl takes for Megatron.
    """
    if "model_config" not in asked:
        return dict(asked)
    beside = {
        name: value for name, value in asked.items() if name not in ("model_config", "attn_implementation")
    }
    for name, value in beside.items():
        if any(value.values()) if isinstance(value, Mapping) else value:
            raise ValueError(
                f"override_config has {name} beside model_config, which is not offered: got {value!r}"
            )
    attention = {name: asked[name] for name in ("attn_implementation",) if name in asked}
    return {**attention, **(asked["model_config"] or {})}


def override(config: Any, values: Mapping[str, Any]) -> None:
    """Replace settings of a transformers configuration; a mapping replaces settings of a part of it."""
    for name, value in values.items():
        if name == "attn_implementation":
            # Only from_pretrained() knows it by this name.
            config._attn_implementation = value
        elif isinstance(value, Mapping) and hasattr(getattr(config, name, None), "to_dict"):
            override(getattr(config, name), value)
        else:
            if not hasattr(config, name):
                say(f"override_config: a {type(config).__name__} has no {name}; the model may not read it")
            setattr(config, name, value)


def language_model(asked: Any, dtype: Optional[torch.dtype] = None) -> nn.Module:
    """Make transformers' causal language model of a `ModelConfig`; its weights are not read.

    Call it within `parameters_on_meta`: otherwise the full model takes memory.

    Args:
        asked: the `ModelConfig`.
        dtype: the dtype for the computation of buffers; None is the configuration's own.

    Raises:
        FileNotFoundError: no such model here; transformers would look for it on the network.
        ValueError: an override that is not offered.

    Example:
        A module stands in for transformers here:

        >>> import sys
        >>> from types import SimpleNamespace
        >>> from unittest import mock
        >>> from torch import nn
        >>> from torch_dcp_backport import engine
        >>> def from_config(config, trust_remote_code):
        ...     return nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        >>> stand_in = SimpleNamespace(AutoModelForCausalLM=SimpleNamespace(from_config=from_config))
        >>> asked = engine.ModelConfig(
        ...     hf_config=SimpleNamespace(hidden_size=4, vocab_size=8), override_config={"vocab_size": 6}
        ... )
        >>> with mock.patch.dict(sys.modules, transformers=stand_in), engine.parameters_on_meta():
        ...     engine.language_model(asked)
        Linear(in_features=4, out_features=6, bias=False)
    """
    import transformers

    kind: Any = transformers.AutoModelForCausalLM
    model: nn.Module = kind.from_config(
        configuration(asked, dtype), trust_remote_code=asked.trust_remote_code
    )
    return model


def value_model(asked: Any, dtype: Optional[torch.dtype] = None) -> nn.Module:
    """Make transformers' model of a `ModelConfig` with one number for each token; its weights are not read.

    Call it within `parameters_on_meta`: otherwise the full model takes memory.

    Args:
        asked: the `ModelConfig`.
        dtype: the dtype for the computation of buffers; None is the configuration's own.

    Raises:
        FileNotFoundError: no such model here; transformers would look for it on the network.
        ValueError: an override that is not offered.

    Example:
        A module stands in for transformers here:

        >>> import sys
        >>> from types import SimpleNamespace
        >>> from unittest import mock
        >>> from torch import nn
        >>> from torch_dcp_backport import engine
        >>> def from_config(config, trust_remote_code):
        ...     return nn.Linear(config.hidden_size, config.num_labels)
        >>> auto = SimpleNamespace(from_config=from_config)
        >>> stand_in = SimpleNamespace(AutoModelForTokenClassification=auto)
        >>> asked = engine.ModelConfig(hf_config=SimpleNamespace(hidden_size=4))
        >>> with mock.patch.dict(sys.modules, transformers=stand_in), engine.parameters_on_meta():
        ...     engine.value_model(asked)
        Linear(in_features=4, out_features=1, bias=True)
    """
    import transformers

    kind: Any = transformers.AutoModelForTokenClassification
    config = configuration(asked, dtype)
    config.num_labels = 1
    config.classifier_dropout = config.hidden_dropout = 0.0
    model: nn.Module = kind.from_config(config, trust_remote_code=asked.trust_remote_code)
    return model


def names_by_parameter(model: nn.Module) -> dict[int, list[str]]:
    """Return id of a parameter -> its names, which are several of a tied parameter."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return names


def units_of(model: nn.Module, blocks: Blocks = None) -> list[nn.Module]:
    """Return the modules that are sharded as units, inner first: blocks, and embeddings nothing else uses.

    Args:
        model: the model; its parameters may be on meta.
        blocks: the name of the block class, the class itself, or several; None takes `_no_split_modules` of a
            model of transformers.

    Raises:
        ValueError: a block class that does not occur, naming those that do; a tied parameter in two units; an
            expert of a sparse model as a unit.

    Example:
        >>> from torch import nn
        >>> from torch_dcp_backport import engine
        >>> model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.LayerNorm(4))
        >>> engine.units_of(model, blocks="Linear")
        [Linear(in_features=4, out_features=4, bias=True), Embedding(8, 4)]
    """
    wanted = getattr(model, "_no_split_modules", None) or () if blocks is None else blocks
    asked = (wanted,) if isinstance(wanted, (str, type)) else tuple(wanted)
    names = [kind if isinstance(kind, str) else kind.__name__ for kind in asked]
    kinds = {type(module).__name__ for module in model.modules()}
    absent = sorted(set(names) - kinds)
    # A model names block classes of all its variants.
    if absent and (blocks is not None or len(absent) == len(set(names))):
        raise ValueError(f"no module is a {', '.join(absent)}; there are {', '.join(sorted(kinds))}")
    shared = {name for tied in names_by_parameter(model).values() if len(tied) > 1 for name in tied}
    ask: Any = getattr(model, "get_output_embeddings", lambda: None)
    end = ask()
    unit_by_path = {}
    for path, module in model.named_modules():
        is_end = isinstance(module, nn.Embedding) or module is end
        is_tied = any(f"{path}.{name}" in shared for name, _ in module.named_parameters())
        if type(module).__name__ in names or (is_end and not is_tied):
            unit_by_path[path] = module
    for path, unit in unit_by_path.items():
        home = path.rpartition(".")[0]
        if is_list_of_experts(home, model):
            raise ValueError(
                f"{path} ({type(unit).__name__}) cannot be a unit: it runs only on ranks whose tokens reach "
                f"it, and the ranks gather a unit's parameters together; take the block around {home}"
            )
    for tied in names_by_parameter(model).values():
        # The innermost of nested units.
        homes = {
            max((path for path in unit_by_path if name.startswith(f"{path}.")), default="") for name in tied
        }
        if len(homes) > 1:
            # Torch 2.13 sees it; older releases make a parameter of each name, and train them apart.
            units = ", ".join(sorted(home or "the rest" for home in homes))
            raise ValueError(f"{', '.join(tied)} are one parameter, but would be in several units: {units}")
    return list(unit_by_path.values())[::-1]


def check_layers(model: nn.Module) -> None:
    """Refuse to train a model that leaves out layers at random: ranks would gather parameters by turns.

    Raises:
        ValueError: its configuration says so.
    """
    config = getattr(model, "config", None)
    for name in ("layerdrop", "decoder_layerdrop"):
        if getattr(config, name, 0.0):
            raise ValueError(
                f"{name}={getattr(config, name)}: each rank would leave out other layers of a "
                f"{type(model).__name__}; set it to 0 (override_config)"
            )


def check_router_loss(model: nn.Module) -> None:
    """Refuse to train with a loss of routers: it is no part of the loss that the caller's function computes.

    Raises:
        ValueError: the configuration asks for one.
    """
    config: Any = getattr(model, "config", None)
    for part in (config, getattr(config, "text_config", None)):
        factor = getattr(part, "router_aux_loss_coef", 0.0)
        if getattr(part, "output_router_logits", False) and factor:
            raise ValueError(
                f"output_router_logits=True with router_aux_loss_coef={factor} is not offered: the loss "
                f"function gets no loss of the routers of a {type(model).__name__}; set output_router_logits "
                "to False (override_config)"
            )


def is_list_of_experts(path: str, model: nn.Module) -> bool:
    """Return whether a sparse model's tokens choose among the modules at the path."""
    is_list = isinstance(model.get_submodule(path), (nn.ModuleList, nn.ModuleDict))
    return is_list and "expert" in path.rpartition(".")[2].lower()


def shard(
    model: nn.Module,
    grid: Grid,
    sharding: Optional[Sharding] = None,
    blocks: Blocks = None,
    apart: Iterable[nn.Module] = (),
) -> None:
    """Apply FSDP2 to each unit, then to the model; the parameters may be on meta.

    Parameters without a gradient on this rank (experts that no token reaches) are reduced as zeros.

    Args:
        model: the model, whose parameters become DTensors.
        grid: the arrangement of ranks, of `arrange`.
        sharding: the settings of FSDP2; None is `Sharding()`.
        blocks: as of `units_of`.
        apart: modules within units that are units of their own, such as those of another dtype.

    Raises:
        ValueError: as `units_of` does.

    Example:
        Within a process group:

        >>> import torch
        >>> from torch import nn
        >>> from torch_dcp_backport import engine
        >>> with engine.parameters_on_meta():
        ...     model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        >>> engine.shard(model, engine.arrange("cpu"), blocks=nn.Linear)
        >>> engine.materialize(model, torch.device("cpu"))
        >>> {name: type(param).__name__ for name, param in model.named_parameters()}
        {'0.weight': 'DTensor', '1.weight': 'DTensor'}
    """
    units = [unit for unit in units_of(model, blocks) if unit is not model]
    arguments = (sharding or Sharding()).arguments(grid)
    for module in (*apart, *units, model):
        compat.fsdp2().fully_shard(module, **arguments)
        if grid.reduced > 1:
            reach.reduce_alike(module)


def materialize(model: nn.Module, device: torch.device, *, buffers: Optional[torch.device] = None) -> None:
    """Give parameters on meta memory on a device, without values; buffers go there with theirs.

    Tied parameters stay tied: torch makes a new parameter for each name. A buffer on meta gets memory if a
    state dict has it, and its values with a load.

    Args:
        model: the model, sharded or not.
        device: the device of the parameters.
        buffers: the device of the buffers; None is `device`. CPUOffloadPolicy brings parameters to the
            device, but no buffers.

    Raises:
        ValueError: buffers on meta that no state dict has; before anything was changed, and on every rank
            that has the model.

    Example:
        >>> import torch
        >>> from torch_dcp_backport import engine
        >>> with engine.parameters_on_meta():
        ...     model = torch.nn.Linear(4, 2)
        >>> engine.materialize(model, torch.device("cpu"))
        >>> model.weight.device.type, model.weight.shape
        ('cpu', torch.Size([2, 4]))
    """
    # What a model computes into them when it is made, such as rotary frequencies, is in no file: its outputs
    # would be silently wrong.
    lost = [name for name, buffer, is_saved in buffers_of(model) if buffer.is_meta and not is_saved]
    if lost:
        raise ValueError(
            f"materialize: {', '.join(lost)}: buffers on meta that no state dict has (persistent=False), "
            "so their values are lost; make the model within engine.parameters_on_meta(), which keeps the "
            "values of buffers, or register buffers with values first"
        )
    tied = names_by_parameter(model).values()

    def real(tensor: torch.Tensor) -> torch.Tensor:
        where = device if isinstance(tensor, nn.Parameter) else buffers or device
        return torch.empty_like(tensor, device=where) if tensor.is_meta else tensor.to(where)

    # FSDP2 looks at its shards anew in `_apply`, and nowhere else.
    move: Any = model._apply
    move(real)
    tie(model, tied)


def tie(model: nn.Module, tied: Iterable[Sequence[str]]) -> None:
    """Make a single parameter again of those that have several names."""
    for first, *others in tied:
        for name in others:
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path)._parameters[leaf] = model.get_parameter(first)


def fill(
    model: nn.Module,
    folder: Union[str, Path, Source],
    *,
    fresh: Optional[Mapping[str, Draw]] = None,
    hf_name: Callable[[str], str] = str,
    other_names: Optional[Mapping[str, str]] = None,
    seed: int = 0,
) -> Filled:
    """Fill a model's parameters and buffers from Hugging Face files, each rank its own slices. Collective.

    Files of a model of transformers are read as `from_pretrained` reads them (`hf.opened`).

    Args:
        model: the model, sharded or not, with memory for its parameters.
        folder: a folder with config.json and safetensors files, or an `hf.Source`.
        fresh: pattern of names that the files need not have -> function that draws the full tensor instead.
        hf_name: maps a name in the model to the name in the files.
        other_names: name in the files -> the name that other programs save this tensor under. The files have
            to have all of them that the model asks for, or none.
        seed: the seed of the drawn tensors, which are the same on every rank.

    Returns:
        The keys that were filled, the tensors of the files that were left, and the bytes that this rank read.

    Raises:
        RuntimeError: a tensor that the files do not have, another shape, a torn file, ...; on every rank.

    Example:
        >>> import torch
        >>> from torch_dcp_backport import engine, hf
        >>> source = hf.Given({"weight": torch.ones(1, 2)}, config={"model_type": "linear"})
        >>> model = torch.nn.Linear(2, 1)
        >>> engine.fill(model, source, fresh={"*bias": lambda tensor, generator: tensor.fill_(3)}).keys
        ('weight',)
        >>> model.weight.data, model.bias.data
        (tensor([[1., 1.]]), tensor([3.]))
    """
    tensors = tensors_of(model)
    patterns = (fresh or {}).items()
    draws = {n: draw for n in tensors for pattern, draw in patterns if fnmatchcase(hf_name(n), pattern)}
    wanted = {hf_name(name): tuple(tensor.shape) for name, tensor in tensors.items()}
    unwrap: Any = getattr(model, "get_base_model", lambda: model)
    with Call(LOAD, "fill", groups_of()) as call:
        source = call.attempt(lambda seen: opened(seen, unwrap(), wanted), opened_together(call, folder))
        held = look(call, source, "auto").tensors
        others = other_names or {}
        if any(other in held for other in others.values()):
            with call.guard():
                _check_other_names(others, wanted, held)
            call.barrier("comparing the names")
        else:
            others = {}

    def in_files(name: str) -> str:
        return others.get(hf_name(name), hf_name(name))

    if draws:
        # The files need only a single name of a tied parameter.
        for names in names_by_parameter(model).values():
            if any(in_files(name) in held for name in names):
                draws = {name: draw for name, draw in draws.items() if name not in names}
        draws = {name: draw for name, draw in draws.items() if in_files(name) not in held}
    state = {in_files(name): tensor for name, tensor in tensors.items() if name not in draws}
    filled = load_state_dict(state, source.value)
    for name, draw in draws.items():
        # By name: layers alike must not begin alike.
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        draw_into(tensors[name], draw, generator)
    return filled


def _check_other_names(others: Mapping[str, str], wanted: Collection[str], held: Collection[str]) -> None:
    """Check that files have all tensors under the names of another program, and none under both.

    Raises:
        ValueError: the files have a part of them, some that the model has not, or some twice.
    """
    asked = sorted(other for own, other in others.items() if own in wanted)
    there = sorted(other for other in others.values() if other in held)
    if asked != there:
        raise ValueError(f"the files have {', '.join(there)}; the model needs {', '.join(asked) or 'none'}")
    twice = sorted(own for own in others if own in held)
    if twice:
        raise ValueError(f"the files have both {', '.join(twice)} and {', '.join(there)}")


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters, under all their names, and the buffers that a state dict has.

    FSDP2's are shards, also where a forward pass has left them unsharded, in the dtype it computes in. Not
    `state_dict()`, which FSDP2 of torch 2.4 refuses on a mesh of two dimensions.

    Args:
        model: the model, sharded or not.

    Example:
        >>> import torch
        >>> from torch_dcp_backport import engine
        >>> list(engine.tensors_of(torch.nn.BatchNorm1d(2)))
        ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']
    """
    compat.reshard(model)
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors.update((name, buffer) for name, buffer, is_saved in buffers_of(model) if is_saved)
    return tensors


def buffers_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield the name of each buffer, the buffer, and whether a state dict has it."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            yield f"{path}.{name}".lstrip("."), buffer, name not in module._non_persistent_buffers_set


@torch.no_grad()
def draw_into(tensor: torch.Tensor, draw: Draw, generator: torch.Generator) -> None:
    """Draw a full tensor, and fill this rank's part of the tensor from it."""
    drawn = torch.empty(tensor.shape, dtype=tensor.dtype)
    draw(drawn, generator)
    layout = layout_of(tensor)
    rank = torch.distributed.get_rank() if layout.mesh is not None else 0
    local = compat.local_part(tensor) if isinstance(tensor, compat.DTensor) else tensor
    local.copy_(part_of(drawn, whole(tuple(tensor.shape)), layout.own_box(rank)))


def zeros(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Draw zeros."""
    tensor.zero_()


def as_linear(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Draw the first weights of a linear layer, as torch does."""
    bound = 1 / math.sqrt(tensor.shape[-1])
    tensor.uniform_(-bound, bound, generator=generator)
