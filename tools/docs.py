#!/usr/bin/env python3
"""The pages and a reference of all public names, as a site in build/site.

    make docs

Runs in the lane `docs`, which has mkdocs and mkdocstrings. It reads the sources, and imports neither the
package nor torch. A dead link, a dead anchor, or a public name without a docstring ends it with exit code 1.
"""

from __future__ import annotations

import io
import logging
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import griffe
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "site"
PACKAGE = "torch_dcp_backport"
# What CONTRIBUTING.md, "Versions", calls public. None is all of a module's __all__.
PUBLIC: dict[str, tuple[str, ...] | None] = {
    "": None,
    ".state_dict": None,
    ".transfer": ("configure", "last_report", "reshard", "Report", "Progress", "TransferError"),
    ".dist_checkpointing": None,
    ".checkpoint": None,
    ".hf": ("load_state_dict", "save_state_dict", "save_adapter", "opened", "Export", "Filled", "Saved"),
    ".megatron": None,
    ".engine": None,
}
# Files and folders that pages link to, as they are.
LINKED = re.compile(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")
NAV: list[Any] = [
    {"Home": "README.md"},
    {"By stack": "docs/stacks.md"},
    {
        "Fix an out-of-memory": [
            "docs/install.md",
            "docs/recipes.md",
            "docs/state-dict.md",
            "docs/tuning.md",
            "docs/migration.md",
        ]
    },
    {"Save and resume": ["docs/checkpoint.md", "docs/dist-checkpointing.md"]},
    {
        "Reshard, convert, train": [
            "docs/transfer.md",
            "docs/hf.md",
            "docs/megatron.md",
            "docs/engine.md",
        ]
    },
    {"Run it in CI": ["docs/in-your-ci.md"]},
    {"When something goes wrong": ["docs/troubleshooting.md", "docs/reliability.md"]},
]


def main() -> int:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    missing = sorted(undocumented())
    for name in missing:
        print(f"{name} is public and has no docstring", file=sys.stderr)
    with TemporaryDirectory() as folder:
        source = Path(folder)
        pages = copied(source)
        for module, names in PUBLIC.items():
            (source / "api").mkdir(exist_ok=True)
            (source / "api" / f"{PACKAGE}{module}.md").write_text(reference(module, names))
        try:
            build(configuration(source))
        except Abort as error:
            print(f"docs: {error}", file=sys.stderr)
            return 1
    print(f"{len(pages)} pages and {sum(1 for _ in public())} public names in {SITE.relative_to(ROOT)}")
    return 1 if missing else 0


def copied(source: Path) -> list[Path]:
    """Copy the pages, and the files in the tree that they link to, to where their links find them."""
    pages = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("patches/*.md"),
        *ROOT.glob("benchmarks/**/*.md"),
    ]
    for page in pages:
        text = page.read_text()
        for link in LINKED.findall(text):
            there = (page.parent / link).resolve()
            if there.is_dir():  # no page of a site
                text = text.replace(f"]({link})", "](#)")
            elif there.is_file() and there.suffix != ".md":
                copy(there, source)
        goal = source / page.relative_to(ROOT)
        goal.parent.mkdir(parents=True, exist_ok=True)
        goal.write_text(text)
    return pages


def copy(file: Path, source: Path) -> None:
    goal = source / file.relative_to(ROOT)
    goal.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, goal)


def reference(module: str, names: tuple[str, ...] | None) -> str:
    """Return the page of a module."""
    blocks = [f"# {PACKAGE}{module}\n"]
    for name in names or exported(module):
        hides = LOADED[f"{PACKAGE}{module}"].members[name].is_module
        blocks.append(f"::: {meant(module, name).path if hides else f'{PACKAGE}{module}.{name}'}\n")
    return "\n".join(blocks)


def exported(module: str) -> list[str]:
    """Return the public names of a module, by its `__all__`."""
    found = LOADED[f"{PACKAGE}{module}"].exports or []
    return [
        str(getattr(name, "name", name))
        for name in found
        if str(getattr(name, "name", name)) != "__version__"
    ]


def public() -> Iterator[tuple[str, Any]]:
    """Yield every public name with what it is."""
    for module, names in PUBLIC.items():
        for name in names or exported(module):
            yield f"{PACKAGE}{module}.{name}", meant(module, name)


def meant(module: str, name: str) -> Any:
    """Return what a name at a module's door is; a file may have the name of the function that is in it."""
    found = LOADED[f"{PACKAGE}{module}"].members[name]
    found = found.final_target if found.is_alias else found
    return found.members[name] if found.is_module and name in found.members else found


def undocumented() -> Iterator[str]:
    """Yield the public names, and public methods of public classes, that have no docstring."""
    for path, found in public():
        if not found.has_docstring:
            yield path
        if found.is_class:
            for name, member in found.members.items():
                own = not member.is_alias and member.is_function and not name.startswith("_")
                if own and not member.has_docstring and not inherited(found, name):
                    yield f"{path}.{name}"


def inherited(owner: Any, name: str) -> bool:
    """Whether a base has a docstring for this method."""
    try:
        bases = owner.mro()
    except Exception:  # a base outside of the package
        return False
    return any(name in base.members and base.members[name].has_docstring for base in bases)


def configuration(source: Path) -> Any:
    nav = [*NAV, {"Reference": [f"api/{PACKAGE}{module}.md" for module in PUBLIC]}]
    listed = {
        page
        for part in nav
        for pages in part.values()
        for page in ([pages] if isinstance(pages, str) else pages)
    }
    others = sorted(str(page.relative_to(source)) for page in source.rglob("*.md"))
    nav.append({"More": [page for page in others if page not in listed]})
    return load_config(
        config_file=io.StringIO("{}"),
        site_name="torch-dcp-backport",
        docs_dir=str(source),
        site_dir=str(SITE),
        use_directory_urls=False,
        theme={"name": "mkdocs"},
        nav=nav,
        strict=True,
        validation={"links": {"anchors": "warn", "not_found": "warn", "absolute_links": "warn"}},
        markdown_extensions=["fenced_code", "tables", {"toc": {"slugify": slug}}],
        plugins=[
            "search",
            {"mkdocstrings": {"handlers": {"python": {"paths": [str(ROOT)], "options": OPTIONS}}}},
        ],
    )


def slug(text: str, separator: str) -> str:
    """Return what a heading is called in links, as GitHub and GitLab call it."""
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", separator)


OPTIONS = {
    "docstring_style": "google",
    # The fields of a NamedTuple stand below Args.
    "docstring_options": {"warn_unknown_params": False, "warn_missing_types": False, "warnings": False},
    "extensions": [str(Path(__file__).with_name("docs_griffe.py"))],
    "allow_inspection": False,
    "show_source": False,
    "show_root_heading": True,
    "show_if_no_docstring": False,
    "heading_level": 2,
}
# Static: griffe parses the files.
LOADED: Any = griffe.GriffeLoader(search_paths=[str(ROOT)], allow_inspection=False)
LOADED.load(PACKAGE)
LOADED.resolve_aliases(implicit=True, external=False)
LOADED = LOADED.modules_collection

if __name__ == "__main__":
    sys.exit(main())
