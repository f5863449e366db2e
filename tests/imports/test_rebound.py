"""Torch's own modules that bound a helper by name, in fresh interpreters."""

from __future__ import annotations

import pytest
from interpreters import AFFECTED, Fresh

BOUND = (
    ("torch.distributed.checkpoint.staging", "_copy_state_dict"),
    ("torch.distributed.checkpoint.staging", "_create_cpu_state_dict"),
    ("torch.distributed.checkpoint.staging", "_offload_state_dict_to_cpu"),
    ("torch.distributed.checkpoint.state_dict_saver", "_offload_state_dict_to_cpu"),
    ("torch.distributed.fsdp._optim_utils", "_gather_state_dict"),
    ("torch.distributed.checkpoint.state_dict", "_gather_state_dict"),
    ("torch.distributed.checkpoint.state_dict", "_offload_state_dict_to_cpu"),
)

ORDERS = {
    "us first": "import torch_dcp_backport; import torch.distributed.checkpoint.state_dict",
    "us last": "import torch.distributed.checkpoint.state_dict; import torch_dcp_backport",
    "us in between": """
import torch.distributed.checkpoint
import torch_dcp_backport
import torch.distributed.checkpoint.state_dict
""",
}

CHECK = """
import torch_dcp_backport.state_dict as ours
def facts():
    # No list of the functions stays behind: the next activation would find and report it.
    held = [(getattr(sys.modules[module], name), name) for module, name in bound]
    homes = {origin(value) for value, _ in held}
    return [all(value is getattr(ours, name) for value, name in held),
            all(value is getattr(sys.modules[A], name) for value, name in held), *homes]
on = facts()
torch_dcp_backport.deactivate()
off = facts()
torch_dcp_backport.activate()
tell(on=on, off=off, again=facts())
"""


@pytest.mark.skipif(not AFFECTED, reason="nothing is replaced in this torch")
@pytest.mark.parametrize("order", ORDERS)
def test_torchs_modules_call_the_replaced_helpers(fresh: Fresh, order: str) -> None:
    ended = fresh(f"bound = {BOUND!r}\n" + ORDERS[order] + CHECK)
    replaced = [True, True, "torch_dcp_backport"]
    assert ended.facts == {"on": replaced, "off": [False, True, "torch"], "again": replaced}
    assert "Warning" not in ended.err, "torch's own modules are nobody's late import"


STAGE = """
import torch, torch.distributed.checkpoint.state_dict
from torch.distributed.checkpoint.staging import BlockingAsyncStager
live = {"weight": torch.zeros(3)}
staged = BlockingAsyncStager().stage(live)
live["weight"].fill_(1)  # training goes on
tell(staged=staged["weight"].tolist())
"""


@pytest.mark.parametrize("first", ["import torch_dcp_backport\n", ""], ids=["patched", "stock"])
def test_the_state_staged_for_an_asynchronous_save_stands_still(fresh: Fresh, first: str) -> None:
    staged = fresh(first + STAGE).facts["staged"]
    assert staged == ([1, 1, 1] if AFFECTED and not first else [0, 0, 0])
