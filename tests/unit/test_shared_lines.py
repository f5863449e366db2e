"""`tools/shared_lines.py`, which holds every line of the package to be its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "shared_lines.py"
FIVE = [f"value_{number} = compute(value, {number})" for number in range(5)]
CASES = {
    "as it stands": ("\n".join(FIVE), 1),
    "with other spaces, comments and blank lines": ("\n\n".join(f"{line}  # mine" for line in FIVE), 1),
    "with texts between": ("\n".join(f'{line}\n"""Another text."""' for line in FIVE), 1),
    "four of five": ("\n".join(FIVE[:4]), 0),
    "in another order": ("\n".join(reversed(FIVE)), 0),
    "imports": ("\n".join(f"from somewhere import value_{number}" for number in range(6)), 0),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_of_five_lines_is_told(tmp_path: Path, case: str) -> None:
    text, code = CASES[case]
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "part.py").write_text(f"def ours():\n    pass\n{text}\n")
    torchs = tmp_path / "torchs.py"
    torchs.write_text("\n".join([*FIVE, *(f"from somewhere import value_{number}" for number in range(6))]))
    done = subprocess.run(
        [sys.executable, str(TOOL), str(tmp_path / "ours"), str(torchs)], capture_output=True, text=True
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert (f"part.py:3 stands in {torchs}:1, too" in done.stdout) == (code == 1)
