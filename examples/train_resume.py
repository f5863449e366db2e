"""A training that may be killed at any moment: started again, it goes on from its newest good step.

    torchrun --nproc-per-node 4 examples/train_resume.py

With `--root FOLDER`, start it again after a kill: on the same number of ranks for the same losses to the last
bit, or on another number, for the same learning rates and order of the data. CPU or CUDA.
"""

# %%
import argparse
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_dcp_backport.checkpoint import CheckpointHandler, FSDPCheckpointManager, SaveSignals

# %% [markdown]
# ## A small decoder

# %%
VOCABULARY, WIDTH, LENGTH, BATCH = 97, 32, 12, 12


class Block(nn.Module):
    """A decoder's block: attention over what came before, and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        x = x + self.dropout(self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)))
        y = self.norms[1](x)
        return x + self.dropout(self.down(nn.functional.silu(self.gate(y)) * self.up(y)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


# %% [markdown]
# ## Data with a state
#
# Whatever has `state_dict` and `load_state_dict` can be saved with a step. This one says which batch comes
# next.


# %%
class Batches:
    """Batches in a random order, a new one each epoch; its state is the same on every rank."""

    def __init__(self, samples: torch.Tensor) -> None:
        self.samples = samples
        self.epoch = self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]

    def next(self) -> torch.Tensor:
        if self.position + BATCH > len(self.samples):
            self.epoch, self.position = self.epoch + 1, 0
        order = torch.randperm(len(self.samples), generator=torch.Generator().manual_seed(self.epoch))
        batch = order[self.position : self.position + BATCH]
        self.position += BATCH
        return batch


# %% [markdown]
# ## FSDP2 or DDP
#
# The manager takes either.


# %%
def parallel(model: nn.Module) -> Any:
    """Under FSDP2 where it trains on the CPU, else under DDP."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8):
        # DDP makes its buckets anew after the first step, and the last bit of a sum over more than two ranks
        # depends on where in a bucket it is: after a resume it would be another one. This keeps the buckets.
        return DistributedDataParallel(model, find_unused_parameters=True)
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


# %% [markdown]
# ## The training
#
# These are the lines to copy: a manager of the model, the optimizer and the schedule; a handler of the
# manager and of the data; `load_checkpoint` before the first step, and `save_checkpoint` after some.
# `SaveSignals` asks for one more save when the job is about to end.


# %%
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", help="where the steps are; by default a new folder")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=5)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    root = [args.root or tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(root)  # every rank sees this folder

    torch.manual_seed(0)
    model = parallel(Model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    samples = torch.randint(0, VOCABULARY, (60, LENGTH), generator=torch.Generator().manual_seed(1))
    batches = Batches(samples)
    torch.manual_seed(100 + rank)  # dropout differs between ranks

    manager = FSDPCheckpointManager(model, optimizer, schedule)
    handler = CheckpointHandler(manager, batches, default_local_dir=root[0], max_ckpt_to_keep=2)
    first = handler.load_checkpoint()  # 0 in a new root
    with SaveSignals() as signals:
        for step in range(first + 1, args.steps + 1):
            batch = batches.next()
            tokens = samples[batch[rank::world]].to(device)
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rate = schedule.get_last_lr()[0]
            schedule.step()
            dist.all_reduce(mean := loss.detach() / world)
            if rank == 0:
                print(f"step {step} loss {mean.item():.9f} rate {rate:.9f} data {batch.tolist()}", flush=True)
            if step % args.every == 0 or signals.should_save():
                handler.save_checkpoint(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
