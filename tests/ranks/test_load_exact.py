"""set_model_state_dict and get_model_state_dict are torch's where a corner tempts to be otherwise."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import two_dim_support
from hooked import HOWS, WRAPPERS, error_of, given, options, unwrapped, whole_state, wrapped
from models import build, full_state
from pool import on_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel


class Tied(nn.Module):
    """The head comes before the embedding in the names' order, and after it in the module's."""

    def __init__(self) -> None:
        super().__init__()
        self.z_embed = nn.Embedding(6, 4)
        self.middle = nn.Linear(4, 4)
        self.a_head = nn.Linear(4, 6, bias=False)
        self.a_head.weight = self.z_embed.weight


class SameModule(nn.Module):
    """One parameter under two names of one module."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.zeros(4, 4))
        self.other = self.one
        self.listed = nn.ParameterList([self.one, nn.Parameter(torch.zeros(4))])
        self.listed.append(self.listed[1])


def tied(api: Any, wrapper: str, how: str, order: str, device: str) -> None:
    """Names of one tensor with different values: the last in the module's order wins."""
    state = {
        "z_embed.weight": torch.full((6, 4), 1.0),
        "middle.weight": torch.ones(4, 4),
        "middle.bias": torch.ones(4),
        "a_head.weight": torch.full((6, 4), 2.0),
    }
    if order == "sorted":
        state = dict(sorted(state.items()))
    with torch.device(device):
        model = wrapped(Tied(), wrapper)
    api.set_model_state_dict(model, given(state, how), options=options(api, how))
    inner = unwrapped(model)
    assert inner.a_head.weight is inner.z_embed.weight
    assert (whole_state(model)["z_embed.weight"] == 2).all()


def tied_misfit(api: Any, wrapper: str, how: str) -> str:
    """The losing name is judged too."""
    state = dict(Tied().state_dict())
    state["z_embed.weight"] = torch.ones(5, 4)
    model = wrapped(Tied(), wrapper)
    before = {key: value.clone() for key, value in whole_state(model).items()}
    text = error_of(lambda: api.set_model_state_dict(model, given(state, how), options=options(api, how)))
    for key, value in whole_state(model).items():
        assert torch.equal(value, before[key]), key
    return text


def replica_alone(api: Any, offload: bool) -> None:
    """One replica of HSDP gets a full state dict while the other one does something else."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, state = build(mesh=mesh), full_state()
    api.set_model_state_dict(model, given(dict(state), "rank0"), options=options(api, "rank0"))
    if dist.get_rank() < 2:
        got = api.get_model_state_dict(
            model, options=api.StateDictOptions(full_state_dict=True, cpu_offload=offload)
        )
        assert set(got) == (set() if offload and dist.get_rank() else set(state))
        for key, value in got.items():
            assert torch.equal(value, state[key]), key
    dist.barrier()


class Breaks(Mapping[str, Any]):
    """A mapping whose values cannot be read any more from some moment on."""

    def __init__(self, held: dict[str, Any], reads: int) -> None:
        self.held, self.reads = held, reads

    def __getitem__(self, key: str) -> Any:
        self.reads -= 1
        if self.reads < 0:
            raise OSError("the file is gone")
        return self.held[key].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


def breaks(api: Any, how: str, passes: float) -> str:
    model, state = build(), full_state()
    mine: Any = state if how == "all" else {}
    if dist.get_rank() == (0 if how == "rank0" else 2):
        mine = Breaks(state, int(passes * len(state)))
    return error_of(lambda: api.set_model_state_dict(model, mine, options=options(api, how)))


def partial_on_one(api: Any) -> str:
    from torch_dcp_backport.compat import DTensor

    try:
        from torch.distributed.tensor import Partial
    except ImportError:
        from torch.distributed._tensor import Partial
    model, state = build(), full_state()
    if dist.get_rank() == 2:
        mesh = model.head.weight.device_mesh
        state["head.weight"] = DTensor.from_local(state["head.weight"], mesh, [Partial()], run_check=False)
    return error_of(lambda: api.set_model_state_dict(model, state, options=options(api, "all")))


class Counting(Mapping[str, Any]):
    """Values made anew on every access; counts reads and what is alive at the same time."""

    def __init__(self, held: dict[str, Any]) -> None:
        self.held = held
        self.reads = dict.fromkeys(held, 0)

    def __getitem__(self, key: str) -> Any:
        self.reads[key] += 1
        return self.held[key].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 2048, bias=False) for _ in range(3))
        self.small = nn.Linear(4, 4)


class Slice:
    """As safetensors' slices are."""

    def __init__(self, value: torch.Tensor, reads: list[int]) -> None:
        self.value, self.reads = value, reads

    def get_shape(self) -> list[int]:
        return list(self.value.shape)

    def get_dtype(self) -> str:
        return {torch.float32: "F32", torch.bfloat16: "BF16"}[self.value.dtype]

    def __getitem__(self, index: Any) -> torch.Tensor:
        part = self.value[index].clone()
        self.reads.append(part.numel())
        return part


def read_seldom(api: Any, wrapper: str, how: str) -> dict[str, int]:
    torch.manual_seed(0)
    state = dict(Wide().state_dict())
    mine: Any = Counting(state) if how == "all" or dist.get_rank() == 0 else {}
    model = wrapped(Wide(), wrapper)
    api.set_model_state_dict(model, mine, options=options(api, how))
    for key, value in whole_state(model).items():
        assert torch.equal(value, state[key]), key
    return mine.reads if isinstance(mine, Counting) else {}


