"""Megatron's distributed optimizer goes to another TP, PP and DP through a checkpoint, bit for bit.

The oracle is the same optimizer that made the same steps at the other cut. Gradients are the weights, so
steps are element by element and the same at any cut.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from decoders import Decoder
from gpt import gpt
from pool import Pool

from torch_dcp_backport.dist_checkpointing import CheckpointingException, verify
from torch_dcp_backport.megatron.convert import convert

pytest.importorskip("megatron.core")
transformers = pytest.importorskip("transformers")

OURS, MEGATRONS = "torch_dcp_backport.dist_checkpointing", "megatron.core.dist_checkpointing"
#: The padding of a vocabulary depends on TP; 64 is padded by none of them.
DENSE = Decoder("qwen2", vocab=64)
TIED = DENSE._replace(tied=True)
SPARSE = Decoder("qwen3_moe", head_dim=6, vocab=64, experts=4, expert_rows=12)
#: A dense layer before sparse ones, so that each layer has keys of its own, and a shared expert.
MIXED = Decoder("qwen2_moe", vocab=64, experts=4, expert_rows=12, shared_rows=6, dense=(0,))


@pytest.fixture(scope="module")
def optimizer_ranks():
    pool = Pool(4, "torch_dcp_backport.megatron", timeout=60.0, limit=170.0)
    yield pool.run
    pool.close()


def on_the_cpu(make: Any) -> Any:
    """What `make` makes, where Megatron asks for tensors of CUDA alone."""
    tensor, kind = torch.tensor, torch.Tensor.type

    def anywhere(*args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor(*args, **{**kwargs, "device": "cpu"})

    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = kind(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    from megatron.core.optimizer import distrib_optimizer

    kept = distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self: Any, param: torch.Tensor, tensors: dict[str, Any]) -> None:
        # torch's Adam keeps its step beside the moments; Megatron's function is written for another one.
        kept(self, param, {**tensors, "step": tensor(self.optimizer.param_groups[0]["step"])})

    with (
        mock.patch.object(
            distrib_optimizer.DistributedOptimizer, "_set_main_param_and_optimizer_states", with_step
        ),
        mock.patch.object(torch, "tensor", anywhere),
        mock.patch.object(torch.Tensor, "type", named),
        # Of weights in fp8, which need TransformerEngine; there are none.
        mock.patch.object(distrib_optimizer, "quantize_param_shard"),
    ):
        return make()


def trained(api: Any, files: str, decoder: Decoder, cut: tuple[int, int, int], steps: int) -> Any:
    """This rank's chunk and its distributed optimizer, after some steps."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    tp, pp, ep = cut
    (model,) = gpt(decoder, tp, pp, dtype=torch.bfloat16, ep=ep)
    api.load_hf(model, files)
    # Several buckets; Megatron 0.12.3 cannot have them with a tied embedding that two stages share.
    several = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=not decoder.tied, bucket_size=1500
    )
    wrapped = DistributedDataParallel(model.config, several, model)
    options = OptimizerConfig(
        optimizer="adam",
        lr=0.1,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        clip_grad=0.0,
    )
    optimizer = on_the_cpu(lambda: get_megatron_optimizer(options, [wrapped]))
    step(wrapped, optimizer, steps)
    return wrapped, optimizer


