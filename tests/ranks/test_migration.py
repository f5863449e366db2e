"""docs/migration.md: optimizers that torch < 2.7 saved, and what they lack."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from pool import on_ranks
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migration.md"
KEY = "decoupled_weight_decay"


def planner() -> type[Any]:
    """The class as the page has it."""
    (text,) = re.findall(r"^class OlderOptimizer.*?(?=\n\n\n)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    scope: dict[str, Any] = {"dcp": dcp}
    exec(text, scope)
    return type("Planner", (scope["OlderOptimizer"],), {})


def trained(kind: str) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, weight_decay=0.3)
    # As the page says for torch < 2.7; later releases have it.
    for group in optimizer.param_groups:
        group[KEY] = isinstance(optimizer, torch.optim.AdamW)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()


def states(api: Any, model: nn.Module, optimizer: Optimizer, flat: bool) -> dict[str, Any]:
    options = api.StateDictOptions(flatten_optimizer_state_dict=flat)
    return {
        "model": model.state_dict(),
        "optim": api.get_optimizer_state_dict(model, optimizer, options=options),
    }


def older(state: dict[str, Any]) -> dict[str, Any]:
    """What torch < 2.7 saves."""
    optim = {key: value for key, value in state["optim"].items() if not key.endswith(KEY)}
    if "param_groups" in optim:
        optim["param_groups"] = [
            {key: value for key, value in group.items() if key != KEY} for group in optim["param_groups"]
        ]
    return {**state, "optim": optim}


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
@on_ranks(world=1)
def test_an_optimizer_of_an_older_torch_loads_with_the_pages_planner(
    api: Any, tmp_path: Path, kind: str, flat: bool
) -> None:
    folder = str(tmp_path / "saved")
    model, optimizer = trained(kind)
    dcp.save(older(states(api, model, optimizer, flat)), checkpoint_id=folder)
    step(model, optimizer)

    loaded, into = trained(kind)
    step(loaded, into)
    state = states(api, loaded, into, flat)
    with pytest.raises(CheckpointException, match=f"Missing key .*{KEY}"):
        dcp.load(state, checkpoint_id=folder)
    dcp.load(state, checkpoint_id=folder, planner=planner()())
    loaded.load_state_dict(state["model"])
    options = api.StateDictOptions(flatten_optimizer_state_dict=flat)
    api.set_optimizer_state_dict(loaded, into, state["optim"], options=options)
    assert into.param_groups[0][KEY] is (kind == "AdamW")
    step(loaded, into)
    assert torch.equal(loaded.weight, model.weight)

    state["model"]["more"] = torch.zeros(1)
    with pytest.raises(CheckpointException, match=r"Missing key .*model\.more"):
        dcp.load(state, checkpoint_id=folder, planner=planner()())
    # What the page says of the other way.
    dcp.load(state, checkpoint_id=folder, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))


@pytest.mark.parametrize("flat", [False, True])
@on_ranks(world=1)
def test_the_key_is_ignored_where_none_asks_for_it(api: Any, tmp_path: Path, flat: bool) -> None:
    """A checkpoint that has the key loads where none asks for it, as torch < 2.7 does not."""
    folder = str(tmp_path / "saved")
    model, optimizer = trained("AdamW")
    dcp.save(states(api, model, optimizer, flat), checkpoint_id=folder)
    assert any(key.endswith(KEY) for key in dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)
    step(model, optimizer)
    state = older(states(api, model, optimizer, flat))
    dcp.load(state, checkpoint_id=folder)
    again = states(api, *trained("AdamW"), flat)
    assert torch.equal(state["model"]["weight"], again["model"]["weight"])


@on_ranks(world=1)
def test_a_flat_optimizer_from_a_file_loads(api: Any, tmp_path: Path) -> None:
    options = api.StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = trained("AdamW")
    saved = copy.deepcopy(older(states(api, model, optimizer, True))["optim"])
    step(model, optimizer)
    loaded, into = trained("AdamW")
    step(loaded, into)
    loaded.load_state_dict(trained("AdamW")[0].state_dict())
    state = {**api.get_optimizer_state_dict(loaded, into, options=options), **saved}
    api.set_optimizer_state_dict(loaded, into, state, options=options)
    step(loaded, into)
    assert torch.equal(loaded.weight, model.weight)
