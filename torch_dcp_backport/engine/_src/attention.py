"""Attention within rows that lie in one sequence, by implementations that transformers' registries offer.

An implementation of transformers (sdpa, eager, ...) computes; beside it stands an implementation of ours,
which masks what is of other rows, and exchanges heads for tokens between the ranks that share a sequence. No
model is patched: its configuration names the implementation. Must never import transformers before a model
of it is there.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Optional

import torch
from torch import nn

from torch_dcp_backport import compat
from torch_dcp_backport.engine._src import ulysses
from torch_dcp_backport.transfer import Group

#: The implementations of transformers that can keep rows apart.
DENSE, FLEX, FLASH = ("eager", "sdpa"), "flex_attention", ("flash_attention_2", "flash_attention_3")
PACKING = (*DENSE, FLEX, *FLASH)
#: Ours are called after those that compute.
PREFIX = "rows_by_"
#: On a mask of ours: where rows begin and end.
ENDS = "ends_of_rows"
#: For fewer than 128 tokens torch takes its kernel for decoding, and compiled for lengths that change it finds
#: none (2.11 on an H100: "No choices exist for backend"). So flex attention gets the other kernel always.
NO_DECODING = {"FORCE_USE_FLEX_ATTENTION": True}


class Rows:
    """The rows of the sequence that a model runs on.

    Args:
        numbers: (tokens), of each token of the whole sequence the number of its row.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers
        #: How often the model has asked for a mask, and for attention.
        self.masked = self.attended = 0

    @functools.cached_property
    def is_single(self) -> bool:
        """Whether there is nothing to keep apart."""
        return bool((self.numbers == self.numbers[:1]).all())

    @functools.cached_property
    def ends(self) -> list[int]:
        """The first token of each row, and the token behind the last row."""
        lengths = torch.unique_consecutive(self.numbers, return_counts=True)[1]
        return [0, *lengths.cumsum(0).tolist()]

    @functools.cached_property
    def same(self) -> torch.Tensor:
        """Whether two tokens are of the same row: (tokens, tokens)."""
        return self.numbers[:, None] == self.numbers[None]


_under_way: ContextVar[Optional[Rows]] = ContextVar("rows", default=None)


@contextlib.contextmanager
def within(rows: Rows) -> Iterator[Rows]:
    """Return a context: models whose attention is `install`ed see tokens of the same row alone."""
    token = _under_way.set(rows)
    try:
        yield rows
    finally:
        _under_way.reset(token)


def implementation(model: nn.Module) -> str:
    """Return transformers' implementation of a model's attention, also where ours stands beside it; or ""."""
    name = getattr(getattr(model, "config", None), "_attn_implementation", None) or ""
    return str(name).removeprefix(PREFIX).partition("_on_")[0]


def install(model: nn.Module, group: Group = None, size: int = 1) -> None:
    """Let a model of transformers compute its attention by our implementation.

    Args:
        model: the model, whose implementation is one of `PACKING`.
        group: the ranks that share a sequence.
        size: the number of these ranks.
    """
    masks, functions = compat.attention_registries()
    base = implementation(model)
    name = f"{PREFIX}{base}" if size == 1 else f"{PREFIX}{base}_on_{size}"
    masks.register(name, functools.partial(mask, base, size))
    functions.register(name, functools.partial(attend, base, group if size > 1 else None, size))
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) not in (None, name):
            config._attn_implementation = name


