"""verl 0.7 and 0.9 as they are: their worker trains with this engine and their losses as one process does."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import small
import torch
import torch.distributed as dist
from pool import Pool

from torch_dcp_backport import checkpoint, engine
from torch_dcp_backport.engine._src import batches, config, lora
from torch_dcp_backport.engine._src import verl as known
from torch_dcp_backport.transfer._src import once

try:
    VERSION = importlib.metadata.version("verl")
except importlib.metadata.PackageNotFoundError:
    VERSION = ""
if not VERSION.startswith(("0.7.", "0.9.")):
    pytest.skip("verl 0.7 is in the lane verl, 0.9 in the lane verl-0.9", allow_module_level=True)
IS_0_7 = VERSION.startswith("0.7.")
test_qwen = pytest.importorskip("test_engine_transformers")

WORLD, ROWS, PROMPT, RESPONSE = 2, 8, 4, 6
RATE, STEPS = 0.5, 3


@pytest.fixture(scope="module")
def workers() -> Iterator[Callable[..., list[Any]]]:
    """Ranks that have imported verl once, in the process that they are forks of."""
    imports = (
        "torch_dcp_backport",
        "verl_cpu",
        "verl.workers.engine_workers",
        "peft",
        "transformers.models.qwen2",
    )
    pools: list[Pool] = []

    def run(*args: Any) -> list[Any]:
        if not pools or not pools[-1].usable:
            pools.append(Pool(WORLD, "torch_dcp_backport.engine", timeout=60.0, imports=imports))
        return pools[-1].run(*args)

    yield run
    for pool in pools:
        pool.close()


def drawn(step: int) -> dict[str, torch.Tensor]:
    """All ranks' rows as a rollout gives them: prompts padded on the left, responses on the right."""
    draw = torch.Generator().manual_seed(step)
    prompts = torch.randint(1, small.VOCABULARY, (ROWS, PROMPT), generator=draw)
    responses = torch.randint(1, small.VOCABULARY, (ROWS, RESPONSE), generator=draw)
    skipped = torch.randint(0, PROMPT - 1, (ROWS, 1), generator=draw)
    lengths = torch.randint(1, RESPONSE + 1, (ROWS, 1), generator=draw)
    is_prompt, is_response = torch.arange(PROMPT) >= skipped, torch.arange(RESPONSE) < lengths
    numbers = {
        name: torch.randn(ROWS, RESPONSE, generator=draw)
        for name in ("advantages", "ref_log_prob", "values", "returns")
    }
    return {
        **numbers,
        "old_log_probs": -3.3 + 0.1 * numbers["ref_log_prob"],
        "prompts": prompts * is_prompt,
        "responses": responses * is_response,
        "attention_mask": torch.cat([is_prompt, is_response], 1).long(),
        "response_mask": is_response.long(),
    }


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def without_padding(data: dict[str, torch.Tensor], for_sft: bool) -> dict[str, torch.Tensor]:
    """What verl makes of it, with flash-attn: ids jagged, and a policy's loss masks responses."""
    there = data["attention_mask"].bool()
    rows = [row[keep] for row, keep in zip(torch.cat([data["prompts"], data["responses"]], 1), there)]
    made = {"input_ids": jagged(rows), "position_ids": jagged([torch.arange(len(row)) for row in rows])}
    if not for_sft:
        return {**data, **made, "loss_mask": data["response_mask"]}
    marked = torch.cat([torch.zeros(len(rows), PROMPT, dtype=torch.long), data["response_mask"]], 1)
    return {**made, "loss_mask": jagged([row[keep] for row, keep in zip(marked, there)])}


def own(data: dict[str, torch.Tensor], made: Any) -> dict[str, torch.Tensor]:
    rank, size = made.get_data_parallel_rank(), made.get_data_parallel_size()
    rows = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    return {name: value[rows] for name, value in data.items()}


def losses_of(kind: str) -> tuple[Any, dict[str, Any]]:
    """verl's loss, and what its trainers say of a batch beside the tensors."""
    from verl.workers.config import CriticConfig, FSDPActorConfig
    from verl.workers.utils import losses

    if kind == "sft":
        from verl.utils.dataset.dataset_utils import DatasetPadMode

        said = {"pad_mode": DatasetPadMode.NO_PADDING, "use_dynamic_bsz": True, "max_token_len_per_gpu": 20}
        return functools.partial(losses.sft_loss, config=None), said
    said = {"global_batch_size": ROWS, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
    if kind == "value":
        needed = {"model_config": object()} if IS_0_7 else {"model": object()}
        config = CriticConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=2, **needed)
        return functools.partial(losses.value_loss, config=config), said
    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=2, use_kl_loss=True, entropy_coeff=0.01
    )
    return functools.partial(losses.ppo_loss, config=config), {**said, "calculate_entropy": True}


