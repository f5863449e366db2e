"""scatter and gather between any two layouts, with small chunks, against slices of the source."""

from __future__ import annotations

import gc
import itertools
import math
import os
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import build, full_state, fully_shard, value_of
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torch_dcp_backport import transfer
from torch_dcp_backport.compat import Replicate, Shard
from torch_dcp_backport.state_dict.source import StateSource
from torch_dcp_backport.transfer import Box, Held, Layout, Mesh, Target, TensorInfo, Want
from torch_dcp_backport.transfer._src import groups
from torch_dcp_backport.transfer._src.scatter import PLAN_BYTES, Offer

SHAPES = {"a": (7, 5), "b": (64, 3), "one": (1,), "scalar": (), "none": (0, 4), "deep": (3, 5, 2, 4)}
DTYPES = {
    "a": torch.float32,
    "b": torch.bfloat16,
    "one": torch.int64,
    "scalar": torch.float64,
    "none": torch.int8,
    "deep": torch.bool,
}

try:
    from torch.distributed.tensor import distribute_tensor
except ImportError:  # torch 2.4
    from torch.distributed._tensor import distribute_tensor

PLACEMENTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]] = {
    "shard0": ((4,), (0, 1, 2, 3), ((0, 1),)),
    "replicate": ((4,), (0, 1, 2, 3), (None,)),
    "hsdp": ((2, 2), (0, 1, 2, 3), (None, (0, 1))),
    "shard01": ((2, 2), (0, 1, 2, 3), ((0, 1), (1, 1))),
    "twice": ((2, 2), (0, 1, 2, 3), ((0, 1), (0, 1))),
    "strided": ((2, 2), (0, 1, 2, 3), ((0, 2), (0, 1))),
    "outside": ((2,), (1, 3), ((0, 1),)),
    "backwards": ((4,), (3, 2, 1, 0), ((0, 1),)),
}


def layout(key: str, kind: str) -> Layout:
    shape = SHAPES[key]
    mesh_shape, ranks, placements = PLACEMENTS[kind]
    if len(shape) < 2:
        placements = tuple(None if p is None or p[0] >= len(shape) else p for p in placements)
    return Layout(shape, Mesh(mesh_shape, ranks), placements)


def full_values() -> dict[str, torch.Tensor]:
    return {
        key: value_of(key, shape, torch.float32).to(DTYPES[key])
        if shape != ()
        else torch.tensor(2.5, dtype=DTYPES[key])
        for key, shape in SHAPES.items()
    }


def scatter_to(api: Any, kinds: list[str], staging: int, by_window: bool = False) -> None:
    """Every rank of its own kind: the demands may differ between ranks."""
    rank = dist.get_rank()
    kind = kinds[rank % len(kinds)]
    values = full_values()
    infos = {key: TensorInfo(tuple(v.shape), v.dtype) for key, v in values.items()}
    wants = {key: Want(layout(key, kind), DTYPES[key]) for key in SHAPES}
    targets = {}
    for key, want in wants.items():
        box = want.layout.box(rank)
        if box is not None:
            targets[key] = Target(torch.full(box.size, 1).to(want.dtype), box)
    reader = StateSource(values) if rank == 0 else None
    with transfer.Call("test", "scatter") as call:
        inventory = call.publish(infos if rank == 0 else None)
        agreement = call.agree_on_wants(wants, staging_bytes=staging)
        transfer.scatter(call, Offer(inventory, reader, by_window), targets, agreement)
    whole = {key: Box((0,) * v.dim(), tuple(v.shape)) for key, v in values.items()}
    for key, target in targets.items():
        assert torch.equal(target.tensor, values[key][target.box.within(whole[key])]), key


