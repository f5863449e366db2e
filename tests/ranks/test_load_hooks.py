"""set_model_state_dict where the model's loading code takes part: values, keys and errors are torch's own."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import hooked
import pytest
import torch
import torch.distributed as dist
from hooked import (
    HOWS,
    WRAPPERS,
    Tower,
    Versioned,
    error_of,
    fill,
    given,
    options,
    unwrapped,
    whole_state,
    wrapped,
)
from pool import on_ranks
from torch import nn


def checkpoint(model: nn.Module) -> dict[str, torch.Tensor]:
    """A full checkpoint of an unwrapped model: every tensor another number, `a` before `b`."""
    return {
        key: torch.arange(value.numel(), dtype=torch.float32).reshape(value.shape) + 100 * (number + 1)
        for number, (key, value) in enumerate(model.state_dict().items())
    }


def expected_of(model: nn.Module, state: dict[str, torch.Tensor], **how: Any) -> tuple[Any, dict[str, Any]]:
    """What torch's own load_state_dict() makes of it, on one rank's whole model: (result, values)."""
    reference = copy.deepcopy(model)
    return reference.load_state_dict(copy.copy(state), **how), dict(reference.state_dict())


def versions(api: Any, wrapper: str, how: str, version: int, full: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Versioned())
    saved = OrderedDict(checkpoint(model))
    saved._metadata = OrderedDict({"": {"version": 1}, "0": {"version": 1}, "1": {"version": version}})
    sign = 1 if version == 2 else -1
    before = copy.deepcopy(saved._metadata)
    parallel = wrapped(model, wrapper)
    if full:
        mine = saved if how == "all" or dist.get_rank() == 0 else {}
        api.set_model_state_dict(parallel, mine, options=options(api, how))
    else:
        api.set_model_state_dict(parallel, saved)
    assert torch.equal(whole_state(parallel)["1.weight"], sign * saved["1.weight"])
    assert saved._metadata == before


def fails_in_the_middle(api: Any, wrapper: str, how: str) -> str:
    model = nn.Sequential(Tower(hooked.add_current), Tower(hooked.fail_on_one), Tower(hooked.add_current))
    state = checkpoint(model)
    parallel = wrapped(model, wrapper)
    text = error_of(
        lambda: api.set_model_state_dict(parallel, given(dict(state), how), options=options(api, how))
    )
    # The group is in step.
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, text)
    assert not any("_load_from_state_dict" in vars(module) for module in unwrapped(parallel).modules())
    return text


def extra_state_fails(api: Any, how: str) -> str:
    model = nn.Sequential(nn.Linear(2, 2), hooked.Sized(2) if dist.get_rank() else Silent(2))
    state = {**model.state_dict(), "1._extra_state": -1}
    return error_of(lambda: api.set_model_state_dict(model, given(state, how), options=options(api, how)))


class Silent(hooked.Sized):
    def set_extra_state(self, state: Any) -> None:
        pass


class OnlySetter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.got: Any = None

    def set_extra_state(self, state: Any) -> None:
        self.got = state


class Speechless(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


def speechless(api: Any, how: str) -> str:
    model = Tower()

    def fail(*_: Any) -> None:
        if dist.get_rank() == 1:
            raise Speechless

    model.pair._register_load_state_dict_pre_hook(fail)
    state = checkpoint(Tower())
    try:
        api.set_model_state_dict(wrapped(model, "fsdp2"), given(state, how), options=options(api, how))
    except Speechless:
        return "speechless"
    except RuntimeError as error:
        return str(error)
    return ""


# The tests.


@pytest.mark.parametrize("depth", ["parent", "root"])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", ["swap", "add_current", "transpose"])
@on_ranks(world=2)
def test_a_hook_sees_the_checkpoint_and_the_model_as_it_was(
    api: Any, hook: str, wrapper: str, how: str, depth: str
) -> None:
    function = getattr(hooked, hook)
    torch.manual_seed(0)
    model = fill(Tower(function if depth == "parent" else None), 10.0)
    if depth == "root":
        model._register_load_state_dict_pre_hook(
            lambda module, state, prefix, *rest: function(module.pair, state, prefix + "pair.", *rest),
            with_module=True,
        )
    state = checkpoint(model)
    _, want = expected_of(model, state)
    # A root hook of DDP's inner module is not the root's.
    parallel = wrapped(model, wrapper)
    result = api.set_model_state_dict(parallel, given(dict(state), how), options=options(api, how))
    assert not result.missing_keys
    assert not result.unexpected_keys
    for key, value in whole_state(parallel).items():
        assert torch.equal(value, want[key]), (key, value, want[key])


@pytest.mark.parametrize("how", HOWS)
@on_ranks(world=2)
def test_a_hook_sees_the_checkpoint_from_meta(api: Any, how: str) -> None:
    hook = "swap"
    function = getattr(hooked, hook)
    state = checkpoint(Tower())
    _, want = expected_of(fill(Tower(function), 0.0), state)
    with torch.device("meta"):
        model = Tower(function)
    model = wrapped(model, "fsdp2")
    api.set_model_state_dict(model, given(dict(state), how), options=options(api, how))
    for key, value in whole_state(model).items():
        assert torch.equal(value, want[key]), key


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("wrapper", ["plain", "ddp"])
@on_ranks(world=2)
def test_a_hook_that_knows_an_old_name_finds_it_on_every_rank(api: Any, wrapper: str, how: str) -> None:
    model = fill(Tower(hooked.rename), 10.0)
    state = checkpoint(model)
    state["pair.old.weight"] = state.pop("pair.a.weight")
    _, want = expected_of(model, state)
    model = wrapped(model, wrapper)
    result = api.set_model_state_dict(model, given(dict(state), how), options=options(api, how))
    assert not result.missing_keys
    assert not result.unexpected_keys
    for key, value in whole_state(model).items():
        assert torch.equal(value, want[key]), key


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_versions_reach_loading_code(ranks, wrapper, how, version):
    ranks(versions, wrapper, how, version, full=True, world=2)


@pytest.mark.parametrize("wrapper", ["plain", "ddp"])
def test_versions_reach_loading_code_without_full_tensors(ranks, wrapper):
    ranks(versions, wrapper, "all", 2, full=False, world=2)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", ["drop_misfits", "cut_misfits"])
@on_ranks(world=2)
def test_a_hook_judges_shapes_itself(api: Any, hook: str, wrapper: str, how: str, strict: bool) -> str:
    model = fill(Tower(getattr(hooked, hook)), 10.0)
    state = checkpoint(model)
    state["pair.a.weight"] = torch.ones(7, 4)
    reference = copy.deepcopy(model)
    want = error_of(lambda: reference.load_state_dict(copy.copy(state), strict=strict))
    parallel = wrapped(model, wrapper)
    results: list[Any] = []
    got = error_of(
        lambda: results.append(
            api.set_model_state_dict(
                parallel, given(dict(state), how), options=options(api, how, strict=strict)
            )
        )
    )
    assert bool(got) == bool(want), (got, want)
    if want:
        assert "pair.a.weight" in got
        return got
    assert results[0].missing_keys == (["pair.a.weight"] if hook == "drop_misfits" else [])
    for key, value in whole_state(parallel).items():
        assert torch.equal(value, reference.state_dict()[key]), key
    return ""


@pytest.mark.parametrize("wrong", ["missing", "unexpected", "both"])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(world=2)
def test_a_post_hook_forgives(api: Any, wrapper: str, how: str, wrong: str) -> None:
    """Post-hooks may clear missing and unexpected keys."""
    model = Tower()
    state = checkpoint(model)
    if wrong in ("missing", "both"):
        del state["pair.b.weight"]
    if wrong in ("unexpected", "both"):
        state["pair.c.weight"] = torch.ones(3)
    model.pair.register_load_state_dict_post_hook(hooked.forgive)
    fill(model, 10.0)
    _, want = expected_of(model, state)
    parallel = wrapped(model, wrapper)
    result = api.set_model_state_dict(parallel, given(dict(state), how), options=options(api, how))
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    for key, value in whole_state(parallel).items():
        assert torch.equal(value, want[key]), key


@pytest.mark.parametrize("how", HOWS)
@on_ranks(world=2)
def test_a_post_hook_changes_a_shared_tensor(api: Any, how: str) -> None:
    """A post-hook changes a shared tensor, which is then loaded under its second name."""
    model = Tower()
    model.after.weight = model.before.weight
    model.before.register_load_state_dict_post_hook(hooked.double)
    state = checkpoint(model)
    _, want = expected_of(model, state)
    api.set_model_state_dict(model, given(dict(state), how), options=options(api, how))
    for key, value in whole_state(model).items():
        assert torch.equal(value, want[key]), key


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("how", HOWS)
@on_ranks(world=2)
def test_the_models_own_load_state_dict(api: Any, how: str, strict: bool) -> None:
    """The root's own load_state_dict gets real tensors, on every rank."""

    class Own(Tower):
        def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
            halved = {key: value / 2 for key, value in state_dict.items()}
            return super().load_state_dict(halved, strict, assign)

    model = Own()
    state = checkpoint(model)
    parallel = wrapped(model, "fsdp2")
    api.set_model_state_dict(parallel, given(dict(state), how), options=options(api, how, strict=strict))
    for key, value in whole_state(parallel).items():
        assert torch.equal(value, state[key] / 2), key


