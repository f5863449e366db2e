"""docs/recipes.md, Ray: its workers are processes that nothing of the driver's reaches."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from programs import blocks_below, output_of

ROOT = Path(__file__).resolve().parents[2]
(INIT,) = re.findall(
    r"^ray\.init\((runtime_env=.*)\)$", (ROOT / "docs" / "recipes.md").read_text(), re.MULTILINE
)

PROGRAM = """
import os, ray
@ray.remote
def home():
    from torch.distributed.checkpoint.state_dict import set_model_state_dict
    return set_model_state_dict.__globals__["__name__"].partition(".")[0]
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, {how})
print("the worker has that of", ray.get(home.remote()))
"""
WITH_PATH = """runtime_env={"env_vars": {"PYTHONPATH": os.environ["WORKERS"]}}"""


@pytest.mark.parametrize(
    ("how", "package"),
    [("runtime_env=None", "torch"), (INIT, "torch_dcp_backport"), (WITH_PATH, "torch_dcp_backport")],
)
def test_a_worker(how: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import torch_dcp_backport\n")
    (tmp_path / "train.py").write_text("import torch_dcp_backport\n" + PROGRAM.format(how=how))
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("WORKERS", f"{tmp_path / 'site'}{os.pathsep}{path}")
    assert f"the worker has that of {package}\n" in output_of(["train.py"], tmp_path)


def test_ray_train(tmp_path: Path) -> None:
    """docs/stacks.md, Ray: what the workers run begins with the import."""
    pytest.importorskip("ray")
    (tmp_path / "train.py").write_text(blocks_below(ROOT / "docs" / "stacks.md", "python")["Ray"])
    output = output_of(["train.py"], tmp_path)
    assert "'fix': 'applied'" in output, output
    assert (tmp_path / "steps" / "global_step_1").is_dir()
