"""This room's files for programs that call torch's `dcp.save` and `dcp.load`.

    dcp.save(state_dict, storage_writer=CheckedWriter(folder))
    dcp.load(state_dict, storage_reader=CheckedReader(folder))

torch plans, and raises a failure on every rank; the files are as those of `save`.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Optional

import torch
from torch.distributed.checkpoint import planner as planning
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torch_dcp_backport.dist_checkpointing._src import commit, integrity, metadata, values, writer
from torch_dcp_backport.dist_checkpointing._src.body import Output
from torch_dcp_backport.dist_checkpointing._src.files import ReadSource
from torch_dcp_backport.dist_checkpointing._src.load import Opened, opened, small_files
from torch_dcp_backport.dist_checkpointing._src.metadata import Chunk, Index, RecordPlace, Stored
from torch_dcp_backport.dist_checkpointing._src.reader import Read, RecordReader
from torch_dcp_backport.dist_checkpointing._src.writer import WriteWork
from torch_dcp_backport.dist_checkpointing.core import CheckpointingException, Folder
from torch_dcp_backport.transfer import Box, whole


def is_path(checkpoint_id: Folder) -> bool:
    """Return whether an id names a folder of this machine's file systems: it is no URL."""
    return "://" not in os.fspath(checkpoint_id)


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class CheckedReader(storage.StorageReader):
    """Reads the checkpoints of any `dcp.save`, Megatron or this room: parts of records alone, verified.

    In this package's files every byte that is read is verified, in torch's the records that are read in full.
    `.metadata` runs no code; nor do objects, unless `trust` is set.
    """

    def __init__(self, path: Folder, *, trust: bool = False, verify_integrity: bool = False) -> None:
        """Make a reader.

        Args:
            trust: let torch make objects of any class, which runs what the file says.
            verify_integrity: compare the files that this rank reads from with their SHA-256, before any rank
                loads anything.
        """
        self.folder = Path(path).absolute()
        self.trust = trust
        self.verify_integrity = verify_integrity
        self._opened: Optional[Opened] = None
        self._chunks: dict[str, dict[tuple[int, ...], Chunk]] = {}

    def reset(self, checkpoint_id: Optional[Folder] = None) -> None:
        if checkpoint_id is not None:
            self.folder = Path(checkpoint_id).absolute()
        self._opened = None
        self._chunks.clear()

    @property
    def holds(self) -> Index:
        if self._opened is None:
            self._opened = opened(self.folder, small_files(self.folder))
        return self._opened.holds

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return torch's index, made anew from values that were checked.

        Raises:
            CheckpointingException: no checkpoint, or a damaged one.
        """
        # Bytes of ours, which name torch's own classes alone.
        made: Metadata = pickle.loads(metadata.to_bytes(self.holds))
        return made

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: planning.LoadPlan) -> planning.LoadPlan:
        """Compare digests where that was asked for: torch raises an error on all ranks before they read.

        Raises:
            CheckpointingException: a file is not what was saved, or there are no digests.
        """
        if self.verify_integrity:
            self.verify_digests({self.place_of(item)[0].file for item in plan.items})
        return plan

    def verify_digests(self, needed: set[str]) -> None:
        try:
            digests = integrity.read(self.folder)
        except integrity.Unknown as error:
            raise CheckpointingException(str(error)) from None
        problems = integrity.unlisted(digests, {*needed, *integrity.named_in(self.folder)})
        for name in sorted({*needed, *commit.SMALL} & {*digests}):
            problems += integrity.problem_of(self.folder, name, digests[name])
        if problems:
            raise CheckpointingException("; ".join(map(str, problems)))

    def prepare_global_plan(self, plans: list[planning.LoadPlan]) -> list[planning.LoadPlan]:
        return plans

    def read_data(self, plan: planning.LoadPlan, planner: planning.LoadPlanner) -> Future[None]:
        """Read the plan's items, in the order in which they are stored.

        Raises:
            Damaged: a record is not what was saved.
        """
        by_file: dict[str, list[tuple[RecordPlace, Optional[Chunk], planning.ReadItem]]] = {}
        for item in plan.items:
            place, chunk = self.place_of(item)
            by_file.setdefault(place.file, []).append((place, chunk, item))
        reader = RecordReader(self.folder, self.holds.is_ours)
        for name in sorted(by_file):
            with reader.open(name) as source, torch.no_grad():
                for place, chunk, item in sorted(by_file[name], key=lambda entry: entry[0].offset):
                    if chunk is None:
                        data = reader.object_in(source, place)
                        # torch makes objects of any class of these bytes.
                        data = data if self.trust else self.harmless(item.storage_index.fqn, data)
                        planner.load_bytes(item, io.BytesIO(data))
                    else:
                        self.read_tensor(reader, source, chunk, item, planner)
        return done(None)

    def place_of(self, item: planning.ReadItem) -> tuple[RecordPlace, Optional[Chunk]]:
        index = item.storage_index
        if item.type == planning.LoadItemType.BYTE_IO:
            return self.holds.objects[index.fqn], None
        offset = tuple(index.offset or ())
        chunk = self.chunks_of(index.fqn).get(offset)
        if chunk is None:
            raise CheckpointingException(f"{self.folder} has no chunk of {index.fqn} at {offset}")
        return chunk.place, chunk

    def chunks_of(self, key: str) -> dict[tuple[int, ...], Chunk]:
        """Return a tensor's chunks by their offset; of two at the same offset the chunk that has elements."""
        if key not in self._chunks:
            chunks = sorted(self.holds.tensors[key].chunks, key=lambda chunk: chunk.box.numel)
            self._chunks[key] = {chunk.box.offset: chunk for chunk in chunks}
        return self._chunks[key]

    def read_tensor(
        self,
        reader: RecordReader,
        source: ReadSource,
        chunk: Chunk,
        item: planning.ReadItem,
        planner: planning.LoadPlanner,
    ) -> None:
        target = planner.resolve_tensor(item)
        offset = tuple(map(sum, zip(chunk.box.offset, item.storage_offsets)))
        part = Box(offset, tuple(item.lengths))
        key, into = item.storage_index.fqn, target.detach()
        if tuple(into.shape) != part.size:
            raise CheckpointingException(f"{key}: a part of {part.size} is to go into {tuple(into.shape)}")
        if part.numel:
            read = Read(key, chunk, part, self.holds.tensors[key].dtype, into, part)
            reader.read_part(source, read)
        planner.commit_tensor(item, target)

    def harmless(self, key: str, data: bytes) -> bytes:
        """Return the bytes of the same object, written anew: none of the file's bytes are left in them."""
        try:
            return values.dumps(values.loads(data))
        except values.Unloadable as error:
            raise CheckpointingException(f"{key} cannot be loaded: {error}") from error

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Folder) -> bool:
        return is_path(checkpoint_id) and Path(checkpoint_id).is_dir()