def mask(base: str, size: int, **given: Any) -> Any:
    """Return the mask of an implementation of transformers, without what is of other rows.

    Args:
        base: the implementation.
        size: the number of ranks that share a sequence.
        given: as transformers gives them to each function of its registry of masks.

    Raises:
        RuntimeError: ranks share a sequence, and no batch of the engine is under way.
    """
    make = compat.attention_registries()[0]()[base]
    rows = _under_way.get()
    if rows is None and size > 1:
        # The exchange of heads would take the tokens of all ranks for one sequence: other values, silently.
        raise RuntimeError(
            f"{size} ranks share the model's sequences (ulysses_sequence_parallel_size), and it was called "
            "outside of the engine: call train_batch, infer_batch or forward_backward_batch"
        )
    if rows is None:
        return make(**given)
    rows.masked += 1
    numbers = rows.numbers
    if base in FLASH:
        # It takes the lengths of rows, which go to each layer in the place of a mask.
        return numbers[None]
    # Of the whole sequence, of which the model may have this rank's tokens alone.
    whole = compat.whole_mask(given, len(numbers), numbers.device)
    if base == FLEX:
        inner = given["mask_function"]

        def within_rows(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return inner(batch, head, query, key) & (numbers[query] == numbers[key])

        return make(**{**whole, "mask_function": within_rows})
    if rows.is_single:
        return make(**whole)
    made = make(**{**whole, "allow_is_causal_skip": False})
    if made.dtype == torch.bool:
        made = made & rows.same
        setattr(made, ENDS, rows.ends)
        return made
    return made.masked_fill(~rows.same, torch.finfo(made.dtype).min)


def attend(
    base: str,
    group: Group,
    size: int,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[torch.Tensor, Any]:
    """Return the attention of an implementation of transformers, of all tokens of a rank's heads.

    Args:
        base: the implementation.
        group, size: the ranks that share a sequence, each with its part of the tokens on both sides of this
            function, and with its part of the heads in between.
        module, query, key, value, attention_mask, options: as transformers gives them to each function of its
            registry of attention.
    """
    rows = _under_way.get()
    if rows is not None:
        rows.attended += 1
    function = function_of(base, module)
    if base == FLEX:
        # "BACKEND" has this choice in it, and torch takes one of them alone.
        chosen = options.get("kernel_options") or {}
        options["kernel_options"] = chosen if "BACKEND" in chosen else {**NO_DECODING, **chosen}
    if base in FLASH and attention_mask is not None and attention_mask.dtype == torch.long:
        options.update(lengths_of(attention_mask))
        options.pop("position_ids", None)
        attention_mask = None
    if size == 1:
        return row_by_row(function, module, query, key, value, attention_mask, **options)
    heads = query.shape[1]
    key, value = (ulysses.repeated(tensor, size) for tensor in (key, value))
    query, key, value = (ulysses.exchange(tensor, group, 1, 2) for tensor in (query, key, value))
    part = Part(module, query.shape[1] // key.shape[1], heads, group)
    if options.get("s_aux") is not None:
        options["s_aux"] = part.of_heads(options["s_aux"])
    output, _ = row_by_row(function, part, query, key, value, attention_mask, **options)
    return ulysses.exchange(output, group, 1, 2), None


def row_by_row(
    function: Any,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[torch.Tensor, Any]:
    """Return the attention of each row by itself on the CPU: not of all tokens to all, most of it masked.

    An accelerator gets all rows in one call. So does a mask that the model has made another tensor of.
    """
    ends = getattr(attention_mask, ENDS, None)
    if ends is None or query.device.type != "cpu" or query.shape[2] != ends[-1]:
        found: tuple[torch.Tensor, Any] = function(module, query, key, value, attention_mask, **options)
        return found
    outputs = []
    for row in map(slice, ends, ends[1:]):
        parts = (tensor[:, :, row] for tensor in (query, key, value))
        outputs.append(function(module, *parts, attention_mask[:, :, row, row], **options)[0])
    return torch.cat(outputs, 1), None


class Part:
    """An attention module with a rank's part of the heads; all else is the module's own.

    Args:
        module: the module.
        groups: queries for each key.
        heads: the number of all heads.
        group: the ranks that share them.
    """

    def __init__(self, module: Any, groups: int, heads: int, group: Group) -> None:
        self._module, self._heads, self._group = module, heads, group
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        # gpt-oss has a number for each head.
        return self.of_heads(found) if name == "sinks" else found

    def of_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor with a number for each head."""
        rank, size = torch.distributed.get_rank(self._group), torch.distributed.get_world_size(self._group)
        return tensor.chunk(size)[rank]


def function_of(base: str, module: Any) -> Any:
    """Return transformers' function of an implementation; eager attention is in each model's own file.

    Raises:
        RuntimeError: there is none.
    """
    if base != "eager":
        return compat.attention_registries()[1]()[base]
    for kind in type(module).__mro__:
        found = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if found is not None:
            return found
    raise RuntimeError(f"{type(module).__name__} has no eager_attention_forward beside it")


def lengths_of(numbers: torch.Tensor) -> dict[str, Any]:
    """Return flash attention's arguments for rows by the numbers of tokens' rows: (1, tokens)."""
    lengths = torch.unique_consecutive(numbers[0], return_counts=True)[1]
    ends = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    longest = int(lengths.max())
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
