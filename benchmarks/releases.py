#!/usr/bin/env python3
"""The table of the files that each release of transformers opens: those of `save_pretrained`, and exports.

    python3 tools/lanes.py run transformers -- python benchmarks/releases.py
    python3 tools/lanes.py run transformers -- python benchmarks/releases.py --models mixtral llava --rows

Each release, in a process of its own, writes small random models twice: with `save_pretrained`, and with
`hf.save_state_dict`. Then each release opens all of these files, with `from_pretrained` and with `hf.opened`.
"equal" stands for the values of `from_pretrained` on the files of `save_pretrained`, bit for bit, with no
tensor missing and none left out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

#: Where the lane has releases beside its own.
BESIDE = Path(sys.prefix) / "beside"
EQUAL, SAVED, EXPORT = "equal", "save_pretrained", "export"
SECOND, UNTIED = "another value under a second name of the same tensor", "with tie_word_embeddings=False"

TEXT = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
HEADS = {**TEXT, "head_dim": 8}
#: No two sizes of an expert are the same.
SPARSE = {**HEADS, "moe_intermediate_size": 12, "num_experts_per_tok": 2}
DEEP = {
    **TEXT, "moe_intermediate_size": 12, "num_experts_per_tok": 2, "n_routed_experts": 3, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
PICTURES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip
QWEN_VISION = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 4,
    "out_hidden_size": 32, "fullatt_block_indexes": [1], "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}  # fmt: skip
ROPE = {"rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [1, 1, 2]}}


def of_parts(text: str, vision: str, **more: Any) -> dict[str, Any]:
    """The settings of a model of pictures and text."""
    return {
        "text_config": {"model_type": text, **HEADS},
        "vision_config": {"model_type": vision, **PICTURES},
        **more,
    }


#: Kind -> model -> (class, class of its configuration, settings).
KINDS: dict[str, dict[str, tuple[str, str, dict[str, Any]]]] = {
    "dense models and encoders": {
        "llama": ("LlamaForCausalLM", "LlamaConfig", TEXT),
        "mistral": ("MistralForCausalLM", "MistralConfig", TEXT),
        "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", TEXT),
        "qwen2, tied": ("Qwen2ForCausalLM", "Qwen2Config", {**TEXT, "tie_word_embeddings": True}),
        "qwen2, no head": ("Qwen2Model", "Qwen2Config", TEXT),
        "qwen2, values": ("Qwen2ForTokenClassification", "Qwen2Config", {**TEXT, "num_labels": 1}),
        "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", HEADS),
        "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", HEADS),
        "gemma3 text": ("Gemma3ForCausalLM", "Gemma3TextConfig", HEADS),
        "phi3": ("Phi3ForCausalLM", "Phi3Config", TEXT),
        "glm4": ("Glm4ForCausalLM", "Glm4Config", HEADS),
        "gpt2": (
            "GPT2LMHeadModel", "GPT2Config",
            {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16},
        ),
        "bert": (
            "BertForMaskedLM", "BertConfig",
            {key: value for key, value in TEXT.items() if key != "num_key_value_heads"},
        ),
        "t5": (
            "T5ForConditionalGeneration", "T5Config",
            {"vocab_size": 40, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        ),
    },
    "sparse models": {
        "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**TEXT, "num_local_experts": 3}),
        "qwen2_moe": (
            "Qwen2MoeForCausalLM", "Qwen2MoeConfig",
            {**SPARSE, "num_experts": 3, "shared_expert_intermediate_size": 16},
        ),
        "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**SPARSE, "num_experts": 3}),
        "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", {**TEXT, "num_experts": 3, "num_experts_per_tok": 2}),
        "phimoe": ("PhimoeForCausalLM", "PhimoeConfig", {**TEXT, "num_local_experts": 3}),
        "deepseek_v2": ("DeepseekV2ForCausalLM", "DeepseekV2Config", DEEP),
        "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", DEEP),
        "glm4_moe": (
            "Glm4MoeForCausalLM", "Glm4MoeConfig",
            {**SPARSE, "n_routed_experts": 3, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        ),
        "ernie4_5_moe": (
            "Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeConfig",
            {
                **TEXT, "moe_intermediate_size": 12, "moe_num_experts": 3, "moe_k": 2,
                "moe_layer_start_index": 0,
            },
        ),
    },
    "sparse models whose files have packed experts": {
        "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {**HEADS, "num_local_experts": 3}),
        "llama4 text": (
            "Llama4ForCausalLM", "Llama4TextConfig",
            {**HEADS, "num_local_experts": 3, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 1},
        ),
    },
    "Qwen2-VL, Qwen2.5-VL": {
        "qwen2_vl": (
            "Qwen2VLForConditionalGeneration", "Qwen2VLConfig",
            {
                "text_config": {**TEXT, **ROPE},
                "vision_config": {**QWEN_VISION, "embed_dim": 32},
            },
        ),
        "qwen2_5_vl": (
            "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig",
            {"text_config": {**TEXT, **ROPE}, "vision_config": QWEN_VISION},
        ),
    },
    "Gemma 3, PaliGemma, LLaVA, Mistral 3 with pictures": {
        "gemma3": (
            "Gemma3ForConditionalGeneration", "Gemma3Config", of_parts("gemma3_text", "siglip_vision_model"),
        ),
        "paligemma": (
            "PaliGemmaForConditionalGeneration", "PaliGemmaConfig",
            of_parts("gemma", "siglip_vision_model", projection_dim=32, hidden_size=32),
        ),
        "llava": (
            "LlavaForConditionalGeneration", "LlavaConfig",
            of_parts("llama", "clip_vision_model", image_token_index=3),
        ),
        "mistral3": (
            "Mistral3ForConditionalGeneration", "Mistral3Config",
            of_parts("mistral", "pixtral", image_token_index=3),
        ),
    },
    "Qwen3-VL": {
        "qwen3_vl": (
            "Qwen3VLForConditionalGeneration", "Qwen3VLConfig",
            {"text_config": {**HEADS, **ROPE}, "vision_config": QWEN_VISION},
        ),
    },
    "Qwen3-VL-MoE": {
        "qwen3_vl_moe": (
            "Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeConfig",
            {"text_config": {**SPARSE, **ROPE, "num_experts": 3}, "vision_config": QWEN_VISION},
        ),
    },
}  # fmt: skip
MODELS = {name: row for models in KINDS.values() for name, row in models.items()}


def made(name: str) -> Any:
    """A model of this release, with values of its own in every parameter and buffer."""
    import torch
    import transformers

    kind, configuration, settings = MODELS[name]
    config = getattr(transformers, configuration)
    if "text_config" in settings and "text_config" not in config.sub_configs:
        # Qwen2-VL's of 4.51 has the text's settings at the top.
        settings = {**settings, **settings["text_config"]}
        del settings["text_config"]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config(**settings)).eval()
    kept = set(model.state_dict())
    draw = torch.Generator().manual_seed(len(name))
    values = [*model.parameters(), *(value for key, value in model.named_buffers() if key in kept)]
    with torch.no_grad():
        for value in values:
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape, generator=draw) * 0.1)
    return model


def write(folder: Path, names: list[str]) -> dict[str, str]:
    """Write models of this release: name -> "equal" where both ways write the same, or what differs."""
    import transformers

    from torch_dcp_backport import hf

    found = {}
    for name in names:
        if not hasattr(transformers, MODELS[name][0]):
            continue
        try:
            model = made(name)
            model.save_pretrained(folder / name / SAVED)
            hf.save_state_dict(model.state_dict(), folder / name / EXPORT, like=model.config)
            found[name] = compared(hf.Folder(folder / name / SAVED), hf.Folder(folder / name / EXPORT))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:90]
    return found


def compared(saved: Any, export: Any) -> str:
    """Return "equal", or how the tensors of two folders differ."""
    import torch

    from torch_dcp_backport.transfer import Box

    keys = sorted(saved.tensors.keys() ^ export.tensors.keys())
    if keys:
        return f"names differ: {keys[0]}"
    for key, info in saved.tensors.items():
        box = Box((0,) * len(info.shape), info.shape)
        if info != export.tensors[key] or not torch.equal(saved.part(key, box), export.part(key, box)):
            return f"values differ: {key}"
    return EQUAL


def open_all(folders: list[Path], names: list[str]) -> dict[str, dict[str, str]]:
    """Open the files of all releases: "release|name" -> way -> "equal", or the first words of an error."""
    import transformers

    found: dict[str, dict[str, str]] = {}
    for folder in folders:
        for name in names:
            if (folder / name).is_dir() and hasattr(transformers, MODELS[name][0]):
                found[f"{folder.name}|{name}"] = opened(folder / name, name)
    return found


def opened(folder: Path, name: str) -> dict[str, str]:
    """Return way -> result for the two folders of a model."""
    import torch
    import transformers

    kind = getattr(transformers, MODELS[name][0])
    found: dict[str, str] = {}
    want: Any = None
    for way in (SAVED, EXPORT):
        try:
            with torch.random.fork_rng():
                model, info = kind.from_pretrained(folder / way, output_loading_info=True)
        except Exception as error:
            found[way] = found[f"ours of {way}"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"[
                :90
            ]
            continue
        state = model.state_dict()
        random = [*info["missing_keys"], *info["mismatched_keys"], *info["unexpected_keys"]]
        if way == SAVED and not random:
            want = state
        found[way] = f"draws at random: {random[0]}" if random else verdict(state, want)
        found[f"ours of {way}"] = ours(kind, model.config, folder / way, want)
        if SECOND in found[f"ours of {way}"]:
            # As the error says it. `from_pretrained` of transformers 5 makes two tensors of one here.
            model.config.tie_word_embeddings = False
            found[f"ours of {way}"] = f"{ours(kind, model.config, folder / way, want)}, {UNTIED}"
    return found


def ours(kind: Any, config: Any, folder: Path, want: Any) -> str:
    """Return the result of `hf.opened`."""
    from torch_dcp_backport import hf

    model = kind(config)
    try:
        hf.load_state_dict(model.state_dict(), hf.opened(folder, model))
    except RuntimeError as error:
        return f"an error: {' '.join(str(error).split('rank 0: ')[-1].split())}"[:90]
    model.tie_weights()
    return verdict(model.state_dict(), want)


def verdict(state: dict[str, Any], want: Any) -> str:
    import torch

    if want is None:
        return "nothing to compare with"
    differ = [key for key in want if key not in state or not torch.equal(state[key], want[key])]
    return f"differs: {differ[0]}" if differ else EQUAL


# --- the processes ---


def places() -> dict[str, str]:
    """Return release -> the folder that goes first on its path; "" for the lane's own."""
    from importlib.metadata import version

    found = {folder.name: str(folder) for folder in sorted(BESIDE.iterdir())} if BESIDE.is_dir() else {}
    return {**found, version("transformers"): ""}


