"""What SECURITY.md says of files that can run code: where the package unpickles, and who may ask for it."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

import torch_dcp_backport
from torch_dcp_backport import checkpoint, dist_checkpointing
from torch_dcp_backport.dist_checkpointing import storage, training_state

PACKAGE = Path(torch_dcp_backport.__file__).parent
CALLS = {"pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load"}
#: Modules that unpickle, by what comes in: messages of ranks, of a process that this one has started, and
#: values that this process has pickled itself.
MESSAGES = {f"transfer/_src/{name}.py" for name in ("object_collectives", "plan", "tree", "wire")}
WRITER = {"dist_checkpointing/_src/saver.py", "dist_checkpointing/_src/saver_process.py"}
OWN = {
    "dcp/collectives.py",
    "dist_checkpointing/_src/common.py",
    "dist_checkpointing/_src/save.py",
    "dist_checkpointing/storage.py",  # what `to_bytes` has just made
}
#: Files: with `trust` alone, or by classes that run nothing; `verify` reads the files that it made.
FILES = {
    "checkpoint/_src/verl.py",
    "dist_checkpointing/_src/unpickle.py",
    "dist_checkpointing/_src/values.py",
    "regression/verify/model.py",
}


def test_no_other_module_unpickles() -> None:
    """A new one is a new row of SECURITY.md, or one of these kinds."""
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in CALLS
    }
    assert found == MESSAGES | WRITER | OWN | FILES


@pytest.mark.parametrize(
    "takes",
    [
        dist_checkpointing.load,
        dist_checkpointing.load_common_state_dict,
        training_state.load_training_state,
        storage.CheckedReader,
        checkpoint.FSDPCheckpointManager,
        checkpoint.MegatronCheckpointManager,
        checkpoint.CheckpointHandler,
        checkpoint.NearbyCheckpoints,
        checkpoint.export_checkpoint,
    ],
    ids=lambda takes: takes.__name__,
)
def test_trust_is_asked_for(takes: Any) -> None:
    assert inspect.signature(takes).parameters["trust"].default is False
    page = (PACKAGE.parent / "SECURITY.md").read_text()
    name = takes.__name__
    assert ("managers" if name.endswith("CheckpointManager") else f"`{name}`") in page
