"""Parameters for which a state dict has no state: an error, or a start from nothing.

Nothing is read from or written to a tensor here.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any, Optional

import torch

from torch_dcp_backport.state_dict.form import PARAMS
from torch_dcp_backport.state_dict.optim.initial import Beginning

#: Hyperparameters that say little about which optimizer they belong to.
COMMON = frozenset(
    ("lr", "weight_decay", "eps", "momentum", "foreach", "maximize", "capturable", "differentiable", "fused")
)

logger = logging.getLogger("torch_dcp_backport.state_dict.optimizer")


class AbsentStates:
    """The parameters of one optimizer that have no state in a state dict: judged one by one, reported once.

    A parameter that never had a gradient has no state, and is saved without one. It stays without: the next
    step starts it from nothing, as the run that was saved would have. Everything else is an error if strict.
    """

    def __init__(self, beginning: Beginning, strict: bool, stateful: bool) -> None:
        """`stateful`: whether the state dict has any state at all; torch takes one that has none."""
        self.beginning = beginning
        self.strict = strict
        self.stateful = stateful
        self.fqns: list[str] = []

    def judge(
        self,
        fqn: str,
        param: torch.Tensor,
        group: Mapping[str, Any],
        saved: Optional[Collection[str]],
    ) -> None:
        """Judge a parameter.

        Args:
            saved: the hyperparameters that the state dict has for this parameter; None if it has none.

        Raises:
            RuntimeError: the state is missing.
        """
        if not param.requires_grad or not self.strict:
            return
        if saved is not None:
            foreign = self.foreign(group, saved)
            if foreign:
                raise missing_state(fqn, foreign)
            beginning = self.beginning
            if beginning.starts(param, self.strict):
                if beginning.optim.state.get(param) or beginning.expected.get(param):
                    self.fqns.append(fqn)
                return
        if self.stateful:
            raise missing_state(fqn)

    def foreign(self, group: Mapping[str, Any], saved: Collection[str]) -> str:
        """The reason why a parameter's saved hyperparameters are plainly another optimizer's, or ""."""
        defaults = getattr(self.beginning.optim, "defaults", {})
        distinctive = {name for name in defaults if name not in COMMON}
        unknown = [name for name in saved if name not in group and name != PARAMS]
        if not distinctive or not unknown or not distinctive.isdisjoint(saved):
            return ""
        return (
            f"it was saved by another kind of optimizer, with {unknown[0]!r} and without {min(distinctive)!r}"
        )

    def report(self) -> None:
        if self.fqns:
            logger.warning(
                "%d parameters have no state in the state dict and start from nothing, for instance %s",
                len(self.fqns),
                self.fqns[0],
            )


def missing_state(fqn: str, why: str = "it requires gradients but has no saved state") -> RuntimeError:
    return RuntimeError(
        f"Missing optimizer state for parameter '{fqn}': {why}. "
        "To load what is there, use StateDictOptions(strict=False)."
    )
