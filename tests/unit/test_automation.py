"""The files that other programs read: CI, pre-commit, issue forms, and the figures of releases."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from torch_dcp_backport.__main__ import COMMANDS

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"
FORMS = sorted(path for path in GITHUB.glob("ISSUE_TEMPLATE/*.yml") if path.name != "config.yml")
MAKEFILE = (ROOT / "Makefile").read_text()
#: Where a checkout is needed: a source archive has no hidden files.
pytestmark = pytest.mark.skipif(not GITHUB.exists(), reason="no checkout")


def parsed(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def recipe(target: str) -> str:
    """The commands of a target of the Makefile, with their variables as they are used here."""
    (found,) = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    return found.replace("$(LANES)", "python3 tools/lanes.py")


def test_every_file_is_yaml() -> None:
    for path in (*GITHUB.rglob("*.yml"), ROOT / ".pre-commit-config.yaml"):
        assert isinstance(parsed(path), dict), path


def test_ci_runs_what_this_tree_runs_and_keeps_what_that_makes() -> None:
    ci = parsed(GITHUB / "workflows" / "ci.yml")
    steps = [step for job in ci["jobs"].values() for step in job["steps"]]
    assert ".ci/run" in [step.get("run") for step in steps]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100
    for used in (step["uses"] for step in steps if "uses" in step):
        assert re.fullmatch(r"actions/[\w-]+@v\d+", used)
    kept = {step["with"]["path"] for step in steps if "upload-artifact" in step.get("uses", "")}
    assert kept == {"dist/", "build/site/", "build/shots/"}
    assert "make shots" in [step.get("run") for step in steps]
    targets = re.search(r"make --keep-going.*?2>&1", (ROOT / ".ci" / "run").read_text(), re.DOTALL)
    assert targets is not None
    assert {"wheel", "docs"} <= set(targets[0].split())


def test_pre_commit_runs_the_commands_of_make_lint() -> None:
    repos = parsed(ROOT / ".pre-commit-config.yaml")["repos"]
    assert [repo["repo"] for repo in repos] == ["local"]  # so that no version is named twice
    for hook in repos[0]["hooks"]:
        entry = hook["entry"]
        assert entry == "make lint" or f"\t{entry}\n" in recipe("lint"), entry
        assert hook["pass_filenames"] is False


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_a_form_asks_for_the_report(form: Path) -> None:
    made = parsed(form)
    assert {"name", "description", "body"} <= set(made)
    asked = {part["id"]: part for part in made["body"] if part["type"] != "markdown"}
    assert len(asked) == len(made["body"]) - 1
    assert all(part["attributes"]["label"] for part in asked.values())
    assert "python -m torch_dcp_backport report" in asked["report"]["attributes"]["description"]
    named = re.findall(r"python -m torch_dcp_backport (\w+)", form.read_text())
    assert set(named) <= set(COMMANDS)
    if form.stem == "bug":
        assert asked["report"]["validations"]["required"]


def test_figures_are_one_line_for_each_run() -> None:
    lines = [json.loads(line) for line in (ROOT / "benchmarks" / "figures.jsonl").read_text().splitlines()]
    runs = [(line["release"], line["date"]) for line in lines]
    assert runs
    assert len(set(runs)) == len(runs)
    for line in lines:
        assert set(line) == {"release", "commit", "date", "machine", "calls"}
        assert all(set(call) <= {"over_stock", "over_native", "peak_mib"} for call in line["calls"].values())
