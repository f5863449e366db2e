"""`CheckpointHandler(state={"ema": ema})`: the program's own objects come back exactly, or are an error."""

from __future__ import annotations

import contextlib
import logging
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from test_ranks import sharded
from torch.distributed.device_mesh import DeviceMesh
from trainer import Trainer

from torch_dcp_backport import compat
from torch_dcp_backport.checkpoint import SavePolicy
from torch_dcp_backport.checkpoint._src import store
from torch_dcp_backport.dist_checkpointing import CheckpointingException, load_common_state_dict


class Holder:
    """An object whose state is whatever it is given."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        random.random()
        torch.rand(1)
        self.value = state


class Average:
    """An average of a model's parameters, kept by their names."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.shadow = {name: value.detach().clone() for name, value in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {"decay": 0.9, "shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in self.shadow.items():
            value.copy_(state["shadow"][name])


def odd_values() -> dict[str, Any]:
    return {
        "int and text": {0: torch.tensor(1.0), "0": torch.tensor(2.0)},
        "a.b": torch.tensor([3]),
        "a": {"b": torch.tensor([4])},
        "list": [torch.zeros(0, 2), None, (torch.ones(2), "text")],
        "order": OrderedDict(z=1, a=2),
        "half": torch.ones(3, dtype=torch.bfloat16).t(),
        "empty": {},
    }


def test_every_kind_of_value_comes_back(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, state={"odd": Holder(odd_values()), "none": Holder(None)})
    trainer.handler.save_checkpoint(1)
    other = Trainer(tmp_path, state={"odd": Holder({}), "none": Holder(7)})
    assert other.handler.load_checkpoint() == 1
    assert repr(other.handler.state["odd"].value) == repr(odd_values())
    assert other.handler.state["none"].value is None


@pytest.mark.parametrize("config", [None, {"async_save": True}])
def test_names_with_dots_are_not_mixed_up(tmp_path: Path, config: Any) -> None:
    saved = {"a": {"b.c": torch.ones(2)}, "a.b": {"c": torch.zeros(2)}, "a%2Eb": {"c": torch.full((3,), 2.0)}}
    trainer = Trainer(tmp_path, config=config, state={name: Holder(value) for name, value in saved.items()})
    trainer.handler.save_checkpoint(1)
    trainer.handler.finish()
    other = Trainer(tmp_path, state={name: Holder({}) for name in saved})
    assert other.handler.load_checkpoint() == 1
    assert repr({name: holder.value for name, holder in other.handler.state.items()}) == repr(saved)


def test_a_resume_draws_the_numbers_of_the_run(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, state={"own": Holder({"n": 1})})
    trainer.train()
    trainer.handler.save_checkpoint(1)
    expected = trainer.state()["draws"]
    other = Trainer(tmp_path, state={"own": Holder()})
    other.handler.load_checkpoint()
    assert other.state()["draws"] == expected


def test_an_object_that_no_step_has_is_an_error_and_no_fault_of_steps(tmp_path: Path, caplog) -> None:
    Trainer(tmp_path, state={"ema": Holder({"n": 1})}).handler.save_checkpoint(1)
    Trainer(tmp_path, state={"scaler": Holder({"n": 2})}).handler.save_checkpoint(2)
    other = Trainer(tmp_path, state={"ema": Holder(), "sampler": Holder()})
    before = other.state()
    with pytest.raises(
        CheckpointingException, match=r"global_step_2 has no state of it \(it has scaler\).*'ema'"
    ):
        other.handler.load_checkpoint()
    assert all(map(torch.equal, other.state()["parameters"], before["parameters"]))
    assert not list(tmp_path.glob(f"*/{store.NOT_LOADED}"))
    with caplog.at_level(logging.WARNING):
        assert Trainer(tmp_path).handler.load_checkpoint() == 2
    assert "not loaded, as state= does not have it, or exclude has it: scaler" in caplog.text


def test_an_error_of_the_objects_own_code_is_no_fault_of_the_step(tmp_path: Path) -> None:
    for step in (1, 2):
        Trainer(tmp_path, state={"own": Holder({"n": step})}).handler.save_checkpoint(step)

    class Refuses(Holder):
        def load_state_dict(self, state: Any) -> None:
            raise KeyError("shape")

    with pytest.raises(CheckpointingException, match="KeyError: 'shape'"):
        Trainer(tmp_path, state={"own": Refuses()}).handler.load_checkpoint()
    assert not list(tmp_path.glob(f"*/{store.NOT_LOADED}"))


def test_a_damaged_state_is_the_steps_fault(tmp_path: Path) -> None:
    for step in (1, 2):
        Trainer(tmp_path, state={"own": Holder({"n": torch.ones(9) * step})}).handler.save_checkpoint(step)
    (tmp_path / "global_step_2" / "user_state" / "common.pt").write_bytes(b"")
    other = Trainer(tmp_path, state={"own": Holder()})
    assert other.handler.load_checkpoint() == 1
    assert other.handler.state["own"].value["n"][0] == 1


