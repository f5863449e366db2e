"""The time to replace: at once if torch's modules are loaded, else as soon as they are. And the way back.

Must never import torch where nothing has, act on a half-executed module, or run other code than ours while
holding a lock.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from importlib import _bootstrap, import_module

from torch_dcp_backport.activation import replace
from torch_dcp_backport.activation.bindings import OWN, Early, find_early
from torch_dcp_backport.activation.gate import Decision
from torch_dcp_backport.activation.hooks import Hooks, when_ended
from torch_dcp_backport.activation.replace import Refused, Replacement
from torch_dcp_backport.activation.status import BackportWarning, LateImportWarning, Status, warn
from torch_dcp_backport.activation.table import CHECKPOINT, FSDP, TABLE

# All is replaced at once, when checkpoint.state_dict has been executed. Torch's other modules use the helpers
# without it (dcp.save, dcp.load, FSDP), so the end of each entrance to them imports it.
HOOKED = (*TABLE.entrances, TABLE.trigger)
RULES = "torch._dynamo.trace_rules"
# Modules whose imports can wait for one another.
UNDER_WAY = ("torch.distributed", f"{OWN}.")
# Another thread waits for what this one has, and has what this one wants: Python gives up one of the imports.
DEADLOCK: tuple[type[Exception], ...] = (getattr(_bootstrap, "_DeadlockError", Refused),)


class Installer:
    """An attempt to replace the table's targets; `pending` until it is `applied`, refused or removed.

    Outcomes, and the methods that lead from one to the next:

        pending   _advance: torch's import is not at its end         -> pending, until the hook at that end
        pending   _advance: another thread's import waits for ours   -> pending, _advance_later
        pending   _attempt, _apply: all names are checked, written   -> applied
        pending   _attempt, _refuse: a check or a write fails       -> unsupported, conflict; torch unchanged
        applied   reloaded: torch's module was executed again        -> pending, with the next install()
        any       remove                                             -> over: torch's names are back
    """

    def __init__(self, decision: Decision, hooks: Hooks) -> None:
        self.decision = decision
        self._hooks = hooks
        self.outcome = "pending"
        self._strict = decision.switch == "strict"
        self.reason = f"{decision.reason}; waiting for one of {', '.join(HOOKED)} to be imported"
        self._late = False  # torch's modules were there before the hooks, open to early bindings
        self._steps: list[Replacement] = []  # a second one after a reload of torch's module
        self._lock = threading.Lock()  # held for the few writes only
        self._busy = False  # a thread is replacing
        self._over = False  # removed, or refused: nothing more is tried

    def install(self) -> None:
        """Replace now or hook the imports; again does no harm. Raise RuntimeError if strict and refused."""
        if self.reloaded() or self.can_complete():
            self.outcome = "pending"
        self._late = self._late or any(module in sys.modules for module in TABLE.modules)
        self._hooks.installer = self
        if RULES in sys.modules:
            _skip_own_code()
        else:
            self._hooks.hook(RULES, _skip_own_code)
        for name in HOOKED:
            self._hooks.hook(name, self._advance)
            # Another thread may be importing it right now, too early to have seen the hook.
            _wait_for_import(name)
            if _is_lazy(name):
                self._hooks.when_lazy(name)
        self._advance()

    def remove(self) -> list[str]:
        """Take back the hooks or the replacement; return the names that hold neither ours nor torch's."""
        with self._lock:
            self._over = True
            lost = self._steps[-1].overridden() if self._steps else []
            for step in reversed(self._steps):
                step.undo()
        self._unhook(*HOOKED, RULES)
        return lost

    def status(self) -> Status:
        decision, steps = self.decision, self._steps
        status = Status(self.outcome, self.reason, decision.switch, decision.torch_version)
        status = status._replace(
            late_bindings=tuple(sorted({name for step in steps for name in step.early.rebound()})),
            out_of_reach=tuple(sorted({name for step in steps for name in step.early.listed})),
            overridden=tuple(steps[-1].overridden()) if steps else (),
            left_out=tuple(sorted(map(str, steps[-1].left_out))) if steps else (),
        )
        if self.reloaded():
            again = f"{TABLE.trigger} was reloaded since, with torch's own functions"
            reason = f"{decision.reason}; {again}: call torch_dcp_backport.activate()"
            return status._replace(outcome="pending", reason=reason)
        if self.outcome == "applied":
            return status._replace(replaced=steps[-1].names_by_module(), records=steps[-1].records())
        is_due = self.outcome == "pending" and not self._busy and _is_there(TABLE.trigger)
        if is_due and not _is_initializing(TABLE.trigger) and _outermost() is None:
            missed = f"{TABLE.trigger} was loaded unnoticed: call torch_dcp_backport.activate()"
            return status._replace(reason=f"{decision.reason}; {missed}")
        return status

    def reloaded(self) -> bool:
        return bool(self._steps) and self._steps[-1].reloaded()

    def has_work(self) -> bool:
        """Return whether `install` would do something."""
        return self.outcome == "pending" or self.reloaded() or self.can_complete()

    def can_complete(self) -> bool:
        """Return whether a name that was left out is torch's own by now (a mock.patch has ended)."""
        left_out = self._steps[-1].left_out if self._steps else []
        return any(replace.is_torchs_now(name, self.decision.release) for name in left_out)

    def _advance(self) -> None:
        """Replace all if a module of torch's needs it, and this thread is in the middle of none."""
        if self._over or self.outcome == "applied" or not any(map(_is_there, HOOKED)):
            return
        outermost = _outermost()
        if outermost is not None:
            # What it imports next may be what we would import, and find half executed.
            if not self._hooks.awaits(outermost):
                when_ended(outermost, self._advance)
            return
        try:
            # In this order: else an import of torch's that is under way in another thread is not waited for.
            for name in (CHECKPOINT, FSDP, TABLE.trigger):
                if _is_lazy(name):
                    return
                import_module(name)
        except DEADLOCK:
            self._advance_later()
            return
        except Exception as error:
            if self.outcome != "pending":  # refused at the end of one of them
                raise
            # Torch's imports are circular: with other threads in them this may pass.
            why = f"{TABLE.trigger} cannot be imported: {type(error).__name__}: {error}"
            self.reason = f"{self.decision.reason}; {why}"
            self._complain(error)
            return
        self._attempt()

    def _attempt(self) -> None:
        """Replace all, unless it is over, or done, or another thread is at it."""
        with self._lock:
            if self._busy or self._over or self.outcome == "applied":
                return
            self._busy = True
        is_given_up = False
        try:
            self._apply()
        except DEADLOCK:
            is_given_up = True
        except Refused as refused:
            self._refuse(refused.outcome, refused.reason)
        except BackportWarning as warning:  # turned into an error by the user's warning filter
            self.outcome, self.reason = "conflict", str(warning)
            raise
        except Exception as error:
            why = f"the replacement failed and was taken back: {type(error).__name__}: {error}"
            self._refuse("unsupported", why, error)
        finally:
            self._busy = False
        if is_given_up:
            self._advance_later()

    def _advance_later(self) -> None:
        """Advance at the end of each import that is under way: this thread would wait for one of them."""
        for name in sys.modules.copy():
            if name.startswith(UNDER_WAY) and _is_initializing(name):
                when_ended(name, self._advance)

    def _apply(self) -> None:
        # All that imports, warns or can fail comes before the lock and before the first write.
        release, preview = self.decision.release, self.decision.preview
        for module in replace.optional(release, preview):
            with contextlib.suppress(Exception):  # a package that it needs is missing, or does not fit
                import_module(module)
        former = {swap.dotted: swap for step in self._steps for swap in step.swaps}
        plan = replace.plan(release, preview, former, complete=self._strict)
        early = find_early(plan.swaps, TABLE.owner, classes=self._late)
        _report(early, self._strict)
        if plan.left_out:
            names = ", ".join(map(str, plan.left_out))
            advice = "When that has ended, torch_dcp_backport.activate() replaces the rest."
            warn(f"left out, as other code had replaced it: {names}. {advice}", BackportWarning)
        replacement = Replacement(plan, early)
        with self._lock:
            if self._over:
                return
            replacement.write()
            self._steps.append(replacement)
            self.outcome, self.reason = "applied", self.decision.reason
        if threading.active_count() > 1:
            # Another thread may have bound torch's objects between the search and the write.
            missed = find_early(plan.swaps, TABLE.owner, classes=self._late)
            with self._lock:
                if not self._over:
                    replacement.extend(missed)
            _report(missed, strict=False)
        self._unhook(*HOOKED)

    def _refuse(self, outcome: str, reason: str, cause: Exception | None = None) -> None:
        self.outcome = outcome
        self.reason = f"{reason}. torch {self.decision.torch_version} was left as it is."
        if not self._strict:  # else the next import raises again
            self._unhook(*HOOKED, RULES)
            self._over = True
        self._complain(cause)

    def _complain(self, cause: Exception | None) -> None:
        if self._strict:
            raise RuntimeError(f"torch_dcp_backport: {self.reason}") from cause
        warn(self.reason, BackportWarning)

    def _unhook(self, *names: str) -> None:
        if self._hooks.installer in (self, None):
            for name in names:
                self._hooks.unhook(name)


