"""Torch's private helpers: copies on the CPU, gathering to some ranks, distributing; all private names."""

from __future__ import annotations

import gc
import io
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Optional

import pytest
import torch
import torch.distributed as dist
from models import build, value_of
from packaging.version import Version
from pool import on_ranks
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from torch_dcp_backport.compat import DTensor, Replicate, Shard

try:
    from torch.distributed.tensor import distribute_tensor
except ImportError:  # torch 2.4
    from torch.distributed._tensor import distribute_tensor

STATE_DICT = "torch.distributed.checkpoint.state_dict"
UTILS = "torch.distributed._state_dict_utils"


def helper(api: Any, name: str) -> Any:
    """Ours, or with stock torch the one of `_state_dict_utils`."""
    return getattr(api, name, None) or getattr(import_module(UTILS), name)


def dtensors(placements: tuple[Any, ...] = (Shard(0),), shape: tuple[int, ...] = ()) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", shape or (dist.get_world_size(),))
    values = {"even": value_of("even", (8, 4)), "uneven": value_of("uneven", (5, 3)), "row": torch.ones(1, 2)}
    return {key: distribute_tensor(value, mesh, placements) for key, value in values.items()}


def scalar() -> DTensor:
    return distribute_tensor(
        torch.tensor(2.5), init_device_mesh("cpu", (dist.get_world_size(),)), [Replicate()]
    )


def legacy() -> Any:
    """A ShardedTensor of 2 rows per rank."""
    rank = dist.get_rank()
    rows = torch.arange(6.0).view(2, 3) + 10 * rank
    return init_from_local_shards([LocalShard.from_tensor_and_offsets(rows, [2 * rank, 0], rank)], 4, 3)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Every plain tensor, also those inside DTensors and ShardedTensors."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        for one in tree:
            yield from tensors_in(one)
    elif isinstance(tree, DTensor):
        yield tree._local_tensor
    elif hasattr(tree, "local_shards"):
        yield from (shard.tensor for shard in tree.local_shards())
    elif torch.is_tensor(tree):
        yield tree


def check_apart(copy: Any, live: Any) -> None:
    addresses = {one.untyped_storage().data_ptr() for one in tensors_in(live) if one.numel()}
    for one in tensors_in(copy):
        assert not one.numel() or one.untyped_storage().data_ptr() not in addresses, "shares memory"


def check_same(copy: Any, live: Any) -> None:
    mine, theirs = list(tensors_in(copy)), list(tensors_in(live))
    assert len(mine) == len(theirs)
    for one, two in zip(mine, theirs):
        assert torch.equal(one, two)
        assert (one.dtype, one.device.type) == (two.dtype, "cpu")


# --- copies on the CPU -----------------------------------------------------------------------


def everything() -> dict[Any, Any]:
    return {
        "tensor": torch.arange(6.0).view(2, 3).t(),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "small": [1, 2.5, True, "text", b"bytes", None, {}, []],
        "deep": [{"tuple": (torch.ones(1), 3)}],
        7: torch.ones(1, dtype=torch.bool),
    }


class Odd:
    """What no checkpoint can hold."""


#: What is copied, and a copy that does not fit it.
MISFITS: dict[str, Any] = {
    "missing key": lambda: (1, {}),
    "extra key": lambda: ({}, {"x": 1}),
    "shorter list": lambda: ([1, 2], [1]),
    "no container": lambda: ([1], 1),
    "no tensor": lambda: (torch.ones(1), 1),
    "None": lambda: (torch.ones(1), None),
    "broadcast shape": lambda: (torch.ones(1), torch.zeros(3)),
    "shape": lambda: (torch.ones(2), torch.zeros(3)),
    "plain for DTensor": lambda: (dtensors()["even"], torch.zeros(8, 4)),
    "DTensor for plain": lambda: (torch.zeros(8, 4), dtensors()["even"]),
    "placements": lambda: (dtensors()["even"], dtensors((Shard(1),))["even"]),
    "ShardedTensor for plain": lambda: (torch.ones(4, 3), legacy()),
}


def misfit(api: Any, which: str) -> None:
    """An error that names the key, before anything was copied."""
    value, target = MISFITS[which]()
    first = torch.zeros(2)
    state, copy = {"first": torch.ones(2), "at": {"x": value}}, {"first": first, "at": {"x": target}}
    if which == "missing key":
        copy["at"] = {}
    with pytest.raises(import_module(UTILS).CompanionMismatch, match=r"at"):
        helper(api, "_copy_state_dict")(state, copy)
    assert first.tolist() == [0, 0]
    assert not helper(api, "_check_state_dict_similarity")(state, copy)


