"""Values that every rank, process and release makes the same; a mapping and a tensor that fail."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def value_of(key: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same values on every rank and in every process."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big")
    generator = torch.Generator().manual_seed(seed)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(1, 100, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


class Breaking(Mapping[str, torch.Tensor]):
    """Values that are made at each access, as from a disk that fails after some reads."""

    def __init__(self, full: Mapping[str, torch.Tensor], reads: int) -> None:
        self.full, self.reads = full, reads

    def __iter__(self) -> Iterator[str]:
        return iter(self.full)

    def __len__(self) -> int:
        return len(self.full)

    def __getitem__(self, key: str) -> torch.Tensor:
        self.reads -= 1
        if self.reads < 0:
            raise OSError("the disk failed")
        return self.full[key].clone()


class Failing(torch.Tensor):
    """A target with code of its own, which takes no values."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            raise ValueError("no values are taken")
        return super().__torch_function__(func, types, args, kwargs or {})
