"""Adapters of peft: made on meta, drawn alike on every rank, trained, saved and exported alone.

peft is imported where adapters are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

import torch
from torch import nn

from torch_dcp_backport.engine import build
from torch_dcp_backport.engine.config import ModelConfig

FRESH: Mapping[str, build.Draw] = {"*.lora_A.*": build.as_linear, "*.lora_B.*": build.zeros}
PREFIX = "base_model.model."


def adapted(model: nn.Module, asked: ModelConfig) -> nn.Module:
    """The model with adapters, which alone are trained. Within `build.parameters_on_meta`.

    Raises:
        RuntimeError: peft is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise RuntimeError(f"lora_rank={asked.lora_rank} needs peft: {error}") from error
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
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
    """The name of a weight in the model without adapters."""
    return name[len(PREFIX) :].replace(".base_layer.", ".") if name.startswith(PREFIX) else name


def base(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {base_name(name): tensor for name, tensor in tensors.items() if not is_adapter(name)}


def adapters(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Adapters under the names that peft saves."""
    return {name.replace(".default.", "."): tensor for name, tensor in tensors.items() if is_adapter(name)}


def config_of(model: Any) -> Optional[dict[str, Any]]:
    """peft's configuration of the adapters as a dict; None without any."""
    configs = getattr(model, "peft_config", None)
    return None if configs is None else dict(configs["default"].to_dict())
