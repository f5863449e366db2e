"""verl's worker and trainer (0.7 and 0.9) with verl's own engine: our manager and handler are in them."""

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
    from verl.workers.engine.fsdp import transformer_impl
    from verl.workers.engine_workers import TrainingWorker

    test_engine_verl.registered(language_model=transformer_impl.FSDPEngineWithLMHead)
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
    import transformers
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    test_engine_verl.test_qwen.write(tmp_path / "m", is_tied=False)
    whole = workers(saved, tmp_path / "m", tmp_path / "step")[0]
    write_tokenizer(tmp_path / "step" / "huggingface")
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


def write_tokenizer(folder: Path) -> None:
    import tokenizers
    import transformers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
    special = {"unk_token": "a", "eos_token": "a", "pad_token": "a", "bos_token": "a"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


def actor_of(folder: Path, is_ours: bool) -> Any:
    """verl's ActorRolloutRefWorker as an actor, with its model made."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf
    from verl.utils.checkpoint import fsdp_checkpoint_manager
    from verl.workers import fsdp_workers

    fsdp_workers.FSDPCheckpointManager = (
        Trusting if is_ours else fsdp_checkpoint_manager.FSDPCheckpointManager
    )
    for name in ("log_gpu_memory_usage", "aggressive_empty_cache"):
        setattr(fsdp_workers, name, lambda *_, **__: None)
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, WORLD_SIZE=str(WORLD), MASTER_ADDR="-", MASTER_PORT="0", LOCAL_RANK=rank)
    root = Path(fsdp_workers.__file__).parents[1] / "trainer" / "config"
    with initialize_config_dir(str(root), version_base=None):
        config = compose("ppo_trainer").actor_rollout_ref
    OmegaConf.set_struct(config, False)
    config.model.path, config.model.use_remove_padding = str(folder), False
    config.model.enable_gradient_checkpointing = False
    config.model.override_config = {"attn_implementation": "eager"}
    config.actor.strategy = config.actor.fsdp_config.strategy = "fsdp2"
    config.actor.ppo_micro_batch_size_per_gpu = 1
    config.actor.optim.total_training_steps = 10
    config.actor.checkpoint.save_contents = BOTH if is_ours else BOTH[:3]
    made = fsdp_workers.ActorRolloutRefWorker(config, role="actor")
    made.init_model()
    return made


def facts_of_actor(worker: Any) -> dict[str, Any]:
    states = worker.actor_optimizer.state_dict()["state"].values()
    local = [part for state in states for _, part in sorted(state.items())]
    local += list(worker.actor_module_fsdp.state_dict().values())
    parts = [(part.to_local() if hasattr(part, "to_local") else part).clone() for part in local]
    return {"model": dict(enumerate(parts)), "states": [], "rate": worker.actor_lr_scheduler.get_last_lr()}


def acted(api: Any, model: Path, root: Path) -> None:
    folders = {is_ours: str(root / f"{is_ours}" / "global_step_2" / "actor") for is_ours in (False, True)}
    for is_ours, folder in folders.items():
        worker = actor_of(model, is_ours)
        for _ in range(2):
            for parameter in worker.actor_module_fsdp.parameters():
                parameter.grad = parameter.detach() * 0.5
            worker.actor_optimizer.step()
            worker.actor_lr_scheduler.step()
        worker.save_checkpoint(folder, None, 2, 1)
        expected = facts_of_actor(worker)
    # Each reads both kinds of folders: the steps were the same.
    for is_ours in (False, True):
        for folder in folders.values():
            fresh = actor_of(model, is_ours)
            assert not fresh.actor_optimizer.state
            fresh.load_checkpoint(folder, del_local_after_load=True)
            assert same(facts_of_actor(fresh), expected)


@pytest.mark.skipif(not test_engine_verl.IS_0_7, reason="verl 0.9 has no fsdp_workers")
@pytest.mark.filterwarnings("ignore")
def test_its_actor_saves_and_loads(workers: Any, tmp_path: Path) -> None:
    test_engine_verl.test_qwen.write(tmp_path / "m", is_tied=False)
    write_tokenizer(tmp_path / "m")
    workers(acted, tmp_path / "m", tmp_path)


def saved(api: Any, model: Path, folder: Path) -> dict[str, torch.Tensor]:
    worker = worker_of(model, True, ["verl"])
    stepped(worker, "sft", 0)
    worker.save_checkpoint(str(folder), None, 1, None)
    dist.barrier()
    return {name: value.full_tensor() for name, value in worker.engine.module.state_dict().items()}
