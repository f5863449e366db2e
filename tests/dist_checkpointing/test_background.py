"""Saves in the background: the values of the call, one at a time, whole or absent, told on every rank."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks

from torch_dcp_backport.dist_checkpointing import (
    CheckpointingException,
    ShardedObject,
    ShardedTensor,
    check_is_distributed_checkpoint,
    load,
    save,
    storage_report,
    verify,
)
from torch_dcp_backport.dist_checkpointing._src import saver
from torch_dcp_backport.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from torch_dcp_backport.regression import memory, meter

SHAPE = (3, 5)


def state_of(value: float, *, blank: bool = False) -> dict[str, Any]:
    """A row of a tensor, a strided replica, a tensor in bf16, an object of each rank and a common value."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    fill = 0.0 if blank else value
    same = torch.zeros(5, 3) if blank else torch.arange(15.0).view(5, 3) + value
    return {
        "rows": ShardedTensor.from_rank_offsets("rows", torch.full(SHAPE, fill + rank), (0, rank, world)),
        "same": ShardedTensor.from_rank_offsets("same", same.t(), replica_id=rank),
        "half": ShardedTensor.from_rank_offsets(
            "half", torch.full((7,), fill, dtype=torch.bfloat16), (0, rank, world)
        ),
        "object": ShardedObject("object", None if blank else [value, rank], (world,), (rank,)),
        "step": 0 if blank else value,
    }


def values_of(state: dict[str, Any]) -> list[Any]:
    data = [state[key].data.clone() for key in ("rows", "same", "half")]
    return [*(part.float().tolist() for part in data), list(state["object"].data), state["step"]]


def loaded(folder: Path) -> list[Any]:
    state = load(state_of(0, blank=True), folder)
    return [
        *(state[key].float().tolist() for key in ("rows", "same", "half")),
        state["object"],
        state["step"],
    ]


def spoil(state: dict[str, Any]) -> None:
    """What training does to the tensors next."""
    for key in ("rows", "same", "half"):
        state[key].data.fill_(-1)
    state["object"].data[0] = "spoilt"


class Gate:
    """Lets writers go on when it is opened."""

    def __init__(self, fails: bool = False) -> None:
        self.opened = threading.Event()
        self.fails = fails

    @contextlib.contextmanager
    def around(self):
        native = saver.write

        def write(*args: Any) -> Any:
            assert threading.current_thread() is not threading.main_thread()
            assert self.opened.wait(30)
            if self.fails:
                raise OSError(28, "No space left on device")
            return native(*args)

        saver.write = write  # type: ignore[assignment]
        try:
            yield
        finally:
            self.opened.set()
            saver.write = native


def begin(folder: Path, value: float) -> tuple[AsyncRequest, list[Any]]:
    state = state_of(value)
    expected = values_of(state)
    request = save(state, folder, async_sharded_save=True)
    assert request is not None
    spoil(state)
    return request, expected


def goes_on(api: Any, folder: Path) -> None:
    gate, queue = Gate(), AsyncCallsQueue()
    with gate.around():
        request, expected = begin(folder, 4)
        called: list[int] = []
        request.add_finalize_fn(lambda: called.append(dist.get_rank()))
        assert queue.schedule_async_request(request) == 1
        assert queue.get_num_unfinalized_calls() == 1
        assert queue.maybe_finalize_async_calls() == []
        assert called == []
        assert not check_is_distributed_checkpoint(folder)
        if dist.get_rank() == 0:
            gate.opened.set()
            assert queue._running is not None
            assert queue._running.worker is not None
            assert queue._running.worker.wait(60)
        if dist.get_world_size() > 1:
            # The other ranks still write.
            assert queue.maybe_finalize_async_calls() == []
        gate.opened.set()
        assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    assert called == [dist.get_rank()]
    assert queue.get_num_unfinalized_calls() == 0
    assert queue.maybe_finalize_async_calls(blocking=True) == []
    assert loaded(folder) == expected
    queue.close()


@pytest.mark.parametrize("world", [1, 3])
def test_the_values_of_the_call_are_saved_once_every_rank_has_written(
    ranks, tmp_path: Path, world: int
) -> None:
    ranks(goes_on, tmp_path, world=world)
    assert verify(tmp_path) == []


