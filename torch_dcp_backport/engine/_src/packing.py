"""Rows without padding: all of a micro-batch in one sequence, where each token sees its own row alone.

Refuses by name each model that was not compared with padded rows. Must never change what a padded row gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Optional

import torch
from torch import nn

from torch_dcp_backport import compat
from torch_dcp_backport.engine._src import attention, ulysses
from torch_dcp_backport.engine._src.batches import IDS, MASK, POSITIONS
from torch_dcp_backport.engine._src.heads import NO_LABEL
from torch_dcp_backport.transfer import Group

#: Entries for `prepare_model_outputs` beside the model's inputs: of each token the next one, and the number
#: of its row.
LABELS, ROWS = "labels", "rows"
INSTEAD = "use_remove_padding=False would do"
#: The model types of transformers whose rows have the same values and gradients packed as alone
#: (test_packing.py).
FAMILIES = frozenset({
    "apertus", "arcee", "aria_text", "bitnet", "code_llama", "cohere", "cohere2", "deepseek_v2",
    "deepseek_v3", "diffllama", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "flex_olmo", "gemma",
    "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neox",
    "gpt_oss", "granite", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "llama", "longcat_flash",
    "ministral", "mistral", "mixtral", "modernbert-decoder", "olmo", "olmo2", "olmo3", "phi", "phi3", "qwen2",
    "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2", "vaultgemma",
})  # fmt: skip
_STATE = "its layers carry a state from token to token, also from one row into the next"
#: Model type -> why it is refused.
REASONS = {
    "bamba": _STATE,
    "biogpt": "it makes a mask of its own",
    "bloom": "its attention counts places from the first token of all rows",
    "doge": "its attention chooses among tokens of all rows",
    "falcon_h1": _STATE,
    "falcon_mamba": _STATE,
    "granitemoehybrid": _STATE,
    "jamba": _STATE,
    "lfm2": "its convolutions read the end of the row before",
    "lfm2_moe": "its convolutions read the end of the row before",
    "llama4_text": "its chunks count from the first token of all rows",
    "mamba": _STATE,
    "mamba2": _STATE,
    "minimax": _STATE,
    "qwen3_next": _STATE,
    "recurrent_gemma": _STATE,
    "rwkv": _STATE,
    "xlstm": _STATE,
    "zamba": _STATE,
    "zamba2": _STATE,
}
#: Of `FAMILIES`, those whose attention is none of transformers' registry, so that ranks cannot share it.
NOT_SHARED = frozenset({"diffllama"})
#: Kinds of layers whose tokens see their own row alone where a mask says so.
LAYERS = frozenset({"full_attention", "sliding_attention"})
#: A mask between so many tokens is small.
SMALL = 4096
#: Packages whose modules were compared.
OURS = ("transformers", "torch", "peft")


def check(model: nn.Module, size: int = 1) -> None:
    """Refuse to pack rows for a model that may let them read each other.

    Args:
        model: the model; its parameters may be on meta.
        size: the number of ranks that share a sequence.

    Raises:
        ValueError: a family that was not compared, code that is none of transformers', an implementation of
            attention that cannot keep rows apart, or numbers of heads that do not divide.
    """
    asked = "use_remove_padding=True" if size == 1 else f"ulysses_sequence_parallel_size={size}"
    instead = INSTEAD if size == 1 else "ulysses_sequence_parallel_size=1 would do"
    unwrap: Any = getattr(model, "get_base_model", lambda: model)
    config: Any = getattr(unwrap(), "config", None)
    family = str(getattr(config, "model_type", ""))
    kind = type(unwrap()).__name__
    kinds = [compat.unsharded_class(module) for module in model.modules()]
    foreign = [found for found in kinds if found.__module__.partition(".")[0] not in OURS]
    if foreign:
        names = sorted({f"{found.__module__}.{found.__qualname__}" for found in foreign})
        raise ValueError(f"{asked}: {', '.join(names)} is none of transformers' own modules; {instead}")
    why = REASONS.get(family, "it has not been compared with padded rows")
    if family not in FAMILIES:
        raise ValueError(f"{asked} is not offered for {family!r} ({kind}): {why}; {instead}")
    if size > 1 and family in NOT_SHARED:
        raise ValueError(
            f"{asked} is not offered for {family!r} ({kind}): its attention is none of transformers' "
            f"registry; {instead}"
        )
    others = sorted(set(getattr(config, "layer_types", None) or ()) - LAYERS)
    if others:
        raise ValueError(f"{asked} is not offered for layers of {', '.join(others)}; {instead}")
    if getattr(config, "use_bidirectional_attention", None):
        raise ValueError(f"{asked} is not offered with use_bidirectional_attention; {instead}")
    name = attention.implementation(unwrap())
    if name not in attention.PACKING:
        raise ValueError(
            f"{asked}: attn_implementation={name!r} cannot keep rows apart; take one of "
            f"{', '.join(attention.PACKING)}, or {instead}"
        )
    try:
        compat.attention_registries()
    except ValueError as error:
        raise ValueError(f"{asked}: {error}; {instead}") from error
    if size > 1:
        _check_shared(config, size, asked, instead)


def _check_shared(config: Any, size: int, asked: str, instead: str) -> None:
    """Refuse ranks that cannot share the heads, or the frequencies of positions.

    Raises:
        ValueError: numbers that do not divide, or frequencies by the longest row.
    """
    heads = config.num_attention_heads
    if heads % size:
        raise ValueError(f"{asked} does not divide num_attention_heads={heads}; {instead}")
    keys = getattr(config, "num_key_value_heads", None) or heads
    if keys % size and size % keys:
        raise ValueError(
            f"{asked} neither divides num_key_value_heads={keys} nor is a multiple of it; {instead}"
        )
    rope = rope_by_length(config)
    if rope:
        raise ValueError(
            f"{asked} is not offered with rope_scaling of type {rope!r}: its frequencies depend on the "
            f"longest row, of which each rank has a part; {instead}"
        )


def rope_by_length(config: Any) -> str:
    """Return the type of rotary frequencies that depend on the longest row beside a row, or ""."""
    for name in ("rope_scaling", "rope_parameters"):
        asked = getattr(config, name, None)
        for entry in (asked, *asked.values()) if isinstance(asked, Mapping) else ():
            kind = (entry.get("rope_type") or entry.get("type")) if isinstance(entry, Mapping) else ""
            if kind in ("dynamic", "longrope"):
                return str(kind)
    return ""


class Packed(NamedTuple):
    """The rows of a micro-batch in one sequence.

    Args:
        inputs: the model's inputs, of this rank's tokens: each (1, tokens).
        more: what `prepare_model_outputs` reads beside them: `labels` and `rows`, each (1, tokens).
        rows: the rows of the whole sequence.
        there: where the tokens are in padded rows, (rows, columns); None where the rows are jagged.
        tokens: the tokens of the rows; behind them there may be some for the ranks to have as many each.
        group: the ranks that share the sequence; None where it is this rank alone.
    """

    inputs: dict[str, torch.Tensor]
    more: dict[str, torch.Tensor]
    rows: attention.Rows
    there: Optional[torch.Tensor]
    tokens: int
    group: Group

    def unpacked(self, output: torch.Tensor, data: Mapping[str, Any]) -> torch.Tensor:
        """Return a result for each token in the form of the rows, padded with zeros, or jagged. Collective.

        Args:
            output: this rank's results: (1, tokens, ...).
            data: the micro-batch's data.
        """
        whole = output if self.group is None else ulysses.gathered(output, self.group, 1)
        flat = whole[0, : self.tokens]
        if self.there is None:
            offsets = data[IDS].offsets().to(flat.device)
            return torch.nested.nested_tensor_from_jagged(flat, offsets)
        padded = flat.new_zeros((*self.there.shape, *flat.shape[1:]))
        return padded.index_put((self.there,), flat)


def packed(data: Mapping[str, Any], device: torch.device, group: Group = None, size: int = 1) -> Packed:
    """Return a micro-batch's rows as a single sequence, or this rank's part of the sequence.

    Args:
        data: a micro-batch's data, as of `batches.model_inputs`; positions count each row's tokens from 0.
        device: the device of the inputs.
        group: the ranks that share the sequence, which have the same rows.
        size: the number of these ranks.

    Example:
        >>> import torch
        >>> from torch_dcp_backport.engine._src import packing
        >>> data = {"input_ids": torch.tensor([[0, 7, 8], [5, 6, 9]])}
        >>> data["attention_mask"] = torch.tensor([[0, 1, 1], [1, 1, 1]])
        >>> found = packing.packed(data, torch.device("cpu"))
        >>> found.inputs["input_ids"], found.inputs["position_ids"]
        (tensor([[7, 8, 5, 6, 9]]), tensor([[0, 1, 0, 1, 2]]))
    """
    ids, there = data[IDS].to(device), None
    if ids.is_nested:
        flat, lengths = ids.values(), ids.offsets().diff()
    else:
        there = data[MASK].to(device).bool() if MASK in data else torch.ones_like(ids, dtype=torch.bool)
        flat, lengths = ids[there], there.sum(1)
    count, rows = len(flat), torch.arange(len(lengths), device=device)
    numbers = rows.repeat_interleave(lengths)
    positions = torch.arange(count, device=device) - (lengths.cumsum(0) - lengths)[numbers]
    labels = flat.roll(-1).where(numbers == numbers.roll(-1), NO_LABEL)
    labels[-1:] = NO_LABEL
    # So that each rank has as many tokens. They are the first row's: others would reach other experts.
    more = torch.arange(-count % size, device=device)
    again = more % lengths[0]
    sequence = {
        IDS: torch.cat([flat, flat[again]]),
        POSITIONS: torch.cat([positions, again]),
        LABELS: torch.cat([labels, torch.full_like(again, NO_LABEL)]),
        ROWS: torch.cat([numbers, torch.zeros_like(again)]),
    }
    # What fills up is a row of its own, which needs a mask; behind a long row it sees that row instead.
    ends = len(lengths) + more // lengths[0]
    is_long = len(lengths) == 1 and count > SMALL
    kept = attention.Rows(torch.cat([numbers, torch.zeros_like(ends) if is_long else ends]))
    own = {
        name: ulysses.part_of(value[None], group, 1) if size > 1 else value[None]
        for name, value in sequence.items()
    }
    # Nothing is padding. Without a mask transformers would look for rows in a rank's own part.
    own[MASK] = torch.ones_like(own[IDS])
    inputs = {name: own[name] for name in (IDS, MASK, POSITIONS)}
    outputs = {name: own[name] for name in (LABELS, ROWS)}
    return Packed(inputs, outputs, kept, there, count, group if size > 1 else None)


def check_asked(rows: attention.Rows, model: nn.Module, is_shared: bool) -> None:
    """Refuse what a model has computed without asking how rows are kept apart.

    Raises:
        RuntimeError: it has not asked; on every rank, since each runs the same model.
    """
    if not rows.masked or (is_shared and not rows.attended):
        what = "mask" if not rows.masked else "attention"
        raise RuntimeError(
            f"a {type(model).__name__} takes its {what} from elsewhere than transformers' registry, so that "
            f"packed rows may have read each other; {INSTEAD}"
        )
