"""`FileSystemWriter.write_data` that fails where one of its threads fails.

Torch's own code writes each file; only the threads around it are ours. Must never leave one of them running.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from queue import Queue
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from torch.distributed.checkpoint import filesystem
from torch.futures import Future

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
    from torch.distributed.checkpoint.storage import WriteResult


class File(NamedTuple):
    """What torch's loop takes from its queue."""

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

        def write(some: Iterable[File]) -> list[list[WriteResult]]:
            """The results of each file."""
            waiting: Queue[File] = Queue()
            written: Queue[list[WriteResult]] = Queue()
            for file in some:
                waiting.put(file)
            filesystem._write_files_from_queue(
                create_stream=self.fs.create_stream,
                file_queue=waiting,
                result_queue=written,
                planner=planner,
                inflight_threshhold=self.per_thread_copy_ahead,
                use_fsync=self.sync_files,
                thread_count=self.thread_count,
            )
            return [written.get() for _ in range(written.qsize())]

        results = (
            write(files) if self.thread_count <= 1 else write_in_threads(write, files, self.thread_count)
        )
        future: Future[list[WriteResult]] = Future()
        future.set_result([result for each in results for result in each])
        return future


def write_in_threads(
    write: Callable[[Iterable[File]], list[list[WriteResult]]], files: Sequence[File], count: int
) -> list[list[WriteResult]]:
    """What `write` returns for the files, one by one, in `count` threads, of which the caller's is one.

    Raises what the first of them raised; by then the others are done with the file that they were at.
    """
    waiting = deque(files)
    written: list[list[WriteResult]] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while not failures:
                try:
                    file = waiting.popleft()
                except IndexError:
                    return
                results = write([file])
                if file.items and not results:
                    # Torch's loop takes a queue.Empty that the storage or the planner raises for its own end.
                    raise RuntimeError(f"{file.name} was not written: something raised queue.Empty")
                written.extend(results)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(1, count)]
    try:
        for thread in threads:
            thread.start()
        work()
        for thread in threads:
            thread.join()
    except BaseException as error:  # no room for a thread, or an interrupt
        failures.append(error)
        for thread in filter(threading.Thread.is_alive, threads):
            thread.join()
    if failures:
        try:
            raise failures[0]
        finally:
            failures.clear()  # it holds, by its traceback, the frames that hold this list, and their tensors
    return written
