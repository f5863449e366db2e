"""The source's inventory and everyone's demand: what the ranks tell each other before anything moves.

Only small metadata crosses ranks here; no tensor is read or written.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, TypeVar

import torch
import torch.distributed as dist

from torch_dcp_backport.transfer import settings
from torch_dcp_backport.transfer.chunks import Key
from torch_dcp_backport.transfer.consensus import Mark, agree_on_mark, broadcast_bytes, share_bytes
from torch_dcp_backport.transfer.errors import UNCHANGED, Problem, problem_of, raise_together, spell_key, told
from torch_dcp_backport.transfer.groups import Group, comm_device_type, group_ranks
from torch_dcp_backport.transfer.layout import Layout

logger = logging.getLogger("torch_dcp_backport.transfer")

BAD_BUDGET = "not a staging budget"

#: Transfers of fewer bytes are not worth a question whether every rank has the memory.
SMALL = 2**20
#: What a rank without room for its staging buffers does not go below.
FLOOR = 2**20


class TensorInfo(NamedTuple):
    """What the source holds under a key, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Want(NamedTuple):
    """What one rank wants of a key: its box of this layout."""

    layout: Layout
    dtype: torch.dtype
    #: When it moves, where not all of a load moves at once.
    stage: str = ""


class Table(NamedTuple):
    """What some ranks want, all of them the same."""

    wants: Mapping[Key, Want]
    #: Global ranks.
    ranks: tuple[int, ...]
    #: Whether they can pass on to their replicas.
    relays: bool = False
    #: What they passed as `note`.
    note: Any = None


class Agreement(NamedTuple):
    """Everyone's wants: one table where all want the same, else one for each set of ranks that does."""

    mine: Mapping[Key, Want]
    tables: Sequence[Table]
    #: Peak bytes of staging buffers on any rank: the smallest that a rank asks for.
    staging_bytes: int
    #: The device type of the staging buffers.
    device: str
    #: Whether some rank's code outside torch has a part in it that can fail later.
    custom: bool

    @property
    def is_common(self) -> bool:
        """Whether all want the same."""
        return len(self.tables) == 1

    def table_of(self, rank: int) -> Table:
        return next(table for table in self.tables if rank in table.ranks)

    def of(self, rank: int) -> Mapping[Key, Want]:
        return self.table_of(rank).wants


def publish(
    inventory: Optional[Mapping[Key, object]], problems: Sequence[Problem], title: str, group: Group = None
) -> dict[Key, Any]:
    """The source's inventory (key -> TensorInfo, or a small value itself) on every rank.

    The source is the group's first rank; what other ranks pass is ignored, but their `problems`
    are not: they are raised by `agree`, which every rank must call next.

    Raises:
        RuntimeError: the source has problems; on every rank.
    """
    ranks = group_ranks(group)
    is_source = dist.get_rank() == ranks[0]
    received = broadcast_bytes(pickled(inventory or {}, problems) if is_source else b"", group)
    # As torch's own object collectives do.
    found = pickle.loads(received)
    if isinstance(found, list):
        raise_together(title, [(ranks[0], Problem(*problem)) for problem in found])
    if not is_inventory(found):
        raise RuntimeError(
            f"{title}: {UNCHANGED}; what rank {ranks[0]} sent is no inventory. Is the same release of "
            "torch_dcp_backport on every rank?"
        )
    return dict(inventory or {}) if is_source else found


def is_inventory(found: object) -> bool:
    """Whether what a peer announces as tensors is described as it should be; other values may be anything."""
    return isinstance(found, dict) and all(
        isinstance(one.dtype, torch.dtype)
        and isinstance(one.shape, tuple)
        and all(isinstance(size, int) and size >= 0 for size in one.shape)
        for one in found.values()
        if isinstance(one, TensorInfo)
    )


def pickled(inventory: Mapping[Key, object], problems: Sequence[Problem]) -> bytes:
    """The inventory, or the problems; the other ranks wait, so that a value that cannot travel is one."""
    if problems:
        return pickle.dumps(list(problems))
    try:
        return pickle.dumps(dict(inventory))
    except Exception:
        return pickle.dumps([one for one in map(unsendable, inventory, inventory.values()) if one])


def unsendable(key: Key, value: object) -> Optional[Problem]:
    try:
        pickle.dumps(value)
    except Exception as error:
        return Problem("a value that cannot be pickled for the other ranks", spell_key(key), got=str(error))
    return None