def test_what_would_not_load_again_is_refused_by_the_save(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, state={"own": Holder({"odd": Trainer})})
    with pytest.raises(CheckpointingException, match=r"state\['own'\] would not load again"):
        trainer.handler.save_checkpoint(1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("state", [[1], {"": Holder()}, {1: Holder()}, {"ema": object()}])
def test_what_is_no_state_is_refused_at_once(tmp_path: Path, state: Any) -> None:
    with pytest.raises(ValueError, match="state"):
        Trainer(tmp_path, state=state)


def save_on_ranks(api: Any, root: Path, config: Any) -> list[torch.Tensor]:
    trainer = Trainer(root, sharded(), config=config)
    ema, rank = Average(trainer.model), dist.get_rank()
    trainer.handler.state = {
        "ema": ema,
        "rank": Holder({"r": rank, "t": torch.tensor(rank)}),
        "n": Holder([1]),
    }
    trainer.train(rank, rank + 1)
    trainer.handler.save_checkpoint(3)
    trainer.handler.finish()
    return [value.full_tensor() for value in ema.shadow.values()]


def load_on_ranks(api: Any, root: Path, expected: list[torch.Tensor], names: str) -> str:
    trainer = Trainer(root, sharded(1))
    objects = {"ema": Average(trainer.model), "rank": Holder(), "n": Holder()}
    trainer.handler.state = {name: objects[name] for name in names.split()}
    try:
        trainer.handler.load_checkpoint()
    except CheckpointingException as error:
        return str(error)
    assert all(map(torch.equal, (value.full_tensor() for value in objects["ema"].shadow.values()), expected))
    if "rank" in names:
        assert objects["rank"].value == {"r": dist.get_rank(), "t": torch.tensor(dist.get_rank())}
    assert objects["n"].value == [1]
    return ""


@pytest.mark.parametrize("config", [None, {"async_save": True}])
def test_shards_load_on_any_ranks_and_each_ranks_own_on_as_many(ranks, tmp_path: Path, config: Any) -> None:
    expected = ranks(save_on_ranks, tmp_path, config, world=2)[0]
    assert ranks(load_on_ranks, tmp_path, expected, "ema rank n", world=2) == [""] * 2
    assert ranks(load_on_ranks, tmp_path, expected, "ema n", world=3) == [""] * 3
    (text,) = set(ranks(load_on_ranks, tmp_path, expected, "ema rank n", world=3))
    assert all(part in text for part in ("differ between ranks", "3 ranks", "2 ranks"))


def faulty(api: Any, root: Path, what: str) -> str:
    odd = dist.get_rank() == 1

    class Fails(Holder):
        def state_dict(self) -> Any:
            if odd:
                raise {"code": OSError, "end": StopIteration}[what]("no state today")
            return {}

    states = {"names": {"b" if odd else "a": Holder(1)}}.get(what, {"own": Fails()})
    trainer = Trainer(root, state=states)
    with pytest.raises(CheckpointingException) as caught:
        trainer.handler.save_checkpoint(1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("names", "not the same on every rank: state"),
        ("code", "rank 1: OSError: no state"),
        ("end", "rank 1: StopIteration: no state"),
    ],
)
def test_a_rank_that_fails_is_heard_of_on_every_rank(ranks, tmp_path: Path, what: str, says: str) -> None:
    (text,) = set(ranks(faulty, tmp_path, what, world=2))
    assert says in text
    assert "1 problem(s)" in text
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(("global", "."))]


def save_moments(api: Any, root: Path) -> None:
    trainer = Trainer(root, sharded())
    trainer.train()
    trainer.handler.state = {"other": trainer.optimizer}
    trainer.handler.save_checkpoint(1)


def load_moments(api: Any, root: Path) -> str:
    trainer = Trainer(root, sharded())
    trainer.handler.state = {"other": torch.optim.AdamW(trainer.model.parameters())}
    with pytest.raises(CheckpointingException) as caught:
        trainer.handler.load_checkpoint()
    return str(caught.value)


def test_shards_are_never_given_whole_to_an_object_without_state(ranks, tmp_path: Path) -> None:
    ranks(save_moments, tmp_path, world=2)
    (text,) = set(ranks(load_moments, tmp_path, world=2))
    assert all(part in text for part in ("make its state before the load", "exp_avg"))


