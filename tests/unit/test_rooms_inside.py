"""Order inside a room: no files that import each other in a circle, no class name with two meanings, and one
list of public names. Read from the syntax trees."""

from __future__ import annotations

import ast
from collections import defaultdict
from importlib import import_module
from pathlib import Path

import pytest

import torch_dcp_backport

PACKAGE = Path(torch_dcp_backport.__file__).parent
ROOT = PACKAGE.parent
NAME = PACKAGE.name
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))

#: Room -> a file of each circle that is known, and still to be broken.
KNOWN_CIRCLES = {"checkpoint": {"handler"}, "dist_checkpointing": {"serialization"}}
#: Room -> the names of classes that are known to stand for two things.
KNOWN_TWICE: dict[str, set[str]] = {}
#: Words of this package's own, for which torch, DCP and Megatron have names. They came back often enough.
OWN_WORDS = {
    *(
        "told",
        "seat",
        "sight",
        "course",
        "governor",
        "governs",
        "governed",
        "governance",
        "outlook",
        "saying",
    ),
    *("stand", "stands", "hand", "story", "heard", "spelled", "settle", "settled"),
}
#: Rooms that have none of them.
IN_WORDS_OF_THE_FIELD = (
    "activation",
    "dcp",
    "dist_checkpointing",
    "engine",
    "hf",
    "megatron",
    "publish",
    "regression",
    "state_dict",
    "transfer",
)


def modules_of(room: str) -> dict[str, ast.Module]:
    """Return dotted name -> syntax tree of the files of a room."""
    paths = (PACKAGE / room).rglob("*.py")
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    return {name.removesuffix(".__init__"): ast.parse(path.read_text()) for path, name in names.items()}


def imports_of(tree: ast.Module, modules: set[str]) -> set[str]:
    """Return the modules of a room that a file imports, in function bodies and for type checkers, too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {
                name for name in (f"{node.module}.{alias.name}" for alias in node.names) if name in modules
            }
            found |= (
                {node.module}
                if any(f"{node.module}.{alias.name}" not in modules for alias in node.names)
                else set()
            )
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & modules


def circles_in(uses: dict[str, set[str]]) -> list[set[str]]:
    """Return the sets of two or more modules that reach one another."""
    reached = {module: set(found) for module, found in uses.items()}
    for through in uses:
        for module in uses:
            if through in reached[module]:
                reached[module] |= reached[through]
    circles = {
        frozenset(other for other in uses if other in reached[module] and module in reached[other])
        for module in uses
        if module in reached[module]
    }
    return [set(circle) for circle in circles if len(circle) > 1]


@pytest.mark.parametrize("room", ROOMS)
def test_no_files_of_a_room_import_each_other_in_a_circle(room: str) -> None:
    trees = modules_of(room)
    # A room's own __init__ shows what its files have: a file that imports the room comes after all of them.
    uses = {
        module: imports_of(tree, set(trees)) - {module, f"{NAME}.{room}"} for module, tree in trees.items()
    }
    known = KNOWN_CIRCLES.get(room, set())
    circles = [{module.rpartition(".")[2] for module in circle} for circle in circles_in(uses)]
    assert [sorted(circle) for circle in circles if not circle & known] == []


@pytest.mark.parametrize("room", ROOMS)
def test_a_class_name_of_a_room_has_one_meaning(room: str) -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for module, tree in modules_of(room).items():
        for node in ast.walk(tree):
            # A Protocol says what a lower file needs of a class above it, under the name of that class.
            if isinstance(node, ast.ClassDef) and "Protocol" not in map(ast.unparse, node.bases):
                places[node.name].append(module)
    twice = {name: modules for name, modules in places.items() if len(modules) > 1}
    assert {name: twice[name] for name in twice.keys() - KNOWN_TWICE.get(room, set())} == {}


def test_the_reference_shows_each_library() -> None:
    tree = ast.parse((ROOT / "tools" / "docs.py").read_text())
    (shown,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PUBLIC"
    ]
    assert sorted(shown) == sorted(["", *(f".{library}" for library in torch_dcp_backport._ROOMS)])


@pytest.mark.parametrize("library", torch_dcp_backport._ROOMS)
def test_a_public_name_is_not_one_for_other_libraries_alone(library: str) -> None:
    """The reference shows `__all__`; a name that is imported as itself is for other libraries alone."""
    public = import_module(f"{NAME}.{library}").__all__
    assert len(set(public)) == len(public)
    tree = ast.parse((PACKAGE / library / "__init__.py").read_text())
    aliases = [alias for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert {alias.name for alias in aliases if alias.asname == alias.name} & set(public) == set()
    assert {alias.name for alias in aliases if alias.asname is None} - {"require"} <= set(public)


def names_in(tree: ast.Module) -> set[str]:
    """Return the names that a file gives or uses, of all kinds."""
    found: set[str] = set()
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname"):
            name = getattr(node, field, None)
            found |= {name} if isinstance(name, str) else set()
    return found


@pytest.mark.parametrize("room", IN_WORDS_OF_THE_FIELD)
def test_names_of_a_room_are_words_of_the_field(room: str) -> None:
    own = set()
    for module, tree in modules_of(room).items():
        for name in {module.rpartition(".")[2], *names_in(tree)}:
            own |= {f"{module}: {name}"} if OWN_WORDS & set(name.lower().split("_")) else set()
    assert own == set()
