"""The checkpoint manager of a model, plain or by DDP, FSDP, HSDP or TP, and of its optimizer."""

from __future__ import annotations

import copy
import json
import logging
import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel

from torch_dcp_backport import compat
from torch_dcp_backport.checkpoint._src import base_weights, beside, extra, verl
from torch_dcp_backport.checkpoint._src.manager import (
    ADAPTER,
    CONTENTS,
    HF_MODEL,
    LORA_ONLY,
    SAVED,
    SCHEDULER,
    SCHEDULERS_WORLD,
    TIED,
    VERL,
    VERL_ADAPTER,
    WORLD,
    ShardedManager,
    Stateful,
    schedule_of,
)
from torch_dcp_backport.checkpoint._src.partial import View
from torch_dcp_backport.checkpoint._src.together import CANNOT_LOAD, CANNOT_SAVE, writing_in
from torch_dcp_backport.dist_checkpointing import (
    CheckpointingException,
    LoadOptions,
    ShardedTensor,
    begin,
    values,
)
from torch_dcp_backport.dist_checkpointing.core import HUGGING_FACE, SHARDED, Folder
from torch_dcp_backport.dist_checkpointing.mapping import ShardedStateDict
from torch_dcp_backport.dist_checkpointing.serialization import LoadUnderWay, loading
from torch_dcp_backport.dist_checkpointing.training_state import (
    FORMS,
    GROUPS,
    MODEL,
    OPTIMIZER,
    STATE,
    RankNames,
    asked_of,
    described,
    names_held,
    names_lacking,
    plain_of,
    put_together,
    restored_from,
    state_of,
    take_states_of_checkpoint,
)
from torch_dcp_backport.hf import (
    ADAPTER_CONFIG,
    PREFIX,
    Export,
    as_settings,
    is_wrapped,
    save_adapter,
    save_state_dict,
    scale_of,
    tied_names,
    unchecked,
)
from torch_dcp_backport.publish import disk
from torch_dcp_backport.state_dict import set_model_state_dict, set_optimizer_state_dict, set_state_dict
from torch_dcp_backport.state_dict.fqn import get_fqns
from torch_dcp_backport.transfer import (
    Call,
    Group,
    group_ranks,
    layout_of,
)

logger = logging.getLogger("torch_dcp_backport.checkpoint")

# --- FSDP1's tensors as DTensors ---
#
# A write into either is a write into both. Must never touch FSDP2, nor FSDP1 with a mesh.


Groups = dict[dist.ProcessGroup, dist.ProcessGroup]


