"""Tensor parallelism inside, FSDP2 outside: strided shards on a 2-D mesh, from and to full tensors.

    torchrun --nproc-per-node 4 examples/tp_fsdp2_full_state.py

torch >= 2.5: FSDP2 of torch 2.4 has no state dicts on a 2-D mesh.
"""

# %%
import torch_dcp_backport  # isort: skip  # noqa: F401, before anything binds torch's functions

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
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.5
    from torch.distributed._composable.fsdp import fully_shard


# %% [markdown]
# ## A model that tensor parallelism can cut
#
# Tensor parallelism cuts `up` by rows and `down` by columns. FSDP2 cuts what is left once more.


# %%
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(256, 1024)
        self.down = nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


# %% [markdown]
# ## The same two calls
#
# Rank 0 has whole tensors. The functions know both cuts of every parameter: nothing has to be said of them.


# %%
def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(4)))
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])

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
        print(f"{len(again)} tensors; model[0].up.weight is placed as {model[0].up.weight.placements}")
    dist.barrier()  # nobody leaves while others still talk to it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
