"""Full loads of plain models, most of which are copies and nothing else: what they give is torch's."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hooked import wrapped
from pool import on_ranks
from torch import nn


class Net(nn.Module):
    """Parameters, buffers, a norm and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("hidden", torch.ones(2), persistent=False)


class Doubling(nn.Module):
    """Its own loading code doubles what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        state_dict[prefix + "inner.first.bias"] = state_dict[prefix + "inner.first.bias"] * 2
        super()._load_from_state_dict(state_dict, prefix, *rest)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


def in_one_memory(shared: int) -> nn.Module:
    """Two tensors that have some elements in common, or none."""
    memory = torch.zeros(6)
    model = nn.Module()
    model.register_buffer("a", memory[: 3 + shared])
    model.register_buffer("b", memory[3:])
    return model


def expanded() -> nn.Module:
    model = nn.Module()
    model.register_buffer("a", torch.ones(1).expand(3))
    model.register_buffer("b", torch.ones(3))
    return model


def hooked() -> nn.Module:
    model = Net()
    model.register_load_state_dict_post_hook(add_to_scale)
    return model


def add_to_scale(model: Any, keys: object) -> None:
    model.scale.data.add_(1)


def hooked_by_torch() -> nn.Module:
    """A hook of torch's that changes values, as those of its quantized modules do."""
    model = Net()
    model._register_load_state_dict_pre_hook(double)
    return model


def double(state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    if prefix + "first.bias" in state_dict:
        state_dict[prefix + "first.bias"] = state_dict[prefix + "first.bias"] * 2


double.__module__ = "torch.ao.quantization"

MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "own code": Doubling,
    "hook": hooked,
    "torch's hook": hooked_by_torch,
    "tied": tied,
    "overlapping": lambda: in_one_memory(1),
    "halves": lambda: in_one_memory(0),
    "expanded": expanded,
    "other dtype": lambda: Net().to(torch.bfloat16),
    "frozen": lambda: Net().requires_grad_(False),
    "channels last": lambda: nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last),
    "complex": lambda: nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=torch.complex64))]),
    "empty": lambda: nn.ParameterDict({"none": torch.empty(0, 3), "a": torch.zeros(2)}),
    "nothing": nn.Identity,
}


def short(state: dict[str, Any]) -> dict[str, Any]:
    del state[next(iter(state))]
    return state


