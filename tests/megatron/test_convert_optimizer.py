"""`convert` with `ep`: what it says of optimizers in a checkpoint, in one process and without megatron-core.

The buckets are made here, in Megatron's order; test_megatron_distributed.py has those of Megatron itself.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from decoders import Decoder, write_folder
from values import value_of

from torch_dcp_backport import hf
from torch_dcp_backport.__main__ import main
from torch_dcp_backport.dist_checkpointing import (
    CheckpointingException,
    ShardedObject,
    ShardedTensor,
    load,
    load_common_state_dict,
    load_plain_tensors,
    save,
    verify,
)
from torch_dcp_backport.megatron.convert import convert

LAYERS = 2
LAYER = "decoder.layers."
EXPERTS = f"{LAYER}mlp.experts.experts."
#: As TransformerEngine's modules list them.
SHAPES = {
    "embedding.word_embeddings.weight": (8, 4),
    f"{LAYER}self_attention.linear_proj.weight": (4, 4),
    f"{LAYER}self_attention.linear_qkv.layer_norm_weight": (4,),
    f"{LAYER}self_attention.linear_qkv.weight": (8, 4),
    f"{LAYER}self_attention.q_layernorm.weight": (4,),
    f"{LAYER}self_attention.k_layernorm.weight": (4,),
    f"{LAYER}mlp.linear_fc1.layer_norm_weight": (4,),
    f"{LAYER}mlp.linear_fc1.weight": (16, 4),
    f"{LAYER}mlp.linear_fc2.weight": (4, 8),
    "decoder.final_layernorm.weight": (4,),
    "output_layer.weight": (8, 4),
}
STATES = ("param", "exp_avg", "exp_avg_sq")
GROUP = "optimizer.distributed.dp_group_idx_0."
ALL_GROUPS = {"lr_mult": 1.0, "is_decoupled_lr": False, "is_expert_parallel": False, "lr": 0.1}
GROUPS: list[dict[str, Any]] = [{"wd_mult": mult, **ALL_GROUPS} for mult in (1.0, 0.0)]


def states() -> dict[str, dict[str, torch.Tensor]]:
    """State -> key of the model -> its values; in bfloat16 all norms are 1, and alike."""
    made: dict[str, dict[str, torch.Tensor]] = {}
    for state in STATES:
        for key, shape in SHAPES.items():
            full = ((LAYERS,) if key.startswith(LAYER) else ()) + shape
            values = value_of(f"{state} {key}", full)
            is_norm = state == "param" and "norm" in key
            made.setdefault(state, {})[key] = 1 + values.clamp(-1, 1) / 2000 if is_norm else values
    return made


#: (Key, place in it) of parameters.
Listed = list[tuple[str, Any]]


def in_order() -> Listed:
    """The parameters in the order of the model."""
    inner = [key for key in SHAPES if key.startswith(LAYER)]
    listed: Listed = [("embedding.word_embeddings.weight", ...)]
    listed += [(key, layer) for layer in range(LAYERS) for key in inner]
    return [*listed, ("decoder.final_layernorm.weight", ...), ("output_layer.weight", ...)]


def flat_of(of: dict[str, dict[str, torch.Tensor]], *buckets: Listed) -> list[dict[str, torch.Tensor]]:
    """The states of buckets of parameters, each of which begins at a multiple of 64."""
    made = []
    for bucket in buckets:
        flat: dict[str, list[torch.Tensor]] = {state: [] for state in STATES}
        for (key, place), state in itertools.product(bucket, STATES):
            used = sum(map(len, flat[state]))
            flat[state] += [torch.zeros(-used % 64), of[state][key][place].reshape(-1)]
        made.append({state: torch.cat(parts) for state, parts in flat.items()})
    return made


def gathered(of: dict[str, dict[str, torch.Tensor]], *chunks: Listed) -> dict[Any, Any]:
    """The buckets of the ranks of one TP x PP, as Megatron gathers them: a bucket for each virtual stage."""
    buckets: dict[Any, Any] = {"buckets_coalesced": True}
    for number, tensors in enumerate(flat_of(of, *(chunk[::-1] for chunk in chunks or [in_order()]))):
        of_a_buffer: dict[str, Any] = {**tensors, "numel_unpadded": len(tensors["param"])}
        buckets[number] = {(torch.bfloat16, torch.float32): of_a_buffer}
    return buckets


def saved(
    folder: Path, model: dict[str, torch.Tensor], bucket: Any, kind: str = "dp_zero_gather_scatter"
) -> str:
    folder.mkdir()
    parts = [ShardedTensor.from_rank_offsets(key, value) for key, value in model.items()]
    objects = [
        ShardedObject(f"{GROUP}{name}", value, (1,), (0,))
        for name, value in (("optimizer", {"param_groups": GROUPS}), ("param_state", bucket))
    ]
    objects += [
        ShardedObject("decoder.x._extra_state", io.BytesIO(b"abc"), (2,), (place,)) for place in (0, 1)
    ]
    beside = ShardedObject("rng_state", {"seed": 3}, (1, 1), (0, 0))
    common = {"optimizer": {"param_state_sharding_type": kind}, "iteration": 7}
    save({"parts": parts, "objects": objects, "rng": beside, **common}, folder)
    return str(folder)


def model_of(of: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: value.to(torch.bfloat16) for key, value in of["param"].items()}


def is_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """The states of an optimizer are stored as flattened layers."""
    return torch.equal(left.flatten(), right.flatten())


def test_parameters_that_are_equal_in_the_model_keep_their_own_states(tmp_path):
    of = states()
    model = model_of(of)
    assert {float(value) for key in model if "norm" in key for value in model[key].flatten()} == {1.0}
    source = saved(tmp_path / "source", model, gathered(of))
    plan = convert(source, tmp_path / "out", ep=1, dry_run=True)
    assert not (tmp_path / "out").exists()
    assert plan == convert(source, tmp_path / "out", ep=1)
    assert verify(tmp_path / "out") == []
    names = dict(zip(STATES, ("fp32_param", "exp_avg", "exp_avg_sq")))
    wanted = {f"optimizer.state.{names[state]}.{key}": of[state][key] for state in STATES for key in SHAPES}
    got = load_plain_tensors(tmp_path / "out")
    assert set(got) - {"optimizer", "iteration"} == {*wanted, *model} == set(plan.tensors)
    assert [key for key, value in {**wanted, **model}.items() if not is_equal(got[key], value)] == []
    wants = ("rng_state", (1, 1), (0, 0)), *(("decoder.x._extra_state", (2,), (place,)) for place in (0, 1))
    beside = load({"them": [ShardedObject(key, None, *place) for key, *place in wants]}, tmp_path / "out")
    assert beside["them"][0] == {"seed": 3}
    assert [state.getvalue() for state in beside["them"][1:]] == [b"abc", b"abc"]
    common = load_common_state_dict(tmp_path / "out")
    assert common["iteration"] == 7
    assert common["optimizer"]["optimizer"]["param_groups"] == GROUPS
    assert common["optimizer"]["param_state_sharding_type"] == "fully_sharded_model_space"


def test_virtual_stages_have_buckets_of_their_own(tmp_path):
    listed = in_order()
    middle = 1 + (len(listed) - 3) // LAYERS
    source = saved(tmp_path / "source", model_of(OF), gathered(OF, listed[:middle], listed[middle:]))
    convert(source, tmp_path / "out", ep=1)
    got = load_plain_tensors(tmp_path / "out")
    assert all(is_equal(got[f"optimizer.state.exp_avg.{key}"], OF["exp_avg"][key]) for key in SHAPES)


def test_zeros_are_not_taken_for_a_parameter_that_is_zero(tmp_path):
    bias = f"{LAYER}mlp.linear_fc2.bias"
    of = {state: {**values, bias: value_of(f"{state} {bias}", (LAYERS, 4))} for state, values in OF.items()}
    of["param"][bias].zero_()
    listed = in_order()
    for layer in range(LAYERS):
        listed.insert(listed.index((FC2, layer)) + 1, (bias, layer))
    listed.reverse()
    # The second bucket begins with the bias, and behind a bucket that does not end at a multiple of 64.
    cut = listed.index((bias, LAYERS - 1))
    buckets = flat_of(of, listed[:cut], listed[cut:])
    assert len(buckets[0]["param"]) % 64 == 4
    joined = {state: torch.cat([bucket[state] for bucket in buckets]) for state in STATES}
    source = saved(
        tmp_path / "source",
        model_of(of),
        {"buckets_coalesced": True, 0: {(torch.bfloat16, torch.float32): joined}},
    )
    convert(source, tmp_path / "out", ep=1)
    got = load_plain_tensors(tmp_path / "out")
    wrong = [
        key for key in of["param"] if not is_equal(got[f"optimizer.state.exp_avg.{key}"], of["exp_avg"][key])
    ]
    assert wrong == []


@pytest.mark.parametrize("is_tied", [False, True], ids=["norms that are all 1", "a tied embedding"])
def test_no_bucket_is_left_out(tmp_path, is_tied):
    listed = in_order()
    middle = 1 + (len(listed) - 3) // LAYERS
    first, second = listed[:middle][::-1], listed[middle:][::-1]
    model = model_of(OF)
    if is_tied:
        del model["output_layer.weight"]
        second = [listed[0], *second[1:]]
        stages = [[first[:-1], first[-1:]], [second[:1], second[1:]]]
    else:
        # The last norm is equal to the one that the second bucket begins with.
        cut = first.index((f"{LAYER}mlp.linear_fc1.layer_norm_weight", 0))
        stages = [[first[:cut], first[cut:]], [second]]
    parts = [ShardedTensor.from_rank_offsets(key, value) for key, value in model.items()]
    objects = []
    for number, stage in enumerate(stages):
        group = f"optimizer.distributed.dp_group_idx_{number}"
        buckets = flat_of(OF, *stage)
        lengths = {0: {"dtype": [len(bucket["param"]) for bucket in buckets]}}
        for name, value in (("per_bucket_numel_unpadded", lengths), ("optimizer", {"param_groups": GROUPS})):
            objects.append(ShardedObject(f"{group}.{name}", value, (1,), (0,)))
        for place, bucket in enumerate(buckets):
            name = f"{group}.gbuf_idx_0.dtype_(torch.bfloat16, torch.bfloat16).bucket_idx_{place}"
            for state, values in bucket.items():
                padded = torch.cat([values, torch.full((-len(values) % 128,), torch.nan)])
                parts.append(ShardedTensor.from_rank_offsets(f"{name}.{state}", padded))
    common = {"optimizer": {"param_state_sharding_type": "fully_sharded_bucket_space"}}
    (tmp_path / "source").mkdir()
    save({"parts": parts, "objects": objects, **common}, tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out", ep=1)
    got = load_plain_tensors(tmp_path / "out")
    assert all(is_equal(got[f"optimizer.state.exp_avg.{key}"], OF["exp_avg"][key]) for key in model)


@pytest.mark.parametrize("is_grouped", [False, True], ids=["one module for each", "one module for all"])
def test_experts_are_found_in_the_order_of_either_kind_of_modules(tmp_path, is_grouped):
    router, matrices = (
        f"{LAYER}mlp.router.weight",
        [f"{EXPERTS}linear_fc{number}.weight" for number in (1, 2)],
    )
    shapes = {router: (LAYERS, 4, 8), matrices[0]: (LAYERS, 4, 6, 8), matrices[1]: (LAYERS, 4, 8, 3)}
    of = {
        state: {key: value_of(f"{state} {key}", shape) for key, shape in shapes.items()} for state in STATES
    }
    (tmp_path / "source").mkdir()
    parts = [ShardedTensor.from_rank_offsets(key, value) for key, value in model_of(of).items()]
    groups = {"chained_0.optimizer.distributed.dp_group_idx_0": [(router, layer) for layer in range(LAYERS)]}
    for rank in (0, 1):
        own = [2 * rank, 2 * rank + 1]
        pairs = [(key, expert) for key in matrices for expert in own]
        if not is_grouped:
            pairs = [(key, expert) for expert in own for key in matrices]
        groups[f"chained_1.optimizer.distributed.dp_group_idx_{rank}"] = [
            (key, (layer, expert)) for layer in range(LAYERS) for key, expert in pairs
        ]
    objects = [
        ShardedObject(f"{group}.{name}", value, (1,), (0,))
        for group, listed in groups.items()
        for name, value in (
            ("param_state", gathered(of, listed)),
            ("optimizer", {"param_groups": GROUPS[:1]}),
        )
    ]
    nodes = {number: {"param_state_sharding_type": "dp_zero_gather_scatter"} for number in (0, 1)}
    save({"parts": parts, "objects": objects, "optimizer": nodes}, tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "ep", ep=4)
    convert(tmp_path / "source", tmp_path / "alone", ep=1)
    for folder, prefixes in (("ep", ("chained_0.", "chained_1.")), ("alone", ("", ""))):
        got = load_plain_tensors(tmp_path / folder)
        for key in shapes:
            name = f"{prefixes[key != router]}optimizer.state.exp_avg_sq.{key}"
            assert is_equal(got[name], of["exp_avg_sq"][key])


def another(model: dict[str, torch.Tensor], key: str) -> dict[str, torch.Tensor]:
    """The same model but for the last element of a tensor."""
    changed = model[key].clone()
    changed.view(-1)[-1] += 1
    return {**model, key: changed}


OF = states()
FC2 = f"{LAYER}mlp.linear_fc2.weight"
NORM = "decoder.final_layernorm.weight"


def changed(state: str, change: Any, number: int = 0) -> dict[Any, Any]:
    """Buckets of two virtual stages, with another state of one."""
    listed = in_order()
    middle = 1 + (len(listed) - 3) // LAYERS
    buckets = gathered(OF, listed[:middle], listed[middle:])
    (tensors,) = buckets[number].values()
    tensors[state] = change(tensors[state])
    return buckets


def without(state: str, number: int = 0) -> dict[Any, Any]:
    return changed(state, lambda _: None, number)


CASES: dict[str, tuple[dict[str, torch.Tensor], Any, str, str]] = {
    "weights of another step": (
        another(model_of(OF), FC2),
        gathered(OF),
        "dp_zero_gather_scatter",
        rf"dp_group_idx_0, buffer 0 is not known: up to element 68 of \d+ .*{FC2}",
    ),
    "a parameter that is not trained": (
        model_of(OF),
        gathered(OF, [one for one in in_order() if one[0] != NORM]),
        "dp_zero_gather_scatter",
        rf"not in the optimizer's buckets, .*: {NORM} \(expected 4, got 0 elements\)",
    ),
    "a parameter without a known place": (
        {**model_of(OF), f"{LAYER}mlp.another.weight": torch.ones(LAYERS, 4)},
        gathered(OF),
        "dp_zero_gather_scatter",
        "mlp.another.weight of .* not known where Megatron lists",
    ),
    "no weights in a bucket": (
        model_of(OF),
        without("param"),
        "dp_zero_gather_scatter",
        "buffer 0 has no param, the float32 weights",
    ),
    "a moment of another length": (
        model_of(OF),
        changed("exp_avg", lambda values: torch.cat([values, values[:1]])),
        "dp_zero_gather_scatter",
        r"in .* buffer 0 exp_avg has the shape \(\d+,\), and param \(\d+,\)",
    ),
    "a moment that another buffer lacks": (
        model_of(OF),
        without("exp_avg_sq", 1),
        "dp_zero_gather_scatter",
        r"buffer 1 has the states exp_avg \(torch.float32\), param .* first one .* exp_avg_sq",
    ),
    "no buckets": (model_of(OF), [1], "dp_zero_gather_scatter", "not in a form of Megatron's buckets"),
    "an older form": (model_of(OF), {0: {}}, "dp_zero_gather_scatter", "in the form of before 2024"),
    "an unknown form": (
        model_of(OF),
        gathered(OF),
        "by_colour",
        r"param_state_sharding_type \['by_colour'\]",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_optimizer_that_cannot_be_carried_is_refused_by_name(tmp_path, case):
    model, bucket, kind, says = CASES[case]
    source = saved(tmp_path / "source", model, bucket, kind)
    with pytest.raises(CheckpointingException, match=says):
        convert(source, tmp_path / "out", ep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_buckets_of_one_optimizer_are_not_those_of_two(tmp_path):
    """The parts of one optimizer with the common state of a model at an EP above 1."""
    (tmp_path / "source").mkdir()
    parts = [ShardedTensor.from_rank_offsets(key, value) for key, value in model_of(OF).items()]
    values = {"optimizer": {"param_groups": GROUPS}, "param_state": gathered(OF)}
    objects = [ShardedObject(f"{GROUP}{name}", value, (1,), (0,)) for name, value in values.items()]
    node = {"param_state_sharding_type": "dp_zero_gather_scatter"}
    save({"parts": parts, "objects": objects, "optimizer": {0: node, 1: node}}, tmp_path / "source")
    says = r"buckets of optimizer\.distributed\.dp_group_idx_0 are not those of the optimizers: optimizer"
    with pytest.raises(CheckpointingException, match=says):
        convert(tmp_path / "source", tmp_path / "out", ep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_what_needs_no_conversion_or_has_no_sense_is_refused(tmp_path):
    source = saved(tmp_path / "source", model_of(OF), gathered(OF))
    with pytest.raises(CheckpointingException, match=r"the model has no experts: ep \(2\)"):
        convert(source, tmp_path / "out", ep=2)
    with pytest.raises(CheckpointingException, match=r"no number of parts: ep \(expected 1 or more, got 0\)"):
        convert(source, tmp_path / "out", ep=0)
    with pytest.raises(CheckpointingException, match="keeps the dtypes of the files: dtype"):
        convert(source, tmp_path / "out", ep=1, how=hf.Export(torch.float32))
    convert(source, tmp_path / "out", ep=1)
    with pytest.raises(CheckpointingException, match="any TP, PP and DP, and EP 1, as it is"):
        convert(tmp_path / "out", tmp_path / "again", ep=1)
    decoder = Decoder()
    write_folder(tmp_path / "hf", decoder, decoder.tensors())
    with pytest.raises(CheckpointingException, match="model files have no optimizer: ep"):
        convert(tmp_path / "hf", tmp_path / "again", ep=1)
    convert(tmp_path / "hf", tmp_path / "model")
    with pytest.raises(CheckpointingException, match="no state of Megatron's distributed optimizer"):
        convert(tmp_path / "model", tmp_path / "again", ep=1)
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("text", "wrong"),
    [(b'{"model_type": "qw', "is no JSON: Unterminated"), (b"[1]", "has a list, and no JSON")],
)
def test_a_torn_configuration_is_an_error_that_names_the_file(tmp_path, text, wrong):
    source = saved(tmp_path / "source", model_of(OF), gathered(OF))
    path = Path(source) / "huggingface" / "config.json"
    path.parent.mkdir()
    path.write_bytes(text)
    with pytest.raises(CheckpointingException, match=re.escape(f"{path} {wrong}")):
        convert(source, tmp_path / "out", ep=1)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["source"]


def test_a_damaged_byte_is_an_error_and_leaves_nothing(tmp_path):
    source = saved(tmp_path / "source", model_of(OF), gathered(OF))
    (path,) = Path(source).glob("*.distcp")
    # Of the first record's values, and of the buckets at the end.
    for place in (600, path.stat().st_size - 20000):
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)
        with pytest.raises(CheckpointingException, match=r"wrong checksum"):
            convert(source, tmp_path / "out", ep=1)
        data[place] ^= 1
        path.write_bytes(data)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


EXPERT = f"{EXPERTS}linear_fc2.weight"


def sparse(folder: Path, groups: list[dict[str, Any]]) -> Path:
    """A checkpoint at EP 1 of a model of four experts a layer, in the shapes of the model."""
    folder.mkdir()
    values = {f"optimizer.state.{state}.{EXPERT}": value_of(state, (LAYERS, 4, 3, 2)) for state in STATES}
    parts = [ShardedTensor.from_rank_offsets(key, value) for key, value in values.items()]
    parts.append(ShardedTensor.from_rank_offsets(EXPERT, value_of("model", (LAYERS, 4, 3, 2))))
    node = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_sharded_model_space"}
    save({"parts": parts, "training": {"optimizer": node}}, folder)
    return folder


def test_experts_get_an_optimizer_of_their_own_and_give_it_back(tmp_path):
    source = sparse(tmp_path / "source", GROUPS)
    with pytest.raises(CheckpointingException, match=r"4 experts are not dealt out to equal parts: ep \(3\)"):
        convert(source, tmp_path / "ep", ep=3)
    convert(source, tmp_path / "ep", ep=2)
    assert {f"chained_1.optimizer.state.exp_avg.{EXPERT}"} <= set(load_plain_tensors(tmp_path / "ep"))
    nodes = load_common_state_dict(tmp_path / "ep")["training"]["optimizer"]
    assert nodes[0]["optimizer"]["param_groups"] == GROUPS
    assert nodes[1]["optimizer"]["param_groups"] == [{**GROUPS[0], "is_expert_parallel": True}]
    convert(tmp_path / "ep", tmp_path / "back", ep=1)
    before, after = load_plain_tensors(source), load_plain_tensors(tmp_path / "back")
    assert before.pop("training") == after.pop("training")
    assert set(before) == set(after)
    assert all(is_equal(before[key], after[key]) for key in before)


def test_a_moment_that_the_optimizer_lacks_is_an_error(tmp_path):
    key = f"optimizer.state.exp_avg.{EXPERT}"
    (tmp_path / "source").mkdir()
    keys = [EXPERT, "decoder.final_layernorm.weight"]
    keys += [f"optimizer.state.{state}.{key}" for state, key in itertools.product(STATES, keys)]
    keys.remove(key)
    parts = [ShardedTensor.from_rank_offsets(key, torch.ones(2, 4, 3, 2)) for key in keys]
    node = {"optimizer": {"param_groups": GROUPS}, "param_state_sharding_type": "fully_sharded_model_space"}
    save({"parts": parts, "optimizer": node}, tmp_path / "source")
    with pytest.raises(CheckpointingException, match=f"the optimizer in it has no state exp_avg: {EXPERT}"):
        convert(tmp_path / "source", tmp_path / "ep", ep=2)


def test_experts_in_a_group_that_cannot_be_told_are_refused(tmp_path):
    source = sparse(tmp_path / "source", [*GROUPS, {**GROUPS[0], "lr_mult": 2.0}])
    with pytest.raises(CheckpointingException, match=r"which of 3 parameter groups .*lr_mult 2\.0"):
        convert(source, tmp_path / "ep", ep=2)


def test_the_command_carries_an_optimizer(tmp_path, capsys):
    source = saved(tmp_path / "source", model_of(OF), gathered(OF))
    assert main(["convert", source, str(tmp_path / "out"), "--ep", "1"]) == 0
    numel = sum(math.prod(value.shape) for value in model_of(OF).values())
    said = capsys.readouterr().out
    assert f"{4 * len(SHAPES)} tensors, {numel * 14 / 1024:.1f} KiB" in said
    assert main(["convert", source, str(tmp_path / "no"), "--ep", "none"]) == 2
    assert "argument --ep: none: no number" in capsys.readouterr().err
    assert main(["convert", source, str(tmp_path / "no"), "--ep", "1", "--dtype", "float32"]) == 2
    assert "--dtype is for files alone" in " ".join(capsys.readouterr().err.split())
    decoder = Decoder()
    write_folder(tmp_path / "hf", decoder, decoder.tensors())
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "no"), "--ep", "1"]) == 2
    assert "which have no optimizer" in " ".join(capsys.readouterr().err.split())
