"""The settings of verl's configuration objects, and what the engine does with each.

No setting is accepted and forgotten: it is served, refused by name unless it asks for nothing, or known to
change no value of the training. Must never import verl.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Optional

from torch_dcp_backport.engine._src.checks import check_known, flag, say

SERVED = "serves it"
#: verl's object does it before the engine sees it; in a mapping nothing does.
BEFORE = "finds it already done"
#: Speed, memory, or files beside the weights.
NO_VALUE = "ignores it"
REFUSED = "refuses it"


#: For optimizers that are not offered.
INSTEAD = "take 'AdamW', and where its states are too large `optimizer_offload` or `offload_policy`"


class Known(NamedTuple):
    """The treatment of a setting of verl's by the engine."""

    does: str
    #: For the page of documentation.
    text: str = ""
    #: The values that ask for nothing; None is any value.
    idle: Optional[tuple[Any, ...]] = (None, False)
    #: Of settings within settings: those that ask for something.
    inner: tuple[str, ...] = ()
    #: Of settings within settings: those that say more of the former.
    details: tuple[str, ...] = ()
    #: Of a setting that is refused: what to do.
    instead: str = ""

    def asked(self, name: str, value: Any) -> dict[str, Any]:
        """Return the settings that ask for something, by name."""
        if self.inner:
            found = {f"{name}.{part}": within(value, part) for part in self.inner}
            return {part: asked for part, asked in found.items() if asked and asked not in (self.idle or ())}
        return {} if self.idle is None or value in self.idle else {name: value}


def within(value: Any, name: str) -> Any:
    """Return a setting of a mapping or an object; None where it has none."""
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


MODEL = {
    "path": Known(SERVED, "a folder; `local_path` of verl's object goes first"),
    "local_path": Known(SERVED, "the folder that verl has copied `path` to"),
    "hf_config_path": Known(SERVED, "a folder with another config.json"),
    "local_hf_config_path": Known(SERVED, "as `hf_config_path`"),
    "hf_config": Known(SERVED, "the configuration of the model, except its `attn_implementation`"),
    "override_config": Known(
        SERVED, 'also within "model_config"; without `attn_implementation` transformers chooses'
    ),
    "trust_remote_code": Known(SERVED),
    "model_type": Known(
        SERVED,
        "that of the engine's class, or verl's default, language_model; any other is refused",
        idle=None,
    ),
    "enable_gradient_checkpointing": Known(SERVED, "not reentrant"),
    "enable_activation_offload": Known(SERVED, "on [accelerators](#memory-of-the-backward-pass)"),
    "lora_rank": Known(SERVED),
    "lora_alpha": Known(SERVED),
    "target_modules": Known(SERVED),
    "exclude_modules": Known(SERVED),
    "architectures": Known(
        NO_VALUE, "the class of the engine decides between a language model and a value model", idle=None
    ),
    "tokenizer": Known(SERVED, "its files go into every checkpoint; else those in the model's folder"),
    "processor": Known(SERVED, "as `tokenizer`, which is in it"),
    "tokenizer_path": Known(BEFORE, "`tokenizer` is read from it"),
    "local_tokenizer_path": Known(BEFORE, "`tokenizer` is read from it"),
    "load_tokenizer": Known(
        NO_VALUE, "without `tokenizer` its files in the model's folder are taken", idle=None
    ),
    "generation_config": Known(NO_VALUE, "a file beside the weights, from the model's folder", idle=None),
    "custom_chat_template": Known(BEFORE, "`tokenizer` or `processor` has it"),
    "external_lib": Known(BEFORE, "it imports the library"),
    "use_shm": Known(BEFORE, "`local_path` is the copy"),
    "share_embeddings_and_output_weights": Known(BEFORE, "the configuration has it as `tie_word_embeddings`"),
    "use_remove_padding": Known(
        SERVED,
        "for the [families that were compared](#packed-rows); an error for the others, until it is False",
    ),
    "use_liger": Known(NO_VALUE, "speed and memory; the layers of transformers run"),
    "use_fused_kernels": Known(SERVED, "the head [never makes whole logits](#the-head)"),
    "fused_kernel_options": Known(NO_VALUE, "there is one kernel", idle=None, details=("impl_backend",)),
    "tiled_mlp": Known(
        NO_VALUE, "saves memory in verl; not here", inner=("enabled",), details=("num_shards",)
    ),
    "target_parameters": Known(REFUSED, "there are adapters of modules only", idle=(None, [], ())),
    "lora_adapter_path": Known(SERVED, "a folder with peft's files; its rank and modules"),
    "lora": Known(
        SERVED, "`merge`; `rank` and unknown keys are refused, and the keys of Megatron's adapters are said"
    ),
    "mtp": Known(
        REFUSED,
        "if `enable` or `enable_train` is set",
        inner=("enable", "enable_train"),
        details=(
            "enable_rollout",
            "detach_encoder",
            "mtp_loss_scaling_factor",
            "speculative_algorithm",
            "speculative_num_steps",
            "speculative_eagle_topk",
            "speculative_num_draft_tokens",
            "method",
            "num_speculative_tokens",
        ),
    ),
}

