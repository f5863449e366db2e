"""Weights in fp8 with a scale for each block, as the values that they encode, read slice by slice.

Must never hold more than the slice that is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

import torch

from torch_dcp_backport.hf._src.source import Source, copied_of
from torch_dcp_backport.transfer import Box, Problem, TensorInfo

#: Beside a weight: what its blocks are multiplied by.
SCALE = "_scale_inv"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def block_size_of(config: Mapping[str, Any]) -> Optional[tuple[int, int]]:
    """Return (rows, columns) of the blocks that config.json says weights in fp8 have; None without such."""
    said = config.get("quantization_config")
    if not isinstance(said, Mapping) or said.get("quant_method") != "fp8":
        return None
    size = said.get("weight_block_size")
    if not isinstance(size, (list, tuple)) or len(size) != 2:
        return None
    if not all(type(number) is int and number > 0 for number in size):
        return None
    return size[0], size[1]


def dequantised(source: Source) -> Source:
    """Return a source without fp8; one whose config.json speaks of no blocks of fp8 is returned as it is."""
    return Dequantised(source) if block_size_of(source.config) is not None else source


def as_held(source: Source, held: Mapping[str, Optional[torch.dtype]]) -> Source:
    """Return a source without fp8, unless what is filled from it has scales, or is in fp8 itself.

    Args:
        held: name of a tensor that is filled -> its dtype; None where that is not known.
    """
    is_fp8 = any(
        key.endswith(SCALE) or (dtype is not None and dtype.is_floating_point and dtype.itemsize == 1)
        for key, dtype in held.items()
    )
    return source if is_fp8 else dequantised(source)


def quantisation_of(config: Mapping[str, Any]) -> str:
    """Return the name of the way in which config.json says that weights are quantised; "" for none."""
    said = config.get("quantization_config")
    return str(said.get("quant_method") if isinstance(said, Mapping) else said) if said else ""


class Dequantised:
    """A source whose weights in fp8 are multiplied by their scales as they are read."""

    def __init__(self, source: Source) -> None:
        """Pair weights and scales. What does not fit goes to `problems`."""
        self.source = source
        self.config = {key: value for key, value in source.config.items() if key != "quantization_config"}
        self.absent = source.absent
        self.problems = list(source.problems)
        block = block_size_of(source.config)
        assert block is not None, "there are blocks"
        self.block = block
        said = source.config.get("torch_dtype", source.config.get("dtype"))
        self.dtype = DTYPES.get(str(said), torch.bfloat16)
        self.tensors: dict[str, TensorInfo] = {}
        self._scaled: set[str] = set()
        for key, info in source.tensors.items():
            if key.endswith(SCALE) and key[: -len(SCALE)] in source.tensors:
                continue
            scale = source.tensors.get(key + SCALE)
            if scale is None:
                self.tensors[key] = info
                continue
            self.tensors[key] = TensorInfo(info.shape, self.dtype)
            self._scaled.add(key)
            expected = tuple(-(-size // step) for size, step in zip(info.shape, block))
            if info.dtype.itemsize != 1 or not info.dtype.is_floating_point:
                self.problems.append(Problem("has a scale, and is not in fp8", key, f"{info.dtype}"))
            elif len(info.shape) != 2 or scale.shape != expected:
                what = f"wrong shape for a weight of {info.shape} in blocks of {block}"
                self.problems.append(Problem(what, key + SCALE, f"{scale.shape}", f"{expected}"))

    def part(self, key: str, box: Box) -> torch.Tensor:
        part = self.source.part(key, box)
        if key not in self._scaled:
            return part
        # The blocks that the box touches, and of each row and column the block that it is in.
        first = tuple(at // step for at, step in zip(box.offset, self.block))
        last = tuple(-(-(at + size) // step) for at, size, step in zip(box.offset, box.size, self.block))
        size = tuple(max(stop - start, 0) for start, stop in zip(first, last))
        if not part.numel():
            return part.to(self.dtype)
        scales = self.source.part(key + SCALE, Box(first, size)).to(torch.float32)
        for dim in (0, 1):
            places = (
                torch.arange(box.offset[dim], box.offset[dim] + box.size[dim]) // self.block[dim] - first[dim]
            )
            scales = scales.index_select(dim, places)
        return (part.to(torch.float32) * scales).to(self.dtype)

    @property
    def copied(self) -> set[str]:
        """Keys of tensors that are read as copies: those with scales, and the files' own."""
        return self._scaled | (copied_of(self.source) & self.tensors.keys())

    def digest(self) -> str:
        return f"{self.source.digest()} in {self.dtype}"
