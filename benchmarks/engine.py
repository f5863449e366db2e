"""The engine beside what its users would write: seconds and memory of exports, loads and steps.

    python3 tools/lanes.py run current -- python benchmarks/engine.py
    python3 tools/lanes.py run current -- python benchmarks/engine.py --parts rows long
    python3 tools/lanes.py run current -- python benchmarks/engine.py --parts experts

On the shape of Qwen2.5-0.5B (942 MiB in bfloat16; `--layers` makes it smaller), 4 ranks, gloo. Ways take
turns; the best is shown. Memory is private memory above that before the call, of the worst rank; CPU is
that of the median turn; collectives are those that a rank takes part in, messages between two ranks included.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
VOCABULARY, WIDTH, INNER, HEADS, GROUPS = 151936, 896, 4864, 14, 2


def private_bytes() -> int:
    """Memory of this process that no file has."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


class Meter:
    """A context: seconds, and the peak of private memory above that before."""

    def __enter__(self) -> Meter:
        self.before = self.most = private_bytes()
        self.is_done = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        while not self.is_done.wait(0.003):
            self.most = max(self.most, private_bytes())

    def __exit__(self, *error: object) -> None:
        self.is_done.set()
        self.thread.join()
        self.peak = max(self.most, private_bytes()) - self.before


def collectives(way: Callable[[], Any]) -> tuple[int, int]:
    """How many collectives a rank takes part in, by gloo's own count, and messages between two ranks."""
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode

    class Messages(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += str(func) in ("c10d.send.default", "c10d.recv_.default")
            return func(*args, **(kwargs or {}))

    group: Any = dist.group.WORLD
    before = group._get_sequence_number_for_group()
    with Messages() as messages:
        way()
    return group._get_sequence_number_for_group() - before, messages.count


def settled() -> None:
    """Give freed memory back to the system, so that it is not taken for free by what comes next."""
    import ctypes
    import gc

    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def qwen(layers: int) -> dict[str, Any]:
    return {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": VOCABULARY,
        "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "max_position_embeddings": 512,
    }  # fmt: skip


def write_files(folder: str, layers: int) -> None:
    import torch
    import transformers

    config = transformers.Qwen2Config(**qwen(layers))
    transformers.AutoModelForCausalLM.from_config(config, torch_dtype=torch.bfloat16).save_pretrained(folder)


def sharded(folder: str) -> tuple[Any, Any]:
    """A model of the folder on every rank's shards, without values."""
    import torch

    from torch_dcp_backport import engine
    from torch_dcp_backport.engine._src import config

    grid = engine.arrange("cpu")
    with engine.parameters_on_meta(torch.bfloat16):
        model = engine.language_model(config.ModelConfig(folder))
    engine.shard(model, grid)
    engine.materialize(model, torch.device("cpu"))
    return model, grid


def write_tiny(folder: str, layers: int) -> str:
    import torch
    import torch.distributed as dist
    import transformers

    tiny = f"{folder}-tiny-{layers}"
    small = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    if dist.get_rank() == 0:
        config = transformers.Qwen2Config(**{**qwen(layers), **small})
        transformers.AutoModelForCausalLM.from_config(config, torch_dtype=torch.float32).save_pretrained(tiny)
    dist.barrier()
    return tiny


def small_exports(folder: str) -> dict[str, Callable[[], Any]]:
    """As of adapters, or of many experts."""
    return {f"small {name}": way for name, way in exports(write_tiny(folder, 24)).items()}


def exports(folder: str) -> dict[str, Callable[[], Any]]:
    from torch_dcp_backport import engine

    model, _ = sharded(folder)
    engine.fill(model, folder)

    def one_by_one() -> None:
        for param in model.parameters():
            param.full_tensor()

    def in_buckets(to: int | None) -> None:
        for _ in engine.whole_tensors(dict(model.named_parameters()), to=to):
            pass

    return {
        "export: full_tensor() one by one": one_by_one,
        "export: buckets, to all": lambda: in_buckets(None),
        "export: buckets, to one rank": lambda: in_buckets(0),
    }


def loads(folder: str) -> dict[str, Callable[[], Any]]:
    """accelerate's way: the whole model on rank 0, each tensor broadcast, and each rank keeps its part."""
    import torch
    import torch.distributed as dist
    import transformers
    from torch.distributed.tensor import distribute_tensor

    from torch_dcp_backport import engine

    model, _ = sharded(folder)

    def ours() -> None:
        engine.fill(model, folder)

    def through_rank_0() -> None:
        state = {}
        if dist.get_rank() == 0:
            kind = transformers.AutoModelForCausalLM
            state = kind.from_pretrained(folder, torch_dtype=torch.bfloat16).state_dict()
        for name, param in model.named_parameters():
            whole = state[name] if state else torch.empty(param.shape, dtype=param.dtype)
            dist.broadcast(whole, 0)
            local = distribute_tensor(whole, param.device_mesh, param.placements)
            param._local_tensor.detach().copy_(local._local_tensor)

    return {"load: whole on rank 0, broadcast": through_rank_0, "load: each rank its own slices": ours}


def steps(folder: str) -> dict[str, Callable[[], Any]]:
    """A tiny model's step by the engine, and by a bare loop of FSDP2."""
    import torch

    from torch_dcp_backport import engine

    tiny = write_tiny(folder, 2)
    made = engine.FSDPEngineWithLMHead(
        {"path": tiny},
        {"mixed_precision": {"param_dtype": "fp32"}, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 4},
        {"optimizer": "AdamW", "lr": 1e-4},
        device="cpu",
    )
    made.initialize()
    ids = torch.randint(512, (8, 128))
    rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": torch.ones_like(ids)}
    positions = torch.arange(128).expand(4, 128)

    def by_engine() -> None:
        made.train_batch(rows, engine.sft_loss)

    def bare() -> None:
        """As a user writes it who knows that nothing is uneven: the same two micro-batches, loss and clip."""
        made.optimizer.zero_grad()
        for part in ids.split(4):
            mask = torch.ones_like(part)
            logits = made.module(part, mask, positions, use_cache=False).logits
            flat = logits[:, :-1].flatten(0, 1).float()
            loss = torch.nn.functional.cross_entropy(flat, part[:, 1:].flatten()) / 2
            loss.backward()
            loss.item()
        torch.nn.utils.clip_grad_norm_(made.module.parameters(), 1.0)
        made.optimizer.step()

    return {"step: bare FSDP2": bare, "step: the engine": by_engine}


def rows_of(lengths: list[int]) -> dict[str, Any]:
    """Rows of these lengths, padded on the right."""
    import torch

    ids = torch.randint(512, (len(lengths), max(lengths)))
    there = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"input_ids": ids, "attention_mask": there.long(), "loss_mask": there.long()}


