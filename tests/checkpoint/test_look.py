"""A look at a run: its steps as a table, the differences of two of them, the largest tensors."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from test_user_state import Holder
from torch import nn
from trainer import Trainer

from torch_dcp_backport import dist_checkpointing as room
from torch_dcp_backport.__main__ import main
from torch_dcp_backport.checkpoint._src import difference, store
from torch_dcp_backport.dist_checkpointing import ShardedTensor
from torch_dcp_backport.transfer._src.settings import Line, Meter

Capture = pytest.CaptureFixture[str]


def said(capsys: Capture) -> str:
    """What a command said on standard error, with its lines as one."""
    return " ".join(capsys.readouterr().err.split())


def test_the_steps_of_a_run_as_a_table(tmp_path: Path, capsys: Capture) -> None:
    trainer = Trainer(tmp_path)
    for step, metric in ((9, None), (10, 0.123456789), (11, 2e-7)):
        trainer.handler.save_checkpoint(step, metric=metric)
    store.pin(tmp_path / "global_step_10")
    next((tmp_path / "global_step_11" / "dist_ckpt").glob("*.distcp")).write_bytes(b"")
    (tmp_path / "global_step_12").mkdir()
    assert main(["checkpoint", "list", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    rows = [line.split() for line in output.splitlines() if line[0] != " "]
    assert rows[0] == ["step", "size", "age", "state", "uploaded", "pinned", "metric"]
    assert [(row[0], *row[-4:]) for row in rows[1:]] == [
        ("11", "damaged", "-", "-", "2e-07"),
        ("10", "complete", "-", "yes", "0.123457"),
        ("9", "complete", "-", "-", "-"),
        ("12", "ours", "-", "-", "-"),
    ]
    assert rows[1][2] == "KiB"
    assert "not ours" in output
    assert max(map(len, output.splitlines())) <= 80
    assert main(["checkpoint", "list", str(tmp_path), "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert [(step["pinned"], step.get("metric")) for step in steps][:3] == [
        (False, 2e-7),
        (True, 0.123456789),
        (False, None),
    ]


def test_the_best_step_for_a_shell(tmp_path: Path, capsys: Capture) -> None:
    trainer = Trainer(tmp_path)
    trainer.handler.save_checkpoint(1)
    command = ["checkpoint", "list", str(tmp_path)]
    assert main([*command, "--best"]) == 1
    why = f"no good step in {tmp_path} has a metric: save_checkpoint(step, metric=...) gives it one"
    assert said(capsys) == f"python -m torch_dcp_backport checkpoint list: {why}"
    for step, metric in ((2, 0.5), (3, 0.25), (4, 0.75), (5, 0.125)):
        trainer.handler.save_checkpoint(step, metric=metric)
    next((tmp_path / "global_step_5" / "dist_ckpt").glob("*.distcp")).write_bytes(b"")
    for options, step in (([], 3), (["--mode", "min"], 3), (["--mode", "max"], 4), (["--verify"], 3)):
        capsys.readouterr()
        assert main([*command, "--best", *options]) == 0
        assert capsys.readouterr().out == f"{tmp_path / f'global_step_{step}'}\n"
    assert main([*command, "--best", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["steps"]
    assert (found["step"], found["metric"]) == (3, 0.25)
    assert main([*command, "--mode", "max"]) == 2
    assert said(capsys).endswith("--mode max needs --best")


def test_a_bar_in_bytes_is_for_terminals_alone(tmp_path: Path, capsys: Capture, monkeypatch) -> None:
    Trainer(tmp_path).handler.save_checkpoint(1)
    commands = (["list", str(tmp_path), "--verify"], ["verify", str(tmp_path / "global_step_1")])
    for command in commands:
        assert main(["checkpoint", *command]) == 0
        assert capsys.readouterr().err == ""
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda self: True, raising=False)
    for command in commands:
        assert main(["checkpoint", *command]) == 0
        shown = capsys.readouterr().err.split("\r")
        assert any("verify [#####" in line and "KiB" in line for line in shown)
        assert shown[-1] == ""
        assert max(map(len, shown)) <= 79


def test_a_bar_reaches_its_end_with_a_file_that_is_gone(tmp_path: Path, capsys: Capture, monkeypatch) -> None:
    Trainer(tmp_path).handler.save_checkpoint(1)
    os.remove(tmp_path / "global_step_1" / "data_0.pt")
    seen: list[Any] = []
    monkeypatch.setattr(Line, "__call__", lambda self, progress: seen.append(progress))
    assert main(["checkpoint", "verify", str(tmp_path / "global_step_1")]) == 1
    assert seen[-1].done == seen[-1].total


#: The commands that take a step -> the exit code of an error.
OF_STEPS = {"inspect": 1, "verify": 1, "diff": 2, "export": 1, "pin": 1, "unpin": 1}


def test_a_root_in_the_place_of_a_step_is_told_the_newest(tmp_path: Path, capsys: Capture) -> None:
    trainer = Trainer(tmp_path)
    trainer.handler.save_checkpoint(1)
    trainer.handler.save_checkpoint(2)
    (tmp_path / "global_step_7").mkdir()
    newest = str(tmp_path / "global_step_2")
    words = {name: ["checkpoint", name] for name in OF_STEPS}
    for command, given in {**words, "convert": ["convert"]}.items():
        other = second_argument(command, tmp_path / "other")
        capsys.readouterr()
        assert main([*given, str(tmp_path), *other]) == OF_STEPS.get(command, 1)
        error = said(capsys)
        assert f"{' '.join(given)}: {tmp_path} is the root of 2 step(s)" in error
        assert error.endswith(f"name one of them, such as {newest}")
    assert not store.is_pinned(tmp_path)


@pytest.mark.parametrize("command", [["list"], ["list", "--json"], ["prune", "--keep", "1"]])
def test_a_step_in_the_place_of_a_root_is_told_its_root(
    tmp_path: Path, capsys: Capture, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Trainer(tmp_path / "a").handler.save_checkpoint(1)
    monkeypatch.chdir(tmp_path)
    step = Path("a/global_step_1")
    places = {step: "a step", step / "dist_ckpt": "in a step", step.absolute(): "a step"}
    (tmp_path / "copy").symlink_to(step / "dist_ckpt")
    for folder, kind in places.items():
        assert main(["checkpoint", *command, str(folder)]) == 1
        output, error = capsys.readouterr()
        root = tmp_path / "a" if folder.is_absolute() else "a"
        text = f"{folder} is {kind}, and the root of a run is wanted: {root}"
        assert " ".join(error.split()).endswith(f": {text}")
        told = {"root": str(folder), "steps": [], "reason": text} if "--json" in command else None
        assert (json.loads(output) if output else None) == told
    assert main(["checkpoint", *command, "copy"]) == 1
    text = "copy is a checkpoint, and the root of a run is wanted: `checkpoint inspect` shows it"
    assert text in said(capsys)
    assert step.is_dir()


def test_prune_says_that_there_is_no_step(tmp_path: Path, capsys: Capture) -> None:
    assert main(["checkpoint", "prune", str(tmp_path), "--keep", "1"]) == 1
    assert said(capsys).endswith(f"prune: no steps in {tmp_path}")


def test_prune_puts_back_the_only_step(tmp_path: Path, capsys: Capture) -> None:
    """Killed while it was replaced, it has no name: that there is none is said where it stays so."""
    Trainer(tmp_path).handler.save_checkpoint(3)
    (tmp_path / "global_step_3").rename(tmp_path / ".global_step_3.was-00000000")
    assert main(["checkpoint", "prune", str(tmp_path), "--keep", "1", "--dry-run"]) == 1
    assert said(capsys).endswith(f"prune: no steps in {tmp_path}")
    assert main(["checkpoint", "prune", str(tmp_path), "--keep", "1"]) == 0
    assert (tmp_path / "global_step_3" / "manifest.json").is_file()


def test_a_run_in_a_folder_with_the_name_of_a_step(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is no step itself; nor is a folder beside one, whatever way leads to it."""
    Trainer(tmp_path / "a").handler.save_checkpoint(1)
    (tmp_path / "global_step_7" / "run").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    for folder in ("global_step_7/run", "a/global_step_1/../../empty"):
        capsys.readouterr()
        assert main(["checkpoint", "list", folder]) == 1
        assert said(capsys) == f"python -m torch_dcp_backport checkpoint list: no steps in {folder}"


