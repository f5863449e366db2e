"""The classes of transformers: their tensors' names, and how `from_pretrained` reads files into them.

Builds models without memory. Must never run code of a model's folder, look at the network, or draw a random
number; imports transformers where it is asked for.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import json
import logging
import random
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Optional

import torch
from torch import nn

from torch_dcp_backport import compat
from torch_dcp_backport.transfer import TensorInfo

logger = logging.getLogger("torch_dcp_backport.hf")

#: transformers' tables of classes by model_type, in the order in which a class is looked for.
TABLES = tuple(
    f"MODEL_{name}_NAMES"
    for name in (
        "FOR_CAUSAL_LM_MAPPING", "FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "FOR_MULTIMODAL_LM_MAPPING",
        "FOR_VISION_2_SEQ_MAPPING", "FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "FOR_TOKEN_CLASSIFICATION_MAPPING",
        "FOR_SEQUENCE_CLASSIFICATION_MAPPING", "FOR_MASKED_LM_MAPPING", "FOR_QUESTION_ANSWERING_MAPPING",
        "FOR_PRETRAINING_MAPPING", "MAPPING",
    )
)  # fmt: skip
MASKED = "MODEL_FOR_MASKED_LM_MAPPING_NAMES"
TABLE = re.compile(r"MODEL_(\w+_)?MAPPING_NAMES")
#: Settings of config.json that say how weights are quantised.
OF_QUANTISED = ("quantization_config", "compression_config")


class Origin(NamedTuple):
    """The tensors of files that a tensor of a model is read from."""

    #: Keys in the files, by transformers' pattern where there are several.
    sources: tuple[tuple[str, ...], ...]
    #: transformers' operations that make the tensor of them; none where a tensor is read as it is.
    steps: tuple[Any, ...] = ()
    #: The shapes of all tensors that they make, and the number of this one.
    shapes: tuple[tuple[int, ...], ...] = ()
    place: int = 0

    @property
    def key(self) -> str:
        """The key of the first tensor, the only one where it is read as it is."""
        return self.sources[0][0]


class Reading(NamedTuple):
    """The result of a look at how `from_pretrained` reads the tensors of files."""

    #: Tensor of the model -> what it is read from.
    routes: Mapping[str, Origin]
    #: Tensors of the model that would be drawn at random.
    missing: list[str]
    #: Tensors of the files that would be left out.
    unexpected: list[str]
    #: Tensors that do not have the shape of the model's -> (their shape, the model's).
    misshaped: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    #: Tensors of the files that are one in the model.
    tied: list[tuple[str, ...]]
    #: Whether the files are of the model with, or without, its head: all names are longer, or shorter.
    is_moved: bool

    @property
    def is_whole(self) -> bool:
        """Return whether every tensor of the model is there."""
        return not self.missing and not self.misshaped

    @property
    def is_exact(self) -> bool:
        return self.is_whole and not self.unexpected


class CannotBuild(Exception):
    """A class that is not transformers', or that has no model without memory."""


class CannotTell(Exception):
    """transformers could not list the tensors that `save_pretrained` writes."""


def names_for(config: Mapping[str, Any], is_every: bool = False) -> list[str]:
    """Return the names of transformers' classes for a configuration.

    Args:
        is_every: also of classes that no language model is, as of pictures and of sounds.
    """
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    names = []
    others = [name for name in dir(auto) if TABLE.fullmatch(name) and name not in TABLES] if is_every else []
    # An encoder has the tensors of a decoder.
    tables = TABLES if config.get("is_decoder") else (MASKED, *TABLES)
    for table in (*tables, *others):
        entry = getattr(auto, table, {}).get(config["model_type"], ())
        names += [entry] if isinstance(entry, str) else list(entry)
    return list(dict.fromkeys(names))


def knows(model_type: object) -> bool:
    """Return whether transformers is installed, and has a configuration of this model_type."""
    if not isinstance(model_type, str) or importlib.util.find_spec("transformers") is None:
        return False
    try:
        auto = importlib.import_module("transformers.models.auto.configuration_auto")
        importlib.import_module("transformers.modeling_utils")
    except Exception as error:
        # Of another torch, or half of it is gone: an export does not need it.
        logger.warning("transformers cannot be imported: %s", error)
        return False
    return model_type in auto.CONFIG_MAPPING_NAMES


