"""docs/conformance.md, from what is recorded."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from differences import DIFFERENCES, kept_tuples
from expected import BASE, NATIVE, PINNED, Expectations, load, row_for
from scenario import all_scenarios

PATH = Path(__file__).resolve().parents[2] / "docs" / "conformance.md"
HEAD = """# Conformance

Made by `make conformance`; `tests/conformance/test_conformance.py` holds it to the records, and the records
to torch itself wherever the suite runs on one of these releases.

{total} scenarios, each on 1 to 8 ranks (gloo, CPU): get and set, model and optimizer, every option, every
wrapper. A result is the order of keys, types, layouts, dtypes, shapes, devices, SHA-256 of values, warnings,
or the class of the error and who raised it. The standard is native torch {natives}: ours must equal one of
them, or the scenario has a row in the table of differences below, and its result is pinned.

## By group

Stock torch: **equal** to native torch / **differs** / **fails** where native torch does not. With
`import torch_dcp_backport`: **equal** / **different on purpose** / decided by that release's own **core**.

"""


def page() -> str:
    scenarios = all_scenarios()
    lines = [HEAD.format(total=len(scenarios), natives=" and ".join(reversed(NATIVE)))]
    lines.append(table([head_of_groups(), *group_rows()]))
    lines.append(
        "\n## Different from native torch on purpose\n\n"
        "One more holds everywhere: tuples of a param group (`betas`) stay tuples; native torch gives lists "
        "back.\n\n"
    )
    lines.append(table([("what, and why", "record", *PINNED), *difference_rows(core=False)]))
    lines.append(
        "\n## Decided by a release's own core\n\nNo replacement of these two modules can change it.\n\n"
    )
    lines.append(table([("what", "", *PINNED), *difference_rows(core=True)]))
    lines.append(
        "\n## What native torch cannot do\n\nOn torch " + NATIVE[0] + "; ours on torch " + BASE + ".\n\n"
    )
    lines.append(table([("scenario", "native torch", "ours"), *failing_rows()]))
    return "".join(lines)


def table(rows: list[tuple[object, ...]]) -> str:
    head, *body = rows
    marks = ("---",) * len(head)
    return "".join("| " + " | ".join(map(str, row)) + " |\n" for row in (head, marks, *body))


def head_of_groups() -> tuple[object, ...]:
    columns = [f"{release} {who}" for release in PINNED for who in ("stock", "with us")]
    return ("group", "scenarios", *columns)


def group_rows() -> list[tuple[object, ...]]:
    groups = dict.fromkeys(one.group for one in all_scenarios().values())
    rows = [(group, *numbers(group)) for group in groups]
    return [*rows, ("**all**", *numbers(""))]


def numbers(group: str) -> list[object]:
    keys = [key for key, one in all_scenarios().items() if group in ("", one.group)]
    cells: list[object] = [len(keys)]
    for release in PINNED:
        stock, pinned = load_once(f"stock-{release}"), expectations(release).pinned
        verdicts = Counter(stock.get(key, "?") for key in keys)
        cells.append(f"{verdicts['equal']} / {verdicts['differs']} / {verdicts['fails']}")
        ours = Counter(kind_of(key, release, pinned) for key in keys)
        cells.append(f"{ours['equal']} / {ours['deliberate']} / {ours['core']}")
    return cells


def kind_of(key: str, release: str, pinned: dict[str, Any]) -> str:
    row = row_for(key, release) if key in pinned else None
    if row is None:
        return "equal"
    return "core" if row.core_of else "deliberate"


def difference_rows(core: bool) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for row in DIFFERENCES:
        if bool(row.core_of) is core:
            counts = [
                sum(row_for(key, release) is row for key in expectations(release).pinned)
                for release in PINNED
            ]
            record = f"[{row.record[:4]}](../patches/{row.record}.md)" if row.record else ""
            rows.append((row.reason, record, *counts))
    return rows


def failing_rows() -> list[tuple[object, ...]]:
    native, ours = load_once(f"native-{NATIVE[0]}"), expectations(BASE)
    rows: list[tuple[object, ...]] = []
    for key, result in native.items():
        if "error" not in result:
            continue
        got = ours.pinned.get(key)
        if got is None:
            other = load_once(f"native-{NATIVE[1]}")[key]
            got = result if "error" in other else kept_tuples(other)
        what = got.get("error", "works")
        rows.append((f"`{key}`", result["error"], "the same" if what == result["error"] else what))
    return rows


_loaded: dict[str, Any] = {}


def load_once(name: str) -> dict[str, Any]:
    if name not in _loaded:
        _loaded[name] = load(name)
    return _loaded[name]  # type: ignore[no-any-return]


def expectations(release: str) -> Expectations:
    if release not in _loaded:
        _loaded[release] = Expectations(release)
    return _loaded[release]  # type: ignore[no-any-return]
