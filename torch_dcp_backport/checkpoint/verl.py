"""Files of verl's own FSDP manager: `model_world_size_W_rank_R.pt` and the like, the shards of each rank.

These are pickles, which run code: read only where the caller trusts them. Must never write.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torch_dcp_backport import compat
from torch_dcp_backport.dist_checkpointing import CheckpointingException
from torch_dcp_backport.dist_checkpointing.engine.cover import covered
from torch_dcp_backport.transfer import Box, Problem, TensorInfo, layout_of
from torch_dcp_backport.transfer.spread import intersection
from torch_dcp_backport.transfer.staging import part_of

MODEL, OPTIMIZER, EXTRA = "model", "optim", "extra_state"
NAME = re.compile(r"(?:model|optim|extra_state)_world_size_(\d+)_rank_\d+\.pt")
UNTRUSTED = "has files of verl's own manager, which run what they say: trust=True reads them"


class Shards(NamedTuple):
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


def loaded(folder: Path, part: str, world: int, rank: int) -> Any:
    """Load a file of a rank; its tensors are read when they are used.

    Raises:
        CheckpointingException: it is not there, or cannot be read.
    """
    path = folder / f"{part}_world_size_{world}_rank_{rank}.pt"
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    except Exception as error:
        raise CheckpointingException(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def model_of(folder: Path, world: int) -> dict[str, Shards]:
    """Return the model that all files together have.

    Raises:
        CheckpointingException: a file cannot be read, or a tensor is incomplete.
    """
    model: dict[str, Shards] = {}
    for rank in range(world):
        state = loaded(folder, MODEL, world, rank)
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) and not hasattr(value, "local_shards"):
                # Extra state of a module: this release gives it to no loader.
                continue
            info = TensorInfo(tuple(value.size()), value.dtype)
            shards = model.setdefault(key, Shards(info, []))
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


def problems_of(model: Mapping[str, Shards], targets: Mapping[str, torch.Tensor]) -> list[Problem]:
    """Return why a model does not fit the tensors that it is to be loaded into."""
    problems = [Problem("missing in the checkpoint", key) for key in targets if key not in model]
    problems += [Problem("only in the checkpoint", key) for key in model if key not in targets]
    for key, target in targets.items():
        if key in model and model[key].info.shape != tuple(target.shape):
            problems.append(Problem("wrong shape", key, f"{model[key].info.shape}", f"{tuple(target.shape)}"))
    return problems


@torch.no_grad()
def fill(model: Mapping[str, Shards], targets: Mapping[str, torch.Tensor], rank: int) -> None:
    """Write a rank's parts of a model's tensors, in place."""
    for key, target in targets.items():
        box = layout_of(target).own_box(rank)
        model[key].copy(box, compat.local_part(target) if isinstance(target, compat.DTensor) else target)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters, in the order of their numbers in the optimizer's state dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def problems_of_optimizer(state: Any, optimizer: torch.optim.Optimizer) -> list[Problem]:
    """Return why a state dict, which goes by the parameters' numbers, is not this optimizer's."""
    have = [len(group["params"]) for group in state["param_groups"]]
    want = [len(group["params"]) for group in optimizer.param_groups]
    if have != want:
        return [Problem("other groups of parameters", "optimizer", f"{have}", f"{want}")]
    parameters = parameters_of(optimizer)
    return [
        Problem("wrong shape", f"optimizer.state.{number}.{name}", f"{tuple(value.shape)}", f"{expected}")
        for number, values in state["state"].items()
        for name, value in values.items()
        for expected in [tuple(parameters[number].shape)]
        if isinstance(value, torch.Tensor) and value.dim() and tuple(value.shape) != expected
    ]


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
