"""Weight decay by groups, and rates: against one process, against transformers, and after a resume."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from heard import heard

from torch_dcp_backport import engine

#: What the model of `small` does not decay, by "norms" and "biases".
UNDECAYED = ["layers.0.norm.weight", "layers.0.norm.bias", "layers.0.out.bias"]
DECAY = 0.3
#: Large steps: a decay that is left out shows.
SETTINGS: dict[str, Any] = {"weight_decay": DECAY, "no_decay": ["norms", "biases"]}
WSD: dict[str, Any] = {
    "lr_scheduler_type": "wsd", "total_training_steps": 6, "lr_warmup_steps": 1, "lr_wsd_decay_steps": 3,
    "min_lr_ratio": 0.1,
}  # fmt: skip


def stepped(made: Any, steps: range) -> dict[str, Any]:
    """As `small.trained`, with a step of the schedule after each."""
    for step in steps:
        small.trained(made, range(step, step + 1))
        made.lr_scheduler_step()
    return dict(made.get_per_tensor_param(dtype=None)[0])


def run(api: Any, folder: Path, options: dict[str, Any], schedule: dict[str, Any]) -> Any:
    asked = {**SETTINGS, **schedule}
    made = small.made(folder, "AdamW", optimizer_config=asked, **options)
    begun = stepped(made, range(3))
    path = folder.parent / "global_step_3"
    made.save_checkpoint(path, global_step=3)
    last = stepped(made, range(3, 5))
    again = small.made(folder, "AdamW", optimizer_config=asked)
    again.load_checkpoint(path)
    groups = [
        (len(group["params"]), group["weight_decay"], group["lr"]) for group in again.optimizer.param_groups
    ]
    return begun, last, groups, stepped(again, range(3, 5))


def alone(steps: int, schedule: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The same by torch alone: groups by name, and the rate of each step by its formula."""
    model = small.model()
    names = dict(model.named_parameters())
    undecayed = [name for name in names if "norm" in name or name.endswith("bias")]
    assert set(UNDECAYED) <= set(undecayed)
    parts = [
        {"params": [names[name] for name in names if name not in undecayed]},
        {"params": [names[name] for name in undecayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(parts, lr=0.01, weight_decay=DECAY)
    for step in range(steps):
        rate = 0.01 * ([0, 1, 1, 1, 0.7, 0.4, 0.1][step] if schedule else 1)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        small.loss_of(model, small.batch(step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("schedule", [{}, WSD], ids=["constant", "wsd"])
@pytest.mark.parametrize("options", [{}, {"fsdp_size": 2}, {"offload_policy": True}], ids=str)
def test_groups_and_rates_are_those_of_one_process_and_are_resumed(
    ranks: Any, tmp_path: Path, options: dict[str, Any], schedule: dict[str, Any]
) -> None:
    if small.cpu_fsdp.RELEASE < (2, 5) and "fsdp_size" in options:
        pytest.skip("FSDP2 of torch 2.4 has no state dict on a mesh of two dimensions")
    small.write(tmp_path / "m")
    begun, expected = alone(3, schedule), alone(5, schedule)
    # Of embed and qkv, out of two blocks; of two norms and one bias each.
    rate = 0.01
    for found, last, groups, again in ranks(run, tmp_path / "m", options, schedule):
        assert groups == [(5, DECAY, rate), (6, 0.0, rate)]
        for name, value in expected.items():
            torch.testing.assert_close(found[name], begun[name], atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(last[name], value, atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(again[name], value, atol=1e-6, rtol=1e-6)


def regrouped(api: Any, folder: Path) -> Any:
    """Groups after a load of a checkpoint that a training with other groups has saved, and what is said."""
    made = small.made(folder, "AdamW", optimizer_config={"weight_decay": DECAY})
    small.trained(made, range(1))
    path = folder.parent / "global_step_1"
    made.save_checkpoint(path, global_step=1)
    again = small.made(folder, "AdamW", optimizer_config=SETTINGS)
    with heard() as texts:
        again.load_checkpoint(path)
    return [(len(group["params"]), group["weight_decay"]) for group in again.optimizer.param_groups], texts


def test_a_resume_goes_on_with_the_decay_that_was_saved_and_says_so(ranks: Any, tmp_path: Path) -> None:
    """As torch's own load of an optimizer does, in silence."""
    small.write(tmp_path / "m")
    for groups, texts in ranks(regrouped, tmp_path / "m"):
        assert groups == [(5, DECAY), (6, DECAY)]
        (text,) = [text for text in texts if "saved param group 0" in text]
        assert "made with different options (weight_decay=0.3 and 0.0)" in text


def refused(api: Any, folder: Path, names: Any) -> str:
    with pytest.raises(RuntimeError) as caught:
        small.made(folder, "AdamW", optimizer_config={"no_decay": names})
    return str(caught.value)


@pytest.mark.parametrize("names", ["layers.*.nrm.*", ["biases", "layers.*.nrm.*"]], ids=str)
def test_a_pattern_that_matches_nothing_is_an_error_on_every_rank(
    ranks: Any, tmp_path: Path, names: Any
) -> None:
    small.write(tmp_path / "m")
    for text in ranks(refused, tmp_path / "m", names):
        assert "no_decay='layers.*.nrm.*' matches no parameter that is trained" in text


def of(model: torch.nn.Module, no_decay: Any) -> set[str]:
    names = {id(param): name for name, param in model.named_parameters()}
    groups = engine.param_groups(model, no_decay)
    assert sum(len(group["params"]) for group in groups) == len(names)
    return {names[id(param)] for group in groups if "weight_decay" in group for param in group["params"]}


def test_a_bare_text_is_one_name_and_a_tied_head_is_an_embedding() -> None:
    model = small.model()
    assert of(model, "embeddings") == {"embed.weight"}
    assert of(model, "head.weight") == {"embed.weight"}
    assert of(model, "layers.?.norm.*") == {
        f"layers.{n}.norm.{leaf}" for n in (0, 1) for leaf in ("weight", "bias")
    }
    assert of(model, "biases") == {f"layers.{n}.{part}.bias" for n in (0, 1) for part in ("norm", "out")}
    assert of(model, ()) == of(model, None) == set()
    with pytest.raises(ValueError, match="no_decay has 3"):
        engine.param_groups(model, [3])  # type: ignore[list-item]


def test_what_is_frozen_is_in_no_group() -> None:
    model = small.freeze(small.model())
    (group,) = engine.param_groups(model, "norms")[1:]
    assert [id(param) for param in group["params"]] == [
        id(param) for param in model.layers[1].norm.parameters()
    ]
    with pytest.raises(ValueError, match="matches no parameter that is trained"):
        engine.param_groups(model, "embed.*")


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("kind", ["linear", "inverse_sqrt", "wsd"])
def test_rates_are_those_of_transformers(kind: str, warmup: int) -> None:
    optimization = pytest.importorskip("transformers.optimization", reason="transformers")

    def rates(make: Any) -> list[float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
        made, found = make(optimizer), []
        for _ in range(14):
            found.append(made.get_last_lr()[0])
            optimizer.step()
            made.step()
        return found

    def theirs(optimizer: Any) -> Any:
        if kind == "linear":
            return optimization.get_linear_schedule_with_warmup(optimizer, warmup, 12)
        if kind == "inverse_sqrt":
            return optimization.get_inverse_sqrt_schedule(optimizer, warmup, timescale=warmup or 1)
        return optimization.get_wsd_schedule(
            optimizer, warmup, 4, num_stable_steps=8 - warmup, min_lr_ratio=0.25, decay_type="cosine"
        )

    if kind == "wsd" and "decay_type" not in optimization.get_wsd_schedule.__code__.co_varnames:
        pytest.skip("this release of transformers has no decay_type")
    least = 0.25 if kind == "wsd" else 0.0
    ours = rates(
        lambda optimizer: engine.schedule(
            optimizer, kind, warmup=warmup, total=12, least=least, decay=4, decay_style="cosine"
        )
    )
    expected = rates(theirs)
    if kind == "inverse_sqrt" and not warmup:
        # Its step 0 is our step 1.
        ours = ours[1:]
    # Its warm-up of "wsd" begins at the least rate.
    skipped = warmup if kind == "wsd" else 0
    assert ours[skipped:] == pytest.approx(expected[skipped : len(ours)])


@pytest.mark.parametrize(
    ("style", "middle"),
    [("linear", 0.5), ("cosine", 0.5), ("minus_sqrt", 1 - 0.5**0.5), ("exponential", 2**0.5 - 1)],
)
def test_the_ways_down_of_wsd(style: str, middle: float) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    made = engine.schedule(optimizer, "wsd", total=8, decay=4, decay_style=style)
    factor = made.lr_lambdas[0]
    assert [factor(step) for step in (0, 4, 6, 8, 20)] == pytest.approx([1, 1, middle, 0, 0])


@pytest.mark.parametrize("given", [5, {"norms": True}, b"norms"], ids=str)
def test_no_decay_that_lists_no_names_is_an_error_that_says_what_it_takes(given: Any) -> None:
    expected = "expected norms, biases, embeddings, or a pattern of names; or a list of them"
    for make in (
        lambda: engine.param_groups(small.model(), given),
        lambda: engine.OptimizerConfig(no_decay=given),
    ):
        with pytest.raises(ValueError, match=re.escape(f"no_decay={given!r}: {expected}")):
            make()
