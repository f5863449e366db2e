"""Load full tensors into a model: plan, and apply the plan through the model's own `load_state_dict()`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import nn

from torch_dcp_backport.state_dict.load import Inventory, LoadPlan, guarded
from torch_dcp_backport.state_dict.model.apply import ModelLoad
from torch_dcp_backport.state_dict.model.outline import Outline, outline_of
from torch_dcp_backport.state_dict.model.plan import ModelPlan, plan_model
from torch_dcp_backport.state_dict.options import StateDictInfo
from torch_dcp_backport.state_dict.source import About, StateSource
from torch_dcp_backport.transfer import Problem

TITLE = "cannot load this model state dict"


def outline_for_load(model: nn.Module, info: StateDictInfo, problems: list[Problem]) -> Outline:
    """The outline of a model; an exception on the way is a problem where other ranks wait."""
    outline = Outline(model, info)
    with guarded(problems, info.broadcast_from_rank0):
        outline = outline_of(model, info)
    return outline


class ModelPlanner:
    """The load of a source into a model."""

    title = TITLE

    def __init__(
        self, outline: Outline, source: StateSource, problems: list[Problem], optional: bool = False
    ) -> None:
        """`optional`: an empty dict is nothing to load."""
        self.outline = outline
        self.source = source
        self.problems = problems
        self.optional = optional

    def live(self) -> Iterable[object]:
        return (entry.value for entry in self.outline.entries)

    def plan(self, inventory: Inventory, stages: Sequence[str]) -> LoadPlan:
        if self.optional and all(key is About.METADATA for key in inventory):
            return LoadPlan(self.problems)
        return plan_model(self.outline, self.source, inventory, stages, self.problems)

    def apply(self, plan: LoadPlan, fetch: Callable[[str], None]) -> None:
        if isinstance(plan, ModelPlan):
            plan.keys = ModelLoad(plan, fetch).run()
