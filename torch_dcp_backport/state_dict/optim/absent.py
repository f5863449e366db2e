"""Parameters for which a state dict has no state: an error, or a start from nothing.

Nothing is read from or written to a tensor here.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Optional

import torch

from torch_dcp_backport.state_dict.form import PARAMS
from torch_dcp_backport.state_dict.optim.initial import Beginning
from torch_dcp_backport.state_dict.tree import Path
from torch_dcp_backport.transfer import spell_key

#: Hyperparameters that say little about which optimizer they belong to.
COMMON = frozenset(
    ("lr", "weight_decay", "eps", "momentum", "foreach", "maximize", "capturable", "differentiable", "fused")
)

logger = logging.getLogger("torch_dcp_backport.state_dict.optimizer")


NO_STATE = "it requires gradients but has no saved state"


class AbsentStates:
    """The states of one optimizer that a state dict lacks: judged parameter by parameter, reported once.

    A parameter that never had a gradient has no state. Where a get gives it first states, their absence is an
    error if strict. Where a get leaves them out (SGD's momentum, an optimizer that is not torch's own), the
    parameter stays without: the next step starts it from nothing, as the run that was saved would have.
    """

    def __init__(
        self, beginning: Beginning, strict: bool, stateful: bool, left_out: Optional[bool] = None
    ) -> None:
        """Begin.

        Args:
            stateful: whether the state dict has any state at all; torch takes one that has none.
            left_out: whether the state dict was made without states of parameters that never had a gradient;
                None is what our own get does.
        """
        self.beginning = beginning
        self.strict = strict
        self.stateful = stateful
        kind = beginning.kind
        self.left_out = kind is None or not kind.neutral if left_out is None else left_out
        self.fqns: list[str] = []
        #: Of an optimizer that is not torch's own: the states that any parameter has, and what each lacks of
        #: those of a first step. Later steps may drop one, of all parameters.
        self.knows_less = kind is None and type(beginning.optim) is not torch.optim.Adagrad
        self.seen: set[str] = set()
        self.doubtful: list[tuple[str, set[str]]] = []

    def judge(
        self,
        fqn: str,
        param: torch.Tensor,
        group: Mapping[str, Any],
        saved: Optional[Mapping[str, Any]],
        states: Collection[Any],
        missing: Collection[Path] = (),
    ) -> None:
        """Judge a parameter.

        Args:
            saved: the settings that the state dict has for this parameter; None if it has none.
            states: the names of the states that the state dict has for it.
            missing: the paths of those that it plainly lacks beside them.
        """
        if not param.requires_grad or not self.strict:
            return
        if states:
            needed = self.beginning.names_after_load(param, group, saved or {})
            names = {str(name) for name in needed if name not in states}
            plain = list(missing)
            if self.knows_less:
                names |= {str(path[0]) for path in plain if path[0] not in states}
                self.seen.update(map(str, states))
                self.doubtful.append((fqn, names))
                names, plain = set(), [path for path in plain if path[0] in states]
            names |= set(map(spell_key, plain))
            # SGD starts a momentum that it does not find.
            if names and type(self.beginning.optim) is not torch.optim.SGD:
                self.miss_some(fqn, names)
            return
        if saved is not None:
            foreign = self.foreign(group, saved)
            if foreign:
                self.miss(fqn, foreign)
                return
            beginning = self.beginning
            if self.may_start(param, group, saved):
                if beginning.optim.state.get(param) or beginning.expected.get(param):
                    self.fqns.append(fqn)
                return
        if self.stateful:
            self.miss(fqn, NO_STATE)

    def miss_some(self, fqn: str, names: Collection[str]) -> None:
        listed = ", ".join(map(repr, sorted(names)))
        self.miss(fqn, f"{listed} {'are' if len(names) > 1 else 'is'} not among its saved states")

    def miss(self, fqn: str, reason: str) -> None:
        self.beginning.missing.setdefault(reason, []).append(fqn)

    def may_start(self, param: torch.Tensor, group: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
        """Whether a parameter without a saved state may start from nothing."""
        beginning = self.beginning
        if not beginning.starts(param, self.strict):
            return False
        is_complete = self.left_out or not self.stateful
        return is_complete or not beginning.names_after_load(param, group, saved)

    def foreign(self, group: Mapping[str, Any], saved: Collection[str]) -> str:
        """The reason why a parameter's saved settings are plainly another optimizer's, or ""."""
        defaults = getattr(self.beginning.optim, "defaults", {})
        distinctive = {name for name in defaults if name not in COMMON}
        unknown = [name for name in saved if name not in group and name != PARAMS]
        if not distinctive or not unknown or not distinctive.isdisjoint(saved):
            return ""
        return (
            f"it was saved by another kind of optimizer, with {unknown[0]!r} and without {min(distinctive)!r}"
        )

    def report(self) -> None:
        """Log what starts from nothing, once all are judged; `missing_states` says what is missing."""
        for fqn, names in self.doubtful:
            if names & self.seen:
                self.miss_some(fqn, names & self.seen)
        if self.fqns and not self.beginning.missing:
            logger.warning(
                "%d parameters have no state in the state dict and start from nothing, for instance %s",
                len(self.fqns),
                self.fqns[0],
            )


def missing_states(begun: Iterable[Beginning]) -> str:
    """Return the error of all optimizers of a load that miss states; "" where nothing is missing."""
    fqns_by_reason: dict[str, list[str]] = {}
    for beginning in begun:
        for reason, fqns in beginning.missing.items():
            fqns_by_reason.setdefault(reason, []).extend(fqns)
    if not fqns_by_reason:
        return ""
    parts = []
    for reason, (first, *others) in fqns_by_reason.items():
        # Programs may look for torch's own first words.
        as_well = f" (and {', '.join(map(repr, others))})" if others else ""
        parts.append(f"for parameter {first!r}{as_well}: {reason}")
    return (
        f"Missing optimizer state {'; '.join(parts)}. "
        "To load what is there, use StateDictOptions(strict=False)."
    )


def raise_missing(begun: Iterable[Beginning]) -> None:
    """Raise RuntimeError where states are missing."""
    text = missing_states(begun)
    if text:
        raise RuntimeError(text)
