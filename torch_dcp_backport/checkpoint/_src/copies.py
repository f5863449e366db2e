"""Copies of a part between two ranks: the files of a folder over a link, in bounded blocks.

The target compares every byte with the manifest; a copy that is torn never gets its name.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch

from torch_dcp_backport.checkpoint._src import manifest, node_folder, store
from torch_dcp_backport.checkpoint._src.manifest import BadManifest, Manifest, ManifestEntry
from torch_dcp_backport.publish import disk
from torch_dcp_backport.publish.drafts import discarding
from torch_dcp_backport.transfer import LENGTH, Link, Meter, bytes_of, tensor_of


@contextlib.contextmanager
def closing(link: Link) -> Iterator[None]:
    """Close a link on an error: the other end would wait for messages that do not come."""
    try:
        yield
    except BaseException:
        link.close()
        raise


def give(link: Link, folder: Path, block: int, meter: Meter) -> None:
    """Send a part to the other end.

    Args:
        block: the most bytes of a message; the same at both ends.
        meter: told of the bytes.

    Raises:
        Damaged: it is not whole here.
        OSError: it cannot be read.
        BrokenLink: the other end gave up, or is gone.
    """
    with closing(link):
        content = manifest.read(folder)
        meter.expect(lambda: content.nbytes)
        data = disk.read_whole(folder / manifest.NAME)
        link.send(tensor_of(len(data).to_bytes(LENGTH, "big")))
        for start in range(0, len(data), block):
            link.send(tensor_of(data[start : start + block]))
        buffer = torch.empty(block, dtype=torch.uint8, device="cpu")
        for name, entry in node_folder.in_order(content):
            with open(disk.opened(folder / name), "rb", buffering=0) as file:
                for size in sizes(entry, block):
                    part = buffer[:size]
                    fill(file, memory_of(part), name)
                    link.send(part)
                    meter.add(size)


def take(link: Link, folder: Path, owner: int, run: str, block: int, is_load: bool = False) -> None:
    """Receive a part, and publish it once all its bytes are those of its manifest.

    Args:
        folder: the place of the part; what is there is replaced.
        owner: the rank that saved it, by its place in the group.
        run: the name of the run that saved it.
        block: as of `give`.
        is_load: whether the part is brought for a load, which removes nothing that others left.

    Raises:
        Damaged: what came is not what was saved.
        OSError: it cannot be written.
        BrokenLink: the other end gave up, or is gone.
    """
    with closing(link):
        draft = store.StepDraft(folder, cleans=not is_load)
        with discarding(draft), draft.explaining():
            content = receive(link, draft.folder, block)
            node_folder.check_name(draft.folder, content, owner, folder.name, run)
            store.publish(draft)


def receive(link: Link, folder: Path, block: int) -> Manifest:
    """Receive the files of a part into a draft; return its manifest."""
    head = torch.empty(LENGTH, dtype=torch.uint8, device="cpu")
    link.receive(head)
    buffer = torch.empty(block, dtype=torch.uint8, device="cpu")
    data = bytearray()
    for size in sizes(ManifestEntry(int.from_bytes(bytes_of(head), "big"), 0), block):
        link.receive(buffer[:size])
        data += memory_of(buffer[:size])
    content = manifest.parsed(bytes(data))
    for name, entry in node_folder.in_order(content):
        path, crc = folder / name, 0
        path.parent.mkdir(parents=True, exist_ok=True)
        disk.step(f"create {path.name}")
        with disk.created(path) as fd:
            # A full disk is known before the bytes have come.
            disk.reserve(fd, entry.nbytes)
            done = 0
            for size in sizes(entry, block):
                link.receive(buffer[:size])
                view = memory_of(buffer[:size])
                crc = zlib.crc32(view, crc)
                disk.write_all(fd, view, done)
                done += size
        if crc != entry.crc32:
            raise BadManifest(f"{name} came with CRC32 {crc:08x}, and had {entry.crc32:08x}")
    disk.write(folder / manifest.NAME, bytes(data))
    return content


def sizes(entry: ManifestEntry, block: int) -> Iterator[int]:
    """Yield the bytes of each message of a file."""
    for start in range(0, entry.nbytes, block):
        yield min(block, entry.nbytes - start)


def memory_of(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array)


def fill(file: IO[bytes], view: memoryview, name: str) -> None:
    """Fill memory with a file's next bytes.

    Raises:
        Damaged: the file ends before.
    """
    source: Any = file
    while view.nbytes:
        size = source.readinto(view)
        if not size:
            raise BadManifest(f"{name} was cut short")
        view = view[size:]
