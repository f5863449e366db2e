"""TORCH_DCP_BACKPORT=off|auto|strict, and what stands in the way: early bindings, other patches, no torch."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreters import AFFECTED, ROOT, Fresh, own

B_NAME = "torch.distributed.checkpoint.state_dict"


def test_unknown_value_names_the_valid_ones(fresh: Fresh) -> None:
    ended = fresh("import torch_dcp_backport", switch="no")
    assert ended.code == 1
    assert "ValueError: TORCH_DCP_BACKPORT='no' is not one of off, auto, strict: auto" in ended.err


def test_off_leaves_torch_alone_and_ours_usable(fresh: Fresh) -> None:
    """The route without patching, on every torch."""
    facts = fresh(
        """
        from torch_dcp_backport.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
        import torch, torch_dcp_backport
        import torch.distributed.checkpoint.state_dict as b
        source, model = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        set_model_state_dict(model, get_model_state_dict(source), options=StateDictOptions(strict=True))
        tell(outcome=torch_dcp_backport.status().outcome,
             stock=home("set_model_state_dict"),
             differs=set_model_state_dict is not b.set_model_state_dict,
             hook=any(type(one).__module__.startswith("torch_dcp_backport") for one in sys.meta_path),
             equal=torch.equal(source.weight, model.weight),
             options=StateDictOptions.__module__.partition(".")[0])
        """,
        switch="OFF",
    ).facts
    assert facts == {
        "outcome": "disabled", "stock": "torch", "differs": True, "hook": False, "equal": True,
        "options": "torch_dcp_backport",
    }  # fmt: skip


CLIENT = """
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict as load
import torch.distributed.checkpoint.state_dict as through_the_module
"""
EARLY = """
import client
import torch.distributed.checkpoint.state_dict as b
stock = b.set_model_state_dict
"""


def test_early_bindings_are_rebound_and_told_once(fresh: Fresh, tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(CLIENT)
    facts = fresh(
        EARLY
        + """
def activate():
    import torch_dcp_backport
    torch_dcp_backport.activate()
found = caught(activate)
import torch_dcp_backport
late = torch_dcp_backport.status().late_bindings
ours = [client.load is stock is b.set_model_state_dict, client.StateDictOptions is b.StateDictOptions]
torch_dcp_backport.deactivate()
back = [client.load is stock is b.set_model_state_dict, home("set_model_state_dict")]
tell(found=found, late=sorted(late), ours=ours, back=back)
"""
    ).facts
    # `stock` of the main script is a module-level name too.
    assert facts["ours"] == [True, True]
    assert facts["back"] == [True, "torch"]
    if not AFFECTED:
        assert facts["found"] == facts["late"] == []
        return
    ((category, text, _),) = facts["found"]
    assert category == "LateImportWarning"
    assert ": __main__.stock, client.load." in text
    assert own(facts["late"]) == ["__main__.stock", "client.load"]


def test_strict_raises_on_early_bindings_and_changes_nothing(fresh: Fresh, tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(CLIENT)
    facts = fresh(
        EARLY
        + """
before = dict(vars(b))
try:
    import torch_dcp_backport
    error = None
except RuntimeError as e:
    error = str(e)
tell(error=error, same=before == dict(vars(b)), load=client.load is stock is b.set_model_state_dict)
""",
        switch="strict",
    ).facts
    assert (facts["same"], facts["load"]) == (True, True)
    if AFFECTED:
        assert "client.load" in facts["error"]
    else:
        assert facts["error"] is None


def test_strict_applies_where_nothing_is_in_the_way(fresh: Fresh) -> None:
    facts = fresh(
        "import torch_dcp_backport, torch.distributed.checkpoint.state_dict\n"
        "tell(outcome=torch_dcp_backport.status().outcome, switch=torch_dcp_backport.status().switch)",
        switch="strict",
    ).facts
    assert facts == {"outcome": "applied" if AFFECTED else "not-needed", "switch": "strict"}


SHIM = """
import torch.distributed.checkpoint.state_dict as b
real = b._load_model_state_dict
def shim(model, state_dict, info):
    return real(model, state_dict, info)
