"""A model with adapters under the names that peft gives them, by torch alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

RANK, ALPHA = 3, 12
SETTINGS: dict[str, Any] = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj"]}


class Adapted(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, RANK, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(RANK, layer.out_features, bias=False)})
        self.merged_adapters: list[str] = []

    def forward(self, x: torch.Tensor) -> Any:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * (ALPHA / RANK)


class Config:
    """As peft's, as far as it is looked at."""

    def __init__(self, **changed: Any) -> None:
        self.settings = {**SETTINGS, **changed}
        self.inference_mode = False
        self.base_model_name_or_path: Any = None

    def to_dict(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name != "settings"}
        return {**self.settings, **own}


class Inner(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class Wrapped(nn.Module):
    def __init__(self, model: Any, **changed: Any) -> None:
        super().__init__()
        torch.manual_seed(5)
        for layer in model.model.layers:
            layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        self.base_model = Inner(model)
        self.config = model.config
        self.peft_config = {"default": Config(**changed)}
        self.active_adapters = ["default"]

    def get_base_model(self) -> Any:
        return self.base_model.model

    def forward(self, *arguments: Any) -> Any:
        return self.base_model.model(*arguments)


def merged(model: Wrapped) -> dict[str, torch.Tensor]:
    """The weights of the model alone, in one process."""
    state = {key[len("base_model.model.") :]: value for key, value in model.state_dict().items()}
    for key in [key for key in state if key.endswith(".base_layer.weight")]:
        path = key[: -len(".base_layer.weight")]
        a, b = (state.pop(f"{path}.lora_{part}.default.weight") for part in "AB")
        state[f"{path}.weight"] = state.pop(key) + (b @ a) * (ALPHA / RANK)
    return {key.replace(".base_layer.", "."): value for key, value in state.items()}
