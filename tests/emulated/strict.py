"""The process-group backend "strict": gloo below, NCCL's rules above, for the emulated accelerator's tensors.

- Tensors are on the communicator's device, contiguous, of NCCL's dtypes.
- A communicator has one queue. Operations run in its order, at some later time, in a thread.
- What is received lands in `wait()`. Until then the buffer has a pattern, and nobody may write into it.
- What is sent is read when its turn comes, and may not change from the post to the wait.
- A send ends when its receive was posted; messages of one batch go and come together.
- Two ranks connect at their first messages: those to and from a peer are in one batch on both sides, or on
  none (NCCL 2.28 ends with "Message truncated" otherwise).
- A communicator is made at its first use, by all ranks of its group. A message outside of a batch needs one
  for its pair of ranks: a violation.
- Two ranks of a communicator may not have the same device.
- All ranks are in the same collective, of the same size.
- Every operation is waited for.

It never repairs a call: what NCCL refuses is an error, and what NCCL would do wrong or at a high price a
violation in the account. `wait()` blocks the host, as with TORCH_NCCL_BLOCKING_WAIT=1; there are no streams.
"""

from __future__ import annotations

import itertools
import queue
import random
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Optional

import torch
import torch.distributed as dist
from emulated.account import account
from emulated.fakegpu import native

#: After so many seconds a rank that waits hangs.
hang_after = 60.0
#: Of the operations, one in so many runs late, by up to so many seconds.
LATE_ONE_IN, LATE_SECONDS = 8, 0.004
#: Of torch 2.6's map to ncclDataType; complex numbers are taken as pairs.
DTYPES = {
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e5m2, torch.float8_e4m3fn),
}
#: By the numbers of c10d's ReduceOp. Gloo has no average: the sum is divided.
SUM, AVERAGE, PRODUCT, MIN, MAX = range(5)
GLOO_REDUCTIONS = {
    SUM: dist.ReduceOp.SUM,
    AVERAGE: dist.ReduceOp.SUM,
    PRODUCT: dist.ReduceOp.PRODUCT,
    MIN: dist.ReduceOp.MIN,
    MAX: dist.ReduceOp.MAX,
}

#: A tensor of the device, and on the host what it gets.
Landing = tuple[torch.Tensor, torch.Tensor]
#: What an operation does in the communicator's thread.
Body = Callable[["Communicator"], list[Landing]]


@dataclass(eq=False)
class Operation:
    """An entry of a communicator's queue, for which its caller waits."""

    kind: str
    run: Body
    reads: list[torch.Tensor]
    writes: list[torch.Tensor]
    #: Compared between ranks; none for messages.
    signature: Optional[str] = None
    #: Held until the end, as memory that NCCL's process group allocates.
    held: list[torch.Tensor] = field(default_factory=list)
    is_waited_for: bool = False

    def __post_init__(self) -> None:
        self.ended = threading.Event()
        self.error: Optional[BaseException] = None
        self.landings: list[Landing] = []
        self.checksums = [native.checksum(tensor) for tensor in self.reads]
        for tensor in self.writes:
            native.poison(tensor)
        self.patterns = [native.checksum(tensor) for tensor in self.writes]
        unwaited.add(self)

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def wait(self) -> None:
        if self.is_waited_for:
            return
        self.is_waited_for = True
        if not self.ended.wait(hang_after):
            account.violation(f"{self} did not end in {hang_after:.0f} s: it hangs")
            raise RuntimeError(f"strict: {self} hangs")
        unwaited.discard(self)
        if self.error is not None:
            raise RuntimeError(str(self.error)) from self.error
        self.check_buffers()
        for target, data in self.landings:
            native.host_alias(target).copy_(data.view(target.shape))
        self.reads, self.writes, self.landings, self.held = [], [], [], []

    def check_buffers(self) -> None:
        if [native.checksum(tensor) for tensor in self.reads] != self.checksums:
            account.violation(f"{self}: what it sends was changed between its post and its wait")
        if [native.checksum(tensor) for tensor in self.writes] != self.patterns:
            account.violation(f"{self}: what it receives into was written between its post and its wait")

    def __str__(self) -> str:
        return self.signature or self.kind


