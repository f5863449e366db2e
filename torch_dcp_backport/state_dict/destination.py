"""The destination of a tensor of a checkpoint on this rank, as data.

A destination says what is filled and what it becomes. Nothing is made or written before every rank agreed.
"""

from __future__ import annotations

import contextlib
import enum
from typing import Any, NamedTuple, Optional

import torch
from torch import nn

from torch_dcp_backport import compat
from torch_dcp_backport.transfer import Layout, Target, TensorInfo, Want, layout_at, layout_of

#: The stage before any loading code runs.
FIRST = ""


class Becomes(enum.Enum):
    """The use of a filled local tensor to its owner."""

    #: The live tensor, filled in place.
    LIVE = enum.auto()
    #: A new tensor: a DTensor where `like` is one, else as it is.
    NEW = enum.auto()
    #: The same as a Parameter, as `like` is one.
    PARAMETER = enum.auto()
    #: A DTensor that every rank of `like`'s mesh holds whole.
    REPLICA = enum.auto()
    #: A state in the memory format, and of the kind, of `like`.
    STATE = enum.auto()


class Destination(NamedTuple):
    """The place of one tensor of the checkpoint on this rank."""

    layout: Layout
    #: dtype and device of the tensor that is filled.
    dtype: torch.dtype
    device: torch.device
    #: The part of the loaded object that gets the value, in the load's terms.
    owner: Any
    becomes: Becomes = Becomes.NEW
    #: The tensor (plain or DTensor) that the value lies like.
    like: Optional[torch.Tensor] = None
    #: The local tensor to fill; None where it is made.
    local: Optional[torch.Tensor] = None
    #: When it moves: FIRST, or a stage of the load's.
    stage: str = FIRST

    @property
    def want(self) -> Want:
        return Want(self.layout, self.dtype, self.stage)


def in_place(live: torch.Tensor, owner: Any, view: Optional[torch.Tensor] = None) -> Destination:
    """`live` (plain or DTensor) itself, for its part of the checkpoint's tensor, or its `view`."""
    seen = live if view is None else view
    local = written_part(seen)
    # A subclass (quantized weights) takes a whole box or nothing.
    into = local if type(local) in compat.PLAIN_TENSORS else None
    return Destination(layout_of(seen), live.dtype, local.device, owner, Becomes.LIVE, live, into)


def fresh(
    like: torch.Tensor,
    offer: TensorInfo,
    device: torch.device,
    owner: Any,
    stage: str = FIRST,
    becomes: Becomes = Becomes.NEW,
) -> Destination:
    """A new tensor of the checkpoint's dtype, laid out as `like` (plain or DTensor), on `device`."""
    return Destination(layout_of(like), offer.dtype, device, owner, becomes, like, stage=stage)


def unsharded(
    offer: TensorInfo,
    device: torch.device,
    owner: Any,
    stage: str = FIRST,
    local: Optional[torch.Tensor] = None,
) -> Destination:
    """A new whole tensor, whatever its shape, on every rank; `local` where this rank has it already."""
    return Destination(layout_at(offer.shape), offer.dtype, device, owner, local=local, stage=stage)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor; a plain tensor itself."""
    return compat.local_part(tensor) if isinstance(tensor, compat.DTensor) else tensor


def written_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor to write into; a plain tensor without its gradient history.

    Call it for parameters and buffers only: an optimizer's state may be of a subclass without `detach`.
    """
    return compat.local_part(tensor) if isinstance(tensor, compat.DTensor) else tensor.detach()


def target_of(destination: Destination, rank: int) -> Target:
    """The local tensor to fill, made where there is none yet."""
    layout, dtype, device, _, becomes, like, local, _ = destination
    box = layout.own_box(rank)
    if local is None:
        form = local_of(like) if like is not None and becomes is Becomes.STATE else None
        if form is not None and type(form) in compat.PLAIN_TENSORS:
            local = torch.empty_like(form, dtype=dtype)
        else:
            local = torch.empty(box.size, dtype=dtype, device=device)
    return Target(local, box)


def another(local: torch.Tensor) -> torch.Tensor:
    """Another tensor of a subclass, to be written."""
    with contextlib.suppress(NotImplementedError):
        return torch.empty_like(local)
    # What moves between devices can be copied.
    return local.to(local.device, copy=True)


def value_of(destination: Destination, filled: torch.Tensor) -> Any:
    """The owner's value, once the local tensor is filled."""
    like, becomes = destination.like, destination.becomes
    if becomes is Becomes.NEW and not isinstance(like, compat.DTensor):
        return filled
    assert like is not None, "it is like another tensor"
    if becomes is Becomes.LIVE:
        if destination.local is None:
            written = written_part(like)
            # The checkpoint may have a vector of one element for a scalar.
            written.copy_(filled.view(written.shape))
        return like
    if becomes is Becomes.REPLICA:
        assert isinstance(like, compat.DTensor), "replicas are on a mesh"
        return compat.replicated(filled, like.device_mesh)
    if becomes is Becomes.STATE:
        local = local_of(like)
        if type(local) not in compat.PLAIN_TENSORS:
            filled = another(local).copy_(filled)
        return compat.wrap_local(filled, like) if isinstance(like, compat.DTensor) else filled
    value = compat.from_local(filled, like) if isinstance(like, compat.DTensor) else filled
    return nn.Parameter(value, like.requires_grad) if becomes is Becomes.PARAMETER else value
