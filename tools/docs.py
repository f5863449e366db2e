#!/usr/bin/env python3
"""The pages, the examples and a reference of all public names, as a site in build/site.

    make docs
    make docs VERSION=0.2.0     # in build/versions/0.2.0, beside other releases, with a menu of all of them

Runs in the lane `docs`, which has mkdocs, its theme "material" and mkdocstrings. It reads the sources, and
imports neither the package nor torch. The site asks nothing of other servers. A dead link, a dead anchor, or
a public name without a docstring ends it with exit code 1.
"""

from __future__ import annotations

import argparse
import io
import json
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
from pages_of_code import listing, page_of

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "site"
#: A folder for each release, and the list that the menu reads.
VERSIONS = ROOT / "build" / "versions"
PACKAGE = "torch_dcp_backport"
STYLE = Path(__file__).with_name("site.css")
# The reference shows the `__all__` of each: what CONTRIBUTING.md, "Versions", calls public.
PUBLIC = ("", ".state_dict", ".transfer", ".dist_checkpointing", ".checkpoint", ".hf", ".megatron", ".engine")
# Files and folders that pages link to, as they are.
LINKED = re.compile(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")
NAV: list[Any] = [
    {"Home": "README.md"},
    {"All pages by task": "docs/README.md"},
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
    {"When something goes wrong": ["docs/troubleshooting.md", "docs/reliability.md", "docs/guarantees.md"]},
    {
        "How it works, and what was tested": [
            "docs/what-is-patched.md",
            "docs/how-it-works.md",
            "docs/accelerators.md",
            "docs/compatibility.md",
            "docs/conformance.md",
            "docs/upstream-tests.md",
            "docs/alternatives.md",
            "docs/measurements.md",
        ]
    },
]
#: Programs of examples/ in the order of the cookbook; each other one comes after them.
COOKBOOK = (
    *("tour", "fsdp2_full_state", "train_resume", "sharded_checkpoint", "one_tensor", "hf_shards"),
    *("hsdp_full_state", "tp_fsdp2_full_state", "lora_from_meta", "engine_sft"),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", help="the release whose pages these are, for a folder of its own")
    version = parser.parse_args().version
    site = VERSIONS / version if version else SITE
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    missing = sorted(undocumented())
    for name in missing:
        print(f"{name} is public and has no docstring", file=sys.stderr)
    with TemporaryDirectory() as folder:
        source = Path(folder)
        pages = copied(source)
        shutil.copyfile(STYLE, source / STYLE.name)
        for module in PUBLIC:
            (source / "api").mkdir(exist_ok=True)
            (source / "api" / f"{PACKAGE}{module}.md").write_text(reference(module))
        try:
            build(configuration(source, site))
        except Abort as error:
            print(f"docs: {error}", file=sys.stderr)
            return 1
    if version:
        listed(version)
    print(f"{len(pages)} pages and {sum(1 for _ in public())} public names in {site.relative_to(ROOT)}")
    return 1 if missing else 0


def copied(source: Path) -> list[Path]:
    """Write the pages, and what they link to in the tree, to where their links find them."""
    pages = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("patches/*.md"),
        *ROOT.glob("benchmarks/**/*.md"),
    ]
    shown: set[Path] = set(ROOT.glob("examples/*.py"))
    for page in pages:
        text = page.read_text()
        for link in LINKED.findall(text):
            there = (page.parent / link).resolve()
            if there.is_dir():  # no page of a site
                text = re.sub(rf"\[([^\]]*)\]\({re.escape(link)}\)", r"\1", text)
            elif there.suffix == ".py" and there.is_file():  # a page with its lines in colour
                shown.add(there)
                text = text.replace(f"]({link})", f"]({link}.md)")
            elif there.is_file() and there.suffix != ".md":
                copy(there, source)
        goal = source / page.relative_to(ROOT)
        goal.parent.mkdir(parents=True, exist_ok=True)
        goal.write_text(text)
    for file in shown:
        name = file.relative_to(ROOT)
        goal = source / f"{name}.md"
        goal.parent.mkdir(parents=True, exist_ok=True)
        goal.write_text(page_of(file) if name.parts[0] == "examples" else listing(file, str(name)))
    return pages


def copy(file: Path, source: Path) -> None:
    goal = source / file.relative_to(ROOT)
    goal.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, goal)


def reference(module: str) -> str:
    """Return the page of a module."""
    blocks = [f"# {PACKAGE}{module}\n"]
    for name in exported(module):
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
    for module in PUBLIC:
        for name in exported(module):
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