def registered(**others: Any) -> None:
    """Put our classes into verl's registry, for the CPU; or others, by the types of models."""
    from verl.workers import engine as verl_engine

    ours = {
        name: type(kind.__name__, (kind, verl_engine.BaseEngine), {})
        for name, kind in (
            ("language_model", engine.FSDPEngineWithLMHead),
            ("value_model", engine.FSDPEngineWithValueHead),
        )
    }
    for name, kind in {**ours, **others}.items():
        # verl 0.9 refuses to register a second one.
        verl_engine.EngineRegistry._engines.get(name, {}).get("fsdp2", {}).pop("cpu", None)
        verl_engine.EngineRegistry.register(name, ["fsdp2"], ["cpu"])(kind)


def worker_of(folder: Path, kind: str, **options: Any) -> Any:
    """verl's own worker; all that it is told of this package is a class in its registry."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    registered()
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(WORLD), MASTER_ADDR="-", MASTER_PORT="0")
    single = {"param_dtype": "fp32", "reduce_dtype": "fp32"}
    optimizer = FSDPOptimizerConfig(
        optimizer="SGD", lr=RATE, weight_decay=0.0, lr_scheduler_type="cosine", clip_grad=0.5
    )
    config = TrainingWorkerConfig(
        model_type="value_model" if kind == "value" else "language_model",
        model_config=HFModelConfig(
            path=str(folder), load_tokenizer=False, enable_gradient_checkpointing=kind == "sft"
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2", mixed_precision=single, param_offload=True, optimizer_offload=True, **options
        ),
        optimizer_config=optimizer,
        checkpoint_config=CheckpointConfig(),
    )
    made = TrainingWorker(config)
    made.set_loss_fn(loss_fn=losses_of(kind)[0])
    optimizer.total_training_steps = STEPS + 1  # as SFTTrainer does, once it has the worker and the data
    made.reset()
    return made


def stepped(worker: Any, kind: str, step: int) -> Any:
    """One step, by the calls of verl's trainers."""
    from tensordict.tensorclass import NonTensorData
    from verl.utils import tensordict_utils as tu

    rows = own(drawn(step), worker.engine)
    said = {**losses_of(kind)[1], "temperature": 1.0}
    data = tu.get_tensordict(without_padding(rows, kind == "sft"), said)
    if kind == "sft":
        lengths = drawn(step)["attention_mask"].sum(1).tolist()
        tu.assign_non_tensor(data, update_lr_scheduler=True, global_token_num=NonTensorData(lengths))
        return metrics_of(worker.train_batch(data))
    tu.assign_non_tensor(data, mini_batch_size=ROWS, epochs=1, seed=1, dataloader_kwargs={"shuffle": False})
    return metrics_of(worker.train_mini_batch(data))


def metrics_of(output: Any) -> Any:
    """None on ranks whose outputs verl does not use, since another rank has the same."""
    from verl.utils import tensordict_utils as tu

    return None if output is None else tu.get(output, "metrics")


def weights_of(worker: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in worker.engine.get_per_tensor_param(dtype=None)[0]}


def run(api: Any, folder: Path, kind: str, options: Any) -> Any:
    worker = worker_of(folder, kind, **options)
    assert worker.engine.is_packing
    begun = weights_of(worker)
    metrics = [stepped(worker, kind, step) for step in range(STEPS)]
    weights = weights_of(worker)
    worker.save_checkpoint(str(folder.parent / "global_step_3"), None, STEPS, None)
    after = stepped(worker, kind, STEPS), weights_of(worker)
    worker.to("cpu")
    worker.to("device")
    again = worker_of(folder, kind, **options)
    again.load_checkpoint(str(folder.parent / "global_step_3"))
    resumed = stepped(again, kind, STEPS), weights_of(again)
    return {"begun": begun, "metrics": metrics, "weights": weights, "after": after, "resumed": resumed}