def agree(
    wants: Mapping[Key, Want],
    problems: Sequence[Problem],
    title: str,
    group: Group = None,
    cause: Optional[BaseException] = None,
    staging_bytes: Optional[int] = None,
    device: str = "",
    condition: str = "",
    custom: bool = False,
    relays: bool = False,
    note: object = None,
    so_far: str = UNCHANGED,
) -> Agreement:
    """Raise every rank's problems on every rank, or learn what everyone wants.

    One small message from and to each rank where nothing is wrong and all want the same.

    Args:
        staging_bytes: this rank's budget; None is that of the settings.
        device: the device type of this rank's tensors; nothing where it has none or of several types.
        custom: whether code outside torch has a part in it on this rank that can fail later.
        condition: of what else must be the same on the ranks of one table.
        relays: whether this rank can pass on to its replicas; a condition, too.
        note: what the other ranks need to know of this one where there are several tables; the same on all
            ranks with the same wants and condition.
        so_far: what an error says of what was written.

    Raises:
        RuntimeError: some rank has problems; the same message on every rank of the group.
        ValueError: nothing is wrong but some rank's budget; on every rank too.
    """
    ranks = group_ranks(group)
    budget, problems = settings.DEFAULT, list(problems)
    try:
        budget = settings.staging_bytes() if staging_bytes is None else settings.checked(staging_bytes)
    except ValueError as error:
        # The other ranks wait in the collective below.
        problems.append(Problem(BAD_BUDGET, got=str(error)))
    own = Mark(digest(wants, f"{relays} {condition}"), bool(problems), custom, budget, device)
    common = agree_on_mark(own, group, so_far)
    if common.troubled:
        found = collect_problems(problems, group)
        kind = ValueError if all(problem.what == BAD_BUDGET for _, problem in found) else RuntimeError
        raise_together(title, found, cause, kind, so_far)
    mine = Table(wants, ranks, relays, note)
    tables = [mine] if common.digest == own.digest else share_table(mine, own.digest, title, group, so_far)
    on = comm_device_type(group, common.device or "cpu")
    return Agreement(wants, tables, common.staging_bytes, on, common.custom)


def share_table(mine: Table, own: bytes, title: str, group: Group, so_far: str) -> list[Table]:
    """Every table of a group, in the order of the first ranks that have them; each travels once.

    `own`: the digest of this rank's.

    Raises:
        RuntimeError: a rank's table cannot be pickled; on every rank.
        TransferError: a rank is gone, or the group's timeout is over.
    """
    ranks = group_ranks(group)
    data, problem = b"", None
    try:
        data = packed(mine)
    except Exception as error:
        problem = problem_of(error)
    everyone: list[Any] = [None] * len(ranks)
    # Whichever of the messages breaks off, the wants are not known everywhere.
    with told(lambda: f"{so_far}; what the ranks want did not arrive everywhere"):
        dist.all_gather_object(everyone, (own, len(data), problem), group=group)
        found = [(rank, Problem(*theirs)) for rank, (*_, theirs) in zip(ranks, everyone) if theirs]
        holders: dict[bytes, list[int]] = {}
        sizes: dict[int, int] = {}
        for rank, (name, size, _) in zip(ranks, everyone):
            if name not in holders:
                sizes[rank] = size
            holders.setdefault(name, []).append(rank)
        sent = {} if found else share_bytes(data, sizes, group)
    raise_together(title, found, so_far=so_far)
    return [
        (mine if name == own else unpacked(sent[members[0]]))._replace(ranks=tuple(members))
        for name, members in holders.items()
    ]


def packed(table: Table) -> bytes:
    """A table as rows: a key, and a number in the list of its distinct wants."""
    numbers: dict[Want, int] = {}
    rows = [(key, numbers.setdefault(want, len(numbers))) for key, want in table.wants.items()]
    # Names of layers have much in common.
    return zlib.compress(pickle.dumps((rows, list(numbers), table.relays, table.note)), 1)


def unpacked(sent: bytes) -> Table:
    rows, wants, relays, note = pickle.loads(zlib.decompress(sent))
    return Table({key: wants[number] for key, number in rows}, (), relays, note)


Buffers = TypeVar("Buffers")


