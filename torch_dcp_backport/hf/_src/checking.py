"""The check of an export's tensors against the class in its config.json, before a byte is written.

A name that the class does not have is left out by `from_pretrained`, and a name that is missing is drawn at
random: such a folder opens as another model. Reads no values.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch

from torch_dcp_backport.hf._src import classes
from torch_dcp_backport.hf._src.apart import Cutout, written
from torch_dcp_backport.hf._src.format import is_plain
from torch_dcp_backport.hf._src.source import INDEX
from torch_dcp_backport.hf._src.source import Folder as Files
from torch_dcp_backport.transfer import Problem, TensorInfo, warn_once

logger = logging.getLogger("torch_dcp_backport.hf")

ARCHITECTURES = "architectures"
#: Names that peft gives to tensors of a model that it wraps.
OF_PEFT = re.compile(r"^base_model\.model\.|\.base_layer\.|\.lora_|\.modules_to_save\.|\.original_module\.")
#: What a model's class keeps in fp32, where the class is not known.
IN_FP32 = re.compile(r"(^|\.)e_score_correction_bias$")
#: Layers at the end of a model, of which classes have different ones.
HEADS = re.compile(r"(^|\.)(lm_head|score|classifier|v_head|reward_head|value_head)\.")
LAYER = re.compile(r"\.layers\.(\d+)\.")
#: Old files hold it; it is computed.
COMPUTED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
SHOWN = 3
#: The part of a model whose tensors have other names under transformers 4, if it is CLIP's or SigLIP's.
TOWER = re.compile(r"(^|\.)vision_tower\.(?!vision_model\.)")
NOTHING: Mapping[str, str] = {}


class ClassFacts(NamedTuple):
    """The facts that an export needs of the class in its config.json."""

    #: The contents of config.json, with the class that the tensors are of.
    config: dict[str, Any]
    problems: list[Problem]
    #: Tensors that keep their dtype where the others are cast.
    kept: frozenset[str] = frozenset()
    #: Names that are one tensor in the class, and several in the export.
    tied: tuple[tuple[str, ...], ...] = ()
    #: Key of a tensor -> the key under which `save_pretrained` would write it.
    renamed: Mapping[str, str] = NOTHING
    is_quantised: bool = False
    #: Key of a tensor -> the tensors of the files that it is written as, where these are its parts.
    apart: Mapping[str, Mapping[str, Cutout]] = {}


def examine(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    dtype: Optional[torch.dtype] = None,
    origin: Optional[Path] = None,
    aliases: Mapping[str, str] = NOTHING,
    is_named: bool = False,
) -> ClassFacts:
    """Compare the tensors of an export with the class in its config.json.

    By transformers' own class where it is installed and has the class; else by the names in the files of the
    model's own folder; else, with a warning, only names of peft are refused.

    Args:
        dtype: that the export casts to; None casts nothing.
        origin: the folder of the model that config.json is from.
        aliases: another name of a tensor -> the name that it has in `tensors`.
        is_named: whether the tensors have the names of files already. Else those that have the names of the
            class get the names that `save_pretrained` gives them.
    """
    export = Examination(dict(config), tensors, dtype, origin, aliases, is_named)
    for rule in RULES:
        facts = rule(export)
        if facts is not None:
            return facts
    return export.facts()


@dataclass
class Examination:
    """An export under examination. Each of `RULES` adds what it finds, or ends it with the facts."""

    config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    dtype: Optional[torch.dtype]
    origin: Optional[Path]
    aliases: Mapping[str, str]
    is_named: bool
    #: Tensors of the files that config.json is from; empty where their names say nothing about the export's.
    source: Mapping[str, Optional[TensorInfo]] = field(default_factory=dict)
    #: The setting of config.json that transformers 5 alone reads; "" without one.
    of_5: str = ""
    #: As in `ClassFacts`.
    kept: set[str] = field(default_factory=set)
    tied: tuple[tuple[str, ...], ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    apart: Mapping[str, Mapping[str, Cutout]] = field(default_factory=dict)
    #: The class that the tensors are compared with, once it is found.
    cls: Optional[Found] = None

    @property
    def found(self) -> Found:
        assert self.cls is not None, "the rules before this one have found the class"
        return self.cls

    def facts(self) -> ClassFacts:
        """The facts where the tensors are those of the class."""
        return ClassFacts(self.config, [], frozenset(self.kept), self.tied, self.renamed, apart=self.apart)

    def shown(self) -> dict[str, TensorInfo]:
        """The tensors under the names that tied ones get."""
        return {self.renamed.get(key, key): info for key, info in self.tensors.items()}

    def by_names(
        self,
        why: str,
        source: Optional[Mapping[str, Optional[TensorInfo]]] = None,
        is_quantised: bool = False,
    ) -> ClassFacts:
        """The facts where the class cannot judge, and why: the names of the model's own files do."""
        names = self.source if source is None else source
        problems = _by_names(self.config, self.tensors, names, why)
        return self.facts()._replace(problems=problems, is_quantised=is_quantised)


