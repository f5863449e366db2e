"""Marks of tokens without a log-probability; losses of routers; contexts with verl's options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import small
import torch
import torch.distributed as dist
from heard import heard

from torch_dcp_backport import engine

SAYS = "loss_mask marks tokens that have no log-probability"


def all_marked(data: dict[str, torch.Tensor], kind: str) -> dict[str, Any]:
    """The batch with a mark on every column, those of the padding as well."""
    data = {**data, "loss_mask": torch.ones_like(data["input_ids"])}
    if kind == "bool":
        data["loss_mask"] = data["loss_mask"].bool()
    return small.jagged(data) if kind == "jagged" else data


def marked_losses(api: Any, folder: Path, kind: str, options: dict[str, Any]) -> Any:
    made = small.made(folder, **options)
    sums: list[float] = []

    def loss(model_output: Any, data: Any, dp_group: Any) -> Any:
        mask = data["loss_mask"]
        sums.append(float((mask.values() if mask.is_nested else mask).sum()) / data["batch_num_tokens"])
        return engine.sft_loss(model_output, data, dp_group)

    with heard("engine") as texts, made.train_mode():
        for _ in range(2):
            sums.clear()
            losses = made.forward_backward_batch(all_marked(small.own_rows(small.batch(0), made), kind), loss)
            made.optimizer_zero_grad()
    total = torch.tensor([sum(losses["loss"]), sum(sums)], dtype=torch.float64)
    dist.all_reduce(total)
    mean = total[0].item() / dist.get_world_size()
    return mean, total[1].item(), sum(SAYS in text for text in texts)


@pytest.mark.parametrize("kind", ["padded", "bool", "jagged"])
@pytest.mark.parametrize("options", [{}, {"max_token_len_per_gpu": 24}], ids=str)
def test_marks_without_a_log_probability_do_not_count(pools, tmp_path: Path, kind: str, options: Any) -> None:
    """The loss is the mean over the log-probabilities that there are, and the first rank says it once."""
    small.write(tmp_path / "m")
    data = small.batch(0)
    is_token = data["attention_mask"].bool()
    with torch.no_grad():
        positions = (data["attention_mask"].cumsum(1) - 1).clamp_min(0)
        logits = small.model()(data["input_ids"], data["attention_mask"], positions).logits.log_softmax(-1)
    logs = logits[:, :-1].gather(-1, data["input_ids"][:, 1:, None])[..., 0]
    expected = -logs[is_token[:, :-1] & is_token[:, 1:]].mean().item()
    first, second = pools.run(marked_losses, tmp_path / "m", kind, options, world=2)
    for mean, share, _ in (first, second):
        assert mean == pytest.approx(expected, rel=1e-5)
        assert share == pytest.approx(1.0)
    assert (first[2], second[2]) == (1, 0)


def other_masks(api: Any, folder: Path) -> Any:
    """Of responses alone, as verl's policy losses have them: nothing is changed."""
    made = small.made(folder)
    data = small.own_rows(small.batch(0), made)
    masks: list[bool] = []
    marks = torch.ones(len(data["input_ids"]), 3, dtype=torch.long)

    def loss(model_output: Any, data: Any, dp_group: Any) -> Any:
        masks.append(bool(data["loss_mask"].all()))
        return model_output["log_probs"].sum() / data["batch_num_tokens"], {}

    with heard("engine") as texts, made.train_mode():
        made.forward_backward_batch({**data, "loss_mask": marks, "response_mask": marks}, loss)
    return masks, [text for text in texts if SAYS in text]


def test_a_mask_of_responses_stays_as_it_is(pools, tmp_path: Path) -> None:
    small.write(tmp_path / "m")
    for masks, texts in pools.run(other_masks, tmp_path / "m", world=2):
        assert all(masks)
        assert not texts


def with_router_loss(api: Any, folder: Path, override: dict[str, Any], options: dict[str, Any]) -> str:
    small.cpu_fsdp.install()
    config = {"path": str(folder), "override_config": override}
    made = engine.FSDPEngineWithLMHead(
        config, {"max_token_len_per_gpu": 64, **options}, {"optimizer": "SGD", "lr": 0.1}, device="cpu"
    )
    try:
        made.initialize()
    except RuntimeError as error:
        return str(error)
    return ""


ASKED = {"output_router_logits": True, "router_aux_loss_coef": 1.0}


@pytest.mark.parametrize(
    ("override", "options", "is_refused"),
    [
        (ASKED, {}, True),
        ({"model_config": ASKED}, {}, True),
        ({"output_router_logits": True, "router_aux_loss_coef": 0.0}, {}, False),
        ({"output_router_logits": False, "router_aux_loss_coef": 1.0}, {}, False),
        (ASKED, {"forward_only": True}, False),
    ],
    ids=str,
)
def test_a_loss_of_routers_is_refused_by_name(
    pools, tmp_path: Path, override: Any, options: Any, is_refused: bool
) -> None:
    pytest.importorskip("transformers")
    import tiny

    tiny.write(tmp_path, "qwen3_moe")
    for text in pools.run(with_router_loss, tmp_path, override, options, world=2):
        assert (
            "output_router_logits=True with router_aux_loss_coef=1.0 is not offered" in text
        ) == is_refused
        assert bool(text) == is_refused


def gradients_at_the_end(api: Any, folder: Path) -> list[bool]:
    made = small.made(folder)
    found = []
    for options in ({}, {"zero_grad_on_exit": False}, {"zero_grad_on_exit": True}):
        with made.train_mode(**options):
            made.forward_backward_batch(small.own_rows(small.batch(0), made), engine.sft_loss)
        found.append(any(param.grad is not None for param in made.module.parameters()))
    with made.eval_mode(zero_grad_on_exit=True), made.disable_adapter():
        made.infer_batch(small.own_rows(small.batch(0), made))
    return found


def test_contexts_have_the_options_of_verls(pools, tmp_path: Path) -> None:
    """`disable_adapter` of a model without adapters is a context that does nothing."""
    small.write(tmp_path / "m")
    assert pools.run(gradients_at_the_end, tmp_path / "m", world=2) == [[False, True, False]] * 2
