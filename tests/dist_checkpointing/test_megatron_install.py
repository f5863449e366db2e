"""`megatron.install()`: imports of Megatron's package get this room's modules, all or none."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torch_dcp_backport.dist_checkpointing import mapping, megatron, optimizer
from torch_dcp_backport.dist_checkpointing import serialization as ours

#: A package as Megatron's is built: it imports its checkpoints' modules at its own import.
FILES = {
    "__init__.py": "",
    "core/__init__.py": "from megatron.core.dist_checkpointing.mapping import ShardedTensor\n"
    "from .dist_checkpointing import optimizer\n",
    "core/late.py": "from megatron.core.dist_checkpointing import optimizer as held\n",
    "core/dist_checkpointing/__init__.py": "from .mapping import ShardedTensor\n",
    "core/dist_checkpointing/mapping.py": "class ShardedTensor:\n    pass\n",
    "core/dist_checkpointing/optimizer.py": "def get_optim_param_to_id_map():\n    pass\n",
    "core/dist_checkpointing/serialization.py": "",
    "core/dist_checkpointing/gpt_checkpoint_interop.py": "from .mapping import ShardedTensor\n",
}
NAME = "megatron.core.dist_checkpointing"


def taken_away() -> dict[str, object]:
    names = [name for name in sys.modules if name == "megatron" or name.startswith("megatron.")]
    return {name: sys.modules.pop(name) for name in names}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in FILES.items():
        path = tmp_path / "megatron" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    before = taken_away()
    yield tmp_path / "megatron"
    megatron.remove()
    taken_away()
    sys.modules.update(before)  # type: ignore[arg-type]


def test_every_module_is_ours(package: Path) -> None:
    megatron.install()
    megatron.install()
    for name in megatron.OURS:
        if name not in megatron.LATE:
            module = importlib.import_module(f"{NAME}.{name}")
            assert module is sys.modules[f"torch_dcp_backport.dist_checkpointing.{name}"]
            assert module.__spec__ is not None
            assert module.__spec__.name == module.__name__ == f"torch_dcp_backport.dist_checkpointing.{name}"
    core = importlib.import_module("megatron.core")
    assert core.ShardedTensor is mapping.ShardedTensor
    assert core.optimizer is optimizer
    assert core.dist_checkpointing.serialization.save is ours.save


def test_a_module_that_renames_shards_is_megatrons_own(package: Path) -> None:
    megatron.install()
    module = importlib.import_module(f"{NAME}.gpt_checkpoint_interop")
    assert module.ShardedTensor is mapping.ShardedTensor
    assert module.__file__ == str(package / "core" / "dist_checkpointing" / "gpt_checkpoint_interop.py")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("strategies.zarr", "strategies.zarr is not offered by .*: only the format torch_dist is read"),
        # One of this room's, which Megatron does not have: there may not be a second copy of it.
        ("loading", "loading is not offered by .*: this package has no such module"),
    ],
)
def test_a_module_that_is_not_offered(package: Path, name: str, words: str) -> None:
    megatron.install()
    with pytest.raises(ModuleNotFoundError, match=words):
        importlib.import_module(f"{NAME}.{name}")


def test_a_name_that_is_not_offered(package: Path) -> None:
    megatron.install()
    with pytest.raises(ImportError, match=r"does not offer Megatron's TemporalAsyncCaller: a save in the"):
        exec(f"from {NAME}.strategies.async_utils import TemporalAsyncCaller")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = importlib.import_module(f"{NAME}.strategies.async_utils").nothing


def test_too_late(package: Path) -> None:
    core = importlib.import_module("megatron.core")
    importlib.import_module("megatron.core.late")
    before = list(sys.meta_path)
    with pytest.raises(
        RuntimeError, match=r"too late: .* hold its functions: megatron.core, megatron.core.late\."
    ):
        megatron.install()
    assert sys.meta_path == before
    assert core.ShardedTensor is not mapping.ShardedTensor


def test_a_room_that_is_not_whole_changes_nothing(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron, "OURS", (*megatron.OURS, "gone"))
    before = list(sys.meta_path)
    with pytest.raises(ImportError, match="gone"):
        megatron.install()
    assert sys.meta_path == before


def test_remove_gives_megatrons_own_back(package: Path, caplog: pytest.LogCaptureFixture) -> None:
    megatron.install()
    importlib.import_module("megatron.core.late")
    importlib.import_module(f"{NAME}.gpt_checkpoint_interop")
    with caplog.at_level(logging.WARNING):
        megatron.remove()
    assert "with this room's functions, and keep them: megatron.core, megatron.core.late" in caplog.text
    assert [name for name in sys.modules if name.startswith(NAME)] == []
    module = importlib.import_module(f"{NAME}.mapping")
    assert module.__file__ == str(package / "core" / "dist_checkpointing" / "mapping.py")
    assert importlib.import_module("torch_dcp_backport.dist_checkpointing.mapping") is mapping


def test_a_program_with_the_real_package() -> None:
    """Where megatron-core is installed, it imports with ours, in an interpreter of its own."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        pytest.skip("megatron-core is not installed here")
    import subprocess

    code = (
        "from torch_dcp_backport.dist_checkpointing import megatron, mapping\n"
        "megatron.install()\n"
        "import megatron.core\n"
        "from megatron.core.optimizer import distrib_optimizer\n"
        "from megatron.core.models.gpt import GPTModel\n"
        "assert megatron.core.dist_checkpointing.ShardedTensor is mapping.ShardedTensor\n"
        "assert distrib_optimizer.ShardedTensor is mapping.ShardedTensor\n"
    )
    code = code.replace("import megatron, mapping", "import mapping, megatron as door").replace(
        "megatron.install()", "door.install()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
