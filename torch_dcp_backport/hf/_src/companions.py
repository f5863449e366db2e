"""The small files beside weights: config.json, a tokenizer's, chat templates, code. Must never read weights.

A name of theirs is a path below the model's folder, with "/" between its parts.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Optional

import torch

from torch_dcp_backport.hf._src.format import is_plain
from torch_dcp_backport.hf._src.source import CONFIG

#: Beside config.json: with it `from_pretrained` opens another model, that of the adapter.
ADAPTER_CONFIG = "adapter_config.json"
#: What an export copies from a model's folder, of the files at its top.
NAMES = re.compile(
    rf"(?!.*\.index\.json$)(?!{re.escape(ADAPTER_CONFIG)}$)"
    r".*\.(json|txt|model|jinja|tiktoken|py|bpe|spm|vocab|codes)"
)
#: Folder of a tokenizer's further chat templates.
TEMPLATES = "additional_chat_templates"
#: What is known to belong to a model, and goes with the model: the names that transformers and its tokenizers
#: write, each of them whole. A pattern would take a caller's own files for the model's.
OF_A_MODEL = frozenset(
    (
        CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        "special_tokens_map.json", "added_tokens.json", "chat_template.json", "chat_template.jinja",
        "preprocessor_config.json", "processor_config.json", "image_processor_config.json",
        "video_preprocessor_config.json", "audio_tokenizer_config.json", "feature_extractor_config.json",
        "quantize_config.json", "quant_config.json", "hf_quant_config.json", "vocab.json", "vocab.txt",
        "merges.txt", "vocab.bpe", "bpe.codes", "dict.txt", "tokenizer.model", "spiece.model",
        "sentencepiece.bpe.model", "sentencepiece.model", "spm.model", "spm_char.model", "source.spm",
        "target.spm", "target_vocab.json", "vocab-src.json", "vocab-tgt.json", "entity_vocab.json",
        "normalizer.json", "emoji.json", "tekken.json", "qwen.tiktoken", "tiktoken.model",
    )
)  # fmt: skip
OF_TEMPLATES = re.compile(rf"{TEMPLATES}/[^/]+\.jinja")
#: Of quantised weights alone.
OF_QUANTISED = re.compile(r"(quantize_config|quant_config|hf_quant_config)\.json")
#: Files that may name code.
POINTERS = (CONFIG, "tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
RELATIVE = re.compile(r"^\s*(?:from\s+\.([\w.]+)\s+import\b|import\s+\.([\w.]+)\s*$)", re.MULTILINE)
#: Of a configuration in a process, and of no model: its place, and that 4.51 has chosen how it attends. With
#: the second in config.json `from_pretrained` of 4.51 does not choose, and computes other values.
CHOSEN = "_attn_implementation_autoset"
OF_A_PROCESS = ("_name_or_path", CHOSEN)
#: The setting for the dtype of weights; the second up to transformers 4.55.
DTYPE = ("dtype", "torch_dtype")
#: Folders in folders that are searched for code.
DEPTH = 4


def as_config(config: Any) -> dict[str, Any]:
    """Return the contents of config.json, from a mapping or from a configuration object of transformers.

    Raises:
        TypeError: neither of them.
    """
    if isinstance(config, Mapping):
        return of_a_model(config)
    # As `save_pretrained` writes it. A default that this release never reads may be a setting in another:
    # transformers 5 goes by the `tie_word_embeddings` that transformers 4 has at the top of LLaVA's.
    to_dict = getattr(config, "to_diff_dict", None) or getattr(config, "to_dict", None)
    if not callable(to_dict):
        raise TypeError(f"a {type(config).__name__} is neither a mapping nor a configuration of transformers")
    values = of_a_model(to_dict())
    # `save_pretrained` names the dtype of the weights, also where the configuration has none.
    of_dtype = next((name for name in DTYPE if hasattr(config, name)), None)
    if of_dtype is not None:
        values.setdefault(of_dtype, None)
    return {name: value for name, value in values.items() if value is not None or name != "architectures"}


def of_a_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration, and those of its parts, without what is of a process."""
    return {
        name: of_a_model(value) if name.endswith("_config") and isinstance(value, Mapping) else value
        for name, value in config.items()
        if name not in OF_A_PROCESS
    }


def companions_of(like: Any) -> dict[str, bytes]:
    """Return name -> content of the small files of a model's folder; of a configuration config.json alone.

    Raises:
        OSError: the folder is not there, or has no config.json.
        TypeError: neither a folder nor a configuration.
        ValueError: config.json is not JSON.
    """
    if not isinstance(like, (str, Path)):
        return {CONFIG: json.dumps(as_config(like), indent=2, sort_keys=True, default=str).encode()}
    folder = Path(like)
    if not (folder / CONFIG).is_file():
        os.listdir(folder)
        raise FileNotFoundError(f"{like} has no {CONFIG}")
    files = {name: (folder / name).read_bytes() for name in names_in(folder)}
    as_config(json.loads(files[CONFIG]))
    return files


