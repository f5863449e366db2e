"""`FileSystemWriter` that fails where one of its threads fails, and that needs no files on this machine.

Torch's own code writes each file; the threads around it and the end of each file are ours. Must never leave a
thread writing.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from io import UnsupportedOperation
from queue import Queue
from typing import Any, Callable, NamedTuple

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

#: Seconds between two looks at whether the threads are done, after an interrupt.
PATIENCE = 0.01


class File(NamedTuple):
    """An entry of the queue of torch's loop."""

    path: Any  # as the writer's storage has it
    name: str
    items: list[WriteItem]


class FileSystemWriter:
    def write_data(self: Any, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if self.single_file_per_rank:
            parts = filesystem._split_by_size_and_type(self.thread_count, plan.items)
        else:
            parts = [[item] for item in plan.items]
        names = [
            f"{plan.storage_data.prefix}{number}{filesystem.DEFAULT_SUFFIX}" for number in range(len(parts))
        ]
        files = [File(self.fs.concat_path(self.path, name), name, part) for name, part in zip(names, parts)]

        def write(batch: Sequence[File]) -> list[list[WriteResult]]:
            """Return the results of each file."""
            waiting: Queue[File] = Queue()
            written: Queue[list[WriteResult]] = Queue()
            for file in batch:
                waiting.put(file)
            filesystem._write_files_from_queue(
                create_stream=partial(create_stream, self),
                file_queue=waiting,
                result_queue=written,
                planner=planner,
                inflight_threshhold=self.per_thread_copy_ahead,
                use_fsync=False,  # our streams do it
                thread_count=self.thread_count,
            )
            if written.qsize() != len(batch):
                # Torch's loop takes a queue.Empty that the storage or the planner raises for its own end.
                raise RuntimeError(
                    f"{batch[written.qsize()].name} was not written: something raised queue.Empty"
                )
            return [written.get() for _ in batch]

        results = (
            write(files) if self.thread_count <= 1 else write_in_threads(write, files, self.thread_count)
        )
        future: Future[list[WriteResult]] = Future()
        future.set_result([result for each in results for result in each])
        return future

    def finish(self: Any, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the checkpoint: write `.metadata` under another name, then rename it."""
        metadata.storage_data = {part.index: part.storage_data for of_rank in results for part in of_rank}
        metadata.storage_meta = self.storage_meta()
        draft = self.fs.concat_path(self.path, ".metadata.tmp")
        with create_stream(self, draft, "wb") as stream:
            pickle.dump(metadata, stream)
        place = self.metadata_path
        if self.fs.exists(place):  # not every storage renames onto what is there
            self.fs.rm_file(place)
        self.fs.rename(draft, place)


@contextlib.contextmanager
def create_stream(writer: Any, path: Any, mode: str) -> Iterator[Any]:
    """Open a file of a writer's storage; at its end force it to the disk, where the writer is to do so."""
    with writer.fs.create_stream(path, mode) as stream:
        yield stream
        if writer.sync_files:
            try:
                number = stream.fileno()
                stream.flush()  # what Python still has of the file is not the system's yet
                os.fsync(number)
            except (AttributeError, UnsupportedOperation):  # not a file of the operating system
                os.sync()


def write_in_threads(
    write: Callable[[Sequence[File]], list[list[WriteResult]]], files: Sequence[File], count: int
) -> list[list[WriteResult]]:
    """Return the results of `write` for each file, from `count` threads with the caller's among them.

    Raises the first thread's error, or an interrupt of the caller's; by then the others are done with
    the file that they were at. A second interrupt ends that wait.
    """
    waiting = deque(files)
    written: list[list[WriteResult]] = []
    failures: list[BaseException] = []
    #: Threads that are at a file, by their numbers. They say so before they look at the failures.
    busy: set[int] = set()

    def work(number: int) -> None:
        try:
            while True:
                busy.add(number)
                if failures:
                    return
                try:
                    file = waiting.popleft()
                except IndexError:
                    return
                written.extend(write([file]))
        except BaseException as error:
            failures.append(error)
        finally:
            busy.discard(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, count)]
    try:
        for thread in threads:
            thread.start()
        work(0)
        for thread in threads:
            thread.join()
    except BaseException as error:  # no room for a thread, or an interrupt
        is_second = any(not isinstance(failure, Exception) for failure in failures)
        failures.append(error)
        # An interrupted start() or join() leaves threads that say of themselves that they do not run.
        busy.discard(0)
        while busy and not is_second:
            time.sleep(PATIENCE)
    if failures:
        try:
            raise next((error for error in failures if not isinstance(error, Exception)), failures[0])
        finally:
            failures.clear()  # it holds, by its traceback, the frames that hold this list, and their tensors
    return written