def expected(api: Any, folder: Path, kind: str, begun: dict[str, torch.Tensor]) -> Any:
    """The same by verl's losses and torch in one process, row by row."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    config = transformers.AutoConfig.from_pretrained(folder)
    if kind == "value":
        auto = transformers.AutoModelForTokenClassification
        config.num_labels, config.classifier_dropout = 1, 0.0
    model = auto.from_config(config)
    model.load_state_dict(begun)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    found = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATE * 0.5 * (1 + math.cos(math.pi * step / (STEPS + 1)))
        data = without_padding(drawn(step), kind == "sft")
        found.append(one_step(model, optimizer, kind, data))
    return found, {name: value.detach() for name, value in model.state_dict().items()}


def one_step(model: Any, optimizer: Any, kind: str, data: dict[str, torch.Tensor]) -> tuple[float, float]:
    from verl.utils import tensordict_utils as tu

    loss_function, said = losses_of(kind)
    marked = data["loss_mask"].values() if kind == "sft" else data["loss_mask"]
    common = {**said, "batch_num_tokens": marked.sum().item(), "dp_size": 1}
    # verl 0.7 divides a value's loss by the tokens of its micro-batch: it matters which rows are together.
    is_of_parts = kind == "value" and IS_0_7
    size = 2 if is_of_parts else ROWS
    total = 0.0
    optimizer.zero_grad()
    for start in range(0, ROWS, size):
        rows = {name: value[start : start + size] for name, value in data.items() if not value.is_nested}
        for name in ("input_ids", "loss_mask"):
            if data[name].is_nested:
                rows[name] = jagged(list(data[name].unbind()[start : start + size]))
        loss, _ = loss_function(
            model_output=outputs(model, rows["input_ids"], kind), data=tu.get_tensordict(rows, common)
        )
        loss = loss / (WORLD if is_of_parts else 1)
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
    optimizer.step()
    return total, norm


def outputs(model: Any, ids: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
    found: dict[str, list[torch.Tensor]] = {}
    for row in ids.unbind():
        logits = model(input_ids=row[None]).logits[0].float()
        if kind == "value":
            found.setdefault("values", []).append(logits[:, 0])
            continue
        logs = logits.log_softmax(-1)
        picked = logs[:-1].gather(-1, row[1:, None])[:, 0]
        found.setdefault("log_probs", []).append(torch.nn.functional.pad(picked, (0, 1)))
        found.setdefault("entropy", []).append(-(logs.exp() * logs).sum(-1))
    if kind == "sft":
        found.pop("entropy")
    offsets = ids.offsets()
    return {n: torch.nested.nested_tensor_from_jagged(torch.cat(rows), offsets) for n, rows in found.items()}


SHARING = {"ulysses_sequence_parallel_size": WORLD}


@pytest.mark.parametrize(
    ("kind", "options"),
    [("sft", {}), ("ppo", {}), ("value", {}), ("sft", SHARING), ("ppo", SHARING)],
    ids=str,
)
def test_its_worker_trains_as_one_process(workers: Any, tmp_path: Path, kind: str, options: Any) -> None:
    """With rows packed, as verl's objects ask for."""
    test_qwen.write(tmp_path / "m")
    results = workers(run, tmp_path / "m", kind, options)
    steps, weights = workers(expected, tmp_path / "m", kind, results[0]["begun"])[0]
    for place, found in enumerate(results):
        if options and place:
            assert found["metrics"] == [None] * STEPS
            continue
        for metrics, (loss, norm) in zip(found["metrics"], steps):
            scalar = {name: value for name, value in metrics.items() if name in ("loss", "grad_norm")}
            got = {name: value[0] if isinstance(value, list) else value for name, value in scalar.items()}
            assert got == pytest.approx({"loss": loss, "grad_norm": norm}, abs=1e-5, rel=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(found["weights"][name], value, atol=1e-5, rtol=1e-5)
        (after, last), (metrics, resumed) = found["after"], found["resumed"]
        assert after["loss"] == metrics["loss"]
        assert all(torch.equal(value, last[name]) for name, value in resumed.items())


def inferred(api: Any, folder: Path) -> Any:
    """A validation's loss, and log-probabilities of what was generated."""
    from verl.utils import tensordict_utils as tu

    worker = worker_of(folder, "sft")
    data = own(drawn(0), worker.engine)
    said = {**losses_of("sft")[1], "temperature": 1.0, "calculate_entropy": True}
    loss = worker.infer_batch(
        tu.get_tensordict(without_padding(data, True), {**said, "global_token_num": None})
    )
    rows = tu.get_tensordict(without_padding(data, False), {**said, "global_token_num": None})
    tu.assign_non_tensor(rows, compute_loss=False)
    output = worker.infer_batch(rows)
    made = {name: [row.clone() for row in output[name].unbind()] for name in ("log_probs", "entropy")}
    return tu.get(loss, "metrics")["loss"], made


def exported(api: Any, folder: Path) -> Any:
    """A step's changes by ours, and by verl's own functions of our parts, gathered by verl's own function."""
    from verl.checkpoint_engine.delta_sync.sparse_gather import gather_slot_entries_to_rank0
    from verl.workers.engine import utils

    worker = worker_of(folder, "ppo", fsdp_size=-1)
    made = worker.engine
    rollout = {name: value.clone() for name, value in made.get_per_tensor_param()[0]}
    made.prime_delta_snapshots()
    theirs: dict[str, torch.Tensor] = {}
    utils.prime_delta_snapshots(made.get_per_tensor_param_shard()[0], theirs, pin=False)
    stepped(worker, "ppo", 0)
    ours = list(made.get_per_tensor_param_delta_shard()[0])
    parts = made.get_per_tensor_param_shard()[0]
    for found, wanted in zip(ours, utils.hf_delta_export(parts, theirs, lambda *of: identity(utils, *of))):
        (slots, dtype, counts, positions, values, group), expected = found, wanted
        assert (slots, dtype, group) == (expected[0], expected[1], expected[5])
        assert all(torch.equal(*pair) for pair in zip((counts, positions, values), expected[2:5]))
        assert positions.dtype == expected[3].dtype
        (pair,) = gather_slot_entries_to_rank0(positions, values, counts, group=group) or [None]
        if pair is not None:
            rollout[slots[0][0]].view(-1)[pair[0].long()] = pair[1]
    assert len(ours) == len(theirs) == len(rollout)
    moved = sum(int(found[2]) for found in ours)
    now = {name: value.clone() for name, value in made.get_per_tensor_param()[0]}
    return moved, dist.get_rank() or all(torch.equal(value, rollout[name]) for name, value in now.items())


def identity(utils: Any, name: str, spec: Any, place: Any, positions: Any, values: Any) -> Any:
    return utils._hf_entry_identity(name, spec, place, positions, values)


@pytest.mark.skipif(IS_0_7, reason="verl 0.7 has no exports of changes")
def test_its_own_functions_export_the_same_changes(workers: Any, tmp_path: Path) -> None:
    test_qwen.write(tmp_path / "m")
    (moved, is_same), (others, _) = workers(exported, tmp_path / "m")
    assert is_same
    assert moved
    assert others


def given(api: Any, folder: Path) -> list[str]:
    """What a loss gets of a TensorDict, of one with wrapped values, and of a dict."""
    import tensordict
    from verl.utils import tensordict_utils as tu

    made, seen = worker_of(folder, "ppo").engine, []
    rows = own(drawn(0), made)
    ids = torch.cat([rows["prompts"], rows["responses"]], 1)
    mark = torch.cat([torch.zeros_like(rows["prompts"]), rows["response_mask"]], 1)
    tensors = {"input_ids": ids, "attention_mask": rows["attention_mask"], "loss_mask": mark}
    said = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 3, "use_remove_padding": False}

    def loss_of(model_output: Any, data: Any, dp_group: Any) -> Any:
        if isinstance(data, tensordict.TensorDict):
            picked = data.select("loss_mask").to_padded_tensor()
            assert tuple(picked.batch_size) == (len(model_output["log_probs"]),)
            values = tu.get_non_tensor_data(data, "names", None), data["each"]
            more = [*data["in"]["each"]], data.get("info").data, data["calculate_entropy"]
            seen.append(f"{values[0]} {list(values[1])} {data['in']['score'].tolist()} {more}")
            assert data["dp_size"] == WORLD
            assert data["batch_num_tokens"] > 0
        else:
            seen.append(type(data).__name__)
        return model_output["log_probs"].sum() * 0, {}

    each = tensordict.NonTensorStack(*"abcd")
    inner = tensordict.TensorDict({"score": torch.arange(len(ids)), "each": each}, batch_size=[len(ids)])
    info = tensordict.NonTensorData({1: [5, 6, 7, 8]} if dist.get_rank() else {})
    asked = tensordict.NonTensorStack(*[True] * len(ids))  # as in joined batches
    wrapped = {"names": tensordict.NonTensorData(["x", "y"]), "each": each, "in": inner, "info": info}
    wrapped["calculate_entropy"] = asked
    data = tu.get_tensordict({**tensors}, said)
    for name, value in wrapped.items():
        data[name] = value
    with made.train_mode():
        made.forward_backward_batch(data, loss_of)
        made.forward_backward_batch({**tensors, **said}, loss_of)
    return seen


