"""The part of a nested state dict that is one optimizer's.

The caller's dict is never changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional

from torch.optim import Optimizer

from torch_dcp_backport.state_dict.optim.absent import AbsentStates
from torch_dcp_backport.state_dict.optim.form import GROUPS, PARAMS, STATE, fqns_of, is_numbered
from torch_dcp_backport.state_dict.optim.initial import Beginning
from torch_dcp_backport.state_dict.options import StateDictInfo


def split_optim_state(
    optim: Optimizer,
    loaded: Mapping[str, Any],
    info: StateDictInfo,
    beginning: Optional[Beginning] = None,
) -> dict[str, Any]:
    """The part of a state dict (of several optimizers perhaps) that is `optim`'s, in its order.

    Raises:
        RuntimeError: a missing state (strict), see `AbsentStates`.
    """
    states, saved = loaded[STATE], loaded[GROUPS]
    if is_numbered(loaded):
        return dict(loaded)
    absent = AbsentStates(beginning or Beginning(optim), info.strict, bool(states))
    group_of = {fqn: number for number, group in enumerate(saved) for fqn in group[PARAMS]}
    empty = [number for number, group in enumerate(saved) if not group[PARAMS]]
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for index, group in enumerate(optim.param_groups):
        names: list[str] = []
        sources: set[int] = set()
        for param in group[PARAMS]:
            for fqn in sorted(fqns_of(param, info)):
                if fqn in info.shared_params_mapping and fqn not in group_of:
                    # Of a shared parameter's names, the state dict holds the one that was saved.
                    continue
                names.append(fqn)
                source = group_of.get(fqn)
                if source is not None:
                    sources.add(source)
                if states.get(fqn):
                    state[fqn] = states[fqn]
                else:
                    absent.judge(fqn, param, group, None if source is None else saved[source])
        if not group[PARAMS] and empty:
            # Nothing names a group without parameters but its place.
            same_place = len(saved) == len(optim.param_groups) and index in empty
            sources.add(index if same_place else empty[0])
        groups.append(merged(names, [saved[number] for number in sorted(sources)], group))
    absent.report()
    return {STATE: state, GROUPS: groups}


def merged(
    names: list[str], sources: Sequence[Mapping[str, Any]], group: Mapping[str, Any]
) -> dict[str, Any]:
    """A param group with the values of the saved groups that hold its parameters; the last saved one wins."""
    result: dict[str, Any] = {PARAMS: names}
    for source in sources:
        result.update({key: value for key, value in source.items() if key != PARAMS})
    # A value that the state dict does not know stays as it is.
    for key, value in group.items():
        result.setdefault(key, value)
    return result
