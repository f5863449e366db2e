"""The source's inventory and every rank's wants, as data and as what travels of them.

Only small metadata crosses ranks here; no tensor is read or written.
"""

from __future__ import annotations

import hashlib
import pickle
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torch_dcp_backport.transfer._src.chunks import Key
from torch_dcp_backport.transfer._src.errors import (
    NOTHING,
    UNCHANGED,
    Common,
    Problem,
    as_transfer_error,
    problem_of,
    raise_together,
)
from torch_dcp_backport.transfer._src.groups import Group, group_ranks
from torch_dcp_backport.transfer._src.layout import Layout
from torch_dcp_backport.transfer._src.wire import gather_objects, share_bytes


class TensorInfo(NamedTuple):
    """A tensor of the source, without its values.

    Args:
        shape: the global shape.
        dtype: the dtype of the source's values.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


class Want(NamedTuple):
    """A rank's want of a key: its box of a layout.

    Args:
        layout: the layout on this rank; its box for the rank is what the rank wants.
        dtype: the dtype of the rank's tensor.
        stage: the name of the part of a load in which it moves, where not all moves at once.
    """

    layout: Layout
    dtype: torch.dtype
    stage: str = ""


class Terms(NamedTuple):
    """A rank's part in an agreement, besides its wants."""

    #: The device type of this rank's tensors; nothing where it has none or of several types.
    device: str = ""
    #: Everything else that must be the same on the ranks of one table.
    condition: str = ""
    #: Whether code outside torch takes part on this rank: it can fail later.
    user_code: bool = False
    #: Whether this rank can pass on to its replicas; a condition, too.
    relays: bool = False
    #: For the other ranks, where there are several tables; the same with the same wants and condition.
    note: Any = None
    #: What must be the same on every rank.
    common: Common = NOTHING

    def digest(self, wants: Mapping[Key, Want]) -> bytes:
        """The same bytes on ranks that want the same keys in the same layouts, under the same condition."""
        lines = [f"{key!r} {want.dtype} {want.stage} {want.layout.signature}" for key, want in wants.items()]
        text = "\n".join([*lines, f"{self.relays} {self.condition} {self.common}"])
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def table(self, wants: Mapping[Key, Want], ranks: tuple[int, ...]) -> WantTable:
        """The table of ranks that all have these wants and terms."""
        return WantTable(wants, ranks, self.relays, self.note, self.common)


class WantTable(NamedTuple):
    """The wants of some ranks, which all want the same."""

    wants: Mapping[Key, Want]
    #: Global ranks.
    ranks: tuple[int, ...]
    #: Whether these ranks pass tensors on to their replicas; the same as in their `Terms`.
    relays: bool = False
    note: Any = None
    common: Common = NOTHING


class Agreement(NamedTuple):
    """The wants of every rank: one table where all want the same, else one for each set of ranks that does.

    Args:
        tables: a table for each set of ranks that want the same.
        staging_bytes: the most bytes of staging buffers on any rank: the smallest budget that a rank asks
            for.
        device: the device type of the staging buffers.
    """

    tables: Sequence[WantTable]
    staging_bytes: int
    device: str

    @property
    def is_common(self) -> bool:
        """True where all ranks want the same."""
        return len(self.tables) == 1

    def table_of(self, rank: int) -> WantTable:
        """Return the table of a rank.

        Args:
            rank: a global rank of the agreement.
        """
        return next(table for table in self.tables if rank in table.ranks)


def checked_inventory(received: Any, title: str, first: int) -> dict[Key, Any]:
    """Return what the first rank says that it has.

    Args:
        received: what it sent.
        title: the first words of an error.
        first: the global rank.

    Raises:
        RuntimeError: it is no inventory.
    """
    if not is_inventory(received):
        raise RuntimeError(
            f"{title}: {UNCHANGED}; what rank {first} sent is no inventory. Is the same release of "
            "torch_dcp_backport on every rank?"
        )
    inventory: dict[Key, Any] = received
    return inventory


def is_inventory(received: object) -> bool:
    """Whether a peer describes its tensors as it should; other values may be anything."""
    return isinstance(received, dict) and all(
        isinstance(info.dtype, torch.dtype)
        and isinstance(info.shape, tuple)
        and all(isinstance(size, int) and size >= 0 for size in info.shape)
        for info in received.values()
        if isinstance(info, TensorInfo)
    )


def share_tables(own: WantTable, digest: bytes, title: str, group: Group, so_far: str) -> list[WantTable]:
    """Return every table of a group, in the order of the first ranks that have them. Collective.

    Each table travels once.

    Args:
        own: this rank's table.
        digest: the digest of this rank's wants and terms.
        title: the first words of an error.
        group: the process group; None is the default group.
        so_far: what an error says of what was written.

    Raises:
        RuntimeError: a rank's table cannot be pickled; on every rank.
        TransferError: a rank is gone, or the group's timeout is over.
    """
    ranks = group_ranks(group)
    data, problem = b"", None
    try:
        data = packed(own)
    except Exception as error:
        problem = problem_of(error)
    # One error text: with any of the messages missing, the wants are not known everywhere.
    with as_transfer_error(lambda: f"{so_far}; what the ranks want did not arrive everywhere"):
        rows = gather_objects((digest, len(data), problem), group)
        findings = [(rank, Problem(*fields)) for rank, (*_, fields) in zip(ranks, rows) if fields]
        ranks_by_digest: dict[bytes, list[int]] = {}
        sizes: dict[int, int] = {}
        for rank, (row_digest, size, _) in zip(ranks, rows):
            if row_digest not in ranks_by_digest:
                sizes[rank] = size
            ranks_by_digest.setdefault(row_digest, []).append(rank)
        received = {} if findings else share_bytes(data, sizes, group)
    raise_together(title, findings, so_far=so_far)
    return [
        (own if row_digest == digest else unpacked(received[members[0]]))._replace(ranks=tuple(members))
        for row_digest, members in ranks_by_digest.items()
    ]


def packed(table: WantTable) -> bytes:
    """A table as rows: a key, and a number in the list of its distinct wants."""
    numbers: dict[Want, int] = {}
    rows = [(key, numbers.setdefault(want, len(numbers))) for key, want in table.wants.items()]
    # Names of layers have much in common.
    return zlib.compress(pickle.dumps((rows, list(numbers), table.relays, table.note, table.common)), 1)


def unpacked(data: bytes) -> WantTable:
    rows, wants, relays, note, common = pickle.loads(zlib.decompress(data))
    return WantTable({key: wants[number] for key, number in rows}, (), relays, note, common)
