"""The layers that each pipeline stage holds, for modules that do not carry their layer's number."""

from __future__ import annotations

from typing import Optional


def stages(
    layers: int, pp_size: int, chunks: int = 1, *, first: Optional[int] = None, last: Optional[int] = None
) -> list[list[list[int]]]:
    """Return [stage][chunk] -> layers, numbered from 0, as Megatron deals them out.

    Args:
        layers: of the full model.
        pp_size: pipeline stages.
        chunks: of each stage (virtual pipeline): chunk 0 of all stages comes first, then chunk 1 of all.
        first, last: layers of the first and of the last stage, where they have other numbers than the rest.

    Raises:
        ValueError: the layers cannot be dealt out evenly.
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
