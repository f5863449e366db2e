"""`set(get())` into a fresh copy restores everything bit for bit, whatever was trained and asked for."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
from models import fully_shard, local_of
from optimizers import WAYS, WRAPPERS, frozen, held, options_of, step, weights
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

CASES = 16

#: name -> settings; a name may stand for a class with a suffix.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "ASGD": {},
    "Adadelta": {"weight_decay": 0.5},
    "Adagrad": {},
    "Adam": {"weight_decay": 0.5, "amsgrad": True, "betas": (0.5, 0.75)},
    "AdamW": {},
    "AdamW tensor": {"lr": torch.tensor(0.01), "foreach": False},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Rprop": {},
    "SGD": {},
    "SGD momentum": {"momentum": 0.5, "weight_decay": 0.5},
    "SGD dampening": {"momentum": 0.5, "dampening": 0.25},
    "Own": {},
}
#: torch's step takes no DTensors in every release.
NOT_SHARDED = ("Rprop",)
#: torch's load_state_dict() gives scalars other than "step" the dtype of the parameter.
NOT_BFLOAT16 = ("ASGD", "NAdam", "Own")
#: Of these a parameter without states is given with first states.
NEUTRAL = ("Adadelta", "Adam", "AdamW", "AdamW tensor", "Adamax", "RAdam", "RMSprop")


class Own(torch.optim.Optimizer):
    """Not torch's: nested states, a counter that starts at 1, and states that grow with the steps."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "pair": (0.5, 0.25)})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state.update(
                        step=1, factors={0: {"left": torch.zeros_like(param)}}, losses=torch.zeros(1)
                    )
                state["step"] += 1
                state["factors"][0]["left"].add_(param.grad)
                state["losses"] = torch.cat([state["losses"], torch.ones(1)])
                param.data.add_(state["factors"][0]["left"], alpha=-group["lr"])


class Case(NamedTuple):
    """One drawn case; the same seed draws the same on every rank."""

    seed: int
    wrapper: str
    way: str
    dtype: torch.dtype
    tied: bool
    optimizers: tuple[str, ...]
    steps: int


class Drawn(nn.Module):
    """Modules of drawn kinds and sizes; some are one row, one column or empty."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        draw = random.Random(case.seed)
        self.embed = nn.Embedding(draw.randint(1, 9), 4)
        self.parts = nn.ModuleList()
        for _ in range(draw.randint(1, 4)):
            kind = draw.choice(["linear", "norm", "lonely"])
            if kind == "linear":
                part: nn.Module = nn.Linear(draw.randint(1, 5), draw.randint(1, 9), bias=draw.random() < 0.5)
            elif kind == "norm":
                part = nn.BatchNorm1d(draw.randint(1, 5))
            else:
                part = nn.ParameterDict(
                    {"w": nn.Parameter(torch.zeros(draw.choice([(3,), (0, 3), (1, 2, 3)])))}
                )
            self.parts.append(part)
        self.head = nn.Linear(4, self.embed.num_embeddings, bias=False)
        if case.tied:
            self.head.weight = self.embed.weight
        for param in self.parts.parameters():
            param.requires_grad_(draw.random() < 0.8)
        self.to(case.dtype)


def drawn(seed: int) -> Case:
    draw = random.Random(1_000_003 * (seed + 1))
    wrapper = draw.choice(WRAPPERS)
    dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16])
    without = (
        *(NOT_SHARDED if wrapper == "fsdp2" else ()),
        *(NOT_BFLOAT16 if dtype is torch.bfloat16 else ()),
    )
    kinds = [name for name in OPTIMIZERS if name not in without]
    return Case(
        seed,
        wrapper,
        draw.choice(WAYS),
        dtype,
        draw.random() < 0.25,
        tuple(draw.choice(kinds) for _ in range(draw.choice([1, 1, 2]))),
        draw.choice([0, 1, 2, 3]),
    )


def made(case: Case, salt: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    torch.manual_seed(salt)
    model: nn.Module = Drawn(case)
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.copy_(torch.rand(value.shape) * 4)
    if case.wrapper == "ddp":
        model = DistributedDataParallel(model)
    elif case.wrapper == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    draw = random.Random(case.seed)
    # A frozen parameter may be in an optimizer all the same.
    params = [param for param in model.parameters() if param.requires_grad or draw.random() < 0.5]
    draw.shuffle(params)
    cut = draw.randint(1, len(params) - 1) if len(case.optimizers) == 2 and len(params) > 1 else len(params)
    optims = []
    for name, mine in zip(case.optimizers, (params[:cut], params[cut:])):
        if not mine:
            continue
        settings = {**({} if "tensor" in name else {"lr": 0.01}), **OPTIMIZERS[name]}
        split = draw.randint(0, len(mine) - 1)
        groups = [{"params": part} for part in (mine[:split], mine[split:]) if part]
        kind = Own if name == "Own" else getattr(torch.optim, name.partition(" ")[0])
        optims.append(kind(groups, **settings))
    return model, optims


def train(case: Case, model: nn.Module, optims: list[torch.optim.Optimizer]) -> None:
    """Some steps, each with gradients of some parameters; schedulers and users change settings too."""
    draw = random.Random(case.seed)
    names = [name for name, _ in model.named_parameters()]
    for number in range(case.steps):
        used = {name for name in names if draw.random() < 0.6}
        for optim in optims:
            step(model, optim, str(number), only=used.__contains__)
    for index, optim in enumerate(optims):
        for group in optim.param_groups:
            group["lr"] = group["lr"] * 0.5 + index
            if not case.way.endswith("flat"):
                group["initial_lr"] = 0.125


def without_first_states(name: str, optim: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer holds, with None for states that say as much as none."""
    found = held(optim)
    if name in NEUTRAL:
        found["state"] = [
            None if states and states["step"] == frozen(torch.tensor(0.0)) else states
            for states in found["state"]
        ]
    return found


