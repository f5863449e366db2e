"""`_patch_model_state_dict` and `_patch_optimizer_state_dict`, torch's and ours, in every order."""

from __future__ import annotations

import pytest
from interpreters import Fresh

MODEL = """
import gc, copy, weakref
import torch, torch.distributed.checkpoint.state_dict as b
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
optims = [torch.optim.Adam(part.parameters(), lr=0.5) for part in model]
for p in model.parameters():
    p.grad = torch.ones_like(p)
for optim in optims:
    optim.step()
    optim.zero_grad()
def patch(by):
    by._patch_model_state_dict(model)
    by._patch_optimizer_state_dict(model, optimizers=optims)
def flat(tree, path=""):
    if isinstance(tree, dict):
        return {k: v for key in tree for k, v in flat(tree[key], f"{path}/{key}").items()}
    if isinstance(tree, list):
        return {k: v for i, one in enumerate(tree) for k, v in flat(one, f"{path}/{i}").items()}
    return {path: tree.tolist() if torch.is_tensor(tree) else tree}
def same(x, y):
    return flat(x) == flat(y)
def check():
    # What the methods give and take is what the functions give and take.
    state, osd = copy.deepcopy(model.state_dict()), copy.deepcopy(optims[1].state_dict())
    got = [same(state, b.get_model_state_dict(model)), same(osd, b.get_optimizer_state_dict(model, optims)),
           len(state) == 7, set(osd["state"]) == {n for n, _ in model.named_parameters()}]
    other = {key: value + 1 for key, value in state.items()}
    model.load_state_dict(other)
    got.append(same(b.get_model_state_dict(model), other))
    osd["param_groups"][0]["lr"] = 0.125
    optims[0].load_state_dict(copy.deepcopy(osd))
    got.append(optims[0].param_groups[0]["lr"] == 0.125)
    got.append(same(b.get_optimizer_state_dict(model, optims), osd))
    return all(got) or got
"""

ORDERS = {
    "ours": "import torch_dcp_backport; patch(b); CHECK",
    "ours, of the library alone": "import torch_dcp_backport.state_dict as o; patch(o); CHECK",
    "stock's, then activation, then ours": """
patch(b); CHECK
import torch_dcp_backport; CHECK
patch(b); CHECK
""",
    "ours, then torch's own again, then ours": """
import torch_dcp_backport
patch(b); CHECK
torch_dcp_backport.deactivate(); CHECK
patch(b); CHECK
torch_dcp_backport.activate(); CHECK
patch(b); CHECK
""",
}


@pytest.mark.parametrize("order", ORDERS)
def test_methods_are_the_functions(fresh: Fresh, order: str) -> None:
    steps = ORDERS[order].replace("CHECK", "seen.append(check())")
    facts = fresh(f"{MODEL}\nseen = []\n{steps}\ntell(seen=seen)").facts
    assert facts["seen"] == [True] * ORDERS[order].count("CHECK")


def test_a_patched_model_is_freed_and_can_be_copied(fresh: Fresh) -> None:
    facts = fresh(
        MODEL
        + """
import torch_dcp_backport.state_dict as o
patch(o)
twin = copy.deepcopy(model)
with torch.no_grad():
    twin[0].weight.fill_(7)
own = [twin.state_dict()["0.weight"][0, 0].item() == 7, model.state_dict()["0.weight"][0, 0].item() != 7]
size = len(b._patched_state_dict)
patch(o)
grown = len(b._patched_state_dict) - size
refs = [weakref.ref(model), weakref.ref(optims[0]), weakref.ref(twin)]
del model, optims, optim, twin, p
gc.collect()
tell(own=own, grown=grown, alive=[ref() is not None for ref in refs])
"""
    ).facts
    assert facts == {"own": [True, True], "grown": 0, "alive": [False] * 3}
