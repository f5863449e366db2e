"""What a scenario must give: native torch's record, or a deliberate difference that is pinned."""

from __future__ import annotations

import fnmatch
import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple, Optional

from canonical import difference, same
from differences import DIFFERENCES, Difference, kept_tuples

FOLDER = Path(__file__).parent / "recorded"
#: The standard, the newest first; a result that equals either is equal.
NATIVE = ("2.15.0", "2.7.1")
NEWEST, *OLDER = (f"native-{release}" for release in NATIVE)
#: The release whose pinned results hold for the others too, where they have none of their own.
BASE = "2.6.0"
#: Stands in a release's pinned results for one that differs on BASE and not there.
AS_NATIVE = {"value": "as native torch"}
#: The releases that have pinned results; the first releases of a minor are held to those of its last.
PINNED = ("2.4.1", "2.5.1", BASE)


#: What decides native torch's results; their records name its digest.
SOURCES = ("cases_*.py", "wrappers.py", "canonical.py", "runner.py", "../values.py")


def digest() -> str:
    """Of the sources of all scenarios."""
    found = hashlib.blake2b(digest_size=8)
    for pattern in SOURCES:
        for path in sorted(FOLDER.parent.glob(pattern)):
            found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


def digests() -> dict[str, str]:
    """Release -> the digest of the scenarios that native torch was recorded with."""
    path = FOLDER / "sources.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def sign(release: str) -> None:
    """The record of a release is of the scenarios as they are."""
    signed = {**digests(), release: digest()}
    (FOLDER / "sources.json").write_text(json.dumps(signed, indent=1, sort_keys=True) + "\n")


class Verdict(NamedTuple):
    #: "equal" to native torch, "deliberate", "core" (torch's own core of that release), or "wrong".
    kind: str
    text: str
    row: Optional[Difference] = None


def load(name: str) -> dict[str, Any]:
    path = FOLDER / f"{name}.json"
    if not path.exists():
        return {}
    stored = json.loads(path.read_text())
    words: list[str] = stored["words"]
    results: dict[str, Any] = {}
    for key, packed in stored["results"].items():
        results[key] = results[packed] if isinstance(packed, str) else unpack(packed, words)
    if name in OLDER:
        results = {**load(NEWEST), **results}
    return {key: result for key, result in results.items() if result is not None}


def firsts() -> set[str]:
    """The first scenario of each result that native torch has."""
    first: dict[str, str] = {}
    for key, result in load(OLDER[-1]).items():
        first.setdefault(json.dumps(result), key)
    return {*first.values()}


def save(name: str, results: dict[str, Any]) -> None:
    """Write a record; of an older native torch, what differs from the newest, None for what it has not."""
    if name in OLDER:
        newest = {key: json.dumps(result) for key, result in load(NEWEST).items()}
        differing = {key: one for key, one in results.items() if json.dumps(one) != newest.get(key)}
        results = {**differing, **dict.fromkeys(key for key in newest if key not in results)}
    older = {other: load(other) for other in OLDER if name == NEWEST}
    write(name, results)
    for other, kept in older.items():
        save(other, kept)


def write(name: str, results: dict[str, Any]) -> None:
    """Each leaf's text once, and a result that another scenario has too by that scenario's key.

    One line for each scenario, so that a change is a readable diff.
    """
    words: dict[str, int] = {}
    first: dict[str, str] = {}
    lines = []
    for key, result in results.items():
        other = first.setdefault(json.dumps(result), key)
        packed = pack(result, words) if other == key else other
        lines.append(f"{json.dumps(key)}: {json.dumps(packed, separators=(',', ':'))}")
    listed = ",\n".join(map(json.dumps, words))
    joined = ",\n".join(lines)
    (FOLDER / f"{name}.json").write_text(f'{{"words": [\n{listed}],\n"results": {{\n{joined}}}}}\n')


def pack(value: Any, words: dict[str, int]) -> Any:
    if isinstance(value, dict):
        return {key: pack(one, words) for key, one in value.items()}
    if isinstance(value, list):
        return [pack(one, words) for one in value]
    return words.setdefault(value, len(words))


def unpack(value: Any, words: list[str]) -> Any:
    if isinstance(value, dict):
        return {key: unpack(one, words) for key, one in value.items()}
    if isinstance(value, list):
        return [unpack(one, words) for one in value]
    return words[value]


def without_text(result: dict[str, Any]) -> dict[str, Any]:
    """The texts of errors are for people; they are not compared."""
    return {key: value for key, value in result.items() if key != "text"}


class Expectations:
    """Everything that is recorded, for one release under test."""

    def __init__(self, release: str) -> None:
        self.release = release
        self.natives = [load(f"native-{one}") for one in NATIVE]
        minor = release.rpartition(".")[0]
        own = next((one for one in PINNED if one.rpartition(".")[0] == minor), release)
        pinned = {**load(f"ours-{BASE}"), **load(f"ours-{own}")}
        self.pinned = {key: result for key, result in pinned.items() if result != AS_NATIVE}
        #: Those that differ from native torch here or on BASE.
        self.differing = set(pinned)

    def equals_native(self, key: str, got: dict[str, Any]) -> bool:
        """Up to the tuples of param groups, which native torch turns into lists.

        An error is the standard only where no native torch does better.
        """
        known = [native[key] for native in self.natives if key in native]
        usable = [one for one in known if "error" not in one] or known
        return any(same(one, got) or same(kept_tuples(one), got) for one in usable)

    def verdict(self, key: str, result: dict[str, Any]) -> Verdict:
        got = without_text(result)
        row = row_for(key, self.release)
        if self.equals_native(key, got):
            if row is not None and not row.core_of and key in self.pinned:
                return Verdict("wrong", f"no longer different from native torch: {row.reason}", row)
            return Verdict("equal", "")
        if row is not None and key in self.pinned and same(self.pinned[key], got):
            return Verdict("core" if row.core_of else "deliberate", row.reason, row)
        if row is not None and key in self.pinned:
            found = [f"differs from what is pinned ({row.reason})", *difference(self.pinned[key], got)]
        else:
            native = next((one[key] for one in self.natives if key in one), {})
            found = ["differs from native torch", *difference(kept_tuples(native), got)]
        return Verdict("wrong", "\n".join([*found[:12], result.get("text", "")]))


def row_for(key: str, release: str) -> Optional[Difference]:
    """The row of the table that speaks of this scenario on this release; the release's own rows first."""
    rows = sorted(DIFFERENCES, key=lambda row: not row.core_of)
    for row in rows:
        if row.core_of and not any(release.startswith(one) for one in row.core_of):
            continue
        if any(fnmatch.fnmatchcase(key, pattern) for pattern in row.scenarios):
            return row
    return None
