#!/usr/bin/env python3
"""What of the package runs in a call: files, functions, depth, closures, files that call both ways.

    python3 tools/lanes.py run 2.6 -- python tools/trace_path.py [--list save_checkpoint]

Two ranks over gloo make each call once; what ran on either of them counts. A caller is the nearest frame of
the package, so that callbacks through torch count. Comprehensions are part of the function around them. With
`--list` each function has the number of its calls on the first rank; a generator is called for each value.

The same on every run: no collector runs meanwhile, and the import hook, which depends on what was imported
before, does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = str(ROOT / "torch_dcp_backport") + os.sep
#: What runs when something is imported.
IMPORTS = PACKAGE + "activation" + os.sep
INLINE = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<module>")
WORLD = 2


class Trace:
    """The calls of one process, of all its threads."""

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()
        self.edges: set[tuple[str, str]] = set()
        self.depth = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        gc.disable()
        threading.setprofile(self.see)
        sys.setprofile(self.see)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            gc.enable()

    def see(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not counts(code):
            return
        self.calls[code] += 1
        depth, caller, outer = 1, None, frame.f_back
        while outer is not None:
            if counts(outer.f_code):
                caller = caller or outer.f_code
                depth += 1
            outer = outer.f_back
        self.depth = max(self.depth, depth)
        if caller is not None and caller.co_filename != code.co_filename:
            self.edges.add((caller.co_filename, code.co_filename))

    def to_plain(self) -> dict[str, Any]:
        return {
            "functions": sorted(
                [
                    code.co_filename[len(PACKAGE) :],
                    code.co_firstlineno,
                    name_of(code),
                    is_closure(code),
                    count,
                ]
                for code, count in self.calls.items()
            ),
            "edges": sorted([a[len(PACKAGE) :], b[len(PACKAGE) :]] for a, b in self.edges),
            "depth": self.depth,
        }


def counts(code: CodeType) -> bool:
    path = code.co_filename
    return path.startswith(PACKAGE) and not path.startswith(IMPORTS) and code.co_name not in INLINE


def name_of(code: CodeType) -> str:
    return str(getattr(code, "co_qualname", code.co_name))


def is_closure(code: CodeType) -> bool:
    """Whether a function stands in another one, and uses its variables."""
    return "__class__" not in code.co_freevars and bool(code.co_freevars)


# --- the calls ---


def small_model() -> Any:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        from torch.distributed._composable.fsdp import fully_shard
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (WORLD,))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optim.step()
    return model, optim


def of_manager(trace: dict[str, Trace], folder: str) -> None:
    from torch_dcp_backport.checkpoint import FSDPCheckpointManager

    manager = FSDPCheckpointManager(*small_model())
    with trace["save_checkpoint"].running():
        manager.save_checkpoint(f"{folder}/global_step_1", global_step=1)
    with trace["load_checkpoint"].running():
        manager.load_checkpoint(f"{folder}/global_step_1")


def of_dist_checkpointing(trace: dict[str, Trace], folder: str) -> None:
    import torch
    import torch.distributed as dist

    from torch_dcp_backport import dist_checkpointing as dc

    rank = dist.get_rank()
    path = Path(folder, "sharded")
    if rank == 0:
        path.mkdir()
    dist.barrier()

    def state() -> dict[str, Any]:
        part = dc.ShardedTensor.from_rank_offsets("w", torch.ones(4, 4), (0, rank, WORLD))
        return {"w": part, "step": 1}

    with trace["dist_checkpointing.save"].running():
        dc.save(state(), str(path))
    with trace["dist_checkpointing.load"].running():
        dc.load(state(), str(path))


def of_state_dict(trace: dict[str, Trace], folder: str) -> None:
    import torch
    import torch.distributed as dist

    from torch_dcp_backport import state_dict as api

    model, _ = small_model()
    full = {name: torch.ones(param.shape) for name, param in model.named_parameters()}
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with trace["set_model_state_dict, broadcast"].running():
        api.set_model_state_dict(model, full if dist.get_rank() == 0 else {}, options=options)


CALLS = {
    "save_checkpoint": of_manager,
    "load_checkpoint": of_manager,
    "dist_checkpointing.save": of_dist_checkpointing,
    "dist_checkpointing.load": of_dist_checkpointing,
    "set_model_state_dict, broadcast": of_state_dict,
}


def be_rank(rank: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(ROOT))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    traces = {name: Trace() for name in CALLS}
    for function in dict.fromkeys(CALLS.values()):
        function(traces, folder)
    Path(folder, f"rank{rank}.json").write_text(
        json.dumps({name: trace.to_plain() for name, trace in traces.items()})
    )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", metavar="CALL", help="every function of a call, and the pairs of files")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        be_rank(args.rank, args.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen([sys.executable, __file__, "--rank", str(rank), "--folder", folder])
            for rank in range(WORLD)
        ]
        codes = [process.wait() for process in ranks]
        if any(codes):
            sys.exit("a rank failed")
        results = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(WORLD)]
    print(f"{'call':34} {'files':>5} {'functions':>9} {'depth':>5} {'closures':>8} {'both ways':>9}")
    for name in CALLS:
        listed = [(tuple(each), count) for *each, count in results[0][name]["functions"]]
        others = [tuple(each) for result in results[1:] for *each, _ in result[name]["functions"]]
        functions = {**dict.fromkeys(others, 0), **dict(listed)}
        edges = {tuple(each) for result in results for each in result[name]["edges"]}
        pairs = sorted({tuple(sorted(edge)) for edge in edges if edge[::-1] in edges})
        files = {path for path, *_ in functions}
        depth = max(result[name]["depth"] for result in results)
        closures = sum(is_closure for *_, is_closure in functions)
        print(f"{name:34} {len(files):5} {len(functions):9} {depth:5} {closures:8} {len(pairs):9}")
        if args.list == name:
            for path, line, function, closure in sorted(functions):
                count = functions[path, line, function, closure]
                print(f"    {count:5} {path}:{line} {function}")
            for pair in pairs:
                print("    both ways:", *pair)


if __name__ == "__main__":
    main()
