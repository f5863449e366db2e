"""verl's and mbridge's ways between Hugging Face files and Megatron's models, as they are, on the CPU.

Their packages' own __init__ import what the functions do not use (ray, TransformerEngine): they are passed
over. Nothing of their functions is changed.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from decoders import MCORE, VERL
from torch import nn

NEEDED = ("verl==0.5.0", "mbridge==0.15.1")
OUTSIDE = {
    "embedding.word_embeddings": "model.embed_tokens",
    "decoder.final_layernorm": "model.norm",
    "output_layer": "lm_head",
}


def hollow(name: str, folder: Path) -> None:
    """A package whose modules can be imported, without its own __init__."""
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package


def module_with(name: str, **contents: Any) -> None:
    module = types.ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module


# --- verl ---


class Verl:
    """`load_state_dict_to_megatron_qwen2`, and `merge_megatron_ckpt_qwen2` with safetensors behind it."""

    def __init__(self, place: Path, model: nn.Module, config: dict[str, Any]) -> None:
        self.config = types.SimpleNamespace(**config)
        self.twin = twin_of(model)
        base = place / "verl"
        parts = (
            "",
            "models",
            "models/qwen2",
            "models/qwen2/megatron",
            "models/qwen2/megatron/checkpoint_utils",
        )
        for part in (*parts, "utils"):
            hollow(f"verl/{part}".rstrip("/").replace("/", "."), base / part)
        device = types.SimpleNamespace(empty_cache=lambda: None)
        module_with("verl.utils.device", get_device_id=lambda: "cpu", get_torch_device=lambda: device)
        module_with("verl.utils.logger", print_rank_0=lambda *_: None)
        module_with("verl.utils.megatron_utils", unwrap_model=lambda model, _: model)
        where = "verl.models.qwen2.megatron.checkpoint_utils"
        self.loader: Any = importlib.import_module(f"{where}.qwen2_loader")
        self.saver: Any = importlib.import_module(f"{where}.qwen2_saver")
        for module in (self.loader, self.saver):
            module.print = lambda *_: None

    def load(self, folder: str) -> int:
        from safetensors.torch import load_file

        state: dict[str, torch.Tensor] = {}
        for path in sorted(Path(folder).glob("*.safetensors")):
            state.update(load_file(path))
        self.loader.load_state_dict_to_megatron_qwen2(
            state, [self.twin], self.config, torch.bfloat16, tie_word_embeddings=True
        )
        return sum(value.nbytes for value in state.values())

    def save(self, folder: str) -> None:
        from safetensors.torch import save_file

        state = self.saver.merge_megatron_ckpt_qwen2(
            [self.twin], self.config, torch.bfloat16, tie_word_embeddings=True
        )
        if state:
            Path(folder).mkdir(exist_ok=True)
            save_file(
                {key: value.contiguous() for key, value in state.items()}, f"{folder}/model.safetensors"
            )


def twin_of(model: nn.Module) -> nn.Module:
    """A module with verl's names for the parameters of a GPTModel."""
    twin = nn.Module()
    names = {MCORE[part]: VERL[part] for part in MCORE}
    for name, param in model.named_parameters():
        if name.startswith("decoder.layers."):
            number, _, rest = name[len("decoder.layers.") :].partition(".")
            put(twin, f"model.layers.{number}.{names[rest]}", param)
        else:
            module, _, kind = name.rpartition(".")
            put(twin, f"{OUTSIDE[module]}.{kind}", param)
    for name in OUTSIDE.values():
        # It asks modules of other stages for a weight that may be None.
        put(twin, f"{name}.", None)
    layers: Any = twin.get_submodule("model.layers")
    setattr(twin.get_submodule("model"), "layers", nn.ModuleList(layers.children()))  # noqa: B010
    return twin


def put(root: nn.Module, name: str, param: Any) -> None:
    *path, last = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    if last:
        setattr(root, last, param)


# --- mbridge ---


class Mbridge:
    """`Bridge.load_weights` and `save_weights`, with the names of the spec without TransformerEngine."""

    def __init__(self, place: Path, model: nn.Module, folder: str) -> None:
        from transformers import Qwen2Config

        hollow("mbridge", place / "mbridge")
        hollow("mbridge.models", place / "mbridge" / "models")
        base: Any = importlib.import_module("mbridge.models.qwen2").Qwen2Bridge
        layer = "model.layers.{layer_number}."

        class Local(base):  # type: ignore[misc]
            def _build_config(self) -> Any:
                return model.config

        Local._OTHER_MAPPING = {"input_layernorm.weight": [layer + "input_layernorm.weight"]}
        norm = {"pre_mlp_layernorm.weight": [layer + "post_attention_layernorm.weight"]}
        Local._MLP_MAPPING = {**base._MLP_MAPPING, **norm}
        self.models = [model]
        config = Qwen2Config(**json.loads((Path(folder) / "config.json").read_text()))
        self.bridge: Any = Local(config, torch.bfloat16)
        self.read = 0
        open_files = self.bridge._get_safetensor_io

        def counted(path: str) -> Any:
            files = open_files(path)
            load = files.load_some_hf_weight

            def load_some(names: list[str]) -> Any:
                found = load(names)
                self.read += sum(value.nbytes for value in found.values())
                return found

            files.load_some_hf_weight = load_some
            return files

        self.bridge._get_safetensor_io = counted

    def load(self, folder: str) -> int:
        self.read = 0
        with torch.no_grad():
            self.bridge.load_weights(self.models, folder)
        return self.read

    def save(self, folder: str) -> None:
        with torch.no_grad():
            self.bridge.save_weights(self.models, folder)
