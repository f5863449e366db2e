"""A small package in torch's place, and one that replaces its functions: imports in milliseconds."""

from __future__ import annotations

from pathlib import Path

from torch_dcp_backport.activation.gate import Decision
from torch_dcp_backport.activation.table import Table, Target

LOW = """
import contextlib, functools

def move(state, device, strict=False):
    return "stock move"

def spread(state):
    return "stock spread"

class Writer:
    def write(self, data):
        return "stock write"
"""

HIGH = """
import contextlib, functools
from dataclasses import dataclass
from fakehost.low import move, spread

@dataclass
class Options:
    strict: bool = True

@functools.lru_cache(maxsize=None)
def names(model):
    return "stock names"

@contextlib.contextmanager
def quiet():
    yield "stock quiet"

def _load(state, info):
    return "stock _load"

def load(model, state, *, options=None):
    return load_with(state)

def load_with(state):
    return _load(state, None)
"""

PROVIDER = """
import contextlib
from dataclasses import dataclass

def move(state, device, strict=False, extra=None):
    return "our move"

def spread(state):
    return "our spread"

class Writer:
    def write(self, data):
        return "our write"

@dataclass
class Options:
    strict: bool = True
    more: int = 0

def names(model):
    return "our names"

@contextlib.contextmanager
def quiet():
    yield "our quiet"

def _load(state, info):
    return "our _load"

def load(model, state, *, options=None):
    return "our load"
"""

RECORDS = ("0001-fake",)
TABLE = Table(
    provider="fakeprovider",
    owner="fakehost",
    helpers=("fakehost.low",),
    trigger="fakehost.high",
    targets=(
        Target("fakehost.low", "move", (2, 4), RECORDS),
        Target("fakehost.low", "spread", (2, 5), RECORDS),
        Target("fakehost.low", "Writer.write", (2, 4), RECORDS),
        Target("fakehost.high", "move", (2, 4), RECORDS),
        Target("fakehost.high", "spread", (2, 5), RECORDS),
        *(
            Target("fakehost.high", name, (2, 4), RECORDS)
            for name in ("Options", "names", "quiet", "_load", "load")
        ),
    ),
)
NAMES = {
    "fakehost.low": ("Writer.write", "move", "spread"),
    "fakehost.high": ("Options", "_load", "load", "move", "names", "quiet", "spread"),
}

AUTO = Decision("pending", "fakehost 2.6 is ill", "auto", "2.6.0", (2, 6), False)
STRICT = AUTO._replace(switch="strict")


def write(folder: Path, **sources: str) -> None:
    """The packages, `low`, `high` and `provider` replaced by what is given."""
    host = folder / "fakehost"
    host.mkdir(exist_ok=True)
    (host / "__init__.py").write_text("")
    (host / "low.py").write_text(sources.get("low", LOW))
    (host / "high.py").write_text(sources.get("high", HIGH))
    (folder / "fakeprovider.py").write_text(sources.get("provider", PROVIDER))