def buffers(model: nn.Module) -> Any:
    return [value.tolist() for value in model.buffers()]


def everything(case: Case, model: nn.Module, optims: list[torch.optim.Optimizer]) -> Any:
    return (
        weights(model),
        buffers(model),
        [without_first_states(name, optim) for name, optim in zip(case.optimizers, optims)],
    )


def restore(api: Any, case: Case) -> None:
    model, optims = made(case, salt=1)
    train(case, model, optims)
    before, used = everything(case, model, optims), [bool(optim.state) for optim in optims]
    model_state, optim_state = api.get_state_dict(model, optims, options=options_of(api, case.way, get=True))
    after = everything(case, model, optims)
    assert after[:2] == before[:2], "get changed the model"
    for was_used, mine, its in zip(used, after[2], before[2]):
        # It leaves first states in an optimizer that was never used.
        assert mine == its or not was_used, "get changed an optimizer"
    before = after
    copy, fresh = made(case, salt=2)
    api.set_state_dict(
        copy,
        fresh,
        model_state_dict=model_state,
        optim_state_dict=optim_state,
        options=options_of(api, case.way, get=False),
    )
    assert everything(case, model, optims) == before, "set changed what was saved"
    assert everything(case, copy, fresh) == before, "not restored"
    for mine, its in zip(copy.parameters(), model.parameters()):
        assert mine.requires_grad == its.requires_grad
        # In the forms that share nothing by design (torch gives shards, and loads them, as they are).
        if case.way.startswith("rank0"):
            assert local_of(mine).data_ptr() != local_of(its).data_ptr() or not local_of(mine).numel()
    if case.way.startswith("rank0"):
        for number, optim in enumerate(optims):
            step(model, optim, "on")
            step(copy, fresh[number], "on")
        assert everything(case, copy, fresh) == everything(case, model, optims), "trains on differently"


def restore_all(api: Any, seeds: list[int]) -> None:
    for seed in seeds:
        case = drawn(seed)
        try:
            restore(api, case)
        except BaseException as error:
            raise AssertionError(f"{case}") from error


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("start", range(0, 8 * CASES, CASES))
def test_set_of_get_restores_everything(ranks, start, world):
    ranks(restore_all, list(range(start * 2 + (world == 4), (start + CASES) * 2, 2)), world=world)
