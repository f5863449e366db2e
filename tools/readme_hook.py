"""Build hook: README for a package index, which knows no relative links.

In the tree they stay relative, so that a checkout, a fork or a mirror shows its own pages. With an address in
[project.urls] they lead there; without one their text stays, and pictures go.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+://|#)([^)]+)\)")


class IndexReadme(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository")
        metadata["readme"] = {"content-type": "text/markdown", "text": for_an_index(text, repository)}


def for_an_index(text: str, repository: str | None) -> str:
    """Return a README whose relative links lead to the repository, or are no links."""

    def link(found: re.Match[str]) -> str:
        image, title, path = found.groups()
        if repository is None:
            return "" if image else title
        return f"{image}[{title}]({repository}/{'raw' if image else 'blob'}/HEAD/{path})"

    return LINK.sub(link, text)
