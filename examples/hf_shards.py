"""Hugging Face files: into an FSDP2 model, each rank its own slices, and back into files.

    torchrun --nproc-per-node 2 examples/hf_shards.py

No rank holds the whole model. It needs transformers for the model alone. CPU or CUDA.
"""

# %%
import os
import tempfile

import torch
import torch.distributed as dist
import transformers

from torch_dcp_backport import engine, hf

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import fully_shard

# %% [markdown]
# ## A small model
#
# Its files stand for those that you have.

# %%
CONFIG = transformers.Qwen2Config(
    vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=False,
)  # fmt: skip

# %% [markdown]
# ## From files to shards, and back
#
# `parameters_on_meta` builds the model without memory for its parameters; buffers that no file holds are
# real. `materialize` makes memory for the shards of this rank. `load_state_dict` fills them in place: each
# rank reads the slices that it holds. `save_state_dict` writes what `from_pretrained` opens.


# %%
def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank0 = dist.get_rank() == 0
    folder = [tempfile.mkdtemp() if rank0 else ""]
    dist.broadcast_object_list(folder)  # every rank sees this folder
    source, target = f"{folder[0]}/source", f"{folder[0]}/target"
    if rank0:
        transformers.Qwen2ForCausalLM(CONFIG).save_pretrained(source)
    dist.barrier()

    with engine.parameters_on_meta():
        model = transformers.Qwen2ForCausalLM(CONFIG)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    engine.materialize(model, torch.device(device, torch.cuda.current_device() if device == "cuda" else None))
    filled = hf.load_state_dict(model.state_dict(), source)

    saved = hf.save_state_dict(model.state_dict(), target, like=source)
    if rank0:
        print(
            f"{len(filled.keys)} tensors: this rank read {filled.bytes_read / saved.nbytes:.2f} of the bytes"
        )
        before, after = (transformers.AutoModelForCausalLM.from_pretrained(path) for path in (source, target))
        assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters()))
        print(f"{type(after).__name__} opened from what the shards wrote, the same bits")
    dist.barrier()  # no rank leaves while others still talk to it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
