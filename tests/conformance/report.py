"""docs/conformance.md, and the list behind it, from what is recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from differences import DIFFERENCES, Difference, kept_tuples
from expected import BASE, FOLDER, NATIVE, PINNED, Expectations, load, row_for
from scenario import all_scenarios
from upstream import BOTH, MAIN, RELEASE, UPSTREAM, Upstream

PATH = Path(__file__).resolve().parents[2] / "docs" / "conformance.md"
#: PyTorch's own tests, name by name.
UPSTREAM_PATH = PATH.with_name("upstream-tests.md")
#: Every scenario that native torch fails in, one a line.
FAILS = FOLDER / "native-fails.tsv"
#: The columns of counts: heading -> verdict.
STOCK = {"stock: equal": "equal", "differs": "differs", "fails where native torch does not": "fails"}
OURS = {"ours: equal": "equal", "different on purpose": "deliberate", "decided by torch's core": "core"}
HEAD = """# Conformance

Made by `make conformance` from [`tests/conformance/`](../tests/conformance/), whose tests hold this page to
the records, and the records to torch.

{total} scenarios on 1 to 8 ranks (gloo, CPU): get and set, model and optimizer, every option, every wrapper.
Compared: order of keys, types, layouts, dtypes, shapes, devices, SHA-256 of values, warnings; an error's
class and ranks. Ours must equal native torch {natives}, or have a reason
below and a pinned result. [Name by name](upstream-tests.md): PyTorch's own tests of the same functions.

Scenario by scenario, in that folder: `differences.py` (reasons), `recorded/ours-*.json` (our results
where they differ), `recorded/stock-*.json` (verdicts on stock torch), `recorded/native-fails.tsv`.

## Counts

"""
PURPOSE = """
## Different from native torch on purpose

Number of scenarios on {releases}, once where all agree. Everywhere: tuples of a param group
(`betas`) stay tuples; native torch makes them lists.

"""
CORE = """
## Decided by a release's own core

No replaced function can change it. Counted as above.

"""
CANNOT = """
## What native torch cannot do

{failing} of {total} scenarios fail on native torch {native}; {works} of these work with us on torch {base}
([each](../tests/conformance/recorded/native-fails.tsv)). With us, and how native torch fails:

"""
UPSTREAM_HEAD = """# PyTorch's own tests

Made by `make conformance`. It lists each of the {tests} tests that PyTorch has in these files of
`test/distributed/checkpoint`, and what this package has for the same promise: scenarios of
[conformance](conformance.md), or other tests, all written without PyTorch's. {ours} tests have one; the
others say why their promise is not this package's.

- **in**: PyTorch {release}, its main branch (the newest copy of each file that was at hand in 2026), or both.
- **here**: scenarios by their names in `tests/conformance/recorded/`, `*` for any end; tests with a link.
- **stock**: the scenarios that torch {base} alone answers as native torch does.
- **ours**: the scenarios in which this package on torch {base} does what native torch does. Fewer than stock
  torch's are no loss: most of the others are errors on every rank where torch loads in silence. Each has its
  [reason](conformance.md#different-from-native-torch-on-purpose); the rest torch's core decides.
- **native**: those that raise no error on torch {native}; in some an error is what is promised.
"""


def files() -> dict[Path, str]:
    """What is made from the records, and its text."""
    return {PATH: page(), FAILS: fails(), UPSTREAM_PATH: upstream_page()}


def page() -> str:
    total, failing = len(all_scenarios()), failing_rows()
    works = sum(ours == "works" for _, _, ours in failing)
    parts = [
        HEAD.format(total=total, natives=" or ".join(reversed(NATIVE)), base=BASE),
        table([("torch", *STOCK, *OURS), *release_rows()]),
        PURPOSE.format(releases="/".join(PINNED)),
        "".join(line(row) for row in DIFFERENCES if not row.core_of),
        CORE,
        "".join(line(row) for row in DIFFERENCES if row.core_of),
        CANNOT.format(failing=len(failing), total=total, native=NATIVE[0], works=works, base=BASE),
        "".join(outcome_lines(failing)),
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


def kinds(keys: list[str], release: str) -> Counter[str]:
    pinned = expectations(release).pinned
    return Counter(kind_of(key, release, pinned) for key in keys)


def kind_of(key: str, release: str, pinned: dict[str, Any]) -> str:
    row = row_for(key, release) if key in pinned else None
    if row is None:
        return "equal"
    return "core" if row.core_of else "deliberate"


def line(row: Difference) -> str:
    """A reason, its record, and how many scenarios it explains on each release."""
    counts = list(map(str, explained(row)))
    record = f" ([{row.record[:4]}](../patches/{row.record}.md))" if row.record else ""
    return f"- {row.reason}{record}: {counts[0] if len(set(counts)) == 1 else '/'.join(counts)}\n"


def explained(row: Difference) -> list[int]:
    """How many pinned scenarios the row explains, on each release."""
    return [sum(row_for(key, release) is row for key in expectations(release).pinned) for release in PINNED]


def outcome_lines(failing: list[tuple[str, str, str]]) -> Iterator[str]:
    """Failing scenarios by what ours do and how native torch fails."""
    outcomes: dict[str, Counter[str]] = {}
    for _, native, ours in failing:
        outcomes.setdefault(ours, Counter())[how(native)] += 1
    for ours, kinds_of in sorted(outcomes.items(), reverse=True):
        ways = ", ".join(f"{native} {number}" for native, number in sorted(kinds_of.items(), reverse=True))
        yield f"- {ours}: {sum(kinds_of.values())} ({ways})\n"


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


def upstream_page() -> str:
    """PyTorch's tests by file, and the verdicts on the scenarios for each."""
    rows = [row for tests in UPSTREAM.values() for row in tests]
    parts = [
        UPSTREAM_HEAD.format(
            tests=len(rows),
            ours=sum(bool(row.scenarios or row.tests) for row in rows),
            release=RELEASE,
            base=BASE,
            native=NATIVE[0],
        )
    ]
    head = ("test", "in", "here", f"stock {BASE}", "ours", f"native {NATIVE[0]}")
    for file, tests in UPSTREAM.items():
        parts += [f"\n## {file}\n\n", table([head, *map(upstream_row, tests)])]
    return "".join(parts)


def upstream_row(row: Upstream) -> tuple[object, ...]:
    where = {BOTH: "both", MAIN: "main", RELEASE: RELEASE}[row.where]
    scenarios = [f"`{pattern}`" for pattern in row.scenarios]
    here = "<br>".join([*scenarios, *map(linked, row.tests), *filter(None, [row.not_ours])])
    return (f"`{row.name}`", where, here, *verdicts_of(row))


def linked(test: str) -> str:
    """A link to the file of a test."""
    path, _, name = test.partition("::")
    return f"[{name}](../{path})"


def verdicts_of(row: Upstream) -> tuple[str, str, str]:
    """How many of the scenarios stock torch, ours and native torch have right."""
    keys = row.keys
    if not keys:
        return ("", "passes" if row.tests else "", "")
    stock, native = load_once(f"stock-{BASE}"), load_once(f"native-{NATIVE[0]}")
    equal = sum(stock[key] == "equal" for key in keys)
    works = sum("error" not in native[key] for key in keys)
    ours = kinds(keys, BASE)
    words = [f"{ours['equal']} of {len(keys)}"]
    words += [
        f"{ours[kind]} {text}"
        for kind, text in (("deliberate", "on purpose"), ("core", "core"))
        if ours[kind]
    ]
    return f"{equal} of {len(keys)}", ", ".join(words), f"{works} of {len(keys)}"
