"""Exports of each release of transformers, opened by each; in the lane that has three of them."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE, LANES = (runpy.run_path(str(ROOT / name)) for name in ("benchmarks/releases.py", "tools/lanes.py"))
EQUAL, SAVED, EXPORT = TABLE["EQUAL"], TABLE["SAVED"], TABLE["EXPORT"]
TEXT = ("qwen2, tied", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss")
#: Of pictures and text; their files have other names than the models of 4.57 and 5.
PARTS = ("gemma3", "paligemma", "llava", "mistral3")
#: Of pictures and text, with the same names in all; 5 holds the experts of one in another order.
ALIKE = ("qwen2_vl", "qwen3_vl_moe")
EVERY = (*TEXT, *PARTS, *ALIKE)
#: Files of transformers 5 that transformers 4 does not open: nor those that `save_pretrained` writes.
OF_5_ALONE = ("qwen3_moe", *PARTS, "qwen3_vl_moe")
#: Models that the oldest release does not have, and a configuration of newer ones that it does not read.
NOT_OF_OLDEST, NOT_IN_OLDEST = {"gpt_oss", "qwen3_vl_moe"}, "qwen2_vl"
LANE = "transformers"
OLDEST, MIDDLE = LANES["BESIDE"][LANE]
(NEWEST,) = (each.partition("==")[2] for each in LANES["LANES"][LANE] if each.startswith("transformers=="))
#: Six processes import transformers.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    if not TABLE["BESIDE"].is_dir():
        pytest.skip("only the lane of transformers has the three releases")
    assert set(TABLE["places"]()) == {OLDEST, MIDDLE, NEWEST}
    return TABLE["results"](tmp_path_factory.mktemp("files"), list(EVERY))


@pytest.mark.parametrize("writer", [OLDEST, MIDDLE, NEWEST])
def test_the_tensors_of_an_export_are_those_of_save_pretrained(results: Any, writer: str) -> None:
    wrote, _ = results
    assert set(wrote[writer].values()) == {EQUAL}
    assert set(wrote[writer]) == set(EVERY) - (NOT_OF_OLDEST if writer == OLDEST else set())


@pytest.mark.parametrize("reader", [OLDEST, MIDDLE, NEWEST])
@pytest.mark.parametrize("writer", [OLDEST, MIDDLE, NEWEST])
def test_an_export_opens_in_every_release(results: Any, writer: str, reader: str) -> None:
    """With `from_pretrained` bit for bit, or as the files of `save_pretrained` do where these do not open."""
    opens = results[1][reader]
    rows = {row.partition("|")[2]: found for row, found in opens.items() if row.startswith(f"{writer}|")}
    assert len(rows) >= len(EVERY) - len(NOT_OF_OLDEST)
    for name, found in rows.items():
        assert found[EXPORT] == found[SAVED], (name, found)
        is_refused = (writer == NEWEST and name in OF_5_ALONE) or (reader == OLDEST and name == NOT_IN_OLDEST)
        if writer == reader or not is_refused:
            assert found[EXPORT] == EQUAL, (name, found)


@pytest.mark.parametrize("name", EVERY)
def test_ours_reads_what_from_pretrained_reads(results: Any, name: str) -> None:
    """Of Mistral 3 under 5 with an untied head, as the error says: `from_pretrained` makes two there."""
    for reader, opens in results[1].items():
        for row, found in opens.items():
            if row.endswith(f"|{name}") and found[SAVED] == EQUAL:
                is_untied = name == "mistral3" and reader == NEWEST and not row.startswith(NEWEST)
                ours = f"{EQUAL}, {TABLE['UNTIED']}" if is_untied else EQUAL
                ways = {found[SAVED], found[EXPORT]}, {found[f"ours of {way}"] for way in (SAVED, EXPORT)}
                assert ways == ({EQUAL}, {ours}), (row, found)
