"""What the documents say in the same words everywhere, and that every link in them leads somewhere."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import torch_dcp_backport
from torch_dcp_backport.__main__ import ABOUT, HELP
from torch_dcp_backport.activation.status import UNINSTALL

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("patches/*.md"),
        *ROOT.glob("benchmarks/**/*.md"),
    ]
)
#: An inline link or picture; the text may hold a picture of its own.
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")


def flat(text: str) -> str:
    """A text without its breaks of lines."""
    return " ".join(text.split())


def prose(page: Path) -> str:
    """A page without its blocks of code and code in lines, which have no links."""
    return re.sub(r"^ *```.*?^ *```$|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What its headings are called in links, as GitHub and GitLab call them; the second of a name has -1."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(
            " ", "-"
        )
        found.add(name if name not in found else f"{name}-1")
    return found


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/README.md"])
def test_a_page_says_what_this_is_in_the_same_three_sentences(page: str) -> None:
    assert flat(ABOUT) in flat((ROOT / page).read_text())
    assert ABOUT in HELP
    assert len(re.findall(r"\.(?: |$)", flat(ABOUT))) == 3


def test_the_wheel_describes_itself_in_the_first_words_of_these() -> None:
    (line,) = re.findall(r'^description = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert flat(ABOUT).partition(":")[0].split(" ", 1)[1].capitalize() == line.partition(". ")[0]


def test_no_page_advises_to_uninstall_without_a_look_at_the_libraries() -> None:
    assert "library of this package" in UNINSTALL
    unsaid = [
        f"{page.name}: {paragraph}"
        for page in PAGES
        for paragraph in re.split(r"\n\s*\n", page.read_text())
        if re.search(r"\buninstall\b", paragraph) and "librar" not in paragraph
    ]
    assert unsaid == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for link, anchor in LINK.findall(prose(page)):
        if "://" in link or link.startswith("mailto:"):
            continue
        there = page.parent / link if link else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            dead.append(f"{link}#{anchor}")
    assert dead == []


def test_no_address_of_the_project_is_invented() -> None:
    texts = [*PAGES, ROOT / "pyproject.toml"]
    assert [page.name for page in texts if "github.com/torch-dcp-backport" in page.read_text()] == []


def test_a_public_name_is_the_same_thing_in_every_library() -> None:
    """`last_report` told of messages in one library, and of files in another."""
    doors = {name: import_module(f"torch_dcp_backport.{name}") for name in torch_dcp_backport._ROOMS}
    meant: dict[str, dict[int, list[str]]] = {}
    for library, door in doors.items():
        for name in door.__all__:
            meant.setdefault(name, {}).setdefault(id(getattr(door, name)), []).append(library)
    assert {name: list(things.values()) for name, things in meant.items() if len(things) > 1} == {}


#: In a row of README's "Which function do I call?": a name of a library, and an option of a function.
NAME = re.compile(rf"`((?:{'|'.join(torch_dcp_backport._ROOMS)})(?:\.\w+)+)`")
OPTION = re.compile(r"`(\w+)=[^`]*`")


def meant(dotted: str) -> Any:
    """What `library.name` is below the package."""
    module, _, name = f"torch_dcp_backport.{dotted}".rpartition(".")
    return getattr(import_module(module), name)


def options_of(name: str) -> set[str]:
    """The options of a function or class; of the state dict functions those of `StateDictOptions`, too."""
    of = [name, "state_dict.StateDictOptions"] if name.startswith("state_dict.") else [name]
    return {option for each in of for option in inspect.signature(meant(each)).parameters}


def test_readme_leads_from_what_a_user_has_to_functions_that_are_there() -> None:
    text = (ROOT / "README.md").read_text()
    table = text.split("## Which function do I call?\n")[1].split("\n## ")[0]
    rows = [row.strip("|").split("|") for row in table.splitlines() if row.startswith("|")][2:]
    assert len(rows) >= 10
    shown: set[str] = set()
    for has, call, page in rows:
        names = NAME.findall(call)
        shown |= {name.split(".")[0] for name in names}
        assert names or "the same" in call or "`import torch_dcp_backport`" in call, has
        for name in names:
            assert meant(name) is not None, name
        for option in OPTION.findall(call):
            assert any(option in options_of(name) for name in names), option
        assert LINK.search(page), has
    assert shown == set(torch_dcp_backport._ROOMS)


def test_unreleased_changes_are_a_line_each_and_begin_with_the_breaking_ones() -> None:
    """A user who upgrades reads what breaks first; the reasons are in git."""
    unreleased = (ROOT / "CHANGELOG.md").read_text().split("## [Unreleased]\n")[1].split("\n## [")[0]
    headings = re.findall(r"^### (.*)$", unreleased, re.MULTILINE)
    assert "Breaking" not in headings[1:]
    assert set(headings) <= {"Breaking", "Added", "Changed", "Fixed", "Removed"}
    entries = [flat(entry) for entry in re.split(r"^(?:- |### .*)", unreleased, flags=re.MULTILINE)]
    assert [entry for entry in entries if len(entry) > 250] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_at_most_one_picture(page: Path) -> None:
    assert len(re.findall(r"!\[", prose(page))) <= 1
