"""Files of verl's own FSDP manager: `model_world_size_W_rank_R.pt` and the like, the shards of each rank.

These are pickles, which run code: read only where the caller trusts them. Must never talk to other ranks.
"""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional

import torch
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

from torch_dcp_backport import compat
from torch_dcp_backport.checkpoint._src import manifest
from torch_dcp_backport.dist_checkpointing import CheckpointingException, covered
from torch_dcp_backport.transfer import Box, Problem, TensorInfo, intersection, layout_of, part_of

MODEL, OPTIMIZER, EXTRA = "model", "optim", "extra_state"
NAME = re.compile(r"(?:model|optim|extra_state)_world_size_(\d+)_rank_\d+\.pt")
#: Option by which torch's Adam is an AdamW, from 2.7 on.
DECOUPLED = "decoupled_weight_decay"
#: Options of a group that schedules and newer releases of torch add. Others tell one optimizer from another.
ADDED = ("initial_lr", "maximize", "foreach", "capturable", "differentiable", "fused", DECOUPLED)
#: Options of a step on the host.
SLOWLY = {"foreach": None, "fused": None, "capturable": False}
UNTRUSTED = "has files of verl's own manager, which run what they say: trust=True reads them"


class FileShards(NamedTuple):
    """A tensor, with its parts in the files of all ranks."""

    info: TensorInfo
    parts: list[tuple[Box, torch.Tensor]]

    def copy(self, box: Box, into: torch.Tensor) -> None:
        """Fill `into`, which holds `box`."""
        for held, tensor in self.parts:
            common = intersection(held, box)
            if common is not None:
                part_of(into, box, common).copy_(part_of(tensor, held, common))


def saved_world(folder: Path) -> int:
    """Return the number of ranks that saved a folder of verl's; 0 for other folders.

    Raises:
        CheckpointingException: several saves are in it.
    """
    matches = map(NAME.fullmatch, [path.name for path in folder.iterdir()] if folder.is_dir() else [])
    worlds = sorted({int(match[1]) for match in matches if match})
    if len(worlds) > 1:
        raise CheckpointingException(f"{folder} has files of saves by {worlds} ranks: remove all but one's")
    return worlds[0] if worlds else 0


def name_of(part: str, world: int, rank: int) -> str:
    return f"{part}_world_size_{world}_rank_{rank}.pt"


class Sharded:
    """A ShardedTensor of FSDP1 without a device mesh, as it was saved.

    Torch makes one again only on the rank that saved it, and within a process group.
    """

    class ProcessGroupState(tuple[int, ...]):
        def __new__(cls, *numbers: int) -> Sharded.ProcessGroupState:
            return super().__new__(cls, numbers)

    def __setstate__(self, state: Any) -> None:
        self.shards, self.facts, *_ = state

    def local_shards(self) -> Any:
        return self.shards

    def size(self) -> Any:
        return self.facts.size

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.facts.tensor_properties.dtype
        return dtype


def rebuilt(kind: Any, *arguments: Any) -> Any:
    """Return an empty tensor of a class of wrappers, which gets its state next."""
    rebuild: Any = torch._utils._rebuild_wrapper_subclass
    return Sharded() if kind is Sharded else rebuild(kind, *arguments)


#: What files name -> what is made in its place.
STAND_INS = {"ShardedTensor": Sharded, "_rebuild_wrapper_subclass": rebuilt}


class Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_of_torch = module.partition(".")[0] == "torch"
        return STAND_INS[name] if is_of_torch and name in STAND_INS else super().find_class(module, name)


#: As torch.load wants it.
PICKLE = SimpleNamespace(Unpickler=Unpickler, load=pickle.load, __name__="pickle")


def loaded(folder: Path, part: str, world: int, rank: int) -> Any:
    """Load a file of a rank; its tensors are read when they are used.

    Raises:
        CheckpointingException: it is not there, cannot be read, or is no dict.
    """
    path = folder / name_of(part, world, rank)
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=False, pickle_module=PICKLE)
    except Exception as error:
        raise CheckpointingException(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(state, Mapping):
        raise CheckpointingException(f"{path} holds a {type(state).__name__}, where verl has a dict")
    return state


def problems_of_files(folder: Path, share: int, shares: int) -> list[Problem]:
    """Return how verl's files differ from the manifest of this package's save, if the folder has one.

    Reads a share of the files: all shares together are all files.

    Raises:
        CheckpointingException: the manifest is damaged.
    """
    try:
        content = manifest.read(folder)
    except manifest.NotOurs:
        return []
    except manifest.BadManifest as error:
        raise CheckpointingException(f"{folder}: {error}") from error
    here = sorted(path.name for path in folder.iterdir() if NAME.fullmatch(path.name))
    unknown = [name for name in here if name not in content.files]
    names = [name for name in sorted(content.files) if NAME.fullmatch(name)][share::shares]
    problems = [Problem("not in the manifest of the save", str(folder / name)) for name in unknown[:3]]
    wrong = manifest.wrong_checksums(folder, content, names)
    return problems + [Problem("not what was saved", str(folder), text) for text in wrong]


def model_of(folder: Path, world: int) -> dict[str, FileShards]:
    """Return the model that all files together have.

    Raises:
        CheckpointingException: a file cannot be read, or a tensor is incomplete.
    """
    model: dict[str, FileShards] = {}
    for rank in range(world):
        state = loaded(folder, MODEL, world, rank)
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) and not hasattr(value, "local_shards"):
                # Extra state of a module: this release gives it to no loader.
                continue
            info = TensorInfo(tuple(value.size()), value.dtype)
            shards = model.setdefault(key, FileShards(info, []))
            if shards.info != info:
                raise CheckpointingException(
                    f"{folder}: {key} is {info.shape} of {info.dtype} in the file of rank {rank}, and "
                    f"{shards.info.shape} of {shards.info.dtype} before"
                )
            known = {box for box, _ in shards.parts}
            shards.parts.extend((box, part) for box, part in parts_of(value, rank) if box not in known)
    for key, shards in model.items():
        have, numel = covered(box for box, _ in shards.parts), math.prod(shards.info.shape)
        if have != numel:
            raise CheckpointingException(f"{folder}: {key} has {have} of {numel} elements in all files")
    return model


