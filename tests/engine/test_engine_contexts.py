"""What is left behind: by contexts within contexts, by inference between steps, by a pass that failed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import cpu_fsdp
import pytest
import small
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from torch_dcp_backport import compat, engine


def moves(api: Any, folder: Path, options: dict[str, Any]) -> Any:
    made: Any = small.made(folder, **options)
    found: list[Any] = []

    def to(device: str, **parts: bool) -> None:
        found.append((len(found), made.mode, sorted(name for name, asked in parts.items() if asked)))

    made.to = to
    with made.train_mode(), made.eval_mode():
        pass
    inside = len(found)
    with made.eval_mode(), made.train_mode():
        assert made.module.training
    with made.train_mode(disable_auto_offload=True):
        pass
    return [what for *_, what in found[:inside]], [what for *_, what in found[inside:]]


@pytest.mark.parametrize(
    ("options", "within_train", "within_eval"),
    [
        ({}, [], []),
        ({"param_offload": True}, [["grad", "model"]] * 2, [["grad", "model"]] * 2),
        ({"optimizer_offload": True}, [["optimizer"]] * 2, [["optimizer"]] * 2),
        (
            {"param_offload": True, "optimizer_offload": True},
            [["grad", "model", "optimizer"]] * 2,
            [["grad", "model"], ["optimizer"], ["optimizer"], ["grad", "model"]],
        ),
    ],
    ids=str,
)
def test_contexts_move_what_is_kept_on_the_host(pools, tmp_path, options, within_train, within_eval) -> None:
    """There and back, once: a context within another leaves what that one has on the device."""
    small.write(tmp_path / "m")
    assert pools.run(moves, tmp_path / "m", options, world=1) == [(within_train, within_eval)]


def nested(api: Any, folder: Path) -> Any:
    made = small.made(folder)
    with made.train_mode():
        with made.eval_mode():
            inner = made.mode, made.module.training
        return inner, (made.mode, made.module.training)


def test_after_an_inner_context_the_outer_one_is_as_it_was(pools, tmp_path: Path) -> None:
    small.write(tmp_path / "m")
    assert pools.run(nested, tmp_path / "m", world=1) == [(("eval", False), ("train", True))]


def inferred_between(api: Any, folder: Path, options: dict[str, Any]) -> Any:
    """Training with an inference between each backward pass and its step."""
    made = small.made(folder, **options)
    losses, norms = [], []
    for step in range(small.STEPS):
        rows = small.own_rows(small.batch(step), made)
        made.optimizer_zero_grad()
        output = made.forward_backward_batch(rows, engine.sft_loss)
        made.infer_batch(rows)
        norms.append(made.optimizer_step())
        total = torch.tensor(sum(output["loss"]), dtype=torch.float64)
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return {"losses": losses, "norms": norms, "weights": dict(made.get_per_tensor_param(dtype=None)[0])}


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=str)
def test_no_pass_sees_the_weights_of_one_before_a_step(pools, tmp_path: Path, options: Any) -> None:
    """FSDP2 leaves units whole after a forward pass alone, and takes them as they are in the next."""
    small.write(tmp_path / "m")
    for found in pools.run(inferred_between, tmp_path / "m", options, world=2):
        small.same(found, small.alone())


def dtypes_between(api: Any, folder: Path) -> set[torch.dtype]:
    mixed = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
    made = small.made(folder, mixed_precision=mixed)
    with made.eval_mode():
        made.module(**small.model_inputs(small.batch(0)))
        return {tensor.dtype for _, tensor in made.get_per_tensor_param(dtype=None)[0]}


def test_an_export_after_a_forward_pass_is_of_the_parameters_themselves(pools, tmp_path: Path) -> None:
    small.write(tmp_path / "m")
    assert pools.run(dtypes_between, tmp_path / "m", world=2) == [{torch.float32}] * 2


class Fails(torch.autograd.Function):
    """Nothing, but for a backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ZeroDivisionError("backwards")


def after_a_pass_that_failed(api: Any, folder: Path, where: str, options: dict[str, Any]) -> Any:
    made = small.made(folder, untied=True, **options)
    small.trained(made, range(1))

    def fail(module: Any, inputs: Any, output: torch.Tensor) -> Any:
        if where == "forwards":
            raise ZeroDivisionError(where)
        return Fails.apply(output)

    handle = made.module.layers[1].out.register_forward_hook(fail)
    with made.train_mode(), pytest.raises(ZeroDivisionError, match=where):
        made.train_batch(small.own_rows(small.batch(0), made), engine.sft_loss)
    handle.remove()
    return small.trained(made, range(1, small.STEPS))


