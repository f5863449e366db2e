"""The small files of a checkpoint that stand beside weights: configuration, tokenizer, chat template, code.

Runs on the first rank. Must never fail a save: what cannot be written is named in the log, and the step is
saved without it.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Optional

from torch import nn

from torch_dcp_backport.hf import (
    ADAPTER_CONFIG,
    CHOSEN,
    CONFIG,
    OF_QUANTISED,
    TEMPLATES,
    as_config,
    config_text,
    names_in,
)
from torch_dcp_backport.publish import disk

logger = logging.getLogger("torch_dcp_backport.checkpoint")

GENERATION, TOKENIZER = "generation_config.json", "tokenizer_config.json"
PROCESSOR = "processor_config.json"
#: Files that a tokenizer's `save_pretrained` writes: those of a model's folder may be another tokenizer's.
OF_A_TOKENIZER = re.compile(
    r"(tokenizer|tokenizer_config|special_tokens_map|added_tokens|chat_template|vocab|tekken)\.json"
    rf"|(vocab|merges)\.txt|chat_template\.jinja|{TEMPLATES}/.*|.*\.(model|tiktoken|bpe|spm|vocab|codes)"
)
#: Files of a processor's parts, which newer releases write into its own.
OF_A_PROCESSOR = re.compile(r"(image_|video_)?(pre)?processor_config\.json")


def folder_of(like: Any, config: Any) -> Optional[Path]:
    """Return the folder of the model that is trained; None where it is not here.

    Args:
        like: the caller's folder; None takes the one that the configuration was read from.
    """
    name = like if like is not None else getattr(config, "name_or_path", None)
    if not isinstance(name, (str, Path)) or not str(name):
        return None
    # The working directory may change before a save.
    path = Path(os.path.abspath(name))
    return path if (path / CONFIG).is_file() else None


def write_beside(
    folder: Path,
    *,
    config: Any,
    generation: Any = None,
    generates: bool = True,
    processing_class: Any = None,
    origin: Optional[Path] = None,
) -> None:
    """Write what `save_pretrained` of model, tokenizer and processor would write, but for the weights.

    Args:
        config: of the model; None writes none.
        generation: the model's generation configuration, where it has one.
        generates: whether the model does: a value model of a language model's folder does not.
        processing_class: a tokenizer or processor.
        origin: the model's own folder, from which all else is copied: code, chat templates, and what
            `processing_class` does not have.
    """
    written = saved_by(processing_class, folder, "the tokenizer or processor")
    if origin is not None:
        with told(f"what is in {origin}"):
            for name in copied(names_in(origin), written):
                write(folder / name, (origin / name).read_bytes())
    has_config = hasattr(config, "save_pretrained")
    if getattr(config, CHOSEN, False):
        # A note of this process alone, which `save_pretrained` of a model takes away.
        config = copy.copy(config)
        setattr(config, CHOSEN, False)
    if has_config and CONFIG not in saved_by(config, folder, "the configuration that it saves itself"):
        with told("the configuration, as its values"):
            values = as_config(config)
            write(folder / CONFIG, json.dumps(values, indent=2, sort_keys=True, default=str).encode())
    if generates:
        write_generation(folder, generation, origin)


def copied(names: Iterable[str], written: Collection[str]) -> list[str]:
    """Return those of the files of a model's folder that go along, beside what was written anew."""
    others = [OF_QUANTISED]
    others += [OF_A_TOKENIZER] if TOKENIZER in written else []
    others += [OF_A_PROCESSOR] if PROCESSOR in written else []
    own = {CONFIG, GENERATION, *written}
    return [name for name in names if name not in own and not any(kind.fullmatch(name) for kind in others)]


def saved_by(part: Any, folder: Path, what: str) -> list[str]:
    """Return the names of the files that a part's `save_pretrained` writes, all of them or none."""
    save: Optional[Callable[[str], Any]] = getattr(part, "save_pretrained", None)
    if save is None:
        return []
    names: list[str] = []
    with told(what):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=folder.parent) as made:
            aside = Path(made)
            save(made)
            for path in sorted(path for path in aside.rglob("*") if path.is_file()):
                name = path.relative_to(aside).as_posix()
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, folder / name)
                names.append(name)
    return names


