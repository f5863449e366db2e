"""One tensor in a notebook: look into a checkpoint without ranks, a model or its memory.

    python examples/one_tensor.py

Open it as a notebook (its cells begin with `# %%`), or run it as a program. The checkpoint may be of any
number of ranks, and of a step that a checkpoint manager saved: then the folder is `global_step_10/dist_ckpt`.
"""

# %%
import os
import tempfile

import torch

from torch_dcp_backport import dist_checkpointing
from torch_dcp_backport.dist_checkpointing.training_state import save_training_state

# %% [markdown]
# ## A checkpoint
#
# This stands for one that you have: eight layers and their AdamW states.

# %%
folder = os.path.join(tempfile.mkdtemp(), "step_7")
os.makedirs(folder)
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
optimizer = torch.optim.AdamW(model.parameters())
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)
optimizer.step()
save_training_state(folder, model, optimizer, extra={"step": 7})

# %% [markdown]
# ## What is in it
#
# Names, shapes and dtypes come from the small files. No tensor is read.

# %%
stored = dist_checkpointing.load_tensors_metadata(folder)
for key, tensor in stored.items():
    if ".3." in key:
        print(f"{key:40} {tuple(tensor.global_shape)} {tensor.dtype}")
print(f"{len(stored)} tensors")

# %% [markdown]
# ## One of them
#
# The tensors that you name are read, whole, onto the CPU. Values that are no tensors come along under their
# own names: here `step`, and the options of the optimizer.

# %%
loaded = dist_checkpointing.load({"weight": stored["model.3.weight"]}, folder)
assert torch.equal(loaded["weight"], model[3].weight)
print(f"model.3.weight: mean {loaded['weight'].mean():.6f}, step {loaded['step']}")
print(dist_checkpointing.storage_report())
