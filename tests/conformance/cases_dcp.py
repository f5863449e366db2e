"""Scenarios of programs: `dcp.save` and `dcp.load` beside the state dict functions, and torch's helpers.

What upstream's own tests of torch.distributed.checkpoint promise, in our words (upstream.py lists them).
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases_optim import Adam, dump, states
from scenario import scenario
from torch import nn
from torch.distributed import _state_dict_utils as helpers
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict, _load_state_dict_from_keys
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP
from values import value_of
from wrappers import FSDP1, Block, Net, fill, fsdp1, fully_shard, live, mesh_of, shard, wrap, zero

try:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
except ImportError:  # torch 2.4
    from torch.distributed._tensor import DTensor, Replicate, Shard, distribute_tensor


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@contextlib.contextmanager
def folder_of_all() -> Iterator[str]:
    """A folder that every rank sees; it is gone when all ranks are done with it."""
    paths: list[Any] = [tempfile.mkdtemp() if rank() == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(paths)
    try:
        yield paths[0]
        if dist.is_initialized():
            dist.barrier()
    finally:
        if rank() == 0:
            shutil.rmtree(paths[0], ignore_errors=True)


def failures_of(call: Any) -> Any:
    """The ranks on which a collective of DCP failed, with the classes of their errors."""
    try:
        call()
    except CheckpointException as error:
        return {str(number): type(one[0]).__name__ for number, one in sorted(error.failures.items())}
    return "no error"


# --- files ------------------------------------------------------------------------------------


@scenario("dcp", ({"world": 0}, {}))
def tensors_and_objects(api: Any) -> Any:
    def state(salt: str) -> dict[str, Any]:
        return {
            "weight": value_of(f"{salt}weight", (3, 5), torch.float32),
            "inner": {"scalar": value_of(f"{salt}scalar", (), torch.bfloat16)},
            "numbers": [len(salt)],
            "text": f"text {salt}",
        }

    with folder_of_all() as path:
        dcp.save(state("saved."), checkpoint_id=path)
        loaded = state("")
        dcp.load(loaded, checkpoint_id=path)
        return loaded


@scenario("dcp", ({"world": 0}, {}))
def nothing(api: Any) -> Any:
    with folder_of_all() as path:
        dcp.save({}, checkpoint_id=path)
        loaded: dict[str, Any] = {}
        dcp.load(loaded, checkpoint_id=path)
        return loaded


PLACEMENTS: dict[str, Any] = {"rows": (Shard(0),), "columns": (Shard(1),), "whole": (Replicate(),)}
FORMS = ("rows", "columns", "whole", "both", "plain")


def laid_out(form: str, value: torch.Tensor) -> torch.Tensor:
    if form == "plain":
        return value
    if form == "both":
        return distribute_tensor(value, mesh_of(2, 2), (Shard(0), Shard(1)))
    return distribute_tensor(value, mesh_of(dist.get_world_size()), PLACEMENTS[form])


@scenario("dcp", [{"old": old, "new": new} for old in FORMS for new in FORMS if old != new])
def another_layout(api: Any, old: str, new: str) -> Any:
    """Even and uneven tensors, saved in one layout and loaded in another."""
    with folder_of_all() as path:
        shapes = {"even": (8, 12), "uneven": (10, 7), "short": (3, 2)}
        dcp.save(
            {key: laid_out(old, value_of(key, shape, torch.float32)) for key, shape in shapes.items()},
            checkpoint_id=path,
        )
        loaded = {key: laid_out(new, torch.zeros(shape)) for key, shape in shapes.items()}
        dcp.load(loaded, checkpoint_id=path)
        return loaded


@scenario("dcp", [{"old": old, "new": new} for old, new in ((4, 2), (4, 3), (2, 4), (3, 4))])
def another_number_of_ranks(api: Any, old: int, new: int) -> Any:
    groups = {size: dist.new_group(range(size)) for size in (2, 3)}

    def part(size: int, value: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(value, DeviceMesh("cpu", list(range(size))), (Shard(0),))

    with folder_of_all() as path:
        state = part(old, value_of("w", (24, 5), torch.float32))
        if rank() < old:
            dcp.save({"w": state}, checkpoint_id=path, process_group=groups.get(old))
        dist.barrier()
        loaded = {"w": part(new, torch.zeros(24, 5))}
        if rank() < new:
            dcp.load(loaded, checkpoint_id=path, process_group=groups.get(new))
        return loaded["w"].to_local()


class More(nn.Module):
    """A model with a parameter more than its checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.extra = nn.Parameter(torch.zeros(3))