@pytest.mark.parametrize("name", ["x" * 300, "loop"])
def test_a_folder_that_cannot_be_listed_is_one_line(tmp_path: Path, capsys: Capture, name: str) -> None:
    folder = tmp_path / name
    if name == "loop":
        folder.symlink_to(folder)
    commands = [["checkpoint", name] for name in (*OF_STEPS, "list")]
    others = [["checkpoint", "prune", "--keep", "1"], ["convert"], ["convert", "--like=model"]]
    for command in (*commands, *others):
        code = OF_STEPS.get(command[-1], 1)
        other = second_argument(command[0 if command[0] == "convert" else -1], tmp_path)
        assert main([*command, str(folder), *other]) == code
        error = said(capsys)
        assert f"{folder} cannot be listed: " in error


def second_argument(command: str, folder: Path) -> list[str]:
    """What a command wants beside the folder: `diff` another one, `export` a target."""
    return {name: [str(folder / "out")] for name in ("diff", "export", "convert")}.get(command, [])


@pytest.mark.parametrize("command", [name for name in OF_STEPS if not name.endswith("pin")])
def test_a_root_without_a_step_of_ours_is_told_what_the_command_wants(
    tmp_path: Path, capsys: Capture, command: str
) -> None:
    """As that of a manager without a handler: its parts have no manifest."""
    (tmp_path / "global_step_7").mkdir()
    (tmp_path / "global_step_5" / "actor").mkdir(parents=True)
    code = main(["checkpoint", command, str(tmp_path), *second_argument(command, tmp_path)])
    assert code == OF_STEPS[command]
    error = said(capsys)
    wanted = "has no huggingface/config.json" if command == "export" else "holds no distributed checkpoint"
    assert f"{tmp_path} {wanted}" in error