class CheckedWriter(storage.StorageWriter):
    """Writes one file of verifiable records for each rank; the folder is a checkpoint at the very end.

    An older checkpoint in the folder is unmade first. Any `dcp.load` reads what this writes.
    """

    def __init__(self, path: Folder, *, verify_integrity: bool = False) -> None:
        """`verify_integrity`: save the SHA-256 of every file (`integrity.json`), too; on all ranks."""
        self.folder = Path(path).absolute()
        self.verify_integrity = verify_integrity

    def reset(self, checkpoint_id: Optional[Folder] = None) -> None:
        if checkpoint_id is not None:
            self.folder = Path(checkpoint_id).absolute()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: planning.SavePlan) -> planning.SavePlan:
        self.folder.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[planning.SavePlan]) -> list[planning.SavePlan]:
        """Name each rank's file, and make the folder no checkpoint. Runs on the coordinator."""
        commit.clear(self.folder)
        return [
            dataclasses.replace(plan, storage_data=commit.file_of(number))
            for number, plan in enumerate(plans)
        ]

    def write_data(self, plan: planning.SavePlan, planner: planning.SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's records, and have them on disk.

        Raises:
            CheckpointingException: a tensor that has no record here, such as a quantised tensor.
            OSError: no room, or a failed write.
        """
        tensors = [item for item in plan.items if item.type != planning.WriteItemType.BYTE_IO]
        objects = [item for item in plan.items if item.type == planning.WriteItemType.BYTE_IO]
        with torch.no_grad():
            resolve: Callable[[planning.WriteItem], Any] = planner.resolve_data
            works = [work_of(resolve(item), item.index.fqn) for item in tensors]
            data = [bytes(resolve(item).getbuffer()) for item in objects]
            output = writer.write(
                self.folder / plan.storage_data, works, data, lambda nbytes: None, self.verify_integrity
            )
        return done(list(results_of(output, tensors, objects)))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the folder a checkpoint of every rank's records. Runs on the coordinator.

        Raises:
            Refusal: a rank's file is not in this folder.
            CheckpointingException: a rank has not hashed its file.
        """
        stored = {record.index: record.storage_data for written in results for record in written}
        index = index_of(metadata, {(key.fqn, key.offset): place for key, (place, _) in stored.items()})
        digests = {place.file: digest for place, digest in stored.values()}
        unhashed = sorted(name for name, digest in digests.items() if not digest)
        if self.verify_integrity and unhashed:
            raise CheckpointingException(
                f"no SHA-256 of {', '.join(unhashed)}: verify_integrity differs between ranks"
            )
        outputs = {
            number: Output(name, end, [], [], sha256=digests[name])
            for number, (name, end) in enumerate(sorted(index.ends.items()))
        }
        commit.publish(self.folder, index, values.dumps({}), outputs, self.verify_integrity)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Folder) -> bool:
        return is_path(checkpoint_id)


def work_of(tensor: torch.Tensor, key: str) -> WriteWork:
    why = writer.why_not_readable(tensor)
    if why:
        raise CheckpointingException(f"a tensor without values in memory: {key} ({why})")
    box = whole(tuple(tensor.shape))
    return WriteWork(tensor.detach(), box, box)


def results_of(
    output: Output, tensors: Sequence[planning.WriteItem], objects: Sequence[planning.WriteItem]
) -> Iterator[WriteResult]:
    for items, written in ((tensors, output.tensors), (objects, output.objects)):
        for item, record in zip(items, written):
            yield WriteResult(item.index, record.length, (RecordPlace(output.file, *record), output.sha256))


def index_of(planned: Metadata, places: dict[tuple[str, Any], RecordPlace]) -> Index:
    """Return the index of a save: torch's own metadata of the plan, with the places of the records."""
    index = Index()
    index.planner_data, index.order = planned.planner_data, list(planned.state_dict_metadata)
    for key, entry in planned.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            index.objects[key] = places[key, MetadataIndex(key).offset]
            continue
        chunks = [
            Chunk(Box(tuple(chunk.offsets), tuple(chunk.sizes)), places[key, chunk.offsets])
            for chunk in entry.chunks
        ]
        index.tensors[key] = Stored(entry.properties.dtype, tuple(entry.size), chunks)
    return index