@pytest.mark.parametrize("kind", ["dtensor", "replica", "scalar", "sharded"])
@on_ranks(world=2, fixture="fixed")
def test_a_staged_copy_is_not_the_live_state(api: Any, kind: str) -> None:
    """As an asynchronous save does it: a dict made once, filled at each save, while training goes on."""
    state: dict[str, Any] = {
        "dtensor": lambda: {"model": dtensors(), "lists": [dtensors()["even"]]},
        "replica": lambda: dtensors((Replicate(),)),
        "scalar": lambda: {"step": scalar()},
        "sharded": lambda: {"legacy": legacy()},
    }[kind]()
    copy = helper(api, "_create_cpu_state_dict")(state)
    check_apart(copy, state)
    for _ in range(2):
        for one in tensors_in(state):
            one.add_(1)
        seen = [one.clone() for one in tensors_in(state)]
        staged = helper(api, "_copy_state_dict")(state, copy)
        for one in tensors_in(state):
            one.zero_()
        check_same(staged, seen)
        for one in tensors_in(state):
            one.copy_(seen.pop(0))
    if kind in ("dtensor", "replica"):
        flat = copy["model"] if kind == "dtensor" else copy
        for key, value in (state["model"] if kind == "dtensor" else state).items():
            assert flat[key].placements == value.placements
            assert flat[key].device_mesh == value.device_mesh
            assert (flat[key].shape, flat[key].stride()) == (value.shape, value.stride())
            assert torch.equal(flat[key].full_tensor(), value.full_tensor())


@on_ranks(world=2, fixture="fixed")
def test_an_offloaded_copy_is_not_the_live_state(api: Any) -> None:
    state = {"plain": torch.ones(3), "nested": [dtensors(), (torch.ones(2),)], "step": 3, "old": legacy()}
    copy = helper(api, "_offload_state_dict_to_cpu")(state)
    check_apart(copy, state)
    check_same(copy, state)
    assert copy["step"] == 3
    assert isinstance(copy["nested"][1], tuple)


@on_ranks(world=2)
def test_other_ranks_of_an_offload_get_an_empty_dict(api: Any) -> None:
    copy = helper(api, "_offload_state_dict_to_cpu")(dtensors(), ranks_only=(1,))
    assert bool(copy) == (dist.get_rank() == 1)
    assert isinstance(copy, dict)


@on_ranks(world=2, fixture="fixed")
def test_copies_record_no_autograd_history(api: Any) -> None:
    create, copy = helper(api, "_create_cpu_state_dict"), helper(api, "_copy_state_dict")
    live = {"plain": nn.Parameter(torch.ones(2)), "shard": nn.Parameter(dtensors()["even"])}
    staged = copy(live, create(live))
    for one in (*staged.values(), *helper(api, "_offload_state_dict_to_cpu")(live).values()):
        assert not one.requires_grad
        assert one.grad_fn is None
    # Back into parameters, as after a load.
    staged["plain"].fill_(7)
    copy(staged, live)
    assert live["plain"].tolist() == [7, 7]
    assert live["plain"].requires_grad


@on_ranks(world=2)
def test_structure_and_small_values_are_kept(api: Any) -> None:
    create, copy = helper(api, "_create_cpu_state_dict"), helper(api, "_copy_state_dict")
    live, stream = everything(), io.BytesIO(b"x")
    staged = create(live)
    result = copy({**live, "io": stream}, {**staged, "io": None})
    check_same([result], [live])
    check_apart(staged, live)
    assert list(result) == [*live, "io"]
    assert result["tensor"] is staged["tensor"]
    assert result["small"] == live["small"]
    assert result["deep"][0]["tuple"][1] == 3
    assert result["io"] is stream
    assert [tuple(one.shape) for one in tensors_in(staged)] == [tuple(one.shape) for one in tensors_in(live)]


@on_ranks(world=2)
def test_types_that_no_checkpoint_holds(api: Any) -> None:
    state: dict[str, Any] = {"a": [Odd()]}
    for name in ("_gather_state_dict", "_offload_state_dict_to_cpu"):
        with pytest.raises(ValueError, match="Odd"):
            helper(api, name)(state)
        got = helper(api, name)(state, type_check=False)["a"][0]
        assert isinstance(got, Odd)
        assert got is not state["a"][0]
    with pytest.raises(ValueError, match="Odd"):
        helper(api, "_copy_state_dict")(state, state)
    assert isinstance(helper(api, "_copy_state_dict")(state, state, type_check=False)["a"][0], Odd)
    assert isinstance(helper(api, "_create_cpu_state_dict")(state)["a"][0], Odd)


