"""`torch_dcp_backport.transfer`, as README writes it: there on every torch, loaded by whoever asks for it."""

from __future__ import annotations

import pytest
from interpreters import AFFECTED, ROOT, Fresh

import torch_dcp_backport

OUTCOME = "pending" if AFFECTED else "not-needed"


@pytest.mark.parametrize("switch", [None, "off"])
def test_a_room_is_an_attribute_before_anything_was_patched(fresh: Fresh, switch: str | None) -> None:
    facts = fresh(
        """
        import torch_dcp_backport
        before = sorted(name for name in sys.modules if name.startswith("torch_dcp_backport.transfer"))
        torch_dcp_backport.transfer.configure(staging_bytes=2**20)
        budget = torch_dcp_backport.transfer.settings.staging_bytes()
        torch_dcp_backport.state_dict.StateDictOptions(full_state_dict=True)
        tell(before=before, budget=budget, outcome=torch_dcp_backport.status().outcome)
        """,
        switch=switch,
    ).facts
    assert facts["before"] == []
    assert facts["budget"] == 2**20
    assert facts["outcome"] in (("disabled",) if switch else (OUTCOME, "applied"))


def test_asking_for_what_is_not_there_imports_nothing(fresh: Fresh) -> None:
    facts = fresh(
        """
        import inspect
        import torch_dcp_backport
        parrot = hasattr(torch_dcp_backport, "parrot")
        try:
            torch_dcp_backport.transfers
        except AttributeError as error:
            says = str(error)
        inspect.getmembers(torch_dcp_backport)  # as tools do with every module that is loaded
        tell(parrot=parrot, says=says, torch="torch" in sys.modules)
        """
    ).facts
    assert facts == {
        "parrot": False, "says": "module 'torch_dcp_backport' has no attribute 'transfers'", "torch": False
    }  # fmt: skip


def test_what_the_shim_needs_loads_no_room_beside_it(fresh: Fresh) -> None:
    facts = fresh(
        """
        import torch_dcp_backport
        import torch_dcp_backport.state_dict
        import torch_dcp_backport.transfer
        import torch.distributed.checkpoint.state_dict
        before = sorted(name for name in sys.modules if "dist_checkpointing" in name)
        lazily = torch_dcp_backport.dist_checkpointing.__name__
        tell(before=before, lazily=lazily)
        """
    ).facts
    assert facts == {"before": [], "lazily": "torch_dcp_backport.dist_checkpointing"}


def test_every_room_is_listed() -> None:
    packages = {path.parent.name for path in (ROOT / "torch_dcp_backport").glob("*/__init__.py")}
    # Of no use but in torch's modules: `dcp`.
    assert set(torch_dcp_backport._ROOMS) == packages - {"activation", "regression", "dcp"}
