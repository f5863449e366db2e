"""The gate: one row per kind of torch, switch and environment."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dcp_backport.activation import gate
from torch_dcp_backport.activation.gate import AFFECTED, FIXED, UNKNOWN, Facts, decide

# version, what a probe of the files finds, outcome. A "-" probe must not be asked for.
ROWS = [
    ("2.4.0", AFFECTED, "pending"),
    ("2.4.1+cu121", AFFECTED, "pending"),
    ("2.5.1", AFFECTED, "pending"),
    ("2.5.1.post1", AFFECTED, "pending"),
    ("2.5.1.post2", AFFECTED, "pending"),
    ("2.6.0", AFFECTED, "pending"),
    ("2.6.0+cu124", AFFECTED, "pending"),
    ("2.6.0+rocm6.2.4.gitd2f5c3d8", AFFECTED, "pending"),
    ("2.6.0.post1", AFFECTED, "pending"),
    ("2.6.0+cu126.post1", AFFECTED, "pending"),
    ("2.6.1", AFFECTED, "pending"),
    ("2.6", AFFECTED, "pending"),
    ("2.6.0+gitunknown", AFFECTED, "pending"),
    ("2.6.0+our.cluster.7", AFFECTED, "pending"),
    ("2.4.1+git38b96d3", AFFECTED, "pending"),
    # Files that cannot be read decide nothing against a plain version.
    ("2.6.0+cu124", UNKNOWN, "pending"),
    ("2.6.0", FIXED, "not-needed"),
    ("2.6.0+fb", FIXED, "not-needed"),
    ("2.4.1+our.cluster.7", FIXED, "not-needed"),
    ("2.7.0", "-", "not-needed"),
    ("2.7", "-", "not-needed"),
    ("2.7.0+cu128", "-", "not-needed"),
    ("2.7.1.post1", "-", "not-needed"),
    ("2.7.0+gitunknown", "-", "not-needed"),
    ("2.7.1a0", FIXED, "not-needed"),
    ("2.8.0.dev20250420", "-", "not-needed"),
    ("2.8.0a0+5228986c39.nv25.05", "-", "not-needed"),
    ("2.10.0", "-", "not-needed"),
    ("2.13.0+cpu", "-", "not-needed"),
    ("3.0.0", "-", "not-needed"),
    *(
        (version, probe, outcome)
        # The number says nothing: the same answer of the probe decides for each of them.
        for version in (
            "2.7.0a0+git.nv25.02",
            "2.7.0a0+6c54963f75.nv25.02",
            "2.7.0a0+7c8ec84dab.nv25.03",
            "2.7.0a0+gitdeadbee",
            "2.7.0.dev20250101+cu124",
            "2.7.0.dev20250210+cu126",
            "2.7.0rc1",
            "2.6.0a0+df5bbc09d1.nv24.11",
            "2.6.0a0+ecf3bae40a.nv25.01",
            "2.6.0a0+gitdeadbee",
            "2.6.0.dev20241112",
            "2.5.0a0+872d972e41.nv24.08",
            "2.4.0a0+f70bd71a48.nv24.06",
            "2.4.0rc9",
        )
        for probe, outcome in ((AFFECTED, "pending"), (FIXED, "not-needed"), (UNKNOWN, "unsupported"))
    ),
    ("2.3.1", "-", "unsupported"),
    ("2.3.0a0+40ec155e58.nv24.03", "-", "unsupported"),
    ("1.13.1+cu117", "-", "unsupported"),
    ("parrot", "-", "unsupported"),
    ("2.6.0-fb", "-", "unsupported"),
    ("2.x", "-", "unsupported"),
    ("2..6", "-", "unsupported"),
    (".2.6", "-", "unsupported"),
    ("", "-", "unsupported"),
]


def _facts(switch: str, version: str | None, probe: str = "-", folder: str | None = "/site/torch") -> Facts:
    def ask() -> str:
        assert probe != "-", f"torch {version} needs no look at its files"
        return probe

    return Facts(switch, version, folder, ask)


@pytest.mark.parametrize("switch", ["auto", "strict"])
@pytest.mark.parametrize(("version", "probe", "outcome"), ROWS)
def test_each_kind_of_torch_gets_its_outcome(version: str, probe: str, outcome: str, switch: str) -> None:
    decision = decide(_facts(switch, version, probe))
    assert decision.outcome == outcome
    assert decision.torch_version == version
    assert decision.switch == switch
    assert repr(version)[1:-1] in decision.reason
    if outcome == "pending":
        assert decision.preview is any(mark in version for mark in ("a0", "dev", "rc"))
    if outcome == "unsupported":
        assert "left as it is" in decision.reason
        assert "Install torch >= 2.4" in decision.reason


def test_release_is_what_the_table_is_asked_with() -> None:
    assert decide(_facts("auto", "2.5.1+cu124", AFFECTED)).release == (2, 5)
    assert decide(_facts("auto", "2.10.1")).release == (2, 10)


@pytest.mark.parametrize("version", [None, "2.6.0", "2.3.0", "parrot", "2.13.0"])
def test_off_wins_over_every_torch(version: str | None) -> None:
    decision = decide(_facts("off", version))
    assert (decision.outcome, decision.reason) == ("disabled", "TORCH_DCP_BACKPORT=off")


def test_no_torch_and_unreadable_torch_are_told_apart() -> None:
    absent = decide(_facts("auto", None, folder=None))
    unreadable = decide(_facts("auto", None, folder="/site/torch"))
    assert (absent.outcome, unreadable.outcome) == ("unsupported", "unsupported")
    assert "no torch was found" in absent.reason
    assert "/site/torch" in unreadable.reason


@pytest.mark.parametrize(
    ("value", "switch"),
    [
        (None, "auto"),
        ("", "auto"),
        (" ", "auto"),
        ("auto", "auto"),
        ("AUTO", "auto"),
        ("Off", "off"),
        ("strict ", "strict"),
    ],
)
def test_switch_values(value: str | None, switch: str) -> None:
    assert gate.read_switch({} if value is None else {"TORCH_DCP_BACKPORT": value}) == switch


@pytest.mark.parametrize("value", ["0", "no", "on", "true", "of", "auto,strict"])
def test_unknown_switch_value_names_the_valid_ones(value: str) -> None:
    with pytest.raises(ValueError, match="off, auto, strict") as caught:
        gate.read_switch({"TORCH_DCP_BACKPORT": value})
    assert repr(value) in str(caught.value)


SIGNATURES = [
    ("def _broadcast_state_dict(full, local, device, pg=None, strict=False): ...\n", AFFECTED),
    (
        "def _broadcast_state_dict(full, local, device, pg=None, strict=False, cpu_offload=False): ...\n",
        FIXED,
    ),
    (
        "def _broadcast_state_dict(full, local, *, cpu_offload: bool = False) -> None:\n    return None\n",
        FIXED,
    ),
    ("cpu_offload = 1\ndef _broadcast_state_dict(full):\n    cpu_offload = full\n", AFFECTED),
    ("def other(cpu_offload): ...\n", UNKNOWN),
    ("class A:\n    def _broadcast_state_dict(self, cpu_offload): ...\n", UNKNOWN),
    ("def _broadcast_state_dict(\n", UNKNOWN),
    ("", UNKNOWN),
    (None, UNKNOWN),
]


@pytest.fixture
def torch_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is found as torch and must never be executed."""
    folder = tmp_path / "torch"
    (folder / "distributed").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('torch was imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return folder


@pytest.mark.parametrize(("source", "found"), SIGNATURES)
def test_probe_reads_the_code_without_running_it(torch_on_disk: Path, source: str | None, found: str) -> None:
    if source is not None:
        (torch_on_disk / "distributed" / "_state_dict_utils.py").write_text("1 / 0\n" * bool(source) + source)
    assert gate.read_facts({}).probe() == found
    assert "torch" not in sys.modules


VERSION_FILES = [
    ("__all__ = ['__version__']\n__version__ = '2.6.0+cu124'\ncuda = '12.4'\n", "2.6.0+cu124"),
    ('__version__ = "2.5.1"  # made by setup.py\n', "2.5.1"),
    ("__version__: str = '2.4.0'\n", "2.4.0"),
    ("__version__ = compute()\n", None),
    ("__version__ = ''\n", None),
    ("debug = False\n", None),
    (None, None),
]


@pytest.mark.parametrize(("text", "version"), VERSION_FILES)
def test_version_is_read_from_disk(torch_on_disk: Path, text: str | None, version: str | None) -> None:
    if text is not None:
        (torch_on_disk / "version.py").write_text(text)
    facts = gate.read_facts({})
    assert (facts.version, facts.folder) == (version, str(torch_on_disk))
    assert "torch" not in sys.modules


def test_what_is_loaded_wins_over_what_lies_on_disk(
    torch_on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (torch_on_disk / "version.py").write_text("__version__ = '2.5.0'\n")
    loaded = ModuleType("torch")
    loaded.__path__ = [str(torch_on_disk)]
    monkeypatch.setitem(sys.modules, "torch", loaded)
    assert gate.read_facts({}).version == "2.5.0"  # half initialised: it has no __version__ yet
    loaded.__version__ = type("TorchVersion", (str,), {})("2.6.0")  # type: ignore[attr-defined]
    version = gate.read_facts({}).version
    assert version == "2.6.0"
    assert type(version) is str


def test_a_stub_in_the_place_of_torch_is_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for stub in (None, ModuleType("torch"), object()):
        monkeypatch.setitem(sys.modules, "torch", stub)  # type: ignore[arg-type]
        facts = gate.read_facts({})
        assert (facts.version, facts.folder) == (None, None)


def test_off_does_not_even_look_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_torch_folder", lambda: pytest.fail("looked for torch"))
    assert decide(gate.read_facts({"TORCH_DCP_BACKPORT": "off"})).outcome == "disabled"


def test_a_finder_that_forbids_torch_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forbids:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "torch":
                raise ImportError("no torch in this process")

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Forbids(), *sys.meta_path])
    assert gate.read_facts({}).folder is None