ENGINE = {
    "fsdp_size": Known(SERVED),
    "reshard_after_forward": Known(SERVED),
    "offload_policy": Known(SERVED),
    "param_offload": Known(SERVED),
    "optimizer_offload": Known(SERVED),
    "forward_only": Known(SERVED, "verl also takes CPUOffloadPolicy then; here `offload_policy` asks for it"),
    "model_dtype": Known(SERVED, "float16 only with `forward_only`"),
    "mixed_precision": Known(SERVED, "float16 only with `forward_only`; `buffer_dtype` only float32"),
    "dtype": Known(SERVED, "`param_dtype`, if `mixed_precision` has none"),
    "wrap_policy": Known(
        SERVED, "`transformer_layer_cls_to_wrap`; `min_num_params` and `disable` change no value"
    ),
    "use_dynamic_bsz": Known(SERVED),
    "max_token_len_per_gpu": Known(SERVED),
    "micro_batch_size_per_gpu": Known(SERVED),
    "infer_max_token_len_per_gpu": Known(SERVED),
    "infer_micro_batch_size_per_gpu": Known(SERVED),
    "seed": Known(
        SERVED, "for heads and adapters that no file has; with `full_determinism` for all random numbers"
    ),
    "full_determinism": Known(SERVED, "seeds the process, and takes deterministic algorithms"),
    "ulysses_sequence_parallel_size": Known(SERVED, "with `use_remove_padding`; not with `tp_size`"),
    "grad_offload": Known(NO_VALUE, "gradients go with their parameters"),
    "forward_prefetch": Known(NO_VALUE, "speed; FSDP2 prefetches on its own"),
    "use_orig_params": Known(NO_VALUE, "FSDP1 has it", idle=None),
    "use_torch_compile": Known(NO_VALUE, "speed; the entropy is not compiled", idle=None),
    "entropy_from_logits_with_chunking": Known(NO_VALUE, "memory; the entropy is always computed in chunks"),
    "entropy_from_logits_chunk_size": Known(NO_VALUE, "memory; chunks have 64 MiB", idle=None),
    "use_no_sync_for_gradient_accumulation": Known(
        SERVED, 'True is `gradient_sync="last"`, False "each"', idle=None
    ),
    "entropy_checkpointing": Known(
        NO_VALUE, "memory; large chunks are always computed again in the backward pass"
    ),
    "use_remove_padding": Known(SERVED, "as of `HFModelConfig`; False in one of the two is False"),
    "use_fused_kernels": Known(SERVED, "as of `HFModelConfig`; True in one of the two is True"),
    "pad_to_length": Known(NO_VALUE, "speed; nothing is compiled for a length"),
    "pad_to_length_bucket": Known(NO_VALUE, "as `pad_to_length`", idle=None),
    "turbo_config": Known(NO_VALUE, "of the strategy fsdp_turbo, which is refused", idle=None),
    "strategy": Known(REFUSED, "except fsdp and fsdp2; both are FSDP2", idle=(None, "fsdp", "fsdp2")),
    "router_replay": Known(
        REFUSED,
        "if `mode` is not disabled",
        idle=("disabled",),
        inner=("mode",),
        details=("record_file", "replay_file"),
    ),
    "qat": Known(
        REFUSED,
        "if `enable` is set",
        inner=("enable",),
        details=(
            "mode",
            "group_size",
            "ignore_patterns",
            "activation_observer",
            "quantization_config_path",
        ),
    ),
}

