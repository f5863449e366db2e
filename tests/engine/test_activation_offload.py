"""What autograd saves, on the host until the backward pass: the same bits, and no copy that is not needed."""

from __future__ import annotations

import contextlib
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torch_dcp_backport import compat
from torch_dcp_backport.engine._src import offload

STEPS = range(2)


def bits(found: dict[str, Any]) -> Any:
    return found["losses"], found["norms"], [value.tolist() for value in found["weights"].values()]


def without_files(api: Any, folder: Path, options: Any) -> Any:
    class Engine(small.Offloading, small.Engine):
        pass

    built = small.made(folder, kind=Engine, **options)
    plain = small.made(folder, **options)
    return bits(small.trained(built, STEPS)), bits(small.trained(plain, STEPS)), built.copied


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fsdp_size": 2, "gradient_sync": "last", "reshard_after_forward": False},
        {"offload_policy": True, "mixed_precision": {"param_dtype": "bf16"}},
        {"frozen": True, "untied": True},
    ],
    ids=str,
)
def test_the_training_has_the_same_bits(ranks, tmp_path: Path, options: Any) -> None:
    small.write(tmp_path / "m", is_tied="untied" not in options)
    for offloaded, plain, copied in ranks(without_files, tmp_path / "m", options):
        assert offloaded == plain
        assert copied


def of_transformers(api: Any, folder: Path, model: Any, options: Any) -> Any:
    small.cpu_fsdp.install()
    found = []
    for kind in (small.Offloading, small.engine.FSDPEngineWithLMHead):
        built = kind(
            {"path": str(folder), **model},
            {"mixed_precision": {"param_dtype": None, "reduce_dtype": None}, **options},
            {"optimizer": "SGD", "lr": 0.5, "clip_grad": 0.3},
            device="cpu",
        )
        built.initialize()
        found.append((bits(small.trained(built, STEPS)), getattr(built, "copied", 0)))
    (offloaded, copied), (plain, _) = found
    return offloaded, plain, copied


RECOMPUTED = {"enable_gradient_checkpointing": True}
PACKED = {"use_remove_padding": True}
TOKENS = {"max_token_len_per_gpu": 24}


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (RECOMPUTED, TOKENS),
        (PACKED, TOKENS),
        ({**PACKED, "override_config": {"attn_implementation": "eager"}}, TOKENS),
        ({**PACKED, **RECOMPUTED}, {**TOKENS, "ulysses_sequence_parallel_size": 2}),
        ({}, {**TOKENS, "tp_size": 2}),
    ],
    ids=str,
)
def test_a_model_of_transformers_has_the_same_bits(ranks, tmp_path: Path, model: Any, options: Any) -> None:
    """Computed again in the backward pass, packed, with ranks that share a sequence, with DTensors."""
    pytest.importorskip("transformers")
    pytest.importorskip("safetensors")
    import tiny

    if "tp_size" in options and not compat.HAS_STRIDED:
        pytest.skip("TP needs torch >= 2.5")
    tiny.write(tmp_path, "qwen3")
    for offloaded, plain, copied in ranks(of_transformers, tmp_path, model, options):
        assert offloaded == plain
        assert copied


class Shared(nn.Module):
    """Three layers read one tensor; a scale and a buffer are read as they are, and by their views."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(2, 8))
        self.register_buffer("factors", torch.ones(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.factors[:2]
        return sum(layer(x) for layer in self.layers) * self.scale[1]  # type: ignore[return-value]


def test_a_storage_is_copied_once_and_no_part_of_the_model() -> None:
    module = Shared()
    with offload.saved_on_host(module, "cpu", least=1) as saved:
        module(torch.ones(2, 8, requires_grad=True))
        # The layers' input, and their sum, by which the scale is differentiated.
        assert [stored.host.nbytes for stored in saved.stored.values()] == [64, 64]


class Mapped(nn.Linear):
    """As masks of transformers are made, by `torch.vmap`; or by another transform."""

    transform: Any = staticmethod(torch.vmap)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.transform(lambda row: (row * 2).sum())(x.detach()) * x)


def test_a_transform_that_torch_refuses_names_the_setting() -> None:
    """torch 2.4 refuses all of them, later releases `torch.func.grad` alone."""
    module, x = Mapped(3, 3), torch.ones(3, 3)
    says = r"enable_activation_offload=True does not go with .* torch >= 2\.5 .*=False would do \(torch.func"
    is_refused = torch.__version__.startswith("2.4.")
    refusal: Any = pytest.raises(RuntimeError, match=says) if is_refused else contextlib.nullcontext()
    with refusal, offload.saved_on_host(module, "cpu", least=1):
        module(x)
    module.transform = torch.func.grad
    with pytest.raises(RuntimeError, match=says), offload.saved_on_host(module, "cpu", least=1):
        module(x)
    # Other errors stay as they are.
    with pytest.raises(RuntimeError, match=r"^its own$"), offload.saved_on_host(module, "cpu"):
        raise RuntimeError("its own")


class Strided(torch.autograd.Function):
    """Gives what it saved to a list, in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, found: list[torch.Tensor], *views: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*views)
        ctx.found = found
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.found.extend(ctx.saved_tensors)
        return (grad.expand(2), None, *(None for _ in ctx.saved_tensors))


