"""Cases of tools/gpu.py --old: torch's own names on torch 2.4 to 2.6, with the shim applied and without.

As in tools/gpu_calls.py no code that is tested takes part in a check.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel

from torch_dcp_backport import compat
from torch_dcp_backport.compat import DTensor

from gpu_calls import (  # isort: skip
    CALLS,
    adamw,
    build,
    check_full,
    check_model,
    check_optimizer,
    fill,
    filled,
    filled_optimizer,
    full_options,
    functions,
    load_optimizer,
    part,
    sharded,
    values,
)
from gpu_place import MIB, Place, shared_folder  # isort: skip

HOST = torch.device("cpu")
#: Rounds in which two codes run in turn; the first one is not counted.
ROUNDS = 4
#: Of the model that does not fit: on the CPU a load has to need more than its staging.
LEAST_MIB = 512
#: A load's staging of 64 MiB, and what allocators round up.
MARGIN = 160 * MIB
#: torch's allocator for the GPU takes 20 MiB for two tensors of 8 MiB.
BLOCK_SHARE = 20 / 16


# --- more forms of the calls ---


def load_every(place: Place, api: Any, size: str, *, meta: bool = False) -> None:
    """Every rank has the full dict."""
    net, full = sharded(place, size, meta=meta), values(size, place.mib, True)
    with place.timed():
        api.set_model_state_dict(net, dict(full), options=full_options(api))
    check_model(place, net, full, place.device)


def shards(place: Place, api: Any, size: str) -> None:
    """DTensors, as sharded checkpoints have them: of the model, and copies on the host."""
    net, full = filled(place, size)
    other = sharded(place, size)
    with place.timed():
        api.set_model_state_dict(other, api.get_model_state_dict(net))
        copies = api.get_model_state_dict(net, options=api.StateDictOptions(cpu_offload=True))
    check_model(place, other, full, place.device)
    assert set(copies) == set(full), sorted(set(copies) ^ set(full))
    for key, value in copies.items():
        is_sharded = isinstance(value, DTensor)
        local = value._local_tensor if is_sharded else value
        assert local.device == HOST, (key, local.device)
        assert torch.equal(local, part(place, full[key]) if is_sharded else full[key]), key


def both(place: Place, api: Any, size: str, *, flat: bool = False) -> None:
    """Model and optimizer together, to rank 0 and from it; flat: with the optimizer's flattened keys."""
    net, full = filled(place, size, tied=False)
    optimizer, states = filled_optimizer(place, size, net)
    other = sharded(place, size, tied=False)
    target = adamw(other)
    more = {"flatten_optimizer_state_dict": flat}
    with place.timed():
        model, optim = api.get_state_dict(net, optimizer, options=full_options(api, cpu_offload=True, **more))
        options = full_options(api, broadcast_from_rank0=True, **more)
        api.set_state_dict(other, target, model_state_dict=model, optim_state_dict=optim, options=options)
    check_model(place, other, full, place.device)
    check_optimizer(place, other, target, states, place.device)
    if not place.is_first:
        return
    check_full(model, full, "cpu")
    for key, state in states.items():
        for name, want in state.items():
            got = optim[f"state.{key}.{name}"] if flat else optim["state"][key][name]
            assert got.device == HOST, (key, name, got.device)
            assert torch.equal(got, want), (key, name)


# --- checkpoints ---


def files(place: Place, api: Any, size: str) -> None:
    """dcp.save and dcp.load by the shim and by stock torch, in one process group; each reads the other's."""
    net, full = filled(place, size, tied=False)
    optimizer, states = filled_optimizer(place, size, net)
    with shared_folder(place, "dcp") as folder, place.timed():
        for writer, reader in (("shim", "shim"), ("shim", "stock"), ("stock", "shim")):
            other = sharded(place, size, tied=False)
            target = adamw(other)
            path = str(folder / f"{writer}-{reader}")
            model, optim = functions(writer).get_state_dict(net, optimizer)
            dcp.save({"model": model, "optim": optim}, checkpoint_id=path)
            api = functions(reader)
            model, optim = api.get_state_dict(other, target)
            state = {"model": model, "optim": optim}
            dcp.load(state, checkpoint_id=path)
            api.set_state_dict(
                other, target, model_state_dict=state["model"], optim_state_dict=state["optim"]
            )
            check_model(place, other, full, place.device)
            check_optimizer(place, other, target, states, place.device)
    functions("shim")