@on_ranks(world=2, fixture="fixed")
def test_empty_tensors_need_no_pinning(api: Any) -> None:
    """Needs no accelerator: there is nothing to pin."""
    state = {"empty": torch.empty(0, 4), "scalar": torch.tensor(1.0)}
    for share in (False, True):
        copy = helper(api, "_create_cpu_state_dict")(state, pin_memory=True, share_memory=share)
        assert copy["empty"].shape == (0, 4)
        assert copy["scalar"].shape == ()


@on_ranks(world=2, fixture="fixed")
def test_shared_memory_also_in_dtensors(api: Any) -> None:
    copy = helper(api, "_create_cpu_state_dict")({"plain": torch.ones(3), **dtensors()}, share_memory=True)
    assert all(one.is_shared() for one in tensors_in(copy))


@on_ranks(world=2, fixture="fixed")
def test_shared_and_pinned_memory_is_given_back(api: Any) -> None:
    """With a pretended CUDA: pinned while it lives, then unpinned."""
    calls: list[tuple[Any, ...]] = []

    class Runtime:
        def cudaHostRegister(self, *args: int) -> int:
            calls.append(("pin", *args))
            return 0

        def cudaHostUnregister(self, *args: int) -> int:
            calls.append(("unpin", *args))
            return 0

    real, torch.cuda.cudart = torch.cuda.cudart, Runtime
    try:
        copy = helper(api, "_create_cpu_state_dict")({"a": torch.ones(5)}, pin_memory=True, share_memory=True)
        address = copy["a"].data_ptr()
        assert calls == [("pin", address, 20, 1)]
        assert copy["a"].is_shared()
        del copy
        gc.collect()
        assert calls[1:] == [("unpin", address)]
    finally:
        torch.cuda.cudart = real


@on_ranks(world=2)
def test_pinning_that_fails_is_an_error(api: Any) -> None:
    class Runtime:
        def cudaHostRegister(self, *args: int) -> int:
            return 2

    real, torch.cuda.cudart = torch.cuda.cudart, Runtime
    try:
        with pytest.raises(RuntimeError, match="CUDA error 2"):
            helper(api, "_create_cpu_state_dict")({"a": torch.ones(5)}, pin_memory=True, share_memory=True)
    finally:
        torch.cuda.cudart = real


@pytest.mark.parametrize("which", MISFITS)
def test_a_copy_that_does_not_fit_stays_as_it_is(ranks, which):
    ranks(misfit, which, world=2)


def test_misfits_are_found_too_late_by_stock(fixed):
    fixed(misfit, "None", world=2)


@on_ranks(world=2, fixture="fixed")
def test_comparing_changes_nothing(api: Any) -> None:
    similar = helper(api, "_check_state_dict_similarity")
    state, other = {"n": {"a": torch.ones(2)}, **dtensors()}, {"n": {"a": torch.zeros(2)}, **dtensors()}
    for one in tensors_in(other):
        one.fill_(5)
    assert similar(state, other)
    assert all(bool((one == 5).all()) for one in tensors_in(other)), "comparing has overwritten it"
    assert not similar({"a": torch.ones(2)}, {"a": torch.ones(2).half()})
    assert similar({"a": [1, "x"]}, {"a": [2, None]})


# --- gather ----------------------------------------------------------------------------------

SPREAD = {
    "shard": ((), (Shard(0),)),
    "columns": ((), (Shard(1),)),
    "replica": ((), (Replicate(),)),
    "hsdp": ((2, 2), (Replicate(), Shard(0))),
    "grid": ((2, 2), (Shard(0), Shard(1))),
}


