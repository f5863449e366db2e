"""megatron-core's GPTModel on the CPU: it computes what transformers does, and is saved as it was loaded.

Its constructors ask for CUDA. The stand-ins below are all that a CPU needs; no other test has them.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from decoders import Decoder, read_folder
from pool import Pool

pytest.importorskip("megatron.core")
transformers = pytest.importorskip("transformers")

CASES = {
    "qwen2": Decoder("qwen2", vocab=48),
    "qwen3": Decoder("qwen3", head_dim=6, vocab=48),
    "llama, tied": Decoder("llama", heads=8, kv_heads=4, head_dim=2, vocab=48, tied=True),
}
STATE: dict[str, Any] = {}


@pytest.fixture(scope="module")
def core_ranks():
    pool = Pool(4, "torch_dcp_backport.megatron", timeout=60.0, limit=170.0)
    yield pool.run
    pool.close()


def stand_in() -> None:
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment, method-assign]
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()


def initialise(tp: int, pp: int, vpp: int = 1) -> Any:
    stand_in()
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp, vpp if vpp > 1 else None)
    return parallel_state


def gpt(decoder: Decoder, tp: int, pp: int, vpp: int = 1) -> list[torch.nn.Module]:
    """This rank's chunks, in the vocabulary that Megatron pads for itself."""
    state = initialise(tp, pp, vpp)
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

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
        add_qkv_bias=decoder.model_type == "qwen2",
        qk_layernorm=decoder.model_type == "qwen3",
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        pipeline_dtype=torch.float32,
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=decoder.model_type == "qwen3")
    chunks = []
    for chunk in range(vpp):
        if vpp > 1:
            state.set_virtual_pipeline_model_parallel_rank(chunk)
        model = GPTModel(
            config,
            spec,
            vocab_size=-(-decoder.vocab // (16 * tp)) * 16 * tp,
            max_sequence_length=32,
            pre_process=state.is_pipeline_first_stage(),
            post_process=state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=decoder.tied,
            position_embedding_type="rope",
            rotary_base=10000,
            parallel_output=False,
        )
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(torch.nan)
        chunks.append(model.eval())
    return chunks


def logits(api: Any, folder: str, decoder: Decoder, tp: int) -> torch.Tensor:
    (model,) = gpt(decoder, tp, 1)
    report = api.load_hf(model, folder)
    assert not report.kept
    ids = torch.arange(8).view(1, 8)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1)
    with torch.no_grad():
        found: torch.Tensor = model(ids, ids.clone(), mask)
    return found[..., : decoder.vocab].clone()


def round_trip(api: Any, folder: str, decoder: Decoder, vpp: int, to: str) -> list[int]:
    models = gpt(decoder, 2, 2, vpp)
    report = api.load_hf(models, folder)
    assert not any(param.isnan().any() for model in models for param in model.parameters())
    api.save_hf(models, to, like=folder)
    return list(report.padded.values())


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Any) -> tuple[str, Decoder, Any]:
    decoder = CASES[request.param]
    config = {**decoder.config, "torch_dtype": "float32", "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
    with torch.no_grad():
        for param in model.parameters():
            # Norms of one and biases of zero would hide that they are elsewhere.
            param.add_(torch.randn_like(param) * 0.2)
    model.save_pretrained(tmp_path / "hf")
    return str(tmp_path / "hf"), decoder, model


@pytest.mark.parametrize("tp", [2, 4])
def test_the_logits_are_those_of_transformers(core_ranks, case, tp):
    folder, decoder, model = case
    if decoder.kv_heads < tp:
        pytest.skip("megatron-core before 0.16 has no KV heads fewer than TP")
    with torch.no_grad():
        wanted = model(torch.arange(8).view(1, 8)).logits
    for got in core_ranks(logits, folder, decoder, tp):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("vpp", [1, 2])
def test_a_model_of_two_stages_is_saved_as_it_was_loaded(core_ranks, case, vpp, tmp_path):
    folder, decoder, _ = case
    core_ranks(round_trip, folder, decoder, vpp, str(tmp_path / "saved"))
    got, wanted = read_folder(tmp_path / "saved"), read_folder(tmp_path / "hf")
    assert set(got) == set(wanted)
    assert all(torch.equal(got[key], wanted[key]) for key in wanted)
