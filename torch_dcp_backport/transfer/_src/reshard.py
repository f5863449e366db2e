"""DTensors to another mesh or other placements: every rank receives what its new shard lacks, once."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, Optional, Union

import torch
from torch.distributed.device_mesh import DeviceMesh

from torch_dcp_backport import compat
from torch_dcp_backport.transfer._src.call import Call
from torch_dcp_backport.transfer._src.consensus import common_device
from torch_dcp_backport.transfer._src.errors import Problem, spell_key
from torch_dcp_backport.transfer._src.exchange import Exchange, ExchangePlan, Route, problems_of, rows_of
from torch_dcp_backport.transfer._src.groups import Group, device_in, note_device
from torch_dcp_backport.transfer._src.layout import Box, Layout, layout_of, mesh_of, misfit, splits_of
from torch_dcp_backport.transfer._src.memory import (
    has_slices,
    is_same_view,
    layout_text,
    span_of,
    why_not_writable,
)
from torch_dcp_backport.transfer._src.plan import Agreement, Terms

TITLE = "cannot reshard"

Placements = Sequence[object]
#: A mesh and placements for a new DTensor, or a DTensor or plain tensor that is written in place.
Destination = Union[tuple[DeviceMesh, Placements], torch.Tensor]


class End(NamedTuple):
    """One end of a tensor's way: its layout, and this rank's local tensor with the box that it holds."""

    layout: Layout
    #: None where it is yet to be made.
    local: Optional[torch.Tensor]
    box: Box


@torch.no_grad()
def reshard(
    tensors: Mapping[Hashable, torch.Tensor],
    to: Union[Destination, Mapping[Hashable, Destination]],
    *,
    group: Group = None,
    staging_bytes: Optional[int] = None,
) -> dict[Hashable, torch.Tensor]:
    """Give every tensor another layout: other placements, another mesh, or both. Collective.

    Every rank of `group` calls with the same keys in the same order. Nothing is gathered whole, and what a
    rank holds already does not travel. On a mesh that is not the old one, ranks outside the old mesh pass the
    DTensor as torch makes it there, with an empty local tensor; ranks outside the new mesh receive such a
    DTensor.

    Args:
        tensors: key -> DTensor, or a plain tensor that every rank of the group holds whole.
        to: a device mesh and placements for all tensors, or for each key; or, for a key, a tensor of the
            same shape that is written in place, cast to its dtype.
        group: the process group; it must contain the ranks of all meshes. None is the default group.
        staging_bytes: the most bytes of staging buffers on any rank; None is the budget of `configure`.

    Returns:
        key -> the tensor in its new layout: a new DTensor, or the one that was written in place.

    Raises:
        RuntimeError: the ranks pass different keys, dtypes or layouts, a placement is Partial, a shape
            differs, a destination shares memory with a source; on every rank, before any byte moves.
        ValueError: `staging_bytes` is not a staging budget.
        TransferError: a rank is gone, or the group's timeout is over; says what was already written.

    Example:
        Within a process group (of the ranks of the mesh):

        >>> import torch
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed._tensor import Shard  # from torch 2.5 on: torch.distributed.tensor
        >>> from torch_dcp_backport.transfer import reshard
        >>> mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        >>> sharded = reshard({"w": torch.arange(4)}, (mesh, [Shard(0)]))
        >>> sharded["w"].placements, sharded["w"].to_local().tolist()
        ((Shard(dim=0),), [0, 1, 2, 3])
    """
    with Call(TITLE, "reshard", [group]) as call:
        have: dict[Hashable, End] = {}
        want: dict[Hashable, End] = {}
        routes: dict[Hashable, Route] = {}
        sources: dict[Hashable, torch.Tensor] = {}
        destinations: dict[Hashable, Destination] = {}
        with call.guard():
            # Once: a mapping may make its values.
            sources.update(tensors.items())
            note_device(group, sources.values())
            destinations.update(destinations_of(sources, to))
            for key, tensor in sources.items():
                with call.guard(key):
                    have[key] = end_of(tensor, call)
                    want[key] = wanted_end(tensor, destinations[key], call)
                    routes[key] = route_of(tensor, have[key], want[key])
            call.problems += misfits(have, call.rank) + misfits(want, call.rank)
            call.problems += problems_of(routes, call) + overlaps(have, want)
        rows: list[str] = []
        with call.guard():
            dtypes = (f" of {tensor.dtype}" for tensor in sources.values())
            rows = [row + dtype for row, dtype in zip(rows_of(routes), dtypes)]
        device = common_device(end.local.device.type for end in have.values() if end.local is not None)
        agreement = agree_on(rows, call, staging_bytes, device)
        new: dict[Hashable, torch.Tensor] = {}
        with call.room_for("the new shards"):
            for key, end in want.items():
                new[key] = local_of(end, sources[key], destinations[key], group)
        plan = ExchangePlan(routes, call.ranks, call.rank)
        read_from = {key: (end.local, end.box) for key, end in have.items() if end.local is not None}
        write_to = {key: (local, want[key].box) for key, local in new.items()}
        Exchange(call, agreement, plan, read_from, write_to).run(plan.nbytes)
        call.tally.tensors = len(routes)
        call.tally.close()
        return {key: finished(destinations[key], sources[key], new[key]) for key in routes}


def destinations_of(
    tensors: Mapping[Hashable, torch.Tensor], to: Union[Destination, Mapping[Hashable, Destination]]
) -> dict[Hashable, Destination]:
    if not isinstance(to, Mapping):
        return dict.fromkeys(tensors, to)
    missing = [key for key in tensors if key not in to]
    if missing:
        raise KeyError(f"no destination for {', '.join(map(spell_key, missing[:5]))}")
    return {key: to[key] for key in tensors}


def end_of(tensor: torch.Tensor, call: Call) -> End:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a {type(tensor).__name__}, where a tensor is needed")
    layout = layout_of(tensor)
    local = compat.arrived(compat.local_part(tensor)) if isinstance(tensor, compat.DTensor) else tensor
    if not has_slices(local) or local.is_meta:
        kind = "on the meta device" if local.is_meta else layout_text(local)
        raise ValueError(f"a local tensor without parts in memory ({kind})")
    return End(layout, local.detach(), layout.own_box(call.rank))


def wanted_end(tensor: torch.Tensor, to: Destination, call: Call) -> End:
    if isinstance(to, torch.Tensor):
        end = end_of(to, call)
        assert end.local is not None, "it is a tensor's"
        why = why_not_writable(end.local)
        if why:
            raise ValueError(f"the destination cannot be written: {why}")
        # Whether torch has such a cast.
        torch.empty(1, dtype=tensor.dtype, device=end.local.device).to(to.dtype)
        return end
    mesh, placements = to
    shape = tuple(tensor.shape)
    if len(placements) != mesh.ndim:
        raise ValueError(f"{len(placements)} placements on a mesh of {mesh.ndim} dimensions")
    if mesh.device_type == "meta":
        raise ValueError("a mesh on the meta device, which holds no values")
    split = mesh_of(mesh)
    layout = Layout(shape, split, splits_of(split.shape, checked(tuple(placements), shape)))
    return End(layout, None, layout.own_box(call.rank))


def checked(placements: tuple[object, ...], shape: tuple[int, ...]) -> tuple[object, ...]:
    """Placements with dimensions that count from the front, as DTensor normalises them."""
    normalised = []
    for placement in placements:
        dim = getattr(placement, "dim", None)
        lowest = -len(shape) if type(placement) is compat.Shard else 0
        if dim is not None and not lowest <= dim < len(shape):
            raise ValueError(f"Shard(dim={dim}) of a tensor of {len(shape)} dimensions")
        normalised.append(compat.Shard(dim + len(shape)) if dim is not None and dim < 0 else placement)
    return tuple(normalised)


def route_of(tensor: torch.Tensor, have: End, want: End) -> Route:
    """A tensor's route, on which the smaller dtype travels: a cast costs the same on both ends."""
    wanted = want.local.dtype if want.local is not None else tensor.dtype
    shrinks = wanted.itemsize < tensor.dtype.itemsize
    return Route(have.layout, want.layout, wanted if shrinks else tensor.dtype)


