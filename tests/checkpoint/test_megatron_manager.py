"""A model that says itself how it is cut: saved at one grid of ranks, resumed at that and at others."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from heard import heard
from torch import nn

from torch_dcp_backport import dist_checkpointing
from torch_dcp_backport.checkpoint import CheckpointHandler, MegatronCheckpointManager
from torch_dcp_backport.dist_checkpointing import CheckpointingException, ShardedTensor

LAYERS, ROWS, COLUMNS = 4, 8, 3


class Grid(NamedTuple):
    """Megatron's parallel state: TP ranks next to each other, then replicas, then pipeline stages."""

    pp: int
    tp: int
    dp: int
    is_flipped: bool = False

    @property
    def places(self) -> tuple[int, int, int]:
        rank = dist.get_rank()
        # The same grid on other machines.
        rank = dist.get_world_size() - 1 - rank if self.is_flipped else rank
        return rank // (self.tp * self.dp), rank % self.tp, rank // self.tp % self.dp

    def get_pipeline_model_parallel_rank(self) -> int:
        return self.places[0]

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self.pp

    def get_tensor_model_parallel_rank(self) -> int:
        return self.places[1]

    def get_tensor_model_parallel_world_size(self) -> int:
        return self.tp

    def get_data_parallel_rank(self, with_context_parallel: bool = False) -> int:
        assert with_context_parallel
        return self.places[2]

    def get_data_parallel_world_size(self, with_context_parallel: bool = False) -> int:
        assert with_context_parallel
        return self.dp

    def set_virtual_pipeline_model_parallel_rank(self, number: int) -> None:
        chunks_asked.append(number)


chunks_asked: list[int] = []


def full(layer: int, what: int) -> torch.Tensor:
    """All of a layer's weight (0), or of its gradient at step `what`."""
    return torch.sin(torch.arange(ROWS * COLUMNS) * (layer + 1.0) + what).view(ROWS, COLUMNS)


