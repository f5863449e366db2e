"""Common states that differ between ranks: told by their paths, or refused; the first rank's is saved."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from heard import heard

from torch_dcp_backport.dist_checkpointing import CheckpointingException, ShardedTensor, load, save
from torch_dcp_backport.dist_checkpointing._src import common


def told(folder: Path, state: dict[str, Any], **options: Any) -> list[str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = ShardedTensor.from_rank_offsets("rows", torch.ones(2, 3), (0, rank, world))
    with heard("dist_checkpointing") as texts:
        try:
            save({**state, "rows": rows}, folder, **options)
        except CheckpointingException as error:
            texts.append(str(error))
    return texts


def state_of(rank: int) -> dict[str, Any]:
    args = Namespace(seed=1, rank=rank)
    return {"args": args, "groups": [{"lr": 0.1}, {"lr": 0.1 * (1 + rank)}], "t": torch.arange(3) + rank}


def alone(state: dict[str, Any]) -> dict[str, Any]:
    return {"args": Namespace(seed=state["args"].seed)}


def differing(api: Any, folder: Path) -> dict[str, list[str]]:
    rank = dist.get_rank()
    texts = {
        "refused": told(folder, state_of(rank), strict_common=True),
        "unchecked and refused": told(
            folder, state_of(rank), strict_common=True, validate_access_integrity=False
        ),
    }
    assert not list(folder.iterdir())
    texts["warned"] = told(folder, state_of(rank))
    loaded = load({"rows": ShardedTensor.from_rank_offsets("rows", torch.zeros(2, 3), (0, rank, 3))}, folder)
    assert loaded["args"].rank == 0
    assert loaded["groups"][1]["lr"] == 0.1
    preprocess = {"preprocess_common_before_consistancy_check": alone}
    texts["preprocessed"] = told(folder, state_of(rank), strict_common=True, **preprocess)
    texts["alike"] = told(folder, state_of(0), strict_common=True)
    texts["unchecked"] = told(folder, state_of(rank), validate_access_integrity=False)
    texts["one has more"] = told(folder, {**state_of(0), **({"more": 1} if rank == 2 else {})})
    return texts


def test_what_differs_is_named_or_refused(ranks: Any, tmp_path: Path) -> None:
    first, *others = ranks(differing, tmp_path, world=3)
    for name in ("refused", "unchecked and refused"):
        (text,) = first[name]
        assert all(other[name] == [text] for other in others)
        assert "6 problem(s), nothing was changed" in text
        assert "rank 2: another common value: args.rank (expected 0 as rank 0, got 2)" in text
        assert "groups.1.lr" in text
        assert "groups.0.lr" not in text
        assert "tensor([1, 2, 3])" in text
    assert len(first["warned"]) == 6
    assert "rank 1: another common value: args.rank (expected 0 as rank 0, got 1)" in first["warned"][0]
    assert len(first["one has more"]) == 1
    assert (
        "rank 2: another common value: more (expected nothing as rank 0, got 1)" in first["one has more"][0]
    )
    assert not any(first[name] for name in ("preprocessed", "alike", "unchecked"))
    # Megatron's sentence stands in the log of the rank that differs.
    for rank, other in enumerate(others, 1):
        (text,) = other["warned"]
        assert text.startswith(
            f"Rank {rank} common state dict differs from rank 0 common state dict. Keys only"
        )
        assert "(('args', 'rank'), <class 'int'>, <class 'int'>)" in text
        assert "<class 'torch.Tensor'>" in text
    keys = "Keys only on rank 0: [], Keys only on 2: [('more',)], Mismatched keys: []"
    assert [other["one has more"] for other in others] == [
        [],
        [f"Rank 2 common state dict differs from rank 0 common state dict. {keys}"],
    ]


def test_what_is_compared_may_be_changed_and_all_is_saved(tmp_path: Path) -> None:
    """By the caller's function: the values that it takes out are none that ranks compare, and are saved."""

    def without_its_own(state: dict[str, Any]) -> dict[str, Any]:
        del state["args"]["rank"]
        state["groups"].clear()
        return state

    state = {"args": {"seed": 1, "rank": 0}, "groups": [{"lr": 0.1}]}
    save(state, tmp_path, preprocess_common_before_consistancy_check=without_its_own)
    assert load({}, tmp_path) == state == {"args": {"seed": 1, "rank": 0}, "groups": [{"lr": 0.1}]}


class Odd:
    """Equal to its like, with other bytes each time."""

    count = 0

    def __init__(self) -> None:
        Odd.count += 1
        self.number = Odd.count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd)

    __hash__ = object.__hash__


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (Odd(), Odd(), True),
        (float("nan"), float("nan"), True),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        (1, True, False),
        (1, 1.0, False),
        ([1, 2], [1], False),
        ([], None, False),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
        (torch.ones(9)[2:4], torch.ones(2), True),
        (torch.zeros(10**5), torch.zeros(10**5), True),
        (torch.zeros(10**5), torch.ones(10**5), False),
        ((torch.zeros(2), 1), (torch.zeros(2), 1), True),
        ((torch.zeros(2), 1), (torch.zeros(2), 2), False),
        (torch.zeros(2, 1), torch.zeros(1, 2), False),
        (torch.tensor(1.5), torch.tensor(1.5), True),
        (torch.zeros(2, 0), torch.zeros(2, 0), True),
        (torch.zeros(2, dtype=torch.bool), torch.zeros(2, dtype=torch.bool), True),
        (lambda: 0, lambda: 0, True),
        (lambda: 0, 5, False),
    ],
)
def test_what_is_the_same(one: Any, other: Any, is_same: bool) -> None:
    said = {rank: common.values_of({"x": value}) for rank, value in enumerate((one, other))}
    assert (common.findings_of(said) == []) == is_same
    assert common.digest_of(said[0]) != common.digest_of(said[1]) or is_same


def test_a_part_of_itself_has_an_end() -> None:
    args = Namespace(seed=1)
    args.me = [args, args]
    assert list(common.values_of({"args": args})) == [("args", "seed")]


def test_many_differences_are_counted() -> None:
    said = {rank: common.values_of([rank] * 20) for rank in range(2)}
    *named, rest = common.findings_of(said)
    assert len(named) == common.MOST
    assert rest[1].what == "12 more common values differ"
