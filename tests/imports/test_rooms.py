"""`torch_dcp_backport.transfer`, as README writes it: there on every torch, loaded by whoever asks for it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from interpreters import AFFECTED, ROOT, Fresh

import torch_dcp_backport

#: The rooms that the shim knows nothing of.
BESIDE = ("checkpoint", "dist_checkpointing", "engine", "hf", "megatron")
OUTCOME = "pending" if AFFECTED else "not-needed"


@pytest.mark.parametrize("switch", [None, "off"])
def test_a_room_is_an_attribute_before_anything_was_patched(fresh: Fresh, switch: str | None) -> None:
    facts = fresh(
        """
        import torch_dcp_backport
        before = sorted(name for name in sys.modules if name.startswith("torch_dcp_backport.transfer"))
        torch_dcp_backport.transfer.configure(staging_bytes=2**20)
        budget = torch_dcp_backport.transfer._src.settings.staging_bytes()
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
        rooms = {BESIDE}
        loaded = [name for name in rooms if f"torch_dcp_backport.{{name}}" in sys.modules]
        tell(loaded=loaded, lazily=[getattr(torch_dcp_backport, name).__name__ for name in rooms])
        """
    ).facts
    assert facts == {"loaded": [], "lazily": [f"torch_dcp_backport.{room}" for room in BESIDE]}


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


def test_the_engine_and_megatron_do_not_know_each_other(fresh: Fresh) -> None:
    facts = fresh(
        """
        import torch_dcp_backport
        torch_dcp_backport.engine.FSDPEngine
        others = ("torch_dcp_backport.megatron", "torch_dcp_backport.checkpoint", "megatron", "safetensors",
                  "transformers", "peft", "tensordict", "verl")
        loaded = [name for name in others if name in sys.modules]
        torch_dcp_backport.megatron.load_hf
        tell(loaded=loaded)
        """
    ).facts
    assert facts == {"loaded": []}
    engine = ROOT / "torch_dcp_backport" / "engine"
    below = [path for path in (ROOT / "torch_dcp_backport").rglob("*.py") if engine not in path.parents]
    text = "torch_dcp_backport.engine", "torch_dcp_backport import engine"
    known = [path.relative_to(ROOT) for path in below if any(words in path.read_text() for words in text)]
    # Where a type checker learns the names of the rooms.
    assert list(map(str, known)) == ["torch_dcp_backport/__init__.py"]
    assert not [path for path in engine.rglob("*.py") if ".megatron" in path.read_text()]


def test_every_room_is_listed() -> None:
    packages = {path.parent.name for path in (ROOT / "torch_dcp_backport").glob("*/__init__.py")}
    # Of no use but in torch's modules: `dcp`.
    assert set(torch_dcp_backport._ROOMS) == packages - {"activation", "regression", "dcp", "publish"}


WITHOUT_NUMPY = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy" or name.startswith("numpy."):
            raise ModuleNotFoundError(f"No module named {name!r}", name="numpy")

sys.meta_path.insert(0, Absent())
import torch
from torch_dcp_backport.dist_checkpointing._src import values
assert "numpy" not in sys.modules
assert values.safe_classes()
assert values.loads(values.dumps({"step": 3, "text": "a"})) == {"step": 3, "text": "a"}
"""


def test_sharded_checkpoints_need_no_numpy() -> None:
    # An interpreter of its own: those of `fresh` have numpy.
    done = subprocess.run([sys.executable, "-c", WITHOUT_NUMPY], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


#: Room -> a private member of torch that it, or a room below it, stands on.
STAND_ON = {
    "transfer": "torch.utils._python_dispatch._disable_current_modes",
    "hf": "torch._C._get_privateuse1_backend_name",
    "state_dict": "torch.nn.modules.module._IncompatibleKeys",
    "dist_checkpointing": "torch._utils._rebuild_tensor_v3",
    "checkpoint": "torch.serialization._load",
    "engine": "torch._foreach_mul_",
}


def test_a_torch_without_what_a_room_stands_on_is_one_error_at_its_import(fresh: Fresh) -> None:
    facts = fresh(
        """
        import importlib, json, torch.distributed
        import torch_dcp_backport
        said = {}
        for room, member in json.loads(sys.argv[1]).items():
            owner, _, name = member.rpartition(".")
            owner = importlib.import_module(owner)
            value = getattr(owner, name)
            delattr(owner, name)
            try:
                importlib.import_module(f"torch_dcp_backport.{room}")
            except ImportError as error:
                said[room] = str(error)
            setattr(owner, name, value)
        tell(said=said, version=torch.__version__)
        """,
        json.dumps(STAND_ON),
        switch="off",
    ).facts
    for room, member in STAND_ON.items():
        assert f"torch {facts['version']} has no {member}, on which it stands" in facts["said"][room]
