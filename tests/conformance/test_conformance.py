"""Every scenario gives what native torch gives, or a deliberate difference that is pinned."""

from __future__ import annotations

import ast
import json
import logging
import os
import zlib
from collections.abc import Collection

import expected
import pytest
import report
from canonical import difference, same
from differences import DIFFERENCES
from expected import (
    BASE,
    FOLDER,
    NATIVE,
    PINNED,
    Expectations,
    digest,
    digests,
    firsts,
    load,
    row_for,
    without_text,
)
from runner import NATIVE as IS_NATIVE
from runner import RELEASE
from scenario import all_scenarios
from upstream import UPSTREAM

KEYS = tuple(all_scenarios())
UPSTREAM_ROWS = [(file, row) for file, rows in UPSTREAM.items() for row in rows]
#: Which of them each test runs on this torch: a native one's own results are the standard, and a
#: release without a record has nothing to be compared with.
#: Native results are run again where that is asked for: a digest says that they are of these scenarios.
RECHECKED = KEYS if RELEASE in NATIVE and os.environ.get("CONFORMANCE_RECHECK") else ()
COMPARED: Collection[str] = () if IS_NATIVE and NATIVE[0] != RELEASE else KEYS
if RELEASE != BASE and COMPARED and not os.environ.get("TESTS_WHOLE"):
    # On the oldest and the newest: every one that differs, and one scenario for each result that native torch
    # has, on one of the two.
    _firsts = {key for key in firsts() if zlib.crc32(key.encode()) % 2 == IS_NATIVE}
    _chosen = _firsts | Expectations(RELEASE).differing
    COMPARED = [key for key in KEYS if key in _chosen]
#: All scenarios of a way run when the first result is asked for.
pytestmark = pytest.mark.timeout(1500)


@pytest.mark.parametrize("way", ["torch"])
@pytest.mark.parametrize("key", RECHECKED)
def test_the_record_is_still_true(results, way, key):
    recorded, got = load_once(f"native-{RELEASE}")[key], without_text(results.of(way, key))
    assert same(recorded, got), "\n".join(difference(recorded, got))


@pytest.mark.parametrize("way", ["direct" if IS_NATIVE else "shim"])
@pytest.mark.parametrize("key", COMPARED)
def test_ours_equals_native_torch(results, way, key):
    verdict = results.verdict(way, key)
    assert verdict.kind != "wrong", verdict.text


LOADED: dict[str, dict] = {}


def load_once(name: str) -> dict:
    if name not in LOADED:
        LOADED[name] = load(name)
    return LOADED[name]


def test_every_scenario_is_recorded_and_no_other():
    for release in NATIVE:
        assert tuple(load_once(f"native-{release}")) == KEYS


def test_an_older_record_stays_when_the_newest_is_written(tmp_path, monkeypatch):
    newest, older = (f"native-{release}" for release in NATIVE)
    records = {newest: load(newest), older: load(older)}
    monkeypatch.setattr(expected, "FOLDER", tmp_path)
    for order in ((newest, older), (older, newest)):
        for name in order:
            expected.save(name, records[name])
        assert {name: json.dumps(load(name)) for name in order} == {
            name: json.dumps(records[name]) for name in order
        }
    changed = {**records[newest], KEYS[0]: records[newest][KEYS[-1]], "another": records[newest][KEYS[0]]}
    del changed[KEYS[1]]
    expected.save(newest, changed)
    assert load(newest) == changed
    assert load(older) == records[older]


def test_native_torch_was_recorded_with_these_scenarios():
    assert digests() == dict.fromkeys(NATIVE, digest()), "make conformance runs native torch again"


@pytest.mark.parametrize("release", PINNED)
def test_whatever_is_pinned_is_a_difference_with_a_reason(release):
    expectations = Expectations(release)
    for key in load_once(f"ours-{release}").keys() & expectations.pinned.keys():
        pinned = expectations.pinned[key]
        assert row_for(key, release), f"{key} differs on {release} without a row in differences.py"
        assert not expectations.equals_native(key, pinned), f"{key} no longer differs"


def test_every_row_explains_something():
    used = {row_for(key, release) for release in PINNED for key in Expectations(release).pinned}
    assert [row.reason for row in DIFFERENCES if row not in used] == []


def test_records_are_those_in_patches():
    folder = FOLDER.parents[2] / "patches"
    for row in DIFFERENCES:
        assert not row.record or (folder / f"{row.record}.md").exists(), row.record


def test_the_page_is_what_is_recorded():
    for path, text in report.files().items():
        assert path.read_text() == text, f"make conformance writes {path.name} anew"


@pytest.mark.parametrize(
    ("file", "row"), UPSTREAM_ROWS, ids=[f"{file} {row.name}" for file, row in UPSTREAM_ROWS]
)
def test_what_is_named_for_a_test_of_pytorchs_is_there(file, row):
    assert row.scenarios or row.tests or row.not_ours, "neither a scenario, nor a test, nor a reason"
    for pattern in row.scenarios:
        assert row._replace(scenarios=(pattern,)).keys, f"no scenario is named {pattern}"
    for test in row.tests:
        path, _, name = test.partition("::")
        functions = ast.parse((FOLDER.parents[2] / path).read_text()).body
        assert name in {one.name for one in functions if isinstance(one, ast.FunctionDef)}, test


def test_each_test_of_pytorchs_has_one_row():
    for file, rows in UPSTREAM.items():
        names = [row.name for row in rows]
        assert len(names) == len(set(names)), file


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
