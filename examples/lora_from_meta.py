"""LoRA: the frozen base comes from rank 0's checkpoint onto the meta device, the adapters are made in place.

    torchrun --nproc-per-node 4 examples/lora_from_meta.py

The checkpoint does not know the adapters, hence strict=False; the adapters alone are saved.
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

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import fully_shard


# %% [markdown]
# ## A layer with an adapter
#
# The base is frozen. The adapter is two small matrices, and the second one begins as zeros.


# %%
class LoRALinear(nn.Module):
    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(size, size, bias=False)
        self.base.weight.requires_grad_(False)
        self.a = nn.Parameter(torch.empty(rank, size))
        self.b = nn.Parameter(torch.empty(size, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


# %% [markdown]
# ## The base from a checkpoint, the adapters from here
#
# With `strict=False` keys may be missing in the checkpoint. A load leaves those parameters as they are, and
# returns their names. With `ignore_frozen_params=True` a save has the adapters alone.


# %%
def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    with torch.device("meta"):
        model = nn.Sequential(*(LoRALinear(512, 8) for _ in range(4)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    # Every rank makes its own part of the adapters; the base stays on the meta device until it is loaded.
    for layer in model:
        layer.a = nn.Parameter(torch.randn_like(layer.a, device=device))
        layer.b = nn.Parameter(torch.zeros_like(layer.b, device=device))

    state = {f"{i}.base.weight": torch.randn(512, 512) for i in range(4)} if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    # A copy of the dict: torch >= 2.7 writes its DTensors into the one that it is given.
    keys = set_model_state_dict(model, dict(state), options=options)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert all(
        float(layer.b.detach().full_tensor().abs().max()) == 0 for layer in model
    )  # untouched by the load

    save = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    adapters = get_model_state_dict(model, options=save)
    if dist.get_rank() == 0:
        assert sorted(adapters) == sorted(f"{i}.{name}" for i in range(4) for name in "ab")
        print(f"{len(state)} base weights loaded, {len(adapters)} adapters saved")
        print("missing in the checkpoint, as meant:", keys.missing_keys)
    dist.barrier()  # nobody leaves while others still talk to it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
