"""Every example runs on an accelerator, too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from emulated.examples import Program
from emulated.runner import Setting, problems, run
from programs import SAYS, check_tour, command_of, output_of

ROOT = Path(__file__).resolve().parents[2]
TOUR = ROOT / "examples/tour.py"
#: With ranks: one process that reads a checkpoint knows no device.
EXAMPLES = [
    path
    for path in sorted((ROOT / "examples").glob("*.py"))
    if path != TOUR and "init_process_group" in path.read_text()
]
#: The device's operations go through the host, one by one: fewer steps than the first lines say.
SHORTER = {"engine_sft": ["--steps", "2"], "train_resume": ["--steps", "6"]}
SAYS_SHORTER = {"train_resume": "step 1 loss (?s:.*)step 6 loss "}
LIMIT = 240.0


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_keeps_the_rules_and_runs_as_it_says(
    example: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    world, arguments = command_of(example)
    program = Program(example, SHORTER.get(example.stem, arguments))
    setting = Setting(world=world, sets_device=False, has_group=False, ends_together=False)
    seen = run(program, setting, LIMIT)
    output = capfd.readouterr().out
    assert not problems(seen), problems(seen)
    assert "not here" not in output
    assert re.search(SAYS_SHORTER.get(example.stem, SAYS[example.stem]), output), output


def test_the_tour_breaks_a_load_mends_it_and_resumes_on_other_ranks() -> None:
    # In a process of its own, since it begins with a torch that is not patched.
    output = output_of([str(ROOT / "tests/emulated/examples.py"), str(TOUR)], ROOT)
    assert "on 4 ranks, fakegpu" in output
    check_tour(output)
