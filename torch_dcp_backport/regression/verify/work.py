"""The work of each rank of `verify`: make the model, make the call, report its costs and results.

Measures only the call: everything else that needs memory is done before it or after it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torch_dcp_backport.regression import meter, scenarios
from torch_dcp_backport.regression.verify import model as models
from torch_dcp_backport.regression.verify.report import PEAK_MARGINS

TAIL = 0.3  # seconds of history after the call, for the picture
LEARNING_RATE = 0.01


def look(api: ModuleType, device: str | None) -> dict[str, Any]:
    """The fields of `place.Seen`, with the device type that was asked for."""
    from torch_dcp_backport import compat

    return {
        "torch": torch.__version__,
        "devices": compat.device_counts(*([device] if device else [])),
        "backends": compat.backends(),
        "defaults": compat.default_backends(),
    }


def write(api: ModuleType, size: str, folder: str, library: bool) -> dict[str, int]:
    return models.write_checkpoint(size, folder, library=library)


def load_model(
    api: ModuleType, size: str, folder: str, library: bool, device: str, meta: bool
) -> dict[str, Any]:
    """Load a checkpoint that rank 0 reads; every rank gets its shard."""
    scenarios.warm_up(api, scenarios.Scenario("warm-up", meta=meta), device)
    model = _sharded(size, library, device, meta)
    checkpoint = models.Checkpoint(folder)
    source = checkpoint.state_dict() if dist.get_rank() == 0 else {}
    # Before the load: stock torch makes two parameters of a tied one.
    model_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    shard = sum(_padded_bytes(parameter) for parameter in model.parameters())
    loaded = scenarios.Loaded(model, None, source)
    cost, _ = _measure(lambda: scenarios.call(api, loaded), source, device, new=shard if meta else 0)
    wrong = [
        key
        for key, tensor in _state(model).items()
        if meter.local(tensor).device.type != device or not _from_file(checkpoint, key, tensor)
    ]
    return {
        **cost,
        "margin": PEAK_MARGINS[size],
        "whole": model_bytes,
        "shard": shard,
        "storages": meter.storage_bytes(p.detach() for p in model.parameters()),
        "tied": model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight"),
        "wrong": wrong,
    }


def load_optimizer(api: ModuleType, size: str, folder: str, library: bool, device: str) -> dict[str, Any]:
    """Move AdamW's states to rank 0 and back into a fresh optimizer; compare them rank by rank."""
    scenarios.warm_up(api, scenarios.Scenario("warm-up", optimizer=True), device)
    model = _sharded(size, library, device, meta=False)
    original = _stepped(model)
    options = api.StateDictOptions(full_state_dict=True, cpu_offload=True)
    source = api.get_optimizer_state_dict(model, original, options=options)
    if dist.get_rank() != 0:
        source = {}
    fresh = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    wanted = _states(model, original)
    shard = sum(meter.own_bytes(tensor) for tensor in wanted.values())
    loaded = scenarios.Loaded(model, fresh, source)
    cost, _ = _measure(lambda: scenarios.call(api, loaded), source, device, new=shard)
    got = _states(model, fresh)
    wrong = [name for name in wanted if name not in got or not _same_state(got[name], wanted[name])]
    wrong += sorted(set(got) - set(wanted))
    if fresh.param_groups[0]["lr"] != LEARNING_RATE:
        wrong.append("param_groups.0.lr")
    return {
        **cost,
        "margin": PEAK_MARGINS[size],
        "whole": sum(t.numel() * t.element_size() for s in original.state.values() for t in s.values()),
        "shard": shard,
        "storages": meter.storage_bytes(got.values()),
        "wrong": wrong,
    }


def get_model(api: ModuleType, size: str, folder: str, library: bool, device: str) -> dict[str, Any]:
    """Get the whole model to the host memory of rank 0; compare it there with the files."""
    options = api.StateDictOptions(full_state_dict=True, cpu_offload=True)
    small = scenarios.prepare(api, scenarios.Scenario("warm-up"), scenarios.TINY, device)
    api.get_model_state_dict(small.model, options=options)
    model = _sharded(size, library, device, meta=False)
    checkpoint = models.Checkpoint(folder)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            rows = scenarios.rows_of(parameter.shape[0], dist.get_rank(), dist.get_world_size())
            meter.local(parameter).copy_(checkpoint.rows(key, *rows))
    model_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    # A tied parameter is in the dict under each of its names, in torch's as well: once more in memory.
    wanted = _state(model) if dist.get_rank() == 0 else {}
    own = sum(t.numel() * t.element_size() for t in wanted.values())
    cost, state = _measure(
        lambda: api.get_model_state_dict(model, options=options),
        {},
        device,
        new=own if device == "cpu" else 0,
    )
    wrong = [key for key in wanted if key not in state or not _is_whole(checkpoint, key, state[key])]
    return {
        **cost,
        "margin": PEAK_MARGINS[size],
        "whole": model_bytes,
        "shard": own,
        "storages": meter.storage_bytes(state.values()),
        "wrong": wrong + sorted(set(state) - set(wanted)),
    }


