"""verl's FSDP2 loader, which below torch 2.7 calls verl's own copy of torch's functions.

No replacement in torch reaches it; docs/recipes.md has the lines that lead it to torch's, and to ours.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from client import environment, facts, full_state_of, tiny_llama
from conftest import check_orders
from programs import blocks
from torch.distributed.device_mesh import init_device_mesh

ROOT = Path(__file__).resolve().parents[2]
COPY = "verl.third_party.torch.distributed.checkpoint.state_dict"


def documented_module() -> str:
    """The program that docs/recipes.md gives to verl's users."""
    (program,) = (text for text in blocks(ROOT / "docs/recipes.md", "python") if "verl" in text)
    return program


def a_job(api: Any, order: str, folder: str) -> dict[str, Any]:
    """What verl's workers do: the whole model on rank 0, the meta device elsewhere, sharded, then loaded.

    `folder`: holds a module for verl's option `external_lib`; empty for verl as it is.
    """
    from verl.utils.fsdp_utils import apply_fsdp2, fsdp2_load_full_state_dict, get_fsdp_full_state_dict
    from verl.utils.import_utils import import_external_libs

    environment()
    sys.modules.pop(COPY, None)
    if folder:
        sys.path.insert(0, folder)
        if order == "no shim":
            sys.modules[COPY] = api
        else:
            import_external_libs("fixed_verl")
    shim = sys.modules.get("torch_dcp_backport.transfer")
    before = shim.last_report() if shim else None
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model = tiny_llama()
    if dist.get_rank() == 0:
        model.load_state_dict(full_state_of(model))
    state = model.state_dict()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    apply_fsdp2(model, {"mesh": mesh, "reshard_after_forward": True}, {})
    fsdp2_load_full_state_dict(model, state, mesh, None)
    ours = shim is not None and shim.last_report() is not before
    assert ours == bool(folder and order != "no shim"), "who carried out the load"
    return facts(model=model.state_dict(), saved=get_fsdp_full_state_dict(model, rank0_only=False))


@pytest.mark.parametrize("reached", [False, True], ids=["as-it-is", "led-to-torch"])
def test_a_load(in_every_order: Any, tmp_path: Path, reached: bool) -> None:
    (tmp_path / "fixed_verl.py").write_text(documented_module())
    # No stock_keeps: the loader makes the parameters first; what is loaded into them keeps nothing alive.
    check_orders(in_every_order(a_job, str(tmp_path) if reached else ""))
