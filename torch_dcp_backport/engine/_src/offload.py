"""What autograd saves for a backward pass, on the host until then.

torch's `save_on_cpu` copies every saved tensor, each time that it is saved: parameters as well, and what
several operations share. Here a storage is copied once, and the model's own tensors stay where they are.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Optional

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from torch_dcp_backport import compat

#: Bytes: what is smaller stays on the device, where two copies would cost more time than it takes memory.
LEAST = 2**16
#: In torch's error where a transform of torch.func is used while there are hooks.
NO_TRANSFORMS = "don't yet support saved tensor hooks"
#: A storage's weak reference, which keeps its address from being another's; equal for the same storage.
weak: Callable[[torch.UntypedStorage], Any] = StorageWeakRef
#: Returns the saved tensor.
Read = Callable[[], torch.Tensor]


class Stored:
    """A storage's bytes on the host; on the device again from the first read on, until nothing refers to it.

    All strides and views of the storage stay as they are: another stride may be another order of a sum.
    """

    def __init__(self, storage: torch.UntypedStorage, version: tuple[int, int]) -> None:
        """Copy the bytes, in the order of the stream that computes.

        Args:
            storage: a storage on the device.
            version: autograd's counts of writes into it, by itself and by a DTensor.
        """
        self.version = version
        self.device = storage.device
        there = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        self.host = compat.host_buffer(storage.nbytes(), self.device.type)
        # Pinned memory is written and read in the stream's order; nothing waits for it.
        self.is_pinned = self.host.is_pinned()
        self.host.copy_(there, non_blocking=self.is_pinned)
        self.again: Optional[torch.UntypedStorage] = None

    def read(
        self, dtype: torch.dtype, offset: int, shape: torch.Size, stride: tuple[int, ...]
    ) -> torch.Tensor:
        """Return a view of the storage on the device, which all reads share."""
        if self.again is None:
            self.again = self.host.to(self.device, non_blocking=self.is_pinned).untyped_storage()
        return torch.empty(0, dtype=dtype, device=self.device).set_(self.again, offset, shape, stride)


class Pass:
    """The storages that a forward pass has saved."""

    def __init__(self, model: nn.Module, kind: str, least: int) -> None:
        """Remember the model's buffers, which stay where they are.

        Args:
            model: the model.
            kind: the type of the device that tensors are saved from.
            least: the bytes of the smallest storage that goes to the host.
        """
        self.kind, self.least = kind, least
        # They live longer than the pass, so that their addresses are enough.
        self.buffers = {buffer.untyped_storage()._cdata for buffer in model.buffers() if is_plain(buffer)}
        self.stored: dict[Any, Stored] = {}

    def save(self, tensor: torch.Tensor) -> Read:
        """Return how to read a tensor that autograd saves."""
        base = tensor._base if tensor._is_view() else tensor
        if isinstance(base, nn.Parameter):
            return kept(tensor)
        if not isinstance(tensor, compat.DTensor):
            return self.copied(tensor) if self.moves(tensor) else kept(tensor)
        local = compat.arrived(compat.local_part(tensor))
        if not self.moves(local):
            return kept(tensor)
        wrap, read = compat.wrapper(tensor), self.copied(local, tensor._version)
        return lambda: wrap(read())

    def moves(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor that is no parameter goes to the host."""
        if not is_plain(tensor) or tensor.device.type != self.kind:
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= self.least and storage._cdata not in self.buffers

    def copied(self, tensor: torch.Tensor, outer: int = 0) -> Read:
        """Return how to read a tensor from its storage's copy, which is made unless there is one.

        Args:
            tensor: a dense tensor on the device.
            outer: the count of writes into the DTensor that it is the part of: they do not count as its own.
        """
        storage = tensor.untyped_storage()
        key, version = weak(storage), (tensor._version, outer)
        stored = self.stored.get(key)
        if stored is None or stored.version != version:
            stored = self.stored[key] = Stored(storage, version)
        offset = int(tensor.storage_offset())
        return functools.partial(stored.read, tensor.dtype, offset, tensor.shape, tensor.stride())


def kept(tensor: torch.Tensor) -> Read:
    """Return how to read a tensor that stays where it is: the tensor itself would keep its graph alive.

    Where there are hooks, autograd does not look whether it was written since.
    """
    there, version = tensor.detach(), tensor._version

    def read() -> torch.Tensor:
        if there._version != version:
            raise RuntimeError(
                f"a tensor {tuple(there.shape)} of {there.dtype} that the backward pass needs was written in "
                f"place after autograd had saved it: {there._version} writes, expected {version}"
            )
        return there

    return read


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a dense view of a storage, and nothing else."""
    return (
        type(tensor) in compat.PLAIN_TENSORS
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        # Zeros of autograd's own, without memory.
        and not tensor._is_zerotensor()
    )


@contextlib.contextmanager
def saved_on_host(model: nn.Module, kind: str, least: int = LEAST) -> Iterator[Pass]:
    """Return a context for a forward pass: what autograd saves in it is on the host until it is read.

    Blocks that are computed again in the backward pass save their inputs alone, as they do without.

    Args:
        model: the model, whose parameters and buffers stay where they are.
        kind: the type of the device that tensors are saved from.
        least: the bytes of the smallest storage that goes to the host.

    Raises:
        RuntimeError: the model uses a transform of torch.func that torch does not run in such a context.
    """
    saved = Pass(model, kind, least)
    try:
        with torch.autograd.graph.saved_tensors_hooks(saved.save, lambda read: read()):
            yield saved
    except RuntimeError as error:
        if NO_TRANSFORMS not in str(error):
            raise
        raise RuntimeError(
            "enable_activation_offload=True does not go with the model's transform of torch.func: "
            "torch.vmap needs torch >= 2.5 beside it, and torch.func.grad is an error in every release; "
            f"enable_activation_offload=False would do ({error})"
        ) from error
    finally:
        # From here on the graph alone keeps them.
        saved.stored.clear()
