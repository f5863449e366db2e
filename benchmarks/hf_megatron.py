#!/usr/bin/env python3
"""Hugging Face weights into megatron-core's own GPTModel and back, beside verl's functions and mbridge.

    make demo-megatron     or: python3 tools/lanes.py run megatron -- python benchmarks/hf_megatron.py

transformers makes a model of Qwen2.5-0.5B's shape (random weights, bf16, tied). Four processes (gloo, one
thread each) load it at tp 2 x pp 2, compute logits, save it, and load what was saved in other cuts; then
transformers opens that. The ways take turns in the same processes, files in the page cache: seconds of the
slowest rank, private memory (anonymous and shared) above what it was before the call. Freed buffers go back
to the system (MALLOC_MMAP_THRESHOLD_): else glibc keeps those of earlier turns, of every way.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Optional

import torch
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parent.parent
PATHS = (ROOT, ROOT / "benchmarks", ROOT / "tests", ROOT / "tests" / "megatron", ROOT / "tools")
sys.path += [str(path) for path in PATHS if str(path) not in sys.path]

import lanes  # noqa: E402
from alternatives.megatron_loaders import NEEDED  # noqa: E402
from decoders import Decoder  # noqa: E402
from hf_megatron_ranks import MIB, Job, mapped, run  # noqa: E402

from torch_dcp_backport.regression import meter  # noqa: E402

MODEL = Decoder("qwen2", 24, 896, 14, 2, 64, 4864, 151936, tied=True)
#: Qwen2.5-0.5B has 14 heads and 2 KV heads: no Megatron cuts it into 4.
WIDE = Decoder("qwen2", 4, 1024, 16, 4, 64, 2816, 32000)
TINY = Decoder("qwen2", 4, 64, 4, 2, 16, 128, 512, tied=True)


def beside() -> Optional[str]:
    """A folder with verl and mbridge, without what they depend on; None where they cannot be had."""
    name = hashlib.sha256(" ".join(NEEDED).encode()).hexdigest()[:12]
    place = lanes.cache_dir() / f"beside-{name}"
    found = sorted(lanes.cache_dir().glob("uv-*/bin/uv"))
    try:
        if not found:
            raise OSError("no uv in the lanes' cache")
        install = [str(found[-1]), "pip", "install", "--quiet", "--no-deps", "--target", str(place), *NEEDED]
        lanes.fresh(place, ["mkdir", "-p", str(place)], [install])
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"verl and mbridge cannot be had here, and are left out: {error}", file=sys.stderr)
        return None
    return str(place)


def make(folder: Path, decoder: Decoder) -> None:
    """A model of transformers' own, its files, and its logits in fp32."""
    import transformers

    config = transformers.AutoConfig.for_model(
        **{**decoder.config, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 64}
    )
    torch.manual_seed(0)
    with transformers.modeling_utils.no_init_weights():
        model: Any = transformers.AutoModelForCausalLM.from_config(
            config, torch_dtype=torch.bfloat16, attn_implementation="eager"
        ).eval()
    with torch.no_grad():
        for param in model.parameters():
            # Norms of one and biases of zero would hide that they are elsewhere.
            param.normal_(0.0 if param.dim() == 2 else 0.5, 0.02 if param.dim() == 2 else 0.1)
    model.tie_weights()
    model.save_pretrained(folder, max_shard_size="200MB")
    with torch.no_grad():
        torch.save(model.float()(torch.arange(8).view(1, 8)).logits, f"{folder}.pt")


def opened(folder: Path, like: Path) -> int:
    """How many tensors transformers has otherwise after from_pretrained of another folder."""
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, torch_dtype="auto", output_loading_info=True
    )
    assert not any(info.values()), info
    state, wanted = model.state_dict(), mapped(str(like))
    assert set(wanted) <= set(state)
    return sum(not torch.equal(state[key], value) for key, value in wanted.items())


