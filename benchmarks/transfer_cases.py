"""The tables of the transfer benchmark: the ways, the cases, the models, and what is measured by default.

Standard library only: the driver reads this without torch, the ranks with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

TORCHS = "torch.distributed.checkpoint.state_dict"
OURS = "torch_dcp_backport.state_dict"
PACKAGE = "torch_dcp_backport"
VERLS = "verl.third_party.torch.distributed.checkpoint.state_dict"


@dataclass(frozen=True)
class Way:
    """One way to reach the state-dict functions."""

    name: str
    lane: str  # of tools/lanes.py
    first: str  # the process's very first import
    api: str  # the module whose functions are called
    switch: str | None  # TORCH_DCP_BACKPORT; None leaves it unset
    code: str  # the package, or the file of set_model_state_dict, whose code has to have run
    text: str = "torch's own fix"


WAYS = {
    way.name: way
    for way in (
        Way("stock-2.6", "2.6", TORCHS, TORCHS, "off", "torch", "as it is"),
        Way(
            "backport-2.6",
            "2.6",
            PACKAGE,
            TORCHS,
            None,
            PACKAGE,
            "with `import torch_dcp_backport` first, through torch's own module",
        ),
        Way("native-2.7", "2.7", TORCHS, TORCHS, "off", "torch"),
        Way("native-current", "current", TORCHS, TORCHS, "off", "torch"),
        Way(
            "direct-current",
            "current",
            TORCHS,
            OURS,
            "off",
            PACKAGE,
            "`torch_dcp_backport.state_dict` called by its own name",
        ),
        Way(
            "verl-2.6",
            "clients",
            VERLS,
            VERLS,
            "off",
            VERLS.replace(".", "/") + ".py",
            "verl 0.5.0's own copy of torch 2.7's functions",
        ),
        Way(
            "accelerate-2.6",
            "clients",
            "alternatives.accelerate_loader",
            "alternatives.accelerate_loader",
            "off",
            "alternatives/accelerate_loader.py",
            "accelerate 1.10.1's `fsdp2_load_full_state_dict`",
        ),
        Way(
            "torchtune-2.6",
            "clients",
            "alternatives.torchtune_loader",
            "alternatives.torchtune_loader",
            "off",
            "alternatives/torchtune_loader.py",
            "torchtune 0.6.1's `load_from_full_model_state_dict`, its switch for torch's functions off",
        ),
    )
}
DEFAULT_WAYS = ("stock-2.6", "backport-2.6", "native-2.7", "native-current")
QUICK_WAYS = (*DEFAULT_WAYS, "direct-current")
ALTERNATIVES = ("stock-2.6", "backport-2.6", "verl-2.6", "accelerate-2.6", "torchtune-2.6", "native-2.7")


@dataclass(frozen=True)
class Case:
    """One call that is measured."""

    name: str
    text: str
    meta: bool = False  # the model is on the meta device before; else its parameters exist
    everyone: bool = False  # every rank has the full dict; else rank 0, which broadcasts
    each: bool = False  # a call for each parameter, as Lightning does
    save: bool = False
    optimizer: bool = False


CASES = {
    case.name: case
    for case in (
        Case("load", "set_model_state_dict, broadcast from rank 0"),
        Case("load-meta", "broadcast from rank 0 into a model on the meta device", meta=True),
        Case("load-all", "set_model_state_dict, the full dict on every rank", everyone=True),
        Case("load-all-meta", "the full dict everywhere, into the meta device", meta=True, everyone=True),
        Case("load-each", "a set_model_state_dict for each parameter (Lightning)", each=True),
        Case("save", "get_model_state_dict, full, cpu_offload", save=True),
        Case("optim-load", "set_optimizer_state_dict, broadcast from rank 0, AdamW", optimizer=True),
        Case("optim-save", "get_optimizer_state_dict, full, cpu_offload", save=True, optimizer=True),
    )
}

Shape = tuple[int, ...]
STATES = ("exp_avg", "exp_avg_sq")
STEP_BYTES = 4


@dataclass(frozen=True)
class Model:
    """The shapes of a model's parameters, block by block; a block is one FSDP2 unit."""

    name: str
    text: str
    blocks: tuple[tuple[Shape, ...], ...]
    dtype: str = "float32"

    def parameters(self) -> Iterator[tuple[str, Shape]]:
        """(key, shape) of every parameter; each has a module of its own."""
        for number, block in enumerate(self.blocks):
            for index, shape in enumerate(block):
                yield f"blocks.{number}.tensor{index}.weight", shape

    @property
    def tensors(self) -> int:
        return sum(map(len, self.blocks))

    @property
    def bytes(self) -> int:
        elements = sum(math.prod(shape) for _, shape in self.parameters())
        return elements * {"float32": 4, "bfloat16": 2}[self.dtype]