class Largest(TorchDispatchMode):
    """The largest storage of a plain tensor that any operation gave back."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Optional[Any] = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in tensors_in(out):
            self.nbytes = max(self.nbytes, one.untyped_storage().nbytes())
        return out


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1024, 64))
        self.layers = nn.ModuleList()


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("only", [(), (0,), (2,), (0, 3), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("spread", SPREAD)
@on_ranks()
def test_gather(api: Any, spread: str, only: tuple[int, ...], offload: bool) -> None:
    shape, placements = SPREAD[spread]
    values = dtensors(placements, shape)
    plain = torch.ones(2)
    state = {"model": values, "list": [values["even"], 1, None], "tuple": (values["row"],), "plain": plain}
    got = helper(api, "_gather_state_dict")(state, ranks_only=only, cpu_offload=offload)
    if only and dist.get_rank() not in only:
        assert got == {}
        return
    want = {"even": value_of("even", (8, 4)), "uneven": value_of("uneven", (5, 3)), "row": torch.ones(1, 2)}
    assert list(got) == list(state)
    assert list(got["model"]) == list(want)
    for key, value in got["model"].items():
        assert type(value) is torch.Tensor
        assert torch.equal(value, want[key])
    assert torch.equal(got["list"][0], want["even"])
    assert got["list"][1:] == [1, None]
    assert isinstance(got["tuple"], tuple)
    assert got["plain"] is plain
    assert all(isinstance(value, DTensor) for value in values.values()), "the given dict has changed"


@on_ranks(world=2, fixture="fixed")
def test_gathered_parameters_have_no_history(api: Any) -> None:
    got = helper(api, "_gather_state_dict")({"a": nn.Parameter(dtensors()["even"])})["a"]
    assert torch.equal(got, value_of("even", (8, 4)))
    assert not got.requires_grad
    assert got.grad_fn is None


@on_ranks()
def test_gather_counts_ranks_in_the_group(api: Any) -> None:
    """`ranks_only` counts in `pg`: its rank 1 is global rank 2."""
    group = dist.new_group([1, 2])
    mesh = DeviceMesh("cpu", [1, 2])
    here = dist.get_rank() in (1, 2)
    local = torch.full((1, 3), float(dist.get_rank())) if here else torch.empty(0)
    value = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(2, 3), stride=(3, 1))
    everywhere = helper(api, "_gather_state_dict")({"a": value})["a"]
    assert everywhere.tolist() == ([[1.0] * 3, [2.0] * 3] if here else [])
    got = helper(api, "_gather_state_dict")({"a": value}, pg=group, ranks_only=(1,))
    assert (got == {}) == (dist.get_rank() != 2)
    if got:
        assert torch.equal(got["a"], everywhere)


@on_ranks(world=2)
def test_gather_of_legacy_shards_and_scalars(api: Any) -> None:
    got = helper(api, "_gather_state_dict")({"a": legacy(), "b": [scalar()]}, ranks_only=(0,))
    if dist.get_rank() == 0:
        want = torch.cat([torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3) + 10])
        assert torch.equal(got["a"], want)
        assert got["b"][0] == 2.5
    else:
        assert got == {}


@on_ranks(world=2)
def test_gather_in_fsdp1(api: Any) -> None:
    """FSDP1 gathers sharded optimizer state with the helper that it bound by name."""
    import_module(STATE_DICT)
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
    from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType

    model = FSDP1(nn.Linear(4, 4), device_id=torch.device("cpu"))
    sharded = StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    optim = torch.optim.Adam(model.parameters(), lr=0.5)
    model(torch.ones(2, 4)).sum().backward()
    optim.step()
    want = {name: one.clone() for name, one in optim.state_dict()["state"][0].items()}
    with FSDP1.state_dict_type(model, *sharded):
        saved = FSDP1.optim_state_dict(model, optim)
        loadable = FSDP1.optim_state_dict_to_load(model, optim, saved)
    for one in tensors_in(optim.state_dict()["state"]):
        one.zero_()
    optim.load_state_dict(loadable)
    got = optim.state_dict()["state"][0]
    assert set(got) == set(want) == {"step", "exp_avg", "exp_avg_sq"}
    assert all(torch.equal(got[name], want[name]) for name in want)


@on_ranks(world=2)
def test_gather_waits_for_tensors_in_flight(api: Any) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    value = distribute_tensor(value_of("even", (8, 4)), mesh, [Shard(0)])
    got = helper(api, "_gather_state_dict")({"a": value.redistribute(mesh, [Replicate()], async_op=True)})[
        "a"
    ]
    assert type(got) is torch.Tensor
    assert torch.equal(got, value_of("even", (8, 4)))


@on_ranks(fixture="fixed")
def test_only_the_receiving_rank_holds_whole_tensors(api: Any) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"a": distribute_tensor(torch.ones(1024, 64), mesh, [Shard(0)])}
    whole = 1024 * 64 * 4
    with Largest() as largest:
        helper(api, "_gather_state_dict")(state, ranks_only=(0,))
    if dist.get_rank() == 0:
        assert largest.nbytes >= whole
    else:
        assert largest.nbytes <= whole // 2, "a rank that gets nothing needs no whole tensor"


@on_ranks(fixture="fixed")
def test_a_full_get_needs_whole_tensors_on_rank_0_alone(api: Any) -> None:
    model = build(kind=Wide)
    whole = 1024 * 64 * 4
    with Largest() as largest:
        options = api.StateDictOptions(full_state_dict=True, cpu_offload=True)
        api.get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        assert largest.nbytes >= whole
    else:
        assert largest.nbytes <= whole // 2, "a rank that gets nothing needs no whole tensor"


# --- distribute ------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
@on_ranks(world=2, fixture="fixed")
def test_distributed_slices_are_not_views(api: Any, device: str) -> None:
    live = dtensors()
    full = {key: value_of(f"new {key}", tuple(value.shape)) for key, value in live.items()}
    start = {key: value.to("meta") for key, value in live.items()} if device == "meta" else live
    local: dict[str, Any] = {key: (start[key], full[key]) for key in start}
    local["plain"] = torch.ones(1)
    helper(api, "_distribute_tensors")(local, [*start, "plain", "absent"], torch.device("cpu"))
    assert set(local) == {*start, "plain"}
    for key, value in full.items():
        assert local[key].placements == live[key].placements
        assert torch.equal(local[key].full_tensor(), value)
        shard = local[key]._local_tensor
        assert shard.untyped_storage().nbytes() <= -(-value.shape[0] // 2) * value[0].nbytes, "a view"
        if device == "cpu":
            assert local[key] is live[key], "not in place"


@on_ranks(world=2, fixture="fixed")
def test_distributing_a_wrong_shape(api: Any) -> None:
    live = dtensors()
    local = {"uneven": (live["uneven"], torch.ones(5, 3)), "even": (live["even"], torch.ones(8, 5))}
    with pytest.raises(RuntimeError, match="wrong shape: even"):
        helper(api, "_distribute_tensors")(local, list(local), torch.device("cpu"))
    assert torch.equal(live["uneven"].full_tensor(), value_of("uneven", (5, 3)))


# --- every private name that somebody outside torch uses -------------------------------------


class Case:
    """A plain model and optimizer, and `call(name, ...)` in the module that is looked at."""

    def __init__(self, modules: list[Any]) -> None:
        self.modules = modules
        self.model = nn.Linear(2, 3)
        self.optim = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)
        self.cpu = torch.device("cpu")

    def find(self, name: str) -> Any:
        return next((getattr(module, name) for module in self.modules if hasattr(module, name)), None)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") or name.startswith("__"):
            raise AttributeError(name)
        return self.find(name)

    def info(self) -> Any:
        return self._verify_options(
            self.model, (self.optim,), optim_only=False, submodules=None, options=None
        )

    def names(self) -> set[str]:
        return set(self.model.state_dict())


def patch_model(case: Case) -> Any:
    case._patch_model_state_dict(case.model, options=None)
    return set(case.model.state_dict())


def patch_optimizer(case: Case) -> Any:
    case._patch_optimizer_state_dict(case.model, optimizers=(case.optim,), options=None)
    return set(case.optim.state_dict()["state"])


def load_optim(case: Case) -> Any:
    state = case._get_optim_state_dict(case.model, (case.optim,), case.info())
    state["param_groups"][0]["lr"] = 0.25
    case._load_optim_state_dict(case.model, (case.optim,), state, case.info())
    return case.optim.param_groups[0]["lr"]


def init_optim(case: Case) -> Any:
    case._init_optim_state(case.optim)
    return len(case.optim.state)


def broadcast(case: Case) -> Any:
    local = {"a": torch.zeros(2), "b": torch.zeros(1)}
    full = {"a": torch.ones(2)} if dist.get_rank() == 0 else {}
    case._broadcast_state_dict(full, local, device=case.cpu, strict=True)
    return {key: value.tolist() for key, value in local.items()}


def distribute(case: Case) -> Any:
    local = {"a": torch.zeros(2)}
    case._distribute_state_dict({"a": torch.ones(2), "n": 3}, local, device=case.cpu)
    return local["a"].tolist(), local["n"]


def distribute_one(case: Case) -> Any:
    live = dtensors()["even"]
    local = {"a": (live, torch.ones(8, 4))}
    case._distribute_tensors(local, ["a"], case.cpu, None)
    return bool((local["a"].full_tensor() == 1).all())


def copied(case: Case) -> Any:
    copy = case._create_cpu_state_dict({"a": torch.ones(1)}, pin_memory=False, share_memory=False)
    return case._copy_state_dict({"a": torch.ones(1)}, copy, non_blocking=False, type_check=True)[
        "a"
    ].tolist()


def gather_all(case: Case) -> Any:
    more = {"pg": None, "device": None, "cpu_offload": False, "ranks_only": (), "type_check": True}
    return case._gather_state_dict({"a": 1}, **more)


def unflatten(case: Case) -> Any:
    with pytest.warns(FutureWarning):
        return dict(case._unflatten_model_state_dict(nn.Sequential(case.model), {case.model: {"weight": 1}}))


def collect(case: Case) -> Any:
    with case._gc_context():
        return gc.isenabled()


def names_of_parameters(case: Case) -> Any:
    """As programs read them: plain dicts, filled."""
    info = case.info()
    return type(info.fqn_param_mapping), info.fqn_param_mapping[case.model.weight], info.shared_params_mapping


#: name -> (a call with the signature of torch 2.6, what comes back)
PRIVATE: dict[str, tuple[Any, Any]] = {
    "_TensorInfo": (lambda case: case._TensorInfo(torch.Size([2]), torch.half).size, (2,)),
    "_broadcast_state_dict": (broadcast, {"a": [1, 1]}),
    "_copy_state_dict": (copied, [1]),
    "_create_cpu_state_dict": (copied, [1]),
    "_distribute_state_dict": (distribute, ([1, 1], 3)),
    "_distribute_tensors": (distribute_one, True),
    "_gather_state_dict": (gather_all, {"a": 1}),
    "_gc_context": (collect, False),
    "_get_fqns": (lambda case: case._get_fqns(case.model, "weight", True, True), {"weight"}),
    "_init_optim_state": (init_optim, 2),
    "_iterate_valid_model_state": (
        lambda case: {name for name, _ in case._iterate_valid_model_state(case.model)},
        {"weight", "bias"},
    ),
    "_load_optim_state_dict": (load_optim, 0.25),
    "_patch_model_state_dict": (patch_model, {"weight", "bias"}),
    "_patch_optimizer_state_dict": (patch_optimizer, {"weight", "bias"}),
    "_state_dict_fn": (lambda case: set(case._state_dict_fn(case.model, "state_dict")()), {"weight", "bias"}),
    "_unflatten_model_state_dict": (unflatten, {"0.weight": 1}),
    "_verify_options": (names_of_parameters, (dict, {"weight"}, {})),
    "_verify_state_dict": (lambda case: case._verify_state_dict({"a": 1}, {"state": {}}, case.info()), None),
}
#: Came with torch 2.5.
LATER = ("_distribute_state_dict", "_distribute_tensors")


def call_private(api: Any, name: str, where: str) -> None:
    modules = [import_module(STATE_DICT), import_module(UTILS)] if where == "torch" else [api]
    call, want = PRIVATE[name]
    assert call(Case(modules)) == want


@pytest.mark.parametrize("where", ["torch", "ours"])
@pytest.mark.parametrize("name", PRIVATE)
def test_private_names_take_the_calls_of_torch_2_6(ranks, name, where):
    if where == "torch" and name in LATER and Version(torch.__version__).release < (2, 5):
        pytest.skip("torch 2.4 does not have it")
    if where == "ours" and name == "_TensorInfo":
        pytest.skip("torch's own, in _state_dict_utils")
    ranks(call_private, name, where, world=2)


@on_ranks(world=2, fixture="fixed")
def test_a_broadcast_that_fails_changes_nothing(api: Any) -> None:
    """An error leaves every entry of the caller's dict as it was, small values too."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])
    for full in ({"n": 99, "w": torch.ones(5, 2)}, {"n": 99, "x": torch.ones(3, device="meta")}):
        local: dict[str, Any] = {"n": 1, "w": weight, "x": torch.zeros(3)}
        mine = full if dist.get_rank() == 0 else {}
        with pytest.raises(RuntimeError, match="nothing was changed"):
            helper(api, "_broadcast_state_dict")(mine, local, device=torch.device("cpu"))
        assert local["n"] == 1
        assert local["w"] is weight
        assert not local["w"]._local_tensor.any()
        assert local["x"].tolist() == [0, 0, 0]
