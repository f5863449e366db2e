"""What accelerators' backends carry, over gloo: broadcasts and all-gathers in place of messages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import test_transfer
import torch
import torch.distributed as dist
from models import build, check_values, full_state, local_of, value_of, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from values import Breaking, Failing

from torch_dcp_backport import compat, transfer
from torch_dcp_backport.state_dict import source
from torch_dcp_backport.transfer import Box, Call, Failure, Problem
from torch_dcp_backport.transfer._src import lanes, object_collectives, wire
from torch_dcp_backport.transfer._src.consensus import share_findings
from torch_dcp_backport.transfer._src.errors import CollectiveError
from torch_dcp_backport.transfer._src.exchange import Route
from torch_dcp_backport.transfer._src.memories import Memories, move
from torch_dcp_backport.transfer._src.memory import part_of
from torch_dcp_backport.transfer._src.scatter import PLAN_BYTES
from torch_dcp_backport.transfer._src.spread import Boxes, intersection
from torch_dcp_backport.transfer._src.staging import Staging

KINDS = list(test_transfer.PLACEMENTS)
#: Bytes: an element at a time, some of the tensors at a time, all at once.
BUDGETS = [16, 600, 2**26]


def collectively(api: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Run a function whose transfers take gloo for an accelerator's backend, and where a message fails."""

    def message(*_: Any) -> Any:
        raise AssertionError("a point-to-point message")

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(lanes, "MESSENGERS", frozenset()))
        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", message))
        return function(api, *args)


