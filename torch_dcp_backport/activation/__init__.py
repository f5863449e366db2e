"""Whether and when this process gets the replacements: one decision, made once, told truthfully.

Knows nothing of tensors. Must never import torch, wrapt or our replacements where they are not needed.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from torch_dcp_backport.activation import gate
from torch_dcp_backport.activation.status import BackportWarning, Status, tell
from torch_dcp_backport.activation.table import TABLE

if TYPE_CHECKING:
    from torch_dcp_backport.activation.importer import Installer

# What happened last in this process: an installer once the gate let us through, a status where it did not.
# importlib.reload() executes this again, and must not forget it.
_installer: Installer | None = globals().get("_installer")
_outcome: Status | None = globals().get("_outcome")
_lock = threading.Lock()
_told: set[str] = globals().get("_told", set())


def activate() -> Status:
    """Do what `import torch_dcp_backport` does; where that has been done, change nothing.

    ValueError for an unknown TORCH_DCP_BACKPORT; RuntimeError when strict and it cannot be applied.
    """
    installer = _pending_or_applied() or _enter_gate()
    if installer is not None and (installer.outcome == "pending" or installer.reloaded()):
        installer.install()
    return current()


def deactivate() -> Status:
    """Torch's own objects back in torch's modules, hooks removed. Modules that bound ours since keep ours."""
    global _installer, _outcome
    with _lock:
        installer = _pending_or_applied()
        if installer is None:  # nothing was done, so there is nothing to take back
            return current()
        _installer = None
        decision = installer.decision
        _outcome = Status("disabled", "deactivate() was called", decision.switch, decision.torch_version)
    from torch_dcp_backport.activation import compiled

    compiled.no_more()
    lost = installer.remove()
    if lost:
        reason = f"deactivate() was called; left alone, as somebody else replaced them: {', '.join(lost)}"
        _outcome = _outcome._replace(reason=reason)
    return current()


def current() -> Status:
    """What is so in this process now. Changes nothing."""
    installer, outcome = _installer, _outcome
    if installer is not None:
        return installer.status()
    return outcome or Status("disabled", "activate() was not called yet", "auto", None)


def _pending_or_applied() -> Installer | None:
    installer = _installer
    return installer if installer is not None and installer.outcome in ("pending", "applied") else None


def _enter_gate() -> Installer | None:
    """A new installer where this process needs one."""
    global _installer, _outcome
    decision = gate.decide(gate.read_facts(os.environ))
    if decision.outcome == "pending":
        from torch_dcp_backport.activation import compiled
        from torch_dcp_backport.activation.importer import Installer

        compiled.pass_us_by()
        with _lock:  # of two threads the second takes the first one's
            _installer = _pending_or_applied() or Installer(TABLE, decision)
            return _installer
    with _lock:
        _installer = None
        _outcome = Status(decision.outcome, decision.reason, decision.switch, decision.torch_version)
    if decision.outcome == "unsupported":
        if decision.switch == "strict":
            raise RuntimeError(f"torch_dcp_backport: {decision.reason}")
        if decision.reason not in _told:
            _told.add(decision.reason)
            tell(decision.reason, BackportWarning)
    return None
