"""Hand a state dict that was made here to an optimizer's own `load_state_dict()`.

torch looks with every state for its parameter in the lists of the groups: of 4,000 parameters that was a
third of the whole load. Must never show another kind of list to code that is not torch's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import FunctionType, MethodType
from typing import Any

from torch.optim import Optimizer

from torch_dcp_backport.state_dict.form import GROUPS, PARAMS
from torch_dcp_backport.state_dict.optim.initial import is_hooked
from torch_dcp_backport.state_dict.patched import original_method

HOME = "torch.optim.optimizer"


class Looked(list):  # type: ignore[type-arg]
    """The parameters of a group, which say without a search whether one is among them."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.known = set(self)

    def __contains__(self, param: object) -> bool:
        return param in self.known

    def __deepcopy__(self, memo: object) -> list[Any]:
        return list(self)


def load_into(optim: Optimizer, state_dict: dict[str, Any]) -> None:
    """Call the optimizer's own load_state_dict().

    Args:
        state_dict: its groups are plain dicts that nobody else has, their parameters lists of FQNs.
    """
    load = original_method(optim, "load_state_dict")
    if is_torchs(load, optim) and not is_hooked(optim):
        groups = [{**group, PARAMS: Looked(group[PARAMS])} for group in state_dict[GROUPS]]
        state_dict = {**state_dict, GROUPS: groups}
    load(state_dict=state_dict)


def is_torchs(load: object, optim: Optimizer) -> bool:
    """Whether a method is torch's own, of this optimizer, and all that it calls with a group is torch's."""
    # Exact types: wrapt's proxies pass for what they stand before.
    if type(load) is MethodType:
        function, owner = load.__func__, load.__self__
    elif type(load) is functools.partial and not load.args:
        function, owner = load.func, load.keywords.get("self")
    else:
        return False
    called = vars(Optimizer).get("_process_value_according_to_param_policy")
    return (
        owner is optim
        and function is vars(Optimizer).get("load_state_dict")
        and all(map(is_of_torch, (function, getattr(called, "__func__", None))))
    )


def is_of_torch(function: object) -> bool:
    """Whether a function is one of torch's optimizers, within torch's own decorators."""
    while type(function) is FunctionType:
        home = str(function.__globals__.get("__name__"))
        inner = vars(function).get("__wrapped__")
        if inner is None:
            return home == HOME
        if not home.startswith("torch."):
            return False
        function = inner
    return False