@on_ranks()
def test_loading_code_of_one_rank_alone(api: Any) -> None:
    """Ranks whose loading code differs still move the same tensors at the same time."""
    rank = dist.get_rank()
    model = fill(Tower(hooked.swap if rank == 2 else None), 10.0)
    if rank == 1:
        model.after._register_load_state_dict_pre_hook(lambda *_: None)
    state = checkpoint(model)
    _, want = expected_of(model, state)
    api.set_model_state_dict(model, given(dict(state), "rank0"), options=options(api, "rank0"))
    for key, value in model.state_dict().items():
        assert torch.equal(value, want[key]), key


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_hook_that_fails_on_one_rank_in_the_middle(ranks, wrapper, how):
    texts = ranks(fails_in_the_middle, wrapper, how, world=4)
    assert texts[1].startswith("OSError: no such vocabulary")
    if how == "rank0" or wrapper == "fsdp2":
        for rank in (0, 2, 3):
            assert "rank 1: OSError: no such vocabulary" in texts[rank]
            assert "do not use what was being loaded" in texts[rank]
            assert "what no loading code looks at, 0.pair" in texts[rank]


@pytest.mark.parametrize("how", HOWS)
@on_ranks(world=2)
def test_quantizers_make_room(api: Any, how: str) -> None:
    """Observers and fake quantizers make room for what the checkpoint holds."""
    from torch.ao.quantization import (
        FakeQuantize,
        MovingAveragePerChannelMinMaxObserver,
        PerChannelMinMaxObserver,
    )

    def build() -> nn.Module:
        fake = FakeQuantize(MovingAveragePerChannelMinMaxObserver, quant_min=0, quant_max=255)
        return nn.Sequential(nn.Linear(4, 4), fake, PerChannelMinMaxObserver(ch_axis=0))

    trained = build()
    trained(torch.randn(3, 4, generator=torch.Generator().manual_seed(1)))
    state = dict(trained.state_dict())
    fresh = build()
    api.set_model_state_dict(fresh, given(dict(state), how), options=options(api, how))
    for key, value in fresh.state_dict().items():
        assert torch.equal(value, state[key]), key


