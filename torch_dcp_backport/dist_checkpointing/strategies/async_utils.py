"""Saves in the background: the request that `save(async_sharded_save=True)` returns, and its queue.

Names and fields are those of `megatron.core.dist_checkpointing.strategies.async_utils`.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple, Optional, TypeVar, cast

from torch_dcp_backport.dist_checkpointing._src import report
from torch_dcp_backport.dist_checkpointing._src.calls import begin
from torch_dcp_backport.dist_checkpointing._src.offers import refusing
from torch_dcp_backport.dist_checkpointing._src.staged import let_go
from torch_dcp_backport.dist_checkpointing._src.worker import Worker, checked_seconds
from torch_dcp_backport.dist_checkpointing.core import CheckpointingException
from torch_dcp_backport.transfer import Call, Group, gc_context

logger = logging.getLogger("torch_dcp_backport.dist_checkpointing")

__getattr__ = refusing(
    __name__,
    "AsyncCaller PersistentAsyncCaller TemporalAsyncCaller _ActiveAsyncRequest",
    ": a save in the background is written by a thread, or a process, which AsyncCallsQueue starts",
)

F = TypeVar("F", bound=Callable[..., Any])

CANNOT_FINALIZE = "cannot finalize the checkpoint"
#: Seconds that a caller with a bound waits for what an abandoned save leaves to be removed.
PATIENCE = 5.0
ADDED = "the checkpoint is made, and every function was called"


class AsyncRequest(NamedTuple):
    """A save that was planned and copied: the caller's tensors may change now."""

    #: Writes this rank's files; not collective. Where it raises, no rank finalizes the save.
    async_fn: Optional[Callable[..., None]]
    async_fn_args: tuple[Any, ...]
    #: Called in this order once every rank has written. The first makes the checkpoint; collective. Ranks may
    #: have different numbers of others.
    finalize_fns: list[Callable[[], None]]
    async_fn_kwargs: Mapping[str, Any] = MappingProxyType({})
    #: Nothing is left to do in it here.
    preload_fn: Optional[Callable[[], Any]] = None
    is_frozen: bool = False
    call_idx: int = 0
    #: Of this package: called where the save was not finalized, on every rank, once `async_fn` has ended.
    abandon_fns: Sequence[Callable[[], None]] = ()
    #: Of this package: called where the wait for `async_fn` is over; returns what it has not done.
    stop_fn: Optional[Callable[[], str]] = None

    def add_finalize_fn(self, fn: Callable[[], None]) -> None:
        """Add a function that this rank calls after the checkpoint is complete on every rank.

        Other ranks may add none, or more. A function is also called where another that was added failed on
        some rank; it is not called where the checkpoint itself failed.

        Raises:
            RuntimeError: the request is under way.
        """
        if self.is_frozen:
            raise RuntimeError("the request is under way: no finalize function can be added")
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Write, and finalize. Collective.

        An error of the request's own functions is raised on this rank alone: an `AsyncCallsQueue` tells the
        others, too.
        """
        if self.async_fn is not None:
            self.async_fn(*self.async_fn_args, **self.async_fn_kwargs)
        for finalize in self.finalize_fns:
            finalize()

    def freeze(self) -> AsyncRequest:
        """Return the same request, to which nothing can be added."""
        return self._replace(is_frozen=True)


def _disable_gc() -> Callable[[F], F]:
    """Return a decorator: Python's garbage collection stands still while the function runs."""

    def decorated(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with gc_context():
                return function(*args, **kwargs)

        return cast(F, call)

    return decorated


def _set_process_qos(cpu_priority: int, io_priority: Optional[int] = None) -> None:
    """Set the priority of this process, as far as it may: of one that removes old checkpoints.

    Args:
        cpu_priority: the nice value; a higher number waits for more others.
        io_priority: the class for disks, as in psutil, which has to be installed; None leaves it.
    """
    try:
        os.setpriority(os.PRIO_PROCESS, 0, cpu_priority)
        if io_priority is not None:
            import_module("psutil").Process().ionice(io_priority)
    except (OSError, ImportError, AttributeError) as error:
        logger.warning("the priority of this process cannot be set: %s", error)


def as_exception(error: BaseException) -> Exception:
    """Return an error of a thread as one that other ranks can hear of.

    What is no Exception (a cancelled task of a store, an exit) would end its thread alone.
    """
    return error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")


def _finalize(call: Call, functions: Sequence[Callable[[], None]]) -> None:
    """Call a request's finalize functions. Collective; ranks may have different numbers of them.

    Ranks must meet as often as each other, however many functions they have: once after the first function,
    which the others must not follow where it failed, and once after the others.

    Raises:
        CheckpointingException: a function failed on some rank; the same on every rank.
    """
    with call.guard():
        for make in functions[:1]:
            make()
    has_more = call.gather_object(
        "finalizing",
        len(functions),
        lambda counts: max(counts.values()) > 1,
        so_far="the checkpoint may be whole by now",
    )
    if not has_more:
        return
    for finalize in functions[1:]:
        try:
            finalize()
        except Exception as error:
            # The next may be collective, and other ranks may be in it: it must not miss this rank.
            call.record(call.problem_of(error), error)
    call.barrier("calling added finalize functions", so_far=ADDED)


class _Running:
    """A request under way, with an outcome of its own: a thread that was given up may yet fail."""

    def __init__(self, request: AsyncRequest) -> None:
        self.request = request
        self.worker: Optional[Worker] = None
        #: An error of its functions before it is finalized.
        self.failure: Optional[Exception] = None

    def start(self) -> None:
        request = self.request
        # The other ranks go on: what fails here is raised on all of them when they finalize.
        self._try(request.preload_fn, (), {})
        if request.async_fn is None or self.failure is not None:
            return
        arguments = request.async_fn, request.async_fn_args, dict(request.async_fn_kwargs)
        self.worker = Worker(functools.partial(self._try, *arguments), "save in the background")
        try:
            # The process waits for it at its end, though it is not finalized then.
            self.worker.start()
        except RuntimeError as error:
            logger.warning("no thread can be started (%s): the files are written now", error)
            self.worker = None
            self._try(*arguments)

    def _try(
        self, function: Optional[Callable[..., Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Call a function of the request, if it has one, and keep its error."""
        try:
            if function is not None:
                function(*args, **kwargs)
        except Exception as error:
            self.failure = error
        except BaseException as error:
            if threading.current_thread() is threading.main_thread():
                raise
            self.failure = as_exception(error)

    def wait(self, timeout: Optional[float]) -> None:
        """Wait until the files are written; give up after so many seconds, which is the request's failure."""
        if self.worker is None or self.worker.wait(timeout):
            return
        self.worker.give_up()
        left = "" if self.request.stop_fn is None else self.request.stop_fn()
        text = f"not written within {timeout:g} s: {left or 'what its async_fn writes'}"
        self.failure = CheckpointingException(f"{text}; it is abandoned, and may end later or never")

    @property
    def is_ended(self) -> bool:
        return self.worker is None or self.worker.wait(0)

    def abandon(self, timeout: Optional[float]) -> None:
        """Call the functions for a save that was not finalized, once its thread has ended.

        They touch the disk: where waits are bounded, they are called in a thread that may hang with it.
        """
        if timeout is None:
            self._abandon()
            return
        worker = Worker(self._abandon, "removal of an abandoned save")
        try:
            worker.start()
        except RuntimeError as error:
            logger.error("no thread can be started (%s): what the save left stays", error)
            return
        # Behind a writer that was given up it would be as long again, which other ranks wait for.
        if self.worker is None or self.worker.wait(0):
            worker.wait(min(timeout, PATIENCE))
        worker.give_up()

    def _abandon(self) -> None:
        if self.worker is not None:
            self.worker.wait()
        for abandon in self.request.abandon_fns:
            abandon()


class AsyncCallsQueue:
    """Runs one request after the other in a thread. All ranks make the same calls in the same order."""

    def __init__(
        self, persistent: bool = False, *, process_group: Group = None, timeout: Optional[float] = None
    ) -> None:
        """`persistent` makes no difference: a thread costs nothing to start.

        `process_group`: the ranks that save together, as it was passed to `save`. `timeout`: the most seconds
        that a call waits for this rank's files; then the request fails on every rank, and the process that
        writes them is ended. It should be less than the timeout of the process group. None waits without end.

        Raises:
            ValueError: `timeout` is no number of seconds.
        """
        self.process_group = process_group
        self.timeout = checked_seconds("timeout", timeout)
        self._running: Optional[_Running] = None
        self._scheduled = 0

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Start a request, and return its number. Waits for the last request, and finalizes it. Collective.

        Raises:
            CheckpointingException: the last request failed; the same on every rank. This one was not started.
        """
        if self._running is not None:
            began = time.monotonic()
            self.maybe_finalize_async_calls(blocking=True)
            logger.info("waited %.1f s for the save before", time.monotonic() - began)
        self._scheduled += 1
        request = async_request.freeze()._replace(call_idx=self._scheduled)
        self._running = _Running(request)
        self._running.start()
        return self._scheduled

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Finalize the request under way once every rank has written its files. Collective.

        Args:
            blocking: wait for it, up to the `timeout` of the queue.
            no_dist: makes no difference: all ranks are asked in any case.

        Returns:
            The number of the request, if it was finalized.

        Raises:
            CheckpointingException: it failed on some rank; the same on every rank. It is not tried again. If
                the first of the finalize functions failed, no other was called on any rank; if others
                failed, the checkpoint is made and all of them were called.
        """
        running = self._running
        if running is None:
            return []
        began = time.perf_counter()
        if blocking:
            running.wait(self.timeout)
        seconds = time.perf_counter() - began
        if not blocking:
            with begin(CANNOT_FINALIZE, "save", self.process_group) as call:
                if not call.gather_object(
                    "asking whether all ranks have written",
                    running.is_ended,
                    lambda ended: all(ended.values()),
                    so_far="the folder holds no checkpoint yet",
                ):
                    return []
        self._running, failure = None, running.failure
        with begin(CANNOT_FINALIZE, "save", self.process_group) as call:
            with call.guard():
                if failure is not None:
                    raise failure
            try:
                call.barrier("writing in the background", so_far="the save was finalized on no rank")
                with report.waited(seconds):
                    _finalize(call, running.request.finalize_fns)
            except CheckpointingException:
                running.abandon(self.timeout)
                raise
        return [running.request.call_idx]

    def get_num_unfinalized_calls(self) -> int:
        """Return 1 while a request is under way, or has not been finalized; else 0."""
        return int(self._running is not None)

    def close(self, abort: bool = False) -> None:
        """Finalize the request under way, and free the memory that is kept for the next copy. Collective.

        Args:
            abort: wait for this rank's thread alone, and finalize nothing: the folder holds no checkpoint.
                Not collective; the other ranks have to do the same.
        """
        try:
            self._close(abort)
        finally:
            let_go()

    def _close(self, abort: bool) -> None:
        if not abort:
            self.maybe_finalize_async_calls(blocking=True)
            return
        running, self._running = self._running, None
        if running is not None:
            running.wait(self.timeout)
            if not running.is_ended:
                logger.error("%s", running.failure)
            running.abandon(self.timeout)

    @classmethod
    def warmup_persistent_caller(cls, *options: Any, **more: Any) -> None:
        """Do nothing: a thread needs no process that is started before."""
