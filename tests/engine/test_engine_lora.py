"""Adapters alone are trained, saved and exported; peft opens them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import small
import torch
import torch.distributed as dist
from heard import heard

from torch_dcp_backport import checkpoint, compat, engine
from torch_dcp_backport.dist_checkpointing import CheckpointingException

pytest.importorskip("peft")
test_qwen = pytest.importorskip("test_engine_transformers")
test_experts = pytest.importorskip("test_engine_experts")

LORA = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"]}


def without_torchao() -> None:
    """torchtune's, in the lane that has peft, is older than any that peft takes, so it raises."""
    import peft.tuners.lora.torchao

    peft.tuners.lora.torchao.is_torchao_available = lambda: False


def made(
    folder: Path,
    sizes: dict[str, Any],
    kind: type[engine.FSDPEngine] = engine.FSDPEngineWithLMHead,
    **model: Any,
) -> Any:
    small.cpu_fsdp.install()
    without_torchao()
    plain = {"mixed_precision": {"param_dtype": None, "reduce_dtype": None}, "use_dynamic_bsz": False}
    config = {**plain, "micro_batch_size_per_gpu": 2, **sizes}
    asked = {"optimizer": "SGD", "lr": 0.5, "weight_decay": 0.0, "clip_grad": None}
    found = kind({"path": str(folder), **LORA, **model}, config, asked, device="cpu")
    found.initialize()
    return found


def run(api: Any, folder: Path, out: Path, sizes: dict[str, int]) -> Any:
    built = made(folder, sizes)
    begun, _ = built.get_per_tensor_param(base_sync_done=True, dtype=None)
    first = {name: value.clone() for name, value in begun}
    found = small.trained(built)
    adapters, config = built.get_per_tensor_param(base_sync_done=True, dtype=None)
    found["adapters"], found["config"] = dict(adapters), config
    with built.eval_mode(), torch.no_grad():
        inputs = small.model_inputs(small.batch(7))
        found["logits"] = built.module(**inputs).logits
        with built.disable_adapter():
            found["plain"] = built.module(**inputs).logits
    built.save_adapter(out)
    built.save_checkpoint(out.parent / "global_step_5", global_step=5)
    again = made(folder, {})
    again.load_checkpoint(out.parent / "global_step_5")
    found["again"] = dict(again.get_per_tensor_param(base_sync_done=True, dtype=None)[0])
    # One half of the ranks has what the other has not: FSDP2 alone, and TP with it, leave a rank a fourth.
    params = dict(built.module.named_parameters())
    found["parts"] = {
        name: compat.local_part(param).numel() * 4 / param.numel()
        for name, param in params.items()
        if name.endswith(("q_proj.base_layer.weight", "o_proj.lora_A.default.weight"))
    }
    found["trained"] = [name for name, param in params.items() if param.requires_grad]
    return first, found


def changes(api: Any, folder: Path) -> list[str]:
    built, texts = made(folder, {}), []
    for export in ("prime_delta_snapshots", "get_per_tensor_param_shard", "get_per_tensor_param_delta_shard"):
        with pytest.raises(ValueError, match="changes of a model with adapters are not offered") as caught:
            getattr(built, export)()
        texts.append(str(caught.value))
    return texts


def test_changes_of_adapters_are_refused(ranks, tmp_path: Path) -> None:
    """They would be those of weights that are not trained."""
    test_qwen.write(tmp_path)
    (text,) = {text for texts in ranks(changes, tmp_path, world=2) for text in texts}
    assert "get_per_tensor_param(base_sync_done=True)" in text