def one_after_the_other(api: Any, folders: list[Path]) -> None:
    queue = AsyncCallsQueue()
    expected = []
    for number, folder in enumerate(folders):
        request, values = begin(folder, number)
        expected.append(values)
        assert queue.schedule_async_request(request) == number + 1
        # The one before is a checkpoint by now.
        assert all(check_is_distributed_checkpoint(before) for before in folders[:number])
    queue.close()
    assert [loaded(folder) for folder in folders] == expected


def test_one_save_at_a_time(ranks, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    ranks(one_after_the_other, folders, world=2)


def one_fails(api: Any, folder: Path) -> str:
    gate, queue = Gate(fails=dist.get_rank() == 1), AsyncCallsQueue()
    gate.opened.set()
    called: list[int] = []
    with gate.around():
        request, _ = begin(folder, 1)
        request.add_finalize_fn(lambda: called.append(1))
        queue.schedule_async_request(request)
        try:
            queue.close()
        except CheckpointingException as error:
            text = str(error)
    assert called == []
    assert queue.get_num_unfinalized_calls() == 0
    # The next one is none the worse.
    gate.fails = False
    request, expected = begin(folder, 2)
    queue.schedule_async_request(request)
    queue.close()
    assert loaded(folder) == expected
    return text


def test_a_rank_that_cannot_write_is_an_error_on_all(ranks, tmp_path: Path) -> None:
    texts = ranks(one_fails, tmp_path, world=3)
    assert len(set(texts)) == 1
    assert "rank 1: OSError: [Errno 28] No space left on device" in texts[0]


def refused(api: Any, folder: Path, what: str) -> str:
    state = state_of(1)
    if dist.get_rank() == 1 and what == "shape":
        state["rows"] = ShardedTensor.from_rank_offsets("rows", torch.ones(2, 2), (0, 1, 2))
    if dist.get_rank() == 1 and what == "object":
        state["object"].data = threading.Lock()
    target = folder / "gone" if dist.get_rank() == 1 and what == "folder" else folder
    try:
        save(state, target, async_sharded_save=True)
    except CheckpointingException as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "says"), [("shape", "rows"), ("object", "object"), ("folder", "no such folder")]
)
def test_what_cannot_be_saved_is_said_at_once(ranks, tmp_path: Path, what: str, says: str) -> None:
    texts = ranks(refused, tmp_path, what, world=2)
    assert len(set(texts)) == 1
    assert says in texts[0]
    assert not list(tmp_path.iterdir())


def of_its_own(
    api: Any, what: str, is_blocking: bool, kind: type[BaseException] = OSError
) -> tuple[list[str], str]:
    """A request of the user's own, of which a function raises on one rank."""
    done: list[str] = []

    def call(name: str) -> None:
        if name == what and dist.get_rank() == 1:
            raise kind(5, "Input/output error")
        done.append(name)

    request = AsyncRequest(call, ("write",), [lambda: call("finalize")], preload_fn=lambda: call("preload"))
    queue = AsyncCallsQueue()
    queue.schedule_async_request(request)
    with pytest.raises(CheckpointingException) as caught:  # noqa: PT012
        while not queue.maybe_finalize_async_calls(blocking=is_blocking):
            time.sleep(0.01)
    # In step again.
    assert queue.get_num_unfinalized_calls() == 0
    queue.schedule_async_request(AsyncRequest(None, (), [lambda: done.append("next")]))
    queue.close()
    return done, str(caught.value)


@pytest.mark.parametrize("is_blocking", [False, True])
@pytest.mark.parametrize("what", ["preload", "write"])
def test_a_function_that_raises_on_one_rank_finalizes_none(ranks, what: str, is_blocking: bool) -> None:
    (first, text), (second, other) = ranks(of_its_own, what, is_blocking, world=2)
    assert text == other
    assert "the save was finalized on no rank" in text
    assert "rank 1: OSError: [Errno 5] Input/output error" in text
    assert first == ["preload", "write", "next"]
    assert second == (["next"] if what == "preload" else ["preload", "next"])


@pytest.mark.parametrize("kind", [SystemExit, asyncio.CancelledError, KeyboardInterrupt])
def test_what_would_end_its_thread_alone_finalizes_none(ranks, kind: type[BaseException]) -> None:
    """A cancelled task of a store is no Exception."""
    (first, text), (second, other) = ranks(of_its_own, "write", True, kind, world=2)
    assert text == other
    assert f"rank 1: RuntimeError: {kind.__name__}" in text
    assert "finalize" not in first + second


