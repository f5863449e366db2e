"""`doctor PROGRAM`: what binds early there, found by its imports alone, and what to change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from interpreters import AFFECTED, Fresh

M = ("-m", "torch_dcp_backport", "doctor")
CLIENT = "from torch.distributed.checkpoint.state_dict import set_model_state_dict as load\n"
FIX = "import torch_dcp_backport\n"
BODY = """
open("ran", "w")
def main():
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
if __name__ == "__main__":
    raise AssertionError
"""


@pytest.mark.parametrize(
    ("program", "code", "says"),
    [
        (FIX + "import client\n", 0, ["line 1: import torch_dcp_backport", "change       nothing"]),
        ("import client\n" + FIX, 1, ["client.load, by line 1: import client",
            "move `import torch_dcp_backport` above line 1"]),
        ("import sys\nsys.path.insert(0, 'lib')\nimport inside\ntry:\n    import parrot\n"
         "except ImportError:\n    import client\nKEPT = []\nimport kept\n", 1,
            ["is not imported by this program", "inside.load, by line 3: import inside",
            "client.load, by line 7: import client", "functools.partial in kept.KEPT, by line 9: import kept",
            "failed       line 5: import parrot: ModuleNotFoundError: No module named 'parrot'",
            "put `import torch_dcp_backport` above line 3, or start it with "
            "python -m torch_dcp_backport run train.py"]),
        (CLIENT, 1, ["__main__.load, by line 1: from torch.distributed.checkpoint.state_dict import"]),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import client\n"
         "import torch.multiprocessing as mp\ndef f():\n    mp.spawn(f)\n", 1,
            ["put `import torch_dcp_backport` first in the program", "line 6: spawn starts",
            "their function's module, or in sitecustomize.py"]),
    ],
)  # fmt: skip
@pytest.mark.skipif(not AFFECTED, reason="nothing is replaced here")
def test_it_says_what_to_change(
    fresh: Fresh, tmp_path: Path, program: str, code: int, says: list[str]
) -> None:
    (tmp_path / "train.py").write_text(program + BODY)
    (tmp_path / "client.py").write_text("print('hello')\n" + CLIENT)
    (tmp_path / "kept.py").write_text(CLIENT + "import functools\nKEPT = functools.partial(load)\ndel load\n")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "inside.py").write_text(CLIENT)
    ended = fresh("", *M, "train.py", "--lr", "1")
    assert ended.code == code, ended.err
    said = " ".join(ended.out.split())
    for text in says:
        assert " ".join(text.split()) in said
    assert max(map(len, ended.out.splitlines())) <= 80
    assert not (tmp_path / "ran").exists()
    assert "hello" not in ended.out


def test_a_module_and_json(fresh: Fresh, tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "__init__.py").write_text("")
    (tmp_path / "job" / "__main__.py").write_text("from job import load" + BODY)
    (tmp_path / "job" / "load.py").write_text(CLIENT)
    ended = fresh("", *M, "--json", "-m", "job", switch="strict")
    found = json.loads(ended.out)
    assert found["status"]["outcome"] == ("applied" if AFFECTED else "not-needed")
    early = [{"name": "job.load.load", "line": 1, "text": "from job import load"}]
    assert found["early"] == (early if AFFECTED else [])
    assert ended.code == len(found["change"]) == (1 if AFFECTED else 0)


def test_sitecustomize_is_first(fresh: Fresh, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(FIX)
    (tmp_path / "train.py").write_text(CLIENT)
    ended = fresh("", *M, "train.py", path=str(tmp_path / "site"))
    assert ended.code == 0, ended.out
    assert "before the program's first line" in ended.out


@pytest.mark.skipif(AFFECTED, reason="torch needs the fix here")
@pytest.mark.parametrize(
    ("program", "keeps"),
    [
        (FIX, False),
        ("import parts\n", False),
        ("def main():\n    from torch_dcp_backport import checkpoint\n", True),
        (FIX + "def main():\n    torch_dcp_backport.transfer.configure()\n", True),
        ("def main():\n    import torch_dcp_backport as tdb\n    tdb.hf.opened('model')\n", True),
        ("import torch_dcp_backport as tdb\ndef main():\n    tdb.status()\n", False),
        ("import uses\n", True),
    ],
)
def test_it_says_uninstall_only_to_a_program_that_uses_no_library(
    fresh: Fresh, tmp_path: Path, program: str, keeps: bool
) -> None:
    (tmp_path / "train.py").write_text(program)
    (tmp_path / "parts.py").write_text(FIX)
    (tmp_path / "uses.py").write_text("import torch_dcp_backport.transfer\n")
    ended = fresh("", *M, "train.py")
    said = " ".join(ended.out.split())
    assert ended.code == 0
    assert ("uninstall the package" in said, "keep it installed" in said) == (not keeps, keeps)


@pytest.mark.parametrize("argv", [["no_such.py"], ["-m", "no_such"], ["broken.py"], []])
def test_what_cannot_be_looked_at(fresh: Fresh, tmp_path: Path, argv: list[str]) -> None:
    (tmp_path / "broken.py").write_text("1 1\n")
    ended = fresh("", *M, *argv)
    assert ended.code == 2
    assert "Traceback" not in ended.err
    assert argv == [] or ended.err.endswith(f"{argv[-1]} could not be looked at (exit code 1)\n")
