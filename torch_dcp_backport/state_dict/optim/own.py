"""Give a state dict that was made here to an optimizer's own `load_state_dict()`.

torch looks for the parameter of every state in the lists of the groups, one after the other: the work of that
grows with the square of the number of parameters. Must never show another kind of list to code that is not
torch's (what looks into torch's frames, or changes its functions' byte code, sees it).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType, MethodType
from typing import Any

from torch.optim import Optimizer

from torch_dcp_backport.state_dict.form import GROUPS, PARAMS, STATE
from torch_dcp_backport.state_dict.optim.initial import is_hooked
from torch_dcp_backport.state_dict.patched import original_method
from torch_dcp_backport.state_dict.tree import Path, leaves, rebuild

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
    call_load(load, state_dict)
    restore_texts(optim, state_dict)


def call_load(load: Callable[..., Any], state_dict: Mapping[str, Any]) -> None:
    """Call a load_state_dict() by its argument's name, as torch does; by place if it has another name."""
    arguments: list[inspect.Parameter] = []
    with contextlib.suppress(TypeError, ValueError):
        arguments = list(inspect.signature(load).parameters.values())
    is_named = not arguments or any(
        (argument.name == "state_dict" and argument.kind is not argument.POSITIONAL_ONLY)
        or argument.kind is argument.VAR_KEYWORD
        for argument in arguments
    )
    if is_named:
        load(state_dict=state_dict)
    else:
        load(state_dict)


def restore_texts(optim: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Put the texts of a loaded state dict back into an optimizer's states.

    torch's own load_state_dict() takes a text for a list of letters, and leaves the text of a generator.
    """

    def leaf(path: Path, value: Any) -> Any:
        is_damaged = isinstance(value, str) and value.startswith(
            "<generator object Optimizer.load_state_dict"
        )
        return texts.get(path, value) if is_damaged else value

    for group, loaded in zip(getattr(optim, "param_groups", ()), state_dict.get(GROUPS, ())):
        for param, name in zip(group[PARAMS], loaded[PARAMS]):
            own = getattr(optim, "state", {}).get(param, {})
            for key, value in state_dict[STATE].get(name, {}).items():
                if key in own and isinstance(value, (str, Mapping, list, tuple)):
                    texts = leaves(value, opens=lambda _: True)
                    if any(isinstance(text, str) for text in texts.values()):
                        own[key] = rebuild(own[key], leaf)


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