def has_class(name: str) -> bool:
    """Return whether transformers itself has a class of this name."""
    kind = getattr(importlib.import_module("transformers"), name, None)
    return isinstance(kind, type) and issubclass(kind, nn.Module)


def built(name: str, config: Mapping[str, Any]) -> nn.Module:
    """Return a model of a configuration on meta.

    Raises:
        CannotBuild: why not.
    """
    try:
        return _built(name, json.dumps(config, sort_keys=True, default=str))
    except Exception as error:
        # The first line may name a setting, and the second its value.
        text = textwrap.shorten(str(error), 200, placeholder=" ...")
        raise CannotBuild(f"{name} cannot be built: {type(error).__name__}: {text}") from error


@functools.lru_cache(maxsize=2)
def _built(name: str, config: str) -> nn.Module:
    transformers = importlib.import_module("transformers")
    # Quantised weights are no weights of the class.
    values, _ = without_quantisation(json.loads(config))
    auto = importlib.import_module("transformers.models.auto.configuration_auto")
    with TemporaryDirectory() as folder:
        # As `from_pretrained` reads it: some values have a form of their own.
        Path(folder, "config.json").write_text(json.dumps(values))
        made = auto.CONFIG_MAPPING[values["model_type"]].from_pretrained(folder)
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"), torch.no_grad():
            model: Any = getattr(transformers, name)(made)
            model.tie_weights()
    finally:
        random.setstate(state)
    found: nn.Module = model
    return found


def without_quantisation(config: Mapping[str, Any], path: str = "") -> tuple[dict[str, Any], list[str]]:
    """Return (a configuration without the settings of quantisation, the paths of what is gone).

    The parts of a model have configurations of their own.
    """
    kept, gone = dict[str, Any](), list[str]()
    for name, value in config.items():
        if name in OF_QUANTISED and value:
            gone.append(path + name)
        elif isinstance(value, dict) and name.endswith("_config"):
            kept[name], below = without_quantisation(value, f"{path}{name}.")
            gone += below
        else:
            kept[name] = value
    return kept, gone


def tensors_in(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of everything in a model's state dict."""
    state = model.state_dict()
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, torch.Tensor)}


def reading(
    model: nn.Module,
    files: Mapping[str, TensorInfo],
    held: Optional[Mapping[str, tuple[int, ...]]] = None,
) -> Reading:
    """Return how `from_pretrained` reads the tensors of files into a model of transformers.

    Args:
        held: name -> shape of the model's tensors; None looks at the model.
    """
    held = tensors_in(model) if held is None else held
    core = _core_of_5()
    renamed, routes = _by_5(model, files, held, core) if core else _by_4(model, files, held)
    misshaped = {}
    for name, route in routes.items():
        shape = files[route.key].shape
        if not route.steps and shape != held[name]:
            misshaped[route.key] = shape, held[name]
    groups = names_of_tied(model)
    absent = {name for name in held if name not in routes}
    for group in groups:
        if not absent >= group:
            # Read under another of its names.
            absent -= group
    buffers = {name for name, _ in model.named_buffers()}
    used = {key for route in routes.values() for keys in route.sources for key in keys}
    left = [key for key in files if key not in used and renamed.get(key, key) not in buffers]
    tied = []
    for group in groups:
        first = written_of(model, group)
        names = sorted((name for name in held if name in group and name in routes), key=first.__ne__)
        keys = tuple(routes[name].key for name in names)
        if len(set(keys)) > 1:
            tied.append(keys)
    missing = [name for name in held if name in absent]
    prefix = getattr(model, "base_model_prefix", "")
    plain = [(name, route.key) for name, route in routes.items() if not route.steps]
    is_moved = any(f"{prefix}.{key}" == name or f"{prefix}.{name}" == key for name, key in plain)
    return Reading(
        routes,
        _without(missing, getattr(model, "_keys_to_ignore_on_load_missing", None)),
        _without(left, getattr(model, "_keys_to_ignore_on_load_unexpected", None)),
        misshaped,
        tied,
        is_moved,
    )


def _without(names: Iterable[str], patterns: Optional[Iterable[str]]) -> list[str]:
    patterns = list(patterns or ())
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]


