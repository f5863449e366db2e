"""Calls of get_* and set_* on a rank of tools/gpu.py, and the models and values of them.

Every value is compared bit by bit with tensors that each rank makes itself, cut by torch.chunk: no code that
is tested takes part in the check.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import torch_dcp_backport
from torch_dcp_backport import compat
from torch_dcp_backport.compat import DTensor

from gpu_place import Place  # isort: skip

TORCHS = "torch.distributed.checkpoint.state_dict"
#: Who is called: our functions by name; torch's names with the shim applied; torch's names as they are.
MODULES = {"ours": "torch_dcp_backport.state_dict", "shim": TORCHS, "stock": TORCHS}


def functions(who: str) -> Any:
    """Return the module whose functions are called, once torch's names lead where they should.

    Raises:
        RuntimeError: they lead elsewhere.
    """
    if who == "shim":
        status = torch_dcp_backport.activate()
        if status.outcome != "applied":
            raise RuntimeError(f"the shim is {status.outcome}: {status.reason}")
    if who == "stock":
        torch_dcp_backport.deactivate()
    api = importlib.import_module(MODULES[who])
    for name in ("set_model_state_dict", "set_optimizer_state_dict", "get_model_state_dict"):
        file = inspect.unwrap(getattr(api, name)).__code__.co_filename
        is_ours = file.startswith(torch_dcp_backport.__path__[0])
        if who != "ours" and is_ours != (who == "shim"):
            raise RuntimeError(f"{who}: {name} is that of {file}")
    return api


# --- models and what is expected of them ---


class Small(nn.Module):
    """Odd sizes, some smaller than the number of ranks, a tied weight, buffers."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.emb = nn.Embedding(33, 24)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 50), nn.LayerNorm(50), nn.Linear(50, 24)) for _ in range(4)
        )
        self.head = nn.Linear(24, 33, bias=False)
        if tied:
            self.head.weight = self.emb.weight
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("flag", torch.zeros((), dtype=torch.bool))


