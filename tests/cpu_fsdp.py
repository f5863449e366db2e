"""What FSDP2 of torch 2.4 to 2.7 lacks to train on the CPU, for tests alone; the rest is that release's own.

1. Streams and events: 2.4 and 2.5 take CUDA's, 2.6 has CPU streams without events, and those of 2.7 give None
   where HSDP asserts an event. On the CPU everything is in order, so an event has nothing to wait for.
2. Version counters: up to 2.6 the copy out of an all-gather bumps those of the unsharded parameters, and
   autograd takes that for a change by the user. On CUDA the counters are never looked at, since the storages
   are freed in between; 2.7 keeps them.
3. Average: gloo (up to 2.7 at least, not of 2.13) sums where `reduce_scatter_tensor` is asked for averages,
   and refuses it in `all_reduce`, so it is the sum, divided.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
from typing import Any

import torch
import torch.distributed as dist

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
#: Whether FSDP2 trains on the CPU as it is.
TRAINS = RELEASE >= (2, 7)
#: Neither the oldest nor a current torch: no part of the engine that moves tensors differs there from both.
BETWEEN = (2, 5) <= RELEASE <= (2, 7)
is_averaging = False


class Event:
    def record(self, stream: Any = None) -> None:
        pass


class Stream:
    def __init__(self, priority: int = 0) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or Event()


def install(average: bool = True) -> None:
    """Put in what this release lacks; without `average` only what it cannot run without."""
    global is_averaging
    is_averaging = average
    install_once()


@functools.cache
def install_once() -> None:
    if RELEASE < (2, 13):
        streams()
        averages()  # where gloo averages as it is, this changes nothing
    if not TRAINS:
        counters()


def modules() -> list[Any]:
    package = "fsdp._fully_shard" if RELEASE >= (2, 6) else "_composable.fsdp"
    names = ("_fsdp_collectives", "_fsdp_param", "_fsdp_param_group", "_fsdp_state")
    return [importlib.import_module(f"torch.distributed.{package}.{name}") for name in names]


def streams() -> None:
    if RELEASE >= (2, 6):
        torch.cpu.Stream.record_event = Stream.record_event  # type: ignore[attr-defined]
        torch.cpu.Stream.wait_event = Stream.wait_event  # type: ignore[attr-defined]
        torch.cpu.Event = Event  # type: ignore[attr-defined]
    cuda = types.SimpleNamespace(
        Stream=Stream,
        Event=Event,
        is_available=lambda: True,
        current_stream=Stream,
        stream=lambda _: contextlib.nullcontext(),
    )

    class Torch(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            return cuda if name in ("cuda", "accelerator") else getattr(torch, name)

    # From 2.6 on CUDA is asked for its stream where an all-gather was for nothing: before a frozen unit.
    for module in modules() if RELEASE < (2, 6) else modules()[2:3]:
        module.torch = Torch("torch")


def counters() -> None:
    group = modules()[2]
    copy_out = group.foreach_all_gather_copy_out

    def keeping(result: Any, params: Any, *rest: Any) -> None:
        before = {
            id(out): out._version for param in params for out in getattr(param, "all_gather_outputs", ())
        }
        copy_out(result, params, *rest)
        for param in params:
            for out in param.all_gather_outputs:
                torch._C._autograd._unsafe_set_version_counter(out, before.get(id(out), 0))

    group.foreach_all_gather_copy_out = keeping


def averages() -> None:
    def averaged(function: Any, name: str) -> Any:
        @functools.wraps(function)
        def call(*args: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, **kwargs: Any) -> Any:
            if op != dist.ReduceOp.AVG or not is_averaging:
                return function(*args, op=op, group=group, **kwargs)
            work = function(*args, op=dist.ReduceOp.SUM, group=group, **kwargs)
            (kwargs[name] if name in kwargs else args[0]).div_(dist.get_world_size(group))
            return work

        return call

    dist.reduce_scatter_tensor = averaged(dist.reduce_scatter_tensor, "output")
    dist.all_reduce = averaged(dist.all_reduce, "tensor")
