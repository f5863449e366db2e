"""Small state dicts: their values travel with the inventory, and nothing else can tell."""

from __future__ import annotations

import mmap
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import INLINE, on_ranks, send_values
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from values import value_of

from torch_dcp_backport import transfer
from torch_dcp_backport.compat import DTensor, Replicate, Shard
from torch_dcp_backport.state_dict import inline
from torch_dcp_backport.transfer import TensorInfo

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64)
ROWS = 6  # uneven on 4 ranks


class Once(Mapping[str, Any]):
    """Makes its values on access, and counts."""

    def __init__(self, given: Mapping[str, torch.Tensor]) -> None:
        self.given = given
        self.reads: list[str] = []

    def __getitem__(self, key: str) -> torch.Tensor:
        self.reads.append(key)
        return self.given[key].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self.given)

    def __len__(self) -> int:
        return len(self.given)


def model_of(full: Mapping[str, torch.Tensor], device: str = "cpu") -> nn.Module:
    """Every tensor of rows sharded by them, but for "replica"; "plain" and scalars are no DTensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Module()
    for key, value in full.items():
        live = torch.zeros(value.shape, dtype=value.dtype, device=device)
        if value.dim() and key != "plain":
            placement = Replicate() if key == "replica" else Shard(0)
            parts = live.chunk(dist.get_world_size()) if key != "replica" else [live] * 4
            mine = parts[dist.get_rank()] if dist.get_rank() < len(parts) else live[:0]
            live = DTensor.from_local(
                mine.clone(), mesh, [placement], run_check=False, shape=value.shape, stride=value.stride()
            )
        model.register_parameter(key, nn.Parameter(live, requires_grad=False))
    return model


def full_of() -> dict[str, torch.Tensor]:
    full = {f"w_{str(dtype)[6:]}": value_of(str(dtype), (ROWS, 3), dtype) for dtype in DTYPES}
    full["replica"], full["plain"] = value_of("replica", (5, 2)), value_of("plain", (3,))
    full["scalar"], full["empty"] = value_of("scalar", ()), torch.zeros(0, 3)
    # The source gives views of any layout.
    full["replica"] = full["replica"].t().contiguous().t()
    return full


def load(api: Any, model: nn.Module, state: Mapping[str, Any], **more: Any) -> transfer.Report:
    send_values(with_inventory=True)
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, **more)
    try:
        api.set_model_state_dict(model, state if dist.get_rank() == 0 else {}, options=options)
    finally:
        send_values(with_inventory=False)
    report = transfer.last_report()
    assert report is not None
    return report


def local(live: torch.Tensor) -> torch.Tensor:
    return live._local_tensor if isinstance(live, DTensor) else live.detach()


def own_part(live: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a whole tensor."""
    if not isinstance(live, DTensor) or live.placements == (Replicate(),):
        return full
    parts = full.chunk(dist.get_world_size())
    return parts[dist.get_rank()] if dist.get_rank() < len(parts) else full[:0]


def loads(api: Any, device: str, lazy: bool) -> tuple[int, int]:
    full = full_of()
    model = model_of(full, device)
    given = Once(full) if lazy else full
    report = load(api, model, given)
    for key, live in model.named_parameters():
        mine = local(live)
        assert torch.equal(mine, own_part(live, full[key])), key
        # Nothing keeps what travelled alive.
        assert mine.untyped_storage().nbytes() == mine.numel() * mine.element_size(), key
    if isinstance(given, Once) and dist.get_rank() == 0:
        assert sorted(given.reads) == sorted(full)
    return report.bytes_sent, report.bytes_received


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_small_values_arrive_bit_for_bit(ranks, device):
    nbytes = sum(value.nbytes for value in full_of().values())
    assert ranks(loads, device, lazy=False) == [(nbytes, 0), *[(0, nbytes)] * 3]


def test_what_is_made_on_access_is_read_when_it_moves(ranks):
    nbytes = sum(value.nbytes for value in full_of().values())
    # Ranks get their own parts, then.
    assert all(0 < got < nbytes for _, got in ranks(loads, "cpu", lazy=True)[1:])


VIEWS = {
    "same": lambda live: live,
    "turned": lambda live: live.t(),
    "conjugated": lambda live: live.conj(),
    "negative": lambda live: live._neg_view(),
}


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("how", list(VIEWS))
@on_ranks()
def test_a_source_that_is_the_destination(api: Any, how: str, broadcast: bool) -> None:
    """What is loaded is a view of what it is loaded into; to write it would change what other ranks get."""
    start = torch.arange(9.0).view(3, 3).to(torch.complex64) * (1 + 2j)
    live = start.clone()
    model = nn.Module()
    model.register_buffer("live", live)
    version = live._version
    if broadcast:
        load(api, model, {"live": VIEWS[how](live)})
    else:
        options = api.StateDictOptions(full_state_dict=True)
        api.set_model_state_dict(model, {"live": VIEWS[how](live)}, options=options)
    assert torch.equal(live, VIEWS[how](start))
    assert how != "same" or live._version == version or dist.get_rank()


@on_ranks()
def test_a_source_in_memory_that_is_read_only(api: Any) -> None:
    """To write a page that may only be read ends the process. The stride of one row says nothing."""
    memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        live = torch.frombuffer(memory, dtype=torch.float32, count=6).view(1, 6)
    model = nn.Module()
    model.register_buffer("live", live if dist.get_rank() == 0 else torch.ones(1, 6))
    load(api, model, {"live": live.as_strided((1, 6), (99, 1))})
    assert not torch.any(model.live)