def trainer(folder: str, **options: Any) -> Any:
    from torch_dcp_backport import engine

    made = engine.FSDPEngineWithLMHead(
        {"path": folder, "use_remove_padding": True},
        {"mixed_precision": {"param_dtype": "fp32"}, **options},
        {"optimizer": "AdamW", "lr": 1e-4},
        device="cpu",
    )
    made.initialize()
    return made


def unequal_rows(folder: str) -> dict[str, Callable[[], Any]]:
    """Steps on 12 rows of 16 to 512 tokens on each rank, padded and packed."""
    import torch

    from torch_dcp_backport import engine

    made = trainer(write_tiny(folder, 2), max_token_len_per_gpu=2048, micro_batch_size_per_gpu=4)
    torch.manual_seed(torch.distributed.get_rank())
    lengths = torch.randint(16, 513, (12,)).tolist()
    rows, every = rows_of(lengths), torch.tensor(sum(lengths))
    torch.distributed.all_reduce(every)
    ways: dict[str, dict[str, Any]] = {
        "padded, 4 rows": {"use_remove_padding": False, "use_dynamic_bsz": False},
        "padded, 2048 tokens": {"use_remove_padding": False},
        "packed, 2048 tokens": {},
    }
    return {
        f"{every} tokens: {name}": functools.partial(made.train_batch, {**rows, **more}, engine.sft_loss)
        for name, more in ways.items()
    }


def long_rows(folder: str) -> dict[str, Callable[[], Any]]:
    """Steps on one row, which each rank has for itself, or shares with others (Ulysses)."""
    import torch

    from torch_dcp_backport import engine

    tiny = write_tiny(folder, 2)
    sizes = [size for size in (1, 2, 4) if size <= engine.arrange("cpu").dp_size]
    engines = {
        size: trainer(tiny, max_token_len_per_gpu=2**20, ulysses_sequence_parallel_size=size)
        for size in sizes
    }
    torch.manual_seed(0)  # ranks that share a row have the same one
    return {
        f"row of {length}: {size} ranks": functools.partial(
            engines[size].train_batch, rows_of([length]), engine.sft_loss
        )
        for length in (1024, 2048, 4096)
        for size in sizes
    }


class ZeroTerm:
    """The work of a step that is there only because tokens choose experts: its seconds, calls and zeros."""

    def __init__(self) -> None:
        from torch_dcp_backport.engine._src import reach

        self.clear()
        reduce_all, complete, drop = reach.Reduction.__call__, reach.complete, reach.drop_unreached

        def reduced(reduction: Any, *unused: Any) -> None:
            began, before = time.perf_counter(), self.beside
            reduce_all(reduction, *unused)
            # FSDP2's own part is taken off: `fsdp2` below.
            self.seconds += time.perf_counter() - began - (self.beside - before)

        def completed(params: Any) -> None:
            params = list(params)
            missing = [param._unsharded_param for param in params if not reach.has_gradient(param)]
            self.zeros += len(missing)
            self.nbytes += sum(param.nbytes for param in missing)
            complete(params)

        def dropped(params: Any) -> int:
            began = time.perf_counter()
            number = drop(params)
            self.seconds += time.perf_counter() - began
            return number

        changed: Any = reach
        changed.Reduction.__call__, changed.complete, changed.drop_unreached = reduced, completed, dropped

    def clear(self) -> None:
        self.seconds, self.beside, self.zeros, self.nbytes = 0.0, 0.0, 0, 0

    def watch(self, model: Any) -> None:
        """Take the time of FSDP2's own reductions."""
        from torch_dcp_backport.engine._src import reach

        for reduction in reach.reductions(model):
            reduction.reduce_present = functools.partial(self.fsdp2, reduction.reduce_present)

    def fsdp2(self, way: Callable[..., None], *arguments: Any) -> None:
        began = time.perf_counter()
        way(*arguments)
        self.beside += time.perf_counter() - began


