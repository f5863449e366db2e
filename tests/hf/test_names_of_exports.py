"""An export has the tensors of the class in its config.json, or is refused before a byte is written."""

from __future__ import annotations

import json
import logging
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import families
import pytest
import torch
from heard import heard

from torch_dcp_backport import hf
from torch_dcp_backport.hf._src import classes
from torch_dcp_backport.transfer._src import once
from torch_dcp_backport.transfer._src.layout import whole


def transformers() -> Any:
    return pytest.importorskip("transformers")


@pytest.mark.parametrize("name", families.FAMILIES)
def test_every_family_opens_as_itself(tmp_path: Path, name: str) -> None:
    """Also of a configuration that names no class, as `from_config` leaves it."""
    library = transformers()
    model = families.made(name)
    assert model.config.architectures is None
    hf.save_state_dict(model.state_dict(), tmp_path / "m", like=model.config)
    kind = families.FAMILIES[name][0]
    assert json.loads((tmp_path / "m" / "config.json").read_text())["architectures"] == [kind]
    assert families.same(families.opened(tmp_path / "m", getattr(library, kind)), model)
    # As of a folder, whose config.json then goes along byte for byte.
    hf.save_state_dict(model.state_dict(), tmp_path / "n", like=tmp_path / "m")
    texts = [(tmp_path / folder / "config.json").read_bytes() for folder in "mn"]
    assert texts[0] == texts[1]


def renamed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"base_model.model.{key}": value for key, value in state.items()}