def as_dtensors(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return a state dict of a model or its optimizers with DTensors for ShardedTensors. Not collective.

    Raises:
        CheckpointingException: the spread of a tensor over the ranks is not known.
    """
    replicas: dict[Any, Any] = {}
    for module in FullyShardedDataParallel.fsdp_modules(model):
        # HYBRID_SHARD: shards over `process_group`, their replicas over `_inter_node_pg`.
        if getattr(module, "_inter_node_pg", None) is not None:
            replicas[module.process_group] = module._inter_node_pg
    converted: dict[str, Any] = _converted(dict(state), Meshes(replicas), "")
    return converted


class Meshes:
    """The meshes of a state dict, each made once."""

    def __init__(self, replicas: Groups) -> None:
        self.replicas = replicas
        self.made: dict[tuple[dist.ProcessGroup, str], DeviceMesh] = {}

    def of(self, group: dist.ProcessGroup, kind: str) -> DeviceMesh:
        mesh = self.made.get((group, kind))
        if mesh is None:
            mesh = self.made[group, kind] = _mesh_of(group, self.replicas.get(group), kind)
        return mesh


def _converted(value: Any, meshes: Meshes, path: str) -> Any:
    if isinstance(value, dict):
        return type(value)(
            (key, _converted(part, meshes, f"{path}.{key}" if path else str(key)))
            for key, part in value.items()
        )
    if isinstance(value, list):
        return [_converted(part, meshes, path) for part in value]
    return _dtensor_of(value, meshes, path) if hasattr(value, "local_shards") else value


def _dtensor_of(tensor: Any, meshes: Meshes, path: str) -> torch.Tensor:
    # `tensor.shape` would warn.
    shards, shape = tensor.local_shards(), tuple(tensor.metadata().size)
    if shards:
        local = shards[0].tensor
    else:
        # There are fewer rows than ranks, and none is left for this rank: its shard is empty.
        facts = tensor.metadata()
        device = facts.shards_metadata[0].placement.device()
        local = torch.empty((0, *shape[1:]), dtype=facts.tensor_properties.dtype, device=device)
    mesh = meshes.of(tensor._process_group, local.device.type)
    placements = (*[compat.Replicate()] * (mesh.ndim - 1), compat.Shard(0))
    stride = torch.empty(shape, device="meta").stride()
    view = compat.as_dtensor(local, mesh, placements, torch.Size(shape), stride)
    box = layout_of(view).own_box(dist.get_rank())
    parts = [(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)) for shard in shards]
    if parts != ([(box.offset, box.size)] if box.numel else []):
        raise CheckpointingException(
            f"{path}: FSDP1 has {parts} of {shape} on this rank, not {box} (give it a device_mesh)"
        )
    return view


def _mesh_of(group: dist.ProcessGroup, replicas: Any, kind: str) -> DeviceMesh:
    if replicas is None:
        return DeviceMesh.from_group(group, kind)
    shard_ranks, replica_ranks = group_ranks(group), group_ranks(replicas)
    # As torch makes them: the shards next to each other, their replicas as far apart as there are shards.
    grid = torch.arange(len(shard_ranks) * len(replica_ranks)).view(-1, len(shard_ranks))
    row, column = divmod(dist.get_rank(), len(shard_ranks))
    if grid[row:].numel() == 0 or [grid[row].tolist(), grid[:, column].tolist()] != [
        list(shard_ranks),
        list(replica_ranks),
    ]:
        raise CheckpointingException(
            f"HYBRID_SHARD over the ranks {list(shard_ranks)} and {list(replica_ranks)}, which are no grid "
            "of all ranks: give FSDP1 a device_mesh"
        )
    return DeviceMesh.from_group([replicas, group], kind, mesh=grid, mesh_dim_names=("replicate", "shard"))


# --- the manager ---

#: For verl's tools: the version of FSDP, and the number of ranks.
FSDP_CONFIG = "fsdp_config.json"
#: Settings of an adapter that its factor depends on.
FACTORS = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
#: Parts of a module's path that wrappers add.
WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


class Adapter(NamedTuple):
    """An adapter of peft that is merged into the model."""

    #: None where the model has peft's names, and no adapter.
    name: Optional[str]
    settings: dict[str, Any]
    #: Path of an adapted module -> whether its weight is (in, out).
    transposed: dict[str, bool]
    #: Whether the model has others.
    is_among_others: bool


class VerlFiles(NamedTuple):
    """What is loaded of the files of verl's own manager; empty where it is not asked for."""

    model: dict[str, verl.FileShards]
    #: This rank's state dict.
    optimizer: Any = None
    #: The schedule and the random states.
    others: Any = None


class FSDPCheckpointManager(ShardedManager):
    """A manager with verl's arguments and methods; its checkpoints load on any number of ranks and any mesh.

    Model and optimizer form a sharded checkpoint of `dist_checkpointing`. Scheduler and step are those of
    the first rank; each rank has its own random states. With "verl" in `save_contents` each rank also writes
    the files of verl's own manager, for verl's merger and manager; "verl" alone writes nothing else of the
    training, and is loaded with `trust`.

    Example:
        >>> import torch
        >>> from torch_dcp_backport.checkpoint import FSDPCheckpointManager
        >>> model = torch.nn.Linear(2, 3)
        >>> manager = FSDPCheckpointManager(model, torch.optim.AdamW(model.parameters()))
        >>> manager.save_checkpoint("run/global_step_1", global_step=1)
        >>> with torch.no_grad():
        ...     saved = model.weight.clone()
        ...     _ = model.weight.zero_()
        >>> manager.load_checkpoint("run/global_step_1")
        >>> torch.equal(model.weight, saved)
        True
    """

    offered = (*ShardedManager.offered, VERL)
    offers_partial_loads = True
    offers_lora_only = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optional[torch.optim.Optimizer] = None,
        lr_scheduler: Optional[Stateful] = None,
        processing_class: Optional[object] = None,
        checkpoint_config: Optional[Union[Mapping[str, object], object]] = None,
        *,
        tokenizer: Optional[object] = None,
        trust_remote_code: bool = False,
        like: Optional[Folder] = None,
        trust: bool = False,
        save_timeout: Optional[float] = None,
        torch_metadata: bool = True,
        process_group: Group = None,
    ) -> None:
        """Remember the parts.

        Args:
            model, optimizer, lr_scheduler, processing_class, checkpoint_config: as of
                `BaseCheckpointManager`.
            trust, save_timeout, torch_metadata, process_group: as of `BaseCheckpointManager`.
            tokenizer: verl's former name of `processing_class`.
            trust_remote_code: of verl's; no code of a model is loaded here.
            like: the model's own folder: its generation configuration, code, and what `processing_class` does
                not have go into every checkpoint. None is the folder that the model was loaded from.

        Raises:
            ValueError: an unknown content; "hf_model" of a model without a configuration; "verl" alone
                without `trust`; "hf_model" or "verl" beside `save_lora_only`.
        """
        processing_class = tokenizer if processing_class is None else processing_class
        super().__init__(
            model,
            optimizer,
            lr_scheduler,
            processing_class,
            checkpoint_config,
            trust=trust,
            save_timeout=save_timeout,
            torch_metadata=torch_metadata,
            process_group=process_group,
        )
        self.origin = beside.folder_of(like, getattr(self.unwrapped, "config", None))
        if self.should_save_hf_model and not hasattr(self.unwrapped, "config"):
            kind = type(self.unwrapped).__name__
            raise ValueError(f"save_contents: no hf_model of a {kind}: it has no config")
        whole = [name for name in (HF_MODEL, VERL) if name in self.checkpoint_save_contents]
        if self.saves_lora_only and whole:
            raise ValueError(
                f"{LORA_ONLY}=True leaves out the weights that save_contents={whole} asks for: take "
                "one of the two"
            )
        if self.should_save_verl and not self.should_save_ours and not trust:
            raise ValueError(
                "save_contents: verl alone could not be loaded again: its files run what they say; take "
                "trust=True, or name model, optimizer, extra beside it"
            )

    should_save_verl = property(lambda self: VERL in self.checkpoint_save_contents)
    #: Whether a save has a sharded checkpoint: of "verl" alone there is none.
    should_save_ours = property(
        lambda self: not self.should_save_verl or bool(set(CONTENTS) & set(self.checkpoint_save_contents))
    )

    @property
    def has_model(self) -> bool:
        return super().has_model or (self.should_save_verl and "model" in self.contents_of_verl)

    @property
    def contents_of_verl(self) -> tuple[str, ...]:
        """The contents of verl's files: those that are saved beside it, or all."""
        return tuple(name for name in CONTENTS if name in self.checkpoint_save_contents) or CONTENTS

    def write(self, folder: Path, step: int) -> None:
        with begin(CANNOT_SAVE, "save", self.process_group) as call:
            base: Optional[base_weights.Sums] = None
            with call.guard() as own:
                if is_merged(self.unwrapped):
                    raise CheckpointingException(
                        "adapters are merged into the weights: unmerge them before a save"
                    )
                halves = self.halves(self.should_save_model, self.should_save_optimizer)
                with values.naming_too_deep(halves):
                    halves = as_dtensors(halves, self.model)
                if self.saves_lora_only and MODEL in halves:
                    halves[MODEL], below = base_weights.parted(halves[MODEL], frozen_names(self.model))
                    base = base_weights.sums_of(below)
                held = {key: unchecked(value) for key, value in tensors_of(halves.get(MODEL, {})).items()}
                own.set({TIED: tied_names(held), **halves})
            plain = call.attempt(plain_of, own)
            are_alike, schedule = self.agree_on_save(call, folder, plain, self.should_save_ours)
            halves = own.value if are_alike else put_together(call, own.value, plain.value)
            sums: dict[str, str] = {}
            if self.saves_lora_only:
                sums = call.gather_object("adding up the weights below adapters", base, base_weights.added)
        if self.should_save_ours:
            with self.saving_state(folder / SHARDED, step, schedule) as parts:
                parts.update(described(halves, self.process_group))
                if sums:
                    parts[LORA_ONLY] = sums
                if self.should_save_extra:
                    rank, world = self.place()
                    parts[WORLD] = world
                    parts[extra.RNG] = extra.own_object(self.get_rng_state(), rank, world)
        if self.should_save_verl:
            self.write_verl(folder)
        if self.should_save_hf_model:

            def write() -> None:
                model = (
                    halves[MODEL]
                    if MODEL in halves
                    else as_dtensors(self.halves(True, False), self.model)[MODEL]
                )
                self.write_hf_model(folder, tensors_of(model))

            self.try_hf_model(folder, write)

    def write_hf_model(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the weights that `from_pretrained` opens, and an adapter also alone. Collective.

        Args:
            folder: the folder of the checkpoint.
            tensors: name -> tensor of the model, plain or a DTensor.

        Raises:
            CheckpointingException, RuntimeError: it cannot be written; on every rank.
            TransferError: a rank is gone, or the group's timeout is over.
        """
        target, how, group = folder / HUGGING_FACE, Export(overwrite=True), self.process_group
        with begin(CANNOT_SAVE, "save", group) as call:
            # Code of peft and of the model, which may raise on a rank alone.
            with call.guard("adapter") as same:
                adapter = self.adapter_of(tensors)
                same.set({"adapter": str(adapter is not None)})
            call.barrier("describing the adapter", must_agree=same)
        if adapter is None:
            save_state_dict(tensors, target, like=target, how=how, process_group=group)
            return
        name, settings, place = adapter.name, adapter.settings, folder / ADAPTER
        if name is not None:
            alone = place / name if adapter.is_among_others else place
            save_adapter(tensors, alone, adapter=settings, name=name, overwrite=True, process_group=group)
        save_state_dict(
            tensors,
            target,
            like=target,
            how=how,
            adapter=settings,
            adapter_name=name,
            transposed=adapter.transposed,
            process_group=group,
        )

    def adapter_of(self, tensors: Iterable[str]) -> Optional[Adapter]:
        """Return the adapter that is merged into "hf_model"; None for a model that peft does not wrap.

        Args:
            tensors: the names of the model's tensors.

        Raises:
            RuntimeError: several adapters are active, or none.
        """
        configs = self.adapters
        if not configs:
            # A wrapper whose adapters were deleted has peft's names, and nothing to merge.
            is_of_peft = isinstance(getattr(self.unwrapped, "peft_config", None), Mapping)
            return Adapter(None, {}, {}, False) if is_of_peft and is_wrapped(tensors) else None
        name = self.active_adapter(configs)
        model = base_of(self.unwrapped)
        settings = beside.adapter_settings(configs[name], str(self.origin or ""), model)
        for text, about in unlike_running(self.unwrapped, name, settings):
            self.tell(text, about)
        return Adapter(name, settings, transposed_in(self.unwrapped), len(configs) > 1)

    def may_have_adapters(self) -> bool:
        return bool(self.adapters)

    @property
    def adapters(self) -> dict[str, Any]:
        """The configurations of peft's adapters, by name."""
        return beside.adapters_of(self.unwrapped)

    def active_adapter(self, configs: Mapping[str, Any]) -> str:
        """Return the name of the adapter that is merged.

        Args:
            configs: name -> configuration of each adapter.

        Raises:
            RuntimeError: several are active, or none.
        """
        names = list(configs)
        if len(names) > 1:
            # transformers has a method of this name, and raises where it has not injected them itself.
            lists = [getattr(module, "active_adapters", None) for module in self.unwrapped.modules()]
            active = {name for names in lists if isinstance(names, (list, tuple)) for name in names}
            names = [name for name in configs if name in active]
        if len(names) != 1:
            raise RuntimeError(
                f"adapters {', '.join(configs)}, of which {len(names)} are active: one is merged"
            )
        return names[0]

    def write_configuration(self, folder: Path) -> None:
        """Write the files that `from_pretrained` needs beside weights, as far as model and tokenizer can.

        Args:
            folder: the folder for them, within the checkpoint.
        """
        with beside.told("the configuration of the model and its tokenizer"):
            model = base_of(self.unwrapped)
            generates = getattr(model, "can_generate", None)
            beside.write_beside(
                folder,
                config=configuration_of(model),
                generation=getattr(model, "generation_config", None),
                generates=generates is None or bool(generates()),
                processing_class=self.processing_class,
                origin=self.origin,
            )
        with beside.told("the configurations of adapters"):
            model = base_of(self.unwrapped)
            beside.write_adapters(folder.parent / ADAPTER, self.adapters, str(self.origin or ""), model)
        version = fsdp_version(self.model)
        if version:
            writing_in(folder).make_folder(folder.parent)
            facts = {"FSDP_version": version, "world_size": self.place()[1]}
            text = json.dumps(facts, indent=4)
            disk.publish(folder.parent / FSDP_CONFIG, text.encode(), is_synced=False)

    def read(self, folder: Path) -> None:
        path = folder / SHARDED
        if verl_world := self.seen:
            if not self.partial.is_whole:
                raise CheckpointingException(
                    f"{folder}: exclude and rename are not offered of verl's own files"
                )
            self.read_verl(folder, verl_world)
            return
        with begin(CANNOT_LOAD, "load", self.process_group) as call:
            with call.guard() as own:
                state = self.halves(self.should_load_model, self.should_load_optimizer)
                state.pop(FORMS, None)
                views, frozen = as_dtensors(state, self.model), frozen_names(self.model)
                own.set(names_held(views, frozen))
            names = call.attempt(lambda held: [sorted(part) for part in held], own)
            wanted = (SAVED, WORLD, SCHEDULERS_WORLD, LORA_ONLY)
            common, are_alike, opened = self.agree_on_load(call, path, wanted, names)
            others = RankNames() if are_alike else names_lacking(call, own.value)
            below: dict[str, Any] = {}
            if LORA_ONLY in common and MODEL in views:
                left_out = self.check_base(call, folder, views[MODEL], common[LORA_ONLY])
                # As they are in the model's own state dict: FSDP1 has no DTensors there.
                below = {name: state[MODEL][name] for name in left_out}
                for half in (views, state):
                    half[MODEL] = {key: value for key, value in half[MODEL].items() if key not in below}
        rank, world = self.place()
        saved_world = common.get(WORLD, world)
        frozen |= others.frozen
        is_all = self.loads_all(common) and not frozen and self.partial.is_whole
        strict = "raise_all" if is_all else "raise_unexpected"
        options = LoadOptions(strict=strict, trust=self.trust, process_group=self.process_group)
        with loading(path, options, opened) as load:
            # Its index may be large, and the load is over before the restore.
            del opened
            if OPTIMIZER in state and self.partial.is_whole:
                # What is left out of a partial load stays as it is: there both sides have to be alike.
                take_states_of_checkpoint(
                    state[OPTIMIZER][STATE], self.model, self.optimizers, load.checkpoint, self.trust
                )
                if not FullyShardedDataParallel.fsdp_modules(self.model):
                    views[OPTIMIZER][STATE] = state[OPTIMIZER][STATE]
            view, schedule = self.ask(load, common, views, others, frozen)
        loaded = load.result
        if view.changes:
            loaded = view.plain(loaded, state)
        restored = restored_from(state, loaded, others.plain)
        if below:
            # Both halves are restored as wholes; what the checkpoint leaves out stays as it is.
            restored[MODEL] = {**restored[MODEL], **below}
        self.restore(view.completed(restored, state) if view.changes else restored)
        self.left_out = tuple(view.left_out())
        if self.left_out:
            logger.warning("%s: left out, and as they were: %s", folder, ", ".join(self.left_out))
        if self.should_load_extra:
            if schedule is None:
                schedule = self.schedule_in_load(loaded)
            if self.lr_scheduler is not None and schedule is not None:
                self.lr_scheduler.load_state_dict(schedule)
            if rank == 0:
                extra.warn_of_other_world(world, saved_world)
            # Last: the loads before may draw random numbers.
            self.load_rng_state(loaded[extra.RNG][0])

    def ask(
        self,
        load: LoadUnderWay,
        common: Mapping[str, Any],
        views: Mapping[str, Any],
        others: RankNames,
        frozen: Collection[str],
    ) -> tuple[View, Any]:
        """Say what a load loads.

        What it asks for is not kept here: it may be large, and the load is over before the restore.

        Args:
            load: the load, with its checkpoint open.
            common: values of the common state of the checkpoint.
            views: this rank's state dicts.
            others: the names that other ranks have, and this rank has not.
            frozen: the names of parameters that are not trained, of all ranks.

        Returns:
            The checkpoint under today's names, and the schedule; None where the checkpoint has no single one.

        Raises:
            CheckpointingException: the checkpoint has other keys or param groups.
        """
        checkpoint, schedule = load.checkpoint, None
        is_full = self.loads_all(common)
        asked = asked_of(views, checkpoint, self.process_group, self.trust)
        view = View(self.partial, checkpoint.holds.tensors, {*keys_of(asked), *others.tensors})
        if not self.partial.is_whole:
            check_tied(view, views.get(MODEL, {}))
        groups = views.get(OPTIMIZER, {}).get(GROUPS, [])
        if self.should_load_extra and self.lr_scheduler is not None:
            stored = checkpoint.common_state(self.trust)
            if SCHEDULER in stored:
                saved = view.groups(stored.get(OPTIMIZER, {}).get(GROUPS, []))
                schedule = schedule_of(stored[SCHEDULER], self.lr_scheduler.state_dict(), saved, groups)
        asked.update(self.schedule_wanted(common))
        if view.changes:
            asked = view.selected(asked)
        if not is_full or frozen or view.changes:
            check_keys(asked, view.held, is_full, others.tensors - view.excluded, frozen)
        if OPTIMIZER in views and view.changes:
            stored = checkpoint.common_state(self.trust).get(OPTIMIZER, {})
            view.check_groups(stored.get(GROUPS, []), groups)
        asked = dict(view.as_saved(asked))
        if self.should_load_extra:
            rank, world = self.place()
            asked[extra.RNG] = extra.wanted_objects(rank, world, common.get(WORLD, world))
        load.ask(asked)
        return view, schedule

    def loads_all(self, common: Mapping[str, Any]) -> bool:
        """Return whether all that was saved is loaded.

        Args:
            common: values of the common state of the checkpoint.
        """
        return set(self.checkpoint_load_contents) >= set(common[SAVED])

    def write_verl(self, folder: Path) -> None:
        """Write this rank's files of verl's own manager. Collective.

        Args:
            folder: the folder of the checkpoint.

        Raises:
            CheckpointingException: FSDP does not shard the model, ...; the same on every rank.
        """
        (rank, world), contents = self.place(), self.contents_of_verl
        with begin(CANNOT_SAVE, "save", self.process_group) as call:
            with call.guard():
                if world > 1 and not fsdp_version(self.model):
                    kind = type(self.model).__name__
                    raise CheckpointingException(
                        f"verl: its files are shards of FSDP, which a {kind} has not"
                    )
                states = verl.states_to_save(self.model, self.optimizer, contents)
                if "extra" in contents:
                    rng = verl.rng_state_to_save(self.get_rng_state(), extra.device_type_of(self.model))
                    schedule = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
                    states[verl.EXTRA] = {"lr_scheduler": schedule, "rng": rng}
                writing_in(folder).make_folder(folder)
                for part, state in states.items():
                    torch.save(state, folder / verl.name_of(part, world, rank))
            call.barrier("writing the files of verl's manager")

    def seen_in(self, folder: Path) -> int:
        """Return the number of ranks of verl's own manager that saved a folder; 0 where ours did.

        Args:
            folder: the folder of the checkpoint.

        Raises:
            CheckpointingException: several of verl's saves are in it; an adapter would be scaled otherwise.
        """
        world = 0 if (folder / SHARDED).exists() else verl.saved_world(folder)
        if world:
            self.check_adapters(folder)
        return world

    def check_contents(self, path: Path, state: Mapping[str, Any]) -> None:
        super().check_contents(path, state)
        self.check_adapters(path.parent)

    def check_base(
        self, call: Call, folder: Path, model: Mapping[str, Any], saved: Mapping[str, str]
    ) -> list[str]:
        """Return the names of this rank's weights that a checkpoint of adapters alone leaves out. Collective.

        Args:
            call: the load.
            folder: the folder of the checkpoint.
            model: the state dict of this rank's model of today, whole.
            saved: the checksum of each weight at the save.

        Raises:
            CheckpointingException: a weight is not as it was at the save; the same on every rank.
        """
        with call.guard() as own:
            if not self.partial.is_whole:
                raise CheckpointingException(
                    f"{folder} has adapters alone ({LORA_ONLY}): exclude and rename are not offered of it"
                )
            below = {key: value for key, value in model.items() if key in saved}
            own.set(base_weights.sums_of(below))

        def compared(sums_by_rank: Mapping[int, base_weights.Sums]) -> None:
            now = base_weights.added(sums_by_rank)
            for key, expected in saved.items():
                if now.get(key) != expected:
                    raise CheckpointingException(
                        f"{folder} has adapters alone ({LORA_ONLY}), and was saved over other weights: {key} "
                        f"has {now.get(key, 'no weight')} in this model, {expected} at the save"
                    )

        call.gather_object("adding up the weights below adapters", own, compared)
        # A stage of a pipeline has some of them.
        return [key for key in saved if key in model]

    def check_adapters(self, folder: Path) -> None:
        """Refuse adapters that would have another factor than at the save. Runs on the first rank.

        Args:
            folder: the folder of the checkpoint.

        Raises:
            CheckpointingException: naming the setting.
        """
        configs = self.adapters if self.should_load_model else {}
        for name, config in configs.items():
            own = folder / ADAPTER / name if len(configs) > 1 else folder / ADAPTER
            places = [place for place in (own, folder / VERL_ADAPTER) if (place / ADAPTER_CONFIG).is_file()]
            for place in places[:1]:
                saved, now = as_settings(place), config.to_dict()
                for setting in FACTORS:
                    if (saved.get(setting) or None) != (now.get(setting) or None):
                        raise CheckpointingException(
                            f"{place}: the adapter {name} was saved with {setting}={saved.get(setting)!r}, "
                            f"and has {now.get(setting)!r} now: it would be scaled otherwise"
                        )

    def verl_files(self, call: Call, folder: Path, saved_world: int) -> VerlFiles:
        """Return what is loaded of verl's files; a file that cannot be loaded is a problem. Not collective.

        Args:
            call: the call that gets the problems.
            folder: the folder of the checkpoint.
            saved_world: the number of ranks that saved it.

        Raises:
            CheckpointingException: it cannot be loaded here.
        """
        rank, world = self.place()
        contents = self.checkpoint_load_contents
        if not self.trust:
            raise CheckpointingException(f"{folder} {verl.UNTRUSTED}")
        if saved_world != world and contents != (MODEL,):
            raise CheckpointingException(
                f"saved by {saved_world} ranks of verl's own manager, and loaded by {world}: on "
                f"another number load_contents=['model'] alone can be, not {', '.join(contents)}"
            )
        files = VerlFiles(verl.model_of(folder, saved_world) if self.should_load_model else {})
        if self.should_load_optimizer:
            if not isinstance(self.optimizer, torch.optim.Optimizer):
                kind = type(self.optimizer).__name__
                raise CheckpointingException(f"verl's files have one optimizer, and this manager a {kind}")
            files = files._replace(optimizer=verl.loaded(folder, verl.OPTIMIZER, world, rank))
            call.problems += verl.problems_of_optimizer(files.optimizer, self.optimizer)
        if self.should_load_extra:
            files = files._replace(others=verl.loaded(folder, verl.EXTRA, world, rank))
            call.problems += verl.problems_of_extra(files.others, self.lr_scheduler is not None)
        return files

    def read_verl(self, folder: Path, saved_world: int) -> None:
        """Load a checkpoint of verl's own manager. Collective.

        Args:
            folder: the folder of the checkpoint.
            saved_world: the number of ranks that saved it.

        Raises:
            CheckpointingException: without `trust`; files that do not fit the model, or are not those in the
                manifest that is beside them; another number of ranks, if more than the model is loaded.
        """
        with begin(CANNOT_LOAD, "load", self.process_group) as call:
            # Before a pickle is opened, which may do anything.
            with call.guard(str(folder)):
                call.problems += verl.problems_of_files(folder, *self.place())
            call.barrier("comparing the files of verl's manager with the manifest")
        with begin(CANNOT_LOAD, "load", self.process_group) as call:
            opened = call.attempt(self.verl_files, call, folder, saved_world, key=str(folder))
            common = {"load_contents": ", ".join(self.checkpoint_load_contents)}
            call.barrier("reading the files of verl's manager", must_agree=common)
        model, optimizer, others = opened.value
        if model:
            # Apart: under FSDP1 the model's state dict is collective.
            with begin(CANNOT_LOAD, "load", self.process_group) as call:
                with call.guard():
                    halves = self.halves(True, False)
                    targets = tensors_of(as_dtensors(halves, self.model)[MODEL])
                    call.problems += verl.problems_of(model, targets)
                call.barrier("comparing them with the model")
            verl.fill(model, targets, dist.get_rank() if dist.is_initialized() else 0)
            self.restore(halves)
        if optimizer is not None:
            verl.load_optimizer(optimizer, self.optimizer)
        if others is not None:
            if self.lr_scheduler is not None:
                self.lr_scheduler.load_state_dict(others["lr_scheduler"])
            if "rng" in others:
                self.load_rng_state(verl.rng_state_of(others["rng"]))
            elif self.is_first:
                logger.warning("%s has no random states, which go on as they are", folder)

    def halves(self, has_model: bool, has_optimizer: bool) -> dict[str, Any]:
        """Return the state dicts of the model and of its optimizers, with DTensors.

        Args:
            has_model: return the model's.
            has_optimizer: return the optimizers'.
        """
        if not (has_model or has_optimizer):
            return {}
        state = state_of(self.model, self.optimizers if has_optimizer else ())
        wanted = {MODEL: has_model, OPTIMIZER: has_optimizer}
        if has_optimizer and FORMS in state:
            wanted[FORMS] = True
        return {key: part for key, part in state.items() if wanted.get(key)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load the state dicts into the model and its optimizers.

        Args:
            state: the state dicts, as `halves` returns them.
        """
        if MODEL in state and OPTIMIZER in state:
            set_state_dict(
                self.model,
                self.optimizers,
                model_state_dict=state[MODEL],
                optim_state_dict=state[OPTIMIZER],
            )
        elif MODEL in state:
            set_model_state_dict(self.model, state[MODEL])
        elif OPTIMIZER in state:
            set_optimizer_state_dict(self.model, self.optimizers, state[OPTIMIZER])

    @property
    def optimizers(self) -> Any:
        return () if self.optimizer is None else self.optimizer

    @property
    def unwrapped(self) -> Any:
        """The user's own model."""
        model = self.model
        while isinstance(getattr(model, "module", None), nn.Module):
            model = model.module
        return model


def check_tied(view: View, model: Mapping[str, Any]) -> None:
    """Refuse to leave out one name of a parameter that is loaded by another.

    Args:
        view: the checkpoint.
        model: the state dict of today's model.

    Raises:
        CheckpointingException: naming both.
    """
    held = {key: unchecked(value) for key, value in tensors_of(model).items()}
    for names in tied_names(held).items():
        left_out = [name for name in names if view.is_excluded(f"{MODEL}.{name}")]
        if len(left_out) == 1:
            (other,) = set(names) - set(left_out)
            raise CheckpointingException(
                f"exclude: {left_out[0]} is tied to {other}, which is loaded: exclude both, or none"
            )


def fsdp_version(model: nn.Module) -> int:
    """Return the version of FSDP that shards a model, 1 or 2; 0 where neither does."""
    if isinstance(model, FullyShardedDataParallel):
        return 1
    return 2 if isinstance(model, compat.fsdp2().FSDPModule) else 0


def tensors_of(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's state dict, without values of other types (extra state)."""
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}


def base_of(model: Any) -> Any:
    """Return the model that peft wraps; any other model as it is."""
    unwrap = getattr(model, "get_base_model", None)
    if not callable(unwrap) or not isinstance(getattr(model, "peft_config", None), Mapping):
        return model
    if beside.adapters_of(model):
        return unwrap()
    # Without an adapter peft's own method looks for one.
    inner = getattr(getattr(model, "base_model", None), "model", None)
    return inner if isinstance(inner, nn.Module) else model


def is_merged(model: Any) -> bool:
    """Return whether adapters of peft are in the weights now: a resume would add them again."""
    if not beside.adapters_of(model):
        return False
    return any(getattr(module, "merged_adapters", None) for module in model.modules())


def path_of(name: str) -> str:
    """Return the path of a module in the model that peft wraps, without wrappers."""
    path = ".".join(part for part in name.split(".") if part not in WRAPPERS)
    return path[len(PREFIX) :] if path.startswith(PREFIX) else path


def transposed_in(model: nn.Module) -> dict[str, bool]:
    """Return path of each adapted module -> whether its weight is (in, out), by the module's class."""
    found = {}
    for name, module in model.named_modules():
        layer = getattr(module, "base_layer", None)
        if isinstance(layer, nn.Module):
            kinds = {kind.__name__ for part in layer.modules() for kind in type(part).__mro__}
            found[path_of(name)] = "Conv1D" in kinds
    return found


def unlike_running(
    model: nn.Module, adapter: str, settings: Mapping[str, Any]
) -> Iterator[tuple[str, Optional[Hashable]]]:
    """Yield warnings, and what they are of, where a model computes now with less or more of an adapter."""
    for name, module in model.named_modules():
        scales, ranks = getattr(module, "scaling", None), getattr(module, "r", None)
        if not isinstance(scales, Mapping) or not isinstance(ranks, Mapping) or adapter not in scales:
            continue
        if getattr(module, "disable_adapters", False) is True:
            yield f"the adapter {adapter} is disabled in the model, and merged in hf_model", None
        path = path_of(name)
        expected = scale_of(path, ranks[adapter], settings)
        if not math.isclose(scales[adapter], expected, rel_tol=1e-6):
            text = f"{scales[adapter]} in {path}, where its configuration says {expected}, as is merged"
            yield f"the adapter {adapter} has the factor {text}", ("factor", adapter)


def configuration_of(model: nn.Module) -> Any:
    """Return a model's configuration, which names its class as transformers' `save_pretrained` would.

    A configuration keeps the class that it came with, also where another is made of it: a value model.
    """
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "architectures"):
        return config
    own = [beside.class_of(model).__name__]
    is_of_transformers = any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__)
    names = own if is_of_transformers else config.architectures or own
    if config.architectures == names:
        return config
    config = copy.deepcopy(config)
    config.architectures = names
    return config


