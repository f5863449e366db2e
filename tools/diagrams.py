#!/usr/bin/env python3
"""Draws docs/parts.svg, docs/full-state.svg and docs/step.svg from the code's own names.

    make diagrams

The rooms and their arrows are FLOORS of tests/unit/test_floors.py. A room is described by the first line of
its package, and a function by that of its docstring: a name that is gone is an error. Needs Python alone.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple, Optional

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "torch_dcp_backport"
#: The shim; all other rooms are libraries. Rooms that are one file are not drawn, but for `compat`.
SHIM = ("activation", "state_dict", "dcp", "transfer", "compat")
#: The rooms one above the other: an arrow over two floors meets no other room. A new room is a column.
COLUMNS = (
    ("activation", "dcp", "compat"),
    ("checkpoint", "state_dict", "transfer"),
    ("megatron", "dist_checkpointing", "publish"),
    ("engine", "hf"),
)
#: Fill and edge, told apart by all eyes (Okabe and Ito), on a light and on a dark page.
ORANGE, BLUE, GREY = ("#fdf1d8", "#b97700"), ("#dcecf7", "#0072b2"), ("#f2f2f2", "#777777")
STYLE = (
    "text{font-family:sans-serif;fill:#1a1a1a}.name{font:bold 14px monospace}.about{font-size:12px}"
    ".title{font:bold 15px sans-serif}line,path{stroke:#777777;stroke-width:1.3;fill:none}"
)
WIDTH, LETTERS, LINE, PAD = 280, 40, 16, 12


class Step(NamedTuple):
    """A function of a path: the file, its name there, and which ranks run it."""

    path: str
    name: str
    ranks: str


EACH, FIRST, MEET = "each rank", "the first rank", "all ranks meet"
PATHS: dict[str, dict[str, tuple[Step, ...]]] = {
    "full-state": {
        "set_model_state_dict(full_state_dict=True, broadcast_from_rank0=True)": (
            Step("state_dict/api.py", "set_model_state_dict", EACH),
            Step("state_dict/source.py", "StateSource.inventory", "rank 0"),
            Step("state_dict/model/plan.py", "plan_model", EACH),
            Step("transfer/_src/call.py", "Call.agree_on_wants", MEET),
            Step("state_dict/destination.py", "target_of", EACH),
            Step("transfer/_src/scatter.py", "scatter", MEET),
            Step("state_dict/model/apply.py", "ModelLoad.run", EACH),
        ),
        "get_model_state_dict(full_state_dict=True, cpu_offload=True)": (
            Step("state_dict/api.py", "get_model_state_dict", EACH),
            Step("state_dict/collect.py", "full_tree", EACH),
            Step("transfer/_src/gather.py", "agree_on_all", MEET),
            Step("transfer/_src/gather.py", "gather", MEET),
        ),
    },
    "step": {
        "a save of a step": (
            Step("checkpoint/_src/handler.py", "CheckpointHandler.save_checkpoint", EACH),
            Step("checkpoint/_src/together.py", "draft_of", MEET),
            Step("dist_checkpointing/training_state.py", "state_of", EACH),
            Step("dist_checkpointing/_src/save.py", "Save.plan", MEET),
            Step("dist_checkpointing/_src/writer.py", "write", EACH),
            Step("dist_checkpointing/_src/save.py", "Save.commit", MEET),
            Step("checkpoint/_src/together.py", "finish_folder", MEET),
            Step("checkpoint/_src/manifest.py", "write", FIRST),
            Step("checkpoint/_src/store.py", "publish", FIRST),
        ),
        "a load of a step": (
            Step("checkpoint/_src/handler.py", "CheckpointHandler.load_checkpoint", EACH),
            Step("checkpoint/_src/together.py", "reading", MEET),
            Step("checkpoint/_src/manager.py", "ShardedManager.agree_on_load", MEET),
            Step("dist_checkpointing/_src/load.py", "open_together", MEET),
            Step("dist_checkpointing/_src/loading.py", "agree_on_load", MEET),
            Step("dist_checkpointing/_src/loading.py", "Loading.read", EACH),
            Step("checkpoint/_src/fsdp.py", "FSDPCheckpointManager.restore", EACH),
        ),
    },
}


def main() -> int:
    for name, text in drawn().items():
        (ROOT / "docs" / f"{name}.svg").write_text(text)
        print(f"docs/{name}.svg")
    return 0


def drawn() -> dict[str, str]:
    """Return the name and the text of each picture."""
    return {"parts": parts(), **{name: path_of(columns) for name, columns in PATHS.items()}}


def floors() -> dict[str, set[str]]:
    """Return FLOORS, without an import of the test."""
    tree = ast.parse((ROOT / "tests" / "unit" / "test_floors.py").read_text())
    (value,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "FLOORS" and node.value
    )
    code = compile(ast.Expression(value), "FLOORS", "eval")
    found: dict[str, set[str]] = eval(code, {"__builtins__": {}}, {"set": set})
    return found


def first_line(docstring: Optional[str], what: str) -> str:
    """Return the first sentence of a docstring.

    Raises:
        SystemExit: there is none.
    """
    if not docstring:
        raise SystemExit(f"{what} has no docstring to draw")
    text = " ".join(docstring.split("\n\n")[0].split()).partition(". ")[0].rstrip(".")
    return text.replace("`", "")


def about_step(step: Step) -> str:
    """Return what a function's docstring says of it first."""
    body: list[ast.stmt] = ast.parse((PACKAGE / step.path).read_text()).body
    for part in step.name.split("."):
        found = [node for node in body if getattr(node, "name", None) == part]
        if not found:
            raise SystemExit(f"{step.path} has no {step.name}")
        node = found[-1]
        assert isinstance(node, (ast.FunctionDef, ast.ClassDef))
        body = node.body
    return first_line(ast.get_docstring(node), step.name)