def warn_of_transformers_5(export: Examination) -> None:
    export.of_5 = setting = setting_of_5(export.config)
    if setting:
        warn_once(
            logger,
            f"config.json is of transformers 5 (it has {setting}): transformers 4 takes its own default for "
            "it, opens another model without an error where that differs, or opens none. Open it under "
            "transformers 5, or export a text model with like= a config.json of transformers 4: both read it",
            about=setting_of_5,
        )


def drop_settings_of_quantisation(export: Examination) -> None:
    """Tensors that are not quantised go without the settings that say how the model's own files are."""
    if not _is_any_quantised(export.tensors):
        export.config, gone = classes.without_quantisation(export.config)
        if gone:
            what = f"config.json goes without the {' and the '.join(gone)} that it had"
            warn_once(logger, f"the weights are not quantised: {what}")


def read_names_of_files(export: Examination) -> None:
    """Find the tensors of the model's own files, and by them the tensors that keep their dtype."""
    source = infos_in(export.origin)
    if not _is_any_quantised(export.tensors) and _is_any_quantised(source):
        # Files with scales beside their weights have other names.
        source = {}
    dtype = export.dtype
    export.source = source
    export.kept = {key for key in export.tensors if dtype is not None and stays(key, dtype, source)}


def judge_quantised(export: Examination) -> Optional[ClassFacts]:
    """Scales beside weights are no tensors of a class."""
    return export.by_names("quantised", is_quantised=True) if _is_any_quantised(export.tensors) else None


def find_ties_by_name(export: Examination) -> None:
    export.tied = tied_by_name(export.config, export.tensors)
    export.renamed = renamed_by_name(export.tensors, export.aliases)


def judge_unknown_kind(export: Examination) -> Optional[ClassFacts]:
    is_known = classes.knows(export.config.get("model_type"))
    return None if is_known else export.by_names("not of transformers")


def find_class(export: Examination) -> Optional[ClassFacts]:
    config, tensors = export.config, export.tensors
    asked = _declared(config)
    try:
        if asked:
            export.cls = _class_of(config, tensors, asked)
        else:
            export.cls = _class_with(config, tensors, {*tensors, *export.aliases})
    except classes.CannotBuild as error:
        # Its files may have other names than the model: transformers 5 renames as it saves.
        return export.by_names(str(error), source={})
    return None


def judge_by_files(export: Examination) -> Optional[ClassFacts]:
    """The class is not known here, or not this transformers': the model's own files decide."""
    config, cls = export.config, export.cls
    if cls is None or (cls.problems and (has_code(config) or _are(export.tensors, export.source, config))):
        return export.by_names("with code of its own" if has_code(config) else "none of this transformers")
    return None