def test_a_loss_gets_a_tensor_dict_where_one_came(workers: Any, tmp_path: Path) -> None:
    test_qwen.write(tmp_path / "m")
    for rank, seen in enumerate(workers(given, tmp_path / "m")):
        more = f"{ {1: [5, 6, 7, 8]} if rank else {} }, True)"
        first = f"['x', 'y'] ['a', 'b', 'c'] [0, 1, 2] (['a', 'b', 'c'], {more}"
        assert seen == [first, f"['x', 'y'] ['d'] [3] (['d'], {more}", "dict", "dict"]


def test_its_worker_infers_what_one_process_does(workers: Any, tmp_path: Path) -> None:
    model = test_qwen.write(tmp_path / "m")
    data = without_padding(drawn(0), True)
    with torch.no_grad():
        wanted = {name: value.unbind() for name, value in outputs(model, data["input_ids"], "ppo").items()}
    marked = data["loss_mask"].values().roll(-1)
    total = -(torch.cat(list(wanted["log_probs"])) * marked).sum() / marked.sum()
    for rank, (loss, found) in enumerate(workers(inferred, tmp_path / "m")):
        assert loss == pytest.approx(total.item(), abs=1e-5)
        for name, rows in found.items():
            for number, row in enumerate(rows):
                want = wanted[name][rank * ROWS // WORLD + number]
                torch.testing.assert_close(row, want, atol=1e-5, rtol=1e-5)


def test_a_tensor_dict_says_itself_what_is_of_the_rows() -> None:
    import tensordict

    names = list("abcdefghi")
    common, own = tensordict.NonTensorData(names), tensordict.NonTensorStack(*names)
    inner = tensordict.TensorDict({"score": torch.arange(9)}, batch_size=[9])
    data = tensordict.TensorDict(
        {**small.batch(0), "common": common, "own": own, "in": inner}, batch_size=[9]
    )
    plan = batches.plan_alone(data, batches.Limit(rows=2))
    first, *_ = batches.micro_batches(data, plan)
    assert first.data["common"] == names
    assert first.data["own"] == names[:2]
    assert first.data["in"]["score"].tolist() == [0, 1]


def taken_apart(value: Any) -> Any:
    """An entry of a TensorDict with its class: of a TensorDict by key, of all others as lists."""
    import tensordict

    if isinstance(value, tensordict.TensorDict):
        return {key: taken_apart(value.get(key)) for key in value.keys()}  # noqa: SIM118
    kind, held = type(value).__name__, batches.unwrapped(value)
    if isinstance(held, dict):
        return kind, {key: batches.values_of(part).tolist() for key, part in held.items()}
    return kind, held.tolist() if isinstance(held, torch.Tensor) else list(held)


@pytest.mark.parametrize("is_inner", [False, True])
def test_a_loss_gets_each_entry_of_a_tensor_dict_as_it_came(is_inner: bool) -> None:
    """For all rows is what came so, of whatever length; cut are rows, also within a TensorDict."""
    import tensordict

    whole, each, rows = tensordict.NonTensorData, tensordict.NonTensorStack, list("abcdefghi")
    nested = torch.nested.nested_tensor([torch.ones(1)] * 3, layout=torch.jagged)
    entries = {
        "numbered": whole({1: torch.arange(9), 2: torch.tensor(5.0), 3: torch.arange(3)}),
        "jagged": whole({"t": nested}),
        "empty": whole({}),
        "tensor": whole(torch.arange(9)),
        "few": whole(torch.arange(2)),
        "list": whole(list(range(9))),
        "meta": tensordict.MetaData({"t": torch.arange(9)}),
        "unbatched": tensordict.UnbatchedTensor(torch.arange(9)),
        "stack": each(*rows),
        "dicts": each(*[{row: 1} for row in rows]),
        "rows": torch.arange(9),
        "in": tensordict.TensorDict({"u": each(*rows), "t": torch.arange(9)}, batch_size=[9]),
    }
    given = tensordict.TensorDict(entries, batch_size=[9])
    cut = {
        "stack": ("NonTensorStack", rows[:2]),
        "dicts": ("NonTensorStack", [{"a": 1}, {"b": 1}]),
        "rows": ("Tensor", [0, 1]),
        "in": {"u": ("NonTensorStack", rows[:2]), "t": ("Tensor", [0, 1])},
    }
    expected = {**taken_apart(given), **cut}
    more = {"more": given} if is_inner else entries
    data = tensordict.TensorDict({**small.batch(0), **more}, batch_size=[9])
    plan = batches.plan_alone(data, batches.Limit(rows=2))
    first, *_, _ = batches.micro_batches(data, plan._replace(parts=[*plan.parts, []]))  # the last has no row
    on_device = batches.on_device(first.data, torch.device("cpu"), data)
    made = batches.like_batch(data, {**on_device, "dp_size": 2}, 2)
    assert made["dp_size"] == 2
    found = made["more"] if is_inner else made.select(*entries)
    assert taken_apart(found) == expected


def flagged(api: Any, folder: Path) -> dict[str, list[str]]:
    """What an engine gives of a flag that stands in tensordict's wrappers."""
    import tensordict

    rank = dist.get_rank()
    built = worker_of(folder, "ppo").engine
    rows = ROWS // WORLD if rank else 1
    said = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1, "temperature": 1.0}

    def outputs_of(flag: Any) -> list[str]:
        data = {name: value[:rows] for name, value in own(drawn(0), built).items()}
        ids = torch.cat([data["prompts"], data["responses"]], 1)
        made = {"input_ids": ids, "attention_mask": data["attention_mask"], "calculate_entropy": flag(rows)}
        settings = {name: plain(value, rows) for name, value in said.items()}
        batch = tensordict.TensorDict({**made, **settings}, batch_size=[rows])
        with built.eval_mode(), torch.no_grad():
            try:
                found = built.forward_backward_batch(batch, None, forward_only=True)
            except RuntimeError as error:
                return [str(error)]
        return sorted(found["model_output"])

    def plain(value: Any, rows: int) -> Any:
        return tensordict.NonTensorData(value, batch_size=[rows])

    each = tensordict.NonTensorStack
    return {
        "on": outputs_of(lambda rows: plain(True, rows)),
        "off": outputs_of(lambda rows: plain(False, rows)),
        "each on": outputs_of(lambda rows: each(*[True] * rows)),
        "each off": outputs_of(lambda rows: each(*[False] * rows)),
        "text": outputs_of(lambda rows: plain("False", rows)),
        "some": outputs_of(lambda rows: each(*[False] * (rows - 1), rank == 1)),
    }


