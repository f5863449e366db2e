"""The settings of an engine, under verl's names; verl's own configuration objects are read as well.

All are checked before anything is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional, TypeVar, Union

import torch

from torch_dcp_backport.engine._src import verl
from torch_dcp_backport.engine._src.batches import Batch, Limit, flag_of, value_in
from torch_dcp_backport.engine._src.build import Sharding
from torch_dcp_backport.engine._src.checks import (
    Settings,
    check_fields,
    clip,
    flag,
    mapping,
    note,
    nothing,
    number,
    optional,
    setting,
    whole,
)
from torch_dcp_backport.engine._src.groups import listed
from torch_dcp_backport.engine._src.step import check_schedule

#: Key of `wrap_policy`.
BLOCKS = "transformer_layer_cls_to_wrap"
DTYPES = {
    "fp32": torch.float32, "float32": torch.float32, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
    "fp16": torch.float16, "float16": torch.float16,
}  # fmt: skip


@dataclass(frozen=True)
class ModelConfig(Settings):
    """The model.

    Args:
        path: a folder with config.json and safetensors files.
        override_config: settings that replace those of the model's configuration; also as verl has them,
            within "model_config".
        trust_remote_code: whether transformers runs code that is in the folder.
        enable_gradient_checkpointing: whether blocks are computed again in the backward pass, to save memory.
        enable_activation_offload: whether what the model saves for the backward pass is on the host until
            then; with `enable_gradient_checkpointing` these are the inputs of blocks.
        lora_rank: the rank of peft's adapters, which alone are trained; 0 is none.
        lora_alpha: adapters are scaled by `lora_alpha / lora_rank`.
        target_modules: the modules with adapters, as peft names them.
        exclude_modules: modules without adapters, as peft names them.
        hf_config_path: a folder with another config.json.
        hf_config: transformers' configuration itself, instead of any file.
        lora_adapter_path: a folder with an adapter of peft, which the training goes on with: its rank, factor
            and modules are those of the files.
        lora: verl's settings of Megatron's adapters, of which `merge` is served: whether a rollout gets the
            weights with the adapter in them. None is none of them.
        use_remove_padding: whether the rows of a micro-batch run in one sequence without padding; None is
            False, unless the engine's configuration says True. False in one of the two is False.
        use_fused_kernels: whether a language model's head makes log-probabilities chunk by chunk, as
            `linear_log_probs`, and never the whole logits; also where the engine's configuration says so.

    Raises:
        ValueError: a value that cannot be.

    Example:
        >>> from torch_dcp_backport import engine
        >>> engine.ModelConfig(path="Qwen2.5-0.5B", lora_rank=8).target_modules
        'all-linear'
    """

    path: str = ""
    override_config: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = setting(False, flag)
    enable_gradient_checkpointing: bool = setting(False, flag)
    enable_activation_offload: bool = setting(False, flag)
    lora_rank: int = setting(0, whole(0))
    lora_alpha: int = setting(16, whole(1))
    target_modules: Union[str, Sequence[str], None] = "all-linear"
    exclude_modules: Union[str, Sequence[str], None] = None
    hf_config_path: Optional[str] = None
    hf_config: Any = None
    lora_adapter_path: Optional[str] = None
    lora: Mapping[str, Any] = setting(None, mapping({"merge": flag, "rank": nothing("lora_rank")}, verl.LORA))
    use_remove_padding: Optional[bool] = setting(None, optional(flag))
    use_fused_kernels: bool = setting(False, flag)

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("target_modules", "exclude_modules"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, (str, list, tuple, set, frozenset)):
                # OmegaConf's lists, which peft takes for something else.
                object.__setattr__(self, name, list(value))
        idle = [f"lora.{key}={value!r}" for key, value in self.lora.items() if key in verl.LORA and value]
        # verl 0.9's files list all of them, with a rank of 0.
        if idle and "rank" not in self.lora:
            note(self, f"no effect here: {', '.join(idle)}; they are Megatron's")

    @property
    def has_adapters(self) -> bool:
        """Whether the model has adapters."""
        return bool(self.lora_rank or self.lora_adapter_path)

    @property
    def is_merged(self) -> bool:
        """Whether a rollout gets weights with the adapter in them."""
        return bool(self.lora.get("merge", False))


@dataclass(frozen=True)
class EngineConfig(Settings):
    """The arrangement of ranks, the sharding of the model, and the cutting of batches.

    Args:
        fsdp_size: ranks that share a copy of the model; -1 is one copy on all ranks.
        tp_size: ranks that compute each layer together.
        ulysses_sequence_parallel_size: ranks that share a sequence: each has a part of the tokens, and in
            attention a part of the heads. It needs `use_remove_padding`.
        reshard_after_forward: whether FSDP2 frees gathered parameters after a unit's forward pass.
        offload_policy: whether FSDP2 keeps parameters on the host all the time; their optimizer steps there.
        param_offload: whether parameters are on the host outside of train_mode() and eval_mode(), by `to()`.
        optimizer_offload: whether optimizer states are on the host outside of train_mode(), by `to()`.
        forward_only: whether there is no optimizer.
        model_dtype: the dtype of the parameters themselves.
        mixed_precision: mapping with param_dtype and reduce_dtype of FSDP2. One that is not set is `dtype` or
            fp32, as in verl; a value of None is the parameters' own.
        wrap_policy: {"transformer_layer_cls_to_wrap": names of block classes}.
        use_dynamic_bsz: whether micro-batches are cut by tokens; else by rows. A batch's own settings of
            these names go first.
        max_token_len_per_gpu: the most tokens of a micro-batch, with the padding that is left; of ranks that
            share a sequence, of each.
        micro_batch_size_per_gpu: the most rows of a micro-batch.
        infer_max_token_len_per_gpu: the same without a backward pass; None is max_token_len_per_gpu.
        infer_micro_batch_size_per_gpu: the same without a backward pass; None is micro_batch_size_per_gpu.
        gradient_sync: whether gradients are reduced after "each" micro-batch or after the "last"; with "last"
            full gradients are kept until then.
        seed: the seed of tensors that no file has, and with `full_determinism` of all random numbers.
        full_determinism: whether all random numbers of the process are seeded, and deterministic algorithms
            are taken where there are any.
        dtype: the param_dtype of a `mixed_precision` without any.
        use_remove_padding: as of `ModelConfig`. A batch's own setting of this name goes first.
        use_fused_kernels: as of `ModelConfig`.

    Raises:
        ValueError: a value that cannot be, or two settings that exclude each other.

    Example:
        >>> from torch_dcp_backport import engine
        >>> config = engine.EngineConfig(max_token_len_per_gpu=4096)
        >>> config.limit({}, is_inference=False)
        Limit(rows=None, tokens=4096)
        >>> engine.EngineConfig(offload_policy=True, param_offload=True)
        Traceback (most recent call last):
        ValueError: offload_policy=True keeps parameters and optimizer on the host by itself: it excludes ...
    """

    fsdp_size: int = setting(-1, whole(-1))
    tp_size: int = setting(1, whole(1))
    ulysses_sequence_parallel_size: int = setting(1, whole(1))
    reshard_after_forward: bool = setting(True, flag)
    offload_policy: bool = setting(False, flag)
    param_offload: bool = setting(False, flag)
    optimizer_offload: bool = setting(False, flag)
    forward_only: bool = setting(False, flag)
    model_dtype: str = "fp32"
    mixed_precision: Optional[Mapping[str, Any]] = None
    wrap_policy: Mapping[str, Any] = field(default_factory=dict)
    use_dynamic_bsz: bool = setting(True, flag)
    max_token_len_per_gpu: Optional[int] = setting(None, optional(whole(1)))
    micro_batch_size_per_gpu: Optional[int] = setting(None, optional(whole(1)))
    infer_max_token_len_per_gpu: Optional[int] = setting(None, optional(whole(1)))
    infer_micro_batch_size_per_gpu: Optional[int] = setting(None, optional(whole(1)))
    gradient_sync: str = "each"
    seed: int = setting(42, whole(0))
    full_determinism: bool = setting(False, flag)
    dtype: str = "bfloat16"
    use_remove_padding: Optional[bool] = setting(None, optional(flag))
    use_fused_kernels: bool = setting(False, flag)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.ulysses_sequence_parallel_size != 1:
            got = f"ulysses_sequence_parallel_size={self.ulysses_sequence_parallel_size}"
            if self.tp_size != 1:
                raise ValueError(f"{got} is not offered with tp_size={self.tp_size}")
            if self.use_remove_padding is False:
                raise ValueError(f"{got} needs use_remove_padding=True, got False")
        if self.offload_policy and (self.param_offload or self.optimizer_offload):
            raise ValueError(
                "offload_policy=True keeps parameters and optimizer on the host by itself: it excludes "
                f"param_offload={self.param_offload} and optimizer_offload={self.optimizer_offload}"
            )
        if self.gradient_sync not in ("each", "last"):
            raise ValueError(f"gradient_sync={self.gradient_sync!r} is neither 'each' nor 'last'")
        unknown = sorted(set(self.wrap_policy) - {BLOCKS, "min_num_params", "disable"})
        if unknown:
            raise ValueError(f"no setting of wrap_policy: {', '.join(unknown)}; there is {BLOCKS}")
        for name in ("min_num_params", "disable"):
            if self.wrap_policy.get(name):
                note(
                    self,
                    f"wrap_policy.{name}={self.wrap_policy[name]!r} has no effect here: units are blocks",
                )
        halves = {"model_dtype": dtype_of(self.model_dtype), **self.sharding._asdict()}
        for name in ("model_dtype", "param_dtype", "reduce_dtype"):
            if halves[name] == torch.float16 and not self.forward_only:
                raise ValueError(
                    f"{name} is float16: gradients would vanish without a scale of the loss, which is not "
                    "offered; take bf16 or fp32, or forward_only=True"
                )

    @property
    def sharding(self) -> Sharding:
        """The settings of FSDP2."""
        asked = {"param_dtype": self.dtype, "reduce_dtype": "fp32", **(self.mixed_precision or {})}
        unknown = sorted(set(asked) - {"param_dtype", "reduce_dtype", "buffer_dtype"})
        if unknown:
            raise ValueError(f"no setting of mixed_precision: {', '.join(unknown)}")
        if dtype_of(asked.get("buffer_dtype")) not in (None, torch.float32):
            raise ValueError(f"buffer_dtype={asked['buffer_dtype']!r}: FSDP2 leaves buffers as they are")
        param_dtype, reduce_dtype = (dtype_of(asked[name]) for name in ("param_dtype", "reduce_dtype"))
        return Sharding(self.reshard_after_forward, param_dtype, reduce_dtype, self.offload_policy)

    def limit(self, data: Batch, is_inference: bool) -> Limit:
        """Return the size of a batch's micro-batches.

        Args:
            data: the batch, whose own settings go first.
            is_inference: whether there is no backward pass.

        Raises:
            ValueError: a setting of the batch that cannot be.
        """

        def setting_of(name: str) -> Any:
            if name in set(data.keys()):  # a TensorDict iterates over rows
                return value_in(data, name)
            own = getattr(self, f"infer_{name}", None) if is_inference else None
            return getattr(self, name) if own is None else own

        if flag_of(data, "use_dynamic_bsz", self.use_dynamic_bsz):
            tokens = setting_of("max_token_len_per_gpu")
            if tokens is not None and self.ulysses_sequence_parallel_size > 1:
                tokens = whole(1)("max_token_len_per_gpu", tokens) * self.ulysses_sequence_parallel_size
            return Limit(tokens=tokens)
        return Limit(rows=setting_of("micro_batch_size_per_gpu"))


#: Classes of torch.optim, in some releases -> why the engine does not take them.
NOT_OFFERED = {
    "Adafactor": "it averages over the rows and columns of whole matrices, and a rank has slices of them",
    "Muon": "it orthogonalizes whole matrices, and a rank has slices of them",
    "LBFGS": "its step computes the loss again, and the engine's steps do not",
    "SparseAdam": "it takes sparse gradients only, and FSDP2 reduces dense ones",
}


@dataclass(frozen=True)
class OptimizerConfig(Settings):
    """The optimizer, a class of torch.optim, and its schedule.

    Args:
        optimizer: the name of a class of torch.optim that computes each element by itself, such as "SGD" or
            "AdamW"; not "Adafactor", "Muon", "LBFGS" or "SparseAdam".
        lr: the learning rate after the warm-up.
        betas: of an Adam, its two betas.
        weight_decay: the optimizer's weight decay.
        override_optimizer_config: arguments of the optimizer that replace those above.
        clip_grad: the norm that gradients are clipped to; None does not clip.
        lr_scheduler_type: "constant", "cosine", "linear", "wsd" or "inverse_sqrt", as of `schedule`.
        lr_warmup_steps: the steps of the warm-up; -1, 0 or None takes `lr_warmup_steps_ratio`.
        lr_warmup_steps_ratio: the steps of the warm-up, as a part of `total_training_steps`.
        total_training_steps: the steps of the training; "cosine", "linear" and "wsd" need them.
        min_lr_ratio: the smallest part of the rate after the warm-up; None is 0.
        num_cycles: waves of a cosine until the last step; a half ends at the bottom.
        lr_wsd_decay_steps: the last steps of the training, in which "wsd" goes down; Megatron's name.
        lr_wsd_decay_style: the way down of "wsd": "linear", "cosine", "minus_sqrt" or "exponential".
        no_decay: the parameters without weight decay, as of `param_groups`: "norms", "biases", "embeddings",
            or patterns of names; a bare text is one name. Patterns match the names in the files, too.

    Raises:
        ValueError: a value that cannot be.

    Example:
        >>> import torch
        >>> from torch_dcp_backport import engine
        >>> config = engine.OptimizerConfig("SGD", lr=0.1, lr_warmup_steps_ratio=0.1, total_training_steps=50)
        >>> config.warmup
        5
        >>> type(config.made([torch.nn.Parameter(torch.zeros(1))])).__name__
        'SGD'
    """

    optimizer: str = "AdamW"
    lr: float = setting(1e-3, number(0))
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = setting(0.01, number(0))
    override_optimizer_config: Optional[Mapping[str, Any]] = None
    clip_grad: Optional[float] = setting(1.0, optional(clip))
    lr_scheduler_type: str = "constant"
    lr_warmup_steps: Optional[int] = setting(-1, optional(whole()))
    lr_warmup_steps_ratio: float = setting(0.0, number(0, 1))
    total_training_steps: int = setting(-1, whole())
    min_lr_ratio: Optional[float] = setting(None, optional(number(0, 1)))
    num_cycles: float = setting(0.5, number(0))
    lr_wsd_decay_steps: Optional[int] = setting(None, optional(whole(0)))
    lr_wsd_decay_style: str = "linear"
    no_decay: Any = ()

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "no_decay", listed(self.no_decay))
        if self.optimizer in NOT_OFFERED:
            raise ValueError(
                f"optimizer={self.optimizer!r} is not offered: {NOT_OFFERED[self.optimizer]}; {verl.INSTEAD}"
            )
        kind = getattr(torch.optim, self.optimizer, None)
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            raise ValueError(f"optimizer={self.optimizer!r} is none of torch.optim; {verl.INSTEAD}")
        if len(tuple(self.betas)) != 2:
            raise ValueError(f"betas={self.betas!r}: expected two numbers")
        below_one = number(0, below=1)
        object.__setattr__(self, "betas", tuple(below_one("betas", beta) for beta in self.betas))
        check_schedule(
            self.lr_scheduler_type,
            self.total_training_steps,
            self.warmup,
            self.lr_wsd_decay_steps or 0,
            self.lr_wsd_decay_style,
        )
        if self.lr_warmup_steps_ratio and (self.lr_warmup_steps or 0) <= 0 and self.total_training_steps <= 0:
            raise ValueError(
                f"lr_warmup_steps_ratio={self.lr_warmup_steps_ratio} needs total_training_steps, "
                f"got {self.total_training_steps}"
            )

    @property
    def warmup(self) -> int:
        """The number of steps of the warm-up."""
        steps = self.lr_warmup_steps
        if steps is not None and steps > 0:
            return steps
        return int(self.lr_warmup_steps_ratio * self.total_training_steps)

    def made(self, params: Union[Iterable[torch.Tensor], Iterable[dict[str, Any]]]) -> torch.optim.Optimizer:
        """Make the optimizer.

        Args:
            params: parameters, or groups of them, as torch.optim takes them.

        Raises:
            ValueError: the optimizer does not take the settings.
        """
        options = {"lr": self.lr, "weight_decay": self.weight_decay}
        if "Adam" in self.optimizer:
            options["betas"] = self.betas  # type: ignore[assignment]
        options.update(self.override_optimizer_config or {})
        try:
            made: torch.optim.Optimizer = getattr(torch.optim, self.optimizer)(params, **options)
        except (TypeError, ValueError) as error:
            raise ValueError(f"optimizer={self.optimizer!r} does not take {options}: {error}") from error
        return made


def dtype_of(name: Union[str, torch.dtype, None]) -> Optional[torch.dtype]:
    """Return the dtype of a verl name.

    Raises:
        ValueError: another name.
    """
    if name is None or name in DTYPES.values():
        return name  # type: ignore[return-value]
    if name not in DTYPES:
        raise ValueError(f"{name!r} is no dtype; there are {', '.join(DTYPES)}")
    return DTYPES[name]  # type: ignore[index]


def settings_text(config: Any) -> str:
    """Return settings as text, the same in every process; without paths and what they lead to."""
    fields = {entry.name: getattr(config, entry.name) for entry in dataclasses.fields(config)}
    for name in ("path", "hf_config_path", "hf_config", "lora_adapter_path"):
        fields.pop(name, None)
    return ", ".join(f"{name}={_ordered(value)!r}" for name, value in fields.items())


def _ordered(value: Any) -> Any:
    """Return a value in a fixed order: a set's order differs between processes."""
    if isinstance(value, Mapping):
        return {key: _ordered(part) for key, part in sorted(value.items(), key=str)}
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else value