def first_as(change: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Change a value that is no scalar."""

    def changed(state: dict[str, Any]) -> dict[str, Any]:
        key = max(state, key=lambda key: state[key].dim())
        return {**state, key: change(state[key])}

    return changed


DICTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "as it is": lambda state: state,
    "ordered": OrderedDict,
    "backwards": lambda state: dict(reversed(state.items())),
    "a key too many": lambda state: {**state, "more": torch.ones(1)},
    "a key too few": short,
    "another key": lambda state: {**short(state), "more": torch.ones(1)},
    "not contiguous": first_as(lambda value: torch.stack([value, value], -1)[..., 0]),
    "negated": first_as(lambda value: torch._neg_view(value)),
    "parameters": first_as(nn.Parameter),
    "double": first_as(lambda value: value.to(torch.float64)),
    "a shape more": first_as(lambda value: value[None]),
    "on meta": first_as(lambda value: value.to("meta")),
    "sparse": first_as(lambda value: value.to_sparse()),
    "a number": first_as(lambda value: 3),
    "none": first_as(lambda value: None),
}


def load(api: Any, model: nn.Module, state: Any, strict: bool) -> Any:
    """What a load gives: keys and values, or the error and the values."""
    options = api.StateDictOptions(full_state_dict=True, strict=strict)
    identities = [id(tensor) for tensor in (*model.parameters(), *model.buffers())]
    try:
        keys = api.set_model_state_dict(model, state, options=options)
    except Exception as error:
        return f"{type(error).__name__}: {error}", model.state_dict()
    assert identities == [id(tensor) for tensor in (*model.parameters(), *model.buffers())]
    return (sorted(keys.missing_keys), sorted(keys.unexpected_keys)), model.state_dict()


def same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert list(mine) == list(theirs)
    for key, value in theirs.items():
        assert (mine[key].dtype, mine[key].stride()) == (value.dtype, value.stride()), key
        assert torch.equal(mine[key], value), key


def loads_as_torch(api: Any, model: str, state: str, strict: bool) -> None:
    """A dict is loaded as any other mapping is, and as torch's own load_state_dict() loads it."""
    torch.manual_seed(1)
    ours = MODELS[model]()
    other, theirs = map(copy.deepcopy, (ours, ours))
    values = {key: torch.rand(value.shape).to(value.dtype) for key, value in theirs.state_dict().items()}
    given = DICTS[state](dict(values)) if values else {}
    told, after = load(api, ours, given, strict)
    told_of_mapping, after_mapping = load(api, other, MappingProxyType(given), strict)
    assert told == told_of_mapping
    same(after, after_mapping)
    if isinstance(told, str) or not given or model in ("tied", "own code"):
        return
    keys = theirs.load_state_dict(dict(given), strict=strict)
    assert told == (sorted(keys.missing_keys), sorted(keys.unexpected_keys))
    same(after, theirs.state_dict())


class Renaming(nn.parallel.DistributedDataParallel):
    """A wrapper with a tensor of its own, under the name of one inside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.register_buffer("weight", torch.zeros(2, 2))


@pytest.mark.parametrize("model", MODELS)
def test_a_plain_model_loads_as_torch_loads_it(ranks, model):
    for state in DICTS:
        for strict in (True, False):
            ranks(loads_as_torch, model, state, strict, world=0)


@on_ranks(world=0)
def test_what_does_not_fit_is_refused(api: Any) -> None:
    """What is wrong is refused before a write."""
    names = ["a key too many", "a key too few", "a shape more", "on meta", "sparse", "a number", "none"]
    for name in names:
        model = Net()
        before = copy.deepcopy(model.state_dict())
        told, after = load(api, model, DICTS[name](dict(Net().state_dict())), True)
        assert str(told).startswith("RuntimeError: "), name
        same(after, before)


@on_ranks(world=0)
def test_a_model_loads_its_own_tensors(api: Any) -> None:
    """A dict of the model's own tensors, and of views of them, as torch loads it."""
    options = api.StateDictOptions(full_state_dict=True)
    model = nn.Linear(3, 3)
    before = model.weight.detach().clone()
    version = model.weight._version
    api.set_model_state_dict(model, dict(model.state_dict()), options=options)
    assert torch.equal(model.weight, before)
    assert model.weight._version == version, "read-only memory would have been written"
    api.set_model_state_dict(
        model, {"weight": model.weight.detach().t(), "bias": model.bias.detach()}, options=options
    )
    assert torch.equal(model.weight, before.t())


@pytest.mark.parametrize("wrapper", ["plain", "fsdp2"])
@on_ranks(world=2)
def test_what_cannot_be_written_loads_itself(api: Any, wrapper: str) -> None:
    """What `get` gives goes back: nothing is written where a tensor is loaded from itself."""
    options = api.StateDictOptions(full_state_dict=True)
    model = nn.Linear(2, 2)
    model.register_buffer("wide", torch.ones(1, 3).expand(4, 3))
    with torch.inference_mode():
        model.register_buffer("inferred", torch.ones(3))
    model = wrapped(model, wrapper)
    api.set_model_state_dict(model, api.get_model_state_dict(model, options=options), options=options)
    assert torch.equal(model.wide, torch.ones(4, 3))


@pytest.mark.parametrize("is_dict", [True, False])
@on_ranks(world=0)
def test_a_tied_tensor_keeps_what_another_name_brought(api: Any, is_dict: bool) -> None:
    model = nn.Module()
    model.p = model.q = nn.Parameter(torch.zeros(2))
    state = {"p": torch.ones(2), "q": model.q.detach()}
    mine = state if is_dict else MappingProxyType(state)
    api.set_model_state_dict(model, mine, options=api.StateDictOptions(full_state_dict=True))
    assert torch.equal(model.p, torch.ones(2))


@on_ranks(world=0)
def test_a_copy_that_fails_leaves_the_optimizer(api: Any) -> None:
    """A copy that fails, as only a copy can tell, leaves the optimizer as it was."""
    memory = torch.arange(8.0)
    model = nn.Module()
    model.v, model.w = nn.Parameter(torch.zeros(4)), nn.Parameter(memory[:4])
    optim = torch.optim.SGD(model.parameters(), lr=1.0)
    options = api.StateDictOptions(full_state_dict=True)
    states = api.get_optimizer_state_dict(model, optim, options=options)
    states["param_groups"][0]["lr"] = 7.0
    with pytest.raises(RuntimeError) as caught:
        api.set_state_dict(
            model,
            optim,
            model_state_dict={"v": torch.ones(4), "w": memory[2:6]},
            optim_state_dict=states,
            options=options,
        )
    assert optim.param_groups[0]["lr"] == 1.0
    notes = getattr(caught.value, "__notes__", ["model state dict: w: 1 of 2 tensors were written before"])
    assert "model state dict: w: 1 of 2 tensors were written before" in notes[0]


@on_ranks(world=2)
def test_a_wrapper_with_a_tensor_of_an_inner_name(api: Any) -> None:
    model = Renaming(nn.Linear(2, 2))
    state = {**nn.Linear(2, 2).state_dict(), "more": torch.ones(1)}
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: .*more"):
        api.set_model_state_dict(model, state, options=api.StateDictOptions(full_state_dict=True))


@pytest.mark.parametrize("strict", [True, False])
@on_ranks(world=2)
def test_a_key_with_the_prefix_of_ddp_is_unexpected(api: Any, strict: bool) -> None:
    """A key that DDP's own code would take for another tensor is unexpected."""
    model, state = nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), nn.Linear(2, 2).state_dict()
    mine = {**state, "module.weight": torch.full((2, 2), 7.0)}
    options = api.StateDictOptions(full_state_dict=True, strict=strict)
    if strict:
        with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: .*module.weight"):
            api.set_model_state_dict(model, mine, options=options)
        return
    keys = api.set_model_state_dict(model, mine, options=options)
    assert (keys.missing_keys, keys.unexpected_keys) == ([], ["module.weight"])
    assert torch.equal(model.module.weight, state["weight"])


