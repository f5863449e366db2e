"""`make demo-resume` with two kills in place of ten."""

from __future__ import annotations

import re
from pathlib import Path

from programs import output_of

ROOT = Path(__file__).resolve().parents[2]


def test_a_killed_training_ends_as_the_undisturbed_one(tmp_path: Path) -> None:
    picture = tmp_path / "resume.png"
    short = ["--kills", "2", "--steps", "16", "--plot", str(picture)]
    output = output_of([str(ROOT / "benchmarks/resume.py"), *short], tmp_path)
    assert len(re.findall(r"killed in step \d+", output)) == 4
    assert len(re.findall(r"ended with step 16", output)) == 2
    assert len(re.findall(r"2 kills, \d in the middle of a save; no saved step lost", output)) == 2
    assert "losses: all the same bits\nlast step: the same bits" in output
    assert re.search(r"losses: differ by at most \d\.\de-0[5-9] from those of 4 ranks", output), output
    assert picture.read_bytes().startswith(b"\x89PNG")
