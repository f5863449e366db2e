"""The loaders and the savers of verl 0.5 to 0.7 for its Megatron models: same names and arguments."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Optional, Union

import torch

from torch_dcp_backport import hf
from torch_dcp_backport.hf import Configuration, Source, as_config
from torch_dcp_backport.megatron._src.agreed import GivenModules
from torch_dcp_backport.megatron._src.bridge import gather, load
from torch_dcp_backport.megatron._src.model import PARALLEL_STATE, Layers, Models, chunks_of
from torch_dcp_backport.megatron._src.names import HEAD, VALUE_HEADS
from torch_dcp_backport.megatron._src.stages import stages


def load_state_dict_to_megatron_qwen2(
    state_dict: Optional[Mapping[str, object]],
    wrapped_models: Models,
    config: Union[Mapping[str, object], Configuration],
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

    def ask() -> tuple[Source, GivenModules]:
        if not isinstance(state_dict, (Mapping, type(None))):
            raise TypeError(f"state_dict is a {type(state_dict).__name__}")
        numbers, given = config_and_chunks(wrapped_models, config, tie_word_embeddings)
        return hf.Given(state_dict or {}, numbers, "" if state_dict else "no state dict"), given

    load(ask, is_value_model)


def merge_megatron_ckpt_qwen2(
    wrapped_models: Models,
    config: Union[Mapping[str, object], Configuration],
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


def load_state_dict_to_megatron_gptmodel(
    state_dict: Optional[Mapping[str, object]],
    wrapped_models: Models,
    config: Union[Mapping[str, object], Configuration],
    params_dtype: torch.dtype,
    is_value_model: bool = False,
) -> None:
    """Fill megatron-core's GPTModel from an HF state dict that every rank has, or rank 0 alone. Collective.

    Args:
        state_dict: full tensors, or slices of files; empty or None on a rank that has none.
        wrapped_models: this rank's chunks, of any family that has a table.
        config: the HF configuration; it says whether the head is the embedding.
        params_dtype: not used: values are cast to the dtype of the parameter that they go to.
        is_value_model: whether the head has one row; if the dict has no such head it stays as it is.

    Raises:
        RuntimeError: the dict and the model do not fit; on every rank, before anything was written.
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
        >>> layer.layer_number = 1
        >>> model = nn.ModuleDict({
        ...     "embedding": nn.ModuleDict({"word_embeddings": nn.Embedding(6, 4)}),
        ...     "decoder": nn.ModuleDict(
        ...         {"layers": nn.ModuleList([layer]), "final_layernorm": nn.RMSNorm(4)}
        ...     ),
        ... })
        >>> config = {
        ...     "model_type": "mistral", "num_hidden_layers": 1, "hidden_size": 4, "num_attention_heads": 1,
        ...     "intermediate_size": 8, "vocab_size": 6, "tie_word_embeddings": True,
        ... }
        >>> tensors = megatron.merge_megatron_ckpt_gptmodel([model], config, torch.float32)
        >>> _ = tensors["model.layers.0.mlp.up_proj.weight"].fill_(2)
        >>> megatron.load_state_dict_to_megatron_gptmodel(tensors, [model], config, torch.float32)
        >>> layer.mlp.linear_fc1.weight[8].tolist()
        [2.0, 2.0, 2.0, 2.0]
    """

    def ask() -> tuple[Source, GivenModules]:
        if not isinstance(state_dict, (Mapping, type(None))):
            raise TypeError(f"state_dict is a {type(state_dict).__name__}")
        source = hf.Given(state_dict or {}, as_config(config), "" if state_dict else "no state dict")
        return source, GivenModules(wrapped_models)

    load(ask, is_value_model)


def merge_megatron_ckpt_gptmodel(
    wrapped_models: Models,
    config: Union[Mapping[str, object], Configuration],
    dtype: torch.dtype,
    is_value_model: bool = False,
    tie_word_embeddings: bool = False,
) -> dict[str, torch.Tensor]:
    """Return the full GPTModel as an HF state dict on the host of rank 0; an empty dict on every other rank.

    Collective over the default process group; without a group, for this process alone.

    Args:
        wrapped_models: this rank's chunks, of any family that has a table.
        config: the HF configuration.
        dtype: the dtype of the dict's tensors.
        is_value_model: not used: a head of one row is a value head. It is under `lm_head.weight`, where
            verl's loader looks for it.
        tie_word_embeddings: whether the head is the embedding, which is in the dict once. What the
            configuration says of it holds as well.

    Raises:
        RuntimeError: the model does not fit its configuration, or rank 0 has no room; on every rank.
        TransferError: a rank is gone, or the group's timeout is over.

    Example:
        As of `load_state_dict_to_megatron_gptmodel`; here is what does not fit:

        >>> import torch
        >>> from torch_dcp_backport import megatron
        >>> megatron.merge_megatron_ckpt_gptmodel([], {"model_type": "mamba"}, torch.float32)
        Traceback (most recent call last):
        ...
        RuntimeError: cannot save as Hugging Face weights: ...
          rank 0: ValueError: config.json has the model_type 'mamba'; these are known: ...
    """
    return _merged((), wrapped_models, config, dtype, tie_word_embeddings)


def merge_megatron_ckpt_gptmodel_qwen_moe(
    wrapped_models: Models,
    config: Union[Mapping[str, object], Configuration],
    dtype: torch.dtype,
    is_value_model: bool = False,
    tie_word_embeddings: bool = False,
) -> dict[str, torch.Tensor]:
    """Return a full sparse Qwen2 or Qwen3, as `merge_megatron_ckpt_gptmodel` does. verl's raises.

    Args:
        wrapped_models: this rank's chunks.
        config: the HF configuration.
        dtype: the dtype of the dict's tensors.
        is_value_model: not used, as there.
        tie_word_embeddings: as there.

    Raises:
        RuntimeError: as there, or a model of another family; on every rank.

    Example:
        >>> import torch
        >>> from torch_dcp_backport import megatron
        >>> megatron.merge_megatron_ckpt_gptmodel_qwen_moe([], {"model_type": "llama"}, torch.float32)
        Traceback (most recent call last):
        ...
        RuntimeError: cannot save as Hugging Face weights: ...
          rank 0: ValueError: the configuration has the model_type 'llama', and not qwen2_moe or qwen3_moe
    """
    return _merged(("qwen2_moe", "qwen3_moe"), wrapped_models, config, dtype, tie_word_embeddings)


def merge_megatron_ckpt_gptmodel_mixtral(
    wrapped_models: Models,
    config: Union[Mapping[str, object], Configuration],
    dtype: torch.dtype,
    is_value_model: bool = False,
    tie_word_embeddings: bool = False,
) -> dict[str, torch.Tensor]:
    """Return a full Mixtral, as `merge_megatron_ckpt_gptmodel` does. verl's raises.

    Args:
        wrapped_models: this rank's chunks.
        config: the HF configuration.
        dtype: the dtype of the dict's tensors.
        is_value_model: not used, as there.
        tie_word_embeddings: as there.

    Raises:
        RuntimeError: as there, or a model of another family; on every rank.

    Example:
        >>> import torch
        >>> from torch_dcp_backport import megatron
        >>> megatron.merge_megatron_ckpt_gptmodel_mixtral([], {"model_type": "llama"}, torch.float32)
        Traceback (most recent call last):
        ...
        RuntimeError: cannot save as Hugging Face weights: ...
          rank 0: ValueError: the configuration has the model_type 'llama', and not mixtral
    """
    return _merged(("mixtral",), wrapped_models, config, dtype, tie_word_embeddings)


def merge_megatron_ckpt_gptmodel_dpskv3(
    wrapped_models: Models,
    config: Union[Mapping[str, object], Configuration],
    dtype: torch.dtype,
    is_value_model: bool = False,
    tie_word_embeddings: bool = False,
) -> dict[str, torch.Tensor]:
    """Return a full DeepSeek-V3, as `merge_megatron_ckpt_gptmodel` does. verl's raises.

    Args:
        wrapped_models: this rank's chunks.
        config: the HF configuration.
        dtype: the dtype of the dict's tensors.
        is_value_model: not used, as there.
        tie_word_embeddings: as there.

    Raises:
        RuntimeError: as there, or a model of another family; on every rank.

    Example:
        >>> import torch
        >>> from torch_dcp_backport import megatron
        >>> megatron.merge_megatron_ckpt_gptmodel_dpskv3([], {"model_type": "llama"}, torch.float32)
        Traceback (most recent call last):
        ...
        RuntimeError: cannot save as Hugging Face weights: ...
          rank 0: ValueError: the configuration has the model_type 'llama', and not deepseek_v3
    """
    return _merged(("deepseek_v3",), wrapped_models, config, dtype, tie_word_embeddings)


def merge_megatron_ckpt_gptmodel_qwen2_5_vl(
    wrapped_models: Models,
    config: Union[Mapping[str, object], Configuration],
    dtype: torch.dtype,
    is_value_model: bool = False,
    tie_word_embeddings: bool = False,
) -> dict[str, torch.Tensor]:
    """Return the text tower of a Qwen2.5-VL, as `merge_megatron_ckpt_gptmodel` does. verl's raises.

    The names are those of the released files (`model.layers.0...`). The vision tower is not in the dict,
    which a warning says once if a chunk has one.

    Args:
        wrapped_models: this rank's chunks: the model, or its `language_model`.
        config: the HF configuration.
        dtype: the dtype of the dict's tensors.
        is_value_model: not used, as there.
        tie_word_embeddings: as there.

    Raises:
        RuntimeError: as there, or a model of another family; on every rank.

    Example:
        >>> import torch
        >>> from torch_dcp_backport import megatron
        >>> megatron.merge_megatron_ckpt_gptmodel_qwen2_5_vl([], {"model_type": "llama"}, torch.float32)
        Traceback (most recent call last):
        ...
        RuntimeError: cannot save as Hugging Face weights: ...
          rank 0: ValueError: the configuration has the model_type 'llama', and not qwen2_5_vl
    """
    return _merged(("qwen2_5_vl",), wrapped_models, config, dtype, tie_word_embeddings)


def _merged(
    kinds: tuple[str, ...], models: Models, config: Any, dtype: torch.dtype, tie_word_embeddings: bool
) -> dict[str, torch.Tensor]:
    """Gather a model; `kinds`: the values of model_type that its configuration may have, empty for any."""

    def ask() -> tuple[dict[str, Any], GivenModules]:
        numbers = as_config(config)
        kind = numbers.get("model_type")
        if kinds and kind not in kinds:
            raise ValueError(f"the configuration has the model_type {kind!r}, and not {' or '.join(kinds)}")
        return {**numbers, **({"tie_word_embeddings": True} if tie_word_embeddings else {})}, GivenModules(
            models
        )

    return {HEAD if key in VALUE_HEADS else key: value for key, value in gather(ask, dtype).items()}


def config_and_chunks(
    models: Models, config: Any, tie_word_embeddings: bool
) -> tuple[dict[str, Any], GivenModules]:
    """Return the numbers of the model, and this rank's chunks.

    Raises:
        TypeError, ValueError: an argument of another kind, or layers that cannot be dealt out.
    """
    numbers = {**as_config(config), "tie_word_embeddings": tie_word_embeddings}
    return numbers, GivenModules(models, layers=layers_of_megatron(numbers, models))


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
