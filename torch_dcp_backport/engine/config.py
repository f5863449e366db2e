"""The settings of an engine, under verl's names; verl's own configuration objects are read as well.

All are checked before anything is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional, TypeVar, Union

import torch

from torch_dcp_backport.engine.batches import Limit
from torch_dcp_backport.engine.build import Sharding
from torch_dcp_backport.engine.step import check_schedule

DTYPES = {
    "fp32": torch.float32, "float32": torch.float32, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
    "fp16": torch.float16, "float16": torch.float16,
}  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """The model."""

    #: A folder with config.json and safetensors files.
    path: str = ""
    #: Settings that replace those of its configuration.
    override_config: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False
    enable_gradient_checkpointing: bool = False
    #: Adapters of peft, which alone are trained; 0 is none.
    lora_rank: int = 0
    lora_alpha: int = 16
    target_modules: Any = "all-linear"
    exclude_modules: Any = None


@dataclass(frozen=True)
class EngineConfig:
    """The arrangement of ranks, the sharding of the model, and the cutting of batches."""

    fsdp_size: int = -1
    tp_size: int = 1
    ulysses_sequence_parallel_size: int = 1
    reshard_after_forward: bool = True
    #: By FSDP2, all the time; or by `to()`, between train_mode() and eval_mode().
    offload_policy: bool = False
    param_offload: bool = False
    optimizer_offload: bool = False
    forward_only: bool = False
    #: Of the parameters themselves.
    model_dtype: str = "fp32"
    #: param_dtype, reduce_dtype; as in verl bf16 and fp32 where nothing is set.
    mixed_precision: Optional[Mapping[str, Any]] = None
    #: {"transformer_layer_cls_to_wrap": names of classes}
    wrap_policy: Mapping[str, Any] = field(default_factory=dict)
    #: By tokens; else by rows. A batch's own settings go first.
    use_dynamic_bsz: bool = True
    max_token_len_per_gpu: Optional[int] = None
    micro_batch_size_per_gpu: Optional[int] = None
    infer_max_token_len_per_gpu: Optional[int] = None
    infer_micro_batch_size_per_gpu: Optional[int] = None
    #: Gradients are reduced after "each" micro-batch, or after the "last": full ones are kept until then.
    gradient_sync: str = "each"
    seed: int = 42

    def __post_init__(self) -> None:
        if self.ulysses_sequence_parallel_size != 1:
            got = self.ulysses_sequence_parallel_size
            raise ValueError(f"ulysses_sequence_parallel_size={got}: sequence parallelism is not offered")
        if self.offload_policy and (self.param_offload or self.optimizer_offload):
            raise ValueError(
                "offload_policy=True keeps parameters and optimizer on the host by itself: it excludes "
                f"param_offload={self.param_offload} and optimizer_offload={self.optimizer_offload}"
            )
        if self.gradient_sync not in ("each", "last"):
            raise ValueError(f"gradient_sync={self.gradient_sync!r} is neither 'each' nor 'last'")
        dtype_of(self.model_dtype)
        _ = self.sharding

    @property
    def sharding(self) -> Sharding:
        unknown = sorted(set(self.mixed_precision or {}) - {"param_dtype", "reduce_dtype", "buffer_dtype"})
        if unknown:
            raise ValueError(f"no setting of mixed_precision: {', '.join(unknown)}")
        asked = {"param_dtype": "bf16", "reduce_dtype": "fp32", **(self.mixed_precision or {})}
        param_dtype, reduce_dtype = (dtype_of(asked[name]) for name in ("param_dtype", "reduce_dtype"))
        return Sharding(self.reshard_after_forward, param_dtype, reduce_dtype, self.offload_policy)

    def limit(self, data: Any, is_inference: bool) -> Limit:
        """Return the size of a batch's micro-batches."""

        def setting(name: str) -> Any:
            if name in set(data.keys()):  # a TensorDict iterates over rows
                return data[name]
            own = getattr(self, f"infer_{name}", None) if is_inference else None
            return getattr(self, name) if own is None else own

        if setting("use_dynamic_bsz"):
            return Limit(tokens=setting("max_token_len_per_gpu"))
        return Limit(rows=setting("micro_batch_size_per_gpu"))


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, a class of torch.optim, and its schedule."""

    optimizer: str = "AdamW"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    override_optimizer_config: Optional[Mapping[str, Any]] = None
    clip_grad: Optional[float] = 1.0
    lr_scheduler_type: str = "constant"
    lr_warmup_steps: Optional[int] = -1
    lr_warmup_steps_ratio: float = 0.0
    total_training_steps: int = -1
    min_lr_ratio: Optional[float] = None
    num_cycles: float = 0.5

    def __post_init__(self) -> None:
        kind = getattr(torch.optim, self.optimizer, None)
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            raise ValueError(f"optimizer={self.optimizer!r} is none of torch.optim")
        check_schedule(self.lr_scheduler_type, self.total_training_steps)

    @property
    def warmup(self) -> int:
        steps = self.lr_warmup_steps
        if steps is not None and steps > 0:
            return steps
        return int(self.lr_warmup_steps_ratio * self.total_training_steps)

    def made(self, params: Any) -> torch.optim.Optimizer:
        options = {"lr": self.lr, "weight_decay": self.weight_decay}
        if "Adam" in self.optimizer:
            options["betas"] = self.betas  # type: ignore[assignment]
        options.update(self.override_optimizer_config or {})
        made: torch.optim.Optimizer = getattr(torch.optim, self.optimizer)(params, **options)
        return made


def dtype_of(name: Union[str, torch.dtype, None]) -> Optional[torch.dtype]:
    """Return the dtype of a verl name.

    Raises:
        ValueError: another name.
    """
    if name is None or isinstance(name, torch.dtype):
        return name
    if name not in DTYPES:
        raise ValueError(f"{name!r} is no dtype; there are {', '.join(DTYPES)}")
    return DTYPES[name]


def spelled(config: Any) -> str:
    """Return settings as text, the same in every process; without paths, which may differ."""
    fields = {entry.name: getattr(config, entry.name) for entry in dataclasses.fields(config)}
    fields.pop("path", None)
    return ", ".join(f"{name}={_ordered(value)!r}" for name, value in fields.items())


def _ordered(value: Any) -> Any:
    """Return a value in a fixed order: a set's order differs between processes."""
    if isinstance(value, Mapping):
        return {key: _ordered(part) for key, part in sorted(value.items(), key=str)}
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else value


