"""The package's paths on an accelerator: each case is a function of (rank, world) that every rank runs.

Only values are judged here. No case may import the emulator: `accelerator` says where it runs. Checks look at
a rank's own memory and send nothing, so that what a case sends is the package's.
"""

from __future__ import annotations

import copy
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from emulated import accelerator
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from values import Breaking

from torch_dcp_backport import compat, dist_checkpointing, hf, status, transfer
from torch_dcp_backport.checkpoint import FSDPCheckpointManager, NearbyCheckpoints
from torch_dcp_backport.dist_checkpointing import ShardedTensor
from torch_dcp_backport.engine import (
    FSDPEngineWithLMHead,
    grad_norm,
    move_model,
    move_optimizer,
    sft_loss,
    step,
)
from torch_dcp_backport.engine._src import export
from torch_dcp_backport.transfer import layout_of
from torch_dcp_backport.transfer._src.layout import whole

functions = accelerator.state_dict_functions()
fully_shard = compat.fsdp2().fully_shard

#: Of staging: the default, and so little that a tensor takes several rounds.
STAGINGS = (None, 2048)

State = dict[str, torch.Tensor]


class Net(nn.Module):
    """Uneven rows, tied weights, buffers of other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(33, 24)
        blocks = (nn.Sequential(nn.Linear(24, 50), nn.LayerNorm(50), nn.Linear(50, 24)) for _ in range(2))
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(24, 33, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("flag", torch.zeros((), dtype=torch.bool))


class Logits(NamedTuple):
    logits: torch.Tensor


class Pair(nn.Module):
    """For tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)


# --- helpers ---


def full_state(seed: int, make: Callable[[], nn.Module] = Net) -> State:
    """A state on the host, the same on every rank."""
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.device("cpu"):
        state = make().state_dict()
    for name, tensor in state.items():
        if tensor.is_floating_point():
            state[name] = torch.randn(tensor.shape, generator=generator, device="cpu").to(tensor.dtype)
        else:
            state[name] = torch.ones_like(tensor)
    if "head.weight" in state:
        state["head.weight"] = state["embedding.weight"]
    return state


def mesh_1d(world: int) -> DeviceMesh:
    return init_device_mesh(accelerator.TYPE, (world,))


