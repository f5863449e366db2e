"""Saves that are due by a policy, on a signal, and of the last complete step after an exception.

Must never save a state that is no step's: after an exception the state is compared with that of the step, and
is not saved where it changed since.
"""

from __future__ import annotations

import json
import logging
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple, Optional

import torch

from torch_dcp_backport import compat
from torch_dcp_backport.checkpoint._src import handler as handlers  # under way: it imports this module
from torch_dcp_backport.checkpoint._src import user_state
from torch_dcp_backport.checkpoint._src.expiry import SaveSignals
from torch_dcp_backport.checkpoint._src.extra import has_state
from torch_dcp_backport.checkpoint._src.manager import BaseCheckpointManager
from torch_dcp_backport.checkpoint._src.store import checked_step
from torch_dcp_backport.dist_checkpointing import CheckpointingException, begin, digest_of, values, values_of
from torch_dcp_backport.transfer import (
    Group,
    TransferError,
    as_bytes,
    group_ranks,
    groups_of,
)

logger = logging.getLogger("torch_dcp_backport.checkpoint")

CANNOT_ASK = "cannot agree on a save"
#: Seconds between two looks at whether the ranks' roll call is decided.
PAUSE = 0.05
#: Seconds in which a rank that is late finds out who else is.
GRACE = 5.0
#: The decision of a roll call of ranks that have all come with the same text.
ALL_ALIKE = "all alike"
#: Ranks of a group -> the watches that they agreed on so far: the same number on every rank.
_watches: Counter[tuple[int, ...]] = Counter()


#: The keys that lead to a tensor.
Name = tuple[Any, ...]


class Due(NamedTuple):
    """The ranks' answer to whether a step is to be saved."""

    is_due: bool
    #: Whether a rank got a signal.
    is_stopping: bool


class Mark:
    """What tells whether the state of a training is still that of a complete step.

    Tensors are held, not copied: by their versions, and where other memory is in their place by their values.
    """

    def __init__(self, handler: handlers.CheckpointHandler, step: int, metric: Any) -> None:
        self.step = step
        # The program's own tensor may be changed in place, and leads to the graph of the whole pass.
        self.metric = metric.detach().clone() if isinstance(metric, torch.Tensor) else metric
        # First, and once: the code of the program's objects may be collective.
        states = user_state.states_of(handler.state)
        self.tensors = {name: held(tensor) for name, tensor in tensors_in(handler, states)}
        self.digests = digests_in(handler, states)
        self.random_state = handler.engine.get_rng_state()
        #: The state of this rank's data loader, packed: by the time of an exception it may be further.
        self.loader: Optional[bytes] = None
        if handler.is_data_source and has_state(handler.train_dataloader):
            self.loader = values.dumps(handler.train_dataloader.state_dict())
        #: What began to change the state since.
        self.touched = ""

    def changed(self, handler: handlers.CheckpointHandler) -> str:
        """Return what is no longer as it was; "" where all is. Calls the program's objects on every rank."""
        states = user_state.states_of(handler.state)
        now = dict(tensors_in(handler, states))
        names = [
            ".".join(map(str, name))
            for name in {**self.tensors, **now}
            if not self.is_same(name, now.get(name))
        ]
        digests = digests_in(handler, states)
        names += [
            name for name in sorted({*digests, *self.digests}) if digests.get(name) != self.digests.get(name)
        ]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return ", ".join(names[:3]) + more

    def is_same(self, name: Name, now: Optional[torch.Tensor]) -> bool:
        if now is None or name not in self.tensors:
            return False
        before, version = self.tensors[name]
        if before.shape != now.shape or before.dtype != now.dtype or version != version_of(before):
            return False
        if before.data_ptr() == now.data_ptr():
            return version == version_of(now)
        # Other memory, or a copy that the object makes each time.
        return bool(torch.equal(*(as_bytes(side.contiguous()) for side in (before, now))))


