"""Where an optimizer wants the tensors of a full state dict, and its own dict once they are there.

Nothing is written into a tensor that exists: it may be a parameter, or another state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import nn
from torch.optim import Optimizer

from torch_dcp_backport import compat
from torch_dcp_backport.state_dict.collect import Index, Path, leaves
from torch_dcp_backport.state_dict.destination import Becomes, Destination, local_of, whole
from torch_dcp_backport.state_dict.load import Load
from torch_dcp_backport.state_dict.model import own_method
from torch_dcp_backport.state_dict.optim.form import GROUPS, PARAMS, STATE
from torch_dcp_backport.state_dict.optim.get import named_state
from torch_dcp_backport.state_dict.optim.initial import (
    Beginning,
    Expected,
    expected_of,
    first_states,
    is_hooked,
    params_of,
)
from torch_dcp_backport.state_dict.source import Carried
from torch_dcp_backport.transfer import Problem, TensorInfo, layout_of, misfit, spell_key
from torch_dcp_backport.transfer.layout import Layout

TITLE = "cannot load this optimizer state dict"

logger = logging.getLogger("torch_dcp_backport.state_dict.optimizer")

#: Key of an inventory: the parameters of the source's optimizer for which it gives no state.
NAMES: Path = ("names",)


class Boxed(NamedTuple):
    """A group's value. It travels with the inventory even if it is a tensor (a learning rate may be one)."""

    value: Any


def paths_of(state: Mapping[str, Any]) -> dict[Path, Any]:
    """path -> value: ("state", FQN, name, ...) and ("param_groups", index, name)."""
    if not state:
        return {}
    found: dict[Path, Any] = {}
    for fqn, states in state[STATE].items():
        found.update(
            {(STATE, fqn, *path): value for path, value in leaves(states, holds_tensors).items() if path}
        )
    for index, group in enumerate(state[GROUPS]):
        for name, value in group.items():
            if name != PARAMS:
                found[GROUPS, index, name] = Boxed(value)
    return found


def holds_tensors(values: Sequence[Any]) -> bool:
    return any(torch.is_tensor(value) for value in values)


