"""What the processes of the transfer benchmark run: a server that forks ranks, and the ranks' measurement.

Must measure only the call, alike for every way, and get its expected values by a formula.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import socket
import stat
import struct
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transfer_cases import CASES, MODELS, STATES, STEP_BYTES, Case, Model, Shape, unit_bytes

from torch_dcp_backport.regression import meter, ranks
from torch_dcp_backport.regression.scenarios import Leaf, rows_of, shard, value

WARM_UP = MODELS["tiny"]
STEP = 3.0
LEARNING_RATE = 0.125
TCP_BYTES_RECEIVED = 128  # where Linux's struct tcp_info has it


def listen() -> None:
    """Run the plan named on each line of stdin, in ranks forked for it; waiting costs nothing."""
    for line in sys.stdin:
        ranks.serve(line.strip())
        print("done", flush=True)


@dataclass
class Work:
    """A model, its optimizer where the case has one, and what this rank hands to the call."""

    case: Case
    shapes: Model
    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    source: dict[str, Any] = field(default_factory=dict)


def measure(api: ModuleType, case: str, model: str) -> dict[str, Any]:
    """One measurement as this rank saw it; memory in bytes above the state before the call."""
    call(api, prepare(CASES[case], WARM_UP))
    work = prepare(CASES[case], MODELS[model])
    # Held until the call is over: stock torch overwrites the caller's dict, which would free it meanwhile.
    handed_in = list(_tensors(work.source))
    released = meter.storage_bytes(handed_in)
    report = _last_report()
    _settle()
    dist.barrier()
    told = meter.forget_peak()
    before, received = meter.resident(), _received()
    dist.barrier()
    start = time.perf_counter()
    result = call(api, work)
    dist.barrier()
    seconds = time.perf_counter() - start
    peak, received_after = meter.peak_resident(), _received()
    handed_in.clear()
    work.source.clear()
    _settle()
    after = meter.resident()
    found = dict(parts(work))
    return {
        "seconds": seconds,
        "peak": _difference(peak, before) if told else None,
        # What rank 0 handed in does not count once it is let go: it is the caller's.
        "kept": _difference(after, before, plus=released),
        "due": _due(work),
        "shard": sum(meter.own_bytes(part) for part in found.values()),
        "storages": meter.storage_bytes(found.values()),
        "received": _difference(received_after, received),
        "report": None if _last_report() is report or work.case.each else _fields(_last_report()),
        "wrong": _wrong(work, result, found),
    }


def prepare(case: Case, shapes: Model) -> Work:
    """Everything up to the call."""
    model = _build(shapes, "meta" if case.meta else "cpu")
    shard(model, model.get_submodule("blocks").children(), "cpu")
    work = Work(case, shapes, model)
    if case.optimizer:
        work.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    if case.save:
        _fill(work)
    elif case.everyone or dist.get_rank() == 0:
        work.source = _source(work)
    return work


def _build(shapes: Model, device: str) -> nn.Module:
    model = nn.Module()
    blocks = nn.ModuleList()
    for block in shapes.blocks:
        unit = nn.Module()
        for index, shape in enumerate(block):
            owner = nn.Module()
            # Not a value that any source has, and written to, so that the memory is really there.
            owner.weight = nn.Parameter(
                torch.full(shape, 777, dtype=getattr(torch, shapes.dtype), device=device)
            )
            unit.add_module(f"tensor{index}", owner)
        blocks.append(unit)
    model.blocks = blocks
    return model


def _fill(work: Work) -> None:
    """Give the model, or the optimizer's states, the values that a full get has to show."""
    dtype = work.shapes.dtype
    for (key, shape), parameter in zip(work.shapes.parameters(), work.model.parameters()):
        if work.optimizer is None:
            meter.local(parameter.detach()).copy_(_mine(key, shape, dtype))
            continue
        states = {name: torch.zeros_like(parameter.detach()) for name in STATES}
        for name, state in states.items():
            meter.local(state).copy_(_mine(key + name, shape, dtype))
        work.optimizer.state[parameter] = {"step": torch.tensor(STEP), **states}


def _source(work: Work) -> dict[str, Any]:
    parameters, dtype = dict(work.shapes.parameters()), work.shapes.dtype
    if work.optimizer is None:
        return {key: _whole(key, shape, dtype) for key, shape in parameters.items()}
    group = {name: setting for name, setting in work.optimizer.param_groups[0].items() if name != "params"}
    return {
        "state": {
            key: {
                "step": torch.tensor(STEP),
                **{name: _whole(key + name, shape, dtype) for name in STATES},
            }
            for key, shape in parameters.items()
        },
        "param_groups": [{**group, "lr": LEARNING_RATE, "params": list(parameters)}],
    }


def _whole(name: str, shape: Shape, dtype: str) -> torch.Tensor:
    return value(name, Leaf(shape, dtype), "cpu")


