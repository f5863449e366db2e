"""Every example runs as its first lines say, on four ranks."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from programs import blocks, output_of, output_of_code, output_of_ranks
from warm import Interpreters

ROOT = Path(__file__).resolve().parents[2]
ALL = sorted((ROOT / "examples").glob("*.py"))
#: It starts its ranks itself.
TOUR = ROOT / "examples/tour.py"
EXAMPLES = [path for path in ALL if path != TOUR]
#: Below torchrun itself, where it and each of its ranks import torch anew.
STARTED = "fsdp2_full_state"
#: What rank 0 says at the end.
SAYS = {
    # FSDP2 trains on the CPU from torch 2.7 on.
    "engine_sft": r"not here: FSDP2 of torch 2\.[456]|AdamW +4 shards(?s:.*)"
    r"each row's loss packed within \S+ of padded(?s:.*)text from the export, the same",
    "fsdp2_full_state": r"19 tensors loaded, trained, saved and loaded again\n.*(applied|not-needed)",
    "hsdp_full_state": "8 tensors on 2 replicas of 2 shards",
    "lora_from_meta": "4 base weights loaded, 8 adapters saved",
    "sharded_checkpoint": r"32 tensors saved by 4 ranks and loaded by 2\nsave: .*\nload: ",
    "train_resume": r"step 1 loss (?s:.*)step 40 loss ",
    "tp_fsdp2_full_state": r"16 tensors; model\[0\].up.weight is placed as \(_StridedShard",
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_as_it_says(interpreters: Interpreters, example: Path) -> None:
    (command,) = re.findall(r"^    torchrun (.*)$", example.read_text(), re.MULTILINE)
    ranks, world, path, *arguments = shlex.split(command)
    assert (ranks, path) == ("--nproc-per-node", f"examples/{example.name}")
    if example.stem == STARTED:
        output = output_of(["-m", "torch.distributed.run", "--standalone", *shlex.split(command)], ROOT)
    else:
        output = output_of_ranks(interpreters, example, ROOT, int(world), arguments)
    assert re.search(SAYS[example.stem], output), output


def test_the_tour_breaks_a_load_mends_it_and_resumes_on_other_ranks() -> None:
    (command,) = re.findall(r"^    python (.*)$", TOUR.read_text(), re.MULTILINE)
    assert command == "examples/tour.py"
    lines = output_of([command], ROOT).splitlines()
    (stock,) = (line for line in lines if line.startswith("load, stock torch: "))
    (fixed,) = (line for line in lines if line.startswith("load, with the fix: "))
    times = [float(re.findall(r"([\d.]+) times", line)[0]) for line in (stock, fixed)]
    assert "(disabled)" in stock
    assert times[1] == 1.0
    # Torch before 2.7 keeps whole tensors alive on every rank.
    assert times[0] > 3 if "(applied)" in fixed else times[0] >= 1.0
    assert any(re.match(r"resume on 2 ranks: from step [34], .* to step 8", line) for line in lines)
    assert any(re.match("open: Qwen2ForCausalLM, at most .* never killed", line) for line in lines)


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7), reason="FSDP2 trains on accelerators alone"
)
def test_the_quickstart_of_the_engine_trains_saves_and_loads(
    interpreters: Interpreters, tmp_path: Path
) -> None:
    programs = blocks(ROOT / "docs/engine.md", "python")
    (program,) = (text for text in programs if "FSDPEngineWithLMHead" in text)
    output = output_of_code(interpreters, program, tmp_path)
    assert re.fullmatch(r"\d\.\d+", output.splitlines()[-1]), output
    assert (tmp_path / "ckpt/global_step_1/manifest.json").is_file()


def test_each_is_listed() -> None:
    listed = (ROOT / "docs" / "README.md").read_text()
    assert [path.name for path in ALL if f"examples/{path.name}" not in listed] == []
