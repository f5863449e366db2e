"""torch's own groups for dry runs and tests: one process as any rank of a world, and ranks as threads."""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import two_dim_support
from models import Model, build, full_state, local_of
from optimizers import held, load, saved, step
from pool import on_ranks
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

WORLD = 4


class Large(Model):
    """More than a transfer begins without asking whether every rank has the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(600, 601)


def apart(call: Callable[[], None]) -> None:
    """Run a function in a process of its own: torch's caches keep the groups of a world that is gone."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        text = ""
        try:
            device_mesh.new_group = dist.new_group  # the pool's finds its groups again
            call()
        except BaseException:
            text = traceback.format_exc()
        os.write(writer, text[-20_000:].encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    assert not text, text
    assert status == 0, f"the process ended with {status}"


def as_rank(rank: int, call: Callable[[], None]) -> None:
    """Run a function as one rank of a world without the others."""

    def run() -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
        call()

    apart(run)


def in_threads(call: Callable[[], None], world: int) -> None:
    """Run a function on ranks that are threads, as torch's MultiThreadedTestCase does."""
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    store, errors = dist.HashStore(), {}

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", store=store, rank=rank, world_size=world)
            call()
        except BaseException as error:
            errors[rank] = traceback.format_exc()
            threaded.ProcessLocalGroup.exception_handle(error)

    def start() -> None:
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        threaded._install_threaded_pg()
        # The first use of torch's threads after a fork makes their pool anew, which two must not do at once:
        # https://github.com/pytorch/pytorch/blob/v2.6.0/caffe2/utils/threadpool/pthreadpool-cpp.cc
        torch.set_num_threads(1)
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, "\n".join(errors.values())

    apart(start)


def made(kind: str, device: str = "cpu", model: type[nn.Module] = Model) -> nn.Module:
    if kind == "plain":
        with torch.device(device):
            return model()
    if kind == "ddp":
        return DistributedDataParallel(model())
    size = dist.get_world_size()
    mesh = None
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    return build(device, mesh=mesh, kind=model)


def part_of(value: Any, whole: torch.Tensor) -> torch.Tensor:
    """A rank's part of a whole tensor, where the last dimension of the mesh shards rows."""
    if not hasattr(value, "_local_tensor"):
        return whole
    mesh = value.device_mesh
    parts = torch.chunk(whole, mesh.size(mesh.ndim - 1))
    place = mesh.get_coordinate()[-1]
    return parts[place] if place < len(parts) else whole[:0]


def options(api: Any, how: str, **more: Any) -> Any:
    return api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=how == "rank0", **more)


def fake_set(api: Any, rank: int, kind: str, device: str, how: str) -> None:
    """Each rank has its parts of its own dict."""

    def call() -> None:
        model, state = made(kind, device, Large), full_state(Large)
        api.set_model_state_dict(model, dict(state), options=options(api, how))
        inner = model.module if kind == "ddp" else model
        for key, value in inner.state_dict().items():
            assert not value.is_meta, key
            assert torch.equal(local_of(value), part_of(value, state[key])), key

    as_rank(rank, call)


def fake_get(api: Any, rank: int, kind: str, offload: bool) -> None:
    """Whole tensors; the parts of other ranks may be anything."""

    def call() -> None:
        model, state = made(kind, model=Large), full_state(Large)
        api.set_model_state_dict(model, dict(state), options=options(api, "all"))
        chosen = api.StateDictOptions(full_state_dict=True, cpu_offload=offload)
        got = api.get_model_state_dict(model, options=chosen)
        assert list(got) == ([] if offload and rank else list(state))
        for key, value in got.items():
            assert type(value) is torch.Tensor, key
            assert (value.shape, value.dtype) == (state[key].shape, state[key].dtype), key

    as_rank(rank, call)


def threaded_round_trip(api: Any, kind: str, device: str, how: str) -> None:
    def call() -> None:
        model, state = made(kind, device, Large), full_state(Large)
        mine = state if how == "all" or dist.get_rank() == 0 else {}
        api.set_model_state_dict(model, dict(mine), options=options(api, how))
        for offload in (False, True):
            chosen = api.StateDictOptions(full_state_dict=True, cpu_offload=offload)
            got = api.get_model_state_dict(model, options=chosen)
            assert list(got) == ([] if offload and dist.get_rank() else list(state))
            for key, value in got.items():
                assert torch.equal(value, state[key]), key

    in_threads(call, WORLD)