def misfits(ends: Mapping[Hashable, End], rank: int) -> list[Problem]:
    problems = [
        misfit(key, end.local, end.layout, rank) for key, end in ends.items() if end.local is not None
    ]
    return [problem for problem in problems if problem]


def overlaps(have: Mapping[Hashable, End], want: Mapping[Hashable, End]) -> list[Problem]:
    """Destinations that would be written while they are read. A tensor may be its own, where it stays."""
    spans: list[tuple[str, int, int, bool, Hashable]] = []
    for ends, is_written in ((have, False), (want, True)):
        for key, end in ends.items():
            if end.local is None or not end.local.data_ptr():
                continue
            source = have[key].local
            stays = end.box == have[key].box
            if is_written and stays and source is not None and is_same_view(end.local, source):
                continue
            spans.append((end.local.device.type, *span_of(end.local), is_written, key))
    problems = []
    #: Whether it is written -> (device, address behind the end, key) of the span that reaches furthest.
    furthest: dict[bool, tuple[str, int, Hashable]] = {}
    for device, start, stop, is_written, key in sorted(spans, key=lambda span: span[:3]):
        for other_is_written, (other_device, other_stop, other_key) in furthest.items():
            if other_device == device and start < other_stop and (is_written or other_is_written):
                written, read = (key, other_key) if is_written else (other_key, key)
                other = "another destination" if is_written == other_is_written else "what is read"
                what = f"shares memory with {other}"
                problems.append(Problem(what, spell_key(written), spell_key(read), "memory of its own"))
        longest = furthest.get(is_written)
        if longest is None or longest[0] != device or stop > longest[1]:
            furthest[is_written] = device, stop, key
    return problems