def names_of_tied(model: nn.Module) -> list[set[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return [group for group in names.values() if len(group) > 1]


def written_of(model: Any, group: Collection[str]) -> str:
    """Return the name under which `save_pretrained` writes a tensor that has several in a model.

    Under another name transformers 4 reads it, and leaves the first on meta.
    """
    every = getattr(model, "all_tied_weights_keys", None)
    if isinstance(every, Mapping):
        left = [name for name in group if name in every]
    else:
        patterns = [
            re.escape(f"{prefix}." if prefix else "") + pattern
            for prefix, part in model.named_modules()
            for pattern in getattr(part, "_tied_weights_keys", None) or ()
        ]
        left = [name for name in group if any(re.search(pattern, name) for pattern in patterns)]
    order: list[str] = [name for name in model.state_dict() if name in group]
    return next((name for name in order if name not in left), order[0])


def renamed_ties(model: nn.Module, files: Mapping[str, TensorInfo], found: Reading) -> dict[str, str]:
    """Return key of a tied tensor under another name than `save_pretrained` gives it -> that name."""
    renamed = {}
    for group in names_of_tied(model):
        routes = {name: found.routes[name] for name in group if name in found.routes}
        wanted = written_of(model, group)
        if not routes or wanted in routes or any(route.steps for route in routes.values()):
            continue
        # Of several with the same values the first is written.
        own = [route.key for route in routes.values()]
        key = next((keys[0] for keys in found.tied if keys[0] in own), own[0])
        name = next(name for name, route in routes.items() if route.key == key)
        # Files may have the names of the model without its head, or with a longer path.
        if name == key:
            renamed[key] = wanted
        elif name.endswith(f".{key}") and wanted.startswith(name[: -len(key)]):
            renamed[key] = wanted[len(name) - len(key) :]
        elif key.endswith(f".{name}"):
            renamed[key] = key[: -len(name)] + wanted
    return {key: name for key, name in renamed.items() if name not in files}


def kept_in_fp32(model: Any, dtype: torch.dtype) -> set[str]:
    """Return the tensors of a model that keep their dtype where the others are cast.

    Buffers, and what transformers' own class keeps: such values (the correction of a router's scores) differ
    by less than a shorter dtype resolves.
    """
    persistent = set(model.state_dict())
    kept = {name for name, _ in model.named_buffers() if name in persistent}
    modules = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        modules |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for pattern in modules:
        found = re.compile(rf"(^|\.){pattern}($|\.)")
        kept |= {name for name in persistent if found.search(name)}
    return kept


def saved(model: Any, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors that `save_pretrained` writes of a model's, by their names and shapes.

    It gives them the names of the files that the model's class is for, and takes experts apart that the
    model holds in a single tensor.

    Raises:
        CannotTell: transformers fails to say it.
    """
    state = {key: torch.empty(shape, dtype=dtype, device="meta") for key, (shape, dtype) in tensors.items()}
    core = _core_of_5()
    try:
        made = (
            core.revert_weight_conversion(_of_own_class(model), state) if core else _saved_by_4(model, state)
        )
        return {key: TensorInfo(tuple(value.shape), value.dtype) for key, value in made.items()}
    except Exception as error:
        raise CannotTell(f"{type(error).__name__}: {' '.join(str(error).split())}") from error


# --- transformers 4 ---


def _by_4(
    model: Any, files: Mapping[str, TensorInfo], held: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, str], dict[str, Origin]]:
    """Return (file key -> name in the model, name in the model -> route), as transformers 4 finds them."""
    prefix = getattr(model, "base_model_prefix", "")
    has_prefix = bool(prefix) and any(key.startswith(prefix) for key in files)
    expects_prefix = bool(prefix) and hasattr(model, prefix)
    renamed = {}
    for key in files:
        name = _mapped_by_4(model, key)
        if expects_prefix and not has_prefix:
            name = f"{prefix}.{name}"
        elif has_prefix and not expects_prefix:
            if not name.startswith(f"{prefix}."):
                continue
            name = name[len(prefix) + 1 :]
        renamed[key] = name
    routes = {name: Origin(((key,),)) for key, name in renamed.items() if name in held}
    return renamed, routes


def _mapped_by_4(model: Any, key: str) -> str:
    fix = getattr(model, "_fix_state_dict_key_on_load", None)
    fixed = key if fix is None else fix(key)
    name: str = fixed if isinstance(fixed, str) else fixed[0]
    for pattern, replacement in patterns_of_4(type(model)).items():
        name, count = re.subn(pattern, replacement, name)
        if count:
            break
    return name


def patterns_of_4(kind: type) -> Mapping[str, str]:
    """Return the patterns of names that a class of transformers 4 renames as it opens files."""
    patterns: Mapping[str, str] = getattr(kind, "_checkpoint_conversion_mapping", None) or {}
    names = getattr(importlib.import_module("transformers.modeling_utils"), "VLMS", None)
    lowered = [each.__name__.lower() for each in kind.__mro__[:-1]]
    is_asked = names is None or any(name in each for each in lowered for name in names)
    return patterns if is_asked else {}


def _saved_by_4(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a model's tensors under the names that transformers 4 writes, as far as it knows them."""
    back = {}
    for pattern, name in patterns_of_4(type(model)).items():
        # Of a pattern that looks ahead the rest is the name.
        back[name] = re.sub(r"\(.*\)", "", pattern.lstrip("^"))
    written = {}
    for key, value in state.items():
        for name, old in back.items():
            key, count = re.subn(name, old, key)
            if count:
                break
        written[key] = value
    fix = getattr(model, "_fix_state_dict_keys_on_save", None)
    return written if fix is None else dict(fix(written))


# --- transformers 5 ---


def is_5() -> bool:
    """Return whether transformers is 5 or newer."""
    return _core_of_5() is not None


def _core_of_5() -> Any:
    """Return transformers' functions that rename and convert; None before transformers 5."""
    if importlib.util.find_spec("transformers.conversion_mapping") is None:
        return None
    return importlib.import_module("transformers.core_model_loading")


def _of_own_class(model: nn.Module) -> nn.Module:
    """Return a model under the class that it had before FSDP2: tables of transformers 5 go by its name."""
    kind = compat.unsharded_class(model)
    if kind is type(model):
        return model
    own: nn.Module = object.__new__(kind)
    own.__dict__.update(model.__dict__)
    return own


def _by_5(
    model: Any, files: Mapping[str, TensorInfo], held: Mapping[str, tuple[int, ...]], core: Any
) -> tuple[dict[str, str], dict[str, Origin]]:
    """Return the result of `_by_4`, by the table of renamings and conversions of transformers 5."""
    table = importlib.import_module("transformers.conversion_mapping")
    transforms = table.get_model_conversion_mapping(_of_own_class(model))
    renamings = [entry for entry in transforms if isinstance(entry, core.WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, core.WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    prefix = getattr(model, "base_model_prefix", "")
    renamed: dict[str, str] = {}
    routes: dict[str, Origin] = {}
    waiting: dict[str, Any] = {}
    keys_by_pattern: dict[str, dict[str, list[str]]] = {}
    for key in sorted(files, key=core.dot_natural_key):
        name, pattern = core.rename_source_key(key, renamings, converters, prefix, held)
        if name not in held and key in held:
            name, pattern = core.rename_source_key(key, [], [], prefix, held)
        renamed[key] = name
        if name not in held:
            continue
        if pattern is None:
            routes.setdefault(name, Origin(((key,),)))
            continue
        if name not in waiting:
            waiting[name] = copy.deepcopy(by_pattern[pattern])
        meta = torch.empty(files[key].shape, dtype=files[key].dtype, device="meta")
        waiting[name].add_tensor(name, key, pattern, meta)
        keys_by_pattern.setdefault(name, {}).setdefault(pattern, []).append(key)
    for name, converter in waiting.items():
        keys = keys_by_pattern[name]
        ordered = tuple(tuple(keys[each]) for each in converter.source_patterns if each in keys)
        made = list(_made_by_5(model, converter, name))
        shapes = tuple(shape for _, shape in made)
        for place, (target, shape) in enumerate(made):
            if target in held and shape == held[target]:
                routes[target] = Origin(ordered, tuple(converter.operations), shapes, place)
    return renamed, routes


def _made_by_5(model: Any, converter: Any, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of what a conversion makes; nothing where it fails, as `from_pretrained` would."""
    try:
        made = converter.convert(name, model=model, config=model.config)
    except Exception:
        return
    for target, value in made.items():
        tensor = value[0] if isinstance(value, list) else value
        yield target, tuple(tensor.shape)
