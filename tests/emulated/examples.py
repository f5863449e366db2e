"""The programs of examples/ on the emulated accelerator: what they do where CUDA is, by the rules of NCCL.

    python3 tools/lanes.py run 2.7 -- python tests/emulated/examples.py examples/tour.py

A program's own lines run, with three words changed: the module, the device's type and the backend.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

NAMES = {"torch.cuda": "torch.fakegpu", '"cuda"': '"fakegpu"', '"nccl"': '"strict"'}
#: Of a machine.
DEVICES = 4


@dataclass(frozen=True)
class Program:
    """An example with its arguments, as torchrun would start it."""

    path: Path
    arguments: Sequence[str]

    def __call__(self, rank: int, world: int) -> None:
        meeting = f"file://{os.environ['EMULATED_FOLDER']}/rendezvous"
        begin = functools.partial(dist.init_process_group, init_method=meeting, rank=rank, world_size=world)
        dist.init_process_group = begin
        run(self.path, self.arguments)


def run(path: Path, arguments: Sequence[str]) -> None:
    text = path.read_text()
    for name, emulated in NAMES.items():
        assert name != '"nccl"' or name in text, f"{path} has no backend for CUDA"
        text = text.replace(name, emulated)
    modules_move_as_on_cuda()
    sys.argv = [str(path), *arguments]
    exec(compile(text, str(path), "exec"), {"__name__": "__main__", "__file__": str(path)})


def modules_move_as_on_cuda() -> None:
    """FSDP2 of torch >= 2.6 moves what is not on the device yet by `tensor.data = ...`.

    Autograd lets CUDA alone have the data of a CPU's tensor: here the tensors are swapped.
    """
    try:
        fsdp = importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard")
    except ModuleNotFoundError:
        return

    def move(parameters: Iterable[Any], buffers: Iterable[Any], device: torch.device) -> None:
        for tensor in (*parameters, *buffers):
            if tensor.device not in (device, torch.device("meta")):
                torch.utils.swap_tensors(tensor, tensor.to(device))

    vars(fsdp)["_move_states_to_device"] = move


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from emulated import fakegpu

    fakegpu.install(DEVICES)
    run(Path(sys.argv[1]), sys.argv[2:])
