"""The registry of scenarios, and how one runs on a rank.

A scenario is a function of the API module and of its row's arguments; it returns what a user sees.
"""

from __future__ import annotations

import importlib
import time
import warnings
import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from canonical import canonical
from pool import send_values

#: Modules that hold scenarios.
CASES = ("cases_model", "cases_optim", "cases_special", "cases_hooks", "cases_states", "cases_dcp")
PUBLIC = (
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
)


class Scenario(NamedTuple):
    group: str
    name: str
    world: int
    function: Callable[..., Any]
    arguments: dict[str, Any]

    @property
    def key(self) -> str:
        return f"{self.group}/{self.name}"


TABLE: dict[str, Scenario] = {}


def scenario(
    group: str, rows: Iterable[dict[str, Any]] = ({},), world: int = 4
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function, once per row of arguments; a row's "world" goes before `world`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for row in rows:
            arguments = {key: value for key, value in row.items() if key != "world"}
            words = [function.__name__, *(spell(key, value) for key, value in arguments.items())]
            ranks = row.get("world", world)
            if ranks != 4:
                words.append(f"{ranks} rank{'s' * (ranks > 1)}" if ranks else "no process group")
            one = Scenario(group, " ".join(words), ranks, function, arguments)
            assert one.key not in TABLE, one.key
            TABLE[one.key] = one
        return function

    return register


def spell(key: str, value: Any) -> str:
    if value is True:
        return key
    if isinstance(value, dict):
        return "+".join(f"{name}" if one is True else f"{name}={one}" for name, one in value.items()) or "-"
    return str(value)


def all_scenarios() -> dict[str, Scenario]:
    for name in CASES:
        importlib.import_module(name)
    return TABLE


class Watched:
    """The API module, with the warnings that its public functions give to their caller."""

    def __init__(self, api: Any) -> None:
        self.api = api
        self.warned: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.api, name)
        if name not in PUBLIC:
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    return value(*args, **kwargs)
                finally:
                    # Of the many that torch gives, those about the call.
                    self.warned |= {
                        one.category.__name__
                        for one in caught
                        if one.category is FutureWarning
                        and "deprecated" in str(one.message)
                        and "module" in str(one.message).lower()
                    }

        return call


def execute(api: Any, key: str, timeout: float) -> dict[str, Any]:
    """Run one scenario on this rank, whose collectives give up after `timeout` seconds.

    Never raises: an error is a result. In half of the scenarios small values travel with their inventory.
    """
    one = all_scenarios()[key]
    send_values(with_inventory=zlib.crc32(key.encode()) % 2 == 0)
    watched = Watched(api)
    torch.manual_seed(0)
    start = time.monotonic()
    result: dict[str, Any]
    try:
        result = {"value": canonical(one.function(watched, **one.arguments))}
    except Exception as error:
        result = {"error": type(error).__name__, "text": str(error)[:2000]}
    if watched.warned:
        result["warnings"] = sorted(watched.warned)
    if "error" in result and time.monotonic() - start > timeout - 1:
        result["error"] = "(hang)"
    return result


def warm_up(api: Any) -> None:
    """What takes seconds the first time, before a collective waits for it."""
    import torch._dynamo

    all_scenarios()
    torch.compile(torch.nn.Linear(1, 1), backend="eager")


def in_step(api: Any, number: int) -> bool:
    """Whether all ranks are at the same place after a scenario."""
    if not dist.is_initialized():
        return True
    try:
        mark = torch.tensor([number, -number])
        dist.all_reduce(mark, op=dist.ReduceOp.MAX)
        return mark.tolist() == [number, -number]
    except Exception:
        return False
