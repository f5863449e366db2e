"""Bad input: one error, the same on every rank, before anything is written; and the group still works."""

from __future__ import annotations

import pickle
from typing import Any, Callable

import pytest
import torch
import torch.distributed as dist
from models import Model, build, check_values, full_state
from pool import on_ranks
from test_optimizer import full_optimizer_state, optimizer_of, snapshot

from torch_dcp_backport.transfer import TensorInfo
from torch_dcp_backport.transfer._src import object_collectives, wire


def no_longer_there(state: dict[str, Any]) -> None:
    del state["layers.1.uneven.weight"]


def unknown(state: dict[str, Any]) -> None:
    state["layers.9.weight"] = torch.ones(3)


def wrong_shape(state: dict[str, Any]) -> None:
    state["layers.1.uneven.weight"] = torch.ones(9, 5)


def wrong_rank(state: dict[str, Any]) -> None:
    state["layers.1.uneven.weight"] = torch.ones(7, 5, 1)


def a_string(state: dict[str, Any]) -> None:
    state["layers.1.uneven.weight"] = "seven"


def a_meta_tensor(state: dict[str, Any]) -> None:
    state["layers.1.uneven.weight"] = torch.ones(7, 5, device="meta")


def sparse(state: dict[str, Any]) -> None:
    state["layers.1.uneven.weight"] = torch.ones(7, 5).to_sparse()


SPOILERS = {
    "missing": (no_longer_there, ["Missing key(s)", "layers.1.uneven.weight"]),
    "unexpected": (unknown, ["Unexpected key(s)", "layers.9.weight"]),
    "shape": (wrong_shape, ["wrong shape: layers.1.uneven.weight", "expected (7, 5), got (9, 5)"]),
    "dimensions": (wrong_rank, ["wrong number of dimensions: layers.1.uneven.weight", "(7, 5, 1)"]),
    "string": (a_string, ["layers.1.uneven.weight", "got str"]),
    "meta": (a_meta_tensor, ["layers.1.uneven.weight", "meta device"]),
    "sparse": (sparse, ["layers.1.uneven.weight", "not dense"]),
}


def error_of(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def same_everywhere(error: tuple[str, str]) -> None:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, error)
    assert len(set(everyone)) == 1, f"different errors: {everyone}"
    assert error[0], "no error"


def spoiled(api: Any, spoiler: str, how: str, device: str) -> tuple[str, str]:
    model, state = build(device), full_state()
    SPOILERS[spoiler][0](state)
    mine = state if how == "all" or dist.get_rank() == 0 else {}
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=how == "rank0")
    error = error_of(lambda: api.set_model_state_dict(model, mine, options=options))
    same_everywhere(error)
    for key, param in model.named_parameters():
        assert param.is_meta == (device == "meta"), key
        assert param.is_meta or not param.full_tensor().any(), f"{key} was written"
    # The group is in step, and the model can still be loaded.
    good = full_state()
    api.set_model_state_dict(model, good if how == "all" or dist.get_rank() == 0 else {}, options=options)
    check_values(model, good)
    return error


def freed(*shape: int) -> torch.Tensor:
    tensor = torch.zeros(*shape)
    tensor.untyped_storage().resize_(0)
    return tensor


def expanded(model: Any) -> str:
    model.layers[1].scale = torch.ones(1).expand(3)
    return "layers.1.scale"


def expanded_in_anothers_memory(model: Any) -> str:
    """load_state_dict() itself copies tensors that share memory, in its order."""
    model.layers[1].scale = model.layers[1].count.view(1).expand(3)
    return "layers.1.scale"


def expanded_shard(model: Any) -> str:
    weight = model.layers[1].even.weight
    weight._local_tensor = torch.zeros(1).expand(weight._local_tensor.shape)
    return "layers.1.even.weight"


def freed_buffer(model: Any) -> str:
    model.layers[1].scale = freed(3)
    return "layers.1.scale"


def freed_shard(model: Any) -> str:
    weight = model.layers[1].even.weight
    weight._local_tensor = freed(*weight._local_tensor.shape)
    return "layers.1.even.weight"


def of_inference(model: Any) -> str:
    with torch.inference_mode():
        model.layers[1].scale = torch.ones(3)
    return "layers.1.scale"


