"""accelerate with its FSDP2 plugin and FULL_STATE_DICT, through Accelerator.save_state() and load_state()."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from client import bits, environment, facts, full_state_of, tiny_llama, train
from conftest import check_orders
from packaging.version import Version
from programs import output_of
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os
from torch.distributed.checkpoint.state_dict import set_model_state_dict

print(f"rank {os.environ['RANK']}: {set_model_state_dict.__globals__['__name__']}\\n", end="", flush=True)
"""


def accelerator_of() -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType

    environment()
    for shared in (AcceleratorState, GradientState, PartialState):
        shared._reset_state()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="FULL_STATE_DICT",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=True,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    # accelerate asks for an accelerator before it takes FSDP; nothing else in its path does.
    for state in (accelerator.state, PartialState()):
        state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator


def prepared(accelerator: Any, filled: bool) -> tuple[nn.Module, Any]:
    model = tiny_llama()
    if filled:
        model.load_state_dict(full_state_of(model))
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def a_job(api: Any, order: str, folder: str) -> dict[str, Any]:
    """A step, its checkpoint, and the checkpoint in another model and optimizer."""
    place = Path(folder, order)
    accelerator = accelerator_of()
    model, optimizer = prepared(accelerator, filled=True)
    train(model, optimizer)
    accelerator.save_state(str(place))
    dist.barrier()
    saved = {path.name: torch.load(path) for path in sorted(place.glob("*.bin"))}
    accelerator = accelerator_of()
    other, its_optimizer = prepared(accelerator, filled=False)
    accelerator.load_state(str(place))
    return facts(saved=saved, model=other.state_dict(), optimizer=its_optimizer.state_dict())


@pytest.mark.skipif(
    Version(torch.__version__).release < (2, 6), reason="accelerate's FSDP2 needs torch 2.6, and says so"
)
def test_a_job(in_every_order: Any, tmp_path: Path) -> None:
    check_orders(in_every_order(a_job, str(tmp_path)), stock_keeps=["optimizer"])


def kept_by_our_manager(api: Any, order: str, folder: str) -> dict[str, Any]:
    """What accelerate has prepared, saved by our manager and loaded into another."""
    from torch_dcp_backport.checkpoint import FSDPCheckpointManager

    model, optimizer = prepared(accelerator_of(), filled=True)
    train(model, optimizer)
    FSDPCheckpointManager(model, optimizer).save_checkpoint(Path(folder, order), global_step=1)
    other, its_optimizer = prepared(accelerator_of(), filled=False)
    FSDPCheckpointManager(other, its_optimizer).load_checkpoint(Path(folder, order))
    saved, loaded = (
        bits({"model": of.state_dict(), "optimizer": its.state_dict()})
        for of, its in ((model, optimizer), (other, its_optimizer))
    )
    return {"saved": saved, "loaded": loaded}


@pytest.mark.skipif(
    Version(torch.__version__).release < (2, 6), reason="accelerate's FSDP2 needs torch 2.6, and says so"
)
def test_our_manager_keeps_what_accelerate_has_prepared(orders: Any, tmp_path: Path) -> None:
    for order, pool in orders.get().items():
        if order == "no shim" and Version(torch.__version__).release < (2, 7):
            continue  # the manager's import would patch torch, for the tests that follow as well
        for found in pool.run(kept_by_our_manager, order, str(tmp_path)):
            assert len(found["saved"]) > 20
            assert found["loaded"] == found["saved"]


def test_accelerate_launch(tmp_path: Path) -> None:
    """The recipe's command, with two ranks: no line of the program knows of us."""
    (tmp_path / "train.py").write_text(PROGRAM)
    (command,) = re.findall(
        r"`accelerate (launch .*?) ARGS\.\.\.`", (ROOT / "docs" / "recipes.md").read_text()
    )
    arguments = ["-m", "accelerate.commands.accelerate_cli", *command.replace(" 8 ", " 2 ").split()]
    output = output_of(arguments, tmp_path)
    is_fixed = Version(torch.__version__).release >= (2, 7)
    module = "torch.distributed.checkpoint.state_dict" if is_fixed else "torch_dcp_backport.state_dict"
    for rank in (0, 1):
        assert f"rank {rank}: {module}" in output, output


def in_model(api: Any, order: str, folder: str, everywhere: bool) -> dict[str, Any]:
    """A checkpoint in several files, file by file, into a model on the meta device."""
    from accelerate.utils import load_checkpoint_in_model
    from client import shard_layers
    from safetensors.torch import save_file

    place = Path(folder, order)
    environment()
    with torch.device("meta"):
        model = tiny_llama()
    full = full_state_of(model)
    shard_layers(model, model.model.layers)
    if dist.get_rank() == 0:
        place.mkdir(parents=True)
        save_file(full, place / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()
    load_checkpoint_in_model(
        model, str(place), strict=True, full_state_dict=True, broadcast_from_rank0=not everywhere
    )
    return facts(model=model.state_dict())


@pytest.mark.parametrize("everywhere", [False, True], ids=["rank-0-reads", "all-read"])
def test_load_checkpoint_in_model(in_every_order: Any, tmp_path: Path, everywhere: bool) -> None:
    results = in_every_order(in_model, str(tmp_path), everywhere)
    check_orders(results, stock_keeps=[] if everywhere else ["model"])