@on_ranks(world=0)
def test_names_that_end_like_those_of_wrappers(api: Any) -> None:
    model = nn.Module()
    model.my_fsdp_wrapped_module = nn.Linear(2, 2)
    options = api.StateDictOptions(full_state_dict=True, strict=False)
    keys = api.set_model_state_dict(model, {"more": torch.ones(1)}, options=options)
    assert keys.missing_keys == ["my_fsdp_wrapped_module.weight", "my_fsdp_wrapped_module.bias"]


@on_ranks(world=0)
def test_what_was_copied_is_reported(api: Any) -> None:
    from torch_dcp_backport import transfer

    model = Net()
    api.set_model_state_dict(model, model.state_dict(), options=api.StateDictOptions(full_state_dict=True))
    report = transfer.last_report()
    assert report is not None
    assert (report.operation, report.tensors) == ("slice", len(model.state_dict()))


#: Wrappers that put their own names before those of the model.
PREFIXED: dict[str, Any] = {
    "ddp": nn.parallel.DistributedDataParallel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled ddp": lambda model: torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager"),
}


@pytest.mark.parametrize("wrapper", PREFIXED)
@pytest.mark.parametrize("full", [False, True])
@on_ranks(world=1)
def test_missing_keys_have_no_prefix_of_a_wrapper(api: Any, wrapper: str, full: bool) -> None:
    """In the result and in the error, with whole tensors and with shards."""
    model = PREFIXED[wrapper](nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    state = dict(api.get_model_state_dict(model))
    del state["0.weight"]
    state["abc"] = torch.zeros(1)
    loose = api.StateDictOptions(full_state_dict=full, strict=False)
    keys = api.set_model_state_dict(model, dict(state), options=loose)
    assert (keys.missing_keys, keys.unexpected_keys) == (["0.weight"], ["abc"])
    with pytest.raises(RuntimeError) as raised:
        api.set_model_state_dict(model, dict(state), options=api.StateDictOptions(full_state_dict=full))
    text = str(raised.value)
    assert "module." not in text
    assert "_orig_mod" not in text
    assert all(word in text for word in ("Missing key(s)", "0.weight", "Unexpected key(s)", "abc"))
