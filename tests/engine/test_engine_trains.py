"""Training on every mesh is the training of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cpu_fsdp
import pytest
import small

MESHES = {"one copy": -1, "replicas of shards": 2, "replicas": 1}


def run(api: Any, folder: Path, optimizer: str, options: dict[str, Any]) -> dict[str, Any]:
    return small.trained(small.made(folder, optimizer, **options))


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("mesh", MESHES)
def test_it_is_the_training_of_one_process(ranks, tmp_path: Path, mesh: str, optimizer: str) -> None:
    small.write(tmp_path / "m")
    expected = small.alone(optimizer)
    for found in ranks(run, tmp_path / "m", optimizer, {"fsdp_size": MESHES[mesh]}):
        small.same(found, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_sync": "last"},
        {"gradient_sync": "last", "fsdp_size": 2},
        {"max_token_len_per_gpu": 24},
        {"reshard_after_forward": False},
        {"offload_policy": True},
        {"param_offload": True, "optimizer_offload": True},
        {"untied": True},
    ],
    ids=str,
)
def test_however_it_is_spread_cut_and_kept(ranks, tmp_path: Path, options: dict[str, Any]) -> None:
    untied = "untied" in options
    small.write(tmp_path / "m", not untied)
    expected = small.alone(is_tied=not untied)
    for found in ranks(run, tmp_path / "m", "SGD", options):
        small.same(found, expected)


@pytest.mark.parametrize(
    "options",
    [{}, {"fsdp_size": 1}, {"gradient_sync": "last", "fsdp_size": 2}, {"offload_policy": True}],
    ids=str,
)
def test_what_is_frozen_stays_as_it_is(ranks, tmp_path: Path, options: dict[str, Any]) -> None:
    small.write(tmp_path / "m", is_tied=False)
    expected = small.alone("AdamW", is_tied=False, is_frozen=True)
    begun = dict(small.model(is_tied=False).named_parameters())
    options = {"untied": True, "frozen": True, **options}
    for found in ranks(run, tmp_path / "m", "AdamW", options):
        small.same(found, expected)
        assert found["weights"]["embed.weight"].equal(begun["embed.weight"])
        assert not found["weights"]["head.weight"].equal(begun["head.weight"])


def natively(api: Any, folder: Path) -> tuple[dict[str, Any], float]:
    made = small.made(folder, average=False)
    return small.trained(made), made.scale


@pytest.mark.parametrize("world", [2, 4])
def test_gradients_are_means_whatever_the_backend_makes_of_an_average(pools, tmp_path, world) -> None:
    """Of SGD: AdamW divides by the size of gradients, and would hide a factor."""
    small.write(tmp_path / "m")
    expected = small.alone()
    for found, scale in pools.run(natively, tmp_path / "m", world=world):
        small.same(found, expected)
        if cpu_fsdp.RELEASE < (2, 8):
            assert scale == 1 / world
        if cpu_fsdp.RELEASE >= (2, 13):
            assert scale == 1
