"""Settings of OmegaConf as plain Python: a checkpoint must load where OmegaConf is not installed.

Must never import OmegaConf: its values are there only where the program has it loaded.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Any


def resolved(value: Any, name: str = "the configuration") -> Any:
    """Return a value with dicts and lists in the place of OmegaConf's, resolved; all else is as it was.

    Args:
        value: any value; dicts, lists and tuples are looked into.
        name: what the value is, for the error.

    Raises:
        ValueError: a setting is "???", or refers to one that is not there.

    Example:
        >>> from torch_dcp_backport.dist_checkpointing import resolved
        >>> resolved({"betas": (0.9, 0.95)})
        {'betas': (0.9, 0.95)}
    """
    omegaconf: Any = sys.modules.get("omegaconf")
    return value if omegaconf is None else _resolved(value, name, omegaconf)


def _resolved(value: Any, name: str, omegaconf: Any) -> Any:
    if omegaconf.OmegaConf.is_config(value):
        try:
            return omegaconf.OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        except omegaconf.errors.OmegaConfBaseException as error:
            key = getattr(error, "full_key", None)
            text = str(error).splitlines()[0]
            raise ValueError(f"{name}{f'.{key}' if key else ''} has no value: {text}") from error
    if type(value) in (dict, OrderedDict):
        parts = {key: _resolved(part, f"{name}.{key}", omegaconf) for key, part in value.items()}
        return value if all(parts[key] is value[key] for key in parts) else type(value)(parts)
    if type(value) in (list, tuple):
        items = [_resolved(part, name, omegaconf) for part in value]
        return value if all(map(_is, items, value)) else type(value)(items)
    return value


def _is(value: object, other: object) -> bool:
    return value is other