UNWRITABLE = {
    expanded: "several of its elements are the same memory",
    expanded_in_anothers_memory: "several of its elements are the same memory",
    expanded_shard: "several of its elements are the same memory",
    freed_buffer: "its memory was freed",
    freed_shard: "its memory was freed",
    of_inference: "it was made in inference mode",
}


def unwritable(api: Any, spoiler: Callable[[Any], str], how: str, function: str) -> str:
    """On one rank a tensor of the model cannot be written."""
    model = build()
    if dist.get_rank() == 1:
        spoiler(model)
    optim = optimizer_of(model, "AdamW")
    states = full_optimizer_state(model, optim)
    is_given = how == "all" or dist.get_rank() == 0
    mine, of_optimizer = (full_state(), states) if is_given else ({}, {})
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=how == "rank0")

    def call() -> None:
        if function == "both":
            api.set_state_dict(
                model, optim, model_state_dict=mine, optim_state_dict=of_optimizer, options=options
            )
        else:
            api.set_model_state_dict(model, mine, options=options)

    error = error_of(call)
    same_everywhere(error)
    assert error[0] == "RuntimeError"
    assert not optim.state
    for key, param in model.named_parameters():
        if param._local_tensor.untyped_storage().nbytes():
            assert not param._local_tensor.any(), f"{key} was written"
    # The group is in step.
    good = build()
    api.set_model_state_dict(good, mine, options=options)
    check_values(good, full_state())
    return error[1]


def freed_source(api: Any, how: str, function: str) -> str:
    """What is read was freed: torch ends the process."""
    model, state = build(), full_state()
    optim = optimizer_of(model, "AdamW")
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=how == "rank0")
    if function == "get":
        freed_shard(model)
        error = error_of(
            lambda: api.get_model_state_dict(model, options=api.StateDictOptions(full_state_dict=True))
        )
    elif function == "model":
        state["layers.1.even.weight"] = freed(16, 8)
        mine = state if how == "all" or dist.get_rank() == 0 else {}
        error = error_of(lambda: api.set_model_state_dict(model, mine, options=options))
    else:
        states = full_optimizer_state(model, optim)
        states["state"]["layers.1.even.weight"]["exp_avg"] = freed(16, 8)
        mine = states if how == "all" or dist.get_rank() == 0 else {}
        error = error_of(lambda: api.set_optimizer_state_dict(model, optim, mine, options=options))
    same_everywhere(error)
    return error[1]


def forgot_to_broadcast(api: Any) -> tuple[str, str]:
    model = build()
    mine = full_state() if dist.get_rank() == 0 else {}
    options = api.StateDictOptions(full_state_dict=True)
    error = error_of(lambda: api.set_model_state_dict(model, mine, options=options))
    same_everywhere(error)
    return error


def a_hundred_thousand_more(api: Any) -> str:
    """Keys of another model: told of with a few of them by name, or listed in full on every rank."""
    model, good = build(), full_state()
    more = {f"extra.{number}.weight": torch.zeros(1) for number in range(100_000)}
    mine = {**good, **more} if dist.get_rank() == 0 else {}
    full = {"full_state_dict": True, "broadcast_from_rank0": True}
    name, text = error_of(lambda: api.set_model_state_dict(model, mine, options=api.StateDictOptions(**full)))
    same_everywhere((name, text))
    options = api.StateDictOptions(**full, strict=False)
    result = api.set_model_state_dict(model, mine, options=options)
    assert result.unexpected_keys == list(more)
    check_values(model, good)
    return text


def differs_on_one_rank(api: Any) -> tuple[str, str]:
    model, state = build(), full_state()
    if dist.get_rank() == 2:
        wrong_shape(state)
    options = api.StateDictOptions(full_state_dict=True)
    error = error_of(lambda: api.set_model_state_dict(model, state, options=options))
    same_everywhere(error)
    return error


def not_a_dict(api: Any) -> tuple[str, str]:
    model = build()
    mine: Any = ["no", "dict"] if dist.get_rank() == 0 else {}
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    error = error_of(lambda: api.set_model_state_dict(model, mine, options=options))
    same_everywhere(error)
    return error


def model_differs(api: Any) -> tuple[str, str]:
    """One rank's model has another shape than the checkpoint."""

    class Other(Model):
        def __init__(self) -> None:
            super().__init__()
            if dist.get_rank() == 1:
                self.head = torch.nn.Linear(8, 33, bias=False)

    model = build(kind=Other)
    mine = full_state() if dist.get_rank() == 0 else {}
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    error = error_of(lambda: api.set_model_state_dict(model, mine, options=options))
    same_everywhere(error)
    return error


