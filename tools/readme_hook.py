"""Build hook: README for a package index, which knows no relative links.

In the tree they stay relative, so that a checkout, a fork or a mirror shows its own pages.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+://|#)([^)]+)\)")


class AbsoluteLinks(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": absolute(text, metadata["urls"]["Repository"]),
        }


def absolute(text: str, repository: str) -> str:
    def link(found: re.Match[str]) -> str:
        image, title, path = found.groups()
        return f"{image}[{title}]({repository}/{'raw' if image else 'blob'}/HEAD/{path})"

    return LINK.sub(link, text)
