"""The whole package in a minute: break a load, fix it, save, kill, resume on other ranks, export, open.

    python examples/tour.py

It starts its ranks itself: four on the CPU over gloo, or one for each GPU over NCCL. A step is a line. The
model is a Qwen2 of 20 MiB where transformers is installed, else linear layers. FSDP2 of torch below 2.7 does
not train on the CPU, so gradients from nowhere stand for a forward and a backward; they are the same on
every number of ranks.
"""

# %%
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

try:
    import transformers
except ImportError:
    transformers = None

# Otherwise the question itself would begin CUDA, in a process that is going to fork.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RANKS = min(4, torch.cuda.device_count()) if DEVICE == "cuda" else 4
FEWER = max(1, RANKS // 2)
STEPS, KILLED, MIB = 8, 4, 2**20
FIRST = "first"
#: Ranks are forks of this process, which already has torch; CUDA does not outlive a fork once it has begun.
FORK = multiprocessing.get_context("fork")


# %% [markdown]
# ## A model
#
# The same seed on every rank makes the same model. FSDP2 shards it: each rank keeps a part of every
# parameter.


# %%
def say(text: str) -> None:
    print(text, flush=True)


def make() -> nn.Module:
    torch.manual_seed(0)
    if transformers is None:
        return nn.Sequential(*(nn.Linear(896, 768) for _ in range(8)))
    config = transformers.Qwen2Config(
        vocab_size=4096, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.Qwen2ForCausalLM(config)


def sharded(on_meta: bool = False) -> nn.Module:
    """The model under FSDP2, on this rank's device."""
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # torch 2.4 and 2.5
        from torch.distributed._composable.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh

    with torch.device("meta" if on_meta else DEVICE):
        model = make()
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    for layer in model if transformers is None else model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def begin(rank: int, world: int, meeting: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch")  # each rank repeats what torch says of its own names
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=world)


# %% [markdown]
# ## Break a load, and fix it
#
# Rank 0 has the full weights, and the model is on the meta device. With `TORCH_DCP_BACKPORT=off` torch's
# own function loads; with `auto` the import of `torch_dcp_backport` corrects that function on torch 2.4 to
# 2.6. Each rank compares the bytes that its shards keep alive with the bytes that they need.


# %%
def load(rank: int, world: int, root: Path, switch: str, answers) -> None:
    """Load full weights that rank 0 has; tell what this rank's parameters keep alive, and what they need."""
    os.environ["TORCH_DCP_BACKPORT"] = switch
    import torch_dcp_backport  # before anything binds torch's functions

    begin(rank, world, f"{root}/meeting-{switch}")
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    model = sharded(on_meta=True)
    state = torch.load(root / "model.pt", mmap=True, weights_only=True) if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    try:
        set_model_state_dict(model, state, options=options)
    except NotImplementedError as error:  # torch 2.4 alone cannot load a model that is on meta
        answers.put((rank, 0, 0, f"fails: {type(error).__name__}"))
        return
    shards = [parameter.to_local() for parameter in model.parameters()]
    kept = {shard.untyped_storage().data_ptr(): shard.untyped_storage().nbytes() for shard in shards}
    needed = sum(shard.numel() * shard.element_size() for shard in shards)
    answers.put((rank, sum(kept.values()), needed, torch_dcp_backport.status().outcome))
    dist.barrier()
    dist.destroy_process_group()


# %% [markdown]
# ## Train, be killed, resume
#
# The handler saves each step, and keeps two. `load_checkpoint` returns the newest good step, 0 in a new
# folder, and has loaded it. Nothing in it names the number of ranks.


# %%
def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) * (-1) ** step
    optimizer.step()
    optimizer.zero_grad()


def train(rank: int, world: int, root: Path, meeting: str, answers) -> None:
    """Resume from the newest good step, and save every step; the first training is killed."""
    begin(rank, world, f"{root}/{meeting}")
    from torch_dcp_backport.checkpoint import CheckpointHandler, FSDPCheckpointManager

    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handler = CheckpointHandler(
        FSDPCheckpointManager(model, optimizer), default_local_dir=root / "run", max_ckpt_to_keep=2
    )
    first = handler.load_checkpoint()
    for step in range(first + 1, STEPS + 1):
        step_of(model, optimizer, step)
        if rank == 0:
            answers.put((first, step))
        handler.save_checkpoint(step)
        if meeting == FIRST and step == KILLED:
            signal.pause()  # however late the signal comes, no later step is saved
    dist.barrier()
    dist.destroy_process_group()


# %% [markdown]
# ## Ranks as processes
#
# These four functions start the ranks, wait for what they answer, and end with them. A program below
# torchrun has none of this.


# %%
def ranks_of(target, world: int, *arguments) -> list:
    ranks = [FORK.Process(target=target, args=(rank, world, *arguments)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    return ranks


def end_of(ranks: list) -> None:
    for rank in ranks:
        rank.join()
    if any(rank.exitcode for rank in ranks):
        sys.exit(f"ranks ended with {[rank.exitcode for rank in ranks]}; see above")


def answer_of(answers, ranks: list):
    """The next answer; a rank that failed ends the tour, and so do ranks that end without one."""
    while answers.empty():
        codes = [rank.exitcode for rank in ranks]
        # A rank that has ended answers no more, but its last answer may have come since the look for it.
        if any(codes) or (None not in codes and answers.empty()):
            end_of(ranks)
            sys.exit("all ranks ended, and without an answer")
        time.sleep(0.01)
    return answers.get()


# %% [markdown]
# ## The steps of the tour
#
# The first training is killed with SIGKILL while it saves a step, or right after. The second one has half
# as many ranks.


# %%
def loads(root: Path) -> None:
    for switch, name in (("off", "stock torch"), ("auto", "with the fix")):
        answers = FORK.SimpleQueue()
        ranks = ranks_of(load, RANKS, root, switch, answers)
        found = [answer_of(answers, ranks) for _ in ranks]
        end_of(ranks)
        _, kept, needed, outcome = max(found)
        if not needed:
            say(f"load, {name}: {outcome}")
            continue
        times = kept / needed
        say(
            f"load, {name}: the last of {RANKS} ranks keeps {kept / MIB:.1f} MiB for its shard of "
            f"{needed / MIB:.1f} MiB: {times:.1f} times ({outcome})"
        )


def resumes(root: Path) -> None:
    answers = FORK.SimpleQueue()
    ranks = ranks_of(train, RANKS, root, FIRST, answers)
    while answer_of(answers, ranks)[1] < KILLED:
        pass
    for rank in ranks:
        os.kill(rank.pid, signal.SIGKILL)
    for rank in ranks:
        rank.join()
    say(f"train and save on {RANKS} ranks: SIGKILL at the save of step {KILLED}")
    answers = FORK.SimpleQueue()
    ranks = ranks_of(train, FEWER, root, "second", answers)
    first, step = answer_of(answers, ranks)
    while step < STEPS:
        _, step = answer_of(answers, ranks)
    end_of(ranks)
    assert first in (KILLED - 1, KILLED), first
    say(f"resume on {FEWER} ranks: from step {first}, which is whole, to step {STEPS}")


# %% [markdown]
# ## Export, and open
#
# `export_checkpoint` needs no ranks and no model. What it writes is a folder for transformers. The last
# line compares the weights with those of one process that was never killed.


# %%
def export(root: Path) -> None:
    from torch_dcp_backport.checkpoint import export_checkpoint

    out = root / "exported"
    if transformers is None:
        say("export and open: not here, since transformers is not installed")
        return
    export_checkpoint(root / "run" / f"global_step_{STEPS}", out)
    size = sum(path.stat().st_size for path in out.iterdir()) / MIB
    say(f"export: {size:.1f} MiB of {', '.join(sorted(path.name for path in out.iterdir()))}")
    opened = transformers.AutoModelForCausalLM.from_pretrained(out)
    alone = make()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-3)
    for step in range(1, STEPS + 1):
        step_of(alone, optimizer, step)
    pairs = zip(opened.state_dict().values(), alone.state_dict().values())
    apart = max((one.float() - other.float()).abs().max().item() for one, other in pairs)
    assert apart < 1e-6, apart
    say(f"open: {type(opened).__name__}, at most {apart:.1g} from one process that was never killed")


def main() -> None:
    began = time.monotonic()
    say(f"torch {torch.__version__} on {RANKS} ranks, {DEVICE}")
    with tempfile.TemporaryDirectory(prefix="tour-") as folder:
        root = Path(folder)
        torch.save(make().state_dict(), root / "model.pt")
        loads(root)
        resumes(root)
        export(root)
    say(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
