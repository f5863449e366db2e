"""transformers' own Qwen2: built on meta, filled from its files, cut by its plan."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import small
import torch
import torch.distributed as dist

from torch_dcp_backport import compat, engine

pytest.importorskip("transformers")
pytest.importorskip("safetensors")


def write(folder: Path, is_tied: bool = True) -> Any:
    import transformers

    config = transformers.Qwen2Config(
        vocab_size=small.VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=is_tied,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, param in model.named_parameters():
            # Else they begin as ones and zeros.
            param.add_(torch.randn_like(param), alpha=0.1 if "norm" in name or "bias" in name else 0)
    model.save_pretrained(folder)
    return model


def made(folder: Path, kind: str = "language_model", **options: Any) -> Any:
    small.cpu_fsdp.install()
    plain = {"mixed_precision": {"param_dtype": None, "reduce_dtype": None}, "use_dynamic_bsz": False}
    config = {**plain, "micro_batch_size_per_gpu": 2, **options}
    asked = {"optimizer": "SGD", "lr": 0.5, "clip_grad": 0.3}
    found = engine.EngineRegistry.new(kind, "fsdp2", {"path": str(folder)}, config, asked, device="cpu")
    found.initialize()  # type: ignore[attr-defined]
    return found


def run(api: Any, folder: Path, options: dict[str, Any]) -> Any:
    built = made(folder, **options)
    with built.eval_mode():
        logits = built.module(**small.model_inputs(small.batch(7))).logits
    return logits.detach(), small.trained(built)


def alone(model: Any) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.01)
    losses, norms = [], []
    for step in range(small.STEPS):
        optimizer.zero_grad()
        loss = small.loss_of(model, small.batch(step))
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "weights": dict(model.named_parameters())}


@pytest.mark.parametrize(
    ("is_tied", "options"),
    [(True, {}), (False, {"fsdp_size": 2}), (True, {"tp_size": 2}), (False, {"tp_size": 2})],
    ids=str,
)
def test_it_is_the_model_and_the_training_of_one_process(ranks, tmp_path: Path, is_tied, options) -> None:
    model = write(tmp_path / "m", is_tied).eval()
    with torch.no_grad():
        expected = model(**small.model_inputs(small.batch(7))).logits
    reference = alone(model.train())
    for logits, found in ranks(run, tmp_path / "m", options):
        # Rotary frequencies are in no file, and what is on meta has none.
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
        small.same(found, reference)


@pytest.mark.parametrize("kind", ["Qwen3", "Gemma3"])
def test_norms_of_heads_are_trained_by_all_heads(ranks, tmp_path: Path, kind: str) -> None:
    """With TP a rank's gradient of them is that of its own heads."""
    import transformers

    name = {"Qwen3": "Qwen3Config", "Gemma3": "Gemma3TextConfig"}[kind]
    config = getattr(transformers, name)(
        vocab_size=small.VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=4, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    reference = alone(model.train())
    for share, found in ranks(trained_in_parts, tmp_path):
        small.same(found, reference)
        assert share == 0.25


def trained_in_parts(api: Any, folder: Path) -> Any:
    built = made(folder, tp_size=2)
    cut = built.module.model.layers[0].self_attn.q_proj.weight
    return compat.local_part(cut).numel() / cut.numel(), small.trained(built)


def valued(api: Any, folder: Path, options: dict[str, Any]) -> Any:
    built = made(folder, "value_model", **options)
    data = small.own_rows(small.batch(0), built)
    data["returns"] = data["input_ids"] / small.VOCABULARY
    norms = []
    for _ in range(2):
        output = built.train_batch(data, value_loss)
        norms.append(output["metrics"]["grad_norm"])
    weights, _ = built.get_per_tensor_param(dtype=None)
    return output["model_output"]["values"].shape, norms, dict(weights), sum(output["loss"])


def value_loss(model_output: Any, data: Any, dp_group: Any) -> Any:
    apart = (model_output["values"] - data["returns"]).square() * data["loss_mask"]
    return apart.sum() / data["batch_num_tokens"] * data["dp_size"], {"apart": apart.max().item()}


def test_a_value_head_that_no_file_has_is_the_same_on_every_mesh(ranks, tmp_path: Path) -> None:
    write(tmp_path / "m")
    runs = [ranks(valued, tmp_path / "m", {"fsdp_size": size}) for size in (-1, 1)]
    for found in zip(*runs):
        (shape, norms, weights, _), (_, other_norms, other, _) = found
        assert shape[1] == small.LENGTH
        assert weights["score.weight"].abs().max() > 0
        torch.testing.assert_close(norms, other_norms, atol=1e-5, rtol=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(value, other[name], atol=1e-5, rtol=1e-5)


def write_trl(folder: Path, *names: str, also: Any = ()) -> dict[str, torch.Tensor]:
    """The files of a language model with a value head of trl's beside it, and with tensors of any name."""
    from safetensors.torch import load_file, save_file

    write(folder)
    draw = torch.Generator().manual_seed(1)
    shapes = {"weight": (1, 16), "bias": (1,)}
    head = {f"v_head.summary.{name}": torch.randn(shapes[name], generator=draw) for name in names}
    save_file(
        {**load_file(folder / "model.safetensors"), **head, **{name: torch.ones(1, 16) for name in also}},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return head


def heads_of(api: Any, folder: Path) -> Any:
    weights, _ = made(folder, "value_model").get_per_tensor_param(dtype=None)
    return {name: value for name, value in weights if name.startswith("score.")}


def fails(api: Any, folder: Path, make_model: Any) -> str:
    kind = engine.FSDPEngineWithValueHead
    with (
        mock.patch.object(kind, "make_model", staticmethod(make_model)),
        pytest.raises(RuntimeError) as caught,
    ):
        made(folder, "value_model")
    return str(caught.value)


def test_a_value_head_of_trl_is_read(ranks, tmp_path: Path) -> None:
    head = write_trl(tmp_path / "m", "weight", "bias")
    for found in ranks(heads_of, tmp_path / "m"):
        assert set(found) == {"score.weight", "score.bias"}
        for name, value in found.items():
            assert value.equal(head[name.replace("score.", "v_head.summary.")])


HEAD = ("v_head.summary.bias", "v_head.summary.weight")


@pytest.mark.parametrize(
    ("names", "also", "make_model", "says"),
    [
        (["weight"], [], engine.value_model, f"the files have {HEAD[1]}; the model needs {', '.join(HEAD)}"),
        (
            ["weight", "bias"],
            ["score.weight"],
            engine.value_model,
            f"the files have both score.weight and {', '.join(HEAD)}",
        ),
        (
            ["weight", "bias"],
            [],
            engine.language_model,
            f"the files have {', '.join(HEAD)}; the model needs none",
        ),
    ],
    ids=["half of it", "beside the model's own", "for a model without one"],
)
def test_a_value_head_of_trl_that_does_not_fit_is_an_error_on_every_rank(
    ranks, tmp_path: Path, names: list[str], also: list[str], make_model: Any, says: str
) -> None:
    write_trl(tmp_path / "m", *names, also=also)
    for found in ranks(fails, tmp_path / "m", make_model):
        assert says in found


def test_buffers_are_computed_in_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    """Not in that of config.json, in which sqrt(20) has three digits."""
    import transformers

    config = transformers.Gemma3TextConfig(
        vocab_size=29, hidden_size=20, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, torch_dtype="bfloat16",
    )  # fmt: skip
    transformers.Gemma3ForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, torch_dtype=torch.float32)
    with engine.parameters_on_meta(torch.float32):
        asked = engine.ModelConfig(str(tmp_path), {"attn_implementation": "eager", "sliding_window": 7})
        made = engine.language_model(asked, torch.float32)
    assert (made.config._attn_implementation, made.config.sliding_window) == ("eager", 7)
    found = dict(made.named_buffers())
    assert found["model.embed_tokens.embed_scale"].item() == pytest.approx(20**0.5)
    for name, buffer in expected.named_buffers():
        assert torch.equal(found[name], buffer), name


def of_another_configuration(api: Any, folder: Path, asked: dict[str, Any]) -> Any:
    """Log-probabilities of a batch; or the error, where rank 3 has another configuration."""
    small.cpu_fsdp.install()
    if asked.pop("differs", False) and dist.get_rank() == 3:
        asked["override_config"] = {"rms_norm_eps": 0.25}
    plain = {"mixed_precision": {"param_dtype": None, "reduce_dtype": None}, "use_dynamic_bsz": False}
    made = engine.FSDPEngineWithLMHead(
        {"path": str(folder), **asked},
        {**plain, "micro_batch_size_per_gpu": 3, "forward_only": True},
        {"clip_grad": 0.0},  # which nothing reads without training
        device="cpu",
    )
    try:
        made.initialize()
    except RuntimeError as error:
        return str(error)
    with made.eval_mode():
        return made.infer_batch(small.batch(0))["model_output"]["log_probs"]


@pytest.mark.parametrize(
    "way", ["overrides", "model_config", "hf_config_path", "hf_config", "hf_config and overrides"]
)
def test_the_configuration_that_is_asked_for(ranks, tmp_path: Path, way: str) -> None:
    """Of verl's names; and not its choice of flash attention, where nobody made another one."""
    import transformers

    model = write(tmp_path / "m").eval()
    config = transformers.AutoConfig.from_pretrained(tmp_path / "m")
    config.rms_norm_eps = 0.5
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", config=config).eval()
    config.save_pretrained(tmp_path / "elsewhere")
    config._attn_implementation = "flash_attention_2"
    asked: dict[str, Any] = {
        "overrides": {"override_config": {"rms_norm_eps": 0.5}},
        "model_config": {
            "override_config": {"model_config": {"rms_norm_eps": 0.5}, "moe_config": {"frozen": False}},
        },
        "hf_config_path": {"hf_config_path": str(tmp_path / "elsewhere")},
        "hf_config": {"hf_config": config},
        "hf_config and overrides": {
            "hf_config": model.config,
            "override_config": {"rms_norm_eps": 0.5, "attn_implementation": "eager"},
        },
    }[way]  # fmt: skip
    data = small.batch(0)
    with torch.no_grad():
        wanted, before = (
            engine.next_log_probs(
                part(**small.model_inputs(data)).logits, data["input_ids"], data["attention_mask"]
            )
            for part in (expected, model)
        )
    assert (wanted - before).abs().max() > 0.01
    for found in ranks(of_another_configuration, tmp_path / "m", asked):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (
            {"override_config": {"model_config": {}, "moe_config": {"frozen": True}}},
            "ranks 0-3: .*moe_config",
        ),
        ({"hf_config_path": "nowhere"}, "ranks 0-3: FileNotFoundError: nowhere has no config.json"),
        ({"differs": True}, "rank 3: not the same on every rank: ModelConfig.*0.25"),
    ],
    ids=str,
)
def test_configurations_that_cannot_be(ranks, tmp_path: Path, asked: Any, says: str) -> None:
    write(tmp_path)
    texts = ranks(of_another_configuration, tmp_path, asked)
    assert len(set(texts)) == 1
    assert re.search(says, texts[0], re.DOTALL), texts[0]