def on_own_meshes(api: Any, root: Path, are_copies: bool, config: Any) -> tuple[list[float], str]:
    """Save and load a DTensor of one name on two meshes, with other values or as copies."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = rank * 2 // world
    meshes = [
        DeviceMesh("cpu", list(range(world))[half * world // 2 : (half + 1) * world // 2]) for half in (0, 1)
    ]

    def spread(number: float) -> Any:
        rows = 4 if are_copies else 4 + 2 * (world == 2) * mine
        return compat.DTensor.from_local(
            torch.full((rows * 2 // world, 2), number), meshes[mine], [compat.Shard(0)]
        )

    trainer = Trainer(
        root, config=config, state={"ema": Holder({"w": spread(1.0 if are_copies else mine + 1.0)})}
    )
    trainer.handler.save_checkpoint(1)
    trainer.handler.finish()
    trainer.handler.state = {"ema": Holder({"w": spread(9.0)})}
    trainer.handler.load_checkpoint()
    worlds = load_common_state_dict(root / "global_step_1" / "user_state")["worlds"]
    return trainer.handler.state["ema"].value["w"].to_local().unique().tolist(), str(worlds)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("config", [None, {"async_save": True}])
def test_stages_with_the_same_names_keep_their_own_values(
    ranks, tmp_path: Path, world: int, config: Any
) -> None:
    found = ranks(on_own_meshes, tmp_path / "stages", False, config, world=world)
    assert found == [([rank * 2 // world + 1.0], str({"ema": world})) for rank in range(world)]
    found = ranks(on_own_meshes, tmp_path / "copies", True, config, world=world)
    assert found == [([1.0], str({"ema": 0}))] * world


class Summed(Holder):
    """An object whose state is summed over ranks, so that their calls must fit together."""

    calls = 0

    def state_dict(self) -> Any:
        self.calls += 1
        total = torch.tensor([float(self.value)])
        dist.all_reduce(total)
        assert total.item() == self.value * dist.get_world_size(), "another object's sum"
        return {"total": total}

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state["total"].item()


def summed(rank: int, *more: str) -> dict[str, Any]:
    """Objects whose order is another one on each rank."""
    made = {name: Summed(value) for value, name in enumerate(("a", "b", "c", *more), start=1)}
    return dict(sorted(made.items(), reverse=rank == 1))


@on_ranks(world=2)
def test_collective_states_are_called_once_and_in_one_order(api: Any, tmp_path: Path) -> None:
    rank = dist.get_rank()
    policy = SavePolicy(steps=2, on_exception=True)
    handler = Trainer(tmp_path, state=summed(rank), save_policy=policy).handler

    def calls() -> list[int]:
        return [handler.state[name].calls for name in "abc"]

    with contextlib.suppress(KeyError), handler.watching():
        handler.save_checkpoint(1)
        assert calls() == [1, 1, 1]
        assert handler.save_if_due(2) is not None
        assert calls() == [3, 3, 3]
        assert handler.save_if_due(3) is None
        assert calls() == [4, 4, 4]
        raise KeyError
    assert calls() == [6, 6, 6]
    other = Trainer(tmp_path, state=summed(rank)).handler
    assert other.load_checkpoint() == 3
    assert [other.state[name].loaded for name in "abc"] == [2, 4, 6]
    assert [other.state[name].calls for name in "abc"] == [1, 1, 1]


@on_ranks(world=2)
def test_collective_states_wait_for_no_rank_that_does_not_come(api: Any, tmp_path: Path) -> None:
    """Each is an error of every rank, at once: a rank alone in an all-reduce would wait for its timeout."""
    odd = dist.get_rank()
    policy = SavePolicy(steps=8, on_exception=True)
    trainer = Trainer(tmp_path, state=summed(odd), save_policy=policy)
    handler = trainer.handler
    with contextlib.suppress(KeyError), handler.watching():
        handler.save_if_due(1)
        with pytest.raises(CheckpointingException, match=r"rank 1: .* expected a whole number from 0 on"):
            handler.save_if_due(-1 if odd else 2)
        with pytest.raises(CheckpointingException, match=r"rank 1: not the same on every rank: step \("):
            handler.save_if_due(3 if odd else 2)
        handler.state = summed(odd, *["d"][:odd])
        for ask in (handler.save_if_due, handler.save_checkpoint):
            with pytest.raises(CheckpointingException, match=r"rank 1: not the same on every rank: state \("):
                ask(2)
        handler.state = summed(odd)
        broken = mock.patch.object(trainer.loader, "state_dict", [dict, 1 / 2][odd])
        with broken, pytest.raises(CheckpointingException, match="rank 1: TypeError: 'float' object is not"):
            handler.save_checkpoint(2)
        assert not store.steps_in(tmp_path)
        handler.save_if_due(2)
        if odd:
            trainer.train()
        raise KeyError
    assert not store.steps_in(tmp_path)
    handler = Trainer(tmp_path, state=summed(odd)).handler
    handler.save_checkpoint(3)
    handler.state = summed(odd, *["d"][:odd])
    with pytest.raises(CheckpointingException, match=r"global_step_3 has no state of it .*'d'"):
        handler.load_checkpoint()


@on_ranks(world=2)
def test_one_that_fails_on_a_rank_alone_keeps_no_rank_from_the_next(api: Any, tmp_path: Path) -> None:
    class Fails(Holder):
        def state_dict(self) -> Any:
            return {} if dist.get_rank() == 0 else 1 / 0

    handler = Trainer(tmp_path, state={"a": Fails(), "b": Summed(2)}).handler
    with pytest.raises(CheckpointingException, match="rank 1: ZeroDivisionError"):
        handler.save_checkpoint(1)
