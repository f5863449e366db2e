"""The small files that go with weights: config.json, a tokenizer's, and the like. Reads them as a whole."""

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
    """The contents of config.json, from a mapping or from a configuration object of transformers.

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
    """Name -> content of the small files of a model's folder; of a configuration config.json alone.

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
    """config.json with the dtype that the weights have; as it is where they have several."""
    config, found = json.loads(text), list(dict.fromkeys(str(dtype).partition(".")[2] for dtype in dtypes))
    # transformers called it torch_dtype up to 4.55.
    names = [name for name in ("dtype", "torch_dtype") if config.get(name) is not None]
    if len(found) != 1 or all([config[name]] == found for name in names):
        return text
    config.update(dict.fromkeys(names, found[0]))
    return json.dumps(config, indent=2).encode()
