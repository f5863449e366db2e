"""Several loads as one: one plan, one agreement, one transfer, and only then anything is handed over.

Must never look into its parts: it renames their keys and stages, and keeps their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch_dcp_backport.state_dict.destination import FIRST, Destination
from torch_dcp_backport.state_dict.load import Load
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

    def plan(self, inventory: Mapping[Any, Any]) -> None:
        for number, part in enumerate(self.parts):
            part.destinations.clear()
            part.plan({key.key: offer for key, offer in inventory.items() if key.part == number})
            self.destinations.update(
                (PartKey(number, key), self.owned(number, one)) for key, one in part.destinations.items()
            )

    def owned(self, number: int, destination: Destination) -> Destination:
        stage = destination.stage
        return destination._replace(
            owner=(number, destination.owner), stage=stage if stage == FIRST else stage_name(number, stage)
        )

    def take(self, owner: tuple[int, Any], value: Any) -> None:
        number, of_part = owner
        self.parts[number].take(of_part, value)

    @property
    def stages(self) -> Sequence[str]:
        return [stage_name(number, stage) for number, part in enumerate(self.parts) for stage in part.stages]

    def widen(self, stages: Sequence[str]) -> None:
        for number, part in enumerate(self.parts):
            start = stage_name(number, "")
            part.widen([stage[len(start) :] for stage in stages if stage.startswith(start)])

    def live(self) -> Iterable[object]:
        for part in self.parts:
            yield from part.live()

    @property
    def is_custom(self) -> bool:
        return any(part.is_custom for part in self.parts)

    def apply(self, fetch: Callable[[str], None]) -> None:
        for number, part in enumerate(self.parts):
            part.apply(lambda stage, number=number: fetch(stage_name(number, stage)))  # type: ignore[misc]
            self.applied += 1
            part.destinations.clear()

    def written(self) -> str:
        parts = self.names[: self.applied]
        if self.applied < len(self.parts):
            name, under_way = self.names[self.applied], self.parts[self.applied].written()
            parts.append(f"of {name} {under_way}" if under_way else f"a part of {name}")
        return "; ".join(parts)


def stage_name(number: int, stage: str) -> str:
    return f"{number}:{stage}"
