"""The outcome in this process, as data and as text, and the warnings that go with it.

Only reports; must never change torch, and never claims more than was done.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from typing import NamedTuple

from torch_dcp_backport._version import __version__
from torch_dcp_backport.activation.gate import VARIABLE
from torch_dcp_backport.activation.table import FIXED_IN, RECORDS

WIDTH = 80  # of a terminal
INDENT = 15  # of the second column
# Each outcome in plain words.
MEANING = {
    "applied": "this process has the replacements",
    "pending": "replaced once torch's modules are imported",
    "not-needed": "torch has the fix, nothing is patched",
    "disabled": "not active, nothing is replaced",
    "unsupported": "this torch cannot be fixed: left alone",
    "conflict": "other code replaced them first: left alone",
}


class BackportWarning(UserWarning):
    """torch_dcp_backport could not do what it was imported for."""


class LateImportWarning(BackportWarning):
    """Torch's functions had been bound elsewhere before torch_dcp_backport was imported."""


class Status(NamedTuple):
    """The state of this process, immutable; `print(status())` explains it, `status().explain()` in full."""

    outcome: str  # one of MEANING
    reason: str
    switch: str  # off, auto or strict
    torch_version: str | None
    version: str = __version__  # of this package
    replaced: tuple[tuple[str, tuple[str, ...]], ...] = ()  # (module, names)
    records: tuple[str, ...] = ()  # files in patches/, without .md
    late_bindings: tuple[str, ...] = ()  # names that had torch's object and were given ours
    out_of_reach: tuple[str, ...] = ()  # places that had torch's object and still have it
    overridden: tuple[str, ...] = ()  # "module.name" that no longer is what we put there
    left_out: tuple[str, ...] = ()  # "module.name (replaced by ...)" that other code had replaced before

    @property
    def fingerprint(self) -> str:
        """A short text for launchers to compare: equal on ranks with the same outcome and replacements."""
        from hashlib import sha256

        facts = (self.version, self.torch_version, self.outcome, self.replaced, self.records)
        return sha256(repr(facts).encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, object]:
        """Return the state as plain data, for JSON."""
        data: dict[str, object] = {name: getattr(self, name) for name in self._fields}
        data["replaced"] = {module: list(names) for module, names in self.replaced}
        for name in ("records", "late_bindings", "out_of_reach", "overridden", "left_out"):
            data[name] = list(getattr(self, name))
        data["upstream"] = {record: list(_upstream(record)[1]) for record in self.records}
        data["fingerprint"] = self.fingerprint
        return data

    def __str__(self) -> str:
        return self._text(verbose=False)

    def explain(self) -> str:
        """Return the state as text, with every replaced name and every defect.

        Example:
            >>> import torch_dcp_backport
            >>> text = torch_dcp_backport.status().explain()
            >>> text.startswith("torch_dcp_backport ")
            True
        """
        return self._text(verbose=True)

    def _text(self, *, verbose: bool) -> str:
        torch = self.torch_version or ("not looked at" if self.switch == "off" else "unknown")
        head = f"torch_dcp_backport {self.version}: {self.outcome} ({MEANING[self.outcome]})"
        lines = [*_wrapped(head, ""), *row("torch", torch), *row("why", self.reason)]
        lines += self._replaced() if verbose else self._counts()
        torchs = tuple(name for name in self.late_bindings if name.startswith("torch."))
        if torchs and verbose:
            lines += row("also in", "torch's own modules that had them:", torchs)
        others = tuple(name for name in self.late_bindings if name not in torchs)
        if others:
            lines += row("bound early", "and given the replacement afterwards:", others)
        if self.out_of_reach:
            lines += row("not reached", "bound early, and still torch's own:", self.out_of_reach)
        if self.left_out:
            lines += row("left out", "replaced by other code before, and left to it:", self.left_out)
        if self.overridden:
            lines += row("lost", "replaced again since by other code:", self.overridden)
        hint = "unset it to switch on" if self.switch == "off" else "=off switches off in a new process"
        final = "not final: pending" if self.outcome == "pending" else "compare between ranks"
        return "\n".join(
            [
                *lines,
                *row("switch", f"{VARIABLE}={self.switch}; {hint}"),
                *row("uninstall", UNINSTALL),
                *row("fingerprint", f"{self.fingerprint} ({final})"),
            ]
        )

    def _counts(self) -> list[str]:
        names = sum(len(names) for _, names in self.replaced)
        if not names:
            return []
        what = f"{names} names in {len(self.replaced)} modules, for {len(self.records)} defects of torch"
        return row("replaced", f"{what} (`status --verbose` lists them)")

    def _replaced(self) -> list[str]:
        lines = []
        for module, names in self.replaced:
            lines += row("replaced", f"{len(names)} names in {module}:", names)
        if self.records:
            lines += row("because of", "these defects of torch:")
            for record in self.records:
                about, links = _upstream(record)
                lines += _wrapped(f"{record[:4]} {about}", " " * INDENT, " " * 5)
                lines += [f"{'':{INDENT + 5}}{link}" for link in links]
        return lines


UNINSTALL = (
    f"with torch >= {FIXED_IN[0]}.{FIXED_IN[1]}, unless your program imports a library of this package"
)


def row(label: str, text: str, names: Iterable[str] = ()) -> list[str]:
    """Return the lines of a label and its text, within WIDTH where words allow it.

    Args:
        label: at most 12 characters.
        text: a sentence or a value.
        names: the line below the text, separated by commas.
    """
    lines = _wrapped(f"  {label:<{INDENT - 2}}{text}", "", " " * INDENT)
    return lines + (_wrapped(", ".join(names), " " * INDENT) if names else [])


def _wrapped(text: str, indent: str, more: str = "") -> list[str]:
    import textwrap  # no import of the package needs it

    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + more,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _upstream(record: str) -> tuple[str, tuple[str, ...]]:
    """Return the subject of a record, and its links."""
    return RECORDS.get(record, (record, ()))


def warn(message: str, category: type[BackportWarning]) -> None:
    """Warn at the line of the first caller outside this package and the import machinery."""
    ours = ("torch_dcp_backport", "wrapt", "importlib", "_frozen_importlib", "_frozen_importlib_external")
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ours:
        frame = frame.f_back
    scope = frame.f_globals
    warnings.warn_explicit(
        f"torch_dcp_backport: {message}",
        category,
        filename=frame.f_code.co_filename,
        lineno=frame.f_lineno,
        module=scope.get("__name__", "<unknown>"),
        registry=scope.setdefault("__warningregistry__", {}),
    )
