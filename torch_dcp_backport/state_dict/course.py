"""The course of every load of full tensors: inventory, plan, agreement, movement, settling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional, Union

import torch
import torch.distributed as dist

from torch_dcp_backport import compat
from torch_dcp_backport.state_dict import inline
from torch_dcp_backport.state_dict.destination import (
    FIRST,
    Destination,
    target_of,
    value_of,
)
from torch_dcp_backport.state_dict.load import Load
from torch_dcp_backport.state_dict.source import About, Key, Source
from torch_dcp_backport.transfer import (
    Agreement,
    Call,
    Problem,
    Target,
    Want,
    layout_of,
    scatter,
    spell_key,
)
from torch_dcp_backport.transfer.errors import DOUBTFUL, spell_broken_off, told
from torch_dcp_backport.transfer.groups import device_types
from torch_dcp_backport.transfer.layout import Mesh, mesh_of
from torch_dcp_backport.transfer.plan import Terms
from torch_dcp_backport.transfer.scatter import Offer, Reader
from torch_dcp_backport.transfer.staging import copy_to


def run(
    load: Load,
    given: Union[Mapping[Any, Any], Source],
    *,
    broadcast: bool,
    group: Optional[dist.ProcessGroup] = None,
) -> None:
    """Carry out a load: from the `given` of the group's first rank, or from every rank's own.

    Raises:
        RuntimeError: what `load.plan` or the inventory found, of all ranks, on all ranks; before
            anything was written. What the owner's own loading code raises: as it is on that rank, as a
            RuntimeError on the others.
    """
    source = given if isinstance(given, Source) else Source(given)
    course = Broadcast(load, source, group) if broadcast else Local(load, source)
    try:
        with course.call:
            course.agree()
            course.carry_out()
    finally:
        # They refer to the load: without a cycle, what it touched is freed as soon as nobody needs it.
        load.destinations.clear()
        source.release()


class Course:
    """One load, from the inventory to its end."""

    def __init__(self, load: Load, source: Source, call: Call) -> None:
        self.load = load
        self.source = source
        self.call = call
        #: The load's destinations, once it is agreed on.
        self.by_stage: dict[str, dict[Key, Destination]] = {}
        #: Keys that were filled from this rank's memory.
        self.written: list[Key] = []

    def agree(self) -> None:
        """Inventory, plan and agreement; nothing is written before it returns."""
        raise NotImplementedError

    def move(self, stage: str) -> None:
        """Fill the destinations of a stage, and settle them."""
        raise NotImplementedError

    def fetch(self, stage: str) -> None:
        """`move`, for the loading code that is about to look at the stage."""
        raise NotImplementedError

    def fetch_rest(self) -> None:
        """The stages that this rank's loading code does not look at."""

    def carry_out(self) -> None:
        """Move, apply; where code outside torch takes part on any rank, all hear of a failure."""
        try:
            self.move_first()
            self.load.apply(self.fetch)
            self.fetch_rest()
        except Exception as error:
            self.call.tell(error, self.so_far)
            raise
        self.call.settle(self.so_far)

    def move_first(self) -> None:
        self.move(FIRST)

    def so_far(self) -> str:
        """What an error says of what was written on this rank."""
        written = self.load.written()
        return f"{DOUBTFUL}: rank {self.call.rank} has written {written}" if written else DOUBTFUL

    def plan(self, inventory: Mapping[Any, Any]) -> None:
        """Plan; a rank whose plan fails still takes part in the agreement, which then fails for all."""
        if not self.call.problems:
            with self.call.guard():
                self.load.plan(inventory)

    def inventory_of_source(self, whole_only: bool) -> dict[Key, Any]:
        """What the dict holds; nothing, and one problem more, where it cannot be read."""
        found: dict[Key, Any] = {}
        if not self.call.problems:
            with self.call.guard():
                found = self.source.inventory(whole_only)
        return found

    def destinations_of(self, stage: str) -> Mapping[Key, Destination]:
        if not self.by_stage:
            for key, one in self.load.destinations.items():
                self.by_stage.setdefault(one.stage, {})[key] = one
        return self.by_stage.get(stage, {})

    def targets_of(self, stage: str) -> dict[Key, Target]:
        return {key: target_of(one, self.call.rank) for key, one in self.destinations_of(stage).items()}

    def settle(self, targets: Mapping[Key, Target]) -> None:
        for key, target in targets.items():
            one = self.load.destinations[key]
            self.load.take(one.owner, value_of(one, target.tensor))

    def fill_from(self, reader: Reader, targets: Mapping[Key, Target]) -> None:
        """Fill targets from what this rank has, and settle them."""
        with self.call.tally.phase("move"):
            for key, target in targets.items():
                if target.box.numel:
                    copy_to(target.tensor, self.piece(reader, key, target))
                self.written.append(key)
                reader.release()
            self.settle(targets)
        self.call.tally.tensors += len(targets)
        self.call.tally.close()

    def piece(self, reader: Reader, key: Key, target: Target) -> torch.Tensor:
        return reader.piece(key, target.box, self.load.destinations[key].layout.shape)

    def fails_alone(self) -> bool:
        try:
            return self.load.is_custom
        except Exception:  # the others wait for the answer
            return True


