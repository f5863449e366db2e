"""importlib.reload(), of torch's module and of ours: status() says what is so, activate() makes it good."""

from __future__ import annotations

import pytest
from interpreters import AFFECTED, Fresh

APPLIED = "applied" if AFFECTED else "not-needed"
HOME = "torch_dcp_backport" if AFFECTED else "torch"

AGAIN = {
    "reload of torch's module": "importlib.reload(b)",
    "torch's module imported anew": "del sys.modules[B]; importlib.import_module(B)",
}


@pytest.mark.parametrize("again", AGAIN)
def test_torchs_module_is_executed_again(fresh: Fresh, again: str) -> None:
    facts = fresh(
        f"""
        import importlib, torch_dcp_backport
        import torch.distributed.checkpoint.state_dict as b
        {AGAIN[again]}
        b = sys.modules[B]
        stock = {{name: id(value) for name, value in vars(b).items()}}
        lost = torch_dcp_backport.status()
        home_lost, lie = home("set_model_state_dict"), "replaced  " in str(lost)
        found = caught(torch_dcp_backport.activate)
        on = torch_dcp_backport.status()
        home_on = home("set_model_state_dict"), home("_broadcast_state_dict", A)
        torch_dcp_backport.deactivate()
        names = [name for name in stock if not hasattr(sys.modules[A], name) and not name.startswith("__")]
        tell(lost=[lost.outcome, lost.reason, len(lost.overridden)], home_lost=home_lost, lie=lie,
             found=found, on=[on.outcome, on.overridden], home_on=home_on,
             restored=[name for name in names if id(vars(b)[name]) != stock[name]],
             helpers=home("_broadcast_state_dict"),
             off=[home("set_model_state_dict"), home("_broadcast_state_dict", A)])
        """
    ).facts
    assert facts["home_lost"] == "torch"
    assert facts["found"] == []
    assert facts["on"] == [APPLIED, []]
    assert facts["home_on"] == [HOME, HOME]
    assert facts["restored"] == []
    assert facts["helpers"] == "torch"
    assert facts["off"] == ["torch", "torch"]
    if AFFECTED:
        outcome, reason, lost = facts["lost"]
        assert outcome == "pending"
        assert "was reloaded since, with torch's own functions: call torch_dcp_backport.activate()" in reason
        assert lost > 20
        assert not facts["lie"]


OURS = ("torch_dcp_backport", "torch_dcp_backport.activation", "torch_dcp_backport.activation.importer")


WHEN = {
    "pending": "",
    "applied": "import torch.distributed.checkpoint.state_dict",
    "deactivated": "import torch.distributed.checkpoint.state_dict; torch_dcp_backport.deactivate()",
}


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("name", OURS)
def test_ours_is_executed_again(fresh: Fresh, name: str, when: str) -> None:
    facts = fresh(
        f"""
        import importlib, torch_dcp_backport
        {WHEN[when]}
        before = torch_dcp_backport.status()
        def again():
            if {name!r} in sys.modules:
                importlib.reload(sys.modules[{name!r}])
        found = caught(again)
        status = sys.modules["torch_dcp_backport.activation"].current()
        same = status == before
        found += caught(sys.modules["torch_dcp_backport.activation"].activate)
        import torch.distributed.checkpoint.state_dict as b
        on = sys.modules["torch_dcp_backport.activation"].current().outcome
        at = home("set_model_state_dict")
        sys.modules["torch_dcp_backport.activation"].deactivate()
        tell(found=found, outcome=status.outcome, same=same, on=on, at=at, off=home("set_model_state_dict"))
        """
    ).facts
    assert facts["found"] == []
    # The package's own last line activates.
    assert facts["same"] or (when, name) == ("deactivated", "torch_dcp_backport")
    assert (facts["on"], facts["at"], facts["off"]) == (APPLIED, HOME, "torch")