@pytest.mark.parametrize("sizes", [{}, {"fsdp_size": 2}, {"tp_size": 2}], ids=str)
def test_adapters_train_alone_and_peft_opens_them(ranks, tmp_path: Path, sizes: dict[str, int]) -> None:
    import peft
    import transformers

    without_torchao()
    model = test_qwen.write(tmp_path / "m")
    results = ranks(run, tmp_path / "m", tmp_path / "adapter", sizes)
    first = results[0][0]
    files = sorted(path.name for path in (tmp_path / "adapter").iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    opened = peft.PeftModel.from_pretrained(opened, tmp_path / "adapter")
    inputs = small.model_inputs(small.batch(7))
    with torch.no_grad():
        expected, plain = opened(**inputs).logits, model(**inputs).logits
    # The same training in one process, from the same first values.
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=LORA["target_modules"])
    alone = peft.get_peft_model(model, config)
    assert not peft.set_peft_model_state_dict(alone, first).unexpected_keys
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
    losses = []
    for step in range(small.STEPS):
        optimizer.zero_grad()
        loss = small.loss_of(alone, small.batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    trained = peft.get_peft_model_state_dict(alone)
    for begun, found in results:
        assert sorted(begun) == sorted(trained)
        assert found["trained"]
        assert all(".lora_" in name for name in found["trained"])
        assert set(found["parts"].values()) == {2.0 if "fsdp_size" in sizes else 1.0}
        assert all(torch.equal(value, first[name]) for name, value in begun.items())
        assert len({value.abs().sum().item() for name, value in begun.items() if "lora_A" in name}) == 4
        torch.testing.assert_close(found["losses"], losses, atol=1e-5, rtol=1e-5)
        for name, value in trained.items():
            torch.testing.assert_close(found["adapters"][name], value, atol=1e-5, rtol=1e-5)
            assert torch.equal(found["adapters"][name], found["again"][name])
        torch.testing.assert_close(found["logits"], expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found["plain"], plain, atol=1e-5, rtol=1e-5)
        assert (found["config"]["r"], found["config"]["lora_alpha"]) == (4, 8)
        # The weights below are as in the files, under vLLM's names.
        state = {below(name): value for name, value in transformers_state(tmp_path / "m").items()}
        assert sorted(found["weights"]) == sorted(state)
        assert all(torch.equal(found["weights"][name], value) for name, value in state.items())


def offloading(api: Any, folder: Path, model: dict[str, Any]) -> Any:
    found = []
    for kind in (small.Offloading, engine.FSDPEngineWithLMHead):
        built = made(folder, {}, kind, **model)
        trained = small.trained(built, range(2))
        adapters, _ = built.get_per_tensor_param(base_sync_done=True, dtype=None)
        values = {name: value.tolist() for name, value in adapters}
        found.append((trained["losses"], trained["norms"], values))
        assert (getattr(built, "copied", 0) > 0) == (kind is small.Offloading)
    return found


@pytest.mark.parametrize("model", [{}, {"enable_gradient_checkpointing": True}], ids=str)
def test_activations_on_the_host_change_no_bit(ranks, tmp_path: Path, model: dict[str, Any]) -> None:
    test_qwen.write(tmp_path)
    for offloaded, plain in ranks(offloading, tmp_path, model):
        assert offloaded == plain


def below(name: str) -> str:
    """A name in the files as vLLM has it, which wraps these layers, whichever have adapters."""
    path, _, leaf = name.rpartition(".")
    return f"{path}.base_layer.{leaf}" if path.endswith("_proj") else name


def merging(api: Any, folder: Path, out: Path, sizes: dict[str, int]) -> Any:
    """A rollout's weights of a trained adapter, merged; the model stays. Then the adapter from its files."""
    built = made(folder, sizes, lora={"merge": True})
    small.trained(built)
    built.save_adapter(out)
    before = {name: value.clone() for name, value in tensors_of(built).items()}
    tensors, config = built.get_per_tensor_param(base_sync_done=True, dtype=None)
    found = dict(tensors)
    short = {name: value.dtype for name, value in built.get_per_tensor_param()[0]}
    to_one = len(list(built.get_per_tensor_param(to=1)[0]))
    assert all(torch.equal(value, before[name]) for name, value in tensors_of(built).items())
    with heard("engine") as said:
        opened = made(folder, {}, lora_rank=0, lora_adapter_path=str(out), target_modules=["k_proj"])
    first = ["target_modules=['k_proj'] has no effect"] if dist.get_rank() == 0 else []
    assert [text.partition(":")[0] for text in said] == first
    return (
        found,
        config,
        set(short.values()),
        to_one,
        adapters_of(opened),
        opened.module.peft_config["default"].r,
    )


def tensors_of(built: Any) -> dict[str, torch.Tensor]:
    return {name: compat.local_part(value) for name, value in built.module.named_parameters()}


@pytest.mark.parametrize("sizes", [{}, {"tp_size": 2}], ids=str)
def test_a_rollout_gets_merged_weights_and_files_are_gone_on_with(
    ranks, tmp_path: Path, sizes: dict[str, int]
) -> None:
    import peft
    import transformers
    from safetensors.torch import load_file

    without_torchao()
    test_qwen.write(tmp_path / "m")
    results = ranks(merging, tmp_path / "m", tmp_path / "out", sizes)
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    expected = peft.PeftModel.from_pretrained(opened, tmp_path / "out").merge_and_unload().state_dict()
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    for rank, (found, config, dtypes, to_one, again, size) in enumerate(results):
        assert config is None
        assert sorted(found) == sorted(expected)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-7, rtol=1e-6)
        assert dtypes == {torch.bfloat16}
        assert to_one == (len(expected) if rank == 1 else 0)
        assert size == 4
        assert sorted(again) == sorted(saved)
        assert all(torch.equal(again[name], value) for name, value in saved.items())


