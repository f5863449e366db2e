"""Planted faults, for each rule of the emulator: a control fails where its fault is not seen."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import patience
import pytest
import torch
import torch.distributed as dist
from emulated import fakegpu, strict
from emulated.account import account
from emulated.fakegpu import native
from emulated.runner import wait_for_all

#: A hang that is expected is seen after so many seconds.
SOON = 1.5
#: Bytes of a buffer that nothing arrived in.
NOT_ARRIVED = 0xEE


def own_device() -> torch.device:
    return torch.device("fakegpu", fakegpu.current_device())


def full(value: float, size: int = 8) -> torch.Tensor:
    return torch.full((size,), float(value), device=own_device())


def rules(rank: int, world: int) -> strict.Rules:
    """Without c10d's checks, which come first in the usual calls."""
    return strict.Rules(dist.HashStore(), rank, world)


@contextlib.contextmanager
def violation(text: str) -> Iterator[None]:
    """The body breaks this rule, and no other."""
    strict.settle_device()
    before = list(account.violations)
    yield
    strict.settle_device()
    new = account.violations[len(before) :]
    account.violations[:] = before
    assert new, f"not seen: {text}"
    assert all(text in each for each in new), new


def error(text: str) -> contextlib.AbstractContextManager[object]:
    return pytest.raises(RuntimeError, match=text)


def is_poison(tensor: torch.Tensor) -> bool:
    data = native.host_alias(tensor).reshape(-1).view(torch.uint8)
    return bool(data.eq(NOT_ARRIVED).all())


def hang_soon() -> None:
    # Messages that do end need longer on a busy machine.
    strict.hang_after = SOON * patience.factor()


def forget_unwaited() -> None:
    strict.unwaited.clear()


def neighbours(rank: int, world: int) -> tuple[int, int]:
    return (rank + 1) % world, (rank - 1) % world


# --- what works ---


def collectives_give_their_values(rank: int, world: int) -> None:
    values = full(rank)
    dist.broadcast(values, 2)
    assert values.cpu().eq(2).all()
    dist.all_reduce(values.fill_(rank))
    assert values.cpu().eq(sum(range(world))).all()
    dist.all_reduce(values.fill_(rank), dist.ReduceOp.MAX)
    assert values.cpu().eq(world - 1).all()
    dist.reduce(values.fill_(rank), 1)
    assert values.cpu().eq(sum(range(world)) if rank == 1 else rank).all()
    rows = [full(-1) for _ in range(world)]
    dist.all_gather(rows, full(rank))
    assert [row.cpu().unique().tolist() for row in rows] == [[source] for source in range(world)]
    whole = full(-1, 8 * world)
    dist.all_gather_into_tensor(whole, full(rank))
    assert torch.equal(whole.cpu(), torch.arange(float(world)).repeat_interleave(8))
    part = full(-1)
    dist.reduce_scatter_tensor(part, whole)
    assert part.cpu().eq(rank * world).all()
    dist.reduce_scatter(part, [full(source) for source in range(world)], dist.ReduceOp.AVG)
    assert part.cpu().eq(rank).all()
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": source} for source in range(world)]
    dist.barrier()


def exchanges_give_their_values(rank: int, world: int) -> None:
    outputs, inputs = [full(-1) for _ in range(world)], [full(10 * rank + peer) for peer in range(world)]
    dist.all_to_all(outputs, inputs)
    assert [int(output[0]) for output in outputs] == [10 * peer + rank for peer in range(world)]
    output = full(-1, world)
    dist.all_to_all_single(output, torch.arange(float(world)).to(output.device) + 10 * rank)
    assert output.tolist() == [10 * peer + rank for peer in range(world)]
    dist.scatter(outputs[0], inputs if rank == 1 else None, 1)
    assert int(outputs[0][0]) == 10 + rank
    dist.gather(full(rank), outputs if rank == 2 else None, 2)
    assert rank != 2 or [int(output[0]) for output in outputs] == list(range(world))
    after, before = neighbours(rank, world)
    sent, received = full(rank), full(-1)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
    ):
        work.wait()
    assert received.cpu().eq(before).all()


def broadcasts_in_flight_end_in_order(rank: int, world: int) -> None:
    sources = [0, 2, 1, 0, 3]
    buffers = [full(10 * number + rank, 100 + number) for number in range(len(sources))]
    works = [dist.broadcast(buffer, source, async_op=True) for buffer, source in zip(buffers, sources)]
    assert all(rank == source or is_poison(buffer) for buffer, source in zip(buffers, sources))
    works[-1].wait()
    assert all(work.is_completed() for work in works)
    for work in reversed(works):
        work.wait()
    for number, (buffer, source) in enumerate(zip(buffers, sources)):
        assert buffer.cpu().eq(10 * number + source).all()