@pytest.mark.parametrize("options", [{}, {"gradient_sync": "last"}], ids=str)
@pytest.mark.parametrize("where", ["forwards", "backwards"])
def test_training_goes_on_after_a_pass_that_failed(pools, tmp_path: Path, where: str, options: Any) -> None:
    small.write(tmp_path / "m", is_tied=False)
    expected = small.alone(is_tied=False)
    expected.update(losses=expected["losses"][1:], norms=expected["norms"][1:])
    for found in pools.run(after_a_pass_that_failed, tmp_path / "m", where, options, world=2):
        small.same(found, expected)


def after_a_cleanup_that_failed(api: Any, folder: Path) -> tuple[str, list[str]]:
    made = small.made(folder)

    def broken(*unused: Any) -> None:
        raise KeyError("a name of FSDP2's")

    def wrong(**unused: Any) -> Any:
        raise ZeroDivisionError("in the loss")

    # FSDP2's own, by which it begins anew: one of them on each torch.
    made.module.reshard = made.module.reset_iter_state = broken
    logged = Kept()
    logging.getLogger("torch_dcp_backport.engine").addHandler(logged)
    with pytest.raises(ZeroDivisionError) as failure, made.train_mode():
        made.train_batch(small.own_rows(small.batch(0), made), wrong)
    return str(failure.value), [*logged.texts, *getattr(failure.value, "__notes__", logged.texts)]


class Kept(logging.Handler):
    """The errors that were logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def test_an_error_of_the_cleanup_does_not_hide_that_of_the_user(pools, tmp_path: Path) -> None:
    """Of the pass that failed, and of the context around it."""
    small.write(tmp_path / "m")
    for text, said in pools.run(after_a_cleanup_that_failed, tmp_path / "m", world=2):
        assert text == "in the loss"
        assert len(said) == 4
        assert all("a name of FSDP2's" in line and "make a new" in line for line in said)


def gradients_after_a_failure(api: Any, folder: Path) -> bool:
    made = small.made(folder)
    rows = small.own_rows(small.batch(0), made)
    made.forward_backward_batch(rows, engine.sft_loss)
    before = [param.grad.to_local().clone() for param in made.module.parameters()]

    def wrong(**unused: Any) -> Any:
        raise ZeroDivisionError("in the loss")

    with pytest.raises(ZeroDivisionError):
        made.forward_backward_batch(rows, wrong)
    after = [param.grad.to_local() for param in made.module.parameters()]
    return all(map(torch.equal, before, after))


def test_gradients_of_batches_before_one_that_failed_stay(pools, tmp_path: Path) -> None:
    small.write(tmp_path / "m")
    assert pools.run(gradients_after_a_failure, tmp_path / "m", world=2) == [True] * 2


def built_without_a_name(api: Any, folder: Path, name: str) -> str:
    cpu_fsdp.install()
    probe: Any = torch.nn.Linear(1, 2)
    compat.fsdp2().fully_shard(probe, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    kind = type(probe._get_fsdp_state()._fsdp_param_group)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(kind, name)
        with pytest.raises(RuntimeError) as failure:
            small.made(folder)
    return str(failure.value)


def test_a_name_of_fsdp2_that_is_gone_is_one_error_before_training(pools, tmp_path: Path) -> None:
    small.write(tmp_path / "m")
    for text in pools.run(built_without_a_name, tmp_path / "m", "post_backward", world=2):
        assert f"engine cannot be used: torch {torch.__version__} has no FSDPParamGroup.post_backward" in text


def checked_without_each(api: Any) -> int:
    """Ask FSDP2's objects for all that the engine needs, as on torches that lack one of it."""
    module: Any = torch.nn.Linear(2, 2)
    compat.fsdp2().fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    compat.check_fsdp2(module, "engine")
    asked: set[str] = set()

    def has(owner: Any, name: str) -> bool:
        asked.add(f"{kinds[type(owner)]}.{name}")
        return f"{kinds[type(owner)]}.{name}" != missing

    kinds = {type(owner): kind for kind, owner in compat._fsdp2_objects(module)}
    missing = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "has", has)
        compat.check_fsdp2(module, "engine")
        names = sorted(asked)
        for missing in names:
            with pytest.raises(RuntimeError, match=rf"torch \S+ has no {missing}, on which it stands"):
                compat.check_fsdp2(module, "engine")
    return len(names)


def test_each_name_of_fsdp2_is_asked_for_before_training(pools) -> None:
    # Those of the unit's passes, and where FSDP2 has public functions two of these.
    assert all(count >= 11 for count in pools.run(checked_without_each, world=2))


def sharded(*within: torch.nn.Module) -> Any:
    """A root that FSDP2 shards, and whose parameters are all in units within it."""
    root, mesh = torch.nn.Sequential(*within), init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in (*within, root):
        compat.fsdp2().fully_shard(unit, mesh=mesh)
    return root


