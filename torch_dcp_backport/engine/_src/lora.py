"""Adapters of peft: drawn alike on every rank or read, trained, saved and exported alone or merged.

peft is imported where adapters are made.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import nn

from torch_dcp_backport.engine._src import build
from torch_dcp_backport.engine._src.config import ModelConfig
from torch_dcp_backport.engine._src.export import same_objects, whole_tensors
from torch_dcp_backport.hf import ADAPTER as WEIGHTS
from torch_dcp_backport.hf import ADAPTER_CONFIG as CONFIG
from torch_dcp_backport.hf import Given, load_state_dict
from torch_dcp_backport.hf import adapters as merging
from torch_dcp_backport.transfer import Box, Call, Problem, TensorInfo, groups_of

logger = logging.getLogger("torch_dcp_backport.engine")

FRESH: Mapping[str, build.Draw] = {"*.lora_A.*": build.as_linear, "*.lora_B.*": build.zeros}
PREFIX = "base_model.model."
#: Modules that vLLM puts into packed layers: it wraps all of them, whichever have adapters.
PACKED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Saved(NamedTuple):
    """An adapter of files, as peft saves it."""

    config: Any
    tensors: dict[str, torch.Tensor]
    #: Of both files, by which ranks compare what they read.
    digest: str


def opened(call: Call, asked: ModelConfig) -> Optional[Saved]:
    """Read the adapter of `lora_adapter_path`; None where there is none.

    Args:
        call: the call of all ranks; its first rank says which settings have no effect.
        asked: the settings of the model.

    Raises:
        FileNotFoundError, ValueError: a file that is not there, or an adapter that is not offered.
    """
    if not asked.lora_adapter_path:
        return None
    import peft

    name, folder = f"lora_adapter_path={asked.lora_adapter_path}", Path(asked.lora_adapter_path)
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{name} has no {file}")
    settings = merging.as_settings(folder)
    merging.check_mergeable(settings)
    for setting, idle in (("bias", "none"), ("lora_bias", False), ("modules_to_save", None)):
        if settings.get(setting) not in (idle, None, []):
            raise ValueError(
                f"{name}: {setting}={settings[setting]!r} is not offered: adapters alone are trained"
            )
    config = peft.PeftConfig.from_pretrained(str(folder))
    config.inference_mode = False
    # A method of first values (PiSSA, OLoRA) would change the model's weights, which the file goes with.
    config.init_lora_weights = True
    if asked.lora_rank and asked.lora_rank != config.r:
        raise ValueError(
            f"lora_rank={asked.lora_rank}, and the adapter in {asked.lora_adapter_path} has r={config.r}"
        )
    others = {
        "lora_alpha": asked.lora_rank and asked.lora_alpha != config.lora_alpha,
        "target_modules": asked.target_modules not in ("all-linear", None)
        and not same_modules(asked, config),
        "exclude_modules": asked.exclude_modules and asked.exclude_modules != config.exclude_modules,
    }
    for setting in (name for name, is_other in others.items() if is_other):
        got = f"{setting}={getattr(asked, setting)!r} has no effect"
        call.warn_once(
            logger, f"{got}: the adapter in {asked.lora_adapter_path} has {getattr(config, setting)!r}"
        )
    data = [(folder / file).read_bytes() for file in (CONFIG, WEIGHTS)]
    tensors = importlib.import_module("safetensors.torch").load(data[1])
    return Saved(
        config, dict(tensors), " ".join(f"{len(part)} bytes {zlib.crc32(part):08x}" for part in data)
    )


def same_modules(asked: ModelConfig, config: Any) -> bool:
    """Return whether the modules that are asked for are those of a saved adapter."""
    pairs = asked.target_modules, config.target_modules
    own, saved = (names if isinstance(names, str) else set(names or ()) for names in pairs)
    return bool(own == saved)


def adapted(call: Call, model: nn.Module, asked: ModelConfig, saved: Optional[Saved] = None) -> nn.Module:
    """Return the model with adapters, which alone are trained. Within `build.parameters_on_meta`.

    As peft makes them they are float32 where a layer's weights are of 16 bits, but for those of experts.

    Args:
        call: the call of all ranks; its first rank says what is otherwise than peft makes it.
        model: the model, without adapters.
        asked: the settings of the model.
        saved: the adapter that is read; None begins anew.

    Raises:
        RuntimeError: peft is not installed.
        ValueError: an adapter of an embedding.
    """
    try:
        import peft
    except ImportError as error:
        raise RuntimeError(f"lora_rank={asked.lora_rank} needs peft: {error}") from error
    config: Any = peft.LoraConfig(
        r=asked.lora_rank or 1,
        lora_alpha=asked.lora_alpha,
        target_modules=asked.target_modules,
        exclude_modules=asked.exclude_modules,
        bias="none",
    )
    if saved is not None:
        config = saved.config
    # peft's wrapper for CAUSAL_LM needs a model that generates, which a value model does not.
    config.task_type = "CAUSAL_LM" if hasattr(model, "prepare_inputs_for_generation") else None
    made: nn.Module = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    for path, module in made.named_modules():
        # Their matrices are bare parameters, under names that neither a fill nor an export here knows.
        if getattr(module, "lora_embedding_A", None):
            raise ValueError(
                f"target_modules={config.target_modules!r}: {base_name(path)} is an embedding, and adapters "
                "of embeddings are not offered"
            )
        if not is_adapter(f".{path}.") or not isinstance(module, nn.Linear):
            continue
        # Ranks gather a unit's parameters together, and experts run only where tokens reach them.
        parents = (path.rsplit(".", count)[0] for count in range(1, path.count(".") + 1))
        if module.weight.dtype in (torch.bfloat16, torch.float16):
            if any(build.is_list_of_experts(parent, made) for parent in parents):
                call.warn_once(logger, f"adapters of experts are {module.weight.dtype}, as the experts are")
            else:
                for param in module.parameters():
                    param.data = param.data.to(torch.float32)
    return made


def apart(model: nn.Module) -> list[nn.Module]:
    """Return the adapters' modules of another dtype than the model's: FSDP2 has one for all of a unit."""
    base = {param.dtype for name, param in model.named_parameters() if not is_adapter(name)}
    return [
        module
        for path, module in model.named_modules()
        if is_adapter(f".{path}.") and isinstance(module, nn.Linear) and module.weight.dtype not in base
    ]


def problems_of(model: nn.Module, saved: Saved) -> list[Problem]:
    """Return why a saved adapter is not that of a model with adapters."""
    wanted = {name: tuple(tensor.shape) for name, tensor in adapters(dict(model.named_parameters())).items()}
    problems = [Problem("missing in the adapter", name) for name in wanted if name not in saved.tensors]
    problems += [Problem("only in the adapter", name) for name in saved.tensors if name not in wanted]
    return problems + [
        Problem("wrong shape", name, f"{tuple(tensor.shape)}", f"{wanted[name]}")
        for name, tensor in saved.tensors.items()
        if name in wanted and tuple(tensor.shape) != wanted[name]
    ]


def fill(model: nn.Module, saved: Saved) -> None:
    """Fill a model's adapters, each rank its own slices. Collective."""
    load_state_dict(adapters(build.tensors_of(model)), Given(saved.tensors, {}))


