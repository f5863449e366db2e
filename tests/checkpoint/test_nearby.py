"""Steps on the nodes themselves: four ranks on two pretended nodes, nodes that are lost, copies that are torn."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any, Optional

import dying
import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from torch import nn

from torch_dcp_backport.checkpoint import NearbyCheckpoints, nearby, node_folder
from torch_dcp_backport.checkpoint.node_folder import Contents, Part
from torch_dcp_backport.dist_checkpointing import CheckpointingException
from torch_dcp_backport.publish import disk
from torch_dcp_backport.state_dict import get_state_dict, set_state_dict

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import fully_shard


def node_here() -> str:
    return f"n{dist.get_rank() // 2}"


def on_nodes(root: Path, **options: Any) -> NearbyCheckpoints:
    """Two ranks on each node, and a folder for each node."""
    options = {"node": node_here(), "timeout": 15.0, **options}
    return NearbyCheckpoints(root / node_here(), **options)


class Training:
    """Five and four rows on four ranks: one rank has no row of the first layer."""

    def __init__(self, seed: int = 0) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
        for layer in self.model:
            fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.seen = 0

    def train(self, step: int) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter) * step
        self.optimizer.step()
        self.seen = 10 * step + dist.get_rank()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "seen": self.seen}

    def resume(self, tier: NearbyCheckpoints) -> Any:
        loaded = tier.load(self.state())
        if loaded is not None:
            model, optimizer = loaded.state["model"], loaded.state["optimizer"]
            set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
            self.seen = loaded.state["seen"]
        return loaded

    def values(self) -> list[torch.Tensor]:
        state = self.state()
        moments = [value for states in state["optimizer"]["state"].values() for value in states.values()]
        tensors = [
            getattr(tensor, "_local_tensor", tensor) for tensor in [*state["model"].values(), *moments]
        ]
        return [*(tensor.detach().clone() for tensor in tensors), torch.tensor(self.seen)]


def trained(root: Path, steps: int = 3, **options: Any) -> dict[int, list[torch.Tensor]]:
    """Train and save after each step; the values that each step had."""
    training, tier, values = Training(), on_nodes(root, **options), {}
    for step in range(1, steps + 1):
        training.train(step)
        assert tier.save(training.state(), step)
        values[step] = training.values()
    return values


def equal(values: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(values) == len(expected) and all(map(torch.equal, values, expected))


def once(function: Any, *args: Any) -> None:
    """Call on the first rank, while the others wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        function(*args)
    dist.barrier()


def files_of(root: Path, node: str, rank: int, step: int) -> Path:
    (folder,) = (root / node / f"rank_{rank}").glob(f"step_{step}.*")
    return folder


def refused(call: Any, *args: Any) -> str:
    with pytest.raises(CheckpointingException) as caught:
        call(*args)
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("lost", ["no node", "n0", "n1"])
@on_ranks()
def test_a_node_is_lost_and_the_training_goes_on_bit_for_bit(api: Any, tmp_path: Path, lost: str) -> None:
    expected = trained(tmp_path)
    if lost != "no node":
        once(shutil.rmtree, tmp_path / lost)
    training, tier = Training(1), on_nodes(tmp_path)
    assert tier.latest() == 3
    loaded = training.resume(tier)
    assert loaded.step == 3
    assert equal(training.values(), expected[3])
    assert loaded.copied_from == ({"n0": "n1", "n1": "n0"}[lost] if node_here() == lost else "")
    # It is at home again, and the next save has its copies again.
    training.train(4)
    assert tier.save(training.state(), 4)
    once(shutil.rmtree, tmp_path / ("n0" if lost == "n1" else "n1"))
    again = Training(2)
    assert again.resume(on_nodes(tmp_path)).step == 4
    assert equal(again.values(), training.values())


@on_ranks()
def test_ranks_that_are_restarted_on_other_nodes_find_their_parts(api: Any, tmp_path: Path) -> None:
    expected = trained(tmp_path)
    # The nodes have changed places; and the folder of the new n0 has no copies.
    once(os.rename, tmp_path / "n0", tmp_path / "x")
    once(os.rename, tmp_path / "n1", tmp_path / "n0")
    once(os.rename, tmp_path / "x", tmp_path / "n1")
    once(lambda: [shutil.rmtree(tmp_path / "n0" / f"rank_{rank}") for rank in (0, 1)])
    training = Training(1)
    loaded = training.resume(on_nodes(tmp_path))
    assert (loaded.step, loaded.copied_from) == (3, "n1" if node_here() == "n0" else "")
    assert equal(training.values(), expected[3])
