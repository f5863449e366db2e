"""Programs that a test runs as a user would."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import patience
from warm import Interpreters

SECONDS = 200
#: What rank 0 of an example says at the end.
SAYS = {
    # FSDP2 trains on the CPU from torch 2.7 on.
    "engine_sft": r"not here: FSDP2 of torch 2\.[456]|AdamW +4 shards(?s:.*)"
    r"each row's loss packed within \S+ of padded(?s:.*)text from the export, the same",
    "fsdp2_full_state": r"19 tensors loaded, trained, saved and loaded again\n.*(applied|not-needed)",
    "hf_shards": r"39 tensors: this rank read 0\.50 of the bytes\nQwen2ForCausalLM opened",
    "hsdp_full_state": "8 tensors on 2 replicas of 2 shards",
    "lora_from_meta": "4 base weights loaded, 8 adapters saved",
    "one_tensor": r"64 tensors\nmodel\.3\.weight: mean -?0\.\d+, step 7\nload: 1 records",
    "sharded_checkpoint": r"32 tensors saved by 4 ranks and loaded by 2\nsave: .*\nload: ",
    "train_resume": r"step 1 loss (?s:.*)step 40 loss ",
    "tp_fsdp2_full_state": r"16 tensors; model\[0\].up.weight is placed as \(_StridedShard",
}


def command_of(example: Path) -> tuple[int, list[str]]:
    """How many ranks an example's first lines start, and with which arguments."""
    if f"    python examples/{example.name}\n" in example.read_text():
        return 1, []
    (command,) = re.findall(r"^    torchrun (.*)$", example.read_text(), re.MULTILINE)
    option, world, path, *arguments = shlex.split(command)
    assert (option, path) == ("--nproc-per-node", f"examples/{example.name}")
    return int(world), arguments


def check_tour(output: str) -> None:
    """What examples/tour.py prints, on four ranks."""
    lines = output.splitlines()
    (stock,) = (line for line in lines if line.startswith("load, stock torch: "))
    (fixed,) = (line for line in lines if line.startswith("load, with the fix: "))
    times = [float(re.findall(r"([\d.]+) times", line)[0]) for line in (stock, fixed)]
    assert "(disabled)" in stock
    assert times[1] == 1.0
    # Torch before 2.7 keeps whole tensors alive on every rank.
    assert times[0] > 3 if "(applied)" in fixed else times[0] >= 1.0
    assert any(re.match(r"resume on 2 ranks: from step [34], .* to step 8", line) for line in lines)
    assert any(re.match("open: Qwen2ForCausalLM, at most .* never killed", line) for line in lines)


def blocks(page: Path, language: str) -> list[str]:
    """The texts of a page's blocks of a language."""
    return re.findall(rf"^ *```{language}\n(.*?)^ *```$", page.read_text(), re.DOTALL | re.MULTILINE)


def blocks_below(page: Path, language: str) -> dict[str, str]:
    """The block of a language below each second heading of a page that has one."""
    parts = re.split(r"^## (.*)$", page.read_text(), flags=re.MULTILINE)
    pattern = rf"^```{language}\n(.*?)^```$"
    found = {}
    for heading, text in zip(parts[1::2], parts[2::2]):
        texts = re.findall(pattern, text, re.DOTALL | re.MULTILINE)
        if texts:
            (found[heading],) = texts
    return found


def output_of(arguments: Sequence[str], folder: Path) -> str:
    """What `python ARGUMENTS...` prints in `folder`, its errors in between; it has to end well."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS * patience.factor(),
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def output_of_code(interpreters: Interpreters, code: str, folder: Path, *argv: str, **later: str) -> str:
    """What a program prints in `folder`, and then its errors; it has to end well."""
    ended, out, err = interpreters.run(
        code, argv, interpreters.environment(None), folder, SECONDS * patience.factor(), **later
    )
    assert ended == 0, out + err
    return out + err


def output_of_ranks(
    interpreters: Interpreters, program: Path, folder: Path, world: int, argv: Sequence[str] = ()
) -> str:
    """What the ranks of a program print, rank 0 first: what torchrun would start, without its imports."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def rank(number: int) -> str:
        mine = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        later = {**mine, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        texts = {name: str(value) for name, value in later.items()}
        return output_of_code(interpreters, program.read_text(), folder, *argv, **texts)

    with ThreadPoolExecutor(world) as executor:
        return "".join(executor.map(rank, range(world)))
