"""The memory of tensors: its addresses, and whether their parts are parts of it. Reads addresses only."""

from __future__ import annotations

import torch


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
    return f"{type(value).__name__} of layout {value.layout}"


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
