"""verl 0.9's SFT program as it is, with this engine: it trains as one process, and resumes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import test_engine_verl
import torch
import torch.distributed as dist
from test_engine_verl import ROWS, one_step, registered

if test_engine_verl.IS_0_7:
    pytest.skip("verl 0.9 is in the lane verl-0.9", allow_module_level=True)

workers = test_engine_verl.workers
WORDS = 20
RATE, EPOCHS, SAMPLES = 0.5, 2, 2 * ROWS
#: Of each message its role, its words, and an end.
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} end {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def write(folder: Path) -> Path:
    """A model with a tokenizer of a few words, and conversations of different lengths."""
    import pandas
    import tokenizers
    import transformers

    words = ["pad", "user", "assistant", "end", *(f"w{number}" for number in range(WORDS))]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: place for place, word in enumerate(words)}, "pad")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "pad", "pad_token": "pad", "eos_token": "end", "bos_token": "end"}
    test_engine_verl.test_qwen.write(folder / "m", is_tied=False)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, chat_template=TEMPLATE, **special
    ).save_pretrained(folder / "m")
    draw = torch.Generator().manual_seed(0)

    def text() -> str:
        count = int(torch.randint(1, 6, (), generator=draw))
        return " ".join(f"w{place}" for place in torch.randint(WORDS, (count,), generator=draw).tolist())

    rows = [
        [{"role": role, "content": text()} for role in ("user", "assistant", "user", "assistant")]
        for _ in range(SAMPLES)
    ]
    pandas.DataFrame({"messages": rows}).to_parquet(folder / "rows.parquet")
    return folder


def configured(folder: Path, name: str) -> Any:
    """verl's own configuration, by its command line's options."""
    import verl
    from hydra import compose, initialize_config_dir

    options = {
        "model.path": folder / "m",
        "engine.strategy": "fsdp2",
        "engine.mixed_precision": "{param_dtype:fp32,reduce_dtype:fp32}",
        "engine.use_no_sync_for_gradient_accumulation": True,
        "optim.optimizer": "SGD",
        "optim.lr": RATE,
        "optim.weight_decay": 0.0,
        "optim.clip_grad": 0.5,
        "data.train_files": folder / "rows.parquet",
        "data.val_files": folder / "rows.parquet",
        "data.train_batch_size": ROWS,
        "data.max_token_len_per_gpu": 60,
        "data.num_workers": 0,
        "trainer.device": "cpu",
        "trainer.logger": "[file]",
        "trainer.default_local_dir": folder / name,
        "trainer.total_epochs": EPOCHS,
        "trainer.save_freq": 1,
        "trainer.test_freq": 2,
        "trainer.max_ckpt_to_keep": 3,
    }
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        return compose("sft_trainer_engine", [f"++{key}={value}" for key, value in options.items()])


def fitted(api: Any, folder: Path, name: str) -> dict[str, torch.Tensor]:
    from verl.trainer import sft_trainer

    registered()
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, WORLD_SIZE=world, MASTER_ADDR="-", MASTER_PORT="0")
    os.environ["VERL_FILE_LOGGER_PATH"] = str(folder / f"{name}.jsonl")
    trainer = sft_trainer.SFTTrainer(configured(folder, name))
    begun = weights_of(trainer.engine)
    trainer.fit()
    return {"begun": begun, "weights": weights_of(trainer.engine)}


def weights_of(made: Any) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in made.get_per_tensor_param(dtype=None)[0]}


def alone(api: Any, folder: Path, begun: dict[str, torch.Tensor]) -> Any:
    """Losses and weights of one process, with the rows that verl's samplers give all ranks."""
    import transformers
    from verl.trainer import sft_trainer
    from verl.utils.dataset.dataset_utils import SFTTensorCollator

    config = configured(folder, "none")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "m")
    rows = sft_trainer.create_sft_dataset(config.data.train_files, config.data, tokenizer, None)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "m", dtype=torch.float32)
    model.load_state_dict(begun)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    world, losses = dist.get_world_size(), []
    for epoch in range(EPOCHS):
        samplers = [
            torch.utils.data.DistributedSampler(rows, num_replicas=world, rank=rank, drop_last=True)
            for rank in range(world)
        ]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        places = [list(sampler) for sampler in samplers]
        for start in range(0, len(places[0]), ROWS // world):
            picked = [rows[place] for own in places for place in own[start : start + ROWS // world]]
            data = dict(SFTTensorCollator("no_padding")(picked))
            losses.append(one_step(model, optimizer, "sft", data)[0])
    return losses, {key: value.detach() for key, value in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore")
def test_it_trains_as_one_process_and_resumes(workers: Any, tmp_path: Path) -> None:
    write(tmp_path)
    found = workers(fitted, tmp_path, "run")[0]
    losses, weights = workers(alone, tmp_path, found["begun"])[0]
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    trained = [line["data"]["train/loss"] for line in lines if "train/loss" in line["data"]]
    assert trained == pytest.approx(losses, abs=1e-5, rel=1e-5)
    assert [line["step"] for line in lines if "val/loss" in line["data"]] == [2, 4]
    for key, value in weights.items():
        torch.testing.assert_close(found["weights"][key], value, atol=1e-5, rtol=1e-5)
    # Of a step that goes, what verl's own handler has put into it stays.
    left = {path.name for path in (tmp_path / "run" / "global_step_1").iterdir()}
    assert left == {"data_0.pt", "data_1.pt"}

    # As if it had ended after the third step.
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("3")
    again = workers(fitted, tmp_path, "run")[0]
    for key, value in found["weights"].items():
        assert torch.equal(again["weights"][key], value)
    assert not all(torch.equal(again["begun"][key], value) for key, value in found["weights"].items())
    (line,) = [json.loads(text) for text in (tmp_path / "run.jsonl").read_text().splitlines()][:1]
    assert line["step"] == 4
