"""docs/stacks.md: each program in it runs as it stands there, on two ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cpu_fsdp import RELEASE
from programs import blocks_below, output_of_code, output_of_ranks
from warm import Interpreters

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "stacks.md"
#: Heading -> a package that its program imports.
HERE = {
    "Lightning Fabric": "lightning_fabric",
    "accelerate": "accelerate",
    "transformers.Trainer": "transformers",
    "torchtune": "torchtune",
}
#: Ray Train starts its own ranks (test_ray.py), megatron-core has a lane of its own (test_megatron_core.py),
#: and verl imports a module (below).
ELSEWHERE = ("Ray", "Megatron-LM", "verl")
WORLD = 2


@pytest.fixture(scope="module")
def interpreters() -> Iterator[Interpreters]:
    interpreters = Interpreters(ROOT, OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true")
    yield interpreters
    interpreters.close()


def test_every_program_is_run() -> None:
    assert set(blocks_below(PAGE, "python")) == {*HERE, *ELSEWHERE}


@pytest.mark.skipif(RELEASE < (2, 6), reason="the page says where FSDP2 is in older releases")
@pytest.mark.parametrize("heading", HERE)
def test_a_program_runs(interpreters: Interpreters, heading: str, tmp_path: Path) -> None:
    pytest.importorskip(HERE[heading])
    program = tmp_path / "program.py"
    program.write_text(blocks_below(PAGE, "python")[heading])
    output_of_ranks(interpreters, program, tmp_path, WORLD)
    if heading != "transformers.Trainer":
        return
    steps = lambda: sorted(path.name for path in (tmp_path / "steps").glob("global_step_*"))  # noqa: E731
    assert steps() == ["global_step_2", "global_step_3"]
    program.write_text(re.sub("max_steps=3", "max_steps=5", program.read_text()))
    output_of_ranks(interpreters, program, tmp_path, WORLD)
    assert steps() == ["global_step_4", "global_step_5"]
    assert (tmp_path / "files" / "model.safetensors").exists()


#: As a worker of verl's does, once its own modules are imported.
WORKER = """
import sys
import verl.workers.fsdp_workers as workers
from verl.utils.import_utils import import_external_libs

sys.path.insert(0, "")
import_external_libs("with_backport")
loader = sys.modules["verl.third_party.torch.distributed.checkpoint.state_dict"]
print(workers.FSDPCheckpointManager.__module__, loader.set_model_state_dict.__globals__["__name__"])
"""


def test_the_module_for_verl(interpreters: Interpreters, tmp_path: Path) -> None:
    """What verl's workers call later is our manager, and torch's corrected function."""
    pytest.importorskip("verl")
    (tmp_path / "with_backport.py").write_text(blocks_below(PAGE, "python")["verl"])
    output = output_of_code(interpreters, WORKER, tmp_path)
    pattern = r"^torch_dcp_backport\.checkpoint\S* torch_dcp_backport\.state_dict"
    assert re.search(pattern, output, re.MULTILINE), output
