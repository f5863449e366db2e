"""When to replace: at once where torch's module is loaded, else by a hook as soon as it is. And the way back.

Must never import torch, act on a half-executed module, or run anybody else's code while holding a lock.
"""

from __future__ import annotations

import sys
import threading
from importlib import _bootstrap, import_module
from typing import TYPE_CHECKING

from torch_dcp_backport.activation import bindings, replace
from torch_dcp_backport.activation.bindings import Early, Swap
from torch_dcp_backport.activation.gate import Decision
from torch_dcp_backport.activation.replace import Refused, Replacement
from torch_dcp_backport.activation.status import BackportWarning, LateImportWarning, Status, tell
from torch_dcp_backport.activation.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

# Everything is applied when checkpoint.state_dict is ready, and not before, also not the part in
# _state_dict_utils: that module is imported from the middle of torch.distributed.fsdp, where importing our
# replacements (which need fsdp) would fail on a circular import. So in a process that never imports
# checkpoint.state_dict, staging and async_save use torch's own helpers; README says so.


class Installer:
    """One attempt to replace the table's targets; `pending` until it is `applied`, refused or removed."""

    def __init__(self, table: Table, decision: Decision) -> None:
        self.table = table
        self.decision = decision
        self.outcome = "pending"
        self.reason = f"{decision.reason}; waiting for {table.trigger} to be imported"
        self._replacement: Replacement | None = None
        self._former: list[Swap] = []  # replaced before torch's module was reloaded
        self._lock = threading.Lock()  # held for the few writes only
        self._busy = False
        self._removed = False
        self._hooked = False
        self._late = False  # some of what is replaced was there before us, for anybody to bind
        self._registering: int | None = None

    def install(self) -> None:
        """Replace now or hook the import; again does no harm. RuntimeError when strict and refused."""
        trigger = self.table.trigger
        if self.reloaded():
            self._start_again()
        self._late = self._late or any(module in sys.modules for module in self.table.modules)
        while True:
            if trigger not in sys.modules and not self._hooked:
                self._hook()
            # Another thread may be importing it right now, too early to have seen the hook.
            _wait_for_import(trigger)
            if trigger in sys.modules or self._hooked:
                break  # else that import failed, and there is no hook for the next one
        if _ready(trigger):
            self._unhook()
            self._apply(search=True)
        elif trigger in sys.modules and not self._hooked:
            self._refuse_half_executed()

    def remove(self) -> list[str]:
        """Take back the hook or the replacement; the names left alone, as somebody replaced ours there."""
        with self._lock:
            self._removed = True
            lost = self._replacement.overridden() if self._replacement is not None else []
            if self._replacement is not None:
                self._replacement.undo()
        self._unhook()
        return lost

    def status(self) -> Status:
        decision, done = self.decision, self._replacement
        status = Status(self.outcome, self.reason, decision.switch, decision.torch_version)
        if done is not None and done.reloaded(self.table):
            again = f"{self.table.trigger} was reloaded since, with torch's own functions"
            reason = f"{decision.reason}; {again}: call torch_dcp_backport.activate()"
            return status._replace(outcome="pending", reason=reason, overridden=tuple(done.overridden()))
        if done is not None:
            return status._replace(
                replaced=replace.names_by_module(done.swaps),
                records=replace.records_of(done.swaps, self.table),
                late_bindings=done.early.rebound,
                out_of_reach=tuple(done.early.listed),
                overridden=tuple(done.overridden()),
            )
        if self.outcome == "pending" and _ready(self.table.trigger):
            # Someone's importlib.util.find_spec at the same moment can make wrapt miss an import.
            missed = f"{self.table.trigger} was loaded unnoticed: call torch_dcp_backport.activate()"
            return status._replace(reason=f"{decision.reason}; {missed}")
        return status

    def _hook(self) -> None:
        from wrapt import register_post_import_hook  # 120 ms: only where it is needed

        self._registering = threading.get_ident()
        self._hooked = True
        try:
            register_post_import_hook(self._on_import, self.table.trigger)
        finally:
            self._registering = None

    def _on_import(self, module: ModuleType) -> None:
        if self._registering == threading.get_ident():
            # Called back at once: the module came up meanwhile, perhaps half executed. install() looks.
            self._hooked = False
            return
        # From wrapt's loader, after the module's code ran. wrapt has dropped the hook by now.
        self._hooked = False
        self._apply(search=self._late)

    def _unhook(self) -> None:
        """Should it fail, _removed still disarms the hook."""
        self._hooked = False
        drop_hook(self.table.trigger, self._on_import)

    def reloaded(self) -> bool:
        done = self._replacement
        return done is not None and done.reloaded(self.table)

    def _start_again(self) -> None:
        with self._lock:
            done, self._replacement = self._replacement, None
            if done is not None:
                done.undo()
                self._former = done.swaps
                self.outcome = "pending"

    def _apply(self, search: bool) -> None:
        """`search` beyond modules for early bindings: not where we came before any could be made."""
        with self._lock:
            if self._busy or self._removed or self._replacement is not None:
                return
            self._busy = True
        try:
            # All that imports, warns or can fail comes before the lock and before the first write.
            swaps = replace.plan(self.table, self.decision.release, self.decision.preview)
            early = self._find_early(swaps, search)
            self._tell_early(early)
            self._write(Replacement(swaps, early))
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

    def _write(self, replacement: Replacement) -> None:
        with self._lock:
            if self._removed:
                return
            replacement.write()
            self._replacement = replacement
            self.outcome, self.reason = "applied", self.decision.reason

    def _find_early(self, swaps: list[Swap], search: bool) -> Early:
        ours = {swap.name: swap.ours for swap in swaps}
        former = [swap._replace(ours=ours[swap.name]) for swap in self._former if swap.name in ours]
        names = bindings.early_names([*former, *swaps])
        places, listed = bindings.early_places([*former, *swaps], self.table.owner) if search else ([], [])
        return Early(names, places, listed)

    def _tell_early(self, early: Early) -> None:
        told = early.told(self.table.owner)
        rebound, listed = ", ".join(told), ", ".join(early.listed)
        if not rebound and not listed:
            return
        if self.decision.switch == "strict":
            names = ", ".join(filter(None, (rebound, listed)))
            raise Refused("conflict", f"bound before torch_dcp_backport was imported, do that first: {names}")
        early_are = "bound before torch_dcp_backport was imported, and"
        parts = [f"{early_are} given the replacements now: {rebound}."] if rebound else []
        parts += [f"{early_are} out of reach: {listed}."] if listed else []
        tell(" ".join([*parts, "Import it earlier."]), LateImportWarning)

    def _refuse_half_executed(self) -> None:
        self.reason = (
            f"{self.decision.reason}; {self.table.trigger} is being imported right now, by something that "
            "imports torch_dcp_backport: call torch_dcp_backport.activate() once that is done"
        )
        self._complain()

    def _refuse(self, outcome: str, reason: str, cause: Exception | None = None) -> None:
        self.outcome = outcome
        self.reason = f"{reason}. torch {self.decision.torch_version} was left as it is."
        self._complain(cause)

    def _complain(self, cause: Exception | None = None) -> None:
        if self.decision.switch == "strict":
            raise RuntimeError(f"torch_dcp_backport: {self.reason}") from cause
        tell(self.reason, BackportWarning)


def drop_hook(name: str, hook: Callable[[ModuleType], None]) -> None:
    """wrapt has no public way to take a hook back.

    wrapt's finder stays in sys.meta_path, as wrapt means it to: taking it out could make another thread,
    just walking that list, miss a finder. Without hooks it costs a dictionary lookup for each import.
    """
    importer = sys.modules.get("wrapt.importer")
    lock = getattr(importer, "_post_import_hooks_lock", None)
    hooks = getattr(importer, "_post_import_hooks", None)
    if lock is None or not isinstance(hooks, dict):
        return
    with lock:
        waiting = hooks.get(name, [])
        if hook in waiting:
            waiting.remove(hook)
            if not waiting:
                del hooks[name]


def _ready(name: str) -> bool:
    """Loaded and executed to the end."""
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def _wait_for_import(name: str) -> None:
    """Until no other thread is in the middle of importing it. Imports nothing."""
    # The import system's own barrier: takes and releases the module's lock, and gets out of a deadlock.
    barrier = getattr(_bootstrap, "_lock_unlock_module", None)
    if barrier is not None:
        barrier(name)
    elif name in sys.modules:
        import_module(name)  # waits as well, and imports nothing new
