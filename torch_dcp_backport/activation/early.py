"""Names that were bound to torch's functions before ours: find them all, and warn the user.

Must never write: early bindings are written with the set that they belong to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_dcp_backport.activation.bindings import Early, Swap, early_names, early_places
from torch_dcp_backport.activation.replace import Refused
from torch_dcp_backport.activation.status import LateImportWarning, warn

if TYPE_CHECKING:
    from collections.abc import Collection


def find(swaps: list[Swap], former: list[Swap], owner: str, search: bool) -> Early:
    """Return the early bindings of the swaps; beyond modules only with `search`, if some can precede us.

    `former`: the swaps from before torch's module was reloaded.
    """
    ours = {swap.name: swap.ours for swap in swaps}
    every = [*(swap._replace(ours=ours[swap.name]) for swap in former if swap.name in ours), *swaps]
    names = early_names(every)
    places, listed = early_places(every, owner) if search else ([], [])
    return Early(names, places, listed)


def report(early: Early, owner: str, missed: Collection[str], strict: bool) -> None:
    """Warn of names outside of torch that were bound before us; raise Refused if that is an error."""
    rebound, listed = ", ".join(early.reported(owner)), ", ".join(early.listed)
    if not rebound and not listed:
        return
    when, advice = "before torch_dcp_backport was imported", "Import it earlier."
    if missed:
        when = f"from {', '.join(sorted(missed))}, which another import hook served unnoticed"
        advice = "Import torch_dcp_backport after what installs that hook."
    if strict:
        names = ", ".join(filter(None, (rebound, listed)))
        first = "" if missed else ", do that first"
        raise Refused("conflict", f"bound {when}{first}: {names}")
    parts = [f"bound {when}, and given the replacements now: {rebound}."] if rebound else []
    parts += [f"bound {when}, and out of reach: {listed}."] if listed else []
    warn(" ".join([*parts, advice]), LateImportWarning)