class OptimizerLoad(Load):
    """A load of full tensors into one optimizer, which stays as it is until `apply`."""

    title = TITLE

    def __init__(
        self,
        model: nn.Module,
        optim: Optimizer,
        beginning: Beginning,
        problems: list[Problem],
        strict: bool = True,
    ) -> None:
        super().__init__(problems)
        self.model = model
        self.optim = optim
        self.beginning = beginning
        self.strict = strict
        self.applied = False
        #: FQN -> parameter; the FQNs of each group.
        self.params: dict[str, torch.Tensor] = {}
        self.names: list[list[str]] = []
        #: path -> value, of the optimizer as it is, or Expected; replaced by what is loaded.
        self.values: dict[Path, Any] = {}
        #: Of what states are laid out as, and its misfit; a parameter has several such states.
        self.layouts: dict[torch.Tensor, tuple[Layout, Optional[Problem]]] = {}

    def look(self) -> None:
        """Make the states that the optimizer does not have yet, and find what it holds; comes first."""
        self.beginning.make_states()
        local = named_state(self.model, self.optim)
        self.params = {
            fqn: param
            for packed, group in zip(local[GROUPS], self.optim.param_groups)
            for fqn, param in zip(packed[PARAMS], group[PARAMS])
        }
        self.names = [group[PARAMS] for group in local[GROUPS]]
        self.values = paths_of(local)
        for fqn, param in self.params.items():
            for name, expected in self.beginning.expected.get(param, {}).items():
                self.values[STATE, fqn, name] = expected

    def live(self) -> Iterable[object]:
        yield from params_of(self.optim)
        yield from (value for value in self.values.values() if isinstance(value, compat.DTensor))

    def plan(self, inventory: Mapping[Any, Any]) -> None:
        inventory = dict(inventory)
        bare = inventory.pop(NAMES, None)
        if bare is not None and self.strict:
            # Another rank's part of a model (a pipeline's stage) is not in the source's optimizer.
            known = {path[1] for path in inventory if path[0] == STATE} | set(bare.value)
            self.problems += [
                Problem("Missing optimizer state", fqn, "no such parameter on the source", "its state")
                for fqn in self.params
                if fqn not in known
            ]
        self.drop_replaced(inventory)
        self.settle_absent(inventory)
        for path, offered in inventory.items():
            if path[0] == GROUPS:
                self.plan_group_value(path, offered)
            elif path[1] in self.params:
                self.plan_state(path, offered)
        self.layouts.clear()
        untouched = [path for path in self.values if path[0] == STATE and path not in inventory]
        if untouched and len(untouched) < len(self.values):
            logger.warning(
                "%d optimizer states are not in the state dict and keep their values, for instance %s",
                len(untouched),
                spell_key(untouched[0]),
            )

    def drop_replaced(self, inventory: Mapping[Any, Any]) -> None:
        """Forget values whose place the checkpoint fills with another structure.

        A list grows and shrinks with it, and a value gives way to a dict or a list and the other way round.
        """
        offered = {path for path in inventory if path[0] == STATE}
        branches: set[Path] = set()
        lists: set[Path] = set()
        for path in offered:
            for length in range(3, len(path)):
                branches.add(path[:length])
                if isinstance(path[length], Index):
                    lists.add(path[:length])

        def is_replaced(path: Path) -> bool:
            for length in range(3, len(path)):
                parent, step = path[:length], path[: length + 1]
                listed = parent in lists or (parent in branches and isinstance(path[length], Index))
                if parent in offered or (listed and step not in offered and step not in branches):
                    return True
            return path in branches

        for path in [path for path in self.values if is_replaced(path)]:
            del self.values[path]

    def settle_absent(self, inventory: Mapping[Any, Any]) -> None:
        """Decide about the parameters that start from nothing: those not in the checkpoint stay so.

        Where only some of their states are there, the others are what a first step would find.
        """
        offered = {path[1] for path in inventory if path[0] == STATE}
        partly: set[str] = set()
        for path in list(self.values):
            if path[0] != STATE or path in inventory:
                continue
            fqn = str(path[1])
            if fqn in offered and isinstance(self.values[path], Expected):
                partly.add(fqn)
            elif fqn not in offered and self.beginning.starts(self.params[fqn], self.strict):
                del self.values[path]
        if partly:
            params = {self.params[fqn] for fqn in partly}
            first = first_states(self.optim, params, frozen=True)
            for fqn in partly:
                for name, value in first[self.params[fqn]].items():
                    self.values[STATE, fqn, name] = value

    def plan_group_value(self, path: Path, offered: Boxed) -> None:
        live = self.values.get(path, Boxed(None)).value
        if torch.is_tensor(live) and torch.is_tensor(offered.value):
            offered = Boxed(offered.value.to(live.device))
        self.values[path] = offered

    def plan_state(self, path: Path, offered: Any) -> None:
        if self.beginning.kind is not None and len(path) > 3:
            what = "not a state that this optimizer has"
            self.problems.append(
                Problem(what, spell_key(path[:3]), "a dict or a list", "a tensor or a number")
            )
            return
        live = self.values.get(path)
        if torch.is_tensor(live):
            expected: Any = expected_of(live)
        else:
            expected = live if isinstance(live, Expected) else None
        if self.beginning.kind is None or expected is None:
            self.plan_any(path, expected, offered)
        elif expected.shape == () and isinstance(offered, (int, float)):
            self.take(path, offered)
        elif offered is None and type(self.optim) is torch.optim.SGD:
            # Momentum that has not begun.
            self.take(path, offered)
        elif self.accepts(path, offered, expected.shape):
            self.want_new(path, expected)

    def take(self, owner: Path, value: Any) -> None:
        self.values[owner] = value

    def plan_any(self, path: Path, expected: Any, offered: Any) -> None:
        """A state of which nothing is known but what is held in its place, if anything is."""
        param = self.params[str(path[1])]
        if isinstance(offered, Carried) and not isinstance(expected and expected.like, compat.DTensor):
            # Quantized states of a plain model: the optimizer's own code takes them as they are.
            self.take(path, offered.value)
            return
        if not self.usable(path, offered):
            return
        if not isinstance(offered, TensorInfo):
            self.take(path, offered)
        elif expected is not None and expected.shape == offered.shape:
            sharded = isinstance(expected.like, compat.DTensor)
            self.want_new(path, expected if sharded else expected._replace(dtype=offered.dtype))
        elif offered.shape == tuple(param.shape):
            # In the parameter's memory format: fused kernels go by memory, not by strides.
            self.want_new(path, expected_of(param)._replace(dtype=offered.dtype))
        elif expected is not None and isinstance(expected.like, compat.DTensor):
            self.accepts(path, offered, expected.shape)
        else:
            # Scalars are on the CPU, as where an optimizer makes them itself.
            device = local_of(param).device if offered.shape else torch.device("cpu")
            self.destinations[path] = whole(offered, device, path)

    def want_new(self, path: Path, expected: Expected) -> None:
        """A new tensor with the layout and memory format of what is expected."""
        like, dtype = expected.like, expected.dtype
        if not expected.shape:
            self.destinations[path] = whole(TensorInfo((), dtype), expected.device, path)
            return
        local = local_of(like)
        if like not in self.layouts:
            layout = layout_of(like)
            self.layouts[like] = layout, misfit(path, local, layout)
        layout, problem = self.layouts[like]
        if problem:
            self.problems.append(problem._replace(key=spell_key(path)))
        self.destinations[path] = Destination(layout, dtype, local.device, path, Becomes.STATE, like)

    @property
    def is_custom(self) -> bool:
        return is_hooked(self.optim) or not type(self.optim).__module__.startswith("torch.")

    def apply(self, fetch: Callable[[str], None]) -> None:
        own_method(self.optim, "load_state_dict")(state_dict=self.result())
        self.applied = True

    def written(self) -> str:
        return "its states" if self.applied else ""

    def result(self) -> dict[str, Any]:
        """The state dict for the optimizer's own load_state_dict()."""
        # In the optimizer's own order.
        state: dict[str, Any] = {fqn: {} for names in self.names for fqn in names}
        groups: list[dict[str, Any]] = [{} for _ in self.names]
        for path, value in self.values.items():
            if path[0] == GROUPS:
                groups[int(str(path[1]))][str(path[2])] = value.value
            else:
                place(state, path[1:], value)
        for group, names in zip(groups, self.names):
            group[PARAMS] = names
        return {STATE: {fqn: relisted(states) for fqn, states in state.items() if states}, GROUPS: groups}


def place(tree: dict[Any, Any], path: Path, value: Any) -> None:
    for step in path[:-1]:
        tree = tree.setdefault(step, {})
    tree[path[-1]] = value


def relisted(tree: Any) -> Any:
    """Lists again, where `leaves` opened lists."""
    if not isinstance(tree, dict):
        return tree
    if tree and all(isinstance(key, Index) for key in tree):
        return [relisted(tree[key]) for key in sorted(tree)]
    return {key: relisted(value) for key, value in tree.items()}
