"""The plan of an optimizer's load of a full state dict, as data.

Nothing is written into a tensor that exists: it may be a parameter, or another state.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional

import torch
from torch.optim import Optimizer

from torch_dcp_backport import compat
from torch_dcp_backport.state_dict.destination import (
    Becomes,
    Destination,
    local_of,
    unsharded,
    value_of,
)
from torch_dcp_backport.state_dict.form import GROUPS, PARAMS, STATE
from torch_dcp_backport.state_dict.load import Inventory, LoadPlan
from torch_dcp_backport.state_dict.optim.get import Params, named_state, params_by_fqn
from torch_dcp_backport.state_dict.optim.initial import (
    Beginning,
    Expected,
    expected_of,
    first_states,
    is_hooked,
)
from torch_dcp_backport.state_dict.source import Carried
from torch_dcp_backport.state_dict.tree import ListIndex, Path, leaves, place, with_lists
from torch_dcp_backport.transfer import (
    Layout,
    Problem,
    TensorInfo,
    layout_of,
    misfit,
    part_of,
    spell_key,
    whole,
)

logger = logging.getLogger("torch_dcp_backport.state_dict.optimizer")

#: Key of an inventory: the parameters of the source's optimizer for which it gives no state.
STATELESS: Path = ("stateless",)


class GroupValue(NamedTuple):
    """A group's value. It travels with the inventory even if it is a tensor (a learning rate may be one)."""

    value: Any


def paths_of(state: Mapping[str, Any]) -> dict[Path, Any]:
    """path -> value: ("state", FQN, name, ...) and ("param_groups", index, name)."""
    if not state:
        return {}
    values: dict[Path, Any] = {}
    for fqn, states in state[STATE].items():
        values.update(
            {(STATE, fqn, *path): value for path, value in leaves(states, holds_tensors).items() if path}
        )
    for index, group in enumerate(state[GROUPS]):
        for name, value in group.items():
            if name != PARAMS:
                values[GROUPS, index, name] = GroupValue(value)
    return values


def holds_tensors(values: Sequence[Any]) -> bool:
    return any(map(torch.is_tensor, values))


@dataclass(eq=False)
class OptimOutline:
    """An optimizer as a load finds it, by FQN."""

    beginning: Beginning
    strict: bool
    params: Mapping[str, torch.Tensor] = field(default_factory=dict)
    #: The FQNs of each group.
    groups: Sequence[Sequence[str]] = ()
    #: path -> value, or Expected where the optimizer would make the state.
    values: dict[Path, Any] = field(default_factory=dict)

    @property
    def optim(self) -> Optimizer:
        return self.beginning.optim


def outline_of(params: Params, beginning: Beginning, strict: bool) -> OptimOutline:
    """Outline an optimizer; first make the states that it lacks, where its loading code may look at them."""
    beginning.make_states()
    state = named_state(params, beginning.optim)
    by_fqn = params_by_fqn(beginning.optim, state)
    values = paths_of(state)
    for fqn, param in by_fqn.items():
        for name, expected in beginning.expected.get(param, {}).items():
            values[STATE, fqn, name] = expected
    return OptimOutline(beginning, strict, by_fqn, [group[PARAMS] for group in state[GROUPS]], values)