@pytest.mark.parametrize(("command", "code"), [("inspect", 1), ("verify", 1), ("diff", 2), ("export", 1)])
def test_a_folder_that_cannot_be_listed_ends_in_a_line(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, command: str, code: int
) -> None:
    def scandir(path: Any = ".") -> Any:
        if Path(path) == tmp_path:
            raise PermissionError(13, "Permission denied", str(path))
        return listing(path)

    listing = os.scandir
    monkeypatch.setattr(os, "scandir", scandir)
    code = main(["checkpoint", command, str(tmp_path), *second_argument(command, tmp_path)])
    assert code == OF_STEPS[command]
    error = said(capsys)
    assert str(tmp_path) in error


def test_a_name_that_is_too_long_ends_in_a_line(tmp_path: Path, capsys: Capture) -> None:
    folder = str(tmp_path / ("a" * 300))
    assert main(["checkpoint", "diff", folder, folder]) == 2
    assert "File name too long" in capsys.readouterr().err


def test_the_largest_tensors_are_shown_and_no_key_is_cut(tmp_path: Path, capsys: Capture) -> None:
    sizes = {"a" * 90: 2, **{f"layer.{number}": number + 3 for number in range(7)}}
    state = {key: ShardedTensor.from_dtensor(key, torch.ones(size * 100)) for key, size in sizes.items()}
    room.save(state, tmp_path)
    assert main(["checkpoint", "inspect", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "a" * 90 in lines
    assert all(len(line) <= 80 for line in lines if line != "a" * 90)
    (place,) = (number for number, line in enumerate(lines) if line.startswith("largest"))
    assert [line.split()[0] for line in lines[place + 1 : -1]] == [
        f"layer.{number}" for number in (6, 5, 4, 3, 2)
    ]
    assert lines[place + 1].split()[-1].endswith("%")


# Differences.


def diff(capsys: Capture, *arguments: object) -> tuple[int, list[dict[str, str]]]:
    capsys.readouterr()
    code = main(["checkpoint", "diff", *map(str, arguments), "--json"])
    output = capsys.readouterr()
    return code, json.loads(output.out)["differences"] if code != 2 else [{"error": output.err}]


def saved(root: Path, step: int = 1, **options: Any) -> Path:
    torch.manual_seed(0)
    trainer = Trainer(root, **options)
    trainer.train()
    return trainer.handler.save_checkpoint(step)


def test_the_same_state_is_the_same(tmp_path: Path, capsys: Capture) -> None:
    state = {"own": Holder({"n": float("nan"), "t": torch.tensor([float("nan")])})}
    first, second = (saved(tmp_path / name, state=state) for name in "ab")
    assert diff(capsys, first, second) == (0, [])
    assert main(["checkpoint", "diff", str(first), str(second / "dist_ckpt")]) == 0
    assert capsys.readouterr().out.startswith("the same: ")


def test_what_differs_is_named(tmp_path: Path, capsys: Capture) -> None:
    first = saved(tmp_path / "a", state={"own": Holder({"n": 1})})
    trainer = Trainer(tmp_path / "b", state={"own": Holder({"n": 2})})
    trainer.train()
    with torch.no_grad():
        trainer.model[0].bias[0] += 0.5
    trainer.loader.position = 7
    second = trainer.handler.save_checkpoint(2)
    (second / "mine.txt").write_text("not in the manifest")
    code, found = diff(capsys, first, second)
    assert code == 1
    by_key = {entry["key"]: entry for entry in found}
    assert by_key["model.0.bias"]["a"] == "1 of 5 elements"
    assert by_key["model.0.bias"]["b"] == "by up to 0.5"
    assert (by_key["data_0.pt.position"]["a"], by_key["data_0.pt.position"]["b"]) == ("1", "7")
    assert by_key["common state.step"]["kind"] == "values"
    assert [entry["a"] for key, entry in by_key.items() if key.startswith("user_state")] == ["1"]
    assert len(found) == 4
    assert main(["checkpoint", "diff", str(first), str(second)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "4 differences"
    assert max(map(len, lines)) <= 80


def checkpoint(path: Path, **tensors: Any) -> Path:
    path.mkdir(parents=True)
    room.save(
        {
            key: ShardedTensor.from_dtensor(key, value) if isinstance(value, torch.Tensor) else value
            for key, value in tensors.items()
        },
        path,
    )
    return path


NAN = float("nan")


@pytest.mark.parametrize(
    ("a", "b", "kinds"),
    [
        ({"w": torch.tensor([1.0, NAN])}, {"w": torch.tensor([1.0, NAN])}, []),
        ({"w": torch.tensor([1.0, NAN])}, {"w": torch.tensor([1.0, 2.0])}, ["values"]),
        ({"w": torch.tensor([0.0])}, {"w": torch.tensor([-0.0])}, ["values"]),
        ({"w": torch.ones(2)}, {"w": torch.ones(2, dtype=torch.bfloat16)}, ["dtype"]),
        ({"w": torch.ones(2, 3)}, {"w": torch.ones(3, 2)}, ["shape"]),
        ({"w": torch.ones(2)}, {"v": torch.ones(2)}, ["only in A", "only in B"]),
        ({"n": [1, 2]}, {"n": [2, 1]}, ["values", "values"]),
        ({"n": {"x": 1, "y": 2}}, {"n": {"y": 2, "x": 1}}, []),
        ({"n": OrderedDict(x=1, y=2)}, {"n": OrderedDict(y=2, x=1)}, ["values"]),
        ({"n": {1: "x"}}, {"n": {"1": "x"}}, ["only in A", "only in B"]),
        ({"n": {1: "x"}}, {"n": {True: "x"}}, ["only in A", "only in B"]),
        ({"n": 1}, {"n": 1.0}, ["type"]),
        ({"n": NAN}, {"n": NAN}, []),
        ({"n": NAN}, {"n": 0.0}, ["values"]),
        ({"n": (torch.ones(1),)}, {"n": (torch.ones(1).half(),)}, ["dtype"]),
        ({"n": {1, 2}}, {"n": {2, 1}}, []),
        ({"n": [1]}, {"n": [1, 2]}, ["values"]),
    ],
)
def test_every_kind_of_difference(tmp_path: Path, capsys: Capture, a: Any, b: Any, kinds: list[str]) -> None:
    code, found = diff(capsys, checkpoint(tmp_path / "a", **a), checkpoint(tmp_path / "b", **b))
    assert code == bool(kinds)
    assert sorted(entry["kind"] for entry in found) == kinds


def test_tensors_are_compared_in_pieces(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(difference, "WINDOW", 64)
    value, other = torch.arange(1000.0), torch.arange(1000.0)
    other[[0, 500, 999]] -= torch.tensor([1.0, 2.0, 4.0])
    meter = Meter("diff", lambda progress: None)
    folders = checkpoint(tmp_path / "a", w=value), checkpoint(tmp_path / "b", w=other)
    assert list(difference.differences(*folders, meter)) == [
        ("values", "w", "3 of 1,000 elements", "by up to 4")
    ]
    assert (meter.done, meter.total) == (4000, 4000)


def test_what_is_damaged_or_no_checkpoint_is_not_compared(tmp_path: Path, capsys: Capture) -> None:
    first = saved(tmp_path / "a")
    second = tmp_path / "b"
    shutil.copytree(first, second)
    path = next((second / "dist_ckpt").glob("*.distcp"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert diff(capsys, first, second)[0] == 2
    shutil.copytree(first, second, dirs_exist_ok=True)
    (second / "data_0.pt").write_bytes(b"")
    code, (error,) = diff(capsys, first, second)
    assert code == 2
    assert "data_0.pt has 0 bytes" in " ".join(error["error"].split())
    assert diff(capsys, first, tmp_path / "none")[0] == 2


def test_models_of_other_layers_differ_by_key(tmp_path: Path, capsys: Capture) -> None:
    first = saved(tmp_path / "a", model=nn.Linear(2, 2), config={"save_contents": ["model"]})
    second = saved(tmp_path / "b", model=nn.Linear(2, 2, bias=False), config={"save_contents": ["model"]})
    code, found = diff(capsys, first, second)
    assert code == 1
    assert ("only in A", "model.bias", "float32 2", "") in [tuple(entry.values()) for entry in found]