def gather_from(api: Any, kind: str, staging: int, to: Any) -> None:
    rank = dist.get_rank()
    values = full_values()
    held = {}
    for key, value in values.items():
        one = layout(key, kind)
        box = one.box(rank) or Box((0,) * value.dim(), (0,) * value.dim())
        whole = Box((0,) * value.dim(), tuple(value.shape))
        held[key] = Held(value[box.within(whole)].clone(), one)
    out = transfer.gather(held, lambda key: torch.full_like(values[key], 1), to=to, staging_bytes=staging)
    if to is not None and rank != to:
        assert out == {}
    else:
        assert list(out) == list(values)
        for key, value in out.items():
            assert torch.equal(value, values[key]), key


def staged_bytes(api: Any, budget: int) -> int:
    """The most bytes of staging that one scatter and one gather allocated."""
    from torch_dcp_backport.transfer._src.staging import Staging

    allocated = []
    init = Staging.__init__

    def spy(self: Staging, device: torch.device, nbytes: int) -> None:
        init(self, device, nbytes)
        allocated.append(self.store.untyped_storage().nbytes())

    Staging.__init__ = spy
    try:
        scatter_to(api, ["shard0"], budget)
        gather_from(api, "shard0", budget, None)
    finally:
        Staging.__init__ = init
    # A backend may hold freed buffers for a moment, so that a second allocation would count on top.
    assert len(allocated) == 2, f"one allocation for the scatter, one for the gather, but {allocated}"
    return max(allocated)


@pytest.mark.parametrize("staging", [6 * 1024, 2**20])
@pytest.mark.parametrize("kind", PLACEMENTS)
def test_scatter_gives_every_rank_its_box(ranks, kind, staging):
    ranks(scatter_to, [kind], staging)


def test_scatter_to_ranks_with_different_layouts(ranks):
    ranks(scatter_to, ["shard0", "shard01", "replicate", "strided"], 6 * 1024)


@pytest.mark.parametrize("kind", ["shard0", "replicate"])
def test_one_tensor_after_the_other(ranks, kind):
    ranks(scatter_to, [kind], 6 * 1024, by_window=True)


@pytest.mark.parametrize("to", [None, 0, 2])
@pytest.mark.parametrize("kind", PLACEMENTS)
def test_gather_makes_whole_tensors(ranks, kind, to):
    ranks(gather_from, kind, 6 * 1024, to)


def test_staging_stays_within_its_budget(ranks):
    assert max(ranks(staged_bytes, 6 * 1024)) <= 6 * 1024


def test_one_element_at_a_time(ranks):
    ranks(scatter_to, ["shard0"], 6 * 16)


