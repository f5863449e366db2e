"""Steps in a store that fsspec reaches (s3://, gs://, hdfs://, a path, ...): sent, found again, brought back.

One process; no threads, no collectives. What was sent is compared with the manifest, which is sent last.
"""

from __future__ import annotations

import importlib
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Optional, TypeVar

from torch_dcp_backport.checkpoint import manifest, store
from torch_dcp_backport.checkpoint.manifest import Damaged, Entry, Manifest
from torch_dcp_backport.checkpoint.store import Step
from torch_dcp_backport.dist_checkpointing.engine import files
from torch_dcp_backport.transfer import settings
from torch_dcp_backport.transfer.progress import Bar, Meter

logger = logging.getLogger("torch_dcp_backport.checkpoint")

#: How often a file is tried, and the seconds before the second time; they double, and vary by a half.
TRIES, WAIT = 5, 1.0
#: Bytes that are read at once of what is in the store.
BLOCK = 4 * 2**20
#: Stores with buckets (containers) instead of folders; one that is not there is a wrong name: not made.
BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "obs", "cos", "tos"})
#: What services say of one that is not there, and fsspec's stores in the cause of an error; not all do.
NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")

Result = TypeVar("Result")


class Failed(Exception):
    """The store did not take, or give, what it was asked for."""


@dataclass(frozen=True)
class Place:
    """A folder in a store."""

    store: Any
    path: str
    #: As the user wrote it.
    url: str

    def below(self, name: str) -> Place:
        return Place(self.store, f"{self.path.rstrip('/')}/{name}", f"{self.url.rstrip('/')}/{name}")

    @property
    def has_buckets(self) -> bool:
        """Whether the store has buckets, or is a cache or a folder of one that has."""
        store = self.store
        while hasattr(getattr(store, "fs", None), "protocol"):
            store = store.fs
        return bool(BUCKETS.intersection(protocols_of(store)))

    def names(self) -> list[str]:
        """Of everything in the folder; nothing where it is not there.

        Raises:
            Failed: the bucket is not there, as far as the store tells this apart from an empty one.
        """
        try:
            return [path.rstrip("/").rpartition("/")[2] for path in self.store.ls(self.path, detail=False)]
        except FileNotFoundError as error:
            self.refuse_bucket(error)
            return []

    def manifest_bytes(self) -> Optional[bytes]:
        """The manifest of a step; None where there is none.

        Raises:
            Failed: as `names`.
        """
        try:
            return bytes(self.store.cat_file(self.below(manifest.NAME).path))
        except FileNotFoundError as error:
            self.refuse_bucket(error)
            return None

    def refuse_bucket(self, error: FileNotFoundError) -> None:
        """Raise Failed where it was the bucket that was not found."""
        # Not in the error's own words: a path may have any name.
        said = f"{error.__cause__} {error.__context__}"
        if self.has_buckets and any(name in said for name in NO_BUCKET):
            raise Failed(f"{self.url}: its bucket is not there: {error}") from error