class OptimPlan(LoadPlan):
    """The destinations of an optimizer's states, and the values that have arrived."""

    def __init__(self, problems: list[Problem], outline: OptimOutline) -> None:
        super().__init__(problems)
        self.outline = outline
        optim = outline.optim
        self.user_code = not type(optim).__module__.startswith("torch.") or is_hooked(optim)
        #: The outline's own, each until its loaded value replaces it: a copy would keep what is replaced.
        self.values = outline.values
        #: Tensor that states lie like -> its layout and misfit; a parameter has several such states.
        self.layouts: dict[torch.Tensor, tuple[Layout, Optional[Problem]]] = {}

    def take(self, owner: Path, value: Any) -> None:
        self.values[owner] = value

    def want_new(self, path: Path, expected: Expected) -> None:
        """Want a new tensor with the layout and memory format of what is expected."""
        like, dtype = expected
        local = local_of(like)
        if not expected.shape:
            self.destinations[path] = unsharded(TensorInfo((), dtype), local.device, path)
            return
        if like not in self.layouts:
            layout = layout_of(like)
            self.layouts[like] = layout, misfit(path, local, layout, self.rank)
        layout, problem = self.layouts[like]
        if problem:
            self.problems.append(problem._replace(key=spell_key(path)))
        self.destinations[path] = Destination(layout, dtype, local.device, path, Becomes.STATE, like)

    def result(self) -> dict[str, Any]:
        """The state dict for the optimizer's own load_state_dict()."""
        # In the optimizer's own order.
        state: dict[str, Any] = {fqn: {} for fqns in self.outline.groups for fqn in fqns}
        groups: list[dict[str, Any]] = [{} for _ in self.outline.groups]
        for path, value in self.values.items():
            if path[0] == GROUPS:
                groups[int(str(path[1]))][str(path[2])] = value.value
            else:
                place(state, path[1:], value)
        for group, fqns in zip(groups, self.outline.groups):
            group[PARAMS] = fqns
        return {STATE: {fqn: with_lists(states) for fqn, states in state.items() if states}, GROUPS: groups}


def plan_optimizer(outline: OptimOutline, inventory: Inventory, problems: list[Problem]) -> OptimPlan:
    """Plan the load of a full state dict."""
    plan = OptimPlan(problems, outline)
    inventory = dict(inventory)
    stateless = inventory.pop(STATELESS, None)
    if stateless is not None and outline.strict:
        # Another rank's part of a model (a pipeline's stage) is not in the source's optimizer.
        fqns = {path[1] for path in inventory if path[0] == STATE} | set(stateless.value)
        problems += [
            Problem("Missing optimizer state", fqn, "no such parameter on the source", "its state")
            for fqn in outline.params
            if fqn not in fqns
        ]
    drop_replaced(plan.values, inventory)
    decide_absent(plan, inventory)
    for path, offer in inventory.items():
        if path[0] == GROUPS:
            plan_group_value(plan, path, offer)
        elif path[1] in outline.params:
            plan_state(plan, path, offer)
    plan.layouts.clear()
    untouched = [path for path in plan.values if path[0] == STATE and path not in inventory]
    if untouched and len(untouched) < len(plan.values):
        logger.warning(
            "%d optimizer states are not in the state dict and keep their values, for instance %s",
            len(untouched),
            spell_key(untouched[0]),
        )
    return plan


def drop_replaced(values: dict[Path, Any], inventory: Inventory) -> None:
    """Forget values whose place the checkpoint fills with another structure.

    A list grows and shrinks with it, and a value gives way to a dict or a list and the other way round.
    """
    offered = {path for path in inventory if path[0] == STATE}
    branches: set[Path] = set()
    lists: set[Path] = set()
    for path in offered:
        for length in range(3, len(path)):
            branches.add(path[:length])
            if isinstance(path[length], ListIndex):
                lists.add(path[:length])

    def is_replaced(path: Path) -> bool:
        for length in range(3, len(path)):
            parent, step = path[:length], path[: length + 1]
            listed = parent in lists or (parent in branches and isinstance(path[length], ListIndex))
            if parent in offered or (listed and step not in offered and step not in branches):
                return True
        return path in branches

    for path in [path for path in values if is_replaced(path)]:
        del values[path]