COPY = """
import torch_dcp_backport
first = torch_dcp_backport
BETWEEN
for name in [name for name in sys.modules if name.partition(".")[0] == "torch_dcp_backport"]:
    del sys.modules[name]
def again():
    import torch_dcp_backport
found = caught(again)
import torch_dcp_backport
import torch.distributed.checkpoint.state_dict as b
status, on = torch_dcp_backport.status(), home("set_model_state_dict")
fields = [name for name in vars(b.StateDictOptions) if name == "dsd_fqn_modifiers"]
torch_dcp_backport.deactivate()
off = [home("set_model_state_dict"), home("_copy_state_dict", A), torch_dcp_backport.status().outcome]
tell(copy=first is not torch_dcp_backport, found=found, outcome=status.outcome, on=on, off=off,
     finders=sum("torch_dcp_backport" in type(finder).__module__ for finder in sys.meta_path),
     again=[torch_dcp_backport.activate().outcome, home("set_model_state_dict")])
"""


@pytest.mark.parametrize("switch", ["auto", "strict"])
@pytest.mark.parametrize(
    "between", ["", "import torch.distributed.checkpoint", "import torch.distributed.checkpoint.state_dict"]
)
def test_a_second_copy_of_ours_is_no_conflict(fresh: Fresh, between: str, switch: str) -> None:
    facts = fresh(COPY.replace("BETWEEN", between), switch=switch).facts
    assert facts["copy"]
    assert facts["found"] == []
    assert (facts["outcome"], facts["on"]) == (APPLIED, HOME)
    assert facts["off"] == ["torch", "torch", "disabled" if AFFECTED else "not-needed"]
    assert facts["again"] == [APPLIED, HOME]
    assert facts["finders"] == AFFECTED


# As typeguard and jaxtyping do: first in the list, asking the finder of files alone, its own loader.
OTHER_HOOK = """
import importlib.machinery
class Loader(importlib.machinery.SourceFileLoader):
    pass
class Other:
    def find_spec(self, name, path=None, target=None):
        if not name.startswith(prefix):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec
def other_hook(which):
    global prefix
    prefix = which
    sys.meta_path.insert(0, Other())
"""


@pytest.mark.parametrize("prefix", ["torch", "torch.distributed.checkpoint.state_dict"])
@pytest.mark.parametrize("switch", ["auto", "strict"])
def test_another_import_hook_serves_torchs_module(fresh: Fresh, prefix: str, switch: str) -> None:
    facts = fresh(
        OTHER_HOOK
        + f"""
import torch_dcp_backport
other_hook({prefix!r})
import torch.distributed.checkpoint.state_dict as torchs
loader = type(torchs.__loader__).__name__
status, before = torch_dcp_backport.status(), home("set_model_state_dict")
torch_dcp_backport.activate()
tell(outcome=status.outcome, reason=status.reason, before=before, loader=loader,
     after=[torch_dcp_backport.status().outcome, home("set_model_state_dict")])
""",
        switch=switch,
    ).facts
    assert (facts["after"], facts["loader"]) == ([APPLIED, HOME], "Loader")
    if AFFECTED and prefix == "torch":  # all of them: told, and to be made good
        assert (facts["outcome"], facts["before"]) == ("pending", "torch")
        assert "was loaded unnoticed: call torch_dcp_backport.activate()" in facts["reason"]
    else:
        assert (facts["outcome"], facts["before"]) == (APPLIED, HOME)


@pytest.mark.skipif(not AFFECTED, reason="nothing is replaced")
@pytest.mark.parametrize("switch", ["auto", "strict"])
def test_what_was_bound_unnoticed_is_told_by_activate(fresh: Fresh, switch: str) -> None:
    ended = fresh(
        OTHER_HOOK
        + """
import torch_dcp_backport
other_hook("torch")
from torch.distributed.checkpoint.state_dict import set_model_state_dict
torch_dcp_backport.activate()
tell(home=origin(set_model_state_dict))
""",
        switch=switch,
    )
    assert "__main__.set_model_state_dict" in ended.err
    if switch == "strict":
        assert (ended.code, "RuntimeError" in ended.err) == (1, True)
    else:
        assert ended.facts == {"home": "torch_dcp_backport"}
