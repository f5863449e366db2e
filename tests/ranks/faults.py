"""Faults of one rank in a load or a save, and what every rank sees of them.

A fault is armed on one rank just before the call. What ends in REFUSED, LOADED or TOLD leaves the process
group whole; what ends in BROKEN leaves ranks that wait for each other until the group's timeout.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from models import fully_shard, local_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torch_dcp_backport import transfer
from torch_dcp_backport.regression import meter
from torch_dcp_backport.state_dict import collect, destination
from torch_dcp_backport.state_dict.model import load as model_load
from torch_dcp_backport.state_dict.model import outline
from torch_dcp_backport.state_dict.optim import load as optim_load
from torch_dcp_backport.transfer._src.staging import Staging

REFUSED = "refused"
LOADED = "done all the same"
TOLD = "told"
BROKEN = "broken off"

#: Of the process groups whose transfers are broken off, in seconds. On a busy machine all start within it.
TIMEOUT = 6.0
WORLD = 4
SIZE, LAYERS = 512, 4
KEYS = [f"{number}.{name}" for number in range(LAYERS) for name in ("weight", "bias")]


class Fault(NamedTuple):
    #: As it stands in docs/reliability.md.
    what: str
    #: Makes it happen, on the rank that has it; called with the scene, undone when the call is over.
    arm: Callable[[Scene], contextlib.AbstractContextManager[None]]
    #: (call, rank), each one case.
    where: list[tuple[str, int]]
    ends: str
    #: What every error of another rank must say.
    says: str = ""
    #: Whether it comes before anything can have been written.
    before: bool = False
    #: Whether its process ends.
    dies: bool = False


class Seen(NamedTuple):
    """What one rank saw of one case."""

    #: Type and text of the error; nothing where there was none.
    error: tuple[str, str]
    seconds: float
    #: Keys whose values are others than before.
    changed: list[str]
    #: Whether every value is that of the dict that was loaded (that was saved).
    complete: bool
    #: Whether the caller's dict, gc and the hooks are as before.
    untouched: bool
    #: Bytes of tensors that are alive and were not before, the model's and the result's apart.
    kept: int


class Scene:
    """One call on one rank: what it works on, and the call."""

    def __init__(self, api: Any, call: str) -> None:
        self.call, rank = call, dist.get_rank()
        self.emptied = False
        #: The rank with the fault, and the processes of all; where they are needed.
        self.rank, self.pids = 0, [0]
        mesh = init_device_mesh("cpu", (WORLD,))
        with torch.device("meta" if call == "meta" else "cpu"):
            self.model = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(LAYERS)))
        for parameter in self.model.parameters() if call != "meta" else ():
            parameter.detach().zero_()
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        self.optim = torch.optim.AdamW(self.model.parameters())
        self.full: dict[str, Any] = {}
        broadcast = call in ("load", "meta", "optimizer")
        options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        gathered = api.StateDictOptions(full_state_dict=True, cpu_offload=True)
        values = {key: torch.full((SIZE, SIZE) if key[2] == "w" else (SIZE,), 2.0) for key in KEYS}
        if "optimizer" in call:
            self.make_states()
        if call == "optimizer":
            groups = [{**self.optim.param_groups[0], "params": KEYS}]
            states = {
                key: {"step": torch.tensor(2.0), "exp_avg": value, "exp_avg_sq": value.clone()}
                for key, value in values.items()
            }
            self.full = {"state": states, "param_groups": groups}
        elif call in ("load", "meta", "local"):
            self.full = values
        self.given: Any = self.full if rank == 0 or not broadcast else {}
        self.go: Callable[[], Any] = {
            "load": lambda: api.set_model_state_dict(self.model, self.given, options=options),
            "meta": lambda: api.set_model_state_dict(self.model, self.given, options=options),
            "local": lambda: api.set_model_state_dict(self.model, self.given, options=options),
            "optimizer": lambda: api.set_optimizer_state_dict(
                self.model, self.optim, self.given, options=options
            ),
            "save": lambda: api.get_model_state_dict(self.model, options=gathered),
            "save optimizer": lambda: api.get_optimizer_state_dict(self.model, self.optim, options=gathered),
        }[call]

    def make_states(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optim.step()
        self.optim.zero_grad()

    def values(self) -> dict[str, torch.Tensor]:
        """What the call may write, by the names that errors use."""
        names = dict(self.model.named_parameters())
        if "optimizer" not in self.call:
            return {name: local_of(value) for name, value in names.items()}
        return {
            f"state.{name}.{key}": local_of(value)
            for name, parameter in names.items()
            for key, value in self.optim.state[parameter].items()
        }

    def snapshot(self) -> dict[str, Optional[tuple[float, float]]]:
        return {
            name: None if value.is_meta else (float(value.min()), float(value.max()))
            for name, value in self.values().items()
        }

    def is_complete(self, result: Any) -> bool:
        """Every value is the one that was loaded, or gathered: all are the same number."""
        if self.call.startswith("save"):
            if dist.get_rank():
                return result == {}
            tree = result.get("state", {"": result})
            found = [value for states in tree.values() for value in states.values()]
            shapes = {tuple(value.shape) for value in found}
            number = 0.0
            found = [value for value in found if value.dim()]
            if (SIZE, SIZE) not in shapes:
                return False
        else:
            found, number = list(self.values().values()), 2.0
        return all(not value.is_meta and bool((value == number).all()) for value in found)


def tensor_bytes(scene: Scene) -> int:
    """Of all tensors but the model's or optimizer's own."""
    found = meter.live_storages()
    for value in scene.values().values():
        found.pop((str(value.device), value.untyped_storage().data_ptr()), None)
    return sum(nbytes for nbytes, _ in found.values())


def hooks_of(scene: Scene) -> list[int]:
    return [
        len(vars(module)[name])
        for module in scene.model.modules()
        for name in vars(module)
        if "hooks" in name
    ]


def case(api: Any, call: str, number: int, rank: int) -> Seen:
    """Fault `number` of FAULTS on `rank`, in this call."""
    fault = FAULTS[number]
    if not gc.get_freeze_count():
        # What was there before the first case: looking through it takes most of a second.
        gc.freeze()
    scene = Scene(api, call)
    if fault.ends == BROKEN:
        transfer.configure(staging_bytes=2**20)
        scene.pids = everyone(os.getpid())
        scene.rank = rank
    with fault.arm(scene) if dist.get_rank() == rank else contextlib.nullcontext():
        given = copy_of(scene.given)
        before, old, hooks, collects = tensor_bytes(scene), scene.snapshot(), hooks_of(scene), gc.isenabled()
        error, result = ("", ""), None
        began = time.monotonic()
        try:
            result = scene.go()
        except BaseException as caught:
            error = type(caught).__name__, str(caught)
        seconds = time.monotonic() - began
        same = (
            same_dict({} if scene.emptied else given, scene.given)
            and hooks_of(scene) == hooks
            and gc.isenabled() == collects
        )
    complete = not error[0] and scene.is_complete(result)
    new = scene.snapshot()
    del result
    kept = tensor_bytes(scene) - before
    transfer.configure()
    return Seen(error, seconds, [key for key in new if new[key] != old.get(key)], complete, same, kept)


def everyone(mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def group_is_usable(api: Any) -> bool:
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return float(ones) == WORLD


def copy_of(tree: Any) -> Any:
    return {key: copy_of(value) for key, value in tree.items()} if isinstance(tree, dict) else tree


def same_dict(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same_dict(a[key], b[key]) for key in a)
    return a is b


# --- the faults ------------------------------------------------------------------------------


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    real = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, real)


def fail(*args: Any, **kwargs: Any) -> Any:
    raise KeyError("a fault")


def no_room(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def spoiled(change: Callable[[dict[str, Any], str], None]) -> Any:
    """The dict is changed before the call; `change` gets the part that holds tensors, and a key of it."""

    @contextlib.contextmanager
    def arm(scene: Scene) -> Iterator[None]:
        change(*tensors_of(scene.given))
        yield

    return arm


def tensors_of(given: dict[str, Any]) -> tuple[dict[str, Any], str]:
    return (given["state"]["1.weight"], "exp_avg") if "state" in given else (given, "1.weight")


def lack(part: dict[str, Any], key: str) -> None:
    del part[key]


def reshape(part: dict[str, Any], key: str) -> None:
    part[key] = torch.ones(SIZE + 1, SIZE)


def make_text(part: dict[str, Any], key: str) -> None:
    part[key] = "text"


def make_unsendable(part: dict[str, Any], key: str) -> None:
    part[key] = lambda: None


@contextlib.contextmanager
def not_a_dict(scene: Scene) -> Iterator[None]:
    scene.given = ["no", "dict"]
    yield


@contextlib.contextmanager
def plan_fails(scene: Scene) -> Iterator[None]:
    module, name = (optim_load, "plan_optimizer") if scene.call == "optimizer" else (model_load, "plan_model")
    with replaced(module, name, fail):
        yield


@contextlib.contextmanager
def model_cannot_be_read(scene: Scene) -> Iterator[None]:
    with replaced(outline, "entries_of", fail):
        yield


@contextlib.contextmanager
def no_room_for_tensors(scene: Scene) -> Iterator[None]:
    owner = {"meta": destination, "save": collect, "save optimizer": collect}[scene.call]
    with replaced(owner, "torch", SimpleNamespace(**{**vars(torch), "empty": no_room})):
        yield


@contextlib.contextmanager
def no_room_for_staging(scene: Scene) -> Iterator[None]:
    with replaced(Staging, "__init__", no_room):
        yield


@contextlib.contextmanager
def little_room_for_staging(scene: Scene) -> Iterator[None]:
    real = Staging.__init__

    def short(self: Staging, device: torch.device, nbytes: int) -> None:
        if nbytes > 2**20:
            no_room()
        real(self, device, nbytes)

    with replaced(Staging, "__init__", short):
        yield


@contextlib.contextmanager
def bad_budget(scene: Scene) -> Iterator[None]:
    os.environ["TORCH_DCP_BACKPORT_STAGING_MIB"] = "plenty"
    try:
        yield
    finally:
        del os.environ["TORCH_DCP_BACKPORT_STAGING_MIB"]


@contextlib.contextmanager
def load_hook_fails(scene: Scene) -> Iterator[None]:
    owner = scene.optim if scene.call == "optimizer" else scene.model
    handle = owner.register_load_state_dict_post_hook(fail)
    yield
    handle.remove()


@contextlib.contextmanager
def get_hook_fails(scene: Scene) -> Iterator[None]:
    owner = scene.optim if scene.call == "save optimizer" else scene.model
    register = getattr(owner, "register_state_dict_post_hook", None) or owner._register_state_dict_hook
    handle = register(fail)
    yield
    handle.remove()


def at_chunk(do: Callable[[Scene], None], number: int = 2) -> Any:
    """`do` happens when a rank packs or unpacks its second chunk."""

    @contextlib.contextmanager
    def arm(scene: Scene) -> Iterator[None]:
        count = 0

        def watched(real: Callable[..., None]) -> Callable[..., None]:
            def call(*args: Any) -> None:
                nonlocal count
                count += 1
                if count == number:
                    do(scene)
                real(*args)

            return call

        pack, unpack = watched(Staging.pack), watched(Staging.unpack)
        with replaced(Staging, "pack", pack), replaced(Staging, "unpack", unpack):
            yield

    return arm


def die(scene: Scene) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt(scene: Scene) -> None:
    raise KeyboardInterrupt


def stop(scene: Scene) -> None:
    """Another process wakes this one up, long after the others gave up."""
    if os.fork() == 0:
        time.sleep(2 * TIMEOUT)
        os.kill(scene.pids[scene.rank], signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)


def be_late(scene: Scene) -> None:
    time.sleep(2 * TIMEOUT)


def be_slow(scene: Scene) -> None:
    time.sleep(0.5)


def empty_the_dict(scene: Scene) -> None:
    scene.emptied = True
    for part in (*scene.given.values(), scene.given):
        if isinstance(part, dict):
            part.clear()


def shrink(scene: Scene) -> None:
    value = scene.full["3.weight"]
    value.data = torch.ones(3)


@contextlib.contextmanager
def stays_away(scene: Scene) -> Iterator[None]:
    real = scene.go

    def go() -> None:
        time.sleep(2 * TIMEOUT)
        real()

    scene.go = go
    yield


def at(ranks: tuple[int, ...], *calls: str) -> list[tuple[str, int]]:
    return [(call, rank) for call in calls for rank in ranks]


BROADCAST = ("load", "meta", "optimizer")

FAULTS = [
    Fault(
        "the dict lacks a key",
        spoiled(lack),
        at((0,), "load", "meta") + at((2,), "local"),
        REFUSED,
        "Missing key",
    ),
    Fault(
        "a tensor of another shape",
        spoiled(reshape),
        at((0,), *BROADCAST) + at((2,), "local"),
        REFUSED,
        "wrong shape",
    ),
    Fault(
        "a text for a tensor",
        spoiled(make_text),
        at((0,), *BROADCAST) + at((2,), "local"),
        REFUSED,
        "not a tensor",
    ),
    Fault(
        "a value that cannot be pickled",
        spoiled(make_unsendable),
        at((0,), *BROADCAST),
        REFUSED,
        "cannot be pickled",
    ),
    Fault(
        "no dict at all", not_a_dict, at((0,), *BROADCAST) + at((2,), "local"), REFUSED, "not a state dict"
    ),
    Fault(
        "a staging budget that is no number",
        bad_budget,
        at((0, 2), *BROADCAST, "save"),
        REFUSED,
        "staging budget",
    ),
    Fault("planning fails", plan_fails, at((0, 2), *BROADCAST, "local"), REFUSED, "a fault"),
    Fault(
        "the model's tensors cannot be listed",
        model_cannot_be_read,
        at((0, 2), "load", "meta"),
        REFUSED,
        "a fault",
    ),
    Fault(
        "no memory for shards or whole tensors",
        no_room_for_tensors,
        at((0, 2), "meta") + at((0,), "save", "save optimizer"),
        REFUSED,
        "could not allocate",
    ),
    Fault(
        "no memory for staging",
        no_room_for_staging,
        at((0, 2), *BROADCAST, "save", "save optimizer"),
        REFUSED,
        "could not allocate",
    ),
    Fault(
        "little memory for staging",
        little_room_for_staging,
        at((0, 2), *BROADCAST, "save", "save optimizer"),
        LOADED,
    ),
    Fault(
        "slow, but within the timeout", at_chunk(be_slow, 1), at((0,), *BROADCAST) + at((2,), "save"), LOADED
    ),
    Fault("the dict is emptied while it is sent", at_chunk(empty_the_dict, 1), at((0,), *BROADCAST), LOADED),
    Fault(
        "a hook of the user's fails after the load",
        load_hook_fails,
        at((0, 2), *BROADCAST, "local"),
        TOLD,
        "do not use what was being loaded",
    ),
    Fault(
        "raises at its second chunk",
        at_chunk(fail),
        [("load", 0), ("load", 2), ("meta", 0), ("optimizer", 0), ("save", 0), ("save", 3)],
        BROKEN,
    ),
    Fault(
        "is killed at its second chunk",
        at_chunk(die),
        [("load", 0), ("load", 2), ("optimizer", 0), ("save", 0), ("save", 3)],
        BROKEN,
        dies=True,
    ),
    Fault("is stopped (SIGSTOP) at its second chunk", at_chunk(stop), [("load", 0), ("save", 3)], BROKEN),
    Fault(
        "is slower than the timeout", at_chunk(be_late), [("load", 0), ("optimizer", 0), ("save", 3)], BROKEN
    ),
    Fault("KeyboardInterrupt at its second chunk", at_chunk(interrupt), [("load", 0), ("save", 3)], BROKEN),
    Fault("a tensor of the dict shrinks while it is sent", at_chunk(shrink), [("load", 0)], BROKEN),
    Fault(
        "does not call",
        stays_away,
        [("load", 0), ("load", 3), ("optimizer", 0), ("save", 3)],
        BROKEN,
        before=True,
    ),
    Fault(
        "a hook of the user's fails before the save",
        get_hook_fails,
        [("save", 2), ("save optimizer", 2)],
        BROKEN,
        before=True,
    ),
]
