#!/usr/bin/env python3
"""Host time of one rank's side of a transfer on an accelerator's backend, for any number of ranks.

    python3 tools/lanes.py run current -- python benchmarks/planning_accelerator.py [--ranks 8 64 1024 8192]

The package's own engines run over torch's "fake" process group: every chunk is planned, packed, sent and
emptied, and nothing travels. By default the tensors are on the meta device, where nothing is copied either;
an operation takes the host there about as long as the start of a CUDA kernel. `--device cuda` copies on a
GPU, in so much memory as the model takes.

Beside it stands a model of the wires: a broadcast or an all-gather moves all bytes once, on NVLink or over
one 400G NIC of each host, and stock torch has a collective for each tensor.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_dcp_backport import compat
from torch_dcp_backport.transfer import Agreement, Box, Call, Held, Mesh, Target, TensorInfo, Want
from torch_dcp_backport.transfer._src.engine import Engine
from torch_dcp_backport.transfer._src.gather import engine_of
from torch_dcp_backport.transfer._src.layout import layout_at
from torch_dcp_backport.transfer._src.memory import part_of
from torch_dcp_backport.transfer._src.plan import WantTable
from torch_dcp_backport.transfer._src.scatter import Offer, Scatter
from torch_dcp_backport.transfer._src.settings import DEFAULT
from torch_dcp_backport.transfer._src.staging import Staging

#: Bytes a second: what a broadcast reaches within a host of eight H100, and one 400G NIC.
WIRES = {"NVLink": 200e9, "400G": 45e9}
#: Seconds that a collective takes before its first byte, one after the other.
START = 30e-6
#: Of all tensors.
DEVICE = [torch.device("meta")]


class Done:
    """Work that is over."""

    def wait(self) -> None: ...


def nothing_travels(*_: object, **__: object) -> Done:
    """In place of collectives: those of the "fake" group copy to each rank's place."""
    return Done()


class Model(NamedTuple):
    """The numbers of a decoder."""

    hidden: int
    feed: int
    layers: int
    vocab: int
    keys: int


MODELS = {"7B": Model(4096, 11008, 32, 32000, 4096), "70B": Model(8192, 28672, 80, 128256, 1024)}


def shapes_of(model: Model) -> dict[str, tuple[int, ...]]:
    hidden, feed = model.hidden, model.feed
    layer: dict[str, tuple[int, ...]] = {
        "q": (hidden, hidden),
        "k": (model.keys, hidden),
        "v": (model.keys, hidden),
        "o": (hidden, hidden),
        "gate": (feed, hidden),
        "up": (feed, hidden),
        "down": (hidden, feed),
        "norm_1": (hidden,),
        "norm_2": (hidden,),
    }
    shapes = {f"{number}.{name}": shape for number in range(model.layers) for name, shape in layer.items()}
    return {"embed": (model.vocab, hidden), **shapes, "norm": (hidden,), "head": (model.vocab, hidden)}


def states_of(model: Model) -> dict[str, tuple[int, ...]]:
    """AdamW's."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes_of(model).items():
        shapes.update({f"{name}.step": (), f"{name}.exp_avg": shape, f"{name}.exp_avg_sq": shape})
    return shapes


class Whole:
    """Full tensors without memory."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        self.full = {key: torch.empty(shape, dtype=dtype, device=DEVICE[0]) for key, shape in shapes.items()}

    def piece(self, key: str, box: Box, shape: tuple[int, ...]) -> torch.Tensor:
        return part_of(self.full[key], Box((0,) * len(shape), shape), box)

    def release(self) -> None: ...


def agreed(shapes: Mapping[str, tuple[int, ...]], ranks: tuple[int, ...], dtype: torch.dtype) -> Agreement:
    mesh = Mesh((len(ranks),), ranks)
    wants = {
        key: Want(layout_at(shape, mesh, ((0, 1) if shape else None,)), dtype)
        for key, shape in shapes.items()
    }
    return Agreement([WantTable(wants, ranks)], DEFAULT, DEVICE[0].type)


