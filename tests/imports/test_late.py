"""A client that bound torch's functions in all ways there are, before it imported us."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from interpreters import AFFECTED, Fresh, own

CLIENT = """
import functools
import torch
import torch.distributed.checkpoint.state_dict as torchs
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.checkpoint.state_dict import set_model_state_dict as alias

def make():
    captured = torchs.set_model_state_dict
    def inner():
        return captured
    return inner

inner = make()
loader = functools.partial(torchs.set_model_state_dict, options=StateDictOptions(strict=False))
undifferentiated = torch.no_grad()(torchs.set_model_state_dict)

class Trainer:
    load = staticmethod(torchs.set_model_state_dict)
    save = torchs.get_model_state_dict
    registry = {"load": torchs.set_model_state_dict}

    def __init__(self, options: StateDictOptions):
        self.options = options
        self.load_too = torchs.set_model_state_dict

def train(model, load=torchs.set_model_state_dict):
    pass

class Model(torch.nn.Linear):
    pass

trainer = Trainer(StateDictOptions())
kept = [torchs.get_model_state_dict]
patched = Model(3, 3)
torchs._patch_model_state_dict(patched)

def all_of_them():
    return dict(
        StateDictOptions=StateDictOptions, get_model_state_dict=get_model_state_dict, alias=alias,
        inner=inner(), loader=loader.func, load=Trainer.__dict__["load"].__func__, save=Trainer.save,
        undifferentiated=undifferentiated.__closure__[-1].cell_contents,
        registry=Trainer.registry["load"], load_too=trainer.load_too, default=train.__defaults__[0],
        kept=kept[0])
"""
REBOUND = [
    "client.Trainer.load",
    "client.Trainer.save",
    "client.alias",
    "client.get_model_state_dict",
]
LISTED = ["functools.partial in client.loader"]
# What else has torch's own function finds the replaced ones in the globals of torch's module.
UNREACHED = {"inner", "loader", "undifferentiated", "registry", "load_too", "default", "kept"}

LOOK = """
import client, torch
import torch.distributed.checkpoint.state_dict as b
names = dict(StateDictOptions="StateDictOptions", get_model_state_dict="get_model_state_dict",
             save="get_model_state_dict", kept="get_model_state_dict")
def now():
    return {name: value is getattr(b, names.get(name, "set_model_state_dict"))
            for name, value in client.all_of_them().items()}
def world():
    state = client.loader.__reduce__()[2]
    return [id(value) for value in (*vars(b).values(), *client.all_of_them().values(),
                                    Trainer.__dict__["load"], *state[1], *state[2].values())]
Trainer = client.Trainer
"""


@pytest.fixture
def client(tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(CLIENT)


@pytest.mark.usefixtures("client")
def test_each_is_rebound_or_listed_in_one_warning_and_undone(fresh: Fresh) -> None:
    facts: Any = fresh(
        LOOK
        + """
before, stock = world(), now()
def activate():
    import torch_dcp_backport
    torch_dcp_backport.activate()
found = caught(activate)
import torch_dcp_backport
status, ours = torch_dcp_backport.status(), now()
model = client.Model(3, 3)
source = {"weight": torch.ones(3, 3)}
client.loader(model, source)
works = [torch.equal(model.weight, source["weight"])]
works += [client.Trainer.load(model, model.state_dict()) is not None]
early = client.inner(), client.Trainer.registry["load"], client.trainer.load_too, client.undifferentiated
for load in early:
    source = {"weight": source["weight"] + 1}
    load(model, source, options=client.StateDictOptions(strict=False))
    works += [torch.equal(model.weight, source["weight"])]
works += [sorted(client.patched.state_dict()), client.loader.keywords["options"].strict]
torch_dcp_backport.deactivate()
tell(found=found, stock=stock, ours=ours, late=status.late_bindings, listed=status.out_of_reach, works=works,
     same=before == world(), text=str(status))
"""
    ).facts
    assert set(facts["stock"].values()) == {True}
    assert facts["works"] == [*[True] * 6, ["bias", "weight"], False]
    assert facts["same"]
    if not AFFECTED:
        assert (facts["found"], facts["late"], facts["listed"]) == ([], [], [])
        return
    assert {name for name, is_ours in facts["ours"].items() if not is_ours} == UNREACHED
    assert own(facts["late"]) == REBOUND
    assert facts["listed"] == LISTED
    ((category, text, filename),) = facts["found"]
    assert category == "LateImportWarning"
    assert filename == "<string>"
    for name in (*own(facts["late"]), *LISTED):
        assert name in text
        assert name in " ".join(facts["text"].split())
    assert "torch.distributed" not in text


@pytest.mark.usefixtures("client")
def test_strict_refuses_by_name_and_changes_nothing(fresh: Fresh) -> None:
    facts: Any = fresh(
        LOOK
        + """
