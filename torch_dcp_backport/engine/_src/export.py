"""Whole tensors out of shards, in buckets: to every rank, or to the rank that feeds a rollout.

Must never hold more whole tensors than a bucket.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Optional

import torch

from torch_dcp_backport.hf import HeldPart as Part
from torch_dcp_backport.hf import names_of, tied_names, unchecked
from torch_dcp_backport.transfer import Group, Held, Key, gather

BUCKET_BYTES = 64 * 2**20
#: Beside a bucket: half as much as transfers take where they fill what is there already.
STAGING_BYTES = 32 * 2**20


@torch.no_grad()
def whole_tensors(
    tensors: Mapping[str, torch.Tensor],
    *,
    to: Optional[int] = None,
    dtype: Optional[torch.dtype] = None,
    device: Optional[torch.device] = None,
    bucket_bytes: int = BUCKET_BYTES,
    group: Group = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) of every name; tied names get the same tensor in sequence. Collective.

    Every rank runs through it to the end; on ranks that receive nothing it is empty.

    Args:
        tensors: DTensors, or tensors that every rank holds; the same names on every rank.
        to: the global rank that receives; None is every rank.
        dtype: the dtype of floating tensors, cast before they travel; None is their own.
        device: the device of the whole tensors; None is the device of the parts.
        bucket_bytes: bytes of whole tensors that are gathered at once; a larger one is alone.
        group: the ranks that take part; None is the default process group.

    Raises:
        RuntimeError: ranks hold different names, shapes or dtypes; on every rank.
        TransferError: a rank is gone, or the group's timeout is over.

    Example:
        Within a process group:

        >>> import torch
        >>> from torch_dcp_backport import engine
        >>> model = torch.nn.Linear(2, 1)
        >>> for name, tensor in engine.whole_tensors(engine.tensors_of(model), dtype=torch.bfloat16):
        ...     print(name, tuple(tensor.shape), tensor.dtype)
        weight (1, 2) torch.bfloat16
        bias (1,) torch.bfloat16
    """
    parts = {name: unchecked(tensor) for name, tensor in tensors.items()}
    bucket: list[list[str]] = []
    size, most = 0, bucket_bytes
    for names in names_of(parts, {**tied_names(parts), **same_objects(tensors)}):
        info = parts[names[0]].info
        nbytes = math.prod(info.shape) * cast_dtype(info.dtype, dtype).itemsize
        if bucket and size + nbytes > most:
            yield from _gathered(parts, bucket, to, dtype, device, group)
            # The caller's loop holds a tensor until it gets the next: beside a large tensor is room for one.
            most = 0 if size > bucket_bytes else bucket_bytes
            bucket, size = [], 0
        bucket.append(names)
        size += nbytes
    if bucket:
        yield from _gathered(parts, bucket, to, dtype, device, group)


def same_objects(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return later name of an object -> its first name, also on ranks that hold nothing of it."""
    first: dict[int, str] = {}
    return {
        name: first[id(tensor)]
        for name, tensor in tensors.items()
        if first.setdefault(id(tensor), name) != name
    }


def _gathered(
    parts: Mapping[str, Part],
    bucket: list[list[str]],
    to: Optional[int],
    dtype: Optional[torch.dtype],
    device: Optional[torch.device],
    group: Group,
) -> Iterator[tuple[str, torch.Tensor]]:
    held: dict[Key, Held] = {}
    for name, *_ in bucket:
        layout, local = parts[name]
        held[name] = Held(local.to(cast_dtype(local.dtype, dtype)), layout)

    def make(name: Key) -> torch.Tensor:
        local, layout = held[name]
        return torch.empty(layout.shape, dtype=local.dtype, device=device or local.device)

    full_tensors = gather(held, make, to=to, group=group, staging_bytes=STAGING_BYTES)
    held.clear()
    for names in bucket:
        tensor = full_tensors.pop(names[0], None)
        if tensor is not None:
            for name in names:
                yield name, tensor


def cast_dtype(own: torch.dtype, dtype: Optional[torch.dtype]) -> torch.dtype:
    """Return the dtype of an exported tensor: floating ones are cast to `dtype`, where there is one."""
    return dtype if dtype is not None and own.is_floating_point else own
