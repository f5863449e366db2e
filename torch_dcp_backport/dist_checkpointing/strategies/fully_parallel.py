"""Strategies by which ranks share work: Megatron's names.

A save shares it out in any case; a load does with one of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch_dcp_backport.transfer.groups import Group


@dataclass(frozen=True)
class FullyParallelSaveStrategyWrapper:
    """A save in which every rank writes. `save(balanced=True)`, the default, does so without it."""

    #: None, or a strategy for the one format.
    strategy: Any = None
    #: Makes no difference: any rank that holds a replica may write it.
    parallelization_group: Group = None
    #: Makes no difference: nothing is cached.
    do_cache_distribution: bool = False

    base_strategy = property(lambda self: self.strategy)


@dataclass(frozen=True)
class FullyParallelLoadStrategyWrapper:
    """A load in which the ranks of a group read together: what several want is read once, and sent.

    For files far away (a network's file system). With files in the memory of this machine each rank is as
    fast by itself.
    """

    #: None, or a strategy for the one format.
    strategy: Any = None
    #: The ranks that read together; None is the default group. All of them have to take part in the load.
    parallelization_group: Group = None
    #: Makes no difference: nothing is cached.
    do_cache_distribution: bool = False
    #: Makes no difference: there is one.
    exchange_algo: str = "broadcast"

    base_strategy = property(lambda self: self.strategy)
