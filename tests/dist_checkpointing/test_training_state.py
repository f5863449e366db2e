"""The main job: a model and its optimizer saved on 4 ranks, loaded on any other mesh, bit-equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import qwen
import torch
import torch.distributed as dist
from pool import on_ranks

from torch_dcp_backport.checkpoint import CheckpointHandler, FSDPCheckpointManager
from torch_dcp_backport.compat import HAS_STRIDED
from torch_dcp_backport.dist_checkpointing import CheckpointingException, ShardedObject
from torch_dcp_backport.dist_checkpointing.training_state import (
    load_training_state,
    save_training_state,
    sharded_state_dict,
)


def own_rng(data: Any) -> ShardedObject:
    return ShardedObject("rng", data, (dist.get_world_size(),), (dist.get_rank(),))


def saved(room: Any, folder: str, kind: str) -> int:
    model, optimizer = qwen.build(kind)
    state = sharded_state_dict(model, optimizer)
    qwen.fill(state)
    optimizer.param_groups[0]["lr"] = 0.125
    save_training_state(folder, model, optimizer, extra={"step": 7, "rng": own_rng(dist.get_rank())})
    return sum(part.data.nbytes for part in qwen.parts_of(state))


def loaded(room: Any, folder: str, kind: str) -> tuple[list[str], float, int, Any]:
    model, optimizer = qwen.build(kind)
    with_rng = {"rng": own_rng(None)} if dist.get_world_size() == 4 else {}
    strict = "raise_all" if with_rng else "raise_unexpected"
    extra = load_training_state(folder, model, optimizer, extra=with_rng, strict=strict)
    assert extra["step"] == 7
    assert extra.get("rng", dist.get_rank()) == dist.get_rank()
    wrong = qwen.differences(sharded_state_dict(model, optimizer))
    group = optimizer.param_groups[0]
    steps = {float(state["step"]) for state in optimizer.state.values()}
    return wrong, group["lr"], len(optimizer.state), len(steps)


#: torch 2.4's FSDP2 has no state dict on a mesh of two dimensions.
TWO_DIM = HAS_STRIDED


@pytest.mark.parametrize("source", ["FSDP", "HSDP"] if TWO_DIM else ["FSDP"])
def test_a_model_and_its_optimizer_come_back_on_any_mesh(ranks: Any, tmp_path: Path, source: str) -> None:
    ranks(saved, str(tmp_path), source)
    targets = [
        ("FSDP", 1),
        ("FSDP", 2),
        ("FSDP", 3),
        ("FSDP", 8),
        ("HSDP", 4),
        ("plain", 2),
        ("TP x FSDP", 4),
    ]
    for kind, world in targets if source == "FSDP" else targets[1:2]:
        if kind in ("HSDP", "TP x FSDP") and not TWO_DIM:
            continue
        for wrong, rate, states, _ in ranks(loaded, str(tmp_path), kind, world=world):
            assert wrong == []
            assert rate == 0.125
            assert states == 23


def test_a_model_alone_loads_from_the_whole(ranks: Any, tmp_path: Path) -> None:
    ranks(saved, str(tmp_path), "FSDP")
    for wrong, missing in ranks(model_alone, str(tmp_path), world=2):
        assert wrong == []
        assert "optimizer.state.layers.0.mlp.up_proj.weight.exp_avg" in missing


def model_alone(room: Any, folder: str) -> tuple[list[str], str]:
    model, _ = qwen.build("FSDP")
    with pytest.raises(room.CheckpointingException, match="loaded by no rank") as caught:
        load_training_state(folder, model)
    load_training_state(folder, model, strict="raise_unexpected")
    return qwen.differences(sharded_state_dict(model)), str(caught.value)


def test_the_error_of_a_handlers_step_names_the_way_to_load_it(tmp_path: Path) -> None:
    """The step has random states, too, which `load_training_state` leaves to the manager."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    CheckpointHandler(FSDPCheckpointManager(model, optimizer), default_local_dir=tmp_path).save_checkpoint(1)
    step = tmp_path / "global_step_1" / "dist_ckpt"
    with pytest.raises(CheckpointingException) as caught:
        load_training_state(step, model)
    first, *others = [line for line in str(caught.value).splitlines() if "Missing keys" in line]
    assert first.endswith('optimizer.state.bias.exp_avg (strict="raise_unexpected" loads the rest)')
    assert len(others) == 6  # and the hint is said once
    assert "strict=" not in "".join(others)
    assert load_training_state(step, model, optimizer, strict="raise_unexpected")["step"] == 1


@on_ranks()
def test_keys_are_those_of_dcp(room: Any) -> None:
    model, optimizer = qwen.build("FSDP")
    keys = [part.key for part in qwen.parts_of(sharded_state_dict(model, optimizer))]
    assert "model.layers.1.self_attn.q_proj.bias" in keys
    assert "optimizer.state.layers.1.self_attn.q_proj.bias.exp_avg_sq" in keys
    with pytest.raises(room.CheckpointingException, match="extra may not have model"):
        save_training_state(".", model, extra={"model": 1})


def by_dcp(room: Any, folder: str) -> list[str]:
    """Plain torch reads what was saved, with the state dicts that it always had."""
    import torch.distributed.checkpoint as dcp

    from torch_dcp_backport.state_dict import get_state_dict

    model, optimizer = qwen.build("FSDP")
    model_state, optimizer_state = get_state_dict(model, optimizer)
    tensors = {
        "model": model_state,
        "optimizer": {"state": optimizer_state["state"]},
    }
    with torch.no_grad():
        dcp.load(tensors, checkpoint_id=folder)
    return qwen.differences(sharded_state_dict(model, optimizer))


def test_dcp_reads_it(ranks: Any, tmp_path: Path) -> None:
    ranks(saved, str(tmp_path), "HSDP" if TWO_DIM else "FSDP")
    assert ranks(by_dcp, str(tmp_path), world=2) == [[], []]


def by_a_part_of_the_world(room: Any, folder: str) -> Any:
    """Ranks 1 and 3 save and load a model that both have whole."""
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return None
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for value in model.parameters():
            value.fill_(5.0)
    save_training_state(folder, model, process_group=group)
    replicas = [part.replica_id for part in qwen.parts_of(sharded_state_dict(model, process_group=group))]
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    load_training_state(folder, model, process_group=group)
    return replicas, [value.unique().tolist() for value in model.parameters()]


def test_a_group_without_rank_0_has_a_main_replica(ranks: Any, tmp_path: Path) -> None:
    results = ranks(by_a_part_of_the_world, str(tmp_path))
    assert results == [None, ([0, 0], [[5.0], [5.0]]), None, ([1, 1], [[5.0], [5.0]])]