def flat_key_missing(api: Any) -> tuple[str, str]:
    model = build()
    optim = optimizer_of(model, "AdamW")
    options = api.StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True, flatten_optimizer_state_dict=True
    )
    flat = api.StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    state = api.get_optimizer_state_dict(model, optim, options=flat)
    del state["state.head.weight.exp_avg"]
    mine = state if dist.get_rank() == 0 else {}
    error = error_of(lambda: api.set_optimizer_state_dict(model, optim, mine, options=options))
    same_everywhere(error)
    return error


def spoil_optimizer(state: dict[str, Any], spoiler: str) -> None:
    mine = state["state"]["layers.1.uneven.weight"]
    if spoiler == "shape":
        mine["exp_avg"] = torch.ones(9, 5)
    elif spoiler == "string":
        mine["exp_avg"] = "seven"
    else:
        del state["state"]["layers.1.uneven.weight"]


def spoiled_optimizer(api: Any, spoiler: str, how: str) -> tuple[str, str]:
    model = build()
    optim = optimizer_of(model, "AdamW")
    state = full_optimizer_state(model, optim)
    api.set_optimizer_state_dict(model, optim, state, options=api.StateDictOptions(full_state_dict=True))
    before = snapshot(optim)
    other = full_optimizer_state(model, optim, salt="other")
    spoil_optimizer(other, spoiler)
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=how == "rank0")
    mine = other if how == "all" or dist.get_rank() == 0 else {}
    error = error_of(lambda: api.set_optimizer_state_dict(model, optim, mine, options=options))
    same_everywhere(error)
    assert snapshot(optim) == before, "states were written"
    return error


def odd_inventory(api: Any, sent: object, most: int) -> tuple[str, str]:
    """What a peer sends is not what it should be."""
    model = build()
    real, limit = object_collectives._value_or_problems, wire.MOST
    if sent is not None:
        object_collectives._value_or_problems = lambda *_: pickle.dumps(sent)
    wire.MOST = most or limit
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    mine = full_state() if dist.get_rank() == 0 else {}
    try:
        error = error_of(lambda: api.set_model_state_dict(model, mine, options=options))
    finally:
        object_collectives._value_or_problems, wire.MOST = real, limit
    same_everywhere(error)
    assert not any(param.full_tensor().any() for param in model.parameters())
    return error


@pytest.mark.parametrize(
    ("sent", "most", "expected"),
    [
        ("text", 0, "what rank 0 sent is no inventory. Is the same release of torch_dcp_backport on every"),
        ({"head.weight": TensorInfo((32, -8), torch.float32)}, 0, "what rank 0 sent is no inventory"),
        ({"head.weight": TensorInfo((32, 8), "float32")}, 0, "what rank 0 sent is no inventory"),  # type: ignore[arg-type]
        (None, 100, "where 100 are the most"),
    ],
)
def test_what_a_peer_sends_is_checked(ranks, sent, most, expected):
    for _, text in ranks(odd_inventory, sent, most):
        assert "nothing was changed" in text
        assert expected in text


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("how", ["rank0", "all"])
@pytest.mark.parametrize("spoiler", SPOILERS)
def test_one_error_on_every_rank_and_nothing_written(ranks, spoiler, how, device):
    for kind, text in ranks(spoiled, spoiler, how, device):
        assert kind == "RuntimeError"
        for part in SPOILERS[spoiler][1]:
            assert part in text
        assert "nothing was changed" in text
        assert "rank" in text


@pytest.mark.parametrize("function", ["model", "both"])
@pytest.mark.parametrize("how", ["rank0", "all"])
@pytest.mark.parametrize("spoiler", UNWRITABLE)
def test_a_tensor_that_cannot_be_written_is_named_before_any_write(ranks, spoiler, how, function):
    for text in ranks(unwritable, spoiler, how, function, world=2):
        key = "layers.1.even.weight" if "shard" in spoiler.__name__ else "layers.1.scale"
        assert f"rank 1: the destination cannot be written: {key} ({UNWRITABLE[spoiler]}" in text
        assert "1 problem(s), nothing was changed" in text