def refuse_misfits(export: Examination) -> Optional[ClassFacts]:
    return ClassFacts(export.config, export.found.problems) if export.found.problems else None


def judge_without_class(export: Examination) -> Optional[ClassFacts]:
    """config.json names no class, and none has just these tensors."""
    found = export.found
    if found.name:
        return None
    if export.source:
        return export.by_names("no class of transformers has just these tensors")
    near, reading = type(found.model).__name__, found.reading
    sides = (("has not", reading.unexpected), ("has also", reading.missing or list(reading.misshaped)))
    differs = ", and ".join(f"{verb} {some(names)}" for verb, names in sides if names)
    warn_once(
        logger,
        "no class of transformers has just these tensors: config.json names none, and they are not "
        f"compared (a {near} {differs})",
    )
    return export.facts()


def keep_what_the_class_keeps(export: Examination) -> None:
    if export.dtype is not None:
        names = classes.kept_in_fp32(export.found.model, export.dtype)
        routes = export.found.reading.routes
        export.kept |= {route.key for name, route in routes.items() if name in names and not route.steps}


def warn_of_tensors_left_out(export: Examination) -> None:
    found = export.found
    if found.reading.unexpected:
        left = some(found.reading.unexpected)
        warn_once(logger, f"from_pretrained leaves out what a {found.name} does not have: {left}")


def find_ties_by_class(export: Examination) -> None:
    found = export.found
    export.tied = tuple(found.reading.tied)
    export.renamed = classes.renamed_ties(found.model, export.tensors, found.reading)
    if export.config.get("tie_word_embeddings") is False:
        # A T5 of transformers 5 is tied all the same, until its files have two tensors: it reads both.
        export.tied = tuple(keys for keys in export.tied if not any(map(HEADS.search, keys)))
        if heads := list(filter(HEADS.search, {**export.aliases, **export.renamed})):
            warn_once(
                logger,
                f"tie_word_embeddings is false in config.json, and {some(heads)} is the embedding here: it "
                "is written once, and transformers 4 draws the other at random",
            )


def name_ties_as_the_class(export: Examination) -> Optional[ClassFacts]:
    """A tied tensor is written under the name that the class reads; without one the export is refused."""
    found, renamed = export.found, export.renamed
    if renamed:
        export.cls = found._replace(reading=classes.reading(found.model, export.shown()))
        if not export.found.reading.is_whole:
            what = f"the name of a tied tensor that a {found.name} is not written with"
            problem = Problem(what, some(list(renamed)), expected=some(list(renamed.values())))
            return ClassFacts(export.config, [problem])
    export.config = found.config
    return None


def name_as_save_pretrained(export: Examination) -> None:
    """Give tensors with the names of the class the names that `save_pretrained` would write."""
    if export.is_named:
        return
    found = export.found
    in_files, export.apart, left, unknown = written(found.model, export.shown(), found.reading)
    if unknown and not left:
        warn_once(
            logger,
            f"the tensors that save_pretrained writes of a {found.name} are not known ({unknown}): all keep "
            "their names, an older transformers may not find them, and draw them at random",
        )
    if left:
        warn_once(
            logger,
            f"save_pretrained writes {some(left)} of a {found.name} as other tensors, which is not offered "
            "here: an older transformers may not find them, and draw them at random",
        )
    new = {key: export.renamed.get(key, key) for key in export.tensors}
    new = {key: in_files.get(name, name) for key, name in new.items()}
    export.renamed = {key: name for key, name in new.items() if key != name}
    unlike = [name for name in new.values() if TOWER.search(name) and name not in export.source]
    if unlike and classes.is_5() and not export.of_5:
        warn_once(
            logger,
            f"tensors have their names of transformers 5 ({some(unlike)}): transformers 4 may know them by "
            "others, and draws these at random. Open the export under transformers 5, or export under "
            "transformers 4.57: both open that",
            about=TOWER,
        )