@pytest.mark.parametrize("staging", BUDGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_keeps_its_box_of_what_is_broadcast(ranks, kind, staging):
    ranks(collectively, test_transfer.scatter_to, [kind], staging)


@pytest.mark.parametrize("by_window", [False, True])
def test_ranks_with_different_layouts(ranks, by_window):
    ranks(collectively, test_transfer.scatter_to, KINDS, 600, by_window)


@pytest.mark.parametrize("staging", BUDGETS)
@pytest.mark.parametrize("to", [None, 0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_all_gathers_make_whole_tensors(ranks, kind, to, staging):
    ranks(collectively, test_transfer.gather_from, kind, staging, to)


def test_staging_stays_within_its_budget(ranks):
    for budget in (2**12, 2**20):
        assert max(ranks(collectively, test_transfer.staged_bytes, budget)) <= budget


class Wide(nn.Module):
    """Too much to come with the inventory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 67) for _ in range(4))
        self.head = nn.Linear(67, 5)


def loads_and_gets(api: Any) -> tuple[transfer.Report, transfer.Report]:
    model, full = build(kind=Wide), full_state(Wide)
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    bad = {key: value for key, value in full.items() if key != "head.weight"}
    with pytest.raises(RuntimeError, match=r"nothing was changed.\n  ranks 0-3: Missing key.*head.weight"):
        api.set_model_state_dict(model, bad if dist.get_rank() == 0 else {}, options=options)
    transfer.configure(staging_bytes=600)
    try:
        api.set_model_state_dict(model, full if dist.get_rank() == 0 else {}, options=options)
        loaded = transfer.last_report()
        check_values(model, full)
        got = api.get_model_state_dict(model, options=api.StateDictOptions(full_state_dict=True))
        saved = transfer.last_report()
    finally:
        transfer.configure()
    assert list(got) == list(full)
    assert all(torch.equal(value, full[key]) for key, value in got.items())
    return loaded, saved


def test_a_model_is_loaded_and_read_and_errors_are_everywhere_the_same(ranks):
    total = sum(value.nbytes for value in full_state(Wide).values())
    for rank, (loaded, saved) in enumerate(ranks(collectively, loads_and_gets)):
        # Every rank gets the model once, whatever it keeps; rank 0 packs it once, whatever the ranks.
        assert (loaded.bytes_sent, loaded.bytes_received) == ((total, 0) if rank == 0 else (0, total))
        assert not any((loaded.peers_sent, loaded.peers_received, saved.peers_sent, saved.peers_received))
        assert loaded.rounds == loaded.chunks > 100


def a_copy_fails(api: Any, on: int) -> tuple[str, bool]:
    """On rank 0, whose dict cannot be read any more, or on another rank, whose memory cannot be written."""
    model, full = build(kind=Wide), full_state(Wide)
    rank = dist.get_rank()
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state: Any = Breaking(full, len(full) + 1) if on == 0 else full
    real = Staging.unpack

    def unpack(*args: Any) -> None:
        if rank == on:
            raise OSError("the disk failed")
        real(*args)

    broken = mock.patch.object(Staging, "unpack", unpack if on else real)
    # Each value is read again when it moves.
    forgetful = mock.patch.object(source, "KEPT_BYTES", 0)
    with broken, forgetful, pytest.raises(transfer.TransferError) as seen:
        api.set_model_state_dict(model, state if rank == 0 else {}, options=options)
    api.set_model_state_dict(model, full if rank == 0 else {}, options=options)
    check_values(model, full)
    return str(seen.value), isinstance(seen.value.__cause__, OSError)


@pytest.mark.parametrize("on", [0, 2])
def test_a_copy_that_fails_is_told_to_all_in_the_end(ranks, on):
    """Broadcasts that others wait in are made all the same: nothing would end their wait but a watchdog."""
    found = ranks(collectively, a_copy_fails, on)
    # The second value that moves cannot be read; what fails on the other rank is no copy of a tensor.
    key = "" if on else f": {list(full_state(Wide))[1]}"
    text = (
        "cannot load this model state dict: 1 problem(s), do not use what was being loaded.\n"
        f"  rank {on}: OSError: the disk failed{key}"
    )
    assert found == [(text, rank == on) for rank in range(4)]


def a_whole_tensor_is_not_taken(api: Any) -> str:
    """Two tensors that every rank has whole; on rank 1 the memory for the second takes no values."""
    held = {key: transfer.Held(torch.ones(4), transfer.layout_of(torch.ones(4))) for key in "ab"}

    def make(key: str) -> torch.Tensor:
        memory = torch.zeros(4)
        return memory.as_subclass(Failing) if (key, dist.get_rank()) == ("b", 1) else memory

    with pytest.raises(transfer.TransferError) as seen:
        transfer.gather(held, make)
    return str(seen.value)


def test_a_failed_copy_of_a_whole_tensor_names_its_key(ranks):
    text = "cannot gather: 1 problem(s), nothing was changed.\n  rank 1: ValueError: no values are taken: b"
    assert ranks(collectively, a_whole_tensor_is_not_taken) == [text] * 4


def a_target_is_too_small(api: Any) -> str:
    """Two tensors in chunks of a part of one; on rank 1 the second has no such part."""
    rank, box = dist.get_rank(), Box((0,), (64,))
    layout = transfer.layout_of(torch.zeros(64))
    sizes = {"a": 64, "b": 1 if rank == 1 else 64}
    targets = {key: transfer.Target(torch.zeros(size), box) for key, size in sizes.items()}
    with Call("cannot load", "scatter") as call:
        infos = {key: transfer.TensorInfo((64,), torch.float32) for key in targets}
        inventory = call.publish(infos if rank == 0 else None)
        wants = {key: transfer.Want(layout, torch.float32) for key in targets}
        agreement = call.agree_on_wants(wants, staging_bytes=64)
        reader = test_transfer.StateSource({key: torch.ones(64) for key in targets}) if rank == 0 else None
        offer = test_transfer.Offer(inventory, reader)
        with pytest.raises(transfer.TransferError) as seen:
            transfer.scatter(call, offer, targets, agreement)
    return str(seen.value).splitlines()[1]


def test_a_failed_target_names_its_key(ranks):
    (text,) = set(ranks(collectively, a_target_is_too_small))
    assert text.startswith("  rank 1: RuntimeError: ")
    assert text.endswith(": b")


def test_messages_to_ranks_are_counted(ranks):
    found = ranks(test_transfer.reports, 64, [7 * 16 * 1024 + 64 * PLAN_BYTES])
    peers = [[(one.peers_sent, one.peers_received) for one in reports] for reports in found]
    assert peers == [[(3, 0), (0, 3)], *[[(0, 1), (1, 0)]] * 3]


def optimizer_there_and_back(api: Any) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1)
    optimizer.step()
    everything = api.StateDictOptions(full_state_dict=True)
    full = api.get_optimizer_state_dict(model, optimizer, options=everything)
    other = build()
    target = torch.optim.AdamW(other.parameters(), lr=0.5, foreach=False)
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    api.set_optimizer_state_dict(other, target, full if dist.get_rank() == 0 else {}, options=options)
    assert target.param_groups[0]["lr"] == 0.1
    for (name, parameter), old in zip(other.named_parameters(), model.parameters()):
        assert set(target.state[parameter]) == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in target.state[parameter].items():
            assert torch.equal(whole(value), whole(optimizer.state[old][key])), (name, key)


def test_an_optimizer_is_loaded(ranks):
    ranks(collectively, optimizer_there_and_back)


def casts(api: Any) -> None:
    """Ranks that want a tensor in two dtypes get the source's, and cast it themselves."""
    rank = dist.get_rank()
    dtype = (torch.bfloat16, torch.float64)[rank % 2]
    full = value_of("w", (8, 6), torch.float32)
    layout = transfer.Layout((8, 6), transfer.Mesh((4,), (0, 1, 2, 3)), ((0, 1),))
    box = layout.own_box(rank)
    target = transfer.Target(torch.zeros(box.size, dtype=dtype), box)
    with Call("test", "scatter") as call:
        infos = {"w": transfer.TensorInfo((8, 6), torch.float32)}
        inventory = call.publish(infos if rank == 0 else None)
        agreement = call.agree_on_wants({"w": transfer.Want(layout, dtype)}, staging_bytes=64)
        reader = test_transfer.StateSource({"w": full}) if rank == 0 else None
        transfer.scatter(call, test_transfer.Offer(inventory, reader), {"w": target}, agreement)
    assert torch.equal(target.tensor, full.chunk(4)[rank].to(dtype))


def test_each_rank_casts_what_it_keeps(ranks):
    ranks(collectively, casts)


def agreements(api: Any) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for nbytes in (0, 1, wire.HEAD - wire.LENGTH, wire.HEAD, 3 * wire.HEAD, 5 * 2**20):
        own = bytes([rank]) * (nbytes * (rank + 1) // world)
        expected = {other: bytes([other]) * (nbytes * (other + 1) // world) for other in range(world)}
        assert wire.gather_bytes(own, None) == expected, nbytes
        assert wire.gather_bytes(own, None, is_kept=rank == 1) == (expected if rank == 1 else {})
        for answers in (expected, dict.fromkeys(range(world), b"the same" * nbytes)):
            round_ = object_collectives.Round(None)
            heard = round_.gather(own)
            assert (heard.messages if heard else None) == (expected if rank == 0 else None)
            assert round_.scatter(answers if rank == 0 else None) == answers[rank]
        sizes = {1: len(expected[1]), 3: len(expected[3])}
        assert wire.share_bytes(own, sizes, None) == {1: expected[1], 3: expected[3]}
    problem = Problem("is wrong", f"key {rank}")
    findings = share_findings([(rank, problem)] if rank % 2 else [], None)
    assert findings == [(other, Problem("is wrong", f"key {other}")) for other in (1, 3)]


def test_agreements_of_any_length(ranks):
    ranks(collectively, agreements)


def boxes_of_one_holder(api: Any, holder: int) -> int:
    """Rows of a tensor that one rank holds, to ranks that want some of them, some twice, some none."""
    rank = dist.get_rank()
    full = value_of("w", (12, 5), torch.float32)
    rows = {0: [(0, 3)], 1: [(2, 4), (8, 1)], 2: [], 3: [(0, 12)]}
    parts = {other: tuple(Box((a, 0), (n, 5)) for a, n in listed) for other, listed in rows.items()}
    out = {box: torch.zeros(box.size) for box in parts[rank]}
    have = Boxes((12, 5), ((holder, (Box((0, 0), (7, 5)), Box((7, 0), (5, 5)))),))
    want = Boxes((12, 5), tuple(parts.items()))

    def source(_: str, box: Box) -> torch.Tensor:
        return full[box.within(Box((0, 0), (12, 5)))]

    def target(_: str, box: Box) -> torch.Tensor:
        around = next(one for one in out if intersection(one, box) == box)
        return part_of(out[around], around, box)

    with Call("test", "reshard") as call:
        agreement = call.agree_on_wants({}, staging_bytes=200)
        move(call, agreement, {"w": Route(have, want, torch.float32)}, Memories(source, target))
        received = call.tally.bytes_received
    for box, tensor in out.items():
        assert torch.equal(tensor, full[box.within(Box((0, 0), (12, 5)))]), box
    return received


@pytest.mark.parametrize("holder", [0, 2])
def test_what_one_rank_holds_is_broadcast(ranks, holder):
    nbytes = 12 * 5 * 4
    expected = [0 if rank == holder else nbytes for rank in range(4)]
    assert ranks(collectively, boxes_of_one_holder, holder) == expected


def tells_of_failures(api: Any, on: int, size: tuple[int, int]) -> tuple[list[tuple[str, str]], str]:
    """(what this rank's caller is told, what all ranks are told then), where copies of a rank fail."""
    rank, full = dist.get_rank(), Box((0, 0), size)
    value = torch.ones(size)
    told: list[Failure] = []

    def part(_: str, box: Box) -> torch.Tensor:
        if rank == on:
            raise OSError("no memory")
        return part_of(value, full, box)

    have = Boxes(size, ((0, (full,)),))
    want = Boxes(size, tuple((other, (full,)) for other in range(4)))
    with Call("test", "reshard") as call:
        agreement = call.agree_on_wants({}, staging_bytes=200)
        memories = Memories(part, part, failed=told.append)
        move(call, agreement, {"w": Route(have, want, torch.float32)}, memories)
        for error, key in told:
            call.record(call.problem_of(error, key), error)
        with pytest.raises(RuntimeError) as caught:
            call.agree_on_outcome()
    return [(str(error), key) for error, key in told], str(caught.value)


@pytest.mark.parametrize("size", [(12, 5), (16, 4)], ids=["packed", "as it lies"])
@pytest.mark.parametrize("on", [0, 2])
@pytest.mark.parametrize("way", [(), (collectively,)], ids=["gloo", "collectives"])
def test_a_failed_copy_ends_no_exchange_whose_caller_is_told(ranks, way, on, size):
    told, texts = zip(*ranks(*way, tells_of_failures, on, size))
    assert [rank for rank in range(4) if told[rank] == [("no memory", "w")]] == [on]
    assert len(set(texts)) == 1
    assert f"rank {on}: OSError: no memory: w" in texts[0]


def without_all_gather(api: Any) -> str:
    """A backend without the collective of agreements."""

    def lacks(*_: Any, **__: Any) -> None:
        raise RuntimeError("Backend fictional does not support allgather_into_tensor_coalesced")

    model, full = build(kind=Wide), full_state(Wide)
    before = [parameter.detach().clone() for parameter in map(local_of, model.parameters())]
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with mock.patch.object(compat, "all_gather_rows", lacks), pytest.raises(transfer.TransferError) as seen:
        api.set_model_state_dict(model, full if dist.get_rank() == 0 else {}, options=options)
    assert all(map(torch.equal, map(local_of, model.parameters()), before))
    return str(seen.value)


def test_what_a_backend_lacks_is_told_before_any_byte_moves(ranks):
    for text in ranks(collectively, without_all_gather):
        assert "nothing was changed; no agreement" in text
        assert "Backend fictional does not support" in text


def fails_alone(api: Any) -> None:
    """A group of one rank: nobody else has to hear of it, and it is an error all the same."""
    model, full = build(kind=Wide), full_state(Wide)
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with mock.patch.object(source, "KEPT_BYTES", 0), pytest.raises(RuntimeError, match="the disk failed"):
        api.set_model_state_dict(model, Breaking(full, len(full) + 1), options=options)
    api.set_model_state_dict(model, full, options=options)
    check_values(model, full)
    state = {"a": torch.ones(4, 3)}
    layout = transfer.Layout((4, 3), transfer.Mesh((1,), (0,)), ((0, 1),))
    held = {"a": transfer.Held(state["a"], layout)}
    no_copy = mock.patch.object(Staging, "unpack", side_effect=OSError("no copy"))
    with no_copy, pytest.raises(RuntimeError, match="no copy"):
        transfer.gather(held, lambda _: torch.zeros(4, 3))
    assert torch.equal(transfer.gather(held, lambda _: torch.zeros(4, 3))["a"], state["a"])
    mesh = init_device_mesh("cpu", (1,))
    for shape in ((0, 4), (2, 4)):
        tensors = {"t": compat.as_dtensor(torch.ones(shape), mesh, [compat.Shard(0)], shape, (4, 1))}
        moved = transfer.reshard(tensors, (mesh, [compat.Shard(1)]))
        assert torch.equal(moved["t"].to_local(), torch.ones(shape))
    assert transfer.reshard({}, (mesh, [compat.Shard(1)])) == {}


def test_a_group_of_one_rank(ranks):
    ranks(collectively, fails_alone, world=1)


def uneven_get(api: Any) -> tuple[int, int]:
    """Five rows on four ranks: two, two, one, none."""
    rank = dist.get_rank()
    layout = transfer.Layout((5, 4), transfer.Mesh((4,), (0, 1, 2, 3)), ((0, 1),))
    full = value_of("w", (5, 4), torch.float32)
    box = layout.own_box(rank)
    held = {"w": transfer.Held(full[box.within(Box((0, 0), (5, 4)))].clone(), layout)}
    assert torch.equal(transfer.gather(held, lambda _: torch.zeros(5, 4))["w"], full)
    report = transfer.last_report()
    return report.bytes_sent, report.bytes_received


@pytest.mark.parametrize("function", [(uneven_get,), (collectively, uneven_get)], ids=["gloo", "collectives"])
def test_a_get_counts_no_padding(ranks, function):
    assert ranks(*function) == [(32, 48), (32, 48), (16, 64), (0, 80)]


def of_its_holder_alone(api: Any) -> int:
    """What nobody else wants stays where it is."""
    have = Boxes((8,), ((1, (Box((0,), (8,)),)),))
    memory = torch.arange(8.0)

    def whole_of(_: str, box: Box) -> torch.Tensor:
        return memory[box.offset[0] : box.offset[0] + box.size[0]]

    with Call("test", "reshard") as call:
        agreement = call.agree_on_wants({}, staging_bytes=200)
        move(call, agreement, {"w": Route(have, have, torch.float32)}, Memories(whole_of, whole_of))
        return call.tally.bytes_sent + call.tally.bytes_received


def test_what_nobody_else_wants_is_not_broadcast(ranks):
    assert ranks(collectively, of_its_holder_alone) == [0] * 4


def fails_before_the_backend(api: Any) -> str:
    """A copy fails on rank 1, and then the backend on all ranks, before they could hear of it."""
    model, full = build(kind=Wide), full_state(Wide)
    rank, real, calls = dist.get_rank(), dist.broadcast, []

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) > 6:
            raise RuntimeError("the backend failed")
        return real(*args, **kwargs)

    def unpack(*_: Any) -> None:
        if rank == 1:
            raise OSError("no copy")

    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    transfer.configure(staging_bytes=2**15)
    try:
        patches = mock.patch.object(dist, "broadcast", broken), mock.patch.object(Staging, "unpack", unpack)
        with patches[0], patches[1], pytest.raises(transfer.TransferError, match="backend failed") as seen:
            api.set_model_state_dict(model, full if rank == 0 else {}, options=options)
    finally:
        transfer.configure()
    cause = seen.value.__cause__
    return "\n".join(getattr(cause, "__notes__", [str(cause)]))


def test_what_failed_first_is_in_the_error_of_the_backend(ranks):
    for rank, text in enumerate(ranks(collectively, fails_before_the_backend)):
        assert ("OSError: no copy" in text) == (rank == 1), text


def refuse_to_be_read() -> None:
    raise ValueError("of another release")


class Unreadable:
    """A value that is sent, and cannot be read."""

    def __reduce__(self) -> Any:
        return refuse_to_be_read, ()


def unreadable(api: Any) -> str:
    call = Call("cannot count", "count", kind=CollectiveError)
    with pytest.raises(CollectiveError) as caught:
        call.all_gather_object("counting", Unreadable() if dist.get_rank() == 1 else 0)
    return str(caught.value)


def unreadable_answer(api: Any) -> str:
    call = Call("cannot count", "count", kind=CollectiveError)
    with pytest.raises(CollectiveError) as caught:
        call.gather_object("counting", 0, lambda _: Unreadable())
    assert isinstance(caught.value.__cause__, ValueError)
    return str(caught.value)


def test_an_answer_that_cannot_be_read_is_an_error_of_the_call_on_every_rank(ranks):
    for rank, text in enumerate(ranks(collectively, unreadable_answer)):
        assert "cannot count: 1 problem(s), nothing was changed." in text
        assert f"rank {rank}: ValueError: of another release" in text


def test_a_value_that_cannot_be_read_is_an_error_of_the_call_on_every_rank(ranks):
    for text in ranks(collectively, unreadable):
        assert "cannot count: 1 problem(s), nothing was changed." in text
        assert "ValueError: of another release" in text


def in_another_collective(api: Any, of_failed: str, of_others: str) -> str:
    with Call("cannot save", "save") as call:
        collectives: dict[str, Callable[[], Any]] = {
            "barrier": lambda: call.barrier("waiting", must_agree={"step": "1"}),
            "gather": lambda: call.gather_object("planning", call.rank, len),
            "scatter": lambda: call.scatter_object("sharing", call.rank, dict),
            "all_gather": lambda: call.all_gather_object("counting", "much" * 1000),
        }
        if call.rank == 1:
            with call.guard("loader"):
                raise ValueError("no state")
        with pytest.raises(RuntimeError) as caught:
            collectives[of_failed if call.rank == 1 else of_others]()
        # The next agreement is one of all again.
        assert dist.get_world_size() == sum(call_of_all().values())
    return str(caught.value)


def call_of_all() -> Any:
    with Call("cannot count", "count") as call:
        return call.all_gather_object("counting", 1)


@pytest.mark.parametrize("of_others", ["barrier", "gather", "scatter", "all_gather"])
@pytest.mark.parametrize("of_failed", ["barrier", "gather", "scatter", "all_gather"])
def test_a_rank_that_failed_may_be_in_another_collective_than_the_others(ranks, of_failed, of_others):
    expected = "cannot save: 1 problem(s), nothing was changed.\n  rank 1: ValueError: no state: loader"
    assert set(ranks(collectively, in_another_collective, of_failed, of_others)) == {expected}
