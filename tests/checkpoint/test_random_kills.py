"""Trainings killed at random moments: what a save acknowledged is never lost, and what is resumed is right.

SOAK_KILLS=1000 python3 tools/lanes.py test 2.6 -- tests/checkpoint/test_random_kills.py -s --timeout 3600
"""

from __future__ import annotations

import datetime
import hashlib
import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Optional

import pytest
import torch
import torch.distributed as dist
from forks import Forks, Tell
from trainer import Trainer

from torch_dcp_backport.checkpoint._src import manifest, remote, store

KILLS = int(os.environ.get("SOAK_KILLS", "8"))
STARTED = 60.0  # seconds until a training must have resumed


def train(trainer: Trainer, step: int) -> None:
    """Bring it from the step before to this one, as any training on any ranks would."""
    trainer.train(seed=step, gradient=step % 5 + 1)


def digest(trainer: Trainer) -> str:
    """Of all that has to come back; draws random numbers, which every step seeds anew."""
    state = trainer.state()
    tensors = b"".join(tensor.numpy().tobytes() for tensor in state["parameters"] + state["moments"])
    others = repr((state["rate"], state["position"], state["draws"])).encode()
    return hashlib.sha256(tensors + others).hexdigest()


def digests() -> Iterator[str]:
    """What an undisturbed training has at step 1, 2, ..."""
    trainer = Trainer(Path("unused"))
    step = 0
    while True:
        step += 1
        train(trainer, step)
        yield digest(trainer)


class How(NamedTuple):
    world: int
    is_async: bool
    #: Where steps are uploaded to.
    copies: Optional[Path]
    #: For each upload; else only where one has come to its end.
    waits: bool = False


def go_on(root: Path, rank: int, how: How, rendezvous: Path, tell: Tell) -> None:
    """Resume, and train until the process is killed; tells what was resumed, and each step that is safe."""
    torch.set_num_threads(1)
    if how.world > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=how.world,
            timeout=datetime.timedelta(seconds=STARTED),
        )
    url = None if how.copies is None else f"file://{how.copies}"
    config = {"async_save": how.is_async}
    trainer = Trainer(root, config=config, max_ckpt_to_keep=2, default_hdfs_dir=url)
    step = trainer.handler.load_checkpoint()
    tell("resumed", step, digest(trainer) if step else "")
    while True:
        train(trainer, step + 1)
        trainer.handler.save_checkpoint(step + 1)
        step += 1
        # In the background it is published by the next save.
        tell("saved", step - 1 if how.is_async else step, "")
        if url is not None and trainer.handler.finish(blocking=how.waits):
            tell("uploaded", step, "")


def killed(root: Path, how: How, count: int, moment: float, rendezvous: Path, kind: str) -> list[Any]:
    """Train in processes that are killed a moment after so many messages and one of a kind; all they told."""
    forks = Forks(how.world, lambda rank, tell: go_on(root, rank, how, rendezvous, tell))
    messages = list[Any]()
    end = time.monotonic() + STARTED
    while len(messages) < 1 + count or kind not in (message[0] for message in messages):
        told = forks.heard(end - time.monotonic())
        if not told:
            break
        messages += told
    # However slow the machine is: the moment counts from the last message.
    time.sleep(moment)
    forks.kill()
    statuses, last = forks.end()
    assert all(map(os.WIFSIGNALED, statuses)), "it ended by itself; see above"
    return messages + last


def check_copies(root: Path, uploaded: int) -> int:
    """Whether all that counts as a step in the store is whole; how many were cut short."""
    steps = remote.steps_at(remote.place_of(str(root))) if root.is_dir() else []
    for step in steps:
        if step.manifest is not None:
            assert not list(manifest.wrong_checksums(root / step.path, step.manifest))
    assert uploaded in [0, *(step.step for step in steps if step.manifest is not None)]
    return sum(step.manifest is None for step in steps)


@pytest.mark.timeout(60 + 5 * KILLS)
@pytest.mark.parametrize("has_copies", [False, True], ids=["local", "uploaded"])
def test_random_kills(tmp_path: Path, has_copies: bool) -> None:
    root, chance = tmp_path / "root", random.Random(KILLS)
    copies = tmp_path / "copies" if has_copies else None
    reference, expected = digests(), [""]
    acknowledged = resumed = uploaded = 0
    saves = in_a_save = in_an_upload = losses = 0
    for number in range(KILLS + 1):
        # On a busy machine no upload is done in time, and now and then one has to be.
        waits = has_copies and number % 4 == 0
        how = How(chance.choice([1, 2]), chance.random() < 0.5, copies, waits)
        count, moment = chance.randint(0, 2 + 2 * has_copies), chance.uniform(0, 0.05)
        awaited = "uploaded" if waits else "resumed"
        meeting = tmp_path / f"store-{number}"
        (kind, resumed, found), *later = killed(root, how, count, moment, meeting, awaited)
        assert kind == "resumed"
        assert len(later) >= count
        while len(expected) <= resumed:
            expected.append(next(reference))
        assert resumed >= acknowledged, f"step {acknowledged} was saved, and {resumed} resumed"
        assert found == expected[resumed], f"step {resumed} has other values than were saved"
        saves += sum(step > acknowledged for kind, step, _ in later if kind == "saved")
        acknowledged = max([resumed, *(step for _, step, _ in later)])
        in_a_save += any(root.glob(".*.tmp-*"))
        faults = [step.fault for step in store.steps_in(root) if step.fault]
        assert not faults, "a step has its name before it is whole"
        if copies is not None:
            uploaded = max([uploaded, *(step for kind, step, _ in later if kind == "uploaded")])
            in_an_upload += check_copies(copies, uploaded) > 0
            if uploaded and chance.random() < 0.25:
                # The machine is gone: what was uploaded is not.
                shutil.rmtree(root)
                acknowledged, losses = uploaded, losses + 1
    assert saves > KILLS / 4
    left = Trainer(root, default_hdfs_dir=None if copies is None else str(copies))
    resumed = left.handler.load_checkpoint()
    assert resumed >= acknowledged
    # What was killed goes with a save, and with no load.
    left.handler.save_checkpoint(resumed + 1)
    left.handler.finish()
    assert not list(root.glob(".*"))
    if copies is not None:
        check_copies(copies, resumed)
        assert uploaded
    print(
        f"\n{KILLS} kills, {in_a_save} while a step was written; {saves} acknowledged saves, none lost"
        + (f"; {in_an_upload} with an upload cut short, {losses} roots lost" if has_copies else "")
    )
