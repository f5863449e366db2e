"""docs/conformance.md, and the list behind it, from what is recorded."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from differences import DIFFERENCES, Difference, kept_tuples
from expected import BASE, FOLDER, NATIVE, PINNED, Expectations, load, row_for
from scenario import all_scenarios

PATH = Path(__file__).resolve().parents[2] / "docs" / "conformance.md"
#: Every scenario that native torch fails in, one a line.
FAILS = FOLDER / "native-fails.tsv"
#: The columns of counts: heading -> verdict.
STOCK = {"stock: equal": "equal", "differs": "differs", "fails where native torch does not": "fails"}
OURS = {"ours: equal": "equal", "different on purpose": "deliberate", "decided by torch's core": "core"}
HEAD = """# Conformance

Made by `make conformance` from [`tests/conformance/`](../tests/conformance/), whose tests hold this page to
the records, and the records to torch wherever the suite runs on one of these releases.

{total} scenarios on 1 to 8 ranks (gloo, CPU): get and set, model and optimizer, every option, every wrapper.
Compared: order of keys, types, layouts, dtypes, shapes, devices, SHA-256 of values, warnings; of an error
the class and the ranks that raise it. The standard is native torch {natives}. Ours must equal one
of them, or have a reason below and a pinned result.

Each scenario stands in the files there: `differences.py` (reasons), `recorded/ours-*.json` (our results
where they differ), `recorded/stock-*.json` (verdicts on stock torch), `recorded/native-fails.tsv` (what
native torch cannot do).

## Counts

"""
GROUPS = """
Ours by group: equal/on purpose/core. Equal on all of these releases:
{equal}.

"""
PURPOSE = """
## Different from native torch on purpose

Scenarios are counted on {releases}: one number where all agree. One more difference holds everywhere:
tuples of a param group (`betas`) stay tuples; native torch makes them lists.

"""
CORE = """
## Decided by a release's own core

No function that is replaced can change it.

"""
CANNOT = """
## What native torch cannot do

{failing} of {total} scenarios fail on native torch {native}; {works} of these work with us on torch {base}:

