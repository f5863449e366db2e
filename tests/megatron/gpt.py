"""megatron-core's GPTModel on the CPU, for tests and the benchmark.

Its constructors ask for CUDA: the stand-ins here are all that a CPU needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from decoders import Decoder
from pool import reusing


def stand_in() -> None:
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment, method-assign]
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()


def initialise(tp: int, pp: int, vpp: int = 1, ep: int = 1, etp: int = 0) -> Any:
    """Megatron's parallel state, on the groups of earlier ones where they have the same ranks."""
    stand_in()
    from megatron.core import parallel_state

    with (
        mock.patch.object(dist, "new_group", reusing(dist.new_group)),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tp,
            pp,
            vpp if vpp > 1 else None,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp or None,
        )
    return parallel_state


#: The setting for the gate of shared experts; older releases have a parameter in their module's spec.
GATE = "moe_shared_expert_gate"


def has_setting(name: str) -> bool:
    """Return whether this megatron-core's TransformerConfig has a setting."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return name in {field.name for field in dataclasses.fields(TransformerConfig)}


def stage_of(function: Any, chunk: int, vpp: int) -> dict[str, int]:
    """Return the argument that says which chunk is made; older releases have it in their parallel state."""
    return {"vp_stage": chunk} if vpp > 1 and "vp_stage" in inspect.signature(function).parameters else {}


def sparse(decoder: Decoder) -> dict[str, Any]:
    """What a sparse model's TransformerConfig has beside the others'."""
    if not decoder.experts:
        return {}
    return {
        **({GATE: True} if decoder.shared_rows and has_setting(GATE) else {}),
        "num_moe_experts": decoder.experts,
        "moe_ffn_hidden_size": decoder.expert_rows,
        "moe_shared_expert_intermediate_size": decoder.shared_rows or None,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none",
        # For layers of one kind a number: a list asks for keys with the layer's.
        "moe_layer_freq": [int(layer not in decoder.dense) for layer in range(decoder.layers)]
        if decoder.dense
        else 1,
    }


def gpt(
    decoder: Decoder,
    tp: int,
    pp: int,
    vpp: int = 1,
    *,
    dtype: torch.dtype = torch.float32,
    ep: int = 1,
    etp: int = 0,
) -> list[torch.nn.Module]:
    """This rank's chunks, full of NaN, in the vocabulary that Megatron pads for itself.

    On the CPU there are no TP and EP together: that needs sequence parallelism, which torch's norms have not.
    """
    state = initialise(tp, pp, vpp, ep, etp)
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    has_norms = decoder.model_type.startswith("qwen3")
    config = TransformerConfig(
        num_layers=decoder.layers,
        hidden_size=decoder.hidden,
        num_attention_heads=decoder.heads,
        num_query_groups=decoder.kv_heads,
        kv_channels=decoder.head_dim,
        ffn_hidden_size=decoder.intermediate,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=decoder.model_type.startswith("qwen2"),
        qk_layernorm=has_norms,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=dtype,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        pipeline_dtype=dtype,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp or tp,
        **sparse(decoder),
    )
    chunks = []
    for chunk in range(vpp):
        if vpp > 1:
            state.set_virtual_pipeline_model_parallel_rank(chunk)
        # Of the layers of this chunk, where they differ.
        if decoder.dense:
            spec = gpt_layer_specs.get_gpt_decoder_block_spec(
                config,
                use_transformer_engine=False,
                normalization="RMSNorm",
                **stage_of(gpt_layer_specs.get_gpt_decoder_block_spec, chunk, vpp),
            )
        else:
            spec = gpt_layer_specs.get_gpt_layer_local_spec(
                normalization="RMSNorm",
                qk_layernorm=has_norms,
                num_experts=decoder.experts or None,
                moe_grouped_gemm=False,
            )
        if decoder.shared_rows and not has_setting(GATE):
            for layer in spec.layer_specs if decoder.dense else [spec]:
                mlp = layer.submodules.mlp.submodules
                if getattr(mlp, "shared_experts", None):
                    mlp.shared_experts.params = {"gate": True}
        model = GPTModel(
            config,
            spec,
            vocab_size=-(-decoder.vocab // (16 * tp)) * 16 * tp,
            max_sequence_length=32,
            pre_process=chunk == 0 and state.is_pipeline_first_stage(ignore_virtual=True),
            post_process=chunk == vpp - 1 and state.is_pipeline_last_stage(ignore_virtual=True),
            share_embeddings_and_output_weights=decoder.tied,
            position_embedding_type="rope",
            rotary_base=10000,
            parallel_output=False,
            **stage_of(GPTModel.__init__, chunk, vpp),
        ).to(dtype)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(torch.nan)
        chunks.append(model.eval())
    return chunks


@torch.no_grad()
def forward(model: torch.nn.Module, decoder: Decoder, words: int = 8) -> torch.Tensor:
    """The logits of the first words of the vocabulary, through all pipeline stages; on the last one alone."""
    from megatron.core import parallel_state as state

    ids = torch.arange(words).view(1, words)
    mask = torch.ones(1, 1, words, words, dtype=torch.bool).triu(1)
    rank, size = dist.get_rank(), state.get_pipeline_model_parallel_world_size()
    step = dist.get_world_size() // size
    dtype = next(model.parameters()).dtype
    if not state.is_pipeline_first_stage(ignore_virtual=True):
        hidden = torch.empty(words, 1, decoder.hidden, dtype=dtype)
        dist.recv(hidden, rank - step)
        model.set_input_tensor(hidden)  # type: ignore[operator]
    out: torch.Tensor = model(ids, ids.clone(), mask)
    if not state.is_pipeline_last_stage(ignore_virtual=True):
        dist.send(out.contiguous(), rank + step)
        return torch.empty(0)
    return out[..., : decoder.vocab].clone()
