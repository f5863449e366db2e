"""The checkpoint manager of models with a `sharded_state_dict`, such as megatron-core's.

Must never import megatron: Megatron's parallel state is handed in, or taken where it is loaded already.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import nn

from torch_dcp_backport import rooms
from torch_dcp_backport.checkpoint._src import beside, extra
from torch_dcp_backport.checkpoint._src.manager import (
    SAVED,
    SCHEDULERS_WORLD,
    WORLD,
    ShardedManager,
    Stateful,
)
from torch_dcp_backport.checkpoint._src.together import CANNOT_LOAD, CANNOT_SAVE, writing_in
from torch_dcp_backport.dist_checkpointing import (
    CheckpointingException,
    LoadOptions,
    begin,
    param_groups,
    resolved,
)
from torch_dcp_backport.dist_checkpointing.core import HUGGING_FACE, SHARDED, Folder
from torch_dcp_backport.dist_checkpointing.mapping import ShardedStateDict
from torch_dcp_backport.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from torch_dcp_backport.dist_checkpointing.serialization import loading
from torch_dcp_backport.dist_checkpointing.state_dict_utils import structure_of
from torch_dcp_backport.hf import Export
from torch_dcp_backport.publish import disk
from torch_dcp_backport.state_dict.optim.initial import init_optim_state
from torch_dcp_backport.transfer import Group

logger = logging.getLogger("torch_dcp_backport.checkpoint")

#: A param group, with the keys of its parameters.
Options = param_groups.Group
PARALLEL_STATE, RANDOM = "megatron.core.parallel_state", "megatron.core.tensor_parallel.random"
TRANSFORMER_CONFIG = "transformer_config.json"
#: Beside an optimizer's states: values that have no parameter's shape, such as the number of steps.
SCALARS = "scalars"
#: The param groups of torch's own optimizer, of all ranks, by the keys of their parameters.
NAMED = "named_groups"
#: What a rank has for an optimizer, in errors: values of the last kind are Megatron's own, as it saves them.
NO_OPTIMIZER, TORCH, ITS_OWN = "no optimizer", "one of torch's", "a sharded_state_dict of its own"
PUTTING_TOGETHER = "putting the ranks' optimizers together"
#: Common state: the numbers of pipeline stages, TP ranks and replicas.
GRID = "grid"


class GridPlace(NamedTuple):
    """A rank's place among pipeline stages, TP ranks and replicas."""

    own: tuple[int, ...]
    grid: tuple[int, ...]

    @property
    def number(self) -> int:
        number = 0
        for place, extent in zip(self.own, self.grid):
            number = number * extent + place
        return number


