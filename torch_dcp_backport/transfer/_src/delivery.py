"""The boxes of a scatter and their ways: every rank derives the same, and nothing moves."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Optional

import torch

from torch_dcp_backport.transfer._src.chunks import (
    LARGEST_CHUNK,
    Key,
    KeyedBox,
    Piece,
    box_bytes,
    chunks,
    total_bytes,
)
from torch_dcp_backport.transfer._src.lanes import Lane
from torch_dcp_backport.transfer._src.layout import Mesh, whole
from torch_dcp_backport.transfer._src.plan import Agreement, TensorInfo, WantTable


class Relay(NamedTuple):
    """A way to all holders of a box: along these dimensions of a mesh, one after the other."""

    mesh: Mesh
    dims: tuple[int, ...]

    @staticmethod
    def order(relay: Optional[Relay]) -> tuple[object, ...]:
        return (1, relay.mesh.ranks, relay.mesh.shape, relay.dims) if relay is not None else (0,)

    def starts_at(self, rank: int) -> bool:
        coordinate = self.mesh.coordinates.get(rank)
        return coordinate is not None and not any(coordinate[dim] for dim in self.dims)

    def neighbours(self, rank: int) -> tuple[Optional[tuple[int, int]], list[int]]:
        """((dimension, rank) that a rank's chunks come from, dimensions along which it passes them on)."""
        coordinate = self.mesh.coordinates[rank]
        last = max((dim for dim in self.dims if coordinate[dim]), default=-1)
        before = (last, self.mesh.first_along(last, rank)) if last >= 0 else None
        return before, [dim for dim in self.dims if dim > last]


class Window(NamedTuple):
    """The keys of tensors that the source holds at the same time."""

    #: Those that go to every rank: it wants them whole, or keeps its parts.
    common: list[Key]
    #: The others, by the way that they take; in the same order on every rank that takes part.
    ways: dict[Optional[Relay], list[Key]]


class Delivery:
    """One scatter call, as one of its ranks sees it."""

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        inventory: Mapping[Key, object],
        agreement: Agreement,
        by_window: bool,
        lane: Lane = Lane.MESSAGES,
    ) -> None:
        self.ranks = ranks
        self.rank = rank
        self.source = ranks[0]
        self.agreement = agreement
        #: Whether every tensor goes to every rank.
        self.to_all = lane is Lane.BROADCAST
        self._wanted: dict[tuple[int, tuple[int, ...]], tuple[Sequence[Key], list[Key]]] = {}
        self.own_wants = agreement.table_of(rank).wants
        self.tensors = {key: info for key, info in inventory.items() if isinstance(info, TensorInfo)}
        self.windows = [self.window_of(keys) for keys in self.key_windows(by_window)]
        self.all = self.windows[0] if len(self.windows) == 1 else self.window_of(self.tensors)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors; the same on every rank."""
        return sum(math.prod(info.shape) * info.dtype.itemsize for info in self.tensors.values())

    def key_windows(self, by_window: bool) -> list[list[Key]]:
        """All keys at once, or tensors one by one; small ones together."""
        if not by_window:
            return [list(self.tensors)]
        windows: list[list[Key]] = []
        room = 0
        for key, info in self.tensors.items():
            nbytes = math.prod(info.shape) * info.dtype.itemsize
            if nbytes > room or not windows:
                windows.append([])
                room = LARGEST_CHUNK
            windows[-1].append(key)
            room -= nbytes
        return windows

    def window_of(self, keys: Iterable[Key]) -> Window:
        common: list[Key] = []
        ways: dict[Optional[Relay], list[Key]] = {}
        if self.to_all:
            return Window([key for key in keys if self.is_wanted(key)], ways)
        if self.rank != self.source:
            # Other keys go past this rank.
            keys = [key for key in keys if key in self.own_wants]
        # Where all want the same, the way of a tensor is that of its layout; thousands of tensors have a few.
        known: dict[Optional[int], list[Key]] = {}
        for key in keys:
            tables = [table for table in self.agreement.tables if key in table.wants]
            layout = id(tables[0].wants[key].layout) if tables and self.agreement.is_common else None
            if layout in known:
                known[layout].append(key)
                continue
            if self.is_wanted_whole_by_all(key, tables):
                way = common
            else:
                way = ways.setdefault(self.relay_of(key, tables), [])
            way.append(key)
            if layout is not None:
                known[layout] = way
        return Window(common, dict(sorted(ways.items(), key=lambda item: Relay.order(item[0]))))

    def is_wanted(self, key: Key) -> bool:
        return any(key in table.wants for table in self.agreement.tables)

    def is_wanted_whole_by_all(self, key: Key, tables: list[WantTable]) -> bool:
        wants = [table.wants[key] for table in tables]
        return (
            len(wants) == len(self.agreement.tables)
            and all(want.layout.held_whole_by(self.ranks) for want in wants)
            and len({want.dtype for want in wants}) == 1
        )

    def relay_of(self, key: Key, tables: list[WantTable]) -> Optional[Relay]:
        """The relay of a key; None where the source sends to every rank itself."""
        if len(tables) != 1:
            return None
        (table,) = tables
        layout = table.wants[key].layout
        if layout.mesh is None or not layout.replica_dims:
            return None
        # Ranks outside the mesh have no box, even if they want the key.
        relayed = table.relays and set(layout.mesh.ranks) <= set(table.ranks)
        return Relay(layout.mesh, layout.replica_dims) if relayed else None

    def dtype_for(self, key: Key, wanted: torch.dtype) -> torch.dtype:
        """The dtype that travels: the destination's where that is smaller, or the source's."""
        offered = self.tensors[key].dtype
        return wanted if wanted.itemsize < offered.itemsize else offered

    def boxes_of(self, rank: int, keys: Sequence[Key]) -> Iterator[KeyedBox]:
        table = self.agreement.table_of(rank)
        for key in self.wanted_of(keys, table):
            want = table.wants[key]
            box = want.layout.box(rank)
            if box is not None:
                yield key, box, self.dtype_for(key, want.dtype)

    def wanted_of(self, keys: Sequence[Key], table: WantTable) -> Sequence[Key]:
        """The keys that are in a table; looked up once for all of its ranks."""
        name = id(keys), table.ranks
        if name not in self._wanted:
            # With the keys, so that no other list gets their id.
            self._wanted[name] = keys, [key for key in keys if key in table.wants]
        return self._wanted[name][1]

    def boxes_for_all(self, common: Iterable[Key]) -> Iterator[KeyedBox]:
        for key in common:
            yield key, whole(self.tensors[key].shape), self.dtype_for_all(key)

    def dtype_for_all(self, key: Key) -> torch.dtype:
        """As `dtype_for`; the source's where ranks want several."""
        wanted = {table.wants[key].dtype for table in self.agreement.tables if key in table.wants}
        return self.dtype_for(key, wanted.pop()) if len(wanted) == 1 else self.tensors[key].dtype

    def chunks_for_all(self, common: Sequence[Key], capacity: int) -> Iterator[list[Piece]]:
        """Chunks of tensors that go to every rank.

        Where all go so, no scalar shares one with other tensors: counters of steps are on the host, whatever
        the device of a parameter's other states.
        """
        counters = [key for key in common if self.to_all and self.tensors[key].shape == ()]
        apart = set(counters)
        others = [key for key in common if key not in apart]
        for keys in (counters, others):
            yield from chunks(self.boxes_for_all(keys), capacity)

    def receivers(self, relay: Optional[Relay]) -> list[int]:
        """The ranks that receive directly from the source."""
        return [
            rank for rank in self.ranks if rank != self.source and (relay is None or relay.starts_at(rank))
        ]

    def takes_part(self, relay: Optional[Relay]) -> bool:
        """Whether own chunks come along this way. The source's do where it is one of several holders."""
        if relay is None:
            return self.rank != self.source
        return self.rank in relay.mesh.coordinates

    def expected(self) -> int:
        """Bytes that this rank sends and receives."""
        nbytes = box_bytes(self.boxes_for_all(self.all.common))
        for relay, keys in self.all.ways.items():
            if self.rank == self.source:
                nbytes += sum(self.bytes_for(rank, keys) for rank in self.receivers(relay))
            if self.takes_part(relay):
                _, behind = relay.neighbours(self.rank) if relay is not None else (None, [])
                nbytes += self.bytes_for(self.rank, keys) * (len(behind) + (self.rank != self.source))
        return nbytes

    def bytes_for(self, rank: int, keys: Sequence[Key]) -> int:
        return box_bytes(self.boxes_of(rank, keys))

    @functools.cached_property
    def largest(self) -> tuple[int, int]:
        """(bytes that no chunk of a single rank exceeds, bytes that no common chunk exceeds)."""
        largest = 0
        for keys in self.all.ways.values():
            boxes = self.boxes_of(self.rank, keys)
            if self.rank == self.source:
                boxes = ((key, whole(self.tensors[key].shape), self.tensors[key].dtype) for key in keys)
            largest = max(largest, total_bytes(boxes))
        return largest, total_bytes(self.boxes_for_all(self.all.common))
