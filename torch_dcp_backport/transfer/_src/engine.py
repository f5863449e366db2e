"""The common part of all transfers: chunks through buffers in turn, their counts, and the text of an error.

Knows no plan: scatter, gather and exchange say which pieces go where.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Optional, TypeVar

import torch
import torch.distributed as dist

from torch_dcp_backport import compat
from torch_dcp_backport.transfer._src.call import Call
from torch_dcp_backport.transfer._src.chunks import Key, KeyedBox, Piece, chunk_bytes, cut_of, moved
from torch_dcp_backport.transfer._src.consensus import NO_DIGEST, Mark, agree_on_mark, share_findings
from torch_dcp_backport.transfer._src.errors import (
    DOUBTFUL,
    Failure,
    TransferError,
    as_transfer_error,
    problem_of,
    raise_together,
    spell_broken_off,
)
from torch_dcp_backport.transfer._src.groups import device_in, note_device
from torch_dcp_backport.transfer._src.layout import Box
from torch_dcp_backport.transfer._src.memory import is_same_view, part_of
from torch_dcp_backport.transfer._src.plan import Agreement
from torch_dcp_backport.transfer._src.spread import intersection
from torch_dcp_backport.transfer._src.staging import Move, Ring, Staging, copy_to
from torch_dcp_backport.transfer._src.wire import Message, finish, open_lane, post

logger = logging.getLogger("torch_dcp_backport.transfer")

#: Transfers of fewer bytes are not worth a question whether every rank has the memory.
SMALL = 2**20
#: The smallest budget that a rank without room for its staging buffers falls back to.
FLOOR = 2**20

T = TypeVar("T")

#: A local tensor, and the box of the global tensor that it holds.
Local = tuple[torch.Tensor, Box]


class Engine:
    """One transfer under way on this rank; a subclass chooses the messages."""

    #: What an error says of the targets, where copies failed.
    after_failure = DOUBTFUL

    def __init__(
        self,
        call: Call,
        agreement: Agreement,
        sources: Mapping[Key, Local],
        targets: Mapping[Key, Local],
    ) -> None:
        self.call = call
        self.agreement = agreement
        self.sources = sources
        self.targets = targets
        self.rank = call.rank
        self.ranks = call.ranks
        self.group = call.group
        self.tally = call.tally
        #: Whether all that moves goes to all ranks, of several, on an accelerator's backend.
        self.is_collective = False
        #: Called after all messages, with the first error of this rank's copies; ranks agree on it then.
        self.failed: Optional[Callable[[Failure], object]] = None
        #: The first error of this rank's copies, where others still wait for its messages.
        self.failure: Optional[Failure] = None
        #: The step under way, for an error: a verb with its peer, and pieces.
        self.doing: tuple[str, Sequence[Piece]] = ("starting", ())
        self.written: dict[Key, None] = {}
        self.ring = Ring()
        self.staging: Staging
        note_device(call.group, (tensor for tensor, _ in chain(sources.values(), targets.values())))

    def staging_bytes(self, budget: int) -> int:
        """Bytes of this rank's buffers, within a budget."""
        raise NotImplementedError

    def move(self, budget: int) -> None:
        """Send and receive everything, through buffers of `staging_bytes(budget)`."""
        raise NotImplementedError

    def run(self, nbytes: int) -> None:
        """Move everything, `nbytes` of all tensors; that number is the same on every rank.

        Raises:
            RuntimeError: some rank has problems, or no room for its buffers; before anything is written, and
                on every rank if 1 MiB or more moves.
            TransferError: a rank is gone, or the group's timeout is over; says what was under way and what
                was already written.
        """
        with self.tally.phase("prepare"):
            self.staging, self.tally.staging_budget = self.prepare(nbytes)
        # In the frame of an error, and so there as long as it: chunks on their way to other ranks arrive.
        ring = self.ring  # noqa: F841
        with self.tally.phase("move"), as_transfer_error(self.failure_text):
            try:
                if len(self.ranks) > 1:
                    open_lane(self.staging.device, self.group)
                self.move(self.tally.staging_budget)
            except Exception as error:
                if self.failure is not None:
                    compat.add_note(error, f"before that, on this rank: {problem_of(*self.failure)}")
                raise
            finally:
                # Both refer to this engine: such a cycle keeps alive what was touched.
                self.ring, self.failure = Ring(), None

    def prepare(self, nbytes: int) -> tuple[Staging, int]:
        """(buffers, the budget that they are of): every rank has its memory, or every rank raises.

        Without this, a rank that is out of memory leaves the others to the group's timeout. One small message
        from and to each rank, but none where less than SMALL moves in messages: there a rank raises alone. A
        rank without room for its buffers tries half of the budget, and so on down to FLOOR; the smallest
        counts for all.
        """
        call, budget = self.call, self.agreement.staging_bytes
        staging: Optional[Staging] = None
        with call.room_for("staging buffers"):
            while staging is None and not call.problems:
                try:
                    staging = self.allocate(budget)
                except (RuntimeError, MemoryError):
                    if nbytes < SMALL or budget <= FLOOR:
                        raise
                    budget = max(budget // 2, FLOOR)
        common = budget
        if nbytes >= SMALL or self.is_collective:
            mark = Mark(NO_DIGEST, bool(call.problems), staging_bytes=budget)
            common = call.compare(mark, call.findings).staging_bytes
        call.raise_alone()
        if common < budget:
            # Never both at once.
            staging = None
            staging = self.allocate(common)
        if common < self.agreement.staging_bytes:
            logger.warning(
                "the staging budget is %d bytes instead of %d: a rank has no room for more",
                common,
                self.agreement.staging_bytes,
            )
        assert staging is not None, "there are buffers, or problems were raised"
        # A call may move several times.
        self.tally.staging_bytes = max(self.tally.staging_bytes, self.staging_bytes(common))
        return staging, common

    def allocate(self, budget: int) -> Staging:
        return Staging(device_in(self.group, self.agreement.device), self.staging_bytes(budget))

    def failure_text(self) -> str:
        verb, pieces = self.doing
        doing = verb, (piece.key for piece in pieces)
        return f"{self.call.title}: {spell_broken_off(self.rank, doing, self.written)}"

    # --- tensors ---

    def read(self, key: Key, box: Box) -> torch.Tensor:
        """The part of a tensor that this rank holds; its key is noted for an error."""
        self.staging.at = key
        return self.source_part(key, box)

    def write(self, key: Key, box: Box) -> torch.Tensor:
        """The part of a tensor that is written in place; its key is noted for an error."""
        self.staging.at = key
        return self.target_part(key, box)

    def source_part(self, key: Key, box: Box) -> torch.Tensor:
        """As `read`, for a subclass to replace."""
        return part_of(*self.sources[key], box)

    def target_part(self, key: Key, box: Box) -> torch.Tensor:
        """As `write`, for a subclass to replace."""
        return part_of(*self.targets[key], box)

    def pack(self, buffer: torch.Tensor, pieces: Iterable[Piece]) -> None:
        self.staging.pack(buffer, ((piece, self.read(piece.key, piece.box)) for piece in pieces))

    def unpack(self, buffer: torch.Tensor, pieces: Sequence[Piece]) -> None:
        def moves() -> Iterator[Move]:
            for piece in pieces:
                self.written[piece.key] = None
                yield piece, self.write(piece.key, piece.box)

        self.staging.unpack(buffer, moves())
        self.tally.received(moved(pieces))

    def copy_own(self, boxes: Iterable[KeyedBox], nbytes: float = math.inf) -> None:
        """Copy boxes that this rank holds and wants, up to that with which they come to `nbytes`."""
        for key, box, _ in boxes:
            source, target = self.read(key, box), self.write(key, box)
            # A tensor may stay where it is.
            if not is_same_view(source, target):
                self.written[key] = None
                copy_to(target, source)
            nbytes -= target.nbytes
            if nbytes <= 0:
                return

    # --- chunks to all ranks ---

    def broadcast(self, source: int, pieces: Sequence[Piece]) -> None:
        """Bring a chunk from one rank to all, each of which keeps what it wants of it."""
        buffer = self.ring.take(chunk_bytes(pieces))
        if self.rank == source:
            self.attempt(functools.partial(self.pack, buffer, pieces))
            self.tally.sent(moved(pieces))
        self.doing = f"broadcasting from rank {source}", pieces
        work = dist.broadcast(buffer, src=source, group=self.group, async_op=True)
        self.ring.use(functools.partial(self.arrive_at_all, self.doing[0], buffer, pieces, work))
        self.tally.rounds += 1

    def arrive_at_all(self, verb: str, buffer: torch.Tensor, pieces: Sequence[Piece], work: Any) -> None:
        self.wait(verb, pieces, [work])
        self.attempt(functools.partial(self.keep, buffer, pieces))

    def keep(self, buffer: torch.Tensor, pieces: Sequence[Piece]) -> None:
        """Copy what this rank wants out of a chunk that went to all."""
        raise NotImplementedError

    def kept_boxes(self, key: Key) -> Sequence[Box]:
        """The boxes of a key that `keep_parts` copies."""
        raise NotImplementedError

    def keep_parts(self, buffer: torch.Tensor, pieces: Sequence[Piece]) -> None:
        """Copy the parts of a chunk's pieces that lie in this rank's boxes."""

        def moves() -> Iterator[Move]:
            for piece in pieces:
                for box in self.kept_boxes(piece.key):
                    part = intersection(piece.box, box)
                    if part is not None:
                        self.written[piece.key] = None
                        yield cut_of(piece, part), self.write(piece.key, part)

        self.staging.unpack(buffer, moves())

    def attempt(self, copy: Callable[[], T]) -> Optional[T]:
        """Copy; where others wait for this rank's messages, keep the first error, and copy no more.

        So it is between collectives of an accelerator, where nothing else would end their wait well (NCCL's
        watchdog ends the whole job after the group's timeout), and where there is a `failed` to call.
        """
        if not self.is_collective and self.failed is None:
            return copy()
        if self.failure is None:
            self.staging.at = ""
            try:
                return copy()
            except Exception as error:
                self.failure = Failure(error, self.staging.at)
                # Now, too: the other ranks may be gone before the agreement brings it to them.
                logger.error("%s: %s", self.call.title, problem_of(*self.failure))
        return None

    def conclude(self) -> None:
        """The end of all messages: no rank takes for loaded what another one could not copy.

        After collectives all ranks agree on that here; where there is a `failed`, its caller has them agree.

        Raises:
            TransferError: on every rank, if copies of one failed.
        """
        # Not kept here: the error's traceback refers to this engine.
        failure, self.failure = self.failure, None
        if self.failed is not None:
            if failure is not None:
                self.failed(failure)
            return
        if not self.is_collective:
            return
        title, mark = self.call.title, Mark(NO_DIGEST, failure is not None)
        if agree_on_mark(mark, self.group, f"{title}: {self.after_failure}").troubled:
            own = [(self.rank, problem_of(*failure))] if failure is not None else []
            findings = share_findings(own, self.group)
            cause = failure.error if failure is not None else None
            raise_together(title, findings, cause, TransferError, self.after_failure)

    # --- messages ---

    def post(self, messages: Sequence[Message]) -> Sequence[Any]:
        for operation, _, peer in messages:
            self.tally.met(peer, sends=operation is dist.isend)
        return post(messages, self.group)

    def send(self, peer: int, pieces: Sequence[Piece]) -> None:
        buffer = self.ring.take(chunk_bytes(pieces))
        self.pack(buffer, pieces)
        verb = f"sending to rank {peer}"
        self.doing = verb, pieces
        works = self.post([(dist.isend, buffer, peer)])
        self.tally.sent(moved(pieces))
        self.ring.use(functools.partial(self.wait, verb, pieces, works))

    def wait(self, verb: str, pieces: Sequence[Piece], works: Sequence[Any]) -> None:
        self.doing = verb, pieces
        finish(works)

    def arrive(
        self,
        buffer: torch.Tensor,
        pieces: Sequence[Piece],
        works: Sequence[Any],
        peer: int,
        behind: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        """Wait for a chunk of `peer`, pass it on along the groups of the replicas behind, and empty it."""
        self.wait(f"receiving from rank {peer}", pieces, works)
        onward = []
        for group in behind:
            onward.append(dist.broadcast(buffer, src=self.rank, group=group, async_op=True))
            self.tally.sent(moved(pieces))
        if pieces:
            self.attempt(functools.partial(self.unpack, buffer, pieces))
        if onward:
            self.wait("passing on to replicas", pieces, onward)