def injected(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As `model.add_adapter` of transformers names them."""
    key = "model.layers.0.self_attn.q_proj"
    changed = {name.replace(f"{key}.", f"{key}.base_layer."): value for name, value in state.items()}
    return {**changed, f"{key}.lora_A.default.weight": torch.ones(2, 32)}


def lost(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in state.items() if "layers.1.mlp.up_proj" not in key}


def headless(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in state.items() if key != "lm_head.weight"}


def longer(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**state, "model.embed_tokens.weight": torch.ones(41, 32)}


HARMS = {
    renamed: r"would draw at random what is not there: model\S+.* and \d+ more[\s\S]*names of peft",
    injected: r"not there: model.layers.0.self_attn.q_proj.weight[\s\S]*names of peft, which no class has",
    lost: r"of a Qwen2ForCausalLM would draw at random .*: model.layers.1.mlp.up_proj.weight\b",
    headless: r"would draw at random what is not there: lm_head.weight",
    longer: r"shape of a Qwen2ForCausalLM: model.embed_tokens.weight \(expected \(40, 32\), got \(41, 32\)",
}


def refused(api: Any, folder: Path, harm: str, like: Any) -> str:
    torch.manual_seed(0)
    model = families.made("a language model")
    state = {function.__name__: function for function in HARMS}[harm](model.state_dict())
    try:
        api.save_state_dict(state, folder, like=model.config if like is None else like)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("named", [True, False], ids=["the class is named", "no class is named"])
@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
def test_other_names_are_refused_on_every_rank_before_a_byte(
    ranks, tmp_path: Path, harm, named: bool
) -> None:
    transformers()
    model = families.made("a language model")
    like = {**model.config.to_dict(), "architectures": ["Qwen2ForCausalLM"]} if named else None
    texts = set(ranks(refused, tmp_path / "m", harm.__name__, like, world=2))
    assert len(texts) == 1
    text = texts.pop()
    assert re.search(HARMS[harm], text), text
    assert "nothing was changed" in text
    assert not list(tmp_path.iterdir())


def test_a_value_head_on_the_files_of_a_language_model(tmp_path: Path) -> None:
    """verl makes a critic of such a folder; config.json would name the class of the other."""
    library = transformers()
    families.made("a language model").save_pretrained(tmp_path / "base")
    model = families.made("a value for each token")
    hf.save_state_dict(model.state_dict(), tmp_path / "m", like=tmp_path / "base")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForTokenClassification"]
    opened = families.opened(tmp_path / "m", library.AutoModelForTokenClassification)
    assert opened.config.num_labels == 1
    assert families.same(opened, model)


def test_a_vocabulary_that_has_grown_is_not_that_of_the_old_folder(tmp_path: Path) -> None:
    library = transformers()
    model = families.made("a language model")
    model.save_pretrained(tmp_path / "base")
    model.resize_token_embeddings(48)
    with pytest.raises(RuntimeError, match=r"not the shape of a Qwen2ForCausalLM: model.embed_tokens.weight"):
        hf.save_state_dict(model.state_dict(), tmp_path / "m", like=tmp_path / "base")
    hf.save_state_dict(model.state_dict(), tmp_path / "m", like=model.config)
    assert families.same(families.opened(tmp_path / "m", library.AutoModelForCausalLM), model)


def test_what_a_program_adds_to_a_whole_model_is_said_and_goes_along(tmp_path: Path, caplog) -> None:
    library = transformers()
    model = families.made("a language model")
    state = {**model.state_dict(), "v_head.summary.weight": torch.ones(1, 32)}
    once.forget()
    with caplog.at_level(logging.WARNING, "torch_dcp_backport.hf"):
        hf.save_state_dict(state, tmp_path / "m", like=named(model.config))
    assert "leaves out what a Qwen2ForCausalLM does not have: v_head.summary.weight" in caplog.text
    assert "v_head.summary.weight" in hf.Folder(tmp_path / "m").tensors
    assert families.same(library.AutoModelForCausalLM.from_pretrained(tmp_path / "m"), model)


def named(config: Any, kind: str = "Qwen2ForCausalLM") -> dict[str, Any]:
    return {**config.to_dict(), "architectures": [kind]}


def class_in(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text()).get("architectures")


@pytest.mark.parametrize("change", ["more", "other names"])
def test_no_class_is_guessed_where_none_is_named(tmp_path: Path, change: str, caplog) -> None:
    """A model of a program's own class: its head is beyond a language model, or all its names are others."""
    transformers()
    model = families.made("a language model")
    state = model.state_dict()
    if change == "more":
        state["v_head.summary.weight"] = torch.ones(1, 32)
    else:
        state = {f"backbone.{key}": value for key, value in state.items()}
    once.forget()
    with caplog.at_level(logging.WARNING, "torch_dcp_backport.hf"):
        hf.save_state_dict(state, tmp_path / "m", like=model.config)
    assert class_in(tmp_path / "m") is None
    assert "no class of transformers has just these tensors: config.json names none" in caplog.text
    assert set(hf.Folder(tmp_path / "m").tensors) == set(state)


SMALL = {"vocab_size": 40, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
ENCODER = {key: families.SIZES[key] for key in families.SIZES if key != "num_key_value_heads"}


@pytest.mark.parametrize(
    ("kind", "configuration", "settings"),
    [
        ("T5Model", "T5Config", SMALL),
        ("T5EncoderModel", "T5Config", SMALL),
        ("BertForNextSentencePrediction", "BertConfig", ENCODER),
        ("RobertaForMultipleChoice", "RobertaConfig", ENCODER),
        ("ViTForImageClassification", "ViTConfig", {**families.VISION, "image_size": 16, "patch_size": 8}),
    ],
    ids=str,
)
def test_a_class_that_is_no_language_model_is_known_by_its_tensors(
    tmp_path: Path, kind: str, configuration: str, settings: Any
) -> None:
    library = transformers()
    model = getattr(library, kind)(getattr(library, configuration)(**settings))
    hf.save_state_dict(model.state_dict(), tmp_path / "m", like=model.config)
    assert class_in(tmp_path / "m") == [kind]
    assert families.same(families.opened(tmp_path / "m", getattr(library, kind)), model)


ORDERS: dict[str, Any] = {
    "sorted": lambda state: dict(sorted(state.items())),
    "the head alone": lambda state: {key: state[key] for key in state if "embed_tokens" not in key},
    "copies, sorted": lambda state: {key: value.clone() for key, value in sorted(state.items())},
}


@pytest.mark.parametrize("kind", ["Qwen2ForCausalLM", None])
@pytest.mark.parametrize("order", ORDERS)
def test_a_tied_tensor_has_the_name_that_save_pretrained_gives_it(tmp_path: Path, order: str, kind) -> None:
    """transformers 4 opens it under its other name, and cannot run it."""
    library = transformers()
    model = families.made("a tied head")
    like = model.config if kind is None else named(model.config)
    saved = hf.save_state_dict(ORDERS[order](model.state_dict()), tmp_path / "m", like=like)
    model.save_pretrained(tmp_path / "n")
    assert set(saved.keys) == set(hf.Folder(tmp_path / "m").tensors) == set(hf.Folder(tmp_path / "n").tensors)
    opened = families.opened(tmp_path / "m", library.AutoModelForCausalLM)
    assert not any(parameter.is_meta for parameter in opened.parameters())
    assert families.same(opened, model)
    opened(torch.arange(4)[None])


def test_without_the_class_a_tied_tensor_is_the_embedding(tmp_path: Path) -> None:
    weight = torch.ones(4, 2)
    state = {"lm_head.weight": weight, "model.embed_tokens.weight": weight}
    like = {"model_type": "own", "tie_word_embeddings": True}
    assert hf.save_state_dict(state, tmp_path / "m", like=like).keys == ("model.embed_tokens.weight",)


@pytest.mark.parametrize(
    "places",
    [("compression_config",), ("text_config", "quantization_config"), ("text_config", "compression_config")],
    ids=".".join,
)
def test_no_part_of_a_configuration_says_that_plain_weights_are_quantised(
    tmp_path: Path, places: tuple[str, ...], caplog
) -> None:
    library = transformers()
    model = families.made("pictures")
    config = named(model.config, "LlavaForConditionalGeneration")
    part = config
    for place in places[:-1]:
        part = part[place]
    part[places[-1]] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    once.forget()
    with caplog.at_level(logging.WARNING, "torch_dcp_backport.hf"):
        hf.save_state_dict(model.state_dict(), tmp_path / "m", like=config)
    assert f"config.json goes without the {'.'.join(places)} that it had" in caplog.text
    found = json.loads((tmp_path / "m" / "config.json").read_text())
    assert places[-1] not in found
    assert places[-1] not in found["text_config"]
    assert families.same(families.opened(tmp_path / "m", library.LlavaForConditionalGeneration), model)


def test_a_head_of_its_own_where_the_configuration_says_that_it_is_the_embedding(tmp_path: Path) -> None:
    """transformers would take the embedding for both, and say nothing."""
    library = transformers()
    model = families.made("a language model")
    like = {**model.config.to_dict(), "tie_word_embeddings": True}
    with pytest.raises(
        RuntimeError, match=r"says that they are one .*: model.embed_tokens.weight and lm_head"
    ):
        hf.save_state_dict(model.state_dict(), tmp_path / "m", like=like)
    assert not list(tmp_path.iterdir())
    # A copy of it is written once.
    state = {**model.state_dict(), "lm_head.weight": model.model.embed_tokens.weight.detach().clone()}
    hf.save_state_dict(state, tmp_path / "m", like=like)
    assert "lm_head.weight" not in hf.Folder(tmp_path / "m").tensors
    opened = families.opened(tmp_path / "m", library.AutoModelForCausalLM)
    assert torch.equal(opened.lm_head.weight, model.model.embed_tokens.weight)


def test_a_look_at_the_class_draws_no_random_number(tmp_path: Path) -> None:
    transformers()
    model = families.made("a tied head")
    torch.manual_seed(3)
    random.seed(3)
    expected = [torch.rand(1).item(), random.random()]
    torch.manual_seed(3)
    random.seed(3)
    hf.save_state_dict(model.state_dict(), tmp_path / "m", like=model.config)
    assert [torch.rand(1).item(), random.random()] == expected


OWN = {"model.embed_tokens.weight": torch.ones(4, 2), "model.layers.0.a.weight": torch.ones(2, 2)}
#: Layers for further tokens, which loaders leave out; a head of another kind.
BESIDE = {"model.layers.1.mtp.weight": torch.ones(2), "lm_head.weight": torch.ones(4, 2)}
CODE = {"model_type": "of_its_own", "architectures": ["Own"], "num_hidden_layers": 1}


def test_a_class_that_is_not_known_is_compared_with_the_models_own_files(tmp_path: Path) -> None:
    hf.save_state_dict({**OWN, **BESIDE}, tmp_path / "base", like=CODE)
    for state in ({**OWN, **BESIDE}, {**OWN, "lm_head.weight": BESIDE["lm_head.weight"]}):
        hf.save_state_dict(state, tmp_path / "m", like=tmp_path / "base", how=hf.Export(overwrite=True))
    hf.save_state_dict({**OWN, "score.weight": torch.ones(1, 2)}, tmp_path / "v", like=tmp_path / "base")
    for state, says in (
        (
            {**BESIDE, "model.embed_tokens.weight": OWN["model.embed_tokens.weight"]},
            "model.layers.0.a.weight",
        ),
        (OWN, "lm_head.weight"),
        (renamed({**OWN, **BESIDE}), "names of peft, which no class has"),
    ):
        with pytest.raises(RuntimeError, match=says):
            hf.save_state_dict(state, tmp_path / "no", like=tmp_path / "base")
    assert not (tmp_path / "no").exists()


def test_a_broken_export_in_the_place_of_the_files_proves_nothing(tmp_path: Path) -> None:
    """Its names are peft's, as an export of before has them; code of a model's own may have such names."""
    for config in (CODE, {**CODE, "auto_map": {"AutoModel": "modeling_own.Own"}}):
        folder = tmp_path / str(len(config))
        hf.save_state_dict(OWN, folder, like=CODE)
        safetensors = pytest.importorskip("safetensors.torch")
        safetensors.save_file(renamed(OWN), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        for like, target in ((folder, folder), (folder, tmp_path / "new")):
            how = hf.Export(overwrite=True)
            if "auto_map" in config:
                hf.save_state_dict(renamed(OWN), target, like=like, how=how)
                continue
            with pytest.raises(RuntimeError, match="names of peft"):
                hf.save_state_dict(renamed(OWN), target, like=like, how=how)


def test_of_a_class_that_nothing_tells_of_peft_is_refused_and_the_rest_said_once(
    tmp_path: Path, caplog
) -> None:
    once.forget()
    with caplog.at_level(logging.WARNING, "torch_dcp_backport.hf"):
        for name in "ab":
            hf.save_state_dict(OWN, tmp_path / name, like=CODE)
    texts = [record.message for record in caplog.records]
    assert [text for text in texts if "are not compared with those of a Own" in text] == texts
    assert len(texts) == 1
    with pytest.raises(RuntimeError, match="names of peft"):
        hf.save_state_dict(renamed(OWN), tmp_path / "c", like=CODE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_weights_that_are_not_quantised_are_not_said_to_be(tmp_path: Path) -> None:
    quantised = {**CODE, "quantization_config": {"quant_method": "fp8"}}
    folder = tmp_path / "base"
    hf.save_state_dict(OWN, folder, like=CODE)
    (folder / "config.json").write_text(json.dumps(quantised))
    (folder / "hf_quant_config.json").write_text("{}")
    hf.save_state_dict(OWN, tmp_path / "plain", like=folder)
    assert json.loads((tmp_path / "plain" / "config.json").read_text()) == CODE
    assert not (tmp_path / "plain" / "hf_quant_config.json").exists()
    # Bytes of another dtype stay what they are.
    packed = {**OWN, "model.layers.0.a.weight": torch.ones(2, 2, dtype=torch.uint8)}
    hf.save_state_dict(packed, tmp_path / "packed", like=folder)
    assert json.loads((tmp_path / "packed" / "config.json").read_text()) == quantised
    assert (tmp_path / "packed" / "hf_quant_config.json").exists()


def test_a_quantised_configuration_of_a_known_class(tmp_path: Path) -> None:
    library = transformers()
    model = families.made("a language model")
    like = {**model.config.to_dict(), "quantization_config": {"quant_method": "fp8"}}
    hf.save_state_dict(model.state_dict(), tmp_path / "m", like=like)
    assert families.same(families.opened(tmp_path / "m", library.AutoModelForCausalLM), model)


CORRECTION = "model.layers.1.mlp.gate.e_score_correction_bias"


def test_buffers_keep_their_values_where_weights_are_cast(tmp_path: Path) -> None:
    """16 values that bfloat16 cannot tell apart."""
    transformers()
    model = families.made("buffers", n_routed_experts=16)
    values = 8 + torch.arange(16) / 1000
    state = {**model.state_dict(), CORRECTION: values}
    hf.save_state_dict(state, tmp_path / "m", like=model.config, how=hf.Export(torch.bfloat16))
    source = hf.Folder(tmp_path / "m")
    for key in ("lm_head.weight", "model.layers.1.mlp.experts.0.up_proj.weight"):
        assert source.tensors.get(key, source.tensors["lm_head.weight"]).dtype == torch.bfloat16
    kept = source.part(CORRECTION, whole((16,)))
    assert torch.equal(kept, values)
    # The dtype of the model is that of the others.
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) in ("bfloat16", None)


def test_what_stays_in_fp32_where_no_class_tells(tmp_path: Path) -> None:
    """By the name that routers have for it, and as the model's own files have it."""
    name, other = "model.layers.0.gate.e_score_correction_bias", "model.layers.0.decay"
    state = {**OWN, name: torch.ones(2), other: torch.ones(2)}
    dtypes = {key: torch.float32 if key in (name, other) else torch.bfloat16 for key in state}
    own = {key: value.to(dtypes[key]) for key, value in state.items()}
    hf.save_state_dict(own, tmp_path / "base", like=CODE)
    for like, kept in ((tmp_path / "base", {name, other}), (CODE, {name})):
        how = hf.Export(torch.bfloat16, overwrite=True)
        hf.save_state_dict(state, tmp_path / "m", like=like, how=how)
        found = hf.Folder(tmp_path / "m").tensors
        assert {key for key in found if found[key].dtype == torch.float32} == kept


@pytest.mark.parametrize("name", ["experts", "pictures", "a tied head"])
def test_the_tensors_are_those_of_save_pretrained(tmp_path: Path, name: str) -> None:
    """A tensor for each expert, which transformers 5 packs; and the names that files of LLaVA have."""
    library = transformers()
    model = families.made(name)
    model.save_pretrained(tmp_path / "own")
    hf.save_state_dict(model.state_dict(), tmp_path / "m", like=model.config)
    own, ours = hf.Folder(tmp_path / "own"), hf.Folder(tmp_path / "m")
    assert dict(own.tensors) == dict(ours.tensors)
    for key, info in own.tensors.items():
        assert torch.equal(own.part(key, whole(info.shape)), ours.part(key, whole(info.shape))), key
    if name == "pictures" and library.__version__ < "5":
        assert "language_model.lm_head.weight" in ours.tensors
    other = families.made(name, seed=1)
    if set(own.tensors) != set(other.state_dict()) and name != "a tied head":
        with pytest.raises(RuntimeError, match=r"there is \S+: hf.opened\(folder, model\) reads files"):
            hf.load_state_dict(other.state_dict(), tmp_path / "m")
    hf.load_state_dict(other.state_dict(), hf.opened(tmp_path / "m", other))
    assert families.same(other, model)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_the_configuration_is_that_of_save_pretrained(tmp_path: Path, name: str) -> None:
    """With no default that another release takes for a setting, as a LLaVA's tied head."""
    transformers()
    model = families.made(name)
    hf.save_state_dict(model.state_dict(), tmp_path / "m", like=model.config)
    model.save_pretrained(tmp_path / "own")
    own, ours = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("own", "m"))
    assert own == ours


def test_what_a_process_has_noted_in_a_configuration_is_no_setting(tmp_path: Path) -> None:
    """transformers 4.51 notes that it chose how to attend; where config.json says so, it does not choose."""
    noted = {"_attn_implementation_autoset": True, "_name_or_path": "/here"}
    for name, like in (("a", {**CODE, **noted, "text_config": dict(noted)}), ("b", SimpleNamespace())):
        if name == "b":
            like.to_diff_dict = lambda: {**CODE, **noted, "text_config": dict(noted)}
        hf.save_state_dict({"a": torch.ones(2)}, tmp_path / name, like=like)
        assert json.loads((tmp_path / name / "config.json").read_text()) == {**CODE, "text_config": {}}
    # Older checkpoints have such a config.json.
    (tmp_path / "a" / "config.json").write_text(json.dumps({**CODE, "_attn_implementation_autoset": True}))
    hf.save_state_dict({"a": torch.ones(2)}, tmp_path / "c", like=tmp_path / "a")
    assert json.loads((tmp_path / "c" / "config.json").read_text()) == CODE


OF_5 = "under transformers 5, or export"
FREQUENCIES = {"rope_parameters": {"rope_theta": 777.0}}


def test_an_export_of_a_t5_says_which_release_opens_its_configuration(tmp_path: Path) -> None:
    """4 scales by `tie_word_embeddings`, which 5 makes true."""
    with heard("hf") as said:
        like = {**CODE, "scale_decoder_outputs": False, "tie_word_embeddings": True}
        hf.save_state_dict({"a": torch.ones(2)}, tmp_path / "5", like=like)
    assert [OF_5 in text for text in said if "scale_decoder_outputs" in text] == [True]


@pytest.mark.parametrize("config", [FREQUENCIES, {"text_config": FREQUENCIES}, {"encoder": FREQUENCIES}])
def test_an_export_says_once_which_release_opens_its_configuration(tmp_path: Path, config: Any) -> None:
    """4 reads `rope_theta`, and has a default for it; the tensors are the same."""
    both = json.loads(json.dumps(config).replace('{"rope_p', '{"rope_theta": 777.0, "rope_p'))
    with heard("hf") as said:
        hf.save_state_dict({"a": torch.ones(2)}, tmp_path / "4", like={**CODE, **both})
        assert not any(OF_5 in text for text in said)
        for place in ("5", "again"):
            hf.save_state_dict({"a": torch.ones(2)}, tmp_path / place, like={**CODE, **config})
    (text,) = [text for text in said if OF_5 in text]
    assert text.startswith("config.json is of transformers 5 (it has rope_parameters, and no rope_theta)")


def test_an_export_says_once_which_release_opens_its_names(tmp_path: Path) -> None:
    """Of pictures, where config.json is one that both releases read."""
    library = transformers()
    model = families.made("pictures")
    hf.save_state_dict(model.state_dict(), tmp_path / "m", like=model.config)
    path = tmp_path / "m" / "config.json"
    config = json.loads(path.read_text())
    config["text_config"].update(config["text_config"].pop("rope_parameters", {}))
    with heard("hf") as said:
        for place in ("n", "again"):
            hf.save_state_dict(model.state_dict(), tmp_path / place, like=config)
    # A tensor that has the name of the files that it comes from is found by what reads those.
    path.write_text(json.dumps(config))
    with heard("hf") as unsaid:
        hf.save_state_dict(model.state_dict(), tmp_path / "o", like=tmp_path / "m")
    assert not unsaid
    assert [OF_5 in text for text in said] == [True] * (int(library.__version__.partition(".")[0]) >= 5), said


def test_a_head_of_its_own_is_written_where_the_configuration_says_so(tmp_path: Path) -> None:
    """A T5 of transformers 5 is tied whatever its configuration says, and untied by `from_pretrained`."""
    library = transformers()
    sizes = {"vocab_size": 16, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    model = library.T5ForConditionalGeneration(library.T5Config(**sizes, tie_word_embeddings=False))
    like = {**sizes, "model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
    like["tie_word_embeddings"] = False
    state = {**model.state_dict(), "lm_head.weight": torch.ones(16, 8)}
    hf.save_state_dict(state, tmp_path / "m", like=like)
    opened = library.T5ForConditionalGeneration.from_pretrained(tmp_path / "m")
    assert torch.equal(opened.lm_head.weight, torch.ones(16, 8))
    assert torch.equal(opened.shared.weight, model.shared.weight)
    if model.lm_head.weight is model.shared.weight:
        with heard("hf") as said:
            hf.save_state_dict(model.state_dict(), tmp_path / "n", like=like)
        assert any("lm_head.weight is the embedding here" in text for text in said)


def test_names_that_every_release_has_are_no_reason_for_a_warning(tmp_path: Path) -> None:
    library = transformers()
    part = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**part, "vocab_size": 16, "bos_token_id": 1, "eos_token_id": 2}
    config = library.CLIPConfig(text_config=text, vision_config={**part, "image_size": 16, "patch_size": 8})
    with heard("hf") as said:
        hf.save_state_dict(library.CLIPModel(config).state_dict(), tmp_path / "m", like=config)
    assert not said


def test_a_configuration_that_no_release_reads_is_said_with_the_setting(tmp_path: Path) -> None:
    """As transformers 5 refuses that of Llama 4 of 4.51. Another release may read it, so it is no error."""
    library = transformers()
    model = families.made("a language model")
    config = {**named(model.config), "hidden_size": "of no kind"}
    with heard("hf") as said:
        hf.save_state_dict(model.state_dict(), tmp_path / "m", like=config)
    (text,) = [text for text in said if "cannot be built" in text]
    assert "\n" not in text
    if int(library.__version__.partition(".")[0]) >= 5:
        assert "Field 'hidden_size' expected int, got str (value: 'of no kind')" in text


LAYER = "model.layers.0"
#: A tensor of a model, as transformers 5 has it -> a name that the files have; None where no name is alike.
NEAR = {
    f"{LAYER}.mlp.gate.weight": f"{LAYER}.block_sparse_moe.gate.weight",
    f"{LAYER}.mlp.experts.gate_up_proj": f"{LAYER}.block_sparse_moe.experts.0.w1.weight",
    f"{LAYER}.mlp.experts.down_proj": f"{LAYER}.mlp.experts.0.down_proj.weight",
    "model.language_model.norm.weight": "language_model.model.norm.weight",
    "model.layers.1.norm.weight": None,
    "a.weight": None,
}


@pytest.mark.parametrize("key", NEAR)
def test_the_error_of_another_name_says_what_reads_it(tmp_path: Path, key: str) -> None:
    near = NEAR[key]
    others = [f"{LAYER}.norm.weight", "b.weight", "model.layers.1.up.weight", *([near] if near else [])]
    hf.save_state_dict({other: torch.ones(2) for other in others}, tmp_path, like=CODE)
    state = {name: torch.zeros(2) for name in (key, "model.layers.1.up.weight")}
    with pytest.raises(RuntimeError) as caught:
        hf.load_state_dict(state, tmp_path)
    hint = f" (there is {near}: hf.opened(folder, model) reads files as from_pretrained does)" if near else ""
    assert str(caught.value).endswith(f"not in the files: {key}{hint}")


def test_a_tensor_that_is_lost_is_not_taken_for_another(tmp_path: Path) -> None:
    """Those that the state dict has, too, are no other name."""
    names = [f"{LAYER}.attn.norm.weight", f"{LAYER}.mlp.norm.weight"]
    hf.save_state_dict({names[0]: torch.ones(2)}, tmp_path, like=CODE)
    with pytest.raises(RuntimeError) as caught:
        hf.load_state_dict({name: torch.zeros(2) for name in names}, tmp_path)
    assert str(caught.value).endswith(f"not in the files: {names[1]}")


def test_names_that_are_those_of_files_already_stay(tmp_path: Path) -> None:
    """As of files that were read, and of programs that name tensors as files have them."""
    transformers()
    model = families.made("pictures")
    hf.save_state_dict(model.state_dict(), tmp_path / "m", like=model.config)
    source = hf.Folder(tmp_path / "m")
    state = {key: source.part(key, whole(info.shape)) for key, info in source.tensors.items()}
    hf.save_state_dict(state, tmp_path / "n", like=tmp_path / "m")
    assert dict(hf.Folder(tmp_path / "n").tensors) == dict(source.tensors)


def test_a_conversion_of_save_pretrained_that_is_not_offered_is_said(
    tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a stand-in for transformers 5 that does not read the name that it writes."""
    transformers()
    once.forget()
    model = families.made("a language model")
    key = "model.layers.0.mlp.up_proj.weight"

    def revert(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert all(value.is_meta for value in state.values())
        return {name.replace("up_proj.weight", "w3.weight"): value for name, value in state.items()}

    by_4 = classes._by_4
    monkeypatch.setattr(classes, "_core_of_5", lambda: SimpleNamespace(revert_weight_conversion=revert))
    monkeypatch.setattr(classes, "_by_5", lambda model, files, held, core: by_4(model, files, held))
    hf.save_state_dict(model.state_dict(), tmp_path / "m", like=model.config)
    (said,) = [record.message for record in caplog.records if "is not offered here" in record.message]
    assert said.startswith(
        f"save_pretrained writes {key}, model.layers.1.mlp.up_proj.weight of a Qwen2ForCausalLM"
    )
    assert key in hf.Folder(tmp_path / "m").tensors


@pytest.mark.parametrize("how", ["raises", "writes more", "reads parts"])
def test_an_export_whose_names_transformers_cannot_tell_is_said(
    tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Once, with the reason; all tensors keep their names."""
    transformers()
    once.forget()
    model = families.made("a language model")
    key, more = "model.norm.weight", "model.more.weight"
    why = {
        "raises": "KeyError: 'no such operation'",
        "writes more": "from_pretrained reads other tensors than those",
        "reads parts": f"{key} is not made of whole tensors of the files",
    }[how]

    def revert(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if how == "raises":
            raise KeyError("no such operation")
        return {**state, more: state[key]}

    def by_5(model: Any, files: Any, held: Any, core: Any) -> Any:
        renamed, routes = classes._by_4(model, files, held)
        if how == "reads parts" and more in files:
            routes[key] = routes[key]._replace(steps=(object(),), shapes=(held[key],))
        return renamed, routes

    monkeypatch.setattr(classes, "_core_of_5", lambda: SimpleNamespace(revert_weight_conversion=revert))
    monkeypatch.setattr(classes, "_by_5", by_5)
    for name in "mn":
        hf.save_state_dict(model.state_dict(), tmp_path / name, like=model.config)
        assert key in hf.Folder(tmp_path / name).tensors
    start = "the tensors that save_pretrained writes of a Qwen2ForCausalLM are not known"
    (said,) = [record.message for record in caplog.records if "save_pretrained" in record.message]
    assert said.startswith(f"{start} ({why}): ")
