"""StateDictOptions and the functions as values: pickled, copied, compared, compiled."""

from __future__ import annotations

import json
from typing import Any

import pytest
from interpreters import AFFECTED, Fresh, own

PATCHED = "import torch_dcp_backport\n"

PICKLE = """
import copy, pickle
import torch, torch.distributed.checkpoint.state_dict as b
def options():
    return b.StateDictOptions(full_state_dict=True, strict=False)
def load(data):
    got = pickle.loads(bytes.fromhex(data))
    info = b._verify_options(torch.nn.Linear(1, 1), (), optim_only=False, options=got)
    return [type(got) is b.StateDictOptions, info.full_state_dict, info.strict, got == options()]
loaded = [load(data) for data in sys.argv[1:]]
tell(data=[pickle.dumps(options(), protocol).hex() for protocol in range(pickle.HIGHEST_PROTOCOL + 1)],
     loaded=loaded)
"""


@pytest.mark.parametrize("switch", ["off", "auto"])
def test_options_pickle_between_patched_and_stock_processes(fresh: Fresh, switch: str) -> None:
    """`off` is what a rank without the fix has; it imports us as the others do."""
    patched = fresh(PATCHED + PICKLE).facts["data"]
    assert not any(b"torch_dcp_backport" in bytes.fromhex(data) for data in patched)
    stock = fresh((PATCHED if switch == "off" else "") + PICKLE, *patched, switch=switch).facts
    back = fresh(PATCHED + PICKLE, *patched, *stock["data"]).facts
    assert stock["loaded"] == [[True, True, False, True]] * len(patched)
    assert back["loaded"] == [[True, True, False, True]] * 2 * len(patched)


def test_options_pickled_while_applied_load_after_deactivate_and_back(fresh: Fresh) -> None:
    facts = fresh(
        """
        import pickle, torch, torch_dcp_backport
        import torch.distributed.checkpoint.state_dict as b
        make = lambda: b.StateDictOptions(strict=False)
        ours = pickle.dumps(make())
        torch_dcp_backport.deactivate()
        stock, stocks = pickle.dumps(make()), pickle.loads(ours)
        down = [type(stocks) is b.StateDictOptions, stocks == make()]
        torch_dcp_backport.activate()
        tell(down=down, up=[type(pickle.loads(stock)) is b.StateDictOptions, pickle.loads(stock) == make()])
        """
    ).facts
    assert facts == {"down": [True, True], "up": [True, True]}


def test_options_made_before_activation_are_still_good(fresh: Fresh) -> None:
    facts: Any = fresh(
        """
        import copy, dataclasses, pickle, torch
        import torch.distributed.checkpoint.state_dict as b
        class Mine(b.StateDictOptions):
            pass
        old, mine = b.StateDictOptions(cpu_offload=True), Mine(cpu_offload=True)
        warnings.simplefilter("ignore")  # Mine cannot be rebound
        import torch_dcp_backport
        model = torch.nn.Linear(2, 2)
        made = [old, dataclasses.replace(old, strict=False), copy.copy(old), copy.deepcopy(old),
                pickle.loads(pickle.dumps(b.StateDictOptions(cpu_offload=True))), mine]
        seen = [b._verify_options(model, (), optim_only=False, options=one) for one in made]
        works = [sorted(b.get_model_state_dict(model, options=one)) for one in made]
        tell(seen=[[info.cpu_offload, info.strict] for info in seen], works=works)
        """
    ).facts
    assert facts["seen"] == [[True, True], [True, False], *[[True, True]] * 4]
    assert facts["works"] == [["bias", "weight"]] * 6


