"""Words of torch's own warnings and errors by which programs and test suites know them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optim = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optim.step()
    return model, optim


def submodules(api: Any) -> None:
    model, _ = model_and_optimizer()
    api.get_model_state_dict(model, submodules={model[0]})


def modules_as_keys(api: Any) -> None:
    model, _ = model_and_optimizer()
    api.set_model_state_dict(
        model, {model[0]: model[0].state_dict()}, options=api.StateDictOptions(strict=False)
    )


def missing_key(api: Any, **options: bool) -> None:
    model, _ = model_and_optimizer()
    state = dict(model.state_dict())
    del state["0.weight"]
    api.set_model_state_dict(model, state, options=api.StateDictOptions(**options))


def unexpected_key(api: Any, **options: bool) -> None:
    model, _ = model_and_optimizer()
    state = {**model.state_dict(), "2.weight": torch.ones(1)}
    api.set_model_state_dict(model, state, options=api.StateDictOptions(**options))


def missing_state(api: Any, **options: bool) -> None:
    model, optim = model_and_optimizer()
    state = api.get_optimizer_state_dict(model, optim)
    del state["state"]["0.weight"]
    api.set_optimizer_state_dict(model, optim, state, options=api.StateDictOptions(**options))


def broadcast_alone(api: Any) -> None:
    model, _ = model_and_optimizer()
    api.set_model_state_dict(model, {}, options=api.StateDictOptions(broadcast_from_rank0=True))


def flat_parameter(api: Any) -> None:
    model, _ = model_and_optimizer()
    api.set_model_state_dict(model, {"_flat_param": torch.ones(1)})


#: What begins a warning: warnings.filterwarnings() matches from the start.
WARNINGS: dict[Callable[..., None], str] = {
    submodules: "Getting submodules only model/optim state_dict is deprecated",
    modules_as_keys: "Passing model_state_dict as a ``Dict[nn.Module, Dict[str, Any]]``",
}
#: What stands in an error: ours is a list of all problems, with the ranks that have them.
ERRORS: dict[Callable[..., None], tuple[type[Exception], str]] = {
    missing_key: (RuntimeError, "Missing key"),
    unexpected_key: (RuntimeError, "Unexpected key"),
    missing_state: (RuntimeError, "Missing optimizer state"),
    broadcast_alone: (ValueError, "full_state_dict must be True when broadcast_from_rank0 is True."),
    flat_parameter: (RuntimeError, "contains _flat_param"),
}


def warned(api: Any, call: str) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        globals()[call](api)
    return next(str(one.message) for one in caught if one.category is FutureWarning)


def raised(api: Any, call: str, options: dict[str, bool]) -> tuple[str, str]:
    try:
        globals()[call](api, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("call", WARNINGS, ids=lambda call: call.__name__)
def test_a_warning_begins_with_torchs_own_words(ranks, call):
    (text,) = ranks(warned, call.__name__, world=0)
    assert text.startswith(WARNINGS[call])


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("call", ERRORS, ids=lambda call: call.__name__)
def test_an_error_has_torchs_own_words(ranks, call, full):
    kind, words = ERRORS[call]
    options = {"full_state_dict": True} if full else {}
    if call in (broadcast_alone, flat_parameter):
        options = {}
    ((name, text),) = ranks(raised, call.__name__, options, world=0)
    assert name == kind.__name__
    assert words in text
