"""Adapters of peft (LoRA): their tensors' names, and the weights that they are merged into, piece by piece.

Knows names and shapes; must never import peft, nor hold more than a piece of a merged weight.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch

from torch_dcp_backport.hf._src.blocks import Share
from torch_dcp_backport.hf._src.format import is_plain
from torch_dcp_backport.transfer import (
    Box,
    Boxes,  # noqa: F401  # of fields that MergedShare inherits
    TensorInfo,
)

#: Before the names of a model that peft wraps.
PREFIX = "base_model.model."
LORA = re.compile(r"(?P<path>.+)\.lora_(?P<part>A|B)\.(?P<adapter>[^.]+)\.(?P<leaf>weight|bias)")
EMBEDDING = re.compile(r"(?P<path>.+)\.lora_embedding_(?P<part>A|B)\.(?P<adapter>[^.]+)")
TRAINED = re.compile(r"(?P<path>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<leaf>.+)")
REPLACED = re.compile(r"(.+)\.original_module\.(.+)")
#: What is left of peft in a name that is none of these.
OTHERS = re.compile(r"\.(lora_\w+|base_layer|token_adapter|\w*_adapter|ia3_\w+|hada_\w+|lokr_\w+|vera_\w+)\.")
#: Settings of an adapter with which merging is another computation, or none.
NOT_MERGED = (
    "use_dora", "use_qalora", "use_bdlora", "layer_replication", "target_parameters",
    "trainable_token_indices", "alora_invocation_tokens", "arrow_config", "kasa_config", "velora_config",
    "monteclora_config",
)  # fmt: skip


#: Names of GPT-2's layers: their weights are (in, out) there, and (out, in) in models made after it.
OF_GPT2 = frozenset(("c_attn", "c_proj", "c_fc", "q_attn"))
#: Names of embeddings and heads, for which peft looks, and which grow with the vocabulary.
EMBEDDINGS = frozenset(("embed_tokens", "lm_head"))
OF_A_VOCABULARY = EMBEDDINGS | {"wte", "word_embeddings", "embed_in", "embed_out", "shared"}


class CannotMerge(ValueError):
    """An adapter that cannot be merged into plain weights."""


class Low(NamedTuple):
    """The two thin matrices of an adapted weight."""

    #: Keys of the tensors as they were saved.
    a: str
    b: str
    scale: float
    #: Whether the weight is (in, out), as an embedding's.
    is_turned: bool
    #: Whether the sum is in the weight's dtype.
    is_cast: bool = False


class Merged(NamedTuple):
    """The tensors of the model that an adapter makes of another."""

    #: HF key -> the key that it was saved under.
    names: dict[str, str]
    #: HF key -> what is added to the tensor.
    added: dict[str, Low]
    #: HF key of a bias -> (key of what is added to it, its factor).
    biases: dict[str, tuple[str, float]]
    #: Adapters that are not merged, and their tensors.
    left: dict[str, list[str]]

    @property
    def changed(self) -> set[str]:
        return {*self.added, *self.biases}

    def renamed(self, names: Mapping[str, str]) -> Merged:
        """Return the same with other HF keys."""
        return self._replace(
            names={names.get(key, key): saved for key, saved in self.names.items()},
            added={names.get(key, key): low for key, low in self.added.items()},
            biases={names.get(key, key): bias for key, bias in self.biases.items()},
        )

    def needed(self, key: str) -> list[str]:
        """Return the keys of the small tensors that a changed tensor is made of."""
        low = self.added.get(key)
        return [low.a, low.b] if low is not None else [self.biases[key][0]]


def adapters_in(names: Iterable[str]) -> list[str]:
    """Return the names of peft's adapters that a model's tensors belong to."""
    found = (
        match["adapter"]
        for name in names
        for kind in (LORA, EMBEDDING, TRAINED)
        if (match := kind.fullmatch(name))
    )
    return list(dict.fromkeys(found))


def is_wrapped(names: Iterable[str]) -> bool:
    """Return whether names are those of a model with an adapter of peft."""
    return any(name.startswith(PREFIX) or ".base_layer." in name or ".lora_" in name for name in names)


def as_settings(config: Any) -> dict[str, Any]:
    """Return an adapter's configuration as a dict, from a mapping, peft's object or a folder.

    Raises:
        OSError: no adapter_config.json in the folder.
        TypeError: none of them.
        ValueError: no JSON.
    """
    if isinstance(config, (str, Path)):
        path = Path(config)
        config = json.loads((path / "adapter_config.json" if path.is_dir() else path).read_bytes())
    if not isinstance(config, Mapping):
        to_dict = getattr(config, "to_dict", None)
        if not callable(to_dict):
            raise TypeError(f"a {type(config).__name__} is no configuration of an adapter")
        config = to_dict()
    return dict(config)


def check_mergeable(config: Mapping[str, Any]) -> None:
    """Refuse what is no plain LoRA.

    Raises:
        CannotMerge: naming the setting.
    """
    kind = config.get("peft_type", "LORA")
    name = str(getattr(kind, "value", kind))
    if name.rpartition(".")[2].upper() != "LORA":
        raise CannotMerge(f"peft_type={name}: only LoRA is merged")
    for setting in NOT_MERGED:
        if config.get(setting):
            raise CannotMerge(f"{setting}={config[setting]!r}: such an adapter is not merged")


def merged(
    tensors: Mapping[str, TensorInfo],
    config: Mapping[str, Any],
    adapter: Optional[str] = None,
    transposed: Optional[Mapping[str, bool]] = None,
) -> Merged:
    """Return how the tensors of a model with an adapter become those of the model alone.

    As peft's `merge_and_unload` does.

    Args:
        adapter: the adapter's name; None is the only one that there is.
        transposed: path of a module -> whether its weight is (in, out), as a Conv1D's; of others their
            shapes and those of their neighbours decide.

    Raises:
        CannotMerge: another method than LoRA, a quantised weight, ...; naming the key.
    """
    check_mergeable(config)
    known = adapters_in(tensors)
    if adapter is None:
        if len(known) > 1:
            raise CannotMerge(f"adapters {', '.join(known)}: which of them is not known")
        adapter = known[0] if known else "default"
    plan = Merged({}, {}, {}, {})
    parts: dict[str, dict[str, str]] = {}
    for key in tensors:
        name = key[len(PREFIX) :] if key.startswith(PREFIX) else key
        match = LORA.fullmatch(name) or EMBEDDING.fullmatch(name) or TRAINED.fullmatch(name)
        if match is not None and match["adapter"] != adapter:
            plan.left.setdefault(match["adapter"], []).append(key)
        elif match is None:
            if REPLACED.fullmatch(name) is None:
                plan.names.setdefault(name.replace(".base_layer.", ".", 1), key)
        elif match.re is TRAINED:
            plan.names[f"{match['path']}.{match['leaf']}"] = key
        else:
            part = match["part"] if match.re is LORA else f"embedding {match['part']}"
            leaf = match["leaf"] if match.re is LORA else "weight"
            parts.setdefault(match["path"], {})[f"{part} {leaf}"] = key
    for key in plan.names:
        if OTHERS.search(key):
            raise CannotMerge(f"{plan.names[key]}: what it is of an adapter is not known here")
    _keep_originals(tensors, plan)
    sides = Sides(tensors, plan, parts, config, transposed or {})
    for path, keys in parts.items():
        _add(tensors, plan, path, keys, config, sides)
    return plan


class Sides:
    """The order of a square weight's two sides, which follows neither from its shape nor from the adapter's.

    peft takes it from the layer's class, and its setting `fan_in_fan_out` is that of the last layer alone.
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorInfo],
        plan: Merged,
        parts: Mapping[str, Mapping[str, str]],
        config: Mapping[str, Any],
        transposed: Mapping[str, bool],
    ) -> None:
        """Look at the weights that are not square: an adapter or a bias shows which side is which."""
        self.is_asked = bool(config.get("fan_in_fan_out"))
        self.transposed = transposed
        #: Last part of a path -> the orders of such weights.
        self.seen: dict[str, set[bool]] = {}
        for name, key in plan.names.items():
            path, _, leaf = name.rpartition(".")
            shape = tensors[key].shape
            bias = plan.names.get(f"{path}.bias")
            keys = parts.get(path, {})
            if leaf != "weight" or len(shape) != 2 or shape[0] == shape[1]:
                continue
            if "B weight" in keys:
                rows = tensors[keys["B weight"]].shape[0]
            elif bias is not None and not keys:
                rows = tensors[bias].shape[0]
            else:
                continue
            self.seen.setdefault(path.rpartition(".")[2], set()).add(rows == shape[1])

    def is_turned(self, path: str) -> bool:
        """Return whether the square weight of a module is (in, out).

        Raises:
            CannotMerge: nothing decides.
        """
        known = self.transposed.get(path)
        if known is not None:
            return known
        own = path.rpartition(".")[2]
        is_of_gpt2 = own in OF_GPT2
        alike = (orders for leaf, orders in self.seen.items() if (leaf in OF_GPT2) == is_of_gpt2)
        for orders in (self.seen.get(own, set()), set().union(*alike)):
            if len(orders) == 1:
                return next(iter(orders))
        if self.is_asked != is_of_gpt2:
            raise CannotMerge(
                f"{path}.weight is square, and nothing tells whether it is (in, out), as a Conv1D's: "
                f"fan_in_fan_out={self.is_asked} may be of another layer (transposed=)"
            )
        return self.is_asked