def reports(api: Any, count: int, budgets: list[int]) -> Any:
    """Load and save `count` vectors of 16 KiB, on ranks with these budgets."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    transfer.configure(staging_bytes=budgets[rank % len(budgets)])
    try:
        model = nn.Module()
        model.blocks = nn.ParameterList(nn.Parameter(torch.zeros(4096)) for _ in range(count))
        fully_shard(model, mesh=mesh)
        state = {key: torch.ones(4096) for key in model.state_dict()}
        options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        api.set_model_state_dict(model, state if rank == 0 else {}, options=options)
        loaded = transfer.last_report()
        options = api.StateDictOptions(full_state_dict=True, cpu_offload=True)
        api.get_model_state_dict(model, options=options)
        return loaded, transfer.last_report()
    finally:
        transfer.configure()


def test_the_report_counts_bytes_and_rounds(ranks):
    budget = 7 * 16 * 1024 + 64 * PLAN_BYTES
    for rank, (loaded, saved) in enumerate(ranks(reports, 64, [budget])):
        total, shard = 64 * 16 * 1024, 16 * 16 * 1024
        assert (loaded.operation, saved.operation) == ("scatter", "gather")
        assert loaded.tensors == saved.tensors == 64
        assert loaded.bytes_received == (0 if rank == 0 else shard)
        assert loaded.bytes_sent == (total - shard if rank == 0 else 0)
        assert saved.bytes_sent == (0 if rank == 0 else shard)
        assert saved.bytes_received == (total - shard if rank == 0 else 0)
        # A rank's shard goes in portions of a seventh of the budget: rank 0 has six under way. A load leaves
        # room for its plan.
        assert (loaded.rounds, saved.rounds) == (16, 9)
        assert (loaded.chunks, saved.chunks) == ((48, 27) if rank == 0 else (16, 9))
        assert 0 < loaded.staging_bytes <= budget
        assert loaded.staging_budget == saved.staging_budget == budget
        assert {"inventory", "agree", "move"} <= set(loaded.seconds)
        assert "scatter: 64 tensors" in str(loaded)


def test_rounds_grow_with_bytes_and_not_with_tensors(ranks):
    for count in (8, 64, 512):
        for loaded, saved in ranks(reports, count, [7 * 2**20 + count * PLAN_BYTES]):
            assert loaded.rounds == saved.rounds == max(1, count * 4 // 1024)


def test_the_smallest_budget_counts_for_all(ranks):
    for loaded, _ in ranks(reports, 16, [2**20, 2**18, 2**19]):
        assert loaded.staging_budget == 2**18


def no_traffic(api: Any) -> Any:
    model = build()
    options = api.StateDictOptions(full_state_dict=True)
    api.set_model_state_dict(model, full_state(), options=options)
    return transfer.last_report()


def test_a_dict_on_every_rank_moves_nothing(ranks):
    for report in ranks(no_traffic):
        assert report.operation == "slice"
        assert report.rounds == report.bytes_sent == report.bytes_received == report.staging_bytes == 0


@on_ranks(world=2)
def test_a_budget_that_is_none_is_refused_on_every_rank(api: Any) -> None:
    """On one rank only."""
    text = "64MB"
    os.environ["TORCH_DCP_BACKPORT_STAGING_MIB"] = text if dist.get_rank() == 1 else ""
    model = build()
    try:
        options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        state = full_state() if dist.get_rank() == 0 else {}
        with pytest.raises(ValueError, match=f"rank 1: not a staging budget.*STAGING_MIB='{text}'"):
            api.set_model_state_dict(model, state, options=options)
        with pytest.raises(ValueError, match="rank 1: not a staging budget"):
            api.get_model_state_dict(model, options=api.StateDictOptions(full_state_dict=True))
    finally:
        del os.environ["TORCH_DCP_BACKPORT_STAGING_MIB"]
    with pytest.raises(ValueError, match="staging_bytes=15"):
        transfer.Call("test", "scatter").agree_on_wants({}, staging_bytes=15)


def replicated(api: Any, mesh_shape: tuple[int, ...], kinds: str, dtype: torch.dtype) -> Any:
    """Load a DTensor model on this mesh: "R" replicates along a mesh dimension, digits shard."""
    mesh = init_device_mesh("cpu", mesh_shape)
    placements = [Replicate() if kind == "R" else Shard(int(kind)) for kind in kinds]
    model = nn.Module()
    state = {}
    for number in range(6):
        state[f"w{number}"] = value_of(str(number), (8, 12), torch.float32)
        empty = distribute_tensor(torch.zeros(8, 12, dtype=dtype), mesh, placements)
        model.register_parameter(f"w{number}", nn.Parameter(empty))
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    seen: list[Any] = []
    transfer.configure(staging_bytes=7 * 128, progress=seen.append)
    try:
        api.set_model_state_dict(model, state if dist.get_rank() == 0 else {}, options=options)
    finally:
        transfer.configure()
    for key, value in state.items():
        expected = distribute_tensor(value.to(dtype), mesh, placements).to_local()
        assert torch.equal(getattr(model, key).to_local(), expected), key
    report = transfer.last_report()
    assert [one.total for one in seen] == [report.bytes_sent + report.bytes_received] * report.chunks
    assert [one.done for one in seen][-1:] == [one.total for one in seen][-1:]
    return report


@pytest.mark.parametrize(
    ("mesh_shape", "kinds", "world"),
    [
        ((2, 2), "R0", 4),
        ((2, 2), "0R", 4),
        ((2, 2), "R1", 4),
        ((2, 2, 2), "R01", 8),
        ((2, 2, 2), "RR0", 8),
        ((2, 2, 2), "R0R", 8),
        ((2, 2, 2), "0RR", 8),
    ],
)
def test_the_source_sends_a_box_once_for_all_its_replicas(ranks, mesh_shape, kinds, world):
    total = 6 * 8 * 12 * 4
    box = total // math.prod(extent for extent, kind in zip(mesh_shape, kinds) if kind != "R")
    replicas = [dim for dim, kind in enumerate(kinds) if kind == "R"]
    grid = list(itertools.product(*map(range, mesh_shape)))
    for rank, report in enumerate(ranks(replicated, mesh_shape, kinds, torch.float32, world=world)):
        # Along the replica dimensions one after the other: who got it on one of them sends on the later ones.
        last = max((dim for dim in replicas if grid[rank][dim]), default=-1)
        passed_on = box * sum(dim > last for dim in replicas)
        assert report.bytes_sent == passed_on + (total - box if rank == 0 else 0)
        assert report.bytes_received == (0 if rank == 0 else box)


def test_what_shrinks_is_cast_before_it_travels(ranks):
    whole = 6 * 8 * 12
    for rank, report in enumerate(ranks(replicated, (4,), "0", torch.bfloat16)):
        assert report.bytes_received == (0 if rank == 0 else whole // 4 * 2)
    for rank, report in enumerate(ranks(replicated, (4,), "0", torch.float64)):
        assert report.bytes_received == (0 if rank == 0 else whole // 4 * 4)
    for rank, report in enumerate(ranks(replicated, (4,), "R", torch.bfloat16)):
        assert report.bytes_received == (0 if rank == 0 else whole * 2)


@on_ranks()
def test_a_source_that_is_not_the_first_of_its_replicas(api: Any) -> None:
    """The source is the last of the replicas: it takes part in passing on what it sent."""
    mesh = DeviceMesh("cpu", [[3, 2], [1, 0]])
    value = value_of("w", (8, 6), torch.float32)
    model = nn.Module()
    model.w = nn.Parameter(distribute_tensor(torch.zeros(8, 6), mesh, [Replicate(), Shard(0)]))
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    transfer.configure(staging_bytes=7 * 16)
    try:
        api.set_model_state_dict(model, {"w": value} if dist.get_rank() == 0 else {}, options=options)
    finally:
        transfer.configure()
    assert torch.equal(model.w.to_local(), value.chunk(2)[0 if dist.get_rank() in (3, 1) else 1])


@on_ranks()
def test_a_source_whose_box_goes_to_another_rank_late(api: Any) -> None:
    """The source's own head comes after another one, and there are buffers for two chunks only."""
    from torch_dcp_backport.transfer._src import chunks

    mesh = DeviceMesh("cpu", [[1, 3], [2, 0]])
    value = value_of("w", (8, 6), torch.float32)
    model = nn.Module()
    model.w = nn.Parameter(distribute_tensor(torch.zeros(8, 6), mesh, [Replicate(), Shard(0)]))
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    most, chunks.MOST_SLOTS = chunks.MOST_SLOTS, 2
    transfer.configure(staging_bytes=3 * 16)
    try:
        api.set_model_state_dict(model, {"w": value} if dist.get_rank() == 0 else {}, options=options)
    finally:
        chunks.MOST_SLOTS = most
        transfer.configure()
    assert torch.equal(model.w.to_local(), value.chunk(2)[0 if dist.get_rank() in (1, 2) else 1])


