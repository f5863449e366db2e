"""Upload, list and download steps in a store that fsspec reaches (s3://, gs://, hdfs://, a path, ...).

One process; must never use threads or collectives. Files are compared with the manifest, which is sent last.
"""

from __future__ import annotations

import importlib
import logging
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Optional, TypeVar

from torch_dcp_backport.checkpoint._src import manifest, store
from torch_dcp_backport.checkpoint._src.manifest import BadManifest, Manifest, ManifestEntry
from torch_dcp_backport.checkpoint._src.store import Step
from torch_dcp_backport.publish import disk
from torch_dcp_backport.publish.drafts import discarding
from torch_dcp_backport.transfer import Bar, Meter, settings

logger = logging.getLogger("torch_dcp_backport.checkpoint")

#: How often a file is tried, and the seconds before the second try; they double, and vary by a half.
TRIES, WAIT = 5, 1.0
#: Bytes of a file in the store that are read at once.
BLOCK = 4 * 2**20
#: Stores with buckets (containers) instead of folders: an absent bucket is a wrong name, and is not made.
BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "obs", "cos", "tos"})
#: Names of the error for an absent bucket, in the cause of an error of fsspec; not all services have them.
NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")

Result = TypeVar("Result")


class Failed(Exception):
    """An upload, a download or another request to the store failed."""


@dataclass(frozen=True)
class RemoteFolder:
    """A folder in a store."""

    store: Any
    path: str
    #: As the user wrote it.
    url: str

    def below(self, name: str) -> RemoteFolder:
        return RemoteFolder(self.store, f"{self.path.rstrip('/')}/{name}", f"{self.url.rstrip('/')}/{name}")

    @property
    def has_buckets(self) -> bool:
        """Return whether the store has buckets, or is a cache or a folder of a store that has."""
        store = self.store
        while hasattr(getattr(store, "fs", None), "protocol"):
            store = store.fs
        return bool(BUCKETS.intersection(protocols_of(store)))

    def names(self) -> list[str]:
        """Return the names in the folder; none where it is not there.

        Raises:
            Failed: the bucket is not there, as far as the store distinguishes that from an empty bucket.
        """
        try:
            return [path.rstrip("/").rpartition("/")[2] for path in self.store.ls(self.path, detail=False)]
        except FileNotFoundError as error:
            self.refuse_bucket(error)
            return []

    def manifest_bytes(self) -> Optional[bytes]:
        """Return the manifest of a step; None where there is none.

        Raises:
            Failed: as `names`.
        """
        try:
            return bytes(self.store.cat_file(self.below(manifest.NAME).path))
        except FileNotFoundError as error:
            self.refuse_bucket(error)
            return None

    def refuse_bucket(self, error: FileNotFoundError) -> None:
        """Raise Failed if it is the bucket that is absent."""
        # Not in the error's own text, which has the path: a path may have any name.
        causes = f"{error.__cause__} {error.__context__}"
        if self.has_buckets and any(name in causes for name in NO_BUCKET):
            raise Failed(f"{self.url}: its bucket is not there: {error}") from error