@scenario("dcp", [{"partial": one, "world": world} for one in (True, False) for world in (0, 4)])
def key_that_is_not_saved(api: Any, partial: bool) -> Any:
    with folder_of_all() as path:
        dcp.save({"module": {"linear": fill(nn.Linear(2, 2), "saved.").state_dict()}}, checkpoint_id=path)
        state = {"module": {"linear": zero(nn.Linear(2, 2)).state_dict(), "extra": torch.ones(3)}}
        planner = DefaultLoadPlanner(allow_partial_load=partial)
        return failures_of(lambda: dcp.load(state, checkpoint_id=path, planner=planner)), state


@scenario("dcp", ({"world": 0}, {}))
def another_shape(api: Any) -> Any:
    with folder_of_all() as path:
        dcp.save({"w": torch.ones(2, 2)}, checkpoint_id=path)
        return failures_of(lambda: dcp.load({"w": torch.zeros(3, 2)}, checkpoint_id=path))


@scenario("dcp", [{"call": call} for call in ("save", "load")])
def storage_of_an_unknown_kind(api: Any, call: str) -> Any:
    return getattr(dcp, call)({"w": torch.ones(2)}, checkpoint_id="abc://abc.abc")


@scenario("dcp", [{"overwrite": one} for one in (True, False)])
def folder_with_a_checkpoint(api: Any, overwrite: bool) -> Any:
    with folder_of_all() as path:
        dcp.save({"w": torch.zeros(4)}, checkpoint_id=path)
        dist.barrier()
        writer = dcp.FileSystemWriter(path, overwrite=overwrite)
        failed = failures_of(lambda: dcp.save({"w": torch.ones(4)}, storage_writer=writer))
        loaded = {"w": torch.full((4,), 2.0)}
        dcp.load(loaded, checkpoint_id=path)
        return failed, loaded


# --- failures ---------------------------------------------------------------------------------


class Fails:
    """Raises in one method on one rank; `later` in what the method returns."""

    method, on, later = "", -1, False

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name != super().__getattribute__("method") or rank() != super().__getattribute__("on"):
            return found
        if not super().__getattribute__("later"):

            def failing(*args: Any, **kwargs: Any) -> Any:
                raise ValueError(f"{name} fails")

            return failing

        def failed(*args: Any, **kwargs: Any) -> Any:
            future: Future[Any] = Future()
            future.set_exception(ValueError(f"{name} fails later"))
            return future

        return failed


class FailingWriter(Fails, dcp.FileSystemWriter):
    pass


class FailingReader(Fails, dcp.FileSystemReader):
    pass


def failing(storage: Any, method: str, on: int, later: bool) -> Any:
    storage.method, storage.on, storage.later = method, on, later
    return storage


SAVE_FAILS = (
    ("set_up_storage_writer", 0),
    ("prepare_local_plan", 0),
    ("prepare_local_plan", 2),
    ("prepare_global_plan", 0),
    ("write_data", 2),
    ("finish", 0),
)
LOAD_FAILS = (
    ("set_up_storage_reader", 0),
    ("prepare_local_plan", 1),
    ("prepare_global_plan", 0),
    ("read_data", 3),
    ("read_metadata", 0),
    ("read_metadata", 3),
)


def faults(table: tuple[tuple[str, int], ...], moved: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"method": method, "on": on} for method, on in table]
    found += [{"method": moved, "on": 3, "later": True}]
    found += [{**row, "on": 0, "world": 0} for row in found if row["on"] == 0 or row["method"] == moved]
    first = table[0][0]
    return [
        *found,
        {"method": first, "on": 1, "coordinator": 1},
        {"method": moved, "on": 0, "coordinator": 2},
    ]


def parts() -> dict[str, Any]:
    state: dict[str, Any] = {"whole": torch.ones(3), "numbers": [1, 2]}
    if dist.is_initialized():
        state["sharded"] = laid_out("rows", value_of("sharded", (8, 2), torch.float32))
    return state


@scenario("dcp, failures", faults(SAVE_FAILS, "write_data"))
def save_fails(api: Any, method: str, on: int, later: bool = False, coordinator: int = 0) -> Any:
    with folder_of_all() as path:
        writer = failing(FailingWriter(path), method, on, later)
        alone = {"no_dist": not dist.is_initialized(), "coordinator_rank": coordinator}
        return failures_of(lambda: _save_state_dict(parts(), writer, **alone))


