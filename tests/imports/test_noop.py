"""Where nothing is needed, nothing is done: proven in fresh processes, by identity."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from interpreters import AFFECTED, ROOT, Fresh

# Either torch has the fix, or we are switched off.
NOOP = ["off"] if AFFECTED else ["off", "auto", "strict", None]

# What a no-op has no use for. What packaging imports depends on its release.
HEAVY = ("torch", "wrapt", "importlib.metadata", "argparse", "json", "hashlib")


@pytest.mark.parametrize("switch", NOOP)
def test_nothing_is_imported_and_nothing_changed(fresh: Fresh, switch: str | None) -> None:
    facts = fresh(
        f"""
        import builtins, importlib
        for name in {HEAVY!r}:
            sys.modules.pop(name, None)  # the prelude's json
        def world():
            return [list(sys.meta_path), list(sys.path_hooks), list(warnings.filters), list(sys.path),
                    builtins.__import__, importlib.import_module, sys.excepthook]
        before = world()
        import torch_dcp_backport
        same = before == world()
        heavy = [name for name in {HEAVY!r} if name in sys.modules]
        ours = sorted(name for name in sys.modules if name.startswith("torch_dcp_backport"))
        status = torch_dcp_backport.status()
        import json
        torch_dcp_backport.activate()
        torch_dcp_backport.deactivate()
        tell(same=same and before == world(), heavy=heavy, ours=ours, outcome=status.outcome,
             after=torch_dcp_backport.status().outcome)
        """,
        switch=switch,
    ).facts
    assert facts["same"]
    assert facts["heavy"] == []
    assert facts["outcome"] == facts["after"] == ("disabled" if switch == "off" else "not-needed")
    assert not [
        name
        for name in facts["ours"]
        if "state_dict" in name or "importer" in name or "replace" in name or ".dcp" in name
    ]


@pytest.mark.parametrize("switch", NOOP[:2])
def test_torchs_objects_are_torchs(fresh: Fresh, switch: str) -> None:
    facts = fresh(
        """
        import torch_dcp_backport
        import torch.distributed.checkpoint.state_dict as b
        import torch.distributed._state_dict_utils as a
        from torch_dcp_backport.activation.table import TABLE
        before = [dict(vars(a)), dict(vars(b))]
        torch_dcp_backport.activate()
        torch_dcp_backport.deactivate()
        now = [dict(vars(a)), dict(vars(b))]
        targets = served(TABLE.targets)
        tell(homes=sorted({home(t.name, t.module) for t in targets if t.module in sys.modules}),
             same=all(x.keys() == y.keys() and all(x[n] is y[n] for n in x) for x, y in zip(before, now)),
             ours=[n for n in sys.modules if n.startswith("torch_dcp_backport.") and n[19:22] in "sta dcp"],
             late=torch_dcp_backport.status().late_bindings,
             loader=type(b.__spec__.loader).__name__)
        """,
        switch=switch,
    ).facts
    assert facts == {
        "homes": ["torch"], "same": True, "ours": [], "late": [], "loader": "SourceFileLoader"
    }  # fmt: skip


def test_before_torch_nobody_imports_torch(fresh: Fresh) -> None:
    facts = fresh(
        """
        import torch_dcp_backport
        status = torch_dcp_backport.status()
        str(status), status.to_dict()
        finders = sum(type(one).__module__.startswith("torch_dcp_backport") for one in sys.meta_path)
        tell(outcome=status.outcome, torch="torch" in sys.modules, finders=finders,
             version=status.torch_version)
        """
    ).facts
    assert facts["outcome"] == ("pending" if AFFECTED else "not-needed")
    assert not facts["torch"]
    assert facts["finders"] == AFFECTED
    assert facts["version"][:3].rstrip(".") in ("2.4", "2.5", "2.6", "2.7", "2.8", "2.1")


def test_a_no_op_imports_little(tmp_path: Path) -> None:
    """What it costs in milliseconds is in benchmarks/startup.py; here, what can make it cost more."""
    # A torch that needs nothing, in front of whichever is installed.
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('torch was imported')\n")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.13.0'\n")
    code = (
        "import sys; before = set(sys.modules); import torch_dcp_backport as t; "
        "assert t.status().outcome == 'not-needed'; print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    new = done.stdout.split()
    assert not set(HEAVY) & set(new)
    # 54 on Python 3.11, with packaging 26.
    assert len(new) <= 80