OPTIMIZER = {
    "optimizer": Known(
        SERVED, "a class of torch.optim, except Adafactor, Muon, LBFGS and SparseAdam; none of 8 bits"
    ),
    "lr": Known(SERVED),
    "betas": Known(SERVED, "for Adam and its variants"),
    "weight_decay": Known(SERVED),
    "override_optimizer_config": Known(SERVED),
    "clip_grad": Known(SERVED, "above 0; None does not clip"),
    "lr_scheduler_type": Known(SERVED, "constant or cosine; here also linear, wsd and inverse_sqrt"),
    "lr_warmup_steps": Known(SERVED),
    "lr_warmup_steps_ratio": Known(SERVED),
    "total_training_steps": Known(SERVED, "read by `initialize()`"),
    "min_lr_ratio": Known(SERVED),
    "num_cycles": Known(SERVED),
    "grad_clip": Known(BEFORE, "`clip_grad` has it"),
    "warmup_style": Known(BEFORE, "`lr_scheduler_type` has it"),
    "optimizer_impl": Known(
        REFUSED, "except torch.optim", idle=(None, "torch.optim"), instead=f"it is 'torch.optim'; {INSTEAD}"
    ),
    "zero_indexed_step": Known(REFUSED, "if False", idle=(None, True)),
}

CHECKPOINT = {
    "save_contents": Known(SERVED, "by the [checkpoint manager](checkpoint.md)"),
    "load_contents": Known(SERVED, "by the checkpoint manager"),
    "async_save": Known(SERVED, "by the checkpoint manager"),
    "mbridge_config": Known(NO_VALUE, "Megatron has it", idle=None),
    "strict": Known(NO_VALUE, "an export here is complete, or an error", idle=(None, True)),
    "save_lora_only": Known(SERVED, "a save [without the weights below adapters](#adapters-alone)"),
}

#: The keys of `lora` for Megatron's adapters, beside `merge` and `rank`.
LORA = (
    "type", "alpha", "dropout", "target_modules", "exclude_modules", "dropout_position", "lora_A_init_method",
    "lora_B_init_method", "a2a_experimental", "dtype", "adapter_path", "freeze_vision_model",
    "freeze_vision_projection", "freeze_language_model",
)  # fmt: skip

#: Class of verl -> its settings.
CLASSES = {
    "HFModelConfig": MODEL,
    "FSDPEngineConfig": ENGINE,
    "FSDPOptimizerConfig": OPTIMIZER,
    "CheckpointConfig": CHECKPOINT,
}


#: Setting of verl's -> our setting, and its value there by verl's.
RENAMED: dict[str, tuple[str, Mapping[bool, Any]]] = {
    "use_no_sync_for_gradient_accumulation": ("gradient_sync", {True: "last", False: "each"}),
}
#: verl's default of `model_type`, which also engines for other models get.
DEFAULT_TYPE = "language_model"


def check_model_type(asked: Any, own: str) -> None:
    """Refuse a type of model that the class is not for.

    verl's worker sets it to the type that it looks the class up by, and its default asks for nothing.

    Args:
        asked: `model_type` of verl's object or of a mapping; None where it has none.
        own: the type that the class is registered for; "" where it is of any.

    Raises:
        ValueError: another type.
    """
    if own and asked not in (None, "", own, DEFAULT_TYPE):
        raise ValueError(
            f"model_type is not offered: got {asked!r}, and this engine is for a {own}; a subclass "
            "for another has a `model_type` of its own"
        )


