"""The options of param groups in a checkpoint: put together from all ranks, and compared at a load.

Pure functions of groups as `torch.optim.Optimizer.state_dict` has them, with FQNs for parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torch_dcp_backport.dist_checkpointing.core import CheckpointingException

logger = logging.getLogger("torch_dcp_backport.dist_checkpointing")

PARAMS = "params"
Group = Mapping[str, Any]


def options_of(group: Group) -> dict[str, Any]:
    """Return the options of a group, without its parameters."""
    return {name: value for name, value in group.items() if name != PARAMS}


def united(groups_by_rank: Mapping[int, Sequence[Group]]) -> list[dict[str, Any]]:
    """Return groups with the parameters of all ranks, each with the options that it has on its rank.

    Groups with the same options become one. A parameter that several ranks have keeps the options of the
    lowest.

    Raises:
        CheckpointingException: ranks have the same parameter with different options.
    """
    merged: list[dict[str, Any]] = []
    places: dict[str, tuple[int, int]] = {}
    for rank, groups in sorted(groups_by_rank.items()):
        for number, group in enumerate(groups):
            options = options_of(group)
            alike = [place for place, other in enumerate(merged) if not differing(options, options_of(other))]
            place = number if number in alike else next(iter(alike), len(merged))
            if place == len(merged):
                merged.append({**options, PARAMS: []})
            for fqn in group[PARAMS]:
                first, known = places.setdefault(fqn, (rank, place))
                if known != place:
                    texts = options_text(differing(options, options_of(merged[known])))
                    raise CheckpointingException(
                        f"{fqn} has other options on rank {rank} than on rank {first}: {texts}"
                    )
                if first == rank:
                    merged[place][PARAMS].append(fqn)
    return merged


def differing(options: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return name -> the two values, of options that are not the same; of one that is absent, "nothing"."""
    return {
        name: (options.get(name, "nothing"), others.get(name, "nothing"))
        for name in {**options, **others}
        if (name in options) != (name in others) or not is_same(options[name], others[name])
    }


def is_same(value: Any, other: Any) -> bool:
    """Return whether two values of an option are equal; a number may be a tensor of one element."""
    if isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor):
        left, right = (torch.as_tensor(part).detach().cpu() for part in (value, other))
        return left.shape == right.shape and bool(torch.equal(left.double(), right.double()))
    if isinstance(value, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(value) == len(other) and all(map(is_same, value, other))
    return value is other or bool(value == other)


def options_text(values: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{name}={value!r:.60} and {other!r:.60}" for name, (value, other) in values.items())


def check(saved: Sequence[Group], current: Sequence[Group]) -> None:
    """Compare the grouping of a checkpoint with that of the optimizer that it is loaded into.

    A group of today whose parameters were saved in several groups can have the options of one of them alone:
    that is refused where these differ. Saved groups that are several today give their options to each, which
    is said where the groups had different options.

    Raises:
        CheckpointingException: naming the groups and the options.
    """
    place_of = {fqn: place for place, group in enumerate(saved) for fqn in group[PARAMS]}
    parts: dict[int, list[int]] = {}
    for number, group in enumerate(current):
        places = sorted({place_of[fqn] for fqn in group[PARAMS] if fqn in place_of})
        for place in places:
            parts.setdefault(place, []).append(number)
        for other in places[1:]:
            values = differing(options_of(saved[places[0]]), options_of(saved[other]))
            if values:
                raise CheckpointingException(
                    f"param group {number} has parameters that were saved in groups {places[0]} and {other}, "
                    f"with different options: {options_text(values)}; make the groups as they were saved, or "
                    "load without the optimizer"
                )
    for place, numbers in parts.items():
        split: dict[str, tuple[Any, Any]] = {}
        for number in numbers[1:]:
            split.update(differing(options_of(current[numbers[0]]), options_of(current[number])))
        if split:
            taken = ", ".join(f"{name}={saved[place].get(name)!r:.60}" for name in split)
            logger.warning(
                "saved param group %d is now groups %s, which were made with different options (%s): each "
                "gets those that were saved, %s",
                place,
                ", ".join(map(str, numbers)),
                options_text(split),
                taken,
            )


def assigned(saved: Sequence[Group], current: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """Yield today's groups with the options that were saved for their parameters.

    A group of which no parameter was saved keeps its options.
    """
    place_of = {fqn: place for place, group in enumerate(saved) for fqn in group[PARAMS]}
    for group in current:
        place = next((place_of[fqn] for fqn in group[PARAMS] if fqn in place_of), None)
        options = {} if place is None else options_of(saved[place])
        # Of its own: a scheduler sets a tensor in place, and groups that were one would go on with one rate.
        own = {name: value.clone() if torch.is_tensor(value) else value for name, value in options.items()}
        yield {**group, **own}


def placed(saved: Iterable[Group], current: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """Yield saved groups with tensors among their options on the devices of today's groups."""
    number_of = {fqn: number for number, group in enumerate(current) for fqn in group[PARAMS]}
    for group in saved:
        number = next((number_of[fqn] for fqn in group[PARAMS] if fqn in number_of), None)
        live: Group = {} if number is None else current[number]
        yield {name: _placed(value, live.get(name)) for name, value in group.items()}


def _placed(value: Any, live: Any) -> Any:
    if isinstance(value, torch.Tensor) and isinstance(live, torch.Tensor):
        return value.to(live.device)
    return value