def wrapped(api: Any, folder: Path, what: str, rank: int) -> list[str]:
    """A save whose request got a function of the user's, which raises on one rank; then the next save."""
    request, _ = begin(folder, 1)
    write = request.async_fn

    def fail() -> None:
        if dist.get_rank() == rank:
            raise OSError(5, "Input/output error")

    def write_and_fail() -> None:
        write()
        fail()

    if what == "async_fn":
        request = request._replace(async_fn=write_and_fail)
    elif what == "preload_fn":
        request = request._replace(preload_fn=fail)
    else:
        request.finalize_fns.insert(0, fail)
    queue = AsyncCallsQueue()
    with pytest.raises(CheckpointingException) as caught:  # noqa: PT012
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
    dist.barrier()
    left = sorted(path.name for path in folder.iterdir())
    save(state_of(2), folder)
    verify(folder)
    return [str(caught.value), *left]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["async_fn", "preload_fn", "finalize_fn"])
def test_the_folder_of_a_request_that_failed_is_free(ranks, tmp_path: Path, what: str, rank: int) -> None:
    """Also while somebody still holds the request, as a traceback does."""
    first, second = ranks(wrapped, tmp_path, what, rank, world=2)
    assert first == second
    assert f"rank {rank}: OSError: [Errno 5]" in first[0]
    assert len(first) == 1


def unlike(api: Any, root: Path, counts: list[int], failing: list[tuple[int, int]]) -> list[Any]:
    """Two saves, of which each rank adds `counts[rank]` functions; (rank, number) of those that fail."""
    rank, queue, called = dist.get_rank(), AsyncCallsQueue(), list[int]()
    texts = []

    def function(number: int) -> None:
        called.append(number)
        if (rank, number) in failing:
            raise OSError(28, f"No space left for {number}")

    for name in ("first", "second"):
        folder = root / name
        if rank == 0:
            folder.mkdir()
        dist.barrier()
        request, expected = begin(folder, 1)
        for number in range(counts[rank]):
            request.add_finalize_fn(functools.partial(function, number))
        queue.schedule_async_request(request)
        text = ""
        try:
            queue.maybe_finalize_async_calls(blocking=True)
        except CheckpointingException as error:
            text = str(error)
        texts.append(text)
        assert loaded(folder) == expected
    assert called == [*range(counts[rank])] * 2
    return texts


@pytest.mark.parametrize(
    ("counts", "failing"),
    [([1, 0, 0], []), ([0, 0, 2], []), ([2, 1, 0], [(0, 0)]), ([1, 0, 3], [(0, 0), (2, 1), (2, 2)])],
)
def test_ranks_may_add_other_numbers_of_finalize_functions(ranks, tmp_path: Path, counts, failing) -> None:
    """Megatron-LM writes its tracker on the first rank, and logs on the last rank."""
    first, *others = ranks(unlike, tmp_path, counts, failing, world=3)
    assert others == [first, first]
    for text in first:
        named = [f"rank {rank}: OSError: [Errno 28] No space left for {number}" for rank, number in failing]
        assert all(name in text for name in named)
        assert bool(text) == bool(failing)
        assert not text or "the checkpoint is made" in text


def after_a_failed_commit(api: Any, folder: Path) -> list[str]:
    queue, called = AsyncCallsQueue(), list[str]()
    request, _ = begin(folder, 1)

    def fail() -> None:
        if dist.get_rank() == 1:
            raise OSError(5, "Input/output error")

    request.finalize_fns[0] = fail
    if dist.get_rank() == 0:
        request.add_finalize_fn(lambda: called.append("the tracker"))
    queue.schedule_async_request(request)
    with pytest.raises(CheckpointingException) as caught:
        queue.close()
    return [str(caught.value), *called]


def test_nothing_follows_a_commit_that_failed(ranks, tmp_path: Path) -> None:
    first, second = ranks(after_a_failed_commit, tmp_path, world=2)
    assert first == second
    assert "rank 1: OSError: [Errno 5]" in first[0]
    assert len(first) == 1
    assert not check_is_distributed_checkpoint(tmp_path)


def never_run(api: Any, folder: Path) -> str:
    request, _ = begin(folder, 1)
    with pytest.raises(CheckpointingException) as caught:
        request.finalize_fns[0]()
    return str(caught.value)


