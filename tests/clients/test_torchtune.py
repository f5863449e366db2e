"""torchtune's recipes: it binds torch's functions when it is imported, and keeps its switch for them off."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from client import environment, facts, full_state_of, train
from conftest import check_orders
from torch import nn


def decoder() -> nn.Module:
    from torchtune.models.llama3 import llama3

    return llama3(vocab_size=128, num_layers=2, num_heads=4, num_kv_heads=4, embed_dim=32, max_seq_len=64)


def sharded() -> nn.Module:
    from torchtune.training import get_shard_conditions, shard_model

    with torch.device("meta"):
        model = decoder()
    shard_model(model, shard_conditions=[get_shard_conditions], cpu_offload=False)
    return model


def a_job(api: Any, order: str, switch: bool) -> dict[str, Any]:
    """Full weights into a model on the meta device, a step, its optimizer's full state into another one."""
    from torchtune.training import _distributed as recipes
    from torchtune.training import (
        gather_cpu_state_dict,
        get_full_optimizer_state_dict,
        load_from_full_model_state_dict,
        load_from_full_optimizer_state_dict,
    )

    environment()
    cpu, first = torch.device("cpu"), dist.get_rank() == 0
    before = recipes._DISTRIBUTED_STATE_DICT_API_IS_AVAILABLE
    # As a user would who trusts torch's functions again.
    recipes._DISTRIBUTED_STATE_DICT_API_IS_AVAILABLE = switch
    try:
        model = sharded()
        load_from_full_model_state_dict(model, full_state_of(decoder()), cpu, strict=True)
        with cpu:
            for module in model.modules():
                if hasattr(module, "rope_init"):
                    module.rope_init()
        loaded = model.state_dict()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=False)
        start = facts(loaded=loaded)
        train(model, optimizer)
        weights = gather_cpu_state_dict(model, first, device=cpu)
        saved = get_full_optimizer_state_dict(model, optimizer, first, device=cpu)
        other = sharded()
        load_from_full_model_state_dict(other, full_state_of(decoder()), cpu, strict=True)
        its_optimizer = torch.optim.AdamW(other.parameters(), lr=0.1, fused=False)
        whole = facts(weights=weights, saved=saved) if first else facts()
        # A recipe reads its checkpoint on every rank.
        read = [saved]
        dist.broadcast_object_list(read, src=0)
        load_from_full_optimizer_state_dict(other, its_optimizer, read[0], cpu)
        end = facts(model=other.state_dict(), optimizer=its_optimizer.state_dict())
    finally:
        recipes._DISTRIBUTED_STATE_DICT_API_IS_AVAILABLE = before
    return {kind: {**start[kind], **whole[kind], **end[kind]} for kind in start}


@pytest.mark.parametrize("switch", [False, True], ids=["its-own-loader", "torchs-functions"])
def test_a_job(in_every_order: Any, switch: bool) -> None:
    check_orders(in_every_order(a_job, switch), stock_keeps=["loaded", "optimizer"] if switch else [])


def bound(api: Any, order: str) -> tuple[bool, str, list[str]]:
    from torchtune.training import _distributed as recipes

    names = (
        "set_model_state_dict",
        "set_optimizer_state_dict",
        "get_optimizer_state_dict",
        "_init_optim_state",
    )
    same = all(getattr(recipes, name) is getattr(api, name) for name in names)
    shim = sys.modules.get("torch_dcp_backport")
    late = [name for name in shim.status().late_bindings if name.startswith("torchtune")] if shim else []
    return same, recipes.set_model_state_dict.__globals__["__name__"], late


def test_what_it_binds_is_ours(in_every_order: Any) -> None:
    for order, ranks in in_every_order(bound).items():
        for same, module, late in ranks:
            assert same, order
            assert module.startswith("torch_dcp_backport") == (order != "no shim")
            assert bool(late) == (order == "client first")
