"""Every order of importing torch, torch's module and us, and every way back."""

from __future__ import annotations

import pytest
from interpreters import AFFECTED, TORCH, Fresh, own

PENDING, APPLIED = ("pending", "applied") if AFFECTED else ("not-needed", "not-needed")
HOME = "torch_dcp_backport" if AFFECTED else "torch"
B_NAME = "torch.distributed.checkpoint.state_dict"

# After any order: what must be so. Runs in the process; `b` and `a` are torch's modules.
CHECK = """
import torch_dcp_backport
import torch.distributed.checkpoint.state_dict as b
import torch.distributed._state_dict_utils as a
from torch_dcp_backport.activation.table import TABLE
status = torch_dcp_backport.status()
def shares_torchs_set():
    model = __import__("torch").nn.Linear(1, 1)
    b._patch_model_state_dict(model)
    return model.state_dict in b._patched_state_dict and sorted(model.state_dict()) == ["bias", "weight"]
targets = served(TABLE.targets)
classes = {"StateDictOptions", "_StateDictInfo", "_EXTRA_STATE"}
result = dict(
    outcome=status.outcome,
    version=status.torch_version,
    homes=sorted(
        {home(t.name, t.module) for t in targets if t.name not in classes and t.module in sys.modules}
    ),
    classes=sorted({home(name) for name in classes}),
    shared=shares_torchs_set(),
    one_helper=b._broadcast_state_dict is a._broadcast_state_dict,
    sys_modules=sys.modules[B] is b and sys.modules[A] is a,
    loader=[type(b.__spec__.loader).__name__, type(b.__loader__).__name__],
    overridden=status.overridden,
)
"""
EXPECTED = {
    "outcome": APPLIED,
    "homes": [HOME],
    "classes": ["torch"],  # ours say they are torch's, for pickle
    "shared": True,
    "one_helper": True,
    "sys_modules": True,
    "loader": ["SourceFileLoader"] * 2,
    "overridden": [],
}

ORDERS = {
    "us, torch's module": "import torch_dcp_backport",
    "us, us again, torch": """
import torch_dcp_backport
first = sys.modules.pop("torch_dcp_backport")
torch_dcp_backport.activate()
sys.modules["torch_dcp_backport"] = first
import torch_dcp_backport
""",
    "torch, us": "import torch; import torch_dcp_backport",
    "the package of the module, us": "import torch.distributed.checkpoint; import torch_dcp_backport",
    "torch's module, us": "import torch.distributed.checkpoint.state_dict; import torch_dcp_backport",
    "us from within a half-initialised torch": """
import wrapt
def early(module):
    global half
    half = not hasattr(sys.modules["torch"], "__version__")
    import torch_dcp_backport
wrapt.register_post_import_hook(early, "torch.version")
import torch
assert half
""",
    "us from the middle of torch.distributed": """
import wrapt
def early(module):
    global half
    half = sys.modules["torch.distributed.checkpoint"].__spec__._initializing and B not in sys.modules
    import torch_dcp_backport
wrapt.register_post_import_hook(early, A)
import torch.distributed.checkpoint.state_dict
assert half
""",
    "us in many threads, then torch's module in many": """
import threading, importlib
def at_once(name):
    barrier = threading.Barrier(8)
    def work():
        barrier.wait()
        importlib.import_module(name)
    threads = [threading.Thread(target=work) for _ in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
at_once("torch_dcp_backport")
at_once(B)
""",
    "us in many threads, torch's module there": """
import threading, importlib
import torch.distributed.checkpoint.state_dict
barrier = threading.Barrier(8)
def work():
    barrier.wait()
    importlib.import_module("torch_dcp_backport").activate()
threads = [threading.Thread(target=work) for _ in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
""",
    "us in one thread, torch's module in others": """
import threading, importlib
import torch
barrier = threading.Barrier(4)
def work(name):
    barrier.wait()
    importlib.import_module(name)
# Not two modules of torch at once: its circular imports break then, without us too (2 of 16 runs on 2.6).
names = ["torch_dcp_backport", B, B, B]
threads = [threading.Thread(target=work, args=(name,)) for name in names]
[t.start() for t in threads]
[t.join() for t in threads]
""",
    "our functions directly, then torch's module": "import torch_dcp_backport.state_dict",
}


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_ends_the_same(fresh: Fresh, order: str) -> None:
    ended = fresh(ORDERS[order] + CHECK + "tell(**result)")
    facts = ended.facts
    assert facts.pop("version").partition("+")[0] == TORCH.partition("+")[0]
    assert facts == EXPECTED
    assert "Warning" not in ended.err


