#!/usr/bin/env python3
"""Screenshots of the built site at 1280 and 390 px, and what a picture does not show.

    make docs shots        # build/shots/*.png

Runs in the lane `shots`, which has playwright; the browser is the machine's own: chromium or Google Chrome
on PATH, or the path in CHROME. It serves build/site on this machine alone. It ends with exit code 1 if a page
is wider than the window, cuts code beside the side bars, breaks a name in a table, has a wide table without a
shadow at its side, asks another server for something, writes an error to the console, hides a heading
below its header, or has no search, no copy button or no coloured code.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "site"
SHOTS = ROOT / "build" / "shots"
WIDTHS = (1280, 390)
HEIGHT = 900
#: The name of a picture, the page, and a heading to scroll to.
PAGES = (
    ("home", "index.html", ""),
    ("functions", "index.html", "which-function-do-i-call"),
    ("checkpoint", "docs/checkpoint.html", "managers"),
    ("stacks", "docs/stacks.html", "accelerate"),
    ("tour", "examples/tour.py.html", "what-it-prints"),
    ("how", "docs/how-it-works.html", "one-load"),
    (
        "reference",
        "api/torch_dcp_backport.checkpoint.html",
        "torch_dcp_backport.checkpoint.CheckpointHandler",
    ),
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
#: How far a page can be scrolled sideways, and the widest element that sticks out of no box that scrolls.
WIDER = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
#: Blocks of code that are wider than their box.
CUT = (
    "() => [...document.querySelectorAll('pre > code')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
)
#: Names in tables that stand in more than one line.
BROKEN = """() => [...document.querySelectorAll('.md-typeset table code')]
    .filter(e => !/[\\s-]/.test(e.textContent) && e.getClientRects().length > 1).map(e => e.textContent)"""
#: Tables that scroll, and do not show it.
UNMARKED = """() => [...document.querySelectorAll('.md-typeset__scrollwrap')]
    .filter(e => e.scrollWidth > e.clientWidth && getComputedStyle(e).backgroundImage === 'none').length"""
#: The upper edge of a heading below the lower edge of the header.
BELOW = """id => document.getElementById(id).getBoundingClientRect().top
    - document.querySelector('.md-header').getBoundingClientRect().bottom"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Say nothing of what is served."""


@contextmanager
def served() -> Iterator[str]:
    """The site's address on this machine."""
    handler = functools.partial(Quiet, directory=str(SITE))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


def browser_path() -> str:
    found = [os.environ.get("CHROME"), *map(shutil.which, BROWSERS)]
    path = next(filter(None, found), None)
    if path is None:
        raise SystemExit(f"no browser: none of {', '.join(BROWSERS)} is on PATH; install one, or set CHROME")
    return path


def faults_of(page: Page, anchor: str) -> Iterator[str]:
    """What is wrong with a page that is open."""
    wider = page.evaluate(WIDER)
    if wider > 0:
        yield f"it is {wider} px wider than the window"
    if page.viewport_size and page.viewport_size["width"] == max(WIDTHS) and page.evaluate(CUT):
        yield f"{page.evaluate(CUT)} blocks of code are cut"
    broken = page.evaluate(BROKEN)
    if broken:
        yield f"names in tables are broken: {', '.join(broken[:3])}"
    if page.evaluate(UNMARKED):
        yield f"{page.evaluate(UNMARKED)} wide tables do not show that they scroll"
    if anchor:
        below = page.evaluate(BELOW, anchor)
        if not 0 <= below < HEIGHT:
            yield f"the heading {anchor} is {below:.0f} px below the header"
    blocks, coloured, copies = (
        page.locator(selector).count()
        for selector in (
            ".highlight code",
            ".highlight code span[class]",
            "button.md-code__button, .md-clipboard",
        )
    )
    if blocks and not coloured:
        yield "its code has no colours"
    if blocks and not copies:
        yield "its code has no copy buttons"


def search_fault(page: Page) -> str:
    """What is wrong with the search for a word of a page, if anything."""
    page.locator(".md-header label[for=__search]").first.dispatch_event("click")
    page.locator("input.md-search__input").first.press_sequentially("max_ckpt_to_keep")
    try:
        page.wait_for_selector(".md-search-result__item a", timeout=10_000)
    except Exception as error:
        return f"the search finds nothing: {type(error).__name__}"
    return ""


def hear(heard: list[str], said: Any) -> None:
    """Keep an error of the console."""
    if said.type == "error":
        heard.append(said.text)


def hear_of(heard: list[str], address: str, asked: Any) -> None:
    """Keep a request to another server."""
    if not asked.url.startswith((address, "data:", "blob:", "about:")):
        heard.append(asked.url)


def main() -> int:
    shutil.rmtree(SHOTS, ignore_errors=True)
    SHOTS.mkdir(parents=True)
    wrong: list[str] = []
    with served() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        for width in WIDTHS:
            page = browser.new_page(viewport={"width": width, "height": HEIGHT})
            heard: list[str] = []
            page.on("console", functools.partial(hear, heard))
            page.on("request", functools.partial(hear_of, heard, address))
            for name, path, anchor in PAGES:
                page.goto("about:blank")
                heard.clear()
                page.goto(f"{address}{path}{'#' if anchor else ''}{anchor}", wait_until="networkidle")
                page.screenshot(path=str(SHOTS / f"{name}-{width}.png"))
                faults = [*faults_of(page, anchor), *(f"it says or asks: {text}" for text in heard)]
                wrong += [f"{path} at {width} px: {fault}" for fault in faults]
            page.goto(address, wait_until="networkidle")
            if width == WIDTHS[1]:
                page.locator(".md-header label[for=__drawer]").click()
                page.wait_for_timeout(500)  # until it has come in from the side
                page.screenshot(path=str(SHOTS / "menu.png"))
            if width == WIDTHS[0]:
                wrong += [f"search: {fault}" for fault in [search_fault(page)] if fault]
                page.screenshot(path=str(SHOTS / "search.png"))
        browser.close()
    for fault in wrong:
        print(fault, file=sys.stderr)
    print(f"{len(list(SHOTS.iterdir()))} pictures in {SHOTS.relative_to(ROOT)}, {len(wrong)} faults")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
