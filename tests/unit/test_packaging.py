"""What pip makes of our requirements, by the rules that pip goes by."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from torch_dcp_backport.activation.needs import LEAST

ROOT = Path(__file__).resolve().parents[2]
(LINE,) = re.findall(r"^dependencies = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
NEEDED = {needed.name: needed.specifier for needed in map(Requirement, re.findall('"([^"]+)"', LINE))}


def test_nothing_else_is_needed_and_an_import_checks_the_same_bounds() -> None:
    assert {name: str(needed) for name, needed in NEEDED.items() if name != "torch"} == {
        name: f">={least}" for name, least in LEAST.items()
    }
    assert set(NEEDED) == {"torch", "packaging", "wrapt"}


def test_pip_does_not_pick_a_nightly() -> None:
    offered = ["2.3.1", "2.4.0", "2.6.0", "2.7.0a0", "2.8.0.dev20250401", "2.9.0rc1"]
    assert list(NEEDED["torch"].filter(offered)) == ["2.4.0", "2.6.0"]


@pytest.mark.parametrize(
    ("installed", "kept"),
    [
        ("2.3.1", False),
        ("2.3.0a0+40ec155e58.nv24.03", False),
        ("2.4.0a0+f70bd71a48.nv24.06", True),
        ("2.5.0a0+872d972e41.nv24.08", True),
        ("2.6.0+rocm6.2.4.gitd2f5c3d8", True),
        ("2.7.0a0+7c8ec84dab.nv25.03", True),
        ("2.7.0.dev20250101+cu124", True),
    ],
)
def test_pip_leaves_a_vendors_torch_alone(installed: str, kept: bool) -> None:
    """Of what is installed pip asks the number alone."""
    assert NEEDED["torch"].contains(installed, prereleases=True) is kept