def a_part_is_gathered_from_its_place(rank: int, world: int) -> None:
    whole = full(-1, 8 * world)
    own = whole[8 * rank : 8 * (rank + 1)].fill_(rank)
    allocated, _ = fakegpu.memory_allocated(), fakegpu.reset_peak_memory_stats()
    dist.all_gather_into_tensor(whole, own)
    assert fakegpu.max_memory_allocated() == allocated
    assert torch.equal(whole.cpu(), torch.arange(float(world)).repeat_interleave(8))


def views_are_of_their_base(rank: int, world: int) -> None:
    base = torch.arange(6, dtype=torch.float32).to(own_device()).view(2, 3)
    assert (base + 1).t()[1:].cpu().tolist() == [[2, 5], [3, 6]]
    base.t()[0].fill_(9)
    assert base.cpu().tolist() == [[9, 1, 2], [9, 4, 5]]
    assert base.device == torch.device("fakegpu", rank)


# --- tensors ---


def a_tensor_of_the_host_is_refused(rank: int, world: int) -> None:
    with error("Tensors must be CUDA and dense|No backend type associated with device type cpu"):
        dist.broadcast(torch.zeros(4), 0)
    with error("Tensors must be CUDA and dense: allgather_base got cpu"):
        rules(rank, world).allgather_base(full(0, 8 * world), torch.zeros(8))


def tensors_of_two_devices_are_refused(rank: int, world: int) -> None:
    other = (rank + 1) % world
    with violation(f"memory on device {other}, where this process has set device {rank}"):
        foreign = torch.zeros(8, device=torch.device("fakegpu", other))
    with error(f"has tensors on fakegpu:{other} and fakegpu:{rank}"):
        rules(rank, world).allgather([foreign] * world, full(0))


def memory_on_the_device_of_another_rank_is_seen(rank: int, world: int) -> None:
    def in_a_thread() -> None:
        torch.zeros(8, device="fakegpu")

    if rank:  # rank 0 has the device on which every thread begins
        with violation(f"memory on device 0, where this process has set device {rank}"):
            thread = threading.Thread(target=in_a_thread)
            thread.start()
            thread.join()


def a_collective_on_another_device_is_seen(rank: int, world: int) -> None:
    native.set_home_device(-1)
    foreign = torch.zeros(8, device=torch.device("fakegpu", (rank + 1) % world))
    native.set_home_device(rank)
    with violation(f"broadcast of a tensor on {foreign.device}, where this process has set device {rank}"):
        dist.broadcast(foreign, 0)