def background(place: Place, api: Any, size: str) -> None:
    """dcp.async_save of a model that is overwritten right after the call."""
    net, full = filled(place, size)
    other = sharded(place, size)
    with shared_folder(place, "async") as folder:
        with place.timed():
            future = dcp.async_save({"model": api.get_model_state_dict(net)}, checkpoint_id=str(folder / "a"))
            with torch.no_grad():
                for value in net.parameters():
                    value._local_tensor.zero_()
            future.result()
        model = api.get_model_state_dict(other)
        dcp.load({"model": model}, checkpoint_id=str(folder / "a"))
        api.set_model_state_dict(other, model)
    check_model(place, other, full, place.device)


# --- training ---


class Trained(nn.Module):
    """Words to numbers, with and without a matrix product (cuBLAS)."""

    def __init__(self, product: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(33, 24)
        last = nn.Linear(24, 17) if product else nn.Identity()
        self.layers = nn.ModuleList([nn.LayerNorm(24), last])

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.emb(words)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def step(place: Place, net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """The same batch on every rank: the mean of their gradients is that of one process."""
    optimizer.zero_grad()
    if place.kind == "cuda" or compat.TRAINS_ON_CPU:
        words = (torch.arange(66, device=place.device) * (number + 2)) % 33
        wanted = torch.linspace(-1, 1, 66, device=place.device)
        made = net(words)
        # Without weights a LayerNorm leaves nothing but rounding of the gradients below it.
        weights = torch.linspace(0.5, 2, made.shape[1], device=place.device)
        ((made * weights).mean(1) - wanted).square().mean().backward()
    else:
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))
    optimizer.step()


def train(place: Place, api: Any, size: str, *, product: bool = False, offload: bool = False) -> None:
    """Three steps, a save of the full state, a load into a model from meta, and two steps of both.

    Beside one process that trains without FSDP2.
    """

    def made() -> nn.Module:
        torch.manual_seed(1)
        return Trained(product)

    def cut(device: torch.device) -> nn.Module:
        fsdp2 = compat.fsdp2()
        more = {}
        if offload:
            more["offload_policy"] = fsdp2.CPUOffloadPolicy(pin_memory=place.kind == "cuda")
        with device:
            net = made()
        for layer in (net.emb, *(layer for layer in net.layers if any(True for _ in layer.parameters()))):
            fsdp2.fully_shard(layer, mesh=place.mesh(), **more)
        return fsdp2.fully_shard(net, mesh=place.mesh(), **more)

    alone, net = made().to(place.device), cut(place.device)
    full = {key: value.detach().cpu().clone() for key, value in alone.named_parameters()}
    fill(place, net, full)
    optimizers = {id(each): torch.optim.AdamW(each.parameters(), lr=0.01) for each in (alone, net)}
    for number in range(3):
        for each in (alone, net):
            step(place, each, optimizers[id(each)], number)
    other = cut(torch.device("meta"))
    with place.timed():
        options = full_options(api, cpu_offload=True)
        model = api.get_model_state_dict(net, options=options)
        optim = api.get_optimizer_state_dict(net, optimizers[id(net)], options=options)
        options = full_options(api, broadcast_from_rank0=True, cpu_offload=offload)
        api.set_model_state_dict(other, model, options=options)
        optimizers[id(other)] = torch.optim.AdamW(other.parameters(), lr=0.5)
        api.set_optimizer_state_dict(other, optimizers[id(other)], optim, options=options)
    assert same(net, other, optimizers), "the loaded state is not the saved one"
    for number in range(3, 5):
        for each in (alone, net, other):
            step(place, each, optimizers[id(each)], number)
    plain = dict(alone.named_parameters())
    for trained in (net, other):
        for key, value in trained.named_parameters():
            want = part(place, plain[key].detach().cpu())
            torch.testing.assert_close(value._local_tensor.detach().cpu(), want, rtol=1e-4, atol=1e-5)
    place.measured["note"] = f"goes on with the same bits: {same(net, other, optimizers)}"


