"""Every order of importing torch, torch's module and us, and every way back."""

from __future__ import annotations

import pytest
from interpreters import AFFECTED, TORCH, Fresh

PENDING, APPLIED = ("pending", "applied") if AFFECTED else ("not-needed", "not-needed")
HOME = "torch_dcp_backport" if AFFECTED else "torch"

# After any order: what must be so. Runs in the process; `b` and `a` are torch's modules.
CHECK = """
import torch_dcp_backport
import torch.distributed.checkpoint.state_dict as b
import torch.distributed._state_dict_utils as a
from torch_dcp_backport.activation.table import TABLE
status = torch_dcp_backport.status()
targets = [t for t in TABLE.targets if hasattr(sys.modules[t.module], t.name)]
hooks = sys.modules["wrapt.importer"]._post_import_hooks if "wrapt.importer" in sys.modules else {}
classes = {"StateDictOptions", "_StateDictInfo", "_EXTRA_STATE"}
result = dict(
    outcome=status.outcome,
    version=status.torch_version,
    homes=sorted({home(t.name, t.module) for t in targets if t.name not in classes}),
    classes=sorted({home(name) for name in classes}),
    shared=b._patched_state_dict is b._patch_model_state_dict.__globals__["_patched_state_dict"],
    one_helper=b._broadcast_state_dict is a._broadcast_state_dict,
    sys_modules=sys.modules[B] is b and sys.modules[A] is a,
    loader=[type(b.__spec__.loader).__name__, type(b.__loader__).__name__],
    hooks=B in hooks or A in hooks,
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
    "hooks": False,
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
        tell(seen=seen, finger=status.fingerprint, replaced=status.replaced)
        """
    ).facts
    assert facts["seen"] == [PENDING] * 3 + [APPLIED]
    assert [module for module, _ in facts["replaced"]] == (
        ["torch.distributed._state_dict_utils", "torch.distributed.checkpoint.state_dict"] if AFFECTED else []
    )
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
    assert facts["late"] == []
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


PICKLE = """
import pickle
import torch, torch.distributed.checkpoint.state_dict as b
def options():
    return b.StateDictOptions(full_state_dict=True, strict=False)
def load(data):
    got = pickle.loads(bytes.fromhex(data))
    info = b._verify_options(torch.nn.Linear(1, 1), (), optim_only=False, options=got)
    return [type(got) is b.StateDictOptions, info.full_state_dict, info.strict, got == options()]
loaded = [load(data) for data in sys.argv[1:]]
tell(data=pickle.dumps(options()).hex(), loaded=loaded)
"""


def test_options_pickle_between_patched_and_stock_processes(fresh: Fresh) -> None:
    patched = fresh("import torch_dcp_backport\n" + PICKLE).facts["data"]
    assert b"torch_dcp_backport" not in bytes.fromhex(patched)
    stock = fresh(PICKLE, patched).facts
    back = fresh("import torch_dcp_backport\n" + PICKLE, patched, stock["data"]).facts
    assert stock["loaded"] + back["loaded"] == [[True, True, False, True]] * 3
