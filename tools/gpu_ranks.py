"""A rank of tools/gpu.py: runs cases in turn, each in a process group of its own, and writes down their ends.

    gpu_ranks.py PLAN RANK

All ranks share one device.
"""

from __future__ import annotations

import collections.abc
import faulthandler
import functools
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torch_dcp_backport import compat, dist_checkpointing, transfer
from torch_dcp_backport.compat import Replicate, Shard

import gpu_calls  # isort: skip
import gpu_rooms  # isort: skip
import gpu_shim  # isort: skip
from gpu_calls import (  # isort: skip
    adamw,
    check_model,
    check_optimizer,
    filled,
    filled_optimizer,
    full_options,
    functions,
    part,
    sharded,
    values,
)
from gpu_place import MIB, Place, shared_folder  # isort: skip


# --- the cases: (place, the module whose functions are called, size) ---


def reshard(place: Place, api: Any, size: str) -> None:
    """Rows to columns and back, to replicas and back."""
    mesh = place.mesh()
    if size == "small":
        shapes = [(17, 9), (8, 8), (5, 2), (3, 4, 10)]
        random = torch.Generator().manual_seed(5)
        full = {f"t{i}": torch.randn(shape, generator=random) for i, shape in enumerate(shapes)}
    else:
        full = values(size, place.mib, False)
    tensors: Any = {
        key: compat.as_dtensor(
            part(place, value).to(place.device, copy=True), mesh, [Shard(0)], value.shape, value.stride()
        )
        for key, value in full.items()
    }
    way = (
        [Shard(1), Shard(0)] if size == "large" else [Shard(1), Replicate(), Shard(1), Shard(0), Replicate()]
    )
    with place.timed():
        for placement in way:
            tensors = transfer.reshard(tensors, (mesh, [placement]))
            if size == "small":
                check_placed(place, tensors, full, placement)
    check_placed(place, tensors, full, way[-1])


def check_placed(place: Place, tensors: Mapping[str, Any], full: Mapping[str, Any], placement: Any) -> None:
    for key, tensor in tensors.items():
        want = full[key]
        if isinstance(placement, Shard):
            parts = want.chunk(place.world, placement.dim)
            want = parts[place.rank] if place.rank < len(parts) else want.narrow(placement.dim, 0, 0)
        local = tensor._local_tensor
        assert local.device == place.device, (key, local.device)
        assert torch.equal(local.cpu(), want), (key, placement)


def errors(place: Place, api: Any, size: str) -> None:
    """The same error on every rank, and the next load works."""
    net, full = sharded(place, size), values(size, place.mib, True)
    key = "layers.1.0.weight"
    bad = {
        "missing": {name: value for name, value in full.items() if name != key},
        "shape": {**full, key: torch.zeros(3, 3)},
        "unpicklable": {**full, "more": lambda: 0},
    }
    said = []
    options = full_options(api, broadcast_from_rank0=True)
    with place.timed():
        for name, source in bad.items():
            try:
                api.set_model_state_dict(net, source if place.is_first else {}, options=options)
                raise AssertionError(f"{name}: no error")
            except AssertionError:
                raise
            except Exception as error:
                said.append(f"{name}: {type(error).__name__}: {error}")
        api.set_model_state_dict(net, dict(full) if place.is_first else {}, options=options)
    check_model(place, net, full, place.device)
    theirs = place.told("said", said)
    assert all(other == said for other in theirs), f"not the same error on every rank: {theirs}"
    place.measured["errors"] = said
    place.measured["note"] = ", ".join(" ".join(text.split()[:2]).rstrip(":") for text in said)


def dist_checkpoint(place: Place, api: Any, size: str) -> None:
    """Saved by rows, loaded by rows and by columns."""
    rows, columns = 8 * place.world, 12
    full = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))

    def state(is_filled: bool, dim: int) -> dict[str, Any]:
        mine = full.chunk(place.world, dim)[place.rank]
        own = (mine.clone() if is_filled else torch.zeros(mine.shape)).to(place.device)
        same = (torch.arange(6.0) if is_filled else torch.zeros(6)).to(place.device)
        make = dist_checkpointing.ShardedTensor.from_rank_offsets
        return {
            "w": make("w", own, (dim, place.rank, place.world)),
            "same": make("same", same, replica_id=place.rank),
            "step": 5,
        }

    with shared_folder(place, "dist") as folder:
        target = folder / "a"
        if place.is_first:
            target.mkdir()
        place.outside()
        with place.timed():
            dist_checkpointing.save(state(True, 0), str(target))
            loaded = [dist_checkpointing.load(state(False, dim), str(target)) for dim in (0, 1)]
        for dim, got in enumerate(loaded):
            assert got["w"].device == got["same"].device == place.device
            assert torch.equal(got["w"].cpu(), full.chunk(place.world, dim)[place.rank]), dim
            assert torch.equal(got["same"].cpu(), torch.arange(6.0))
            assert got["step"] == 5


def manager(place: Place, api: Any, size: str) -> None:
    """Save, and load into another model and optimizer."""
    from torch_dcp_backport.checkpoint import FSDPCheckpointManager

    net, full = filled(place, size, tied=False)
    optimizer, states = filled_optimizer(place, size, net)
    other = sharded(place, size, tied=False)
    target = adamw(other)
    with shared_folder(place, "manager") as folder:
        path = str(folder / "global_step_1" / "actor")
        with place.timed():
            FSDPCheckpointManager(net, optimizer).save_checkpoint(path, None, 1)
            FSDPCheckpointManager(other, target).load_checkpoint(path)
    check_model(place, other, full, place.device)
    check_optimizer(place, other, target, states, place.device)