before = world()
try:
    import torch_dcp_backport
    error = None
except RuntimeError as e:
    error = str(e)
tell(error=error, same=before == world(), all=all(now().values()))
""",
        switch="strict",
    ).facts
    assert facts["same"]
    assert facts["all"]
    if AFFECTED:
        for name in (*REBOUND, *LISTED):
            assert name in facts["error"]
    else:
        assert facts["error"] is None


ONE = {
    "a class attribute": ("class T:\n    f = staticmethod(b.set_model_state_dict)", "__main__.T.f"),
    "a class method": ("class T:\n    f = classmethod(b.set_model_state_dict)", "__main__.T.f"),
    "a class in a class": ("class T:\n class U:\n  f = b.set_model_state_dict", "__main__.T.U.f"),
    "a partial": ("f = functools.partial(b.set_model_state_dict)", "functools.partial in __main__.f"),
    "a partial of a class": (
        "class T: f = functools.partial(b.set_model_state_dict)",
        "functools.partial in __main__.T.f",
    ),
    "a bound method": ("f = types.MethodType(b.set_model_state_dict, 1)", "method in __main__.f"),
}


@pytest.mark.parametrize("one", ONE)
@pytest.mark.parametrize("switch", ["auto", "strict"])
def test_each_alone_is_enough(fresh: Fresh, one: str, switch: str) -> None:
    code, name = ONE[one]
    ended = fresh(
        f"import functools, types\nimport torch.distributed.checkpoint.state_dict as b\n{code}\n"
        "import torch_dcp_backport\n"
        "tell(outcome=torch_dcp_backport.status().outcome)",
        switch=switch,
    )
    if not AFFECTED:
        assert ended.facts == {"outcome": "not-needed"}
        assert ended.err == ""
    elif switch == "auto":
        assert ended.facts == {"outcome": "applied"}
        assert ended.err.count("LateImportWarning") == 1
        assert f": {name}." in ended.err
    else:
        assert ended.code == 1
        assert name in ended.err.splitlines()[-1]


def test_torch_alone_is_nobodys_early_binding(fresh: Fresh) -> None:
    """All of torch that works with these functions, loaded and used before us: nothing to tell."""
    ended = fresh(
        """
        import dataclasses, torch, typing
        import torch._dynamo, torch.distributed.fsdp, torch.distributed.checkpoint as dcp
        import torch.distributed.checkpoint.state_dict as b
        model = torch.nn.Linear(2, 2)
        b.set_model_state_dict(model, b.get_model_state_dict(model))
        torch.compile(lambda m: b.get_model_state_dict(m), backend="eager")(model)
        def annotated(options: typing.Optional[b.StateDictOptions] = None) -> b.StateDictOptions: ...
        @dataclasses.dataclass
        class Config:
            options: b.StateDictOptions = dataclasses.field(default_factory=lambda: b.StateDictOptions())
        config = Config()
        import torch_dcp_backport
        status = torch_dcp_backport.status()
        tell(late=status.late_bindings, listed=status.out_of_reach, outcome=status.outcome)
        """,
        switch="strict",
    )
    assert ended.facts["outcome"] == ("applied" if AFFECTED else "not-needed")
    assert own(ended.facts["late"]) == ended.facts["listed"] == []
    assert "torch_dcp_backport" not in ended.err


def test_the_search_runs_no_code_of_what_it_looks_at(fresh: Fresh) -> None:
    """Lazy modules, objects in a module's place, metaclasses with methods of their own."""
    ended = fresh(
        """
        import types, torch.distributed.checkpoint.state_dict as b
        def no(*args): raise AssertionError("asked")
        class Lazy(types.ModuleType):
            __getattribute__ = no
        class Odd:
            __getattr__ = no
            __class__ = property(no)
        class Meta(type):
            __getattribute__ = __setattr__ = __eq__ = no
            __hash__ = type.__hash__
        class Deep(metaclass=Meta):
            load = b.set_model_state_dict
        scope = {"load": b.set_model_state_dict}
        exec("cls = type('Nameless', (), {'load': load})", scope)  # without a __module__
        Nameless = scope["cls"]
        sys.modules.update(lazy=Lazy("lazy"), odd=Odd(), nothing=None)
        warnings.simplefilter("ignore")
        import torch_dcp_backport
        def same():
            return type.__getattribute__(Deep, "load") is b.set_model_state_dict
        status, ours = torch_dcp_backport.status(), same()
        torch_dcp_backport.deactivate()
        late = [name for name in status.late_bindings if name.startswith("__main__.")]
        tell(outcome=status.outcome, ours=ours, late=late, back=same())
        """
    )
    late = ["__main__.Deep.load", "__main__.load"] if AFFECTED else []
    assert ended.facts == {
        "outcome": "applied" if AFFECTED else "not-needed", "ours": True, "late": late, "back": True
    }  # fmt: skip


