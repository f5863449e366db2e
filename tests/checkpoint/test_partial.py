"""Loads of a part of a checkpoint, or under other names: what is left out stays as it was, and is listed."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_ranks import fully_shard
from test_user_state import Holder
from torch import nn

from torch_dcp_backport.checkpoint import CheckpointHandler, FSDPCheckpointManager, MegatronCheckpointManager
from torch_dcp_backport.dist_checkpointing import CheckpointingException, ShardedTensor
from torch_dcp_backport.dist_checkpointing._src.load import Opened

MODEL_ALONE = {"save_contents": ["model", "optimizer"], "load_contents": ["model"]}


class Base(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 2)


class Adapted(Base):
    """The base with an adapter, of which alone is trained."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.requires_grad_(False)
        self.lora_a = nn.Linear(3, 1)


def manager_of(
    model: nn.Module, config: Any = None, trained: Callable[[str], bool] = lambda name: True
) -> Any:
    parameters = [value for name, value in model.named_parameters() if value.requires_grad and trained(name)]
    optimizer = torch.optim.AdamW(parameters, lr=0.1) if parameters else None
    return FSDPCheckpointManager(model, optimizer, checkpoint_config=config)


def train(manager: Any, gradient: float = 1.0) -> None:
    for group in manager.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter) * gradient
    manager.optimizer.step()


def saved(root: Path, model: nn.Module, **how: Any) -> tuple[str, dict[str, torch.Tensor]]:
    manager, folder = manager_of(model, **how), str(root / "global_step_5")
    train(manager)
    manager.save_checkpoint(folder, None, 5)
    return folder, {name: value.clone() for name, value in model.state_dict().items()}


def moments(manager: Any, name: str) -> dict[str, torch.Tensor]:
    return manager.optimizer.state[dict(manager.model.named_parameters())[name]]


def test_what_a_load_asks_for_is_let_go_before_the_restore(tmp_path: Path, monkeypatch) -> None:
    folder, expected = saved(tmp_path, Base())
    model = Base(1)
    manager = manager_of(model)
    alive: list[list[type]] = []
    restore = manager.restore

    def restoring(state: Any) -> None:
        gc.collect()
        alive.append([kind for kind in map(type, gc.get_objects()) if kind in (Opened, ShardedTensor)])
        restore(state)

    monkeypatch.setattr(manager, "restore", restoring)
    manager.load_checkpoint(folder)
    assert alive == [[]]
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_a_base_model_into_a_model_with_adapters(tmp_path: Path, caplog) -> None:
    folder, expected = saved(tmp_path, Base())
    model = Adapted(1)
    before = model.lora_a.weight.clone()
    manager = manager_of(model, MODEL_ALONE)
    with pytest.raises(CheckpointingException, match="lora_a"):
        manager.load_checkpoint(folder)
    with caplog.at_level(logging.WARNING):
        manager.load_checkpoint(folder, exclude=["lora_*"])
    assert manager.left_out == ("model.lora_a.bias", "model.lora_a.weight")
    assert "left out, and as they were: model.lora_a.bias, model.lora_a.weight" in caplog.text
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.items())
    assert torch.equal(model.lora_a.weight, before)


def test_a_handler_begins_with_a_part_and_goes_on_with_all(tmp_path: Path) -> None:
    folder, expected = saved(tmp_path / "base", Base())
    for seed in (1, 2):
        manager = manager_of(Adapted(seed), {"load_contents": ["model", "optimizer"]})
        handler = CheckpointHandler(
            manager,
            default_local_dir=tmp_path / "run",
            resume_from_path=folder,
            exclude=["lora_*", "optimizer.*", "state.ema"],
            state={"ema": Holder({"n": seed})},
        )
        assert handler.load_checkpoint() == (5 if seed == 1 else 6)
        if seed == 1:
            assert handler.state["ema"].value == {"n": 1}
            train(manager)
            handler.save_checkpoint(6)
            expected["lora_a.weight"] = manager.model.lora_a.weight.detach().clone()
    assert manager.left_out == ()
    assert handler.state["ema"].value == {"n": 1}
    assert all(torch.equal(manager.model.state_dict()[name], value) for name, value in expected.items())


def test_a_head_that_is_left_out_keeps_its_values_and_its_moments(tmp_path: Path) -> None:
    folder, expected = saved(tmp_path, Base())
    manager = manager_of(Base(1))
    train(manager, 3.0)
    head, moment = manager.model.head.weight.clone(), moments(manager, "head.weight")["exp_avg"].clone()
    manager.load_checkpoint(folder, exclude="head.*")
    assert torch.equal(manager.model.head.weight, head)
    assert torch.equal(moments(manager, "head.weight")["exp_avg"], moment)
    assert torch.equal(manager.model.body.weight, expected["body.weight"])
    assert moments(manager, "body.weight")["exp_avg"].unique().tolist() == [pytest.approx(0.1)]
    assert "optimizer.state.head.bias.step" in manager.left_out
    assert len(manager.left_out) == 2 + 6
    train(manager)