def messages(place: Place, api: Any, size: str, *, unlike: bool = False) -> None:
    """A message each way between the first two ranks; unlike: in a batch on one rank, in two on the other.

    Over sockets NCCL 2.28 refuses short ones that are batched unlike ("Message truncated"): the length of a
    message there depends on what else is in its batch.
    """
    nbytes = 48 if size == "small" else MIB
    own = torch.full((nbytes,), place.rank, dtype=torch.uint8, device=place.device)
    other = torch.full_like(own, 9)
    if place.rank > 1:
        with place.timed():
            pass
        return
    peer = 1 - place.rank
    send, receive = dist.P2POp(dist.isend, own, peer), dist.P2POp(dist.irecv, other, peer)
    batches = [[receive], [send]] if unlike and place.is_first else [[send, receive]]
    with place.timed():
        for batch in batches:
            for work in dist.batch_isend_irecv(batch):
                work.wait()
    assert other.cpu().eq(peer).all(), "the wrong bytes"


CASES: dict[str, Callable[[Place, Any, str], None]] = {
    **gpu_calls.CALLS,
    "reshard": reshard,
    "errors": errors,
    "dist-checkpoint": dist_checkpoint,
    "manager": manager,
    **gpu_rooms.CASES,
    **gpu_shim.CASES,
    "messages": messages,
    "messages-unlike": functools.partial(messages, unlike=True),
}


# --- faults: each rank says what it sees, and when ---


class Failing(collections.abc.Mapping):  # type: ignore[type-arg]
    """A state dict that fails at its second read of a value once the transfer has begun."""

    def __init__(self, held: dict[str, torch.Tensor]) -> None:
        self.held, self.reads = held, 0

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, key: str) -> torch.Tensor:
        self.reads += 1
        # The inventory reads each value once.
        if self.reads > len(self.held) + 1:
            raise OSError("the disk failed")
        return self.held[key].clone()


def fault(place: Place, api: Any, name: str) -> dict[str, Any]:
    net, full = sharded(place, "large"), values("large", place.mib, False)
    place.outside()
    start = time.perf_counter()
    if name == "absent" and place.rank == 1:
        time.sleep(30)
        return {"seconds": 30.0, "note": "did not call"}
    source: Any = {}
    if place.is_first:
        source = Failing(full) if name == "source" else full
    try:
        api.set_model_state_dict(net, source, options=full_options(api, broadcast_from_rank0=True))
        place.synchronize()
        said = "no error"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "note": said[:300]}


# --- the process ---


def begin(plan: Mapping[str, Any], rank: int, number: int) -> Place:
    """A new process group whose communicator has been used, as in a training that has begun."""
    store = dist.FileStore(f"{plan['folder']}/store-{number}", plan["world"])
    store.set_timeout(timedelta(seconds=plan["timeout"]))
    dist.init_process_group(
        plan["backend"],
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=plan["world"],
        timeout=timedelta(seconds=plan["timeout"]),
    )
    place = Place(plan["device"], rank, plan["world"], dist.PrefixStore("case", store), plan["mib"])
    block = torch.full((256,), float(rank), device=place.device)
    dist.broadcast(block, 0)
    every = torch.empty(256 * place.world, device=place.device)
    dist.all_gather_into_tensor(every, block)
    place.synchronize()
    assert not every.any(), "a broadcast or an all_gather is wrong"
    return place


def run_case(plan: Mapping[str, Any], rank: int, number: int) -> dict[str, Any]:
    name, who, size = plan["cases"][number]
    api = functions(who)
    start = time.perf_counter()
    place = begin(plan, rank, number)
    began = time.perf_counter() - start
    if name.startswith("fault-"):
        return fault(place, api, name[len("fault-") :])
    CASES[name](place, api, size)
    place.outside()
    dist.destroy_process_group()
    return {**place.measured, "group_seconds": began}


def main() -> int:
    plan, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    faulthandler.dump_traceback_later(plan["case_seconds"] - 2, exit=False)
    torch.set_num_threads(plan["threads"])
    if plan["device"] == "cuda":
        if plan["set_device"]:
            torch.cuda.set_device(0)
        torch.cuda.set_per_process_memory_fraction(plan["fraction"], 0)
    with open(f"{plan['folder']}/{rank}.jsonl", "a", buffering=1) as out:
        for number in range(plan["first"], len(plan["cases"])):
            print(f"--- {plan['cases'][number]}", flush=True)
            out.write(json.dumps({"case": number, "event": "start"}) + "\n")
            faulthandler.dump_traceback_later(plan["case_seconds"] - 2, exit=False)
            try:
                result = run_case(plan, rank, number)
            except BaseException as error:
                traceback.print_exc()
                said = f"{type(error).__name__}: {error}"
                out.write(json.dumps({"case": number, "event": "failed", "error": said[:600]}) + "\n")
                # Other ranks may wait for this one: the caller ends them all.
                time.sleep(plan["linger"])
                os._exit(1)
            out.write(json.dumps({"case": number, "event": "done", **result}) + "\n")
            if plan["linger"]:
                time.sleep(plan["linger"])
                os._exit(0)
            gc.collect()
            if plan["device"] == "cuda":
                torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
