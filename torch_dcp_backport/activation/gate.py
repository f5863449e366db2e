"""The decision whether this process needs the backport: by torch's version, its files and the switch.

Must never import torch, and must never change anything: facts in, Decision out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch_dcp_backport.activation.needs import require
from torch_dcp_backport.activation.table import FIRST, FIXED_IN, STATE_DICT

VARIABLE = "TORCH_DCP_BACKPORT"
SWITCHES = ("off", "auto", "strict")

# The results of the probe of torch's files.
FIXED, AFFECTED, UNKNOWN = "fixed", "affected", "unknown"
# The helper in torch that has another parameter since the fix: https://github.com/pytorch/pytorch/pull/142845
HELPER, PARAMETER = "_broadcast_state_dict", "cpu_offload"


class Facts(NamedTuple):
    """The facts behind the decision."""

    switch: str  # off, auto or strict
    version: str | None  # torch's version; None where it could not be read
    folder: str | None  # where torch lies; None where there is no torch
    probe: Callable[[], str]  # looks at torch's files; called only for releases that may need the backport


class Decision(NamedTuple):
    """`pending` here means: replace, as soon as torch's modules are there."""

    outcome: str
    reason: str
    switch: str
    torch_version: str | None = None
    release: tuple[int, int] = (0, 0)
    preview: bool = False  # a pre-release or vendor build: newer names may be missing


def read_switch(environ: Mapping[str, str]) -> str:
    value = environ.get(VARIABLE, "").strip().lower() or "auto"
    if value not in SWITCHES:
        raise ValueError(
            f"{VARIABLE}={environ[VARIABLE]!r} is not one of {', '.join(SWITCHES)}: auto (or unset) patches "
            "where torch needs it, strict raises where that is not possible"
        )
    return value


def read_facts(environ: Mapping[str, str]) -> Facts:
    switch = read_switch(environ)
    if switch == "off":  # then not even a look at torch
        return Facts(switch, None, None, lambda: UNKNOWN)
    folder = _torch_folder()
    return Facts(switch, _torch_version(folder), folder, lambda: _probe(folder))


def decide(facts: Facts) -> Decision:
    """Return the outcome for these facts, with a reason that a person can act on.

    Raises:
        ImportError: there is a version to compare, and no packaging that can.
    """
    if facts.switch == "off":
        return Decision("disabled", f"{VARIABLE}=off", "off")
    fixed_in = _dotted(FIXED_IN)
    unsupported = (
        f"torch was left as it is. Install torch >= {_dotted(FIRST)}, or better >= {fixed_in}, which needs "
        f"no backport; {VARIABLE}=off silences this."
    )
    if facts.version is None:
        if facts.folder is None:
            why = "no torch was found in this environment"
        else:
            why = f"torch lies in {facts.folder}, but its version cannot be read from there"
        return Decision("unsupported", f"{why}; {unsupported}", facts.switch)

    text = facts.version
    parsed = _parse(text)
    if parsed is None:
        why = f"torch's version {text!r} is not one that can be compared"
        return Decision("unsupported", f"{why}; {unsupported}", facts.switch, text)
    release, preview = parsed

    def decision(outcome: str, reason: str) -> Decision:
        return Decision(outcome, reason, facts.switch, text, release, preview)

    if release < FIRST:
        return decision("unsupported", f"torch {text} is older than {_dotted(FIRST)}; {unsupported}")
    if release > FIXED_IN or (release == FIXED_IN and not preview):
        return decision("not-needed", f"torch {text} has the fix")
    needed = f"torch {text} lacks what torch {fixed_in} fixed in {STATE_DICT}"
    # Nightly and vendor builds are cut on any day: some of 2.7.0a0 lack the fix, some of 2.6.0a0 may have it.
    # And a vendor may have taken the fix into a build with a plain version (2.6.0+fb).
    probed = facts.probe()
    if probed == FIXED:
        build = "a pre-release or vendor build" if preview else "a build of a vendor"
        return decision("not-needed", f"torch {text} ({build}) has the fix in its code")
    if not preview:
        return decision("pending", needed)
    if probed == AFFECTED:
        return decision("pending", f"{needed} (a pre-release or vendor build, decided by its code)")
    return decision("unsupported", f"torch {text} (a pre-release or vendor build) is unknown; {unsupported}")


def _parse(text: str) -> tuple[tuple[int, int], bool] | None:
    """Return the release, and whether it is a pre-release; None for a text that PEP 440 does not know."""
    require("packaging")
    from packaging.version import InvalidVersion, Version

    try:
        version = Version(text)
    except InvalidVersion:
        return None
    return (version.major, version.minor), version.is_prerelease


def _dotted(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"


def _torch_folder() -> str | None:
    """Return the folder that torch lies in, or would be imported from."""
    if "torch" in sys.modules:
        # A half-initialised torch, or a stub in its place, has no __path__.
        paths = _of_torch("__path__")
    else:
        from importlib.util import find_spec

        try:
            spec = find_spec("torch")
        except ImportError:  # some finder forbids torch
            spec = None
        paths = spec.submodule_search_locations if spec is not None else None
    for path in paths or ():
        return str(path)
    return None


def _of_torch(name: str) -> Any:
    """Return an attribute of the torch that is loaded; LazyLoader's is not executed for it."""
    torch = sys.modules.get("torch")
    if type(torch).__name__ == "_LazyModule":
        return object.__getattribute__(torch, "__dict__").get(name)
    return getattr(torch, name, None)


def _torch_version(folder: str | None) -> str | None:
    # The loaded torch wins over the files on disk.
    loaded = _of_torch("__version__")
    if isinstance(loaded, str):
        return str.__str__(loaded)  # torch has a subclass of str there
    if folder is None:
        return None
    for line in _read(folder, "version.py").splitlines():
        if line.startswith("__version__"):
            value = line.partition("=")[2].partition("#")[0].strip()
            if len(value) > 2 and value[0] == value[-1] and value[0] in "'\"":
                return value[1:-1]
    return None


def _probe(folder: str | None) -> str:
    """Return FIXED if torch's broadcast helper has the fix's parameter, else AFFECTED."""
    text = _read(folder or "", "distributed", "_state_dict_utils.py")
    signature, end, _ = text.partition(f"\ndef {HELPER}(")[2].partition(")")
    if end and "(" not in signature and PARAMETER not in signature:
        return AFFECTED
    import ast  # 5 ms, and rarely needed

    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return UNKNOWN
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == HELPER:
            names = {argument.arg for argument in node.args.args + node.args.kwonlyargs}
            return FIXED if PARAMETER in names else AFFECTED
    return UNKNOWN


def _read(*parts: str) -> str:
    try:
        with open(os.path.join(*parts), encoding="utf-8") as handle:
            return handle.read()
    except (OSError, UnicodeDecodeError):
        return ""
