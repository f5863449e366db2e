"""HSDP: shards within a group of ranks, replicas across groups.

    torchrun --nproc-per-node 4 examples/hsdp_full_state.py

Rank 0 sends each shard once; replicas pass it on. CPU or CUDA.
"""

# %%
import torch_dcp_backport  # isort: skip  # before anything binds torch's functions

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import fully_shard


# %% [markdown]
# ## Two dimensions of ranks
#
# The dimension `shard` cuts each parameter, and the dimension `replicate` repeats it. The calls are the
# same as for FSDP2 alone: the mesh tells them who holds what.


# %%
def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    groups = dist.get_world_size() // 2
    mesh = init_device_mesh(device, (groups, 2), mesh_dim_names=("replicate", "shard"))
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    for layer in model:
        fully_shard(layer, mesh=mesh)

    state = (
        {key: torch.randn(value.shape) for key, value in model.state_dict().items()}
        if dist.get_rank() == 0
        else {}
    )
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    # A copy of the dict: torch >= 2.7 writes its DTensors into the one that it is given.
    set_model_state_dict(model, dict(state), options=options)

    again = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        assert all(torch.equal(again[key], value) for key, value in state.items())
        print(f"{len(again)} tensors on {groups} replicas of 2 shards")
        if torch_dcp_backport.status().outcome == "applied":
            print("the last transfer:", torch_dcp_backport.transfer.last_report())
    dist.barrier()  # nobody leaves while others still talk to it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