def test_pending_until_it_is_applied(fresh: Fresh) -> None:
    facts = fresh(
        """
        import torch_dcp_backport
        seen = []
        for name in ("torch", "torch.distributed._state_dict_utils", "torch.distributed.checkpoint", B):
            __import__(name)
            seen.append(torch_dcp_backport.status().outcome)
        status = torch_dcp_backport.status()
        from torch_dcp_backport.activation.table import TABLE
        tell(seen=seen, finger=status.fingerprint, replaced=[module for module, _ in status.replaced],
             served=list(dict.fromkeys(t.module for t in served(TABLE.targets))))
        """
    ).facts
    assert facts["seen"] == [PENDING, *[APPLIED] * 3]
    assert facts["replaced"] == (facts["served"] if AFFECTED else [])
    again = fresh(
        "import torch.distributed.checkpoint.state_dict, torch_dcp_backport\n"
        "tell(finger=torch_dcp_backport.status().fingerprint)"
    ).facts
    assert again["finger"] == facts["finger"]


def test_deactivate_restores_by_identity_and_activate_works_again(fresh: Fresh) -> None:
    facts = fresh(
        """
        import torch.distributed.checkpoint.state_dict as b, torch.distributed._state_dict_utils as a
        def world():
            return [dict(vars(a)), dict(vars(b))]
        def same(x, y):
            return all(p.keys() == q.keys() and all(p[n] is q[n] for n in p) for p, q in zip(x, y))
        stock = world()
        import torch_dcp_backport
        ours = world()
        torch_dcp_backport.activate()
        twice = same(world(), ours)
        off = torch_dcp_backport.deactivate()
        restored = same(world(), stock)
        from torch_dcp_backport.state_dict import StateDictOptions, _StateDictInfo
        labels = [StateDictOptions.__module__.partition(".")[0], _StateDictInfo.__qualname__]
        torch_dcp_backport.deactivate()
        on = torch_dcp_backport.activate()
        tell(changed=not same(ours, stock), twice=twice, off=[off.outcome, off.reason], restored=restored,
             on=on.outcome, again=same(world(), ours), labels=labels, late=on.late_bindings)
        """
    ).facts
    assert facts["changed"] is AFFECTED
    assert facts["twice"]
    assert facts["restored"]
    assert facts["again"]
    assert facts["on"] == APPLIED
    assert own(facts["late"]) == []
    assert facts["labels"] == ["torch_dcp_backport", "StateDictInfo"]
    if AFFECTED:
        assert facts["off"] == ["disabled", "deactivate() was called"]


def test_deactivated_before_torch_came(fresh: Fresh) -> None:
    facts = fresh(
        """
        import torch_dcp_backport
        torch_dcp_backport.deactivate()
        import torch.distributed.checkpoint.state_dict
        tell(home=home("set_model_state_dict"), outcome=torch_dcp_backport.status().outcome,
             ours="torch_dcp_backport.state_dict" in sys.modules)
        """
    ).facts
    assert facts == {"home": "torch", "outcome": "disabled" if AFFECTED else "not-needed", "ours": False}


def test_us_from_the_middle_of_torchs_own_module(fresh: Fresh) -> None:
    """Half executed, in our own thread: it is replaced at its end, before its import returns."""
    facts = fresh(
        """
        import wrapt, torch.distributed.checkpoint
        C = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
        half, found = [], []
        def activate():
            global torch_dcp_backport
            import torch_dcp_backport
        def early(module):
            torchs = sys.modules[B]
            half.append([torchs.__spec__._initializing, "set_model_state_dict" in vars(torchs)])
            found.extend(caught(activate))
            half.append(torch_dcp_backport.status().outcome)
        del sys.modules[C]  # which torch's module imports in the middle, but would find loaded
        wrapt.register_post_import_hook(early, C)
        import torch.distributed.checkpoint.state_dict
        status, now = torch_dcp_backport.status(), home("set_model_state_dict")
        tell(half=half, found=found, outcome=status.outcome, home=now,
             spec=type(sys.modules[B].__spec__).__name__)
        """
    ).facts
    assert facts == {
        "half": [[True, False], PENDING], "found": [], "outcome": APPLIED, "home": HOME, "spec": "ModuleSpec"
    }  # fmt: skip


