"""Lightning Fabric's ModelParallelStrategy: a model one parameter per call, an optimizer in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from client import environment, facts, full_state_of, train
from conftest import check_orders
from models import fully_shard
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 128)
        self.norm = nn.BatchNorm1d(128)
        self.down = nn.Linear(128, 64)


def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model:
        if mesh["tensor_parallel"].size() > 1:
            parallelize_module(block, mesh["tensor_parallel"], plan)
        fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def fabric_of(tensor_parallel: int) -> Any:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import ModelParallelStrategy

    environment()
    world = dist.get_world_size()
    strategy = ModelParallelStrategy(
        parallelize,
        data_parallel_size=world // tensor_parallel,
        tensor_parallel_size=tensor_parallel,
        save_distributed_checkpoint=False,
    )
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    return fabric


def new(fabric: Any) -> tuple[Any, Any]:
    with fabric.init_module(empty_init=True):
        model = nn.Sequential(Block(), Block())
    model = fabric.setup(model)
    return model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.1))


def a_job(api: Any, order: str, tensor_parallel: int, folder: str) -> dict[str, Any]:
    """From raw weights to a checkpoint, and from the checkpoint into another model."""
    start, path = Path(folder, f"{order}.start"), Path(folder, f"{order}.ckpt")
    fabric = fabric_of(tensor_parallel)
    model, optimizer = new(fabric)
    if dist.get_rank() == 0:
        torch.save(full_state_of(nn.Sequential(Block(), Block())), start)
    dist.barrier()
    fabric.load_raw(start, model)
    loaded = facts(raw=model.state_dict())
    train(model, optimizer)
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 1})
    dist.barrier()
    saved = facts(saved=torch.load(path, weights_only=False))
    other, its_optimizer = new(fabric)
    state = {"model": other, "optimizer": its_optimizer, "step": 0}
    fabric.load(path, state)
    assert state["step"] == 1
    after = facts(model=other.state_dict(), optimizer=its_optimizer.state_dict())
    return {kind: {**loaded[kind], **saved[kind], **after[kind]} for kind in loaded}


def test_a_job(in_every_order: Any, tmp_path: Path) -> None:
    check_orders(in_every_order(a_job, 1, str(tmp_path)), stock_keeps=["optimizer"])


def test_a_job_with_tensor_parallel(in_every_order: Any, tmp_path: Path) -> None:
    check_orders(in_every_order(a_job, 2, str(tmp_path)), stock_keeps=["optimizer"])
