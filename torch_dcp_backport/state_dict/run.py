"""The steps of every load of full tensors: inventory, plan, agreement, movement, values to their owners."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional, Union

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torch_dcp_backport import compat
from torch_dcp_backport.state_dict import inline
from torch_dcp_backport.state_dict.destination import FIRST, Destination, target_of, value_of
from torch_dcp_backport.state_dict.load import Inventory, LoadPlan, Planner
from torch_dcp_backport.state_dict.source import About, Key, StateSource
from torch_dcp_backport.transfer import (
    DOUBTFUL,
    Agreement,
    Call,
    Mesh,
    Offer,
    Problem,
    Reader,
    Target,
    Terms,
    Want,
    as_transfer_error,
    comm_device_type,
    copy_to,
    device_types,
    layout_of,
    mesh_of,
    note_device,
    scatter,
    source_of,
    spell_broken_off,
    spell_key,
)


def run(
    planner: Planner,
    state: Union[Mapping[Any, Any], StateSource],
    *,
    broadcast: bool,
    group: Optional[dist.ProcessGroup] = None,
    once_agreed: Callable[[], object] = lambda: None,
) -> LoadPlan:
    """Carry out a load: from the `state` of the group's first rank, or from every rank's own.

    Args:
        once_agreed: is called when nothing is wrong on any rank, before anything is written.

    Returns:
        this rank's plan, carried out.

    Raises:
        RuntimeError: the problems that inventories and plans of all ranks have, on all ranks; before
            anything was written. An error of the loaded object's own code: as it is on that rank, as a
            RuntimeError on the others.
    """
    source = state if isinstance(state, StateSource) else StateSource(state)
    load = BroadcastLoad(planner, source, group) if broadcast else LocalLoad(planner, source)
    try:
        with load.call:
            load.agree()
            once_agreed()
            load.carry_out()
        return load.plan
    finally:
        # The traceback of an error refers to this frame: tensors are not to live as long.
        load.plan.destinations.clear()
        load.by_stage.clear()
        source.release()


class Load:
    """One load, from the inventory to its end."""

    def __init__(self, planner: Planner, source: StateSource, call: Call) -> None:
        self.planner = planner
        self.source = source
        self.call = call
        self.plan = LoadPlan(planner.problems)
        #: The plan's destinations, once it is agreed on.
        self.by_stage: dict[str, dict[Key, Destination]] = {}
        #: Keys that were filled from this rank's memory.
        self.written: list[Key] = []

    def agree(self) -> None:
        """Inventory, plan and agreement; nothing is written before it returns."""
        raise NotImplementedError

    def move(self, stage: str) -> None:
        """Fill the destinations of a stage, and give them to their owners."""
        raise NotImplementedError

    def fetch(self, stage: str) -> None:
        """`move`, for the loading code that is about to look at the stage."""
        self.move(stage)

    def fetch_rest(self) -> None:
        """`move`, for the stages that this rank's loading code does not look at."""

    def carry_out(self) -> None:
        """Move and apply; where code outside torch takes part on any rank, all get the error."""
        try:
            self.move(FIRST)
            self.planner.apply(self.plan, self.fetch)
            self.fetch_rest()
        except Exception as error:
            self.call.tell(error, self.so_far)
            raise
        if self.call.user_code:
            # The last agreement: it failed on another rank, or on none.
            self.call.agree_on_outcome(self.so_far(), kind=RuntimeError)

    def so_far(self) -> str:
        """The words of an error about this rank's writes."""
        written = self.plan.written()
        return f"{DOUBTFUL}: rank {self.call.rank} has written {written}" if written else DOUBTFUL

    def make_plan(self, inventory: Inventory, stages: Sequence[str] = ()) -> None:
        """Plan; a rank without a plan still takes part in the agreement, which then fails for all."""
        if not self.call.problems:
            with self.call.guard():
                self.plan = self.planner.plan(inventory, stages)

    def inventory_of_source(self, whole_only: bool) -> dict[Key, Any]:
        """The dict's inventory; empty, with one problem more, where the dict cannot be read."""
        inventory: dict[Key, Any] = {}
        if not self.call.problems:
            with self.call.guard():
                inventory = self.source.inventory(whole_only)
        return inventory

    def destinations_of(self, stage: str) -> Mapping[Key, Destination]:
        if not self.by_stage:
            for key, destination in self.plan.destinations.items():
                self.by_stage.setdefault(destination.stage, {})[key] = destination
        return self.by_stage.get(stage, {})

    def targets_of(self, stage: str) -> dict[Key, Target]:
        rank = self.call.rank
        return {key: target_of(destination, rank) for key, destination in self.destinations_of(stage).items()}

    def give(self, targets: Mapping[Key, Target]) -> None:
        """Give the owners of filled targets their values."""
        for key, target in targets.items():
            destination = self.plan.destinations[key]
            self.plan.take(destination.owner, value_of(destination, target.tensor))

    def fill_from(self, reader: Reader, targets: Mapping[Key, Target]) -> None:
        """Fill targets from this rank's memory, and give them to their owners."""
        with self.call.tally.phase("move"):
            for key, target in targets.items():
                if target.box.numel:
                    shape = self.plan.destinations[key].layout.shape
                    copy_to(target.tensor, reader.piece(key, target.box, shape))
                self.written.append(key)
                reader.release()
            self.give(targets)
        self.call.tally.tensors += len(targets)
        self.call.tally.close()


