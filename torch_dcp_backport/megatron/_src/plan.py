"""HF tensors over all ranks: their blocks and holders, and the problems of what does not fit.

Every rank computes the same from the same, so that all have the same problems. Reads and writes no values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Optional

from torch_dcp_backport.hf import gaps, is_plain
from torch_dcp_backport.megatron._src.cuts import Holding, holding_of, value_head
from torch_dcp_backport.megatron._src.model import ModelShard, Param
from torch_dcp_backport.megatron._src.names import (
    COMPUTED,
    EMBED,
    HEAD,
    LAYER,
    NORM,
    SCORE_BIAS,
    VALUE_HEADS,
    hf_keys,
)
from torch_dcp_backport.megatron._src.shape import Shape, misfits
from torch_dcp_backport.transfer import Box, Boxes, Problem, TensorInfo, WantTable, spell, spread_of

#: In a layer of multi-token prediction: a copy -> its original.
COPIES = {"embed_tokens.weight": EMBED, "shared_head.head.weight": HEAD}
COPIED = "equal to the model's own"
#: (rank, parameter) of a tensor; messages name them beside its key.
Holder = tuple[int, Param]


class Head(NamedTuple):
    """The head of the last stage."""

    #: The HF tensor that it holds; None where it is left as it is.
    key: Optional[str]
    is_value: bool = False


class Spreading:
    """A model's HF tensors on all ranks. All that does not fit is in `problems`."""

    def __init__(self, tables: Iterable[WantTable], shape: Shape, head: Head) -> None:
        """`tables`: the ranks' shards, as notes of an agreement."""
        self.shape = shape
        self.head = head
        self.problems: list[Problem] = []
        #: HF key -> rank -> blocks.
        self.blocks: dict[str, dict[int, list[Box]]] = {}
        #: HF key -> its holders: the first rank of equal shards, and the parameter.
        self.holders: dict[str, list[Holder]] = {}
        self.shards: list[tuple[tuple[int, ...], ModelShard]] = [
            (table.ranks, table.note) for table in tables
        ]
        for size, style, etp in sorted({size_of(shard) for _, shard in self.shards}):
            self.problems += misfits(shape, size, style, etp)
        self.problems += stage_faults(self.shards)
        #: HF key -> the blocks of every rank, in the order of an export.
        self.spreads: dict[str, Boxes] = {}
        if not self.problems:
            for ranks, shard in self.shards:
                for param in shard.params:
                    self._add(ranks, shard, param)
        if not self.problems:
            for key in sorted(self.blocks, key=self.shape.order):
                self.spreads[key] = spread_of(self.size_of(key), self.blocks[key])
                gap = gaps(key, self.spreads[key])
                self.problems += [problem._replace(key=self.named(key)) for problem in gap]

    def holding(self, shard: ModelShard, param: Param) -> Optional[Holding]:
        """Return the cuts of a parameter; None for a head that is left as it is.

        Raises:
            ValueError: the rows of all TP ranks are fewer than the vocabulary has.
        """
        role, keys = param.role, hf_keys(param.role, param.layer)
        if role.cut == "head":
            if self.head.key is None:
                return None
            if self.head.is_value:
                return value_head(self.head.key, self.shape)
            role, keys = role._replace(cut="vocab"), (self.head.key,)
        return holding_of(role, keys, self.shape, shard.place, param.shape)

    def _add(self, ranks: tuple[int, ...], shard: ModelShard, param: Param) -> None:
        size = (1, self.shape.hidden)
        if self.head.is_value and param.role.cut == "head" and param.shape != size:
            # Also where it would be left as it is: no file has values for it.
            key = f"{param.name} of {spell(ranks)}, for a value head"
            self.problems.append(Problem("wrong shape", key, f"{param.shape}", f"{size}"))
            return
        try:
            holding = self.holding(shard, param)
        except ValueError as error:
            self.problems.append(Problem(str(error), f"{param.name} of {spell(ranks)}"))
            return
        if holding is None:
            return
        if holding.shape != param.shape:
            target = holding.cuts[0].key if holding.cuts else EMBED
            key = f"{param.name} of {spell(ranks)}, for {target}"
            self.problems.append(Problem("wrong shape", key, f"{param.shape}", f"{holding.shape}"))
            return
        for cut in holding.cuts:
            self.holders.setdefault(cut.key, []).append((ranks[0], param))
            for rank in ranks:
                self.blocks.setdefault(cut.key, {}).setdefault(rank, []).append(cut.box)

    # --- what the ranks hold ---

    def size_of(self, key: str) -> tuple[int, ...]:
        return (1, self.shape.hidden) if self.head == Head(key, True) else self.shape.hf_shape(key)

    def named(self, key: str) -> str:
        """Return a key with a parameter that holds it, for a message."""
        rank, param = self.holders[key][0]
        return f"{key} (in {param.name} of rank {rank})"

    def infos(self, key: str) -> list[TensorInfo]:
        """Return a tensor's shape with each dtype that it is held in."""
        dtypes = dict.fromkeys(param.dtype for _, param in self.holders[key])
        return [TensorInfo(self.size_of(key), dtype) for dtype in dtypes]

    def faults(self) -> list[Problem]:
        """Return problems for what config.json asks for and no rank holds, and what is held beyond that."""
        needed = {EMBED, NORM}
        predicted = {layer_number(key) for key in self.spreads} & set(behind(self.shape))
        for layer in (*range(self.shape.layers), *sorted(predicted)):
            for name in self.shape.names_in(layer):
                numbers = range(self.shape.experts) if "{}" in name else (0,)
                needed.update(f"model.layers.{layer}.{name.format(number)}" for number in numbers)
        if not self.shape.tied or self.head.key:
            needed.add(self.head.key or HEAD)
        missing = [key for key in sorted(needed, key=self.shape.order) if key not in self.spreads]
        beyond = [key for key in self.spreads if key not in needed]
        return [
            *(Problem("held by no rank", name) for name in summed(by_layer(missing, self.spreads))),
            *(
                Problem(f"held, and not in a {self.shape.kind} model with this config.json", name)
                for name in summed(by_layer(beyond, needed))
            ),
        ]


