"""Sparse models: ranks whose tokens reach different experts train what one process trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import small
import torch
import torch.distributed as dist
from torch import nn

from torch_dcp_backport import compat, engine
from torch_dcp_backport.engine._src import reach

#: Of which the ranks' tokens reach 1 to 4, the row of zeros that keeps other ranks company 0, and nothing 5.
EXPERTS = 6
SPARSE = {"override_config": {"is_tied": True, "experts": EXPERTS}}


def run(api: Any, folder: Path, options: dict[str, Any]) -> Any:
    made = small.made(folder, "AdamW", model_config=SPARSE, **options)
    found = small.trained(made, drawn=small.sparse_batch)
    return found, sum(bool(state) for state in made.optimizer.state.values())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fsdp_size": 1},
        {"fsdp_size": 2},
        {"gradient_sync": "last"},
        {"gradient_sync": "last", "fsdp_size": 2},
        {"max_token_len_per_gpu": 24},
        {"reshard_after_forward": False},
        {"offload_policy": True},
    ],
    ids=str,
)
def test_the_training_of_one_process(ranks, tmp_path: Path, options: dict[str, Any]) -> None:
    """Of AdamW, which shrinks the weights of an expert that has a gradient, zeros too."""
    small.write(tmp_path / "m", experts=EXPERTS)
    plain = small.model(experts=EXPERTS)
    begun = {name: param.detach().clone() for name, param in plain.named_parameters()}
    expected = small.alone("AdamW", plain=plain, rows=small.sparse_batch)
    for found, trained in ranks(run, tmp_path / "m", options):
        small.same(found, expected)
        for layer in range(2):
            for number in range(EXPERTS):
                name = f"layers.{layer}.experts.{number}.weight"
                assert found["weights"][name].equal(begun[name]) == (number in (0, 5))
        # States of two parameters of two experts in two layers are not there: AdamW never saw a gradient.
        assert trained == len(list(plain.parameters())) - 2 * 2 * 2


def sharded(folder: Path, size: int, change: Any = None) -> Any:
    """The model by the functions that a loop of one's own calls."""
    small.cpu_fsdp.install()
    grid = engine.arrange("cpu", size)
    with engine.parameters_on_meta():
        made = small.Model(experts=EXPERTS)
    if change is not None:
        change(made)
    engine.shard(made, grid)
    engine.materialize(made, torch.device("cpu"))
    engine.fill(made, folder)
    return made, engine.divisor_of(grid) / grid.dp_size


def only_two_experts(model: nn.Module) -> None:
    """Of one rank's tokens each, and in the first layer alone: the others' reach nothing that is trained."""
    for name, param in model.named_parameters():
        param.requires_grad_(name.startswith(("layers.0.experts.2.", "layers.0.experts.3.")))


def looped(api: Any, folder: Path, size: int, change: Any) -> Any:
    made, scale = sharded(folder, size, change)
    optimizer = torch.optim.AdamW([p for p in made.parameters() if p.requires_grad], lr=0.01)
    norms = []
    for step in range(small.STEPS):
        whole = small.sparse_batch(step)
        rows = small.share(whole, dist.get_rank(), 4)
        optimizer.zero_grad()
        share = rows["loss_mask"].sum() / whole["loss_mask"].sum() * 4
        (small.loss_of(made, rows) * share * scale).backward()
        norms.append(engine.step(optimizer, 0.3).grad_norm)
    return {"losses": [], "norms": norms, "weights": dict(engine.whole_tensors(engine.tensors_of(made)))}


@pytest.mark.parametrize("size", [-1, 2, 1])
@pytest.mark.parametrize("change", [None, only_two_experts])
def test_a_loop_of_ones_own(ranks, tmp_path: Path, size: int, change: Any) -> None:
    small.write(tmp_path / "m", experts=EXPERTS)
    plain = small.model(experts=EXPERTS)
    if change is not None:
        change(plain)
    expected = small.alone("AdamW", plain=plain, rows=small.sparse_batch)
    expected["losses"] = []
    for found in ranks(looped, tmp_path / "m", size, change):
        small.same(found, expected)
        frozen = [name for name, param in plain.named_parameters() if not param.requires_grad]
        assert all(found["weights"][name].equal(dict(plain.named_parameters())[name]) for name in frozen)


def in_half_precision(api: Any, folder: Path, options: dict[str, Any]) -> Any:
    mixed = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
    made = small.made(
        folder, model_config=SPARSE, mixed_precision=mixed, micro_batch_size_per_gpu=1, **options
    )

    def rows(data: Any, made: Any) -> Any:
        mine = small.own_rows(data, made)
        # Each row, and so each micro-batch, reaches an expert of its own.
        mine["input_ids"] += torch.arange(len(mine["input_ids"]))[:, None] % 3
        return mine

    return small.trained(made, range(1), rows, small.sparse_batch)


@pytest.mark.parametrize("options", [{}, {"fsdp_size": 2}], ids=str)
def test_micro_batches_that_reach_different_experts_in_half_precision(ranks, tmp_path, options) -> None:
    """Gradients that wait for the last micro-batch are float32, those of the last one are not."""
    small.write(tmp_path / "m", experts=EXPERTS)
    each = ranks(in_half_precision, tmp_path / "m", options)
    last = ranks(in_half_precision, tmp_path / "m", {**options, "gradient_sync": "last"})
    for found, expected in zip(last, each):
        small.same(found, expected, 1e-3)


