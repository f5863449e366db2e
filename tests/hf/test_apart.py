"""A model's tensors that files have in parts: experts that a model holds in a single tensor."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from test_opening import WAYS, concatenate, merge, transpose
from test_state_dicts import Replicate, Shard, distribute_tensor
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torch_dcp_backport import hf
from torch_dcp_backport.checkpoint import export_checkpoint
from torch_dcp_backport.dist_checkpointing.training_state import save_training_state
from torch_dcp_backport.hf._src import apart, classes, sharing
from torch_dcp_backport.hf._src.classes import Origin
from torch_dcp_backport.hf._src.opening import made_of
from torch_dcp_backport.transfer import Box, TensorInfo, part_of
from torch_dcp_backport.transfer._src import once

#: Of `WAYS`, those of which every tensor of the files is a part of what is made.
CUT = {"Chunk", "Split"}
WHOLE = [way for way, (_, steps, _) in WAYS.items() if CUT.isdisjoint(type(step).__name__ for step in steps)]


@pytest.mark.parametrize("way", WHOLE)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_part_is_what_the_tensor_was_made_of(way: str, data: st.DataObject) -> None:
    shapes, steps, function = WAYS[way]
    files = {f"{i}.{j}": shape for i, row in enumerate(shapes) for j, shape in enumerate(row)}
    values = {key: torch.randn(shape) for key, shape in files.items()}
    keys = [[f"{i}.{j}" for j in range(len(row))] for i, row in enumerate(shapes)]
    (made,) = function([[values[key] for key in row] for row in keys])
    infos = {key: TensorInfo(shape, torch.float32) for key, shape in files.items()}
    route = Origin(tuple(map(tuple, keys)), tuple(steps), (tuple(made.shape),))
    found = made_of(route, infos)
    assert found is not None
    cuts = apart.cutouts(found, "x")
    assert set(cuts) == set(files)
    key = data.draw(st.sampled_from(sorted(cuts)))
    cut = cuts[key]
    assert cut.shape == files[key]
    # Any box of it, in the tensor that is made and back.
    offset = tuple(data.draw(st.integers(0, size - 1)) for size in cut.shape)
    box = Box(offset, tuple(data.draw(st.integers(1, size - at)) for size, at in zip(cut.shape, offset)))
    outer = cut.outer(box)
    assert cut.inner(outer) == box
    part = part_of(made, Box((0,) * made.dim(), tuple(made.shape)), outer)
    taken = cut.taken(part)
    assert torch.equal(taken, values[key][box.within(Box((0,) * len(cut.shape), cut.shape))])
    assert torch.equal(cut.put_back(taken), part)
    assert taken.data_ptr() == part.data_ptr()


def test_a_tensor_that_is_cut_is_not_taken_apart() -> None:
    shapes, steps, _ = WAYS["a part of rows"]
    files = {"0.0": TensorInfo(shapes[0][0], torch.float32)}
    made = made_of(Origin((("0.0",),), tuple(steps), ((2, 4),) * 3, 1), files)
    assert made is not None
    assert apart.cutouts(made, "x") == {}


EXPERTS, ROWS, COLUMNS = 3, 12, 32
PACKED = "model.layers.{}.mlp.experts.gate_up_proj"


class StandIn:
    """As transformers 5, for the experts of gpt-oss, which all releases pack: gate above up, and turned."""

    @staticmethod
    def names(key: str) -> list[list[str]]:
        folder = key.rpartition(".")[0]
        return [[f"{folder}.{number}.{name}.weight" for number in range(EXPERTS)] for name in ("w1", "w3")]

    @classmethod
    def revert_weight_conversion(cls, model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {}
        for key, value in state.items():
            if not key.endswith(".gate_up_proj"):
                found[key] = value
                continue
            for names, half in zip(cls.names(key), value.transpose(1, 2).chunk(2, 1)):
                found.update(zip(names, half.unbind()))
        return found

    @classmethod
    def by_5(cls, model: Any, files: Any, held: Any, core: Any) -> tuple[dict[str, str], dict[str, Origin]]:
        renamed, routes = cls.by_4(model, files, held)
        for key, shape in held.items():
            names = cls.names(key) if key.endswith(".gate_up_proj") else []
            if names and names[0][0] in files:
                steps = merge(0), concatenate(1), transpose(1, 2)
                routes[key] = Origin(tuple(map(tuple, names)), steps, (shape,))
        return renamed, routes

    by_4 = staticmethod(classes._by_4)


def made(seed: int = 0) -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes = {"vocab_size": 40, "hidden_size": COLUMNS, "intermediate_size": ROWS, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": EXPERTS}
    model = GptOssForCausalLM(GptOssConfig(**sizes, **heads, num_experts_per_tok=2))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    return model


class Adapted(nn.Module):
    """A linear layer with an adapter of LORA, under peft's names."""

    def __init__(self, layer: nn.Linear, generator: torch.Generator) -> None:
        super().__init__()
        self.base_layer = layer
        for name, wide, high in (("lora_A", layer.in_features, 2), ("lora_B", 2, layer.out_features)):
            part = nn.Linear(wide, high, bias=False)
            part.weight.data = torch.randn(high, wide, generator=generator)
            self.add_module(name, nn.ModuleDict({"default": part}))