def asked_of(module: torch.nn.Module, room: str, call: Any, missing: str = "") -> set[str]:
    """What FSDP2's objects of a module are asked for by a call, on a torch that lacks one member."""
    kinds = {type(owner): kind for kind, owner in compat._fsdp2_objects(module)}
    asked: set[str] = set()

    def has(owner: Any, name: str) -> bool:
        asked.add(f"{kinds[type(owner)]}.{name}")
        return f"{kinds[type(owner)]}.{name}" != missing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "has", has)
        if not missing:
            call(module)
        else:
            with pytest.raises(RuntimeError, match=rf"{room} cannot be used: torch \S+ has no {missing}, on"):
                call(module)
    return asked


def checked_within_a_root(api: Any) -> bool:
    root = sharded(torch.nn.ReLU(), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    for room, call in (
        ("state_dict", compat.offloaded_parameters),
        ("checkpoint", compat.abandon_pass),
        ("engine", lambda module: compat.check_fsdp2(module, "engine")),
    ):
        names = asked_of(root, room, call)
        assert names == asked_of(root[1], room, call)
        assert any(name.startswith("FSDPParam.") for name in names)
        for missing in sorted(names):
            asked_of(root, room, call, missing)
    compat.abandon_pass(sharded(torch.nn.ReLU()))  # FSDP2 has no parameter there
    return True


def test_a_root_is_asked_for_what_is_within_it(pools) -> None:
    assert pools.run(checked_within_a_root, world=2) == [True] * 2


def named_as_missing(api: Any) -> list[tuple[str, str]]:
    """What errors name, of members that are taken away for real."""
    root: Any = sharded(torch.nn.Linear(2, 2))
    (param,) = list(compat.fsdp2_parameters(root))[:1]
    state, found = root._get_fsdp_state(), []
    engines, passes = (lambda: compat.check_fsdp2(root, "engine")), (lambda: compat.abandon_pass(root))
    for owner, name, call in (
        (type(param), "accumulate_unsharded_grad_if_needed", engines),
        (type(param), "to_accumulated_grad_if_needed", engines),
        (state, "_comm_ctx", passes),
        (state, "_is_root", passes),
    ):
        # Those of torch before 2.15, and one that each has.
        if name != "_is_root" and not hasattr(param, "accumulate_unsharded_grad_if_needed"):
            continue
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(owner, name)
            with pytest.raises(RuntimeError) as failure:
                call()
        found.append((name, str(failure.value)))
    return found


def test_an_error_names_the_member_that_is_missing(pools) -> None:
    for found in pools.run(named_as_missing, world=2):
        assert found
        for name, text in found:
            assert f"torch {torch.__version__} has no FSDP" in text
            assert f".{name}, on which it stands" in text


def moved_for_real(api: Any, folder: Path, options: dict[str, Any]) -> Any:
    """As by an accelerator: what is moved is another tensor; on the CPU `to` gives the same one back."""
    made: Any = small.made(folder, "AdamW", **options)

    @torch.no_grad()
    def to(device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        if model:
            made.module._apply(lambda tensor: tensor.clone())
        for state in made.optimizer.state.values() if optimizer else ():
            state.update({name: value.clone() for name, value in state.items() if value.dim()})

    made.to = to
    losses, norms = [], []
    for step in range(small.STEPS):
        rows = small.own_rows(small.batch(step), made)
        with made.eval_mode():
            made.infer_batch(rows)
        with made.train_mode():
            made.optimizer_zero_grad()
            output = made.forward_backward_batch(rows, engine.sft_loss)
            made.to("cpu")
            norms.append(made.optimizer_step())
        total = torch.tensor(sum(output["loss"]), dtype=torch.float64)
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return {"losses": losses, "norms": norms, "weights": dict(made.get_per_tensor_param(dtype=None)[0])}


@pytest.mark.parametrize("options", [{}, {"fsdp_size": 2}], ids=str)
def test_training_goes_on_with_what_was_moved(ranks, tmp_path: Path, options: Any) -> None:
    small.write(tmp_path / "m")
    options = {**options, "param_offload": True, "optimizer_offload": True}
    for found in ranks(moved_for_real, tmp_path / "m", options):
        small.same(found, small.alone("AdamW"))


def grouped(api: Any) -> Any:
    grid = engine.arrange("cpu", tp_size=2)
    made = engine.BaseEngine()
    made.grid = grid
    alone = engine.BaseEngine()
    alone.grid = engine.arrange("cpu")
    shared = engine.BaseEngine()
    shared.grid = engine.arrange("cpu", ulysses_sequence_parallel_size=2)
    groups = made.get_model_parallel_group(), shared.get_context_parallel_group()
    assert alone.get_model_parallel_group() is None
    assert alone.get_context_parallel_group() is None
    return [dist.get_process_group_ranks(group) for group in groups]


def test_the_groups_of_ranks_that_share_a_layer_or_a_sequence(ranks) -> None:
    found = ranks(grouped)
    assert found == [[[rank // 2 * 2, rank // 2 * 2 + 1]] * 2 for rank in range(len(found))]
