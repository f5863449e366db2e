"""Agreements: the common mark of all ranks, or the problems of all ranks, on every rank."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch.distributed as dist

from torch_dcp_backport.transfer._src.errors import UNCHANGED, Finding, Problem, as_transfer_error, spell
from torch_dcp_backport.transfer._src.groups import Group, group_ranks, is_silent
from torch_dcp_backport.transfer._src.tree import Tree
from torch_dcp_backport.transfer._src.wire import (
    absent,
    bytes_of,
    check_in,
    count_agreement,
    device_for,
    gather_objects,
    gather_rows,
    takes_collectives,
    tensor_of,
)

NO_DIGEST = bytes(16)
#: A mark as it travels: the device type is filled up with zeros.
ROW = struct.Struct(">16s??Q15s")
MARK_BYTES = ROW.size


class Mark(NamedTuple):
    """A rank's part in an agreement; or the common mark of all ranks."""

    #: Of the wants, 16 bytes; of all ranks: `NO_DIGEST` where they differ.
    digest: bytes
    #: Whether the rank has problems; of all ranks: any rank.
    troubled: bool
    #: Whether code outside torch takes part; of all ranks: on any rank.
    user_code: bool = False
    #: The budget; of all ranks: the smallest.
    staging_bytes: int = 0
    #: A device type of up to 15 letters; of all ranks: nothing where those that have one differ.
    device: str = ""

    def to_bytes(self) -> bytes:
        return ROW.pack(*self[:4], self.device.encode())

    @classmethod
    def from_bytes(cls, row: bytes) -> Mark:
        *fields, device = ROW.unpack(row)
        return cls._make([*fields, device.rstrip(b"\0").decode()])


def common_mark(marks: Sequence[Mark]) -> Mark:
    digests = {mark.digest for mark in marks}
    return Mark(
        digests.pop() if len(digests) == 1 else NO_DIGEST,
        any(mark.troubled for mark in marks),
        any(mark.user_code for mark in marks),
        min(mark.staging_bytes for mark in marks),
        common_device(mark.device for mark in marks if mark.device),
    )


def common_device(types: Iterable[str]) -> str:
    """The one device type; nothing where there are none or several."""
    distinct = set(types)
    return distinct.pop() if len(distinct) == 1 else ""


def agree_on_mark(mark: Mark, group: Group, so_far: str = UNCHANGED) -> Mark:
    """The common mark of all ranks, on every rank; `so_far` is part of the error where none comes about.

    Along the tree where messages are cheap: an all-gather takes a step for each rank there.
    """
    ranks = group_ranks(group)

    def failure_text() -> str:
        if dist.get_rank() == ranks[0]:
            return f"{so_far}; no agreement with {spell(absent(group) or ranks[1:])}"
        return f"{so_far}; no agreement with {spell(ranks[:1])}, which may be waiting for another rank itself"

    check_in(group)
    with as_transfer_error(failure_text):
        common = _common_mark_in(mark, group)
    count_agreement(group)
    return common


def _common_mark_in(mark: Mark, group: Group) -> Mark:
    if is_silent(group):
        return mark
    if takes_collectives(group):
        rows = gather_rows(tensor_of(mark.to_bytes()).to(device_for(group)), group).cpu()
        return common_mark([Mark.from_bytes(bytes_of(row)) for row in rows])
    tree = Tree(group)
    # Ranks mostly have the same one.
    reduced = tree.reduce({mark}, lambda marks: set[Mark]().union(*marks))
    if reduced is not None and reduced[1]:
        tree.end(reduced[1][0])
    common = None if reduced is None else common_mark(list(reduced[0]))
    return Mark.from_bytes(tree.broadcast(b"" if common is None else common.to_bytes()))


def agree_on_mesh(
    findings: Sequence[Finding], groups: Sequence[Group], user_code: bool = False, so_far: str = UNCHANGED
) -> tuple[Sequence[Finding], bool]:
    """(every rank's findings, whether user code takes part on any rank), on every rank of a mesh.

    The groups are those of its dimensions. None may span the mesh as a whole; passing the findings on along
    one dimension after the other reaches every rank.
    """
    for group in groups:
        common = agree_on_mark(Mark(NO_DIGEST, bool(findings), user_code), group, so_far)
        user_code = common.user_code
        if common.troubled:
            findings = share_findings(findings, group)
    return findings, user_code


def share_findings(findings: Sequence[Finding], group: Group) -> list[Finding]:
    """The findings that the ranks of a group know of.

    One message for every kind of agreement: a rank that failed takes part in whichever the others are in.
    """
    by_rank = gather_objects(list(findings), group)
    return [(rank, Problem(*problem)) for received in by_rank for rank, problem in received]