def test_flags_in_wrappers_are_read_as_their_value(workers: Any, tmp_path: Path) -> None:
    """One rank has a row, and another four: it takes part in three micro-batches without any."""
    test_qwen.write(tmp_path / "m")
    for found in workers(flagged, tmp_path / "m"):
        assert found["on"] == found["each on"] == ["entropy", "log_probs"]
        assert found["off"] == found["each off"] == ["log_probs"]
        assert "calculate_entropy='False': expected True or False" in found["text"][0]
        assert "rank 1: " in found["some"][0]
        assert "calculate_entropy is False for some rows and True for others" in found["some"][0]


@pytest.mark.parametrize(
    "options", [{}, {"exclude_modules": ["v_proj"]}, {"target_modules": "all-linear"}], ids=str
)
def test_weights_below_adapters_have_its_names(tmp_path: Path, options: dict[str, Any]) -> None:
    import peft
    from verl.utils.fsdp_utils import normalize_peft_param_name, replace_lora_wrapper

    model = test_qwen.write(tmp_path, is_tied=False)
    config = peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj", "v_proj"], **options})
    wrapped = peft.get_peft_model(model, config)
    own = wrapped.peft_config["default"]
    names = normalize_peft_param_name(wrapped.state_dict())
    expected = {replace_lora_wrapper(name, own) for name in names}
    assert set(lora.rollout_names(wrapped, wrapped.state_dict())) == expected


