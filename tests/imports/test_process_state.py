"""What an import, its undoing and the switch leave behind in a process: nothing, or what is listed here."""

from __future__ import annotations

import pytest
from interpreters import AFFECTED, Fresh

STATE = """
import gc, os, signal, threading
def resident():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
def handlers():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1)
    return [signal.getsignal(number) for number in numbers]
def state():
    return dict(
        meta_path=list(sys.meta_path), path_hooks=list(sys.path_hooks), path=list(sys.path),
        filters=list(warnings.filters), showwarning=warnings.showwarning,
        gc=[gc.isenabled(), gc.get_threshold(), list(gc.callbacks), gc.get_freeze_count(), gc.get_debug()],
        hooks=[sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook, sys.gettrace(),
               sys.getprofile(), sys.breakpointhook], handlers=handlers(),
        threads=threading.active_count(), descriptors=sorted(os.listdir("/proc/self/fd")),
        environ=dict(os.environ), folder=os.getcwd(), recursion=sys.getrecursionlimit(),
    )
def globals_of_torch():
    return {n: dict(vars(m)) for n, m in list(sys.modules.items()) if n.partition(".")[0] == "torch"}
def changed(before, after):
    return sorted(key for key in before if before[key] != after[key])
def replaced(before, after):
    # That another of torch's modules was imported is no change.
    found = []
    for name in before:
        a, b = before[name], after.get(name, {})
        for key in a.keys() | b.keys():
            imported = key not in a and isinstance(b[key], type(sys))
            if a.get(key, a) is not b.get(key, b) and not imported:
                found.append(f"{name}.{key}")
    return sorted(found)
"""

TORCH_FIRST = """
import torch, torch.distributed.checkpoint.state_dict
import torch.distributed.checkpoint.state_dict_saver, torch.distributed.fsdp
"""
END = """
new = sorted(sys.modules.keys() - modules)
tell(changed=changed(before, state()), replaced=replaced(torchs, globals_of_torch()),
     grown=resident() - memory,
     new=[n for n in new if n.partition(".")[0] != "torch_dcp_backport"],
     ours=any(n.startswith("torch_dcp_backport.state_dict") for n in new),
     outcome=torch_dcp_backport.status().outcome,
     meta_path=[type(one).__name__ for one in sys.meta_path if one not in before["meta_path"]])
"""
BEGIN = "modules, torchs, before, memory = set(sys.modules), globals_of_torch(), state(), resident()\n"

MIB = 2**20


@pytest.mark.parametrize("switch", ["off", "auto"])
def test_applied_and_undone_torch_is_as_it_was(fresh: Fresh, switch: str) -> None:
    facts = fresh(
        STATE
        + TORCH_FIRST
        + BEGIN
        + """
import torch_dcp_backport
applied = torch_dcp_backport.status().outcome
assert changed(before, state()) in ([], ["meta_path"]), changed(before, state())
torch_dcp_backport.deactivate()
"""
        + END,
        switch=switch,
    ).facts
    assert facts["changed"] in ([], ["meta_path"])
    # It is not taken out under other threads.
    assert facts["meta_path"] in ([], ["Hooks", "ImportHookFinder"])
    # torch.compile goes on to pass our folder by: somebody may still hold a function of ours.
    rules = "torch._dynamo.trace_rules.SKIP_DIRS_RE"
    assert facts["replaced"] in ([], [rules] * (AFFECTED and switch == "auto"))
    assert facts["outcome"] == "disabled" if switch == "off" or AFFECTED else "not-needed"
    assert facts["grown"] < 16 * MIB
    if switch == "off" or not AFFECTED:
        assert facts["meta_path"] == []
        assert not facts["ours"]
        assert facts["grown"] < 8 * MIB
        heavy = [name for name in facts["new"] if name.partition(".")[0] not in ("ast", "_ast", "packaging")]
        assert heavy == []


@pytest.mark.parametrize("switch", ["off", "auto"])
def test_undone_before_torch_was_there(fresh: Fresh, switch: str) -> None:
    """Torch, imported afterwards, is what it is in a process that never heard of us."""
    code = """
import torch, torch.distributed.checkpoint.state_dict as b, torch.distributed._state_dict_utils as a
tell(names=sorted(vars(b)), helpers=sorted(vars(a)), changed=changed(before, state()),
     homes=sorted({str(getattr(v, "__module__", "")) for m in (a, b) for v in vars(m).values()}),
     loaders=[type(m.__spec__.loader).__name__ for m in (a, b)],
     meta_path=[type(one).__name__ for one in sys.meta_path if one not in before["meta_path"]])
"""
    undone = fresh(
        STATE + BEGIN + "import torch_dcp_backport\ntorch_dcp_backport.deactivate()\n" + code, switch=switch
    ).facts
    never = fresh(STATE + BEGIN + code).facts
    hooked = AFFECTED and switch == "auto"
    assert undone.pop("meta_path") == never.pop("meta_path") + ["Hooks", "ImportHookFinder"] * hooked
    assert set(undone.pop("changed")) - {"meta_path"} == set(never.pop("changed")) - {"meta_path"}
    assert undone == never


def test_a_process_that_uses_it_keeps_its_settings(fresh: Fresh) -> None:
    """A load and a save, patched: gc, warnings and hooks are as before, and memory is not kept."""
    facts = fresh(
        STATE
        + TORCH_FIRST
        + """
import torch_dcp_backport
import torch.distributed.checkpoint.state_dict as api
def cycle():
    model = torch.nn.Linear(1024, 1024)
    options = api.StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = api.get_model_state_dict(model, options=options)
    api.set_model_state_dict(model, state, options=api.StateDictOptions(full_state_dict=True))
for _ in range(3):
    cycle()
"""
        + BEGIN
        + "for _ in range(20):\n    cycle()\n"
        + END
    ).facts
    assert facts["changed"] == []
    assert facts["replaced"] == []
    assert facts["new"] == []
    if AFFECTED:  # else it is torch's own that ran
        # 20 models have 80 MiB; allocators keep some for the next.
        assert facts["grown"] < 32 * MIB