LORA = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["q_proj"]}
MERGED = "model.layers.{}.self_attn.q_proj.weight"


def adapted() -> tuple[Any, dict[str, torch.Tensor]]:
    """(`made()` with an adapter on two layers, which are no experts; the weights of both with it)."""
    model, draw, merged = made(), torch.Generator().manual_seed(5), {}
    for number, layer in enumerate(model.model.layers):
        both = layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj, draw)
        a, b = (both.get_submodule(f"{name}.default").weight.data for name in ("lora_A", "lora_B"))
        merged[MERGED.format(number)] = both.base_layer.weight.data + b @ a * 4
    return model, merged


def check_merged(folder: hf.Folder, merged: dict[str, torch.Tensor]) -> None:
    assert set(folder.tensors) == set(StandIn.revert_weight_conversion(None, made().state_dict()))
    for key, value in merged.items():
        found = folder.part(key, Box((0, 0), tuple(value.shape)))
        torch.testing.assert_close(found, value, msg=key)


#: The placements of the layers, in turn.
PLACED = {
    "experts": [Shard(0)],
    "columns": [Shard(1)],
    "rows": [Shard(2)],
    "replicas": [Replicate()],
    "unlike": [Shard(0), Shard(2)],
}


def saved(api: Any, folder: Path, placed: str, adapter: Any = None) -> tuple[tuple[str, ...], int, int]:
    """(keys, bytes that this rank wrote, bytes of its largest copy), of a model whose experts are sharded."""
    model = made() if adapter is None else adapted()[0]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = dict(model.state_dict())
    for layer in range(2):
        key = PACKED.format(layer)
        state[key] = distribute_tensor(state[key], mesh, [PLACED[placed][layer % len(PLACED[placed])]])
    wrote, largest, write, view = 0, 0, os.pwrite, apart.SharedParts.view

    def counted(file: int, data: Any, offset: int) -> int:
        nonlocal wrote
        # Headers are at the beginning.
        wrote += len(data) if offset else 0
        return write(file, data, offset)

    def watched(self: Any, key: str, box: Box) -> torch.Tensor:
        nonlocal largest
        part = view(self, key, box)
        cut = self.cuts.get(key)
        if cut is not None:
            memory = self.model.parts[cut.key][0].into
            assert part.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr(), "a copy"
            largest = max(largest, part.numel())
        return part

    with contextlib.ExitStack() as patches:
        for place, name, value in (
            (classes, "_core_of_5", lambda: StandIn),
            (classes, "_by_5", StandIn.by_5),
            (sharing, "SHORTEST_RUN", 1),
            (os, "pwrite", counted),
            (apart.SharedParts, "view", watched),
        ):
            patches.enter_context(mock.patch.object(place, name, value))
        keys = api.save_state_dict(state, folder, like=model.config, adapter=adapter).keys
    return keys, wrote, largest


def check_experts(folder: hf.Folder, model: Any, dtype: torch.dtype) -> None:
    """Each expert is in the files by itself, with its values, and the other tensors under their names."""
    state = model.state_dict()
    for layer in range(2):
        key = PACKED.format(layer)
        assert key not in folder.tensors
        for names, half in zip(StandIn.names(key), state[key].transpose(1, 2).chunk(2, 1)):
            for name, value in zip(names, half):
                found = folder.part(name, Box((0, 0), (ROWS, COLUMNS)))
                assert torch.equal(found, value.to(dtype)), name
    assert {key for key in state if not key.endswith(".gate_up_proj")} <= set(folder.tensors)