def mesh_2d(world: int) -> DeviceMesh:
    return init_device_mesh(accelerator.TYPE, (2, world // 2), mesh_dim_names=("replicate", "shard"))


def sharded(mesh: DeviceMesh, *, meta: bool = False, **options: Any) -> Net:
    """A model with this rank's own values, or none."""
    torch.manual_seed(1 + dist.get_rank())
    with torch.device("meta") if meta else accelerator.device():
        net = Net()
    for layer in net.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return net


def filled(net: nn.Module, full: Mapping[str, torch.Tensor]) -> Any:
    """The model, with its parts of a state; nothing is sent."""
    with torch.no_grad():
        for name, tensor in tensors_of(net).items():
            local_of(tensor).copy_(own_part(full[name], tensor))
    return net


def tensors_of(net: nn.Module) -> State:
    return {**dict(net.named_parameters(remove_duplicate=False)), **dict(net.named_buffers())}


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def own_part(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor that is cut as `like` is."""
    if not isinstance(like, DTensor):
        return full
    return full[layout_of(like).own_box(dist.get_rank()).within(whole(tuple(full.shape)))]


def check_model(net: nn.Module, full: Mapping[str, torch.Tensor], *, device: str = accelerator.TYPE) -> None:
    for name, tensor in tensors_of(net).items():
        local = local_of(tensor)
        assert local.device.type == device, (name, local.device)
        assert torch.equal(local.cpu(), own_part(full[name], tensor)), name


def check_state(state: Mapping[str, torch.Tensor], full: Mapping[str, torch.Tensor], device: str) -> None:
    assert set(state) == set(full)
    for name, tensor in state.items():
        assert tensor.device.type == device, (name, tensor.device)
        assert torch.equal(tensor.cpu(), full[name]), name


def whole_states(**options: bool) -> StateDictOptions:
    return StateDictOptions(full_state_dict=True, **options)


def from_rank_0(**options: bool) -> StateDictOptions:
    return whole_states(broadcast_from_rank0=True, **options)


def stagings() -> Iterator[Optional[int]]:
    for size in STAGINGS:
        transfer.configure(staging_bytes=size)
        yield size
    transfer.configure()


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    """Steps with gradients that are made up: other values for each parameter and each step."""
    for number in range(steps):
        for index, parameter in enumerate(net.parameters()):
            local = torch.full_like(local_of(parameter), (index + 1) * (number + 1) / 10)
            parameter.grad = compat.from_local(local, parameter) if isinstance(parameter, DTensor) else local
        optimizer.step()
        optimizer.zero_grad()


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False)


def check_optimizer(optimizer: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    """Both have the same states on the same devices."""
    for group, other_group in zip(optimizer.param_groups, other.param_groups):
        for parameter, other_parameter in zip(group["params"], other_group["params"]):
            state, other_state = optimizer.state[parameter], other.state[other_parameter]
            assert set(state) == set(other_state)
            assert state
            for name, value in state.items():
                local, other_local = local_of(value), local_of(other_state[name])
                assert local.device == other_local.device, (name, local.device, other_local.device)
                assert torch.equal(local.cpu(), other_local.cpu()), name


# --- loads of a model ---


def load(rank: int, world: int, mesh: DeviceMesh, on_device: Callable[[str], bool]) -> None:
    if accelerator.IS_PATCHED and "EMULATED_API" not in os.environ:
        assert status().outcome == "applied", status()
    for _ in stagings():
        for meta in (False, True):
            net, full = sharded(mesh, meta=meta), full_state(int(meta))
            source = {
                name: tensor.to(accelerator.device()) if on_device(name) else tensor
                for name, tensor in full.items()
            }
            options = from_rank_0(strict=True)
            functions.set_model_state_dict(net, source if rank == 0 else {}, options=options)
            check_model(net, full)


def load_from_host(rank: int, world: int) -> None:
    load(rank, world, mesh_1d(world), lambda name: False)


def load_from_device(rank: int, world: int) -> None:
    load(rank, world, mesh_1d(world), lambda name: True)


def load_from_both(rank: int, world: int) -> None:
    load(rank, world, mesh_1d(world), lambda name: "layers" in name)


def load_hsdp(rank: int, world: int) -> None:
    load(rank, world, mesh_2d(world), lambda name: False)


def load_hsdp_from_device(rank: int, world: int) -> None:
    load(rank, world, mesh_2d(world), lambda name: True)


def load_on_every_rank(rank: int, world: int) -> None:
    """Every rank has the whole state."""
    for meta in (False, True):
        net, full = sharded(mesh_1d(world), meta=meta), full_state(7)
        functions.set_model_state_dict(net, {**full}, options=whole_states())
        check_model(net, full)


def load_ddp(rank: int, world: int) -> None:
    """A plain model on each rank."""
    for _ in stagings():
        net, full = Net().to(accelerator.device()), full_state(8)
        functions.set_model_state_dict(net, full if rank == 0 else {}, options=from_rank_0())
        check_model(net, full)
        got = functions.get_model_state_dict(net, options=whole_states(cpu_offload=True))
        check_state(got, full if rank == 0 else {}, "cpu")


def load_ddp_without_set_device(rank: int, world: int) -> None:
    """As `DDP(device_ids=[rank])` works where `torch.cuda.set_device` was never called."""
    with torch.device(accelerator.TYPE, rank):
        net = Net()
    full = full_state(8)
    functions.set_model_state_dict(net, full if rank == 0 else {}, options=from_rank_0())
    check_model(net, full)


def load_offloaded(rank: int, world: int) -> None:
    """FSDP2's CPUOffloadPolicy: the parameters are on the host."""
    policy = compat.fsdp2().CPUOffloadPolicy()
    for _ in stagings():
        for meta in (False, True):
            net, full = sharded(mesh_1d(world), meta=meta, offload_policy=policy), full_state(9 + meta)
            options = from_rank_0(cpu_offload=True)
            functions.set_model_state_dict(net, full if rank == 0 else {}, options=options)
            for name, parameter in net.named_parameters():
                assert local_of(parameter).device.type == "cpu", name
                assert torch.equal(local_of(parameter), own_part(full[name], parameter)), name
            got = functions.get_model_state_dict(net, options=whole_states(cpu_offload=True))
            check_state(got, full if rank == 0 else {}, "cpu")


def load_in_a_group(rank: int, world: int) -> None:
    """All ranks but the last have the model: their group is used by them alone."""
    group = dist.new_group(list(range(world - 1)))
    if rank == world - 1:
        return
    mesh, full = DeviceMesh.from_group(group, accelerator.TYPE), full_state(5)
    net = sharded(mesh)
    functions.set_model_state_dict(net, {**full}, options=whole_states())
    check_model(net, full)
    local = dict(sharded(mesh).state_dict())
    if accelerator.IS_PATCHED:
        from torch.distributed._state_dict_utils import _broadcast_state_dict

        _broadcast_state_dict(full if rank == 0 else {}, local, device=accelerator.device(), pg=group)
        for name, tensor in local.items():
            assert torch.equal(local_of(tensor).cpu(), own_part(full[name], tensor)), name
    check_state(functions.get_model_state_dict(net, options=whole_states()), full, accelerator.TYPE)


def load_with_split_groups(rank: int, world: int) -> None:
    """The mesh's groups lack the default group's CPU backend, as `split_group` of torch 2.6 makes them."""
    grid = torch.arange(world, device="cpu").view(2, world // 2)
    mine = {}
    backend = dist.get_backend_config().rpartition(f"{accelerator.TYPE}:")[2].partition(",")[0]
    for name, rows in (("replicate", grid.t()), ("shard", grid)):
        for row in rows.tolist():
            group = dist.new_group(row, backend=backend)
            if rank in row:
                mine[name] = group
    mesh = DeviceMesh.from_group(list(mine.values()), accelerator.TYPE, mesh=grid, mesh_dim_names=tuple(mine))
    net, full = sharded(mesh), full_state(4)
    functions.set_model_state_dict(net, full if rank == 0 else {}, options=from_rank_0())
    check_model(net, full)


def tensor_parallel(rank: int, world: int) -> None:
    """FSDP2 over TP: model and optimizer, there and back."""
    mesh = init_device_mesh(accelerator.TYPE, (world // 2, 2), mesh_dim_names=("dp", "tp"))
    full = full_state(3, Pair)

    def cut() -> Pair:
        net = Pair().to(accelerator.device())
        parallelize_module(net, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
        fully_shard(net, mesh=mesh["dp"])
        return net

    first, second = cut(), cut()
    accelerator.preparation_ends()
    for _ in stagings():
        functions.set_model_state_dict(first, full if rank == 0 else {}, options=from_rank_0())
        check_model(first, full)
        got = functions.get_model_state_dict(first, options=whole_states(cpu_offload=True))
        check_state(got, full if rank == 0 else {}, "cpu")
        optimizer, other = adamw(first), adamw(second)
        train(first, optimizer)
        state = functions.get_optimizer_state_dict(first, optimizer, options=whole_states(cpu_offload=True))
        functions.set_optimizer_state_dict(second, other, state if rank == 0 else {}, options=from_rank_0())
        check_optimizer(optimizer, other)


# --- gets of a model ---


def get_to_one(rank: int, world: int) -> None:
    full = full_state(3)
    net = filled(sharded(mesh_1d(world)), full)
    for _ in stagings():
        got = functions.get_model_state_dict(net, options=whole_states(cpu_offload=True))
        check_state(got, full if rank == 0 else {}, "cpu")


def get_to_all(rank: int, world: int) -> None:
    full = full_state(3)
    net = filled(sharded(mesh_1d(world)), full)
    for _ in stagings():
        check_state(functions.get_model_state_dict(net, options=whole_states()), full, accelerator.TYPE)


def get_to_all_hsdp(rank: int, world: int) -> None:
    full = full_state(3)
    net = filled(sharded(mesh_2d(world)), full)
    for _ in stagings():
        check_state(functions.get_model_state_dict(net, options=whole_states()), full, accelerator.TYPE)


def get_shards(rank: int, world: int) -> None:
    """Sharded states on the host: nothing is sent."""
    full = full_state(3)
    net = filled(sharded(mesh_1d(world)), full)
    state = functions.get_model_state_dict(net, options=StateDictOptions(cpu_offload=True))
    for name, tensor in state.items():
        assert local_of(tensor).device.type == "cpu", name
        assert torch.equal(local_of(tensor), own_part(full[name], tensor)), name


# --- optimizers ---


def optimizers(
    rank: int, mesh: DeviceMesh, make: Callable[[nn.Module], torch.optim.Optimizer], *, both: bool
) -> None:
    """Get a trained optimizer's state, and load it into others; with `both` together with the model's."""
    full = full_state(3)
    net = filled(sharded(mesh), full)
    optimizer = make(net)
    train(net, optimizer)
    for _ in stagings():
        to_host = functions.get_optimizer_state_dict(net, optimizer, options=whole_states(cpu_offload=True))
        to_all = functions.get_optimizer_state_dict(net, optimizer, options=whole_states())
        for source in (copy.deepcopy(to_host), to_all):
            other_net = sharded(mesh)
            other = make(other_net)
            options = from_rank_0()
            functions.set_optimizer_state_dict(other_net, other, source if rank == 0 else {}, options=options)
            check_optimizer(optimizer, other)
        if not both:
            continue
        _, state = functions.get_state_dict(other_net, other, options=whole_states(cpu_offload=True))
        for name, values in state["state"].items() if rank == 0 else ():
            for key, value in values.items():
                assert torch.equal(value, to_host["state"][name][key]), (name, key)
        functions.set_state_dict(
            other_net,
            other,
            model_state_dict=full if rank == 0 else {},
            optim_state_dict=to_host if rank == 0 else {},
            options=from_rank_0(),
        )
        check_model(other_net, full)
        check_optimizer(optimizer, other)


def optimizer_adamw(rank: int, world: int) -> None:
    optimizers(rank, mesh_1d(world), adamw, both=True)


def optimizer_sgd(rank: int, world: int) -> None:
    optimizers(rank, mesh_1d(world), sgd, both=False)


def optimizer_hsdp(rank: int, world: int) -> None:
    optimizers(rank, mesh_2d(world), adamw, both=False)


# --- between layouts ---


def reshard(rank: int, world: int) -> None:
    line, grid = mesh_1d(world), mesh_2d(world)
    layouts = [
        (line, [Shard(0)]),
        (grid, [Shard(0), Replicate()]),
        (grid, [Replicate(), Shard(0)]),
        (line, [Replicate()]),
    ]
    generator = torch.Generator("cpu").manual_seed(0)
    shapes = [(17, 9), (8, 8), (5,), (3, 4, 10)]
    full = {str(shape): torch.randn(shape, generator=generator, device="cpu") for shape in shapes}
    for size in STAGINGS:
        for mesh, placements in layouts:
            tensors = {name: cut(tensor, mesh, placements) for name, tensor in full.items()}
            for target in layouts:
                moved = transfer.reshard(tensors, target, staging_bytes=size)
                for name, tensor in moved.items():
                    assert torch.equal(local_of(tensor).cpu(), own_part(full[name], tensor)), (name, target)


def cut(tensor: torch.Tensor, mesh: DeviceMesh, placements: Iterable[Any]) -> DTensor:
    """The tensor as it is placed; nothing is sent."""
    from_meta = torch.empty_like(tensor, device="meta")
    like = DTensor.from_local(
        from_meta, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    local = own_part(tensor, like).to(accelerator.device())
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


# --- torch's checkpoints ---


def copies_on_the_host(rank: int, world: int) -> None:
    """What asynchronous saves make: pinned copies with non_blocking, and plain ones."""
    from torch.distributed import _state_dict_utils

    state = filled(sharded(mesh_1d(world)), full_state(2)).state_dict()
    pinned = _state_dict_utils._create_cpu_state_dict(state, pin_memory=True)
    _state_dict_utils._copy_state_dict(state, pinned, non_blocking=True)
    accelerator.module().synchronize()
    for copied in (pinned, _state_dict_utils._offload_state_dict_to_cpu(state)):
        for name, tensor in copied.items():
            assert local_of(tensor).device.type == "cpu", name
            assert torch.equal(local_of(tensor), local_of(state[name]).cpu()), name


def dcp_save_and_load(rank: int, world: int) -> None:
    mesh, full, place = mesh_1d(world), full_state(2), str(accelerator.folder() / "saved")
    dcp.save({"model": functions.get_model_state_dict(filled(sharded(mesh), full))}, checkpoint_id=place)
    check_loaded(sharded(mesh), full, place)


def dcp_async_save_and_load(rank: int, world: int) -> None:
    """In the background it needs a CPU backend."""
    mesh, full, place = mesh_1d(world), full_state(2), str(accelerator.folder() / "saved")
    state = {"model": functions.get_model_state_dict(filled(sharded(mesh), full))}
    if "cpu" in dist.get_backend_config():
        dcp.async_save(state, checkpoint_id=place).result()
        check_loaded(sharded(mesh), full, place)
    else:
        with pytest.raises(AssertionError, match="CPU backend"):
            dcp.async_save(state, checkpoint_id=place)


def check_loaded(net: nn.Module, full: State, place: str) -> None:
    state = {"model": functions.get_model_state_dict(net)}
    dcp.load(state, checkpoint_id=place)
    functions.set_model_state_dict(net, state["model"])
    check_model(net, full)


# --- the rooms ---


def dist_checkpointing_save_and_load(rank: int, world: int) -> None:
    """Saved by rows, loaded by rows and by columns."""
    generator = torch.Generator("cpu").manual_seed(1)
    big = torch.randn(world * 8, world * 3, generator=generator, device="cpu")
    replicated = torch.arange(6.0, device="cpu")

    def part(by_rows: bool) -> torch.Tensor:
        return big.chunk(world, 0 if by_rows else 1)[rank].contiguous()

    def state(by_rows: bool, fill: bool) -> dict[str, Any]:
        own, everywhere = part(by_rows).to(accelerator.device()), replicated.to(accelerator.device())
        if not fill:
            own, everywhere = torch.zeros_like(own), torch.zeros_like(everywhere)
        axis = 0 if by_rows else 1
        return {
            "cut": ShardedTensor.from_rank_offsets("cut", own, (axis, rank, world)),
            "replicated": ShardedTensor.from_rank_offsets("replicated", everywhere, replica_id=rank),
            "step": 5,
        }

    place = accelerator.folder() / "saved"
    place.mkdir(exist_ok=True)
    dist_checkpointing.save(state(True, True), str(place))
    for by_rows in (True, False):
        loaded = dist_checkpointing.load(state(by_rows, False), str(place))
        assert loaded["cut"].device == loaded["replicated"].device == accelerator.device()
        assert torch.equal(loaded["cut"].cpu(), part(by_rows))
        assert torch.equal(loaded["replicated"].cpu(), replicated)
        assert loaded["step"] == 5


def hf_load(rank: int, world: int) -> None:
    """Safetensors files: every rank reads its slices, or rank 0 reads for all."""
    from safetensors.torch import save_file

    full = {name: tensor for name, tensor in full_state(9).items() if name not in ("head.weight", "flag")}
    place, written = accelerator.folder() / "model", accelerator.folder() / "written"
    if rank == 0:
        place.mkdir()
        save_file({name: tensor.clone() for name, tensor in full.items()}, str(place / "model.safetensors"))
        (place / "config.json").write_text("{}")
        written.touch()
    wait_for_file(written)
    for files in ("auto", "rank0"):
        net = sharded(mesh_1d(world))
        tensors = {name: tensor for name, tensor in tensors_of(net).items() if name in full}
        hf.load_state_dict(tensors, str(place), files=files)
        for name, tensor in tensors.items():
            assert torch.equal(local_of(tensor).cpu(), own_part(full[name], tensor)), (files, name)


def wait_for_file(path: Path) -> None:
    """Ranks meet without a message."""
    while not path.exists():
        time.sleep(0.01)


def whole_tensors(rank: int, world: int) -> None:
    """The engine's export, in buckets: to all ranks, and to one."""
    full = full_state(6)
    net = filled(sharded(mesh_1d(world)), full)
    for to in (None, 0, world - 1):
        for dtype, bucket_bytes in ((None, 64 * 2**20), (torch.bfloat16, 5000)):
            parameters = dict(net.named_parameters())
            seen = set()
            for name, tensor in export.whole_tensors(
                parameters, to=to, dtype=dtype, bucket_bytes=bucket_bytes
            ):
                assert tensor.device == accelerator.device()
                assert torch.equal(tensor.cpu(), full[name].to(dtype or full[name].dtype)), name
                seen.add(name)
            assert seen == (set(parameters) if to in (None, rank) else set())


def engine_moves_and_steps(rank: int, world: int) -> None:
    net = filled(sharded(mesh_1d(world)), full_state(6))
    optimizer = adamw(net)
    train(net, optimizer)
    for device in (torch.device("cpu"), accelerator.device()):
        move_model(net, device)
        move_optimizer(optimizer, device)
        assert {local_of(parameter).device for parameter in net.parameters()} == {device}
    for parameter in net.parameters():
        parameter.grad = compat.from_local(torch.ones_like(local_of(parameter)), parameter)
    wanted = math.sqrt(sum(parameter.numel() for parameter in net.parameters()))
    assert abs(grad_norm(net.parameters()) - wanted) < 1e-6
    step(optimizer, 1.0)


class Block(nn.Module):
    """It saves ten times as much as its input has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Decoder(nn.Module):
    """With the arguments of transformers' models; its logits are small beside what its blocks save."""

    _no_split_modules = ("Block",)
    is_recomputed = False

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(33, 64), nn.Linear(64, 33, bias=False)
        self.head.weight = self.embedding.weight
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def gradient_checkpointing_enable(self, options: Any) -> None:
        self.is_recomputed = True

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Logits:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_recomputed else layer(x)
        return Logits(self.head(x))


class Engine(FSDPEngineWithLMHead):
    make_model = staticmethod(lambda asked, dtype: Decoder())


def engine_trains_with_activations_on_the_host(rank: int, world: int) -> None:
    """The same bits with and without, and a part of the memory; with blocks that are computed again, too."""
    folder = accelerator.folder() / "model"
    hf.save_state_dict(full_state(3, Decoder), folder, like={"model_type": "small"})
    ids = torch.randint(33, (1, 512), generator=torch.Generator("cpu").manual_seed(rank), device="cpu")
    rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": torch.ones_like(ids)}
    memory = accelerator.module()
    found: dict[bool, list[Any]] = {True: [], False: []}
    held: dict[tuple[bool, bool], int] = {}
    peaks: dict[tuple[bool, bool], int] = {}

    def loss(**given: Any) -> Any:
        """Between the forward and the backward pass."""
        held[is_recomputed, is_offloaded] = memory.memory_allocated() - before
        return sft_loss(**given)

    for is_recomputed in (False, True):
        for is_offloaded in (False, True):
            model = {
                "path": str(folder),
                "enable_activation_offload": is_offloaded,
                "enable_gradient_checkpointing": is_recomputed,
            }
            settings = {"mixed_precision": {"param_dtype": None}, "max_token_len_per_gpu": 1024}
            built = Engine(model, settings, {"optimizer": "SGD", "lr": 0.1}, device=accelerator.TYPE)
            built.initialize()
            before = memory.memory_allocated()
            memory.reset_peak_memory_stats()
            with built.train_mode():
                losses = built.train_batch(rows, loss)["loss"]
            weights = [local_of(param).cpu().tolist() for param in built.module.parameters()]
            found[is_offloaded].append((losses, weights))
            peaks[is_recomputed, is_offloaded] = memory.max_memory_allocated() - before
    assert found[True] == found[False]
    tensor = 512 * 64 * 4
    # A block saves its input, the norm's output, and four times as wide those before and after GELU; computed
    # again, its input.
    assert held[False, False] - held[False, True] > 4 * 10 * tensor, held
    assert held[True, False] - held[True, True] > 3 * tensor, held
    assert peaks[False, True] < peaks[False, False] / 2, peaks


def manager(rank: int, world: int) -> None:
    """Saved at once and in the background, loaded on another mesh."""
    full = full_state(2)
    net = filled(sharded(mesh_1d(world)), full)
    optimizer = adamw(net)
    train(net, optimizer)
    places = [str(accelerator.folder() / f"global_step_{number}" / "actor") for number in (1, 2)]
    FSDPCheckpointManager(net, optimizer).save_checkpoint(places[0], None, 1)
    background = FSDPCheckpointManager(net, optimizer, checkpoint_config={"async_save": True})
    background.save_checkpoint(places[1], None, 2)
    assert background.finish()
    trained = functions.get_model_state_dict(net, options=whole_states(cpu_offload=True))
    states = functions.get_optimizer_state_dict(net, optimizer, options=whole_states(cpu_offload=True))
    for place in places:
        other_net = sharded(mesh_2d(world))
        other = adamw(other_net)
        FSDPCheckpointManager(other_net, other).load_checkpoint(place)
        loaded = functions.get_model_state_dict(other_net, options=whole_states(cpu_offload=True))
        check_state(loaded, trained, "cpu")
        loaded = functions.get_optimizer_state_dict(other_net, other, options=whole_states(cpu_offload=True))
        for name, values in states["state"].items() if rank == 0 else ():
            for key, value in values.items():
                assert torch.equal(value, loaded["state"][name][key]), (name, key)


def nearby_nodes(rank: int, world: int) -> None:
    """Each rank's part on its own node, with a copy on the next one; a node's folder is gone."""
    net = filled(sharded(mesh_1d(world)), full_state(2))
    optimizer = adamw(net)
    train(net, optimizer)
    folder = accelerator.folder() / f"node_{rank // 2}"
    model, states = functions.get_state_dict(net, optimizer)
    assert NearbyCheckpoints(folder, run="a", ranks_per_node=2).save({"model": model, "optimizer": states}, 1)
    dist.barrier()
    if rank == 2:
        shutil.rmtree(folder)
    dist.barrier()
    other_net = sharded(mesh_1d(world))
    other = adamw(other_net)
    wanted, other_states = functions.get_state_dict(other_net, other)
    tier = NearbyCheckpoints(folder, run="a", ranks_per_node=2)
    loaded = tier.load({"model": wanted, "optimizer": other_states})
    assert loaded is not None
    assert loaded.copied_from == ("node 0" if rank >= 2 else "")
    for name, tensor in wanted.items():
        assert local_of(tensor).device == accelerator.device()
        assert torch.equal(local_of(tensor).cpu(), local_of(model[name]).cpu()), name
    for name, values in states["state"].items():
        for key, value in values.items():
            again = loaded.state["optimizer"]["state"][name][key]
            assert torch.equal(local_of(again).cpu(), local_of(value).cpu()), (name, key)


# --- what goes wrong ---


def errors_on_every_rank(rank: int, world: int) -> None:
    """One error on every rank, and the next load works."""
    net, full = sharded(mesh_1d(world)), full_state(1)
    missing = {name: tensor for name, tensor in full.items() if name != "layers.1.0.weight"}
    for source, text in (
        (missing, "layers.1.0.weight"),
        ({**full, "layers.1.0.weight": torch.zeros(3, 3, device="cpu")}, "layers.1.0.weight"),
        ({**full, "unpicklable": lambda: 0}, "unpicklable|pickle"),
    ):
        with pytest.raises(Exception, match=text):
            functions.set_model_state_dict(net, source if rank == 0 else {}, options=from_rank_0())
    functions.set_model_state_dict(net, full if rank == 0 else {}, options=from_rank_0())
    check_model(net, full)


def a_dict_that_fails_while_it_is_sent(rank: int, world: int) -> None:
    """Every rank hears of it, none waits for a watchdog, and the next load works."""
    random = torch.Generator("cpu").manual_seed(6)
    # More than a source keeps between its inventory and the transfer.
    names = {f"layers.{number}.weight" for number in range(6)}
    full = {name: torch.randn(512, 512, generator=random, device="cpu") for name in sorted(names)}
    net = nn.Module()
    with accelerator.device():
        net.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(6))
    fully_shard(net, mesh=mesh_1d(world))
    source = Breaking(full, len(full) + 1)
    with pytest.raises(transfer.TransferError, match="rank 0: OSError: the disk failed"):
        functions.set_model_state_dict(net, source if rank == 0 else {}, options=from_rank_0())
    functions.set_model_state_dict(net, full if rank == 0 else {}, options=from_rank_0())
    check_model(net, full)


def counters_stay_on_the_host(rank: int, world: int) -> None:
    """AdamW's counters are on the host; the states beside them do not go there and back."""
    with accelerator.device():
        net = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))
    optimizer = adamw(net)
    train(net, optimizer)
    state = functions.get_optimizer_state_dict(net, optimizer, options=whole_states())
    other = adamw(net)
    before = accelerator.copied_bytes()
    functions.set_optimizer_state_dict(net, other, state if rank == 0 else {}, options=from_rank_0())
    copied = accelerator.copied_bytes() - before
    check_optimizer(optimizer, other)
    # An inventory and agreements of some KiB, and the counters; the states have 400 KiB.
    assert copied <= 2**18, f"{copied} bytes between host and device"


def little_memory_on_a_rank(rank: int, world: int) -> None:
    """No room on one rank for the buffers that it would like: smaller ones do."""
    names, shape = [f"weight{number}" for number in range(4)], (512, 1024)
    generator = torch.Generator("cpu").manual_seed(0)
    full = {name: torch.randn(shape, generator=generator, device="cpu") for name in names}
    net = nn.Module()
    for name in names:
        net.register_parameter(name, nn.Parameter(torch.zeros(shape, device=accelerator.device())))
    fully_shard(net, mesh=mesh_1d(world))
    accelerator.module().reset_peak_memory_stats()
    before = accelerator.module().memory_allocated()
    functions.set_model_state_dict(net, full if rank == 0 else {}, options=from_rank_0())
    check_model(net, full)
    liked = accelerator.module().max_memory_allocated() - before
    assert liked > 3 * 2**20
    with torch.no_grad():
        for parameter in net.parameters():
            local_of(parameter).zero_()
    if rank == 1:
        accelerator.limit_memory(3 * 2**20)
    functions.set_model_state_dict(net, full if rank == 0 else {}, options=from_rank_0())
    check_model(net, full)
    accelerator.limit_memory(-1)


def with_a_default_device(rank: int, world: int) -> None:
    """After `torch.set_default_device`, as some trainers call it."""
    torch.set_default_device(accelerator.device())
    for case in (load_from_host, get_to_one, get_to_all, load_offloaded, load_on_every_rank, optimizer_sgd):
        case(rank, world)
    for case in (whole_tensors, engine_moves_and_steps, dist_checkpointing_save_and_load):
        case(rank, world)
    if accelerator.IS_PATCHED:  # else torch's own pins host memory that is the default device's
        copies_on_the_host(rank, world)


def rooms_with_a_default_device(rank: int, world: int) -> None:
    torch.set_default_device(accelerator.device())
    hf_load(rank, world)
    manager(rank, world)
