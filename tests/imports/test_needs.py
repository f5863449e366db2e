"""The packages that activation needs: where one is missing or too old, the import says which."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreters import AFFECTED, Fresh

BOUND = {"packaging": "20.0", "wrapt": "1.15.0"}
# What is in the way, and what the error says of it.
WAYS = {
    "too old": ("__version__ = '1.14.1'\n", "{name} 1.14.1 is installed"),
    "missing": (
        "raise ModuleNotFoundError(\"No module named '{name}'\")\n",
        "it cannot be imported (No module",
    ),
    "another of this name": ("", "it is not what is there (AttributeError"),
    "an odd version": ("__version__ = 'newest'\n", "it is not what is there (InvalidVersion"),
}


def write(folder: Path, name: str, source: str) -> str:
    """Put a package in front of the one that is installed; packaging's own modules stay."""
    (folder / "site" / name).mkdir(parents=True)
    stay = "import os, sys\n__path__ += [os.path.join(p, NAME) for p in sys.path if 'site-packages' in p]\n"
    text = stay.replace("NAME", repr(name)) + source.format(name=name)
    (folder / "site" / name / "__init__.py").write_text(text)
    return str(folder / "site")


@pytest.mark.parametrize("switch", ["auto", "strict"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BOUND)
def test_one_error_names_the_version_found_and_wanted(
    fresh: Fresh, tmp_path: Path, name: str, way: str, switch: str
) -> None:
    source, says = WAYS[way]
    path = write(tmp_path, name, source)
    if name == "wrapt" and not AFFECTED:  # it is not looked at
        ended = fresh("import torch_dcp_backport\ntell(ok=1)", path=path, switch=switch, anew=True)
        assert ended.facts == {"ok": 1}
        return
    ended = fresh("import torch_dcp_backport", path=path, switch=switch, anew=True)
    assert ended.code == 1
    last = ended.err.splitlines()[-1]
    assert last.startswith(f"ImportError: torch_dcp_backport needs {name} >= {BOUND[name]}, and ")
    assert says.format(name=name) in last
    assert last.endswith(f": pip install '{name}>={BOUND[name]}'")


@pytest.mark.parametrize("name", BOUND)
def test_switched_off_none_is_looked_at(fresh: Fresh, tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name, "raise AssertionError\n")
    code = "import torch_dcp_backport\ntell(outcome=torch_dcp_backport.status().outcome)"
    assert fresh(code, path=path, switch="off", anew=True).facts == {"outcome": "disabled"}


@pytest.mark.skipif(not AFFECTED, reason="wrapt is not needed")
def test_our_own_command_reports_it(fresh: Fresh, tmp_path: Path) -> None:
    path = write(tmp_path, "wrapt", "__version__ = '1.14.1'\n")
    ended = fresh("", "-m", "torch_dcp_backport", "status", path=path)
    assert ended.code == 1
    said = " ".join((ended.out + ended.err).split())  # in lines of 80 columns
    assert "torch_dcp_backport needs wrapt >= 1.15.0, and wrapt 1.14.1 is installed" in said
    assert "Traceback" not in ended.err