def write_generation(folder: Path, generation: Any, origin: Optional[Path]) -> None:
    """Write the generation configuration of a model that has one of its own.

    One that transformers derived from the model's configuration says nothing: a reader derives it again. It
    would take the place of the file in the model's folder, which has what was lost (sampling, all tokens that
    end a text).
    """
    own = None if origin is None else origin / GENERATION
    if own is not None and not own.is_file():
        own = None
    is_derived = not hasattr(generation, "save_pretrained") or getattr(
        generation, "_from_model_config", False
    )
    if own is not None and (is_derived or is_of(generation, own.parent)):
        with told("the generation configuration"):
            write(folder / GENERATION, own.read_bytes())
    elif not is_derived and GENERATION not in saved_by(
        generation, folder, "a valid generation configuration"
    ):
        # transformers refuses to save some that it loads.
        with told("the generation configuration, as its values"):
            write(folder / GENERATION, generation.to_json_string().encode())


def is_of(generation: Any, folder: Path) -> bool:
    """Return whether a generation configuration is that of a model's folder."""
    try:
        return bool(type(generation).from_pretrained(str(folder)).to_dict() == generation.to_dict())
    except Exception:
        return False


def adapters_of(model: Any) -> dict[str, Any]:
    """Return name -> configuration of the adapters that a model has parameters of.

    peft's configurations alone say nothing: they stay at a model after `merge_and_unload`.
    """
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, Mapping) or not configs:
        return {}
    held = held_adapters(model)
    return {name: config for name, config in configs.items() if name in held}


def held_adapters(model: nn.Module) -> set[str]:
    """Return the names of the adapters that modules of a model have parameters of."""
    held: set[str] = set()
    for module in model.modules():
        is_of_peft = any(kind.__module__.partition(".")[0] == "peft" for kind in type(module).__mro__)
        for name, child in module.named_children():
            parts: Any = getattr(child, "_fsdp_wrapped_module", child)
            # peft keeps what is an adapter's own in dicts, by the adapter's name.
            if (is_of_peft or name.startswith("lora_")) and callable(getattr(parts, "keys", None)):
                held.update(parts.keys())
    return held


def write_adapters(folder: Path, configs: Mapping[str, Any], base: str, model: Any = None) -> None:
    """Write adapter_config.json of each adapter as peft does; of several in a folder of each.

    Args:
        base: the place of the model that they adapt, where they do not know it.
        model: the model that they adapt.
    """
    for name, config in configs.items():
        with told(f"the configuration of the adapter {name}"):
            write(
                (folder / name if len(configs) > 1 else folder) / ADAPTER_CONFIG,
                config_text(adapter_settings(config, base, model), 2).encode(),
            )


def adapter_settings(config: Any, base: str, model: Any = None) -> dict[str, Any]:
    """Return an adapter's configuration as peft saves it: for inference, and for `AutoPeftModel`."""
    saved = copy.copy(config)
    saved.inference_mode = True
    if not getattr(saved, "base_model_name_or_path", None):
        saved.base_model_name_or_path = base or None
    settings = dict(saved.to_dict())
    if model is not None and settings.get("task_type") is None and not settings.get("auto_mapping"):
        kind = class_of(model)
        settings["auto_mapping"] = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    return settings


def class_of(model: nn.Module) -> type:
    """Return a model's own class: FSDP2 puts another in its place, which is derived from it."""
    return next(kind for kind in type(model).__mro__ if not kind.__module__.startswith("torch."))


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.write(path, content)


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    """Turn an error into a warning that says what the checkpoint is without."""
    try:
        yield
    except Exception as error:
        logger.warning("the checkpoint is without %s: %s: %s", what, type(error).__name__, error)