def test_a_request_that_nobody_ran_is_no_checkpoint(ranks, tmp_path: Path) -> None:
    texts = ranks(never_run, tmp_path, world=2)
    assert len(set(texts)) == 1
    assert "its async_fn did not run" in texts[0]
    assert not check_is_distributed_checkpoint(tmp_path)


def in_each_others_way(api: Any, folder: Path) -> list[str]:
    texts = []
    request, expected = begin(folder, 1)
    request.async_fn()  # type: ignore[misc]
    with pytest.raises(CheckpointingException) as caught:
        save(state_of(2), folder)
    texts.append(str(caught.value))
    request.finalize_fns[0]()
    assert loaded(folder) == expected
    # The other way round: nothing of the first one is written when the second one comes.
    late, _ = begin(folder, 3)
    state = state_of(4)
    save(state, folder)
    with pytest.raises(CheckpointingException) as caught:
        late.execute_sync()
    texts.append(str(caught.value))
    assert loaded(folder) == values_of(state)
    # A save that was refused has taken nothing from one that waits.
    late, expected = begin(folder, 5)
    state = state_of(6)
    if dist.get_rank() == 1:
        state["rows"] = ShardedTensor.from_rank_offsets("rows", torch.ones(2, 2), (0, 1, 2))
    with pytest.raises(CheckpointingException, match="rows"):
        save(state, folder)
    late.execute_sync()
    assert loaded(folder) == expected
    # Nobody can finalize this one any more.
    late, _ = begin(folder, 7)
    late.async_fn()  # type: ignore[misc]
    del late
    save(state_of(8), folder)
    assert loaded(folder)[-1] == 8
    return texts


def test_two_saves_to_one_folder_are_not_mixed(ranks, tmp_path: Path) -> None:
    first, *others = ranks(in_each_others_way, tmp_path, world=2)
    assert others == [first]
    assert "is under way: finalize its request first" in first[0]
    assert "nothing was changed" in first[0]
    assert "a later save has taken" in first[1]
    assert verify(tmp_path) == []


def test_without_a_queue_and_without_a_group(tmp_path: Path) -> None:
    request, expected = begin(tmp_path, 3)
    request.execute_sync()
    assert loaded(tmp_path) == expected
    frozen = request.freeze()
    assert frozen.is_frozen
    with pytest.raises(RuntimeError, match="under way"):
        frozen.add_finalize_fn(print)


def test_it_holds_one_copy_and_lets_it_go(tmp_path: Path) -> None:
    if not meter.forget_peak():
        pytest.skip("this system does not tell a process's peak memory")
    data = torch.ones(8, 2**20)
    state = {"w": ShardedTensor.from_rank_offsets("w", data)}
    with memory.limit(keeps=data.nbytes + 2**16, peak=data.nbytes + 16 * 2**20) as held:
        request = save(state, tmp_path, async_sharded_save=True)
    assert held.kept >= data.nbytes
    with memory.limit(peak=16 * 2**20):
        assert request is not None
        request.execute_sync()
    # The copy is kept for the next save, until the queue is closed.
    with memory.limit(keeps=2**20, peak=16 * 2**20):
        again = save(state, tmp_path, async_sharded_save=True)
    assert again is not None
    again.execute_sync()
    with_it = meter.resident()
    AsyncCallsQueue().close()
    assert with_it - meter.resident() > data.nbytes / 2


PROGRAM = """
import os, sys, threading, time, torch
from torch_dcp_backport.dist_checkpointing import ShardedTensor, save
from torch_dcp_backport.publish import disk
from torch_dcp_backport.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
native, writing = disk.reserve, threading.Event()
def slow(*args):
    writing.set()
    time.sleep(float(sys.argv[2]))
    native(*args)
disk.reserve = slow
queue = AsyncCallsQueue()
queue.schedule_async_request(
    save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(9))}, sys.argv[1], async_sharded_save=True)
)
assert writing.wait(30)
print("goes on", flush=True)
"""


