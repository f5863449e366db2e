"""A sharded checkpoint: saved by the ranks that train, loaded by any other number of ranks.

    torchrun --nproc-per-node 4 examples/sharded_checkpoint.py

Each rank writes its shards; then half of the ranks load the checkpoint on a mesh of their own. CPU or CUDA.
"""

# %%
import torch_dcp_backport  # isort: skip  # before anything binds torch's functions

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torch_dcp_backport import dist_checkpointing
from torch_dcp_backport.dist_checkpointing import ShardedObject
from torch_dcp_backport.dist_checkpointing.training_state import load_training_state, save_training_state

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import fully_shard


# %% [markdown]
# ## A model and its optimizer, on any mesh


# %%
def build(mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).to(mesh.device_type)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


# %% [markdown]
# ## Saved by all ranks, loaded by half of them
#
# Each rank writes the parts that it holds. Each rank that loads reads the parts that it needs, so any
# number of ranks can load. `verify` compares every record with its checksum.


# %%
def main() -> None:
    assert torch_dcp_backport.status().outcome in ("applied", "pending", "not-needed")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)  # every rank sees this folder

    model, optimizer = build(init_device_mesh(device, (world,)))
    # What is different on each rank is one of a grid of objects; plain values are those of rank 0.
    rng = ShardedObject("rng", torch.get_rng_state(), (world,), (rank,))
    save_training_state(folder[0], model, optimizer, extra={"step": 100, "rng": rng})
    saved = dist_checkpointing.storage_report()

    half = list(range(world // 2))
    group, mesh = dist.new_group(half), DeviceMesh(device, half)
    if rank in half:
        model, optimizer = build(mesh)
        extra = load_training_state(
            folder[0], model, optimizer, strict="raise_unexpected", process_group=group
        )
        assert extra["step"] == 100
        if rank == 0:
            tensors = len(dist_checkpointing.load_tensors_metadata(folder[0]))
            print(f"{tensors} tensors saved by {world} ranks and loaded by {len(half)}")
            print(saved)
            print(dist_checkpointing.storage_report())
            assert dist_checkpointing.verify(folder[0]) == []
    dist.barrier()  # no rank leaves while others still talk to it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
