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


@pytest.mark.parametrize("when", ["pending", "applied", "deactivated"])
@pytest.mark.parametrize("name", OURS)
def test_ours_is_executed_again(fresh: Fresh, name: str, when: str) -> None:
    facts = fresh(
        f"""
        import importlib, torch_dcp_backport
        if {when!r} != "pending":
            import torch.distributed.checkpoint.state_dict as b
        if {when!r} == "deactivated":
            torch_dcp_backport.deactivate()
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