@scenario("dcp, failures", faults(LOAD_FAILS, "read_data"))
def load_fails(api: Any, method: str, on: int, later: bool = False, coordinator: int = 0) -> Any:
    with folder_of_all() as path:
        dcp.save(parts(), checkpoint_id=path)
        reader = failing(FailingReader(path), method, on, later)
        alone = {"no_dist": not dist.is_initialized(), "coordinator_rank": coordinator}
        return failures_of(lambda: _load_state_dict(parts(), reader, **alone))


# --- programs ---------------------------------------------------------------------------------


class Counter:
    """An object with a state, and what was done to it."""

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self.calls = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": torch.tensor(self.value), "list": [self.value]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.calls = int(state["value"]) + state["list"][0], self.calls + 1


KINDS = ("ddp", "fsdp1", "fsdp1-hsdp", "fsdp2", "fsdp2+tp", "hsdp")


@scenario("dcp, programs", [{"kind": kind, "later": later} for kind in KINDS for later in (False, True)])
def training(api: Any, kind: str, later: bool) -> Any:
    """Model, optimizer and a counter through torch's patched methods, into new ones."""

    def made(salt: str, value: int) -> tuple[nn.Module, Any, dict[str, Any]]:
        model = wrap(kind, fill(Net(), salt))
        optim = states(Adam(model.parameters()), value)
        api._patch_model_state_dict(model)
        api._patch_optimizer_state_dict(model, optimizers=optim)
        return model, optim, {"model": model, "optimizer": optim, "counter": Counter(value)}

    with folder_of_all() as path:
        state = made("saved.", 3)[2]
        if later:
            dcp.async_save(state, checkpoint_id=path).result()
        else:
            dcp.save(state, checkpoint_id=path)
        dist.barrier()
        model, optim, loaded = made("new.", 5)
        dcp.load(loaded, checkpoint_id=path)
        same_objects = loaded["model"] is model and loaded["optimizer"] is optim
        return live(model), optim.state_dict(), loaded["counter"].value, same_objects


class Watched(dict[str, Any]):
    """A dict that knows whether anything was put into it."""

    is_changed = False

    def __setitem__(self, key: str, value: Any) -> None:
        self.is_changed = True
        super().__setitem__(key, value)


@scenario("dcp, programs", [{"what": what} for what in ("object", "dict")])
def what_is_replaced(api: Any, what: str) -> Any:
    """An object with a state loads itself and stays; what has none is put in anew."""
    counter = Counter(2)
    state = Watched(x=counter if what == "object" else {"whole": torch.ones(2), "bytes": [1, 2]})
    with folder_of_all() as path:
        dcp.save(state, checkpoint_id=path)
        dcp.load(state, checkpoint_id=path)
        return counter.calls, state["x"] is counter, state.is_changed


class Together:
    """An object whose load is collective."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.result: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.result = self.call(torch.tensor([1.0 + rank()]))


def gathered(value: torch.Tensor) -> list[float]:
    found = [torch.zeros_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(found, value)
    return [float(one) for one in found]


def summed(value: torch.Tensor) -> float:
    dist.all_reduce(value)
    return float(value)


@scenario("dcp, programs")
def another_order_on_each_rank(api: Any) -> Any:
    pair = {"a": Together(gathered), "b": Together(summed)}
    state = dict(pair if rank() == 0 else reversed(list(pair.items())))
    with folder_of_all() as path:
        dcp.save(state, checkpoint_id=path)
        dcp.load(state, checkpoint_id=path)
    return pair["a"].result, pair["b"].result


@scenario("dcp, programs", [{"kind": kind} for kind in ("ddp", "fsdp1", "fsdp2")])
def part_of_a_checkpoint(api: Any, kind: str) -> Any:
    """The model without its optimizer; then keys by their beginnings, without a model."""
    with folder_of_all() as path:
        model = wrap(kind, fill(Net(), "saved."))
        optim = states(Adam(model.parameters()))
        model_state, optim_state = api.get_state_dict(model, optim)
        dcp.save({"model": model_state, "optimizer": optim_state}, checkpoint_id=path)
        dist.barrier()
        other = wrap(kind, zero(Net()))
        state = {"model": api.get_model_state_dict(other)}
        dcp.load(state, checkpoint_id=path)
        api.set_model_state_dict(other, state["model"])
        by_key = [_load_state_dict_from_keys(key, checkpoint_id=path) for key in ("model", "optimizer.state")]
        return live(other), by_key


@scenario("dcp, programs", [{"kind": kind} for kind in ("plain", "ddp", "fsdp2")])
def dicts_of_the_caller(api: Any, kind: str) -> Any:
    """A load fills the dicts that it was given, and the optimizer gets the saved rate."""
    with folder_of_all() as path:
        model = wrap(kind, fill(Net(), "saved."))
        saved = api.get_state_dict(model, states(Adam(model.parameters())))
        dcp.save(dict(zip(("model", "optimizer"), saved)), checkpoint_id=path)
        dist.barrier()
        model = wrap(kind, fill(Net()))
        optim = states(torch.optim.Adam(model.parameters(), lr=0.5), 5)
        own = api.get_state_dict(model, optim)
        state = dict(zip(("model", "optimizer"), own))
        dcp.load(state, checkpoint_id=path)
        is_kept = [state["model"] is own[0], state["optimizer"] is own[1]]
        api.set_state_dict(model, optim, model_state_dict=own[0], optim_state_dict=own[1])
        return is_kept, live(model), [group["lr"] for group in optim.param_groups], dump(optim)


class Tuned(nn.Module):
    """A frozen base with a new head."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Net().requires_grad_(False)
        self.head = nn.Linear(8, 4)
        self.blocks = nn.ModuleList()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.base(x))


