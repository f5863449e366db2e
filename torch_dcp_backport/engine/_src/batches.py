"""Rows of a batch as micro-batches: the same number on every rank, and results in the order of the rows.

Takes a mapping of tensors with rows first, padded or jagged (a TensorDict too), and of values of the rows or
of the batch. Knows no model.
"""

from __future__ import annotations

import contextlib
import math
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Protocol, Union

import torch
from torch.nn.utils.rnn import pad_sequence

from torch_dcp_backport.engine._src.checks import flag, number, say, whole
from torch_dcp_backport.transfer import Call, Group, Problem, raise_together

TITLE = "cannot run this batch"
IDS, MASK, LOSS_MASK, RESPONSES = "input_ids", "attention_mask", "loss_mask", "response_mask"
#: Whether a language model also returns the entropies of its tokens.
ENTROPY = "calculate_entropy"
POSITIONS, TEMPERATURE = "position_ids", "temperature"
#: Classes of tensordict for a value of all rows, and the one for a value of each row.
OF_ALL, OF_EACH = ("NonTensorData", "MetaData", "UnbatchedTensor"), "NonTensorStack"
#: What ranks with the same rows compare, in the order of the numbers that each sends.
COMPARED = (
    "another number of micro-batches",
    f"another sum of {LOSS_MASK}",
    f"other rows ({IDS})",
    f"other masks or positions ({MASK}, {LOSS_MASK}, {POSITIONS})",
    f"another cut into micro-batches, or another use_remove_padding, {ENTROPY} or temperature",
)

#: First column of a row that is no padding, and the column behind the last.
Span = tuple[int, int]


class Batch(Protocol):
    """Rows of a rank by name: a dict of tensors, a TensorDict, or what has these two methods."""

    def keys(self) -> Any:
        """Return the names."""

    def __getitem__(self, name: str, /) -> Any:
        """Return the values of a name, rows first."""


class Limit(NamedTuple):
    """The size of a micro-batch: rows, or tokens with the padding that is left. Exactly one of them is given.

    Args:
        rows: the most rows of a micro-batch.
        tokens: the most tokens of a micro-batch: its rows times its columns, or the sum of packed rows.
    """

    rows: Optional[int] = None
    tokens: Optional[int] = None


class Plan(NamedTuple):
    """The parts that a batch is cut into; as many on every rank.

    Args:
        parts: the numbers of the rows of each micro-batch, from 0; an empty list where the rank only takes
            part in the collectives.
        spans: for each row its first column that is no padding, and the column behind its last.
        tokens: the number of tokens with a loss on all ranks; of a mask of weights their sum.
        width: columns of padded rows; None where the rows are jagged.
        is_packed: whether the rows of a micro-batch run in one sequence.
        has_entropy: whether the batch asks for entropies.
        dropped: the number of tokens on all ranks that `loss_mask` marks and that do not count.
        all_tokens: the number of tokens of the rows of all ranks, without padding.
    """

    parts: list[list[int]]
    spans: list[Span]
    tokens: float
    width: Optional[int]
    is_packed: bool = False
    has_entropy: bool = False
    dropped: int = 0
    all_tokens: int = 0


class Micro(NamedTuple):
    """A micro-batch.

    Args:
        data: the batch's entries, of these rows; padded columns that no row needs are gone.
        rows: the numbers of the rows in the batch, from 0; empty where the rank has none.
        columns: the first of the batch's columns that is in `data`, and the column behind the last.
    """

    data: dict[str, Any]
    rows: list[int]
    columns: Span

    @property
    def is_filler(self) -> bool:
        """Whether the rank has no row here, and only takes part in the collectives."""
        return not self.rows