def refused(api: Any, folder: Path, out: Path, what: str) -> str:
    if what == "other values" and dist.get_rank() == 1:
        out = out.with_name("other")
    if what == "gone" and dist.get_rank() == 1:
        out = out.with_name("nowhere")
    asked: dict[str, Any] = {"lora_rank": 0, "lora_adapter_path": str(out)}
    asked.update({"lora_rank": 8} if what == "rank" else {})
    if what == "an embedding" and dist.get_rank() == 1:
        asked = {"target_modules": ["q_proj", "embed_tokens"]}
    asked.update(
        {"lora_adapter_path": None, "lora_rank": 4} if what == "one rank" and dist.get_rank() else {}
    )
    try:
        made(folder, {}, **asked)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("gone", "has no adapter_config.json"),
        ("other values", "not the same on every rank: lora_adapter_path"),
        ("one rank", "not the same on every rank"),
        ("rank", "lora_rank=8, and the adapter in "),
        ("dora", "use_dora=True: such an adapter is not merged"),
        ("bias", "lora_bias=True is not offered: adapters alone are trained"),
        ("an embedding", "model.embed_tokens is an embedding, and adapters of embeddings are not offered"),
        ("saved for an embedding", "model.embed_tokens is an embedding, and adapters of embeddings are not"),
        ("half", "missing in the adapter: base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"),
    ],
)
def test_an_adapter_that_is_not_the_same_or_not_whole_is_one_error(
    ranks, tmp_path: Path, what: str, says: str
) -> None:
    import peft
    import transformers
    from safetensors.torch import load_file, save_file

    without_torchao()
    test_qwen.write(tmp_path / "m")
    for name in ("out", "other"):
        opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
        targets = ["q_proj", *(["embed_tokens"] if what == "saved for an embedding" else [])]
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, use_dora=what == "dora")
        config.lora_bias = what == "bias"
        peft.get_peft_model(opened, config).save_pretrained(tmp_path / name)
    path = tmp_path / "out" / "adapter_model.safetensors"
    if what == "half":
        save_file({name: value for name, value in load_file(path).items() if "layers.1" in name}, path)
    (text,) = set(ranks(refused, tmp_path / "m", tmp_path / "out", what))
    assert says in text


def in_two_dtypes(api: Any, folder: Path, sizes: dict[str, int]) -> Any:
    built = made(folder, {"model_dtype": "bf16", **sizes})
    dtypes = {name: param.dtype for name, param in built.module.named_parameters()}
    begun = {name: value.clone() for name, value in adapters_of(built).items()}
    found = small.trained(built)
    kept = {value.dtype for _, value in built.get_per_tensor_param(base_sync_done=True)[0]}
    return dtypes, begun, found["losses"], adapters_of(built), kept


@pytest.mark.parametrize("sizes", [{}, {"tp_size": 2}], ids=str)
def test_adapters_are_float32_over_half_precision_as_pefts(
    ranks, tmp_path: Path, sizes: dict[str, int]
) -> None:
    import peft
    import transformers

    without_torchao()
    test_qwen.write(tmp_path / "m")
    results = ranks(in_two_dtypes, tmp_path / "m", sizes)
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.bfloat16)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=LORA["target_modules"])
    alone = peft.get_peft_model(opened, config)
    assert not peft.set_peft_model_state_dict(alone, results[0][1]).unexpected_keys
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
    for step in range(small.STEPS):
        optimizer.zero_grad()
        small.loss_of(alone, small.batch(step)).backward()
        optimizer.step()
    expected = {name: param.dtype for name, param in alone.named_parameters()}
    trained = peft.get_peft_model_state_dict(alone)
    for dtypes, begun, _, adapters, kept in results:
        assert dtypes == expected
        assert kept == {torch.float32}
        # Half precision gives their gradients some three digits.
        wrong = torch.cat([(adapters[name] - value).flatten() for name, value in trained.items()]).norm()
        learnt = torch.cat([(value - begun[name]).flatten() for name, value in trained.items()]).norm()
        assert wrong < 0.05 * learnt