class Chunk(nn.Module):
    """Some layers: weights cut by rows, biases of which every TP rank has all."""

    def __init__(self, grid: Grid, layers: range) -> None:
        super().__init__()
        self.grid, self.layers = grid, layers
        for layer in layers:
            self.register_parameter(f"weight{layer}", nn.Parameter(self.cut(full(layer, 0)).clone()))
            self.register_parameter(f"bias{layer}", nn.Parameter(full(layer, 0)[0].clone()))

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(self.grid.tp)[self.grid.places[1]]

    def sharded_state_dict(self) -> dict[str, Any]:
        _, tp, dp = self.grid.places
        state = {}
        for name, parameter in self.state_dict(keep_vars=True).items():
            cuts, replica = ([(0, tp, self.grid.tp)], (0, 0, dp)) if "weight" in name else ([], (0, tp, dp))
            state[name] = ShardedTensor.from_rank_offsets(
                f"decoder.{name}", parameter, *cuts, replica_id=replica
            )
        return state


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Distributed:
    """An optimizer that says itself how its states are cut; Megatron's are not torch's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.asked: list[bool] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def sharded_state_dict(self, model_state: dict[str, Any], is_loading: bool = False) -> dict[str, Any]:
        from torch_dcp_backport.checkpoint._src.megatron import sharded_optimizer

        self.asked.append(is_loading)
        state = sharded_optimizer(self.inner, model_state, is_loading)
        # Megatron's has the groups by their places.
        del state["named_groups"]
        groups = self.inner.state_dict()["param_groups"]
        local = [dist_checkpointing.LocalNonpersistentObject(group["params"]) for group in groups]
        state["param_groups"] = [{**group, "params": own} for group, own in zip(groups, local)]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for values in state["state"].values():
            values["step"] = state["scalars"]["step"].clone()
        self.inner.load_state_dict({key: state[key] for key in ("state", "param_groups")})


class Tracker:
    """Of random states for dropout within TP groups."""

    def __init__(self, seed: int) -> None:
        self.states = {"model-parallel-rng": torch.full((4,), seed, dtype=torch.uint8)}

    def get_states(self) -> dict[str, torch.Tensor]:
        return self.states

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states = states


@dataclass
class Config:
    layers: int = LAYERS
    dtype: torch.dtype = torch.bfloat16
    activation: Any = torch.nn.functional.silu


class Training:
    def __init__(
        self, root: Path, grid: Grid, chunks: int = 1, kind: str = "torch's", **options: Any
    ) -> None:
        self.grid, each = grid, LAYERS // (grid.pp * chunks)
        starts = [each * (number * grid.pp + grid.places[0]) for number in range(chunks)]
        self.chunks = [Chunk(grid, range(start, start + each)) for start in starts]
        parameters = [parameter for chunk in self.chunks for parameter in chunk.parameters()]
        self.inner = torch.optim.AdamW(parameters, lr=0.1)
        self.optimizer: Any = self.inner if kind == "torch's" else Distributed(self.inner)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.inner, 1, gamma=0.5)
        self.tracker = Tracker(dist.get_rank())
        self.manager = MegatronCheckpointManager(
            model=[Wrapper(chunk) for chunk in self.chunks],
            optimizer=self.optimizer,
            optimizer_scheduler=self.schedule,
            transformer_config=Config(),
            parallel_state=grid,
            rng_tracker=self.tracker,
            **options,
        )
        self.handler = CheckpointHandler(self.manager, default_local_dir=root, max_ckpt_to_keep=2)

    def train(self, step: int) -> None:
        for chunk in self.chunks:
            for name, parameter in chunk.named_parameters():
                gradient = full(int(name[-1]), step)
                parameter.grad = (chunk.cut(gradient) if "weight" in name else gradient[0]).clone()
        self.inner.step()
        self.schedule.step()

    def check(self, steps: int) -> None:
        """Compare with what one process has that trains all of it."""
        weights = [nn.Parameter(full(layer, 0)) for layer in range(LAYERS)]
        biases = [nn.Parameter(full(layer, 0)[0].clone()) for layer in range(LAYERS)]
        optimizer = torch.optim.AdamW([*weights, *biases], lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for step in range(1, steps + 1):
            for layer in range(LAYERS):
                weights[layer].grad, biases[layer].grad = full(layer, step), full(layer, step)[0].clone()
            optimizer.step()
            schedule.step()
        for chunk in self.chunks:
            for layer in chunk.layers:
                assert torch.equal(getattr(chunk, f"weight{layer}"), chunk.cut(weights[layer]))
                assert torch.equal(getattr(chunk, f"bias{layer}"), biases[layer])
        assert self.schedule.get_last_lr() == schedule.get_last_lr()


def saves(api: Any, root: Path, grid: Grid, options: dict[str, Any]) -> tuple[tuple[int, ...], float]:
    training = Training(root, grid, **options)
    for step in (1, 2):
        training.train(step)
    training.check(2)
    torch.manual_seed(dist.get_rank())
    training.handler.save_checkpoint(2)
    training.handler.finish()
    return grid.places, torch.rand(1).item()


def resumes(api: Any, root: Path, grid: Grid, options: dict[str, Any]) -> tuple[tuple[int, ...], float, int]:
    training = Training(root, grid, **options)
    chunks_asked.clear()
    assert training.handler.load_checkpoint() == 2
    drawn = torch.rand(1).item()
    training.check(2)
    training.train(3)
    training.check(3)
    if isinstance(training.optimizer, Distributed):
        assert training.optimizer.asked == [True]
    assert chunks_asked == (list(range(len(training.chunks))) if len(training.chunks) > 1 else [])
    return grid.places, drawn, int(training.tracker.states["model-parallel-rng"][0])


CASES = [
    (Grid(2, 2, 1), Grid(2, 2, 1), {}),
    (Grid(1, 2, 2), Grid(1, 2, 2, is_flipped=True), {"kind": "its own"}),
    (Grid(2, 2, 1), Grid(1, 4, 1), {}),
    (Grid(2, 1, 2), Grid(2, 1, 1), {"checkpoint_config": {"async_save": True}}),
    (Grid(2, 2, 1), Grid(2, 2, 1), {"chunks": 2}),
]


@pytest.mark.parametrize(("saved", "loaded", "options"), CASES)
def test_it_goes_on_at_any_grid(ranks, tmp_path: Path, saved: Grid, loaded: Grid, options: Any) -> None:
    before = dict(ranks(saves, tmp_path, saved, options, world=saved.pp * saved.tp * saved.dp))
    after = ranks(resumes, tmp_path, loaded, options, world=loaded.pp * loaded.tp * loaded.dp)
    if saved[:3] == loaded[:3]:
        # Random states go with places in the grid, whatever rank is there.
        assert {place: drawn for place, drawn, _ in after} == before
        numbers = [number for _, _, number in after]
        assert numbers == ([3, 2, 1, 0] if loaded.is_flipped else [0, 1, 2, 3])
    config = json.loads((tmp_path / "global_step_2" / "transformer_config.json").read_text())
    assert config == {"layers": LAYERS, "dtype": "torch.bfloat16"}


def says(api: Any, root: Path, what: str) -> str:
    grid = Grid(1, 2, 1)
    training = Training(root, grid)
    training.train(1)
    if what == "uneven" and dist.get_rank() == 1:
        next(iter(training.inner.state.values()))["step"] += 1
    if what == "grid":
        training.manager._parallel_state = Grid(1, 2, 2)
    if what == "foreign":
        path = root / "global_step_1"
        if dist.get_rank() == 0:
            (path / "dist_ckpt").mkdir(parents=True)
        dist.barrier()
        # As Megatron-LM and verl save.
        state = training.manager.generate_state_dict(["model", "optimizer"])
        dist_checkpointing.save({**state, "lr_scheduler": training.schedule.state_dict()}, path / "dist_ckpt")
        fresh = Training(root, grid, checkpoint_config={"load_contents": ["model", "optimizer"]})
        fresh.manager.load_checkpoint(path)
        fresh.check(1)
        fresh = Training(root, grid)
        with pytest.raises(CheckpointingException) as caught:
            fresh.manager.load_checkpoint(path)
        return str(caught.value)
    with pytest.raises(CheckpointingException) as caught:
        training.handler.save_checkpoint(1)
    dist.barrier()
    assert not list(root.iterdir())
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("uneven", "rank 1: the optimizer's step is 1.0 of one parameter, and 2.0 of others"),
        ("grid", "(PP, TP, DP) = (1, 2, 2) is not 2 ranks"),
        ("foreign", "has no extra; it has model, optimizer"),
    ],
)
def test_what_cannot_be_is_one_error(ranks, tmp_path: Path, what: str, text: str) -> None:
    (said,) = set(ranks(says, tmp_path, what, world=2))
    assert text in said


def keeps_schedule(api: Any, root: Path) -> list[float]:
    training = Training(root, Grid(1, 1, 2))
    training.train(1)
    training.handler.save_checkpoint(1)
    fresh = Training(root, Grid(1, 1, 2), use_checkpoint_opt_param_scheduler=False)
    with heard("checkpoint") as said:
        fresh.handler.load_checkpoint()
    assert ["the schedule begins anew" in text for text in said] == [True] * (dist.get_rank() == 0)
    return [fresh.schedule.last_epoch, training.schedule.last_epoch]


def test_a_schedule_that_is_not_wanted(ranks, tmp_path: Path) -> None:
    assert ranks(keeps_schedule, tmp_path, world=2) == [[0, 1]] * 2


class Scaled(nn.Module):
    """With a parameter that is a number, whose moments look like its number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.tensor(2.0))

    def sharded_state_dict(self) -> dict[str, Any]:
        parameters = self.state_dict(keep_vars=True)
        return {key: ShardedTensor.from_rank_offsets(key, value) for key, value in parameters.items()}

    def optimized(self, kind: Any) -> tuple[torch.optim.Optimizer, MegatronCheckpointManager]:
        optimizer = kind(self.parameters(), lr=0.1)
        return optimizer, MegatronCheckpointManager(model=self, optimizer=optimizer)


