"""Every example runs as its first lines say, on four ranks."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from programs import output_of, output_of_ranks
from warm import Interpreters

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
#: Below torchrun itself, where it and each of its ranks import torch anew.
STARTED = "fsdp2_full_state"
#: What rank 0 says at the end.
SAYS = {
    # FSDP2 trains on the CPU from torch 2.7 on.
    "engine_sft": r"not here: FSDP2 of torch 2\.[456]|AdamW +4 shards(?s:.*)text from the export, the same",
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


def test_each_is_listed() -> None:
    listed = (ROOT / "docs" / "README.md").read_text()
    assert [path.name for path in EXAMPLES if f"examples/{path.name}" not in listed] == []