ENTRANCES = [
    "torch.distributed._state_dict_utils",
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._optim_utils",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint.state_dict_saver",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
    "torch.distributed.algorithms._optimizer_overlap",
    "torch.distributed.pipelining",  # imports fsdp in its middle, and of the two the one imports the other
    "torch.distributed.tensor.parallel.fsdp",
]


@pytest.mark.skipif(not AFFECTED, reason="nothing is replaced")
@pytest.mark.parametrize("module", ENTRANCES)
def test_each_module_alone_replaces_all(fresh: Fresh, module: str) -> None:
    facts = fresh(
        f"""
        import torch_dcp_backport, torch
        before = torch_dcp_backport.status().outcome
        try:
            import {module}
        except ImportError as error:  # another release has it, or it can: torch's imports are circular
            assert error.name in {module!r}, error
            import torch.distributed.fsdp
        from torch_dcp_backport.activation.table import TABLE
        status, targets = torch_dcp_backport.status(), served(TABLE.targets)
        tell(before=before, outcome=status.outcome, late=status.late_bindings,
             names=sum(len(names) for _, names in status.replaced) - len(targets),
             specs=[n for n, m in sys.modules.items() if "_Ending" in str(type(getattr(m, "__spec__", 0)))])
        """,
        switch="strict",
    ).facts
    assert own(facts.pop("late")) == []
    assert facts == {"before": "pending", "outcome": "applied", "names": 0, "specs": []}


NAMES = {
    "from torch.distributed.checkpoint import load as name": "load",
    "from torch.distributed._state_dict_utils import _copy_state_dict as name": "_copy_state_dict",
    "from torch.distributed.checkpoint.state_dict import get_state_dict as name": "get_state_dict",
}


@pytest.mark.skipif(not AFFECTED, reason="nothing is replaced")
@pytest.mark.parametrize("line", NAMES)
def test_a_name_that_is_imported_after_us_is_ours(fresh: Fresh, line: str) -> None:
    facts = fresh(f"import torch_dcp_backport\n{line}\ntell(home=origin(name), torch=TORCHS)".replace(
        "TORCHS", "__import__('torch').__version__"
    )).facts  # fmt: skip
    ours = NAMES[line] != "load" or facts["torch"] < "2.6"
    assert (facts["home"] == "torch_dcp_backport") is ours


LAZY = """
import importlib.util, torch
def lazy(name):
    spec = importlib.util.find_spec(name)
    spec.loader = importlib.util.LazyLoader(spec.loader)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
"""


@pytest.mark.skipif(not AFFECTED, reason="nothing is replaced")
@pytest.mark.parametrize("switch", ["auto", "strict"])
@pytest.mark.parametrize("name", [B_NAME.rpartition(".")[0], B_NAME])
def test_a_lazy_module_is_replaced_when_it_is_executed(fresh: Fresh, name: str, switch: str) -> None:
    """importlib.util.LazyLoader has put it into sys.modules before us, and executes it at the first use."""
    ended = fresh(
        LAZY
        + f"""
module = lazy({name!r})
import torch_dcp_backport
before = torch_dcp_backport.status().outcome, type(module).__name__
module.__doc__
after = torch_dcp_backport.status().outcome, type(module.__loader__).__name__
import torch.distributed.checkpoint.state_dict
there = home("set_model_state_dict")
tell(before=before, after=after, home=there, off=torch_dcp_backport.deactivate().outcome)
""",
        switch=switch,
    )
    assert ended.facts == {
        "before": ["pending", "_LazyModule"], "after": ["applied", "SourceFileLoader"],
        "home": "torch_dcp_backport", "off": "disabled"
    }  # fmt: skip
    assert ended.err == ""


def test_a_lazy_torch_is_not_executed(fresh: Fresh) -> None:
    facts = fresh(
        """
        import importlib.util
        spec = importlib.util.find_spec("torch")
        spec.loader = importlib.util.LazyLoader(spec.loader)
        module = sys.modules["torch"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        import torch_dcp_backport
        tell(kind=type(module).__name__, outcome=torch_dcp_backport.status().outcome)
        """
    ).facts
    assert facts == {"kind": "_LazyModule", "outcome": "pending" if AFFECTED else "not-needed"}
