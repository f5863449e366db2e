"""When to save: by steps, by minutes, on a signal, and the complete step after an exception, or nothing."""

from __future__ import annotations

import contextlib
import logging
import shutil
import signal
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import cpu_fsdp
import pytest
import torch
import torch.distributed as dist
from heard import heard
from pool import on_ranks
from test_ranks import sharded
from test_user_state import Holder
from torch import nn
from trainer import Trainer, same

from torch_dcp_backport import compat
from torch_dcp_backport.checkpoint import CheckpointHandler, FSDPCheckpointManager, SavePolicy, SaveSignals
from torch_dcp_backport.checkpoint._src import store, watching
from torch_dcp_backport.dist_checkpointing import CheckpointingException
from torch_dcp_backport.publish import disk

ON_EXCEPTION = SavePolicy(on_exception=True, patience=1.0)


CPU_PASS = pytest.mark.skipif(not cpu_fsdp.TRAINS, reason="no forward pass of FSDP2 on this torch's CPU")


class Boom(Exception):
    """What a training dies of."""


def steps(root: Path) -> list[int]:
    return sorted(step.step for step in store.steps_in(root) if not step.fault)


@contextlib.contextmanager
def left_by(kind: type[BaseException], handler: CheckpointHandler) -> Iterator[None]:
    """Watch a loop that an exception ends."""
    with pytest.raises(kind), handler.watching():
        yield


def saves(root: Path, policy: SavePolicy, last: int = 6) -> list[int]:
    handler = Trainer(root, save_policy=policy).handler
    with handler.watching():
        return [step for step in range(1, last + 1) if handler.save_if_due(step)]


@pytest.mark.parametrize(
    ("policy", "saved"),
    [
        (SavePolicy(steps=3), [3, 6]),
        (SavePolicy(minutes=1e-9), [1, 2, 3, 4, 5, 6]),
        (SavePolicy(minutes=1e9), []),
        (SavePolicy(minutes=1e9, steps=4), [4]),
    ],
)
def test_by_steps_and_by_minutes(tmp_path: Path, policy: SavePolicy, saved: list[int]) -> None:
    assert saves(tmp_path, policy) == saved
    assert steps(tmp_path) == saved


def test_a_save_by_hand_begins_the_minutes_anew(tmp_path: Path) -> None:
    handler = Trainer(tmp_path, save_policy=SavePolicy(minutes=0.2 / 60)).handler
    time.sleep(0.3)
    handler.save_checkpoint(1)
    assert handler.save_if_due(2) is None