class MegatronCheckpointManager(ShardedManager):
    """A manager with verl's arguments and methods; loads at any TP, PP and DP that the model's parts allow.

    Keys in the checkpoint are those of the model's `sharded_state_dict`, as Megatron saves them.
    """

    schedule_in = "optimizer"

    def __init__(
        self,
        config: Optional[object] = None,
        checkpoint_config: Optional[Union[Mapping[str, object], object]] = None,
        model_config: Optional[object] = None,
        transformer_config: Optional[object] = None,
        role: str = "actor",
        model: Optional[Union[nn.Module, Sequence[nn.Module]]] = None,
        arch: str = "",
        hf_config: Optional[object] = None,
        param_dtype: Optional[torch.dtype] = None,
        share_embeddings_and_output_weights: bool = False,
        processing_class: Optional[object] = None,
        optimizer: Optional[Stateful] = None,
        optimizer_scheduler: Optional[Stateful] = None,
        use_distributed_optimizer: bool = False,
        use_checkpoint_opt_param_scheduler: bool = True,
        use_dist_checkpointing: bool = True,
        bridge: Optional[object] = None,
        provider: Optional[object] = None,
        peft_cls: Optional[object] = None,
        *,
        parallel_state: Optional[object] = None,
        rng_tracker: Optional[object] = None,
        like: Optional[Folder] = None,
        trust: bool = False,
        save_timeout: Optional[float] = None,
        torch_metadata: bool = True,
        process_group: Group = None,
    ) -> None:
        """Remember the parts. Not collective.

        Args:
            config, model_config, role, arch: arguments of verl's; not needed.
            checkpoint_config: as of `BaseCheckpointManager`. The schedule belongs to the optimizer.
            transformer_config: a dataclass, written to transformer_config.json.
            model: this rank's chunk, or a list of its chunks; wrappers are removed.
            hf_config: with `save_pretrained`; needed for "hf_model".
            param_dtype: the dtype that the weights of "hf_model" are cast to; None keeps theirs.
            share_embeddings_and_output_weights, use_distributed_optimizer: arguments of verl's; not needed.
            processing_class: as of `BaseCheckpointManager`.
            optimizer: with `sharded_state_dict(model_state)`, as Megatron's; or torch's own, of the model's
                parameters.
            optimizer_scheduler: the schedule, with `state_dict()` and `load_state_dict()`.
            use_checkpoint_opt_param_scheduler: whether the schedule is loaded.
            use_dist_checkpointing, bridge, provider, peft_cls: arguments of verl's. They change nothing; the
                log says so once where they ask for another format than a sharded checkpoint.
            parallel_state: with the functions of megatron.core.parallel_state, which is the default if the
                program has it loaded and initialised; else every rank is a replica.
            rng_tracker: with `get_states` and `set_states`; Megatron's own where the program has it loaded.
            like: the model's own folder; as of `FSDPCheckpointManager`.
            trust, save_timeout, torch_metadata, process_group: as of `BaseCheckpointManager`.

        Raises:
            ValueError: an unknown content; "hf_model" without `hf_config`.
        """
        others = {"bridge": bridge, "provider": provider, "peft_cls": peft_cls}
        asked = [name for name, value in others.items() if value is not None]
        asked += [] if use_dist_checkpointing else ["use_dist_checkpointing=False"]
        is_one = isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList)
        chunks: Any = [model] if is_one else model
        super().__init__(
            chunks,
            optimizer,
            optimizer_scheduler,
            processing_class,
            checkpoint_config,
            trust=trust,
            save_timeout=save_timeout,
            torch_metadata=torch_metadata,
            process_group=process_group,
        )
        if asked:
            self.tell(f"{', '.join(asked)}: changes nothing here; all is saved as a sharded checkpoint")
        self.transformer_config: Any = transformer_config
        self.hf_config: Any = hf_config
        self.param_dtype = param_dtype
        self.use_checkpoint_opt_param_scheduler = use_checkpoint_opt_param_scheduler
        self._parallel_state: Any = parallel_state
        self._rng_tracker: Any = rng_tracker
        self.origin = beside.folder_of(like, hf_config)
        if self.should_save_hf_model and not hasattr(hf_config, "save_pretrained"):
            raise ValueError("save_contents: no hf_model: hf_config has no save_pretrained")

    def write(self, folder: Path, step: int) -> None:
        with begin(CANNOT_SAVE, "save", self.process_group) as call:
            made = call.attempt(self.generate_state_dict, self.checkpoint_save_contents)
            own = call.attempt(optimizer_values, made)
            compared = call.attempt(OptimizerValues.compared, own)
            are_alike, schedule = self.agree_on_save(call, folder, compared)
            state = made.value
            if not are_alike:
                # Every rank takes part, also one without an optimizer: the first rank alone saves these
                # values, and may be the one that has none.
                values = call.gather_object(PUTTING_TOGETHER, own.value, values_together)
                state["optimizer"] = {**state.get("optimizer", {}), **values}
        with self.saving_state(folder / SHARDED, step, schedule) as parts:
            parts.update(state)
        if self.should_save_hf_model:
            target, how = folder / HUGGING_FACE, Export(dtype=self.param_dtype, overwrite=True)
            place, save_hf = self.tensor_parallel, rooms.offered("the export of Megatron models")
            self.try_hf_model(
                folder, lambda: save_hf(self.chunks, target, like=target, parallel=place, how=how)
            )

    def write_configuration(self, folder: Path) -> None:
        beside.write_beside(
            folder, config=self.hf_config, processing_class=self.processing_class, origin=self.origin
        )
        if self.should_save_extra and dataclasses.is_dataclass(self.transformer_config):
            writing_in(folder).make_folder(folder.parent)
            text = text_of(self.transformer_config)
            disk.publish(folder.parent / TRANSFORMER_CONFIG, text.encode(), is_synced=False)

    def read(self, folder: Path) -> None:
        path, contents = folder / SHARDED, self.checkpoint_load_contents
        with begin(CANNOT_LOAD, "load", self.process_group) as call:
            with call.guard():
                state = self.generate_state_dict(contents, is_loading=True)
            common, _, opened = self.agree_on_load(call, path, (SAVED, WORLD, GRID, SCHEDULERS_WORLD))
        place = self.parallel_place()
        saved_world = common.get(WORLD, self.place()[1])
        strict = "raise_all" if set(contents) >= set(self.contents_in(common)) else "raise_unexpected"
        options = LoadOptions(strict=strict, trust=self.trust, process_group=self.process_group)
        with loading(path, options, opened) as load:
            # Its index may be large, and the load is over before the restore.
            del opened
            if NAMED in state.get("optimizer", {}):
                saved = load.checkpoint.common_state(self.trust).get("optimizer", {})
                param_groups.check(saved_groups(saved, state["optimizer"][NAMED]), state["optimizer"][NAMED])
            asked = {**state, **self.schedule_wanted(common)}
            if self.should_load_extra:
                numbers = place.number, self.place()[1], saved_world
                asked[extra.RNG] = extra.wanted_objects(*numbers)
            load.ask(asked)
        loaded = load.result
        for name, chunk in zip(self.names, self.chunks) if self.should_load_model else ():
            chunk.load_state_dict(loaded[name])
        if self.should_load_optimizer and self.optimizer is not None:
            self.load_optimizer(loaded["optimizer"], state["optimizer"].get(NAMED, ()))
        if self.should_load_optimizer and self.lr_scheduler is not None:
            if self.use_checkpoint_opt_param_scheduler:
                self.lr_scheduler.load_state_dict(self.schedule_in_load(loaded))
            elif self.is_first:
                logger.warning("the schedule begins anew: use_checkpoint_opt_param_scheduler is False")
        if self.should_load_extra:
            if self.place()[0] == 0 and tuple(common[GRID]) != place.grid:
                logger.warning(
                    "saved at (PP, TP, DP) = %s, loaded at %s: rank r goes on with the random state of rank "
                    "r %% %d of that grid",
                    tuple(common[GRID]),
                    place.grid,
                    saved_world,
                )
            # Last: the loads before may draw random numbers.
            self.load_rng_state(loaded[extra.RNG][0])

    def contents_in(self, state: Mapping[str, Any]) -> Sequence[str]:
        # A checkpoint of another program has no list, and random states of its own kind.
        return state.get(SAVED, ("model", "optimizer"))  # type: ignore[no-any-return]

    def generate_state_dict(self, contents: Sequence[str], is_loading: bool = False) -> ShardedStateDict:
        """Return the state dict to save or to fill; it has random states only to save.

        Collective where the functions of the model's parts, or the optimizer's, are.

        Args:
            contents: the contents to include: "model", "optimizer", "extra".
            is_loading: the state dict is to be filled.
        """
        state: dict[str, Any] = {}
        if {"model", "optimizer"} & set(contents):
            for number, (name, chunk) in enumerate(zip(self.names, self.chunks)):
                if len(self.chunks) > 1 and self.parallel_state is not None:
                    self.parallel_state.set_virtual_pipeline_model_parallel_rank(number)
                state[name] = chunk.sharded_state_dict()
        model = dict(state)
        if "optimizer" in contents and self.optimizer is not None:
            state["optimizer"] = sharded_optimizer(self.optimizer, model, is_loading)
        if "model" not in contents:
            state = {key: part for key, part in state.items() if key not in model}
        if "extra" in contents and not is_loading:
            place, world = self.parallel_place(), self.place()[1]
            rng = extra.own_object(self.get_rng_state(), place.number, world)
            state.update({extra.RNG: rng, WORLD: world, GRID: list(place.grid)})
        return state

    def load_optimizer(self, state: dict[str, Any], current: Sequence[Options]) -> None:
        """Load the state of the optimizer.

        Args:
            state: the optimizer's part of a loaded state dict.
            current: the param groups of torch's own optimizer, with the keys of their parameters.
        """
        if not hasattr(self.optimizer, "sharded_state_dict"):
            groups = list(param_groups.assigned(saved_groups(state, current), current))
            numbers = [group["params"] for group in self.optimizer.state_dict()["param_groups"]]
            state.pop(NAMED, None)
            state["param_groups"] = [{**group, "params": own} for group, own in zip(groups, numbers)]
            scalars = state.pop(SCALARS)
            for values in state["state"].values():
                # A parameter of a scalar's shape has such states of its own.
                values.update({name: copied(scalars[name]) for name in scalars if name not in values})
        self.optimizer.load_state_dict(state)

    def get_rng_state(self) -> dict[str, Any]:
        state = extra.rng_state(extra.device_type_of(self.chunks[0]))
        return state if self.rng_tracker is None else {**state, "tracker": self.rng_tracker.get_states()}

    def load_rng_state(self, rng_state: dict[str, Any]) -> None:
        extra.set_rng_state(rng_state, extra.device_type_of(self.chunks[0]))
        if self.rng_tracker is not None and "tracker" in rng_state:
            self.rng_tracker.set_states(rng_state["tracker"])

    @property
    def chunks(self) -> list[Any]:
        """The models within their wrappers."""
        chunks = []
        for chunk in self.model:
            while isinstance(getattr(chunk, "module", None), nn.Module):
                chunk = chunk.module
            chunks.append(chunk)
        return chunks

    @property
    def names(self) -> list[str]:
        """The keys of the chunks' state dicts, as in Megatron-LM."""
        return ["model"] if len(self.model) == 1 else [f"model{number}" for number in range(len(self.model))]

    @property
    def parallel_state(self) -> Any:
        if self._parallel_state is not None:
            return self._parallel_state
        loaded = sys.modules.get(PARALLEL_STATE)
        return loaded if loaded is not None and loaded.model_parallel_is_initialized() else None

    @property
    def rng_tracker(self) -> Any:
        loaded = sys.modules.get(RANDOM)
        if self._rng_tracker is not None or loaded is None:
            return self._rng_tracker
        return loaded.get_cuda_rng_tracker()

    @property
    def tensor_parallel(self) -> Any:
        """This rank's place for the cuts of weights; None leaves it to megatron-core."""
        state = self._parallel_state
        if state is None:
            return None
        place = rooms.offered("a rank's place in Megatron's grid")
        own = state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()
        if not hasattr(state, "get_expert_model_parallel_rank"):
            return place(*own)
        return place(
            *own, state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size()
        )

    def parallel_place(self) -> GridPlace:
        """Return this rank's place.

        Raises:
            CheckpointingException: the grid does not have all ranks.
        """
        state, (rank, world) = self.parallel_state, self.place()
        if state is None:
            return GridPlace((0, 0, rank), (1, 1, world))
        pipeline = state.get_pipeline_model_parallel_rank(), state.get_pipeline_model_parallel_world_size()
        tensor = state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()
        replica = (
            state.get_data_parallel_rank(with_context_parallel=True),
            state.get_data_parallel_world_size(with_context_parallel=True),
        )
        own, grid = zip(pipeline, tensor, replica)
        if grid[0] * grid[1] * grid[2] != world:
            raise CheckpointingException(f"(PP, TP, DP) = {grid} is not {world} ranks")
        return GridPlace(own, grid)