def unreached(api: Any, folder: Path) -> Any:
    """Gradients of experts after a pass, after another beside it, and after those of no rank are dropped."""
    made, _ = sharded(folder, -1)
    params = dict(made.named_parameters())
    experts = {number: params[f"layers.0.experts.{number}.weight"] for number in range(EXPERTS)}
    found = []
    for rank in (0, 1):
        data = small.share(small.sparse_batch(0), rank, 4)
        small.loss_of(made, data).backward()  # the same on every rank
        found.append({n for n, p in experts.items() if compat.local_part(p.grad).any()})
    moved = [param.grad is None for param in experts.values()]
    engine.move_model(made, torch.device("cpu"))
    dropped = engine.drop_unreached(made.parameters())
    return found, moved, dropped, [number for number, param in experts.items() if param.grad is None]


def test_gradients_of_what_no_rank_reached_are_dropped(ranks, tmp_path: Path) -> None:
    small.write(tmp_path / "m", experts=EXPERTS)
    for found, moved, dropped, without in ranks(unreached, tmp_path / "m"):
        assert found[0] <= {1}
        assert found[1] <= {1, 2}
        assert not any(moved)
        assert (dropped, without) == (2 * 2 * 4, [0, 3, 4, 5])


def test_experts_are_no_units() -> None:
    """Ranks would gather an expert's parameters by turns."""
    with pytest.raises(ValueError, match=r"layers.0.experts.0 .*Linear.* tokens"):
        engine.units_of(small.model(experts=2), ["Block", "Linear"])


SIZES: dict[str, Any] = {
    "vocab_size": small.VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 12},
    "qwen2_moe": {"num_experts": 12, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
    "qwen3_moe": {"num_experts": 12, "moe_intermediate_size": 8, "head_dim": 4},
    "deepseek_v3": {
        "n_routed_experts": 12, "moe_intermediate_size": 8, "n_group": 2, "topk_group": 1, "kv_lora_rank": 8,
        "q_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
        "num_key_value_heads": 4, "first_k_dense_replace": 1,
    },
}  # fmt: skip


def write(folder: Path, family: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def of_transformers(api: Any, folder: Path, kind: str, options: dict[str, Any]) -> Any:
    small.cpu_fsdp.install()
    plain = {"mixed_precision": {"param_dtype": None, "reduce_dtype": None}, "use_dynamic_bsz": False}
    config = {"path": str(folder), "enable_gradient_checkpointing": options.pop("checkpointing", False)}
    made: Any = engine.EngineRegistry.new(
        kind,
        "fsdp2",
        config,
        {**plain, "micro_batch_size_per_gpu": 2, **options},
        {"optimizer": "AdamW", "lr": 0.01, "override_optimizer_config": {"eps": 0.01}, "clip_grad": 0.3},
        device="cpu",
    )
    made.initialize()
    begun = dict(made.get_per_tensor_param(dtype=None)[0])
    norms = []
    with made.train_mode():
        for step in range(2):
            made.optimizer_zero_grad()
            data = small.own_rows(small.sparse_batch(step), made)
            made.forward_backward_batch(data, value_loss if kind == "value_model" else engine.sft_loss)
            named = dict(made.module.named_parameters())
            unreached = {name for name, param in named.items() if reach.is_unreached(param.grad)}
            norms.append(made.optimizer_step())
    weights = dict(made.get_per_tensor_param(dtype=None)[0])
    return begun, {"losses": [], "norms": norms, "weights": weights}, unreached


def value_loss(model_output: Any, data: Any, dp_group: Any) -> Any:
    apart = (model_output["values"] - data["input_ids"] / small.VOCABULARY).square() * data["loss_mask"]
    return apart.sum() / data["batch_num_tokens"] * data["dp_size"], {}


def by_transformers(folder: Path, kind: str, begun: dict[str, torch.Tensor]) -> Any:
    """The same in one process."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, num_labels=1)
    auto: Any = transformers.AutoModelForCausalLM
    if kind == "value_model":
        auto = transformers.AutoModelForTokenClassification
    model = auto.from_config(config)
    if hasattr(model, "dropout"):
        model.dropout.p = 0.0
    model.load_state_dict(begun)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=0.01)
    norms = []
    for step in range(2):
        data = small.sparse_batch(step)
        optimizer.zero_grad()
        if kind == "value_model":
            values = model(**small.model_inputs(data)).logits[..., 0]
            tokens = int(data["loss_mask"].sum())
            value_loss({"values": values}, {**data, "batch_num_tokens": tokens, "dp_size": 1}, None)[
                0
            ].backward()
        else:
            small.loss_of(model, data).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        optimizer.step()
    return {"losses": [], "norms": norms, "weights": dict(model.named_parameters())}


@pytest.mark.parametrize(
    ("family", "kind", "options"),
    [
        ("mixtral", "language_model", {}),
        ("qwen2_moe", "language_model", {"checkpointing": True, "fsdp_size": 2}),
        ("deepseek_v3", "language_model", {"fsdp_size": 1}),
        ("qwen3_moe", "value_model", {"gradient_sync": "last"}),
    ],
)
def test_families_of_transformers(ranks, tmp_path: Path, family: str, kind: str, options: Any) -> None:
    write(tmp_path, family)
    results = ranks(of_transformers, tmp_path, kind, options)
    expected = by_transformers(tmp_path, kind, results[0][0])
    for _, found, _ in results:
        small.same(found, expected)
    # Others have run all experts, up to transformers 4.51; transformers 5 has those of a layer in one tensor.
    if family == "deepseek_v3" and any(".experts.0." in name for name in results[0][1]["weights"]):
        # Of each rank other parameters had no gradient of its own.
        assert len({frozenset(unreached) for *_, unreached in results}) == 4