def test_options_made_before_activation_are_of_the_class_that_everybody_has(fresh: Fresh) -> None:
    """They can be pickled (mp.spawn does), and equal those made since; also after deactivate()."""
    facts: Any = fresh(
        """
        import dataclasses, pickle
        import torch.distributed.checkpoint.state_dict as b
        from torch.distributed.checkpoint.state_dict import StateDictOptions
        old = StateDictOptions(cpu_offload=True)
        def found():
            twin = pickle.loads(pickle.dumps(old))
            return [type(twin) is type(old) is b.StateDictOptions is StateDictOptions,
                    twin == old == b.StateDictOptions(cpu_offload=True) == dataclasses.replace(old),
                    len(dataclasses.fields(old)) == len(dataclasses.asdict(old)) == repr(old).count("=")]
        before, fields = found(), [field.name for field in dataclasses.fields(old)]
        import torch_dcp_backport
        after = found()
        since = b.StateDictOptions(dsd_fqn_modifiers="other")
        unlike = since != b.StateDictOptions()
        torch_dcp_backport.deactivate()
        tell(before=before, after=after, since=unlike, undone=found(),
             same=fields == [field.name for field in dataclasses.fields(old)],
             late=torch_dcp_backport.status().late_bindings, is_one=isinstance(since, StateDictOptions))
        """,
        switch="strict",
    ).facts
    assert facts["before"] == facts["after"] == facts["undone"] == [True] * 3
    assert (facts["since"], facts["is_one"], facts["same"], facts["late"]) == (True, True, True, [])


def test_options_are_a_dataclass_like_any_other(fresh: Fresh) -> None:
    facts: Any = fresh(
        PATCHED
        + """
import copy, dataclasses
import torch.distributed.checkpoint.state_dict as b
one = b.StateDictOptions(full_state_dict=True)
two = dataclasses.replace(one, strict=False)
copies = [copy.copy(two), copy.deepcopy(two), copy.deepcopy([two])[0]]
copies += [b.StateDictOptions(**dataclasses.asdict(two))]
class Mine(b.StateDictOptions):
    pass
tell(dataclass=dataclasses.is_dataclass(b.StateDictOptions),
     fields=[[f.name, f.default] for f in dataclasses.fields(b.StateDictOptions)][:7],
     asdict={k: v for k, v in dataclasses.asdict(two).items() if k != "dsd_fqn_modifiers"},
     astuple=dataclasses.astuple(two)[:7], types=[type(c) is b.StateDictOptions for c in copies],
     equal=[c == two and c is not two for c in copies], unlike=one == two, left=one.strict,
     replaced=type(dataclasses.replace(Mine(), strict=False)).__name__,
     positional=b.StateDictOptions(True, True) == b.StateDictOptions(full_state_dict=True, cpu_offload=True),
     repr=repr(two).split("(")[0])
"""
    ).facts
    names = (
        "full_state_dict", "cpu_offload", "ignore_frozen_params", "keep_submodule_prefixes", "strict",
        "broadcast_from_rank0", "flatten_optimizer_state_dict",
    )  # fmt: skip
    defaults = [False, False, False, True, True, False, False]
    assert facts["dataclass"]
    assert facts["fields"] == [list(pair) for pair in zip(names, defaults)]
    changed = [True, False, False, True, False, False, False]
    assert facts["asdict"] == dict(zip(names, changed))
    assert facts["astuple"] == changed
    assert facts["types"] == facts["equal"] == [True] * 4
    assert (facts["unlike"], facts["left"], facts["positional"]) == (False, True, True)
    assert (facts["replaced"], facts["repr"]) == ("Mine", "StateDictOptions")


REPLACED = """
import pickle
import torch_dcp_backport, torch, torch.distributed.checkpoint.state_dict
from torch_dcp_backport.activation.table import TABLE
objects = {}
for target in served(TABLE.targets):
    found = sys.modules.get(target.module)
    for part in target.name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) or type(found) is type(served):
        objects[f"{target.module}.{target.name}"] = found
"""