def agree_on(rows: Sequence[str], call: Call, staging_bytes: Optional[int], device: str) -> Agreement:
    """Raise every rank's problems, and the differences between what the ranks pass."""
    condition = hashlib.blake2b("\n".join(rows).encode(), digest_size=16).hexdigest()
    agreement = call.agree_on_wants({}, Terms(device, condition, note=rows), staging_bytes=staging_bytes)
    if not agreement.is_common:
        first = call.ranks[0]
        call.problems += differences(agreement.table_of(first).note, rows, first)
        call.agree_on_wants({})
    return agreement


def differences(expected: Sequence[str], rows: Sequence[str], first: int) -> list[Problem]:
    """Problems of this rank's rows, where they are not those of the first rank."""
    what = "passed differently"
    problems = [
        Problem(what, got=row, expected=f"{expected_row} as rank {first}")
        for row, expected_row in zip(rows, expected)
        if row != expected_row
    ]
    if len(rows) != len(expected):
        problems.append(Problem(what, got=f"{len(rows)} tensors", expected=f"{len(expected)}"))
    return problems


def local_of(end: End, tensor: torch.Tensor, to: Destination, group: Group) -> torch.Tensor:
    """The local tensor that is written: that of the destination, or a new one."""
    if end.local is not None:
        return end.local
    assert not isinstance(to, torch.Tensor)
    return torch.empty(end.box.size, dtype=tensor.dtype, device=device_in(group, to[0].device_type))


def finished(to: Destination, tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    if isinstance(to, torch.Tensor):
        return to
    mesh, placements = to
    placements = checked(tuple(placements), tuple(tensor.shape))
    stride = torch.empty(tensor.shape, device="meta").stride()
    return compat.as_dtensor(local, mesh, placements, tensor.shape, stride)
