"""Several loads as one: a common plan, agreement and transfer, and only then anything is handed over.

Must never look into its parts: it renames their keys and stages, and keeps their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch_dcp_backport.state_dict.destination import FIRST, Destination
from torch_dcp_backport.state_dict.load import Inventory, Load, Plan
from torch_dcp_backport.state_dict.source import PartKey
from torch_dcp_backport.transfer import Problem


class Together(Load):
    """The loads of a model and its optimizers; they share one list of problems."""

    title = "cannot load these state dicts"

    def __init__(self, parts: Mapping[str, Load], problems: list[Problem]) -> None:
        """`parts`: name for errors -> load, in the order in which they are applied."""
        super().__init__(problems)
        self.names = list(parts)
        self.parts = list(parts.values())
        self.applied = 0

    def live(self) -> Iterable[object]:
        for part in self.parts:
            yield from part.live()

    def plan(self, inventory: Inventory, stages: Sequence[str] = ()) -> Plan:
        together = Plan(self.problems)
        for number, part in enumerate(self.parts):
            start = stage_name(number, "")
            plan = part.plan(
                {key.key: offer for key, offer in inventory.items() if key.part == number},
                [stage[len(start) :] for stage in stages if stage.startswith(start)],
            )
            together.destinations.update(
                (PartKey(number, key), of_part(number, destination))
                for key, destination in plan.destinations.items()
            )
            # A tensor that two plans hold is not freed with one of them.
            plan.destinations.clear()
            together.stages = [*together.stages, *(stage_name(number, stage) for stage in plan.stages)]
            together.user_code |= plan.user_code
        return together

    def take(self, owner: tuple[int, Any], value: Any) -> None:
        number, owner_in_part = owner
        self.parts[number].take(owner_in_part, value)

    def apply(self, fetch: Callable[[str], None]) -> None:
        for number, part in enumerate(self.parts):
            part.apply(lambda stage, number=number: fetch(stage_name(number, stage)))  # type: ignore[misc]
            self.applied += 1

    def written(self) -> str:
        parts = self.names[: self.applied]
        if self.applied < len(self.parts):
            name, written = self.names[self.applied], self.parts[self.applied].written()
            parts.append(f"of {name} {written}" if written else f"a part of {name}")
        return "; ".join(parts)


def of_part(number: int, destination: Destination) -> Destination:
    stage = destination.stage
    return destination._replace(
        owner=(number, destination.owner), stage=stage if stage == FIRST else stage_name(number, stage)
    )


def stage_name(number: int, stage: str) -> str:
    return f"{number}:{stage}"
