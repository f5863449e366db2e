"""Generated models and state dicts, most of them wrong in some way, against a plain reference.

What can be loaded is loaded bit for bit; all else is one RuntimeError on every rank, and changes nothing.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple, Optional

import pytest
import torch
import torch.distributed as dist
from cpu_fsdp import BETWEEN
from pool import send_values
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torch_dcp_backport.compat import DTensor, Replicate, Shard

#: 2,000 cases on the oldest and a current torch, 400 in between; others on each.
BATCHES, CASES = 2, 200 if BETWEEN else 1000
FIRST = int("".join(torch.__version__.split(".")[:2])) * 10_000

NAMES = ("weight", "0", "größe", "ключ", "with space", "a-b", "_", "state", "param_groups", "权重")
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
OTHERS = (torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn)


class Wrapped(torch.Tensor):
    """A subclass without behaviour of its own."""


class Case(NamedTuple):
    """One load; the same on every rank, as it comes from a number."""

    model: nn.Module
    state: dict[str, Any]
    options: dict[str, bool]
    #: What is wrong: words of the error; nothing where it can be loaded.
    wrong: list[str]
    done: list[tuple[str, str]]


def bits(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def random_tensor(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bits: payloads of NaN, infinities and subnormal numbers too."""
    size = torch.Size(shape).numel() * dtype.itemsize
    if dtype is torch.bool:
        return torch.tensor([rng.random() < 0.5 for _ in range(size)], dtype=dtype).reshape(shape)
    data = torch.tensor(list(rng.randbytes(size)), dtype=torch.uint8)
    return data.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


