"""What stands in the way in torch, and what other tools do around us: torch stays whole, and it is told."""

from __future__ import annotations

from typing import Any

import pytest
from interpreters import AFFECTED, Fresh

pytestmark = pytest.mark.skipif(not AFFECTED, reason="nothing is replaced")

ACTIVATE = """
import torch.distributed.checkpoint.state_dict as b, torch.distributed._state_dict_utils as a
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import _FileSystemWriter as writer
def world():
    return [dict(vars(holder)) for holder in (a, b, filesystem, writer, b.StateDictOptions)]
def same(x, y):
    return all(p.keys() == q.keys() and all(p[n] is q[n] for n in p) for p, q in zip(x, y))
def activate():
    global error
    try:
        import torch_dcp_backport
    except (RuntimeError, UserWarning) as raised:
        error = str(raised)
error = None
"""
TELL = """
before = world()
found = caught(activate)
ours = sys.modules["torch_dcp_backport.activation"]  # strict: the package is imported anew each time
status = ours.current()
tell(same=same(before, world()), outcome=status.outcome, reason=status.reason, replaced=status.replaced,
     text=error or " ".join(text for _, text, _ in found), warnings=len(found))
"""
LAYOUTS = {
    "a name is missing": ("del b._load_model_state_dict", "has no _load_model_state_dict: unknown layout"),
    "a newer parameter": (
        "exec('def _get_fqns(model, name, skip_ddp_prefix=1, skip_compiler_prefix=1, new=0): 0', vars(b))",
        "no parameter new",
    ),
    "another order": ("exec('def _copy_state_dict(b, a): 0', vars(a))", "unknown layout"),
    "a function for a class": ("exec('def StateDictOptions(): 0', vars(b))", "there is no replacement for"),
    "a method is gone": ("del writer.write_data", "has no _FileSystemWriter.write_data: unknown layout"),
}


