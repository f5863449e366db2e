"""The part of a nested state dict that is one optimizer's.

The caller's dict is never changed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import torch

from torch_dcp_backport.state_dict.form import GROUPS, PARAMS, STATE, check_params, is_numbered, named_params
from torch_dcp_backport.state_dict.optim.absent import AbsentStates
from torch_dcp_backport.state_dict.optim.flat import same
from torch_dcp_backport.state_dict.optim.initial import Beginning
from torch_dcp_backport.state_dict.options import StateDictInfo

logger = logging.getLogger("torch_dcp_backport.state_dict.optimizer")


def split_optim_state(
    beginning: Beginning,
    loaded: Mapping[str, Any],
    info: StateDictInfo,
    left_out: Optional[bool] = None,
) -> dict[str, Any]:
    """The part of a state dict (of several optimizers perhaps) that is one optimizer's, in its order.

    What is missing (strict) is noted in `beginning.missing`.

    Args:
        left_out: as of `AbsentStates`.
    """
    optim, states, saved = beginning.optim, loaded[STATE], loaded[GROUPS]
    if is_numbered(loaded):
        check_numbered(beginning, loaded, info.strict)
        return dict(loaded)
    check_params(optim, info.fqn_param_mapping)
    absent = AbsentStates(beginning, info.strict, bool(states), left_out)
    group_of = {fqn: number for number, group in enumerate(saved) for fqn in group[PARAMS]}
    empty = [number for number, group in enumerate(saved) if not group[PARAMS]]
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for index, group in enumerate(optim.param_groups):
        fqns: list[str] = []
        numbers: set[int] = set()
        for fqn, param in named_params(group, info, group_of.__contains__):
            fqns.append(fqn)
            number = group_of.get(fqn)
            if number is not None:
                numbers.add(number)
            if states.get(fqn):
                state[fqn] = states[fqn]
            absent.judge(fqn, param, group, None if number is None else saved[number], states.get(fqn) or ())
        if not group[PARAMS] and empty:
            # Nothing names a group without parameters but its place.
            same_place = len(saved) == len(optim.param_groups) and index in empty
            numbers.add(index if same_place else empty[0])
        groups.append(merged(fqns, [saved[number] for number in sorted(numbers)], group))
    absent.report()
    return {STATE: state, GROUPS: groups}


def check_numbered(beginning: Beginning, loaded: Mapping[str, Any], strict: bool) -> None:
    """Note what is missing of the states of parameters that have some.

    Whole states may be absent: the optimizer's own `state_dict()` has none of a parameter without gradients.
    """
    absent = AbsentStates(beginning, strict, stateful=False, left_out=True)
    for group, saved in zip(beginning.optim.param_groups, loaded[GROUPS]):
        for param, number in zip(group[PARAMS], saved[PARAMS]):
            states = loaded[STATE].get(number)
            if states:
                absent.judge(str(number), param, group, saved, states)
    absent.report()


def merged(fqns: list[str], saved: Sequence[Mapping[str, Any]], group: Mapping[str, Any]) -> dict[str, Any]:
    """A param group with the values of the saved groups that hold its parameters; the last one wins."""
    result: dict[str, Any] = {PARAMS: fqns}
    for saved_group in saved:
        # A scheduler sets a tensor in place: groups that were one group would go on with one rate.
        values = {
            name: value.clone() if torch.is_tensor(value) else value
            for name, value in saved_group.items()
            if name != PARAMS
        }
        for name in values.keys() & result.keys():
            if not same(values[name], result[name]):
                logger.warning(
                    "saved param groups with different %s are one group now (%s, ...): taken is %s, not %s",
                    name,
                    ", ".join(fqns[:2]),
                    values[name],
                    result[name],
                )
        result.update(values)
    # A value that the state dict does not know stays as it is.
    for name, value in group.items():
        result.setdefault(name, value)
    return result