def test_a_signal_saves_the_next_step_and_is_restored(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    policy = SavePolicy(signals=[signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1])
    handler = Trainer(tmp_path, save_policy=policy).handler
    with handler.watching():
        assert handler.save_if_due(1) is None
        signal.raise_signal(signal.SIGTERM)
        assert not handler.is_stopping
        assert handler.save_if_due(2) is not None
        assert handler.is_stopping
        assert handler.save_if_due(3) is None
        assert not handler.is_stopping
    assert signal.getsignal(signal.SIGTERM) is before
    assert steps(tmp_path) == [2]


def test_an_interrupt_saves_the_next_step_before_the_loop_ends(tmp_path: Path) -> None:
    handler = Trainer(tmp_path, save_policy=SavePolicy(signals=[signal.SIGINT])).handler
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with handler.watching():
            signal.raise_signal(signal.SIGINT)
            assert handler.save_if_due(1) is not None
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_metric_of_a_step_is_that_at_its_end(tmp_path: Path) -> None:
    handler, mean = Trainer(tmp_path, save_policy=ON_EXCEPTION).handler, torch.tensor(1.0)
    loss = torch.ones(3, requires_grad=True).sum()
    graph = weakref.ref(loss)
    with left_by(Boom, handler):
        handler.save_if_due(1, metric=loss)
        del loss
        assert graph() is None
        handler.save_if_due(2, metric=mean)
        mean += 1
        raise Boom
    assert [step.manifest.metric for step in store.steps_in(tmp_path)] == [1.0]


@pytest.mark.parametrize("step", [None, "2", 1.5, float("nan"), -1, True])
def test_a_step_that_is_none_is_refused_also_where_it_is_not_due(tmp_path: Path, step: Any) -> None:
    handler = Trainer(tmp_path, save_policy=SavePolicy(steps=4)).handler
    with pytest.raises(CheckpointingException, match="expected a whole number from 0 on"):
        handler.save_if_due(step)


def test_signals_that_cannot_be_watched_leave_none_watched() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises((OSError, ValueError)), SaveSignals([signal.SIGUSR1, signal.SIGKILL]):
        pass
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_signal_after_the_last_step_is_told(tmp_path: Path, caplog) -> None:
    handler = Trainer(tmp_path, save_policy=SavePolicy(signals=[signal.SIGUSR1])).handler
    with handler.watching():
        handler.save_if_due(1)
        signal.raise_signal(signal.SIGUSR1)
    assert "no step was saved for it" in caplog.text


def test_without_a_policy_it_is_an_error(tmp_path: Path) -> None:
    handler = Trainer(tmp_path).handler
    with pytest.raises(CheckpointingException, match="no save_policy"):
        handler.save_if_due(1)
    with pytest.raises(CheckpointingException, match="no save_policy"), handler.watching():
        pass


def test_a_policy_that_watches_is_nothing_outside_of_it(tmp_path: Path) -> None:
    handler = Trainer(tmp_path, save_policy=ON_EXCEPTION).handler
    with pytest.raises(CheckpointingException, match="outside of watching"):
        handler.save_if_due(1)
    with handler.watching(), pytest.raises(CheckpointingException, match="already"), handler.watching():
        pass


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"steps": 0},
        {"minutes": -1},
        {"minutes": float("nan")},
        {"signals": 15},
        {"signals": ["SIGTERM"]},
        {"on_exception": "yes"},
        {"on_exception": True, "patience": 0},
        {"on_exception": True, "patience": None},
        {"minutes": True},
    ],
)
def test_a_policy_that_says_nothing_is_refused(options: Any) -> None:
    with pytest.raises(ValueError, match=list(options)[-1] if options else "nothing would ever be saved"):
        SavePolicy(**options)


def test_an_engine_whose_state_is_not_known_is_refused(tmp_path: Path) -> None:
    class Engine:
        def save_checkpoint(self, **options: Any) -> None: ...

        def load_checkpoint(self, path: str) -> None: ...

    handler = CheckpointHandler(Engine(), default_local_dir=tmp_path, save_policy=ON_EXCEPTION)
    with pytest.raises(CheckpointingException, match="got Engine"), handler.watching():
        pass


# After an exception.


