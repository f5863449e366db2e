"""Private helpers of torch that other projects call, with torch's signatures, on our engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Optional

import torch

from torch_dcp_backport import compat
from torch_dcp_backport.state_dict.collect import Group, full_tree
from torch_dcp_backport.state_dict.cpu_copy import Tree
from torch_dcp_backport.state_dict.destination import FIRST, fresh, unsharded
from torch_dcp_backport.state_dict.load import Inventory, LoadPlan
from torch_dcp_backport.state_dict.run import LocalLoad, run
from torch_dcp_backport.state_dict.source import Carried, StateSource
from torch_dcp_backport.state_dict.tree import check_types, rebuild, untouched
from torch_dcp_backport.transfer import TensorInfo, group_ranks

#: FQN -> tensor or small value.
FlatDict = dict[str, Any]


class DictPlan(LoadPlan):
    """The plan of a load into the entries of a flat dict, as torch's helpers do it."""

    def __init__(self, local: dict[str, Any], device: torch.device, cpu_offload: bool) -> None:
        super().__init__([])
        self.local = local
        self.device = device
        self.cpu_offload = cpu_offload
        #: The keys of the full dict.
        self.names: set[str] = set()
        #: Values that are no tensors; written once nothing can fail any more.
        self.small: dict[str, Any] = {}

    def add(self, inventory: Inventory) -> DictPlan:
        self.names = set(inventory)
        for key, offer in inventory.items():
            if key in self.local:
                self.add_entry(key, self.local[key], offer)
        return self

    def add_entry(self, key: str, live: Any, offer: Any) -> None:
        if not isinstance(live, compat.DTensor):
            if isinstance(offer, TensorInfo):
                # Scalars stay on the CPU.
                device = self.device if offer.shape else torch.device("cpu")
                self.destinations[key] = unsharded(offer, device, key)
            elif isinstance(offer, Carried):
                self.small[key] = offer.value
            elif self.usable(key, offer):
                self.small[key] = offer
        elif self.accepts(key, offer, tuple(live.shape)):
            if live.is_meta:
                self.destinations[key] = fresh(live, offer, self.device, key)
            else:
                self.want_in_place(key, live, key)

    def take(self, owner: str, value: torch.Tensor) -> None:
        self.local[owner] = value.cpu() if self.cpu_offload else value


class DictPlanner:
    """The load into a flat dict: its plan is made before, and there is no object to give values to."""

    title = "cannot distribute this state dict"

    def __init__(self, plan: DictPlan) -> None:
        self.made = plan
        self.problems = plan.problems

    def live(self) -> Iterable[object]:
        return self.made.local.values()

    def plan(self, inventory: Inventory, stages: Sequence[str]) -> DictPlan:
        return self.made.add(inventory)

    def apply(self, plan: DictPlan, fetch: Callable[[str], None]) -> None:
        """Nothing: `take` has put the values into the dict."""


@torch.no_grad()
def broadcast_state_dict(
    full_state_dict: FlatDict,
    local_state_dict: FlatDict,
    device: torch.device,
    pg: Group = None,
    strict: bool = False,
    cpu_offload: bool = False,
) -> None:
    """From the full dict of the group's first rank to every rank's `local_state_dict`, in place.

    Args:
        full_state_dict: FQN -> whole tensor or small value, on the first rank.
        local_state_dict: FQN -> this rank's DTensor (or plain tensor, or anything) to fill or replace.
        device: where new tensors are made.
        pg: the process group; None is the default group.
        strict: drop the entries of `local_state_dict` that the full dict does not have.
        cpu_offload: move what was received to the CPU.

    Raises:
        RuntimeError: wrong shapes or types; on every rank, before anything was written.
    """
    plan = DictPlan(local_state_dict, torch.device(device), cpu_offload)
    run(DictPlanner(plan), full_state_dict, broadcast=True, group=pg)
    local_state_dict.update(plan.small)
    if strict:
        for key in set(local_state_dict) - plan.names:
            del local_state_dict[key]


@torch.no_grad()
def distribute_state_dict(
    full_state_dict: FlatDict,
    local_state_dict: FlatDict,
    device: torch.device,
    pg: Group = None,
) -> None:
    """As `broadcast_state_dict`, where every rank holds the full dict: each takes its own slices."""
    plan = DictPlan(local_state_dict, torch.device(device), False)
    run(DictPlanner(plan), full_state_dict, broadcast=False)
    for key, value in full_state_dict.items():
        if not torch.is_tensor(value):
            local_state_dict[key] = value


@torch.no_grad()
def distribute_tensors(
    local_state_dict: dict[str, Any], keys: Iterable[str], device: torch.device, pg: Group = None
) -> None:
    """Put the DTensor in place of entries (DTensor, full tensor), holding this rank's slice. No traffic.

    The slice is written into the DTensor's own memory, or into new memory on `device` for a DTensor on the
    meta device. Other entries stay. `pg` is not needed.

    Raises:
        RuntimeError: wrong shapes; before anything was written.
    """
    entries: dict[Any, Any] = {
        key: local_state_dict[key] for key in keys if isinstance(local_state_dict.get(key), tuple)
    }
    plan = DictPlan({key: live for key, (live, _) in entries.items()}, torch.device(device), False)
    load = LocalLoad(DictPlanner(plan), StateSource({key: full for key, (_, full) in entries.items()}))
    load.plan = plan.add(load.source.inventory())
    plan.local.update(plan.small)
    load.call.raise_alone()
    load.move(FIRST)
    local_state_dict.update(plan.local)


@torch.no_grad()
def gather_state_dict(
    state_dict: Tree,
    *,
    pg: Group = None,
    device: Optional[torch.device] = None,
    cpu_offload: bool = False,
    ranks_only: tuple[int, ...] = (),
    type_check: bool = True,
) -> Tree:
    """`state_dict` with whole tensors in place of DTensors and ShardedTensors.

    Args:
        state_dict: only read.
        pg: the process group of the ShardedTensors; `ranks_only` counts in it.
        device: where ShardedTensors are gathered.
        cpu_offload: whole tensors, and all others, on the CPU.
        ranks_only: the ranks that get the result, and need memory for it; the others get an empty
            dict. () for all.
        type_check: refuse values that a checkpoint cannot hold; else they are deep-copied.

    Raises:
        RuntimeError: the ranks hold different keys, dtypes or layouts; on every rank.
        ValueError: an unsupported type (type_check).
    """
    if type_check:
        check_types(state_dict)
    to = None
    if ranks_only:
        members = group_ranks(pg)
        to = [members[rank] for rank in ranks_only if rank < len(members)]
    gathered = full_tree(state_dict, to, cpu_offload, group=pg, device=device)
    return rebuild(gathered, lambda _, value: untouched(value))  # type: ignore[no-any-return]