def of_another_file(api: Any, folder: Path) -> Any:
    """As where the folder of one rank is of an older revision: with the same weights."""
    return of_another_configuration(api, folder / ("a" if dist.get_rank() == 2 else "b"), {})


def test_ranks_with_other_configurations(ranks, tmp_path: Path) -> None:
    model = write(tmp_path / "a")
    model.config.rms_norm_eps = 5.0
    model.save_pretrained(tmp_path / "b")
    texts = ranks(of_another_file, tmp_path)
    assert len(set(texts)) == 1
    assert "rank 2: not the same on every rank: configuration" in texts[0]


def test_an_override_that_no_model_reads_is_said(tmp_path: Path, caplog: Any) -> None:
    write(tmp_path)
    asked = engine.ModelConfig(str(tmp_path), {"rms_norm_epz": 0.5})
    with engine.parameters_on_meta():
        engine.language_model(asked)
    assert "a Qwen2Config has no rms_norm_epz" in caplog.text


def determined(api: Any, folder: Path) -> Any:
    made(folder, full_determinism=True, seed=5)
    try:
        return torch.are_deterministic_algorithms_enabled(), torch.rand(2).tolist()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False


def test_full_determinism(ranks, tmp_path: Path) -> None:
    write(tmp_path)
    (is_on, first), *others = ranks(determined, tmp_path)
    assert is_on
    assert all(found == (is_on, first) for found in (*others, *ranks(determined, tmp_path)))


