"""A save that is killed at every step: older steps are there, and the next start clears up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import dying
import pytest
import torch
from trainer import Trainer, same

from torch_dcp_backport.checkpoint._src import store


def saved_until(trainer: Trainer, steps: Sequence[int], limit: int) -> int:
    """Save in a child that is gone before its `limit`-th step; how many steps it came to."""

    def work(begin: Callable[[], None]) -> None:
        begin()
        for step in steps:
            trainer.handler.save_checkpoint(step)
        trainer.handler.finish()

    return dying.until(limit, work)


@pytest.mark.parametrize("step", [2, 3], ids=["the same step again", "the next step"])
@pytest.mark.parametrize(("keep", "is_async"), [(None, False), (1, False), (1, True)])
def test_killed_at_every_step(tmp_path: Path, step: int, keep: int | None, is_async: bool) -> None:
    older, before = Trainer(tmp_path / "unused"), {}
    total = None
    for limit in range(1000):
        root = tmp_path / str(limit)
        older.handler.default_local_dir = root
        older.handler.max_ckpt_to_keep = None
        older.manager.is_async = False
        for number in (1, 2):
            older.train(number, number)
            older.handler.save_checkpoint(number)
            before[number] = older.state()
        older.train(step + 10, 5)
        older.handler.max_ckpt_to_keep = keep
        older.manager.is_async = is_async
        total = saved_until(older, [step], limit)
        after = older.state()
        fresh = Trainer(root)
        fresh.train(99)
        resumed, state = fresh.handler.load_checkpoint(), fresh.state()
        assert (resumed == 2 and same(state, before[2])) or (resumed == step and same(state, after))
        left = {path.name for path in root.iterdir()}
        assert len([one for one in store.steps_in(root) if not one.fault]) >= (2 if keep is None else 1)
        # The load removed nothing, and renamed nothing; the next save does.
        assert {path.name for path in root.iterdir()} == left
        fresh.handler.save_checkpoint(50)
        fresh.handler.finish()
        assert not list(root.glob(".*"))
        if total < limit:
            break
    assert total is not None
    assert 20 < total < limit
    assert resumed == step


def test_killed_while_the_step_before_is_removed_in_a_thread(tmp_path: Path) -> None:
    """A retention that goes on while the next step is written, and is waited for by the next one."""
    trainer = Trainer(tmp_path / "unused", max_ckpt_to_keep=1)
    trainer.train(7, 3)
    names: dict[str, set[str]] = {}
    for limit in range(1000):
        root = trainer.handler.default_local_dir = tmp_path / str(limit)
        trainer.handler.save_checkpoint(1)
        expected = trainer.state()
        total = saved_until(trainer, [2, 3], limit)
        left = {path.name for path in root.iterdir()}
        names[str(limit)] = {name.split("-")[0] for name in left if ".old-" in name}
        fresh = Trainer(root)
        fresh.train(99)
        assert fresh.handler.load_checkpoint() in (1, 2, 3)
        assert all(map(torch.equal, fresh.state()["parameters"], expected["parameters"]))
        loaded = fresh.handler.load_checkpoint()
        fresh.handler.save_checkpoint(4)
        assert not list(root.glob(".*"))
        if total < limit:
            break
    assert {".global_step_1.old", ".global_step_2.old"} <= set().union(*names.values())
    assert loaded == 3