def sharded_optimizer(optimizer: Any, model: Mapping[str, Any], is_loading: bool) -> ShardedStateDict:
    """Return the state of an optimizer, by its own `sharded_state_dict`, or sharded as its parameters are."""
    make = getattr(optimizer, "sharded_state_dict", None)
    if make is not None:
        knows = "is_loading" in inspect.signature(make).parameters
        return dict(make(dict(model), is_loading=is_loading) if knows else make(dict(model)))
    init_optim_state(optimizer)
    state = optimizer.state_dict()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors: dict[int, dict[str, Any]] = {}
    scalars: dict[str, Any] = {}
    for number, values in state["state"].items():
        tensors[number] = {}
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.shape == parameters[number].shape:
                tensors[number][name] = value
            elif isinstance(value, torch.Tensor) and value.numel() != 1:
                raise CheckpointingException(
                    f"the optimizer's {name} is of shape {tuple(value.shape)}, and its parameter of "
                    f"{tuple(parameters[number].shape)}: how it is cut is not known"
                )
            elif plain(scalars.setdefault(name, copied(value))) != plain(value):
                raise CheckpointingException(
                    f"the optimizer's {name} is {plain(value)} of one parameter, and {plain(scalars[name])} "
                    "of others: one for all is saved"
                )
    state["state"] = tensors
    parts = get_param_id_to_sharded_param_map(structure_of(dict(model)), parameters)
    optim_state_to_sharding_state(state, parts)
    groups = resolved(optimizer.state_dict()["param_groups"], "param_groups")
    del state["param_groups"]
    state[NAMED] = [
        {**group, "params": [name_of(parts[number]) for number in group["params"] if number in parts]}
        for group in groups
    ]
    state[SCALARS] = scalars
    return dict(state)