def plan(
    data: Batch,
    limit: Union[Limit, Callable[[], Limit]],
    group: Group = None,
    *,
    needs_tokens: bool = True,
    copies: int = 1,
    packs: Union[bool, Callable[[Limit], bool]] = False,
    predicted: bool = False,
) -> Plan:
    """Cut a batch into the same number of micro-batches on every rank. Collective.

    Args:
        data: rows of this rank: a mapping with `input_ids`, padded (rows, columns) or jagged, and where there
            are a loss and padding with `loss_mask` and `attention_mask` of the same shape.
        limit: the size of a micro-batch, or a function that finds it; an error of the function is raised on
            every rank.
        group: the ranks that take part; None is the default process group.
        needs_tokens: whether a batch without any token of a loss is an error.
        copies: the number of consecutive ranks that have the same rows (tensor or sequence parallelism).
        packs: whether the rows of a micro-batch run in one sequence without padding, or a function that finds
            it out by the limit.
        predicted: whether `loss_mask` counts tokens with a log-probability alone: the first of a row, and
            padding, have none.

    Raises:
        RuntimeError: a row above the limit, no rows, no tokens, columns that do not fit, other rows than the
            copies have, ...; on every rank.

    Example:
        Within a process group:

        >>> import torch
        >>> from torch_dcp_backport import engine
        >>> ids = torch.arange(15).view(3, 5)
        >>> data = {"input_ids": ids, "loss_mask": torch.ones_like(ids)}
        >>> plan = engine.plan(data, engine.Limit(tokens=10))
        >>> plan.parts, plan.tokens
        ([[0, 1], [2]], 15.0)
    """
    call = Call(TITLE, "plan", (group,), plain=(ValueError, KeyError))
    # Errors of any kind: the other ranks wait in the agreement.
    own = call.attempt(lambda: _planned(data, limit, needs_tokens, packs, predicted))
    counts = call.attempt(lambda made: numbers_of(data, made, copies > 1), own)
    rows = list(call.all_gather_numbers(counts, len(COMPARED) + 2).values())
    count, tokens = int(max(row[0] for row in rows)), sum(row[1] for row in rows[::copies])
    ranks = call.ranks
    findings = []
    for place, rank in enumerate(ranks):
        first = place - place % copies
        unlike = [what for what, own_, other in zip(COMPARED, rows[place], rows[first]) if own_ != other]
        if unlike:
            text = f"{'; '.join(unlike[::-1])} than rank {ranks[first]}, with which it computes the same rows"
            findings.append(
                (rank, Problem(f"{text} (tensor parallelism, or ulysses_sequence_parallel_size)"))
            )
        elif not count:
            findings.append((rank, Problem("no rows on any rank")))
        elif needs_tokens and not tokens:
            findings.append((rank, Problem(f"no token on any rank has a loss: {LOSS_MASK} is zero")))
    raise_together(TITLE, findings)
    dropped, all_tokens = (int(sum(row[place] for row in rows[::copies])) for place in (-2, -1))
    if dropped:
        say(
            f"{LOSS_MASK} marks tokens that have no log-probability (the first of a row, or padding): they "
            "do not count, in the loss and in batch_num_tokens"
        )
    return own.value._replace(
        parts=spread(own.value.parts, count), tokens=tokens, dropped=dropped, all_tokens=all_tokens
    )


def _planned(data: Any, limit: Any, needs_tokens: bool, packs: Any, predicted: bool) -> Plan:
    checked_batch(data)
    most = checked_limit(limit() if callable(limit) else limit)
    return plan_alone(data, most, needs_tokens, packs(most) if callable(packs) else packs, predicted)


def plan_alone(
    data: Any, limit: Limit, needs_tokens: bool = True, packs: bool = False, predicted: bool = False
) -> Plan:
    """Cut this rank's rows, as `plan` does for all ranks.

    Raises:
        ValueError: a row above the limit, an invalid limit, columns that do not fit.
        KeyError: a batch without a key that is needed.
    """
    limit = checked_limit(limit)
    keys = set(data.keys())
    check_offered(data, keys)
    for key in (IDS, LOSS_MASK) if needs_tokens else (IDS,):
        if key not in keys:
            raise KeyError(f"the batch has no {key}; it has {', '.join(sorted(map(str, keys)))}")
    check_tensors(data, keys, needs_tokens)
    ids = data[IDS]
    spans = spans_of(data)
    check_positions(data, keys)
    check_rows(data, len(spans))
    temperature_of(data, len(spans))
    if packs:
        check_packable(data, keys, spans)
    tokens, dropped, is_dropped = 0.0, 0, None
    if needs_tokens:
        # verl's policy losses mask responses alone, and the mask of a loss is that.
        if not (RESPONSES in keys and same_values(data[LOSS_MASK], data[RESPONSES])):
            check_alike(LOSS_MASK, data[LOSS_MASK], ids)
            is_dropped = unpredicted(data) if predicted else None
        counted = values_of(data[LOSS_MASK])
        if is_dropped is not None:
            dropped = int(is_dropped.sum())
            counted = counted.masked_fill(is_dropped, 0)
        tokens = float(counted.sum(dtype=torch.float64))
        if not math.isfinite(tokens):
            raise ValueError(f"the sum of {LOSS_MASK} is {tokens}: expected finite numbers")
    if limit.rows is not None:
        rows = list(range(len(spans)))
        parts = [rows[start : start + limit.rows] for start in range(0, len(rows), limit.rows)]
    else:
        parts = (by_lengths if packs else by_tokens)(spans, limit.tokens or 0)
    width = None if ids.is_nested else int(ids.shape[1])
    is_masked = MASK in keys and not ids.is_nested
    count = int(is_token(data[MASK]).sum()) if is_masked else values_of(ids).numel()
    return Plan(parts, spans, tokens, width, packs, flag_of(data, ENTROPY, False), dropped, count)


