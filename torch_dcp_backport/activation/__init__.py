"""The decision whether and when this process gets the replacements: made once, reported truthfully.

Knows nothing of tensors. Must never import torch or our replacements where they are not needed.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, cast

from torch_dcp_backport.activation import gate
from torch_dcp_backport.activation.needs import require
from torch_dcp_backport.activation.status import BackportWarning, Status, warn

if TYPE_CHECKING:
    from torch_dcp_backport.activation.hooks import Hooks
    from torch_dcp_backport.activation.importer import Installer
else:
    # Tools that look annotations up at run time (beartype) need the names. Their modules import wrapt.
    Hooks = Installer = object

# The process's hooks have the installer, once the gate let us through; else this is what happened.
# importlib.reload() executes this again, and must not forget it.
_outcome: Status | None = globals().get("_outcome")
# Also where sys.meta_path was put back to what it had been.
_own: Hooks | None = globals().get("_own")
_lock = threading.Lock()
#: Reasons that were warned about.
_reported: set[str] = globals().get("_reported", set())


def activate() -> Status:
    """Do what `import torch_dcp_backport` does; where that has been done, change nothing.

    Raises:
        ValueError: an unknown TORCH_DCP_BACKPORT.
        ImportError: packaging or wrapt, where it is needed, is missing or too old.
        RuntimeError: strict, and it cannot be applied.
    """
    installer = _pending_or_applied() or _enter_gate()
    if installer is not None and installer.has_work():
        installer.install()
    return current()


def deactivate() -> Status:
    """Put torch's own objects back and remove the hooks. Modules that bound ours since keep ours."""
    global _outcome
    with _lock:
        installer = _pending_or_applied()
        if installer is None:  # nothing was done, so there is nothing to take back
            return current()
        here = _hooks()
        assert here is not None
        here.installer = None
        decision = installer.decision
        _outcome = Status("disabled", "deactivate() was called", decision.switch, decision.torch_version)
    lost = installer.remove()
    if lost:
        reason = f"deactivate() was called; left alone, as other code replaced them: {', '.join(lost)}"
        _outcome = _outcome._replace(reason=reason)
    return current()


def current() -> Status:
    """Return the state of this process now. Changes nothing."""
    installer = _installer()
    if installer is not None:
        return installer.status()
    return _outcome or Status("disabled", "activate() was not called yet", "auto", None)


def _hooks() -> Hooks | None:
    """Return this process's hooks, perhaps of a copy of this package deleted from sys.modules."""
    for finder in sys.meta_path:
        if type(finder).__module__ == f"{__name__}.hooks":
            return cast("Hooks", finder)
    return _own


def _installer() -> Installer | None:
    here = _hooks()
    return cast("Installer | None", here.installer) if here is not None else None


def _pending_or_applied() -> Installer | None:
    installer = _installer()
    return installer if installer is not None and installer.outcome in ("pending", "applied") else None


def _enter_gate() -> Installer | None:
    """Return a new installer if this process needs the replacements."""
    global _outcome, _own
    decision = gate.decide(gate.read_facts(os.environ))
    if decision.outcome == "pending":
        require("wrapt")
        from torch_dcp_backport.activation.hooks import Hooks
        from torch_dcp_backport.activation.importer import Installer

        with _lock:  # of two threads the second takes the installer of the first
            _own = _hooks() or Hooks()
            _own.installer = installer = _pending_or_applied() or Installer(decision, _own)
            return installer
    with _lock:
        here = _hooks()
        if here is not None:
            here.installer = None
        _outcome = Status(decision.outcome, decision.reason, decision.switch, decision.torch_version)
    if decision.outcome == "unsupported":
        if decision.switch == "strict":
            raise RuntimeError(f"torch_dcp_backport: {decision.reason}")
        if decision.reason not in _reported:
            _reported.add(decision.reason)
            warn(decision.reason, BackportWarning)
    return None