#: In this order: what is known without the class, the class, and what the class says. The first rule that
#: returns facts ends the examination.
RULES: tuple[Callable[[Examination], Optional[ClassFacts]], ...] = (
    warn_of_transformers_5,
    drop_settings_of_quantisation,
    read_names_of_files,
    judge_quantised,
    find_ties_by_name,
    judge_unknown_kind,
    find_class,
    judge_by_files,
    refuse_misfits,
    judge_without_class,
    keep_what_the_class_keeps,
    warn_of_tensors_left_out,
    find_ties_by_class,
    name_ties_as_the_class,
    name_as_save_pretrained,
)


def setting_of_5(config: Mapping[str, Any]) -> str:
    """Return what config.json, or a part of it, has where transformers 5 alone looks for it; else ""."""
    if config.get("rope_parameters") and "rope_theta" not in config:
        return "rope_parameters, and no rope_theta"
    if config.get("scale_decoder_outputs") is False and config.get("tie_word_embeddings") is not False:
        # transformers 4 goes by `tie_word_embeddings`, which 5 makes true of every T5.
        return "scale_decoder_outputs"
    parts = (setting_of_5(part) for part in config.values() if isinstance(part, Mapping))
    return next(filter(None, parts), "")


class Found(NamedTuple):
    """The class that an export's tensors are of, or the class that they should be of, with the problems."""

    name: str
    model: Any
    reading: classes.Reading
    config: dict[str, Any]
    problems: list[Problem]


def _declared(config: Mapping[str, Any]) -> str:
    """Return the class that a config.json names; "" where it names none."""
    names = config.get(ARCHITECTURES)
    return str(names[0]) if isinstance(names, (list, tuple)) and names else ""


def _class_of(config: dict[str, Any], tensors: Mapping[str, TensorInfo], asked: str) -> Optional[Found]:
    """Return the class of the tensors; None where transformers does not have the class.

    First the class that config.json names, if it has exactly these tensors; then another class of the same
    model_type that has exactly them, which config.json is to name (a value head on a language model); then
    the named class, if nothing but other programs' tensors is beyond it.

    Raises:
        CannotBuild: the named class has no model without memory.
    """
    if asked and not classes.has_class(asked):
        return None
    named = [asked] if asked else []
    others = [name for name in classes.names_for(config) if name != asked]
    every: list[Found] = []
    for name in (*named, *others):
        fitted = with_labels(config, name, tensors)
        try:
            model = classes.built(name, fitted)
        except classes.CannotBuild:
            if name == asked:
                raise
            continue
        reading = classes.reading(model, tensors)
        if name != asked and reading.is_moved:
            # A language model that has lost its head is no model without one.
            continue
        every.append(Found(name, model, reading, {**fitted, ARCHITECTURES: [name]}, []))
        if reading.is_exact:
            break
    whole = [found for found in every if found.reading.is_whole]
    chosen = next((found for found in reversed(every) if found.reading.is_exact), whole[0] if whole else None)
    if chosen is None:
        return every[0]._replace(problems=misfits(every[0])) if every else None
    if chosen.name != asked and asked:
        warn_once(
            logger,
            f"these are the tensors of a {chosen.name}: the export's config.json names it, not {asked}",
        )
    if chosen.name == asked and chosen.config[ARCHITECTURES] != config[ARCHITECTURES]:
        return chosen._replace(config={**chosen.config, ARCHITECTURES: config[ARCHITECTURES]})
    return chosen


