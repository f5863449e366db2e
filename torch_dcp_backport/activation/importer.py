"""The time to replace: at once if torch's modules are loaded, else as soon as they are. And the way back.

Must never import torch, act on a half-executed module, or run other code than ours while holding a lock.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from importlib import _bootstrap, import_module
from typing import TYPE_CHECKING, Any, cast

from torch_dcp_backport.activation import early, finder, replace
from torch_dcp_backport.activation.bindings import Early, Swap, early_names
from torch_dcp_backport.activation.finder import ready
from torch_dcp_backport.activation.gate import Decision
from torch_dcp_backport.activation.loaded import Loaded
from torch_dcp_backport.activation.replace import Plan, Refused, Replacement
from torch_dcp_backport.activation.status import BackportWarning, Status, warn
from torch_dcp_backport.activation.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

# The set is replaced when checkpoint.state_dict has been imported. Other modules of torch use the helpers
# without it (dcp.save, dcp.load), and _state_dict_utils is imported from the middle of
# torch.distributed.fsdp: our replacements, which need fsdp, cannot be imported there. So the helpers get
# stubs, which import nothing. The first call of a stub imports checkpoint.state_dict, and with it
# everything is replaced.


class Installer:
    """An attempt to replace the table's targets; `pending` until it is `applied`, refused or removed."""

    def __init__(self, table: Table, decision: Decision) -> None:
        self.table = table
        self.decision = decision
        self.outcome = "pending"
        self._strict = decision.switch == "strict"
        self.reason = (
            f"{decision.reason}; waiting for {table.trigger} to be imported, "
            f"or for a function of {', '.join(table.helpers)} to be called"
        )
        self._modules = Loaded()
        self._stubs = _Stubs()
        self._replacement: Replacement | None = None
        self._former: list[Swap] = []  # replaced before torch's module was reloaded
        self._lock = threading.Lock()  # held for the few writes only
        self._busy = False  # a thread takes a step
        self._awaited = False  # another thread has a new step for it
        self._over = False  # removed, or refused: nothing more is tried

    def install(self) -> None:
        """Replace now or hook the import; again does no harm. Raise RuntimeError if strict and refused."""
        if self.reloaded():
            self._start_again()
        if self._replacement is not None:
            return
        here = finder.process()
        here.installer = self
        for module in self.table.modules:
            if module in sys.modules and module not in self._stubs.modules:
                self._modules.late.add(module)
            here.hook(module, self._on_import)
        for module in self.table.modules:
            # Another thread may be importing it right now, too early to have seen the hook.
            _wait_for_import(module)
            if ready(module):
                here.seen(module)
        self._catch_up()
        if self.table.trigger in sys.modules and not ready(self.table.trigger):
            self.reason = (
                f"{self.decision.reason}; {self.table.trigger} is being imported right now, by something "
                "that imports torch_dcp_backport: call torch_dcp_backport.activate() once that is done"
            )
            _complain(self.reason, self._strict)

    def remove(self) -> list[str]:
        """Take back the hook or the replacement; return the names that hold neither ours nor torch's."""
        with self._lock:
            self._over = True
            lost = self._replacement.overridden() if self._replacement is not None else []
            if self._replacement is not None:
                self._replacement.undo()
            self._stubs.take_back()
        _unhook(self.table)
        here = finder.process()
        if here.installer is self:
            here.installer = None
        return lost

    def status(self) -> Status:
        decision, done = self.decision, self._replacement
        status = Status(self.outcome, self.reason, decision.switch, decision.torch_version)
        steps = [step.early for step in (*self._stubs.steps, done) if step is not None]
        status = status._replace(
            late_bindings=tuple(sorted({name for bindings in steps for name in bindings.rebound})),
            out_of_reach=tuple(sorted({name for bindings in steps for name in bindings.listed})),
        )
        if done is not None and done.reloaded(self.table):
            again = f"{self.table.trigger} was reloaded since, with torch's own functions"
            reason = f"{decision.reason}; {again}: call torch_dcp_backport.activate()"
            return status._replace(outcome="pending", reason=reason, overridden=tuple(done.overridden()))
        if done is not None:
            return status._replace(
                replaced=replace.names_by_module(done.swaps),
                records=replace.records_of(done.swaps, self.table),
                overridden=tuple(done.overridden()),
            )
        if self.outcome == "pending" and ready(self.table.trigger):
            missed = f"{self.table.trigger} was loaded unnoticed: call torch_dcp_backport.activate()"
            return status._replace(reason=f"{decision.reason}; {missed}")
        return status

    def reloaded(self) -> bool:
        done = self._replacement
        return done is not None and done.reloaded(self.table)

    def resolve(self, module: str, name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that a stub calls."""
        if not self._over and (self.outcome == "pending" or (self._strict and self.outcome != "applied")):
            try:
                import_module(self.table.trigger)
                self._catch_up()
            except BackportWarning:
                raise
            except Exception as error:
                if self._strict:
                    raise
                why = f"{self.table.trigger} cannot be imported: {type(error).__name__}: {error}"
                self._refuse("unsupported", why, error)
        # Pending: another thread is at it. If a helper is expected, ours would import it from the middle of
        # its package.
        is_early = any(map(self._modules.is_expected, self.table.required))
        if self._over or is_early or self.outcome not in ("applied", "pending"):
            return stock
        return cast("Callable[..., Any]", replace.replacement_of(self.table, module, name))

    def _on_import(self, name: str, missed: bool) -> None:
        self._modules.note(name, missed)
        self._catch_up()

    def _catch_up(self) -> None:
        """Do as much as the loaded modules of torch allow."""
        modules, trigger = self._modules, self.table.trigger
        again = True
        while again:
            again = False
            if not modules.is_complete(trigger) and self._stubs.possible(self.table, modules):
                again = self._attempt(self._put_stubs)
            # The end of a helper module brings us back here.
            if modules.is_complete(trigger) and not self._is_helper_under_way():
                again = self._attempt(self._apply) or again

    def _is_helper_under_way(self) -> bool:
        """Return whether a helper is in the middle of its import, or will certainly be imported."""
        modules = self._modules
        # No import has to come of an optional helper that is not there yet.
        there = [name for name in self.table.optional if name in sys.modules]
        return any(map(modules.under_way, (*self.table.required, *there)))

    def _start_again(self) -> None:
        with self._lock:
            done, self._replacement = self._replacement, None
            if done is not None:
                done.undo()
                self._former = done.swaps
                self._modules.late.add(self.table.trigger)
                self.outcome = "pending"

    def _attempt(self, step: Callable[[], None]) -> bool:
        """Take the step, unless it is over; return whether another thread asked for a step meanwhile."""
        with self._lock:
            if self._busy:
                self._awaited = True
                return False
            if self._over or self._replacement is not None:
                return False
            self._busy = True
        try:
            step()
        except Refused as refused:
            self._refuse(refused.outcome, refused.reason)
        except BackportWarning as warning:  # turned into an error by the user's warning filter
            self.outcome, self.reason = "conflict", str(warning)
            self._modules.executed.clear()
            raise
        except Exception as error:
            why = f"the replacement failed and was taken back: {type(error).__name__}: {error}"
            self._refuse("unsupported", why, error)
        finally:
            with self._lock:
                self._busy = False
                awaited, self._awaited = self._awaited, False
        return awaited

    # All that imports, warns or can fail comes before the lock and before the first write.

    def _put_stubs(self) -> None:
        decision, modules = self.decision, self._stubs.possible(self.table, self._modules)
        if not modules:  # another thread has put them since
            return
        swaps = replace.find(self.table, modules, decision.release, decision.preview)
        swaps = [swap._replace(ours=_stub(swap)) for swap in swaps]
        late = not self._modules.late.isdisjoint(modules)
        bindings = self._find_early(swaps, search=True) if late else Early([], [], [])
        self._write(Replacement(Plan(swaps, []), bindings), modules)

    def _apply(self) -> None:
        for helper in replace.optional(self.table, self.decision.release, self.decision.preview):
            with contextlib.suppress(Exception):  # a package that it needs is missing, or does not fit
                import_module(helper)
        stubs = [swap for step in self._stubs.steps for swap in step.swaps]
        plan = replace.plan(self.table, self.decision.release, self.decision.preview, stubs)
        bindings = self._find_early(plan.swaps, search=self.table.trigger in self._modules.late)
        if self._write(Replacement(plan, bindings)):
            self.outcome, self.reason = "applied", self.decision.reason
            _unhook(self.table)

    def _find_early(self, swaps: list[Swap], search: bool) -> Early:
        bindings = early.find(swaps, self._former, self.table.owner, search)
        early.report(bindings, self.table.owner, self._modules.missed, self._strict)
        return bindings

    def _write(self, replacement: Replacement, stubbed: Collection[str] = ()) -> bool:
        """Write the set, or the stubs of some modules, and return True; do nothing where it is over."""
        with self._lock:
            if self._over:
                return False
            replacement.write()
            if stubbed:
                self._stubs.steps.append(replacement)
                self._stubs.modules.update(stubbed)
            else:
                self._replacement = replacement
            return True

    def _refuse(self, outcome: str, reason: str, cause: Exception | None = None) -> None:
        self.outcome = outcome
        self._modules.executed.clear()  # the next import executes them again
        self.reason = f"{reason}. torch {self.decision.torch_version} was left as it is."
        if not self._strict:  # else the next import raises again, and so does a stub
            _unhook(self.table)
            with self._lock:
                self._over = True
                self._stubs.take_back()
        _complain(self.reason, self._strict, cause)


class _Stubs:
    """The stubs that are in place."""

    def __init__(self) -> None:
        self.steps: list[Replacement] = []
        self.modules: set[str] = set()  # the helper modules that have them

    def possible(self, table: Table, modules: Loaded) -> list[str]:
        """Return the loaded helper modules that could have stubs, and have none."""
        return [name for name in table.helpers if modules.is_complete(name) and name not in self.modules]

    def take_back(self) -> None:
        """Take the stubs back, also from modules that imported them since."""
        steps, self.steps = self.steps, []
        self.modules.clear()
        for step in steps:
            names = early_names([swap._replace(held=swap.ours) for swap in step.swaps])
            Replacement(Plan([], []), Early(names, [], [])).undo()
            step.undo()


def _complain(reason: str, strict: bool, cause: Exception | None = None) -> None:
    if strict:
        raise RuntimeError(f"torch_dcp_backport: {reason}") from cause
    warn(reason, BackportWarning)


def _unhook(table: Table) -> None:
    for module in table.modules:
        finder.process().unhook(module)


def _stub(swap: Swap) -> object:
    module, name, function = swap.module, swap.name, cast("Callable[..., Any]", swap.stock)

    @functools.wraps(function)
    def stub(*args: Any, **kwargs: Any) -> Any:
        installer = finder.process().installer
        call = function if installer is None else installer.resolve(module, name, function)
        return call(*args, **kwargs)

    return stub


def _wait_for_import(name: str) -> None:
    """Wait until no other thread is in the middle of importing a module. Imports nothing."""
    # The import system's own barrier: takes and releases the module's lock, and gets out of a deadlock.
    barrier = getattr(_bootstrap, "_lock_unlock_module", None)
    if barrier is not None:
        barrier(name)
    elif name in sys.modules:
        import_module(name)  # waits as well, and imports nothing new