def step(model: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        for param in model.parameters():
            param.main_grad.copy_(param.detach())
        on_the_cpu(optimizer.step)


IN_MODEL_SPACE = "fully_sharded_model_space"
GATHERED, IN_BUCKETS = "dp_zero_gather_scatter", "fully_sharded_bucket_space"


def state_of(model: Any, optimizer: Any, is_loading: bool, kind: str = IN_MODEL_SPACE) -> dict[str, Any]:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    sharded, states = model.module.sharded_state_dict(), "_get_main_param_and_optimizer_states"
    kept = getattr(DistributedOptimizer, states)

    def in_buckets(self: Any, param: torch.Tensor) -> dict[str, Any]:
        # torch's Adam has its step among the states; Megatron's buckets have no place for it.
        return {name: state for name, state in kept(self, param).items() if name != "step"}

    with mock.patch.object(DistributedOptimizer, states, in_buckets if kind == IN_BUCKETS else kept):
        return {
            "model": sharded,
            "optimizer": on_the_cpu(
                lambda: optimizer.sharded_state_dict(sharded, is_loading=is_loading, sharding_type=kind)
            ),
        }


def saves(
    api: Any, room: str, files: str, to: str, decoder: Decoder, cut: Any, kind: str = IN_MODEL_SPACE
) -> None:
    model, optimizer = trained(api, files, decoder, cut, 2)
    if dist.get_rank() == 0:
        os.makedirs(to)
    dist.barrier()
    # Megatron's writes from processes of its own.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    importlib.import_module(room).save(state_of(model, optimizer, False, kind), to)


def held(model: Any, optimizer: Any) -> list[torch.Tensor]:
    """All that this rank's part of the optimizer has, and the model's parameters."""
    every = [param.detach() for param in model.parameters()]
    for one in optimizer.chained_optimizers:
        for group in one.optimizer.param_groups:
            for param in group["params"]:
                state = one.optimizer.state[param]
                every += [param.detach(), state["exp_avg"], state["exp_avg_sq"]]
    return [tensor.clone() for tensor in every]


def differs(api: Any, room: str, files: str, folder: str, decoder: Decoder, cut: Any) -> tuple[int, int]:
    """(Tensors of this rank, those that are others than of the optimizer that made all steps at this cut)."""
    wanted = []
    model, optimizer = trained(api, files, decoder, cut, 2)
    wanted.append(held(model, optimizer))
    step(model, optimizer, 1)
    wanted.append(held(model, optimizer))
    # Without TransformerEngine Megatron cannot load into an optimizer that has made no step.
    model, optimizer = trained(api, files, decoder, cut, 1)
    state = state_of(model, optimizer, True)
    state = importlib.import_module(room).load(state, folder)
    model.module.load_state_dict(state["model"])
    on_the_cpu(lambda: optimizer.load_state_dict(state["optimizer"]))
    for one in optimizer.chained_optimizers:
        # Megatron gives all parameters one tensor as their step, which torch's Adam then counts up for each.
        for kept in one.optimizer.state.values():
            kept["step"] = kept["step"].clone()
    got = [held(model, optimizer)]
    step(model, optimizer, 1)
    got.append(held(model, optimizer))
    pairs = [pair for left, right in zip(got, wanted) for pair in zip(left, right)]
    assert [len(left) for left in got] == [len(right) for right in wanted]
    return len(pairs), sum(not torch.equal(left, right) for left, right in pairs)


def refused(api: Any, room: str, files: str, folder: str, decoder: Decoder, cut: Any) -> str:
    state = state_of(*trained(api, files, decoder, cut, 1), True)
    with pytest.raises(
        CheckpointingException, match=r"not in the checkpoint.*chained_0\.optimizer"
    ) as caught:
        importlib.import_module(room).load(state, folder)
    return str(caught.value)


def files_of(decoder: Decoder, folder: Any) -> str:
    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model(**{**decoder.config, "torch_dtype": "bfloat16"})
    model = transformers.AutoModelForCausalLM.from_config(made).to(torch.bfloat16)
    for param in model.parameters():
        if param.dim() == 1:
            # Norms and biases of a new model are all alike.
            torch.nn.init.normal_(param)
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "writer, reader, decoder, source, target",
    [
        (OURS, OURS, DENSE, (2, 1, 1), (1, 2, 1)),
        (MEGATRONS, OURS, DENSE, (1, 2, 1), (2, 1, 1)),
        (OURS, MEGATRONS, DENSE, (2, 2, 1), (2, 1, 1)),
        (MEGATRONS, OURS, SPARSE, (1, 1, 2), (1, 1, 4)),
    ],
    ids=[
        "tp 2 to pp 2",
        "Megatron's, pp 2 to tp 2",
        "to Megatron, tp 2 x pp 2 to tp 2",
        "Megatron's, ep 2 to ep 4",
    ],
)
def test_the_optimizer_is_the_one_of_the_other_cut(
    optimizer_ranks, tmp_path, writer, reader, decoder, source, target
):
    files, to = files_of(decoder, tmp_path / "hf"), str(tmp_path / "ckpt")
    optimizer_ranks(saves, writer, files, to, decoder, source)
    for count, others in optimizer_ranks(differs, reader, files, to, decoder, target):
        assert count > 20
        assert others == 0


@pytest.mark.parametrize(
    "writer, kind, reader, decoder, source, target",
    [
        (MEGATRONS, GATHERED, OURS, TIED, (2, 2, 1), (1, 1, 1)),
        (OURS, IN_BUCKETS, MEGATRONS, DENSE, (1, 2, 1), (2, 1, 1)),
        (MEGATRONS, IN_MODEL_SPACE, MEGATRONS, SPARSE, (1, 1, 1), (1, 1, 2)),
        (MEGATRONS, GATHERED, OURS, MIXED, (1, 2, 2), (1, 1, 1)),
        (OURS, IN_BUCKETS, OURS, SPARSE, (1, 1, 2), (1, 1, 4)),
    ],
    ids=[
        "gathered and tied, tp 2 x pp 2 to dp 4",
        "buckets, pp 2 to tp 2, to Megatron",
        "ep 1 to ep 2, to Megatron",
        "gathered, dense and sparse layers, pp 2 x ep 2 to ep 1",
        "buckets, ep 2 to ep 4",
    ],
)
def test_convert_carries_an_optimizer_to_another_grid(
    optimizer_ranks, tmp_path, writer, kind, reader, decoder, source, target
):
    files, saved, to = files_of(decoder, tmp_path / "hf"), tmp_path / "saved", str(tmp_path / "ckpt")
    optimizer_ranks(saves, writer, files, str(saved), decoder, source, kind)
    convert(saved, to, ep=target[2])
    assert verify(to) == []
    for count, others in optimizer_ranks(differs, reader, files, to, decoder, target):
        assert count > 20
        assert others == 0


def test_a_sparse_models_optimizer_does_not_go_from_ep_1_to_a_larger_one(optimizer_ranks, tmp_path):
    files, to = files_of(SPARSE, tmp_path / "hf"), str(tmp_path / "ckpt")
    optimizer_ranks(saves, OURS, files, to, SPARSE, (1, 1, 1))
    texts = optimizer_ranks(refused, OURS, files, to, SPARSE, (1, 1, 2))
    assert len(set(texts)) == 1
    assert "nothing was changed" in texts[0]