class BroadcastLoad(Load):
    """From the dict of the group's first rank."""

    def __init__(self, planner: Planner, source: StateSource, group: Optional[dist.ProcessGroup]) -> None:
        super().__init__(planner, source, Call(planner.title, "scatter", [group], planner.problems))
        self.is_source = self.call.rank == source_of(group)
        self.inventory: dict[Key, Any] = {}
        #: Reads the values where they came with the inventory.
        self.values: Optional[inline.InlineReader] = None
        self.by_window = False
        #: Stages that are still to come, in the same order on every rank.
        self.pending: list[str] = []
        self.agreement: Agreement
        self.relays: Optional[Mapping[Mesh, Sequence[dist.ProcessGroup]]] = None

    def agree(self) -> None:
        call = self.call
        note_device(call.group, self.planner.live())
        with call.tally.phase("inventory"):
            inventory = self.inventory_of_source(whole_only=True) if self.is_source else None
            if inventory and len(call.ranks) > 1 and not call.problems:
                with call.guard():
                    inventory[About.VALUES] = inline.pack(self.source, inventory)
        self.inventory = call.publish(inventory)
        self.by_window = bool(self.inventory.pop(About.FLEETING, False))
        data = self.inventory.pop(About.VALUES, None)
        self.agree_on_plan()
        stages = stages_of_all(self.agreement)
        if stages is not None:
            # Ranks with other modules (pipelines), or other hooks, have other stages. A stage moves in one
            # collective, so each rank needs all of them, in one order: all plan anew with the union.
            self.agree_on_plan(stages)
        self.pending = list(self.plan.stages)
        if data is not None and not self.pending:
            # Loading code may change the source between two stages, and every rank gets what it is then.
            self.values = inline.InlineReader(data, self.inventory)

    def agree_on_plan(self, stages: Sequence[str] = ()) -> None:
        call = self.call
        with call.tally.phase("agree"):
            self.make_plan(self.inventory, stages)
            plan = self.plan
            # Counters of steps are on the host with an accelerator's optimizer too.
            kinds = {wanted.device.type for wanted in plan.destinations.values() if wanted.layout.shape}
            device = kinds.pop() if len(kinds) == 1 else ""
            carrier = comm_device_type(call.group, device or "cpu")
            self.relays = self.relay_groups(carrier)
            wants, note = wants_of(plan.destinations), list(plan.stages)
        self.agreement = call.agree_on_wants(
            wants,
            Terms(
                device=device,
                # Where ranks differ in it, none of them passes anything on.
                condition=f"{note} {carrier if self.relays else ''}",
                user_code=plan.user_code,
                relays=self.relays is not None,
                note=note,
            ),
        )

    def relay_groups(self, carrier: str) -> Optional[Mapping[Mesh, Sequence[dist.ProcessGroup]]]:
        """The groups along which replicas pass a box on; None where one has no such backend."""
        if not any(wanted.layout.replica_dims for wanted in self.plan.destinations.values()):
            return {}
        try:
            relays = {mesh_of(mesh): compat.mesh_groups(mesh) for mesh in meshes_of(self.planner)}
        except Exception:  # a mesh without process groups; the source sends to every replica itself then
            return None
        carried = all(carrier in device_types(group) for groups in relays.values() for group in groups)
        return relays if carried else None

    def fetch(self, stage: str) -> None:
        while stage in self.pending:
            self.fetch_next()

    def fetch_rest(self) -> None:
        while self.pending:
            self.fetch_next()

    def fetch_next(self) -> None:
        """Fetch the next stage. Every rank comes to it, or sends the others its problem here."""
        # Loading code of one rank may fail before it comes here, while the others wait for the stage. So each
        # stage begins with an agreement, in which its problem travels: no rank waits for tensors in vain.
        stage = self.pending.pop(0)
        self.call.is_in_collective = True
        terms = Terms(device=self.agreement.device, user_code=True, relays=self.relays is not None)
        wants = wants_of(self.destinations_of(stage))
        self.agreement = self.call.agree_on_wants(wants, terms, so_far=self.so_far())
        self.move(stage)

    def move(self, stage: str) -> None:
        # From here on a failure reaches all ranks in the move itself, or the group is broken: an error
        # must not begin another collective, which the other ranks are not in (`Call.tell`).
        self.call.is_in_collective = True
        targets: dict[Key, Target] = {}
        wanted = {
            key for table in self.agreement.tables for key, want in table.wants.items() if want.stage == stage
        }
        with self.call.room_for("what is loaded"):
            targets = self.targets_of(stage)
        if self.values is not None:
            # Copies from memory can fail on one rank alone.
            self.call.is_in_collective = False
            self.move_values(self.values, targets)
        else:
            offer = Offer(
                {key: offered for key, offered in self.inventory.items() if key in wanted},
                self.source if self.is_source else None,
                self.by_window,
            )
            scatter(self.call, offer, targets, self.agreement, self.relays)
            self.give(targets)
        self.call.is_in_collective = False

    def move_values(self, values: inline.InlineReader, targets: Mapping[Key, Target]) -> None:
        """Fill all targets from what came with the inventory."""
        self.call.raise_alone()
        tally, written = self.call.tally, self.written
        tally.staging_budget, tally.rounds = self.agreement.staging_bytes, 1
        tally.meter.expect(lambda: values.nbytes)
        (tally.sent if self.is_source else tally.received)(values.nbytes)

        def text() -> str:
            doing = "copying what came with the inventory", list(targets)[len(written) : len(written) + 1]
            return f"{self.call.title}: {spell_broken_off(self.call.rank, doing, written)}"

        with as_transfer_error(text):
            # A target may be the source's own tensor: no copy of it is made.
            self.fill_from(self.source if self.is_source else values, targets)


