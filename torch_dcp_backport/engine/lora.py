"""Adapters of peft: made on meta, drawn alike on every rank, trained, saved and exported alone.

peft is imported where adapters are made.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional, Union

import torch
from torch import nn

from torch_dcp_backport.engine import build
from torch_dcp_backport.engine.config import ModelConfig
from torch_dcp_backport.engine.export import whole_tensors
from torch_dcp_backport.transfer import Call
from torch_dcp_backport.transfer.groups import groups_of

FRESH: Mapping[str, build.Draw] = {"*.lora_A.*": build.as_linear, "*.lora_B.*": build.zeros}
PREFIX = "base_model.model."


def adapted(model: nn.Module, asked: ModelConfig) -> nn.Module:
    """Return the model with adapters, which alone are trained. Within `build.parameters_on_meta`.

    Raises:
        RuntimeError: peft is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise RuntimeError(f"lora_rank={asked.lora_rank} needs peft: {error}") from error
    config = peft.LoraConfig(
        # peft's wrapper for CAUSAL_LM needs a model that generates, which a value model does not.
        task_type="CAUSAL_LM" if hasattr(model, "prepare_inputs_for_generation") else None,
        r=asked.lora_rank,
        lora_alpha=asked.lora_alpha,
        target_modules=asked.target_modules,
        exclude_modules=asked.exclude_modules,
        bias="none",
    )
    # FSDP2 has one dtype for all parameters of a unit.
    made: nn.Module = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    return made


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def base_name(name: str) -> str:
    """Return the name of a weight in the model without adapters."""
    return name[len(PREFIX) :].replace(".base_layer.", ".") if name.startswith(PREFIX) else name


def base(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {base_name(name): tensor for name, tensor in tensors.items() if not is_adapter(name)}


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
        call.settle()
        named = adapters(build.tensors_of(model))
        full_tensors = dict(whole_tensors(named, to=call.ranks[0], device=torch.device("cpu")))
        with call.guard(str(folder)):
            if full_tensors:
                model.peft_config["default"].save_pretrained(str(folder))
                target = Path(folder, "adapter_model.safetensors")
                draft = target.with_name(f".{target.name}")
                contiguous = {name: tensor.contiguous() for name, tensor in full_tensors.items()}
                importlib.import_module("safetensors.torch").save_file(contiguous, draft, {"format": "pt"})
                os.replace(draft, target)
        call.settle()


def config_of(model: Any) -> Optional[dict[str, Any]]:
    """Return peft's configuration of the adapters as a dict; None without adapters."""
    configs = getattr(model, "peft_config", None)
    # peft's configuration stays at a model that has no adapter any more.
    if not configs or not any(is_adapter(name) for name, _ in model.named_parameters()):
        return None
    return dict(configs["default"].to_dict())
