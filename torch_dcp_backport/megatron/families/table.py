"""The form of a family's table: parameters, the HF tensors behind them, and the numbers in config.json.

Data and small arithmetic on it; must never look at a tensor, a module or a rank.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional

#: The cuts that a row may have; see `row`.
CUTS = ("whole", "rows", "rows or whole", "columns", "gate_up", "qkv")
#: Those of which TP has to divide numbers.
CUT_BY_NUMBERS = ("rows", "columns", "gate_up", "qkv")
#: The numbers that most families have: name in a table -> its formula over the keys of config.json.
NUMBERS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads or num_attention_heads",
    "head_dim": "head_dim or hidden_size/num_attention_heads",
    "intermediate": "intermediate_size",
    "vocab": "vocab_size",
}
#: The numbers that sparse families have; without experts they are 0.
OF_EXPERTS = ("experts", "expert_rows", "shared_rows")
#: Which layers are dense, by the keys of config.json that say so.
DENSE = ("mlp_only_layers", "decoder_sparse_step", "first_k_dense_replace")
LAYER_KINDS = ("dense", "sparse")
WORD = re.compile(r"[A-Za-z_]\w*")


class Tensor(NamedTuple):
    """An HF tensor of a layer."""

    #: Its key without the layer's prefix; of an expert with {} for its number.
    key: str
    #: The size of each dimension, as a formula over the numbers of the family.
    sizes: tuple[str, ...]
    #: How many of them are one dimension in the files; empty where each is.
    folds: tuple[int, ...] = ()

    @property
    def is_packed(self) -> bool:
        """Whether it has all experts of a layer."""
        return self.sizes[0] == "experts" and "{}" not in self.key and len(self.sizes) > 1


class Row(NamedTuple):
    """A parameter of a layer: made by `row`.

    Args:
        names: megatron-core's names for it; the first is that of a checkpoint.
        cut: how TP cuts it: one of `CUTS`.
        tensors: the HF tensors behind it.
        when: what must hold for a layer to have it: kinds of layers, numbers above 0, flags; `!` is "not".
        is_under_each: whether a checkpoint has it under each of its names, since models look for different
            ones.
    """

    names: tuple[str, ...]
    cut: str
    tensors: tuple[Tensor, ...]
    when: tuple[str, ...] = ()
    is_under_each: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(tensor.key for tensor in self.tensors)

    def when_also(self, *words: str) -> Row:
        """Return the row for fewer layers or models.

        Args:
            words: what must hold, too, as in `when`.
        """
        return self._replace(when=(*self.when, *words))


def row(names: str, cut: str, *tensors: str, when: str = "", is_under_each: bool = False) -> Row:
    """Return a row of a family's table.

    Args:
        names: megatron-core's names of the parameter within its layer, separated by spaces. The first one is
            used in checkpoints. Rows of experts have the names within the expert's module.
        cut: the part of a TP rank: "whole" (all of it), "rows" (of the first dimension), "rows or whole" (as
            the parameter's own shape says), "columns" (of the second dimension), "gate_up" (its rows of the
            first tensor, then of the second; or of both halves of a single tensor), "qkv" (query, key and
            value, of each group of heads).
        tensors: an HF tensor each, as "key: size, size". A size is a formula of products and sums over the
            numbers of the family, such as "heads*head_dim". The key of an expert's tensor has {} for its
            number; without it the tensor has all experts, in its first dimension. Of a dimension that is
            two, such as "expert_rows|2" (gate and up in turns) or "2|expert_rows", the outer comes first.
        when: words, separated by spaces, that must all hold for the layer to have the parameter: "dense" or
            "sparse" (the layer), a number that is above 0, a flag of config.json. "!word" is its opposite.
        is_under_each: whether a converted checkpoint has the tensor under each of the names.

    Raises:
        ValueError: a cut that does not exist, or a tensor in another form.

    Example:
        >>> from torch_dcp_backport import megatron
        >>> megatron.row("mlp.linear_fc2.weight", "columns", "mlp.out.weight: hidden, intermediate").keys
        ('mlp.out.weight',)
    """
    if cut not in CUTS:
        raise ValueError(f"{names} has the cut {cut!r}; these exist: {', '.join(CUTS)}")
    if not tensors or not names.split():
        raise ValueError(f"the row {names!r} needs a name and an HF tensor")
    parsed = []
    for text in tensors:
        key, colon, sizes = text.partition(":")
        groups = [size.replace(" ", "").split("|") for size in sizes.split(",")]
        parts = tuple(size for group in groups for size in group)
        if not colon or not all(parts):
            raise ValueError(f"{names} has the tensor {text!r}, where 'key: size, size' is needed")
        folds = tuple(map(len, groups)) if len(parts) > len(groups) else ()
        parsed.append(Tensor(key.strip(), parts, folds))
    return Row(tuple(names.split()), cut, tuple(parsed), tuple(when.split()), is_under_each)


@dataclass(frozen=True)
class Family:
    """A family of models, as a table: `add_family` makes it known.

    Args:
        kinds: the values of `model_type` in config.json that this table is for.
        rows: the parameters of a layer, in the order in which an export has their tensors.
        experts: the parameters of an expert, by their names within its module (`linear_fc1.weight`).
        numbers: name in formulas -> formula over the keys of config.json ("a or b", "a*b", "a/b", "256").
            They are added to those that most families have (layers, hidden, heads, kv_heads, head_dim,
            intermediate, vocab), or replace them. Sparse families have experts and expert_rows, and
            shared_rows if an expert is shared.
        flags: key of config.json that is true or false -> its value where config.json lacks it.
        dense: keys of config.json that say which layers of a sparse model are dense.
        prediction: the parameters of a layer of multi-token prediction beside those of each layer. Files have
            such layers behind the others; the number "predicted" says how many.
        is_tied: whether the head is the embedding where config.json does not say it.

    Example:
        >>> from torch_dcp_backport import megatron
        >>> norm = megatron.row("input_layernorm.weight", "whole", "norm.weight: hidden")
        >>> megatron.Family(kinds=("tiny",), rows=(norm,)).kinds
        ('tiny',)
    """

    kinds: tuple[str, ...]
    rows: tuple[Row, ...]
    experts: tuple[Row, ...] = ()
    numbers: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, bool] = field(default_factory=dict)
    dense: tuple[str, ...] = ()
    prediction: tuple[Row, ...] = ()
    is_tied: bool = False

    @property
    def formulas(self) -> dict[str, str]:
        """Number -> its formula over the keys of config.json."""
        return {**NUMBERS, **self.numbers}

    def every_row(self) -> Iterator[Row]:
        """Yield the rows of a layer, of multi-token prediction, and of an expert."""
        yield from self.rows
        yield from self.prediction
        yield from self.experts

    def tensors(self) -> dict[str, Tensor]:
        """Return key -> tensor of a layer, in the order of an export."""
        return {tensor.key: tensor for row in self.every_row() for tensor in row.tensors}


def digest_of(family: Family) -> str:
    """Return a text that is the same on every rank that has the same table."""
    return hashlib.blake2b(repr(family).encode(), digest_size=8).hexdigest()


def problems_of(family: Family) -> list[str]:
    """Return what is wrong with a table."""
    problems = []
    known = {*family.formulas, *family.flags, *LAYER_KINDS}
    by_name: dict[tuple[str, bool], tuple[str, tuple[str, ...]]] = {}
    sizes: dict[str, tuple[str, ...]] = {}
    for entry in family.every_row():
        is_expert = entry in family.experts
        words = {word.lstrip("!") for word in entry.when}
        words.update(word for tensor in entry.tensors for size in tensor.sizes for word in WORD.findall(size))
        problems += [
            f"{entry.names[0]} speaks of {word}, which the table has not" for word in sorted(words - known)
        ]
        if entry.cut == "qkv" and len(entry.tensors) not in (1, 3):
            problems.append(
                f"{entry.names[0]} is cut as qkv, and has {len(entry.tensors)} tensors, not 1 or 3"
            )
        if entry.cut == "gate_up" and len(entry.tensors) not in (1, 2):
            problems.append(
                f"{entry.names[0]} is cut as gate_up, and has {len(entry.tensors)} tensors, not 1 or 2"
            )
        if entry.cut not in ("qkv", "gate_up") and len(entry.tensors) != 1:
            problems.append(
                f"{entry.names[0]} is cut as {entry.cut}, and has {len(entry.tensors)} tensors, not 1"
            )
        if entry.cut in CUT_BY_NUMBERS:
            axis = int(entry.cut == "columns")
            first = entry.tensors[0]
            size = "".join(first.sizes[axis : axis + 1])
            if not all(WORD.search(term) for term in size.split("+")):
                problems.append(
                    f"{entry.names[0]} is cut as {entry.cut}, and dimension {axis} of {first.key} has the "
                    f"size {size or None}, not a number of the table in each term"
                )
        for name in entry.names:
            role = by_name.setdefault((name, is_expert), (entry.cut, entry.keys))
            if role != (entry.cut, entry.keys):
                problems.append(
                    f"{name} stands for two things: {', '.join(role[1])}, and {', '.join(entry.keys)}"
                )
        for tensor in entry.tensors:
            if sizes.setdefault(tensor.key, tensor.sizes) != tensor.sizes:
                problems.append(f"{tensor.key} has two shapes: {sizes[tensor.key]}, and {tensor.sizes}")
            if is_expert and "{}" not in tensor.key and not tensor.is_packed:
                problems.append(f"{tensor.key} of an expert has no {{}} for the expert's number")
    if family.prediction and "predicted" not in family.numbers:
        problems.append("layers of multi-token prediction need the number predicted")
    problems += [f"{key} says nothing of dense layers" for key in family.dense if key not in DENSE]
    return problems


# --- formulas ---


def size_of(formula: str, numbers: Mapping[str, int]) -> int:
    """Return the value of a formula of sums and products over numbers."""
    total = 0
    for term in formula.split("+"):
        value = 1
        for factor in term.split("*"):
            value *= int(factor) if factor.isdigit() else numbers[factor]
        total += value
    return total


def units_of(formula: str) -> set[str]:
    """Return the numbers that a cut must divide: the first of each term (heads, not head_dim)."""
    return {next(factor for factor in term.split("*") if not factor.isdigit()) for term in formula.split("+")}


def number_of(formula: str, config: Mapping[str, Any], least: int = 1) -> int:
    """Return the value of a formula over the keys of config.json.

    Raises:
        ValueError: a number is missing, is no number, or is less than `least`.
    """
    alternatives = formula.split(" or ")
    least = 0 if alternatives[-1] == "0" else least
    for alternative in alternatives:
        value = _value(alternative, config, least)
        if value is not None:
            return value
    key = WORD.search(formula)
    raise ValueError(f"config.json has {key[0] if key else formula}=None, where a positive number is needed")


def _value(formula: str, config: Mapping[str, Any], least: int) -> Optional[int]:
    """Return a product's or a quotient's value; None where config.json lacks a number of it."""
    value = None
    for sign, factor in re.findall(r"(^|[*/])([^*/]+)", formula):
        name = factor.strip()
        number = int(name) if name.isdigit() else _positive(name, config.get(name), least)
        if number is None:
            return None
        value = number if value is None else value * number if sign == "*" else value // number
    return value


def _positive(name: str, number: object, least: int) -> Optional[int]:
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise ValueError(f"config.json has {name}={number!r}, where a positive number is needed")
    return number


def dense_layers(family: Family, config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the dense layers of a sparse model.

    Raises:
        ValueError: config.json says it in another form.
    """
    dense: set[int] = set()
    for key in family.dense:
        value: object = config.get(key)
        if value is None:
            continue
        if key == "mlp_only_layers":
            if not isinstance(value, (list, tuple)):
                raise ValueError(f"config.json has mlp_only_layers={value!r}, where a list is needed")
            dense.update(value)
        elif key == "decoder_sparse_step":
            step = number_of(key, config)
            dense.update(layer for layer in range(layers) if (layer + 1) % step)
        else:
            dense.update(range(number_of(key, config, 0)))
    return tuple(layer for layer in range(layers) if layer in dense)


def holds(words: Iterable[str], facts: Mapping[str, object]) -> bool:
    """Return whether all words hold: what they name is true or above 0, and with a `!` it is not."""
    return all(bool(facts[word.lstrip("!")]) != word.startswith("!") for word in words)