def size_of(shard: ModelShard) -> tuple[int, str, int]:
    """Return the sizes and the style that the numbers of the model have to fit."""
    return shard.place.tp_size, shard.place.style, shard.place.etp_size


def stage_faults(shards: Sequence[tuple[tuple[int, ...], ModelShard]]) -> list[Problem]:
    """Return problems for layers that are twice in a rank, or in two stages."""
    problems = []
    stages: dict[frozenset[int], tuple[int, ...]] = {}
    for ranks, shard in shards:
        names: dict[tuple[object, Optional[int]], str] = {}
        for param in shard.params:
            key = param.role, param.layer
            if key in names:
                got = f"{names[key]} and {param.name}"
                problems.append(
                    Problem("held twice", f"{hf_keys(*key)[0]} on {spell(ranks)}", got, "one parameter")
                )
            names[key] = param.name
        layers = frozenset(param.layer for param in shard.params if param.layer is not None)
        stages[layers] = tuple(sorted({*stages.get(layers, ()), *ranks}))
    known = list(stages.items())
    for number, (layers, ranks) in enumerate(known):
        for other, others in known[:number]:
            both = sorted(layers & other)
            if both:
                got = f"{spell(others)} with {sorted(other)}, {spell(ranks)} with {sorted(layers)}"
                problems.append(Problem("in two stages", f"layers {both}", got, "each layer in one stage"))
    return problems


# --- against what the files hold ---


def head_of(shape: Shape, tensors: Mapping[str, TensorInfo], is_value: bool) -> Head:
    """Return the head that a load fills."""
    if not is_value:
        return Head(EMBED if shape.tied else HEAD)
    fits = [key for key in VALUE_HEADS if key in tensors and tensors[key].shape == (1, shape.hidden)]
    return Head(fits[0] if fits else None, True)