shim.__module__, b._load_model_state_dict = "other.shim", shim
shim.__globals__["__name__"] = "other.shim"
before = dict(vars(b))
def activate():
    global torch_dcp_backport
    import torch_dcp_backport
"""


def test_another_shim_is_left_alone(fresh: Fresh) -> None:
    facts = fresh(
        SHIM
        + """
found = caught(activate)
tell(found=found, same=before == dict(vars(b)), outcome=torch_dcp_backport.status().outcome,
     reason=torch_dcp_backport.status().reason)
"""
    ).facts
    assert facts["same"]
    assert facts["outcome"] == ("conflict" if AFFECTED else "not-needed")
    assert len(facts["found"]) == AFFECTED
    if AFFECTED:
        category, text, _ = facts["found"][0]
        assert category == "BackportWarning"
        assert "_load_model_state_dict was already replaced by other.shim" in text
        assert facts["reason"] in text


def test_another_shim_raises_when_strict(fresh: Fresh) -> None:
    ended = fresh(SHIM + "activate()\ntell(done=True)", switch="strict")
    if AFFECTED:
        assert ended.code == 1
        assert "already replaced by other.shim" in ended.err.splitlines()[-1]
    else:
        assert ended.facts == {"done": True}


WRAPPERS = {
    "contextlib": """
import contextlib
@contextlib.contextmanager
def timed():
    yield
wrap = timed()""",
    "record_function": "import torch.profiler; wrap = torch.profiler.record_function('load')",
    "torch.no_grad": "import torch; wrap = torch.no_grad()",
}


@pytest.mark.parametrize("name", ["set_model_state_dict", "_load_model_state_dict"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("switch", ["auto", "strict"])
def test_another_tools_wrapper_is_left_alone(fresh: Fresh, wrapper: str, name: str, switch: str) -> None:
    """However it was made: torch makes some of its own with the same means."""
    ended = fresh(
        f"{WRAPPERS[wrapper]}\nname = {name!r}\n"
        + """
import torch.distributed.checkpoint.state_dict as b
setattr(b, name, wrap(getattr(b, name)))
wrapped = getattr(b, name)
before = dict(vars(b))
error = None
def activate():
    global error
    try:
        import torch_dcp_backport
    except RuntimeError as raised:
        error = str(raised)
found = caught(activate)
tell(found=found, same=before == dict(vars(b)), kept=getattr(b, name) is wrapped, error=error)
""",
        switch=switch,
    )
    facts = ended.facts
    assert facts["kept"]
    # A function that torch itself does not call is left out alone; strict mode raises, and writes nothing.
    is_left_out = AFFECTED and switch == "auto" and not name.startswith("_")
    assert facts["same"] != is_left_out
    assert len(facts["found"]) == (AFFECTED and switch == "auto")
    text = str(facts["error"] or facts["found"])
    if is_left_out:
        assert (
            f"left out, as other code had replaced it: torch.distributed.checkpoint.state_dict.{name} ("
            in text
        )
    elif AFFECTED:
        assert f"{name} was already replaced by" in text


@pytest.mark.parametrize("first", ["import torch_dcp_backport", "import torch.distributed.checkpoint"])
def test_a_first_import_that_raised_when_strict_raises_again(
    fresh: Fresh, tmp_path: Path, first: str
) -> None:
    """Ours, and torch's after ours; a program that catches it does not go on with torch's own unawares."""
    (tmp_path / "client.py").write_text(CLIENT)
    late = "import client, importlib\n"
    broken = """
import importlib, torch_dcp_backport
import torch_dcp_backport.activation.replace as replace
def fails(*args):
    raise replace.Refused("unsupported", "unknown layout")
replace.plan = fails
"""
    name = "torch_dcp_backport" if "backport" in first else B_NAME
    facts = fresh(
        (late if "backport" in first else broken)
        + f"""
errors = []
for _ in range(3):
    try:
        importlib.import_module({name!r})
    except RuntimeError as error:
        errors.append(str(error))