def load_of(shapes: Mapping[str, tuple[int, ...]], ranks: tuple[int, ...], rank: int, call: Call) -> Engine:
    dtype = torch.bfloat16
    agreement = agreed(shapes, ranks, dtype)
    boxes = {key: want.layout.own_box(rank) for key, want in agreement.tables[0].wants.items()}
    targets = {
        key: Target(torch.empty(box.size, dtype=dtype, device=DEVICE[0]), box) for key, box in boxes.items()
    }
    inventory = {key: TensorInfo(shape, dtype) for key, shape in shapes.items()}
    reader = Whole(shapes, dtype) if rank == 0 else None
    engine = Scatter(call, Offer(inventory, reader), targets, agreement, None)  # type: ignore[arg-type]
    # In the group that moves nothing each rank is its own source.
    engine.source, engine.is_source = 0, rank == 0
    return engine


def get_of(shapes: Mapping[str, tuple[int, ...]], ranks: tuple[int, ...], rank: int, call: Call) -> Engine:
    dtype = torch.bfloat16
    agreement = agreed(shapes, ranks, dtype)
    held = {
        key: Held(torch.empty(want.layout.own_box(rank).size, dtype=dtype, device=DEVICE[0]), want.layout)
        for key, want in agreement.tables[0].wants.items()
    }
    out = {key: torch.empty(shape, dtype=dtype, device=DEVICE[0]) for key, shape in shapes.items()}
    return engine_of(call, agreement, held, out, None)


CASES = {
    "load": (load_of, shapes_of),
    "optimizer load": (load_of, states_of),
    "get to all": (get_of, shapes_of),
}


class Measured(NamedTuple):
    collectives: int
    #: Of tensors.
    nbytes: int
    #: Of the host, planning included.
    seconds: float


def measured(case: str, model: Model, world: int, rank: int) -> Measured:
    make, shapes_for = CASES[case]
    shapes, ranks = shapes_for(model), tuple(range(world))
    call = Call("benchmark", case, [None])
    engine = make(shapes, ranks, rank, call)
    began, host = time.perf_counter(), time.process_time()
    engine.staging = Staging(DEVICE[0], engine.staging_bytes(DEFAULT))
    engine.move(DEFAULT)
    seconds = time.process_time() - host
    if DEVICE[0].type == "cuda":
        torch.cuda.synchronize()
        print(f"# {case}, rank {rank} of {world}: with all copies {time.perf_counter() - began:.3f} s")
    nbytes = sum(2 * torch.Size(shape).numel() for shape in shapes.values())
    return Measured(engine.tally.rounds or engine.tally.chunks, nbytes, seconds)


def rows(worlds: list[int], models: list[str]) -> Iterator[str]:
    yield (
        "| case | model | ranks | collectives | host s, rank 0 | host s, another | "
        + " | ".join(f"{wire}: s, stock" for wire in WIRES)
        + " |"
    )
    yield "|---|---|---|---|---|---|" + "---|" * len(WIRES)
    for case, (_, shapes_for) in CASES.items():
        for name in models:
            for world in worlds:
                by_rank = []
                for rank in (0, world // 2):
                    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
                    by_rank.append(measured(case, MODELS[name], world, rank))
                    dist.destroy_process_group()
                first, other = by_rank
                times = []
                for speed in WIRES.values():
                    wire = first.nbytes / speed
                    ours = max(wire + START * first.collectives, *(one.seconds for one in by_rank))
                    times.append(f"{ours:.2f}, {wire + START * len(shapes_for(MODELS[name])):.2f}")
                yield (
                    f"| {case} | {name} | {world:,} | {first.collectives:,} | {first.seconds:.2f} | "
                    f"{other.seconds:.2f} | {' | '.join(times)} |"
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="meta")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1024, 8192])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    DEVICE[0] = torch.device(options.device)
    dist.broadcast = compat.all_gather_rows = nothing_travels  # type: ignore[assignment]
    # The last agreement: one small all-gather.
    Engine.conclude = lambda self: None  # type: ignore[method-assign]
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    for row in rows(options.ranks, options.models):
        print(row, flush=True)


if __name__ == "__main__":
    main()
