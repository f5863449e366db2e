"""Ranks that hold different values, keys or param groups: no value is lost, none is a mixture."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from heard import heard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torch_dcp_backport.checkpoint import CheckpointHandler, FSDPCheckpointManager
from torch_dcp_backport.dist_checkpointing import CheckpointingException, verify

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import fully_shard


def handler_of(
    root: Path, model: nn.Module, optimizer: Any = None, schedule: Any = None, **options: Any
) -> Any:
    return CheckpointHandler(
        FSDPCheckpointManager(model, optimizer, schedule, **options), default_local_dir=root
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer, gradient: float = 1.0) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) * gradient
    optimizer.step()


# Replicas that differ.


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)
        self.register_buffer("large", torch.zeros(3, 200_000))
        self.register_buffer("same", torch.ones(3, 200_000, dtype=torch.bfloat16))


def buffers_of(api: Any, root: Path, is_async: bool) -> tuple[dict[str, torch.Tensor], list[str]]:
    torch.manual_seed(0)
    model, rank = Normed(), dist.get_rank()
    # DDP makes all ranks alike when it is made; a step has local statistics again.
    wrapped = nn.parallel.DistributedDataParallel(model)
    with torch.no_grad():
        model.norm.running_mean.fill_(rank + 1)
        model.norm.running_var.fill_(10 * rank + 1)
        model.norm.num_batches_tracked.fill_(rank)
        # One element among 600,000.
        model.large[2, 100_000 + rank] = 1.0
    with heard() as said:
        handler = handler_of(root, wrapped, checkpoint_config={"async_save": is_async})
        for number in (1, 2):
            handler.save_checkpoint(number)
        handler.finish()
    first = {name: value.clone() for name, value in model.state_dict().items()}
    fresh = Normed()
    handler_of(root, nn.parallel.DistributedDataParallel(fresh)).load_checkpoint()
    loaded = fresh.state_dict()
    shared = [{name: value.tolist() for name, value in first.items()} if rank == 0 else None]
    dist.broadcast_object_list(shared)
    wrong = [name for name, value in loaded.items() if value.tolist() != shared[0][name]]
    assert wrong == []
    return loaded, [text for text in said if "differ between the ranks" in text]


@pytest.mark.parametrize("is_async", [False, True])
def test_buffers_that_differ_are_those_of_the_first_rank(ranks, tmp_path: Path, is_async: bool) -> None:
    results = ranks(buffers_of, tmp_path, is_async, world=3)
    loaded = results[0][0]
    assert (loaded["norm.running_mean"] == 1).all()
    assert (loaded["norm.running_var"] == 1).all()
    assert loaded["large"][2].nonzero().tolist() == [[100_000]]
    (text,) = results[0][1]
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "large"):
        assert f"model.{name} " in text
    assert "layer" not in text
    assert "same" not in text
    assert "(expected those of rank 0, got other values on ranks 1-2)" in text


def replicas_of_shards(api: Any, root: Path) -> list[str]:
    """HSDP whose replicas went apart, as after a faulty link."""
    torch.manual_seed(0)
    model = nn.Linear(8, 300_000, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    if dist.get_rank() >= 2:
        with torch.no_grad():
            model.weight.to_local()[7] += 1
    expected = model.weight.to_local().detach().clone()
    dist.broadcast(expected, dist.get_rank() % 2, group=groups()[dist.get_rank() % 2])
    handler = handler_of(root, model)
    with heard() as said:
        handler.save_checkpoint(1)
    handler.load_checkpoint()
    assert torch.equal(model.weight.to_local(), expected)
    return [text for text in said if "differ between the ranks" in text]


def groups() -> list[Any]:
    return [dist.new_group([0, 2]), dist.new_group([1, 3])]


@pytest.mark.skipif(
    torch.__version__.startswith("2.4"), reason="torch 2.4 has no state_dict() of a module under HSDP"
)
def test_replicas_of_shards_that_differ(ranks, tmp_path: Path) -> None:
    said = ranks(replicas_of_shards, tmp_path, world=4)
    assert "model.weight (expected those of rank 0, got other values on rank 2)" in said[0][0]
    assert said[1:] == [[], [], []]


# Stages of a pipeline.


class Stage(nn.Module):
    """A part of a model under the names of the whole."""

    def __init__(self, numbers: range, extra: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Layer(number) for number in numbers})


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.linear = nn.Linear(6, 4)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("count", torch.tensor(number))
        self.note = io.BytesIO(f"layer {number}".encode())

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": lambda groups, **options: torch.optim.SGD(groups, momentum=0.9, **options),
    "adamw": torch.optim.AdamW,
    "tensor lr": lambda groups, lr, **options: torch.optim.AdamW(groups, lr=torch.tensor(lr), **options),
}


def staged(kind: str, is_sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """This rank's stage of two, on half of the ranks, with rates of its own."""
    world, rank = dist.get_world_size(), dist.get_rank()
    number, width = rank // (world // 2), world // 2
    model = Stage(range(2 * number, 2 * number + 2))
    if is_sharded:
        mesh = init_device_mesh("cpu", (2, width), mesh_dim_names=("pp", "dp"))["dp"]
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    norms = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    others = [parameter for name, parameter in model.named_parameters() if "norm" not in name]
    groups = [{"params": others, "weight_decay": 0.1 * (number + 1)}, {"params": norms, "weight_decay": 0.0}]
    optimizer = OPTIMIZERS[kind](groups, lr=0.01 * (number + 1))
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def facts_of(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any) -> dict[str, Any]:
    """All that a resume has to bring back, as plain values."""

    def plain(value: Any) -> Any:
        if hasattr(value, "to_local"):
            value = value.to_local()
        return value.tolist() if isinstance(value, torch.Tensor) else value

    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        "parameters": {name: plain(parameter) for name, parameter in model.named_parameters()},
        "buffers": {name: plain(buffer) for name, buffer in model.named_buffers()},
        "notes": {name: layer.note.getvalue() for name, layer in model.layers.items()},
        "states": {
            names[parameter]: {name: plain(value) for name, value in states.items()}
            for parameter, states in optimizer.state.items()
        },
        "groups": [
            {name: plain(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ],
        "rates": [plain(rate) for rate in schedule.get_last_lr()],
        "base": [plain(rate) for rate in schedule.base_lrs],
    }


def save_stages(api: Any, root: Path, kind: str, is_sharded: bool) -> dict[str, Any]:
    model, optimizer, schedule = staged(kind, is_sharded)
    for layer in model.layers.values():
        layer.note = io.BytesIO(layer.note.getvalue() + b" trained")
    handler = handler_of(root, model, optimizer, schedule)
    for number in range(1, 3):
        step(model, optimizer, number * (dist.get_rank() // (dist.get_world_size() // 2) + 1))
        schedule.step()
        handler.save_checkpoint(number)
    expected = facts_of(model, optimizer, schedule)
    fresh = staged(kind, is_sharded)
    for group in fresh[1].param_groups:
        group["weight_decay"] = 7.0
    assert handler_of(root, *fresh).load_checkpoint() == 2
    assert facts_of(*fresh) == expected
    assert verify(root / "global_step_2" / "dist_ckpt") == []
    return expected


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_stages_are_saved_and_loaded_whole(ranks, tmp_path: Path, kind: str, is_sharded: bool) -> None:
    results = ranks(save_stages, tmp_path, kind, is_sharded, world=4 if is_sharded else 2)
    first, last = results[0], results[-1]
    assert first["groups"] != last["groups"]
    assert first["parameters"].keys() != last["parameters"].keys()
    # The whole model, on one rank.
    (whole,) = ranks(load_whole, tmp_path, kind, world=1)
    both = results if is_sharded else [first, last]
    for name, value in whole["notes"].items():
        assert value == next(facts["notes"][name] for facts in both if name in facts["notes"])
    for what in ("parameters", "states"):
        for name, value in whole[what].items():
            if "linear.bias" in name or "norm" in name:  # the others are cut
                owners = [facts[what][name] for facts in both if name in facts[what]]
                assert owners
                if not is_sharded:
                    assert value == owners[0]
    expected = [*first["groups"], *last["groups"]]
    assert [(group["lr"], group["weight_decay"]) for group in whole["groups"]] == [
        (group["lr"], group["weight_decay"]) for group in expected
    ]


def load_whole(api: Any, root: Path, kind: str) -> dict[str, Any]:
    model = Stage(range(4))
    named = dict(model.named_parameters())
    parts = [[name for name in named if name.split(".")[1] in numbers] for numbers in ("01", "23")]
    groups = [
        {"params": [named[name] for name in names if ("norm" in name) == is_norm], "weight_decay": 7.0}
        for names in parts
        for is_norm in (False, True)
    ]
    optimizer = OPTIMIZERS[kind](groups, lr=3.0)
    handler = handler_of(root, model, optimizer, checkpoint_config={"load_contents": ["model", "optimizer"]})
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    assert handler.load_checkpoint() == 2
    return facts_of(model, optimizer, schedule)


def load_parts(api: Any, root: Path, frozen: Sequence[int], contents: Sequence[str]) -> tuple[bool, str]:
    """Save and load two stages on the same ranks; return whether the parameters came back, and an error."""
    rank = dist.get_rank()

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(rank)
        model = nn.ModuleDict({f"stage{rank}": nn.Linear(2, 2)})
        model[f"stage{rank}"].bias.requires_grad_(rank not in frozen)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return model, torch.optim.AdamW(trained, lr=0.1)

    model, optimizer = made()
    step(model, optimizer)
    handler_of(root, model, optimizer).save_checkpoint(1)
    saved = [parameter.clone() for parameter in model.parameters()]
    other, fresh = made()
    config = {"load_contents": list(contents)} if contents else None
    try:
        handler_of(root, other, fresh, checkpoint_config=config).load_checkpoint()
    except CheckpointingException as error:
        return False, str(error)
    is_same = all(map(torch.equal, saved, other.parameters()))
    for state in fresh.state.values():
        is_same = is_same and float(state["step"]) == float("optimizer" in contents or not contents)
    return is_same or contents == ["optimizer"], ""


@pytest.mark.parametrize("frozen", [(), (1,), (0, 1)])
@pytest.mark.parametrize("contents", [(), ["model"], ["model", "optimizer"], ["optimizer"]])
def test_parts_of_stages_and_frozen_parameters_load(ranks, tmp_path: Path, frozen, contents) -> None:
    """What another rank loads is not missing."""
    assert ranks(load_parts, tmp_path, frozen, contents, world=2) == [(True, "")] * 2


def other_stages(api: Any, root: Path) -> tuple[str, str]:
    """What is refused: a schedule of each rank on another number of ranks; a stage that no rank loads."""
    texts = []
    model = Stage(range(4))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for handler in (
        handler_of(root, model, None, schedule, checkpoint_config={"load_contents": ["model", "extra"]}),
        handler_of(root, Stage(range(2)), checkpoint_config={"load_contents": ["model"]}),
    ):
        with pytest.raises(CheckpointingException) as caught:
            handler.load_checkpoint()
        texts.append(str(caught.value))
    return texts[0], texts[1]


def test_what_cannot_be_loaded_of_stages_is_refused_by_name(ranks, tmp_path: Path) -> None:
    ranks(save_stages, tmp_path, "adamw", False, world=2)
    ((schedules, keys),) = ranks(other_stages, tmp_path, world=1)
    assert "2 ranks saved schedules that differ, and 1 ranks load" in schedules
    assert "only the checkpoint has" in keys
    assert "model.layers.2" in keys


def same_parameter(api: Any, root: Path) -> str:
    """A parameter on two ranks, with another rate on each."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + dist.get_rank())
    with pytest.raises(CheckpointingException) as caught:
        handler_of(root, model, optimizer).save_checkpoint(1)
    return str(caught.value)


def test_a_parameter_with_other_options_on_another_rank_is_refused(ranks, tmp_path: Path) -> None:
    (text,) = set(ranks(same_parameter, tmp_path, world=2))
    assert "weight has other options on rank 1 than on rank 0: lr=1.1 and 0.1" in text


# Learning rates, groups, and values that a load would refuse.


def rated(rate: Any, root: Path) -> tuple[nn.Module, torch.optim.Optimizer, CheckpointHandler]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    return model, optimizer, handler_of(root, model, optimizer)


@pytest.mark.parametrize("saved", [0.25, torch.tensor(0.25)], ids=["float", "tensor"])
@pytest.mark.parametrize("loaded", [0.5, torch.tensor(0.5)], ids=["into float", "into tensor"])
def test_a_rate_that_was_a_tensor_or_a_number(tmp_path: Path, saved: Any, loaded: Any) -> None:
    """As `optimizer.load_state_dict` has it: the value and the kind that were saved."""
    model, optimizer, handler = rated(saved, tmp_path)
    step(model, optimizer)
    handler.save_checkpoint(1)
    other, fresh, resumed = rated(loaded, tmp_path)
    native = torch.optim.AdamW(nn.Linear(3, 2).parameters(), lr=loaded)
    native.load_state_dict(optimizer.state_dict())
    assert resumed.load_checkpoint() == 1
    assert type(fresh.param_groups[0]["lr"]) is type(native.param_groups[0]["lr"])
    assert fresh.param_groups[0]["lr"] == 0.25
    for one, two in ((model, optimizer), (other, fresh)):
        step(one, two, 2.0)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_a_rate_that_a_scheduler_turned_into_a_number(tmp_path: Path) -> None:
    model, optimizer, _ = rated(torch.tensor(0.5), tmp_path)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    handler = handler_of(tmp_path, model, optimizer, schedule)
    for loss in (1.0, 1.0, 1.0):
        step(model, optimizer)
        schedule.step(loss)
    handler.save_checkpoint(3)
    other, fresh, _ = rated(torch.tensor(0.5), tmp_path)
    again = torch.optim.lr_scheduler.ReduceLROnPlateau(fresh, patience=0, factor=0.5)
    assert handler_of(tmp_path, other, fresh, again).load_checkpoint() == 3
    assert float(fresh.param_groups[0]["lr"]) == float(optimizer.param_groups[0]["lr"])
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_a_step_that_has_the_rate_among_its_tensors_loads(tmp_path: Path, monkeypatch) -> None:
    """As saves had it before: a tensor with the key of its place."""
    from torch_dcp_backport.dist_checkpointing import training_state

    model, optimizer, handler = rated(torch.tensor(0.25), tmp_path)
    step(model, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(training_state, "GROUPS", "none of them")
        patch.setattr(training_state, "plain_of", lambda halves: {})
        handler.save_checkpoint(1)
    for rate in (0.5, torch.tensor(0.5)):
        _, fresh, resumed = rated(rate, tmp_path)
        assert resumed.load_checkpoint() == 1
        assert fresh.param_groups[0]["lr"] == 0.25


def grouped(root: Path, *groups: tuple[str, float]) -> tuple[torch.optim.Optimizer, CheckpointHandler]:
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in "abc"})
    optimizer = torch.optim.SGD(
        [
            {"params": [p for name in names for p in model[name].parameters()], "weight_decay": decay}
            for names, decay in groups
        ],
        lr=0.1,
    )
    return optimizer, handler_of(root, model, optimizer)


def decays(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["weight_decay"] for group in optimizer.param_groups]


def test_groups_that_became_one_are_refused_where_they_differ(tmp_path: Path) -> None:
    grouped(tmp_path, ("ab", 0.1), ("c", 0.0))[1].save_checkpoint(1)
    optimizer, handler = grouped(tmp_path, ("abc", 0.5))
    before = [parameter.clone() for parameter in handler.engine.model.parameters()]
    with pytest.raises(
        CheckpointingException, match=r"groups 0 and 1, with different options: weight_decay=0\.1 and 0\.0"
    ):
        handler.load_checkpoint()
    assert decays(optimizer) == [0.5]
    assert all(map(torch.equal, before, handler.engine.model.parameters()))
    # Those that are alike are one.
    grouped(tmp_path / "alike", ("ab", 0.1), ("c", 0.1))[1].save_checkpoint(1)
    optimizer, handler = grouped(tmp_path / "alike", ("abc", 0.5))
    assert handler.load_checkpoint() == 1
    assert decays(optimizer) == [0.1]


def test_a_group_that_became_several_is_said(tmp_path: Path, caplog) -> None:
    grouped(tmp_path, ("abc", 0.1))[1].save_checkpoint(1)
    optimizer, handler = grouped(tmp_path, ("ab", 0.5), ("c", 0.0))
    with caplog.at_level(logging.WARNING):
        assert handler.load_checkpoint() == 1
    assert decays(optimizer) == [0.1, 0.1]
    assert "saved param group 0 is now groups 0, 1" in caplog.text
    assert "weight_decay=0.5 and 0.0" in caplog.text
    assert "each gets those that were saved, weight_decay=0.1" in caplog.text
    caplog.clear()
    optimizer, handler = grouped(tmp_path, ("c", 0.5), ("ba", 0.5))
    assert handler.load_checkpoint() == 1
    assert "is now groups" not in caplog.text


def test_groups_that_were_one_have_a_rate_each(tmp_path: Path) -> None:
    """A scheduler sets a rate in place: that of one group must not be the other's."""
    saved, handler = grouped(tmp_path, ("abc", 0.1))
    saved.param_groups[0]["lr"] = torch.tensor(0.25)
    handler.save_checkpoint(1)
    optimizer, handler = grouped(tmp_path, ("ab", 0.1), ("c", 0.1))
    assert handler.load_checkpoint() == 1
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, [lambda step: 1.0 if step == 0 else 0.5, lambda step: 1.0]
    )
    optimizer.step()
    schedule.step()
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.125, 0.25]


def with_sets(api: Any, root: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    schedule.seen = {0, 8} if dist.get_rank() == 0 else {8, 0}  # type: ignore[attr-defined]
    handler_of(root, model, optimizer, schedule).save_checkpoint(1)


def test_equal_sets_are_no_difference(ranks, tmp_path: Path) -> None:
    """In whatever order each rank made them: the schedule is one, and loads on any number of ranks."""
    ranks(with_sets, tmp_path, world=2)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert handler_of(tmp_path, model, optimizer, schedule).load_checkpoint() == 1
    assert schedule.seen == {0, 8}  # type: ignore[attr-defined]


def test_the_order_of_groups_does_not_matter(tmp_path: Path, caplog) -> None:
    grouped(tmp_path, ("ab", 0.1), ("c", 0.0))[1].save_checkpoint(1)
    optimizer, handler = grouped(tmp_path, ("c", 0.5), ("ba", 0.5))
    assert handler.load_checkpoint() == 1
    assert decays(optimizer) == [0.0, 0.1]
    assert not caplog.records


class Odd:
    """A class that no load takes without trust."""


@pytest.mark.parametrize("where", ["extra state", "option", "object"])
def test_what_a_load_would_refuse_is_refused_by_the_save(tmp_path: Path, where: str, monkeypatch) -> None:
    from torch_dcp_backport.checkpoint._src import extra

    model = Stage(range(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if where == "extra state":
        model.layers["0"].note = Odd()  # type: ignore[assignment]
    if where == "option":
        optimizer.param_groups[0]["odd"] = Odd()
    if where == "object":
        monkeypatch.setattr(extra, "rng_state", lambda kind: {"odd": Odd()})
    with pytest.raises(CheckpointingException, match=r"would not load again: .*Odd"):
        handler_of(tmp_path, model, optimizer).save_checkpoint(1)
    handler_of(tmp_path, model, optimizer, trust=True).save_checkpoint(1)