def tells_progress(api: Any, place: int) -> list[tuple[int, int]]:
    """One rank has a callback."""
    calls: list[tuple[int, int]] = []
    if dist.get_rank() == place:
        transfer.configure(progress=lambda progress: calls.append((progress.done, progress.total)))
    try:
        model = nn.Linear(3, 2)
        load(api, model, {"weight": torch.ones(2, 3), "bias": torch.ones(2)})
    finally:
        transfer.configure()
    assert torch.all(model.weight == 1)
    return calls


@pytest.mark.parametrize("place", [0, 2])
def test_progress(ranks, place):
    calls = ranks(tells_progress, place)
    assert calls[place] == [(32, 32)]
    assert sum(map(len, calls)) == 1


@on_ranks()
def test_what_nobody_wants_is_not_read(api: Any) -> None:
    """Keys that no rank wants, of tensors that cannot be read."""
    freed, model = torch.ones(64), nn.Linear(3, 2)
    freed.untyped_storage().resize_(0)
    state = {"weight": torch.ones(2, 3), "bias": torch.ones(2), "freed": freed}
    load(api, model, state, strict=False)
    assert torch.all(model.weight == 1)


@on_ranks()
def test_every_rank_gets_what_a_stage_finds(api: Any) -> None:
    """A source that the load itself changes: a hook lets b wait until a, which it views, is written."""
    model = nn.Module()
    model.a, model.b = nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)
    model.b.weight = nn.Parameter(model.a.weight.detach().view(1, 3))
    model.b._register_load_state_dict_pre_hook(lambda *_: None)
    load(api, model, {"a.weight": torch.full((1, 3), 7.0), "b.weight": model.b.weight.detach()})
    assert torch.all(model.a.weight == 7)
    assert torch.all(model.b.weight == 7)


@on_ranks()
def test_a_rank_that_fails_while_it_copies(api: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    model.register_load_state_dict_post_hook(lambda *_: None)
    if dist.get_rank() == 1:
        # torch has no copy into this dtype.
        model[1].bias = nn.Parameter(torch.zeros(4, dtype=torch.uint8).view(torch.bits8), requires_grad=False)
    state = {key: torch.ones(value.shape) for key, value in nn.Sequential(*model).state_dict().items()}
    start = time.monotonic()
    words = "rank 1"
    if dist.get_rank() == 1:
        words = r"broken off while copying.*1\.bias; do not use.*rank 1 wrote 0\.weight"
    with pytest.raises(RuntimeError, match=words):
        load(api, model, state)
    assert time.monotonic() - start < 10, "the others wait for the timeout"


@on_ranks()
def test_a_rank_that_cannot_load_is_heard_of_before_anything_is_written(api: Any) -> None:
    full = full_of()
    model = model_of(full)
    if dist.get_rank() == 2:
        model.extra = nn.Parameter(torch.zeros(2))
    with pytest.raises(RuntimeError, match=r"rank 2: Missing key\(s\) in state_dict.*extra"):
        load(api, model, full)
    assert not any(torch.any(local(live)) for live in model.parameters())


@on_ranks()
def test_a_source_that_cannot_be_read(api: Any) -> None:
    full = full_of()
    model = model_of(full)

    class Breaks(Once):
        def __getitem__(self, key: str) -> torch.Tensor:
            if key == "scalar":
                raise OSError("a bad sector")
            return super().__getitem__(key)

    with pytest.raises(RuntimeError, match="a bad sector"):
        load(api, model, Breaks(full))
    assert not any(torch.any(local(live)) for live in model.parameters())


@on_ranks()
def test_states_of_several_optimizers(api: Any) -> None:
    """Counters and moments of several optimizers."""
    model = nn.Linear(4, 3)
    optimizers = [torch.optim.Adam([model.weight]), torch.optim.SGD([model.bias], momentum=0.5)]
    sum(parameter.sum() for parameter in model.parameters()).backward()
    for optimizer in optimizers:
        optimizer.step()
    options = api.StateDictOptions(full_state_dict=True)
    state = api.get_optimizer_state_dict(model, optimizers, options=options)
    fresh = [torch.optim.Adam([model.weight]), torch.optim.SGD([model.bias], momentum=0.5)]
    send_values(with_inventory=True)
    api.set_optimizer_state_dict(
        model,
        fresh,
        state if dist.get_rank() == 0 else {},
        options=api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    send_values(with_inventory=False)
    for old, new in zip(optimizers, fresh):
        for parameter, values in old.state.items():
            assert values.keys() == new.state[parameter].keys()
            for name, value in values.items():
                assert torch.equal(value, new.state[parameter][name]), name


def test_no_more_than_what_fits_into_one_message():
    fits = {"a": TensorInfo((INLINE // 4,), torch.float32), "b": "no tensor"}
    assert [piece.nbytes for piece in inline.pieces_of(fits)] == [INLINE]
    assert inline.pieces_of({**fits, "c": TensorInfo((1,), torch.bool)}) is None
    # Alignment counts.
    assert inline.pieces_of({str(n): TensorInfo((1,), torch.bool) for n in range(INLINE // 15)}) is None
    assert inline.pieces_of({}) == inline.pieces_of({"empty": TensorInfo((0,), torch.bool)}) == []
    assert inline.MOST == INLINE
