"""Tensor parallelism by the plan that a model of transformers brings; applied before FSDP2.

Modules that the plan does not cut are replicas on every rank: all parameters are on the same mesh.
"""

from __future__ import annotations

import fnmatch
import re
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import parallel

from torch_dcp_backport import compat
from torch_dcp_backport.engine._src.build import names_by_parameter, tie
from torch_dcp_backport.engine._src.mesh import Grid

STYLES = {"colwise": parallel.ColwiseParallel, "rowwise": parallel.RowwiseParallel}
#: The model types of transformers whose training is that of one process (test_tensor_parallel.py). A plan
#: alone promises nothing: another type may crash in its first batch, or compute something else.
FAMILIES = frozenset({
    "arcee", "code_llama", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text",
    "gpt_neox", "granite", "helium", "llama", "ministral", "mistral", "olmo", "phi", "qwen2", "qwen3",
    "qwen3_moe", "seed_oss", "smollm3", "starcoder2", "vaultgemma",
})  # fmt: skip
#: Model type with a plan of styles that are offered -> why it is refused all the same.
REASONS = {
    "aria_text": "its experts write to parts of a plain tensor",
    "deepseek_v2": "its attention has projections that all heads share",
    "glm4_moe": "its router adds a plain buffer to its scores",
    "longcat_flash": "its router computes with the weight of a module within it",
    "qwen2_moe": "its attention takes hidden_size for the width of its heads",
    "qwen3_next": "its linear attention has parameters beside its modules",
}
#: Random zeros in what every rank computes: a rank would draw others than those beside it. Those of attention
#: are of the rank's own heads.
DROPOUTS = (
    "residual_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "embedding_dropout",
    "hidden_dropout",
    "mlp_dropout",
)
#: Norms of each head of queries and keys (Qwen3, Gemma3): they see the heads of their rank alone.
OF_HEADS = re.compile(r".*[.][qk]_(layer)?norm")
#: The style of such norms in plans of transformers 5; older plans leave them out.
SUMMED = "replicated_with_grad_allreduce"


def styles_of(model: Any, grid: Grid) -> dict[str, Any]:
    """Return path of a module -> torch's style that cuts it; empty without tensor parallelism.

    Raises:
        ValueError: a family that is not offered, a model without a plan or with a style that is not offered,
            or sizes that do not divide.
    """
    if grid.tp is None:
        return {}
    asked = f"tp_size={grid.sizes.tp}"
    config: Any = getattr(model, "config", None)
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise ValueError(f"{asked}: a {type(model).__name__} has no plan for it")
    plan = {key: style for key, style in plan.items() if style != SUMMED or not OF_HEADS.fullmatch(key)}
    unknown = sorted({style for style in plan.values() if style not in STYLES})
    if unknown:
        raise ValueError(f"{asked}: the plan of a {type(model).__name__} has {unknown}")
    family = getattr(config, "model_type", "")
    if family not in FAMILIES:
        why = REASONS.get(family, "it has not been tried")
        raise ValueError(
            f"{asked} is not offered for {family!r}: {why}; there are {', '.join(sorted(FAMILIES))}"
        )
    if getattr(config, "clip_qkv", None):
        raise ValueError(
            f"{asked} is not offered with clip_qkv={config.clip_qkv}, which writes to what TP returns"
        )
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (getattr(config, name, None) or 0) % grid.sizes.tp:
            raise ValueError(f"{asked} does not divide {name}={getattr(config, name)}")
    styles = {}
    for path, module in model.named_modules():
        for pattern, style in plan.items():
            # Wherever the layers are: base_model_prefix need not say it (Gemma3), and adapters come before.
            if fnmatch.fnmatchcase(f".{path}", f"*.{pattern}"):
                cut = [path]
                if hasattr(module, "base_layer"):
                    # Of an adapter's two matrices only this has the dimension that is cut.
                    inner = "lora_B" if style == "colwise" else "lora_A"
                    cut = [f"{path}.base_layer", *(f"{path}.{inner}.{name}" for name in module.lora_A)]
                for name in cut:
                    size = model.get_submodule(name).weight.shape[0 if style == "colwise" else 1]
                    if size % grid.sizes.tp:
                        raise ValueError(f"{asked} does not divide the {size} features of {name}")
                styles.update({name: STYLES[style]() for name in cut})
    if not styles:
        raise ValueError(f"{asked}: a {type(model).__name__} has none of {sorted(plan)}")
    return styles


def check_dropout(model: Any, grid: Grid) -> None:
    """Refuse to train with random zeros that ranks which compute the same would not draw alike.

    Raises:
        ValueError: the model's configuration asks for some.
    """
    config = getattr(model, "config", None)
    for name in DROPOUTS:
        if grid.tp is not None and getattr(config, name, None):
            raise ValueError(
                f"tp_size={grid.sizes.tp} is not offered with {name}={getattr(config, name)}: each rank "
                "would drop out others; set it to 0 (override_config)"
            )


def parallelize(model: nn.Module, grid: Grid) -> None:
    """Cut the modules of the plan over the ranks of `grid.tp`; the others become replicas."""
    if grid.tp is None:
        return
    styles = styles_of(model, grid)
    tied = names_by_parameter(model).values()
    for path, module in list(model.named_modules()):
        if path in styles:
            asked = {name: param.requires_grad for name, param in module.named_parameters()}
            parallel.parallelize_module(module, grid.tp, styles[path])
            # Some releases (2.6) cut a frozen parameter into parameters that are trained.
            for name, param in module.named_parameters():
                param.requires_grad_(asked[name])
        elif next(module.parameters(recurse=False), None) is not None:
            beside = path.rpartition(".")[0] + "."
            is_of_heads = OF_HEADS.fullmatch(path) and any(name.startswith(beside) for name in styles)
            _replicate(module, grid.tp, bool(is_of_heads))
    tie(model, tied)


def _replicate(module: nn.Module, mesh: Any, is_fed_parts: bool) -> None:
    """Make the module compute with DTensors inside, and plain tensors on both sides.

    If each rank feeds it a part of its own, each gets a part of the parameters' gradients.
    """
    for name, param in list(module.named_parameters(recurse=False)):
        local = compat.replicated(param.detach(), mesh)
        module.register_parameter(name, nn.Parameter(local, param.requires_grad))

    def made(x: torch.Tensor) -> torch.Tensor:
        # Whichever dimension the parts are of, a norm works along the last one alone.
        return compat.parted(x, mesh, x.dim() - 2) if is_fed_parts else compat.replicated(x, mesh)

    def enter(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(made(x) if isinstance(x, torch.Tensor) else x for x in inputs)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(lambda _, __, output: output.to_local())