def frozen_names(model: nn.Module) -> set[str]:
    """Return the FQNs of the parameters that are not trained, all of a tied one."""
    named = model.named_parameters(remove_duplicate=False)
    names = [name for name, parameter in named if not parameter.requires_grad]
    return {fqn for name in names for fqn in get_fqns(model, name)}


def check_keys(
    asked: ShardedStateDict,
    held: Iterable[str],
    is_full: bool,
    elsewhere: Collection[str],
    frozen: Collection[str],
) -> None:
    """Refuse keys that only the checkpoint has, in the halves that are loaded.

    Allowed are an optimizer's states of parameters that were trained at the save, and are frozen now.

    Args:
        elsewhere: the keys that other ranks ask for.
        frozen: of all ranks.

    Raises:
        CheckpointingException: naming them.
    """
    own = {*keys_of(asked), *elsewhere}
    halves = tuple(f"{name}." for name in (MODEL, OPTIMIZER) if is_full or name in asked)
    only_held = {key for key in held if key.startswith(halves) and key not in own}
    states = tuple(f"{OPTIMIZER}.state.{name}." for name in frozen)
    left_out = {key for key in only_held if key.startswith(states)}
    left = sorted(only_held - left_out)
    if left:
        raise CheckpointingException(f"only the checkpoint has {', '.join(left[:5])}")
    if left_out:
        logger.warning("not loaded, as their parameters are frozen now: %s", ", ".join(sorted(left_out)[:5]))


def keys_of(value: Any) -> list[str]:
    """Return the keys of the tensors in a sharded state dict."""
    if isinstance(value, ShardedTensor):
        return [value.key]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [key for part in parts for key in keys_of(part)]
