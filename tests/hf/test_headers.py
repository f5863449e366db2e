"""Who opens what in a load of many files: one rank reads headers, and each rank the files of its slices.

Torch maps a file without an audit event. A look at the file tells of it, with which its times are compared.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from file_calls import counted

from torch_dcp_backport import hf
from torch_dcp_backport.compat import DTensor, Shard

FILES = 30
ROWS = 8


def tensors(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {f"w{number}": torch.full((ROWS, 4), value + number) for number in range(FILES)}


def saved(folder: Path, value: float = 0.0) -> Path:
    how = hf.Export(file_bytes=ROWS * 4 * 4)
    hf.save_state_dict(tensors(value), folder, like={"model_type": "made"}, how=how)
    assert len(list(folder.glob("*.safetensors"))) == FILES
    return folder


def sharded() -> dict[str, Any]:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    part = torch.full((ROWS // dist.get_world_size(), 4), -1.0)
    return {key: DTensor.from_local(part.clone(), mesh, [Shard(0)], run_check=False) for key in tensors()}


def is_right(state: dict[str, Any], value: float = 0.0) -> bool:
    return all(bool((part.to_local() == value + n).all()) for n, part in enumerate(state.values()))


def loaded(api: Any, folder: Path, copy: bool = False, files: str = "auto") -> tuple[int, int, bool]:
    """(opens of data files, looks at them, whether the values are right) of this rank."""
    if copy and dist.get_rank():
        folder = Path(shutil.copytree(folder, folder.with_name(f"copy-{dist.get_rank()}")))
    dist.barrier()
    state = sharded()
    with counted(folder) as calls:
        hf.load_state_dict(state, folder, files=files)
    names = [name for name in {*calls.opens, *calls.stats} if name.endswith(".safetensors")]
    return sum(calls.opens[name] for name in names), sum(calls.stats[name] for name in names), is_right(state)


@pytest.mark.parametrize("world", [2, 4])
def test_the_first_rank_alone_reads_headers(ranks: Any, tmp_path: Path, world: int) -> None:
    first, *others = ranks(loaded, saved(tmp_path / "m"), world=world)
    # Beside the files that are mapped: whether the folder has a single file is looked at by its name.
    assert first[::2] == (FILES, True)
    assert others == [(0, FILES + 1, True)] * (world - 1)
    assert first[1] <= FILES + 2


def test_copies_on_other_machines_are_read_there(ranks: Any, tmp_path: Path) -> None:
    found = ranks(loaded, saved(tmp_path / "m"), copy=True, world=2)
    assert [(opens, good) for opens, _, good in found] == [(FILES, True)] * 2


def test_a_rank_that_does_not_read_opens_nothing(ranks: Any, tmp_path: Path) -> None:
    first, *others = ranks(loaded, saved(tmp_path / "m"), files="rank0", world=2)
    assert first[2]
    assert others == [(0, 0, True)]


def filled_late(api: Any, folder: Path, change: str) -> str:
    """The error of a load whose files change on the last rank between headers and data; "" where none."""
    native, last = hf.fill_here, dist.get_rank() == dist.get_world_size() - 1

    def fill(*args: Any) -> Any:
        dist.barrier()
        if last:
            path = folder / "model-00007-of-00030.safetensors"
            content = path.read_bytes()
            if change == "touched":
                os.utime(path, (5, 5))
            elif change == "copied":
                shutil.copy(path, folder / "new")
                (folder / "new").rename(path)
            elif change == "absent":
                path.unlink()
            else:
                # Other values behind the same header, or another header of the same length.
                name, other = (b"w6", b"w0") if change == "names" else (content[-8:], bytes(8))
                path.unlink()
                path.write_bytes(content.replace(name, other))
                os.utime(path, (7, 7))
        dist.barrier()
        return native(*args)

    state = sharded()
    hf._src.state.fill_here = fill
    try:
        hf.load_state_dict(state, folder)
    except Exception as error:
        return str(error)
    finally:
        hf._src.state.fill_here = native
    assert is_right(state)
    return ""


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("touched", ""),
        ("copied", ""),
        ("values", "was changed while it was read"),
        ("names", "was changed while it was read"),
        ("absent", "No such file"),
    ],
)
def test_a_file_that_changes_between_header_and_data(
    ranks: Any, tmp_path: Path, change: str, says: str
) -> None:
    (text,) = set(ranks(filled_late, saved(tmp_path / "m"), change, world=2))
    assert says in text
    assert bool(says) == bool(text)


def other_files(api: Any, folder: Path) -> str:
    """The error of ranks that see different models."""
    own = folder if not dist.get_rank() else folder.with_name("other")
    with pytest.raises(RuntimeError) as caught:
        hf.load_state_dict(sharded(), own, files="shared")
    return str(caught.value)


def test_ranks_that_see_other_values_are_refused(ranks: Any, tmp_path: Path) -> None:
    saved(tmp_path / "m")
    saved(tmp_path / "other", 5.0)
    (text,) = set(ranks(other_files, tmp_path / "m", world=2))
    assert "the ranks see different files" in text


def linked(_: Any, folder: Path, places: list[Path]) -> str:
    back = os.getcwd()
    os.chdir(places[dist.get_rank()])
    try:
        state = sharded()
        before = {key: part.to_local().clone() for key, part in state.items()}
        with pytest.raises(RuntimeError) as caught:
            hf.load_state_dict(state, folder)
        assert all(torch.equal(part.to_local(), before[key]) for key, part in state.items())
    finally:
        os.chdir(back)
    return str(caught.value)


def test_links_that_lead_elsewhere_on_a_rank_are_noticed_before_anything_is_written(
    ranks: Any, tmp_path: Path
) -> None:
    """The folder is shared; its files are links to a place of each machine."""
    folder = saved(tmp_path / "m")
    places = [tmp_path / "first", tmp_path / "second"]
    for place, value in zip(places, (1.0, 5.0)):
        saved(place, value)
    for path in folder.glob("*.safetensors"):
        path.unlink()
        path.symlink_to(f"/proc/self/cwd/{path.name}")
    (text,) = set(ranks(linked, folder, places, world=2))
    assert "nothing was changed" in text
    assert "the ranks see different files" in text