@pytest.mark.parametrize("how", ["rank0", "all"])
@on_ranks(world=2)
def test_states_that_cannot_be_written_are_replaced(api: Any, how: str) -> None:
    """Loaded states are new tensors: whatever memory those of today have, none of it is written."""
    model = build()
    optim = optimizer_of(model, "AdamW")
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=how == "rank0")
    state = full_optimizer_state(model, optim)
    mine = state if how == "all" or dist.get_rank() == 0 else {}
    api.set_optimizer_state_dict(model, optim, mine, options=options)
    before = snapshot(optim)
    for states in optim.state.values():
        shape = states["exp_avg"]._local_tensor.shape
        states["exp_avg"]._local_tensor = torch.zeros(1).expand(shape)
        states["exp_avg_sq"]._local_tensor = freed(*shape)
    api.set_optimizer_state_dict(model, optim, mine, options=options)
    assert snapshot(optim) == before


@pytest.mark.parametrize(
    ("how", "function"),
    [("rank0", "model"), ("all", "model"), ("rank0", "optimizer"), ("all", "optimizer"), ("all", "get")],
)
def test_a_tensor_that_was_freed_is_not_read(ranks, how, function):
    for text in ranks(freed_source, how, function, world=2):
        assert "a tensor whose memory was freed" in text
        assert "layers.1.even.weight" in text
        assert "nothing was changed" in text


@pytest.mark.parametrize("how", ["rank0", "all"])
@on_ranks(world=2)
def test_loading_code_may_make_room_for_a_tensor_that_cannot_be_written(api: Any, how: str) -> None:
    """Loading code outside torch may replace a tensor that cannot be written."""

    class Roomy(Model):
        def __init__(self) -> None:
            super().__init__()
            self.layers[1].scale = torch.ones(1).expand(3)
            self.layers[1]._register_load_state_dict_pre_hook(self.make_room, with_module=True)

        @staticmethod
        def make_room(layer: Any, *_: Any) -> None:
            layer.scale = layer.scale.clone()

    model = Roomy()
    mine = full_state() if how == "all" or dist.get_rank() == 0 else {}
    options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=how == "rank0")
    api.set_model_state_dict(model, mine, options=options)
    check_values(model, full_state())


def test_stock_loads_a_wrong_shape(fixed):
    fixed(spoiled, "shape", "rank0", "cpu")


def test_forgotten_broadcast(ranks):
    for kind, text in ranks(forgot_to_broadcast):
        assert kind == "RuntimeError"
        assert "ranks 1-3: the model state dict is empty" in text
        assert "broadcast_from_rank0" in text


def test_huge_key_counts(ranks):
    for text in ranks(a_hundred_thousand_more, world=2):
        assert "100000 problem(s), nothing was changed" in text
        assert "Unexpected key(s) in state_dict: extra.0.weight" in text
        assert text.endswith("... and 99980 more")


def test_a_problem_of_one_rank_names_it(ranks):
    for _, text in ranks(differs_on_one_rank):
        assert "rank 2: wrong shape: layers.1.uneven.weight (expected (7, 5), got (9, 5))" in text


def test_a_model_that_differs_on_one_rank(ranks):
    for _, text in ranks(model_differs):
        assert "rank 1: wrong shape: head.weight (expected (33, 8), got (32, 8))" in text


def test_not_a_dict_at_all(ranks):
    for kind, text in ranks(not_a_dict):
        assert kind == "RuntimeError"
        assert "not a state dict" in text
        assert "list" in text


@on_ranks()
def test_broadcast_without_full_state_dict(api: Any) -> None:
    model = build()
    with pytest.raises(ValueError, match="full_state_dict must be True when broadcast_from_rank0 is True"):
        api.set_model_state_dict(model, {}, options=api.StateDictOptions(broadcast_from_rank0=True))


@pytest.mark.parametrize("how", ["rank0", "all"])
@pytest.mark.parametrize("spoiler", ["shape", "string", "missing"])
def test_optimizer_error_on_every_rank_and_nothing_written(ranks, spoiler, how):
    for kind, text in ranks(spoiled_optimizer, spoiler, how):
        assert kind == "RuntimeError"
        assert "layers.1.uneven.weight" in text


def test_a_missing_flat_key_is_named_on_every_rank(ranks):
    for kind, text in ranks(flat_key_missing):
        assert kind == "RuntimeError"
        assert "Missing optimizer state for parameter 'head.weight': 'exp_avg' is not among" in text
