"""Slots: where a sharded checkpoint of Megatron's GPTModel has the rows of HF tensors. Arithmetic alone.

Layers of one kind are stacked: `decoder.layers.mlp.linear_fc2.weight` has the layer as its first axis;
tensors of experts have the expert as the second. If layers differ, each has keys with its number.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple, Optional

import torch

from torch_dcp_backport.megatron._src.cuts import Cut, Place, holding_of
from torch_dcp_backport.megatron._src.model import ModelShard, Param
from torch_dcp_backport.megatron._src.names import LAYERS, STYLES, Role, hf_keys
from torch_dcp_backport.megatron._src.plan import Head, Spreading
from torch_dcp_backport.megatron._src.shape import Shape
from torch_dcp_backport.megatron.families.table import Row
from torch_dcp_backport.transfer import Box, Problem, TensorInfo, WantTable

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
#: Keys of things that are not the model, with the model's names in them.
OPTIMIZER = re.compile(r"(^|\.)(optimizer|chained_\d+)\.")
MODEL = ("embedding.", "decoder.", "output_layer.", "mtp.")
MTP_LAYERS = "mtp.layers."
#: The full model is on a single TP rank.
ALONE = Place("mcore", 0, 1)
#: Cuts of modules with a state of their own in TransformerEngine: empty, unless they compute in 8 bits.
WITH_STATE = ("rows", "rows or whole", "columns", "gate_up", "qkv")
CORE_ATTENTION = "self_attention.core_attention"


class Slot(NamedTuple):
    """The place of a full model's parameter in a checkpoint."""

    key: str
    #: Its place along the axes in front of its own (layer, expert), and how long they are.
    lead: tuple[int, ...] = ()
    extents: tuple[int, ...] = ()

    def box(self, at: Box) -> Box:
        """Return a box of the parameter as a box of the stored tensor."""
        return Box((*self.lead, *at.offset), (1,) * len(self.lead) + at.size)


class Naming(NamedTuple):
    """A checkpoint's names for a model's tensors."""

    #: Before every key, such as `module.`.
    prefix: str = ""
    #: Whether each layer has keys of its own.
    is_flat: bool = False
    #: The keys of a checkpoint that is read; None of a checkpoint that is written.
    keys: Optional[frozenset[str]] = None
    #: Whether it has the layers of multi-token prediction.
    has_predicted: bool = False

    def layers(self, shape: Shape) -> range:
        """Return the layers that the checkpoint has, those of multi-token prediction behind the others."""
        return range(shape.layers + (shape.predicted if self.has_predicted else 0))

    def slot(self, rest: str, shape: Shape, layer: int, expert: Optional[int] = None) -> Slot:
        """Return the slot of a layer's tensor; `rest` is its name in the layer."""
        lead, extents = ((), ()) if expert is None else ((expert,), (shape.experts,))
        if layer >= shape.layers:
            # Beside its weight, a module of TransformerEngine has a state.
            module = rest.rpartition(".")[0]
            is_beside = any(
                name.rpartition(".")[0] == module for row in shape.family.prediction for name in row.names
            )
            path = f"{MTP_LAYERS}{layer - shape.layers}.{'' if is_beside else 'transformer_layer.'}"
            return Slot(f"{self.prefix}{path}{rest}", lead, extents)
        if self.is_flat:
            return Slot(f"{self.prefix}{LAYERS}{layer}.{rest}", lead, extents)
        return Slot(f"{self.prefix}{LAYERS}{rest}", (layer, *lead), (shape.layers, *extents))

    def slots(self, row: Row, shape: Shape, layer: int) -> tuple[Slot, ...]:
        """Return where a parameter is written, under each name; of a checkpoint that is read, where it is."""
        every = tuple(self.slot(name, shape, layer) for name in row.names)
        if self.keys is None:
            return every if row.is_under_each else every[:1]
        there = [slot for slot in every if slot.key in self.keys]
        return tuple(there[:1]) or every[:1]

    def doubles(self, shape: Shape) -> set[str]:
        """Return keys of second names of what is read under another name."""
        return {
            slot.key
            for layer in self.layers(shape)
            for row in shape.rows_in(layer)
            if row.is_under_each
            for slot in (self.slot(name, shape, layer) for name in row.names)
            if slot not in self.slots(row, shape, layer)
        }


