"""Cases of tools/gpu.py for the rooms: the engine, copies on the nodes, saves in the background, HF files.

The oracle of the engine is the same training in one process, by torch and transformers alone, on the same
device. Without transformers the engine's cases fail, and say so.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torch_dcp_backport import compat
from torch_dcp_backport.compat import DTensor

from gpu_place import Place, shared_folder  # isort: skip

ROWS, LENGTH, WORDS = 8, 48, 97


def same_on_all(place: Place, model: nn.Module) -> nn.Module:
    """FSDP2, with the values that every rank has drawn alike."""
    return compat.fsdp2().fully_shard(model, mesh=place.mesh())


def wholes(model: nn.Module) -> dict[str, torch.Tensor]:
    """Torch's own gather of every parameter; none of our code."""
    return {
        key: (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu()
        for key, value in model.named_parameters()
    }


# --- the engine ---


def write_model(folder: Path) -> None:
    import transformers

    config = transformers.Qwen2Config(
        vocab_size=WORDS,
        hidden_size=64,
        # Its activations are large enough to go to the host.
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """Rows of unlike lengths, on the host."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(1, WORDS, (ROWS, LENGTH), generator=draw)
    lengths = torch.randint(5, LENGTH + 1, (ROWS,), generator=draw)
    there = (torch.arange(LENGTH) < lengths[:, None]).long()
    marked = there.clone()
    marked[:, :3] = 0
    return {"input_ids": ids * there, "attention_mask": there, "loss_mask": marked}


def train_alone(place: Place, folder: Path, steps: int) -> tuple[nn.Module, list[float]]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).to(place.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for step in range(steps):
        batch = {name: value.to(place.device) for name, value in batch_of(step).items()}
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        labels = batch["input_ids"].masked_fill(batch["loss_mask"] == 0, -100)[:, 1:]
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def train(place: Place, made: Any, steps: range) -> list[float]:
    from torch_dcp_backport import engine

    rank, size = made.get_data_parallel_rank(), made.get_data_parallel_size()
    losses = []
    with made.train_mode():
        for step in steps:
            rows = {name: value[rank::size] for name, value in batch_of(step).items()}
            own = float(sum(made.train_batch(rows, engine.sft_loss)["loss"]))
            loss = torch.tensor(own, device=place.device, dtype=torch.float64)
            dist.all_reduce(loss)
            losses.append(loss.item() / place.world)
    return losses


def make_engine(
    folder: Path, model: dict[str, Any], settings: dict[str, Any], optimizer: dict[str, Any]
) -> Any:
    from torch_dcp_backport import engine

    class Counting(engine.FSDPEngineWithLMHead):
        #: Bytes of activations that went to the host.
        copied = 0

        @contextlib.contextmanager
        def saving(self) -> Any:
            with super().saving() as saved:
                yield
                self.copied += sum(stored.host.nbytes for stored in saved.stored.values()) if saved else 0

    fixed = {"fsdp_size": -1, "mixed_precision": {"param_dtype": "fp32"}}
    made = Counting(
        {"path": str(folder), **model},
        {**fixed, **settings},
        {"optimizer": "SGD", "lr": 0.2, "weight_decay": 0.0, **optimizer},
    )
    made.initialize()
    return made


ROWS_OF = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
PACKED = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 160}


def check_engine(
    place: Place, folder: Path, name: str, model: dict[str, Any], settings: dict[str, Any]
) -> float:
    """Three steps, a save, and two more from there: the losses and weights of one process."""
    alone, expected = train_alone(place, folder, 5)
    made = make_engine(folder, model, settings, {})
    losses = train(place, made, range(3))
    # A folder for each way: an older save must not be loaded in the place of this one.
    step = folder.parent / name.replace(" ", "-") / "global_step_3"
    made.save_checkpoint(str(step), global_step=3)
    again = make_engine(folder, model, settings, {})
    again.load_checkpoint(str(step))
    losses += train(place, again, range(3, 5))
    # On the CPU the setting has no effect.
    is_moved = bool(model.get("enable_activation_offload")) and place.kind != "cpu"
    assert (again.copied > 0) == is_moved, f"{again.copied} bytes of activations went to the host"
    apart = max(abs(one - other) for one, other in zip(losses, expected))
    assert apart < 2e-5, f"losses {losses}, in one process {expected}"
    # Every rank runs through it; the first has the tensors.
    exported = dict(again.get_per_tensor_param(to=0, dtype=None)[0])
    if place.is_first:
        whole = alone.state_dict()
        for key, value in exported.items():
            torch.testing.assert_close(value.cpu(), whole[key].cpu(), atol=1e-4, rtol=1e-4, msg=key)
    return apart


def run_engine(place: Place, api: Any, size: str, *, ways: Any) -> None:
    with shared_folder(place, "engine") as folder:
        if place.is_first:
            write_model(folder / "model")
        place.outside()
        notes = []
        with place.timed():
            for name, model, settings in ways:
                apart = check_engine(place, folder / "model", name, model, settings)
                notes.append(f"{name} {apart:.0e}")
        place.measured["note"] = ", ".join(notes)


def attention(name: str) -> dict[str, Any]:
    return {"use_remove_padding": True, "override_config": {"attn_implementation": name}}


PADDED_WAYS = [
    ("padded", {}, ROWS_OF),
    ("offload", {}, {**ROWS_OF, "param_offload": True, "optimizer_offload": True}),
    ("CPUOffloadPolicy", {}, {**ROWS_OF, "offload_policy": True}),
    ("recomputed", {"enable_gradient_checkpointing": True}, ROWS_OF),
    ("activations on the host", {"enable_activation_offload": True}, ROWS_OF),
]
PACKED_WAYS = [(name, attention(name), PACKED) for name in ("sdpa", "eager")]
FLEX_WAYS = [("flex", attention("flex_attention"), PACKED)]
ULYSSES_WAYS = [
    (f"{name} by 2", attention(name), {**PACKED, "ulysses_sequence_parallel_size": 2})
    for name in ("sdpa", "eager")
]


def run_adapters(place: Place, api: Any, size: str) -> None:
    """LoRA: a resume goes on as the run that it was saved in; a merged rollout is the model's own sum."""
    model = {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora": {"merge": True}}
    adamw = {"optimizer": "AdamW", "lr": 1e-2}
    with shared_folder(place, "adapters") as folder:
        if place.is_first:
            write_model(folder / "model")
        place.outside()
        with place.timed():
            made = make_engine(folder / "model", model, ROWS_OF, adamw)
            train(place, made, range(3))
            made.save_checkpoint(str(folder / "global_step_3"), global_step=3)
            losses = train(place, made, range(3, 5))
            again = make_engine(folder / "model", model, ROWS_OF, adamw)
            again.load_checkpoint(str(folder / "global_step_3"))
            resumed = train(place, again, range(3, 5))
            merged = dict(again.get_per_tensor_param(to=0, dtype=None)[0])
        assert max(abs(one - other) for one, other in zip(resumed, losses)) < 1e-5, (resumed, losses)
        parts = wholes(again.module)
        if place.is_first:
            name = "model.layers.0.mlp.up_proj"
            found = {
                end: next(v for k, v in parts.items() if f"layers.0.mlp.up_proj.{end}" in k)
                for end in ("base_layer", "lora_A", "lora_B")
            }
            want = found["base_layer"] + found["lora_B"] @ found["lora_A"] * 2
            torch.testing.assert_close(merged[f"{name}.weight"].cpu(), want, atol=1e-5, rtol=1e-5)


# --- checkpoints ---


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(33, 50), nn.Linear(50, 7))
        self.free = nn.Parameter(torch.randn(5, 3).bfloat16().float())


def odd(place: Place, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = same_on_all(place, Odd().to(place.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def run_nearby(place: Place, api: Any, size: str) -> None:
    """Each rank is a node. Two saves; then a node is lost with its folder."""
    from torch_dcp_backport.checkpoint import NearbyCheckpoints
    from torch_dcp_backport.state_dict import get_state_dict, set_state_dict

    def state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        generator = {"device": torch.cuda.get_rng_state()} if place.kind == "cuda" else {}
        return {"model": model_state, "optimizer": optimizer_state, "mine": place.rank, **generator}

    with shared_folder(place, "nearby") as folder:
        own = {"run": "gpu", "node": f"node{place.rank}", "keep": 2}
        nearby = NearbyCheckpoints(folder / str(place.rank), **own)
        model, optimizer = odd(place, 1)
        with place.timed():
            for step in (1, 2):
                nearby.save(state(model, optimizer), step)
        want = wholes(model)
        if place.rank == place.world - 1:
            shutil.rmtree(folder / str(place.rank))
        place.outside()
        other, target = odd(place, 2)
        loaded = NearbyCheckpoints(folder / str(place.rank), **own).load(state(other, target))
        assert loaded is not None
        assert loaded.step == 2, loaded
        assert loaded.state["mine"] == place.rank
        set_state_dict(
            other,
            target,
            model_state_dict=loaded.state["model"],
            optim_state_dict=loaded.state["optimizer"],
        )
        got = wholes(other)
        wrong = [key for key, value in want.items() if not torch.equal(got[key], value)]
        assert not wrong, f"wrong: {wrong}"
        for (key, one), two in zip(model.named_parameters(), other.parameters()):
            for name in ("exp_avg", "exp_avg_sq"):
                left, right = optimizer.state[one][name], target.state[two][name]
                assert right.device == left.device, (key, name)
                assert torch.equal(left._local_tensor, right._local_tensor), (key, name)


def run_background(place: Place, api: Any, size: str) -> None:
    """What is changed right after the call is not in the file; no memory of the device stays."""
    from torch_dcp_backport import dist_checkpointing
    from torch_dcp_backport.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    make = dist_checkpointing.ShardedTensor.from_rank_offsets
    # Enough for shared memory, and a process that writes.
    rows = 12 * 2**20

    def state(value: float) -> dict[str, Any]:
        own = torch.arange(rows, dtype=torch.float32, device=place.device) * value + place.rank
        return {"w": make("w", own, (0, place.rank, place.world)), "step": int(value)}

    with shared_folder(place, "background") as folder:
        targets = [folder / str(number) for number in range(3)]
        if place.is_first:
            for target in targets:
                target.mkdir()
        place.outside()
        queue = AsyncCallsQueue()
        with place.timed():
            for number, target in enumerate(targets):
                held = state(number + 1.0)
                request = dist_checkpointing.save(held, str(target), async_sharded_save=True)
                queue.schedule_async_request(request)
                held["w"].data.fill_(-1)
            queue.close()
        assert place.measured.get("added", 0) <= 0, place.measured
        for number, target in enumerate(targets):
            got = dist_checkpointing.load(state(0.0), str(target))
            want = torch.arange(rows, dtype=torch.float32) * (number + 1.0) + place.rank
            assert got["w"].device == place.device
            assert torch.equal(got["w"].cpu(), want), number


def run_files(place: Place, api: Any, size: str) -> None:
    """A model written as HF files, and read back into shards and into bf16."""
    import transformers

    from torch_dcp_backport import hf

    with shared_folder(place, "files") as folder:
        if place.is_first:
            write_model(folder / "model")
        place.outside()
        config = transformers.AutoConfig.from_pretrained(folder / "model")
        torch.manual_seed(3)
        with place.device:
            model = transformers.AutoModelForCausalLM.from_config(config)
        for layer in model.model.layers:
            same_on_all(place, layer)
        same_on_all(place, model)
        want = wholes(model)
        with place.timed():
            hf.save_state_dict(model.state_dict(), folder / "out", like=config)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter._local_tensor.zero_()
            hf.load_state_dict(model.state_dict(), folder / "out")
        got = wholes(model)
        wrong = [key for key, value in want.items() if not torch.equal(got[key], value)]
        assert not wrong, f"wrong: {wrong}"
        if place.is_first:
            opened = transformers.AutoModelForCausalLM.from_pretrained(folder / "out")
            found = dict(opened.named_parameters())
            wrong = [key for key, value in want.items() if not torch.equal(found[key].cpu(), value)]
            assert not wrong, f"wrong: {wrong}"
        place.outside()


class Average:
    """A user's object with a tensor on the device."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "count": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value.copy_(state["value"])


def run_handler(place: Place, api: Any, size: str) -> None:
    """A handler with a user's object, a policy, and a resume."""
    from torch_dcp_backport.checkpoint import CheckpointHandler, FSDPCheckpointManager, PreservationPolicy

    with shared_folder(place, "handler") as folder:

        def handler(seed: int) -> tuple[Any, nn.Module, Average]:
            model, optimizer = odd(place, seed)
            ema = Average(torch.full((5,), float(seed), device=place.device))
            manager = FSDPCheckpointManager(model, optimizer)
            made = CheckpointHandler(
                manager,
                default_local_dir=str(folder / "runs"),
                state={"ema": ema},
                preserve=PreservationPolicy(last=2),
            )
            return made, model, ema

        first, model, ema = handler(1)
        with place.timed():
            for step in (1, 2, 3):
                first.save_checkpoint(step)
            want = wholes(model)
            second, other, average = handler(2)
            assert second.load_checkpoint() == 3
        got = wholes(other)
        assert all(torch.equal(got[key], value) for key, value in want.items())
        assert torch.equal(average.value, ema.value), average.value
        assert average.value.device == place.device
        assert len(list((folder / "runs").glob("global_step_*"))) == 2


CASES: dict[str, Callable[[Place, Any, str], None]] = {
    "engine": functools.partial(run_engine, ways=PADDED_WAYS),
    "engine-packed": functools.partial(run_engine, ways=PACKED_WAYS),
    "engine-flex": functools.partial(run_engine, ways=FLEX_WAYS),
    "engine-ulysses": functools.partial(run_engine, ways=ULYSSES_WAYS),
    "engine-lora": run_adapters,
    "nearby": run_nearby,
    "background": run_background,
    "hf-files": run_files,
    "handler": run_handler,
}