class Dropping(nn.Module):
    """A model whose forward pass draws random numbers, and changes buffers only if it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 5)
        self.register_buffer("mean", torch.zeros(5))
        self.count = torch.zeros(1)

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


def before_a_step(trainer: Trainer) -> None:
    """What a next step has done by the time that it fails in the forward pass."""
    trainer.loader.position += 1
    torch.rand(3)
    for parameter in trainer.model.parameters():
        parameter.grad = torch.ones_like(parameter)


def half_a_step(trainer: Trainer) -> None:
    with torch.no_grad():
        next(iter(trainer.model.parameters())).add_(1)


def a_step_that_fails(trainer: Trainer) -> None:
    for parameter in trainer.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    # Its first parameter is changed by then; through `.data`, which no version tells.
    next(iter(trainer.model.parameters())).data.add_(1)
    trainer.optimizer.step()


def a_buffer(trainer: Trainer) -> None:
    trainer.model.mean.add_(1)


def extra_state(trainer: Trainer) -> None:
    trainer.model.count.add_(1)


def the_rate(trainer: Trainer) -> None:
    trainer.schedule.last_epoch += 1


def an_option(trainer: Trainer) -> None:
    trainer.optimizer.param_groups[0]["lr"] = 0.5


def own_state(trainer: Trainer) -> None:
    trainer.handler.state["own"].value["count"] += 1


def own_tensor(trainer: Trainer) -> None:
    trainer.handler.state["own"].value["tensor"] = torch.ones(2)


def other_memory(trainer: Trainer) -> None:
    trainer.model.mean = torch.ones(5)


@pytest.mark.parametrize(
    ("happens", "is_saved"),
    [
        (before_a_step, True),
        (half_a_step, False),
        (a_step_that_fails, False),
        (a_buffer, False),
        (extra_state, False),
        (the_rate, False),
        (an_option, False),
        (own_state, False),
        (own_tensor, False),
        (other_memory, False),
    ],
)
def test_only_the_state_of_the_complete_step_is_saved(
    tmp_path: Path, caplog, happens, is_saved: bool
) -> None:
    state = {"own": Holder({"count": 1, "tensor": torch.zeros(2)})}
    trainer = Trainer(tmp_path, Dropping(), save_policy=ON_EXCEPTION, state=state)
    with left_by(Boom, trainer.handler):
        trainer.train()
        trainer.handler.save_if_due(1)
        trainer.train(1)
        random_state = torch.get_rng_state()
        trainer.handler.save_if_due(2)
        happens(trainer)
        raise Boom
    assert steps(tmp_path) == [2] * is_saved
    if not is_saved:
        assert "step 2 was complete, and is not saved: " in caplog.text
        return
    expected = Trainer(tmp_path / "other", Dropping())
    expected.train()
    expected.train(1)
    torch.set_rng_state(random_state)
    seen = expected.state()
    other = Trainer(tmp_path, Dropping(), state={"own": Holder()})
    assert other.handler.load_checkpoint() == 2
    assert same(other.state(), seen)


def test_a_step_that_is_saved_is_published_and_not_saved_again(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, save_policy=ON_EXCEPTION, config={"async_save": True})
    orders = []
    with left_by(KeyboardInterrupt, trainer.handler):
        trainer.handler.save_if_due(1)
        trainer.handler.save_checkpoint(1)
        trainer.handler.finish()
        orders += [step.age for step in store.steps_in(tmp_path)]
        raise KeyboardInterrupt
    assert [step.age for step in store.steps_in(tmp_path)] == orders
    with left_by(SystemExit, trainer.handler):
        trainer.handler.save_if_due(2)
        trainer.handler.save_checkpoint(2)
        raise SystemExit
    assert steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("is_heard_before", [True, False])
def test_a_step_whose_save_failed_in_the_background_is_saved(tmp_path: Path, is_heard_before: bool) -> None:
    trainer = Trainer(tmp_path, save_policy=ON_EXCEPTION, config={"async_save": True})
    with left_by(Boom, trainer.handler):
        trainer.train()
        trainer.handler.save_if_due(1)
        trainer.handler.save_checkpoint(1)
        (draft,) = tmp_path.glob(".global_step_1.tmp-*")
        shutil.rmtree(draft)
        if is_heard_before:
            with pytest.raises(CheckpointingException, match="step 1 was not saved"):
                trainer.handler.finish()
        raise Boom
    assert steps(tmp_path) == [1]


def test_not_a_number_is_no_change(tmp_path: Path) -> None:
    class Copying(Holder):
        def state_dict(self) -> Any:
            return {"mean": self.value.clone()}

    trainer = Trainer(tmp_path, save_policy=ON_EXCEPTION, state={"own": Copying(torch.tensor(torch.nan))})
    with left_by(Boom, trainer.handler):
        trainer.handler.save_if_due(1)
        raise Boom
    assert steps(tmp_path) == [1]


def test_a_step_after_a_load_of_an_older_one_is_not_taken_for_saved(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, save_policy=ON_EXCEPTION)
    trainer.handler.save_checkpoint(1)
    trainer.train()
    trainer.handler.save_checkpoint(2)
    trainer.handler.resume_mode, trainer.handler.resume_from_path = "resume_path", tmp_path / "global_step_1"
    trainer.handler.load_checkpoint()
    trainer.train(7, 3)
    with left_by(Boom, trainer.handler):
        trainer.handler.save_if_due(2)
        expected = [parameter.clone() for parameter in trainer.model.parameters()]
        raise Boom
    other = Trainer(tmp_path)
    assert other.handler.load_checkpoint() == 2
    assert all(map(torch.equal, other.model.parameters(), expected))


def test_a_save_that_fails_leaves_the_exception_as_it_was(tmp_path: Path, monkeypatch, caplog) -> None:
    trainer = Trainer(tmp_path, save_policy=ON_EXCEPTION)

    def refuse(name: str) -> None:
        raise OSError(28, "No space left on device")

    with left_by(Boom, trainer.handler):
        trainer.handler.save_if_due(1)
        monkeypatch.setattr(disk, "on_step", refuse)
        raise Boom
    assert "step 1 was complete, and is not saved: " in caplog.text
    assert "No space left" in caplog.text


@on_ranks(world=2)
def test_the_exception_is_logged_before_ranks_wait_for_each_other(api: Any, tmp_path: Path) -> None:
    handler, records = Trainer(tmp_path, save_policy=ON_EXCEPTION).handler, list[logging.LogRecord]()

    def never(*text: Any) -> None:
        assert [record.getMessage() for record in records] == [
            f"the loop ends after step 1, with Boom: rank {dist.get_rank()}"
        ]
        assert "raise Boom(" in logging.Formatter().formatException(records[0].exc_info)
        raise OSError("no store")

    watched = logging.getLogger("torch_dcp_backport.checkpoint")
    with (
        mock.patch.object(watched, "handle", records.append),
        mock.patch.object(watching, "roll_call", never),
        left_by(Boom, handler),
    ):
        handler.save_if_due(1)
        raise Boom(f"rank {dist.get_rank()}")
    assert "no store" in records[1].getMessage()


def test_an_upload_that_failed_does_not_keep_it_from_being_saved(tmp_path: Path, caplog) -> None:
    root = tmp_path / "run"
    (tmp_path / "store").write_text("no folder")
    trainer = Trainer(
        root, save_policy=SavePolicy(steps=1, on_exception=True), default_hdfs_dir=str(tmp_path / "store")
    )
    with left_by(CheckpointingException, trainer.handler):
        trainer.handler.save_if_due(1)
        trainer.handler._uploads.wait(60)
        trainer.handler.save_if_due(2)
    assert steps(root) == [1, 2]


def train_on_ranks(api: Any, root: Path, what: str) -> list[str]:
    rank = dist.get_rank()
    policy = SavePolicy(on_exception=True, patience=1.0 if what == "one leaves" else 60.0)
    trainer = Trainer(root, sharded(), save_policy=policy)
    try:
        with heard("checkpoint") as texts, trainer.handler.watching():
            for step in (1, 2):
                trainer.train(step + rank)
                trainer.handler.save_if_due(step)
            if what == "one leaves" and rank:
                return texts
            if what == "one has saved it by itself" and rank:
                trainer.handler.last_saved = 2
            if what == "one has changed" and rank:
                trainer.train()
            if what == "in the middle of a pass":
                # FSDP2 has its root whole until the backward pass.
                trainer.model(torch.ones(2, 6)).sum()
            raise Boom
    except Boom:
        pass
    finally:
        dist.barrier()
    return texts


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("all raise", ""),
        pytest.param("in the middle of a pass", "", marks=CPU_PASS),
        (
            "one has saved it by itself",
            "rank 0: step 2, saved last: None; rank 1: step 2, saved last: 2)",
        ),
        ("one leaves", "ranks 1 did not leave the loop within 1 s"),
        ("one has changed", "the state of rank 1 has changed since: an optimizer's step had begun"),
    ],
)
def test_ranks_save_together_or_not_at_all(ranks, tmp_path: Path, what: str, says: str) -> None:
    texts = ranks(train_on_ranks, tmp_path, what, world=2)
    assert steps(tmp_path) == ([] if says else [2])
    assert says in "".join(texts[0])


def called(api: Any, prefix: str, absent: int, odd: int) -> tuple[str, set[str]]:
    """The outcome of a roll call, and the entries that this rank asked for while it waited for it."""
    asked, native = set[str](), compat.default_store()

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

        def check(self, keys: list[str]) -> bool:
            asked.update(keys)
            return native.check(keys)

    rank = dist.get_rank()
    if rank == absent:
        return "", asked
    # One of them comes last.
    time.sleep(0.3 * (rank == 2))
    with mock.patch.object(compat, "default_store", Counting):
        try:
            watching.roll_call(None, prefix, str(7 + (rank == odd)), 1.0)
        except CheckpointingException as error:
            return str(error), asked
    return "agreed", asked


@pytest.mark.parametrize(
    ("absent", "odd", "outcome"),
    [
        (-1, -1, "agreed"),
        (-1, 1, "ranks are not at the same step (rank 0: 7; rank 1: 8)"),
        (1, -1, "ranks 1 did not leave the loop within 1 s"),
    ],
)
def test_ranks_that_wait_ask_for_one_entry_and_have_one_outcome(
    ranks, tmp_path, absent, odd, outcome
) -> None:
    seen = ranks(called, str(tmp_path), absent, odd, world=3)
    assert [text for text, _ in seen] == ["" if rank == absent else outcome for rank in range(3)]
    alone = [asked for _, asked in seen if asked <= {f"{tmp_path}/decision"}]
    # Of all ranks one asks who has come: a thousand that did would ask a million times.
    assert len(alone) == 2


@on_ranks(world=2)
def test_a_signal_on_one_rank_saves_on_all(api: Any, tmp_path: Path) -> None:
    handler = Trainer(tmp_path, save_policy=SavePolicy(signals=[signal.SIGUSR2])).handler
    with handler.watching():
        handler.save_if_due(1)
        if dist.get_rank() == 1:
            signal.raise_signal(signal.SIGUSR2)
        assert handler.save_if_due(2) is not None
        assert handler.is_stopping


@on_ranks(world=2)
def test_policies_and_steps_that_differ_are_refused_on_every_rank(api: Any, tmp_path: Path) -> None:
    odd = dist.get_rank() == 1
    handler = Trainer(tmp_path, save_policy=SavePolicy(steps=5 if odd else 4)).handler
    with pytest.raises(CheckpointingException, match=r"rank 1: not the same on every rank: save_policy \("):
        handler.save_if_due(1)
    with pytest.raises(CheckpointingException, match="save_policy"), handler.watching():
        pass
    handler.save_policy = SavePolicy(steps=4)
    with pytest.raises(CheckpointingException, match=r"rank 1: not the same on every rank: step \("):
        handler.save_if_due(4 + odd)
    handler.save_policy = None if odd else SavePolicy(steps=4)
    with pytest.raises(CheckpointingException, match=r"rank 1: .*no save_policy"):
        handler.save_if_due(4)


@on_ranks(world=2)
def test_an_object_that_fails_on_one_rank_is_heard_of_on_every_rank(api: Any, tmp_path: Path) -> None:
    class Fails(Holder):
        def state_dict(self) -> Any:
            if dist.get_rank() == 1:
                raise OSError("no state today")
            return {}

    policy = SavePolicy(on_exception=True, patience=60.0)
    handler = Trainer(tmp_path, save_policy=policy, state={"own": Fails()}).handler
    with handler.watching(), pytest.raises(CheckpointingException, match="rank 1: OSError: no state today"):
        handler.save_if_due(1)


def test_tensors_without_versions_are_compared_by_their_values(tmp_path: Path) -> None:
    with torch.inference_mode():
        value = torch.zeros(2)
    trainer = Trainer(tmp_path, save_policy=ON_EXCEPTION, state={"own": Holder({"value": value})})
    with left_by(Boom, trainer.handler):
        trainer.handler.save_if_due(1)
        with torch.inference_mode():
            value += 1
        raise Boom
    assert steps(tmp_path) == []
    with left_by(Boom, trainer.handler):
        trainer.handler.save_if_due(1)
        raise Boom
    assert steps(tmp_path) == [1]


def test_an_optimizer_without_memory_of_its_own_is_compared(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    manager = FSDPCheckpointManager(model, torch.optim.SGD(model.parameters(), lr=0.1))
    handler = CheckpointHandler(manager, default_local_dir=tmp_path, save_policy=ON_EXCEPTION)
    with left_by(Boom, handler):
        handler.save_if_due(3)
        raise Boom
    assert steps(tmp_path) == [3]
