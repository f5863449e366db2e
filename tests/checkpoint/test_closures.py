"""Optimizers whose step needs a closure, or whose states grow: their steps resume in a fresh process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import on_ranks
from test_ranks import fully_shard
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_dcp_backport.checkpoint import CheckpointHandler, FSDPCheckpointManager
from torch_dcp_backport.dist_checkpointing.training_state import load_training_state, save_training_state


class SAM(torch.optim.SGD):
    """Needs two gradients in a step."""

    def step(self, closure: Any = None) -> None:
        assert closure is not None, "SAM needs a closure"
        closure()
        super().step()


class Growing(torch.optim.Optimizer):
    """Its states have another form after each step: a list that grows, a tensor that does, a dict."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Callable[[], Any]) -> None:
        closure()
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["past"] = [*state.get("past", []), param.grad.clone()]
                state["losses"] = torch.ones(len(state["past"]))
                state["table"] = {"left": torch.full((2,), 3.0), "rank": 4}
                state["spare"] = None if len(state["past"]) > 2 else torch.zeros(1)
                with torch.no_grad():
                    param -= group["lr"] * sum(state["past"])


class Odd(torch.optim.Optimizer):
    """Its states are nested, under keys of all kinds; some are a tensor at first and something else later."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, grad = self.state[param], param.grad.clone()
                step = state["step"] = state.get("step", 0) + 1
                state["nested"] = [*state.get("nested", []), [grad, [float(step), step, {"sum": grad.sum()}]]]
                state["digits"] = {"0": grad, "1": grad + 1, "00": torch.ones(1)}
                state["numbers"] = {0: torch.ones(2), 1: step}
                state["7"] = torch.full((3,), float(step))
                state["dotted.name"] = torch.full((2,), float(step))
                state["changes"] = torch.ones(2, 2) if step == 1 else 0.5 * step
                state["pair"] = (torch.full((2,), float(step)), step)
                if step == 1:
                    state["gone"] = torch.ones(2)
                else:
                    state.pop("gone", None)
                with torch.no_grad():
                    param -= group["lr"] * sum(part[0] for part in state["nested"])


class OddWithClosure(Odd):
    def step(self, closure: Any = None) -> None:
        assert closure is not None, "a closure is needed"
        super().step(closure)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "LBFGS": lambda params: torch.optim.LBFGS(params, history_size=5, max_iter=3),
    "full LBFGS": lambda params: torch.optim.LBFGS(params, history_size=2, line_search_fn="strong_wolfe"),
    "SAM": lambda params: SAM(params, lr=0.5, momentum=0.9),
    "Growing": Growing,
    "Odd": Odd,
    "OddWithClosure": OddWithClosure,
}


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def by_ddp() -> nn.Module:
    return DistributedDataParallel(plain())


def by_fsdp2() -> nn.Module:
    return fully_shard(plain())


class Training:
    """A model and its optimizer."""

    def __init__(self, name: str, wrap: Callable[[], nn.Module] = plain, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = wrap()
        #: A parameter without a gradient.
        self.unused: Any = None
        self.optimizer = OPTIMIZERS[name](self.model.parameters())

    def step(self, steps: int) -> list[float]:
        return [self.one_step() for _ in range(steps)]

    def one_step(self) -> float:
        """Return the sum of p**4 before a step, by hand: FSDP2 of torch 2.6 does not train on the CPU."""
        losses = []

        def closure() -> torch.Tensor:
            loss = torch.zeros(())
            for param in self.model.parameters():
                if param is self.unused:
                    continue
                param.grad = 4 * param.detach() ** 3
                loss += getattr(param, "_local_tensor", param).detach().pow(4).sum()
            losses.append(loss.item())
            return loss

        self.optimizer.step(closure)
        return losses[0]

    def handler(self, root: Path) -> CheckpointHandler:
        manager = FSDPCheckpointManager(self.model, self.optimizer)
        return CheckpointHandler(manager, default_local_dir=str(root))


@pytest.mark.parametrize("before", [0, 1, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_training_goes_on_as_the_undisturbed(tmp_path: Path, name: str, before: int) -> None:
    """Into an optimizer that made no step, fewer steps, or more than the saved one."""
    training = Training(name)
    training.step(2)
    training.handler(tmp_path).save_checkpoint(2)
    expected = training.step(3)
    resumed = Training(name, seed=1)
    resumed.step(before)
    assert resumed.handler(tmp_path).load_checkpoint() == 2
    assert resumed.step(3) == expected


# torch's own LBFGS does not step with DTensors.
@pytest.mark.parametrize(
    ("wrap", "name"),
    [(by_ddp, "SAM"), (by_ddp, "Growing"), (by_ddp, "LBFGS"), (by_fsdp2, "SAM"), (by_fsdp2, "Growing")],
)
@on_ranks(world=2)
def test_on_ranks(api: Any, tmp_path: Path, wrap: Callable[[], nn.Module], name: str) -> None:
    training = Training(name, wrap)
    training.step(2)
    training.handler(tmp_path).save_checkpoint(2)
    expected = training.step(3)
    resumed = Training(name, wrap, seed=1)
    assert resumed.handler(tmp_path).load_checkpoint() == 2
    assert resumed.step(3) == expected


def spelled(value: Any) -> Any:
    """A state with its types, keys and numbers."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {repr(key): spelled(part) for key, part in value.items()}
    return [type(value).__name__, *map(spelled, value)] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("is_by_handler", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_have_the_form_that_they_had(
    tmp_path: Path, name: str, steps: int, is_by_handler: bool
) -> None:
    """Also where a parameter never had a gradient."""
    training, resumed = Training(name), Training(name, seed=1)
    for each in (training, resumed):
        each.unused = each.model[2].bias if name == "OddWithClosure" else None
    training.step(steps)
    if is_by_handler:
        training.handler(tmp_path).save_checkpoint(1)
        resumed.handler(tmp_path).load_checkpoint()
    else:
        save_training_state(tmp_path, training.model, training.optimizer)
        more = load_training_state(tmp_path, resumed.model, resumed.optimizer)
        assert more == {}
    assert spelled(resumed.optimizer.state_dict()) == spelled(training.optimizer.state_dict())
    assert resumed.step(2) == training.step(2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_by_the_functions_of_dist_checkpointing(tmp_path: Path, name: str) -> None:
    training = Training(name)
    training.step(2)
    save_training_state(tmp_path, training.model, training.optimizer)
    expected = training.step(3)
    resumed = Training(name, seed=1)
    load_training_state(tmp_path, resumed.model, resumed.optimizer)
    assert resumed.step(3) == expected


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_save_before_the_first_step(tmp_path: Path, name: str) -> None:
    training = Training(name)
    training.handler(tmp_path).save_checkpoint(0)
    expected = training.step(3)
    resumed = Training(name, seed=1)
    assert resumed.handler(tmp_path).load_checkpoint() == 0
    assert resumed.step(3) == expected
