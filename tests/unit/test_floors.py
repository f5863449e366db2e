"""The floors of the package: which part may use which other one, and that no arrow turns back.

Read from the syntax trees: imports in function bodies count, and so do names of modules in strings.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import torch_dcp_backport

PACKAGE = Path(torch_dcp_backport.__file__).parent
NAME = PACKAGE.name

#: Part of the package -> the parts that it may use, from the ground up: each stands below all that use it.
FLOORS: dict[str, set[str]] = {
    "_version": set(),
    "compat": set(),
    "publish": set(),
    "transfer": {"compat"},
    "state_dict": {"compat", "transfer"},
    "dcp": {"compat"},
    # Finds its replacements by name, when they are put in place.
    "activation": {"_version", "dcp", "state_dict"},
    "dist_checkpointing": {"compat", "publish", "transfer"},
    "hf": {"compat", "publish", "transfer"},
    "megatron": {"compat", "publish", "transfer", "hf", "dist_checkpointing"},
    "rooms": set(),
    "checkpoint": {"compat", "publish", "transfer", "hf", "dist_checkpointing", "state_dict", "rooms"},
    "engine": {"compat", "transfer", "hf", "rooms"},
}
#: Modules that stand on another floor than their folder, and what they may use besides.
APART = {"dist_checkpointing/training_state.py": {"state_dict"}}
#: Above all floors: commands, and what is run as a program.
ROOF = {"__init__", "__main__", "bug_report", "doctor", "program", "regression"}


def part_of(module: str) -> str:
    """`a.b.c` of the package -> `b`."""
    return [*module.split("."), "__init__"][1]


def used_by(tree: ast.Module, module: str) -> Iterator[tuple[int, str]]:
    """Yield (line, part of the package) of everything that a module names."""
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            base += [node.module] if node.module else []
            names = [".".join([*base, alias.name]) for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == NAME:
            names = [f"{NAME}.{node.attr}"]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            # Of a name that is put together, too: f"torch_dcp_backport.{room}" names every room.
            names = [node.value] if re.fullmatch(rf"{NAME}(\.\w*)+", node.value) else []
        for name in names:
            if name.split(".")[0] == NAME and "." in name:
                yield node.lineno, part_of(name)


def wrong_in(source: str, path: str) -> list[str]:
    """The uses in a module that its floor does not have."""
    own = path.split("/")[0].removesuffix(".py")
    if own in ROOF:
        return []
    allowed = {own, *FLOORS[own], *APART.get(path, ())}
    module = ".".join([NAME, *path.removesuffix(".py").split("/")])
    uses = used_by(ast.parse(source), module)
    return [f"{path}:{line} uses {part or 'any room'}" for line, part in uses if part not in allowed]


def modules() -> list[str]:
    return sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


def test_no_module_uses_what_its_floor_does_not_have() -> None:
    found = [wrong_in((PACKAGE / path).read_text(), path) for path in modules() if path != "rooms.py"]
    assert [text for of_module in found for text in of_module] == []


def test_every_part_has_a_floor_below_all_that_use_it() -> None:
    parts = {path.split("/")[0].removesuffix(".py") for path in modules()}
    assert parts == {*FLOORS, *ROOF}
    floor = {part: number for number, part in enumerate(FLOORS)}
    assert [(user, part) for user in floor for part in FLOORS[user] if floor[part] > floor[user]] == []


def test_an_offer_is_of_a_room_above_which_nobody_uses_directly() -> None:
    from torch_dcp_backport import rooms

    for what, (room, name) in rooms.OFFERS.items():
        assert room in FLOORS
        assert hasattr(getattr(torch_dcp_backport, room), name), what
        text = f'rooms.offered("{what}")'
        users = [path for path in modules() if text in (PACKAGE / path).read_text()]
        assert users, what


BAD = [
    "from torch_dcp_backport.checkpoint.store import Shelf",
    "from torch_dcp_backport import checkpoint",
    "from ..checkpoint import store",
    "import torch_dcp_backport.checkpoint",
    "def f():\n    from torch_dcp_backport.checkpoint import store",
    "import importlib\nm = importlib.import_module('torch_dcp_backport.checkpoint')",
    "m = __import__(f'torch_dcp_backport.{name}')",
    "import torch_dcp_backport\nm = torch_dcp_backport.checkpoint.store",
    "if TYPE_CHECKING:\n    from torch_dcp_backport.checkpoint import Shelf",
]
GOOD = [
    "from torch_dcp_backport.hf import files",
    "from .files import Draft",
    "from torch_dcp_backport import __version__ as version, compat",
    '"""torch_dcp_backport.checkpoint"""',
    "logger = logging.getLogger('torch_dcp_backport.hf')",
]


@pytest.mark.parametrize("source", BAD)
def test_a_wrong_use_is_seen(source: str) -> None:
    assert len(wrong_in(source, "hf/files.py")) == 1


@pytest.mark.parametrize("source", GOOD)
def test_a_right_use_is_none(source: str) -> None:
    assert [text for text in wrong_in(source, "hf/files.py") if "__version__" not in text] == []