def test_another_factor_at_a_resume_is_refused(ranks, tmp_path: Path) -> None:
    test_qwen.write(tmp_path / "m")
    (text,) = set(ranks(resumed_with_another_factor, tmp_path / "m", tmp_path / "global_step_1"))
    assert "the adapter default was saved with lora_alpha=8, and has 16 now" in text


def resumed_with_another_factor(api: Any, folder: Path, step: Path) -> str:
    made(folder, {}).save_checkpoint(step, global_step=1)
    other = made(folder, {}, lora_alpha=16)
    before = {name: value.clone() for name, value in tensors_of(other).items()}
    with pytest.raises(CheckpointingException) as caught:
        other.load_checkpoint(step)
    assert all(torch.equal(value, before[name]) for name, value in tensors_of(other).items())
    return str(caught.value)


def valued(api: Any, folder: Path) -> Any:
    small.cpu_fsdp.install()
    without_torchao()
    plain = {"mixed_precision": {"param_dtype": None, "reduce_dtype": None}, "use_dynamic_bsz": False}
    built = engine.FSDPEngineWithValueHead(
        {"path": str(folder), "lora_rank": 2}, {**plain, "micro_batch_size_per_gpu": 2}, device="cpu"
    )
    built.initialize()
    data = small.own_rows(small.batch(0), built)
    data["returns"] = data["input_ids"] / small.VOCABULARY
    norm = built.train_batch(data, test_qwen.value_loss)["metrics"]["grad_norm"]
    base = dict(built.get_per_tensor_param(dtype=None)[0])
    trained = sum(param.requires_grad for param in built.module.parameters())
    return norm, sorted(base), trained, len(list(built.get_per_tensor_param(base_sync_done=True)[0]))


def test_a_value_model_has_adapters_too(ranks, tmp_path: Path) -> None:
    """Its head has no file, and an adapter of its own."""
    test_qwen.write(tmp_path / "m")
    names = {*transformers_state(tmp_path / "m"), "score.weight", "score.bias"} - {"lm_head.weight"}
    for norm, base, trained, adapters in ranks(valued, tmp_path / "m"):
        assert norm > 0
        adapted = {name.replace("score.", "score.base_layer.") for name in names}
        assert base == sorted(map(below, adapted))
        assert trained == adapters == 2 * (2 * 7 + 1)


EXPERTS = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["gate_proj", "down_proj"]}


def of_experts(api: Any, folder: Path) -> Any:
    small.cpu_fsdp.install()
    without_torchao()
    plain = {"mixed_precision": {"param_dtype": None, "reduce_dtype": None}, "use_dynamic_bsz": False}
    asked = {"optimizer": "SGD", "lr": 0.5, "weight_decay": 0.1, "clip_grad": None}
    built = engine.FSDPEngineWithLMHead(
        {"path": str(folder), **EXPERTS}, {**plain, "micro_batch_size_per_gpu": 2}, asked, device="cpu"
    )
    built.initialize()
    begun = {name: v.clone() for name, v in adapters_of(built).items()}
    found = small.trained(built, drawn=small.sparse_batch)
    return begun, found, adapters_of(built)


def adapters_of(built: Any) -> dict[str, torch.Tensor]:
    return dict(built.get_per_tensor_param(base_sync_done=True, dtype=None)[0])


def test_adapters_of_experts_that_other_ranks_do_not_reach(ranks, tmp_path: Path) -> None:
    import peft
    import transformers

    without_torchao()
    test_experts.write(tmp_path, "qwen2_moe")
    results = ranks(of_experts, tmp_path)
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=EXPERTS["target_modules"])
    alone = peft.get_peft_model(opened, config)
    assert not peft.set_peft_model_state_dict(alone, results[0][0]).unexpected_keys
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.5, weight_decay=0.1)
    norms = []
    for step in range(small.STEPS):
        optimizer.zero_grad()
        small.loss_of(alone, small.sparse_batch(step)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(alone.parameters(), 1e9)))
        optimizer.step()
    trained = peft.get_peft_model_state_dict(alone)
    for _, found, adapters in results:
        assert found["norms"] == pytest.approx(norms, rel=1e-5)
        for name, value in trained.items():
            torch.testing.assert_close(adapters[name], value, atol=1e-5, rtol=1e-5)


def transformers_state(folder: Path) -> dict[str, torch.Tensor]:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()