class Broadcast(Course):
    """From the dict of the group's first rank."""

    def __init__(self, load: Load, source: Source, group: Optional[dist.ProcessGroup]) -> None:
        super().__init__(load, source, Call(load.title, "scatter", [group], load.problems))
        self.is_source = dist.get_rank(group) == 0
        self.inventory: dict[Key, Any] = {}
        #: Reads the values where they came with the inventory.
        self.values: Optional[inline.Values] = None
        self.by_window = False
        #: Stages that are still to come, in the same order on every rank.
        self.pending: list[str] = []
        self.agreement: Agreement
        self.relays: Optional[Mapping[Mesh, Sequence[dist.ProcessGroup]]] = None

    def agree(self) -> None:
        load, call = self.load, self.call
        with call.tally.phase("inventory"):
            mine = self.inventory_of_source(whole_only=True) if self.is_source else None
            if mine and len(call.ranks) > 1 and not call.problems:
                with call.guard():
                    mine[About.VALUES] = inline.pack(self.source, mine)
        self.inventory = call.publish(mine)
        self.by_window = bool(self.inventory.pop(About.FLEETING, False))
        data = self.inventory.pop(About.VALUES, None)
        self.agree_on_plan()
        stages = stages_of_all(self.agreement)
        if stages is not None:
            # Some rank's loading code looks at what other ranks' does not: all plan anew.
            load.widen(stages)
            load.destinations.clear()
            self.agree_on_plan()
        self.pending = list(load.stages)
        if data is not None and not self.pending:
            # Loading code may change the source between two stages, and every rank gets what it is then.
            self.values = inline.Values(data, self.inventory)

    def agree_on_plan(self) -> None:
        load, call = self.load, self.call
        with call.tally.phase("agree"):
            self.plan(self.inventory)
            # Counters of steps are on the host with an accelerator's optimizer too.
            kinds = {one.device.type for one in load.destinations.values() if one.layout.shape}
            self.relays = self.relay_groups()
            wants = wants_of(load.destinations)
            stages, user_code = list(load.stages), self.fails_alone()
        self.agreement = call.agree(
            wants,
            Terms(
                device=kinds.pop() if len(kinds) == 1 else "",
                condition=repr(stages),
                user_code=user_code,
                relays=self.relays is not None,
                note=stages,
            ),
        )

    def relay_groups(self) -> Optional[Mapping[Mesh, Sequence[dist.ProcessGroup]]]:
        """The groups along which replicas pass a box on; None where they do not carry what `group` does."""
        if not any(one.layout.replica_dims for one in self.load.destinations.values()):
            return {}
        try:
            found = {mesh_of(mesh): compat.mesh_groups(mesh) for mesh in self.load.meshes()}
        except Exception:  # a mesh without process groups; the source sends to every replica itself then
            return None
        needed = set(device_types(self.call.group))
        carried = all(needed <= set(device_types(one)) for groups in found.values() for one in groups)
        return found if carried else None

    def move_first(self) -> None:
        # Copies from memory can fail on one rank alone.
        self.call.is_settled = self.values is None
        self.move(FIRST)
        self.call.is_settled = False

    def fetch(self, stage: str) -> None:
        while stage in self.pending:
            self.fetch_next()

    def fetch_rest(self) -> None:
        while self.pending:
            self.fetch_next()

    def fetch_next(self) -> None:
        """One more stage. Every rank comes to it, or tells the others here why it does not."""
        stage = self.pending.pop(0)
        self.call.is_settled = True
        wants = wants_of(self.destinations_of(stage))
        device = self.agreement.device
        terms = Terms(device=device, user_code=True, relays=self.relays is not None)
        self.agreement = self.call.agree(wants, terms, so_far=self.so_far())
        self.move(stage)
        self.call.is_settled = False

    def move(self, stage: str) -> None:
        targets: dict[Key, Target] = {}
        wanted = {
            key for table in self.agreement.tables for key, want in table.wants.items() if want.stage == stage
        }
        with self.call.room_for("what is loaded"):
            targets = self.targets_of(stage)
        if self.values is not None:
            self.move_values(self.values, targets)
            return
        offer = Offer(
            {key: offered for key, offered in self.inventory.items() if key in wanted},
            self.source if self.is_source else None,
            self.by_window,
        )
        scatter(self.call, offer, targets, self.agreement, self.relays)
        self.settle(targets)

    def move_values(self, values: inline.Values, targets: Mapping[Key, Target]) -> None:
        """Fill all targets from what came with the inventory."""
        self.call.raise_alone()
        tally, written = self.call.tally, self.written
        tally.staging_budget, tally.rounds = self.agreement.staging_bytes, 1
        tally.meter.expect(lambda: values.nbytes)
        (tally.sent if self.is_source else tally.received)(values.nbytes)

        def story() -> str:
            doing = "copying what came with the inventory", list(targets)[len(written) : len(written) + 1]
            return f"{self.call.title}: {spell_broken_off(self.call.rank, doing, written)}"

        with told(story):
            # A target may be the source's own tensor: no copy of it stands in between.
            self.fill_from(self.source if self.is_source else values, targets)