def _report(early: Early, strict: bool) -> None:
    """Warn of names outside of torch that were bound before us; raise Refused if that is an error."""
    rebound = ", ".join(name for name in early.rebound() if name.partition(".")[0] != TABLE.owner)
    listed = ", ".join(early.listed)
    if not rebound and not listed:
        return
    when, advice = "before torch_dcp_backport was imported", "Import it earlier."
    if strict:
        names = ", ".join(filter(None, (rebound, listed)))
        raise Refused("conflict", f"bound {when}, do that first: {names}")
    parts = [f"bound {when}, and given the replacements now: {rebound}."] if rebound else []
    parts += [f"bound {when}, and out of reach: {listed}."] if listed else []
    warn(" ".join([*parts, advice]), LateImportWarning)


def _skip_own_code() -> None:
    """Make torch.compile skip our modules, as it skips those of torch's that ours stand in for.

    Tracing them takes half a second on torch 2.6 and fails on 2.4.
    """
    add = getattr(sys.modules[RULES], "add", None)
    if add is not None:
        add(OWN)


def _is_lazy(name: str) -> bool:
    """Return whether a module is one of LazyLoader's that has not been executed. Runs no code of it."""
    module = sys.modules.get(name)
    if type(module).__name__ != "_LazyModule":
        return False
    # From Python 3.12 on it keeps this class until the hook at its end has been called.
    return not object.__getattribute__(module, "__spec__").loader_state.get("is_loading")


def _is_there(name: str) -> bool:
    return sys.modules.get(name) is not None and not _is_lazy(name)


def _is_initializing(name: str) -> bool:
    """Return whether Python will note the end of this module's import in its spec."""
    return bool(getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False))


def _outermost() -> str | None:
    """Return the outermost module, of torch.distributed or ours, that this thread is in the middle of."""
    found, frame = None, sys._getframe().f_back
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        # Our package itself activates, from its last line.
        if frame.f_code.co_name == "<module>" and name.startswith(UNDER_WAY):
            found = name if name in HOOKED or _is_initializing(name) else found
        frame = frame.f_back
    return found


def _wait_for_import(name: str) -> None:
    """Wait until no other thread is in the middle of importing a module. Imports nothing."""
    # The import system's own barrier: takes and releases the module's lock, and gets out of a deadlock.
    barrier = getattr(_bootstrap, "_lock_unlock_module", None)
    if barrier is not None:
        barrier(name)
    elif name in sys.modules:
        import_module(name)  # waits as well, and imports nothing new