def within(place: str, *arguments: str) -> Any:
    """Run a part of this program with a release of transformers, and return what it says."""
    path = os.pathsep.join(filter(None, (place, os.environ.get("PYTHONPATH", ""))))
    env = {**os.environ, "PYTHONPATH": path, "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}
    env["HF_HUB_OFFLINE"] = env["TQDM_DISABLE"] = "1"
    done = subprocess.run([sys.executable, __file__, *arguments], env=env, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.decode().splitlines()[-1])


def results(folder: Path, names: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (release -> result of `write`, release -> result of `open_all`)."""
    releases = places()
    folders = {release: folder / release for release in releases}
    every = os.pathsep.join(map(str, folders.values()))
    # Two at a time: most of each is an import.
    with ThreadPoolExecutor(2) as threads:
        written = [
            threads.submit(within, place, "write", str(folders[release]), *names)
            for release, place in releases.items()
        ]
        wrote = {release: each.result() for release, each in zip(releases, written)}
        read = [threads.submit(within, place, "open", every, *names) for place in releases.values()]
        return wrote, {release: each.result() for release, each in zip(releases, read)}


def table(wrote: dict[str, Any], opens: dict[str, Any]) -> list[str]:
    """Return the lines of the table: kinds by writers and ways, a column for each release that opens."""
    releases = list(opens)
    lines = [
        "| files | of | " + " | ".join(f"in {release}" for release in releases) + " |",
        "|---" * (2 + len(releases)) + "|",
    ]
    for kind, models in KINDS.items():
        rows: dict[tuple[str, ...], list[str]] = {}
        for writer in releases:
            known = [name for name in models if name in wrote[writer]]
            if not known:
                continue
            cells = []
            for reader in releases:
                by_words = defaultdict(list)
                for name in known:
                    found = opens[reader].get(f"{writer}|{name}")
                    if found is not None:
                        by_words[words(found)].append(name)
                parts = [
                    text if len(by_words) == 1 else f"{text} ({', '.join(names)})"
                    for text, names in by_words.items()
                ]
                cells.append("; ".join(parts) or "no such class")
            rows.setdefault(tuple(cells), []).append(writer)
        lines += [
            f"| {kind} | {', '.join(writers)} | {' | '.join(cells)} |" for cells, writers in rows.items()
        ]
    return lines


def words(found: dict[str, str]) -> str:
    """Return the results of all ways as one text, shorter where they are the same."""
    return (
        found[SAVED]
        if len(set(found.values())) == 1
        else ", ".join(f"{way}: {text}" for way, text in found.items())
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), help="which; all by default"
    )
    parser.add_argument("--rows", action="store_true", help="show a line for each model, too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wrote, opens = results(Path(folder), args.models)
    for release, found in wrote.items():
        others = {name: text for name, text in found.items() if text != EQUAL}
        words_of = f"{len(found)} models, and the tensors of an export are those of save_pretrained"
        print(f"{release}: {words_of}{f'; but {others}' if others else ''}")
    if args.rows:
        for reader, rows in opens.items():
            for row, found in rows.items():
                print(f"{row} in {reader}: {words(found)}")
    print("\n".join(table(wrote, opens)))


if __name__ == "__main__":
    if sys.argv[1:2] in (["write"], ["open"]):
        # What transformers prints must not be taken for the result.
        with contextlib.redirect_stdout(io.StringIO()):
            verb, where, *chosen = sys.argv[1:]
            every = list(map(Path, where.split(os.pathsep)))
            result = write(every[0], chosen) if verb == "write" else open_all(every, chosen)
        print(json.dumps(result))
    else:
        main()