class Whole:
    """A full model on a single rank, as of megatron-core at TP 1, and its places in a checkpoint."""

    def __init__(self, shape: Shape, rows: Mapping[str, int], naming: Naming) -> None:
        """`rows`: of the embedding and of the head, padding included; a missing head has no entry."""
        self.shape = shape
        #: Parameter name -> its slots, one for each of its names in the checkpoint.
        self.slots: dict[str, tuple[Slot, ...]] = {}
        params: list[Param] = []
        for name, role, layer, slots in params_of(shape, naming):
            if role.cut in ("vocab", "head"):
                if name not in rows:
                    continue
                size: tuple[int, ...] = (rows[name], shape.hidden)
            else:
                size = holding_of(role, hf_keys(role, layer), shape, ALONE, ()).shape
            params.append(Param(name, role, layer, size, torch.bfloat16))
            self.slots[name] = slots
        self.shard = ModelShard(ALONE, tuple(params))

    def spreading(self, head: Head) -> Spreading:
        """Return the model's HF tensors; what does not fit is in their problems."""
        return Spreading([WantTable({}, (0,), note=self.shard)], self.shape, head)

    def cuts(self, spreading: Spreading) -> Iterator[tuple[Slot, Cut]]:
        """Yield (slot, cut): a box of an HF tensor, and the stored tensor that has it."""
        for param in self.shard.params:
            holding = spreading.holding(self.shard, param)
            for cut in holding.cuts if holding is not None else ():
                yield from ((slot, cut) for slot in self.slots[param.name])


def params_of(shape: Shape, naming: Naming) -> Iterator[tuple[str, Role, Optional[int], tuple[Slot, ...]]]:
    """Yield (name, role, layer, slots) of every parameter that a model with these numbers may have."""
    for name, role in STYLES["mcore"].outside.items():
        yield name, role, None, (Slot(naming.prefix + name),)
    for layer in naming.layers(shape):
        for row in shape.rows_in(layer):
            slots = naming.slots(row, shape, layer)
            yield f"{LAYERS}{layer}.{row.names[0]}", Role.of(row), layer, slots
        for row in shape.experts_in(layer):
            for expert in range(shape.experts):
                slot = naming.slot(f"mlp.experts.experts.{row.names[0]}", shape, layer, expert)
                name = f"{LAYERS}{layer}.mlp.experts.{expert}.{row.names[0]}"
                yield name, Role.of(row, expert), layer, (slot,)


def states_of(shape: Shape, naming: Naming) -> Iterator[Slot]:
    """Yield slots of empty objects that a load into modules of TransformerEngine asks for."""
    for layer in naming.layers(shape):
        for module in (CORE_ATTENTION, *modules_of(shape.rows_in(layer))):
            slot = naming.slot(f"{module}._extra_state", shape, layer)
            # An object needs a place among those of its key, even where it is alone.
            yield slot if slot.lead else slot._replace(lead=(0,), extents=(1,))
        for module in modules_of(shape.experts_in(layer)):
            for expert in range(shape.experts):
                yield naming.slot(f"mlp.experts.experts.{module}._extra_state", shape, layer, expert)


def modules_of(rows: Iterable[Row]) -> dict[str, None]:
    """Return the modules of TransformerEngine that hold these parameters."""
    weights = [row.names[0] for row in rows if row.cut in WITH_STATE]
    return dict.fromkeys(name.rpartition(".")[0] for name in weights if name.endswith(".weight"))


def naming_of(keys: Iterable[str]) -> Naming:
    """Return the naming of the model in a checkpoint."""
    known = [key for key in keys if not OPTIMIZER.search(key)]
    ends = sorted((key for key in known if key.endswith(EMBEDDING)), key=len)
    prefix = ends[0][: -len(EMBEDDING)] if ends else ""
    numbered = re.compile(re.escape(prefix + LAYERS) + r"\d+\.")
    has_predicted = any(key.startswith(prefix + MTP_LAYERS) for key in known)
    return Naming(prefix, any(map(numbered.match, known)), frozenset(known), has_predicted)


def model_in(keys: Collection[str], naming: Naming, shape: Shape) -> list[str]:
    """Return the keys of a checkpoint's tensors that are the model's, each once."""
    doubles = naming.doubles(shape)
    starts = tuple(naming.prefix + name for name in MODEL)
    return [key for key in keys if key.startswith(starts) and key not in doubles]


def misfits_of(model: Whole, stored: Mapping[str, TensorInfo]) -> list[Problem]:
    """Return problems for tensors that a checkpoint lacks, has in another shape, or has beyond the model."""
    problems: list[Problem] = []
    used: set[str] = set()
    for param in model.shard.params:
        slot = model.slots[param.name][0]
        if slot.key in used:
            continue
        used.add(slot.key)
        name = f"{slot.key} (for {', '.join(hf_keys(param.role, param.layer))})"
        info, size = stored.get(slot.key), slot.extents + param.shape
        if info is None:
            problems.append(Problem("not in the checkpoint", name))
        elif info.shape != size:
            problems.append(Problem("wrong shape in the checkpoint", name, f"{info.shape}", f"{size}"))
    what = "in the checkpoint, and not in a model with this config.json"
    return problems + [Problem(what, key, f"{stored[key].shape}") for key in sorted(set(stored) - used)]
