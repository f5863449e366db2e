"""Ranks that fail, die or stay away during a transfer: the others say so within the group's timeout."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import build, full_state, fully_shard
from pool import OURS, Pool, RankError
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torch_dcp_backport import transfer
from torch_dcp_backport.state_dict import load
from torch_dcp_backport.transfer.staging import Staging

TIMEOUT = 2.0


@pytest.fixture
def pool() -> Iterator[Pool]:
    """A fresh one for every test: no group is whole afterwards."""
    pool = Pool(4, OURS, timeout=TIMEOUT, limit=40.0)
    yield pool
    pool.close()


def die() -> None:
    os._exit(7)


def fail() -> None:
    raise KeyError("a fault")


FAULTS: dict[str, Callable[[], None]] = {"dies": die, "fails": fail}


def faulty(api: Any, call: str, where: str, rank: int, fault: str, folder: str) -> None:
    """`rank` has the fault when it packs or unpacks its second chunk; the others' errors go into `folder`."""
    model = build()
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state = full_state()
    api.set_model_state_dict(model, state if dist.get_rank() == 0 else {}, options=options)
    real, calls = getattr(Staging, where), []

    def spy(self: Staging, *args: Any) -> None:
        calls.append(1)
        if dist.get_rank() == rank and len(calls) == 2:
            FAULTS[fault]()
        real(self, *args)

    setattr(Staging, where, spy)
    transfer.configure(staging_bytes=7 * 256)
    began = time.monotonic()
    try:
        if call == "load":
            api.set_model_state_dict(model, state if dist.get_rank() == 0 else {}, options=options)
        else:
            options = api.StateDictOptions(full_state_dict=True, cpu_offload=True)
            api.get_model_state_dict(model, options=options)
        text = "no error"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    finally:
        setattr(Staging, where, real)
        transfer.configure()
    Path(folder, str(dist.get_rank())).write_text(f"{time.monotonic() - began:.1f} {text}")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("call", "where", "rank", "living"),
    [
        ("load", "unpack", 2, r"broken off while (sending to|receiving from) rank \d"),
        ("load", "pack", 0, r"broken off while (sending to|receiving from) rank \d"),
        ("save", "pack", 3, r"broken off while (sending to|receiving from) rank \d"),
        ("save", "unpack", 0, r"broken off while sending to rank 0"),
    ],
)
def test_a_rank_with_a_fault_ends_the_transfer_of_those_that_need_it(
    pool, tmp_path, call, where, rank, fault, living
):
    if fault == "dies":
        with pytest.raises(RankError, match=f"the process of rank {rank} died"):
            pool.run(faulty, call, where, rank, fault, str(tmp_path))
    else:
        pool.run(faulty, call, where, rank, fault, str(tmp_path))
    texts = {path.name: path.read_text().partition(" ") for path in tmp_path.iterdir()}
    assert len(texts) == 4 - (fault == "dies")
    errors = {name: text for name, (_, _, text) in texts.items() if text != "no error"}
    assert all(float(seconds) < 5 * TIMEOUT for seconds, _, _ in texts.values())
    if fault == "fails":
        assert "a fault" in errors.pop(str(rank))
    # Whoever had all that it needs before may be done; whoever waits for the faulty rank is not.
    waiting = set(map(str, range(4))) if rank == 0 else {"0"}
    assert waiting - {str(rank)} <= set(errors)
    for name, text in errors.items():
        title = "cannot load this model state dict" if call == "load" else "cannot gather"
        assert text.startswith(f"TransferError: {title}: broken off while"), text
        if name in waiting:
            assert re.search(living, text), text
        if call == "load":
            assert f"rank {name} wrote" in text


def snapshot(model: nn.Module) -> list[Any]:
    return [getattr(value, "_local_tensor", value).tolist() for value in model.state_dict().values()]


def stays_away(api: Any, absent: int) -> str:
    if dist.get_rank() == absent:
        time.sleep(2 * TIMEOUT)
        return ""
    model = build()
    before = snapshot(model)
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with pytest.raises(transfer.TransferError) as caught:
        api.set_model_state_dict(model, full_state() if dist.get_rank() == 0 else {}, options=options)
    assert snapshot(model) == before
    return str(caught.value)


@pytest.mark.parametrize("absent", [0, 3])
def test_a_rank_that_does_not_call_is_missed_before_anything_is_written(pool, absent):
    texts = pool.run(stays_away, absent)
    for rank, text in enumerate(texts):
        if rank != absent:
            assert text.startswith("nothing was changed; "), text
    if absent == 3:
        assert "no agreement with ranks 1-3" in texts[0]


def no_memory(api: Any, where: str, rank: int) -> tuple[str, Any]:
    """`rank` finds no memory for whole tensors or shards, or for staging buffers above 2 MiB."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    state = {key: torch.full((512, 512), 2.0) for key in model.state_dict()}
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    real = Staging.__init__

    def short(self: Staging, device: torch.device, nbytes: int) -> None:
        if where == "staging" and dist.get_rank() == rank and nbytes > limit:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        real(self, device, nbytes)

    limit = 2 * 2**20

    def none(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    Staging.__init__ = short
    if where == "shards" and dist.get_rank() == rank:
        load.torch = SimpleNamespace(**{**vars(torch), "empty": none})
    try:
        api.set_model_state_dict(model, state if dist.get_rank() == 0 else {}, options=options)
        return "", transfer.last_report()
    except RuntimeError as error:
        assert all(parameter.is_meta for parameter in model.parameters())
        return str(error), None
    finally:
        Staging.__init__ = real
        load.torch = torch
        dist.barrier()  # the group is whole


def test_a_rank_without_room_for_its_buffers_gets_smaller_ones(ranks):
    for text, report in ranks(no_memory, "staging", 0):
        assert not text
        assert 0 < report.staging_bytes <= 2 * 2**20
        assert 2**20 <= report.staging_budget < 64 * 2**20


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_without_room_for_its_shards_is_an_error_on_every_rank(ranks, rank):
    texts = {text for text, _ in ranks(no_memory, "shards", rank)}
    assert len(texts) == 1
    (text,) = texts
    assert text.startswith("cannot load this model state dict: 1 problem(s), nothing was changed.")
    assert f"rank {rank}: could not allocate: what is loaded (DefaultCPUAllocator" in text
