"""What goes wrong on one rank, or cannot be: an error, never a step that is silently wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pool
import pytest
import small
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from torch_dcp_backport import compat, engine

try:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
except ImportError:  # torch 2.4
    from torch.distributed._tensor import Replicate, Shard, distribute_tensor


def not_finite(api: Any, folder: Path, options: dict[str, Any], value: float) -> Any:
    made = small.made(folder, "AdamW", **options)
    small.trained(made, range(1))
    before = [compat.local_part(param).clone() for param in made.module.parameters()]
    with made.train_mode():
        rows = small.own_rows(small.batch(1), made)
        made.optimizer_zero_grad()
        made.forward_backward_batch(rows, engine.sft_loss)
        if dist.get_rank() == 2:
            gradient: Any = next(iter(made.module.parameters())).grad
            compat.local_part(gradient)[0, 0] = value
        norm = made.optimizer_step()
    same = all(torch.equal(compat.local_part(p), b) for p, b in zip(made.module.parameters(), before))
    skipped = made.skipped_steps
    after = small.trained(made, range(1, 2))
    return same, norm, skipped, made.skipped_steps, after


@pytest.mark.parametrize(
    ("options", "value"), [({}, float("nan")), ({"fsdp_size": 2}, float("inf")), ({}, 1e20)]
)
def test_a_gradient_that_is_not_finite_on_one_rank_is_no_step(ranks, tmp_path, options, value) -> None:
    """Also of one replica alone."""
    small.write(tmp_path / "m")
    undisturbed = small.alone("AdamW", steps=2)
    for same, norm, skipped, still, after in ranks(not_finite, tmp_path / "m", options, value):
        assert same
        assert not torch.isfinite(torch.tensor(norm))
        assert (skipped, still) == (1, 1)
        assert after["losses"][0] == pytest.approx(undisturbed["losses"][1], abs=1e-5)


def raising(api: Any, folder: Path) -> str:
    made = small.made(folder)

    def loss(**named: Any) -> Any:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("in my loss")
        return engine.sft_loss(**named)

    try:
        made.train_batch(small.own_rows(small.batch(0), made), loss)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_loss_that_raises_on_one_rank_is_that_error_there_and_no_hang(tmp_path: Path) -> None:
    small.write(tmp_path / "m")
    own = pool.Pool(2, "torch_dcp_backport.engine", timeout=5, limit=60)
    try:
        here, there = own.run(raising, tmp_path / "m")
    finally:
        own.close()
    assert there == "ZeroDivisionError: in my loss"
    assert re.search("(?i)timed? ?out|closed|reset", here), here


def moved(api: Any, folder: Path, options: dict[str, Any]) -> Any:
    made = small.made(folder, **options)
    texts = []
    for call in (lambda: made.to("cpu"), lambda: made.to("cuda"), lambda: small.trained(made, range(1))):
        try:
            call()
            texts.append("")
        except (RuntimeError, ValueError) as error:
            texts.append(str(error))
    return texts


def test_moves_that_cannot_be(ranks, tmp_path: Path) -> None:
    small.write(tmp_path / "m")
    for here, elsewhere, after in ranks(moved, tmp_path / "m", {"offload_policy": True}):
        assert "offload_policy=True keeps its parameters on the host" in here
        assert "'cuda': expected 'cpu' or 'cpu'" in elsewhere
        assert after == ""
    for here, elsewhere, after in ranks(moved, tmp_path / "m", {}):
        assert (here, after) == ("", "")
        assert "'cuda'" in elsewhere


def begun(api: Any, folder: Path, options: dict[str, Any], alone: bool) -> tuple[str, str]:
    """A setting that cannot be, on every rank or on rank 1."""
    if alone and dist.get_rank() != 1:
        options = {}
    try:
        small.made(folder, **options)
    except (ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"mixed_precision": {"param_dtype": "fp16"}}, "ValueError", "ValueError: param_dtype is float16"),
        ({"micro_batch_size_per_gpu": 0}, "ValueError", "micro_batch_size_per_gpu=0: expected"),
        ({"model_config": {"lora": {"merged": True}}}, "ValueError", "no setting of lora: merged; there are"),
        ({"optimizer_config": {"clip_grad": -1.0}}, "RuntimeError", "ValueError: clip_grad=-1.0"),
        ({"optimizer_config": {"lr": float("nan")}}, "RuntimeError", "ValueError: lr=nan: expected"),
        (
            {"optimizer_config": {"override_optimizer_config": {"momentun": 0.9}}},
            "RuntimeError",
            "ValueError: optimizer='SGD' does not take {'lr': 0.5, 'weight_decay': 0.01, 'momentun': 0.9}: ",
        ),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_is_one_error_on_every_rank(
    ranks, tmp_path, options, kind, says, alone
) -> None:
    small.write(tmp_path / "m")
    found = ranks(begun, tmp_path / "m", options, alone)
    assert len(set(found)) == 1
    assert found[0][0] == kind
    assert ("rank 1: " if alone else "ranks 0-3: ") in found[0][1]
    assert says in found[0][1]


def clipped(api: Any, value: float) -> str:
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    try:
        engine.step(torch.optim.SGD([param], lr=1.0), max_norm=value)
    except ValueError as error:
        assert param.detach().equal(torch.ones(3))
        return str(error)
    return ""


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_largest_norm_that_is_none(ranks, value: float) -> None:
    """With 0 nothing would be trained, and with -1 the loss would grow."""
    assert set(ranks(clipped, value)) == {
        f"max_norm={value}: expected a number above 0, or None to clip nothing"
    }
    assert set(ranks(clipped, float("inf"))) == {""}


def with_settings(api: Any, folder: Path) -> str:
    made = small.made(folder)
    rows = small.own_rows(small.batch(0), made)
    if dist.get_rank() == 1:
        rows["use_dynamic_bsz"] = "False"
    try:
        made.forward_backward_batch(rows, engine.sft_loss)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_setting_of_a_batch_that_cannot_be(ranks, tmp_path: Path) -> None:
    small.write(tmp_path / "m")
    texts = ranks(with_settings, tmp_path / "m")
    assert len(set(texts)) == 1
    assert "rank 1: use_dynamic_bsz='False': expected True or False" in texts[0]


def arranged(api: Any, size: Any) -> str:
    try:
        engine.arrange("cpu", size[dist.get_rank()])
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_ask_for_other_sizes(ranks) -> None:
    texts = ranks(arranged, [2, 2, -1, 2])
    assert len(set(texts)) == 1
    assert "rank 2: not the same on every rank: fsdp_size (expected 2 as on rank 0, got -1)" in texts[0]
    assert ranks(arranged, [2] * 4) == [""] * 4


def replicated(api: Any, folder: Path, size: int) -> Any:
    """As this release is, but for what it cannot run without."""
    try:
        made = small.made(folder, average=False, fsdp_size=size)
    except RuntimeError as error:
        return str(error)
    return small.trained(made)


@pytest.mark.parametrize("size", [1, 2])
def test_replicas_are_right_or_refused(ranks, tmp_path: Path, size: int) -> None:
    small.write(tmp_path / "m")
    for found in ranks(replicated, tmp_path / "m", size):
        if small.cpu_fsdp.RELEASE < (2, 8):
            assert f"cannot reduce gradients over {4 // size} replicas of {size} shards" in found
            assert "Cannot use ReduceOp.AVG with Gloo" in found
            # One copy of the model does not train there, either.
            hints = ("One copy of the model", "On the CPU FSDP2 trains with torch >= 2.7")
            assert [hint in found for hint in hints] == [small.cpu_fsdp.TRAINS, not small.cpu_fsdp.TRAINS]
        if not isinstance(found, str):
            small.same(found, small.alone())
        assert small.cpu_fsdp.RELEASE < (2, 13) or not isinstance(found, str)


PROBE = """
import sys
import small
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
options = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
small.Engine({"path": sys.argv[1]}, options, device="cpu").initialize()
"""


@pytest.mark.skipif(small.cpu_fsdp.TRAINS, reason="FSDP2 of this torch trains on the CPU")
def test_a_torch_whose_fsdp2_does_not_train_on_the_cpu_says_so(tmp_path: Path) -> None:
    """In an interpreter of its own: the ranks of these tests have what this torch lacks."""
    small.write(tmp_path / "m")
    command = [sys.executable, "-c", PROBE, str(tmp_path / "m")]
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **paths})
    assert "RuntimeError: cannot arrange the ranks: FSDP2 of torch" in ended.stderr
    assert "On the CPU FSDP2 trains with torch >= 2.7" in ended.stderr
    assert "with forward_only=True an engine loads and exports" in ended.stderr


def incomplete(api: Any, folder: Path) -> str:
    try:
        small.made(folder, untied=True)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_tensor_that_the_files_do_not_have(ranks, tmp_path: Path) -> None:
    small.write(tmp_path / "m")
    texts = ranks(incomplete, tmp_path / "m")
    assert len(set(texts)) == 1
    assert "not in the files: head.weight" in texts[0]


def without_ranks(api: Any) -> str:
    try:
        engine.arrange("cpu")
    except RuntimeError as error:
        return str(error)
    return ""


def test_no_process_group(pools) -> None:
    assert "init_process_group comes first" in pools.run(without_ranks, world=0)[0]


def norms(api: Any) -> Any:
    """Plain tensors, shards, replicas of shards and tensors on a part of the ranks, in one norm."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    draw = torch.Generator().manual_seed(0)
    values = {name: torch.randn(4, 3, generator=draw) for name in "psrq"}
    params = {name: torch.nn.Parameter(torch.zeros(4, 3)) for name in "p"}
    params["p"].grad = values["p"].clone()
    cut = {"s": (mesh, [compat.Shard(0), compat.Shard(1)]), "r": (mesh, [Replicate(), compat.Shard(0)])}
    cut["q"] = (mesh["b"], [compat.Shard(0)])  # the same on both such meshes
    for name, (where, placements) in cut.items():
        whole = distribute_tensor(values[name], where, placements)
        params[name] = torch.nn.Parameter(torch.zeros_like(whole))
        params[name].grad = whole
    found = engine.grad_norm(params.values())
    expected = torch.stack([value.double().square().sum() for value in values.values()]).sum().sqrt()
    return found, expected.item()


