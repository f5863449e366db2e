"""Load full tensors into a model: plan, and hand over through its own `load_state_dict()`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from torch_dcp_backport.state_dict.load import Inventory, LoadPlan, Planner, guarded
from torch_dcp_backport.state_dict.model.apply import Handover
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


def model_planner(
    outline: Outline, source: StateSource, problems: list[Problem], optional: bool = False
) -> Planner:
    """The load of a source into a model; `optional`: an empty dict is nothing to load."""

    def plan(inventory: Inventory, stages: Sequence[str] = ()) -> LoadPlan:
        if optional and all(key is About.METADATA for key in inventory):
            return LoadPlan(problems)
        return plan_model(outline, source, inventory, stages, problems)

    def apply(plan: LoadPlan, fetch: Callable[[str], None]) -> None:
        if isinstance(plan, ModelPlan):
            plan.keys = Handover(plan, fetch).run()

    return Planner(
        TITLE,
        problems,
        lambda: (entry.value for entry in outline.entries),
        plan,
        apply,
    )
