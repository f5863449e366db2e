"""The floors of the package: which part may use which other one, that no arrow turns back, and its doors.

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
    # Parsers of commands: there without torch.
    "arguments": set(),
    "private_members": set(),
    "compat": {"private_members"},
    "publish": set(),
    "transfer": {"compat", "private_members"},
    "state_dict": {"compat", "private_members", "transfer"},
    "dcp": {"compat"},
    # Finds its replacements by name, when they are put in place.
    "activation": {"_version", "dcp", "state_dict"},
    "dist_checkpointing": {"compat", "private_members", "publish", "transfer"},
    "hf": {"compat", "publish", "transfer"},
    "megatron": {"arguments", "compat", "publish", "transfer", "hf", "dist_checkpointing"},
    "rooms": set(),
    "checkpoint": {
        *("arguments", "compat", "private_members", "publish", "transfer", "hf", "dist_checkpointing"),
        *("state_dict", "rooms"),
    },
    "engine": {"compat", "private_members", "transfer", "hf", "rooms"},
}
#: Modules that stand on another floor than their folder, and what they may use besides.
APART = {"dist_checkpointing/training_state.py": {"state_dict"}}
#: The folder of a room that no other room looks into.
INSIDES = "_src"
#: Above all floors: commands, and what is run as a program.
ROOF = {"__init__", "__main__", "bug_report", "doctor", "program", "regression"}


def part_of(module: str) -> str:
    """`a.b.c` of the package -> `b`."""
    return [*module.split("."), "__init__"][1]


def named_in(tree: ast.Module, module: str) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of everything of the package that a module names."""
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            base += [node.module] if node.module else []
            names = [".".join([*base, alias.name]) for alias in node.names]
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            names = [ast.unparse(node)] if re.match(rf"{NAME}\.", ast.unparse(node)) else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            # Of a name that is put together, too: f"torch_dcp_backport.{room}" names every room.
            names = [node.value] if re.fullmatch(rf"{NAME}(\.\w*)+", node.value) else []
        for name in names:
            if name.split(".")[0] == NAME and "." in name:
                yield node.lineno, name


def wrong_in(source: str, path: str) -> list[str]:
    """The uses in a module that its floor does not have."""
    own = path.split("/")[0].removesuffix(".py")
    if own in ROOF:
        return []
    allowed = {own, *FLOORS[own], *APART.get(path, ())}
    module = ".".join([NAME, *path.removesuffix(".py").split("/")])
    uses = [(line, part_of(name)) for line, name in named_in(ast.parse(source), module)]
    return [f"{path}:{line} uses {part or 'any room'}" for line, part in uses if part not in allowed]


def insides_in(source: str, path: str) -> list[str]:
    """The insides of other rooms that a module names: what a room shares is imported from the room itself."""
    own = path.split("/")[0].removesuffix(".py")
    module = ".".join([NAME, *path.removesuffix(".py").split("/")])
    uses = [(line, name) for line, name in named_in(ast.parse(source), module) if INSIDES in name.split(".")]
    return [f"{path}:{line} reaches into {name}" for line, name in uses if part_of(name) != own]


def neighbours_names(room: str) -> set[str]:
    """The names at a room's door that are there for other rooms alone: imported as themselves."""
    tree = ast.parse((PACKAGE / room / "__init__.py").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    names = [alias for node in imports for alias in node.names]
    return {alias.name for alias in names if alias.asname == alias.name}


def modules() -> list[str]:
    return sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


def test_no_module_uses_what_its_floor_does_not_have() -> None:
    found = [wrong_in((PACKAGE / path).read_text(), path) for path in modules() if path != "rooms.py"]
    assert [text for of_module in found for text in of_module] == []


def test_no_module_reaches_into_another_room() -> None:
    found = [insides_in((PACKAGE / path).read_text(), path) for path in modules()]
    assert [text for of_module in found for text in of_module] == []


def test_examples_and_pages_show_no_insides() -> None:
    root = PACKAGE.parent
    pages = [*root.glob("examples/*.py"), *root.glob("docs/*.md"), root / "README.md"]
    shown = re.compile(rf"(import|from) {NAME}\.[\w.]*{INSIDES}|{NAME}\.\w+\.{INSIDES}")
    assert [str(page) for page in pages if shown.search(page.read_text())] == []


def test_a_neighbour_uses_what_a_door_holds_for_neighbours() -> None:
    used = set()
    for path in modules():
        own = path.split("/")[0].removesuffix(".py")
        module = ".".join([NAME, *path.removesuffix(".py").split("/")])
        names = {name for _, name in named_in(ast.parse((PACKAGE / path).read_text()), module)}
        used |= {name for name in names if part_of(name) != own}
    rooms = [room for room in FLOORS if (PACKAGE / room / INSIDES).is_dir()]
    assert rooms
    idle = {f"{NAME}.{room}.{name}" for room in rooms for name in neighbours_names(room)} - used
    assert idle == set()


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
    "from torch_dcp_backport.checkpoint._src.store import Shelf",
    "from torch_dcp_backport import checkpoint",
    "from ..checkpoint import store",
    "import torch_dcp_backport.checkpoint",
    "def f():\n    from torch_dcp_backport.checkpoint import store",
    "import importlib\nm = importlib.import_module('torch_dcp_backport.checkpoint')",
    "m = __import__(f'torch_dcp_backport.{name}')",
    "import torch_dcp_backport\nm = torch_dcp_backport.checkpoint._src.store",
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


@pytest.mark.parametrize(
    "source",
    [
        "from torch_dcp_backport.transfer._src.call import Call",
        "from torch_dcp_backport.transfer import _src",
        "def f():\n    from torch_dcp_backport.transfer._src import call",
        "import torch_dcp_backport.transfer._src.call",
        "m = import_module('torch_dcp_backport.transfer._src.call')",
        "import torch_dcp_backport\nm = torch_dcp_backport.transfer._src.call",
    ],
)
def test_a_reach_into_another_room_is_seen(source: str) -> None:
    assert len(insides_in(source, "hf/files.py")) == 1
    assert insides_in(source, "transfer/files.py") == []


@pytest.mark.parametrize("source", GOOD)
def test_a_right_use_is_none(source: str) -> None:
    assert [text for text in wrong_in(source, "hf/files.py") if "__version__" not in text] == []