def rollout_names(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the model's own tensors as vLLM names them below adapters: `base_layer` in layers it wraps."""
    config = model.peft_config["default"]
    named = {}
    for name, tensor in tensors.items():
        if not is_adapter(name):
            path, _, leaf = base_name(name).rpartition(".")
            is_wrapped = ".base_layer." in name or (path.endswith(PACKED) and not is_excluded(path, config))
            named[
                f"{path}.base_layer.{leaf}" if is_wrapped and leaf in ("weight", "bias") else base_name(name)
            ] = tensor
    return named


def is_excluded(path: str, config: Any) -> bool:
    """Return whether a module is among peft's `exclude_modules`: a pattern, or ends of paths."""
    excluded = getattr(config, "exclude_modules", None)
    if isinstance(excluded, str):
        return re.fullmatch(excluded, path) is not None
    return any(path == name or path.endswith(f".{name}") for name in excluded or ())


def merged(
    model: Any, *, to: Optional[int], dtype: Optional[torch.dtype], device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Return (name in the files, whole tensor) with the adapter in it; the model stays as it is. Collective.

    Sums are those of peft's `merge_and_unload`, in the weights' own dtype, before they are cast.

    Args:
        to, dtype, device: as of `whole_tensors`.

    Raises:
        ValueError: an adapter that no plain weights can stand for.
    """
    tensors = build.tensors_of(model)
    infos = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    kinds = {
        base_name(path): any(kind.__name__ == "Conv1D" for kind in type(module.base_layer).__mro__)
        for path, module in model.named_modules()
        if isinstance(getattr(module, "base_layer", None), nn.Module)
    }
    plan = merging.merged(infos, config_of(model) or {}, "default", kinds)
    tied = same_objects(tensors)
    changed = {plan.names[name] for name in plan.changed}
    for name in sorted(changed & {*tied, *tied.values()}):
        raise merging.CannotMerge(f"{base_name(name)} is tied: its other name has no adapter")
    return _merged(tensors, plan, to, dtype, device)


def _merged(
    tensors: Mapping[str, torch.Tensor],
    plan: merging.Merged,
    to: Optional[int],
    dtype: Optional[torch.dtype],
    device: torch.device,
) -> Iterator[tuple[str, torch.Tensor]]:
    # The thin matrices of a weight come before it.
    order = [key for name, saved in plan.names.items() for key in (*needed(plan, name), saved)]
    name_of = {saved: name for name, saved in plan.names.items()}
    thin: dict[str, torch.Tensor] = {}
    for key, tensor in whole_tensors({key: tensors[key] for key in order}, to=to, device=device):
        if key not in name_of:
            thin[key] = tensor
            continue
        name = name_of[key]
        low = plan.added.get(name)
        if low is not None:
            box = Box((0,) * tensor.dim(), tuple(tensor.shape))
            merging.add(tensor, box, low, thin.pop(low.a), thin.pop(low.b))
        yield name, tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def needed(plan: merging.Merged, name: str) -> list[str]:
    return plan.needed(name) if name in plan.added else []


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def base_name(name: str) -> str:
    """Return the name of a weight in the model without adapters."""
    return name[len(PREFIX) :].replace(".base_layer.", ".") if name.startswith(PREFIX) else name


def adapters(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return adapters under the names that peft saves."""
    return {name.replace(".default.", "."): tensor for name, tensor in tensors.items() if is_adapter(name)}


def save(model: Any, folder: Union[str, Path]) -> None:
    """Write the adapters of a model, as peft opens them. Collective; the first rank writes.

    Raises:
        RuntimeError: no adapters, a folder that cannot be written, ...; on every rank.
    """
    with Call("cannot save the adapters", "save", groups_of()) as call:
        with call.guard():
            if config_of(model) is None:
                raise ValueError(f"a {type(model).__name__} has none")
        call.barrier("looking for adapters")
        named = adapters(build.tensors_of(model))
        full_tensors = dict(whole_tensors(named, to=call.ranks[0], device=torch.device("cpu")))
        with call.guard(str(folder)):
            if full_tensors:
                model.peft_config["default"].save_pretrained(str(folder))
                target = Path(folder, WEIGHTS)
                draft = target.with_name(f".{target.name}")
                contiguous = {name: tensor.contiguous() for name, tensor in full_tensors.items()}
                importlib.import_module("safetensors.torch").save_file(contiguous, draft, {"format": "pt"})
                os.replace(draft, target)
        call.barrier("writing the adapters")


def config_of(model: Any) -> Optional[dict[str, Any]]:
    """Return peft's configuration of the adapters as a dict; None without adapters."""
    configs = getattr(model, "peft_config", None)
    # peft's configuration stays at a model that has no adapter any more.
    if not configs or not any(is_adapter(name) for name, _ in model.named_parameters()):
        return None
    return dict(configs["default"].to_dict())
