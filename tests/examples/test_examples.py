"""Every example runs as its first lines say, on four ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from programs import SAYS, blocks, check_tour, command_of, output_of, output_of_code, output_of_ranks
from warm import Interpreters

ROOT = Path(__file__).resolve().parents[2]
ALL = sorted((ROOT / "examples").glob("*.py"))
#: It starts its ranks itself.
TOUR = ROOT / "examples/tour.py"
EXAMPLES = [path for path in ALL if path != TOUR]
#: Below torchrun itself, where it and each of its ranks import torch anew.
STARTED = "fsdp2_full_state"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_as_it_says(interpreters: Interpreters, example: Path) -> None:
    world, arguments = command_of(example)
    if example.stem == STARTED:
        count = ["--nproc-per-node", str(world)]
        output = output_of(["-m", "torch.distributed.run", "--standalone", *count, str(example)], ROOT)
    else:
        output = output_of_ranks(interpreters, example, ROOT, world, arguments)
    assert re.search(SAYS[example.stem], output), output


def test_the_tour_breaks_a_load_mends_it_and_resumes_on_other_ranks() -> None:
    (command,) = re.findall(r"^    python (.*)$", TOUR.read_text(), re.MULTILINE)
    assert command == "examples/tour.py"
    check_tour(output_of([command], ROOT))


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7), reason="FSDP2 trains on accelerators alone"
)
def test_the_quickstart_of_the_engine_trains_saves_and_loads(
    interpreters: Interpreters, tmp_path: Path
) -> None:
    programs = blocks(ROOT / "docs/engine.md", "python")
    (program,) = (text for text in programs if "FSDPEngineWithLMHead" in text)
    output = output_of_code(interpreters, program, tmp_path)
    assert re.fullmatch(r"\d\.\d+", output.splitlines()[-1]), output
    assert (tmp_path / "ckpt/global_step_1/manifest.json").is_file()


@pytest.mark.parametrize("example", ALL, ids=lambda path: path.stem)
def test_what_a_page_shows_was_printed_by_it(example: Path) -> None:
    """As `make outputs` has recorded it."""
    first, _, printed = (example.parent / "outputs" / f"{example.stem}.txt").read_text().partition("\n")
    assert re.fullmatch(r"On torch 2\.\d+\.\d+, (four ranks|two ranks|one process) on the CPU:", first)
    if example == TOUR:
        check_tour(printed)
    else:
        assert re.search(SAYS[example.stem], printed), printed


@pytest.mark.parametrize("example", ALL, ids=lambda path: path.stem)
def test_its_cells_are_a_notebook(example: Path) -> None:
    """Cells of code and of text in turn, each text with words alone."""
    text = example.read_text()
    cells = re.split(r"^# %%", text, flags=re.MULTILINE)[1:]
    assert cells[0].startswith("\n")
    assert [cell for cell in cells if cell.startswith(" [markdown]")]
    for cell in cells:
        if cell.startswith(" [markdown]"):
            lines = cell.strip().splitlines()[1:]
            assert all(line.startswith("#") for line in lines if line), cell
            assert lines[0].startswith("# ## ")


def test_each_is_listed() -> None:
    listed = (ROOT / "docs" / "README.md").read_text()
    assert [path.name for path in ALL if f"examples/{path.name}" not in listed] == []