"""


def files() -> dict[Path, str]:
    """What is made from the records, and its text."""
    return {PATH: page(), FAILS: fails()}


def page() -> str:
    total, failing = len(all_scenarios()), failing_rows()
    works = sum(ours == "works" for _, _, ours in failing)
    parts = [
        HEAD.format(total=total, natives=" and ".join(reversed(NATIVE)), base=BASE),
        table([("torch", *STOCK, *OURS), *release_rows()]),
        GROUPS.format(equal=", ".join(f"`{name}` {len(keys)}" for name, keys in groups(equal=True))),
        table([("group", "scenarios", *PINNED), *group_rows()]),
        PURPOSE.format(releases="/".join(PINNED)),
        table([("what, and why", "record", "scenarios", "such as"), *purpose_rows()]),
        CORE,
        table([("what", *PINNED, "such as"), *core_rows()]),
        CANNOT.format(failing=len(failing), total=total, native=NATIVE[0], works=works, base=BASE),
        table([("native torch", "ours", "scenarios", "which"), *outcome_rows(failing)]),
    ]
    return "".join(parts)


def fails() -> str:
    head = ("scenario", f"native torch {NATIVE[0]}", f"ours on torch {BASE}")
    return "".join("\t".join(row) + "\n" for row in (head, *failing_rows()))


def table(rows: list[tuple[object, ...]]) -> str:
    head, *body = (f"| {' | '.join(map(str, row))} |\n" for row in rows)
    return f"{head}|{'---|' * len(rows[0])}\n{''.join(body)}"


def release_rows() -> list[tuple[object, ...]]:
    keys, rows = list(all_scenarios()), []
    for release in PINNED:
        stock, ours = load_once(f"stock-{release}"), kinds(keys, release)
        verdicts = Counter(stock.get(key, "?") for key in keys)
        counts = (*(verdicts[one] for one in STOCK.values()), *(ours[one] for one in OURS.values()))
        rows.append((release, *counts))
    return rows


def group_rows() -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for name, keys in groups(equal=False):
        found = [kinds(keys, release) for release in PINNED]
        cells = ("/".join(str(one[kind]) for kind in OURS.values()) for one in found)
        rows.append((name, len(keys), *cells))
    return rows


def groups(equal: bool) -> list[tuple[str, list[str]]]:
    """Those in which ours equal native torch everywhere, or the others; with their scenarios."""
    found: dict[str, list[str]] = {}
    for key, one in all_scenarios().items():
        found.setdefault(one.group, []).append(key)
    return [
        (name, keys)
        for name, keys in found.items()
        if equal is all(kinds(keys, release)["equal"] == len(keys) for release in PINNED)
    ]


def kinds(keys: list[str], release: str) -> Counter[str]:
    pinned = expectations(release).pinned
    return Counter(kind_of(key, release, pinned) for key in keys)


def kind_of(key: str, release: str, pinned: dict[str, Any]) -> str:
    row = row_for(key, release) if key in pinned else None
    if row is None:
        return "equal"
    return "core" if row.core_of else "deliberate"


def purpose_rows() -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for row in DIFFERENCES:
        if not row.core_of:
            found = explained(row)
            counts = [str(len(keys)) for keys in found]
            record = f"[{row.record[:4]}](../patches/{row.record}.md)" if row.record else ""
            number = counts[0] if len(set(counts)) == 1 else "/".join(counts)
            rows.append((row.reason, record, number, example(found)))
    return rows


def core_rows() -> list[tuple[object, ...]]:
    rows = [(row.reason, explained(row)) for row in DIFFERENCES if row.core_of]
    return [(reason, *map(len, found), example(found)) for reason, found in rows]


def explained(row: Difference) -> list[list[str]]:
    """The pinned scenarios that the row explains, on each release."""
    return [
        [key for key in expectations(release).pinned if row_for(key, release) is row] for release in PINNED
    ]


def example(found: list[list[str]]) -> str:
    """The first scenario on the first release that has any."""
    return next((f"`{key}`" for keys in found for key in keys), "")


def family(key: str) -> str:
    """A scenario's group and function, without the words of its row."""
    group, _, name = key.partition("/")
    return f"{group}/{name.split()[0]}"


def outcome_rows(failing: list[tuple[str, str, str]]) -> list[tuple[object, ...]]:
    """Failing scenarios by what ours do and how native torch fails."""
    outcomes: dict[tuple[str, str], list[str]] = {}
    for key, native, ours in failing:
        outcomes.setdefault((ours, how(native)), []).append(key)
    rows: list[tuple[object, ...]] = []
    for (ours, native), keys in sorted(outcomes.items(), reverse=True):
        counts = Counter(map(family, keys))
        if len(counts) == 1:
            which = f"`{keys[0]}`" + (f" and {len(keys) - 1} more such" if len(keys) > 1 else "")
        else:
            which = ", ".join(f"`{name}`" + (f" {n}" if n > 1 else "") for name, n in counts.items())
        rows.append((native, ours, len(keys), which))
    return rows


def how(error: str) -> str:
    """The kind of a failure, without the classes of its errors."""
    if "(crash)" in error:
        return "crash"
    if "(hang)" in error:
        return "hang"
    return "an error on every rank" if error.endswith("on every rank") else "different by rank"


def failing_rows() -> list[tuple[str, str, str]]:
    """Scenario, native torch's failure, and what ours do."""
    native, ours = load_once(f"native-{NATIVE[0]}"), expectations(BASE)
    rows: list[tuple[str, str, str]] = []
    for key, result in native.items():
        if "error" not in result:
            continue
        got = ours.pinned.get(key)
        if got is None:
            other = load_once(f"native-{NATIVE[1]}")[key]
            got = result if "error" in other else kept_tuples(other)
        what = got.get("error", "works")
        rows.append((key, result["error"], "the same" if what == result["error"] else what))
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