def read_slices(api: Any, wrapper: str, how: str) -> int:
    torch.manual_seed(0)
    state = dict(Wide().state_dict())
    reads: list[int] = []
    lazy = {key: Slice(value, reads) for key, value in state.items()}
    model = wrapped(Wide(), wrapper)
    api.set_model_state_dict(model, given(lazy, how), options=options(api, how))
    for key, value in whole_state(model).items():
        assert torch.equal(value, state[key]), key
    return sum(reads)


# The tests.


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("order", ["sorted", "as the module"])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("wrapper", ["plain", "ddp", "fsdp2"])
def test_the_last_name_in_the_modules_order_wins(ranks, wrapper, how, order, device):
    if wrapper == "ddp" and device == "meta":
        return
    ranks(tied, wrapper, how, order, device, world=2)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_losing_name_has_to_fit_too(ranks, wrapper, how):
    for text in ranks(tied_misfit, wrapper, how, world=2):
        assert "wrong shape: z_embed.weight (expected (6, 4), got (5, 4))" in text


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(world=2)
def test_two_names_in_one_module(api: Any, wrapper: str, how: str) -> None:
    torch.manual_seed(0)
    model = SameModule()
    with torch.no_grad():
        model.one.normal_()
        model.listed[1].normal_()
    saved = wrapped(copy.deepcopy(model), wrapper)
    state = api.get_model_state_dict(saved, options=api.StateDictOptions(full_state_dict=True))
    assert set(state) == set(model.state_dict())
    fresh = wrapped(SameModule(), wrapper)
    result = api.set_model_state_dict(fresh, given(state, how), options=options(api, how))
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    for key, value in whole_state(fresh).items():
        assert torch.equal(value, model.state_dict()[key]), key


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(world=2)
def test_frozen_parameters_that_get_leaves_out(api: Any, wrapper: str, how: str) -> None:
    """What get leaves out, set does not miss."""
    torch.manual_seed(0)
    model = Tied()
    model.middle.requires_grad_(False)
    trained = wrapped(copy.deepcopy(model), wrapper)
    get = api.StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    state = api.get_model_state_dict(trained, options=get)
    assert set(state) == {"z_embed.weight", "a_head.weight"}
    fresh = wrapped(copy.deepcopy(model), wrapper)
    with torch.no_grad():
        for param in fresh.parameters():
            param.zero_()
    chosen = options(api, how, ignore_frozen_params=True)
    result = api.set_model_state_dict(fresh, given(state, how), options=chosen)
    assert not result.unexpected_keys
    values = whole_state(fresh)
    assert torch.equal(values["z_embed.weight"], model.z_embed.weight)
    assert not values["middle.weight"].any()
    assert "Missing key(s)" in error_of(
        lambda: api.set_model_state_dict(fresh, given(state, how), options=options(api, how))
    )


@pytest.mark.parametrize("offload", [False, True])
def test_a_replica_gets_alone(ranks, offload):
    with two_dim_support():
        ranks(replica_alone, offload)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("passes", [0, 0.5])
def test_a_mapping_that_breaks_is_heard_of(ranks, how, passes):
    for text in ranks(breaks, how, passes):
        assert f"rank {0 if how == 'rank0' else 2}: OSError: the file is gone" in text
        assert "nothing was changed" in text


def test_partial_sums_on_one_rank(ranks):
    for text in ranks(partial_on_one):
        assert "rank 2: " in text
        assert "nothing was changed" in text


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_values_made_on_access_are_read_twice_at_most(ranks, wrapper, how):
    """Once for the inventory, and once when they move; small ones are kept in between."""
    for reads in ranks(read_seldom, wrapper, how):
        for key, number in reads.items():
            assert number <= (1 if key.startswith("small") else 2), (key, number)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_slices_are_read_slice_by_slice(ranks, wrapper, how):
    whole = sum(value.numel() for value in Wide().state_dict().values())
    for rank, elements in enumerate(ranks(read_slices, wrapper, how)):
        if how == "rank0":
            # FSDP2: every rank's slices. Else once for all ranks, and the source's own copy.
            expected = 0 if rank else whole if wrapper == "fsdp2" else 2 * whole
        else:
            expected = whole // 4 if wrapper == "fsdp2" else whole
        assert elements <= expected


@pytest.mark.parametrize("has_hook", [False, True])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("wrapper", ["ddp", "checkpoint", "compile", "ddp checkpoint compile"])
@on_ranks(world=2)
def test_missing_and_unexpected_keys_have_no_prefix_of_a_wrapper(
    api: Any, wrapper: str, how: str, has_hook: bool
) -> None:
    """Names are those of the model without wrappers, and the caller's own, as in a strict error."""

    def make() -> nn.Module:
        inner = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        if has_hook:
            inner[1].register_load_state_dict_post_hook(lambda *_: None)
        return inner

    state = make().state_dict()
    for key in ("0.weight", "1.0.bias", "1.1.running_mean"):
        del state[key]
    more = ["1.0.more", "more", "module.more"]
    state.update(dict.fromkeys(more, torch.ones(2)))
    model = make()
    if "checkpoint" in wrapper:
        model[1][0] = checkpoint_wrapper(model[1][0])
    if "compile" in wrapper:
        model[1] = torch.compile(model[1])
    if "ddp" in wrapper:
        model = DistributedDataParallel(model)
    result = api.set_model_state_dict(model, given(dict(state), how), options=options(api, how, strict=False))
    assert sorted(result.missing_keys) == ["0.weight", "1.0.bias", "1.1.running_mean"]
    assert sorted(result.unexpected_keys) == sorted(more)
