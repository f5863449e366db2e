"""The table of the suite's loads, and the functions by which its ranks load and check the result.

The expected values come from a formula, slice by slice, never through the library or torch's state-dict code.
"""

from __future__ import annotations

import functools
import gc
import importlib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torch_dcp_backport.regression import meter

STAGING = 64 * meter.MIB  # the transfer's default budget
SLACK = 64 * meter.MIB  # thread stacks, gloo's and the allocators' own
STEP = 3.0
LEARNING_RATE = 0.125
STATES = ("exp_avg", "exp_avg_sq")
#: Of the values. A prime, so that no rows that changed places are equal.
PERIOD = 65_521
UNLOADED = 777  # no tensor has it


@dataclass(frozen=True)
class Leaf:
    """A parameter or buffer of a model."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    buffer: bool = False


Shapes = tuple[tuple[Leaf, ...], ...]  # the leaves of every block; a block is an FSDP2 unit

DENSE: Shapes = ((Leaf((2048, 2048)),),) * 16  # 256 MiB, no tensor over 1/16 of it
UNEVEN: Shapes = (
    (Leaf((10, 64)), Leaf((3, 32)), Leaf((1, 16)), Leaf((7,))),  # padded shards, and ranks without a row
    (Leaf((64, 33)), Leaf((5, 3, 2)), Leaf((5, 4), buffer=True), Leaf((), "int64", buffer=True)),
    (Leaf((513, 1024), "bfloat16"), Leaf((9,), "bfloat16")),
    *(((Leaf((16, 16)), Leaf((18,))),) * 20),
)
TINY: Shapes = (
    (Leaf((12, 8)),),
    (Leaf((9, 4)),),
)  # to have every lazy import and buffer in place before a measurement


@dataclass(frozen=True)
class Scenario:
    """A load: the state that is loaded, and the state of the model before."""

    name: str
    optimizer: bool = False  # AdamW's state; else the model's
    meta: bool = False  # the model is made on the meta device; else its parameters exist


SCENARIOS = {
    s.name: s
    for s in (
        Scenario("model"),
        Scenario("model-meta", meta=True),
        Scenario("optimizer", optimizer=True),
        Scenario("optimizer-meta", optimizer=True, meta=True),
    )
}


@dataclass
class Loaded:
    """A model, its optimizer where the scenario has one, and what rank 0 loads into them."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    source: dict[str, Any]  # empty on every rank but 0