def tuned(kind: str, make: Any) -> nn.Module:
    model = Tuned()
    (fill if make is fill else zero)(model)
    return shard(model, mesh_of(dist.get_world_size())) if kind == "fsdp2" else fsdp1(model)


@scenario("dcp, programs", [{"kind": kind} for kind in ("fsdp1", "fsdp2")])
def fine_tuning(api: Any, kind: str) -> Any:
    """The base from its own checkpoint; the head with its optimizer, saved and loaded alone."""
    trainable = api.StateDictOptions(ignore_frozen_params=True)
    part = api.StateDictOptions(strict=False)
    with folder_of_all() as path:
        dcp.save({"model": api.get_model_state_dict(fill(Net(), "base."))}, checkpoint_id=f"{path}/base")
        dist.barrier()
        model = tuned(kind, fill)
        base = model.base
        state = api.get_model_state_dict(
            model, submodules={base}, options=api.StateDictOptions(keep_submodule_prefixes=False)
        )
        dcp.load({"model": state}, checkpoint_id=f"{path}/base")
        api.set_model_state_dict(model, {base: state}, options=part)
        optim = states(Adam([param for param in model.parameters() if param.requires_grad]))
        saved = api.get_state_dict(model, optim, options=trainable)
        shown = [sorted(saved[0]), sorted(saved[1]["state"])]
        dcp.save(dict(zip(("model", "optimizer"), saved)), checkpoint_id=f"{path}/tuned")
        dist.barrier()
        other = tuned(kind, zero)
        target = states(Adam([param for param in other.parameters() if param.requires_grad]), 5)
        state = dict(zip(("model", "optimizer"), api.get_state_dict(other, target, options=trainable)))
        dcp.load(state, checkpoint_id=f"{path}/tuned")
        outcome = api.set_state_dict(
            other,
            target,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=part,
        )
        return shown, sorted(outcome.missing_keys), live(model), live(other)


@scenario("dcp, programs", [{"options": one} for one in ({}, {"flatten_optimizer_state_dict": True})])
def pipeline(api: Any, options: dict[str, Any]) -> Any:
    """Each pair of ranks has another stage, under FSDP2, in one checkpoint."""
    mesh = mesh_of(2, 2, names=("pp", "dp"))
    stage = rank() // 2
    chosen = api.StateDictOptions(**options)

    def made(make: Any) -> tuple[nn.Module, Any, dict[str, Any]]:
        model = nn.Module()
        model.blocks = nn.ModuleDict({str(stage): Block()})
        make(model)
        fully_shard(model.blocks[str(stage)], mesh=mesh["dp"])
        optim = states(Adam(model.parameters()), 1 if make is fill else 5)
        return (
            model,
            optim,
            dict(zip(("model", "optimizer"), api.get_state_dict(model, optim, options=chosen))),
        )

    with folder_of_all() as path:
        dcp.save(made(fill)[2], checkpoint_id=path)
        dist.barrier()
        model, optim, state = made(zero)
        dcp.load(state, checkpoint_id=path)
        api.set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return live(model), dump(optim)


