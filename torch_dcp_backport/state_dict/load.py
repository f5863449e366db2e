"""A load of full tensors, and its wants as data: where each tensor goes on this rank.

`run` and `transfer` decide the way of each tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional, Protocol

import torch
import torch.distributed as dist
from torch.nn.modules.module import _IncompatibleKeys

from torch_dcp_backport import compat
from torch_dcp_backport.state_dict.destination import Destination, in_place, local_of
from torch_dcp_backport.state_dict.source import Carried, Key, Unusable
from torch_dcp_backport.transfer import (
    Problem,
    TensorInfo,
    has_slices,
    misfit,
    problem_of,
    spell_key,
    why_not_writable,
)

#: Key -> TensorInfo, Carried or Unusable for tensors, everything else as it is: an offer for each key.
Inventory = Mapping[Any, Any]


class LoadPlan:
    """The wants of one rank from a full state dict. Nothing is written while it is made."""

    def __init__(self, problems: list[Problem]) -> None:
        """`problems`: the call's, of this rank; the plan adds to them."""
        self.problems = problems
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.destinations: dict[Key, Destination] = {}
        #: The stages that `Planner.apply` asks for, in its order: each moves when loading code is about to
        #: look.
        self.stages: Sequence[str] = ()
        #: Whether code outside torch takes part in `Planner.apply`: it can fail on one rank alone.
        self.user_code = False
        #: The parts that were applied, for an error.
        self.applied: list[str] = []
        #: Missing and unexpected keys of a model, once it is loaded.
        self.keys = _IncompatibleKeys([], [])

    def take(self, owner: Any, value: Any) -> None:
        """Give the owner of one of the destinations its value."""
        raise NotImplementedError

    def written(self) -> str:
        """The parts that were applied so far, for an error."""
        return ", ".join(self.applied)

    def usable(self, key: Key, offer: Any) -> bool:
        """Whether `offer` is no tensor, or a tensor with slices; any other tensor is a problem."""
        if isinstance(offer, Carried):
            offer = Unusable(f"a tensor that is not dense ({offer.value.layout})")
        if isinstance(offer, Unusable):
            what = "not a tensor that can be loaded"
            self.problems.append(Problem(what, spell_key(key), offer.why, "a whole, dense tensor"))
            return False
        return True

    def accepts(self, key: Key, offer: Any, shape: tuple[int, ...]) -> bool:
        """Whether `offer` is a tensor of this shape; anything else is a problem."""
        if not self.usable(key, offer):
            return False
        if not isinstance(offer, TensorInfo):
            what, got, expected = (
                "not a tensor that can be loaded",
                type(offer).__name__,
                f"a tensor of {shape}",
            )
        elif offer.shape != shape:
            what = "wrong shape" if len(offer.shape) == len(shape) else "wrong number of dimensions"
            got, expected = str(offer.shape), str(shape)
        else:
            return True
        self.problems.append(Problem(what, spell_key(key), got, expected))
        return False

    def want_in_place(
        self, key: Key, live: torch.Tensor, owner: object, view: Optional[torch.Tensor] = None
    ) -> None:
        """Have `live` receive its part of the checkpoint's tensor, as `destination.in_place` says."""
        destination = in_place(live, owner, view)
        problem = misfit(key, local_of(live if view is None else view), destination.layout, self.rank)
        if problem:
            self.problems.append(problem)
        self.writes(key, live)
        self.destinations[key] = destination

    def writes(self, key: Key, live: torch.Tensor) -> None:
        """Note that `live` (plain or DTensor) will be written; its local tensor must have memory for that.

        Else the copy fails in the middle of the transfer, on this rank alone, or ends the process.
        """
        local = local_of(live)
        # Wrappers around other tensors have no memory of their own.
        if type(local) in compat.PLAIN_TENSORS and has_slices(local) and not local.is_meta:
            why = why_not_writable(local)
            if why and not self.gets_itself(key, live):
                self.problems.append(Problem("the destination cannot be written", spell_key(key), why))

    def gets_itself(self, key: Key, live: Any) -> bool:
        """Whether this rank's dict has the live tensor itself under a key: then nothing is written."""
        return False


class Planner(Protocol):
    """An object that full tensors are loaded into, as `run.run` sees it: it plans the load, and ends it."""

    #: First words of an error.
    title: str
    #: The problems of this rank so far. A plan adds to them.
    problems: list[Problem]

    def live(self) -> Iterable[object]:
        """Yield everything that the object holds now."""

    def plan(self, inventory: Inventory, stages: Sequence[str]) -> LoadPlan:
        """Plan the load of an inventory. Writes nothing.

        Args:
            stages: of other ranks' plans: all ranks move the same tensors at the same time.
        """

    def apply(self, plan: Any, fetch: Callable[[str], None]) -> None:
        """Give what was loaded to the object; `fetch` brings the tensors of a stage."""


@contextlib.contextmanager
def normal_mode(live: Iterable[object]) -> Iterator[None]:
    """A context outside `torch.inference_mode()`: tensors that are made in that mode can never be trained.

    Args:
        live: everything that may be written. If any of it was made in that mode, it can be written there
            alone, and the mode stays.
    """
    if not torch.is_inference_mode_enabled() or any(map(is_of_inference, live)):
        yield
        return
    # The end of the mode would switch gradients on.
    with torch.inference_mode(False), torch.no_grad():
        yield


def is_of_inference(value: object) -> bool:
    return torch.is_tensor(value) and local_of(value).is_inference()


@contextlib.contextmanager
def guarded(problems: list[Problem], others_wait: bool) -> Iterator[None]:
    """Turn an exception of this rank into a problem where other ranks wait in the agreement."""
    try:
        yield
    except Exception as error:
        if not others_wait:
            raise
        problems.append(problem_of(error))
