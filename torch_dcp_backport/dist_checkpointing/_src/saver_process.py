"""The program of the process in `saver.py`. It has the standard library and no torch, and starts in no time.

Must never make, remove or sync a file: it fills the file that was handed to it. It ends when the trainer is
gone.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import socket
import sys
from pathlib import Path
from types import ModuleType

PACKAGE = "torch_dcp_backport"
#: Packages whose own code would import torch.
BARE = (PACKAGE, f"{PACKAGE}.dist_checkpointing", f"{PACKAGE}.dist_checkpointing._src", f"{PACKAGE}.publish")


def close_inherited() -> None:
    """Close everything but the standard streams: what peers of the trainer have open must end with it."""
    if os.path.isdir("/proc/self/fd"):
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2:
                # The list itself had one that is closed by now.
                with contextlib.suppress(OSError):
                    os.close(int(name))
    else:
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))


def prepare(root: Path) -> None:
    """Let modules below the root of the package be imported, and not the code of their packages."""
    for name in BARE:
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package


def serve(door: socket.socket) -> None:
    """Take one order, and write it."""
    from torch_dcp_backport.dist_checkpointing._src import body, messages

    head, fds, _, _ = socket.recv_fds(door, messages.MESSAGE.size, 2)
    if not head:
        return
    memory_fd, fd = fds
    with door.makefile("rb") as received:
        head += received.read(messages.MESSAGE.size - len(head))
        order = pickle.loads(received.read(messages.MESSAGE.unpack(head)[1]))
    waiting = 0

    def moved(nbytes: int) -> None:
        nonlocal waiting
        waiting += nbytes
        if waiting >= body.BLOCK:
            door.sendall(messages.MESSAGE.pack(messages.MOVED, waiting))
            waiting = 0

    memory = memoryview(mmap.mmap(memory_fd, order.nbytes, prot=mmap.PROT_READ))
    try:
        output = body.write_staged(fd, memory, order.places, order.objects, moved, order.output)
        kind, answer = messages.DONE, pickle.dumps(output)
    except BrokenPipeError:
        raise
    except OSError as error:
        kind, answer = messages.FAILED, pickle.dumps((error.errno, error.strerror))
    if waiting:
        door.sendall(messages.MESSAGE.pack(messages.MOVED, waiting))
    door.sendall(messages.MESSAGE.pack(kind, len(answer)) + answer)


if __name__ == "__main__":
    # First. What the process is to have comes later, through the door.
    close_inherited()
    prepare(Path(sys.argv[1]))
    # The trainer is gone: nothing is left to do.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        serve(socket.socket(fileno=0))