#: Of this process.
unwaited: set[Operation] = set()


class Several:
    """Operations for which the caller waits at once."""

    def __init__(self, operations: Sequence[Any] = ()) -> None:
        self.operations = operations

    def wait(self) -> None:
        for operation in self.operations:
            operation.wait()

    def is_completed(self) -> bool:
        return all(operation.is_completed() for operation in self.operations)


class InBatch:
    """What a call within a batch gives: the batch alone can be waited for."""

    def wait(self) -> None:
        account.violation("wait for a single operation of a batch")

    def is_completed(self) -> bool:
        return False


class Communicator:
    """A queue with its thread, and gloo below it."""

    def __init__(self, name: str, store: dist.Store, group_rank: int, ranks: list[int], device: int) -> None:
        """`ranks`: those of the group that are in it, by their numbers in the group."""
        self.name, self.ranks = name, ranks
        self.rank, self.size = ranks.index(group_rank), len(ranks)
        self.collectives = 0
        #: Peers that there were messages with.
        self.connected: set[int] = set()
        self.meet(store, device)
        account.communicators.append(name)
        timeout = timedelta(seconds=hang_after)
        self.gloo = dist.ProcessGroupGloo(store, self.rank, self.size, timeout=timeout)
        self.queue: queue.SimpleQueue[Operation] = queue.SimpleQueue()
        self.random = random.Random(f"{name} {group_rank}")
        threading.Thread(target=self.work, daemon=True).start()

    def meet(self, store: dist.Store, device: int) -> None:
        """Wait for all ranks, with devices of their own."""
        store.set(f"device {self.rank}", str(device))
        store.add("ranks", 1)
        until = time.monotonic() + hang_after
        while store.add("ranks", 0) < self.size:
            if time.monotonic() > until:
                ranks = f"not all of ranks {self.ranks} came to {self.name}"
                raise refused(f"first use of a communicator by a part of its ranks: {ranks}")
            time.sleep(0.001)
        devices = [store.get(f"device {rank}").decode() for rank in range(self.size)]
        if len(set(devices)) < self.size:
            raise RuntimeError(f"strict: Duplicate GPU detected: ranks {self.ranks} have devices {devices}")

    def put(self, operation: Operation) -> Operation:
        self.queue.put(operation)
        return operation

    def work(self) -> None:
        while True:
            operation = self.queue.get()
            try:
                if self.random.randrange(LATE_ONE_IN) == 0:
                    time.sleep(self.random.random() * LATE_SECONDS)
                if operation.signature is not None:
                    self.compare(operation.signature)
                operation.landings = operation.run(self)
            except BaseException as error:
                operation.error = error
            operation.ended.set()
            del operation

    def compare(self, signature: str) -> None:
        """All ranks are in the same collective."""
        self.collectives += 1
        own = torch.tensor([self.collectives, zlib.crc32(signature.encode())], device="cpu")
        rows = [torch.zeros_like(own) for _ in self.ranks]
        self.gloo.allgather([rows], [own]).wait()
        if any(not torch.equal(row, own) for row in rows):
            text = f"ranks are in different collectives of {self.name}"
            raise refused(f"{text}, this one in number {self.collectives}: {signature}")

    def reduced(self, tensor: torch.Tensor, reduction: int) -> torch.Tensor:
        if tensor.dtype in (torch.float16, torch.bfloat16):
            return self.reduced(tensor.float(), reduction).to(tensor.dtype)
        if tensor.dtype is torch.bool:
            return self.reduced(tensor.to(torch.uint8), MAX if reduction == SUM else reduction).to(torch.bool)
        options = dist.AllreduceOptions()
        options.reduceOp = GLOO_REDUCTIONS[reduction]
        self.gloo.allreduce([tensor], options).wait()
        return tensor.div_(self.size) if reduction == AVERAGE else tensor

    def exchanged(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> list[Landing]:
        """Send and receive at once; a send goes out when the size of its receive has come (tag 1)."""
        landings = [(target, host_bytes(target.nbytes)) for target, _ in receives]
        works, asked = [], []
        both = {peer for _, peer in sends} & {peer for _, peer in receives}
        own_sends = [tensor for tensor, peer in sends if peer == self.rank]
        for (target, peer), (_, data) in zip(receives, landings):
            if peer == self.rank:
                if not own_sends:
                    raise refused("a receive from the rank itself, without its send in the batch")
                data.copy_(to_host(own_sends.pop(0)))
            else:
                size = torch.tensor([target.nbytes, peer in both], device="cpu")
                works += [self.gloo.send([size], peer, 1), self.gloo.recv([data], peer, 2)]
        for tensor, peer in sends:
            if peer != self.rank:
                size = torch.zeros(2, dtype=torch.int64, device="cpu")
                asked.append((tensor, peer, size, self.gloo.recv([size], peer, 1)))
        for tensor, peer, size, work in asked:
            work.wait()
            nbytes, is_both = size.tolist()
            if nbytes != tensor.nbytes:
                sizes = f"{tensor.nbytes} bytes meets a receive of {nbytes}"
                raise refused(f"a message to rank {peer} of {self.name} of {sizes}")
            if peer not in self.connected and is_both != (peer in both):
                raise refused(
                    f"first messages to and from rank {peer} of {self.name}: in one batch on one side"
                )
            works.append(self.gloo.send([to_host(tensor)], peer, 2))
        for work in works:
            work.wait()
        self.connected.update(peer for _, peer in (*sends, *receives))
        return [(target, data.view(target.dtype)) for target, data in landings]


def refused(text: str) -> RuntimeError:
    """The error of a call that NCCL would take, and do wrong: a violation even where the error is caught."""
    account.violation(text)
    return RuntimeError(f"strict: {text}")


def host_bytes(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu")


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the bytes."""
    flat = native.host_alias(tensor).clone().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else host_bytes(0)


def span(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    (first_start, first_end), (second_start, second_end) = span(first), span(second)
    return max(first_start, second_start) < min(first_end, second_end)


@dataclass
class Message:
    kind: str
    tensor: torch.Tensor
    peer: int


class Rules:
    """The backend of one process group: c10d's calls by name, with ranks by their numbers in the group."""

    numbers = itertools.count()

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.name = f"group {next(self.numbers)}"
        self.communicators: dict[tuple[int, ...], Communicator] = {}
        #: Messages and collectives since the start of a batch.
        self.batch: Optional[list[Any]] = None

    def communicator(self, device: int, pair: tuple[int, ...] = ()) -> Communicator:
        """The one of all ranks for this device, or of two ranks."""
        key = (device, *sorted(pair))
        if key not in self.communicators:
            ranks = sorted(pair) or list(range(self.size))
            # Ranks that make them in different orders, or with other devices, do not meet.
            number = sum(known.ranks == ranks for known in self.communicators.values())
            store = dist.PrefixStore(f"ranks {ranks}, {number}/", self.store)
            name = f"{self.name}, ranks {ranks}, {number}"
            self.communicators[key] = Communicator(name, store, self.rank, ranks, device)
        return self.communicators[key]

    def check(self, kind: str, *tensors: torch.Tensor) -> None:
        first, home = tensors[0].device, native.home_device()
        for tensor in tensors:
            if tensor.device.type != "fakegpu":
                raise RuntimeError(f"strict: Tensors must be CUDA and dense: {kind} got {tensor.device}")
            if tensor.device != first:
                raise RuntimeError(f"strict: {kind} has tensors on {first} and {tensor.device}")
            if not tensor.is_contiguous():
                raise RuntimeError(f"strict: Tensors must be contiguous: {kind}")
            if tensor.dtype not in DTYPES and not tensor.is_complex():
                raise RuntimeError(f"strict: Unconvertible NCCL type {tensor.dtype}: {kind}")
        if home not in (-1, first.index):
            account.violation(f"{kind} of a tensor on {first}, where this process has set device {home}")

    def collective(
        self,
        kind: str,
        run: Body,
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        sent: int,
        signature: str,
        held: Sequence[torch.Tensor] = (),
    ) -> Any:
        """Put it into the queue of the communicator, or into the batch that was begun."""

        def post() -> Operation:
            communicator = self.communicator((*reads, *writes)[0].device.index)
            text = f"{kind} {signature}"
            return communicator.put(Operation(kind, run, list(reads), list(writes), text, list(held)))

        account.sent[kind] += sent
        if self.batch is None:
            return post()
        self.batch.append(post)
        return InBatch()

    # --- collectives ---

    def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        self.check("broadcast", tensor)
        is_root = self.rank == root

        def run(communicator: Communicator) -> list[Landing]:
            data = to_host(tensor) if is_root else host_bytes(tensor.nbytes)
            if data.numel():
                communicator.gloo.broadcast(data, root).wait()
            return [] if is_root else [(tensor, data.view(tensor.dtype))]

        return self.collective(
            "broadcast",
            run,
            reads=[tensor] if is_root else [],
            writes=[] if is_root else [tensor],
            sent=tensor.nbytes if is_root else 0,
            signature=f"of {tensor.nbytes} bytes from {root}",
        )

    def allreduce(self, tensor: torch.Tensor, reduction: int, kind: str = "allreduce") -> Any:
        self.check(kind, tensor)
        data = native.host_alias(tensor).clone()
        return self.collective(
            kind,
            lambda communicator: [(tensor, communicator.reduced(data, reduction))],
            writes=[tensor],
            sent=tensor.nbytes,
            signature=f"of {tensor.numel()} {tensor.dtype}, reduction {reduction}",
        )

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], reduction: int) -> Any:
        return Several([self.allreduce(tensor, reduction) for tensor in tensors])

    def barrier(self) -> Any:
        device = torch.device("fakegpu", native.current_device())
        return self.allreduce(torch.zeros(1, device=device), SUM, "barrier")

    def reduce(self, tensor: torch.Tensor, root: int, reduction: int) -> Any:
        self.check("reduce", tensor)
        is_root = self.rank == root
        data = native.host_alias(tensor).clone()

        def run(communicator: Communicator) -> list[Landing]:
            result = communicator.reduced(data, reduction)
            return [(tensor, result)] if is_root else []

        return self.collective(
            "reduce",
            run,
            reads=[] if is_root else [tensor],
            writes=[tensor] if is_root else [],
            sent=tensor.nbytes,
            signature=f"of {tensor.numel()} {tensor.dtype}, reduction {reduction}, to {root}",
        )

    def allgather_base(self, output: torch.Tensor, own: torch.Tensor) -> Any:
        """One contiguous output; a rank's own part may be sent from its place in it."""
        self.check("allgather_base", output, own)
        if output.nbytes != own.nbytes * self.size or output.dtype != own.dtype:
            raise RuntimeError("strict: output of all_gather_into_tensor must be world size times its input")
        is_in_place = output.data_ptr() + self.rank * own.nbytes == own.data_ptr()
        if overlap(output, own) and not is_in_place:
            raise refused("allgather_base: the input overlaps the output, but is not at its place in it")
        return self.gathered("allgather_base", [output], own, copied=is_in_place)

    def allgather(self, outputs: Sequence[torch.Tensor], own: torch.Tensor) -> Any:
        """A list of outputs, which costs a contiguous one and copies out of it."""
        self.check("allgather", *outputs, own)
        if {tensor.nbytes for tensor in outputs} != {own.nbytes}:
            raise RuntimeError("strict: all_gather of different sizes")
        held = [torch.empty(own.nbytes * self.size, dtype=torch.uint8, device=own.device)]
        return self.gathered("allgather", outputs, own, held=held)

    def gathered(
        self,
        kind: str,
        outputs: Sequence[torch.Tensor],
        own: torch.Tensor,
        *,
        copied: bool = False,
        held: Sequence[torch.Tensor] = (),
    ) -> Any:
        """`copied`: the input is read now, for its place gets the pattern of what has not arrived."""
        early = to_host(own) if copied else None

        def run(communicator: Communicator) -> list[Landing]:
            data = to_host(own) if early is None else early
            flat = host_bytes(own.nbytes * self.size)
            if data.numel():
                communicator.gloo.allgather([list(flat.chunk(self.size))], [data]).wait()
            parts = flat.chunk(len(outputs)) if data.numel() else [flat] * len(outputs)
            return [(output, part.view(output.dtype)) for output, part in zip(outputs, parts)]

        return self.collective(
            kind,
            run,
            reads=[] if copied else [own],
            writes=outputs,
            sent=own.nbytes,
            signature=f"of {own.nbytes} bytes",
            held=held,
        )

    def allgather_base_coalesced(self, outputs: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> Any:
        return Several([self.allgather_base(*pair) for pair in zip(outputs, own)])

    def reduce_scatter_base(self, output: torch.Tensor, whole: torch.Tensor, reduction: int) -> Any:
        self.check("reduce_scatter_base", output, whole)
        if whole.nbytes != output.nbytes * self.size or whole.dtype != output.dtype:
            raise RuntimeError("strict: input of reduce_scatter_tensor must be world size times its output")
        is_in_place = whole.data_ptr() + self.rank * output.nbytes == output.data_ptr()
        if overlap(output, whole) and not is_in_place:
            raise refused("reduce_scatter_base: the output overlaps the input, but is not at its place in it")
        early = native.host_alias(whole).clone() if is_in_place else None

        def run(communicator: Communicator) -> list[Landing]:
            data = native.host_alias(whole).clone() if early is None else early
            return [(output, communicator.reduced(data, reduction).view(-1).chunk(self.size)[self.rank])]

        return self.collective(
            "reduce_scatter_base",
            run,
            reads=[] if is_in_place else [whole],
            writes=[output],
            sent=whole.nbytes,
            signature=f"of {whole.numel()} {whole.dtype}, reduction {reduction}",
        )

    def reduce_scatter(self, output: torch.Tensor, parts: Sequence[torch.Tensor], reduction: int) -> Any:
        """A list of inputs is copied into a contiguous one."""
        self.check("reduce_scatter", output, *parts)
        return self.reduce_scatter_base(output, torch.cat([part.reshape(-1) for part in parts]), reduction)

    def reduce_scatter_base_coalesced(
        self, outputs: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor], reduction: int
    ) -> Any:
        return Several([self.reduce_scatter_base(*pair, reduction) for pair in zip(outputs, wholes)])

    # --- messages, and the collectives that NCCL makes of them ---

    def start_coalescing(self) -> None:
        self.batch = []

    def end_coalescing(self) -> Any:
        batch, self.batch = self.batch or [], None
        messages = [entry for entry in batch if isinstance(entry, Message)]
        operations = [entry() for entry in batch if not isinstance(entry, Message)]
        return Several([*operations, *([self.post("messages", messages)] if messages else [])])

    def send(self, tensor: torch.Tensor, peer: int) -> Any:
        return self.message(Message("send", tensor, peer))

    def recv(self, tensor: torch.Tensor, peer: int) -> Any:
        return self.message(Message("recv", tensor, peer))

    def message(self, message: Message) -> Any:
        self.check(message.kind, message.tensor)
        if self.batch is not None:
            self.batch.append(message)
            return InBatch()
        pair = self.rank, message.peer
        text = f"{message.kind} outside of a batch"
        account.violation(f"{text}: a communicator for the ranks {pair} of {self.name}")
        return self.post("messages", [message], pair=pair)

    def post(
        self,
        kind: str,
        messages: Sequence[Message],
        pair: tuple[int, ...] = (),
        signature: Optional[str] = None,
    ) -> Operation:
        communicator = self.communicator(messages[0].tensor.device.index, pair)
        sends, receives = (
            [(each.tensor, communicator.ranks.index(each.peer)) for each in messages if each.kind == wanted]
            for wanted in ("send", "recv")
        )
        for tensor, peer in sends:
            if peer != communicator.rank:
                account.sends_to.add((communicator.name, peer))
                account.sent[kind] += tensor.nbytes
        others = {peer for _, peer in receives} - {communicator.rank}
        account.receives_from.update((communicator.name, peer) for peer in others)
        operation = Operation(
            kind,
            lambda communicator: communicator.exchanged(sends, receives),
            [tensor for tensor, _ in sends],
            [tensor for tensor, _ in receives],
            signature and f"{kind} {signature}",
        )
        return communicator.put(operation)

    def scatter(self, output: torch.Tensor, parts: Sequence[torch.Tensor], root: int) -> Any:
        self.check("scatter", output, *parts)
        messages = [Message("recv", output, root)]
        if self.rank == root:
            messages += [Message("send", part, rank) for rank, part in enumerate(parts)]
        return self.post("scatter", messages, signature=f"of {output.nbytes} bytes from {root}")

    def gather(self, outputs: Sequence[torch.Tensor], own: torch.Tensor, root: int) -> Any:
        self.check("gather", own, *outputs)
        messages = [Message("send", own, root)]
        if self.rank == root:
            messages += [Message("recv", output, rank) for rank, output in enumerate(outputs)]
        return self.post("gather", messages, signature=f"of {own.nbytes} bytes to {root}")

    def alltoall(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Any:
        self.check("alltoall", *outputs, *inputs)
        messages = [Message("send", tensor, rank) for rank, tensor in enumerate(inputs)]
        messages += [Message("recv", tensor, rank) for rank, tensor in enumerate(outputs)]
        return self.post("alltoall", messages, signature="")

    def alltoall_base(
        self, output: torch.Tensor, given: torch.Tensor, output_rows: list[int], input_rows: list[int]
    ) -> Any:
        outputs, inputs = (
            tensor.split(rows) if rows else tensor.chunk(self.size)
            for tensor, rows in ((output, output_rows), (given, input_rows))
        )
        return self.alltoall(outputs, inputs)


def make_backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    return native.Backend(rank, size, Rules(store, rank, size))


def batched(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """Torch 2.7's `batch_isend_irecv`: a batch on every backend that can; 2.6 makes one for CUDA alone."""

    def batch_isend_irecv(p2p_op_list: Sequence[dist.P2POp]) -> Any:
        c10d = dist.distributed_c10d
        device = p2p_op_list[0].tensor.device
        if device.type != "fakegpu":
            return torchs(p2p_op_list)
        c10d._check_p2p_op_list(p2p_op_list)
        with c10d._coalescing_manager(p2p_op_list[0].group, device, async_ops=True) as manager:
            for each in p2p_op_list:
                each.op(each.tensor, each.peer, each.group, each.tag)
        return manager.works

    return batch_isend_irecv


def settle_device() -> None:
    """End late copies; what the device saw goes to the account."""
    native.synchronize()
    account.violations += native.take_violations()


def settle() -> None:
    """What is still open at the end of a case."""
    settle_device()
    for operation in unwaited:
        account.violation(f"never waited for: {operation}")
