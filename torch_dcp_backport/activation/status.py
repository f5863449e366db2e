"""The outcome in this process, as data and as text, and the warnings that go with it.

Only reports; must never change torch, and never claims more than was done.
"""

from __future__ import annotations

import sys
import warnings
from typing import NamedTuple

from torch_dcp_backport._version import __version__
from torch_dcp_backport.activation.gate import VARIABLE
from torch_dcp_backport.activation.table import FIXED_IN, RECORDS

# Each outcome in plain words.
MEANING = {
    "applied": "torch's functions are replaced in this process",
    "pending": "nothing is replaced yet; it will be once FSDP or torch.distributed.checkpoint is imported",
    "not-needed": "this torch has the fix, nothing was touched",
    "disabled": "switched off, nothing is replaced",
    "unsupported": "this torch cannot be fixed here, nothing was touched",
    "conflict": "somebody else got to these functions first, nothing was touched",
}


class BackportWarning(UserWarning):
    """torch_dcp_backport could not do what it was imported for."""


class LateImportWarning(BackportWarning):
    """Torch's functions had been bound elsewhere before torch_dcp_backport was imported."""


class Status(NamedTuple):
    """The state of this process, immutable; `print(status())` explains it."""

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
        for name in ("records", "late_bindings", "out_of_reach", "overridden"):
            data[name] = list(getattr(self, name))
        data["upstream"] = {record: list(_upstream(record)[1]) for record in self.records}
        data["fingerprint"] = self.fingerprint
        return data

    def __str__(self) -> str:
        torch = self.torch_version or ("not looked at" if self.switch == "off" else "unknown")
        lines = [
            f"torch_dcp_backport {self.version}: {self.outcome} ({MEANING[self.outcome]})",
            f"  torch        {torch}",
            f"  why          {self.reason}",
        ]
        for module, names in self.replaced:
            lines += [f"  replaced     {len(names)} names in {module}:", *_wrapped(names)]
        if self.records:
            lines += ["  because of   these defects of torch:", *map(_record, self.records)]
        torchs = tuple(name for name in self.late_bindings if name.startswith("torch."))
        if torchs:
            lines += ["  also in      torch's own modules that had them:", *_wrapped(torchs)]
        others = tuple(name for name in self.late_bindings if name not in torchs)
        if others:
            lines += ["  bound early  and given the replacement afterwards:", *_wrapped(others)]
        if self.out_of_reach:
            lines += ["  not reached  bound early, and still torch's own:", *_wrapped(self.out_of_reach)]
        if self.overridden:
            lines += ["  lost         replaced again since by somebody else:", *_wrapped(self.overridden)]
        hint = (
            "unset it to switch on" if self.switch == "off" else "start the process with =off to switch off"
        )
        final = "not final: pending" if self.outcome == "pending" else "compare between ranks"
        lines += [
            f"  switch       {VARIABLE}={self.switch}; {hint}",
            f"  delete it    with torch >= {FIXED_IN[0]}.{FIXED_IN[1]}: remove the import and uninstall",
            f"  fingerprint  {self.fingerprint} ({final})",
        ]
        return "\n".join(lines)


def _upstream(record: str) -> tuple[str, tuple[str, ...]]:
    """Return the subject of a record, and its links."""
    return RECORDS.get(record, (record, ()))


def _record(record: str) -> str:
    about, links = _upstream(record)
    return f"{'':15}{record[:4]} {about}" + "".join(f"\n{'':20}{link}" for link in links)


def _wrapped(names: tuple[str, ...], width: int = 96) -> list[str]:
    """Return names in lines, indented to the text column."""
    lines = [""]
    for name in names:
        if lines[-1] and len(lines[-1]) + len(name) + 3 > width:
            lines.append("")
        lines[-1] += f"{name}, "
    return [" " * 15 + line.rstrip() for line in lines[:-1]] + [" " * 15 + lines[-1].rstrip(", ")]


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
