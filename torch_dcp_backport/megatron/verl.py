"""The loader and the saver of verl 0.5 to 0.7 for its Megatron Qwen2 modules: same names and arguments."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Optional

import torch

from torch_dcp_backport import hf
from torch_dcp_backport.hf import Source
from torch_dcp_backport.hf.companions import as_config
from torch_dcp_backport.megatron.agreed import Given
from torch_dcp_backport.megatron.bridge import gather, load
from torch_dcp_backport.megatron.model import PARALLEL_STATE, Layers, Models, chunks_of
from torch_dcp_backport.megatron.names import HEAD, VALUE_HEADS
from torch_dcp_backport.megatron.stages import stages


def load_state_dict_to_megatron_qwen2(
    state_dict: Optional[Mapping[str, Any]],
    wrapped_models: Models,
    config: Any,
    params_dtype: torch.dtype,
    is_value_model: bool = False,
    tie_word_embeddings: bool = False,
) -> None:
    """Fill verl's Megatron modules from an HF state dict that every rank has, or rank 0 alone. Collective.

    Args:
        state_dict: full tensors, or slices of files; empty or None on a rank that has none.
        wrapped_models: this rank's chunks.
        config: the HF configuration.
        params_dtype: not used: values are cast to the dtype of the parameter that they go to.
        is_value_model: whether the head has one row; if the dict has no such head it stays as it is.
        tie_word_embeddings: whether the head is the embedding; the last stage's copy is filled as well.

    Raises:
        RuntimeError: the dict and the model do not fit; on every rank, before anything was written.
        TransferError: a rank is gone, or the group's timeout is over.

    Example:
        The module stands in for verl's, with a single layer.

        >>> import torch
        >>> from torch import nn
        >>> from torch_dcp_backport import megatron
        >>> layer = nn.ModuleDict({
        ...     "input_layernorm": nn.RMSNorm(4),
        ...     "self_attn": nn.ModuleDict({
        ...         "qkv_proj": nn.Linear(4, 12), "o_proj": nn.Linear(4, 4, bias=False),
        ...     }),
        ...     "post_attention_layernorm": nn.RMSNorm(4),
        ...     "mlp": nn.ModuleDict({
        ...         "gate_up_proj": nn.Linear(4, 16, bias=False), "down_proj": nn.Linear(8, 4, bias=False),
        ...     }),
        ... })
        >>> model = nn.ModuleDict({"model": nn.ModuleDict({
        ...     "embed_tokens": nn.Embedding(6, 4), "layers": nn.ModuleList([layer]), "norm": nn.RMSNorm(4),
        ... })})
        >>> config = {
        ...     "model_type": "qwen2", "num_hidden_layers": 1, "hidden_size": 4, "num_attention_heads": 1,
        ...     "intermediate_size": 8, "vocab_size": 6,
        ... }
        >>> tensors = megatron.merge_megatron_ckpt_qwen2(
        ...     [model], config, torch.float32, tie_word_embeddings=True
        ... )
        >>> tensors["model.layers.0.self_attn.k_proj.bias"].fill_(2)
        tensor([2., 2., 2., 2.])
        >>> megatron.load_state_dict_to_megatron_qwen2(
        ...     tensors, [model], config, torch.float32, tie_word_embeddings=True
        ... )
        >>> layer.self_attn.qkv_proj.bias[4:8].tolist()
        [2.0, 2.0, 2.0, 2.0]
    """

    def ask() -> tuple[Source, Given]:
        if not isinstance(state_dict, (Mapping, type(None))):
            raise TypeError(f"state_dict is a {type(state_dict).__name__}")
        numbers, given = config_and_chunks(wrapped_models, config, tie_word_embeddings)
        return hf.Given(state_dict or {}, numbers, "" if state_dict else "no state dict"), given

    load(ask, is_value_model)


def merge_megatron_ckpt_qwen2(
    wrapped_models: Models,
    config: Any,
    dtype: torch.dtype,
    is_value_model: bool = False,
    tie_word_embeddings: bool = False,
) -> dict[str, torch.Tensor]:
    """Return the full model as an HF state dict on the host of rank 0; an empty dict on every other rank.

    Collective over the default process group; without a group, for this process alone.

    Args:
        wrapped_models: this rank's chunks.
        config: the HF configuration.
        dtype: the dtype of the dict's tensors.
        is_value_model: not used: a head of one row is a value head. It is under `lm_head.weight`, where
            verl's loader looks for it.
        tie_word_embeddings: whether the head is the embedding, which is in the dict once.

    Raises:
        RuntimeError: the model does not fit its configuration, or rank 0 has no room; on every rank.
        TransferError: a rank is gone, or the group's timeout is over.

    Example:
        The module stands in for verl's, with a single layer.

        >>> import torch
        >>> from torch import nn
        >>> from torch_dcp_backport import megatron
        >>> layer = nn.ModuleDict({
        ...     "input_layernorm": nn.RMSNorm(4),
        ...     "self_attn": nn.ModuleDict({
        ...         "qkv_proj": nn.Linear(4, 12), "o_proj": nn.Linear(4, 4, bias=False),
        ...     }),
        ...     "post_attention_layernorm": nn.RMSNorm(4),
        ...     "mlp": nn.ModuleDict({
        ...         "gate_up_proj": nn.Linear(4, 16, bias=False), "down_proj": nn.Linear(8, 4, bias=False),
        ...     }),
        ... })
        >>> model = nn.ModuleDict({"model": nn.ModuleDict({
        ...     "embed_tokens": nn.Embedding(6, 4), "layers": nn.ModuleList([layer]), "norm": nn.RMSNorm(4),
        ... })})
        >>> config = {
        ...     "model_type": "qwen2", "num_hidden_layers": 1, "hidden_size": 4, "num_attention_heads": 1,
        ...     "intermediate_size": 8, "vocab_size": 6,
        ... }
        >>> tensors = megatron.merge_megatron_ckpt_qwen2(
        ...     [model], config, torch.bfloat16, tie_word_embeddings=True
        ... )
        >>> tensors["model.layers.0.self_attn.q_proj.bias"].dtype
        torch.bfloat16
    """
    tensors = gather(lambda: config_and_chunks(wrapped_models, config, tie_word_embeddings), dtype)
    return {HEAD if key in VALUE_HEADS else key: value for key, value in tensors.items()}


def config_and_chunks(models: Models, config: Any, tie_word_embeddings: bool) -> tuple[dict[str, Any], Given]:
    """Return the numbers of the model, and this rank's chunks.

    Raises:
        TypeError, ValueError: an argument of another kind, or layers that cannot be dealt out.
    """
    numbers = {**as_config(config), "tie_word_embeddings": tie_word_embeddings}
    return numbers, Given(models, layers=layers_of_megatron(numbers, models))


def layers_of_megatron(config: Mapping[str, Any], models: Models) -> Optional[Layers]:
    """Return this rank's layers, as verl deals them out; None where that is not known here."""
    state = sys.modules.get(PARALLEL_STATE)
    count = config.get("num_hidden_layers")
    chunks = len(chunks_of(models))
    if not isinstance(count, int):
        return None
    if state is None or not state.model_parallel_is_initialized():
        return [list(range(count))] if chunks == 1 else None
    rank, size = state.get_pipeline_model_parallel_rank(), state.get_pipeline_model_parallel_world_size()
    return stages(count, size, chunks)[rank]