def test_layers_that_are_left_out_at_random(ranks, tmp_path: Path) -> None:
    import transformers

    config = transformers.OPTConfig(
        vocab_size=small.VOCABULARY, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, word_embed_proj_dim=16, layerdrop=0.1, dropout=0.0,
    )  # fmt: skip
    transformers.OPTForCausalLM(config).save_pretrained(tmp_path)
    texts = ranks(refused, tmp_path, {})
    assert len(set(texts)) == 1
    assert "ranks 0-3: ValueError: layerdrop=0.1" in texts[0]
    assert ranks(refused, tmp_path, {"forward_only": True}) == [""] * 4


def refused(api: Any, folder: Path, options: dict[str, Any]) -> str:
    elsewhere = options.pop("elsewhere", "")
    if dist.get_rank() == 1 and elsewhere == "files":
        folder = folder / "elsewhere"
    if dist.get_rank() == 1 and elsewhere == "rows":
        options["micro_batch_size_per_gpu"] = 3
    try:
        made(folder, **options)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"wrap_policy": {"transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]}},
            "there are .*Qwen2Attention",
        ),
        ({"elsewhere": "files"}, "rank 1: .*elsewhere"),
        (
            {"elsewhere": "rows"},
            "rank 1: not the same .*: EngineConfig .*gpu=2",
        ),
        ({"fsdp_size": 3}, "ranks 0-3: .*fsdp_size=3 does not divide 4"),
        ({"tp_size": 4}, "tp_size=4 does not divide num_key_value_heads=2"),
        ({"tp_size": 2, "fsdp_size": 1}, "2 replicas: not offered with tp_size=2"),
    ],
    ids=str,
)
def test_one_error_on_every_rank(ranks, tmp_path: Path, options: Any, says: str) -> None:
    write(tmp_path / "m")
    texts = ranks(refused, tmp_path / "m", options)
    assert len(set(texts)) == 1
    assert re.search(says, texts[0], re.DOTALL), texts[0]