def unpredicted(data: Any) -> torch.Tensor:
    """Return which marks of `loss_mask` are of tokens without a log-probability, as `values_of` has them.

    A token has one where a token of its row is before it.
    """
    ids, marks = data[IDS], values_of(data[LOSS_MASK])
    if ids.is_nested:
        is_first = torch.zeros_like(marks, dtype=torch.bool)
        is_first[ids.offsets()[:-1]] = True
        return is_first & (marks != 0)
    is_token = data[MASK] != 0 if MASK in set(data.keys()) else torch.ones_like(ids, dtype=torch.bool)
    is_predicted = is_token & is_token.roll(1, 1)
    is_predicted[:, :1] = False
    return ~is_predicted & (marks != 0)


def with_predicted(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch whose `loss_mask` marks tokens with a log-probability alone."""
    mask = data[LOSS_MASK]
    if RESPONSES in data and same_values(mask, data[RESPONSES]):
        return dict(data)
    marks = values_of(mask).masked_fill(unpredicted(data), 0)
    if mask.is_nested:
        marks = torch.nested.nested_tensor_from_jagged(marks, mask.offsets())
    return {**data, LOSS_MASK: marks}


def checked_batch(data: Any) -> Any:
    """Return a batch. Raises a TypeError for what is no mapping, such as a tensor of token ids."""
    if not callable(getattr(data, "keys", None)):
        raise TypeError(f"the batch is a {type(data).__name__}: expected a mapping with {IDS}")
    return data


def checked_limit(limit: Limit) -> Limit:
    """Return a limit as a whole number, which may be given as text.

    Raises:
        ValueError: no number, or two of them.
    """
    with contextlib.suppress(ValueError):
        sizes = {name: whole(1)(name, size) for name, size in limit._asdict().items() if size is not None}
        if len(sizes) == 1:
            return Limit(**sizes)
    raise ValueError(f"{limit}: expected a positive number of either rows or tokens")


def check_offered(data: Any, keys: set[Any]) -> None:
    """Refuse what verl's own engines read of a batch, and which would have no effect.

    Raises:
        ValueError: images, or rows that have to stay together.
    """
    images = data["multi_modal_inputs"] if "multi_modal_inputs" in keys else None
    if images is not None and any(len(row or ()) for row in images):
        raise ValueError("multi_modal_inputs: images and the like are not offered")
    got = value_in(data, "force_group_size")
    if got not in (None, 1):
        raise ValueError(f"force_group_size={got}: rows that stay together in a micro-batch are not offered")


def check_tensors(data: Any, keys: set[Any], needs_tokens: bool) -> None:
    """Refuse ids, masks and positions that are no tensors, such as lists or arrays.

    Raises:
        ValueError: no tensor, or ids that are no whole numbers.
    """
    for key in (IDS, MASK, *((LOSS_MASK,) if needs_tokens else ()), POSITIONS):
        if key not in keys or (key == POSITIONS and data[key] is None):
            continue
        if not isinstance(data[key], torch.Tensor):
            raise ValueError(f"{key} is a {type(data[key]).__name__}: expected a tensor")
    if data[IDS].is_floating_point():
        raise ValueError(f"{IDS} is {data[IDS].dtype}: expected whole numbers")


def check_rows(data: Any, count: int, within: str = "") -> None:
    """Refuse jagged entries of other rows than the batch has, also those in dicts within the batch.

    Raises:
        ValueError: another number of rows.
    """
    for key in list(data.keys()):  # a TensorDict iterates over rows
        value = data.get(key)
        if is_of_all(value):
            continue
        if has_entries(value):
            check_rows(value, count, f"{within}{key}.")
        elif isinstance(value, torch.Tensor) and value.is_nested and value.size(0) != count:
            raise ValueError(f"{within}{key} has {value.size(0)} rows, {IDS} has {count}")


def temperature_of(data: Any, count: Optional[int] = None) -> Union[float, torch.Tensor]:
    """Return the temperature of a batch: one for all rows, or a float32 tensor with one for each row.

    Args:
        data: the batch, or a micro-batch's data; without a temperature it is 1.
        count: the number of the batch's rows; None does not check it.

    Raises:
        ValueError: no number, or as many numbers as there are no rows.
    """
    value: Any = unwrapped(data[TEMPERATURE]) if TEMPERATURE in set(data.keys()) else None
    if value is None:
        return 1.0
    if not isinstance(value, (list, tuple)) and not getattr(value, "ndim", 0):
        return float(number(0)(TEMPERATURE, value.item() if hasattr(value, "item") else value))
    if isinstance(value, (list, tuple)):
        value = [float(number(0)(TEMPERATURE, unwrapped(part))) for part in value]
    found = torch.as_tensor(value, dtype=torch.float32)
    if not (found.isfinite() & (found >= 0)).all():
        raise ValueError(f"{TEMPERATURE}={found.tolist()}: expected numbers at least 0")
    if count is not None and found.numel() != 1 and tuple(found.shape) not in ((count,), (count, 1)):
        raise ValueError(
            f"{TEMPERATURE} has the shape {tuple(found.shape)}: expected one number, or one for each of "
            f"{count} rows"
        )
    # A micro-batch without rows has none of a list.
    return found.flatten() if found.numel() else 1.0


def unwrapped(value: Any) -> Any:
    """Return what a wrapper of tensordict holds: a value for the batch, or a list of a value for each row."""
    while is_of_all(value) and not isinstance(value, torch.Tensor):
        value = value.data
    return value.tolist() if type(value).__name__ == OF_EACH else value


def is_of_all(value: Any) -> bool:
    """Return whether a wrapper of tensordict says that a value is for all rows, whatever its length is."""
    return type(value).__name__ in OF_ALL


def has_entries(value: Any) -> bool:
    """Return whether a value of a batch is a dict or a TensorDict, whose entries are cut with the rows."""
    if is_of_all(value) or type(value).__name__ == OF_EACH:
        return False
    return type(value) is dict or (hasattr(value, "batch_size") and callable(getattr(value, "keys", None)))


def value_in(data: Any, name: str, default: Any = None) -> Any:
    """Return a setting of a batch: one value, also where joined batches have it for each row.

    Raises:
        ValueError: rows have other values than others.
    """
    if name not in set(data.keys()):  # a TensorDict iterates over rows
        return default
    value = unwrapped(data[name])
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        return value
    values = [unwrapped(part) for part in value]
    others = [part for part in values if part != values[0]]
    if others:
        raise ValueError(
            f"{name} is {values[0]!r} for some rows and {others[0]!r} for others: one is for all"
        )
    return values[0] if values else default


def flag_of(data: Any, name: str, default: bool) -> bool:
    """Return a flag of a batch, which joined batches have for each row.

    Raises:
        ValueError: something else than a flag, or rows with different ones.
    """
    value = value_in(data, name)
    return default if value is None else flag(name, value)


def numbers_of(data: Any, plan: Plan, is_compared: bool) -> list[float]:
    """Return the numbers of `COMPARED`: of what a rank runs, and checksums where ranks compare their rows."""
    sums: list[float] = [0, 0, 0]
    if is_compared:
        keys = set(data.keys())
        masks = [data[key] for key in (MASK, LOSS_MASK, POSITIONS) if key in keys]
        temperature: Any = temperature_of(data)
        if isinstance(temperature, torch.Tensor):
            temperature = temperature.tolist()
        shape = data[IDS].offsets() if data[IDS].is_nested else torch.tensor(data[IDS].shape)
        asked = repr((plan.parts, plan.is_packed, plan.has_entropy, temperature))
        sums = [digest_of([data[IDS], shape]), digest_of(masks), zlib.crc32(asked.encode())]
    return [len(plan.parts), plan.tokens, *sums, plan.dropped, plan.all_tokens]


def digest_of(tensors: Sequence[torch.Tensor]) -> int:
    """Return a checksum of tensors' values."""
    digest = 0
    for tensor in tensors:
        # As numbers: ranks may have a mask as flags, or as whole numbers.
        values = values_of(tensor).detach().to("cpu", torch.float64).contiguous()
        digest = zlib.crc32(values.view(torch.uint8).numpy().tobytes(), digest)
    return digest


def same_values(mask: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two masks, jagged or not, are the same."""
    return mask.is_nested == other.is_nested and torch.equal(values_of(mask), values_of(other))


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.values() if tensor.is_nested else tensor


def check_alike(name: str, mask: Any, ids: Any) -> None:
    """Refuse a mask that has no value for some id.

    Raises:
        ValueError: another shape, or other rows.
    """
    if ids.is_nested and mask.is_nested:
        check_jagged(name, mask)
        if not torch.equal(mask.offsets(), ids.offsets()):
            got, expected = mask.offsets().diff().tolist(), ids.offsets().diff().tolist()
            raise ValueError(f"{name} has rows of {got} tokens, {IDS} of {expected}")
    elif ids.is_nested or mask.is_nested or mask.shape != ids.shape:
        shapes = [
            "jagged" if tensor.is_nested else f"of shape {tuple(tensor.shape)}" for tensor in (mask, ids)
        ]
        raise ValueError(f"{name} is {shapes[0]}: expected that of {IDS}, {shapes[1]}")


def check_jagged(name: str, tensor: Any) -> None:
    """Refuse a nested tensor whose values are not its rows in sequence.

    Raises:
        ValueError: it is strided, or narrowed.
    """
    if tensor.layout is not torch.jagged:
        raise ValueError(f"{name} is nested and {tensor.layout}: expected torch.jagged")
    if tensor.lengths() is not None:
        raise ValueError(f"{name} is a part of another tensor's rows: call contiguous()")


def spans_of(data: Any) -> list[Span]:
    """Return the columns of each row between the padding on both sides.

    Raises:
        ValueError: a mask of another shape, or a row that is padding alone.
    """
    ids = data[IDS]
    if ids.is_nested:
        check_jagged(IDS, ids)
        lengths = ids.offsets().diff().tolist()
        if 0 in lengths:
            raise ValueError(f"row {lengths.index(0)} has no tokens")
        if MASK in set(data.keys()):
            check_mask_of_jagged(data[MASK], ids)
        return [(0, length) for length in lengths]
    if ids.dim() != 2 or (len(ids) and not ids.shape[1]):
        raise ValueError(f"{IDS} of shape {tuple(ids.shape)}: expected rows and columns")
    keys = set(data.keys())  # a TensorDict iterates over rows
    if MASK not in keys:
        return [(0, int(ids.shape[1]))] * len(ids)
    mask = data[MASK]
    if mask.shape != ids.shape:
        raise ValueError(f"{MASK} of shape {tuple(mask.shape)}: expected that of {IDS}, {tuple(ids.shape)}")
    if not len(ids):
        return []
    there = is_token(mask)
    if not there.any(1).all():
        raise ValueError(f"row {there.any(1).tolist().index(False)} is padding alone")
    first = there.int().argmax(1)
    behind = ids.shape[1] - there.flip(1).int().argmax(1)
    return list(zip(first.tolist(), behind.tolist()))


def is_token(mask: Any) -> torch.Tensor:
    """Return a padded mask as booleans.

    Raises:
        ValueError: other numbers than 0 and 1.
    """
    there: torch.Tensor = mask.bool()
    if not torch.equal(mask.to(torch.float32), there.to(torch.float32)):
        got = sorted(set(mask.unique().tolist()) - {0, 1})
        raise ValueError(f"{MASK} has {got[:4]}: expected 0 for padding and 1 for tokens")
    return there


def check_mask_of_jagged(mask: Any, ids: Any) -> None:
    """Refuse a mask that has other tokens than jagged ids.

    It may be padded: verl's `left_right_2_no_padding` keeps the mask that it removes the padding by.

    Raises:
        ValueError: padding in a jagged mask, or a padded one with other rows or numbers of tokens.
    """
    if mask.is_nested:
        check_alike(MASK, mask, ids)
        if not (mask.values() == 1).all():
            raise ValueError(f"{MASK} is jagged and not 1 everywhere: jagged rows have no padding")
        return
    lengths = ids.offsets().diff().tolist()
    if mask.dim() != 2 or len(mask) != len(lengths):
        raise ValueError(
            f"{MASK} of shape {tuple(mask.shape)}: expected rows and columns, and a row for each of the "
            f"{len(lengths)} jagged rows of {IDS}"
        )
    for row, (got, length) in enumerate(zip(is_token(mask).sum(1).tolist(), lengths)):
        if got != length:
            raise ValueError(f"row {row} has {got} tokens in {MASK}, and {length} in {IDS}, which is jagged")


def check_positions(data: Any, keys: set[Any]) -> None:
    """Refuse positions that are not one number for each token.

    Raises:
        ValueError: another shape than that of the ids.
    """
    if POSITIONS not in keys or data[POSITIONS] is None:
        return
    positions = data[POSITIONS]
    if positions.dim() != 2:
        raise ValueError(f"{POSITIONS} has {positions.dim()} dimensions: expected a number for each token")
    check_alike(POSITIONS, positions, data[IDS])


def check_packable(data: Any, keys: set[Any], spans: Sequence[Span]) -> None:
    """Refuse rows that have other values without padding.

    Raises:
        ValueError: padding between a row's tokens, or positions that do not count its tokens from 0.
    """
    ids, lengths = data[IDS], torch.tensor([stop - start for start, stop in spans])
    there = None
    if not ids.is_nested:
        there = (data[MASK] != 0).cpu() if MASK in keys else torch.ones(ids.shape, dtype=torch.bool)
        holes = there.sum(1) != lengths
        if holes.any():
            row = holes.tolist().index(True)
            raise ValueError(
                f"row {row} has padding between its tokens, which use_remove_padding=True would remove; "
                "use_remove_padding=False would do"
            )
    if POSITIONS not in keys or data[POSITIONS] is None or not len(lengths):
        return
    found = data[POSITIONS]
    flat = (found.values().cpu() if there is None else found.cpu()[there]).long()
    ends = lengths.cumsum(0)
    expected = torch.arange(len(flat)) - (ends - lengths).repeat_interleave(lengths)
    wrong = (flat != expected).nonzero()
    if len(wrong):
        row = int((ends <= wrong[0]).sum())
        got = flat[ends[row] - lengths[row] : ends[row]][:8].tolist()
        raise ValueError(
            f"{POSITIONS} of row {row} do not count its tokens from 0, which use_remove_padding=True needs: "
            f"got {got}; use_remove_padding=False would do"
        )


def by_lengths(spans: Sequence[Span], most: int) -> list[list[int]]:
    """Group rows of at most `most` tokens in all: each row goes where it first fits, the longest before.

    Raises:
        ValueError: a row that is longer than that.
    """
    parts: list[list[int]] = []
    left: list[int] = []
    lengths = [stop - start for start, stop in spans]
    for row in sorted(range(len(spans)), key=lambda row: -lengths[row]):
        if lengths[row] > most:
            raise ValueError(f"row {row} has {lengths[row]} tokens, more than the {most} of a micro-batch")
        place = next((place for place, room in enumerate(left) if room >= lengths[row]), len(parts))
        if place == len(parts):
            parts.append([])
            left.append(most)
        parts[place].append(row)
        left[place] -= lengths[row]
    return parts


def by_tokens(spans: Sequence[Span], most: int) -> list[list[int]]:
    """Group rows of like length; rows x columns of a part are at most `most`.

    Raises:
        ValueError: a row that is longer than that.
    """
    parts: list[list[int]] = []
    columns = (0, 0)
    for row in sorted(range(len(spans)), key=lambda row: spans[row][0] - spans[row][1]):
        start, stop = spans[row]
        if stop - start > most:
            raise ValueError(f"row {row} has {stop - start} tokens, more than the {most} of a micro-batch")
        wider = (min(columns[0], start), max(columns[1], stop))
        if parts and (len(parts[-1]) + 1) * (wider[1] - wider[0]) <= most:
            parts[-1].append(row)
            columns = wider
        else:
            parts.append([row])
            columns = (start, stop)
    return parts


def spread(parts: Sequence[list[int]], count: int) -> list[list[int]]:
    """Return the same rows in `count` parts: the fullest are halved, and parts without rows are empty."""
    spread = [list(part) for part in parts]
    while len(spread) < count:
        fullest = max(range(len(spread)), key=lambda place: len(spread[place]), default=None)
        if fullest is None or len(spread[fullest]) < 2:
            spread.append([])
            continue
        part = spread[fullest]
        spread[fullest : fullest + 1] = [part[: len(part) // 2], part[len(part) // 2 :]]
    return spread


def micro_batches(data: Batch, plan: Plan) -> Iterator[Micro]:
    """Yield the micro-batches of a plan; each is made when it is asked for.

    A tensor, array, list or tuple that is as long as the batch has rows is cut with the rows, also a tensor
    or array in a dict within the batch. Each micro-batch gets the whole of everything else, and of what a
    TensorDict has a single time for all rows: a list, or a dict with whatever is in it.

    Args:
        data: the batch that the plan was made of.
        plan: the result of `plan` on this rank.

    Example:
        Within a process group:

        >>> import torch
        >>> from torch_dcp_backport import engine
        >>> data = {"input_ids": torch.tensor([[1, 2], [3, 4], [5, 6]]), "temperature": 0.5}
        >>> plan = engine.plan(data, engine.Limit(rows=2), needs_tokens=False)
        >>> for micro in engine.micro_batches(data, plan):
        ...     print(micro.rows, micro.data)
        [0, 1] {'input_ids': tensor([[1, 2],
                [3, 4]]), 'temperature': 0.5}
        [2] {'input_ids': tensor([[5, 6]]), 'temperature': 0.5}
    """
    for rows in plan.parts:
        spans = [plan.spans[row] for row in rows] or [(0, 1)]
        columns = min(start for start, _ in spans), max(stop for _, stop in spans)
        yield Micro(_cut(data, rows, columns, plan), rows, columns)


def _cut(data: Any, rows: list[int], columns: Span, plan: Plan, is_inner: bool = False) -> dict[str, Any]:
    """Return the rows of all entries. Lists in a plain dict within the batch are for all rows."""
    entries = {}
    for key in list(data.keys()):  # a TensorDict iterates over rows
        held = data.get(key)
        value = unwrapped(held)
        is_whole = is_of_all(held) or (
            is_inner and isinstance(value, (list, tuple)) and type(held).__name__ != OF_EACH
        )
        entries[key] = value if is_whole else _selected(key, value, rows, columns, plan)
    return entries


def _selected(key: str, value: Any, rows: list[int], columns: Span, plan: Plan) -> Any:
    """Return the rows of a value; for a filler a single row of zeros of tensors, and nothing of all else."""
    count = len(plan.spans)
    if isinstance(value, torch.Tensor):
        return _selected_tensor(key, value, rows, columns, plan)
    if isinstance(value, (list, tuple)):
        return [value[row] for row in rows] if len(value) == count else value
    if has_entries(value):
        return _cut(value, rows, columns, plan, is_inner=True)
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray) or not value.ndim or len(value) != count:
        return value
    picked = value[rows]
    is_padded = plan.width is not None and value.ndim > 1 and value.shape[1] == plan.width
    return picked[:, slice(*columns)] if is_padded else picked


def _selected_tensor(key: str, value: Any, rows: list[int], columns: Span, plan: Plan) -> Any:
    if value.is_nested:
        made = value.unbind()
        picked = [made[row] for row in rows] or [value.values().new_zeros((1, *value.values().shape[1:]))]
        return torch.nested.as_nested_tensor(picked, layout=torch.jagged)
    if not value.dim() or len(value) != len(plan.spans):
        return value
    picked_rows = value[rows] if rows else value.new_full((1, *value.shape[1:]), key == MASK)
    if plan.width is not None and value.dim() > 1 and value.shape[1] == plan.width:
        return picked_rows[:, slice(*columns)]
    return picked_rows


def on_device(data: Mapping[str, Any], device: torch.device, given: Any = None) -> dict[str, Any]:
    """Return a micro-batch with its tensors on a device, also those in dicts within it.

    Args:
        data: the data of a micro-batch.
        device: the device.
        given: the batch: what is within its dicts for all rows stays where it is, as in a TensorDict.
    """
    moved: dict[str, Any] = {}
    for name, value in data.items():
        held = given.get(name) if callable(getattr(given, "get", None)) else None
        if type(value) is dict:
            moved[name] = value if is_of_all(held) else on_device(value, device, held)
        else:
            moved[name] = value.to(device) if isinstance(value, torch.Tensor) else value
    return moved


def like_batch(given: Any, data: Mapping[str, Any], count: int) -> Any:
    """Return a micro-batch's data in the batch's form: as a TensorDict where that is one.

    Each entry has the class of tensordict that it has in the batch.

    Args:
        given: the batch.
        data: the data of a micro-batch, and further entries for all rows.
        count: the number of the micro-batch's rows.
    """
    # Where there is a TensorDict, its package is loaded.
    package: Any = sys.modules.get("tensordict")
    if package is None or not package.is_tensor_collection(given):
        return data
    return _tensor_dict(package, given, data, [count] if given.batch_dims else [])


def _tensor_dict(package: Any, given: Any, data: Mapping[str, Any], size: list[int]) -> Any:
    keys = set(given.keys())

    def entry(held: Any, value: Any) -> Any:
        kind = type(held)
        if is_of_all(held):
            # The value of UnbatchedTensor is a tensor, and has no size of a batch.
            return kind(value) if kind.__name__ == "UnbatchedTensor" else kind(value, batch_size=size)
        if isinstance(value, torch.Tensor):
            return value
        if type(value) is dict and has_entries(held):
            made = _tensor_dict(package, held, value, size)
            return kind.from_tensordict(made) if package.is_tensorclass(held) else made
        if kind.__name__ == OF_EACH and isinstance(value, (list, tuple)):
            return package.NonTensorStack(*value)
        return package.NonTensorData(value, batch_size=size)

    entries = {name: entry(given.get(name) if name in keys else None, part) for name, part in data.items()}
    return package.TensorDict(entries, batch_size=size)


def model_inputs(data: Mapping[str, Any], device: torch.device) -> dict[str, torch.Tensor]:
    """Return a micro-batch's inputs for a model of transformers: ids, mask and positions, padded.

    Args:
        data: a micro-batch's data: `input_ids`, padded (rows, columns) or jagged, and where it has them
            `attention_mask` and `position_ids`.
        device: the device of the inputs.

    Returns:
        `input_ids`, `attention_mask` and `position_ids`, each an integer tensor (rows, columns).

    Example:
        >>> import torch
        >>> from torch_dcp_backport import engine
        >>> data = {"input_ids": torch.tensor([[0, 7, 8]]), "attention_mask": torch.tensor([[0, 1, 1]])}
        >>> engine.model_inputs(data, torch.device("cpu"))["position_ids"]
        tensor([[0, 0, 1]])
    """
    ids = data[IDS]
    if ids.is_nested:
        rows = ids.unbind()
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        ids = pad_sequence(list(rows), batch_first=True)
    else:
        mask = data[MASK] if MASK in data else torch.ones_like(ids)
    positions = data.get(POSITIONS)
    if positions is None:
        # A jagged row begins with its first token.
        positions = (mask.long().cumsum(1) - 1).clamp_min(0)
    elif positions.is_nested:
        positions = pad_sequence(list(positions.unbind()), batch_first=True)
    inputs = {IDS: ids, MASK: mask, POSITIONS: positions}
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def like_rows(padded: torch.Tensor, data: Mapping[str, Any]) -> torch.Tensor:
    """Return a result per token in the form of a micro-batch's rows: padded, or jagged."""
    ids = data[IDS]
    if not ids.is_nested:
        return padded
    offsets = ids.offsets().to(padded.device)
    lengths = offsets.diff()
    there = torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]
    return torch.nested.nested_tensor_from_jagged(padded[there], offsets)


def restored(outputs: Sequence[Mapping[str, torch.Tensor]], plan: Plan) -> dict[str, torch.Tensor]:
    """Return all micro-batches' results, in the order and width of the batch; zeros where padding was cut.

    Args:
        outputs: for each micro-batch name -> tensor with a result for each row, or for each token of a row.
        plan: the plan that the micro-batches were made by.

    Example:
        Within a process group:

        >>> import torch
        >>> from torch_dcp_backport import engine
        >>> mask = torch.tensor([[0, 1, 0], [1, 1, 1]])
        >>> data = {"input_ids": torch.tensor([[0, 5, 0], [1, 2, 3]]), "attention_mask": mask}
        >>> plan = engine.plan(data, engine.Limit(rows=1), needs_tokens=False)
        >>> outputs = [{"twice": 2 * micro.data["input_ids"]} for micro in engine.micro_batches(data, plan)]
        >>> engine.restored(outputs, plan)["twice"]
        tensor([[ 0, 10,  0],
                [ 2,  4,  6]])
    """
    results: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(name for output in outputs for name in output):
        rows_of: dict[int, torch.Tensor] = {}
        for rows, output in zip(plan.parts, outputs):
            if not rows:
                continue
            columns = min(plan.spans[row][0] for row in rows), max(plan.spans[row][1] for row in rows)
            for row, part in zip(rows, output[name].unbind()):
                if plan.width is not None and part.dim() and part.shape[0] == columns[1] - columns[0]:
                    full = part.new_zeros((plan.width, *part.shape[1:]))
                    full[slice(*columns)] = part
                    part = full
                rows_of[row] = part
        ordered = [rows_of[row] for row in sorted(rows_of)]
        if ordered:
            jagged = plan.width is None and ordered[0].dim()
            make: Any = torch.nested.as_nested_tensor if jagged else torch.stack
            results[name] = make(ordered, layout=torch.jagged) if jagged else make(ordered)
    return results