class Box(NamedTuple):
    """A place on a picture: its left and upper edge, its name, and the lines below."""

    x: int
    y: int
    width: int
    name: str
    lines: list[str]
    look: tuple[str, str]

    @property
    def height(self) -> int:
        return 2 * PAD + LINE * (1 + len(self.lines))

    def svg(self) -> str:
        fill, edge = self.look
        texts = [f'<text class="name" x="{self.x + PAD}" y="{self.y + PAD + 12}">{escape(self.name)}</text>']
        for number, line in enumerate(self.lines, 1):
            y = self.y + PAD + 12 + LINE * number
            texts.append(f'<text class="about" x="{self.x + PAD}" y="{y}">{escape(line)}</text>')
        shape = (
            f'<rect x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}" rx="6" '
            f'fill="{fill}" stroke="{edge}"/>'
        )
        return "\n".join([shape, *texts])


def levels(rooms: dict[str, set[str]]) -> dict[str, int]:
    """Return how many floors are below each room; FLOORS names each after those that it uses."""
    found: dict[str, int] = {}
    for room, below in rooms.items():
        found[room] = 1 + max((found[each] for each in below if each in found), default=-1)
    return found


def direct(rooms: dict[str, set[str]]) -> Iterator[tuple[str, str]]:
    """Yield the arrows that no way over another room says already."""

    def reached(room: str) -> set[str]:
        return {each for below in rooms[room] for each in (below, *reached(below))}

    for room, below in rooms.items():
        for other in sorted(below):
            if not any(other in reached(between) for between in below - {other}):
                yield room, other


def column_of(room: str) -> int:
    """Return the column that a room stands in."""
    return next((number for number, rooms in enumerate(COLUMNS) if room in rooms), len(COLUMNS))


def parts() -> str:
    """Draw the rooms, the uppermost floor first."""
    every = floors()
    rooms = {
        room: {each for each in below if each in SHIM or (PACKAGE / each).is_dir()}
        for room, below in every.items()
        if room in SHIM or (PACKAGE / room).is_dir()
    }
    level = levels(rooms)
    boxes: dict[str, Box] = {}
    y = 74
    for height in sorted(set(level.values()), reverse=True):
        row = [room for room in rooms if level[room] == height]
        for room in row:
            x = 20 + (WIDTH + 24) * column_of(room)
            file = PACKAGE / room / "__init__.py" if (PACKAGE / room).is_dir() else PACKAGE / f"{room}.py"
            about = first_line(ast.get_docstring(ast.parse(file.read_text())), room)
            look = ORANGE if room in SHIM else BLUE
            boxes[room] = Box(x, y, WIDTH, room, textwrap.wrap(about, LETTERS), look)
        y += max(boxes[room].height for room in row) + 46
    lines = [
        f'<path d="M {boxes[upper].x + WIDTH // 2} {boxes[upper].y + boxes[upper].height} '
        f'L {boxes[lower].x + WIDTH // 2} {boxes[lower].y}" marker-end="url(#end)"/>'
        for upper, lower in direct(rooms)
    ]
    title = [
        '<text class="title" x="20" y="28">Who uses whom: a part uses those that its arrows lead to</text>',
        '<text class="about" x="20" y="50">Orange: the backport, which import torch_dcp_backport loads. '
        "Blue: libraries, loaded where a program names them; they use parts of the backport.</text>",
    ]
    width = max(box.x + box.width for box in boxes.values()) + 20
    return page(width, y - 20, [*title, *lines, *(box.svg() for box in boxes.values())])


def path_of(columns: dict[str, tuple[Step, ...]]) -> str:
    """Draw paths side by side: the functions in their order, from above."""
    wide, gap = 440, 30
    shapes: list[str] = []
    bottom = 0
    for number, (title, steps) in enumerate(columns.items()):
        x, y = 20 + number * (wide + gap), 52
        size = 15 if len(title) < 40 else 11
        shapes.append(f'<text class="title" style="font-size:{size}px" x="{x}" y="30">{escape(title)}</text>')
        for place, step in enumerate(steps):
            about = textwrap.wrap(f"{step.ranks}: {about_step(step)}", 66)
            name = (
                step.name if "." in step.name or step.name in title else f"{Path(step.path).stem}.{step.name}"
            )
            box = Box(x, y, wide, name, about, BLUE if step.ranks == MEET else GREY)
            if place:
                shapes.append(f'<path d="M {x + 40} {y - 22} L {x + 40} {y}" marker-end="url(#end)"/>')
            shapes.append(box.svg())
            y += box.height + 22
        bottom = max(bottom, y)
    note = '<text class="about" x="20" y="{y}">Blue: every rank waits for the others here.</text>'
    shapes.append(note.format(y=bottom + 8))
    return page(20 + len(columns) * (wide + gap), bottom + 26, shapes)


def page(width: int, height: int, shapes: list[str]) -> str:
    """Return a picture with its shapes, on white."""
    arrow = (
        '<defs><marker id="end" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto"><path d="M 0 0 L 8 4 L 0 8 z" style="fill:#777777"/></marker></defs>'
    )
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    ground = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", arrow, ground, *shapes, "</svg>"]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