@pytest.mark.parametrize("how", ["rank0", "all"])
@pytest.mark.parametrize(
    ("kind", "device"),
    [
        ("plain", "cpu"),
        ("plain", "meta"),
        ("ddp", "cpu"),
        ("fsdp2", "cpu"),
        ("fsdp2", "meta"),
        ("hsdp", "cpu"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_fake_group_loads_the_own_dict(ranks, rank, kind, device, how):
    with two_dim_support() if kind == "hsdp" else contextlib.nullcontext():
        ranks(fake_set, rank, kind, device, how, world=0)


@on_ranks(world=0)
def test_a_fake_group_brings_nothing_of_other_ranks(api: Any) -> None:
    """What other ranks have never comes."""

    def call() -> None:
        model = build()
        with pytest.raises(RuntimeError, match=r"rank 1: Missing key\(s\) in state_dict: embed.weight"):
            api.set_model_state_dict(model, {}, options=options(api, "rank0"))
        assert not any(local_of(param).any() for param in model.parameters())

    as_rank(1, call)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp2", "hsdp"])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_fake_group_gives_whole_tensors(ranks, rank, kind, offload):
    with two_dim_support() if kind == "hsdp" else contextlib.nullcontext():
        ranks(fake_get, rank, kind, offload, world=0)


@pytest.mark.parametrize("way", ["full", "full-flat", "rank0", "rank0-flat"])
@pytest.mark.parametrize("kind", ["plain", "fsdp2"])
@pytest.mark.parametrize("rank", [0, 3])
@on_ranks(world=0)
def test_a_fake_group_and_an_optimizer(api: Any, rank: int, kind: str, way: str) -> None:
    def call() -> None:
        model = made(kind)
        optim = torch.optim.AdamW(model.parameters())
        step(model, optim)
        before = held(optim)
        state = saved(api, model, optim, way.replace("rank0", "full"))
        fresh = torch.optim.AdamW(model.parameters())
        load(api, model, fresh, state, way)
        kinds = [{name: row[:3] for name, row in states.items()} for states in before["state"]]
        assert [{name: row[:3] for name, row in states.items()} for states in held(fresh)["state"]] == kinds

    as_rank(rank, call)


@on_ranks(world=0)
def test_a_fake_group_and_fake_tensors(api: Any) -> None:
    """A dry run without any values."""

    def call() -> None:
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

        mesh = init_device_mesh("cpu", (WORLD,))
        with FakeTensorMode(allow_non_fake_inputs=True):
            got = api.get_model_state_dict(
                build(mesh=mesh), options=api.StateDictOptions(full_state_dict=True)
            )
        for key, value in full_state().items():
            assert isinstance(got[key], FakeTensor), key
            assert got[key].shape == value.shape, key

    as_rank(0, call)


@pytest.mark.parametrize("how", ["rank0", "all"])
@pytest.mark.parametrize(("kind", "device"), [("fsdp2", "cpu"), ("fsdp2", "meta"), ("hsdp", "cpu")])
def test_ranks_that_are_threads(ranks, kind, device, how):
    with two_dim_support() if kind == "hsdp" else contextlib.nullcontext():
        ranks(threaded_round_trip, kind, device, how, world=0)


@pytest.mark.parametrize("way", ["full", "rank0"])
@on_ranks(world=0)
def test_ranks_that_are_threads_and_an_optimizer(api: Any, way: str) -> None:
    def call() -> None:
        model = build()
        optim = torch.optim.AdamW(model.parameters(), foreach=False)
        step(model, optim)
        state, want = saved(api, model, optim, way.replace("rank0", "full")), held(optim)
        fresh = torch.optim.AdamW(model.parameters(), foreach=False)
        load(api, model, fresh, state if way == "full" or dist.get_rank() == 0 else {}, way)
        assert held(fresh) == want

    in_threads(call, 2)


@on_ranks(world=0)
def test_an_error_on_every_rank_that_is_a_thread(api: Any) -> None:
    def call() -> None:
        model, state = build(), full_state()
        if dist.get_rank() == 1:
            model.head.weight._local_tensor = torch.zeros(1).expand(model.head.weight._local_tensor.shape)
        with pytest.raises(RuntimeError, match=r"rank 1: the destination cannot be written: head\.weight"):
            api.set_model_state_dict(model, state, options=options(api, "rank0"))
        good = build()
        api.set_model_state_dict(good, state, options=options(api, "rank0"))
        got = api.get_model_state_dict(good, options=api.StateDictOptions(full_state_dict=True))
        assert all(torch.equal(got[key], value) for key, value in state.items())

    in_threads(call, 2)
