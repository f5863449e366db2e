"""FSDP1 without a device mesh, by a manager: on the same ranks, on others, with replicas."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from trainer import Trainer

from torch_dcp_backport.state_dict import StateDictOptions, get_state_dict

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def trainer_of(root: Path, seed: int, is_orig: bool, is_hybrid: bool = False, rows: int = 6) -> Trainer:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, rows), nn.Linear(rows, 6))
    options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": is_orig}
    if is_hybrid:
        # Two by two, row by row.
        rank, groups = dist.get_rank(), {}
        for ranks in ((0, 1), (2, 3), (0, 2), (1, 3)):
            groups[ranks] = dist.new_group(list(ranks))
        own, others = (2 * (rank // 2), 2 * (rank // 2) + 1), (rank % 2, rank % 2 + 2)
        options["process_group"] = groups[own], groups[others]
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for layer, module in enumerate(model):
            model[layer] = FullyShardedDataParallel(module, **options)
        return Trainer(root, FullyShardedDataParallel(model, **options))


def whole(trainer: Trainer) -> list[torch.Tensor]:
    """The parameters and their moments by name, on every rank."""
    warnings.simplefilter("ignore")
    options = StateDictOptions(full_state_dict=True)
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer, options=options)
    states = [optimizer["state"][key] for key in sorted(model)]
    return [model[key] for key in sorted(model)] + [state[name] for state in states for name in MOMENTS]


def save(api: Any, root: Path, is_orig: bool, is_hybrid: bool = False, rows: int = 6) -> list[torch.Tensor]:
    trainer = trainer_of(root, 0, is_orig, is_hybrid, rows)
    trainer.train(1, 2)
    trainer.handler.save_checkpoint(1)
    return whole(trainer)


def load(
    api: Any, root: Path, is_orig: bool, expected: list[torch.Tensor], is_trained: bool, rows: int = 6
) -> None:
    trainer = trainer_of(root, 5, is_orig, rows=rows)
    if is_trained:
        trainer.train(9, 7)
    assert trainer.handler.load_checkpoint() == 1
    found = whole(trainer)
    assert len(found) == len(expected) == 16
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("is_orig", [False, True])
def test_on_the_same_ranks_and_on_others(ranks, tmp_path: Path, is_orig: bool) -> None:
    (expected, _) = ranks(save, tmp_path, is_orig, world=2)
    ranks(load, tmp_path, is_orig, expected, True, world=2)
    ranks(load, tmp_path, not is_orig, expected, False, world=3)


def test_replicas_are_saved_once(ranks, tmp_path: Path) -> None:
    (expected, *_) = ranks(save, tmp_path, True, True, world=4)
    ranks(load, tmp_path, True, expected, False, world=2)


@pytest.mark.parametrize(("rows", "is_orig"), [(4, True), (1, False)])
def test_a_rank_without_a_row_of_a_parameter(ranks, tmp_path: Path, rows: int, is_orig: bool) -> None:
    """torch fails there, on that rank alone: 4 rows on 3 ranks are 2, 2 and 0."""
    (expected, *_) = ranks(save, tmp_path, is_orig, rows=rows, world=3)
    ranks(load, tmp_path, is_orig, expected, True, rows, world=3)
    ranks(load, tmp_path, is_orig, expected, False, rows, world=2)
