"""The layers that each pipeline stage holds, for modules that do not carry their layer's number."""

from __future__ import annotations

from typing import Optional


def stages(
    layers: int, pp_size: int, chunks: int = 1, *, first: Optional[int] = None, last: Optional[int] = None
) -> list[list[list[int]]]:
    """Return the layers of each chunk of each stage, numbered from 0, as Megatron deals them out.

    Args:
        layers: the number of layers of the full model.
        pp_size: the number of pipeline stages.
        chunks: the number of chunks of each stage (virtual pipeline): chunk 0 of all stages comes first, then
            chunk 1 of all.
        first: the number of layers of the first stage, where it is not that of the middle; None deals evenly.
        last: the number of layers of the last stage, likewise.

    Raises:
        ValueError: the layers cannot be dealt out evenly.

    Example:
        >>> from torch_dcp_backport import megatron
        >>> megatron.stages(8, pp_size=2, chunks=2)
        [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
        >>> megatron.stages(8, pp_size=3, first=2, last=2)
        [[[0, 1]], [[2, 3, 4, 5]], [[6, 7]]]
    """
    ends = [count for count in (first, last) if count is not None]
    middle = pp_size - len(ends)
    left = layers - sum(ends)
    counts = [left // middle] * pp_size if middle > 0 else [0] * pp_size
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    if sum(counts) != layers or any(count % chunks for count in counts) or min(counts) < 0:
        raise ValueError(
            f"{layers} layers cannot be dealt out to {pp_size} stages of {chunks} chunks "
            f"(first={first}, last={last}): {counts}"
        )
    numbers = iter(range(layers))
    dealt: list[list[list[int]]] = [[] for _ in range(pp_size)]
    for _ in range(chunks):
        for stage, count in enumerate(counts):
            dealt[stage].append([next(numbers) for _ in range(count // chunks)])
    return dealt