Kind = TypeVar("Kind", ModelConfig, EngineConfig, OptimizerConfig)


def settings(kind: type[Kind], given: Any) -> Kind:
    """Return settings from a mapping, or from an object of verl's; None is the defaults.

    Raises:
        ValueError: a setting that is not known or not offered, or a value that cannot be.
    """
    if isinstance(given, kind):
        return given
    if given is None:
        return kind()
    known = {ModelConfig: verl.MODEL, EngineConfig: verl.ENGINE, OptimizerConfig: verl.OPTIMIZER}[kind]
    entries = {entry.name: entry for entry in dataclasses.fields(kind)}
    # verl's own objects are mappings, too.
    if isinstance(given, Mapping) and not dataclasses.is_dataclass(given):
        no_effect = verl.check_mapping(given, known, kind.__name__, list(entries))
        values = {name: given[name] for name in entries if name in given}
    else:
        no_effect = verl.check_object(given, known)
        values = {name: getattr(given, name) for name in entries if hasattr(given, name)}
        for name, local in (("path", "local_path"), ("hf_config_path", "local_hf_config_path")):
            if name in entries and getattr(given, local, None):
                values[name] = getattr(given, local)
    if kind is EngineConfig:
        values.update(verl.renamed(given, values))
    # Of most settings None stands for the default, of some it is a value.
    is_value = {name: "Optional" in str(entry.type) for name, entry in entries.items()}
    made = kind(**{name: value for name, value in values.items() if value is not None or is_value[name]})
    note(made, *no_effect)
    return made