def tensors_in(
    handler: handlers.CheckpointHandler, states: Mapping[str, Any]
) -> Iterator[tuple[Name, torch.Tensor]]:
    """Yield the tensors that a save of a handler would read, with names.

    Args:
        handler: the handler.
        states: those of its `state`, by name.
    """
    manager = handler.engine
    for number, chunk in enumerate(listed(manager.model)):
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
            yield ("model", number, name), local(tensor)
    for number, optimizer in enumerate(listed(manager.optimizer)):
        for place, state in enumerate(optimizer.state.values()):
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    yield ("optimizer", number, place, key), local(value)
                else:
                    yield from tensors_below(("optimizer", number, place, key), value)
    for name, state in states.items():
        yield from tensors_below((f"state[{name!r}]",), state)


def tensors_below(name: Name, value: Any) -> Iterator[tuple[Name, torch.Tensor]]:
    for path, tensor in user_state.leaves(value):
        if isinstance(tensor, torch.Tensor):
            yield (*name, *path), local(tensor)


def digests_in(handler: handlers.CheckpointHandler, states: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the digests of the other values that a save would read, by name; `states` as of `tensors_in`."""
    manager = handler.engine
    groups = [
        [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        for optimizer in listed(manager.optimizer)
    ]
    found: dict[str, Any] = {"param_groups": groups}
    for number, chunk in enumerate(listed(manager.model)):
        for name, module in chunk.named_modules():
            if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
                found[f"model.{number}.{name}._extra_state"] = module.get_extra_state()
    if manager.lr_scheduler is not None:
        found["lr_scheduler"] = manager.lr_scheduler.state_dict()
    for name, state in states.items():
        tensors = {path: None for path, leaf in user_state.leaves(state) if isinstance(leaf, torch.Tensor)}
        found[f"state[{name!r}]"] = user_state.with_values(state, tensors)
    return {name: digest_of(values_of(value)) for name, value in found.items()}


def held(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return a tensor with its version; of one that counts none, a copy, which is compared by its values."""
    kept = tensor.clone() if tensor.is_inference() else tensor
    return kept, version_of(kept)


def version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def local(tensor: torch.Tensor) -> torch.Tensor:
    return compat.local_part(tensor) if isinstance(tensor, compat.DTensor) else tensor


def listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


class Watch:
    """A context of a training's loop: records signals, and saves the complete step after an exception."""

    def __init__(self, handler: handlers.CheckpointHandler) -> None:
        self._handler = handler
        self._signals: Optional[SaveSignals] = None
        self._mark: Optional[Mark] = None
        self._stack = ExitStack()
        #: The place of this watch's entries in the store.
        self._prefix = ""

    def __enter__(self) -> Watch:
        handler = self._handler
        with begin(CANNOT_ASK, "save", handler.process_group) as call, ExitStack() as stack:
            with call.guard():
                check_policy(handler)
                if handler.is_watched:
                    raise CheckpointingException("the handler is within watching() already")
                policy = handler.save_policy
                if policy is not None and policy.signals:
                    self._signals = stack.enter_context(SaveSignals(policy.signals, handler.process_group))
                if policy is not None and policy.on_exception:
                    for optimizer in listed(handler.engine.optimizer):
                        stack.callback(optimizer.register_step_pre_hook(self._begin_step).remove)
            call.barrier("comparing the policies", must_agree={"save_policy": str(handler.save_policy)})
            self._stack = stack.pop_all()
            _watches[call.ranks] += 1
            digest = zlib.crc32(json.dumps(call.ranks).encode())
            self._prefix = f"torch_dcp_backport/watch/{digest}/{_watches[call.ranks]}"
        return self

    def __exit__(self, kind: Any, error: Optional[BaseException], traceback: Any) -> None:
        policy, mark = self._handler.save_policy, self._mark
        try:
            if error is None:
                self._warn_of_signal()
            elif policy is not None and policy.on_exception and mark is not None and is_for_all(error):
                # Now: with NCCL an agreement with ranks that are somewhere else may never end.
                trace = type(error), error, traceback
                text = "the loop ends after step %d, with %s: %s"
                logger.error(text, mark.step, type(error).__name__, error, exc_info=trace)
                self._save_complete(mark, policy.patience)
        finally:
            self._mark = None
            self._stack.close()

    def completed(self, step: int, metric: Any) -> None:
        """Remember the state of a step that is complete, for a save after an exception."""
        policy = self._handler.save_policy
        if policy is not None and policy.on_exception:
            self._mark = Mark(self._handler, step, metric)

    def take_signal(self) -> bool:
        """Return whether this rank got a signal since the last call."""
        return self._signals is not None and self._signals.take()

    def _begin_step(self, *step: Any) -> None:
        if self._mark is not None:
            self._mark.touched = "an optimizer's step had begun"

    def _warn_of_signal(self) -> None:
        if self.take_signal():
            logger.warning("a signal came after the last save_if_due: no step was saved for it")

    def _save_complete(self, mark: Mark, patience: float) -> None:
        """Save the last complete step, if all ranks have left the loop and have its state. Never raises."""
        handler = self._handler
        try:
            # What follows is collective, and goes by both.
            place = f"step {mark.step}, saved last: {handler.last_saved}"
            roll_call(handler.process_group, self._prefix, place, patience)
            if handler.last_saved == mark.step:
                try:
                    handler.publish_last()
                except CheckpointingException as error:
                    if not error.is_agreed:
                        raise
                    logger.error("%s", error)
            if handler.last_saved != mark.step:
                self._check_unchanged(mark)
                logger.warning("saving step %d, which was complete before the exception", mark.step)
            handler.save_last(mark)
        except Exception as error:
            if handler.last_saved != mark.step:
                logger.error("step %d was complete, and is not saved: %s", mark.step, error)
            else:
                logger.error("after step %d: %s", mark.step, error)

    def _check_unchanged(self, mark: Mark) -> None:
        """Raise on every rank, if the state of any rank is not that of the mark. Collective."""
        handler = self._handler
        common = {"save_policy": str(handler.save_policy), **user_state.names_of(handler.state)}
        with begin(CANNOT_ASK, "save", handler.process_group) as call:
            with call.guard():
                for chunk in listed(handler.engine.model):
                    # FSDP2 has whole parameters in the middle of a pass.
                    compat.abandon_pass(chunk)
            touched = call.all_gather_object("asking for what began", mark.touched, must_agree=common)
            refuse_changed(touched)
            changed = call.attempt(mark.changed, handler)
            refuse_changed(call.all_gather_object("comparing the state with that of the step", changed))


def refuse_changed(texts_by_rank: Mapping[int, str]) -> None:
    """Raise, if the state of any rank is no longer that of its step.

    Raises:
        CheckpointingException: naming the first of them, and what has changed.
    """
    for rank, text in sorted(texts_by_rank.items()):
        if text:
            raise CheckpointingException(f"the state of rank {rank} has changed since: {text}")


def is_for_all(error: BaseException) -> bool:
    """Return whether other ranks may have left the loop, too, and agreements be in step."""
    if isinstance(error, TransferError):
        return False
    if isinstance(error, CheckpointingException):
        return error.is_agreed
    return not isinstance(error, GeneratorExit)


def check_policy(handler: handlers.CheckpointHandler) -> None:
    """Refuse to watch what could not be saved.

    Raises:
        CheckpointingException: no policy; `on_exception` with an engine whose state cannot be compared.
    """
    policy = handler.save_policy
    if policy is None:
        raise CheckpointingException("the handler has no save_policy: there is nothing to go by")
    if not policy.on_exception:
        return
    if not isinstance(handler.engine, BaseCheckpointManager):
        kind = type(handler.engine).__name__
        raise CheckpointingException(
            f"on_exception=True needs a checkpoint manager, whose state can be compared; got {kind}"
        )
    for optimizer in listed(handler.engine.optimizer):
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise CheckpointingException(
                f"on_exception=True needs optimizers of torch.optim; got a {type(optimizer).__name__}"
            )


def ask(
    handler: handlers.CheckpointHandler, watch: Optional[Watch], step: int, metric: Any, minutes_since: float
) -> Due:
    """Return whether a step is to be saved, the same on every rank. Collective: one small all-gather.

    The watch remembers the state of the step. Where it is to call objects of `state`, whose code may be
    collective, all ranks agree before, and once more afterwards.

    Args:
        handler: the handler.
        watch: its watch; None outside of one.
        step: the step that is complete.
        metric: its metric.
        minutes_since: minutes since the last save; those of the first rank count.

    Raises:
        CheckpointingException: no policy, or ranks with another policy or step; on every rank.
    """
    policy = handler.save_policy
    names = user_state.names_of(handler.state)

    def remember() -> list[float]:
        if watch is not None:
            # Code of the program's own objects, which may fail on a rank alone.
            watch.completed(checked_step(step), metric)
        return []

    def numbers() -> list[float]:
        check_policy(handler)
        assert policy is not None, "it was checked"
        number = checked_step(step)
        if watch is None and (policy.signals or policy.on_exception):
            raise CheckpointingException(f"save_if_due outside of watching(): {policy} would see nothing")
        is_late = policy.minutes is not None and minutes_since >= policy.minutes
        is_due = is_late or (policy.steps is not None and number % policy.steps == 0)
        if not handler.state:
            remember()
        signalled = watch is not None and watch.take_signal()
        return [
            float(zlib.crc32(f"{policy} {names}".encode())),
            float(number),
            float(is_due),
            float(signalled),
        ]

    with begin(CANNOT_ASK, "save", handler.process_group) as call:
        own = call.attempt(numbers)
        if call.groups:
            rows = list(call.all_gather_numbers(own, 4).values())
        else:
            call.barrier("asking whether to save")
            rows = [list(own.value)]
        if any(row[:2] != rows[0][:2] for row in rows):
            common = {"save_policy": str(policy), "step": str(step), **names}
            call.barrier("asking whether to save", must_agree=common)
        if handler.state and policy is not None and policy.on_exception:
            call.all_gather_numbers(call.attempt(remember), 0)
    is_stopping = any(row[3] for row in rows)
    return Due(bool(rows[0][2]) or is_stopping, is_stopping)


def roll_call(group: Group, prefix: str, text: str, patience: float) -> None:
    """Wait until all ranks of a group have come with the same text. No collective: ranks may never come.

    All ranks have the same outcome: the store has one decision, made by the last rank to come, or the first
    to run out of patience. The others ask for that one entry.

    Args:
        group: the ranks.
        prefix: the first characters of the entries of this roll call; the same on every rank.
        text: this rank's.
        patience: seconds to wait for the others.

    Raises:
        CheckpointingException: a rank did not come in time, or with another text; the same on every rank.
    """
    if not groups_of(group):
        return
    store, decision = compat.default_store(), f"{prefix}/decision"
    ranks = group_ranks(group)

    def is_decided(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not (is_there := store.check([decision])) and time.monotonic() < end:
            time.sleep(PAUSE)
        return bool(is_there)

    def reason() -> str:
        gone = [str(rank) for rank in ranks if not store.check([f"{prefix}/{rank}"])]
        if gone:
            return f"ranks {', '.join(gone[:5])} did not leave the loop within {patience:g} s"
        texts = {rank: bytes(store.get(f"{prefix}/{rank}")).decode() for rank in ranks}
        first = texts[ranks[0]]
        others = [f"rank {rank}: {text}" for rank, text in texts.items() if text != first]
        at = "; ".join([f"rank {ranks[0]}: {first}", *others[:5]])
        return f"ranks are not at the same step ({at})" if others else ALL_ALIKE

    store.set(f"{prefix}/{torch.distributed.get_rank()}", text)
    is_last = store.add(f"{prefix}/count", 1) == len(ranks)
    # Of ranks that run out of patience one finds out who is late; the others do where it is gone meanwhile.
    if is_last or (
        not is_decided(patience) and (store.add(f"{prefix}/late", 1) == 1 or not is_decided(GRACE))
    ):
        store.compare_set(decision, "", reason())
    outcome = bytes(store.get(decision)).decode()
    if outcome != ALL_ALIKE:
        raise CheckpointingException(outcome)