@pytest.mark.parametrize("how", HOWS)
@on_ranks(world=2)
def test_weights_of_the_old_weight_norm(api: Any, how: str) -> None:
    old = nn.Sequential(nn.Linear(3, 3), nn.utils.weight_norm(nn.Linear(3, 3)))
    state = {key: value.detach().clone() for key, value in old.state_dict().items()}
    new = nn.Sequential(nn.Linear(3, 3), nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    reference = copy.deepcopy(new)
    reference.load_state_dict(dict(state))
    api.set_model_state_dict(new, given(state, how), options=options(api, how))
    for key, value in new.state_dict().items():
        assert torch.equal(value, reference.state_dict()[key]), key


@pytest.mark.parametrize("wrapper", ["plain", "ddp"])
@pytest.mark.parametrize("how", HOWS)
@on_ranks(world=2)
def test_a_batch_norm_from_before_it_counted(api: Any, how: str, wrapper: str) -> None:
    """Checkpoints from before num_batches_tracked."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].num_batches_tracked.fill_(7)
    state = checkpoint(model)
    del state["1.num_batches_tracked"]
    _, want = expected_of(model, state)
    parallel = wrapped(model, wrapper)
    result = api.set_model_state_dict(parallel, given(dict(state), how), options=options(api, how))
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    for key, value in whole_state(parallel).items():
        assert torch.equal(value, want[key]), key


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("wrapper", ["plain", "ddp"])
@pytest.mark.parametrize("how", HOWS)
@on_ranks(world=2)
def test_a_batch_norm_that_is_missing(api: Any, how: str, wrapper: str, counted: bool) -> None:
    """Nothing is written: a norm makes up no value but its count, and that before version 2 alone."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    state = model.state_dict()
    if counted:
        missing = ["1.num_batches_tracked"]
    else:
        missing = ["1.weight", "1.bias", "1.running_mean", "1.running_var"]
        del state._metadata
    for key in {*missing, "1.num_batches_tracked"}:
        del state[key]
    for key, value in state.items():
        state[key] = value + 1
    parallel = wrapped(copy.deepcopy(model), wrapper)
    before = {key: value.clone() for key, value in whole_state(parallel).items()}
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict") as caught:
        api.set_model_state_dict(parallel, given(state, how), options=options(api, how))
    assert all(key in str(caught.value) for key in missing), caught.value
    for key, value in whole_state(parallel).items():
        assert torch.equal(value, before[key]), key


def counted_by_wrapper(model: nn.Module, state: Any) -> str:
    del state["1.num_batches_tracked"]
    state._metadata = OrderedDict({"module": {"version": 1}, "module.1": {"version": 2}})
    return "1.num_batches_tracked"


def not_counting(model: nn.Module, state: Any) -> str:
    model[1].track_running_stats = False
    del state["1.num_batches_tracked"], state._metadata
    return "1.num_batches_tracked"


def without_count(model: nn.Module, state: Any) -> str:
    model[1].num_batches_tracked = None
    del state["1.num_batches_tracked"], state._metadata
    return "1.num_batches_tracked"


def one_too_many(model: nn.Module, state: Any) -> str:
    del state["1.num_batches_tracked"], state._metadata
    state["1.scale"] = torch.ones(4)
    return "1.scale"


def statistics_of_old(model: nn.Module, state: Any) -> str:
    model[1] = nn.InstanceNorm1d(4, affine=True)
    del state["1.num_batches_tracked"], state._metadata
    return "1.running_mean"


NORM_ERRORS = [counted_by_wrapper, not_counting, without_count, one_too_many, statistics_of_old]


@pytest.mark.parametrize("spoil", NORM_ERRORS)
@pytest.mark.parametrize("how", HOWS)
@on_ranks(world=2)
def test_errors_of_a_norm_come_first(api: Any, how: str, spoil: Any) -> None:
    """Nothing is written where torch's own code of a norm would fail, after modules before it were loaded."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    state = model.state_dict()
    for key, value in state.items():
        state[key] = value + 1
    named = spoil(model, state)
    parallel = wrapped(copy.deepcopy(model), "ddp")
    reference = OrderedDict((f"module.{key}", value) for key, value in state.items())
    reference._metadata = getattr(state, "_metadata", None)
    with pytest.raises(RuntimeError):
        copy.deepcopy(parallel).load_state_dict(reference)
    before = {key: value.clone() for key, value in whole_state(parallel).items()}
    with pytest.raises(
        RuntimeError, match=r"(Missing|Unexpected) .*in state_dict|Unexpected running"
    ) as caught:
        api.set_model_state_dict(parallel, given(state, how), options=options(api, how))
    assert named in str(caught.value), caught.value
    for key, value in whole_state(parallel).items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("how", HOWS)
@on_ranks(world=2)
def test_quantized_modules(api: Any, how: str) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), torch.ao.nn.quantized.Linear(4, 4))

    torch.manual_seed(dist.get_rank())
    trained = build()
    weight = torch.quantize_per_tensor(torch.full((4, 4), 0.5), 0.1, 0, torch.qint8)
    trained[1].set_weight_bias(weight, torch.ones(4))
    fresh = build()
    mine = trained.state_dict() if how == "all" or dist.get_rank() == 0 else {}
    api.set_model_state_dict(fresh, mine, options=options(api, how))
    assert torch.equal(fresh[1].weight().dequantize(), weight.dequantize())
    assert torch.equal(fresh[1].bias(), torch.ones(4))


@pytest.mark.parametrize("how", HOWS)
@on_ranks(world=2)
def test_tensors_without_slices(api: Any, how: str) -> None:
    """Sparse buffers and quantized parameters of a plain model."""

    class Odd(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("sparse", (torch.eye(3) * value).to_sparse())
            self.leaf = nn.Module()
            packed = torch.quantize_per_tensor(torch.full((2, 2), value), 0.5, 0, torch.qint8)
            self.leaf.register_buffer("packed", packed)

    torch.manual_seed(0)
    state = dict(Odd(4.0).state_dict())
    model = Odd(1.0)
    result = api.set_model_state_dict(model, given(dict(state), how), options=options(api, how))
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert torch.equal(model.sparse.to_dense(), torch.eye(3) * 4)
    assert torch.equal(model.leaf.packed.dequantize(), torch.full((2, 2), 4.0))
    assert torch.equal(model.linear.weight, state["linear.weight"])
    again = api.get_model_state_dict(model, options=options(api, "all"))
    assert torch.equal(again["sparse"].to_dense(), torch.eye(3) * 4)


@pytest.mark.parametrize("hook", ["copies", "makes it"])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(world=2)
def test_loading_code_does_not_find_what_the_checkpoint_lacks(
    api: Any, wrapper: str, how: str, hook: str
) -> None:
    """A name of a shared tensor that the checkpoint does not have is absent for loading code, too."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(4, 4, bias=False)
            self.head = nn.Linear(4, 4, bias=False)
            self.head.weight = self.embed.weight

    model = fill(Shared(), 10.0)
    seen: list[bool] = []

    def copy_all(state: dict[str, Any], prefix: str, *_: Any) -> None:
        seen.append(prefix + "head.weight" in state)
        for key, value in list(state.items()):
            if torch.is_tensor(value):
                state[key] = value.clone()
        if hook == "makes it":
            state.setdefault(prefix + "head.weight", state[prefix + "embed.weight"])

    model._register_load_state_dict_pre_hook(copy_all)
    state = {"embed.weight": torch.ones(4, 4)}
    parallel = wrapped(model, wrapper)
    result = api.set_model_state_dict(parallel, given(state, how), options=options(api, how))
    assert seen == [False]
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert (whole_state(parallel)["head.weight"] == 1).all()
    assert unwrapped(parallel).head.weight is unwrapped(parallel).embed.weight


@pytest.mark.parametrize("how", HOWS)
@on_ranks(world=2)
def test_extra_state_comes_before_the_children(api: Any, how: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), hooked.Sized(2))
    state = dict(nn.Sequential(nn.Linear(2, 2), hooked.Sized(3)).state_dict())
    state["1.child.weight"] = torch.ones(3, 3)
    api.set_model_state_dict(model, given(state, how), options=options(api, how))
    assert torch.equal(model[1].child.weight, torch.ones(3, 3))