tell(errors=errors)
""",
        switch="strict",
    ).facts
    assert len(facts["errors"]) == 3 * AFFECTED
    assert len(set(facts["errors"])) == AFFECTED


# --- torches that cannot be helped: folders with only a version.py, which must never be executed

STOCK_HELPER = "def _broadcast_state_dict(full, local, device, pg=None, strict=False): ...\n"
FIXED_HELPER = (
    "def _broadcast_state_dict(full, local, device, pg=None, strict=False, cpu_offload=False): ...\n"
)
FAKES = {
    "2.3.1+cu121": (None, "unsupported"),
    "1.13.1": (None, "unsupported"),
    "parrot": (None, "unsupported"),
    "2.7.0a0+deadbeef.nv25.02": (None, "unsupported"),
    "2.7.0a0+cafe.nv25.02": (STOCK_HELPER, "pending"),
    "2.7.0a0+cafe.nv25.03": (FIXED_HELPER, "not-needed"),
    "2.6.0": (None, "pending"),
    "2.6.0+cu124": (STOCK_HELPER, "pending"),
    "2.6.0+fb": (FIXED_HELPER, "not-needed"),
    "2.9.1": (None, "not-needed"),
    None: (None, "unsupported"),
}
LOOK = """
def activate():
    global torch_dcp_backport
    import torch_dcp_backport
    torch_dcp_backport.activate()
found = caught(activate)
status = torch_dcp_backport.status()
finders = sum(type(one).__module__.startswith("torch_dcp_backport") for one in sys.meta_path)
tell(found=found, outcome=status.outcome, reason=status.reason, version=status.torch_version,
     text=str(status), torch="torch" in sys.modules, finders=finders)
"""


def fake_torch(folder: Path, version: str | None, helper: str | None) -> str:
    (folder / "torch" / "distributed").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text("raise AssertionError('torch was imported')\n")
    if version is not None:
        (folder / "torch" / "version.py").write_text(f"__version__ = '{version}'\n")
    if helper is not None:
        (folder / "torch" / "distributed" / "_state_dict_utils.py").write_text(helper)
    return str(folder)


@pytest.mark.parametrize("version", FAKES)
def test_a_torch_that_cannot_be_fixed_is_told_once(fresh: Fresh, tmp_path: Path, version: str | None) -> None:
    helper, outcome = FAKES[version]
    path = fake_torch(tmp_path / "site", version, helper)
    facts = fresh(LOOK, path=path).facts
    assert (facts["outcome"], facts["version"], facts["torch"]) == (outcome, version, False)
    assert facts["finders"] == (outcome == "pending")
    if outcome != "unsupported":
        assert facts["found"] == []
        return
    ((category, text, filename),) = facts["found"]
    assert category == "BackportWarning"
    assert facts["reason"] in text
    assert facts["reason"] in " ".join(facts["text"].split())
    assert filename == "<string>"  # the line that imported us, not one of ours
    ended = fresh("import torch_dcp_backport", path=path, switch="strict")
    assert ended.code == 1
    assert ended.err.splitlines()[-1].startswith("RuntimeError: torch_dcp_backport: ")
    assert facts["reason"] in ended.err


def test_no_torch_at_all(fresh: Fresh) -> None:
    """-S: without its site-packages an interpreter has neither torch nor anything that we depend on."""
    facts = fresh(LOOK, flags=("-S",)).facts
    assert (facts["outcome"], facts["version"]) == ("unsupported", None)
    ((category, text, _),) = facts["found"]
    assert category == "BackportWarning"
    assert "no torch was found" in text
    strict = fresh("import torch_dcp_backport", flags=("-S",), switch="strict")
    assert strict.code == 1
    assert "RuntimeError: torch_dcp_backport: no torch was found" in strict.err
    off = fresh("import torch_dcp_backport\ntell(ok=1)", flags=("-S",), switch="off")
    assert off.facts == {"ok": 1}
    assert off.err == ""


def test_the_checkout_is_what_is_tested(fresh: Fresh) -> None:
    assert (
        fresh("import torch_dcp_backport\ntell(f=torch_dcp_backport.__file__)")
        .facts["f"]
        .startswith(str(ROOT))
    )