class Experts(nn.Module):
    """A dense layer, and one expert of two: an expert's ranks are every second one."""

    def __init__(self, own: int) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4)
        self.experts = nn.ModuleList(
            nn.Linear(4, 4) if number == own else nn.Identity() for number in range(2)
        )


@scenario("dcp, programs")
def experts(api: Any) -> Any:
    """FSDP1 over all ranks around FSDP1 over the ranks of an expert: each rank has the keys of its own."""
    mesh = mesh_of(2, 2, names=("dp", "ep"))
    own = rank() % 2
    model = fill(Experts(own))
    device = torch.device("cpu")
    sizes = {"device_id": device, "use_orig_params": True}
    model.experts[own] = FSDP1(model.experts[own], device_mesh=mesh["dp"], **sizes)
    model = FSDP1(model, device_mesh=mesh_of(4), **sizes)
    optim = states(Adam(model.parameters()))
    state, optim_state = api.get_state_dict(model, optim)
    found = {key: value.device_mesh.mesh.flatten().tolist() for key, value in state.items()}
    return found, sorted(optim_state["state"])


@scenario("dcp, programs", [{"frozen": one} for one in (False, True)])
def ddp_inside_fsdp1(api: Any, frozen: bool) -> Any:
    """A head under DDP, which FSDP1 around it ignores."""
    options = api.StateDictOptions(ignore_frozen_params=frozen)

    def made(make: Any) -> tuple[nn.Module, Any]:
        model = make(Net(frozen=frozen))
        model.head = DDP(model.head)
        model = FSDP1(
            model, device_id=torch.device("cpu"), use_orig_params=True, ignored_modules=[model.head]
        )
        return model, states(Adam(model.parameters()), 1 if make is fill else 5)

    model, optim = made(fill)
    state, optim_state = api.get_state_dict(model, optim, options=options)
    shown = dict(state), dict(optim_state)
    other, target = made(zero)
    if not frozen:
        both = {"model_state_dict": state, "optim_state_dict": optim_state}
        api.set_state_dict(other, target, **both, options=options)
    return shown, live(other), dump(target)


# --- helpers ----------------------------------------------------------------------------------


def sharded(key: str) -> DTensor:
    return laid_out("rows", value_of(key, (8, 3), torch.float32))


@scenario("helpers", [{"options": one} for one in ({}, {"cpu_offload": True}, {"ranks_only": (0, 2)})])
def gather(api: Any, options: dict[str, Any]) -> Any:
    state = {
        "one": sharded("one"),
        "list": [value for number in range(3) for value in (sharded(f"list {number}"), torch.ones(2))],
        "plain": torch.arange(4),
        "text": "text",
    }
    return helpers._gather_state_dict(state, **options)


@scenario("helpers", [{"ranks_only": one} for one in ((), (0, 2))])
def offload(api: Any, ranks_only: tuple[int, ...]) -> Any:
    state = {"one": torch.arange(4), "two": torch.ones(3), "inner": {"number": 3}}
    return helpers._offload_state_dict_to_cpu(state, ranks_only=ranks_only)


@scenario("helpers", ({"share_memory": True}, {}))
def staged(api: Any, share_memory: bool = False) -> Any:
    """A copy for staging is like the state dict that it is made for, and takes its values."""
    state = {
        "tensor": torch.arange(5),
        "sharded": sharded("staged"),
        "text": "text",
        "bytes": b"bytes",
        "step": torch.tensor(7.0),
        "rate": 1.5,
        "inner": {"list": [1, 2]},
    }
    copy = helpers._create_cpu_state_dict(state, share_memory=share_memory)
    is_alike = helpers._check_state_dict_similarity(state, copy)
    helpers._copy_state_dict(state, copy)
    shown = dict(copy)
    copy["tensor"] = torch.arange(6)
    return is_alike, shown, helpers._check_state_dict_similarity(state, copy)


@scenario("helpers")
def distribute(api: Any) -> Any:
    """Whole tensors are cut as the DTensors beside them are; even and short ones."""
    mesh = mesh_of(4)
    shapes = {"even": (4, 2), "short": (1, 2)}
    state: dict[str, Any] = {
        key: (distribute_tensor(torch.zeros(shape), mesh, (Shard(0),)), value_of(key, shape, torch.float32))
        for key, shape in shapes.items()
    }
    helpers._distribute_tensors(state, list(shapes), torch.device("cpu"))
    return state
