"""The steps of tools/gpu.py that take one process: gpu_alone.py env | copies | cpu | self.

Prints one line of JSON for each row of the table: what, result, ok, and seconds or memory where measured.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, Optional

import torch
import torch.distributed as dist

MIB = 2**20
CHUNK = 4 * MIB


def say(what: str, result: str, ok: Optional[bool] = True, **more: Any) -> None:
    print("ROW " + json.dumps({"what": what, "result": result, "ok": ok, **more}), flush=True)


def device() -> torch.device:
    return torch.device("cuda", 0)


def outside() -> int:
    """Bytes of the GPU outside this process's allocator."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


# --- env ---


def env() -> None:
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    say("versions", f"Python {sys.version.split()[0]}, torch {torch.__version__}, NCCL {nccl}")
    asked = ["nvidia-smi", "--query-gpu=name,driver_version,compute_mode", "--format=csv,noheader"]
    try:
        card = subprocess.run(asked, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        card = f"no nvidia-smi ({error})"
    say("device", f"{torch.cuda.get_device_name()}; {card}")
    before = torch.cuda.mem_get_info()
    torch.zeros(1, device=device())
    text = f"free {before[0] / MIB:.0f} of {before[1] / MIB:.0f} MiB"
    say("memory", text, outside=outside())
    control = shutil.which("nvidia-cuda-mps-control")
    pipe = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    running = "running" if os.path.exists(os.path.join(pipe, "control")) else "not running"
    say("MPS", f"{running}; {control or 'no nvidia-cuda-mps-control'}", None)


# --- copies ---


def copies() -> None:
    from torch_dcp_backport import compat

    # Before that nothing is pinned: it would make a context.
    torch.cuda.init()
    block = compat.host_buffer(CHUNK)
    say("host_buffer is pinned", str(block.is_pinned()), block.is_pinned())
    for name, is_pinned in (("pageable", False), ("pinned", True)):
        check_blocking(name, is_pinned)
    for name, is_pinned in (("pageable", False), ("pinned", True)):
        host = torch.randint(0, 255, (256 * MIB,), dtype=torch.uint8)
        host = host.pin_memory() if is_pinned else host
        there = torch.empty(host.numel(), dtype=torch.uint8, device=device())
        up = rate(lambda there=there, host=host: there.copy_(host), host.numel())
        down = rate(lambda there=there, host=host: host.copy_(there), host.numel())
        say(f"{name}, 256 MiB", f"to the GPU {up:.1f}, from it {down:.1f} GB/s")
    check_staging()


def check_blocking(name: str, is_pinned: bool) -> None:
    """A copy that does not ask for `non_blocking` is over when it returns, also behind a busy stream."""
    host = torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=is_pinned)
    there = torch.zeros(64 * MIB, dtype=torch.uint8, device=device())
    side = torch.cuda.Stream()
    wrong = []
    for value in range(1, 4):
        host.fill_(value)
        torch.cuda._sleep(50_000_000)
        there.copy_(host)
        host.fill_(0)  # the source is free again
        with torch.cuda.stream(side):  # which waits for nothing
            seen = there.clone()
        side.synchronize()
        if not bool(seen.eq(value).all()):
            wrong.append(f"to the GPU, {value}")
        torch.cuda._sleep(50_000_000)
        there.fill_(value + 100)
        host.copy_(there)
        if not bool(host.eq(value + 100).all()):
            wrong.append(f"from the GPU, {value}")
    say(f"blocking copies, {name}", f"wrong: {wrong}" if wrong else "over when they return", not wrong)


def rate(copy: Callable[[], object], nbytes: int) -> float:
    """Median GB/s of five."""
    seconds = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        copy()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return nbytes / statistics.median(seconds[1:]) / 1e9


def check_staging() -> None:
    """Parts on the host through the package's own chunks and their mirror."""
    from torch_dcp_backport.transfer import Box
    from torch_dcp_backport.transfer._src.chunks import Piece
    from torch_dcp_backport.transfer._src.staging import Staging

    staging = Staging(device(), 64 * MIB)
    source = torch.randn(64 * MIB)
    target = torch.empty_like(source)
    step = CHUNK // 4
    piece = Piece("w", Box((0,), (step,)), torch.float32, 0, CHUNK)
    there = torch.empty(source.numel(), device=device())
    buffers = [staging.store[at : at + CHUNK] for at in range(0, 64 * MIB, CHUNK)]

    def up() -> None:
        for number, at in enumerate(range(0, source.numel(), step)):
            buffer = buffers[number % len(buffers)]
            staging.pack(buffer, [(piece, source[at : at + step])])
            there[at : at + step].copy_(buffer.view(torch.float32))

    def down() -> None:
        for number, at in enumerate(range(0, source.numel(), step)):
            buffer = buffers[number % len(buffers)]
            buffer.view(torch.float32).copy_(there[at : at + step])
            staging.unpack(buffer, [(piece, target[at : at + step])])

    nbytes = source.numel() * 4
    rates = rate(up, nbytes), rate(down, nbytes)
    same = torch.equal(source, target)
    text = f"pack {rates[0]:.1f}, unpack {rates[1]:.1f} GB/s of pageable tensors; bytes equal: {same}"
    say("Staging, 256 MiB in chunks of 4 MiB", text, same)


