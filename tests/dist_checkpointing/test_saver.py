"""The process that writes a save in the background, and the memory that it reads."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import os
import signal
import socket
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torch_dcp_backport.dist_checkpointing import (
    CheckpointingException,
    ShardedObject,
    ShardedTensor,
    load_plain_tensors,
    save,
    verify,
)
from torch_dcp_backport.dist_checkpointing._src import body, messages, saver, staged
from torch_dcp_backport.dist_checkpointing._src.records import form_of
from torch_dcp_backport.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from torch_dcp_backport.transfer import configure
from torch_dcp_backport.transfer._src import once

MIB = 2**20
#: Linux's flag of `mmap`, which the module of this name does not have.
MAP_FIXED_NOREPLACE = 0x100000


def state_of(number: int, small: int = 2000) -> dict[str, Any]:
    """More tensors than a thread writes, with every kind of record: of 33 KiB, of 9 MiB, strided, empty."""
    tensors = {f"small.{key}": torch.full((key % 7, 3), float(number)) for key in range(small)}
    tensors |= {f"half.{key}": torch.full((5,), number, dtype=torch.bfloat16) for key in range(9)}
    tensors |= {
        "scalar": torch.tensor(number),
        "eighths": torch.full((5,), number, dtype=torch.float32).to(torch.float8_e4m3fn),
        "words": torch.tensor([number, 2, 3], dtype=torch.uint16),
        "weight": torch.nn.Parameter(torch.full((5,), float(number))),
        "table": torch.arange(8250.0) + number,
        "columns": (torch.arange(6.0).view(2, 3) + number).t(),
        "flags": torch.tensor([True, False, True]),
        "waves": torch.full((3,), 1j * number).conj(),
        "large": torch.arange(9 * MIB // 4, dtype=torch.int32) + number,
    }
    describe = ShardedTensor.from_rank_offsets
    state: dict[str, Any] = {key: describe(key, tensor) for key, tensor in tensors.items()}
    return {**state, "object": ShardedObject("object", {"number": number}, (1,), (0,)), "step": number}


def begin(folder: Path, number: int, **options: Any) -> Any:
    folder.mkdir()
    state = state_of(number, **options)
    request = save(state, folder, async_sharded_save=True)
    for part in state.values():
        if isinstance(part, ShardedTensor):
            part.data.detach().copy_(torch.zeros(part.data.shape))
    return request


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.distcp")}


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, bytes]:
    """The files of the first state, as `save` writes them at once."""
    (tmp_path / "at once").mkdir()
    save(state_of(1), tmp_path / "at once")
    return files_of(tmp_path / "at once")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the processes that were started."""
    pids: list[int] = []
    native = os.posix_spawn

    def spawn(*args: Any, **options: Any) -> int:
        pids.append(native(*args, **options))
        return pids[-1]

    monkeypatch.setattr(os, "posix_spawn", spawn)
    staged.let_go()
    return pids


@pytest.mark.parametrize("choice", ["", "thread"])
def test_a_process_writes_what_a_thread_would(
    tmp_path: Path, expected, started, choice: str, monkeypatch, caplog
) -> None:
    monkeypatch.setenv(saver.VARIABLE, choice)
    calls: list[tuple[int, int]] = []
    configure(progress=lambda so_far: calls.append((so_far.done, so_far.total)))
    try:
        request = begin(tmp_path / "saved", 1)
        request.execute_sync()
    finally:
        configure()
    assert files_of(tmp_path / "saved") == expected
    assert verify(tmp_path / "saved") == []
    assert len(started) == (not choice)
    assert not caplog.records
    assert calls[-1][0] == calls[-1][1] > 9 * MIB
    for pid in started:  # it has ended, and nothing of it waits to be heard
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def test_a_small_share_is_written_by_the_thread(tmp_path: Path, started) -> None:
    (tmp_path / "saved").mkdir()
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(9))}
    request = save(state, tmp_path / "saved", async_sharded_save=True)
    assert request is not None
    request.execute_sync()
    assert not started
    assert not staged._kept


