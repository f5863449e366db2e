"""Make torch.compile skip our modules, as it skips those of torch's that ours stand in for.

Tracing them takes half a second on torch 2.6 and fails on 2.4. Must never import torch._dynamo itself.
"""

from __future__ import annotations

import sys
from types import ModuleType

from torch_dcp_backport.activation.finder import process
from torch_dcp_backport.activation.holders import OWN

RULES = "torch._dynamo.trace_rules"
_informed: list[ModuleType] = []  # the module whose rules name our folder


def skip_own_code() -> None:
    """Add the rule now where torch.compile was used already, else as soon as it is."""
    if RULES in sys.modules:
        _add(RULES)
    else:
        process().hook(RULES, _add)


def stop() -> None:
    """Take the hook back. A rule that was added stays: it names our folder only."""
    process().unhook(RULES)


def _add(name: str, missed: bool = False) -> None:
    process().unhook(name)
    rules = sys.modules[name]
    add = getattr(rules, "add", None)
    if add is not None and rules not in _informed:
        add(OWN)
        _informed.append(rules)
