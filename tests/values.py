"""Values that every rank, process and release makes the same."""

from __future__ import annotations

import hashlib

import torch


def value_of(key: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same values on every rank and in every process."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big")
    generator = torch.Generator().manual_seed(seed)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(1, 100, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)