class Local(Course):
    """From this rank's own dict, which is whole."""

    def __init__(self, load: Load, source: Source) -> None:
        meshes = load.meshes() if dist.is_initialized() else []
        groups = compat.mesh_groups(max(meshes, key=lambda one: one.size())) if meshes else ()
        super().__init__(load, source, Call(load.title, "slice", groups, load.problems))

    def agree(self) -> None:
        call = self.call
        with call.tally.phase("agree"):
            inventory = self.inventory_of_source(whole_only=False)
            inventory.pop(About.FLEETING, None)
            self.plan(inventory)
            with call.guard():
                call.problems += self.other_layouts()
            # A mapping that makes its values is code that can fail, too.
            call.agree_on_problems(self.fails_alone() or not self.source.is_dict)

    def other_layouts(self) -> list[Problem]:
        """DTensors of the dict that do not lie as their destinations do."""
        return [
            Problem("a DTensor of another layout", spell_key(key), str(value.placements), "a whole tensor")
            for key, one in self.load.destinations.items()
            if key in self.source.spread
            for value in [self.source.value(key)]
            if one.like is None or layout_of(value) != one.layout
        ]

    def fetch(self, stage: str) -> None:
        self.move(stage)

    def move(self, stage: str) -> None:
        self.fill_from(self.source, self.targets_of(stage))

    def piece(self, reader: Reader, key: Key, target: Target) -> torch.Tensor:
        if key in self.source.spread:
            return compat.local_part(self.source.value(key).detach())
        return super().piece(reader, key, target)


def wants_of(destinations: Mapping[Key, Destination]) -> dict[Key, Want]:
    return {key: one.want for key, one in destinations.items()}


def stages_of_all(agreement: Agreement) -> Optional[list[str]]:
    """Every rank's stages, in an order that all ranks find; None where they are the same on all."""
    if len({tuple(table.note) for table in agreement.tables}) == 1:
        return None
    return list(dict.fromkeys(name for table in agreement.tables for name in table.note))