def keys_of(kind: Any) -> set[str]:
    return {entry.name for entry in dataclasses.fields(kind) if not entry.name.startswith("_")}


#: The settings that verl's classes have in one of the releases alone.
NOT_IN_0_7 = {
    "model_type", "entropy_from_logits_chunk_size", "use_no_sync_for_gradient_accumulation", "pad_to_length",
    "pad_to_length_bucket", "turbo_config", "strict", "save_lora_only",
}  # fmt: skip
NOT_IN_0_9 = {"grad_offload", "mbridge_config"}


def test_every_setting_of_its_objects_is_known() -> None:
    """A setting that a release adds has to be served, refused, or known to change nothing."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

    for kind in (HFModelConfig, FSDPEngineConfig, FSDPOptimizerConfig, CheckpointConfig):
        names = set(known.CLASSES[kind.__name__])
        others = {"share_embeddings_and_output_weights", *(NOT_IN_0_7 if IS_0_7 else NOT_IN_0_9)}
        assert keys_of(kind) == names - others, kind


def test_every_setting_within_its_settings_is_known(tmp_path: Path) -> None:
    from verl.workers.config import FSDPEngineConfig, HFModelConfig

    test_qwen.write(tmp_path)
    model = HFModelConfig(path=str(tmp_path), load_tokenizer=False)
    for owner in (model, FSDPEngineConfig(strategy="fsdp2")):
        for name, entry in known.CLASSES[type(owner).__name__].items():
            if entry.inner:
                value = getattr(owner, name)
                keys = keys_of(type(value)) if dataclasses.is_dataclass(value) else set(value)
                assert keys == {*entry.inner, *entry.details}, name


def model_of(folder: Path, **options: Any) -> Any:
    from verl.workers.config import HFModelConfig

    asked = HFModelConfig(
        path=str(folder), load_tokenizer=False, enable_gradient_checkpointing=False, **options
    )
    return config.settings(config.ModelConfig, asked)


def test_its_defaults_are_served_without_a_word(tmp_path: Path) -> None:
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig

    test_qwen.write(tmp_path)
    for made in (
        model_of(tmp_path),
        config.settings(config.EngineConfig, FSDPEngineConfig(strategy="fsdp2")),
        config.settings(config.OptimizerConfig, FSDPOptimizerConfig()),
    ):
        assert made.no_effect == ()


@pytest.mark.parametrize(
    "options",
    [
        {"override_config": {"model_config": {"rms_norm_eps": 0.5}}},
        {"override_config": {"rms_norm_eps": 0.5}},
        {"hf_config_path": "elsewhere"},
    ],
    ids=str,
)
def test_its_configuration_is_that_of_the_model(tmp_path: Path, options: dict[str, Any]) -> None:
    """With the weights of another: as verl's own engine makes it of `hf_config`."""
    import transformers

    model = test_qwen.write(tmp_path / "m").eval()
    elsewhere = transformers.AutoConfig.from_pretrained(tmp_path / "m")
    elsewhere.rms_norm_eps = 0.5
    elsewhere.save_pretrained(tmp_path / "elsewhere")
    if "hf_config_path" in options:
        options = {"hf_config_path": str(tmp_path / "elsewhere")}
    with engine.parameters_on_meta(torch.float32):
        made = engine.language_model(model_of(tmp_path / "m", **options), torch.float32)
    engine.materialize(made, torch.device("cpu"))
    made.load_state_dict(model.state_dict())
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", config=elsewhere).eval()
    inputs = small.model_inputs(small.batch(0))
    with torch.no_grad():
        wanted, before, found = (part(**inputs).logits for part in (expected, model, made.eval()))
    assert (wanted - before).abs().max() > 1e-3
    torch.testing.assert_close(found, wanted)