def two_ranks_on_a_device_are_refused(rank: int, world: int) -> None:
    native.set_home_device(-1)
    native.set_device(rank // 2)
    with error("Duplicate GPU detected"):
        dist.all_reduce(torch.zeros(8, device=torch.device("fakegpu", rank // 2)))


def a_dtype_that_nccl_lacks_is_refused(rank: int, world: int) -> None:
    with error("Unconvertible NCCL type torch.uint16"):
        dist.broadcast(torch.zeros(4, dtype=torch.uint16, device=own_device()), 0)


def a_strided_tensor_is_refused(rank: int, world: int) -> None:
    strided = torch.zeros(4, 4, device=own_device()).t()[:, 1:]
    with error("Tensors must be contiguous"):
        dist.broadcast(strided, 0)


def an_output_of_another_size_is_refused(rank: int, world: int) -> None:
    with error("output of all_gather_into_tensor must be world size times its input"):
        rules(rank, world).allgather_base(full(0, 8 * world + 1), full(0))
    with error("input of reduce_scatter_tensor must be world size times its output"):
        rules(rank, world).reduce_scatter_base(full(0), full(0, 8), 0)
    with error("all_gather of different sizes"):
        rules(rank, world).allgather([full(0, 4)] * world, full(0))


def a_part_elsewhere_in_the_output_is_seen(rank: int, world: int) -> None:
    whole = full(rank, 8 * world)
    start = 8 * rank + (4 if rank == 0 else -4)
    text = "the input overlaps the output, but is not at its place in it"
    with violation(text), error(text):
        dist.all_gather_into_tensor(whole, whole[start : start + 8])


# --- time ---


def what_has_not_arrived_is_poison(rank: int, world: int) -> None:
    received = full(rank)
    work = dist.broadcast(received, 0, async_op=True)
    early = received.cpu()
    work.wait()
    assert received.cpu().eq(0).all()
    assert rank == 0 or not early.eq(0).any()
    gathered, scalar = full(rank, 8 * world), full(rank, 1)[0]
    works = [
        dist.all_gather_into_tensor(gathered, full(rank), async_op=True),
        dist.all_reduce(scalar, async_op=True),
    ]
    assert is_poison(gathered)
    assert is_poison(scalar)
    for work in works:
        work.wait()


def what_is_sent_may_not_change(rank: int, world: int) -> None:
    buffer = full(rank)
    dist.barrier()
    peer = rank ^ 1
    works = dist.batch_isend_irecv([dist.P2POp(dist.irecv if rank & 1 else dist.isend, buffer, peer)])
    text = "what it sends was changed between its post and its wait"
    with contextlib.nullcontext() if rank & 1 else violation(text):
        if not rank & 1:
            buffer.fill_(7)
        for work in works:
            work.wait()
    whole = full(-1, 8 * world)
    work = dist.all_gather_into_tensor(whole, buffer, async_op=True)
    with violation(text):
        buffer.fill_(8)
        work.wait()


def what_is_received_may_not_be_written(rank: int, world: int) -> None:
    buffer = full(rank)
    work = dist.broadcast(buffer, 0, async_op=True)
    with contextlib.nullcontext() if rank == 0 else violation("what it receives into was written between"):
        if rank:
            buffer[3:5].fill_(7)
        work.wait()


def work_that_nobody_waits_for_is_seen(rank: int, world: int) -> None:
    work = dist.broadcast(full(rank), 0, async_op=True)
    with violation("never waited for: broadcast of 32 bytes from 0"):
        strict.settle()
    work.wait()
    assert not strict.unwaited


def a_part_of_a_batch_is_not_waited_for(rank: int, world: int) -> None:
    group = dist.distributed_c10d._get_default_group()
    device = own_device()
    with dist.distributed_c10d._coalescing_manager(group, device, async_ops=True) as batch:
        work = dist.broadcast(full(rank), 0, async_op=True)
        with violation("wait for a single operation of a batch"):
            work.wait()
    for work in batch.works:
        work.wait()


def a_late_copy_to_the_host_is_poison(rank: int, world: int) -> None:
    host = torch.empty(3, pin_memory=True)
    assert host.is_pinned()
    host.copy_(full(1, 3), non_blocking=True)
    assert is_poison(host)
    fakegpu.synchronize()
    assert host.eq(1).all()
    strided = torch.empty(4, 4, pin_memory=True).t()[1:3]
    strided.copy_(full(2, 8).view(2, 4), non_blocking=True)
    assert is_poison(strided.contiguous())
    fakegpu.synchronize()
    assert strided.eq(2).all()


def a_late_copy_to_the_device_needs_its_source(rank: int, world: int) -> None:
    host, copy = torch.ones(3, pin_memory=True), full(0, 3)
    with violation("pinned memory was changed before its non_blocking copy to the device had ended"):
        copy.copy_(host, non_blocking=True)
        host.fill_(2)


# --- communicators and ranks ---


def a_first_use_by_some_ranks_hangs(rank: int, world: int) -> None:
    hang_soon()
    text = "first use of a communicator by a part of its ranks"
    if rank < 2:
        with violation(f"{text}: not all of ranks [0, 1, 2, 3] came"), error(text):
            dist.batch_isend_irecv([dist.P2POp(dist.irecv if rank else dist.isend, full(0), 1 - rank)])
    wait_for_all(world)


def unlike_collectives_are_seen(rank: int, world: int) -> None:
    with violation("ranks are in different collectives"), error("ranks are in different collectives"):
        dist.broadcast(full(0), 0) if rank else dist.all_reduce(full(0))


def unlike_sizes_are_seen(rank: int, world: int) -> None:
    with violation("ranks are in different collectives"), error("ranks are in different collectives"):
        dist.broadcast(full(0, 8 + (rank == 2)), 0)


def unlike_messages_are_seen(rank: int, world: int) -> None:
    dist.barrier()
    if rank == 0:
        # Posted within: the sizes may meet before this thread goes on.
        with violation("a message to rank 1 of group 0"), error("of 32 bytes meets a receive of 36"):
            dist.batch_isend_irecv([dist.P2POp(dist.isend, full(0), 1)])[0].wait()
    if rank == 1:
        hang_soon()
        works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, full(0, 9), 0)])
        with violation("messages did not end in"), error("messages hangs"):
            works[0].wait()
        forget_unwaited()
    wait_for_all(world)


def first_messages_that_are_batched_unlike_are_seen(rank: int, world: int) -> None:
    dist.barrier()
    hang_soon()
    if rank < 2:
        send = dist.P2POp(dist.isend, full(1), 1 - rank)
        receive = dist.P2POp(dist.irecv, full(0), 1 - rank)
        with contextlib.suppress(RuntimeError):
            for batch in ([receive], [send]) if rank == 0 else ([send, receive],):
                for work in dist.batch_isend_irecv(batch):
                    work.wait()
        if rank == 1:
            assert any("in one batch on one side" in each for each in account.violations)
        account.violations.clear()
        forget_unwaited()
    wait_for_all(world)


def a_send_waits_for_its_receive(rank: int, world: int) -> None:
    dist.barrier()
    hang_soon()
    if rank < 2:
        send = dist.batch_isend_irecv([dist.P2POp(dist.isend, full(1), 1 - rank)])
        receive = dist.batch_isend_irecv([dist.P2POp(dist.irecv, full(0), 1 - rank)])
        with violation("messages did not end in"), error("messages hangs"):
            for work in (*send, *receive):
                work.wait()
        forget_unwaited()
    wait_for_all(world)


def a_message_outside_of_a_batch_is_seen(rank: int, world: int) -> None:
    with violation("outside of a batch: a communicator for the ranks"):
        (dist.recv if rank & 1 else dist.send)(full(rank), rank ^ 1)


def a_receive_from_oneself_needs_its_send(rank: int, world: int) -> None:
    sent, received = full(rank), full(-1)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, rank), dist.P2POp(dist.irecv, received, rank)]
    ):
        work.wait()
    assert received.cpu().eq(rank).all()
    with violation("a receive from the rank itself"), error("without its send in the batch"):
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, received, rank)]):
            work.wait()


