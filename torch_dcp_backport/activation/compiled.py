"""torch.compile passes torch's own modules by. Ours stand in for some of them, and must be passed by as well:
tracing them takes half a second on torch 2.6 and fails on 2.4. Must never import torch._dynamo itself.
"""

from __future__ import annotations

import sys
from types import ModuleType

from torch_dcp_backport.activation.finder import process
from torch_dcp_backport.activation.holders import OWN

RULES = "torch._dynamo.trace_rules"
_passed: list[ModuleType] = []  # the module whose rules know of us


def pass_us_by() -> None:
    """Now where torch.compile was used already, else as soon as it is."""
    if RULES in sys.modules:
        _add(RULES)
    else:
        process().hook(RULES, _add)


def no_more() -> None:
    """Takes the hook back. A rule that was made stays: it names our folder only."""
    process().unhook(RULES)


def _add(name: str, missed: bool = False) -> None:
    process().unhook(name)
    rules = sys.modules[name]
    add = getattr(rules, "add", None)
    if add is not None and rules not in _passed:
        add(OWN)
        _passed.append(rules)
