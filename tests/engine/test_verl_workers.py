"""verl 0.7's worker and trainer with verl's own engine: our manager and handler stand under their names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import test_engine_verl
import torch
import torch.distributed as dist
from test_engine_verl import STEPS, WORLD, losses_of, stepped
from test_verl_trainer import trainer_of

from torch_dcp_backport import checkpoint

workers = test_engine_verl.workers
BOTH = ["model", "optimizer", "extra", "verl"]


class Trusting(checkpoint.FSDPCheckpointManager):
    """verl's own files are pickles, which are read where they are trusted."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, trust=True)


def worker_of(folder: Path, is_ours: bool, contents: list[str] = BOTH) -> Any:
    """verl's TrainingWorker with its FSDPEngine, which a CPU is no device of until it is registered."""
    from verl.trainer.config import CheckpointConfig
    from verl.utils.checkpoint import fsdp_checkpoint_manager
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp import transformer_impl
    from verl.workers.engine_workers import TrainingWorker

    EngineRegistry.register("language_model", ["fsdp2"], ["cpu"])(transformer_impl.FSDPEngineWithLMHead)
    manager = Trusting if is_ours else fsdp_checkpoint_manager.FSDPCheckpointManager
    transformer_impl.FSDPCheckpointManager = manager
    transformer_impl.log_gpu_memory_usage = lambda *_, **__: None
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(WORLD), MASTER_ADDR="-", MASTER_PORT="0")
    single = {"param_dtype": "fp32", "reduce_dtype": "fp32"}
    saved = contents if is_ours else BOTH[:3]
    made = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=str(folder),
                load_tokenizer=False,
                use_remove_padding=False,
                enable_gradient_checkpointing=False,
                override_config={"attn_implementation": "eager"},
            ),
            engine_config=FSDPEngineConfig(strategy="fsdp2", mixed_precision=single, use_torch_compile=False),
            optimizer_config=FSDPOptimizerConfig(lr=1e-2, total_training_steps=STEPS + 1),
            checkpoint_config=CheckpointConfig(save_contents=saved, load_contents=saved),
        )
    )
    made.set_loss_fn(loss_fn=losses_of("sft")[0])
    made.reset()
    return made


def facts(worker: Any) -> dict[str, Any]:
    own = worker.engine
    local = {name: value.to_local().clone() for name, value in own.module.state_dict().items()}
    states = [
        [
            (value.to_local() if hasattr(value, "to_local") else value).clone()
            for _, value in sorted(state.items())
        ]
        for state in own.optimizer.state_dict()["state"].values()
    ]
    return {"model": local, "states": states, "rate": own.lr_scheduler.get_last_lr()}


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    pairs = [(found["model"][name], value) for name, value in expected["model"].items()]
    pairs += [pair for states in zip(found["states"], expected["states"]) for pair in zip(*states)]
    return found["rate"] == expected["rate"] and all(torch.equal(*pair) for pair in pairs)


def run(api: Any, folder: Path, root: Path) -> None:
    """An unstopped run of verl's; a run that is saved by ours, ended and resumed; each reads the other's."""
    whole = worker_of(folder, False)
    for step in range(STEPS):
        stepped(whole, "sft", step)
    whole.save_checkpoint(str(root / "theirs" / "global_step_3"), None, STEPS, None)
    before = facts(whole)
    stepped(whole, "sft", STEPS)
    expected = facts(whole)
    assert not same(before, expected)

    trainer = trainer_of(root / "ours", worker := worker_of(folder, True))
    assert trainer.ckpt_handler.load_checkpoint() == 0
    for step in range(STEPS):
        stepped(worker, "sft", step)
        trainer.train_dataloader.position = step + 1
        trainer.ckpt_handler.save_checkpoint(step=step + 1)
    assert same(facts(worker), before)
    resumed = trainer_of(root / "ours", again := worker_of(folder, True))
    assert resumed.ckpt_handler.load_checkpoint() == STEPS
    assert resumed.train_dataloader.position == STEPS
    assert same(facts(again), before)
    stepped(again, "sft", STEPS)
    assert same(facts(again), expected)

    for is_ours, path in ((False, root / "ours"), (True, root / "theirs")):
        other = worker_of(folder, is_ours)
        # By the worker, whose engine has verl's default: del_local_after_load=True.
        other.engine.load_checkpoint(str(path / "global_step_3"))
        stepped(other, "sft", STEPS)
        assert same(facts(other), expected)
    dist.barrier()
    assert (root / "theirs" / "global_step_3").is_dir()


@pytest.mark.filterwarnings("ignore")
def test_its_worker_resumes_as_if_it_had_not_stopped(workers: Any, tmp_path: Path) -> None:
    test_engine_verl.test_qwen.write(tmp_path / "m", is_tied=False)
    workers(run, tmp_path / "m", tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_its_merger_reads_a_step(workers: Any, tmp_path: Path) -> None:
    """verl's files beside ours, and its merger's result beside the model that was saved."""
    import tokenizers
    import transformers
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    test_engine_verl.test_qwen.write(tmp_path / "m", is_tied=False)
    whole = workers(saved, tmp_path / "m", tmp_path / "step")[0]
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
    special = {"unk_token": "a", "eos_token": "a", "pad_token": "a"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)
    tokenizer.save_pretrained(tmp_path / "step" / "huggingface")
    folders = {"local_dir": str(tmp_path / "step"), "target_dir": str(tmp_path / "out")}
    config = ModelMergerConfig(
        operation="merge",
        backend="fsdp",
        hf_model_config_path=str(tmp_path / "step" / "huggingface"),
        **folders,
    )
    FSDPModelMerger(config).merge_and_save()
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert merged.keys() == whole.keys()
    assert all(torch.equal(merged[name], value.bfloat16().to(merged[name])) for name, value in whole.items())


def saved(api: Any, model: Path, folder: Path) -> dict[str, torch.Tensor]:
    worker = worker_of(model, True, ["verl"])
    stepped(worker, "sft", 0)
    worker.save_checkpoint(str(folder), None, 1, None)
    dist.barrier()
    return {name: value.full_tensor() for name, value in worker.engine.module.state_dict().items()}
