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


@pytest.mark.parametrize("room", ["state_dict", "transfer"])
def test_the_shim_loads_none_of_the_rooms_beside_it(fresh: Fresh, room: str) -> None:
    facts = fresh(
        f"""
        import torch_dcp_backport
        torch_dcp_backport.{room}.__name__
        import torch.distributed.checkpoint.state_dict
        rooms = ("checkpoint", "dist_checkpointing", "hf", "megatron")
        loaded = [name for name in rooms if f"torch_dcp_backport.{{name}}" in sys.modules]
        tell(loaded=loaded, lazily=[getattr(torch_dcp_backport, name).__name__ for name in rooms])
        """
    ).facts
    names = [f"torch_dcp_backport.{room}" for room in ("checkpoint", "dist_checkpointing", "hf", "megatron")]
    assert facts == {"loaded": [], "lazily": names}


def test_megatron_and_hf_load_no_client(fresh: Fresh) -> None:
    facts = fresh(
        """
        import torch_dcp_backport
        torch_dcp_backport.megatron.load_hf
        torch_dcp_backport.hf.Folder
        clients = ("megatron", "safetensors", "transformers", "verl")
        tell(loaded=[name for name in clients if name in sys.modules])
        """
    ).facts
    assert facts == {"loaded": []}


def test_every_room_is_listed() -> None:
    packages = {path.parent.name for path in (ROOT / "torch_dcp_backport").glob("*/__init__.py")}
    # Of no use but in torch's modules: `dcp`.
    assert set(torch_dcp_backport._ROOMS) == packages - {"activation", "regression", "dcp"}