def _class_with(
    config: dict[str, Any], tensors: Mapping[str, TensorInfo], names: Collection[str]
) -> Optional[Found]:
    """Return the class that has just these tensors, where config.json names none.

    A `Found` without a name where no class has. Tensors that are only a part of a class's were lost.

    Args:
        names: of all tensors, each under all of its names: by these a model with a tied head differs from one
            without.
    """
    every: list[Found] = []
    for name in classes.names_for(config, is_every=True):
        fitted = with_labels(config, name, tensors)
        try:
            model = classes.built(name, fitted)
        except classes.CannotBuild:
            continue
        reading = classes.reading(model, tensors)
        if reading.is_moved:
            continue
        every.append(Found(name, model, reading, {**fitted, ARCHITECTURES: [name]}, []))
        if reading.is_exact and set(classes.tensors_in(model)) == set(names):
            return every[-1]
    exact = next((found for found in every if found.reading.is_exact), None)
    if exact is not None or not every:
        return exact
    lost = next((found for found in every if not found.reading.unexpected), None)
    if of_peft(tensors):
        lost = every[0]
    return lost._replace(problems=misfits(lost)) if lost is not None else every[0]._replace(name="")


def with_labels(config: dict[str, Any], name: str, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Return a configuration with as many labels as the head of a classifier has rows."""
    head = next((tensors[key] for key in ("score.weight", "classifier.weight") if key in tensors), None)
    if "Classification" not in name or head is None or len(head.shape) != 2:
        return config
    labels = config.get("id2label") or {}
    count = len(labels) or config.get("num_labels") or 2
    if count == head.shape[0]:
        return config
    fitted = {key: value for key, value in config.items() if key != "num_labels"}
    numbers = range(head.shape[0])
    fitted["id2label"] = {str(number): f"LABEL_{number}" for number in numbers}
    fitted["label2id"] = {f"LABEL_{number}": number for number in numbers}
    return fitted


def misfits(found: Found) -> list[Problem]:
    """Return the problems of tensors that are not those of a class."""
    problems = []
    missing, unexpected, misshaped = found.reading.missing, found.reading.unexpected, found.reading.misshaped
    if missing:
        what = f"from_pretrained of a {found.name} would draw at random what is not there"
        problems.append(Problem(what, some(missing)))
        if unexpected:
            problems.append(Problem("and leave out", some(unexpected)))
    for key, (shape, expected) in misshaped.items():
        problems.append(Problem(f"not the shape of a {found.name}", key, f"{shape}", f"{expected}"))
    return problems + of_peft(unexpected)


def of_peft(names: Iterable[str]) -> list[Problem]:
    """Return a problem for names that peft gives to a model's tensors."""
    wrapped = [name for name in names if OF_PEFT.search(name)]
    if not wrapped:
        return []
    how = "pass adapter=, the adapter's configuration, or the model after merge_and_unload()"
    return [Problem(f"names of peft, which no class has ({how})", some(wrapped))]


def has_code(config: Mapping[str, Any]) -> bool:
    """Return whether a model may have a class of its own, in its folder."""
    return bool(config.get("auto_map"))


# --- without the class ---


def tied_by_name(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> tuple[tuple[str, ...], ...]:
    """Return the embedding and the head that config.json says are one, where both are there."""
    heads = [key for key in tensors if key.endswith("lm_head.weight")]
    embeddings = [key for key in tensors if key.endswith("embed_tokens.weight")]
    is_tied = bool(config.get("tie_word_embeddings")) and len(heads) == len(embeddings) == 1
    return ((embeddings[0], heads[0]),) if is_tied else ()


def renamed_by_name(tensors: Mapping[str, TensorInfo], aliases: Mapping[str, str]) -> dict[str, str]:
    """Return key of a head -> the name that it has as the embedding: under that name models are read."""
    return {
        key: name
        for name, key in aliases.items()
        if key in tensors and key.endswith("lm_head.weight") and name.endswith("embed_tokens.weight")
    }


def _by_names(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    source: Mapping[str, Optional[TensorInfo]],
    why: str,
) -> list[Problem]:
    """Return the problems of tensors, by the names in the model's own files where these are there."""
    if not source:
        problems = of_peft(tensors)
        kind = _declared(config) or config.get("model_type")
        if not problems:
            warn_once(
                logger,
                f"the tensors' names are not compared with those of a {kind} ({why}, and no files of it)",
            )
        return problems
    missing = missing_from(tensors, source, config)
    problems = [Problem(f"not in the export, and in the model's own files ({why})", some(missing))]
    # Some code of a model's own has such names; but a broken export may be in the place of the files, too.
    wrapped = [key for key in tensors if key not in source or not has_code(config)]
    shapes = other_shapes(tensors, source)
    return [*(problems if missing else []), *shapes, *of_peft(wrapped)]


def _are(
    tensors: Mapping[str, TensorInfo],
    source: Mapping[str, Optional[TensorInfo]],
    config: Mapping[str, Any],
) -> bool:
    """Return whether an export has the names of the model's own files, which another transformers opens."""
    is_within = bool(source) and set(tensors) <= set(source) and not of_peft(tensors)
    return is_within and not missing_from(tensors, source, config) and not other_shapes(tensors, source)


def other_shapes(
    tensors: Mapping[str, TensorInfo], source: Mapping[str, Optional[TensorInfo]]
) -> list[Problem]:
    """Return problems for tensors of other shapes than in the files that config.json is from."""
    problems = []
    for key, info in tensors.items():
        own = source.get(key)
        if own is not None and own.shape != info.shape and not HEADS.search(key):
            what = "not the shape that it has in the model's own files"
            problems.append(Problem(what, key, f"{info.shape}", f"{own.shape}"))
    return problems


def missing_from(
    tensors: Mapping[str, TensorInfo],
    source: Mapping[str, Optional[TensorInfo]],
    config: Mapping[str, Any],
) -> list[str]:
    """Return the names of the model's own files that an export should have.

    Not: another head, the head that is the embedding, layers beyond those of the model (they predict further
    tokens, and transformers leaves them out), and what is computed.
    """
    has_head = any(HEADS.search(key) for key in tensors)
    count = config.get("num_hidden_layers")

    def is_other(key: str) -> bool:
        layer = LAYER.search(key)
        is_beyond = layer is not None and isinstance(count, int) and int(layer[1]) >= count
        is_head = bool(HEADS.search(key)) and (has_head or bool(config.get("tie_word_embeddings")))
        return is_beyond or is_head or bool(COMPUTED.search(key))

    return [key for key in source if key not in tensors and not is_other(key)]


def infos_in(folder: Optional[Path]) -> dict[str, Optional[TensorInfo]]:
    """Return name -> shape and dtype of the weights in a folder; None where an index has the name alone."""
    if folder is None:
        return {}
    files = Files(folder)
    if not files.absent and not files.problems:
        return dict(files.tensors)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        for name in (INDEX, "pytorch_model.bin.index.json"):
            if (folder / name).is_file():
                return dict.fromkeys(json.loads((folder / name).read_bytes())["weight_map"])
    return {}


def stays(key: str, dtype: torch.dtype, source: Mapping[str, Optional[TensorInfo]]) -> bool:
    """Return whether a tensor keeps its dtype, by its name, or as the model's own files have it in fp32."""
    if IN_FP32.search(key):
        return True
    own = source.get(key)
    if own is None or own.dtype != torch.float32 or dtype == torch.float32:
        return False
    # Of a model that is in fp32 as a whole this says nothing.
    return any(info is not None and info.dtype in (torch.bfloat16, torch.float16) for info in source.values())


def _is_any_quantised(tensors: Mapping[str, Optional[TensorInfo]]) -> bool:
    return any(info is not None and is_quantised(info) for info in tensors.values())


def is_quantised(info: TensorInfo) -> bool:
    """Return whether a tensor holds quantised values: indices and masks are of other dtypes."""
    if is_plain(info.dtype) or info.dtype in (torch.int64, torch.bool):
        return False
    return info.dtype != torch.int32 or len(info.shape) > 1


def some(names: Collection[str]) -> str:
    """Return the first of some names as text, and how many more there are."""
    shown = ", ".join(list(names)[:SHOWN])
    return shown + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