def decide_absent(plan: OptimPlan, inventory: Inventory) -> None:
    """Decide about the parameters that start from nothing: those not in the checkpoint stay so.

    A parameter with some of its states gets the others as a first step would find them.
    """
    outline, values = plan.outline, plan.values
    offered = {path[1] for path in inventory if path[0] == STATE}
    partly: set[str] = set()
    for path in list(values):
        if path[0] != STATE or path in inventory:
            continue
        fqn = str(path[1])
        if fqn in offered and isinstance(values[path], Expected):
            partly.add(fqn)
        elif fqn not in offered and outline.beginning.starts(outline.params[fqn], outline.strict):
            del values[path]
    if partly:
        first = first_states(outline.optim, {outline.params[fqn] for fqn in partly}, frozen=True)
        for fqn in partly:
            for name, value in first[outline.params[fqn]].items():
                values[STATE, fqn, name] = value


def plan_group_value(plan: OptimPlan, path: Path, offer: GroupValue) -> None:
    live = plan.values.get(path, GroupValue(None)).value
    if torch.is_tensor(live) and torch.is_tensor(offer.value):
        offer = GroupValue(offer.value.to(live.device))
    plan.values[path] = offer


def plan_state(plan: OptimPlan, path: Path, offer: Any) -> None:
    kind, live = plan.outline.beginning.kind, plan.values.get(path)
    if kind is not None and len(path) > 3:
        what = "not a state that this optimizer has"
        plan.problems.append(Problem(what, spell_key(path[:3]), "a dict or a list", "a tensor or a number"))
        return
    expected = expected_of(live) if torch.is_tensor(live) else live
    if not isinstance(expected, Expected):
        plan_unknown_state(plan, path, None, offer)
    elif kind is None:
        plan_unknown_state(plan, path, expected, offer)
    elif expected.shape == () and isinstance(offer, (int, float)):
        plan.values[path] = offer
    elif offer is None and type(plan.outline.optim) is torch.optim.SGD:
        # Momentum that has not begun.
        plan.values[path] = offer
    elif plan.accepts(path, offer, expected.shape):
        plan.want_new(path, expected)


def part_of_carried(like: torch.Tensor, value: torch.Tensor, rank: int) -> Any:
    """This rank's part of a wrapper without slices (8-bit states), as a new state like a sharded one."""
    layout, local = layout_of(like), local_of(like)
    dense = torch.empty(value.shape, dtype=value.dtype, device=value.device).copy_(value)
    part = part_of(dense, whole(layout.shape), layout.own_box(rank)).to(local.device, copy=True)
    return value_of(Destination(layout, part.dtype, part.device, None, Becomes.STATE, like), part)


def plan_unknown_state(plan: OptimPlan, path: Path, expected: Optional[Expected], offer: Any) -> None:
    """Plan a state of an unknown kind; `expected` is the tensor in its place, if there is one."""
    param = plan.outline.params[str(path[1])]
    sharded = expected is not None and isinstance(expected.like, compat.DTensor)
    if isinstance(offer, Carried) and not sharded:
        # Quantized states of a plain model: the optimizer's own code takes them as they are.
        plan.values[path] = offer.value
    elif expected and isinstance(offer, Carried) and type(offer.value) not in compat.PLAIN_TENSORS:
        info = TensorInfo(tuple(offer.value.shape), offer.value.dtype)
        if plan.accepts(path, info, expected.shape):
            plan.values[path] = part_of_carried(expected.like, offer.value, plan.rank)
    elif not plan.usable(path, offer):
        return
    elif not isinstance(offer, TensorInfo):
        plan.values[path] = offer
    elif expected is not None and expected.shape == offer.shape:
        plan.want_new(path, expected if sharded else expected._replace(dtype=offer.dtype))
    elif offer.shape == tuple(param.shape):
        # In the parameter's memory format: fused kernels go by memory, not by strides.
        plan.want_new(path, expected_of(param)._replace(dtype=offer.dtype))
    elif expected is not None and sharded:
        plan.accepts(path, offer, expected.shape)
    else:
        # Scalars are on the CPU, as where an optimizer makes them itself.
        device = local_of(param).device if offer.shape else torch.device("cpu")
        plan.destinations[path] = unsharded(offer, device, path)