def lora_only(folder: Path, sizes: dict[str, Any], config: Any, **model: Any) -> Any:
    small.cpu_fsdp.install()
    without_torchao()
    plain = {"mixed_precision": {"param_dtype": None, "reduce_dtype": None}, "use_dynamic_bsz": False}
    asked = {"optimizer": "AdamW", "lr": 0.01, "weight_decay": 0.1}
    found = engine.FSDPEngineWithLMHead(
        {"path": str(folder), **LORA, **model},
        {**plain, "micro_batch_size_per_gpu": 2, **sizes},
        asked,
        config,
        device="cpu",
    )
    found.initialize()
    return found


def adapters_there_and_back(api: Any, folder: Path, out: Path, sizes: dict[str, int]) -> Any:
    """A step after a load into a new engine, on another mesh, beside the same step without a load."""
    built = lora_only(folder, sizes, {"save_lora_only": True})
    small.trained(built, range(2))
    built.save_checkpoint(out, global_step=2)
    last = small.trained(built, range(2, 4))
    results = []
    # A checkpoint says itself what it has.
    for config in ({"save_lora_only": True}, None):
        again = lora_only(folder, {}, config)
        again.load_checkpoint(out)
        results.append(small.trained(again, range(2, 4)))
    return last, results


@pytest.mark.parametrize("sizes", [{}, {"fsdp_size": 2}, {"tp_size": 2}], ids=str)
def test_adapters_alone_are_saved_and_resumed(ranks, tmp_path: Path, sizes: dict[str, int]) -> None:
    test_qwen.write(tmp_path / "m")
    out = tmp_path / "global_step_2"
    for last, results in ranks(adapters_there_and_back, tmp_path / "m", out, sizes):
        for again in results:
            torch.testing.assert_close(again["losses"], last["losses"], atol=1e-6, rtol=1e-6)
            for name, value in last["weights"].items():
                torch.testing.assert_close(again["weights"][name], value, atol=1e-6, rtol=1e-6)
    from torch.distributed.checkpoint import FileSystemReader

    (folder,) = {path.parent for path in out.rglob(".metadata")}
    keys = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = [key for key in keys if key.startswith(("model.", "optimizer.state."))]
    assert tensors
    assert all(".lora_" in key for key in tensors)
    with pytest.raises(
        CheckpointingException, match=r"adapters alone \(save_lora_only\), and no weights below"
    ):
        checkpoint.export_checkpoint(out, tmp_path / "exported")


def refusals(api: Any, folder: Path, other: Path, out: Path) -> Any:
    built = lora_only(folder, {}, {"save_lora_only": True})
    built.save_checkpoint(out, global_step=1)
    before = {name: value.clone() for name, value in tensors_of(built).items()}
    texts = []
    for path, model in (
        (other, {}),
        (folder, {"lora_alpha": 16}),
        (folder, {"target_modules": ["q_proj"]}),
        (folder, {"lora_rank": 0}),
    ):
        made_here = lora_only(path, {}, None, **model)
        was = {name: value.clone() for name, value in tensors_of(made_here).items()}
        with pytest.raises(CheckpointingException) as caught:
            made_here.load_checkpoint(out)
        texts.append(str(caught.value))
        assert all(value.equal(was[name]) for name, value in tensors_of(made_here).items())
    assert all(value.equal(before[name]) for name, value in tensors_of(built).items())
    with pytest.raises(ValueError, match=r"save_lora_only=True leaves out .* save_contents=\['hf_model'\]"):
        lora_only(folder, {}, {"save_lora_only": True, "save_contents": ["model", "hf_model"]})
    return texts


def test_other_weights_or_adapters_than_at_the_save_are_refused_on_every_rank(ranks, tmp_path: Path) -> None:
    test_qwen.write(tmp_path / "m")
    model = test_qwen.write(tmp_path / "other")
    with torch.no_grad():
        # The same numbers, two of them in each other's place.
        weight = model.model.layers[1].mlp.up_proj.weight
        weight[0, :2] = weight[0, :2].flip(0)
    model.save_pretrained(tmp_path / "other")
    out = tmp_path / "global_step_1"
    every = ranks(refusals, tmp_path / "m", tmp_path / "other", out)
    for base, factor, modules, none in every:
        assert "was saved over other weights: base_model.model.model.layers.1.mlp.up_proj.weight has" in base
        assert "lora_alpha=8, and has 16 now" in factor
        assert "o_proj" in modules
        assert "no weight in this model" in none