def left_alone(tensors: Mapping[str, TensorInfo], plan: Spreading) -> dict[str, str]:
    """Return tensor of the files -> why no parameter needs it; without such a reason it is a problem."""
    left: dict[str, str] = {}
    held = set(map(layer_number, plan.blocks))
    for key in tensors:
        if key in plan.blocks:
            continue
        if COMPUTED.fullmatch(key):
            left[key] = "computed by the model"
        elif plan.head.is_value and is_other_head(key, plan.head):
            left[key] = "no value head of one row"
        elif key == HEAD and plan.shape.tied:
            left[key] = "equal to the embedding"
        elif plan.shape.towers and LAYER.match(key) is None:
            left[key] = "of another tower than the text's"
        elif layer_number(key) in behind(plan.shape):
            if layer_number(key) not in held:
                left[key] = "of multi-token prediction, which no rank holds"
            elif copy_of(key, plan.shape) is not None:
                left[key] = COPIED
    unheld = [key for key in tensors if key not in plan.blocks and key not in left]
    for name, keys in by_layer(unheld, plan.blocks).items():
        got = f"{tensors[name].shape}" if name in tensors else f"{len(keys)} tensors"
        what, expected = "in the files, and held by no rank", ""
        predicted = plan.shape.family.formulas.get("predicted", "").partition(" or ")[0]
        if predicted and layer_number(keys[0]) >= plan.shape.layers + plan.shape.predicted:
            says = f"as {predicted}={plan.shape.predicted} of config.json says"
            expected = f"no layers behind {plan.shape.layers + plan.shape.predicted}, {says}"
        plan.problems.append(Problem(what, name, got, expected))
    return left


def layer_number(key: str) -> int:
    """Return the number of a key's layer; -1 outside of layers."""
    layer = LAYER.match(key)
    return int(layer[1]) if layer is not None else -1


def behind(shape: Shape) -> range:
    """Return the layers of multi-token prediction."""
    return range(shape.layers, shape.layers + shape.predicted)


def copy_of(key: str, shape: Shape) -> Optional[str]:
    """Return the tensor that files have a copy of in a layer of multi-token prediction; None for others."""
    return COPIES.get(LAYER.sub("", key)) if layer_number(key) in behind(shape) else None


def is_other_head(key: str, head: Head) -> bool:
    """Return whether a tensor is of a head that is not loaded; without its bias a loaded head is wrong."""
    return key in VALUE_HEADS or (key == SCORE_BIAS and head.key != VALUE_HEADS[0])


def check_files(tensors: Mapping[str, TensorInfo], plan: Spreading) -> None:
    """Add problems for tensors that the files lack, or have in another shape or dtype than needed."""
    needed = sorted(plan.blocks, key=plan.shape.order)
    missing = [key for key in needed if key not in tensors]
    for name, keys in by_layer(missing, tensors).items():
        why = "config.json says tie_word_embeddings=false" if name == HEAD else ""
        label = plan.named(keys[0]) if name == keys[0] else f"{name} (such as {plan.named(keys[0])})"
        plan.problems.append(Problem("not in the files", label, why))
    for key in needed:
        info = tensors.get(key)
        if info is None:
            continue
        if info.shape != plan.size_of(key):
            # As files have it: the table may have more dimensions.
            size = plan.shape.folded([key]).get(key, plan.size_of(key))
            expected = f"{size} by config.json"
            plan.problems.append(
                Problem("wrong shape in the files", plan.named(key), f"{info.shape}", expected)
            )
        elif not is_plain(info.dtype):
            got, expected = f"{info.dtype}", "floating-point weights"
            plan.problems.append(Problem("quantised in the files", plan.named(key), got, expected))


def by_layer(keys: Iterable[str], others: Iterable[str]) -> dict[str, list[str]]:
    """Return name in a message -> its keys; all keys of a layer share a name if `others` has none of it."""
    known = set(map(layer_of, others))
    keys_by_name: dict[str, list[str]] = {}
    for key in keys:
        layer = layer_of(key)
        keys_by_name.setdefault(f"{layer}.*" if layer and layer not in known else key, []).append(key)
    return keys_by_name


def summed(names: Iterable[str]) -> list[str]:
    """Return a message's names, with the same name in several layers merged."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(name[len(layer_of(name)) :], []).append(name)
    return [
        alike[0] + (f" and in {len(alike) - 1} more layer(s)" if len(alike) > 1 else "")
        for alike in layers.values()
    ]


def layer_of(key: str) -> str:
    """Return `model.layers.7` for a key in a layer; an empty string for any other key."""
    return ".".join(key.split(".")[:3]) if key.startswith("model.layers.") else ""
