"""When to replace: at once where torch's modules are loaded, else as soon as they are. And the way back.

Must never import torch, act on a half-executed module, or run other code than ours while holding a lock.
"""

from __future__ import annotations

import functools
import sys
import threading
from importlib import _bootstrap, import_module
from typing import TYPE_CHECKING, Any, cast

from torch_dcp_backport.activation import bindings, finder, replace
from torch_dcp_backport.activation.bindings import Early, Swap
from torch_dcp_backport.activation.finder import ready
from torch_dcp_backport.activation.gate import Decision
from torch_dcp_backport.activation.replace import Plan, Refused, Replacement
from torch_dcp_backport.activation.status import BackportWarning, LateImportWarning, Status, warn
from torch_dcp_backport.activation.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

# The set is replaced when checkpoint.state_dict has been imported. Other modules of torch use the helpers
# without it (dcp.save, dcp.load), and _state_dict_utils is imported from the middle of
# torch.distributed.fsdp: our replacements, which need fsdp, cannot be imported there. So the helpers get
# stubs, which import nothing. The first call of one imports checkpoint.state_dict, and with it everything is
# replaced.


class Installer:
    """One attempt to replace the table's targets; `pending` until it is `applied`, refused or removed."""

    def __init__(self, table: Table, decision: Decision) -> None:
        self.table = table
        self.decision = decision
        self.outcome = "pending"
        self.reason = (
            f"{decision.reason}; waiting for {table.trigger} to be imported, "
            f"or for a function of {', '.join(table.helpers)} to be called"
        )
        self._stubs: list[Replacement] = []
        self._stubbed: set[str] = set()  # the helper modules that have them
        self._replacement: Replacement | None = None
        self._former: list[Swap] = []  # replaced before torch's module was reloaded
        self._lock = threading.Lock()  # held for the few writes only
        self._busy = False
        self._over = False  # removed, or refused: nothing more is tried
        self._late: set[str] = set()  # torch's modules that were there before us, open to early bindings
        self._missed: set[str] = set()  # those that were imported past our hook
        self._executed: set[str] = set()  # those that are executed, and whose import has not returned yet

    def install(self) -> None:
        """Replace now or hook the import; again does no harm. RuntimeError when strict and refused."""
        if self.reloaded():
            self._start_again()
        if self._replacement is not None:
            return
        here = finder.process()
        here.installer = self
        for module in self.table.modules:
            if module in sys.modules and module not in self._stubbed:
                self._late.add(module)
            here.hook(module, self._on_import)
        for module in self.table.modules:
            # Another thread may be importing it right now, too early to have seen the hook.
            _wait_for_import(module)
            if ready(module):
                here.seen(module)
        self._catch_up()
        if self.table.trigger in sys.modules and not ready(self.table.trigger):
            self._refuse_half_executed()

    def remove(self) -> list[str]:
        """Take back the hook or the replacement; return the names that hold neither ours nor torch's."""
        with self._lock:
            self._over = True
            lost = self._replacement.overridden() if self._replacement is not None else []
            if self._replacement is not None:
                self._replacement.undo()
            self._take_stubs_back()
        self._unhook()
        here = finder.process()
        if here.installer is self:
            here.installer = None
        return lost

    def status(self) -> Status:
        decision, done = self.decision, self._replacement
        status = Status(self.outcome, self.reason, decision.switch, decision.torch_version)
        steps = [step.early for step in (*self._stubs, done) if step is not None]
        status = status._replace(
            late_bindings=tuple(sorted({name for early in steps for name in early.rebound})),
            out_of_reach=tuple(sorted({name for early in steps for name in early.listed})),
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
        """The function that a stub calls."""
        strict = self.decision.switch == "strict"
        if not self._over and (self.outcome == "pending" or (strict and self.outcome != "applied")):
            try:
                import_module(self.table.trigger)
                self._catch_up()
            except BackportWarning:
                raise
            except Exception as error:
                if strict:
                    raise
                why = f"{self.table.trigger} cannot be imported: {type(error).__name__}: {error}"
                self._refuse("unsupported", why, error)
        # Pending: another thread is at it.
        if self._over or self.outcome not in ("applied", "pending"):
            return stock
        return cast("Callable[..., Any]", replace.replacement_of(self.table, module, name))

    def _on_import(self, name: str, missed: bool) -> None:
        if missed and name not in self._late:
            self._late.add(name)
            self._missed.add(name)
        self._catch_up(name)

    def _catch_up(self, executed: str = "") -> None:
        """Do as much as the loaded modules of torch allow."""
        self._executed.add(executed)
        if not self._loaded(self.table.trigger) and self._without_stubs():
            self._attempt(self._put_stubs)
        # Another thread may have imported it, and have found this thread busy.
        if self._loaded(self.table.trigger) and not self._half_executed():
            self._attempt(self._apply)

    def _half_executed(self) -> bool:
        """Whether a helper module is in the middle of its import; its end brings us back here."""
        return any(name in sys.modules and not self._loaded(name) for name in self.table.helpers)

    def _without_stubs(self) -> list[str]:
        """The loaded helper modules that could have stubs."""
        return [name for name in self.table.helpers if self._loaded(name) and name not in self._stubbed]

    def _loaded(self, name: str) -> bool:
        return name in sys.modules and (name in self._executed or ready(name))

    def _unhook(self) -> None:
        for module in self.table.modules:
            finder.process().unhook(module)

    def _start_again(self) -> None:
        with self._lock:
            done, self._replacement = self._replacement, None
            if done is not None:
                done.undo()
                self._former = done.swaps
                self._late.add(self.table.trigger)
                self.outcome = "pending"

    def _attempt(self, step: Callable[[], None]) -> None:
        with self._lock:
            if self._busy or self._over or self._replacement is not None:
                return
            self._busy = True
        try:
            step()
        except Refused as refused:
            self._refuse(refused.outcome, refused.reason)
        except BackportWarning as warning:  # turned into an error by the user's warning filter
            self.outcome, self.reason = "conflict", str(warning)
            self._executed.clear()
            raise
        except Exception as error:
            why = f"the replacement failed and was taken back: {type(error).__name__}: {error}"
            self._refuse("unsupported", why, error)
        finally:
            self._busy = False

    # All that imports, warns or can fail comes before the lock and before the first write.

    def _put_stubs(self) -> None:
        decision, modules = self.decision, self._without_stubs()
        swaps = replace.find(self.table, modules, decision.release, decision.preview)
        swaps = [swap._replace(ours=_stub(swap)) for swap in swaps]
        late = not self._late.isdisjoint(modules)
        early = self._find_early(swaps, late) if late else Early([], [], [])
        self._report_early(early)
        self._write(Replacement(Plan(swaps, []), early), modules)

    def _apply(self) -> None:
        stubs = [swap for step in self._stubs for swap in step.swaps]
        plan = replace.plan(self.table, self.decision.release, self.decision.preview, stubs)
        early = self._find_early(plan.swaps, self.table.trigger in self._late)
        self._report_early(early)
        if self._write(Replacement(plan, early)):
            self.outcome, self.reason = "applied", self.decision.reason
            self._unhook()

    def _write(self, replacement: Replacement, stubbed: Collection[str] = ()) -> bool:
        """Write the set, or the stubs of some modules, and return True; do nothing where it is over."""
        with self._lock:
            if self._over:
                return False
            replacement.write()
            if stubbed:
                self._stubs.append(replacement)
                self._stubbed.update(stubbed)
            else:
                self._replacement = replacement
            return True

    def _find_early(self, swaps: list[Swap], search: bool) -> Early:
        """Find early bindings; beyond modules only with `search`, where one can have been made before us."""
        ours = {swap.name: swap.ours for swap in swaps}
        former = [swap._replace(ours=ours[swap.name]) for swap in self._former if swap.name in ours]
        names = bindings.early_names([*former, *swaps])
        places, listed = bindings.early_places([*former, *swaps], self.table.owner) if search else ([], [])
        return Early(names, places, listed)

    def _report_early(self, early: Early) -> None:
        rebound, listed = ", ".join(early.reported(self.table.owner)), ", ".join(early.listed)
        if not rebound and not listed:
            return
        when, advice = "before torch_dcp_backport was imported", "Import it earlier."
        if self._missed:
            when = f"from {', '.join(sorted(self._missed))}, which another import hook served unnoticed"
            advice = "Import torch_dcp_backport after what installs that hook."
        if self.decision.switch == "strict":
            names = ", ".join(filter(None, (rebound, listed)))
            first = "" if self._missed else ", do that first"
            raise Refused("conflict", f"bound {when}{first}: {names}")
        parts = [f"bound {when}, and given the replacements now: {rebound}."] if rebound else []
        parts += [f"bound {when}, and out of reach: {listed}."] if listed else []
        warn(" ".join([*parts, advice]), LateImportWarning)

    def _refuse_half_executed(self) -> None:
        self.reason = (
            f"{self.decision.reason}; {self.table.trigger} is being imported right now, by something that "
            "imports torch_dcp_backport: call torch_dcp_backport.activate() once that is done"
        )
        self._complain()

    def _refuse(self, outcome: str, reason: str, cause: Exception | None = None) -> None:
        self.outcome = outcome
        self._executed.clear()  # the next import executes them again
        self.reason = f"{reason}. torch {self.decision.torch_version} was left as it is."
        if self.decision.switch != "strict":  # else the next import raises again, and so does a stub
            self._unhook()
            with self._lock:
                self._over = True
                self._take_stubs_back()
        self._complain(cause)

    def _take_stubs_back(self) -> None:
        """Take the stubs back, also from modules that imported them since."""
        stubs, self._stubs = self._stubs, []
        self._stubbed.clear()
        for step in stubs:
            names = bindings.early_names([swap._replace(held=swap.ours) for swap in step.swaps])
            Replacement(Plan([], []), Early(names, [], [])).undo()
            step.undo()

    def _complain(self, cause: Exception | None = None) -> None:
        if self.decision.switch == "strict":
            raise RuntimeError(f"torch_dcp_backport: {self.reason}") from cause
        warn(self.reason, BackportWarning)


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