def listed(version: str) -> None:
    """Add a release to the list that the menu reads, the newest first; the root leads to the newest."""
    path = VERSIONS / "versions.json"
    others = json.loads(path.read_text()) if path.exists() else []
    names = {version, *(each["version"] for each in others)}
    ordered = sorted(names, key=lambda name: [int(part) for part in re.findall(r"\d+", name)], reverse=True)
    lines = [{"version": name, "title": name, "aliases": []} for name in ordered]
    path.write_text(json.dumps(lines, indent=1) + "\n")
    leads = f'<meta http-equiv="refresh" content="0; {ordered[0]}/">'
    (VERSIONS / "index.html").write_text(f"<!doctype html><title>torch-dcp-backport</title>{leads}\n")


def configuration(source: Path, site: Path) -> Any:
    examples = sorted(
        (f"examples/{path.name}" for path in source.glob("examples/*.md")),
        key=lambda path: next((n for n, name in enumerate(COOKBOOK) if f"/{name}.py" in path), len(COOKBOOK)),
    )
    nav = [*NAV[:3], {"Cookbook": examples}, *NAV[3:]]
    nav.append(
        {"Reference": [{module.lstrip(".") or PACKAGE: f"api/{PACKAGE}{module}.md"} for module in PUBLIC]}
    )
    taken = set(in_nav(nav))
    others = sorted(str(page.relative_to(source)) for page in source.rglob("*.md"))
    others = [page for page in others if page not in taken and not page.endswith(".py.md")]
    nav.append({"Defects of torch": [page for page in others if page.startswith("patches/")]})
    nav.append({"For contributors": [page for page in others if not page.startswith("patches/")]})
    return load_config(
        config_file=io.StringIO("{}"),
        site_name="torch-dcp-backport",
        docs_dir=str(source),
        site_dir=str(site),
        use_directory_urls=False,
        theme=THEME,
        extra_css=[STYLE.name],
        nav=nav,
        not_in_nav="*.py.md",
        strict=True,
        validation={"links": {"anchors": "warn", "not_found": "warn", "absolute_links": "warn"}},
        markdown_extensions=[
            "pymdownx.superfences",
            "tables",
            {"pymdownx.highlight": {"use_pygments": True}},
            {"toc": {"slugify": slug, "permalink": True, "toc_depth": 3}},
        ],
        plugins=[
            "material/search",
            {"mkdocstrings": {"handlers": {"python": {"paths": [str(ROOT)], "options": OPTIONS}}}},
        ],
        extra={"generator": False, "version": {"provider": "mike"}} if site != SITE else {"generator": False},
    )


def in_nav(part: Any) -> Iterator[str]:
    """Yield the pages below a part of the navigation."""
    if isinstance(part, str):
        yield part
    else:
        for below in part.values() if isinstance(part, dict) else part:
            yield from in_nav(below)


def slug(text: str, separator: str) -> str:
    """Return what a heading is called in links, as GitHub and GitLab call it."""
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", separator)


THEME: dict[str, Any] = {
    "name": "material",
    "font": False,  # the reader's own: a site asks no other server
    "features": [
        "content.code.copy",
        "navigation.footer",
        "navigation.indexes",
        "navigation.top",
        "search.highlight",
        "search.suggest",
        "toc.follow",
    ],
    "palette": [
        {
            "media": "(prefers-color-scheme: light)",
            "scheme": "default",
            "toggle": {"icon": "material/weather-night", "name": "dark"},
        },
        {
            "media": "(prefers-color-scheme: dark)",
            "scheme": "slate",
            "toggle": {"icon": "material/weather-sunny", "name": "light"},
        },
    ],
}
OPTIONS = {
    "docstring_style": "google",
    # The fields of a NamedTuple stand below Args.
    "docstring_options": {"warn_unknown_params": False, "warn_missing_types": False, "warnings": False},
    "extensions": [str(Path(__file__).with_name("docs_griffe.py"))],
    "allow_inspection": False,
    "show_source": False,
    "show_root_heading": True,
    "show_root_full_path": False,
    "merge_init_into_class": True,
    "show_if_no_docstring": False,
    "show_signature_annotations": True,
    "separate_signature": True,
    "line_length": 80,  # of signatures, which ruff breaks
    "docstring_section_style": "list",
    "show_symbol_type_heading": True,
    "show_symbol_type_toc": True,
    "heading_level": 2,
}
# Static: griffe parses the files.
LOADED: Any = griffe.GriffeLoader(search_paths=[str(ROOT)], allow_inspection=False)
LOADED.load(PACKAGE)
LOADED.resolve_aliases(implicit=True, external=False)
LOADED = LOADED.modules_collection

if __name__ == "__main__":
    sys.exit(main())