def test_extra_state_that_fails_on_one_rank(ranks):
    texts = ranks(extra_state_fails, "rank0", world=2)
    assert texts[1].startswith("OSError: no such size")
    assert "rank 1: OSError: no such size" in texts[0]


@pytest.mark.parametrize("how", HOWS)
@on_ranks(world=2)
def test_extra_state_that_is_only_set(api: Any, how: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), OnlySetter())
    state = {**nn.Linear(2, 2).state_dict(prefix="0."), "1._extra_state": {"seen": 3}}
    api.set_model_state_dict(model, given(state, how), options=options(api, how))
    assert model[1].got == {"seen": 3}


@pytest.mark.parametrize("how", HOWS)
def test_an_error_without_a_text(ranks, how):
    texts = ranks(speechless, how, world=2)
    assert texts[1] == "speechless"
    assert "rank 1: Speechless: it has no text" in texts[0]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("how", HOWS)
@on_ranks(world=2)
def test_parameters_with_hooks_stay_where_others_are_on_meta(api: Any, how: str, tied: bool) -> None:
    """Real parameters with a hook stay the objects they are, although others come from meta."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[2].weight = model[1].weight
    model[0].to("meta")
    for module in model[1:]:
        module._register_load_state_dict_pre_hook(lambda state, prefix, *_: None)
    if not tied:
        model[2] = nn.Linear(4, 4, bias=False)
    before = dict(model.named_parameters(remove_duplicate=False))
    state = {
        key: torch.full(value.shape, float(number))
        for number, (key, value) in enumerate(model.state_dict().items())
    }
    mine = given(state, how)
    api.set_model_state_dict(model, mine, options=options(api, how))
    after = dict(model.named_parameters(remove_duplicate=False))
    for key in ("1.weight", "2.weight"):
        assert after[key] is before[key], key
        assert all(after[key].data_ptr() != value.data_ptr() for value in mine.values())
    assert torch.equal(after["2.weight"], state["2.weight"])
    assert torch.equal(after["0.weight"], state["0.weight"])


@pytest.mark.parametrize("order", ["module", "reversed"])
@pytest.mark.parametrize("how", HOWS)
@on_ranks(world=2)
def test_parameters_in_one_memory(api: Any, how: str, order: str) -> None:
    """Two parameters in one memory: the last one in the module's order stays, on every rank."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.zeros(4)
            self.front = nn.Parameter(whole[:2])
            self.whole = nn.Parameter(whole)

    state = {"front": torch.full((2,), 5.0), "whole": torch.full((4,), 1.0)}
    if order == "reversed":
        state = dict(reversed(state.items()))
    model = Views()
    api.set_model_state_dict(model, given(state, how), options=options(api, how))
    assert (model.whole == 1).all()