def test_its_files_are_settings(tmp_path: Path) -> None:
    """As OmegaConf opens them, without verl's classes."""
    import verl
    from omegaconf import OmegaConf

    folder = Path(verl.__file__).parent / "trainer" / "config"
    files = {"engine/fsdp.yaml": config.EngineConfig, "optim/fsdp.yaml": config.OptimizerConfig}
    for name, kind in files.items():
        defaults = (
            {"min_lr_ratio": 0.0}
            if kind is config.OptimizerConfig
            else {"wrap_policy": {"min_num_params": 0}}
        )
        assert config.settings(kind, OmegaConf.load(folder / name)) == kind(**defaults)
    model = OmegaConf.load(folder / "model" / "hf_model.yaml")
    model.target_modules = ["q_proj"]
    found = config.settings(config.ModelConfig, model)
    assert found.no_effect == ()
    assert dataclasses.replace(found, lora=None) == config.ModelConfig(
        model.path,
        enable_gradient_checkpointing=True,
        target_modules=["q_proj"],
        use_remove_padding=True,
    )
    assert type(found.target_modules) is list


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("model", {"target_parameters": ["a"]}, "target_parameters is not offered"),
        ("model", {"lora": {"rank": 4}}, "lora.rank is not offered"),
        ("model", {"mtp": {"enable": True}}, "mtp.enable is not offered"),
        ("engine", {"qat": {"enable": True}}, "qat.enable is not offered"),
        ("engine", {"router_replay": {"mode": "R2"}}, "router_replay.mode is not offered: got 'R2'"),
        ("engine", {"dtype": "float16"}, "param_dtype is float16"),
        (
            "engine",
            {"ulysses_sequence_parallel_size": 2, "use_remove_padding": False},
            "ulysses_sequence_parallel_size=2 needs use_remove_padding=True",
        ),
        ("optimizer", {"optimizer_impl": "torchao.optim"}, "optimizer_impl is not offered"),
        ("optimizer", {"zero_indexed_step": False}, "zero_indexed_step is not offered"),
        ("optimizer", {"grad_clip": -1.0}, "clip_grad=-1.0"),
        ("optimizer", {"warmup_style": "cosine"}, "'cosine' needs total_training_steps"),
    ],
    ids=str,
)
def test_what_its_objects_ask_for_in_vain(tmp_path: Path, kind: str, options: Any, says: str) -> None:
    from verl.workers import config as verls
    from verl.workers.config.engine import EngineRouterReplayConfig, QATEngineConfig
    from verl.workers.config.model import MtpConfig

    test_qwen.write(tmp_path)
    parts = {"qat": QATEngineConfig, "router_replay": EngineRouterReplayConfig, "mtp": MtpConfig}
    options = {name: parts[name](**value) if name in parts else value for name, value in options.items()}

    def made() -> Any:
        if kind == "model":
            return model_of(tmp_path, **options)
        if kind == "engine":
            return config.settings(config.EngineConfig, verls.FSDPEngineConfig(strategy="fsdp2", **options))
        return config.settings(config.OptimizerConfig, verls.FSDPOptimizerConfig(**options))

    with pytest.raises(ValueError, match=re.escape(says)):
        made()