def _keep_originals(tensors: Iterable[str], plan: Merged) -> None:
    """Take a module as it was where the adapter trains no copy of it."""
    for key in tensors:
        match = REPLACED.fullmatch(key[len(PREFIX) :] if key.startswith(PREFIX) else key)
        if match is not None:
            plan.names.setdefault(f"{match[1]}.{match[2]}", key)


def _add(
    tensors: Mapping[str, TensorInfo],
    plan: Merged,
    path: str,
    keys: Mapping[str, str],
    config: Mapping[str, Any],
    sides: Sides,
) -> None:
    """Plan the sum of a module's weight and its adapter.

    Raises:
        CannotMerge: the weight is quantised, of more dimensions, or not there.
    """
    is_embedding = "embedding A weight" in keys
    a, b = (keys.get(f"embedding {part} weight" if is_embedding else f"{part} weight") for part in "AB")
    target = f"{path}.weight"
    base = plan.names.get(target)
    if a is None or b is None or base is None:
        raise CannotMerge(f"{next(iter(keys.values()))}: no whole adapter of a weight {target}")
    info, (down, up) = tensors[base], (tensors[key].shape for key in (a, b))
    if not is_plain(info.dtype):
        raise CannotMerge(f"{base} is {info.dtype}: an adapter of quantised weights is not merged")
    if len(info.shape) != 2 or len(down) != 2 or len(up) != 2:
        raise CannotMerge(f"{base} is of the shape {info.shape}: only adapters of matrices are merged")
    plain, turned = (up[0], down[1]), (down[1], up[0])
    if is_embedding:
        is_turned = True
    else:
        is_turned = sides.is_turned(path) if plain == turned == info.shape else info.shape == turned
    if info.shape != (turned if is_turned else plain):
        raise CannotMerge(f"{base} is of the shape {info.shape}, and its adapter is of {plain}")
    scale = scale_of(path, down[0], config)
    plan.added[target] = Low(a, b, scale, is_turned, is_embedding)
    bias = keys.get("B bias")
    if bias is not None:
        if f"{path}.bias" not in plan.names:
            raise CannotMerge(f"{bias}: there is no bias to merge it into")
        plan.biases[f"{path}.bias"] = bias, scale