def place_of(url: str) -> Place:
    """The place that a URL names.

    Raises:
        ValueError: there is no such kind of store, or what is needed for it is not installed.
    """
    try:
        core: Any = importlib.import_module("fsspec.core")
        # What was listed before would hide what others wrote since.
        filesystem, path = core.url_to_fs(str(url), use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{url} cannot be reached: {error}") from error
    return Place(filesystem, path, str(url))


def protocols_of(store: Any) -> tuple[str, ...]:
    """What the URLs of a store begin with."""
    return (store.protocol,) if isinstance(store.protocol, str) else tuple(store.protocol)


def is_within(place: Place, root: Path) -> bool:
    """Whether a place is this machine's folder `root`, or in it, or around it."""
    if "file" not in protocols_of(place.store):
        return False
    there, here = Path(os.path.realpath(place.path)), Path(os.path.realpath(root))
    return there in (here, *here.parents) or here in there.parents


def persistently(name: str, attempt: Callable[[], Result]) -> Result:
    """What `attempt` returns, once it does.

    Raises:
        Failed: it did not, as often as is tried. What it raises of this kind is not tried again.
    """
    for number in range(TRIES):
        try:
            return attempt()
        except Failed:
            raise
        except Exception as error:
            if number == TRIES - 1:
                raise Failed(f"{name}: {type(error).__name__}: {error} ({TRIES} times)") from error
            seconds = WAIT * 2**number * random.SystemRandom().uniform(0.5, 1.5)
            logger.warning("%s: %s: %s; tried again in %.1f s", name, type(error).__name__, error, seconds)
            time.sleep(seconds)
    raise AssertionError("it was not tried")


class Reported:
    """Tells how far a file is, as fsspec's callbacks are told; each byte once, however often it is sent."""

    def __init__(self, meter: Meter, nbytes: int) -> None:
        self.meter = meter
        self.nbytes = nbytes
        self.told = self.done = 0

    def callback(self) -> Any:
        """For one attempt."""
        base: Any = importlib.import_module("fsspec.callbacks").Callback
        self.done = 0
        report = self.add

        class Told(base):  # type: ignore[misc]
            def relative_update(self, inc: int = 1) -> None:
                super().relative_update(inc)
                report(inc)

        return Told()

    def add(self, nbytes: int) -> None:
        self.done += nbytes
        self.upto(min(self.done, self.nbytes))

    def upto(self, done: int) -> None:
        if done > self.told:
            self.told, more = done, done - self.told
            self.meter.add(more)


def meter_of(operation: str, content: Manifest) -> Meter:
    """What tells the progress of a folder; a bar of its own, as a save may go on at the same time."""
    callback = settings.progress()
    meter = Meter(operation, Bar() if isinstance(callback, Bar) else callback)
    meter.expect(lambda: content.nbytes)
    return meter


def upload(folder: Path, place: Place, is_verified: bool = True) -> bytes:
    """Send a whole folder; it counts in the store once its manifest is there.

    Args:
        is_verified: read every file back, and compare its checksum; else its size alone.

    Returns:
        The content of the manifest.

    Raises:
        Failed: the folder is not what was saved, or the store did not take it.
    """
    try:
        content = manifest.read(folder)
        mark = (folder / manifest.NAME).read_bytes()
    except (Damaged, OSError) as error:
        raise Failed(f"{folder}: {error}") from error
    there = persistently(f"{place.url}/{manifest.NAME}", place.manifest_bytes)
    if there == mark:
        # A process that ended before it could say so.
        return mark
    if there is not None:
        # Another step's files are not this one's.
        files.step("remove the manifest from the store")
        target = place.below(manifest.NAME)
        persistently(target.url, lambda: target.store.rm_file(target.path))
    meter = meter_of("upload", content)
    for name, entry in content.files.items():
        files.step(f"upload {name}")
        if manifest.entry_of(folder / name) != entry:
            raise Failed(f"{folder / name} is not what was saved")
        report = Reported(meter, entry.nbytes)
        send(folder / name, place.below(name), Check(entry, is_verified), report)
        report.upto(entry.nbytes)
    files.step(f"upload {manifest.NAME}")
    entry = Entry(len(mark), manifest.crc_of([mark]))
    silent = Reported(Meter("upload", None), entry.nbytes)
    send(folder / manifest.NAME, place.below(manifest.NAME), Check(entry, True), silent)
    return mark


@dataclass(frozen=True)
class Check:
    """What a file has to be."""

    entry: Entry
    is_verified: bool

    def fault(self, place: Place) -> str:
        """Why what is in the store is something else; "" where it is not."""
        nbytes = place.store.info(place.path)["size"]
        if nbytes != self.entry.nbytes:
            return f"{nbytes} bytes are in the store, and {self.entry.nbytes} were sent"
        if self.is_verified:
            with place.store.open(place.path, "rb") as file:
                crc = manifest.crc_of(iter(lambda: file.read(BLOCK), b""))
            if crc != self.entry.crc32:
                return f"CRC32 {crc:08x} is in the store, and {self.entry.crc32:08x} was sent"
        return ""


def send(source: Path, place: Place, check: Check, report: Reported) -> None:
    def attempt() -> None:
        try:
            place.store.put_file(str(source), place.path, callback=report.callback())
        except FileNotFoundError:
            # Stores with folders want them first.
            if place.has_buckets:
                raise
            place.store.makedirs(str(PurePosixPath(place.path).parent), exist_ok=True)
            place.store.put_file(str(source), place.path, callback=report.callback())
        fault = check.fault(place)
        if fault:
            raise OSError(fault)

    persistently(place.url, attempt)


def steps_at(root: Place) -> list[Step]:
    """The steps in a store, newest first; `path` is the name alone. Files are not looked at.

    Raises:
        Failed: the store cannot be asked.
    """
    steps = []
    for name in persistently(root.url, root.names):
        match = store.STEP.fullmatch(name)
        if match is None:
            continue
        place = root.below(name)
        try:
            content = manifest.parsed(persistently(place.url, place.manifest_bytes))
            fault = f"its manifest is of step {content.step}" if content.step != int(match[1]) else ""
            steps.append(Step(int(match[1]), Path(name), content, fault))
        except Damaged as error:
            steps.append(Step(int(match[1]), Path(name), None, str(error)))
    return sorted(steps, key=lambda step: step.age, reverse=True)


def download(place: Place, final: Path) -> Manifest:
    """Bring a folder here, compared with its manifest; it has its name once it is whole.

    Raises:
        Failed: the store has it not, or not whole, or does not give it.
    """
    mark = persistently(place.url, place.manifest_bytes)
    try:
        content = manifest.parsed(mark)
    except Damaged as error:
        raise Failed(f"{place.url}: {error}") from error
    for name in content.files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise Failed(f"{place.url}: {name} would not be in the folder")
    before = store.identity_of(final)
    draft = store.draft_of(final)
    with discarding(draft):
        meter = meter_of("download", content)
        for name, entry in content.files.items():
            files.step(f"download {name}")
            bring(place.below(name), draft / name, entry, Reported(meter, entry.nbytes))
        files.step(f"download {manifest.NAME}")
        data = mark or b""
        (draft / manifest.NAME).write_bytes(data)
        store.mark_uploaded(draft, place.url, data)
        store.publish(draft, final, before)
    return content


def bring(place: Place, target: Path, entry: Entry, report: Reported) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)

    def attempt() -> None:
        place.store.get_file(place.path, str(target), callback=report.callback())
        got = manifest.entry_of(target)
        if got != entry:
            raise OSError(
                f"{got.nbytes} bytes with CRC32 {got.crc32:08x} came, and had {entry.nbytes} with "
                f"{entry.crc32:08x}"
            )

    persistently(place.url, attempt)
    report.upto(entry.nbytes)


@contextmanager
def discarding(draft: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        store.discard(draft)
        raise