def parts_of(value: Any, rank: int) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield the parts of a tensor that a rank's file has, each with its box."""
    if hasattr(value, "local_shards"):
        # FSDP1 without a device mesh.
        for shard in value.local_shards():
            yield Box(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)), shard.tensor
        return
    box = layout_of(value).own_box(rank)
    if box.numel or not math.prod(value.shape):
        yield box, compat.local_part(value) if isinstance(value, compat.DTensor) else value


def problems_of(model: Mapping[str, FileShards], targets: Mapping[str, torch.Tensor]) -> list[Problem]:
    """Return why a model does not fit the tensors that it is to be loaded into."""
    problems = [Problem("missing in the checkpoint", key) for key in targets if key not in model]
    problems += [Problem("only in the checkpoint", key) for key in model if key not in targets]
    for key, target in targets.items():
        if key in model and model[key].info.shape != tuple(target.shape):
            problems.append(Problem("wrong shape", key, f"{model[key].info.shape}", f"{tuple(target.shape)}"))
    return problems


@torch.no_grad()
def fill(model: Mapping[str, FileShards], targets: Mapping[str, torch.Tensor], rank: int) -> None:
    """Write a rank's parts of a model's tensors, in place."""
    for key, target in targets.items():
        box = layout_of(target).own_box(rank)
        model[key].copy(box, compat.local_part(target) if isinstance(target, compat.DTensor) else target)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters, in the order of their numbers in the optimizer's state dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def problems_of_optimizer(state: Any, optimizer: torch.optim.Optimizer) -> list[Problem]:
    """Return why a state dict, which goes by the parameters' numbers, is not this optimizer's."""
    absent = [name for name in ("state", "param_groups") if name not in state]
    if absent:
        return [Problem("missing in the file", f"optimizer.{name}") for name in absent]
    have = [len(group["params"]) for group in state["param_groups"]]
    want = [len(group["params"]) for group in optimizer.param_groups]
    if have != want:
        return [Problem("other groups of parameters", "optimizer", f"{have}", f"{want}")]
    problems = []
    for number, (group, own) in enumerate(zip(state["param_groups"], optimizer.param_groups)):
        more, less = sorted(set(group) - {*own, *ADDED}), sorted(set(own) - {*group, *ADDED})
        if more or less:
            key = f"optimizer.param_groups.{number} (a {type(optimizer).__name__})"
            problems.append(Problem("the state of another optimizer", key, listed(more), listed(less)))
        elif DECOUPLED in group and DECOUPLED in own and group[DECOUPLED] != own[DECOUPLED]:
            key = f"optimizer.param_groups.{number}.{DECOUPLED}"
            problems.append(
                Problem("the state of another optimizer", key, f"{group[DECOUPLED]}", f"{own[DECOUPLED]}")
            )
    if problems:
        return problems
    pairs = zip(state["param_groups"], optimizer.param_groups)
    groups = [options for group, own in pairs for options in [{**own, **group}] for _ in group["params"]]
    parameters, known = parameters_of(optimizer), dict[tuple[int, int], Optional[set[str]]]()
    for number, values in state["state"].items():
        if number not in range(len(parameters)):
            problems.append(Problem("the state of no parameter", f"optimizer.state.{number}"))
            continue
        parameter, group = parameters[number], groups[number]
        kind = id(group), parameter.dim()
        if kind not in known:
            known[kind] = names_of_state(optimizer, group, parameter)
        expected, held = known[kind], {name for name, value in values.items() if value is not None}
        if expected is not None and held != expected:
            key = f"optimizer.state.{number}"
            problems.append(
                Problem("other states than this optimizer has", key, listed(held), listed(expected))
            )
        shape = tuple(parameter.shape)
        problems += [
            Problem("wrong shape", f"optimizer.state.{number}.{name}", f"{tuple(value.shape)}", f"{shape}")
            for name, value in values.items()
            if isinstance(value, torch.Tensor) and value.dim() and tuple(value.shape) != shape
        ]
    return problems


def listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def names_of_state(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], like: torch.Tensor
) -> Optional[set[str]]:
    """Return the names of the states that an optimizer has of a parameter with these options.

    They are those after a step of a copy of the optimizer; None where a copy takes no step.
    """
    parameter = nn.Parameter(torch.zeros([1] * like.dim()))
    parameter.grad = torch.zeros_like(parameter)
    fast = {name: value for name, value in SLOWLY.items() if name in options}
    with contextlib.suppress(Exception):
        probe = copy.copy(optimizer)
        probe.state = defaultdict(dict)
        probe.param_groups = [{**options, **fast, "params": [parameter]}]
        type(probe).step(probe)
        return {name for name, value in probe.state[parameter].items() if value is not None}
    return None


def problems_of_extra(state: Mapping[str, Any], has_schedule: bool) -> list[Problem]:
    """Return why the schedule and the random states of a rank's file cannot be loaded."""
    problems = []
    if "lr_scheduler" not in state:
        problems.append(Problem("missing in the file", f"{EXTRA}.lr_scheduler"))
    elif has_schedule and not isinstance(state["lr_scheduler"], Mapping):
        problems.append(Problem("saved without a scheduler; this manager has one", f"{EXTRA}.lr_scheduler"))
    if "rng" in state:
        held = state["rng"]
        names = ("cpu", "random") if isinstance(held, Mapping) else ()
        absent = [name for name in names if name not in held] if names else ["cpu", "random"]
        problems += [Problem("missing in the file", f"{EXTRA}.rng.{name}") for name in absent]
        if not absent:
            try:
                rng_state_of(held)
                torch.Generator().set_state(held["cpu"])
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                problems.append(Problem("random states that cannot be read", f"{EXTRA}.rng", text))
    return problems


def load_optimizer(state: Any, optimizer: torch.optim.Optimizer) -> None:
    """Load a rank's own state dict; its shards are moved from the mesh of the save to the parameters'."""
    parameters = parameters_of(optimizer)
    states = {
        number: {name: moved(value, parameters[number]) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": states})


def moved(value: Any, like: torch.Tensor) -> Any:
    """Return a state of a parameter in memory of its own, and on the parameter's mesh."""
    if not isinstance(value, torch.Tensor):
        return value
    local = (compat.local_part(value) if isinstance(value, compat.DTensor) else value).clone()
    if isinstance(value, compat.DTensor) and isinstance(like, compat.DTensor) and value.dim():
        return compat.wrap_local(local.to(compat.local_part(like).device), like)
    return local


def states_to_save(model: nn.Module, optimizer: Any, contents: Collection[str]) -> dict[str, Any]:
    """Return the state dicts of a rank's files, as verl's manager makes them. Collective under FSDP1.

    They are torch's own, with the versions of modules (`_metadata`).

    Args:
        contents: of "model" and "optimizer", those that are saved.

    Raises:
        CheckpointingException: verl's files cannot hold the optimizer.
    """
    with sharded_states(model):
        states = {MODEL: model.state_dict()} if "model" in contents else {}
        if "optimizer" in contents and optimizer is not None:
            if not hasattr(optimizer, "state_dict"):
                raise CheckpointingException(
                    f"verl's files hold one optimizer, not a {type(optimizer).__name__}"
                )
            states[OPTIMIZER] = optimizer.state_dict()
    return states


def sharded_states(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Return a context: the state dicts of FSDP1 are shards, on the host."""
    if not isinstance(model, FullyShardedDataParallel):
        return contextlib.nullcontext()
    away = any(parameter.device.type != "cpu" for parameter in model.parameters())
    kinds = ShardedStateDictConfig(offload_to_cpu=away), ShardedOptimStateDictConfig(offload_to_cpu=away)
    context: contextlib.AbstractContextManager[Any] = FullyShardedDataParallel.state_dict_type(
        model, StateDictType.SHARDED_STATE_DICT, *kinds
    )
    return context


def rng_state_to_save(state: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the random states of `extra.rng_state` as verl's manager has them, which needs numpy's.

    Args:
        kind: the type of the device, under which its state stands.
    """
    import numpy

    version, words, gauss = state["random"]
    name, keys, *rest = state["numpy"] if "numpy" in state else numpy.random.get_state()
    saved = {"cpu": state["cpu"], "random": (version, tuple(words), gauss)}
    saved["numpy"] = (name, numpy.array(keys, dtype=numpy.uint32), *rest)
    return {**saved, kind: state["device"]} if "device" in state else saved


def rng_state_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return random states as `extra.set_rng_state` takes them."""
    version, words, gauss = state["random"]
    converted: dict[str, Any] = {"cpu": state["cpu"], "random": [version, list(words), gauss]}
    if "numpy" in state:
        name, keys, *rest = state["numpy"]
        converted["numpy"] = [name, keys.tolist(), *rest]
    for kind, value in state.items():
        if kind not in ("cpu", "random", "numpy"):
            converted["device"] = value
    return converted