@pytest.mark.parametrize("kill", [False, True])
def test_a_process_that_ends_leaves_no_checkpoint(tmp_path: Path, kill: bool) -> None:
    """At its own end it waits for its file; killed it does not. Nobody finalized: there is no checkpoint."""
    folder = tmp_path / "saved"
    folder.mkdir()
    command = [sys.executable, "-c", PROGRAM, str(folder), "60" if kill else "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "goes on\n"
        if kill:
            os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == (-signal.SIGKILL if kill else 0)
    assert not check_is_distributed_checkpoint(folder)
    sizes = [path.stat().st_size for path in folder.glob("*.distcp")]
    assert sizes == ([0] if kill else [max(sizes)])
    request, expected = begin(folder, 1)
    request.execute_sync()
    assert loaded(folder) == expected


@pytest.mark.parametrize("fails", [False, True])
@on_ranks(world=1)
def test_progress_is_told_by_the_thread_that_writes(api: Any, tmp_path: Path, fails: bool) -> None:
    """A save in the background that is slow, and a load beside it."""
    from torch_dcp_backport.transfer import configure

    calls: list[tuple[str, int, int, bool]] = []

    def show(so_far: Any) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        calls.append((so_far.operation, so_far.done, so_far.total, is_main))
        if fails:
            raise ValueError("a callback")

    state = state_of(1)
    nbytes = sum(state[key].data.nbytes for key in ("rows", "half"))
    nbytes += state["same"].data.nbytes if dist.get_world_size() == 1 else 0
    (tmp_path / "older").mkdir(exist_ok=True)
    save(state, tmp_path / "older")
    gate, queue = Gate(), AsyncCallsQueue()
    configure(progress=show)
    try:
        with gate.around():
            queue.schedule_async_request(save(state, tmp_path, async_sharded_save=True))
            assert calls == []
            loaded(tmp_path / "older")
            while_writing, calls[:] = list(calls), []
            gate.opened.set()
            queue.close()
    finally:
        configure()
    assert {(operation, is_main) for operation, _, _, is_main in while_writing} == {("load", True)}
    assert {(operation, is_main) for operation, _, _, is_main in calls} == {("save", False)}
    done = [entry[1] for entry in calls]
    assert len(done) == 1 if fails else len(done) > 1
    if not fails:
        assert done == sorted(done)
        assert calls[-1][1] == calls[-1][2]
        assert calls[-1][2] == nbytes
    assert check_is_distributed_checkpoint(tmp_path)


def test_a_bar_of_its_own_for_each_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from torch_dcp_backport.transfer import Progress
    from torch_dcp_backport.transfer._src.settings import Bar

    shown: list[Any] = []

    class Shown:
        n = 0

        def __init__(self, *, total: int, **_: Any) -> None:
            self.total = total

        def update(self, more: int) -> None:
            self.n += more

        def close(self) -> None:
            shown.append((self.total, self.n))

    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace(tqdm=Shown))
    bar = Bar()
    bar(Progress("save", 1, 7))
    other = threading.Thread(target=lambda: [bar(Progress("save", done, 5)) for done in (2, 5)])
    other.start()
    other.join()
    bar(Progress("save", 7, 7))
    assert shown == [(5, 5), (7, 7)]


@pytest.mark.parametrize("waits", [False, True])
def test_the_report_tells_what_was_hidden(tmp_path: Path, waits: bool) -> None:
    gate, queue = Gate(), AsyncCallsQueue()
    with gate.around():
        request, _ = begin(tmp_path, 3)
        scheduled = time.perf_counter()
        queue.schedule_async_request(request)
        assert queue._running is not None
        assert queue._running.worker is not None
        if waits:
            threading.Timer(0.3, gate.opened.set).start()
        else:
            time.sleep(0.3)
            gate.opened.set()
            assert queue._running.worker.wait(60)
        began = time.perf_counter()
        queue.close()
        closing = time.perf_counter() - began
    report = storage_report()
    assert report is not None
    assert {"comparing plans", "copying", "writing", "committing"} <= set(report.seconds)
    writing = report.seconds["writing"]
    assert max(writing - closing, 0) <= report.hidden <= writing
    if waits:
        assert report.hidden <= began - scheduled
        assert report.blocked >= writing - (began - scheduled)
    else:
        assert report.hidden > 0
        assert f"hidden {report.hidden:.3f} s" in str(report)


def test_the_report_of_a_save_in_the_callers_thread(tmp_path: Path) -> None:
    for background in (False, True):
        began = time.perf_counter()
        request = save(state_of(1), tmp_path, async_sharded_save=background)
        if request is not None:
            request.execute_sync()
        spent = time.perf_counter() - began
        report = storage_report()
        assert report is not None
        assert sum(report.seconds.values()) <= report.blocked <= spent
        assert report.hidden == 0
        assert "hidden" not in str(report)