NEW = pytest.mark.skipif(IS_0_7, reason="a setting of verl 0.9")


@NEW
def test_what_its_new_settings_ask_for(tmp_path: Path) -> None:
    from verl.workers.config import FSDPEngineConfig

    def made(**options: Any) -> Any:
        return config.settings(config.EngineConfig, FSDPEngineConfig(strategy="fsdp2", **options))

    assert made().gradient_sync == "last"
    assert made(use_no_sync_for_gradient_accumulation=False).gradient_sync == "each"
    (told,) = made(pad_to_length=True, pad_to_length_bucket=512, turbo_config={"a": 1}).no_effect
    assert told.startswith("pad_to_length=True has no effect here")
    with pytest.raises(ValueError, match="strategy is not offered: got 'fsdp_turbo'"):
        config.settings(config.EngineConfig, FSDPEngineConfig(strategy="fsdp_turbo"))


@NEW
def test_its_checkpoint_settings(tmp_path: Path, caplog: Any) -> None:
    import peft
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config.checkpoint import McoreCheckpointConfig

    once.forget()
    model = test_qwen.write(tmp_path)
    for kind in (CheckpointConfig, McoreCheckpointConfig):
        checkpoint.FSDPCheckpointManager(model, checkpoint_config=kind())
    checkpoint.FSDPCheckpointManager(model, checkpoint_config=CheckpointConfig(save_lora_only=True))
    assert not caplog.text
    checkpoint.FSDPCheckpointManager(model, checkpoint_config=CheckpointConfig(strict=False))
    assert caplog.text.count("strict changes nothing here") == 1
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    checkpoint.FSDPCheckpointManager(adapted, checkpoint_config=CheckpointConfig())
    made = checkpoint.FSDPCheckpointManager(adapted, checkpoint_config=CheckpointConfig(save_lora_only=True))
    assert made.saves_lora_only


def test_what_changes_no_value_is_noted(tmp_path: Path) -> None:
    test_qwen.write(tmp_path)
    made = model_of(tmp_path, use_liger=True, tiled_mlp={"enabled": True, "num_shards": 2})
    assert [text.split(" ")[0] for text in made.no_effect] == ["use_liger=True", "tiled_mlp.enabled=True"]