def same(net: nn.Module, other: nn.Module, optimizers: dict[int, torch.optim.Optimizer]) -> bool:
    """Whether this rank has the same bits of two models and their optimizers."""
    wrong = []
    for (key, one), two in zip(net.named_parameters(), other.parameters()):
        pairs = {"": (one, two)}
        states = optimizers[id(net)].state[one], optimizers[id(other)].state[two]
        assert set(states[0]) == set(states[1]), (key, sorted(states[1]))
        pairs.update({name: (states[0][name], states[1][name]) for name in states[0]})
        for name, tensors in pairs.items():
            first, second = (getattr(t, "_local_tensor", t).detach().cpu() for t in tensors)
            if not torch.equal(first, second):
                wrong.append(f"{key}.{name}")
    if wrong:
        print("not the same:", wrong, flush=True)
    return not wrong


# --- other ways to shard ---


def hybrid(place: Place, api: Any, size: str) -> None:
    """HSDP: two replicas (as many as there are ranks, if these are odd), sharded within each."""
    across = 2 if place.world % 2 == 0 else place.world
    shape = (across, place.world // across)
    mesh = init_device_mesh(place.kind, shape, mesh_dim_names=("replicate", "shard"))
    here = dataclasses.replace(place, rank=mesh.get_local_rank("shard"), world=shape[1])
    full = values(size, place.mib, False)
    net, other = (sharded(place, size, tied=False, mesh=mesh) for _ in range(2))
    optimizer, states = filled_optimizer(here, size, net)
    fill(here, net, full)
    target = adamw(other)
    try:
        with place.timed():
            options = full_options(api, cpu_offload=True)
            model, optim = api.get_state_dict(net, optimizer, options=options)
            options = full_options(api, broadcast_from_rank0=True)
            api.set_state_dict(other, target, model_state_dict=model, optim_state_dict=optim, options=options)
    except NotImplementedError as error:
        if "2D state_dict" not in str(error):
            raise
        place.measured["note"] = "FSDP2 of torch 2.4 gives no state dict of HSDP"
        return
    check_model(here, other, full, place.device)
    check_optimizer(here, other, target, states, place.device)
    if place.is_first:
        check_full(model, full, "cpu")
    place.measured["note"] = f"{shape[0]} replicas of {shape[1]} shards"


def fsdp1(place: Place, api: Any, size: str) -> None:
    """FSDP1: a load from rank 0, an optimizer to rank 0 and from it, a get."""

    def made() -> nn.Module:
        with place.device:
            net = build(place, size, tied=False)
        options: Any = {"device_id": place.device}
        for number, layer in enumerate(net.layers):
            net.layers[number] = FullyShardedDataParallel(layer, **options)
        return FullyShardedDataParallel(net, **options)

    def stepped(net: nn.Module, factor: float) -> torch.optim.Optimizer:
        optimizer = adamw(net)
        for parameter in net.parameters():
            parameter.grad = torch.linspace(0, factor * (place.rank + 1), parameter.numel()).to(parameter)
        optimizer.step()
        return optimizer

    full, net, other = values(size, place.mib, False), made(), made()
    optimizer, target = stepped(net, 1.0), stepped(other, 0.0)
    with place.timed():
        options = full_options(api, broadcast_from_rank0=True)
        api.set_model_state_dict(net, dict(full) if place.is_first else {}, options=options)
        optim = api.get_optimizer_state_dict(net, optimizer, options=full_options(api, cpu_offload=True))
        api.set_optimizer_state_dict(other, target, optim, options=options)
    with FullyShardedDataParallel.summon_full_params(net, writeback=False):
        for key, value in (*net.named_parameters(), *net.named_buffers()):
            name = key.replace("_fsdp_wrapped_module.", "")
            assert torch.equal(value.detach().cpu(), full[name]), name
    for one, two in zip(net.parameters(), other.parameters()):
        for name, value in optimizer.state[one].items():
            assert torch.equal(value.cpu(), target.state[two][name].cpu()), name
    got = api.get_model_state_dict(net, options=full_options(api, cpu_offload=True))
    if place.is_first:
        check_full(got, full, "cpu")


# --- memory and seconds ---


def short(place: Place, api: Any, size: str, *, call: str, copies: int) -> None:
    """A call with room for a margin and for what it leaves: so many copies of this rank's shards."""
    place.mib = max(3 * place.mib, LEAST_MIB)
    share = BLOCK_SHARE if place.kind == "cuda" else 1
    place.room = int(copies * share * (place.mib // place.world)) * MIB + MARGIN
    CALLS[call](place, api, size)
    note = f"{place.mib} MiB of model, {place.room / MIB:.0f} MiB of room for a rank"
    if "left" in place.measured:
        note += f"; the GPU had {place.measured['left'] / MIB:.0f} MiB left"
    place.measured["note"] = note


def beside(place: Place, api: Any, size: str, *, call: str) -> None:
    """The shim and stock torch in turn, in one process group."""
    figures: dict[str, list[dict[str, float]]] = {"shim": [], "stock": []}
    for _ in range(ROUNDS):
        for who, found in figures.items():
            api = functions(who)
            try:
                CALLS[call](place, api, size)
            except Exception as error:
                if who == "shim":
                    raise
                # Right after the shim's: what is measured is that.
                place.measured["note"] = f"stock: {type(error).__name__}: {error}"[:200]
                functions("shim")
                return
            found.append({name: place.measured.get(name) or 0 for name in ("seconds", "peak", "added")})
    functions("shim")
    by_rank = place.told("figures", figures)
    seconds = {
        who: statistics.median(
            max(rank[who][number]["seconds"] for rank in by_rank) for number in range(1, ROUNDS)
        )
        for who in figures
    }
    peaks = {who: max(f["peak"] for rank in by_rank for f in rank[who]) / MIB for who in figures}
    note = f"shim {seconds['shim']:.3f} s, stock {seconds['stock']:.3f} s"
    note += f" ({seconds['shim'] / seconds['stock']:.2f} of it)"
    if place.kind == "cuda":
        note += f"; largest peak {peaks['shim']:.1f}, stock's {peaks['stock']:.1f}"
    place.measured.update(seconds=seconds["shim"], note=note, figures=figures)
    place.measured.pop("report", None)


CASES: dict[str, Callable[[Place, Any, str], None]] = {
    "load-every": load_every,
    "load-every-meta": functools.partial(load_every, meta=True),
    "shards": shards,
    "both": both,
    "both-flat": functools.partial(both, flat=True),
    "optim-offload": functools.partial(load_optimizer, offload=True),
    "files": files,
    "async-save": background,
    "train": train,
    "train-product": functools.partial(train, product=True),
    "train-offload": functools.partial(train, offload=True),
    "hsdp": hybrid,
    "fsdp1": fsdp1,
    "short-load": functools.partial(short, call="load", copies=0),
    "short-meta": functools.partial(short, call="load-meta", copies=1),
    "short-optim": functools.partial(short, call="optim-load", copies=2),
    "beside-load": functools.partial(beside, call="load"),
    "beside-meta": functools.partial(beside, call="load-meta"),
    "beside-get-first": functools.partial(beside, call="get-first"),
    "beside-get-all": functools.partial(beside, call="get-all"),
    "beside-optim-load": functools.partial(beside, call="optim-load"),
    "beside-optim-get": functools.partial(beside, call="optim-get"),
}
