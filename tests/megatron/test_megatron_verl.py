"""verl's two functions, by their old names and arguments, on verl's layout."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from decoders import Decoder, differences, expected, models_of, spot_of
from pool import on_ranks

from torch_dcp_backport import megatron

QWEN, TIED = Decoder(), Decoder(tied=True, vocab=30)


class Config:
    """As a configuration of transformers gives itself."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def to_dict(self) -> dict[str, Any]:
        return self.decoder.config


def parallel_state(tp_rank: int, tp: int, pp_rank: int, pp: int) -> types.ModuleType:
    """What megatron-core's module of this name answers."""
    module = types.ModuleType("megatron.core.parallel_state")
    answers = {
        "model_parallel_is_initialized": True,
        "get_tensor_model_parallel_rank": tp_rank,
        "get_tensor_model_parallel_world_size": tp,
        "get_pipeline_model_parallel_rank": pp_rank,
        "get_pipeline_model_parallel_world_size": pp,
    }
    for name, answer in answers.items():
        setattr(module, name, lambda answer=answer: answer)
    return module


@pytest.mark.parametrize("who", ["every rank", "rank 0"])
@pytest.mark.parametrize("vpp", [1, 2])
@pytest.mark.parametrize("decoder", [QWEN, TIED], ids=["untied", "tied"])
@on_ranks()
def test_the_old_calls_do_what_their_names_say(api: Any, decoder: Decoder, vpp: int, who: str) -> None:
    rank = dist.get_rank()
    spot = spot_of(decoder, "verl", rank, 2, 2, vpp)
    sys.modules["megatron.core.parallel_state"] = parallel_state(rank % 2, 2, rank // 2, 2)
    try:
        hf = decoder.tensors()
        models = models_of(decoder, spot, hf)
        given = hf if who == "every rank" or rank == 0 else ({} if rank == 1 else None)
        api.load_state_dict_to_megatron_qwen2(
            given, models if vpp > 1 else models[0], Config(decoder), torch.bfloat16, False, decoder.tied
        )
        assert not differences(models, expected(decoder, spot, hf))
        got = api.merge_megatron_ckpt_qwen2(
            models, Config(decoder), torch.float32, tie_word_embeddings=decoder.tied
        )
        assert set(got) == (set(hf) if rank == 0 else set())
        assert all(torch.equal(value, hf[key].float()) for key, value in got.items())
        partial = {key: value for key, value in hf.items() if "layers.3.mlp.up" not in key}
        with pytest.raises(RuntimeError, match=r"not in the files: model.layers.3.mlp.up_proj.weight"):
            api.load_state_dict_to_megatron_qwen2(
                partial, models, Config(decoder), torch.bfloat16, tie_word_embeddings=decoder.tied
            )
    finally:
        del sys.modules["megatron.core.parallel_state"]


@pytest.mark.parametrize("decoder", [QWEN, TIED], ids=["untied", "tied"])
@on_ranks()
def test_the_head_of_a_critic_is_called_as_verl_does(api: Any, decoder: Decoder) -> None:
    rank = dist.get_rank()
    spot = spot_of(decoder, "verl", rank, 2, 2)._replace(value_head=True)
    sys.modules["megatron.core.parallel_state"] = parallel_state(rank % 2, 2, rank // 2, 2)
    try:
        hf = decoder.tensors()
        head = torch.arange(16, dtype=torch.bfloat16).view(1, 16)
        models = models_of(decoder, spot, {**hf, "score.weight": head})
        given = {**hf, "lm_head.weight": head}
        arguments = models, Config(decoder), torch.bfloat16, True, decoder.tied
        api.load_state_dict_to_megatron_qwen2(given, *arguments)
        got = api.merge_megatron_ckpt_qwen2(*arguments)
        # As verl calls it: its own loader takes it from there.
        assert set(got) == (set(given) if rank == 0 else set())
        assert all(torch.equal(value, given[key]) for key, value in got.items())
    finally:
        del sys.modules["megatron.core.parallel_state"]


def arguments_in(path: Path) -> dict[str, list[tuple[str, str]]]:
    """Function of a file -> its arguments and their defaults; verl's cannot be imported without Megatron."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and "megatron" in node.name and not node.name.startswith("_"):
            names = [argument.arg for argument in node.args.args]
            defaults = [ast.unparse(value) for value in node.args.defaults]
            found[node.name] = list(zip(names, [""] * (len(names) - len(defaults)) + defaults))
    return found


def test_the_names_and_arguments_are_those_of_verls_registry():
    verl = importlib.util.find_spec("verl")
    if verl is None or verl.origin is None:
        pytest.skip("verl is not installed")
    folder = Path(verl.origin).parent / "models" / "mcore"
    theirs = {**arguments_in(folder / "loader.py"), **arguments_in(folder / "saver.py")}
    assert "merge_megatron_ckpt_gptmodel_dpskv3" in theirs
    for name, arguments in theirs.items():
        ours = inspect.signature(getattr(megatron, name)).parameters.values()
        assert [
            (own.name, "" if own.default is own.empty else repr(own.default)) for own in ours
        ] == arguments, name