def test_one_norm_over_several_meshes(ranks) -> None:
    for found, expected in ranks(norms):
        assert found == pytest.approx(expected, rel=1e-6)


def loss_of_nothing(api: Any, folder: Path) -> dict[str, Any]:
    """As users write it where a micro-batch may have no tokens."""
    made = small.made(folder)

    def loss(model_output: Any, data: Any, dp_group: Any) -> Any:
        if not data["loss_mask"].any():
            return torch.zeros(()), {}
        return engine.sft_loss(model_output, data)

    def own(data: Any, made: Any) -> Any:
        rows = small.own_rows(data, made)
        if dist.get_rank() == 1:
            rows["loss_mask"] = rows["loss_mask"] * 0
        return rows

    made.train_batch(own(small.batch(0), made), loss)
    return small.trained(made, range(1, 2))


def test_a_loss_that_is_no_function_of_the_model(ranks, tmp_path: Path) -> None:
    small.write(tmp_path / "m")
    assert len({repr(found["norms"]) for found in ranks(loss_of_nothing, tmp_path / "m")}) == 1


def after_a_failure(api: Any, folder: Path) -> tuple[float, float]:
    """The norm of a batch, and of the same after one that failed between its micro-batches."""
    made, calls = small.made(folder, gradient_sync="last"), []

    def fails(**named: Any) -> Any:
        calls.append(named)
        if len(calls) % 2 == 0:
            raise ZeroDivisionError("in my loss")
        return engine.sft_loss(**named)

    rows = {name: value[:4] for name, value in small.batch(0).items()}
    norms = []
    for _ in range(2):
        with made.train_mode():
            made.optimizer_zero_grad()
            made.forward_backward_batch(rows, engine.sft_loss)
            norms.append(engine.grad_norm(made.module.parameters()))
        with made.train_mode():
            made.optimizer_zero_grad()
            with pytest.raises(ZeroDivisionError):
                made.forward_backward_batch(rows, fails)
    return norms[0], norms[1]


def test_gradients_of_a_batch_that_failed_are_gone(ranks, tmp_path) -> None:
    small.write(tmp_path / "m")
    for first, second in ranks(after_a_failure, tmp_path / "m"):
        assert first == pytest.approx(second, rel=1e-6)


def steps_without_gradients(api: Any) -> tuple[float, float]:
    param = torch.nn.Parameter(torch.ones(3))
    if dist.get_rank() == 0:
        param.grad = torch.ones(3)
    done = engine.step(torch.optim.SGD([param], lr=1.0), max_norm=0.1)
    return done.grad_norm, float(param.detach().sum())


def test_a_rank_without_gradients_steps_with_the_others(ranks) -> None:
    found = ranks(steps_without_gradients)
    assert len({norm for norm, _ in found}) == 1
    assert [total == 3 for _, total in found] == [False, True, True, True]


def tied_without_rows(api: Any) -> list[str]:
    mesh = init_device_mesh("cpu", (4,))
    weight = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)])  # the last rank has none
    return [name for name, _ in engine.whole_tensors({"embed": weight, "head": weight})]


def test_ties_are_known_where_there_are_no_rows(ranks) -> None:
    assert ranks(tied_without_rows) == [["embed", "head"]] * 4