@pytest.mark.parametrize("broadcast", [True, False])
@on_ranks()
def test_a_source_that_is_not_on_the_mesh(api: Any, broadcast: bool) -> None:
    mesh = DeviceMesh("cpu", [1, 2, 3])
    value = value_of("w", (9, 4), torch.float32)
    model = nn.Module()
    model.w = nn.Parameter(distribute_tensor(torch.zeros(9, 4), mesh, [Shard(0)]))
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    rank = dist.get_rank()
    api.set_model_state_dict(model, {"w": value} if rank == 0 or not broadcast else {}, options=options)
    if rank:
        assert torch.equal(model.w.to_local(), value.chunk(3)[rank - 1])


@on_ranks()
def test_a_value_that_cannot_travel_is_an_error_on_every_rank(api: Any) -> None:
    model = build()
    optim = torch.optim.Adam(model.parameters())
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state: Any = {}
    if dist.get_rank() == 0:
        names = [name for name, _ in model.named_parameters()]
        groups = {key: value for key, value in optim.param_groups[0].items() if key != "params"}
        state = {"state": {}, "param_groups": [{**groups, "note": threading.Lock(), "params": names}]}
    with pytest.raises(RuntimeError, match=r"rank 0: a value that cannot be pickled.*param_groups\.0\.note"):
        api.set_optimizer_state_dict(model, optim, state, options=options)