def test_a_single_state_is_left_out_by_its_whole_key(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path, Base())
    manager = manager_of(Base(1))
    train(manager, 3.0)
    before = moments(manager, "head.bias")["exp_avg_sq"].clone()
    manager.load_checkpoint(folder, exclude=["optimizer.state.*.exp_avg_sq"])
    assert torch.equal(moments(manager, "head.bias")["exp_avg_sq"], before)
    assert moments(manager, "head.bias")["exp_avg"].unique().tolist() == [pytest.approx(0.1)]
    assert len(manager.left_out) == 4


def test_what_is_trained_only_since_the_save_begins_anew(tmp_path: Path) -> None:
    model = Base()
    model.body.requires_grad_(False)
    folder, expected = saved(tmp_path, model)
    manager = manager_of(Base(1))
    manager.load_checkpoint(folder)
    assert all(torch.equal(manager.model.state_dict()[name], value) for name, value in expected.items())
    assert {name.rpartition(".")[0] for name in manager.left_out} == {
        "optimizer.state.body.weight",
        "optimizer.state.body.bias",
    }
    assert moments(manager, "head.weight")["step"] == 1
    assert moments(manager, "body.weight")["step"] == 0
    train(manager)
    assert moments(manager, "body.weight")["step"] == 1


def test_names_of_a_wrapper_are_renamed(tmp_path: Path) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Base()

    folder, expected = saved(tmp_path, Wrapper())
    manager = manager_of(Base(1))
    manager.optimizer.param_groups[0]["lr"] = 7.0
    with pytest.raises(CheckpointingException, match="body"):
        manager.load_checkpoint(folder)
    manager.load_checkpoint(folder, rename={"inner.*": "*"})
    assert all(
        torch.equal(expected[f"inner.{name}"], value) for name, value in manager.model.state_dict().items()
    )
    assert moments(manager, "head.weight")["step"] == 1
    assert manager.optimizer.param_groups[0]["lr"] == 0.1
    assert manager.left_out == ()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"exclude": ["haed.*"]}, r"no name in the checkpoint or the model fits 'haed\.\*'"),
        ({"rename": {"inner.*": "*"}}, "no name in the checkpoint or the model fits 'inner"),
        ({"rename": {"head.*": "body.*"}}, "rename makes the same name of"),
        ({"rename": {"head.*": "body"}}, r"both need the same number of \*"),
        ({"rename": str.upper}, "a function is not offered"),
        ({"exclude": 3}, "exclude=3: expected patterns"),
        ({"exclude": [""]}, "expected patterns"),
    ],
)
def test_wishes_that_change_nothing_or_cannot_be_followed_are_refused(
    tmp_path: Path, how: Any, says: str
) -> None:
    folder, _ = saved(tmp_path, Base())
    manager = manager_of(Base(1))
    before = {name: value.clone() for name, value in manager.model.state_dict().items()}
    with pytest.raises(CheckpointingException, match=says):
        manager.load_checkpoint(folder, **how)
    assert all(torch.equal(before[name], value) for name, value in manager.model.state_dict().items())


def test_wishes_of_a_load_that_is_none_are_refused(tmp_path: Path) -> None:
    manager = manager_of(Base())
    with pytest.raises(CheckpointingException, match="no path to load from"):
        manager.load_checkpoint(None, exclude=["head.*"])
    with pytest.raises(ValueError, match="resume_from_path, which is None"):
        CheckpointHandler(manager, default_local_dir=tmp_path, exclude=["head.*"])
    with pytest.raises(ValueError, match=r"state\.emma"):
        CheckpointHandler(
            manager, default_local_dir=tmp_path, resume_from_path=tmp_path, exclude=["state.emma"]
        )
    with pytest.raises(CheckpointingException, match="not offered by MegatronCheckpointManager"):
        MegatronCheckpointManager(model=[Base()]).load_checkpoint(tmp_path, exclude=["head.*"])


def test_an_object_of_state_is_left_out_beside_an_engine_that_loads_wholes_alone(tmp_path: Path) -> None:
    folder, values = saved(tmp_path, Base(1))

    class Engine:
        """verl's, say: without `exclude`."""

        def __init__(self, manager: Any) -> None:
            self.manager = manager

        def load_checkpoint(self, local_path: str) -> None:
            self.manager.load_checkpoint(local_path)

    model, ema = Base(2), Holder("as it was")
    engine = Engine(manager_of(model))
    options = {"default_local_dir": tmp_path, "resume_mode": "resume_path", "resume_from_path": folder}
    handler = CheckpointHandler(engine, state={"ema": ema}, exclude=["state.ema"], **options)
    assert handler.load_checkpoint() == 5
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert ema.value == "as it was"
    with pytest.raises(ValueError, match="not offered by Engine"):
        CheckpointHandler(engine, state={"ema": ema}, exclude=["state.ema", "head.*"], **options)