def table(facts: dict[str, Any]) -> list[str]:
    lines = [
        "| way | seconds | MiB, rank 0 | MiB, others | bytes read / own | values |",
        "|---|---|---|---|---|---|",
    ]
    for name, rows in facts["ways"].items():
        seconds = ", ".join(f"{row[0]:.2f}" for row in rows)
        peaks = [max(row[place] for row in rows) for place in (1, 2)]
        share = statistics.median(row[3] for row in rows)
        ratio = f"{share:.2f}" if share else ""
        lines.append(f"| {name} | {seconds} | {peaks[0]:.0f} | {peaks[1]:.0f} | {ratio} | {rows[0][4]} |")
    return lines


def draw(facts: dict[str, Any], model: str, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(facts["ways"])[::-1]
    # Told apart by all eyes (Okabe and Ito).
    colours = ["#E69F00" if "_hf" in name else "#0072B2" for name in names]
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.4), sharey=True)
    runs = [[row[0] for row in facts["ways"][name]] for name in names]
    peaks = [[max(row[1:3]) for row in facts["ways"][name]] for name in names]
    for axis, found, label, form in (
        (axes[0], runs, f"seconds (median of {len(runs[0])} turns; least to most)", "%.2f"),
        (axes[1], peaks, "MiB above the model, worst rank (most of all turns; least to most)", "%.0f"),
    ):
        values = list(map(statistics.median if found is runs else max, found))
        spread = [
            [value - min(each) for value, each in zip(values, found)],
            [max(each) - value for value, each in zip(values, found)],
        ]
        bars = axis.barh(names, values, color=colours, xerr=spread, error_kw={"elinewidth": 1, "capsize": 3})
        axis.bar_label(bars, fmt=form, padding=3)
        axis.set_xlabel(label)
        axis.grid(axis="x", alpha=0.3)
        axis.margins(x=0.15)
    figure.legend(
        [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in ("#E69F00", "#0072B2")],
        ["torch_dcp_backport.megatron", "others"],
        loc="lower center",
        ncol=2,
        frameon=False,
    )
    figure.suptitle(
        f"{model} (bf16), megatron-core 0.12.3 at tp 2 x pp 2, torch {torch.__version__}, "
        f"gloo, four processes on {os.cpu_count()} cores"
    )
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--overwrite", action="store_true", help="save into the folder of the save before")
    parser.add_argument("--tiny", action="store_true", help="only try it")
    parser.add_argument("--alone", action="store_true", help="without verl and mbridge")
    parser.add_argument("--folder", help="where the files go; by default a temporary folder")
    parser.add_argument("--plot", help="where to write a picture")
    parser.add_argument("--json", help="where to write the figures")
    options = parser.parse_args()
    os.environ.update({"HF_HUB_OFFLINE": "1", "MALLOC_MMAP_THRESHOLD_": "1048576"})
    began = time.perf_counter()
    decoder = TINY if options.tiny else MODEL
    others = None if options.alone else beside()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        make(folder / "hf", decoder)
        make(folder / "wide", WIDE)
        gc.collect()
        meter.trim()
        job = Job(str(folder), decoder, WIDE, options.repeats, others, options.overwrite)
        mp.start_processes(run, args=(job,), nprocs=4, start_method="spawn")
        facts = torch.load(folder / "figures.pt", weights_only=False)
        facts["opened"] = opened(folder / "saved", folder / "hf")
    finally:
        shutil.rmtree(folder)
    print(f"torch {torch.__version__}; a rank holds {facts['own'] / MIB:.0f} MiB\n")
    print("\n".join(table(facts)))
    print("\nlogits beside transformers' (fp32, largest difference / largest logit):")
    for name, number in facts["logits"].items():
        print(f"  {name}: {number:.1e}")
    again = ", ".join(f"{name}: {count}" for name, count in facts["again"].items())
    print(f"parameters that differ when what was saved is loaded at {again}")
    print(f"tensors that differ when from_pretrained opens it: {facts['opened']}")
    if options.json:
        Path(options.json).write_text(json.dumps(facts, indent=1))
    if options.plot:
        draw(facts, "a tiny Qwen2" if options.tiny else "Qwen2.5-0.5B's shape", options.plot)
        print(f"\n{options.plot} shows it")
    print(f"{time.perf_counter() - began:.0f} s in all")
    if facts["opened"] or any(facts["again"].values()) or max(facts["logits"].values()) > 1e-4:
        sys.exit("values differ")


if __name__ == "__main__":
    main()
