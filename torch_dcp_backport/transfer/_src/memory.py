"""The memory of tensors: its addresses, and their parts as views of it. Copies nothing."""

from __future__ import annotations

import torch

from torch_dcp_backport.transfer._src.layout import Box


def has_slices(value: torch.Tensor) -> bool:
    """Whether parts of this tensor are parts of its memory: dense, and no wrapper around other tensors."""
    is_wrapper = type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return not is_wrapper and value.layout is torch.strided and not value.is_quantized


def has_values(value: torch.Tensor) -> bool:
    """Whether a tensor that is known to be no wrapper has slices, and values."""
    return (
        value.layout is torch.strided and not value.is_meta and not value.is_quantized and not value.is_nested
    )


def layout_text(value: torch.Tensor) -> str:
    """The kind of a tensor without slices, for errors."""
    if value.is_quantized:
        # Its layout is that of a plain tensor.
        return f"quantized {type(value).__name__} of {value.dtype}"
    return f"{type(value).__name__} of layout {value.layout}"


def part_of(tensor: torch.Tensor, holds: Box, box: Box) -> torch.Tensor:
    """The part of `tensor` (which holds the box `holds`) that belongs to `box`.

    Cut with narrow(): an index of slices costs as much as the copy of a small piece, is cut short where it
    reaches beyond the tensor, and may be a subclass's own.
    """
    for dim, extent in enumerate(box.size):
        if extent != holds.size[dim]:
            tensor = tensor.narrow(dim, box.offset[dim] - holds.offset[dim], extent)
    return tensor


def is_dense(part: torch.Tensor) -> bool:
    """Whether the memory of a tensor has its values, row-major and without gaps; else a copy has them so."""
    is_lazy = part.is_conj() or part.is_neg() or part._is_zerotensor()
    return part.is_contiguous() and not is_lazy


def as_bytes(part: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, which they share."""
    # Of a single element the stride may be any, and no view of another dtype has it so.
    return part.as_strided((part.numel(),), (1,)).view(torch.uint8)


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of a tensor's first byte, and that behind its last one."""
    start = tensor.data_ptr()
    return start, start + (tensor.nbytes if tensor.is_contiguous() else span_bytes(tensor))


def span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to behind its last one."""
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride()))
    return int(last + 1) * tensor.element_size()


def is_same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same elements in the same memory, read in the same way."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.device == b.device
        and (a.dtype, a.shape) == (b.dtype, b.shape)
        # The stride of a dimension of size 1 says nothing.
        and all(
            extent == 1 or stride == other for extent, stride, other in zip(a.shape, a.stride(), b.stride())
        )
        and (a.is_conj(), a.is_neg()) == (b.is_conj(), b.is_neg())
    )


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements are beyond its storage: sharding libraries free it and keep the tensor."""
    # First: some empty tensors (sparse ones, those of vmap) have no storage.
    if not tensor.numel():
        return False
    nbytes = tensor.nbytes if tensor.is_contiguous() else span_bytes(tensor)
    offset = tensor.storage_offset()
    start = offset * tensor.element_size() if offset else 0
    return tensor.untyped_storage().nbytes() < start + nbytes


def why_not_writable(tensor: torch.Tensor) -> str:
    """The reason why a copy into this tensor would fail; "" where it would not."""
    if not tensor.numel():
        return ""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return "it was made in inference mode"
    if is_freed(tensor):
        return "its memory was freed"
    if not tensor.is_contiguous() and any(
        extent > 1 and not stride for extent, stride in zip(tensor.shape, tensor.stride())
    ):
        return "several of its elements are the same memory (expand)"
    return ""
