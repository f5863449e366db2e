"""A value that cannot be saved, or would not come back, is named by its keys, on every rank."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks

from torch_dcp_backport.dist_checkpointing import (
    CheckpointingException,
    ShardedObject,
    ShardedTensor,
    load,
    save,
)


def part(value: float) -> ShardedTensor:
    replica = dist.get_rank() if dist.is_initialized() else 0
    return ShardedTensor.from_rank_offsets("w", torch.full((2,), value), replica_id=replica)


def cycle() -> Any:
    value: dict[str, Any] = {"left": 1}
    value["self"] = value
    return value


def ring() -> Any:
    value: list[Any] = [1]
    value.append([value])
    return value


def nested(make: Callable[[Any], Any], depth: int = 600) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = make(value)
    return value


DEEP: dict[str, tuple[Callable[[], Any], str]] = {
    "cycle": (cycle, r"x\.cycle\.self has itself in it"),
    "ring": (ring, r"x\.ring\.1\.0 has itself in it"),
    "dicts": (lambda: nested(lambda part: {"a": part}), r"x\.dicts\.a\.a\.a\.a \.\.\. is nested 60\d deep"),
    "lists": (lambda: nested(lambda part: [part]), r"x\.lists\.0\.0\.0\.0 \.\.\. is nested 60\d deep"),
    "tuples": (lambda: nested(lambda part: (part,)), r"x\.tuples\.0\.0\.0\.0 \.\.\. is nested 60\d deep"),
    "namespaces": (lambda: nested(lambda part: argparse.Namespace(a=part)), r"x\.namespaces\.a.* is nested"),
}


@pytest.mark.parametrize("name", DEEP)
@on_ranks(world=2)
def test_a_value_that_ends_the_stack(api: Any, tmp_path: Path, name: str) -> None:
    """On one rank alone: the other gets the same error."""
    make, text = DEEP[name]
    values = {name: make() if dist.get_rank() == 0 else 1}
    with pytest.raises(CheckpointingException, match=text):
        save({"w": part(1), "x": values}, tmp_path)
    assert not any(path.name == "metadata.json" for path in tmp_path.iterdir())


def test_an_object_that_ends_the_stack(tmp_path: Path) -> None:
    with pytest.raises(CheckpointingException, match=r"0\.a\.a\.a.* is nested 60\d deep"):
        save({"o": ShardedObject("o", nested(lambda part: {"a": part}), (1,), (0,))}, tmp_path)


def test_a_value_that_cannot_be_pickled(tmp_path: Path) -> None:
    with pytest.raises(CheckpointingException, match=re.escape("x.1.function: ")):
        save({"w": part(1), "x": [0, {"function": lambda: 1}]}, tmp_path)


@pytest.mark.parametrize("value", [int, len, Path, argparse.Namespace.__init__])
def test_a_value_that_loads_with_trust_alone(tmp_path: Path, caplog, value: Any) -> None:
    with caplog.at_level(logging.WARNING):
        save({"w": part(1), "x": [0, {"kind": value}]}, tmp_path)
    assert "the common state will not load as it is: x.1.kind: it has " in caplog.text
    assert load({"w": part(0)}, tmp_path, trust=True)["x"][1]["kind"] == value


@on_ranks(world=2)
def test_a_plain_tensor_of_a_load(api: Any, tmp_path: Path) -> None:
    """It was left out without a word: the caller's own code met a KeyError."""
    save({"w": part(1), "in common": {"mean": torch.ones(3)}}, tmp_path)
    mine = torch.zeros(2)
    for state, name in (
        ({"w": mine}, "w"),
        ({"model": {"w": mine}}, "model.w"),
        ({"a": [{"w": mine}]}, "a.0.w"),
    ):
        with pytest.raises(CheckpointingException) as caught:
            load(state, tmp_path)
        text = str(caught.value)
        expected = "(expected one of (2,) for the key w, got a plain tensor of shape (2,))"
        assert f"ranks 0-1: not a ShardedTensor: {name} {expected}" in text
    assert mine.tolist() == [0, 0]
    # What stands where the common state has a value, gets that.
    loaded = load({"w": part(0), "in common": {"mean": torch.zeros(3)}}, tmp_path)
    assert loaded["in common"]["mean"].tolist() == [1, 1, 1]


def test_a_plain_tensor_that_the_checkpoint_does_not_know_is_named(tmp_path: Path, caplog) -> None:
    save({"w": part(1)}, tmp_path)
    with caplog.at_level(logging.WARNING):
        assert load({"w": part(0), "own": [torch.zeros(1)]}, tmp_path).keys() == {"w"}
    assert "not in the checkpoint, and left out of what is loaded: own.0" in caplog.text