def _mine(name: str, shape: Shape, dtype: str) -> torch.Tensor:
    rows = rows_of(shape[0], dist.get_rank(), dist.get_world_size())
    return value(name, Leaf(shape, dtype), "cpu", rows)


def call(api: ModuleType, work: Work) -> dict[str, Any]:
    """What is measured; returns what a save gives its caller."""
    case, model, optimizer = work.case, work.model, work.optimizer
    if case.save:
        options = api.StateDictOptions(full_state_dict=True, cpu_offload=True)
        state: dict[str, Any] = (
            api.get_model_state_dict(model, options=options)
            if optimizer is None
            else api.get_optimizer_state_dict(model, optimizer, options=options)
        )
        return state
    options = api.StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=not case.everyone, strict=not case.each
    )
    if optimizer is not None:
        api.set_optimizer_state_dict(model, optimizer, work.source, options=options)
    elif case.each:
        for prefix, owner in list(model.named_modules()):
            for name, _ in list(owner.named_parameters(recurse=False)):
                key = f"{prefix}.{name}"
                one = {name: work.source[key]} if key in work.source else {}
                api.set_model_state_dict(owner, one, options=options)
    else:
        api.set_model_state_dict(model, work.source, options=options)
    return {}


def parts(work: Work) -> Iterator[tuple[str, torch.Tensor]]:
    """The local tensors of the model, or of the optimizer's states."""
    for key, parameter in work.model.named_parameters():
        if work.optimizer is None:
            yield key, meter.local(parameter.detach())
        else:
            for name, state in work.optimizer.state[parameter].items():
                yield key + name, meter.local(state)


def _due(work: Work) -> int:
    """Bytes that this rank has to hold after the call and does not hold before."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if work.case.save:
        return unit_bytes(work.case, work.shapes) if rank == 0 else 0
    if work.optimizer is None and not work.case.meta:
        return 0
    total = 0
    for _, shape in work.shapes.parameters():
        first, last = rows_of(shape[0], 0, world)  # FSDP2 gives every rank as many rows as rank 0
        row = torch.Size(shape[1:]).numel() * getattr(torch, work.shapes.dtype).itemsize
        total += (last - first) * row
    if work.optimizer is None:
        return total
    return len(STATES) * total + STEP_BYTES * work.shapes.tensors


def _wrong(work: Work, result: dict[str, Any], found: dict[str, torch.Tensor]) -> int:
    """How many tensors are not, bit for bit, what the formula says, or were never asked for."""
    if not work.case.save:
        wrong = _differ(work, found, whole=False)
        if work.optimizer is not None:
            wrong += work.optimizer.param_groups[0]["lr"] != LEARNING_RATE
        return wrong
    if dist.get_rank() != 0:
        return len(list(_tensors(result)))
    if work.optimizer is None:
        return _differ(work, result, whole=True)
    states = {key + name: t for key, state in result["state"].items() for name, t in state.items()}
    return _differ(work, states, whole=True)


def _differ(work: Work, found: dict[str, torch.Tensor], *, whole: bool) -> int:
    expected = _whole if whole else _mine
    left = dict(found)
    wrong = 0
    for key, shape in work.shapes.parameters():
        for state in ("",) if work.optimizer is None else STATES:
            got = left.pop(key + state, None)
            wrong += got is None or not _same(got, expected(key + state, shape, work.shapes.dtype))
        if work.optimizer is not None:
            step = left.pop(key + "step", None)
            wrong += step is None or step.item() != STEP
    return wrong + len(left)


def _same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return got.dtype == wanted.dtype and got.shape == wanted.shape and torch.equal(got, wanted)


def _settle() -> None:
    """Give what is free back to the system, so that it hides nothing of what the call takes or keeps."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)


def _received() -> int | None:
    """Bytes that this process's TCP connections have received, by the kernel's account of each."""
    total, seen = 0, False
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as opened:
                info = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            if len(info) >= TCP_BYTES_RECEIVED + 8:
                total += struct.unpack_from("=Q", info, TCP_BYTES_RECEIVED)[0]
                seen = True
    return total if seen else None


def _difference(after: int | None, before: int | None, plus: int = 0) -> int | None:
    return None if after is None or before is None else after - before + plus


def _last_report() -> object | None:
    """What our transfer says it moved; None where it is not loaded."""
    last = getattr(sys.modules.get("torch_dcp_backport.transfer"), "last_report", None)
    return last() if callable(last) else None


def _fields(report: object | None) -> dict[str, Any]:
    names = ("operation", "bytes_received", "bytes_sent", "rounds", "staging_bytes")
    return {name: getattr(report, name, None) for name in names}


def _tensors(tree: Any) -> Iterable[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for branch in tree.values():
            yield from _tensors(branch)