def experts(folder: str) -> dict[str, Callable[[], Any]]:
    """Steps of a sparse model, 4 layers of 64 experts of which a token takes 4, and the zero term in them."""
    import torch
    import torch.distributed as dist
    import transformers

    from torch_dcp_backport import engine

    sparse = f"{folder}-sparse"
    if dist.get_rank() == 0:
        config = transformers.Qwen3MoeConfig(
            vocab_size=512, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, head_dim=32,
            num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, num_experts=64,
            num_experts_per_tok=4, architectures=["Qwen3MoeForCausalLM"],
        )  # fmt: skip
        transformers.AutoModelForCausalLM.from_config(config, torch_dtype=torch.float32).save_pretrained(
            sparse
        )
    dist.barrier()
    term = ZeroTerm()
    made = trainer(sparse, max_token_len_per_gpu=2**20)
    term.watch(made.module)
    torch.manual_seed(dist.get_rank())
    batches = {"2,048 tokens": rows_of([256] * 8), "64 tokens": rows_of([64]), "8 tokens": rows_of([8])}

    def stepped(rows: dict[str, Any]) -> tuple[float, ...]:
        term.clear()
        began = time.perf_counter()
        made.train_batch(rows, engine.sft_loss)
        share = term.seconds / (time.perf_counter() - began)
        return term.seconds * 1e3, share * 100, term.zeros, term.nbytes / 2**20

    return {f"experts: {name} a rank": functools.partial(stepped, rows) for name, rows in batches.items()}


PARTS = {
    "export": exports,
    "small": small_exports,
    "load": loads,
    "step": steps,
    "rows": unequal_rows,
    "long": long_rows,
    "experts": experts,
}


def run_rank(rank: int, world: int, folder: str, args: argparse.Namespace, results: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=600)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}-meet", rank=rank, world_size=world, timeout=limit
    )
    found: dict[str, list[tuple[float, float, int]]] = {}
    counts: dict[str, tuple[int, int]] = {}
    zero_terms: dict[str, list[tuple[float, ...]]] = {}
    for part in args.parts:
        ways = PARTS[part](folder)
        is_step = part == "step"
        for number in range((20 if is_step else 1) * args.repeats + 1):
            for name, way in ways.items():
                if not number:  # the first is to warm up
                    counts[name] = collectives(way)
                    continue
                if not is_step:
                    settled()
                dist.barrier()
                cpu = time.process_time()
                with contextlib.nullcontext() if is_step else Meter() as meter:
                    began = time.perf_counter()
                    said = way()
                    cpu = time.process_time() - cpu
                    dist.barrier()
                    seconds = time.perf_counter() - began
                found.setdefault(name, []).append((seconds, cpu, meter.peak if meter else 0))
                if part == "experts":
                    zero_terms.setdefault(name, []).append(said)
        del ways
        settled()
    results.put((rank, (found, counts, zero_terms)))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["export", "small", "load", "step"])
    parser.add_argument("--json", help="write the figures of every rank and turn")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folder = f"{root}/model"
        context = multiprocessing.get_context("spawn")
        if {"export", "load"} & set(args.parts):  # the others have a tiny model
            writer = context.Process(target=write_files, args=(folder, args.layers))
            writer.start()
            writer.join()
        results = context.Queue()
        ranks = [
            context.Process(target=run_rank, args=(rank, args.world, folder, args, results))
            for rank in range(args.world)
        ]
        for process in ranks:
            process.start()
        found = dict(results.get() for _ in ranks)
        for process in ranks:
            process.join()
    for name in found[0][0]:
        by_rank = [found[rank][0][name] for rank in sorted(found)]
        seconds, cpus = (
            [max(turn) for turn in zip(*([t[place] for t in r] for r in by_rank))] for place in (0, 1)
        )
        first, *others = (min(peak for *_, peak in turns) / 2**20 for turns in by_rank)
        calls, messages = map(max, zip(*(counts[name] for _, counts, _ in found.values())))
        print(
            f"{name:38s} {min(seconds):7.3f} s (median {statistics.median(seconds):7.3f}, CPU "
            f"{statistics.median(cpus):7.4f})  {calls:4d} collectives {messages:4d} messages  peak "
            f" {first:5.0f} MiB rank 0, {max(others):5.0f} others"
        )
        if name in found[0][2]:
            columns = zip(*found[0][2][name])
            said = "zero term {:.1f} ms, {:.1f} % of the step; {:.0f} zeros of {:.1f} MiB"
            print(f"    rank 0, medians: {said.format(*map(statistics.median, columns))}")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