@pytest.mark.skipif(not AFFECTED, reason="torch's own functions")
@pytest.mark.parametrize("state", ["on", "off again"])
def test_what_is_replaced_is_pickled_as_torchs(fresh: Fresh, state: str) -> None:
    """A process that loads it need not have this package (a Ray driver, submitit)."""
    pickled = fresh(
        REPLACED
        + f"""
if {state!r} != "on":
    torch_dcp_backport.deactivate()
    # By name they are ours again.
    tell(data={{}}, ours=torch_dcp_backport.state_dict.set_model_state_dict.__module__)
else:
    again = all(pickle.loads(pickle.dumps(found)) is found for found in objects.values())
    tell(data={{name: pickle.dumps(found).hex() for name, found in objects.items()}}, again=again)
"""
    ).facts
    if state != "on":
        assert pickled["ours"] == "torch_dcp_backport.state_dict.api"
        return
    assert pickled["again"]
    assert len(pickled["data"]) > 35
    data = {name: bytes.fromhex(one) for name, one in pickled["data"].items()}
    assert [name for name, one in data.items() if b"torch_dcp_backport" in one] == []
    facts = fresh(
        """
import pickle
sys.modules["torch_dcp_backport"] = None  # as where it is not installed
import torch, torch.distributed.checkpoint.state_dict, torch.distributed.checkpoint.default_planner
tell(homes=sorted({origin(pickle.loads(bytes.fromhex(one))) for one in json.loads(sys.argv[1])}))
""",
        json.dumps(list(pickled["data"].values())),
    ).facts
    assert facts == {"homes": ["torch"]}


@pytest.mark.skipif(not AFFECTED, reason="torch's own functions")
def test_tracebacks_of_replaced_functions_name_our_files(fresh: Fresh) -> None:
    facts = fresh(
        PATCHED
        + """
import traceback
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
import torch
try:
    set_model_state_dict(torch.nn.Linear(1, 1), {"other": torch.ones(1)})
except RuntimeError as error:
    frames = traceback.extract_tb(error.__traceback__)
tell(file=frames[1].filename, name=frames[1].name, line=frames[1].line, label=set_model_state_dict.__module__)
"""
    ).facts
    assert facts["file"].endswith("torch_dcp_backport/state_dict/api.py")
    assert facts["name"] == "set_model_state_dict"
    assert "load_model_state(" in facts["line"]
    assert facts["label"] == "torch.distributed.checkpoint.state_dict"


def test_functions_are_copied_by_reference(fresh: Fresh) -> None:
    facts: Any = fresh(
        PATCHED
        + """
import copy, functools, pickle
import torch.distributed.checkpoint.state_dict as b
names = [name for name in b.__all__ if name.startswith(("get_", "set_"))]
functions = [getattr(b, name) for name in names]
held = functools.partial(b.set_model_state_dict, options=b.StateDictOptions(strict=False))
again = copy.deepcopy(held)
tell(count=len(names), copied=all(copy.copy(f) is f and copy.deepcopy(f) is f for f in functions),
     pickled=all(pickle.loads(pickle.dumps(f)) is f for f in functions),
     partial=[again.func is held.func, again.keywords == held.keywords],
     names=[f.__name__ for f in functions] == names, documented=all(f.__doc__ for f in functions))
"""
    ).facts
    assert facts == {
        "count": 6, "copied": True, "pickled": True, "partial": [True, True], "names": True,
        "documented": True,
    }  # fmt: skip


def test_a_function_that_is_sent_to_another_process_is_the_one_of_that_process(fresh: Fresh) -> None:
    """Whether a process has the fix is decided by its own import, not by who sent it a function."""
    data = fresh(
        PATCHED
        + "import pickle, torch.distributed.checkpoint.state_dict as b\n"
        + "tell(data=pickle.dumps(b.set_model_state_dict).hex())"
    ).facts["data"]
    for line in ("", PATCHED):
        facts = fresh(
            line
            + """
import pickle, torch.distributed.checkpoint.state_dict as b
function = pickle.loads(bytes.fromhex(sys.argv[1]))
tell(same=function is b.set_model_state_dict, home=origin(function))
""",
            data,
        ).facts
        assert facts == {"same": True, "home": "torch_dcp_backport" if AFFECTED and line else "torch"}


