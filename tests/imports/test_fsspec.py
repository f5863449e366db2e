"""`dcp.save` and `dcp.load` through fsspec, in every order of imports, in fresh interpreters."""

from __future__ import annotations

import pytest
from interpreters import AFFECTED, TORCH, Fresh

affected = pytest.mark.skipif(not AFFECTED, reason="nothing is replaced")
MODULE = "torch.distributed.checkpoint._fsspec_filesystem"

# A load that a planner of the user's ends, and what is in the storage then.
LOAD = """
import fsspec, torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
warnings.simplefilter("ignore", UserWarning)
warnings.simplefilter("ignore", FutureWarning)
class Stopped(dcp.DefaultLoadPlanner):
    def load_bytes(self, *args):
        raise KeyboardInterrupt
def load():
    fsspec.filesystem("memory").pipe({f"/saved/{name}": open(f"local/{name}", "rb").read() for name in names})
    try:
        reader = FsspecReader("memory://saved")
        dcp.load({"a": torch.ones(2), "n": 0}, storage_reader=reader, planner=Stopped())
    except dcp.api.CheckpointException as error:
        assert "KeyboardInterrupt" in str(error)
    return sorted(path.rpartition("/")[2] for path in fsspec.filesystem("memory").find("/saved"))
"""
# Saved by another process, so that the load is the first call.
SAVED = """
import os, subprocess
save = '''
import torch, torch.distributed.checkpoint as dcp
dcp.save({"a": torch.ones(2), "n": 5}, checkpoint_id="local")
'''
subprocess.run([sys.executable, "-c", save], check=True, env={**os.environ, "TORCH_DCP_BACKPORT": "off"})
names = sorted(os.listdir("local"))
"""
END = """
import torch_dcp_backport
left = load()
status = torch_dcp_backport.status()
tell(lost=sorted(set(names) - set(left)), outcome=status.outcome, listed=status.out_of_reach,
     late=[name for name in status.late_bindings if not name.startswith("torch.")],
     home=home("FileSystem.create_stream", "torch.distributed.checkpoint._fsspec_filesystem"))
"""
ORDERS = {
    "us, torch": "import torch_dcp_backport" + LOAD,
    "fsspec, us, torch": "import fsspec, torch_dcp_backport" + LOAD,
    "torch's module, us": LOAD + "import torch_dcp_backport",
    "torch's other module, us": "import torch.distributed.checkpoint.state_dict, torch_dcp_backport" + LOAD,
    "us, torch's other module": "import torch_dcp_backport, torch.distributed.checkpoint.state_dict" + LOAD,
}


@affected
@pytest.mark.parametrize("switch", ["auto", "strict"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_load_that_fails_deletes_nothing_in_every_order(fresh: Fresh, order: str, switch: str) -> None:
    ended = fresh(SAVED + ORDERS[order] + END, switch=switch)
    assert ended.facts == {
        "lost": [], "outcome": "applied", "listed": [], "late": [], "home": "torch_dcp_backport"
    }  # fmt: skip
    assert "torch_dcp_backport" not in ended.err


@pytest.mark.skipif(not TORCH.startswith("2.6."), reason="the release that deletes")
def test_stock_deletes_the_file_that_was_read(fresh: Fresh) -> None:
    facts = fresh(SAVED + LOAD + "tell(lost=sorted(set(names) - set(load())))").facts
    assert facts["lost"] == ["__0_0.distcp"]


@affected
def test_without_fsspec_all_else_is_replaced(fresh: Fresh) -> None:
    facts = fresh(
        f"""
        sys.modules.update(dict.fromkeys(("fsspec", "fsspec.core")))
        import torch_dcp_backport, torch.distributed.checkpoint.state_dict
        status = torch_dcp_backport.status()
        tell(outcome=status.outcome, home=home("set_model_state_dict"), loaded={MODULE!r} in sys.modules,
             modules=[name for name, _ in status.replaced])
        """
    ).facts
    assert (facts["outcome"], facts["home"], facts["loaded"]) == ("applied", "torch_dcp_backport", False)
    assert "torch.distributed.checkpoint.filesystem" in facts["modules"]
    assert MODULE not in facts["modules"]


@affected
def test_deactivate_gives_torchs_own_back(fresh: Fresh) -> None:
    facts = fresh(
        """
        from torch.distributed.checkpoint._fsspec_filesystem import FileSystem
        stock = FileSystem.create_stream
        import torch_dcp_backport, torch.distributed.checkpoint.state_dict
        ours = FileSystem.create_stream
        torch_dcp_backport.deactivate()
        tell(ours=ours.__wrapped__.__globals__["__name__"], back=FileSystem.create_stream is stock)
        """
    ).facts
    assert facts == {"ours": "torch_dcp_backport.dcp.remote", "back": True}