@pytest.mark.parametrize("switch", ["auto", "strict"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_unknown_layout_is_left_alone(fresh: Fresh, layout: str, switch: str) -> None:
    change, says = LAYOUTS[layout]
    facts: Any = fresh(ACTIVATE + change + TELL, switch=switch).facts
    assert (facts["same"], facts["outcome"], facts["replaced"]) == (True, "unsupported", [])
    assert says in facts["text"]
    assert facts["reason"] in facts["text"]
    assert facts["warnings"] == (switch == "auto")


def test_replacements_that_cannot_be_imported_break_no_import_of_torchs(fresh: Fresh) -> None:
    facts: Any = fresh(
        """
        import torch_dcp_backport
        sys.modules["torch_dcp_backport.dcp"] = None
        def load():
            import torch.distributed.fsdp
        found = caught(load)
        tell(found=found, outcome=torch_dcp_backport.status().outcome, home=home("set_model_state_dict"))
        """
    ).facts
    assert (facts["outcome"], facts["home"]) == ("unsupported", "torch")
    ((category, text, _),) = facts["found"]
    assert category == "BackportWarning"
    assert "taken back: ModuleNotFoundError" in text


def test_a_warning_that_is_an_error_changes_nothing(fresh: Fresh) -> None:
    facts: Any = fresh(
        ACTIVATE
        + """
load = b.set_model_state_dict
before = world()
warnings.simplefilter("error")
activate()
ours = sys.modules["torch_dcp_backport.activation"]  # strict: the package is imported anew each time
tell(same=same(before, world()), outcome=ours.current().outcome, error=error)
"""
    ).facts
    assert (facts["same"], facts["outcome"]) == (True, "conflict")
    assert "__main__.load" in facts["error"]


# A finder of another tool that fails at torch's module, until it is taken out.
FAILS = """
import torch_dcp_backport, torch
class Fails:
    def find_spec(self, name, path=None, target=None):
        if name == B:
            1 / 0
fails = Fails()
sys.meta_path.insert(0, fails)
"""


def test_torchs_module_that_cannot_be_imported_is_told_and_tried_again(fresh: Fresh) -> None:
    """torch.distributed.checkpoint can be, and is what was asked for."""
    facts: Any = fresh(
        FAILS
        + """
def load():
    import torch.distributed.checkpoint
found = caught(load)
first = torch_dcp_backport.status()
sys.meta_path.remove(fails)
import torch.distributed.checkpoint.state_dict
tell(found=found, first=[first.outcome, first.reason], after=torch_dcp_backport.status().outcome)
"""
    ).facts
    ((category, text, _),) = facts["found"]
    assert category == "BackportWarning"
    assert "state_dict cannot be imported: ZeroDivisionError" in text
    outcome, reason = facts["first"]
    assert (outcome, facts["after"]) == ("pending", "applied")
    assert "cannot be imported" in reason


def test_torchs_module_that_cannot_be_imported_is_an_error_when_strict(fresh: Fresh) -> None:
    facts: Any = fresh(
        FAILS
        + """
try:
    import torch.distributed.checkpoint
    error = None
except RuntimeError as raised:
    error = str(raised)
sys.meta_path.remove(fails)
import torch.distributed.checkpoint
tell(error=error, after=torch_dcp_backport.status().outcome)
""",
        switch="strict",
    ).facts
    assert "state_dict cannot be imported: ZeroDivisionError" in facts["error"]
    assert facts["after"] == "applied"


@pytest.mark.parametrize("when", ["before us", "after us", "after us, and deactivated"])
def test_hooks_of_other_tools_on_the_same_modules_are_called_once(fresh: Fresh, when: str) -> None:
    facts = fresh(
        f"""
        import wrapt, torch
        when, seen = {when!r}, []
        if when != "before us":
            import torch_dcp_backport
        for name in (A, B, "torch.distributed.fsdp", "torch.distributed.checkpoint"):
            wrapt.register_post_import_hook(lambda module: seen.append(module.__name__), name)
        import torch_dcp_backport
        if "deactivated" in when:
            torch_dcp_backport.deactivate()
        import torch.distributed.checkpoint.state_dict
        tell(seen=sorted(seen), outcome=torch_dcp_backport.status().outcome)
        """
    ).facts
    assert facts["seen"] == [
        "torch.distributed._state_dict_utils", "torch.distributed.checkpoint",
        "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp",
    ]  # fmt: skip
    assert facts["outcome"] == ("disabled" if "deactivated" in when else "applied")


def test_what_another_tool_puts_over_ours_is_told_and_left(fresh: Fresh) -> None:
    facts: Any = fresh(
        ACTIVATE
        + """
before = world()
activate()
import torch_dcp_backport
b.set_model_state_dict = theirs = lambda *args: "theirs"
writer.finish = finish = lambda *args: "theirs"
lost = torch_dcp_backport.status()
off = torch_dcp_backport.deactivate()
kept = [b.set_model_state_dict is theirs, writer.finish is finish]
b.set_model_state_dict, writer.finish = before[1]["set_model_state_dict"], before[3]["finish"]
tell(lost=[lost.outcome, *lost.overridden], off=off.reason, kept=kept, same=same(before, world()))
"""
    ).facts
    names = "checkpoint.filesystem._FileSystemWriter.finish", "checkpoint.state_dict.set_model_state_dict"
    assert facts["lost"] == ["applied", *(f"torch.distributed.{name}" for name in names)]
    assert "left alone, as other code replaced them" in facts["off"]
    assert (facts["kept"], facts["same"]) == ([True, True], True)


# One thread is in the middle of torch's module, and stays there until the other has gone on.
SLOW = """
import threading, time, wrapt
import torch.distributed.checkpoint
started, go = threading.Event(), threading.Event()
def stay(module):
    started.set()
    assert go.wait(60)
C = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
del sys.modules[C]  # which torch's module imports in the middle
wrapt.register_post_import_hook(stay, C)
importing = threading.Thread(target=__import__, args=(B,))
importing.start()
assert started.wait(60)
"""


def test_a_module_that_another_thread_is_in_the_middle_of_is_waited_for(fresh: Fresh) -> None:
    facts = fresh(
        SLOW
        + """
half = "set_model_state_dict" not in vars(sys.modules[B])
threading.Timer(0.5, go.set).start()
import torch_dcp_backport
importing.join(60)
tell(half=half, outcome=torch_dcp_backport.status().outcome, home=home("set_model_state_dict"))
""",
        switch="strict",
    ).facts
    assert facts == {"half": True, "outcome": "applied", "home": "torch_dcp_backport"}


def test_deactivated_while_another_thread_imports_torchs_module(fresh: Fresh) -> None:
    facts = fresh(
        SLOW.replace("import torch.distributed.checkpoint", "import torch_dcp_backport, torch").replace(
            "del", "#"
        )
        + """
off = torch_dcp_backport.deactivate().outcome
go.set()
importing.join(60)
tell(off=off, alive=importing.is_alive(), home=home("set_model_state_dict"))
"""
    ).facts
    assert facts == {"off": "disabled", "alive": False, "home": "torch"}


@pytest.mark.parametrize("switch", ["auto", "strict"])
@pytest.mark.parametrize("name", ["torch.distributed.fsdp", "torch.distributed._state_dict_utils"])
def test_a_hook_of_another_tool_that_fails_once_costs_nothing(fresh: Fresh, name: str, switch: str) -> None:
    facts: Any = fresh(
        f"""
        import importlib, wrapt
        calls = []
        def hook(module):
            calls.append(module.__name__)
            if len(calls) == 1:
                raise OSError("once")
        wrapt.register_post_import_hook(hook, {name!r})
        import torch_dcp_backport
        try:
            importlib.import_module({name!r})
        except OSError:
            pass
        importlib.import_module({name!r})
        tell(outcome=torch_dcp_backport.status().outcome)
        """,
        switch=switch,
    ).facts
    assert facts["outcome"] == "applied"


def test_what_is_bound_between_the_search_and_the_write_is_found(fresh: Fresh) -> None:
    facts: Any = fresh(
        """
        import threading, types, torch.distributed.checkpoint.state_dict as b
        stock = [b.set_model_state_dict]
        def module(name):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].bound = stock[0]
        module("early")
        # The warning about the early name stands between the search and the write.
        warnings.showwarning = lambda *_: module("between") if "between" not in sys.modules else None
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        import torch_dcp_backport
        status = torch_dcp_backport.status()
        left = [name for name in ("early", "between") if sys.modules[name].bound is stock[0]]
        tell(left=left, late=status.late_bindings)
        """
    ).facts
    assert facts["left"] == []
    assert {"early.bound", "between.bound"} <= set(facts["late"])


def test_no_module_of_torchs_keeps_what_was_replaced(fresh: Fresh) -> None:
    facts: Any = fresh(
        """
        import torch.distributed.fsdp, torch.distributed.checkpoint.state_dict
        before = {name: dict(vars(module)) for name, module in sys.modules.items() if module is not None}
        import torch_dcp_backport
        status = torch_dcp_backport.status()
        names = [(module, name) for module, names in status.replaced for name in names if "." not in name]
        stock = {id(before[m][n]) for m, n in names if not isinstance(before[m][n], type)}
        tell(left=sorted(
            f"{name}.{key}"
            for name, module in list(sys.modules.items()) if name.partition(".")[0] == "torch"
            for key, value in list(vars(module).items()) if id(value) in stock
        ))
        """
    ).facts
    assert facts["left"] == []


def test_a_property_of_a_module_is_not_run(fresh: Fresh) -> None:
    facts: Any = fresh(
        """
        import types, torch.distributed.checkpoint.state_dict
        class Module(types.ModuleType):
            @property
            def __dict__(self):
                ran.append(1)
                raise OSError
        ran, sys.modules["odd"] = [], Module("odd")
        import torch_dcp_backport
        tell(outcome=torch_dcp_backport.status().outcome, ran=len(ran))
        """
    ).facts
    assert facts == {"outcome": "applied", "ran": 0}


# Another tool's wrapper around one of torch's functions, before us.
WRAPPERS = {
    "functools": "theirs = functools.wraps(stock)(lambda *args, **kwargs: stock(*args, **kwargs))",
    "wrapt": "theirs = wrapt.FunctionWrapper(stock, lambda inner, _, args, more: inner(*args, **more))",
    "mock": "theirs = mock.MagicMock(wraps=stock)",
}
WRAPPED = """
import functools, wrapt
from unittest import mock
import torch
from torch.distributed.checkpoint import default_planner
stock = getattr({holder}, {name!r})
{make}
patch = mock.patch.object({holder}, {name!r}, theirs)
patch.start()
activate_ = activate
found = caught(activate_)
import torch_dcp_backport
status = torch_dcp_backport.status()
"""
ALONE = {
    "a public function": ("b", "set_model_state_dict"),
    "a getter": ("b", "get_optimizer_state_dict"),
    "a function of DCP": ("default_planner", "create_default_local_save_plan"),
    "a method of DCP": ("writer", "write_data"),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("what", ALONE)
def test_a_function_that_another_tool_has_wrapped_is_left_out_and_told(
    fresh: Fresh, what: str, wrapper: str
) -> None:
    holder, name = ALONE[what]
    facts: Any = fresh(
        ACTIVATE
        + WRAPPED.format(holder=holder, name=name, make=WRAPPERS[wrapper])
        + f"""
kept = vars({holder})[{name!r}] is theirs
model = torch.nn.Linear(2, 2)
b.set_model_state_dict(model, b.get_model_state_dict(model), options=b.StateDictOptions(full_state_dict=True))
first = [status.outcome, list(status.left_out), "left out" in str(status)]
patch.stop()
after = torch_dcp_backport.activate()
ours = origin(getattr({holder}, {name!r}))
torch_dcp_backport.deactivate()
tell(found=found, kept=kept, first=first, after=[after.outcome, list(after.left_out), ours],
     names=sum(len(names) for _, names in after.replaced) - sum(len(names) for _, names in status.replaced),
     stock=getattr({holder}, {name!r}) is stock)
"""
    ).facts
    outcome, (left_out,), shown = facts["first"]
    assert (outcome, shown, facts["kept"]) == ("applied", True, True)
    assert f"{name} (replaced by " in left_out
    (warning,) = facts["found"]
    assert warning[0] == "BackportWarning"
    assert left_out in warning[1]
    assert "activate()" in warning[1]
    assert facts["after"] == ["applied", [], "torch_dcp_backport"]
    assert (facts["names"], facts["stock"]) == (1, True)


@pytest.mark.parametrize("switch", ["auto", "strict"])
@pytest.mark.parametrize("name", ["_load_model_state_dict", "_verify_options", "set_model_state_dict"])
def test_a_wrapper_that_nothing_can_stand_beside_says_why(fresh: Fresh, name: str, switch: str) -> None:
    """A function that others of the set call; if strict, every function. After its end all is replaced."""
    if (name, switch) == ("set_model_state_dict", "auto"):
        pytest.skip("it can be left out")
    facts: Any = fresh(
        ACTIVATE
        + WRAPPED.format(holder="b", name=name, make=WRAPPERS["functools"]).replace(
            "import torch_dcp_backport\nstatus = torch_dcp_backport.status()", ""
        )
        + """
text = error or " ".join(text for _, text, _ in found)
patch.stop()
del stock, theirs
import torch_dcp_backport
after = torch_dcp_backport.activate()
tell(text=text, after=[after.outcome, list(after.left_out), home(NAME)])
""".replace("NAME", repr(name)),
        switch=switch,
    ).facts
    assert f"{name} was already replaced by " in facts["text"]
    assert ("other functions of the set need ours there" in facts["text"]) == (switch == "auto")
    assert facts["after"] == ["applied", [], "torch_dcp_backport"]