@pytest.mark.parametrize("placed", PLACED)
def test_ranks_write_each_expert_out_of_what_they_hold(ranks, tmp_path: Path, placed: str) -> None:
    """Three experts on two ranks; no rank holds another's, nor a copy of its own."""
    pytest.importorskip("transformers", minversion="4.55")
    results = ranks(saved, tmp_path / "m", placed, world=2)
    model = made()
    folder = hf.Folder(tmp_path / "m")
    assert {keys for keys, _, _ in results} == {tuple(folder.tensors)}
    assert sum(wrote for _, wrote, _ in results) == sum(value.nbytes for value in model.state_dict().values())
    assert all(wrote for _, wrote, _ in results)
    check_experts(folder, model, torch.float32)
    largest = max(largest for _, _, largest in results)
    assert 0 < largest <= ROWS * COLUMNS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_checkpoint_is_exported_with_each_expert(
    tmp_path: Path, monkeypatch: Any, dtype: torch.dtype
) -> None:
    """By one process, which reads the parts of a tensor out of the checkpoint."""
    pytest.importorskip("transformers", minversion="4.55")
    monkeypatch.setattr(classes, "_core_of_5", lambda: StandIn)
    monkeypatch.setattr(classes, "_by_5", StandIn.by_5)
    model, step = made(), tmp_path / "step"
    step.mkdir()
    save_training_state(step, model)
    export_checkpoint(step, tmp_path / "m", like=model.config, how=hf.Export(dtype=dtype))
    folder = hf.Folder(tmp_path / "m")
    check_experts(folder, model, dtype)
    opened = made(seed=1).to(dtype)
    hf.load_state_dict(opened.state_dict(), hf.opened(folder, opened))
    for key, value in model.state_dict().items():
        assert torch.equal(opened.state_dict()[key], value.to(dtype)), key


def test_an_adapter_is_merged_beside_experts_that_are_taken_apart(ranks, tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="4.55")
    ranks(saved, tmp_path / "m", "columns", LORA, world=2)
    _, merged = adapted()
    folder = hf.Folder(tmp_path / "m")
    check_merged(folder, merged)
    check_experts(folder, made(), torch.float32)


def test_a_checkpoint_with_an_adapter_is_exported_with_each_expert(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("transformers", minversion="4.55")
    monkeypatch.setattr(classes, "_core_of_5", lambda: StandIn)
    monkeypatch.setattr(classes, "_by_5", StandIn.by_5)
    model, merged = adapted()
    step = tmp_path / "step"
    step.mkdir()
    save_training_state(step, model)
    export_checkpoint(step, tmp_path / "m", like=model.config, adapter_config=LORA)
    folder = hf.Folder(tmp_path / "m")
    check_merged(folder, merged)
    check_experts(folder, made(), torch.float32)


def test_a_packed_tensor_beside_names_of_files_stays_and_is_said(
    tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    """The experts of one layer are there each by itself, those of the other are not."""
    pytest.importorskip("transformers", minversion="4.55")
    once.forget()
    monkeypatch.setattr(classes, "_core_of_5", lambda: StandIn)
    monkeypatch.setattr(classes, "_by_5", StandIn.by_5)
    model = made()
    state = dict(model.state_dict())
    state.update(StandIn.revert_weight_conversion(model, {PACKED.format(1): state.pop(PACKED.format(1))}))
    hf.save_state_dict(state, tmp_path / "m", like=model.config)
    assert set(hf.Folder(tmp_path / "m").tensors) == set(state)
    (said,) = [record.message for record in caplog.records if "is not offered here" in record.message]
    assert said.startswith(f"save_pretrained writes {PACKED.format(0)} of a GptOssForCausalLM")


def saved_sparse(api: Any, folder: Path) -> None:
    """Write a Mixtral whose experts are spread over the ranks, and beside it with `save_pretrained`."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": EXPERTS}
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        key: distribute_tensor(value, mesh, (Shard(0),)) if ".experts." in key else value
        for key, value in model.state_dict().items()
    }
    api.save_state_dict(state, folder / "m", like=model.config)
    if dist.get_rank() == 0:
        model.save_pretrained(folder / "own")


def test_experts_of_ranks_are_the_files_of_save_pretrained(ranks, tmp_path: Path) -> None:
    """In the lane of transformers 5 they are packed; elsewhere there is nothing to take apart."""
    pytest.importorskip("transformers")
    ranks(saved_sparse, tmp_path, world=2)
    own, ours = hf.Folder(tmp_path / "own"), hf.Folder(tmp_path / "m")
    assert dict(own.tensors) == dict(ours.tensors)
    assert "model.layers.1.block_sparse_moe.experts.2.w3.weight" in ours.tensors
    for key, info in own.tensors.items():
        box = Box((0,) * len(info.shape), info.shape)
        assert torch.equal(own.part(key, box), ours.part(key, box)), key
