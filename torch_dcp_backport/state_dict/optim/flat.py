"""Optimizer state dicts as one flat dict, and back.

The caller's dict is never changed.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Mapping
from typing import Any

import torch

from torch_dcp_backport.state_dict.form import GROUPS, PARAMS, STATE, check_params, named_params
from torch_dcp_backport.state_dict.optim.absent import AbsentStates
from torch_dcp_backport.state_dict.optim.initial import Beginning
from torch_dcp_backport.state_dict.options import StateDictInfo
from torch_dcp_backport.state_dict.tree import Path, leaves, place

logger = logging.getLogger("torch_dcp_backport.state_dict.optimizer")


def flatten_optim_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """{"state": ..., "param_groups": ...} as one flat dict.

    Keys are "state.FQN.name" and "param_groups.FQN.name"; every parameter carries its group's
    values, so that a reader with other groups finds them (pipeline parallel resharding). Lists,
    texts and None are values like any other.
    """
    flat: dict[str, Any] = {}
    for fqn, states in state_dict[STATE].items():
        for path, value in leaves(states, opens=lambda _: False).items():
            # A parameter without states has no path below it.
            if path:
                flat[".".join([STATE, fqn, *map(str, path)])] = value
    for group in state_dict[GROUPS]:
        for fqn in group[PARAMS]:
            for name, value in group.items():
                if name != PARAMS:
                    flat[f"{GROUPS}.{fqn}.{name}"] = value
    return flat


def unflatten_optim_state(
    beginning: Beginning,
    state_dict: Mapping[str, Any],
    info: StateDictInfo,
    fill: bool = True,
) -> dict[str, Any]:
    """The inverse of `flatten_optim_state`, for the groups that an optimizer has.

    What is missing (strict) is noted in `beginning.missing`.

    Args:
        fill: where some of a parameter's states are missing (not strict), give those that the optimizer has.

    Raises:
        KeyError: a group's value that is not there.
    """
    optim = beginning.optim
    check_params(optim, info.fqn_param_mapping)
    flat = FlatDict(state_dict)
    absent = AbsentStates(beginning, info.strict, bool(flat.below(STATE)))
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for group in optim.param_groups:
        fqns: list[str] = []
        for fqn, param in named_params(group, info, flat.names_of_group):
            fqns.append(fqn)
            existing = optim.state.get(param)
            expected = existing or beginning.expected.get(param, {})
            states, missing = flat.states(fqn, expected)
            if states:
                state[fqn] = states
            saved = flat.group_of(fqn) or None
            absent.judge(fqn, param, group, saved, states, missing if beginning.kind is None else ())
            for path in missing if existing and fill and not info.strict else ():
                place(states, path, missing[path])
        groups.append(group_values(flat, group, fqns))
    absent.report()
    return {STATE: state, GROUPS: groups}


def group_values(flat: FlatDict, group: Mapping[str, Any], fqns: list[str]) -> dict[str, Any]:
    """Return the values of a param group, each as it was saved for the first parameter that has it."""
    result: dict[str, Any] = {PARAMS: fqns}
    for name, value in group.items():
        if name == PARAMS:
            continue
        # Nothing of a group without parameters is in a flat dict.
        keys = {fqn: f"{GROUPS}.{fqn}.{name}" for fqn in fqns}
        saved = {fqn: flat.values[key] for fqn, key in keys.items() if key in flat.values}
        if not saved:
            if fqns and not any(map(flat.names_of_group, fqns)):
                raise KeyError(keys[fqns[0]])
            # A value that the state dict does not know stays as it is.
            result[name] = value
            continue
        first = next(iter(saved))
        result[name] = saved[first]
        other = next((fqn for fqn in saved if not same(saved[fqn], saved[first])), None)
        if other is not None:
            logger.warning(
                "parameters of one group were saved with different %s: taken is %s of %s, not %s of %s",
                name,
                saved[first],
                first,
                saved[other],
                other,
            )
    return result


def same(value: Any, other: Any) -> bool:
    if torch.is_tensor(value) and torch.is_tensor(other):
        return value is other or torch.equal(value, other)
    return value is other or bool(value == other)


class FlatDict:
    """A flat state dict, with its keys by prefix."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.keys = sorted(values)

    def below(self, prefix: str) -> list[str]:
        """The keys that begin with `prefix` and a dot."""
        # "/" is the character after the dot.
        return self.keys[
            bisect.bisect_left(self.keys, f"{prefix}.") : bisect.bisect_left(self.keys, f"{prefix}/")
        ]

    def names_of_group(self, fqn: str) -> list[str]:
        """The names of the group's values that were saved for a parameter."""
        prefix = f"{GROUPS}.{fqn}"
        return [key[len(prefix) + 1 :] for key in self.below(prefix)]

    def group_of(self, fqn: str) -> dict[str, Any]:
        """The group's values that were saved for a parameter."""
        return {name: self.values[f"{GROUPS}.{fqn}.{name}"] for name in self.names_of_group(fqn)}

    def states(self, fqn: str, expected: Mapping[Any, Any]) -> tuple[dict[Any, Any], dict[Path, Any]]:
        """One parameter's states, nested again, under the keys of those that the optimizer has or would make.

        Returns:
            the states, and of a parameter that has some: those of `expected` that are not there.
        """
        keys = self.below(f"{STATE}.{fqn}")
        states: dict[Any, Any] = {}
        if not keys:
            return states, {}
        used: set[str] = set()
        missing = self.find(f"{STATE}.{fqn}", (), expected, states, used)
        for key in keys:
            if key not in used:
                place(states, tuple(key[len(f"{STATE}.{fqn}.") :].split(".")), self.values[key])
        return states, missing

    def find(
        self, prefix: str, path: Path, expected: Mapping[Any, Any], states: dict[Any, Any], used: set[str]
    ) -> dict[Path, Any]:
        """Put the states that are named as `expected` into `states` and their keys into `used`.

        Returns:
            those that are not there, as they are expected.
        """
        missing: dict[Path, Any] = {}
        for name, value in expected.items():
            key = f"{prefix}.{name}"
            if key in self.values:
                states[name] = self.values[key]
                used.add(key)
            elif not self.below(key):
                missing[(*path, name)] = value
            elif isinstance(value, Mapping):
                missing.update(self.find(key, (*path, name), value, states.setdefault(name, {}), used))
        return missing
