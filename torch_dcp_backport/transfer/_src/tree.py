"""Messages to the first rank of a group and back, along a binomial tree of its ranks.

No rank sends or receives more than log2 N small messages in a row. A rank that is gone costs the others no
hang: the first rank finds out, and the ranks that get their messages through it raise. Knows bytes alone.

In a group of seven the first rank has ranks 4, 2 and 1 as children, rank 2 has 3, and rank 4 has 6 and 5.
"""

from __future__ import annotations

import contextlib
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Optional, TypeVar, Union

import torch
import torch.distributed as dist

from torch_dcp_backport.transfer._src.groups import Group, group_ranks
from torch_dcp_backport.transfer._src.wire import (
    HEAD,
    LENGTH,
    MOST,
    absent,
    bytes_of,
    device_for,
    finish,
    post,
    tensor_of,
)

#: More bytes of one rank go directly to the first rank: the ranks between would have to hold them.
LARGE = 16 * 1024

T = TypeVar("T")
#: Bytes; or how many there are, where they go to the first rank directly.
Body = Union[bytes, int]

# --- kinds of messages that come down ---

#: The same bytes for every rank.
SAME = 0
#: Rank -> bytes, for the ranks of a part of the tree.
EACH = 1
#: From the first rank to one: it can take the bytes.
SEND = 2
#: A rank that is gone, and whether no rank has an answer: nothing else will come.
LOST = 3


class Gathered(NamedTuple):
    """The messages that the first rank received, by global rank, and the ranks that are gone or late."""

    messages: dict[int, bytes]
    gone: tuple[int, ...] = ()


class LostRank(RuntimeError):
    """A rank is gone or late from which, or through which, this one gets its messages.

    Args:
        rank: the rank, in the whole job.
        is_unheard: whether what this rank has did not leave it: then no rank can have the others' answer.
    """

    def __init__(self, rank: int, is_unheard: bool = False) -> None:
        super().__init__(f"rank {rank} is gone, or too late")
        self.rank = rank
        self.is_unheard = is_unheard


def neighbours(place: int, count: int) -> tuple[Optional[int], list[range]]:
    """Return the parent of a place in a binomial tree of so many, and the parts of its children.

    The lowest bit that is set in a place is the size of its part of the tree; it comes first there.

    Example:
        >>> from torch_dcp_backport.transfer._src.tree import neighbours
        >>> neighbours(4, 7)
        (0, [range(5, 6), range(6, 7)])
    """
    size = place & -place or 1 << count.bit_length()
    steps = [1 << power for power in range(size.bit_length() - 1) if place + (1 << power) < count]
    children = [range(place + step, min(place + 2 * step, count)) for step in steps]
    return (place - size if place else None), children