# --- memory and counts ---


def memory_has_a_limit(rank: int, world: int) -> None:
    allocated = fakegpu.memory_allocated()
    fakegpu.set_per_process_memory_fraction((allocated + 2**20) / fakegpu.TOTAL_BYTES)
    fits = torch.zeros(2**19, dtype=torch.uint8, device="fakegpu")
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(2**20, dtype=torch.uint8, device="fakegpu")
    del fits
    torch.zeros(2**20, dtype=torch.uint8, device="fakegpu")
    assert fakegpu.memory_allocated() == allocated
    assert fakegpu.max_memory_allocated() == allocated + 2**20


def new_and_freed_memory_is_not_zero(rank: int, world: int) -> None:
    new = torch.empty(512, dtype=torch.uint8, device="fakegpu")
    assert new.cpu().ne(0).all()


def a_list_of_outputs_costs_another_one(rank: int, world: int) -> None:
    rows, own = [full(-1, 2**18) for _ in range(world)], full(rank, 2**18)
    fakegpu.reset_peak_memory_stats()
    dist.all_gather(rows, own)
    assert fakegpu.max_memory_allocated() - fakegpu.memory_allocated() >= world * 2**20


def communicators_are_counted(rank: int, world: int) -> None:
    assert not account.communicators
    dist.barrier()
    pair = dist.new_group([0, 1], backend="strict")
    dist.new_group([2, 3], backend="strict")
    assert len(account.communicators) == 1
    if rank < 2:
        dist.all_reduce(full(0), group=pair)
    assert len(account.communicators) == 1 + (rank < 2)


def traffic_is_counted(rank: int, world: int) -> None:
    dist.broadcast(full(0), 0)
    dist.all_gather_into_tensor(full(0, 8 * world), full(0))
    assert dict(account.sent) == {"broadcast": 32 if rank == 0 else 0, "allgather_base": 32}
    assert not account.sends_to
    assert not account.receives_from
    dist.gather(full(rank), [full(0) for _ in range(world)] if rank == 1 else None, 1)
    assert peers() == ((0, 3) if rank == 1 else (1, 0))
    account.reset_traffic()
    dist.scatter(full(0), [full(0) for _ in range(world)] if rank == 1 else None, 1)
    assert peers() == ((3, 0) if rank == 1 else (0, 1))
    account.reset_traffic()
    after, before = neighbours(rank, world)
    for _ in range(2):
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, full(0), after), dist.P2POp(dist.irecv, full(0), before)]
        ):
            work.wait()
    assert peers() == (1, 1)
    assert dict(account.sent) == {"messages": 64}
    dist.all_to_all([full(0) for _ in range(world)], [full(0) for _ in range(world)])
    assert peers() == (3, 3)
    assert account.sent["alltoall"] == 96


def peers() -> tuple[int, int]:
    return len(account.sends_to), len(account.receives_from)