def test_what_was_bound_early_is_not_kept_alive(fresh: Fresh, tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(
        """
import functools, torch
import torch.distributed.checkpoint.state_dict as torchs
class Trainer:
    model = torch.nn.Linear(2, 2)
    load = torchs.set_model_state_dict
    also = staticmethod(torchs.set_model_state_dict)
load = torchs.set_model_state_dict
held = functools.partial(load, Trainer.model)
inner = (lambda model, function: lambda: (model, function))(Trainer.model, load)
torchs._patch_model_state_dict(torch.nn.Linear(2, 2))
"""
    )
    facts = fresh(
        """
        import gc, weakref, client
        warnings.simplefilter("ignore")
        import torch_dcp_backport
        gone = [weakref.ref(thing) for thing in (client, client.Trainer, client.Trainer.model, client.held)]
        del sys.modules["client"], client
        gc.collect()
        tell(alive=[ref() is not None for ref in gone], off=torch_dcp_backport.deactivate().reason)
        """
    ).facts
    assert facts["alive"] == [False] * 4
    if AFFECTED:
        assert facts["off"] == "deactivate() was called"


@pytest.mark.skipif(not AFFECTED, reason="nothing is replaced")
def test_helpers_bound_before_us_and_before_the_trigger(fresh: Fresh) -> None:
    """torch.distributed.fsdp brings the helpers' module long before checkpoint.state_dict is imported."""
    facts: Any = fresh(
        """
import torch.distributed.fsdp
from torch.distributed import _state_dict_utils as utils
class Saver:
    offload = staticmethod(utils._offload_state_dict_to_cpu)
def activate():
    import torch_dcp_backport
found = caught(activate)
import torch_dcp_backport
import torch.distributed.checkpoint.state_dict
status = torch_dcp_backport.status()
live = {"weight": torch.zeros(3)}
saved = Saver.offload(live)
live["weight"].fill_(1)
tell(late=status.late_bindings, listed=status.out_of_reach, found=found, saved=saved["weight"].tolist())
"""
    ).facts
    assert facts["saved"] == [0, 0, 0]
    assert own(facts["late"]) == ["__main__.Saver.offload"]
    assert facts["listed"] == []
    assert [category for category, *_ in facts["found"]] == ["LateImportWarning"]


@pytest.mark.skipif(not AFFECTED, reason="nothing is replaced")
def test_torchs_own_set_state_dict_loads_optimizers_before_it_looks_at_the_model(fresh: Fresh) -> None:
    """docs/troubleshooting.md, "What a late import repairs"."""
    facts: Any = fresh(
        """
import torch, torch.distributed as dist, torch.distributed.checkpoint.state_dict as b
kept = [b.set_state_dict]
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
warnings.simplefilter("ignore")
import torch_dcp_backport
def made():
    model = torch.nn.Linear(2, 2)
    return model, torch.optim.AdamW(model.parameters())
model, optimizer = made()
model(torch.ones(2)).sum().backward()
optimizer.step()
whole = b.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
weights, states = b.get_state_dict(model, optimizer)
del weights["bias"]
def tried(load):
    model, optimizer = made()
    try:
        load(model, optimizer, model_state_dict=weights, optim_state_dict=states, options=whole)
        return "loaded"
    except RuntimeError as error:
        return [str(error).count("bias"), any(bool(of["exp_avg"].any()) for of in optimizer.state.values())]
tell(kept=tried(kept[0]), ours=tried(b.set_state_dict))
"""
    ).facts
    assert facts == {"kept": [1, True], "ours": [1, False]}


def test_a_method_of_torchs_classes_is_replaced_for_objects_that_are_there(fresh: Fresh) -> None:
    facts: Any = fresh(
        """
from torch.distributed.checkpoint import DefaultLoadPlanner
class Mine(DefaultLoadPlanner):
    pass
mine, kept = Mine(), [DefaultLoadPlanner.set_up_planner]
found = caught(lambda: __import__("torch_dcp_backport"))
tell(is_torchs=[Mine.set_up_planner is kept[0], mine.set_up_planner.__func__ is kept[0]], found=found)
"""
    ).facts
    assert facts == {"is_torchs": [not AFFECTED] * 2, "found": []}