def sharded(rng: random.Random, full: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    dim = rng.randrange(full.dim())
    if rng.random() < 0.2:
        placements, part = [Replicate()], full
    else:
        parts = full.chunk(mesh.size(), dim)
        placements = [Shard(dim)]
        part = parts[dist.get_rank()] if dist.get_rank() < len(parts) else full.narrow(dim, 0, 0)
    return DTensor.from_local(
        part.clone(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def make(seed: int, mesh: DeviceMesh) -> Case:
    rng = random.Random(seed)
    model, state = nn.Module(), {}
    layers = [nn.Module() for _ in range(rng.randint(1, 2))]
    for name, layer in zip(rng.sample(NAMES, len(layers)), layers):
        model.add_module(name, layer)
        for own in rng.sample(NAMES, rng.randint(0, 3)):
            shape = tuple(rng.randint(0 if rng.random() < 0.1 else 1, 5) for _ in range(rng.randint(0, 3)))
            is_buffer = rng.random() < 0.3
            dtype = rng.choice((*FLOATS, *OTHERS) if is_buffer else FLOATS)
            live = random_tensor(rng, shape, dtype)
            if shape and rng.random() < 0.7 and not is_buffer:
                live = sharded(rng, live, mesh)
            if is_buffer:
                layer.register_buffer(own, live)
            else:
                layer.register_parameter(own, nn.Parameter(live))
            state[f"{name}.{own}"] = random_tensor(rng, shape, dtype)
    options = {"strict": rng.random() < 0.6, "broadcast_from_rank0": rng.random() < 0.7}
    wrong: list[str] = []
    done: list[tuple[str, str]] = []
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        change(rng, state, options["strict"], wrong, done, mesh)
    if not state and options["strict"] and not options["broadcast_from_rank0"]:
        wrong.append("state dict is empty")
    return Case(model, state, options, wrong, done)


def change(
    rng: random.Random,
    state: dict[str, Any],
    strict: bool,
    wrong: list[str],
    done: list[tuple[str, str]],
    mesh: DeviceMesh,
) -> None:
    """Do one thing to a state dict, and note what is wrong with it then."""
    touched = {key for _, key in done}
    fine = [key for key, value in state.items() if torch.is_tensor(value) and key not in touched]
    what = rng.choice(("extra", *(CHANGES if fine else ())))
    if what == "extra":
        key = rng.choice(("extra", "weight.", ".", "", "a.b.c.d", "ü.ü"))
        state[key] = rng.choice(
            (torch.ones(2), None, "text", [1, 2], {"a": torch.ones(1)}, 3.5, float("nan"))
        )
        done.append(("extra", key))
        if strict:
            wrong.append("Unexpected key(s)")
        return
    key = rng.choice(fine)
    done.append((what, key))
    value = state[key]
    if what == "missing":
        del state[key]
        if strict:
            wrong.append("Missing key(s)")
    elif what == "shape":
        state[key] = torch.zeros((*value.shape, 2))
        wrong.append("wrong")
    elif what == "longer":
        state[key] = torch.zeros(tuple(size + 1 for size in value.shape) or (2,))
        wrong.append("wrong")
    elif what == "no tensor":
        state[key] = rng.choice((None, "text", 3, [torch.ones(2)], {"a": 1}, object))
        wrong.append("not a tensor that can be loaded")
    elif what == "unusable":
        state[key] = rng.choice(
            (
                torch.zeros(3, 3).to_sparse(),
                torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8),
                torch.empty(tuple(value.shape), device="meta"),
            )
        )
        wrong.append("not a tensor that can be loaded")
    elif what == "dtype":
        if value.dtype in FLOATS:
            state[key] = value.to(rng.choice(FLOATS))
    elif what == "strides":
        room = torch.empty((*reversed(value.shape), 2), dtype=value.dtype)
        turned = room[..., 0].permute(*reversed(range(value.dim()))) if value.dim() else room[0]
        state[key] = turned.copy_(value)
    elif what == "expanded":
        state[key] = (
            value.reshape(-1)[:1].reshape([1] * value.dim()).expand(value.shape) if value.numel() else value
        )
    elif what == "alias":
        same = [one for one in fine if state[one].shape == value.shape and state[one].dtype == value.dtype]
        state[key] = state[rng.choice(same)]
    elif what == "gradient":
        if value.dtype in FLOATS:
            state[key] = value.requires_grad_() if rng.random() < 0.5 else nn.Parameter(value)
    elif what == "subclass":
        state[key] = value.as_subclass(Wrapped)


CHANGES = (
    "missing",
    "shape",
    "longer",
    "no tensor",
    "unusable",
    "dtype",
    "strides",
    "expanded",
    "alias",
    "gradient",
    "subclass",
)


def expected(live: torch.Tensor, full: torch.Tensor) -> bytes:
    """The bits of this rank's part of a whole tensor, in the dtype that it is loaded as."""
    full = full.detach().as_subclass(torch.Tensor)
    if isinstance(live, DTensor):
        (placement,) = live.placements
        if isinstance(placement, Shard):
            parts = full.chunk(dist.get_world_size(), placement.dim)
            mine = dist.get_rank() < len(parts)
            full = parts[dist.get_rank()] if mine else full.narrow(placement.dim, 0, 0)
    return bits(full.to(live.dtype))


def fuzz(api: Any, batch: int) -> dict[str, int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    counts = {"loaded": 0, "refused": 0}
    # In half of the cases small values travel with their inventory.
    send_values(with_inventory=bool(batch % 2))
    for number in range(FIRST + batch * CASES, FIRST + (batch + 1) * CASES):
        case = make(number, mesh)
        one(api, number, case)
        counts["refused" if case.wrong else "loaded"] += 1
    send_values(with_inventory=False)
    return counts


def one(api: Any, number: int, case: Case) -> None:
    values = dict(case.model.named_parameters()) | dict(case.model.named_buffers())
    before = {key: bits(local(value)) for key, value in values.items()}
    given = case.state if dist.get_rank() == 0 or not case.options["broadcast_from_rank0"] else {}
    copy = dict(given)
    source = {key: bits(value) for key, value in given.items() if is_plain(value)}
    about = f"case {number}: {case.options} {case.done}"
    error: Optional[str] = None
    try:
        api.set_model_state_dict(
            case.model, given, options=api.StateDictOptions(full_state_dict=True, **case.options)
        )
    except RuntimeError as caught:
        error = str(caught)
    assert list(given) == list(copy), about
    assert all(given[key] is copy[key] for key in copy), about
    assert source == {key: bits(value) for key, value in given.items() if is_plain(value)}, about
    if case.wrong and values:
        assert error is not None, f"{about}: loaded, but {case.wrong}"
        assert any(word in error for word in case.wrong), f"{about}: {error}"
        assert before == {key: bits(local(value)) for key, value in values.items()}, about
        return
    assert error is None or not values, f"{about}: {error}"
    for key, live in values.items():
        if error is None:
            want = expected(live, case.state[key]) if key in case.state else before[key]
            assert bits(local(live)) == want, f"{about}: {key}"


def is_plain(value: Any) -> bool:
    return (
        torch.is_tensor(value)
        and value.layout is torch.strided
        and not value.is_meta
        and not value.is_quantized
    )


@pytest.mark.parametrize("batch", range(BATCHES))
def test_whatever_is_given_is_loaded_exactly_or_refused_by_all(ranks, batch):
    counts = ranks(fuzz, batch, world=2)
    assert counts[0] == counts[1]
    assert sum(counts[0].values()) == CASES
    assert min(counts[0].values()) > CASES // 10