def test_views_have_their_strides_and_share_their_storage() -> None:
    """Another stride may be another order of a sum."""
    whole = torch.arange(24.0).view(4, 6)
    views = [
        whole.t(), whole[1:3, ::2], whole[:1].expand(4, 6), whole.view(torch.int32)[2], whole.T.contiguous(),
        torch.view_as_complex(whole.view(4, 3, 2)).conj(), whole.to_sparse(), whole[:0], whole.bfloat16()[0],
    ]  # fmt: skip
    x, found = torch.ones(2, requires_grad=True), []  # type: ignore[var-annotated]
    with offload.saved_on_host(nn.Identity(), "cpu", least=1):
        loss = Strided.apply(x, found, *views)
    loss.backward()
    for view, again in zip(views, found):
        assert (again.dtype, again.shape, again.layout) == (view.dtype, view.shape, view.layout)
        assert again.to_dense().equal(view.to_dense())
        if view.layout == torch.strided:
            assert (again.stride(), again.storage_offset()) == (view.stride(), view.storage_offset())
    storages = [view.untyped_storage().data_ptr() for view in found if view.layout == torch.strided]
    assert storages[0] == storages[1] == storages[2] == storages[3] != whole.untyped_storage().data_ptr()


def test_a_write_between_two_saves_changes_neither() -> None:
    factors = torch.tensor([2.0, 3.0], requires_grad=True)
    with offload.saved_on_host(nn.Identity(), "cpu", least=1):
        x = torch.tensor([5.0, 7.0])
        first = x * factors
        x += 1
        second = x * factors
        x.zero_()
    (first + 10 * second).sum().backward()
    assert factors.grad.tolist() == [5 + 60, 7 + 80]  # type: ignore[union-attr]


def dtensor_written(api: Any) -> Any:
    mesh = init_device_mesh("cpu", (4,))
    factors, x = (compat.replicated(torch.tensor(row), mesh) for row in ([2.0, 3.0], [5.0, 7.0]))
    factors.requires_grad_()
    with offload.saved_on_host(nn.Identity(), "cpu", least=1):
        first = x * factors
        x += 1
        second = x * factors
    (first + 10 * second).to_local().sum().backward()
    return factors.grad.to_local().tolist()


def test_a_write_into_a_dtensor_is_one_into_its_part(ranks) -> None:
    assert ranks(dtensor_written) == [[5 + 60, 7 + 80]] * 4


@pytest.mark.parametrize("is_buffer", [False, True])
def test_a_write_into_what_stays_where_it_is_is_an_error(is_buffer: bool) -> None:
    """As without the setting: the gradient would be of another value."""
    factors, module, x = torch.ones(2, requires_grad=True), nn.Identity(), torch.tensor([5.0, 7.0])
    if is_buffer:
        module.register_buffer("x", x)
    with offload.saved_on_host(module, "cpu", least=1 if is_buffer else 9):
        loss = (x * factors).sum()
    x += 1
    with pytest.raises(RuntimeError, match=r"a tensor \(2,\) of torch.float32 .* 1 writes, expected 0"):
        loss.backward()


def test_zeros_without_memory_stay_as_they_are() -> None:
    factors = torch.ones(2, requires_grad=True)
    with offload.saved_on_host(nn.Identity(), "cpu", least=1) as saved:
        loss = torch.mul(factors, torch._efficientzerotensor((2,)))
        assert not saved.stored
    loss.backward(torch.ones(2))
    assert (factors.grad + 1).tolist() == [1, 1]


def test_a_small_tensor_and_another_device_stay_where_they_are() -> None:
    factors = torch.ones(8, requires_grad=True)
    for kind, least in (("cpu", 65), ("cuda", 1)):
        with offload.saved_on_host(nn.Identity(), kind, least) as saved:
            (torch.ones(2, 8) * factors).sum()
            assert not saved.stored


def test_nothing_outlives_its_graph() -> None:
    """Also without a backward pass, and without the garbage collector."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Softmax(-1))
    gc.disable()
    try:
        for goes_back in (True, False):
            with offload.saved_on_host(module, "cpu", least=1) as saved:
                output = module(torch.ones(2, 8))
                copies = [weakref.ref(stored) for stored in saved.stored.values()]
            # The first layer's input, and the outputs of the others.
            assert [copy() is not None for copy in copies] == [True] * 3
            if goes_back:
                output.sum().backward()
            else:
                del output
            assert [copy() for copy in copies] == [None] * 3
    finally:
        gc.enable()
