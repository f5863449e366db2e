"""`load_hf` and `save_hf`: a Megatron model from Hugging Face files, and back.

Must never write into a parameter, or into the target of an export, before all ranks agreed.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Union

import torch

from torch_dcp_backport.hf import (
    CONFIG,
    Configuration,
    Export,
    Saved,
    Source,
    as_config,
    checked,
    collect,
    dequantised,
    export,
    fill_from_first,
    fill_here,
    look,
    opened_together,
    renamed,
    target_of,
    turned,
    viewed,
    with_prefix,
)
from torch_dcp_backport.megatron._src.agreed import Agreed, GivenModules, agree_on_load, agree_on_save
from torch_dcp_backport.megatron._src.model import Layers, Models, Parallel
from torch_dcp_backport.megatron._src.names import EMBED, HEAD
from torch_dcp_backport.megatron._src.shape import shape_of
from torch_dcp_backport.megatron.families.qwen import TURNED_BY_5
from torch_dcp_backport.megatron.families.towers import OLD_HEAD, TOWERS, text_of
from torch_dcp_backport.transfer import Attempt, Call, groups_of, part_of, whole

LOAD = "cannot load Hugging Face weights"
SAVE = "cannot save as Hugging Face weights"


@dataclass(frozen=True)
class Loaded:
    """The result of a load on this rank.

    Args:
        keys: HF tensors that this rank's parameters hold parts of.
        left: HF tensor of the files that no parameter of any rank wants -> why.
        kept: parameters of this rank that the files hold nothing for: a value head.
        padded: parameter -> the number of its last rows that are beyond the vocabulary, now zero.
        cast: parameter -> the dtype that it was cast from.
        bytes_read: bytes of tensors that this rank read of the files.
    """

    keys: tuple[str, ...]
    left: Mapping[str, str]
    kept: tuple[str, ...]
    padded: Mapping[str, int]
    cast: Mapping[str, torch.dtype]
    bytes_read: int


def load_hf(
    models: Models,
    folder: Union[str, Path, Source],
    *,
    parallel: Optional[Parallel] = None,
    layers: Optional[Layers] = None,
    value_head: bool = False,
    files: str = "auto",
    compare: bool = True,
) -> Loaded:
    """Fill a Megatron model of a family that has a table from Hugging Face files, in place.

    Collective over the default process group; without a group, for this process alone. If every rank sees the
    files, each reads the slices that it holds, and nothing else. An optimizer that keeps its own copy of the
    parameters has to read them again: Megatron's `optimizer.reload_model_params()`.

    Args:
        models: this rank's chunk, or its chunks in the order of the virtual pipeline; megatron-core's
            GPTModel or verl's modules, wrapped or not, on any device.
        folder: a folder with config.json and safetensors files, or an `hf.Source`.
        parallel: this rank's place in its TP group; None asks megatron-core.
        layers: for each chunk the numbers of its layers, from 0, where the modules do not carry them
            (verl's); see `stages`.
        value_head: whether the last stage has a head of one row; the files need not have it.
        files: "shared" (every rank reads), "rank0" (the first reads for all), or "auto": as they are seen.
        compare: whether to warn, once, of what the model's TransformerConfig computes otherwise than
            config.json says (a rotary base, an epsilon, ...). What decides where a row goes (heads, groups,
            sizes) is always an error.

    Returns:
        The tensors that this rank filled, those of the files that were left, and the bytes that it read.

    Raises:
        RuntimeError: the files and the model do not fit, a file is torn, ...; the same text on every rank,
            before anything was written.
        TransferError: a read failed, a rank is gone, or the group's timeout is over; parameters were written.

    Example:
        The module stands in for megatron-core's GPTModel, with a single layer. Its vocabulary is padded to 8
        rows.

        >>> import torch
        >>> from torch import nn
        >>> from torch_dcp_backport import hf, megatron
        >>> layer = nn.ModuleDict({
        ...     "input_layernorm": nn.RMSNorm(4),
        ...     "self_attention": nn.ModuleDict({
        ...         "linear_qkv": nn.Linear(4, 12, bias=False), "linear_proj": nn.Linear(4, 4, bias=False),
        ...     }),
        ...     "pre_mlp_layernorm": nn.RMSNorm(4),
        ...     "mlp": nn.ModuleDict({
        ...         "linear_fc1": nn.Linear(4, 16, bias=False), "linear_fc2": nn.Linear(8, 4, bias=False),
        ...     }),
        ... })
        >>> model = nn.ModuleDict({
        ...     "embedding": nn.ModuleDict({"word_embeddings": nn.Embedding(8, 4)}),
        ...     "decoder": nn.ModuleDict(
        ...         {"layers": nn.ModuleList([layer]), "final_layernorm": nn.RMSNorm(4)}
        ...     ),
        ... })
        >>> config = {
        ...     "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 4, "num_attention_heads": 1,
        ...     "intermediate_size": 8, "vocab_size": 6, "tie_word_embeddings": True,
        ... }
        >>> _ = megatron.save_hf(model, "model", like=config, layers=[[0]])
        >>> _ = nn.init.zeros_(layer.mlp.linear_fc1.weight)
        >>> loaded = megatron.load_hf(model, "model", layers=[[0]])
        >>> bool(layer.mlp.linear_fc1.weight.any())
        True
        >>> loaded.padded
        {'embedding.word_embeddings.weight': 2}
    """
    given = GivenModules(models, parallel, layers, compare)
    return load(lambda: (folder, given), value_head, files)


def load(
    ask: Callable[[], tuple[Union[str, Path, Source], GivenModules]], value_head: bool, files: str = "auto"
) -> Loaded:
    """Load as `load_hf` does; `ask` makes this rank's arguments, and all ranks raise its failure."""
    with Call(LOAD, "fill", groups_of()) as call:
        asked = call.attempt(ask)
        seen = opened_together(call, call.attempt(lambda pair: pair[0], asked), files)
        source = call.attempt(as_text, seen)
        visibility = look(call, source, files)
        agreed = agree_on_load(call, call.attempt(lambda pair: pair[1], asked), visibility, value_head)
        if visibility.is_shared:
            assert visibility.source is not None, "every rank reads"
            bytes_read = fill_here(call, visibility.source, agreed.share)
        else:
            bytes_read = fill_from_first(call, agreed.agreement, visibility.source, agreed.share)
        return finished(agreed, bytes_read)


def as_text(source: Source) -> Source:
    """Return a source under the names of a language model, without quantisation.

    Files of a model without its head lack `model.`, the text towers of others have other names, and weights
    in fp8 have their scales beside them.
    """
    source = dequantised(source)
    _, towers = text_of(source.config)
    prefixes = TOWERS[towers].prefixes if towers else ()
    path, _, name = EMBED.partition(".")
    prefix = next((prefix for prefix in prefixes if prefix + name in source.tensors), f"{path}.")
    if prefix != f"{path}.":
        names = {key: f"{path}.{key[len(prefix) :]}" for key in source.tensors if key.startswith(prefix)}
        if OLD_HEAD in source.tensors:
            names[OLD_HEAD] = HEAD
        return as_in_table(renamed(source, names))
    return as_in_table(with_prefix(source, f"{path}.", name))


def as_in_table(source: Source) -> Source:
    """Return a source with the dimensions that the family's table has, where files have fewer."""
    try:
        shape = shape_of(source.config)
    except ValueError:
        # The ranks get it when they agree.
        return source
    if shape.kind in TURNED_BY_5:
        source = turned(source, shape.turned(source.tensors), (1, 2))
    folded = shape.folded(source.tensors)
    # Of another shape, the same number of elements is another order: transformers 5 turns experts of some.
    shapes = {key: shape.hf_shape(key) for key in folded if folded[key] == source.tensors[key].shape}
    return viewed(source, shapes) if shapes else source


@torch.no_grad()
def finished(agreed: Agreed, bytes_read: int) -> Loaded:
    """Zero the padding, and return the result of the load."""
    local, share = agreed.local, agreed.share
    padded: dict[str, int] = {}
    cast: dict[str, torch.dtype] = {}
    kept: list[str] = []
    for param in local.shard.params:
        holding = agreed.spreading.holding(local.shard, param)
        if holding is None:
            kept.append(param.name)
            continue
        for box in holding.padding:
            part_of(local.memory[param.name], whole(param.shape), box).zero_()
            padded[param.name] = box.size[0]
        for cut in holding.cuts:
            if share.tensors[cut.key].dtype != param.dtype:
                cast[param.name] = share.tensors[cut.key].dtype
    return Loaded(tuple(share.parts), agreed.left, tuple(kept), padded, cast, bytes_read)


def save_hf(
    models: Models,
    folder: Union[str, Path],
    *,
    like: Union[str, Path, Mapping[str, object], Configuration],
    parallel: Optional[Parallel] = None,
    layers: Optional[Layers] = None,
    how: Optional[Export] = None,
    compare: bool = True,
) -> Saved:
    """Write a Megatron model as a folder that `from_pretrained` opens.

    Collective over the default process group; without a group, for this process alone. Ranks on the first
    rank's machine that see the folder write what they hold themselves. Until everything is on the disk the
    folder is as it was.

    Args:
        models: this rank's chunk, or its chunks in the order of the virtual pipeline; as of `load_hf`.
        folder: where the model goes.
        like: the folder of the model that this model was made from (config.json, a tokenizer's files and the
            like are copied from there), or its configuration. Only the first rank's is used.
        parallel: this rank's place in its TP group; None asks megatron-core.
        layers: for each chunk the numbers of its layers, from 0, where the modules do not carry them.
        how: dtype, size of files, whether an older model is replaced; None is `Export()`.
        compare: as of `load_hf`.

    Returns:
        The keys that were written, and the bytes of their tensors.

    Raises:
        RuntimeError: the model does not fit its configuration, no rank holds some of it, the folder holds
            a model, the disk is full, ...; the same text on every rank. The folder is as it was.
        TransferError: a rank is gone, or the group's timeout is over. The folder is as it was, or has the new
            model; the error says which.

    Example:
        The module stands in for megatron-core's GPTModel, with a single layer. The padding of its vocabulary
        is left out.

        >>> import torch
        >>> from torch import nn
        >>> from torch_dcp_backport import hf, megatron
        >>> layer = nn.ModuleDict({
        ...     "input_layernorm": nn.RMSNorm(4),
        ...     "self_attention": nn.ModuleDict({
        ...         "linear_qkv": nn.Linear(4, 12, bias=False), "linear_proj": nn.Linear(4, 4, bias=False),
        ...     }),
        ...     "pre_mlp_layernorm": nn.RMSNorm(4),
        ...     "mlp": nn.ModuleDict({
        ...         "linear_fc1": nn.Linear(4, 16, bias=False), "linear_fc2": nn.Linear(8, 4, bias=False),
        ...     }),
        ... })
        >>> model = nn.ModuleDict({
        ...     "embedding": nn.ModuleDict({"word_embeddings": nn.Embedding(8, 4)}),
        ...     "decoder": nn.ModuleDict(
        ...         {"layers": nn.ModuleList([layer]), "final_layernorm": nn.RMSNorm(4)}
        ...     ),
        ... })
        >>> config = {
        ...     "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 4, "num_attention_heads": 1,
        ...     "intermediate_size": 8, "vocab_size": 6, "tie_word_embeddings": True,
        ... }
        >>> saved = megatron.save_hf(model, "model", like=config, layers=[[0]])
        >>> saved.keys[:2]
        ('model.embed_tokens.weight', 'model.layers.0.input_layernorm.weight')
        >>> hf.Folder("model").tensors["model.embed_tokens.weight"].shape
        (6, 4)
    """
    with Call(SAVE, "collect", groups_of()) as call:
        target = target_of(call, folder, like, how)
        config: dict[str, Any] = {}
        if target.companions:
            config = json.loads(target.companions[CONFIG])
        config = call.broadcast_object("reading the configuration", config)
        agreed = agree_on_save(
            call,
            Attempt(GivenModules(models, parallel, layers, compare)),
            config,
            Attempt(target.how),
            target,
        )
        assert agreed.target is not None, "it was handed in"
        return export(call, agreed.agreement, agreed.share, agreed.target)


def gather_hf(
    models: Models,
    *,
    config: Union[Mapping[str, object], Configuration],
    parallel: Optional[Parallel] = None,
    layers: Optional[Layers] = None,
    dtype: Optional[torch.dtype] = None,
    compare: bool = True,
) -> dict[str, torch.Tensor]:
    """Return the full model as HF tensors on the first rank's host; an empty dict on every other rank.

    Collective over the default process group; without a group, for this process alone.

    Args:
        models: this rank's chunk, or its chunks in the order of the virtual pipeline; as of `load_hf`.
        config: the HF configuration of the model: transformers' object, or a mapping.
        parallel: this rank's place in its TP group; None asks megatron-core.
        layers: for each chunk the numbers of its layers, from 0, where the modules do not carry them.
        dtype: the dtype that floating-point parameters are cast to; None keeps theirs.
        compare: as of `load_hf`.

    Returns:
        HF key -> full tensor on the CPU.

    Raises:
        RuntimeError: as `save_hf` does, or the first rank has no room; on every rank.
        TransferError: a rank is gone, or the group's timeout is over.

    Example:
        The module stands in for megatron-core's GPTModel, with a single layer.

        >>> import torch
        >>> from torch import nn
        >>> from torch_dcp_backport import megatron
        >>> layer = nn.ModuleDict({
        ...     "input_layernorm": nn.RMSNorm(4),
        ...     "self_attention": nn.ModuleDict({
        ...         "linear_qkv": nn.Linear(4, 12, bias=False), "linear_proj": nn.Linear(4, 4, bias=False),
        ...     }),
        ...     "pre_mlp_layernorm": nn.RMSNorm(4),
        ...     "mlp": nn.ModuleDict({
        ...         "linear_fc1": nn.Linear(4, 16, bias=False), "linear_fc2": nn.Linear(8, 4, bias=False),
        ...     }),
        ... })
        >>> model = nn.ModuleDict({
        ...     "embedding": nn.ModuleDict({"word_embeddings": nn.Embedding(8, 4)}),
        ...     "decoder": nn.ModuleDict(
        ...         {"layers": nn.ModuleList([layer]), "final_layernorm": nn.RMSNorm(4)}
        ...     ),
        ... })
        >>> config = {
        ...     "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 4, "num_attention_heads": 1,
        ...     "intermediate_size": 8, "vocab_size": 6, "tie_word_embeddings": True,
        ... }
        >>> tensors = megatron.gather_hf(model, config=config, layers=[[0]])
        >>> tensors["model.layers.0.mlp.gate_proj.weight"].shape
        torch.Size([8, 4])
    """
    return gather(lambda: (as_config(config), GivenModules(models, parallel, layers, compare)), dtype)


def gather(
    ask: Callable[[], tuple[dict[str, Any], GivenModules]], dtype: Optional[torch.dtype]
) -> dict[str, torch.Tensor]:
    """Gather as `gather_hf` does; `ask` makes this rank's arguments, and all ranks raise its failure."""
    with Call(SAVE, "collect", groups_of()) as call:
        asked = call.attempt(ask)
        options = call.attempt(lambda: checked(Export(dtype)))
        config, given = (call.attempt(operator.itemgetter(place), asked) for place in (0, 1))
        agreed = agree_on_save(call, given, config, options)
        tensors = collect(call, agreed.agreement, agreed.share)
        shapes = agreed.spreading.shape.folded(tensors)
        return {key: value.view(shapes.get(key, value.shape)) for key, value in tensors.items()}