def renamed(given: Any, ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return our settings that verl has under another name.

    Args:
        given: verl's settings, as an object or a mapping.
        ours: the settings there that have our names.

    Raises:
        ValueError: no flag, or another value under our name.
    """
    found = {}
    for name, (own, values) in RENAMED.items():
        asked = within(given, name)
        if asked is None:
            continue
        found[own] = values[flag(name, asked)]
        if ours.get(own) not in (None, found[own]):
            raise ValueError(f"{name}={asked!r} is {own}={found[own]!r}, and {own}={ours[own]!r}")
    return found


def check_object(given: Any, known: Mapping[str, Known]) -> list[str]:
    """Check each setting of verl's object; return what has no effect.

    Raises:
        ValueError: a setting that is refused, or that is not known and has another value than its default.
    """
    no_effect = []
    for name, value, default in _entries(given):
        if name in known:
            no_effect += _check(name, value, known[name])
        elif value != default:
            raise ValueError(
                f"{name}={value!r} is not known: this engine may do something else than what it asks for"
            )
        else:
            no_effect.append(f"{name}={value!r}, which is not known, has no effect here")
    return no_effect


def check_mapping(
    given: Mapping[str, Any], known: Mapping[str, Known], kind: str, fields: list[str]
) -> list[str]:
    """Check each entry of a mapping that is no field of our class; return what has no effect.

    Args:
        kind, fields: name and fields of the class.

    Raises:
        ValueError: a setting that is refused, that only verl's objects serve, or that is not known.
    """
    # Of a file of verl's, "_target_" is its class.
    others = {str(name): value for name, value in given.items() if name not in (*fields, "_target_")}
    unknown = sorted(set(others) - set(known))
    if unknown:
        raise ValueError(f"no setting of a {kind}: {', '.join(unknown)}; there are {fields}")
    no_effect = []
    for name, value in others.items():
        if known[name].does in (BEFORE, SERVED) and known[name].asked(name, value):
            raise ValueError(f"{name}={value!r}: only verl's own objects have it ({known[name].text})")
        no_effect += _check(name, value, known[name])
    return no_effect


def _check(setting: str, value: Any, known: Known) -> list[str]:
    if known.inner or known.details:
        _check_inner(setting, value, (*known.inner, *known.details))
    no_effect = []
    for name, asked in known.asked(setting, value).items():
        if known.does == REFUSED:
            instead = f": {known.instead}" if known.instead else ""
            raise ValueError(f"{name} is not offered: got {asked!r}{instead}")
        if known.does == NO_VALUE:
            no_effect.append(f"{name}={asked!r} has no effect here: {known.text}")
    return no_effect


def _check_inner(setting: str, value: Any, known: tuple[str, ...]) -> None:
    """Check that settings within a setting are known; None and False are none of them.

    Raises:
        ValueError: an entry of a mapping that is not known, or a field of an object that is not known and has
            another value than its default; or no settings at all.
    """
    if value is None or value is False:
        return
    if isinstance(value, Mapping) and not dataclasses.is_dataclass(value):
        names = [str(name) for name in value if name != "_target_"]
    elif hasattr(value, "__dict__"):
        names = [name for name, own, default in _entries(value) if own != default]
    else:
        raise ValueError(f"{setting}={value!r}: expected a mapping with {', '.join(known)}")
    check_known(setting, names, known)


def say_unknown(method: str, options: Mapping[str, Any]) -> None:
    """Say that a method of the engine does not know options, which a later release of verl may have."""
    for name, value in options.items():
        say(f"{method}: {name}={value!r} is not known, and has no effect here")


def _entries(given: Any) -> Iterator[tuple[str, Any, object]]:
    """Yield name, value and default of an object's settings; names that begin with "_" are its own."""
    if not dataclasses.is_dataclass(given):
        for name, value in vars(given).items():
            if not name.startswith("_"):
                yield name, value, None
        return
    for entry in dataclasses.fields(given):
        if entry.name.startswith("_"):
            continue
        default: object = entry.default
        if entry.default_factory is not dataclasses.MISSING:
            default = entry.default_factory()
        yield entry.name, getattr(given, entry.name, None), default


def table() -> str:
    """Return the settings of all classes as a table for docs/engine.md."""
    lines = ["| setting | the engine | |", "|---|---|---|"]
    for kind, known in CLASSES.items():
        lines.append(f"| **{kind}** | | |")
        for does in (SERVED, BEFORE, NO_VALUE, REFUSED):
            for name, entry in known.items():
                if entry.does == does:
                    lines.append(f"| `{name}` | {does} | {entry.text}".rstrip() + " |")
    return "\n".join(lines)