def scale_of(path: str, rank: int, config: Mapping[str, Any]) -> float:
    """Return the factor of a module's adapter, as peft computes it."""
    patterns = config.get("alpha_pattern") or {}
    found = (alpha for pattern, alpha in patterns.items() if re.match(rf"(.*\.)?({pattern})$", path))
    alpha = next(found, config.get("lora_alpha"))
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool):
        raise CannotMerge(f"lora_alpha={alpha!r} is no number")
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


@torch.no_grad()
def add(part: torch.Tensor, box: Box, low: Low, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add an adapter's share to a part of a weight on the host, in the weight's dtype.

    Args:
        part: of the weight, which `box` is the place of.
        a, b: the two whole matrices, on the host.
    """
    rows, columns = (slice(start, start + size) for start, size in zip(box.offset, box.size))
    if low.is_turned:
        rows, columns = columns, rows
    # As peft does on the host, where shorter dtypes multiply slowly, and in fewer bits.
    dtype = b.dtype
    computed = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    delta = (b[rows].to(computed) @ a[:, columns].to(computed)).mul_(low.scale)
    if low.is_turned:
        delta = delta.T
    delta = delta.to(dtype)
    part.add_(delta.to(part.dtype) if low.is_cast else delta)


@torch.no_grad()
def add_bias(part: torch.Tensor, box: Box, bias: torch.Tensor, scale: float) -> None:
    """Add an adapter's share to a part of a bias on the host."""
    start, size = box.offset[0], box.size[0]
    part.add_(bias[start : start + size] * scale)


#: Returns a small tensor in full, on the host, by the key that it was saved under.
Small = Callable[[str], torch.Tensor]


def merge_into(part: torch.Tensor, plan: Merged, key: str, box: Box, small: Small) -> None:
    """Add an adapter's share to a part of a tensor, a copy on the host."""
    low = plan.added.get(key)
    if low is not None:
        add(part, box, low, small(low.a), small(low.b))
        return
    bias, scale = plan.biases[key]
    add_bias(part, box, small(bias), scale)


def vocabulary_of(config: Mapping[str, Any]) -> Optional[int]:
    """Return the size of the vocabulary of the model that an adapter is put on; None where it is not here."""
    base = config.get("base_model_name_or_path")
    try:
        own = json.loads(Path(str(base or ""), "config.json").read_bytes())
        text = own.get("text_config")
        size = (text if isinstance(text, dict) and "vocab_size" in text else own).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return size if isinstance(size, int) else None


def saved_names(
    tensors: Mapping[str, TensorInfo],
    config: Mapping[str, Any],
    adapter: str,
    vocabulary: Optional[int] = None,
) -> dict[str, str]:
    """Return name in adapter_model.safetensors -> the key that it was saved under, as peft names them.

    As peft's `save_embedding_layers="auto"`: with the embedding and the head, where these have adapters, or
    have another number of rows than the model that the adapter is put on.

    Args:
        vocabulary: the rows of that model's embedding, by its configuration; None where they are not known.

    Raises:
        CannotMerge: peft has other names for such an adapter.
    """
    kind = config.get("peft_type", "LORA")
    name = str(getattr(kind, "value", kind)).rpartition(".")[2].upper()
    if name != "LORA":
        raise CannotMerge(f"peft_type={name}: only LoRA's own format is written")
    bias = config.get("bias") or "none"
    if bias == "lora_only":
        raise CannotMerge("bias='lora_only': peft itself writes no such biases; merged they are there")
    names: dict[str, str] = {}
    whole = of_a_vocabulary(tensors, adapter, vocabulary)
    for key in tensors:
        long = key if key.startswith(PREFIX) else PREFIX + key
        if key in whole:
            names[long] = key
            continue
        trained = TRAINED.fullmatch(long)
        if trained is not None:
            if trained["adapter"] == adapter:
                names[f"{trained['path']}.{trained['leaf']}"] = key
        elif ".token_adapter." in long or ".lora_magnitude_vector." in long:
            raise CannotMerge(f"{key}: of such an adapter only peft knows the format")
        elif ".lora_" in long:
            path, _, rest = long.rpartition(".lora_")
            if re.search(rf"\.{re.escape(adapter)}(\.|$)", rest):
                names[f"{path}.lora_{re.sub(rf'[.]{re.escape(adapter)}(?=[.]|$)', '', rest, count=1)}"] = key
        elif "bias" in long and bias == "all" and ".original_module." not in long:
            names[long] = key
    return names


def of_a_vocabulary(tensors: Mapping[str, TensorInfo], adapter: str, vocabulary: Optional[int]) -> set[str]:
    """Return the keys of embeddings and heads that an adapter alone is not the same without."""
    matches = (kind.fullmatch(key) for key in tensors for kind in (LORA, EMBEDDING))
    targets = {match["path"].rpartition(".")[2] for match in matches if match and match["adapter"] == adapter}
    keys = set()
    for key, (shape, _) in tensors.items():
        path, _, leaf = key.rpartition(".")
        layer = path[: -len(".base_layer")] if path.endswith(".base_layer") else path
        last = layer.rpartition(".")[2]
        if len(shape) != {"weight": 2, "bias": 1}.get(leaf):
            continue
        if layer != path:
            is_needed = last in EMBEDDINGS and bool(EMBEDDINGS & targets)
        else:
            # Also a head beside an embedding with an adapter, which peft leaves out.
            is_needed = last in OF_A_VOCABULARY and vocabulary not in (None, shape[0])
        if is_needed:
            keys.add(key)
    return keys


def check_ties(plan: Merged, tied: Mapping[str, str]) -> None:
    """Refuse an adapter of a tied tensor: merged, it would change the tensor under both names.

    Args:
        tied: HF key -> the key of the same tensor.

    Raises:
        CannotMerge: naming both.
    """
    for key, first in tied.items():
        if key in plan.changed or first in plan.changed:
            raise CannotMerge(f"{first} has an adapter, and is {key}, too: merged, it would change both")


@dataclass(frozen=True)
class MergedShare(Share):
    """A `Share` that adds an adapter's part to some tensors when they are read."""

    plan: Merged = field(default_factory=lambda: Merged({}, {}, {}, {}))
    #: Saved key -> whole small tensor, on the host.
    small: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def view(self, key: str, box: Box) -> torch.Tensor:
        part = super().view(key, box)
        if key not in self.plan.changed:
            return part
        total = part.detach().to("cpu", copy=True)
        merge_into(total, self.plan, key, box, self.small.__getitem__)
        return total.to(part.device)