def names_in(folder: Path) -> list[str]:
    """Return the names of the small files that an export copies from a model's folder.

    Code is copied from folders below, too, if they can be packages; chat templates from theirs.
    """
    names = [path.name for path in folder.iterdir() if path.is_file() and NAMES.fullmatch(path.name)]
    templates = folder / TEMPLATES
    if templates.is_dir():
        names += [f"{TEMPLATES}/{path.name}" for path in templates.glob("*.jinja") if path.is_file()]
    return sorted([*names, *packaged_code(folder)])


def packaged_code(folder: Path, depth: int = DEPTH) -> Iterator[str]:
    """Yield the names of the Python files in folders that code could import from."""
    for path in folder.iterdir() if depth else ():
        is_package = path.name.isidentifier() and path.name != "__pycache__"
        if is_package and path.is_dir() and not path.is_symlink():
            yield from (f"{path.name}/{entry.name}" for entry in path.glob("*.py") if entry.is_file())
            yield from (f"{path.name}/{name}" for name in packaged_code(path, depth - 1))


def code_of(folder: Path) -> set[str]:
    """Return the files of the code that the configurations in a folder name, and of what it imports."""
    found: set[str] = set()
    waiting = [module for name in POINTERS for module in modules_in(folder / name)]
    while waiting:
        module = waiting.pop()
        above = [] if module.endswith("__init__") else module.split(".")[:-1]
        # An import runs the packages that a module is in.
        waiting += [".".join((*above[:number], "__init__")) for number in range(1, len(above) + 1)]
        name = f"{module.replace('.', '/')}.py"
        try:
            text = (folder / name).read_text(errors="replace")
        except OSError:
            continue
        if name not in found:
            found.add(name)
            within = os.path.dirname(name).replace("/", ".")
            modules = [first or second for first, second in RELATIVE.findall(text)]
            waiting += [f"{within}.{module}".lstrip(".") for module in modules]
    return found


def modules_in(path: Path) -> list[str]:
    """Return the modules that a configuration's `auto_map` names."""
    try:
        named = dict(json.loads(path.read_bytes())["auto_map"]).values()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    texts = [text for value in named for text in (value if isinstance(value, list) else [value])]
    places = [text.rpartition("--")[2] for text in texts if isinstance(text, str)]
    return [place.rpartition(".")[0] for place in places if re.fullmatch(r"\w+(\.\w+)+", place)]


def left_by(folder: Path, new: Collection[str]) -> tuple[list[str], list[str]]:
    """Return (small files of the model in a folder, other entries at its top) that no export replaces.

    Hidden entries are neither.

    Args:
        new: names of all files of the export, and of weights that it replaces.
    """
    own = code_of(folder)
    known = [name for name in (*files_below(folder), *own) if name in own or is_of_a_model(name)]
    # What lies behind a link is not the folder's: another model, or a caller, may use it.
    stale = sorted({name for name in known if link_above(folder, name) is None} - set(new))
    gone = {*new, *stale}
    tops = {name.partition("/")[0] for name in gone}

    def is_other(entry: Path) -> bool:
        if entry.name in tops and entry.is_dir() and not entry.is_symlink():
            below = [path.relative_to(folder).as_posix() for path in entry.rglob("*") if not path.is_dir()]
            return not below or not gone.issuperset(below)
        return entry.name not in gone

    others = [entry.name for entry in folder.iterdir() if entry.name[0] != "." and is_other(entry)]
    return stale, sorted(others)


def is_of_a_model(name: str) -> bool:
    """Return whether a small file is known to belong to the model in its folder."""
    return name in OF_A_MODEL or OF_TEMPLATES.fullmatch(name) is not None


def link_above(folder: Path, name: str) -> Optional[Path]:
    """Return the link that the path of a name below a folder leads through; None where there is none."""
    path = folder
    for part in Path(name).parts[:-1]:
        path = path / part
        if path.is_symlink():
            return path
    return None


def files_below(folder: Path) -> Iterator[str]:
    """Yield the names of the files at the top of a folder, and of its further chat templates."""
    for entry in (*folder.iterdir(), *(folder / TEMPLATES).glob("*")):
        if entry.is_file() or entry.is_symlink():
            yield entry.relative_to(folder).as_posix()


def with_dtype(config: dict[str, Any], dtypes: Iterable[torch.dtype]) -> dict[str, Any]:
    """Return a configuration with the dtype that the weights have; unchanged where they have several.

    A setting without a value, but not that of a part, gets the first of several, as from `save_pretrained`.
    """
    every = list(dict.fromkeys(dtypes))
    names = [str(dtype).partition(".")[2] for dtype in every]
    changed = _with_dtype(config, names[0]) if len(names) == 1 else dict(config)
    first = next((name for name, dtype in zip(names, every) if is_plain(dtype)), None)
    changed.update((name, first) for name in DTYPE if name in changed and changed[name] is None)
    return changed


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    changed = dict(config)
    for name, value in config.items():
        # Parts of a model have configurations of their own.
        if name in DTYPE and value is not None:
            changed[name] = dtype
        elif isinstance(value, dict) and name.endswith("_config") and name != "quantization_config":
            changed[name] = _with_dtype(value, dtype)
    return changed