def test_no_choice_is_an_error_of_the_call(ranks, tmp_path: Path) -> None:
    first, second = ranks(with_no_choice, tmp_path, world=2)
    assert first == second
    assert "TORCH_DCP_BACKPORT_SAVER='fork' is neither process (or unset) nor thread" in first
    assert "rank 1" in first
    assert "gone" not in first


def with_no_choice(api: Any, folder: Path) -> str:
    """The checkpoint that was in the folder stays."""
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(9), replica_id=dist.get_rank())}
    save(state, folder)
    if dist.get_rank() == 1:
        os.environ[saver.VARIABLE] = "fork"
    try:
        with pytest.raises(CheckpointingException) as caught:
            save(state, folder, async_sharded_save=True)
    finally:
        os.environ.pop(saver.VARIABLE, None)
    assert verify(folder) == []
    return str(caught.value)


@pytest.mark.parametrize(("first", "then"), [("process", "thread"), ("thread", "process"), ("", "fork")])
def test_the_choice_is_of_the_call(tmp_path: Path, expected, started, first, then, monkeypatch) -> None:
    """It may change until the files are written."""
    monkeypatch.setenv(saver.VARIABLE, first)
    request = begin(tmp_path / "saved", 1)
    monkeypatch.setenv(saver.VARIABLE, then)
    request.execute_sync()
    assert files_of(tmp_path / "saved") == expected
    assert len(started) == (first != "thread")


class Changing(dict[str, str]):
    """Another thread removes a variable while the environment is read."""

    def values(self) -> Any:
        raise KeyError("GONE")


DYING = """
import os, signal, socket, struct
door = socket.socket(fileno=0)
_, fds, _, _ = socket.recv_fds(door, 9, 2)
os.pwrite(fds[1], b"torn" * 100_000, 0)
door.sendall(struct.pack("<cQ", b"m", 400_000))
os.kill(os.getpid(), signal.SIGKILL)
"""
FULL = """
import pickle, socket, struct
door = socket.socket(fileno=0)
socket.recv_fds(door, 9, 2)
answer = pickle.dumps((28, "No space left on device"))
door.sendall(struct.pack("<cQ", b"f", len(answer)) + answer)
while door.recv(65536): pass
"""