class LocalLoad(Load):
    """From this rank's dict, which holds full tensors."""

    def __init__(self, planner: Planner, source: StateSource) -> None:
        meshes = meshes_of(planner) if dist.is_initialized() else []
        groups = compat.mesh_groups(max(meshes, key=lambda mesh: mesh.size())) if meshes else ()
        super().__init__(planner, source, Call(planner.title, "slice", groups, planner.problems))

    def agree(self) -> None:
        call = self.call
        with call.tally.phase("agree"):
            inventory = self.inventory_of_source(whole_only=False)
            inventory.pop(About.FLEETING, None)
            self.make_plan(inventory)
            with call.guard():
                call.problems += self.other_layouts()
            # A mapping that makes its values is code that can fail, too.
            call.agree_on_outcome(user_code=self.plan.user_code or not self.source.is_dict)

    def other_layouts(self) -> list[Problem]:
        """The DTensors of the dict that do not lie as their destinations do."""
        return [
            Problem("a DTensor of another layout", spell_key(key), str(dtensor.placements), "a whole tensor")
            for key, destination in self.plan.destinations.items()
            if key in self.source.spread
            for dtensor in [self.source.value(key)]
            if destination.like is None or layout_of(dtensor) != destination.layout
        ]

    def move(self, stage: str) -> None:
        self.fill_from(self.source, self.targets_of(stage))


def meshes_of(planner: Planner) -> list[DeviceMesh]:
    """The device meshes of a load, in the same order on every rank."""
    meshes: list[DeviceMesh] = []
    for value in planner.live():
        if isinstance(value, compat.DTensor) and value.device_mesh not in meshes:
            meshes.append(value.device_mesh)
    return meshes


def wants_of(destinations: Mapping[Key, Destination]) -> dict[Key, Want]:
    return {key: destination.want for key, destination in destinations.items()}


def stages_of_all(agreement: Agreement) -> Optional[list[str]]:
    """Return the stages of all ranks, merged into one order that every rank computes alike.

    Return None if all ranks have the same stages.
    """
    if len({tuple(table.note) for table in agreement.tables}) == 1:
        return None
    return list(dict.fromkeys(stage for table in agreement.tables for stage in table.note))
