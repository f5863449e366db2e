"""Fresh interpreters: what an import does can only be seen in a process that has not done it yet."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TORCH = version("torch")
AFFECTED = (2, 4) <= tuple(int(part) for part in TORCH.split(".")[:2]) < (2, 7)

# What most processes need: the checks come to this one as JSON on the last line of stdout.
PRELUDE = """
import json, sys, warnings
B, A = "torch.distributed.checkpoint.state_dict", "torch.distributed._state_dict_utils"
def tell(**facts):
    print(json.dumps(facts), flush=True)
def home(name, module=B):
    found = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    return origin(found)
def origin(found):
    # The package that has the code; a label for pickle says torch of ours, too.
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    return getattr(found, "__globals__", {}).get("__name__", found.__module__).partition(".")[0]
def served(targets):
    # Those that this torch has and that are replaced here, or would be.
    import torch
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return [t for t in targets if t.since <= release and t.serves(min(release, (2, 6)), False)]
def caught(function):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        function()
    names = ("BackportWarning", "LateImportWarning")
    return [(w.category.__name__, str(w.message), w.filename) for w in found if w.category.__name__ in names]
"""


def own(late_bindings: list[str]) -> list[str]:
    """Without what torch's own modules hold of each other."""
    return [name for name in late_bindings if not name.startswith("torch.")]


class Ended(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def facts(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out.splitlines()[-1])


Fresh = Callable[..., Ended]