def scheduled(model: nn.Module, groups: list[tuple[str, float]], config: Any = None) -> Any:
    """A manager with a param group for each module, with a rate that halves at each step."""
    made = [{"params": list(model.get_submodule(name).parameters()), "lr": lr} for name, lr in groups]
    optimizer = torch.optim.SGD(made)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    return FSDPCheckpointManager(model, optimizer, schedule, checkpoint_config=config)


def rates_after_a_step(manager: Any) -> list[float]:
    manager.optimizer.step()
    manager.lr_scheduler.step()
    return [group["lr"] for group in manager.optimizer.param_groups]


def test_the_rates_of_a_schedule_follow_their_groups(tmp_path: Path) -> None:
    before = scheduled(Base(), [("body", 8.0), ("head", 4.0)])
    assert rates_after_a_step(before) == [4.0, 2.0]
    before.save_checkpoint(str(tmp_path / "global_step_1"), None, 1)

    turned = scheduled(Base(), [("head", 4.0), ("body", 8.0)])
    turned.load_checkpoint(str(tmp_path / "global_step_1"))
    assert rates_after_a_step(turned) == [1.0, 2.0]

    tuned = scheduled(Adapted(), [("lora_a", 16.0), ("head", 4.0), ("body", 8.0)])
    tuned.load_checkpoint(str(tmp_path / "global_step_1"), exclude=["lora_a.*"])
    # 16 x 0.5 ** 2: the schedule is at its second step.
    assert rates_after_a_step(tuned) == [4.0, 1.0, 2.0]


def test_rates_of_groups_that_are_not_known_are_refused(tmp_path: Path) -> None:
    config = {"save_contents": ["model", "extra"], "load_contents": ["model", "extra"]}
    before = scheduled(Base(), [("body", 8.0), ("head", 4.0)], config)
    before.save_checkpoint(str(tmp_path / "global_step_1"), None, 1)
    other = scheduled(Base(1), [("body", 8.0)], config)
    weight = other.model.body.weight.clone()
    with pytest.raises(CheckpointingException, match="base_lrs has 1 entries here, and 2 in the checkpoint"):
        other.load_checkpoint(str(tmp_path / "global_step_1"))
    assert torch.equal(other.model.body.weight, weight)


class Tied(Base):
    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.copy = nn.Linear(3, 3)
        self.copy.weight = self.body.weight


@pytest.mark.parametrize("excluded", ["copy.weight", "body.*"])
def test_one_of_two_tied_names_is_not_left_out(tmp_path: Path, excluded: str) -> None:
    folder, _ = saved(tmp_path, Tied())
    model = Tied(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    manager = manager_of(model)
    with pytest.raises(CheckpointingException, match=r"is tied to .* exclude both, or none"):
        manager.load_checkpoint(folder, exclude=[excluded])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    manager.load_checkpoint(folder, exclude=["copy.weight", "body.weight"])
    assert torch.equal(model.copy.weight, before["copy.weight"])


def save_on_ranks(api: Any, root: Path) -> None:
    model = Base()
    fully_shard(model)
    saved(root, model)


def load_on_ranks(api: Any, root: Path, what: str) -> str:
    odd, model = dist.get_rank() == 1, Adapted(1)
    fully_shard(model)
    before = model.lora_a.weight.full_tensor()
    manager = manager_of(model, {"save_contents": ["model"], "load_contents": ["model"]})
    how: dict[str, Any] = {
        "all": {"exclude": ["lora_*"]},
        "one": {"exclude": ["lora_*"] if odd else []},
        "function": {"rename": str.upper if odd else None},
        "other": {"exclude": ["lora_*"], "rename": {"head.*": "head.*"} if odd else None},
    }[what]
    try:
        manager.load_checkpoint(str(root / "global_step_5"), **how)
    except CheckpointingException as error:
        return str(error)
    assert torch.equal(model.lora_a.weight.full_tensor(), before)
    return ", ".join(manager.left_out)


def test_every_rank_lists_what_is_left_out_or_hears_of_another_wish(ranks, tmp_path: Path) -> None:
    ranks(save_on_ranks, tmp_path, world=2)
    (text,) = set(ranks(load_on_ranks, tmp_path, "all", world=2))
    assert text == "model.lora_a.bias, model.lora_a.weight"
    (text,) = set(ranks(load_on_ranks, tmp_path, "one", world=2))
    assert "rank 1: not the same on every rank: exclude (" in text
    (text,) = set(ranks(load_on_ranks, tmp_path, "function", world=2))
    assert "rank 1: ValueError: rename=" in text
    (text,) = set(ranks(load_on_ranks, tmp_path, "other", world=2))
    assert "rank 1: not the same on every rank: rename (" in text
