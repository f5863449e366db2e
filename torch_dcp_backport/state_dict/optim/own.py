"""Give a state dict that was made here to an optimizer's own `load_state_dict()`.

torch looks for the parameter of every state in the lists of the groups, one after the other: the work of that
grows with the square of the number of parameters. Must never show another kind of list to code that is not
torch's (what looks into torch's frames, or changes its functions' byte code, sees it).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from types import FunctionType, MethodType
from typing import Any

from torch.optim import Optimizer

from torch_dcp_backport.state_dict.form import GROUPS, PARAMS
from torch_dcp_backport.state_dict.optim.initial import is_hooked
from torch_dcp_backport.state_dict.patched import original_method

NAME, HOME, WRAPPER = "__name__", "torch.optim.optimizer", "torch._compile"


class IndexedParams(list):  # type: ignore[type-arg]
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
        state_dict: its groups are plain dicts that no other code has, their parameters lists of FQNs.
    """
    load = original_method(optim, "load_state_dict")
    if is_torchs(load, optim) and not is_hooked(optim):
        groups = [{**group, PARAMS: IndexedParams(group[PARAMS])} for group in state_dict[GROUPS]]
        state_dict = {**state_dict, GROUPS: groups}
    load(state_dict=state_dict)


def is_torchs(load: object, optim: Optimizer) -> bool:
    """Whether a method is torch's own, of this optimizer, and all that it calls with a group is torch's."""
    # Exact types: wrapt's proxies pass isinstance for the object that they wrap.
    if type(load) is MethodType:
        function, owner = load.__func__, load.__self__
    elif type(load) is functools.partial and not load.args:
        function, owner = load.func, load.keywords.get("self")
    else:
        return False
    policy = vars(Optimizer).get("_process_value_according_to_param_policy")
    # In every release torch wraps it once, to keep torch.compile out.
    if function is not vars(Optimizer).get("load_state_dict") or names_of(function).get(NAME) != WRAPPER:
        return False
    names = names_of(vars(function).get("__wrapped__"))
    return (
        owner is optim
        and names.get(NAME) == HOME
        and names.get("Optimizer") is Optimizer
        and names.get("deepcopy") is copy.deepcopy
        and type(policy) is staticmethod
        and names_of(policy.__func__).get(NAME) == HOME
    )


def names_of(function: object) -> dict[str, Any]:
    """The names that a plain function's code looks up in its module; none for another object."""
    return function.__globals__ if type(function) is FunctionType else {}