class Tree:
    """One round of messages: up from every rank to the first, then down from it to every rank."""

    def __init__(self, group: Group) -> None:
        ranks, place = group_ranks(group), dist.get_rank(group)
        parent, children = neighbours(place, len(ranks))
        self.group = group
        self.ranks = ranks
        self.rank = ranks[place]
        self.parent = None if parent is None else ranks[parent]
        #: Child -> the ranks of its part of the tree; the smallest part first.
        self.children = {ranks[part.start]: ranks[part.start : part.stop] for part in children}
        #: This rank's bytes, where the first rank asks for them.
        self._large = b""

    # --- up ---

    def reduce(self, own: T, join: Callable[[list[T]], T]) -> Optional[tuple[T, list[int]]]:
        """Join the values of all ranks on the way to the first rank.

        Args:
            own: this rank's value; it is pickled.
            join: makes one value of several.

        Returns:
            On the first rank the value of all ranks that reached it, and the ranks that were gone; None
            on the others.

        Raises:
            LostRank: the next rank on the way to the first one is gone.
        """
        messages = _receive_from(self.children, self.group)
        lost = [child for child in self.children if child not in messages]
        # A message to a rank that is late would take as long as it.
        self.children = {child: self.children[child] for child in messages}
        values = [own]
        for message in messages.values():
            value, others = pickle.loads(message)
            values.append(value)
            lost += others
        joined = join(values) if len(values) > 1 else own
        if self.parent is None:
            return joined, lost
        try:
            _send(pickle.dumps((joined, lost)), self.parent, self.group)
        except RuntimeError as error:
            self.end(self.parent, error, is_unheard=True)
        return None

    def gather(self, data: bytes) -> Optional[Gathered]:
        """Send this rank's bytes to the first rank, which gets everyone's; None on the others.

        Raises:
            LostRank: the next rank on the way to the first one is gone.
        """
        if len(data) > LARGE and self.parent is not None:
            self._large = data
        total = self.reduce({self.rank: len(data) if self._large else data}, self._join)
        if total is None:
            if self._large:
                self.parent = self.ranks[0]
            return None
        gathered, lost = total
        messages = {rank: body for rank, body in gathered.items() if isinstance(body, bytes)}
        lengths = {rank: _checked(body) for rank, body in gathered.items() if isinstance(body, int)}
        for child in lost:
            self._send_loss_below(child, gathered)
        # From here on those get messages from this rank alone: one between them that ends would leave them
        # waiting.
        self._take_over(lengths)
        for rank in lengths:
            with _whoever_is_gone():
                _send(pickle.dumps((SEND, None)), rank, self.group)
        messages.update(_receive_bodies(lengths, self.group))
        silent = [rank for rank in self.ranks if rank not in messages]
        self.children = {child: part for child, part in self.children.items() if child in messages}
        lost += [rank for rank in lengths if rank not in messages]
        late = absent(self.group) if silent else []
        # After a timeout gloo closes all connections, also those of ranks that are not late. After the end of
        # a rank, ranks whose messages came through it have not been waited for: they may be about to come.
        named = set(late).intersection(lost) or set(late).intersection(silent)
        named = named or set(lost if len(lost) == 1 else silent)
        return Gathered(messages, tuple(rank for rank in silent if rank in named))

    def _join(self, parts: list[dict[int, Body]]) -> dict[int, Body]:
        # Equal bytes of several ranks are one object: pickle sends it once, and a number for each rank.
        same: dict[Body, Body] = {}
        joined = {rank: same.setdefault(body, body) for part in parts for rank, body in part.items()}
        if self.parent is not None:
            # The first rank itself answers those.
            for child in [child for child in self.children if isinstance(joined.get(child), int)]:
                del self.children[child]
        return joined

    def _send_loss_below(self, lost: int, gathered: Mapping[int, Body]) -> None:
        """Send the error to the ranks below one that is gone: some may wait for a message of the first rank.

        No rank waits until they arrive: ranks that wait for the one that is gone do not receive them.
        """
        place = self.ranks.index(lost)
        message = _head(pickle.dumps((LOST, (lost, True))))
        for rank in self.ranks[place + 1 : place + (place & -place)]:
            if rank not in gathered:
                with _whoever_is_gone():
                    buffer = tensor_of(message).to(device_for(self.group))
                    _not_awaited.append((buffer, post([(dist.isend, buffer, rank)], self.group)))

    def _take_over(self, ranks: Iterable[int]) -> None:
        """Make ranks the children of this one, the first; each rank stays in one child's part."""
        parts = dict(self.children)
        for rank in ranks:
            place = self.ranks.index(rank)
            parts[rank] = self.ranks[place : place + (place & -place)]
        self.children, taken = {}, set[int]()
        for child, part in sorted(parts.items(), key=lambda item: len(item[1])):
            self.children[child] = tuple(rank for rank in part if rank not in taken)
            taken.update(part)

    # --- down ---

    def broadcast(self, data: bytes = b"") -> bytes:
        """Return the first rank's bytes, on every rank.

        Raises:
            LostRank: a rank on the way from the first one is gone.
        """
        if self.parent is None:
            self._pass_on(SAME, data)
            return data
        kind, content = self._receive()
        assert kind == SAME, "the ranks are in one round"
        return bytes(content)

    def scatter(self, answers: Optional[Mapping[int, bytes]]) -> bytes:
        """Return this rank's bytes of those that the first rank passes for each rank; the others pass None.

        Equal bytes for all travel once to each rank. A rank without bytes is one that is gone.

        Raises:
            LostRank: a rank on the way from the first one is gone.
        """
        if self.parent is not None:
            return self._answer()
        assert answers is not None, "the first rank answers"
        if len(set(answers.values())) == 1:
            return self.broadcast(answers[self.rank])
        self._pass_on(EACH, answers)
        return answers[self.rank]

    def _answer(self) -> bytes:
        kind, content = self._receive()
        if kind == SEND:
            try:
                _send_body(self._large, self.ranks[0], self.group)
            except RuntimeError as error:
                self.end(self.ranks[0], error)
            kind, content = self._receive()
        return bytes(content if kind == SAME else content[self.rank])

    def _receive(self) -> tuple[int, Any]:
        """Receive a message from above, and pass it on."""
        parent = self.parent
        assert parent is not None, "the first rank has nothing above it"
        message = _receive_from([parent], self.group).get(parent)
        if message is None:
            self.end(parent)
        kind, content = pickle.loads(message)
        if kind != SEND:
            self._pass_on(kind, content)
        if kind == LOST:
            raise LostRank(*content)
        return kind, content

    def _pass_on(self, kind: int, content: Any) -> None:
        """Send a message to the children; the largest part of the tree comes first."""
        message = pickle.dumps((kind, content)) if kind != EACH else b""
        for child, ranks in reversed(list(self.children.items())):
            if kind == EACH:
                message = pickle.dumps((kind, {rank: content[rank] for rank in ranks if rank in content}))
            with _whoever_is_gone():
                _send(message, child, self.group)

    def end(self, lost: int, error: Optional[Exception] = None, is_unheard: bool = False) -> NoReturn:
        """Raise, and send the error to the ranks below, which wait for what will not come."""
        self._pass_on(LOST, (lost, is_unheard))
        raise LostRank(lost, is_unheard) from error


