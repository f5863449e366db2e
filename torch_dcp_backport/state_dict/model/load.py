"""Load full tensors into a model: plan, and hand over through its own `load_state_dict()`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from torch_dcp_backport.state_dict.load import Inventory, Load, guarded
from torch_dcp_backport.state_dict.model.apply import Handover
from torch_dcp_backport.state_dict.model.outline import Outline, outline_of
from torch_dcp_backport.state_dict.model.plan import NOTHING_GOVERNED, ModelPlan, Owner, plan_model
from torch_dcp_backport.state_dict.options import StateDictInfo
from torch_dcp_backport.state_dict.source import About, Source
from torch_dcp_backport.transfer import Problem


class ModelLoad(Load):
    """A load of full tensors into a model."""

    title = "cannot load this model state dict"

    def __init__(
        self, outline: Outline, source: Source, problems: list[Problem], optional: bool = False
    ) -> None:
        """`optional`: where the source's dict is empty, there is nothing to load."""
        super().__init__(problems)
        self.outline = outline
        self.source = source
        self.optional = optional
        self.planned: ModelPlan
        self.has_work = False
        #: Stages that loading code has seen.
        self.seen: list[str] = []
        #: Missing and unexpected keys, once it is applied.
        self.keys = _IncompatibleKeys([], [])

    def live(self) -> Iterable[object]:
        return (entry.value for entry in self.outline.entries)

    def plan(self, inventory: Inventory, stages: Sequence[str] = ()) -> ModelPlan:
        self.has_work = not self.optional or any(key is not About.METADATA for key in inventory)
        if self.has_work:
            self.planned = plan_model(self.outline, self.source, inventory, stages, self.problems)
        else:
            self.planned = ModelPlan(self.problems, self.outline, self.source, {}, NOTHING_GOVERNED)
        return self.planned

    def take(self, owner: Owner, value: Any) -> None:
        self.planned.take(owner, value)

    def apply(self, fetch: Callable[[str], None]) -> None:
        if self.has_work:
            self.keys = Handover(self.planned, fetch, self.seen).run()

    def written(self) -> str:
        return ", ".join(["what no loading code looks at", *(stage.rstrip(".") for stage in self.seen)])


def model_load(
    model: nn.Module,
    info: StateDictInfo,
    state_dict: Mapping[str, Any],
    problems: list[Problem],
    optional: bool = False,
) -> ModelLoad:
    """A load into `model`; an exception on the way is a problem where other ranks wait."""
    source = Source(state_dict, metadata=True)
    outline = Outline(model, info)
    with guarded(problems, info.broadcast_from_rank0):
        outline = outline_of(model, info)
    return ModelLoad(outline, source, problems, optional)