def place_of(url: str) -> RemoteFolder:
    """Return the place that a URL names.

    Raises:
        ValueError: there is no such kind of store, or a package for it is not installed.
    """
    try:
        core: Any = importlib.import_module("fsspec.core")
        # A cached listing would hide files that other processes wrote since.
        filesystem, path = core.url_to_fs(str(url), use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{url} cannot be reached: {error}") from error
    # A path may be relative, and the working directory another when the next folder is uploaded.
    is_local = "file" in protocols_of(filesystem) and not os.path.isabs(str(url).partition("://")[2] or url)
    return RemoteFolder(filesystem, path, path if is_local else str(url))


def protocols_of(store: Any) -> tuple[str, ...]:
    """Return the protocols with which the URLs of a store begin."""
    return (store.protocol,) if isinstance(store.protocol, str) else tuple(store.protocol)


def is_within(place: RemoteFolder, root: Path) -> bool:
    """Return whether a place is this machine's folder `root`, or in it, or around it."""
    if "file" not in protocols_of(place.store):
        return False
    there, here = Path(os.path.realpath(place.path)), Path(os.path.realpath(root))
    return there in (here, *here.parents) or here in there.parents


def persistently(name: str, attempt: Callable[[], Result]) -> Result:
    """Call `attempt` until it succeeds, and return its result.

    Raises:
        Failed: it failed at every try; or it raised Failed itself, which is not tried again.
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
    """Reports the progress of a file by callbacks of fsspec; each byte once, however often it is sent."""

    def __init__(self, meter: Meter, nbytes: int) -> None:
        self.meter = meter
        self.nbytes = nbytes
        self.reported = self.done = 0

    def callback(self) -> Any:
        """Return a callback of fsspec for a single attempt."""
        base: Any = importlib.import_module("fsspec.callbacks").Callback
        self.done = 0
        report = self.add

        class Attempt(base):  # type: ignore[misc]
            def relative_update(self, inc: int = 1) -> None:
                super().relative_update(inc)
                report(inc)

        return Attempt()

    def add(self, nbytes: int) -> None:
        self.done += nbytes
        self.upto(min(self.done, self.nbytes))

    def upto(self, done: int) -> None:
        if done > self.reported:
            self.reported, more = done, done - self.reported
            self.meter.add(more)


def meter_of(operation: str, content: Manifest) -> Meter:
    """Return the progress meter of a folder; it has a bar of its own, as a save may run at the same time."""
    callback = settings.progress()
    meter = Meter(operation, Bar() if isinstance(callback, Bar) else callback)
    meter.expect(lambda: content.nbytes)
    return meter


def upload(folder: Path, place: RemoteFolder, is_verified: bool = True) -> bytes:
    """Upload a folder; it counts in the store once its manifest is there.

    Args:
        is_verified: read every file back, and compare its checksum; else its size alone.

    Returns:
        The content of the manifest.

    Raises:
        Failed: the folder is not as it was saved, or the store did not take it.
    """
    try:
        content = manifest.read(folder)
        mark = disk.read_whole(folder / manifest.NAME)
    except (BadManifest, OSError) as error:
        raise Failed(f"{folder}: {error}") from error
    there = persistently(f"{place.url}/{manifest.NAME}", place.manifest_bytes)
    if there == mark:
        # Uploaded by a process that ended before it could mark the folder.
        return mark
    if there is not None:
        refuse_foreign(place, there, mark)
        # Another save is in the store: it must not count while its files are replaced.
        disk.step("remove the manifest from the store")
        target = place.below(manifest.NAME)
        persistently(target.url, lambda: target.store.rm_file(target.path))
    meter = meter_of("upload", content)
    for name, entry in content.files.items():
        disk.step(f"upload {name}")
        if manifest.entry_of(folder / name) != entry:
            raise Failed(f"{folder / name} is not what was saved")
        report = Reported(meter, entry.nbytes)
        send(folder / name, place.below(name), Check(entry, is_verified), report)
        report.upto(entry.nbytes)
    disk.step(f"upload {manifest.NAME}")
    entry = ManifestEntry(len(mark), manifest.crc_of([mark]))
    silent = Reported(Meter("upload", None), entry.nbytes)
    send(folder / manifest.NAME, place.below(manifest.NAME), Check(entry, True), silent)
    return mark


def refuse_foreign(place: RemoteFolder, there: bytes, mark: bytes) -> None:
    """Refuse to replace a folder of the store that this package did not upload, or cannot read.

    Raises:
        Failed: naming it.
    """
    try:
        manifest.parsed(there)
    except BadManifest as error:
        # The manifest of this very save, of which an upload that broke off has left the beginning.
        if not mark.startswith(there):
            what = f"{place.url} is {error.kind} ({error})"
            raise Failed(f"{what}, and is not replaced: move it away") from error


@dataclass(frozen=True)
class Check:
    """The size and checksum that a file in the store must have."""

    entry: ManifestEntry
    is_verified: bool

    def fault(self, place: RemoteFolder) -> str:
        """Return how the file in the store differs; "" where it does not."""
        nbytes = place.store.info(place.path)["size"]
        if nbytes != self.entry.nbytes:
            return f"{nbytes} bytes are in the store, and {self.entry.nbytes} were sent"
        if self.is_verified:
            with place.store.open(place.path, "rb") as file:
                crc = manifest.crc_of(iter(lambda: file.read(BLOCK), b""))
            if crc != self.entry.crc32:
                return f"CRC32 {crc:08x} is in the store, and {self.entry.crc32:08x} was sent"
        return ""


def send(source: Path, place: RemoteFolder, check: Check, report: Reported) -> None:
    def attempt() -> None:
        try:
            place.store.put_file(str(source), place.path, callback=report.callback())
        except FileNotFoundError:
            # Stores with folders need the folder first.
            if place.has_buckets:
                raise
            place.store.makedirs(str(PurePosixPath(place.path).parent), exist_ok=True)
            place.store.put_file(str(source), place.path, callback=report.callback())
        fault = check.fault(place)
        if fault:
            raise OSError(fault)

    persistently(place.url, attempt)


def steps_at(root: RemoteFolder) -> list[Step]:
    """Return the steps in a store, newest first; `path` is the name alone. Files are not checked.

    Raises:
        Failed: the store cannot be listed or read.
    """
    steps = []
    for name in persistently(root.url, root.names):
        step = store.step_named(name)
        if step is None:
            continue
        place = root.below(name)
        try:
            content = manifest.parsed(persistently(place.url, place.manifest_bytes))
            fault = f"its manifest is of step {content.step}" if content.step != step else ""
            steps.append(Step(step, Path(name), content, fault))
        except BadManifest as error:
            steps.append(Step(step, Path(name), None, str(error)))
    return sorted(steps, key=lambda step: step.age, reverse=True)


def download(place: RemoteFolder, final: Path) -> Manifest:
    """Download a folder, and compare it with its manifest; it gets its name once it is complete.

    Raises:
        Failed: the folder is absent or incomplete in the store, or the store does not give it; or the folder
            that is here is another step, which would be replaced.
    """
    mark = persistently(place.url, place.manifest_bytes)
    try:
        content = manifest.parsed(mark)
    except BadManifest as error:
        raise Failed(f"{place.url}: {error}") from error
    here = store.published(final)
    if isinstance(here, Manifest) and here.step != content.step:
        raise Failed(
            f"{final} is of step {here.step}, and {place.url} of step {content.step}: move the folder away"
        )
    draft = store.StepDraft(final, cleans=False)
    with discarding(draft), draft.explaining():
        meter = meter_of("download", content)
        for name, entry in content.files.items():
            disk.step(f"download {name}")
            bring(place.below(name), draft.folder / name, entry, Reported(meter, entry.nbytes))
        disk.step(f"download {manifest.NAME}")
        data = mark or b""
        disk.publish(draft.folder / manifest.NAME, data, is_synced=False)
        store.mark_uploaded(draft.folder, place.url, data)
        store.publish(draft)
    return content


def bring(place: RemoteFolder, target: Path, entry: ManifestEntry, report: Reported) -> None:
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