def _whoever_is_gone() -> contextlib.AbstractContextManager[None]:
    """Let a message to a rank that is gone be lost: the next round finds out."""
    return contextlib.suppress(RuntimeError)


# --- messages: a head of one size, with the length and what fits, and then the rest ---


#: Messages to ranks that may never receive them, in a group that has lost a rank.
_not_awaited: deque[tuple[torch.Tensor, Sequence[Any]]] = deque(maxlen=1024)


def _head(data: bytes) -> bytes:
    return (len(data).to_bytes(LENGTH, "big") + data[: HEAD - LENGTH]).ljust(HEAD, b"\0")


def _send(data: bytes, peer: int, group: Group) -> None:
    _send_body(_head(data), peer, group)
    _send_body(data[HEAD - LENGTH :], peer, group)


def _send_body(data: bytes, peer: int, group: Group) -> None:
    if data:
        finish(post([(dist.isend, tensor_of(data).to(device_for(group)), peer)], group))


def _receive_from(peers: Iterable[int], group: Group) -> dict[int, bytes]:
    """Return a message from each of some ranks, in their order; without those that are gone."""
    heads = _receive_bodies(dict.fromkeys(peers, HEAD), group)
    lengths = {peer: _checked(int.from_bytes(head[:LENGTH], "big")) for peer, head in heads.items()}
    longer = {peer: length - (HEAD - LENGTH) for peer, length in lengths.items() if length > HEAD - LENGTH}
    rests = _receive_bodies(longer, group) if longer else {}
    return {
        peer: head[LENGTH : LENGTH + lengths[peer]] + rests.get(peer, b"")
        for peer, head in heads.items()
        if peer in rests or peer not in longer
    }


def _receive_bodies(lengths: Mapping[int, int], group: Group) -> dict[int, bytes]:
    """Return so many bytes from each of some ranks; without those that are gone."""
    device = device_for(group)
    buffers = {
        peer: torch.empty(length, dtype=torch.uint8, device=device) for peer, length in lengths.items()
    }
    gone: set[int] = set()
    works: list[tuple[int, Any]] = []
    for peer, buffer in buffers.items():
        # One by one: where a peer is gone, some backends raise here, for it alone.
        try:
            works += [(peer, work) for work in post([(dist.irecv, buffer, peer)], group)]
        except RuntimeError:
            gone.add(peer)
    for peer, work in works:
        try:
            work.wait()
        except RuntimeError:
            gone.add(peer)
    return {peer: bytes_of(buffer) for peer, buffer in buffers.items() if peer not in gone}


def _checked(length: int) -> int:
    if length > MOST:
        raise ValueError(f"a message of {length} bytes, where {MOST} are the most")
    return length