def test_a_number_has_steps_of_its_own(tmp_path: Path) -> None:
    model, fresh = Scaled(), Scaled()
    optimizer, manager = model.optimized(torch.optim.AdamW)
    for gradient in (1.0, None, 1.0):
        model.weight.grad = torch.ones(3, 2)
        model.scale.grad = None if gradient is None else torch.tensor(gradient)
        optimizer.step()
    manager.save_checkpoint(tmp_path / "global_step_1")
    other, manager = fresh.optimized(torch.optim.AdamW)
    manager.load_checkpoint(tmp_path / "global_step_1")
    assert [int(state["step"]) for state in other.state_dict()["state"].values()] == [3, 2]
    assert torch.equal(fresh.scale, model.scale)


def test_a_state_of_another_shape_is_one_error(tmp_path: Path) -> None:
    model = Scaled()
    _, manager = model.optimized(Factored)
    with pytest.raises(
        CheckpointingException, match=r"row is of shape \(3,\), and its parameter of \(3, 2\)"
    ):
        manager.save_checkpoint(tmp_path / "global_step_1")
    assert not list(tmp_path.iterdir())


class Factored(torch.optim.SGD):
    """As Adafactor keeps a row and a column of the second moments."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim():
                    self.state[parameter]["row"] = parameter.detach().sum(1)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def sharded_state_dict(self) -> dict[str, Any]:
        return {
            name: ShardedTensor.from_rank_offsets(name, parameter)
            for name, parameter in self.named_parameters()
        }


def grouped(*groups: tuple[str, float]) -> tuple[torch.optim.Optimizer, MegatronCheckpointManager]:
    model = TwoLayers()
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [p for name, p in model.named_parameters() if name[0] in names],
                "weight_decay": decay,
            }
            for names, decay in groups
        ],
        lr=0.1,
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer, MegatronCheckpointManager(model=model, optimizer=optimizer)


def test_param_groups_go_by_their_parameters(tmp_path: Path, caplog) -> None:
    """By their places, groups in another order would have the options of each other."""
    folder = tmp_path / "global_step_1"
    grouped(("a", 0.1), ("b", 0.0))[1].save_checkpoint(folder, global_step=1)
    optimizer, manager = grouped(("b", 0.5), ("a", 0.5))
    manager.load_checkpoint(folder)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1]
    optimizer, manager = grouped(("ab", 0.5))
    before = [parameter.clone() for parameter in manager.chunks[0].parameters()]
    with pytest.raises(CheckpointingException, match=r"with different options: weight_decay=0\.1 and 0\.0"):
        manager.load_checkpoint(folder)
    assert all(map(torch.equal, before, manager.chunks[0].parameters()))
    grouped(("ab", 0.1))[1].save_checkpoint(tmp_path / "global_step_2", global_step=2)
    optimizer, manager = grouped(("a", 0.5), ("b", 0.0))
    manager.load_checkpoint(tmp_path / "global_step_2")
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1]
    assert "is now groups 0, 1" in caplog.text


def decayed(api: Any, folder: Path) -> list[float]:
    """Stages whose optimizers have a rate and a decay of their own."""
    grid, rank = Grid(2, 1, 1), dist.get_rank()
    values = []
    for is_fresh in (False, True):
        chunk = Chunk(grid, range(2 * rank, 2 * rank + 2))
        rate = 7.0 if is_fresh else 0.1 * (rank + 1)
        optimizer = torch.optim.SGD(chunk.parameters(), lr=rate, weight_decay=rate)
        manager = MegatronCheckpointManager(model=chunk, optimizer=optimizer, parallel_state=grid)
        if is_fresh:
            manager.load_checkpoint(folder)
        else:
            manager.save_checkpoint(folder, global_step=1)
        values.append([optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]])
    assert values[0] == values[1]
    return values[1]


def test_stages_keep_options_of_their_own(ranks, tmp_path: Path) -> None:
    assert ranks(decayed, tmp_path / "global_step_1", world=2) == [[0.1, 0.1], [0.2, 0.2]]


def one_trains(api: Any, folder: Path, trains: int, kind: str) -> Any:
    """Two stages, of which one has an optimizer."""
    grid, rank = Grid(2, 1, 1), dist.get_rank()
    values = []
    for is_fresh in (False, True):
        chunk = Chunk(grid, range(2 * rank, 2 * rank + 2))
        optimizer: Any = None
        if rank == trains:
            inner = torch.optim.AdamW(chunk.parameters(), lr=7.0 if is_fresh else 0.1)
            optimizer = inner if kind == "torch's" else Distributed(inner)
            for parameter in chunk.parameters():
                parameter.grad = torch.ones_like(parameter)
            for _ in range(1 if is_fresh else 2):
                inner.step()
        manager = MegatronCheckpointManager(model=chunk, optimizer=optimizer, parallel_state=grid)
        if is_fresh:
            with torch.no_grad():
                for parameter in chunk.parameters():
                    parameter.zero_()
            manager.load_checkpoint(folder)
        else:
            try:
                manager.save_checkpoint(folder, global_step=1)
            except CheckpointingException as error:
                return str(error)
        state = None if optimizer is None else optimizer.state_dict()
        values.append((chunk.state_dict(), state))
    torch.testing.assert_close(values[1], values[0], atol=0, rtol=0)
    return None if values[1][1] is None else values[1][1]["param_groups"][0]["lr"]


@pytest.mark.parametrize("trains", [0, 1])
@pytest.mark.parametrize("kind", ["torch's", "its own"])
def test_a_stage_without_an_optimizer(ranks, tmp_path: Path, trains: int, kind: str) -> None:
    """The rank that has none waited for nobody, or saved its nothing for all."""
    found = ranks(one_trains, tmp_path / "global_step_1", trains, kind, world=2)
    if (trains, kind) != (1, "its own"):
        assert found == [0.1 if rank == trains else None for rank in range(2)]
        return
    (said,) = set(found)
    assert "rank 0 has no optimizer, and that of rank 1 has a sharded_state_dict of its own" in said
    assert not list(tmp_path.iterdir())


def stepped_apart(api: Any, folder: Path, grid: tuple[int, int, int]) -> str:
    """Ranks whose optimizers have made another number of steps."""
    rank = dist.get_rank()
    chunk = Chunk(Grid(*grid), range(2 * rank, 2 * rank + 2) if grid[0] == 2 else range(2))
    optimizer = torch.optim.AdamW(chunk.parameters())
    for parameter in chunk.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(1 + 2 * rank):
        optimizer.step()
    manager = MegatronCheckpointManager(model=chunk, optimizer=optimizer, parallel_state=Grid(*grid))
    with pytest.raises(CheckpointingException) as raised:
        manager.save_checkpoint(folder, global_step=1)
    return str(raised.value)


@pytest.mark.parametrize("grid", [(2, 1, 1), (1, 1, 2)])
def test_steps_that_differ_between_ranks_are_refused(
    ranks, tmp_path: Path, grid: tuple[int, int, int]
) -> None:
    """One for all is saved: the other ranks' would come back as the first one's."""
    (said,) = set(ranks(stepped_apart, tmp_path / "global_step_1", grid, world=2))
    assert "the optimizer's step is 1.0 on rank 0, and 3.0 on rank 1: one for all is saved" in said
    assert not list(tmp_path.iterdir())


class Configuration:
    """A configuration of transformers, as far as a manager looks at it; of a model that this one is not."""

    def __init__(self, origin: Path) -> None:
        self.name_or_path = str(origin)

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "config.json").write_text(json.dumps({"model_type": "none of these"}))


def test_files_for_transformers_that_are_refused_lose_no_step(tmp_path: Path, caplog) -> None:
    """Only sharded checkpoints know this model. The small files of its own folder go along."""
    (tmp_path / "base").mkdir()
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        (tmp_path / "base" / name).write_text(json.dumps({"name": name}))
    chunk = Chunk(Alone(), range(2))  # type: ignore[arg-type]
    options = {"model": chunk, "hf_config": Configuration(tmp_path / "base"), "parallel_state": Alone()}
    contents = {"save_contents": ["model", "hf_model"]}
    manager = MegatronCheckpointManager(checkpoint_config=contents, **options)
    with caplog.at_level(logging.ERROR, "torch_dcp_backport.checkpoint"):
        manager.save_checkpoint(tmp_path / "step")
    assert "is saved without the hf_model that was asked for" in caplog.text
    assert "'none of these'" in caplog.text
    names = sorted(path.name for path in (tmp_path / "step" / "huggingface").iterdir())
    assert names == ["config.json", "generation_config.json", "tokenizer.json"]
    with torch.no_grad():
        chunk.weight1.zero_()
    loads = {"load_contents": ["model"]}
    MegatronCheckpointManager(checkpoint_config=loads, **options).load_checkpoint(tmp_path / "step")
    assert torch.equal(chunk.weight1, full(1, 0))
    with pytest.raises(ValueError, match="no hf_model: hf_config has no save_pretrained"):
        MegatronCheckpointManager(model=chunk, checkpoint_config=contents)


class Alone:
    """A process without others."""

    tp = dp = pp = 1
    places = 0, 0, 0

    def __getattr__(self, name: str) -> Any:
        return lambda **_: 1 if name.endswith("world_size") else 0