def value(key: str, leaf: Leaf, device: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
    """Return the tensor that belongs under `key`, or these rows of it: exact in every dtype used here."""
    width = 1
    for size in leaf.shape[1:]:
        width *= size
    first, last = rows if rows is not None else (0, leaf.shape[0] if leaf.shape else 1)
    flat = torch.empty((last - first) * width, dtype=getattr(torch, leaf.dtype), device=device)
    numbers, start = pattern(leaf.dtype, device), first * width + zlib.crc32(key.encode())
    done = 0
    while done < len(flat):
        part = numbers[(start + done) % PERIOD :][: len(flat) - done]
        flat[done : done + len(part)] = part
        done += len(part)
    return flat.reshape((last - first, *leaf.shape[1:]) if leaf.shape else ())


@functools.cache
def pattern(dtype: str, device: str) -> torch.Tensor:
    """`PERIOD` numbers from 0 to 255, without an order."""
    numbers = torch.arange(PERIOD, dtype=torch.int64, device=device).mul_(2654435761)
    return numbers.bitwise_right_shift_(9).bitwise_and_(0xFF).to(getattr(torch, dtype))


def rows_of(size: int, rank: int, world: int) -> tuple[int, int]:
    """FSDP2's rows for a rank: equal parts rounded up, so that the last ranks may get fewer or none."""
    part = -(-size // world)
    return min(rank * part, size), min((rank + 1) * part, size)


def leaves(shapes: Shapes) -> Iterator[tuple[str, Leaf]]:
    for number, block in enumerate(shapes):
        for index, leaf in enumerate(block):
            yield f"blocks.{number}.leaf{index}", leaf


def shard_bytes(shapes: Shapes, rank: int, world: int, *, padded: bool, buffers: bool) -> int:
    """Return the bytes of a rank's parts; with FSDP2's padding, its shards are as large as rank 0's."""
    total = 0
    for _, leaf in leaves(shapes):
        size = getattr(torch, leaf.dtype).itemsize
        for extent in leaf.shape[1:]:
            size *= extent
        if leaf.buffer:
            total += size * (leaf.shape[0] if leaf.shape else 1) * buffers
        else:
            first, last = rows_of(leaf.shape[0], 0 if padded else rank, world)
            total += size * (last - first)
    return total


def build(shapes: Shapes, device: str) -> nn.Module:
    model = nn.Module()
    blocks = nn.ModuleList()
    for block in shapes:
        unit = nn.Module()
        for index, leaf in enumerate(block):
            tensor = torch.empty(leaf.shape, dtype=getattr(torch, leaf.dtype), device=device)
            if leaf.buffer:
                unit.register_buffer(f"leaf{index}", tensor)
            else:
                unit.register_parameter(f"leaf{index}", nn.Parameter(tensor))
        blocks.append(unit)
    model.blocks = blocks
    return model


def shard(model: nn.Module, units: Iterable[nn.Module], device: str) -> nn.Module:
    """Apply FSDP2 to every unit and to the model, over all ranks."""
    place = importlib.import_module("torch.distributed.fsdp")
    if not hasattr(place, "fully_shard"):  # torch 2.4 and 2.5
        place = importlib.import_module("torch.distributed._composable.fsdp")
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for module in (*units, model):
        place.fully_shard(module, mesh=mesh)
    return model


def fill(model: nn.Module) -> None:
    """Write to every local part, so that its memory is really there."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            meter.local(tensor).fill_(UNLOADED)


def prepare(api: ModuleType, scenario: Scenario, shapes: Shapes, device: str) -> Loaded:
    """Prepare everything up to the call that is checked; rank 0 gets the full state to load."""
    model = build(shapes, "meta" if scenario.meta else device)
    shard(model, model.get_submodule("blocks").children(), device)
    if not scenario.meta:
        # Not before: each rank would write to the full model, four times as much.
        fill(model)
    mine = dist.get_rank() == 0
    weights = {key: value(key, leaf, "cpu") for key, leaf in leaves(shapes)} if mine else {}
    if not scenario.optimizer:
        return Loaded(model, None, weights)
    if scenario.meta:
        call(api, Loaded(model, None, weights))
        weights.clear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    parameters = {key: leaf for key, leaf in leaves(shapes) if not leaf.buffer}
    source: dict[str, Any] = {}
    if mine:
        source["state"] = {
            key: {
                "step": torch.tensor(STEP),
                **{state: value(f"{key}.{state}", leaf, "cpu") for state in STATES},
            }
            for key, leaf in parameters.items()
        }
        group = {name: setting for name, setting in optimizer.param_groups[0].items() if name != "params"}
        source["param_groups"] = [{**group, "lr": LEARNING_RATE, "params": list(parameters)}]
    return Loaded(model, optimizer, source)


def call(api: ModuleType, loaded: Loaded) -> None:
    """Make the call that the package is about."""
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    if loaded.optimizer is None:
        api.set_model_state_dict(loaded.model, loaded.source, options=options)
    else:
        api.set_optimizer_state_dict(loaded.model, loaded.optimizer, loaded.source, options=options)


def warm_up(api: ModuleType, scenario: Scenario, device: str) -> None:
    call(api, prepare(api, scenario, TINY, device))
    gc.collect()


def parts(loaded: Loaded) -> dict[str, torch.Tensor]:
    """Return every local part that the load was to fill, by name."""
    parameters = dict(loaded.model.named_parameters())
    if loaded.optimizer is None:
        return {
            key: meter.local(t.detach()) for key, t in (*parameters.items(), *loaded.model.named_buffers())
        }
    local_parts = {}
    for key, parameter in parameters.items():
        state: Mapping[str, torch.Tensor] = loaded.optimizer.state[parameter]
        local_parts.update({f"{key}.{name}": meter.local(tensor) for name, tensor in state.items()})
    return local_parts


def wrong_values(loaded: Loaded, shapes: Shapes) -> list[str]:
    """Return the names of the parts that are not, bit for bit, this rank's slice of the source."""
    rank, world = dist.get_rank(), dist.get_world_size()
    local_parts = parts(loaded)
    expected: dict[str, tuple[Leaf, str]] = {}
    wrong = []
    for key, leaf in leaves(shapes):
        if loaded.optimizer is None:
            expected[key] = (leaf, key)
        elif not leaf.buffer:
            expected.update({f"{key}.{state}": (leaf, key) for state in STATES})
            step = local_parts.pop(f"{key}.step", None)
            if step is None or step.item() != STEP:
                wrong.append(f"{key}.step")
    for name, (leaf, _) in expected.items():
        part = local_parts.pop(name, None)
        rows = None if leaf.buffer else rows_of(leaf.shape[0], rank, world)
        if part is None or not _same(part, value(name, leaf, part.device.type, rows)):
            wrong.append(name)
    if loaded.optimizer is not None and loaded.optimizer.param_groups[0]["lr"] != LEARNING_RATE:
        wrong.append("param_groups.0.lr")
    return wrong + sorted(local_parts)  # what is left was never asked for


def _same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return got.dtype == wanted.dtype and got.shape == wanted.shape and torch.equal(got, wanted)


def room_of(what: Scenario) -> tuple[int, int]:
    """(bytes that the dense load may take above the state before it, bytes that stay of them)."""
    mine = shard_bytes(DENSE, dist.get_rank(), dist.get_world_size(), padded=True, buffers=True)
    new = mine * len(STATES) if what.optimizer else mine if what.meta else 0
    return new + STAGING + SLACK, new


def load_within_limit(api: ModuleType, scenario: str) -> dict[str, Any]:
    """Load the dense model with room for this rank's shard and a margin, far below the full model."""
    what = SCENARIOS[scenario]
    warm_up(api, what, "cpu")
    loaded = prepare(api, what, DENSE, "cpu")
    room, _ = room_of(what)
    gc.collect()
    dist.barrier()
    with meter.data_limit(room):
        enforced = _limit_holds(room)
        if enforced:
            call(api, loaded)
    loaded.source.clear()
    return {"enforced": enforced, "wrong": wrong_values(loaded, DENSE) if enforced else []}


def _limit_holds(room: int) -> bool:
    """Return whether the limit holds: some kernels take it and do not keep it."""
    try:
        torch.empty(room + SLACK, dtype=torch.uint8)
    except RuntimeError:
        return True
    return False


def load_and_look(api: ModuleType, scenario: str) -> dict[str, Any]:
    """Load the uneven model; then weigh every storage that a local part keeps alive."""
    what = SCENARIOS[scenario]
    warm_up(api, what, "cpu")
    loaded = prepare(api, what, UNEVEN, "cpu")
    call(api, loaded)
    loaded.source.clear()
    gc.collect()
    local_parts = parts(loaded)
    limits = limits_of(loaded, local_parts)
    held = {key: part.untyped_storage().nbytes() for key, part in local_parts.items()}
    return {
        "oversized": {key: [held[key], limits[key]] for key in local_parts if held[key] > limits[key]},
        "held": meter.storage_bytes(local_parts.values()),
        "limit": sum(limits.values()),
        "parts": len(local_parts),
        "wrong": wrong_values(loaded, UNEVEN),
    }


def limits_of(loaded: Loaded, local_parts: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The most that each part's storage may have: its own bytes; for a parameter, FSDP2's padded shard."""
    limits = {key: meter.own_bytes(part) for key, part in local_parts.items()}
    if loaded.optimizer is None:
        for key, leaf in leaves(UNEVEN):
            limits[key] = shard_bytes(((leaf,),), 0, dist.get_world_size(), padded=True, buffers=True)
    return limits


def load_on_gpu(api: ModuleType, scenario: str) -> dict[str, Any]:
    """Load the dense model from host memory onto the GPU, by the GPU allocator's own account."""
    what = SCENARIOS[scenario]
    warm_up(api, what, "cuda")
    loaded = prepare(api, what, DENSE, "cuda")
    room, new = room_of(what)
    gc.collect()
    dist.barrier()
    with meter.Watch(meter.gauge("cuda")) as watch:
        call(api, loaded)
        watch.stop_peak()
        loaded.source.clear()
        gc.collect()
    wrong = wrong_values(loaded, DENSE)
    return {"peak": watch.peak, "kept": watch.after, "room": room, "new": new, "wrong": wrong}
