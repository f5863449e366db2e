"""What can be loaded: a model, an optimizer or a dict says where it wants each tensor of a full state dict.

How the tensors get there is decided in `course` and in `transfer`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torch_dcp_backport import compat
from torch_dcp_backport.state_dict.destination import (
    Destination,
    in_place,
    local_of,
)
from torch_dcp_backport.state_dict.source import Carried, Key, Unusable, unusable
from torch_dcp_backport.transfer import (
    Problem,
    TensorInfo,
    misfit,
    problem_of,
    spell_key,
)


class Load:
    """One load of full tensors into one object."""

    #: First words of an error.
    title = "cannot load"

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        self.destinations: dict[Key, Destination] = {}

    def plan(self, inventory: Mapping[Any, Any]) -> None:
        """Fill `destinations` and `problems`. Must not write anything; called again after `widen`."""
        raise NotImplementedError

    @property
    def stages(self) -> Sequence[str]:
        """The stages that `apply` asks for, in its order: what moves when loading code is about to look."""
        return ()

    def widen(self, stages: Sequence[str]) -> None:
        """Take the stages that other ranks have too; all ranks move the same tensors at the same time."""

    def meshes(self) -> list[DeviceMesh]:
        """The device meshes of what is loaded, in the same order on every rank."""
        found: list[DeviceMesh] = []
        for value in self.live():
            if isinstance(value, compat.DTensor) and value.device_mesh not in found:
                found.append(value.device_mesh)
        return found

    def live(self) -> Iterable[object]:
        """Everything that the loaded object holds now."""
        raise NotImplementedError

    @property
    def is_custom(self) -> bool:
        """Whether code outside torch takes part in `apply`: it can fail on one rank alone."""
        return False

    def take(self, owner: Any, value: Any) -> None:
        """A destination's owner gets its value."""
        raise NotImplementedError

    def apply(self, fetch: Callable[[str], None]) -> None:
        """Hand what was loaded to its owner; `fetch(stage)` brings what belongs to a stage."""

    def written(self) -> str:
        """What `apply` has handed over so far, for an error."""
        return ""

    def usable(self, key: Key, offered: Any) -> bool:
        """Whether `offered` is not a tensor that cannot be sliced; if it is, that is a problem."""
        if isinstance(offered, Carried):
            offered = Unusable(f"a tensor that is not dense ({offered.value.layout})")
        if isinstance(offered, Unusable):
            self.problems.append(unusable(key, offered))
            return False
        return True

    def accepts(self, key: Key, offered: Any, shape: tuple[int, ...]) -> bool:
        """Whether `offered` is a tensor of this shape; if not, that is a problem."""
        name = spell_key(key)
        if not self.usable(key, offered):
            return False
        if not isinstance(offered, TensorInfo):
            what = "not a tensor that can be loaded"
            self.problems.append(Problem(what, name, type(offered).__name__, f"a tensor of {shape}"))
            return False
        if offered.shape != shape:
            what = "wrong shape" if len(offered.shape) == len(shape) else "wrong number of dimensions"
            self.problems.append(Problem(what, name, got=str(offered.shape), expected=str(shape)))
            return False
        return True

    def want_in_place(
        self, key: Key, live: torch.Tensor, owner: object, view: Optional[torch.Tensor] = None
    ) -> None:
        """`live` receives its part of the checkpoint's tensor, as `destination.in_place` says."""
        one = in_place(live, owner, view)
        problem = misfit(key, local_of(live if view is None else view), one.layout)
        if problem:
            self.problems.append(problem)
        self.destinations[key] = one


@contextlib.contextmanager
def guarded(problems: list[Problem], others_wait: bool) -> Iterator[None]:
    """Turn what fails on this rank into a problem where other ranks wait in the agreement."""
    try:
        yield
    except Exception as error:
        if not others_wait:
            raise
        problems.append(problem_of(error))


def own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