def unit_bytes(case: Case, model: Model) -> int:
    """What multiples are multiples of: the full model, or the full optimizer state."""
    return len(STATES) * model.bytes + STEP_BYTES * model.tensors if case.optimizer else model.bytes


def _small(name: str, tensors: int) -> Model:
    unit = 200
    sizes = (min(unit, tensors - done) for done in range(0, tensors, unit))
    return Model(name, f"{tensors:,} x 64x64, {unit} per unit", tuple(((64, 64),) * size for size in sizes))


def _moe() -> Model:
    dense = ((512, 512),) * 4
    experts = ((128, 512),) * 64
    return Model(
        "moe",
        "8 layers of 64 experts 128x512 and 4 x 512x512, embedding 8192x512",
        (((8192, 512),), *((*dense, *experts),) * 8),
    )


def _qwen2() -> Model:
    """Qwen2.5-0.5B, the model of `make demo`, with fewer layers and without the tied head."""
    hidden, kv, intermediate, vocabulary, layers = 896, 128, 4864, 151936, 8
    layer = (
        *((hidden, hidden), (hidden,)),  # q_proj
        *((kv, hidden), (kv,)) * 2,  # k_proj, v_proj
        (hidden, hidden),  # o_proj
        *((intermediate, hidden),) * 2,  # gate_proj, up_proj
        (hidden, intermediate),  # down_proj
        *((hidden,),) * 2,  # the norms
    )
    return Model(
        "qwen2",
        f"Qwen2.5-0.5B's shapes, bfloat16, {layers} of its 24 layers, the tied head left out",
        (((vocabulary, hidden), (hidden,)), *(layer,) * layers),
        "bfloat16",
    )


SCALING = ("small-500", "small-1000", "small-2000", "small")  # the curve over the number of tensors
MODELS = {
    model.name: model
    for model in (
        Model("dense", "16 x 2048x2048", (((2048, 2048),),) * 16),
        Model("embed", "32768x1024 and 16 x 1024x1024", (((32768, 1024),), *(((1024, 1024),),) * 16)),
        *map(_small, SCALING, (500, 1000, 2000, 4000)),
        _moe(),
        _qwen2(),
        Model("tiny", "to try the benchmark itself", (((64, 32), (9,)),) * 4),
    )
}
EACH_MODELS = ("dense", "small-500", "tiny")  # one call per parameter is too slow for the others


@dataclass(frozen=True)
class Combination:
    """What all ways are measured with, one beside the other."""

    case: str
    model: str
    world: int

    def __str__(self) -> str:
        return f"{self.case} {self.model} x{self.world}"


# The cheap ones first; what takes stock torch a minute each last.
SELECTION = (
    *(Combination("load", "dense", world) for world in (2, 4, 8)),
    Combination("load-meta", "dense", 4),
    Combination("load-all", "dense", 4),
    Combination("load", "embed", 4),
    Combination("save", "dense", 4),
    Combination("save", "embed", 4),
    Combination("optim-load", "dense", 4),
    Combination("optim-save", "dense", 4),
    *(Combination(case, model, 4) for model in ("moe", "qwen2") for case in ("load", "save")),
    *(Combination("load-each", model, 4) for model in ("dense", "small-500")),
    *(Combination("load", model, 4) for model in SCALING),
    Combination("save", "small", 4),
    Combination("optim-load", "small", 4),
)
ALTERNATIVES_SELECTION = tuple(
    Combination(case, model, 4)
    for model in ("dense", "embed", "moe")
    for case in ("load-meta", "load-all-meta")
)
QUICK = (*(Combination(case, "tiny", 2) for case in CASES), Combination("load", "tiny", 3))