def _measure(
    call: Callable[[], Any], source: dict[str, Any], device: str, new: int
) -> tuple[dict[str, Any], Any]:
    """Measure the call; return its cost and its result, which is held while it is measured.

    Args:
        source: what the call loads; it is let go after the call.
        new: bytes that this rank has to hold afterwards and does not hold before.
    """
    # Held until the call is over: stock torch overwrites the caller's dict, which would free it meanwhile.
    held_source = _tensors(source)
    handed_in = meter.storage_bytes(tensor for tensor in held_source if tensor.device.type == device)
    gc.collect()
    dist.barrier()
    with meter.Watch(meter.gauge(device)) as watch:
        result = call()
        watch.stop_peak()
        watch.mark("returned")
        held_source.clear()
        source.clear()
        gc.collect()
        watch.mark("released")
        time.sleep(TAIL)
    # Rank 0's input does not count once it is let go: it is the caller's.
    history = [(at, held) for at, held in watch.history if at <= watch.marks["returned"]]
    history += [(at, held + handed_in) for at, held in watch.history if at >= watch.marks["released"]]
    cost = {
        "new": new,
        "peak": watch.peak,
        "kept": None if watch.after is None else watch.after + handed_in,
        "seconds": watch.marks["returned"],
        "history": history,
    }
    return cost, result


def _sharded(size: str, library: bool, device: str, meta: bool) -> nn.Module:
    model = models.build(size, "meta" if meta else device, library=library)
    scenarios.shard(model, models.decoder_layers(model), device)
    if not meta:
        for parameter in model.parameters():
            meter.local(parameter.detach()).fill_(77)  # no source has it; and now the memory is really there
    return model


def _padded_bytes(parameter: torch.Tensor) -> int:
    """Return the bytes of a rank's shard: FSDP2 gives every rank as many rows as rank 0."""
    first, last = scenarios.rows_of(parameter.shape[0], 0, dist.get_world_size())
    return (last - first) * (parameter.numel() // parameter.shape[0]) * parameter.element_size()


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: parameter.detach() for key, parameter in model.named_parameters(remove_duplicate=False)}


def _from_file(checkpoint: models.Checkpoint, key: str, tensor: torch.Tensor) -> bool:
    rows = scenarios.rows_of(tensor.shape[0], dist.get_rank(), dist.get_world_size())
    return _same_bits(meter.local(tensor).cpu(), checkpoint.rows(key, *rows))


def _is_whole(checkpoint: models.Checkpoint, key: str, tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and _same_bits(tensor, checkpoint.rows(key, 0, tensor.shape[0]))


def _same_state(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return whether states are equal; a counter of steps may be on the host beside an accelerator."""
    return (got.device == wanted.device or wanted.dim() == 0) and _same_bits(got.cpu(), wanted.cpu())


def _same_bits(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    if got.dtype != wanted.dtype or got.shape != wanted.shape:
        return False
    return torch.equal(
        got.contiguous().reshape(-1).view(torch.uint8), wanted.contiguous().reshape(-1).view(torch.uint8)
    )


def _stepped(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW after a step on random gradients; FSDP2 cannot run a backward on a CPU before torch 2.7.

    Gradients are drawn on the CPU: not every accelerator has a torch.Generator.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)
    generator = torch.Generator().manual_seed(models.SEED + dist.get_rank())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        local = meter.local(parameter.grad)
        local.copy_(torch.randn(local.shape, dtype=local.dtype, generator=generator))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{key}.{name}": meter.local(tensor)
        for key, parameter in model.named_parameters()
        for name, tensor in optimizer.state[parameter].items()
    }


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    branches = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [tensor for branch in branches for tensor in _tensors(branch)]
