"""Rank processes that live for a whole test session and run functions sent to them.

A hang is a failure: after the limit every process dumps its stacks and is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, util
from typing import Any, ClassVar, Optional

import patience

OURS = "torch_dcp_backport.state_dict"
STOCK = "torch.distributed.checkpoint.state_dict"
LIMIT = 200.0
#: Bytes of `inline.MOST`.
INLINE = 24 * 1024
#: Forked from a server that has torch imported, and what modules of tests import, but nothing of ours: a pool
#: that replaces a failed one costs no second import. Nor what ours imports of torch: no test would notice a
#: missing import, or that ours fails where it comes first.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "pytest", "hypothesis", "tests.frozen"])
#: The server takes one request at a time.
STARTING = threading.Lock()
#: One thread at a time says which pools stand still.
STOPPING = threading.Lock()


class RankError(AssertionError):
    """A function raised on some ranks; the message holds every traceback."""


class Pool:
    """`world` processes in one gloo group; functions get the API module under test first.

    A pool stands still while others run: a thread of each gloo group wakes a hundred times a second, and four
    idle ranks with eleven groups took a twentieth of a processor.
    """

    #: Those that may be stopped: of the others the ranks end by themselves, which needs them awake.
    stoppable: ClassVar[weakref.WeakSet[Pool]] = weakref.WeakSet()

    def __init__(
        self,
        world: int,
        api: str,
        *,
        switch: str = "",
        timeout: float = 30.0,
        limit: float = LIMIT,
        imports: Optional[Sequence[str]] = None,
    ) -> None:
        """`switch`: the TORCH_DCP_BACKPORT of the ranks; by default off for torch's own API.

        `timeout` is that of collectives, `limit` that of a whole function, in seconds. A world of 0 is one
        process without any process group. `imports`: what is imported, in this order, before anything else,
        in a process that has not even torch, of which the ranks are forks; by default torch_dcp_backport,
        after torch.
        """
        self.world = world
        self.limit = limit
        self.folder = tempfile.TemporaryDirectory()
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        # Also those that a failed test forgets: at exit multiprocessing waits for ever for what stands still.
        util.Finalize(self, end, args=(self.processes,), exitpriority=100)
        #: Whether a process is the head of a process group that has all ranks in it.
        self.is_group = imports is not None
        self.is_busy = self.is_stopped = False
        switch = switch or ("off" if api == STOCK else "auto")
        context = CONTEXT if imports is None else multiprocessing.get_context("spawn")
        modules = ("torch_dcp_backport",) if imports is None else tuple(imports)
        rendezvous = f"{self.folder.name}/rendezvous"
        pairs = [context.Pipe() for _ in range(max(world, 1))]
        self.pipes = [ours for ours, _ in pairs]
        ranks = [
            (rank, world, api, modules, rendezvous, timeout, theirs) for rank, (_, theirs) in enumerate(pairs)
        ]
        if imports is None:
            self.start(context, serve_alone, switch, ranks)
        else:
            self.start(context, serve_forks, switch, [(modules, ranks)])
        for _, theirs in pairs:
            theirs.close()
        if not self.is_group:
            with STOPPING:
                self.stoppable.add(self)

    def start(self, context: Any, target: Callable[..., None], switch: str, each: Sequence[Any]) -> None:
        for args in each:
            process = context.Process(target=target, args=(switch, *args), daemon=True)
            with STARTING:
                process.start()
            self.processes.append(process)

    def signal(self, number: int) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if self.is_group else os.kill)(process.pid, number)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """function(api, *args, **kwargs) on every rank; its results by rank."""
        self.go()
        try:
            return self.results(function, *args, **kwargs)
        except BaseException:
            # Collectives may be out of step now, and answers to come be those of another function.
            self.close()
            raise
        finally:
            self.is_busy = False

    def go(self) -> None:
        """Wake these ranks, and let those stand still that nothing was sent to."""
        with STOPPING:
            self.is_busy = True
            for pool in self.stoppable:
                if pool.is_stopped is pool.is_busy:
                    pool.signal(signal.SIGCONT if pool.is_busy else signal.SIGSTOP)
                    pool.is_stopped = not pool.is_busy

    def results(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((function.__module__, function.__qualname__, args, kwargs))
        limit = self.limit * patience.factor()
        end = time.monotonic() + limit
        answers: list[Any] = []
        for rank, pipe in enumerate(self.pipes):
            try:
                answers.append(pipe.recv() if pipe.poll(max(0.0, end - time.monotonic())) else None)
            except EOFError:
                answers.append((False, f"the process of rank {rank} died"))
        if any(answer is None for answer in answers):
            self.signal(signal.SIGUSR1)
            time.sleep(1)
        failed = [
            f"--- rank {rank}: " + (answer[1] if answer else f"no answer in {limit:.0f} s, stacks on stderr")
            for rank, answer in enumerate(answers)
            if not answer or not answer[0]
        ]
        if failed:
            raise RankError("\n".join(failed))
        return [answer[1] for answer in answers]

    @property
    def usable(self) -> bool:
        return bool(self.processes) and all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        with STOPPING:
            self.stoppable.discard(self)
        end(self.processes)
        self.folder.cleanup()


def end(processes: list[Any]) -> None:
    """Kill them, and what they have started."""
    while processes:
        process = processes.pop()
        # It may not yet be the head of a group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


class Pools:
    """The pools of a folder of tests, by world size and API; one that lost a rank is followed by another.

    A rank that has run some hundred tests holds up to 1 GiB: of all folders' pools, those that were used last
    stay, up to `MOST` ranks. The start of another costs 0.3 s of CPU per rank.
    """

    MOST = 20
    #: Of all folders, the one used last at the end.
    kept: ClassVar[list[Pool]] = []

    def __init__(self, api: str, *, timeout: float = 30.0, limit: float = LIMIT) -> None:
        self.api = api
        self.timeout = timeout
        self.limit = limit
        self.open: dict[tuple[int, str], Pool] = {}

    def get(self, world: int = 4, api: str = "") -> Pool:
        key = world, api or self.api
        pool = self.open.get(key)
        if pool is None or not pool.usable:
            pool = self.open[key] = Pool(*key, timeout=self.timeout, limit=self.limit)
        self.keep(pool)
        return pool

    def keep(self, newest: Pool) -> None:
        """Close the pools that were not used for longest, those of other folders included."""
        others = [pool for pool in self.kept if pool is not newest and pool.usable]
        ranks = len(newest.processes)
        self.kept[:] = [newest]
        for pool in reversed(others):
            ranks += len(pool.processes)
            if ranks > self.MOST:
                pool.close()
            else:
                self.kept.insert(0, pool)

    def run(self, function: Callable[..., Any], *args: Any, world: int = 4, **kwargs: Any) -> list[Any]:
        """On 4 ranks (or `world=`); the function gets the module of the API first."""
        return self.get(world).run(function, *args, **kwargs)

    def close(self) -> None:
        for pool in self.open.values():
            pool.close()


def fixtures(api: str, **limits: float) -> tuple[Any, Any]:
    """The fixtures `pools` and `ranks` of a folder of tests, with the limits of `Pools`."""
    import pytest  # a process without a server before it needs none

    @pytest.fixture(scope="session")
    def pools() -> Iterator[Pools]:
        pools = Pools(api, **limits)
        yield pools
        pools.close()

    @pytest.fixture
    def ranks(pools: Pools) -> Callable[..., list[Any]]:
        return pools.run

    return pools, ranks


def on_ranks(*, fixture: str = "ranks", **how: Any) -> Callable[[Callable[..., object]], Any]:
    """Make a function that runs on ranks a test, whose first argument is the API's module there.

    Args:
        fixture: brings it there: `ranks` of `fixtures`, or one that takes the same arguments.
        how: the fixture's arguments, such as the number of ranks as `world`.
    """

    def decorate(body: Callable[..., object]) -> Any:
        names = list(inspect.signature(body).parameters)[1:]

        def test(**given: Any) -> None:
            given.pop(fixture)(body, *(given[name] for name in names), **how)

        functools.update_wrapper(test, body)
        keyword = inspect.Parameter.KEYWORD_ONLY
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, keyword) for name in (fixture, *names)]
        )
        # Ranks import the test's module, and find the body in it by this name.
        test.body = body  # type: ignore[attr-defined]
        body.__qualname__ = f"{body.__name__}.body"
        return test

    return decorate


def serve_forks(switch: str, modules: tuple[str, ...], ranks: Sequence[Any]) -> None:
    """Import, and be the ranks; once one of them is gone, so is this process."""
    os.setpgid(0, 0)
    os.environ["TORCH_DCP_BACKPORT"] = switch
    # It is for the ranks, which see to it themselves.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    for name in modules:
        importlib.import_module(name)
    for args in ranks:
        if os.fork() == 0:
            try:
                serve(switch, *args)
            finally:
                os._exit(0)
    os.wait()
    os.killpg(0, signal.SIGKILL)


def serve_alone(*args: Any) -> None:
    """Be a rank, and the head of a process group that has what the rank starts in it."""
    os.setpgid(0, 0)
    end_with_parent()
    serve(*args)


#: Process groups by what they were asked for with.
_groups: dict[str, Any] = {}


def reusing(new_group: Callable[..., Any]) -> Callable[..., Any]:
    """`new_group`, which makes no second group of the same ranks.

    A thread of each gloo group wakes a hundred times a second: after some hundred tests that was most of what
    two processors did. To destroy the groups is no way out: torch's caches hold meshes, and find equal ones.
    """

    def reused(*args: Any, group_desc: Optional[str] = None, **kwargs: Any) -> Any:
        name = repr((args, sorted(kwargs.items())))
        if name not in _groups:
            _groups[name] = new_group(*args, **kwargs)
        return _groups[name]

    return reused


def send_values(with_inventory: bool) -> None:
    """Whether the values of small state dicts travel with their inventory.

    Those of tests are small: what moves larger ones would run in none of them.
    """
    inline = sys.modules.get("torch_dcp_backport.state_dict.inline")
    if inline is not None:
        inline.MOST = INLINE if with_inventory else 0


def met(path: str, world: int) -> Any:
    """A store in a file, once all ranks are there: a short timeout is for collectives, not for imports."""
    import torch.distributed as dist

    store = dist.FileStore(path, world)
    store.set_timeout(datetime.timedelta(seconds=LIMIT))
    if store.add("there", 1) == world:
        store.set("all there", "")
    store.wait(["all there"])
    return dist.PrefixStore("group", store)


def end_with_parent() -> None:
    """Be killed when the process that forked this one ends: what stands still does not see its pipe close."""
    parent_death_signal = 1
    ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
    # The server would end only after the processes that it has forked.
    server = forkserver._forkserver  # type: ignore[attr-defined]
    if getattr(server, "_forkserver_alive_fd", None) is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


def serve(
    switch: str,
    rank: int,
    world: int,
    api: str,
    modules: tuple[str, ...],
    rendezvous: str,
    timeout: float,
    pipe: Any,
) -> None:
    os.environ["TORCH_DCP_BACKPORT"] = switch
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    gc.disable()
    for name in modules:
        importlib.import_module(name)

    import torch
    import torch.distributed as dist
    from torch.distributed import device_mesh

    torch.set_num_threads(1)
    if world:
        limit = datetime.timedelta(seconds=timeout)
        dist.init_process_group(
            "gloo", store=met(rendezvous, world), rank=rank, world_size=world, timeout=limit
        )
    module = importlib.import_module(api)
    if modules == ("torch_dcp_backport",):
        send_values(with_inventory=False)
    device_mesh.new_group = reusing(device_mesh.new_group)
    # Else each of the collector's passes walks torch, and writes to pages that forked ranks share: a fourth
    # of the time of tests/ranks.
    gc.freeze()
    gc.enable()
    while True:
        try:
            where, name, args, kwargs = pipe.recv()
        except EOFError:
            return
        # Else a model that a test builds depends on what ran before it on this rank: replicas would differ.
        torch.manual_seed(0)
        random.seed(0)
        try:
            function = importlib.import_module(where)
            for part in name.split("."):
                function = getattr(function, part)
            answer = True, function(module, *args, **kwargs)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)
