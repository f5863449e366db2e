"""Fine-tuning under FSDP2 that is the training of one process: a small Qwen2 on pages of Python's own manual.

    torchrun --nproc-per-node 4 examples/engine_sft.py --steps 8

The model is made on meta, sharded, and filled from safetensors, each rank its own slices; it is trained
as one copy and as replicas of shards, on padded and on packed rows, saved and resumed on another mesh,
exported to one rank, asked for text. Then padded and packed rows are compared, row by row and in tokens a
second.
CPU (torch >= 2.7; replicas: 2.13) or CUDA. `--plot FILE` draws the curves.
"""

# %%
import argparse
import os
import pydoc_data.topics
import resource
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from torch_dcp_backport import engine

# %% [markdown]
# ## Settings

# %%
ROWS, BATCHES, LENGTH, END = 16, 2, 96, 256
RATES = {"SGD": 0.2, "AdamW": 3e-3}
#: The ranks of a copy, and whether rows are packed.
MESHES = {"4 shards": (-1, False), "2 x 2 shards": (2, False), "4 shards, packed": (-1, True)}
#: Where padded and packed rows are compared: the most tokens of a row, and of a micro-batch.
LONG, TOKENS = 256, 2048


# %% [markdown]
# ## A model, and rows to train it on


# %%
def write_model(folder: str) -> None:
    config = transformers.Qwen2Config(
        vocab_size=END + 1, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, tie_word_embeddings=True,
        bos_token_id=END, eos_token_id=END, pad_token_id=END,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)


def batch_of(step: int, longer: int = 7, length: int = LENGTH) -> dict:
    """Names of topics and what the manual says of them, as bytes; the losses are on the manual's part.

    Each row has `longer` tokens more than the one before, and none more than `length`.
    """
    topics = sorted(pydoc_data.topics.topics.items())
    ids, there, marked = (torch.zeros(ROWS, length, dtype=torch.long) for _ in range(3))
    for row in range(ROWS):
        name, text = topics[(step % BATCHES) * ROWS + row]
        # Rows of many lengths: the ranks have different numbers of tokens.
        said = " ".join(text.split())[: 10 + longer * row].encode()
        tokens = [END, *name.encode(), *b": ", *said, END][:length]
        ids[row, : len(tokens)] = torch.tensor(tokens)
        there[row, : len(tokens)] = 1
        marked[row, min(len(name) + 3, length) : len(tokens)] = 1
    return {"input_ids": ids, "attention_mask": there, "loss_mask": marked}


# %% [markdown]
# ## The same training by torch and transformers alone
#
# All that follows is compared with this.