class Large(nn.Module):
    def __init__(self, mib: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(max(4, mib // 16)))


def build(place: Place, size: str, tied: bool = True) -> nn.Module:
    return Small(tied) if size == "small" else Large(place.mib)


@functools.lru_cache(maxsize=4)
def values(size: str, mib: int, tied: bool, seed: int = 0) -> dict[str, torch.Tensor]:
    """The full state, the same on every rank."""
    with torch.device("meta"):
        net = Small(tied) if size == "small" else Large(mib)
    random = torch.Generator().manual_seed(seed)
    full = {
        key: torch.randn(value.shape, generator=random)
        if value.is_floating_point()
        else torch.ones(value.shape, dtype=value.dtype)
        for key, value in net.state_dict().items()
    }
    if size == "small" and tied:
        full["head.weight"] = full["emb.weight"]
    return full


def sharded(
    place: Place,
    size: str,
    *,
    meta: bool = False,
    tied: bool = True,
    offload: bool = False,
    mesh: Any = None,
) -> nn.Module:
    """A model under FSDP2, with values that are not those that are loaded."""
    fsdp2 = compat.fsdp2()
    torch.manual_seed(1 + place.rank)
    with torch.device("meta") if meta else place.device:
        net = build(place, size, tied)
    # Without a GPU there is nothing to pin for.
    policy = fsdp2.CPUOffloadPolicy(pin_memory=place.kind == "cuda")
    more = {"offload_policy": policy} if offload else {}
    mesh = place.mesh() if mesh is None else mesh
    for layer in net.layers:
        fsdp2.fully_shard(layer, mesh=mesh, **more)
    fsdp2.fully_shard(net, mesh=mesh, **more)
    return net


def part(place: Place, full: torch.Tensor) -> torch.Tensor:
    """This rank's shard along the first dimension."""
    parts = full.chunk(place.world)
    return parts[place.rank] if place.rank < len(parts) else full[:0]


def check_model(place: Place, net: nn.Module, full: Mapping[str, torch.Tensor], device: torch.device) -> None:
    wrong = []
    for key, value in {
        **dict(net.named_parameters(remove_duplicate=False)),
        **dict(net.named_buffers()),
    }.items():
        is_sharded = isinstance(value, DTensor)
        local = value._local_tensor if is_sharded else value.detach()
        want = part(place, full[key]) if is_sharded else full[key]
        # Buffers stay on the accelerator where parameters are offloaded.
        is_placed = local.device == device or not is_sharded
        if local.is_meta or not is_placed or not torch.equal(local.cpu(), want):
            wrong.append(f"{key} on {local.device}")
    assert not wrong, f"wrong: {wrong}"


def check_full(got: Mapping[str, torch.Tensor], full: Mapping[str, torch.Tensor], kind: str) -> None:
    assert set(got) == set(full), sorted(set(got) ^ set(full))
    wrong = [k for k, v in got.items() if v.device.type != kind or not torch.equal(v.cpu(), full[k])]
    assert not wrong, f"wrong: {wrong}"


def full_options(api: Any, **more: bool) -> Any:
    return api.StateDictOptions(full_state_dict=True, **more)


# --- the calls: (place, the module whose functions are called, size) ---


def load(place: Place, api: Any, size: str, *, meta: bool = False, on_device: bool = False) -> None:
    net, full = sharded(place, size, meta=meta), values(size, place.mib, True)
    source: dict[str, torch.Tensor] = {}
    if place.is_first:
        source = {key: value.to(place.device) for key, value in full.items()} if on_device else dict(full)
    with place.timed():
        api.set_model_state_dict(
            net, source, options=full_options(api, broadcast_from_rank0=True, strict=True)
        )
    check_model(place, net, full, place.device)


def load_plain(place: Place, api: Any, size: str) -> None:
    """A model that is whole on every rank, as under DDP."""
    with place.device:
        net = build(place, size)
    full = values(size, place.mib, True)
    with place.timed():
        source = dict(full) if place.is_first else {}
        api.set_model_state_dict(net, source, options=full_options(api, broadcast_from_rank0=True))
    check_model(place, net, full, place.device)


def load_offloaded(place: Place, api: Any, size: str) -> None:
    """FSDP2's CPUOffloadPolicy: the shards stay on the host."""
    net, full = sharded(place, size, offload=True), values(size, place.mib, True)
    with place.timed():
        source = dict(full) if place.is_first else {}
        options = full_options(api, broadcast_from_rank0=True, cpu_offload=True)
        api.set_model_state_dict(net, source, options=options)
    check_model(place, net, full, torch.device("cpu"))


def filled(place: Place, size: str, tied: bool = True) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A sharded model with the known values; no message is sent."""
    net, full = sharded(place, size, tied=tied), values(size, place.mib, tied)
    fill(place, net, full)
    return net, full


def fill(place: Place, net: nn.Module, full: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for key, value in net.named_parameters():
            value._local_tensor.copy_(part(place, full[key]))
        for key, value in net.named_buffers():
            value.copy_(full[key])


def get_first(place: Place, api: Any, size: str) -> None:
    net, full = filled(place, size)
    with place.timed():
        got = api.get_model_state_dict(net, options=full_options(api, cpu_offload=True))
    if place.is_first:
        check_full(got, full, "cpu")
    else:
        assert not got, f"rank {place.rank} got {len(got)} tensors"


def get_all(place: Place, api: Any, size: str) -> None:
    net, full = filled(place, size)
    with place.timed():
        got = api.get_model_state_dict(net, options=full_options(api))
    check_full(got, full, place.kind)


def optimizer_values(place: Place, size: str, net: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    averages, squares = (values(size, place.mib, False, seed) for seed in (1, 2))
    return {
        key: {"step": torch.tensor(3.0), "exp_avg": averages[key], "exp_avg_sq": squares[key].abs()}
        for key, _ in net.named_parameters()
    }


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False)


def load_optimizer(place: Place, api: Any, size: str, *, offload: bool = False) -> None:
    net = sharded(place, size, tied=False, offload=offload)
    optimizer, full = adamw(net), optimizer_values(place, size, net)
    source: dict[str, Any] = {}
    if place.is_first:
        group = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
        source = {"state": full, "param_groups": [{**group, "lr": 0.25, "params": list(full)}]}
    options = full_options(api, broadcast_from_rank0=True, cpu_offload=offload)
    with place.timed():
        api.set_optimizer_state_dict(net, optimizer, source, options=options)
    assert optimizer.param_groups[0]["lr"] == 0.25
    check_optimizer(place, net, optimizer, full, torch.device("cpu") if offload else place.device)


def check_optimizer(
    place: Place,
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    full: Mapping[str, Mapping[str, torch.Tensor]],
    device: torch.device,
) -> None:
    for key, parameter in net.named_parameters():
        state = optimizer.state[parameter]
        assert set(state) == set(full[key]), (key, sorted(state))
        for name, value in state.items():
            if name == "step":
                assert float(value) == 3.0, (key, value)
                continue
            local = value._local_tensor
            assert local.device == device, (key, name, local.device)
            assert torch.equal(local.cpu(), part(place, full[key][name])), (key, name)


def filled_optimizer(place: Place, size: str, net: nn.Module) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    optimizer, full = adamw(net), optimizer_values(place, size, net)
    for key, parameter in net.named_parameters():
        state = optimizer.state[parameter]
        for name, value in full[key].items():
            if name == "step":
                state[name] = value.clone()
                continue
            local = part(place, value).to(place.device, copy=True)
            state[name] = compat.from_local(local, parameter)
    return optimizer, full


def get_optimizer(place: Place, api: Any, size: str) -> None:
    net = sharded(place, size, tied=False)
    optimizer, full = filled_optimizer(place, size, net)
    with place.timed():
        got = api.get_optimizer_state_dict(net, optimizer, options=full_options(api, cpu_offload=True))
    if place.is_first:
        assert set(got["state"]) == set(full), sorted(set(got["state"]) ^ set(full))
        for key, state in full.items():
            for name, value in state.items():
                assert torch.equal(got["state"][key][name], value), (key, name)


#: The cases that stock torch runs, too.
CALLS: dict[str, Callable[[Place, Any, str], None]] = {
    "load": load,
    "load-meta": functools.partial(load, meta=True),
    "load-cuda": functools.partial(load, on_device=True),
    "load-plain": load_plain,
    "load-offload": load_offloaded,
    "get-first": get_first,
    "get-all": get_all,
    "optim-load": load_optimizer,
    "optim-get": get_optimizer,
}