class OptimizerValues(NamedTuple):
    """The values of a rank's optimizer that are saved as common state, by the first rank alone."""

    #: `NO_OPTIMIZER`, `TORCH` or `ITS_OWN`.
    kind: str
    #: The param groups, with the keys of their parameters, and the scalars of an optimizer of torch's.
    groups: Sequence[Options] = ()
    scalars: Mapping[str, Any] = {}

    def compared(self) -> tuple[str, Sequence[Options], dict[str, Any]]:
        """Return the values that ranks compare."""
        return self.kind, self.groups, {name: plain(value) for name, value in self.scalars.items()}


def optimizer_values(state: Mapping[str, Any]) -> OptimizerValues:
    """Return the values of the optimizer in a state dict of `generate_state_dict`."""
    optimizer = state.get("optimizer")
    if optimizer is None:
        return OptimizerValues(NO_OPTIMIZER)
    if NAMED not in optimizer:
        return OptimizerValues(ITS_OWN)
    return OptimizerValues(TORCH, optimizer[NAMED], optimizer[SCALARS])


def values_together(values_by_rank: Mapping[int, OptimizerValues]) -> dict[str, Any]:
    """Return the common values of the optimizers of all ranks, some of which may have none.

    Raises:
        CheckpointingException: ranks have the same parameter with different options, another value for all
            parameters, or optimizers whose common values cannot be put together.
    """
    rank_by_kind: dict[str, int] = {}
    for rank, values in sorted(values_by_rank.items()):
        rank_by_kind.setdefault(values.kind, rank)
    if ITS_OWN in rank_by_kind:
        if TORCH in rank_by_kind:
            raise CheckpointingException(
                f"the optimizer of rank {rank_by_kind[ITS_OWN]} has {ITS_OWN}, and that of rank "
                f"{rank_by_kind[TORCH]} is {TORCH}: all ranks need the same kind"
            )
        first = min(values_by_rank)
        if values_by_rank[first].kind == NO_OPTIMIZER:
            raise CheckpointingException(
                f"rank {first} has {NO_OPTIMIZER}, and that of rank {rank_by_kind[ITS_OWN]} has {ITS_OWN}: "
                f"the values that all ranks share are those of rank {first}; give it an optimizer, without "
                "parameters if it trains none"
            )
        return {}
    scalars: dict[str, Any] = {}
    rank_by_name: dict[str, int] = {}
    for rank, values in sorted(values_by_rank.items()):
        for name, value in values.scalars.items():
            first = rank_by_name.setdefault(name, rank)
            if plain(scalars.setdefault(name, value)) != plain(value):
                raise CheckpointingException(
                    f"the optimizer's {name} is {plain(scalars[name])} on rank {first}, and {plain(value)} "
                    f"on rank {rank}: one for all is saved"
                )
    groups = {rank: values.groups for rank, values in values_by_rank.items()}
    return {NAMED: param_groups.united(groups), SCALARS: scalars}


def name_of(part: Any) -> str:
    """Return the name of a parameter on every rank: its key, and its layer where layers are stacked."""
    places = tuple(getattr(part, "global_offset", ()))[: getattr(part, "prepend_axis_num", 0)]
    return ".".join(map(str, (part.key, *places)))


def saved_groups(state: Mapping[str, Any], current: Sequence[Options]) -> Sequence[Options]:
    """Return the param groups of an optimizer's saved state.

    Raises:
        CheckpointingException: a save without the parameters' keys, of another number of groups.
    """
    if NAMED in state:
        return state[NAMED]  # type: ignore[no-any-return]
    # An earlier save has the groups of the first rank alone, by their places.
    groups = state.get("param_groups", ())
    if len(groups) != len(current):
        raise CheckpointingException(
            f"the optimizer was saved with {len(groups)} param groups, and has {len(current)} now"
        )
    return [{**group, "params": own["params"]} for group, own in zip(groups, current)]


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def text_of(config: Any) -> str:
    """Return a dataclass as JSON, without callables; values that JSON cannot express as their `str`."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return json.dumps(
        {name: value for name, value in values.items() if not callable(value)}, indent=2, default=str
    )