# %%
def train_alone(folder: str, optimizer: str, steps: int):
    """The training in one process, by torch and transformers alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=RATES[optimizer])
    losses = []
    for step in range(steps):
        batch = batch_of(step)
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        labels = batch["input_ids"].masked_fill(batch["loss_mask"] == 0, -100)[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten())
        made.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        made.step()
        losses.append(loss.item())
    return model, losses


# %% [markdown]
# ## The engine
#
# It takes settings of the model, of the engine and of the optimizer. `initialize` builds the model under
# FSDP2, and `train_batch` is a step on the rows of this rank.


# %%
def make_engine(folder: str, optimizer: str, fsdp_size: int, is_packed: bool = False):
    made = engine.FSDPEngineWithLMHead(
        {"path": folder, "use_remove_padding": is_packed},
        {
            "fsdp_size": fsdp_size,
            "mixed_precision": {"param_dtype": "fp32"},
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": 2,  # two micro-batches of the rows of a rank
        },
        {"optimizer": optimizer, "lr": RATES[optimizer], "weight_decay": 0.01 * (optimizer == "AdamW")},
    )
    made.initialize()
    return made


def train(made, steps: range) -> list:
    losses = []
    rank, size = made.get_data_parallel_rank(), made.get_data_parallel_size()
    with made.train_mode():
        for step in steps:
            rows = {name: value[rank::size] for name, value in batch_of(step).items()}
            loss = torch.tensor(
                float(sum(made.train_batch(rows, engine.sft_loss)["loss"])), device=made.device
            )
            dist.all_reduce(loss)
            losses.append(loss.item() / size)
    return losses


# %% [markdown]
# ## Padded and packed rows
#
# Packed rows have no padding: a micro-batch is one long row, and attention stays within each of its parts.


# %%
def compare_rows(made, turns: int) -> str:
    """Steps on the same rows, padded and packed by turns: how far apart their losses are, tokens a second."""
    rows = batch_of(made.get_data_parallel_rank() % BATCHES, longer=14, length=LONG)
    ways = {
        name: {
            **rows,
            "use_remove_padding": name == "packed",
            "use_dynamic_bsz": True,
            "max_token_len_per_gpu": TOKENS,
        }
        for name in ("padded", "packed")
    }
    found = {name: made.infer_batch(batch)["model_output"]["log_probs"] for name, batch in ways.items()}
    # A token's log-probability stands one before the token.
    marked = rows["loss_mask"].roll(-1, dims=1)
    losses = {name: -(value.cpu() * marked).sum(1) / marked.sum(1) for name, value in found.items()}
    apart = (losses["padded"] - losses["packed"]).abs().max()
    seconds = {name: [] for name in ways}
    with made.train_mode():
        for turn in range(turns + 1):
            for name, batch in ways.items():
                dist.barrier()
                began = time.monotonic()
                made.train_batch(batch, engine.sft_loss)
                dist.barrier()
                if turn:  # the first is to warm up
                    seconds[name].append(time.monotonic() - began)
    tokens = rows["attention_mask"].sum(1)
    figures = [apart, *map(min, seconds.values()), -tokens.min(), tokens.max()]
    figures = torch.tensor(figures, device=made.device)
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    apart, padded, packed, least, most = figures.tolist()
    assert apart < 1e-5, f"packed rows: {apart} from the losses of padded ones"
    return (
        f"{ROWS} rows a rank, of {-least:.0f} to {most:.0f} tokens: each row's loss packed within "
        f"{apart:.1e} of padded; {padded / packed:.2f} times as many tokens a second packed as padded "
        f"(the best of {turns} steps)"
    )


# %% [markdown]
# ## What is shown


# %%
def text_of(model) -> str:
    prompt = torch.tensor([[END, *b"if: "]])
    with torch.no_grad():
        tokens = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False
        )
    return bytes(token for token in tokens[0].tolist() if token < END).decode(errors="replace")


def table(rows: list) -> str:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in rows)


def draw(curves: dict, path: str) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(RATES), figsize=(11, 4))
    for axis, optimizer in zip(axes, RATES):
        # Told apart by all eyes (Okabe and Ito), and by widths: the lines lie on each other.
        looks = {
            "one process": ("#E69F00", 7, "-"),
            "4 shards": ("#0072B2", 3, "-"),
            "2 x 2 shards": ("k", 1, "--"),
            "4 shards, packed": ("#D55E00", 1, ":"),
        }
        for (name, kind), losses in curves.items():
            if kind == optimizer:
                color, width, dashes = looks[name]
                axis.plot(losses, label=name, color=color, linewidth=width, linestyle=dashes)
        axis.set(title=optimizer, xlabel="step", ylabel="loss")
        axis.legend(frameon=False)
    where = "NCCL" if torch.cuda.is_available() else f"gloo, {os.cpu_count()} cores"
    figure.suptitle(
        f"A small Qwen2 on pages of Python's manual; torch {torch.__version__}, {where}", fontsize=11
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)


# %% [markdown]
# ## On several meshes
#
# On each mesh the training is saved in the middle, and goes on on the next mesh. At the end one rank gets
# the whole model, tensor by tensor, and transformers writes text with it.


# %%
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--plot")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    elif tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7):
        if os.environ["RANK"] == "0":
            print(f"not here: FSDP2 of torch {torch.__version__} trains on accelerators alone")
        return
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, half = dist.get_rank(), args.steps // 2
    root = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(root)  # every rank sees this folder
    folder = f"{root[0]}/model"
    if rank == 0:
        write_model(folder)
    dist.barrier()

    curves, refused = {}, {}
    rows = [
        ("optimizer", "mesh and rows", "first loss", "last loss", "off one process", "seconds", "peak MiB")
    ]
    for optimizer in RATES:
        plain, alone = train_alone(folder, optimizer, args.steps)
        curves["one process", optimizer] = alone
        made = None
        for name, (size, is_packed) in MESHES.items():
            began = time.monotonic()
            try:
                made = make_engine(folder, optimizer, size, is_packed)
            except RuntimeError as error:  # gloo before torch 2.13 has no average
                if torch.cuda.is_available():
                    raise
                refused[name] = str(error).partition("\n")[0]
                continue
            losses = train(made, range(half))
            step = f"{root[0]}/{optimizer}-{size}-{is_packed}/global_step_{half}"
            made.save_checkpoint(step, global_step=half)
            # The next mesh, or the last one again: the training goes on there.
            try:
                made = make_engine(folder, optimizer, -1 if size > 0 else 2, is_packed)
            except RuntimeError:
                if torch.cuda.is_available():
                    raise
                made = make_engine(folder, optimizer, size, is_packed)
            made.load_checkpoint(step)
            losses += train(made, range(half, args.steps))
            curves[name, optimizer] = losses
            apart = max(abs(one - other) for one, other in zip(losses, alone))
            peaks = [None] * dist.get_world_size()
            dist.all_gather_object(peaks, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
            figures = (
                f"{losses[0]:.5f}",
                f"{losses[-1]:.5f}",
                f"{apart:.1e}",
                f"{time.monotonic() - began:.1f}",
            )
            rows.append((optimizer, name, *figures, str(max(peaks))))
            assert apart < 1e-5, f"{optimizer}, {name}: {apart} from the losses of one process"
        weights, _ = made.get_per_tensor_param(to=0, dtype=None)
        exported = dict(weights)
        if rank == 0:
            again = transformers.AutoModelForCausalLM.from_pretrained(folder)
            again.load_state_dict(exported)
            text = text_of(again)
            assert text == text_of(plain), f"{optimizer}: other text from the export"
    compared = compare_rows(make_engine(folder, "AdamW", -1, True), max(1, args.steps // 8))
    if rank == 0:
        print(table(rows))
        print(compared)
        for name, why in refused.items():
            print(f"{name}: not here: {why}")
        print(f"text from the export, the same as one process's: {text!r}")
        if args.plot:
            draw(curves, args.plot)
            print(f"curves: {Path(args.plot).resolve()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
