"""The decision whether and when this process gets the replacements: made once, reported truthfully.

Knows nothing of tensors. Must never import torch or our replacements where they are not needed.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from torch_dcp_backport.activation import finder, gate
from torch_dcp_backport.activation.status import BackportWarning, Status, warn
from torch_dcp_backport.activation.table import TABLE

if TYPE_CHECKING:
    from torch_dcp_backport.activation.importer import Installer

# The process's finder has the installer, once the gate let us through; else this is what happened.
# importlib.reload() executes this again, and must not forget it.
_outcome: Status | None = globals().get("_outcome")
_lock = threading.Lock()
#: Reasons that were warned about.
_reported: set[str] = globals().get("_reported", set())


def activate() -> Status:
    """Do what `import torch_dcp_backport` does; where that has been done, change nothing.

    Raises:
        ValueError: an unknown TORCH_DCP_BACKPORT.
        RuntimeError: strict, and it cannot be applied.
    """
    installer = _pending_or_applied() or _enter_gate()
    if installer is not None and (installer.outcome == "pending" or installer.reloaded()):
        installer.install()
    return current()


def deactivate() -> Status:
    """Put torch's own objects back and remove the hooks. Modules that bound ours since keep ours."""
    global _outcome
    with _lock:
        installer = _pending_or_applied()
        if installer is None:  # nothing was done, so there is nothing to take back
            return current()
        finder.process().installer = None
        decision = installer.decision
        _outcome = Status("disabled", "deactivate() was called", decision.switch, decision.torch_version)
    from torch_dcp_backport.activation import compiled

    compiled.stop()
    lost = installer.remove()
    if lost:
        reason = f"deactivate() was called; left alone, as somebody else replaced them: {', '.join(lost)}"
        _outcome = _outcome._replace(reason=reason)
    return current()


def current() -> Status:
    """Return the state of this process now. Changes nothing."""
    installer = _installer()
    if installer is not None:
        return installer.status()
    return _outcome or Status("disabled", "activate() was not called yet", "auto", None)


def _installer() -> Installer | None:
    """Return this process's installer, perhaps of a copy of this package deleted from sys.modules."""
    here = finder.installed()
    return here.installer if here is not None else None


def _pending_or_applied() -> Installer | None:
    installer = _installer()
    return installer if installer is not None and installer.outcome in ("pending", "applied") else None


def _enter_gate() -> Installer | None:
    """Return a new installer if this process needs the replacements."""
    global _outcome
    decision = gate.decide(gate.read_facts(os.environ))
    if decision.outcome == "pending":
        from torch_dcp_backport.activation import compiled
        from torch_dcp_backport.activation.importer import Installer

        compiled.skip_own_code()
        with _lock:  # of two threads the second takes the installer of the first
            installer = _pending_or_applied() or Installer(TABLE, decision)
            finder.process().installer = installer
            return installer
    with _lock:
        here = finder.installed()
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