@given(
    st.integers(0, 4),
    st.integers(0, 30),
    st.integers(0, 9),
    st.sampled_from(("", "a0", "rc1", ".dev20250101")),
    st.sampled_from(("", ".post1")),
    st.sampled_from(("", "+cu124", "+git.nv25.02", "+our.cluster.7")),
    st.sampled_from((FIXED, AFFECTED, UNKNOWN)),
)
def test_any_version_is_decided_by_its_number_or_else_by_its_code(
    major, minor, micro, pre, post, local, found
):
    asked = []

    def probe() -> str:
        asked.append(found)
        return found

    version = f"{major}.{minor}.{micro}{pre}{post if not pre.startswith('.dev') else ''}{local}"
    outcome = decide(Facts("auto", version, "/torch", probe)).outcome
    number = (major, minor)
    if number < (2, 4):
        assert (outcome, asked) == ("unsupported", [])
    elif number > (2, 7) or (number == (2, 7) and not pre):
        assert (outcome, asked) == ("not-needed", [])
    elif not pre:
        assert (outcome, asked) == ("not-needed" if found == FIXED else "pending", [found])
    else:
        expected = {FIXED: "not-needed", AFFECTED: "pending", UNKNOWN: "unsupported"}[found]
        assert (outcome, asked) == (expected, [found])


@given(st.text(max_size=30))
def test_any_text_for_a_version_is_decided(text):
    facts = Facts("auto", text, "/torch", lambda: UNKNOWN)
    assert decide(facts).outcome in ("unsupported", "not-needed", "pending")


@given(st.text(max_size=20).filter(lambda text: "\0" not in text))
def test_any_text_for_the_switch_is_one_of_three_or_an_error_that_names_them(text):
    meant = text.strip().lower() or "auto"
    if meant in gate.SWITCHES:
        assert gate.read_switch({gate.VARIABLE: text}) == meant
    else:
        with pytest.raises(ValueError, match="off, auto, strict"):
            gate.read_switch({gate.VARIABLE: text})