@pytest.mark.parametrize(
    "what",
    [
        *("killed", "not there", "no interpreter", "another program", "a program with Python", "no memory"),
        "an environment that changes",
    ],
)
def test_a_process_that_is_gone_is_not_needed(
    tmp_path: Path, expected, what: str, monkeypatch, caplog
) -> None:
    program = tmp_path / "dying.py"
    if what == "killed":
        program.write_text(DYING)
    monkeypatch.setattr(saver, "PROGRAM", program)
    if what == "no interpreter":
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    if what == "no memory":
        staged.let_go()
        monkeypatch.delattr(os, "memfd_create")
    if what == "another program":
        monkeypatch.setattr(sys, "executable", "/bin/sh")
    if what == "a program with Python":
        # It would start as a whole, and wait.
        (tmp_path / "copy-of-python").symlink_to("/bin/cat")
        monkeypatch.setattr(sys, "executable", str(tmp_path / "copy-of-python"))
    if what == "an environment that changes":
        monkeypatch.setattr(os, "environ", Changing(os.environ))
    calls: list[tuple[int, int]] = []
    configure(progress=lambda so_far: calls.append((so_far.done, so_far.total)))
    once.forget()
    try:
        for name in ("first", "second"):
            begin(tmp_path / name, 1).execute_sync()
            assert files_of(tmp_path / name) == expected
    finally:
        configure()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "a thread writes" in caplog.text
    # Bytes that were written twice are told once.
    each = [done for done, _ in calls[: len(calls) // 2]]
    assert each == sorted(each)
    assert calls[-1][0] == calls[-1][1]


def test_a_process_that_has_ended_is_one_warning_however_that_is_heard(
    tmp_path: Path, expected, monkeypatch, caplog
) -> None:
    ends = iter(["has ended (Broken pipe)", "has ended (Connection reset)", "has ended before its work"])

    def order(self: Any, *args: Any) -> None:
        raise saver._Gone(next(ends))

    monkeypatch.setattr(saver._Process, "order", order)
    once.forget()
    for name in ("first", "second", "third"):
        begin(tmp_path / name, 1).execute_sync()
        assert files_of(tmp_path / name) == expected
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_disk_that_is_full_for_the_process_is_an_error(tmp_path: Path, monkeypatch) -> None:
    program = tmp_path / "full.py"
    program.write_text(FULL)
    monkeypatch.setattr(saver, "PROGRAM", program)
    queue = AsyncCallsQueue()
    queue.schedule_async_request(begin(tmp_path / "saved", 1))
    with pytest.raises(CheckpointingException, match=r"OSError: \[Errno 28\] No space left on device"):
        queue.close()


@pytest.mark.parametrize("is_ordered", [False, True])
def test_the_process_ends_without_the_trainer(tmp_path: Path, is_ordered: bool, capfd) -> None:
    nbytes = 64 * MIB
    memory = staged.Memory(nbytes, is_shared=True)
    places = body.Places([form_of(torch.uint8, (nbytes,))], array("L", [0]), array("Q", [0]))
    process = saver._Process()
    with open(tmp_path / "file", "wb") as file:
        if is_ordered:
            order = messages.Order(nbytes, places, [], body.Output("file", nbytes, [], []))
            process.order(order, memory.fd, file.fileno())
        process._door.close()
        assert os.waitpid(process._pid, 0)[1] == 0
    assert (tmp_path / "file").stat().st_size < nbytes
    assert capfd.readouterr().err == ""


def test_the_process_has_nothing_else_of_the_trainer(tmp_path: Path) -> None:
    """A backend's socket that programs inherit would be open for its peers until the file is written."""
    ours, peer = socket.socketpair()
    ours.set_inheritable(True)
    memory = staged.Memory(MIB, is_shared=True)
    places = body.Places([form_of(torch.uint8, (MIB,))], array("L", [0]), array("Q", [0]))
    process = saver._Process()
    try:
        with open(tmp_path / "file", "wb") as file:
            # The answer is too long for the door: the process waits until it is read.
            objects = [b"object"] * 50_000
            order = messages.Order(MIB, places, objects, body.Output("file", MIB, [], []))
            process.order(order, memory.fd, file.fileno())
        assert process._door.recv(1, socket.MSG_PEEK)
        links = Path(f"/proc/{process._pid}/fd").iterdir()
        opened = {os.readlink(link) for link in links if int(link.name) > 2}
        ours.close()
        peer.settimeout(30)
        assert peer.recv(1) == b""
    finally:
        process.close()
        peer.close()
    assert opened == {str(tmp_path / "file"), "/memfd:torch_dcp_backport (deleted)"}


def test_saves_share_memory_one_after_the_other(tmp_path: Path, monkeypatch) -> None:
    """Two that are under way at a time do not, and a changed tensor reaches neither."""
    made: list[int] = []
    native = staged.Memory._map

    def count(memory: staged.Memory) -> None:
        made.append(memory.nbytes)
        native(memory)

    monkeypatch.setattr(staged.Memory, "_map", count)
    staged.let_go()
    for number in range(3):
        begin(tmp_path / f"{number}", number).execute_sync()
    assert len(made) == 1
    first, second = begin(tmp_path / "a", 10), begin(tmp_path / "b", 20)
    assert len(made) == 2
    second.execute_sync()
    third = begin(tmp_path / "c", 30)
    assert len(made) == 2
    first.execute_sync()
    third.execute_sync()
    for name, number in {"0": 0, "1": 1, "2": 2, "a": 10, "b": 20, "c": 30}.items():
        tensors = load_plain_tensors(tmp_path / name)
        assert tensors["scalar"] == number
        assert torch.equal(tensors["large"], torch.arange(9 * MIB // 4, dtype=torch.int32) + number)
        assert tensors["small.6"].unique().tolist() == [number]
    # One is kept, and none of them when a queue is closed.
    assert len(staged._kept) == 1
    descriptor = staged._kept[0].fd
    AsyncCallsQueue().close()
    assert not staged._kept
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(descriptor)


def test_memory_that_is_much_too_large_is_not_kept() -> None:
    staged.let_go()
    large = staged.take(64 * MIB, is_kept=True)
    staged.give_back(large)
    assert staged.take(32 * MIB, is_kept=True) is large
    staged.give_back(large)
    small = staged.take(10 * MIB, is_kept=True)
    assert small.nbytes == 10 * MIB
    staged.give_back(small)
    staged.let_go()


def test_a_save_that_is_given_up_leaves_its_memory(tmp_path: Path) -> None:
    staged.let_go()
    queue = AsyncCallsQueue()
    request = begin(tmp_path / "saved", 1)
    request.abandon_fns[0]()
    assert len(staged._kept) == 1
    queue.close()


@pytest.mark.parametrize("is_under_way", [False, True])
def test_a_forked_process_holds_no_memory(is_under_way: bool) -> None:
    """Neither its descriptors nor its place, where the process may have other memory by now."""
    staged.let_go()
    gc.collect()
    # What the error of another test still holds is not ours to count.
    before = len(memories_open())
    memory: Any = staged.take(64 * MIB, is_kept=True)
    at = memory.tensor.data_ptr()
    if not is_under_way:
        staged.give_back(memory)
    pid = os.fork()
    if not pid:
        # Exactly in the old place, and an error where something is there: where the kernel would put it
        # depends on what ran before.
        map_at = ctypes.CDLL(None, use_errno=True).mmap
        map_at.restype = ctypes.c_void_p
        map_at.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
        is_met = map_at(at, 64 * MIB, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == at
        memory = None
        gc.collect()
        if is_met:
            ctypes.memset(at, 1, 64 * MIB)
        os._exit(len(memories_open()) + 10 * len(staged._kept) + 100 * (not is_met))
    # No signal, and with other memory in the old place.
    assert os.waitpid(pid, 0)[1] == 0
    assert len(memories_open()) == before + 1
    memory = None
    staged.let_go()
    assert len(memories_open()) == before


@pytest.mark.parametrize("small", [9, 2000])
def test_a_request_runs_in_the_process_that_made_it(tmp_path: Path, small: int) -> None:
    """With a small share, too, which is not in shared memory."""
    request = begin(tmp_path / "saved", 1, small=small)
    before = list((tmp_path / "saved").iterdir())
    pid = os.fork()
    if not pid:
        told = ""
        try:
            request.async_fn(*request.async_fn_args)
        except RuntimeError as error:
            told = str(error)
        os._exit("this one was forked from it" not in told)
    assert os.waitpid(pid, 0)[1] == 0
    assert list((tmp_path / "saved").iterdir()) == before
    request.execute_sync()
    assert verify(tmp_path / "saved") == []


def memories_open() -> list[str]:
    links = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    return [link for link in links if "memfd:torch_dcp_backport" in link]


def test_a_forked_process_does_not_keep_the_other_end_open(tmp_path: Path) -> None:
    process = saver._Process()
    ready, go = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(go)
        os.read(ready, 1)
        os._exit(0)
    process._door.close()
    # It ends while the forked process is there.
    assert os.waitpid(process._pid, 0)[1] == 0
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    os.close(go)
    os.waitpid(pid, 0)


def test_a_process_that_has_ended_sends_no_signal(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(saver, "PROGRAM", tmp_path / "not there.py")
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        process = saver._Process()
        os.waitid(os.P_PID, process._pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(saver._Gone, match="has ended"):
            process.order(messages.Order(1, body.Places([], [], []), [], body.Output("", 0, [], [])))
    finally:
        signal.signal(signal.SIGPIPE, before)
        process.close()


def test_many_tensors_without_values(tmp_path: Path, caplog) -> None:
    (tmp_path / "saved").mkdir()
    tensors = {f"{key}": torch.empty(0, 3) for key in range(2000)}
    state: dict[str, Any] = {key: ShardedTensor.from_rank_offsets(key, part) for key, part in tensors.items()}
    request = save(state, tmp_path / "saved", async_sharded_save=True)
    assert request is not None
    request.execute_sync()
    assert verify(tmp_path / "saved") == []
    assert not caplog.records
