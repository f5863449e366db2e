"""`run PROGRAM` is `python PROGRAM`: each program is run both ways and has to see the same."""

from __future__ import annotations

import json
import os
import py_compile
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from interpreters import AFFECTED, ROOT, Fresh

M = ("-m", "torch_dcp_backport")

LOOK = """
import inspect, json, os, sys
here = sorted(globals())
def train():
    return "epoch"
class Config:
    pass
os.chdir("/")  # as Hydra does
try:
    source = inspect.getsource(train)
except OSError as error:
    source = str(error)
spec = globals()["__spec__"]
print(json.dumps(dict(
    names=here, file=globals().get("__file__"), cached=globals().get("__cached__"), package=__package__,
    spec=spec and [spec.name, spec.origin], loader=str(__loader__).partition(" at ")[0], doc=__doc__,
    builtins=type(__builtins__).__name__, main=sys.modules["__main__"].__dict__ is globals(), source=source,
    code=train.__code__.co_filename, argv=sys.argv, path=sys.path[:2], flags=train.__code__.co_flags)))
"""


@pytest.mark.parametrize(
    "argv",
    [
        ["jobs/train.py", "--lr", "1"],
        ["./jobs/../jobs/train.py"],
        ["jobs"],
        ["jobs.zip", "a"],
        ["train.pyc"],
        ["-m", "jobs", "-m"],
        ["-m", "jobs.train", "a"],
        ["-mjobs.train", "a"],
        ["-c", LOOK, "a", "-c"],
        ["-c" + LOOK],
    ],
    ids=lambda argv: " ".join(argv)[:20].strip(),
)
def test_a_program_sees_what_it_sees_below_python(fresh: Fresh, tmp_path: Path, argv: list[str]) -> None:
    (tmp_path / "jobs").mkdir()
    for name in ("train.py", "__main__.py"):
        (tmp_path / "jobs" / name).write_text('"""Trains."""' + LOOK)
    with zipfile.ZipFile(tmp_path / "jobs.zip", "w") as archive:
        archive.writestr("__main__.py", LOOK)
    py_compile.compile(str(tmp_path / "jobs" / "train.py"), str(tmp_path / "train.pyc"))
    plain = fresh("", *argv)
    ours = fresh("", *M, "run", *argv)
    newer = {"source": ours.facts["source"]} if argv[0][:2] == "-c" and sys.version_info < (3, 13) else {}
    assert ours.facts == {**plain.facts, **newer}, ours.err
    assert ours.err == plain.err


def test_a_program_from_standard_input(tmp_path: Path) -> None:
    def facts(*argv: str) -> object:
        done = subprocess.run(
            [sys.executable, *argv, "-", "a"],
            input=LOOK,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    assert facts(*M, "run") == facts()


OUTLIVES = """
import atexit, os, pickle, sys, threading
class Result:
    pass
def tell(who):
    import __main__
    print(who, pickle.loads(pickle.dumps(Result())).__class__ is Result is __main__.Result, flush=True)
def wait():
    threading.main_thread().join()
    tell("thread")
threading.Thread(target=wait).start()
atexit.register(tell, "atexit")
if sys.argv[1:]:
    sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("argv", [["train.py"], ["train.py", "3"], ["-m", "train"], ["-m", "train", "3"]])
def test_what_outlives_the_program_still_finds_its_classes(
    fresh: Fresh, tmp_path: Path, argv: list[str]
) -> None:
    (tmp_path / "train.py").write_text(OUTLIVES)
    ended = fresh("", *M, "run", *argv)
    assert ended == fresh("", *argv)
    assert ended.out.splitlines() == ["thread True", "atexit True"]


@pytest.mark.parametrize("argv", [["-u", "train.py"], ["-O", "-m", "train"], ["--", "train.py"], ["-Werror"]])
def test_pythons_own_options_get_one_clear_line(fresh: Fresh, tmp_path: Path, argv: list[str]) -> None:
    (tmp_path / "train.py").write_text("raise AssertionError\n")
    ended = fresh("", *M, "run", *argv)
    assert ended.code == 2
    assert ended.out == ""
    (line,) = ended.err.splitlines()
    assert f"{argv[0]}: " in line
    assert "python OPTIONS -m torch_dcp_backport run" in line


SPAWNS = """
import multiprocessing, sys
def work(queue):
    import torch_dcp_backport
    torch_dcp_backport.activate()
    queue.put(1)
if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.Queue()
    for _ in range(2):
        process = context.Process(target=work, args=(queue,))
        process.start()
        queue.get(timeout=60)
        process.join()
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_it_says_when_the_program_starts_what_it_does_not_reach(
    fresh: Fresh, tmp_path: Path, method: str
) -> None:
    (tmp_path / "train.py").write_text(SPAWNS)
    ended = fresh("", *M, "run", "train.py", method)
    assert ended.code == 0, ended.err
    assert ended.err.count("run does not reach") == (AFFECTED and method != "fork")
    assert ended.err.count("a sitecustomize.py on PYTHONPATH") == (AFFECTED and method != "fork")
    assert "run does not reach" not in fresh("", *M, "run", "train.py", method, switch="off").err


@pytest.mark.parametrize(("method", "start"), [("spawn", ()), ("forkserver", (*M, "run")), ("fork", ())])
def test_sitecustomize_reaches_every_process(
    fresh: Fresh, tmp_path: Path, method: str, start: tuple[str, ...]
) -> None:
    """The recipe in docs/recipes.md."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import torch_dcp_backport\n")
    (tmp_path / "train.py").write_text(
        SPAWNS.replace("import torch_dcp_backport\n    torch_dcp_backport.activate()", HOME)
    )
    ended = fresh("", *start, "train.py", method, path=str(tmp_path / "site"))
    assert ended.code == 0, ended.err
    assert ended.err == ""
    assert ended.out.split() == ["torch_dcp_backport" if AFFECTED else "torch"] * 2


HOME = """from torch.distributed.checkpoint.state_dict import set_model_state_dict
    print(set_model_state_dict.__globals__["__name__"].partition(".")[0], flush=True)"""
