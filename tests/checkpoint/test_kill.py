"""A save that is killed at every step: older steps are there, and the next start clears up."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from trainer import Trainer, same

from torch_dcp_backport.checkpoint import store
from torch_dcp_backport.dist_checkpointing.engine import files


def saved_until(trainer: Trainer, step: int, limit: int) -> int:
    """Save in a child that is gone before its `limit`-th step; how many steps it came to."""
    reads, writes = os.pipe()
    state = random.getstate()
    child = os.fork()
    if not child:
        random.setstate(state)  # Python seeds it anew in a fork
        count = 0

        def die(name: str) -> None:
            nonlocal count
            if count == limit:
                os.write(writes, str(count).encode())
                os._exit(9)
            count += 1

        files.on_step = die
        try:
            trainer.handler.save_checkpoint(step)
            trainer.handler.finish()
            os.write(writes, str(count).encode())
        finally:
            os._exit(0)
    os.close(writes)
    os.waitpid(child, 0)
    with os.fdopen(reads) as file:
        return int(file.read())


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
        total = saved_until(older, step, limit)
        after = older.state()
        fresh = Trainer(root)
        fresh.train(99)
        resumed, state = fresh.handler.load_checkpoint(), fresh.state()
        assert (resumed == 2 and same(state, before[2])) or (resumed == step and same(state, after))
        assert len([one for one in store.steps_in(root) if not one.fault]) >= (2 if keep is None else 1)
        assert not list(root.glob(".*"))
        if total < limit:
            break
    assert total is not None
    assert 20 < total < limit
    assert resumed == step
