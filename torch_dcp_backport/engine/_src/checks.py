"""The values that settings may have: flags, whole numbers, numbers within limits.

Text that says a number is read as a number, since YAML's 1e-5 is text; nothing else is guessed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import logging
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional

import torch

from torch_dcp_backport import compat
from torch_dcp_backport.transfer import warn_on_first

logger = logging.getLogger("torch_dcp_backport.engine")

#: Takes a setting's name and value, and returns the value to use, or raises ValueError.
Read = Callable[[str, Any], Any]
READ = "read"


class Settings:
    """What all settings have beside their fields."""

    #: What is asked for and has no effect; an engine says it.
    no_effect: tuple[str, ...] = ()


def note(config: Settings, *texts: str) -> None:
    """Add to what has no effect; the settings are frozen."""
    object.__setattr__(config, "no_effect", (*config.no_effect, *texts))


def setting(default: Any, read: Read) -> Any:
    """Return a dataclass field whose values are checked by `read`."""
    return dataclasses.field(default=default, metadata={READ: read})


def check_fields(config: Any) -> None:
    """Check the fields of a frozen dataclass that were made by `setting`.

    Raises:
        ValueError: a value that cannot be; the text has name and value.
    """
    for entry in dataclasses.fields(config):
        if READ in entry.metadata:
            value = entry.metadata[READ](entry.name, getattr(config, entry.name))
            object.__setattr__(config, entry.name, value)


def flag(name: str, value: Any) -> bool:
    """Read True or False; of text "false" would be true."""
    is_numpys = type(value).__module__ == "numpy" and type(value).__name__ in ("bool_", "bool")
    if not isinstance(value, bool) and not is_numpys:
        raise ValueError(f"{name}={value!r}: expected True or False")
    return bool(value)


def optional(read: Read) -> Read:
    """Return a reader that also takes None."""

    def checked(name: str, value: Any) -> Any:
        return None if value is None else read(name, value)

    return checked


def nothing(instead: str) -> Read:
    """Return a reader of a setting that is not offered, which may ask for nothing.

    Args:
        instead: the setting that is offered.
    """

    def checked(name: str, value: Any) -> Any:
        if value:
            raise ValueError(f"{name} is not offered: got {value!r}; {instead} is")
        return value

    return checked


def mapping(readers: Mapping[str, Read], others: Iterable[str]) -> Read:
    """Return a reader of settings within a setting; None is none of them.

    Args:
        readers: key -> reader of its value.
        others: keys that have no effect.
    """
    idle = frozenset(others)

    def checked(name: str, value: Any) -> dict[str, Any]:
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{name}={value!r}: expected a mapping")
        given = dict(value or {})
        check_known(name, map(str, given), (*readers, *sorted(idle)))
        return {
            key: readers[key](f"{name}.{key}", part) if key in readers else part
            for key, part in given.items()
        }

    return checked


def check_known(name: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Check the names of settings within a setting.

    Raises:
        ValueError: names that are not known; the text has the nearest known one of the first.
    """
    unknown = sorted(set(given) - set(known))
    if unknown:
        close = difflib.get_close_matches(unknown[0], known, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"no setting of {name}: {', '.join(unknown)}; there are {', '.join(known)}{hint}")


def say(text: str) -> None:
    """Log a warning on the first of all ranks alone, once in its process."""
    warn_on_first(logger, text)


@contextlib.contextmanager
def cleaning_up(error: Optional[BaseException], outcome: str) -> Iterator[None]:
    """Return a context for work after an exception, or without one: the exception stays what is raised.

    An error of the work itself is logged, and noted on the exception. Without an exception it is raised.

    Args:
        error: the exception; None where there is none.
        outcome: what such an error leaves behind, and what to do.
    """
    try:
        yield
    except Exception as second:
        if error is None:
            raise
        text = f"{outcome} ({type(second).__name__}: {second})"
        compat.add_note(error, text)
        logger.error("after %s: %s", type(error).__name__, text)


def whole(least: Optional[int] = None) -> Read:
    """Return a reader of whole numbers."""

    def checked(name: str, value: Any) -> int:
        found = _number(value)
        if found is None or not found.is_integer() or (least is not None and found < least):
            limit = "" if least is None else f" of at least {least}"
            raise ValueError(f"{name}={value!r}: expected a whole number{limit}")
        with contextlib.suppress(ValueError):
            # Of more digits than a float has.
            return int(value) if isinstance(value, (numbers.Integral, str)) else int(found)
        return int(found)

    return checked


def number(
    least: float = -math.inf, most: float = math.inf, *, above: float = -math.inf, below: float = math.inf
) -> Read:
    """Return a reader of finite numbers; a tensor of a single number stays a tensor.

    Args:
        least, most, above, below: limits, of which the last two are no value themselves.
    """

    def checked(name: str, value: Any) -> Any:
        found = _number(value)
        if (
            found is None
            or not math.isfinite(found)
            or not (least <= found <= most)
            or not (above < found < below)
        ):
            limits = [
                text.format(limit)
                for text, limit in (
                    ("at least {}", least),
                    ("at most {}", most),
                    ("above {}", above),
                    ("below {}", below),
                )
                if math.isfinite(limit)
            ]
            raise ValueError(f"{name}={value!r}: expected a number {' and '.join(limits)}".rstrip())
        return value if isinstance(value, torch.Tensor) else found

    return checked


def clip(name: str, value: Any) -> float:
    """Read a largest norm of gradients: with 0 nothing would be trained, and below 0 the loss would grow."""
    found = _number(value)
    if found is None or not found > 0:
        raise ValueError(f"{name}={value!r}: expected a number above 0, or None to clip nothing")
    return found


def _number(value: Any) -> Optional[float]:
    """Return a value as a number, also from text; None if it is not a number."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if isinstance(value, torch.Tensor):
        is_number = value.numel() == 1 and value.dtype != torch.bool
    if not is_number and not isinstance(value, str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
