"""The course of every load of full tensors: inventory, plan, agreement, movement, settling.

Models and optimizers say where they want each tensor (`Load.plan`); how it gets there is decided
here and in `transfer`.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torch_dcp_backport import compat
from torch_dcp_backport.transfer import (
    Problem,
    Tally,
    Target,
    TensorInfo,
    Want,
    agree,
    layout_of,
    misfit,
    publish,
    raise_together,
    scatter,
    spell_key,
)
from torch_dcp_backport.transfer.errors import DOUBTFUL
from torch_dcp_backport.transfer.exclusive import exclusive
from torch_dcp_backport.transfer.layout import Box, Layout, Mesh, mesh_of, whole
from torch_dcp_backport.transfer.plan import agree_on_mesh, no_room

Key = Hashable

logger = logging.getLogger(__name__)


class Destination(NamedTuple):
    """Where one tensor of the checkpoint goes on this rank."""

    layout: Layout
    #: dtype and device of the destination.
    dtype: torch.dtype
    device: torch.device
    #: Gives the local tensor to write, made (if need be) only after every rank agreed.
    make: Callable[[Box], torch.Tensor]
    #: Called with the local tensor once it is filled.
    settle: Callable[[torch.Tensor], None]
    #: The DTensor that the checkpoint's value may equal in layout, or None.
    like: Optional[torch.Tensor] = None


class Unusable(NamedTuple):
    """Stands in an inventory for a tensor that cannot be sliced."""

    why: str


class Load:
    """One load of full tensors into one object."""

    #: First words of an error.
    title = "cannot load"

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        self.destinations: dict[Key, Destination] = {}

    def plan(self, inventory: Mapping[Any, Any]) -> None:
        """Fill `destinations` and `problems`. Must not write anything."""
        raise NotImplementedError

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

    def apply(self) -> None:
        """Hand what was loaded to its owner."""

    def usable(self, key: Key, offered: Any) -> bool:
        """Whether `offered` is not a tensor that cannot be sliced; if it is, that is a problem."""
        if isinstance(offered, Unusable):
            what, expected = "not a tensor that can be loaded", "a whole, dense tensor"
            self.problems.append(Problem(what, spell_key(key), offered.why, expected))
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

    def want_in_place(self, key: Key, live: torch.Tensor, settle: Callable[[], None]) -> None:
        """`live` (plain or DTensor) receives its part of the checkpoint's tensor in place."""
        local = compat.local_part(live) if isinstance(live, compat.DTensor) else live.detach()
        plain = type(local) in (torch.Tensor, torch.nn.Parameter)
        layout = layout_of(live)
        problem = misfit(key, local, layout)
        if problem:
            self.problems.append(problem)

        def make(box: Box) -> torch.Tensor:
            # A subclass (quantized weights) takes a whole box or nothing.
            return local if plain else torch.empty(box.size, dtype=live.dtype, device=local.device)

        def finish(filled: torch.Tensor) -> None:
            if not plain:
                local.copy_(filled)
            settle()

        self.destinations[key] = Destination(layout, live.dtype, local.device, make, finish, live)

    def want_fresh(
        self,
        key: Key,
        like: torch.Tensor,
        offered: TensorInfo,
        device: torch.device,
        settle: Callable[[torch.Tensor], None],
    ) -> None:
        """A new tensor of the checkpoint's dtype, laid out as `like` (plain or DTensor)."""

        def make(box: Box) -> torch.Tensor:
            return torch.empty(box.size, dtype=offered.dtype, device=device)

        def finish(filled: torch.Tensor) -> None:
            settle(compat.from_local(filled, like) if isinstance(like, compat.DTensor) else filled)

        self.destinations[key] = Destination(layout_of(like), offered.dtype, device, make, finish, like)

    def want_whole(
        self, key: Key, offered: TensorInfo, device: torch.device, settle: Callable[[torch.Tensor], None]
    ) -> None:
        """A new whole tensor, whatever its shape, on every rank."""

        def make(box: Box) -> torch.Tensor:
            return torch.empty(box.size, dtype=offered.dtype, device=device)

        self.destinations[key] = Destination(Layout(offered.shape), offered.dtype, device, make, settle)


