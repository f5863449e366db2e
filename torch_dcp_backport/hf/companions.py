"""The small files beside weights (config.json, a tokenizer's, ...), read in full. Must never read weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from torch_dcp_backport.hf.source import CONFIG

NAMES = re.compile(r"(?!.*\.index\.json$).*\.(json|txt|model|jinja|tiktoken|py)")


def as_config(config: Any) -> dict[str, Any]:
    """Return the contents of config.json, from a mapping or from a configuration object of transformers.

    Raises:
        TypeError: neither of them.
    """
    if isinstance(config, Mapping):
        return dict(config)
    to_dict = getattr(config, "to_dict", None)
    if not callable(to_dict):
        raise TypeError(f"a {type(config).__name__} is neither a mapping nor a configuration of transformers")
    return dict(to_dict())


def companions_of(like: Any) -> dict[str, bytes]:
    """Return name -> content of the small files of a model's folder; of a configuration config.json alone.

    Raises:
        OSError: the folder is not there, or has no config.json.
        TypeError: neither a folder nor a configuration.
        ValueError: config.json is not JSON.
    """
    if not isinstance(like, (str, Path)):
        return {CONFIG: json.dumps(as_config(like), indent=2, sort_keys=True, default=str).encode()}
    files = {
        path.name: path.read_bytes()
        for path in sorted(Path(like).iterdir())
        if path.is_file() and NAMES.fullmatch(path.name)
    }
    if CONFIG not in files:
        raise FileNotFoundError(f"{like} has no {CONFIG}")
    as_config(json.loads(files[CONFIG]))
    return files


def with_dtype(text: bytes, dtypes: Iterable[torch.dtype]) -> bytes:
    """Return config.json with the dtype that the weights have; unchanged where they have several."""
    config, saved = json.loads(text), list(dict.fromkeys(str(dtype).partition(".")[2] for dtype in dtypes))
    # transformers called it torch_dtype up to 4.55.
    names = [name for name in ("dtype", "torch_dtype") if config.get(name) is not None]
    if len(saved) != 1 or all([config[name]] == saved for name in names):
        return text
    config.update(dict.fromkeys(names, saved[0]))
    return json.dumps(config, indent=2).encode()
