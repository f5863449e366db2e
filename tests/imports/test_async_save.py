"""Programs that use torch's helpers, and never import checkpoint.state_dict, in fresh interpreters."""

from __future__ import annotations

import pytest
from interpreters import AFFECTED, Fresh

# Training goes on before the thread that writes begins.
SAVE = """
import threading, torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
go = threading.Event()
class Slow(dcp.FileSystemWriter):
    def write_data(self, *args):
        assert go.wait(60)
        return super().write_data(*args)
live = {"weight": torch.zeros(8), "step": 3}
future = dcp.async_save(live, storage_writer=Slow(f"{folder}/saved"))
live["weight"].fill_(1)
go.set()
future.result()
saved = {"weight": torch.full((8,), 5.0), "step": 0}
dcp.load(saved, checkpoint_id=f"{folder}/saved")
"""
# destroy_process_group() of torch 2.6 waits for ever now and then, in its own destructor.
LEAVE = "__import__('os')._exit(0)"
END = """
status = torch_dcp_backport.status()
tell(saved=saved["weight"].unique().tolist(), step=saved["step"], outcome=status.outcome,
     late=status.late_bindings)
"""
ORDERS = {
    "us first": "import torch_dcp_backport",
    "us after torch": "import torch, torch_dcp_backport",
    "us after fsdp": "import torch.distributed.fsdp, torch_dcp_backport",
    "us after dcp": "import torch.distributed.checkpoint, torch_dcp_backport",
    "us from the middle of fsdp": """
import torch, wrapt
wrapt.register_post_import_hook(lambda module: __import__("torch_dcp_backport"), "torch.distributed.fsdp.api")
import torch.distributed.fsdp
import torch_dcp_backport
""",
}


@pytest.mark.parametrize("switch", ["auto", "strict"])
@pytest.mark.parametrize("order", ORDERS)
def test_async_save_writes_what_it_was_given(fresh: Fresh, tmp_path: str, order: str, switch: str) -> None:
    ended = fresh(f"folder = {str(tmp_path)!r}\n" + ORDERS[order] + SAVE + END + LEAVE, switch=switch)
    facts = ended.facts
    assert (facts["saved"], facts["step"]) == ([0], 3)
    assert facts["outcome"] == ("applied" if AFFECTED else "not-needed")
    assert [name for name in facts["late"] if not name.startswith("torch.")] == []
    assert "torch_dcp_backport" not in ended.err


@pytest.mark.skipif(not AFFECTED, reason="fixed in torch")
def test_stock_writes_what_training_made_of_it(fresh: Fresh, tmp_path: str) -> None:
    ended = fresh(
        f"folder = {str(tmp_path)!r}\n" + SAVE + "tell(saved=saved['weight'].unique().tolist())\n" + LEAVE
    )
    assert ended.facts["saved"] == [1]
