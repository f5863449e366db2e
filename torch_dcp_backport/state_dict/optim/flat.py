"""Optimizer state dicts as one flat dict, and back.

The caller's dict is never changed.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Mapping
from typing import Any, Optional

import torch
from torch.optim import Optimizer

from torch_dcp_backport.state_dict.collect import Path, leaves
from torch_dcp_backport.state_dict.optim.absent import AbsentStates, missing_state
from torch_dcp_backport.state_dict.optim.form import GROUPS, PARAMS, STATE, fqns_of
from torch_dcp_backport.state_dict.optim.initial import Beginning
from torch_dcp_backport.state_dict.options import StateDictInfo

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
    optim: Optimizer,
    state_dict: Mapping[str, Any],
    info: StateDictInfo,
    beginning: Optional[Beginning] = None,
    fill: bool = True,
) -> dict[str, Any]:
    """The inverse of `flatten_optim_state`, for the groups that `optim` has.

    Args:
        beginning: what `optim` was like before the load.
        fill: where some of a parameter's states are missing (not strict), give those that `optim` has.

    Raises:
        KeyError: a group's value that is not there.
        RuntimeError: a missing state (strict), see `AbsentStates`.
    """
    beginning = beginning or Beginning(optim)
    flat = FlatDict(state_dict)
    absent = AbsentStates(beginning, info.strict, bool(flat.below(STATE)))
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for group in optim.param_groups:
        names: list[str] = []
        for param in group[PARAMS]:
            for fqn in sorted(fqns_of(param, info)):
                saved = [key[len(f"{GROUPS}.{fqn}.") :] for key in flat.below(f"{GROUPS}.{fqn}")]
                if fqn in info.shared_params_mapping and not saved:
                    # Of a shared parameter's names, the state dict holds the one that was saved.
                    continue
                names.append(fqn)
                own = optim.state.get(param)
                held = own or beginning.expected.get(param, {})
                loaded = flat.states(fqn, held, info.strict, fill and bool(own))
                if loaded:
                    state[fqn] = loaded
                else:
                    absent.judge(fqn, param, group, saved or None)
        groups.append(group_values(flat, group, names))
    absent.report()
    return {STATE: state, GROUPS: groups}


def group_values(flat: FlatDict, group: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """A param group as it was saved for the first of its parameters."""
    result: dict[str, Any] = {PARAMS: names}
    for key, held in group.items():
        if key == PARAMS:
            continue
        if not names:
            # Nothing of a group without parameters is in a flat dict.
            result[key] = held
            continue
        places = {fqn: f"{GROUPS}.{fqn}.{key}" for fqn in names}
        saved = {fqn: flat.values[place] for fqn, place in places.items() if place in flat.values}
        if not saved and any(flat.below(f"{GROUPS}.{fqn}") for fqn in names):
            # A value that the state dict does not know stays as it is.
            result[key] = held
            continue
        if not saved:
            raise KeyError(places[names[0]])
        first, value = next(iter(saved.items()))
        other = next((fqn for fqn, one in saved.items() if not same(one, value)), None)
        if other is not None:
            logger.warning(
                "parameters of one group were saved with different %s: taken is %s of %s, not %s of %s",
                key,
                value,
                first,
                saved[other],
                other,
            )
        result[key] = value
    return result


def same(one: Any, other: Any) -> bool:
    if torch.is_tensor(one) and torch.is_tensor(other):
        return one is other or torch.equal(one, other)
    return one is other or bool(one == other)


class FlatDict:
    """A flat state dict, whose keys are found by what they begin with."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.keys = sorted(values)

    def below(self, prefix: str) -> list[str]:
        """The keys that begin with `prefix` and a dot."""
        # "/" is the character after the dot.
        return self.keys[
            bisect.bisect_left(self.keys, f"{prefix}.") : bisect.bisect_left(self.keys, f"{prefix}/")
        ]

    def states(self, fqn: str, held: Mapping[Any, Any], strict: bool, fill: bool) -> dict[Any, Any]:
        """One parameter's states, nested again, under the keys of those that the optimizer holds.

        Raises:
            RuntimeError: some of `held` are there, and others are not (strict).
        """
        keys = self.below(f"{STATE}.{fqn}")
        if not keys:
            return {}
        found: dict[Any, Any] = {}
        seen: set[str] = set()
        missing = self.find(f"{STATE}.{fqn}", (), held, found, seen)
        if missing and strict:
            name = ".".join(map(str, next(iter(missing))))
            raise missing_state(fqn, f"{name!r} is not among its saved states")
        for path, value in missing.items() if fill else ():
            place(found, path, value)
        for key in keys:
            if key not in seen:
                place(found, tuple(key[len(f"{STATE}.{fqn}.") :].split(".")), self.values[key])
        return found

    def find(
        self, prefix: str, path: Path, held: Mapping[Any, Any], found: dict[Any, Any], seen: set[str]
    ) -> dict[Path, Any]:
        """Put the states that are named as `held` into `found` and their keys into `seen`.

        Returns:
            those that are not there, as they are held.
        """
        missing: dict[Path, Any] = {}
        for name, value in held.items():
            key = f"{prefix}.{name}"
            if key in self.values:
                found[name] = self.values[key]
                seen.add(key)
            elif not self.below(key):
                missing[(*path, name)] = value
            elif isinstance(value, Mapping):
                missing.update(self.find(key, (*path, name), value, found.setdefault(name, {}), seen))
        return missing


def place(tree: dict[Any, Any], path: Path, value: Any) -> None:
    for step in path[:-1]:
        tree = tree.setdefault(step, {})
    tree[path[-1]] = value