# --- cpu: a process that uses CPU tensors alone makes no context on the GPU ---


def has_context() -> bool:
    """Whether this process has a CUDA context on the first GPU; asks the driver, which makes none."""
    cuda = ctypes.CDLL("libcuda.so.1")
    cuda.cuInit(0)
    flags, active = ctypes.c_uint(0), ctypes.c_int(0)
    if cuda.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)):
        raise RuntimeError("the driver does not say whether there is a context")
    return bool(active.value)


def cpu() -> None:
    is_there = has_context if torch.cuda.is_available() else lambda: False

    def stage(what: str) -> None:
        made = is_there() or torch.cuda.is_initialized()
        say(what, "a CUDA context was made here or before" if made else "no CUDA context", not made)

    import torch_dcp_backport.state_dict as api
    from torch_dcp_backport import compat, dist_checkpointing

    stage("import")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        stage("a gloo group")
        net = torch.nn.Linear(64, 64)
        full = {"weight": torch.randn(64, 64), "bias": torch.randn(64)}
        options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        api.set_model_state_dict(net, full, options=options)
        api.get_model_state_dict(net, options=api.StateDictOptions(full_state_dict=True, cpu_offload=True))
        stage("load and get")
        whole = torch.randn(512, 512)
        make = dist_checkpointing.ShardedTensor.from_rank_offsets
        os.mkdir(f"{folder}/a")
        dist_checkpointing.save({"w": make("w", whole)}, f"{folder}/a")
        stage("dist_checkpointing.save")
        # The target is strided: it is read through a block of its own.
        strided = torch.zeros(512, 512).t()
        got = dist_checkpointing.load({"w": make("w", strided)}, f"{folder}/a")
        assert torch.equal(got["w"], whole)
        stage("dist_checkpointing.load, strided")
        compat.host_buffer(CHUNK)
        stage("compat.host_buffer")
        dist.destroy_process_group()


# --- self: NCCL, one rank that sends to itself ---


def to_itself() -> None:
    """Order by streams alone, the host's cost of a chunk, NCCL's memory."""
    from torch_dcp_backport.transfer._src.staging import Staging

    torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        before = outside()
        dist.broadcast(torch.zeros(1, device=device()), 0)
        torch.cuda.synchronize()
        base = outside()
        say("a communicator", "world size 1", outside=base, added=base - before)
        staging = Staging(device(), 64 * MIB)
        source = torch.randint(0, 255, (256 * MIB,), dtype=torch.uint8, device=device())
        target = torch.empty_like(source)

        send_chunks(staging, source, target)
        same = torch.equal(source, target)
        target.zero_()
        # The stream is busy before: the host must run ahead of it, and the order still hold.
        torch.cuda.synchronize()
        torch.cuda._sleep(400_000_000)
        start = time.perf_counter()
        send_chunks(staging, source, target)
        host = time.perf_counter() - start
        torch.cuda.synchronize()
        whole = time.perf_counter() - start
        same_again = torch.equal(source, target)
        start = time.perf_counter()
        send_chunks(staging, source, target)
        host_alone = time.perf_counter() - start
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        each = 1e6 * CHUNK / source.numel()
        after = outside()
        say(
            "64 chunks of 4 MiB to itself",
            f"bytes equal: {same}; a chunk: {seconds * each:.0f} us, of the host {host_alone * each:.0f}",
            same,
            seconds=seconds,
            outside=after,
            added=after - base,
        )
        say(
            "behind a busy stream",
            f"bytes equal: {same_again}; the host was done after {host:.3f} s of {whole:.3f} s",
            same_again and host < 0.7 * whole,
        )
        dist.destroy_process_group()


def send_chunks(staging: Any, source: torch.Tensor, target: torch.Tensor) -> None:
    """As the package's exchanges do: a ring of buffers, a batch for each chunk, no wait of the host."""
    from torch_dcp_backport.transfer._src.wire import finish, post

    ring = staging.ring(8, CHUNK)
    for at in range(0, source.numel(), CHUNK):
        out, back = ring.take(CHUNK), ring.take(CHUNK)
        out.copy_(source[at : at + CHUNK])
        works = post([(dist.isend, out, 0), (dist.irecv, back, 0)], None)

        def arrive(back: torch.Tensor = back, works: Any = works, at: int = at) -> None:
            finish(works)
            target[at : at + CHUNK].copy_(back)

        ring.use(arrive)
    ring.drain()


if __name__ == "__main__":
    {"env": env, "copies": copies, "cpu": cpu, "self": to_itself}[sys.argv[1]]()
