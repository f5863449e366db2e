"""The numbers of a model, as config.json and the table of its family have them. Knows nothing of ranks."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch_dcp_backport.hf import block_size_of
from torch_dcp_backport.megatron._src.names import EMBED, HEAD, LAYER, NORM
from torch_dcp_backport.megatron.families import family_of
from torch_dcp_backport.megatron.families.table import (
    CUT_BY_NUMBERS,
    OF_EXPERTS,
    Family,
    Row,
    Tensor,
    dense_layers,
    holds,
    number_of,
    size_of,
    units_of,
)
from torch_dcp_backport.megatron.families.towers import text_of
from torch_dcp_backport.transfer import Problem, TensorInfo

#: The number of an expert in a key.
EXPERT_NUMBER = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
#: An expert's tensor comes after all others of its layer.
LAST = 1_000_000


@dataclass(frozen=True)
class Shape:
    """A decoder of one of the known families."""

    kind: str
    #: (name in the family's formulas, value), sorted.
    numbers: tuple[tuple[str, int], ...]
    #: (key of config.json, value), sorted.
    flags: tuple[tuple[str, bool], ...]
    #: Whether the files hold no lm_head, since it is the embedding.
    tied: bool
    #: The layers of a sparse model that are dense.
    dense: tuple[int, ...] = ()
    #: The model_type of the towers that this is the text tower of; empty where it is the model.
    towers: str = ""

    @property
    def family(self) -> Family:
        return family_of(self.kind)

    def number(self, name: str) -> int:
        """Return a number by its name in formulas; 0 where the family does not have it."""
        return _numbers(self).get(name, 0)

    @property
    def layers(self) -> int:
        return self.number("layers")

    @property
    def hidden(self) -> int:
        return self.number("hidden")

    @property
    def vocab(self) -> int:
        return self.number("vocab")

    @property
    def predicted(self) -> int:
        """The number of layers of multi-token prediction, which come behind the others."""
        return self.number("predicted")

    @property
    def experts(self) -> int:
        """Of every sparse layer; 0 in a dense model."""
        return self.number("experts")

    @property
    def described(self) -> dict[str, object]:
        """Every number, by what it is called in messages."""
        return {
            "model_type": self.towers or self.kind,
            "tied": self.tied,
            "dense": self.dense,
            **dict(self.numbers),
            **dict(self.flags),
        }

    def is_sparse(self, layer: int) -> bool:
        return bool(self.experts) and layer not in self.dense

    @property
    def is_mixed(self) -> bool:
        """Return whether some layers are dense and some sparse."""
        return len({self.is_sparse(layer) for layer in range(self.layers)}) > 1

    def rows_in(self, layer: int) -> tuple[Row, ...]:
        """Return the parameters of a layer, beside those of experts."""
        beside = self.family.prediction if layer >= self.layers else ()
        return _rows(self, self.is_sparse(layer)) + beside

    def experts_in(self, layer: int) -> tuple[Row, ...]:
        """Return the parameters of each expert of a layer."""
        return self.family.experts if self.is_sparse(layer) else ()

    def every_row(self) -> Iterator[tuple[Row, bool]]:
        """Yield (row, whether it is of an expert) of all that some layer has."""
        for is_sparse in sorted({self.is_sparse(layer) for layer in range(self.layers)}):
            yield from ((row, False) for row in _rows(self, is_sparse))
            yield from ((row, True) for row in self.family.experts if is_sparse)

    def names_in(self, layer: int) -> frozenset[str]:
        """Return HF names of a layer's tensors, without its prefix; of experts with {} for the number."""
        beside = self.family.prediction if layer >= self.layers else ()
        return _names(self, self.is_sparse(layer)) | {key for row in beside for key in row.keys}

    def hf_shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor in the files, by its HF key."""
        if key in (EMBED, HEAD):
            return self.vocab, self.hidden
        if key == NORM:
            return (self.hidden,)
        return _sizes(self, EXPERT_NUMBER.sub("{}", LAYER.sub("", key)))

    def tensor(self, key: str) -> Tensor:
        """Return the row's tensor of a key in a layer."""
        return _tensors(self.family)[EXPERT_NUMBER.sub("{}", LAYER.sub("", key))]

    def folded(self, keys: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Return key -> its shape in the files, where that has fewer dimensions than the table."""
        known, folded = _tensors(self.family), {}
        if not any(tensor.folds for tensor in known.values()):
            return {}
        for key in keys:
            tensor = known.get(LAYER.sub("", key))
            if tensor is not None and tensor.folds:
                sizes = iter(self.hf_shape(key))
                folded[key] = tuple(math.prod(next(sizes) for _ in range(fold)) for fold in tensor.folds)
        return folded

    def turned(self, tensors: Mapping[str, TensorInfo]) -> set[str]:
        """Return the keys of packed tensors of layers whose files have an expert's two dimensions exchanged.

        Where one of a layer's two tensors is square, the other one decides.
        """
        known, layers = _tensors(self.family), dict[str, list[str]]()
        turned_layers: set[str] = set()
        for key, info in tensors.items():
            layer = LAYER.match(key)
            tensor = known.get(key[layer.end() :]) if layer else None
            if layer is None or tensor is None or not tensor.is_packed or len(info.shape) != 3:
                continue
            layers.setdefault(layer[0], []).append(key)
            count, first, second = self.folded([key]).get(key, self.hf_shape(key))
            if info.shape == (count, second, first) and first != second:
                turned_layers.add(layer[0])
        return {key for layer in turned_layers for key in layers[layer]}

    def order(self, key: str) -> tuple[int, int, int, str]:
        """Return a key's place in an export, for sorting: embedding, layers, norm, heads."""
        layer = LAYER.match(key)
        if layer is None:
            return (-1, 0, -1, key) if key == EMBED else (2**62, int(key != NORM), -1, key)
        rest = key[layer.end() :]
        expert = EXPERT_NUMBER.search(rest)
        place = _places(self.family).get(EXPERT_NUMBER.sub("{}", rest), LAST)
        if expert is None:
            return int(layer[1]), place, -1, key
        # All of an expert, then the next expert.
        return int(layer[1]), LAST + int(expert[0]), place, key


@functools.lru_cache(maxsize=64)
def _numbers(shape: Shape) -> dict[str, int]:
    return dict(shape.numbers)


@functools.lru_cache(maxsize=1024)
def _sizes(shape: Shape, name: str) -> tuple[int, ...]:
    """Return the shape of a tensor by its name in the table: the same for all layers and experts."""
    return tuple(size_of(size, _numbers(shape)) for size in _tensors(shape.family)[name].sizes)


@functools.lru_cache(maxsize=64)
def _rows(shape: Shape, is_sparse: bool) -> tuple[Row, ...]:
    facts = {**_numbers(shape), **dict(shape.flags), "sparse": is_sparse, "dense": not is_sparse}
    return tuple(row for row in shape.family.rows if holds(row.when, facts))


@functools.lru_cache(maxsize=64)
def _names(shape: Shape, is_sparse: bool) -> frozenset[str]:
    rows = (*_rows(shape, is_sparse), *(shape.family.experts if is_sparse else ()))
    return frozenset(key for row in rows for key in row.keys)


def _tensors(family: Family) -> Mapping[str, Tensor]:
    return _tables(family.kinds)


@functools.lru_cache(maxsize=64)
def _tables(kinds: tuple[str, ...]) -> dict[str, Tensor]:
    return family_of(kinds[0]).tensors()


def _places(family: Family) -> Mapping[str, int]:
    return _order(family.kinds)


@functools.lru_cache(maxsize=64)
def _order(kinds: tuple[str, ...]) -> dict[str, int]:
    return {key: place for place, key in enumerate(_tables(kinds))}


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Return the numbers of a config.json.

    Raises:
        ValueError: another kind of model, quantised weights, or numbers that are missing or do not fit.
    """
    config, towers = text_of(config)
    family = family_of(config.get("model_type"))
    check_quantisation(config)
    formulas = family.formulas
    # Without experts transformers makes every layer a dense one, whatever the other numbers are.
    is_dense = any(config.get(key) == 0 for key in formulas.get("experts", "").split(" or "))
    numbers = {
        name: 0 if is_dense and name in OF_EXPERTS else number_of(formula, config)
        for name, formula in formulas.items()
    }
    heads, kv_heads = numbers["heads"], numbers["kv_heads"]
    if heads % kv_heads:
        raise ValueError(f"config.json has {heads} heads, which {kv_heads} KV heads cannot share")
    tied = config.get("tie_word_embeddings")
    return Shape(
        kind=config["model_type"],
        numbers=tuple(sorted(numbers.items())),
        flags=tuple(sorted((key, bool(config.get(key, default))) for key, default in family.flags.items())),
        tied=family.is_tied if tied is None else bool(tied),
        dense=() if is_dense else dense_layers(family, config, numbers["layers"]),
        towers=towers,
    )


def check_quantisation(config: Mapping[str, Any]) -> None:
    """Refuse weights that are quantised in a way that is not taken back as they are read.

    Raises:
        ValueError: what config.json says of them.
    """
    said = config.get("quantization_config")
    if said and block_size_of(config) is None:
        method = said.get("quant_method") if isinstance(said, Mapping) else said
        raise ValueError(
            f"config.json has a quantization_config ({method}): quantised weights are not loaded, but for "
            "fp8 in blocks; dequantise the model first"
        )


def misfits(shape: Shape, tp_size: int, style: str, etp_size: int = 1) -> list[Problem]:
    """Return problems for numbers that TP, or the experts' TP, does not divide; style: "verl", "mcore"."""
    #: (number, whether it is cut among the experts' ranks)
    units: dict[tuple[str, bool], None] = {}
    for row, is_expert in shape.every_row():
        if row.cut in CUT_BY_NUMBERS:
            # Query heads are cut as units; a fused tensor has them first.
            formula = row.tensors[0].sizes[1 if row.cut == "columns" else 0]
            names = {"heads"} if row.cut == "qkv" else units_of(formula)
            if row.tensors[0].is_packed:
                names = {"expert_rows"}
            units.update(dict.fromkeys((name, is_expert) for name in sorted(names)))
    problems = []
    for name, is_expert in units:
        size, value = etp_size if is_expert else tp_size, shape.number(name)
        if value % size:
            group = "the experts' TP" if is_expert else "TP"
            expected = f"a multiple of {group} {size}"
            key = shape.family.formulas[name].partition(" or ")[0]
            problems.append(Problem(f"{key} cannot be cut", "", f"{value}", expected))
    if any(row.cut == "qkv" for row, _ in shape.every_row()):
        problems += _groups_that_do_not_fit(shape, tp_size, style)
    return problems


def _groups_that_do_not_fit(shape: Shape, tp_size: int, style: str) -> list[Problem]:
    problems, groups = [], shape.number("kv_heads")
    if groups % tp_size and tp_size % groups:
        expected = f"a multiple or a divisor of TP {tp_size}"
        problems.append(Problem("num_key_value_heads cannot be cut", "", f"{groups}", expected))
    rows = (shape.number("heads") + 2 * groups) * shape.number("head_dim")
    if style == "mcore" and rows % tp_size:
        # It deals out the rows of all groups, not the groups.
        expected = f"a multiple of TP {tp_size}"
        problems.append(Problem("linear_qkv cannot be cut", "", f"{rows} rows", expected))
    return problems