def ready(
    allocate: Callable[[int], Buffers],
    budget: int,
    nbytes: int,
    problems: Sequence[Problem],
    title: str,
    group: Group = None,
    cause: Optional[BaseException] = None,
) -> tuple[Buffers, int]:
    """(staging buffers, the budget that they are of): every rank has its memory, or every rank raises.

    Without this, a rank that is out of memory leaves the others to the group's timeout. One small message
    from and to each rank, but none where less than SMALL moves: there a rank raises alone. A rank without
    room for its buffers tries half of the budget, and so on down to FLOOR; the smallest counts for all.

    Args:
        allocate: makes buffers for a budget.
        nbytes: what moves, of all tensors; the same on every rank.
        problems: of this rank, from the memory that it needed so far.

    Raises:
        RuntimeError: some rank has no room; the same message on every rank (from SMALL bytes on).
    """
    problems, asked = list(problems), budget
    buffers: Optional[Buffers] = None
    while buffers is None and not problems:
        try:
            buffers = allocate(asked)
        except (RuntimeError, MemoryError) as error:
            if nbytes >= SMALL and asked > FLOOR:
                asked = max(asked // 2, FLOOR)
            else:
                problems.append(no_room("staging buffers", error))
                cause = error
    common = Mark(bytes(16), bool(problems), staging_bytes=asked)
    try:
        if nbytes >= SMALL:
            common = agree_on_mark(common, group)
            if common.troubled:
                raise_together(title, collect_problems(problems, group), cause)
        raise_together(title, [(dist.get_rank(), problem) for problem in problems], cause)
    finally:
        # An error that its own traceback holds on to keeps alive what it touched.
        cause = None
    if common.staging_bytes < asked:
        del buffers
        buffers = allocate(common.staging_bytes)
    if common.staging_bytes < budget:
        logger.warning(
            "the staging budget is %d bytes instead of %d: a rank has no room for more",
            common.staging_bytes,
            budget,
        )
    assert buffers is not None, "there are buffers, or problems were raised"
    return buffers, common.staging_bytes


def no_room(what: str, error: BaseException) -> Problem:
    return Problem("could not allocate", what, got=str(error).partition("\n")[0])


def agree_on_mesh(
    problems: Sequence[Problem],
    groups: Sequence[Group],
    custom: bool = False,
    so_far: str = UNCHANGED,
) -> tuple[list[tuple[int, Problem]], bool]:
    """(every rank's problems, whether any is `custom`), on every rank of a mesh with these groups.

    The groups are those of its dimensions. None may span the mesh as a whole; passing the findings on along
    one dimension after the other reaches every rank.
    """
    known: list[tuple[int, Problem]] = [(dist.get_rank(), problem) for problem in problems]
    for group in groups:
        common = agree_on_mark(Mark(bytes(16), bool(known), custom), group, so_far)
        custom = common.custom
        if common.troubled:
            known = share_problems(known, group)
    return known, custom


def collect_problems(problems: Sequence[Problem], group: Group) -> list[tuple[int, Problem]]:
    return share_problems([(dist.get_rank(), problem) for problem in problems], group)


def share_problems(known: Sequence[tuple[int, Problem]], group: Group) -> list[tuple[int, Problem]]:
    """The problems that the ranks of a group know of, with the ranks that have them.

    One message for every kind of agreement: a rank that failed takes part in whichever the others are in.
    """
    everyone: list[Any] = [None] * len(group_ranks(group))
    dist.all_gather_object(everyone, list(known), group=group)
    return [(rank, Problem(*problem)) for theirs in everyone for rank, problem in theirs]


def misfit(key: Key, local: torch.Tensor, layout: Layout) -> Optional[Problem]:
    """The problem of a local tensor that has not the shape of this rank's box.

    A layout of torch's that is understood otherwise here must be an error, never a wrong slice.
    """
    box = layout.box(dist.get_rank() if dist.is_initialized() else 0)
    if box is None or tuple(local.shape) == box.size or local.numel() == box.numel == 0:
        return None
    what = "the local tensor is not the shard that its placements say"
    return Problem(what, spell_key(key), got=str(tuple(local.shape)), expected=str(box.size))


def digest(wants: Mapping[Key, Want], condition: str) -> bytes:
    """The same bytes on ranks that want the same keys in the same layouts, under the same condition."""
    lines = [f"{key!r} {want.dtype} {want.stage} {want.layout.signature}" for key, want in wants.items()]
    text = "\n".join([*lines, condition])
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
