"""FSDP2: load a full checkpoint that only rank 0 reads, train, save a full checkpoint from rank 0.

    torchrun --nproc-per-node 4 examples/fsdp2_full_state.py

On torch 2.4 to 2.6 the first line is the fix; without it every rank would hold the whole model. CPU or CUDA.
"""

# %%
import torch_dcp_backport  # isort: skip  # before anything binds torch's functions

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import fully_shard

# %% [markdown]
# ## What to load, and what to save
#
# With `broadcast_from_rank0=True` rank 0 alone has the dict, and the others pass an empty one. With
# `cpu_offload=True` and `full_state_dict=True` rank 0 alone gets the whole model, on the CPU.

# %%
LOAD = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
SAVE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def build() -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(1000, 256), *(nn.Linear(256, 256) for _ in range(8)), nn.Linear(256, 1000)
    )


# %% [markdown]
# ## From full weights to shards, and back
#
# The model is made on the meta device, so that it needs no memory before the load. After a training step
# the model and the optimizer come back whole to rank 0, and go the same way again as after a restart.


# %%
def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank0 = dist.get_rank() == 0
    folder = tempfile.mkdtemp() if rank0 else ""
    if rank0:  # stands for a checkpoint that you have
        torch.save(build().state_dict(), f"{folder}/model.pt")

    # Nothing is allocated here: the parameters are made by the load, as shards.
    with torch.device("meta"):
        model = build()
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = torch.load(f"{folder}/model.pt", mmap=True, weights_only=True) if rank0 else {}
    set_model_state_dict(model, state, options=LOAD)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, device)

    # Rank 0 gets everything, on the CPU; the others get empty dicts.
    model_state = get_model_state_dict(model, options=SAVE)
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=SAVE)
    if rank0:
        torch.save({"model": model_state, "optimizer": optimizer_state}, f"{folder}/trained.pt")

    # A restart: the same way back.
    saved = torch.load(f"{folder}/trained.pt", mmap=True, weights_only=True) if rank0 else {}
    set_model_state_dict(model, saved.get("model", {}), options=LOAD)
    set_optimizer_state_dict(model, optimizer, saved.get("optimizer", {}), options=LOAD)
    again = get_model_state_dict(model, options=SAVE)
    if rank0:
        assert all(torch.equal(again[key], value) for key, value in model_state.items())
        print(f"{len(again)} tensors loaded, trained, saved and loaded again")
        print(torch_dcp_backport.status())
    dist.barrier()  # nobody leaves while others still talk to it
    dist.destroy_process_group()


# %% [markdown]
# ## One step of training


# %%
def train(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> None:
    if device == "cpu" and torch.__version__ < "2.7":
        # There FSDP2's forward needs an accelerator; gradients from nowhere stand for it. On 2.7 gloo sums
        # gradients instead of averaging them: torch_dcp_backport.engine measures that.
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    else:
        tokens = torch.randint(1000, (4, 16), device=device)
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    main()