COMPILED = """
import torch, torch.distributed.checkpoint.state_dict as b
options = b.StateDictOptions(full_state_dict=True)
@torch.compile(backend="eager")
def save(model):
    return b.get_model_state_dict(model, options=options)
@torch.compile(backend="eager")
def load(model, state):
    return b.set_model_state_dict(model, state, options=options)
@torch.compile(backend="eager")
def step(model, x):
    return model(x) + len(b.get_model_state_dict(model))
source, model = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
state = save(source)
result = [list(map(list, load(model, state))) for _ in range(2)]
x = torch.ones(1, 3)
inner = torch.compile(torch.nn.Sequential(torch.nn.Linear(3, 2)), backend="eager")
inner(x)
tell(keys=sorted(state), loaded=torch.equal(source.weight, model.weight), result=result,
     step=torch.equal(step(model, x), source(x) + 2), module=sorted(b.get_model_state_dict(inner)))
"""


def test_compiled_callers_get_what_stock_gives_them(fresh: Fresh) -> None:
    ours, stock = fresh(PATCHED + COMPILED), fresh(COMPILED)
    assert stock.facts == ours.facts
    assert ours.facts == {
        "keys": ["bias", "weight"], "loaded": True, "result": [[[], []]] * 2, "step": True,
        "module": ["0.bias", "0.weight"],
    }  # fmt: skip


@pytest.mark.parametrize(
    "order", ["import torch_dcp_backport, torch._dynamo", "import torch._dynamo, torch_dcp_backport"]
)
@pytest.mark.skipif(not AFFECTED, reason="torch's own functions")
def test_compiled_callers_trace_nothing_of_ours(fresh: Fresh, order: str) -> None:
    """As they trace nothing of torch's: it is slow, and crashes on 2.4."""
    facts = fresh(
        order
        + """
import torch, torch.distributed.checkpoint.state_dict as b
import torch._dynamo.convert_frame as frames
traced = []
real = frames.transform_code_object
def seen(code, *args, **kwargs):
    traced.append(code.co_filename)
    return real(code, *args, **kwargs)
frames.transform_code_object = seen
save = torch.compile(lambda model: [b.get_model_state_dict(model), len(b.__name__)], backend="eager")
save(torch.nn.Linear(2, 2))
tell(ours=[name for name in traced if "torch_dcp_backport" in name], any=len(traced))
"""
    ).facts
    assert facts["ours"] == []
    assert facts["any"] > 0


@pytest.mark.skipif(not AFFECTED, reason="no hook")
def test_deactivated_before_compile_came_its_rules_are_torchs(fresh: Fresh) -> None:
    facts = fresh(
        """
        import torch_dcp_backport
        torch_dcp_backport.deactivate()
        import torch._dynamo.trace_rules as rules
        tell(ours="torch_dcp_backport" in rules.SKIP_DIRS_RE.pattern)
        """
    ).facts
    assert facts == {"ours": False}


@pytest.mark.skipif(not AFFECTED, reason="nothing is bound anew")
def test_a_caller_compiled_before_activation_finds_ours(fresh: Fresh) -> None:
    facts = fresh(
        """
        import torch, torch.distributed.checkpoint.state_dict as b
        load = torch.compile(b.set_model_state_dict, backend="eager")
        def calls(model, state):
            return b.set_model_state_dict(model, state)
        caller = torch.compile(calls, backend="eager")
        model, source = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        for one in (load, caller):
            one(model, source.state_dict())
        def activate():
            import torch_dcp_backport
        found = caught(activate)
        import torch_dcp_backport
        equal = []
        for one in (load, caller):
            other = torch.nn.Linear(2, 2)
            one(model, other.state_dict())
            equal.append(torch.equal(model.weight, other.weight))
        tell(found=found, equal=equal, late=torch_dcp_backport.status().late_bindings,
             listed=torch_dcp_backport.status().out_of_reach)
        """
    ).facts
    assert facts["equal"] == [True, True]
    assert own(facts["late"]) == []
    assert (facts["listed"], facts["found"]) == ([], [])
