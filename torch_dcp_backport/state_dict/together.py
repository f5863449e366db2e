"""Several loads as one: a common plan, agreement and transfer, and only then anything is applied.

Must never look into its parts: it renames their keys and stages, and keeps their order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch_dcp_backport.state_dict.destination import FIRST, Destination
from torch_dcp_backport.state_dict.load import Inventory, LoadPlan, Planner
from torch_dcp_backport.state_dict.source import PartKey
from torch_dcp_backport.transfer import Problem


class PlanTogether(LoadPlan):
    """The plans of a model and its optimizers, in the order in which they are applied."""

    def __init__(self, problems: list[Problem], parts: Mapping[str, LoadPlan]) -> None:
        """`parts`: name for errors -> plan; a model's is the last one."""
        super().__init__(problems)
        self.names = list(parts)
        self.parts = list(parts.values())
        for number, plan in enumerate(self.parts):
            self.destinations.update(
                (PartKey(number, key), of_part(number, destination))
                for key, destination in plan.destinations.items()
            )
            # A tensor that two plans hold is not freed with one of them.
            plan.destinations.clear()
        self.stages = [
            stage_name(number, stage) for number, plan in enumerate(self.parts) for stage in plan.stages
        ]
        self.user_code = any(plan.user_code for plan in self.parts)

    def take(self, owner: tuple[int, Any], value: Any) -> None:
        number, owner_in_part = owner
        self.parts[number].take(owner_in_part, value)

    def written(self) -> str:
        parts, number = list(self.applied), len(self.applied)
        if number < len(self.parts):
            name, written = self.names[number], self.parts[number].written()
            parts.append(f"of {name} {written}" if written else f"a part of {name}")
        return "; ".join(parts)


class PlannerTogether:
    """The load of a model and its optimizers, which share one list of problems, as one."""

    title = "cannot load these state dicts"

    def __init__(self, parts: Mapping[str, Planner], problems: list[Problem]) -> None:
        """`parts`: name for errors -> planner; a model's is the last one."""
        self.parts = parts
        self.problems = problems

    def live(self) -> Iterable[object]:
        return itertools.chain.from_iterable(part.live() for part in self.parts.values())

    def plan(self, inventory: Inventory, stages: Sequence[str]) -> PlanTogether:
        plans: dict[str, LoadPlan] = {}
        for number, (name, part) in enumerate(self.parts.items()):
            start = stage_name(number, "")
            plans[name] = part.plan(
                {key.key: offer for key, offer in inventory.items() if key.part == number},
                [stage[len(start) :] for stage in stages if stage.startswith(start)],
            )
        return PlanTogether(self.problems, plans)

    def apply(self, plan: PlanTogether, fetch: Callable[[str], None]) -> None:
        for number, (name, part) in enumerate(self.parts.items()):
            part.apply(plan.parts[number], lambda stage, number=number: fetch(stage_name(number, stage)))  # type: ignore[misc]
            plan.applied.append(name)
        plan.keys = plan.parts[-1].keys


def of_part(number: int, destination: Destination) -> Destination:
    stage = destination.stage
    return destination._replace(
        owner=(number, destination.owner), stage=stage if stage == FIRST else stage_name(number, stage)
    )


def stage_name(number: int, stage: str) -> str:
    return f"{number}:{stage}"