@pytest.mark.parametrize("optimizer", [False, True])
@on_ranks()
def test_what_was_loaded_is_freed_without_the_garbage_collector(api: Any, optimizer: bool) -> None:
    """Without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        model = build("cpu" if optimizer else "meta")
        options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        source = full_state()
        if optimizer:
            optim = torch.optim.Adam(model.parameters())
            names = [name for name, _ in model.named_parameters()]
            groups = {key: value for key, value in optim.param_groups[0].items() if key != "params"}
            shapes = {name: param.shape for name, param in model.named_parameters()}
            states = {
                name: {
                    "step": torch.tensor(1.0),
                    "exp_avg": torch.ones(shape),
                    "exp_avg_sq": torch.ones(shape),
                }
                for name, shape in shapes.items()
            }
            source = {"state": states, "param_groups": [{**groups, "params": names}]}
            alive = [weakref.ref(state["exp_avg"]) for state in states.values()]
            api.set_optimizer_state_dict(
                model, optim, source if dist.get_rank() == 0 else {}, options=options
            )
            del states
        else:
            alive = [weakref.ref(value) for value in source.values()]
            api.set_model_state_dict(model, source if dist.get_rank() == 0 else {}, options=options)
        del source
        assert [one() for one in alive] == [None] * len(alive)
    finally:
        gc.enable()


@on_ranks()
def test_buffers_of_a_gloo_group_are_on_the_host(api: Any) -> None:
    """gloo is registered for accelerators too, but sends nothing that is on one."""

    assert groups.device_types(None) == ["cpu"]
    assert groups.comm_device_type(None, "cuda") == "cpu"


@on_ranks()
def test_host_tensors_reach_an_accelerator_through_one_buffer(api: Any) -> None:
    """As on an accelerator, where everything on the host passes through pinned memory."""
    from torch_dcp_backport.transfer._src.staging import Staging

    crosses, may_cross = Staging.crosses, Staging.may_cross
    Staging.crosses = lambda self, part: part.dtype != torch.bfloat16
    Staging.may_cross = True
    try:
        scatter_to(api, ["shard0", "shard01", "replicate", "strided"], 6 * 1024)
        gather_from(api, "shard0", 6 * 1024, 0)
        gather_from(api, "hsdp", 6 * 1024, None)
    finally:
        Staging.crosses, Staging.may_cross = crosses, may_cross


def failing_callback(api: Any) -> int:
    calls = []

    def callback(progress: Any) -> None:
        calls.append(progress)
        raise KeyError("a bug")

    transfer.configure(staging_bytes=7 * 1024, progress=callback if dist.get_rank() == 1 else None)
    try:
        no_problem = build()
        options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        state = full_state() if dist.get_rank() == 0 else {}
        api.set_model_state_dict(no_problem, state, options=options)
    finally:
        transfer.configure()
    return len(calls)


def test_a_progress_callback_that_fails_ends_nothing(ranks):
    assert ranks(failing_callback) == [0, 1, 0, 0]