def run(
    load: Load, given: Mapping[Any, Any], *, broadcast: bool, group: Optional[dist.ProcessGroup] = None
) -> None:
    """Carry out a load: from the `given` of the group's first rank, or from every rank's own.

    Raises:
        RuntimeError: what `load.plan` or the inventory found, of all ranks, on all ranks; before
            anything was written. What the owner's own loading code raises: as it is on that rank, as a
            RuntimeError on the others.
    """
    try:
        with contextlib.ExitStack() as alone:
            if broadcast:
                alone.enter_context(exclusive(group, load.title))
                custom, targets = run_broadcast(load, given, group)
                finish_together(load, lambda: settle(load, targets), [group], custom)
                return
            meshes = load.meshes() if dist.is_initialized() else []
            groups = compat.mesh_groups(max(meshes, key=lambda one: one.size())) if meshes else ()
            for one in groups:
                alone.enter_context(exclusive(one, load.title))
            tally = Tally("slice")
            with tally.phase("agree"):
                custom = plan_local(load, given, groups)
            finish_together(load, lambda: copy_slices(load, given, tally), groups, custom)
    finally:
        # They refer to the load: without a cycle, what it touched is freed as soon as nobody needs it.
        load.destinations.clear()


def snapshot(given: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """What a dict holds now, whatever another thread does to it meanwhile.

    Other mappings may make their tensors anew each time; they are read as needed.
    """
    return dict(given) if type(given) in (dict, OrderedDict) else given


def finish_together(
    load: Load, last: Callable[[], None], groups: Sequence[Optional[dist.ProcessGroup]], custom: bool
) -> None:
    """`last()` and `load.apply()`; where code outside torch takes part on any rank, all hear of a failure."""
    try:
        last()
        load.apply()
    except Exception as error:
        if custom and groups:
            # Now, in case that the others never come to the agreement.
            logger.error("%s: %s", load.title, problem_of(error))
            with contextlib.suppress(Exception):
                agree_on_mesh([problem_of(error)], groups, so_far=DOUBTFUL)
        raise
    if custom and groups:
        found, _ = agree_on_mesh([], groups, so_far=DOUBTFUL)
        raise_together(load.title, found, so_far=DOUBTFUL)


def run_broadcast(
    load: Load, given: Mapping[Any, Any], group: Optional[dist.ProcessGroup]
) -> tuple[bool, dict[Key, Target]]:
    """(whether code outside torch takes part in what is left to do, on any rank; the filled tensors)."""
    tally = Tally("scatter")
    cause: Optional[BaseException] = None
    try:
        is_source = dist.get_rank(group) == 0
        with tally.phase("inventory"):
            mine, cause = guarded_inventory(load, given) if is_source else (None, None)
            inventory = publish(mine, load.problems, load.title, group)
        with tally.phase("agree"):
            cause = guarded_plan(load, inventory) or cause
            wants = {key: Want(one.layout, one.dtype) for key, one in load.destinations.items()}
            # Counters of steps are on the host with an accelerator's optimizer too.
            kinds = {one.device.type for one in load.destinations.values() if one.layout.shape}
            kind = kinds.pop() if len(kinds) == 1 else ""
            relays = relays_of(load, group)
            condition = "relays" if relays is not None else ""
            agreement = agree(
                wants,
                load.problems,
                load.title,
                group,
                cause,
                device=kind,
                condition=condition,
                custom=fails_alone(load),
            )
        targets: dict[Key, Target] = {}
        problems: list[Problem] = []
        try:
            targets = make_targets(load)
        except (RuntimeError, MemoryError) as error:
            problems, cause = [no_room("what is loaded", error)], error
        scatter(
            lambda key: given[key],
            inventory,
            targets,
            agreement,
            group=group,
            relays=relays,
            tally=tally,
            title=load.title,
            problems=problems,
            cause=cause,
        )
        return agreement.custom, targets
    finally:
        # An error that its own traceback holds on to keeps alive what it touched.
        cause = None


def relays_of(
    load: Load, group: Optional[dist.ProcessGroup]
) -> Optional[Mapping[Mesh, Sequence[dist.ProcessGroup]]]:
    """The groups along which replicas can pass a box on; None where they do not carry what `group` does."""
    if not any(one.layout.replica_dims for one in load.destinations.values()):
        return {}
    try:
        found = {mesh_of(mesh): compat.mesh_groups(mesh) for mesh in load.meshes()}
    except Exception:  # a mesh without process groups; the source sends to every replica itself then
        return None
    needed = set(compat.device_types(group))
    carried = all(needed <= set(compat.device_types(one)) for groups in found.values() for one in groups)
    return found if carried else None


def copy_slices(load: Load, given: Mapping[Any, Any], tally: Tally) -> None:
    """Every destination from this rank's own dict; a DTensor there has the destination's layout."""
    with tally.phase("move"):
        _copy_slices(load, given)
    tally.tensors = len(load.destinations)
    tally.close()


def _copy_slices(load: Load, given: Mapping[Any, Any]) -> None:
    targets = make_targets(load)
    for key, target in targets.items():
        if not target.box.numel:
            continue
        value = given[key].detach()
        if isinstance(value, compat.DTensor):
            target.tensor.copy_(compat.local_part(value))
        else:
            target.tensor.copy_(value[target.box.within(whole(tuple(value.shape)))])
    settle(load, targets)


def plan_local(load: Load, given: Mapping[Any, Any], groups: Sequence[Optional[dist.ProcessGroup]]) -> bool:
    """Whether code outside torch takes part in what is left to do, on any rank."""
    inventory, cause = guarded_inventory(load, given, whole_only=False)
    cause = guarded_plan(load, inventory or {}) or cause
    for key, one in load.destinations.items():
        value = given[key]
        if isinstance(value, compat.DTensor) and (one.like is None or layout_of(value) != one.layout):
            load.problems.append(
                Problem(
                    "a DTensor of another layout",
                    spell_key(key),
                    got=str(value.placements),
                    expected="a whole tensor",
                )
            )
    found, custom = [(own_rank(), problem) for problem in load.problems], fails_alone(load)
    if groups:
        found, custom = agree_on_mesh(load.problems, groups, custom)
    try:
        raise_together(load.title, found, cause)
    finally:
        cause = None  # as above
    return custom


def guarded_plan(load: Load, inventory: Mapping[Any, Any]) -> Optional[Exception]:
    """Plan; a rank whose plan fails still takes part in the agreement, which then fails for all."""
    if load.problems:
        return None
    try:
        load.plan(inventory)
    except Exception as error:
        load.problems.append(problem_of(error))
        return error
    return None


def fails_alone(load: Load) -> bool:
    try:
        return load.is_custom
    except Exception:  # the others wait for the answer
        return True


def guarded_inventory(
    load: Load, given: Mapping[Any, Any], whole_only: bool = True
) -> tuple[Optional[dict[Key, Any]], Optional[BaseException]]:
    """What a dict holds; nothing, and one problem more, where it cannot be read."""
    if load.problems:
        return None, None
    try:
        return inventory_of(given, whole_only), None
    except Exception as error:
        load.problems.append(problem_of(error))
        return None, error


def problem_of(error: Exception) -> Problem:
    return Problem(f"{type(error).__name__}: {error}")


def inventory_of(given: Mapping[Any, Any], whole_only: bool = True) -> dict[Key, Any]:
    """What a dict holds: TensorInfo for tensors (Unusable for some), everything else as it is."""
    return {
        key: offer_of(value, whole_only) if torch.is_tensor(value) else value for key, value in given.items()
    }


def offer_of(value: torch.Tensor, whole_only: bool) -> Union[TensorInfo, Unusable]:
    if isinstance(value, compat.DTensor):
        if whole_only:
            return Unusable("a DTensor; a full state dict holds whole tensors, see DTensor.full_tensor()")
    elif value.is_meta:
        return Unusable("a tensor on the meta device, which holds no values")
    elif value.layout is not torch.strided or value.is_quantized:
        return Unusable(f"a tensor that is not dense ({value.layout})")
    return TensorInfo(tuple(value.shape), value.dtype)


def make_targets(load: Load) -> dict[Key, Target]:
    rank = own_rank()
    targets = {}
    for key, one in load.destinations.items():
        # A rank outside the mesh holds an empty tensor.
        box = one.layout.box(rank) or Box((0,) * len(one.layout.shape), (0,) * len(one.layout.shape))
        targets[key] = Target(one.make(box), box)
    return targets


def own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def settle(load: Load, targets: Mapping[Key, Target]) -> None:
    for key, target in targets.items():
        load.destinations[key].settle(target.tensor)
