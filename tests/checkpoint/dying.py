"""A child that is gone before one of the steps by which files are written."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable

from torch_dcp_backport.publish import disk


def until(limit: int, work: Callable[[Callable[[], None]], None], is_uploading: bool = False) -> int:
    """Do some work in a child that is gone before its `limit`-th step, in any thread; how many it came to.

    Args:
        work: gets a function that it calls where steps begin to count.
        is_uploading: count what is not in the main thread alone.
    """
    reads, writes = os.pipe()
    state, lock = random.getstate(), threading.Lock()
    child = os.fork()
    if not child:
        random.setstate(state)  # Python seeds it anew in a fork
        count = 0

        def die(name: str) -> None:
            nonlocal count
            if is_uploading and threading.current_thread() is threading.main_thread():
                return
            with lock:
                if count == limit:
                    os.write(writes, str(count).encode())
                    os._exit(9)
                count += 1

        def begin() -> None:
            disk.on_step = die

        try:
            work(begin)
            os.write(writes, str(count).encode())
        finally:
            os._exit(0)
    os.close(writes)
    os.waitpid(child, 0)
    with os.fdopen(reads) as file:
        return int(file.read())