Kind = TypeVar("Kind", ModelConfig, EngineConfig, OptimizerConfig)


def settings(kind: type[Kind], given: Any) -> Kind:
    """Return settings from an object or a mapping with fields of the same names; None is the defaults.

    Raises:
        ValueError: a mapping with other names, a value that is not offered, ...
    """
    if isinstance(given, kind):
        return given
    names = [entry.name for entry in dataclasses.fields(kind)]
    if given is None:
        return kind()
    # verl's own are mappings and dataclasses, and have more fields.
    if isinstance(given, Mapping) and not dataclasses.is_dataclass(given):
        unknown = sorted(set(map(str, given)) - set(names))
        if unknown:
            raise ValueError(f"no setting of a {kind.__name__}: {', '.join(unknown)}; there are {names}")
        return kind(**given)
    would_change = {
        "qat": getattr(getattr(given, "qat", None), "enable", False),
        "zero_indexed_step=False": not getattr(given, "zero_indexed_step", True),
        "optimizer_impl": getattr(given, "optimizer_impl", "torch.optim") != "torch.optim",
        "lora_adapter_path": getattr(given, "lora_adapter_path", None),
        "lora.merge": (getattr(given, "lora", None) or {}).get("merge", False),
        "target_parameters": getattr(given, "target_parameters", None),
    }
    for name, is_asked in would_change.items():
        if is_asked:
            raise ValueError(f"{name} is not offered")
    values = {name: getattr(given, name) for name in names if getattr(given, name, None) is not None}
    local = getattr(given, "local_path", None)
    return kind(**{**values, "path": local} if local and "path" in names else values)
