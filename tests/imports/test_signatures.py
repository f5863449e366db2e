"""Signatures: the public ones are native torch 2.15's, and every call that torch 2.6 takes is taken.

The record is made from torch itself, and the lanes that have that torch check it. To make it anew:
    python3 tools/lanes.py run LANE -- python tests/imports/test_signatures.py    (LANE: current, then 2.6)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from interpreters import AFFECTED, ROOT, TORCH, Fresh

RECORD = ROOT / "tests" / "conformance" / "signatures.json"
NEWEST, LAST_AFFECTED = "2.15", "2.6"

# Every function and class that torch's two modules define, and what is replaced in others:
# [parameter, kind, default as text or null].
SIGNATURES = """
import importlib, inspect, json
def text_of(default):
    return default.__qualname__ if inspect.isfunction(default) else repr(default)
def signature_of(function):
    parameters = inspect.signature(function).parameters.values()
    return [[p.name, p.kind.name, None if p.default is p.empty else text_of(p.default)] for p in parameters]
def signatures(modules):
    found = {}
    for module in modules:
        for name, value in vars(importlib.import_module(module)).items():
            if callable(value) and getattr(value, "__module__", None) == module:
                try:
                    found[f"{module}.{name}"] = signature_of(value)
                except ValueError:  # an exception's class
                    pass
    for target in TABLE.targets:
        try:
            value = importlib.import_module(target.module)
        except ImportError:  # of an earlier torch
            continue
        for part in target.name.split("."):
            value = getattr(value, part, None)
        if target.module not in modules and value is not None:
            found[f"{target.module}.{target.name}"] = signature_of(value)
    return found
TORCHS = ("torch.distributed.checkpoint.state_dict", "torch.distributed._state_dict_utils")
from torch_dcp_backport.activation.table import TABLE
"""


def record() -> dict[str, Any]:
    return dict(json.loads(RECORD.read_text()))


def release(version: str) -> str:
    return ".".join(version.split(".")[:2])


@pytest.fixture(scope="module")
def public() -> dict[str, Any]:
    """Name -> parameters, in native torch 2.15."""
    module = "torch.distributed.checkpoint.state_dict."
    names = record()[NEWEST]["__all__"]
    return {name: record()[NEWEST][module + name] for name in names if module + name in record()[NEWEST]}


def test_the_record_has_what_users_call(public: dict[str, Any]) -> None:
    assert set(public) == {
        "StateDictOptions", "get_state_dict", "get_model_state_dict", "get_optimizer_state_dict",
        "set_state_dict", "set_model_state_dict", "set_optimizer_state_dict",
    }  # fmt: skip


@pytest.mark.skipif(release(TORCH) not in (NEWEST, LAST_AFFECTED), reason="no record of this torch")
def test_the_record_is_what_this_torch_has(fresh: Fresh) -> None:
    facts = fresh(SIGNATURES + "tell(**signatures(TORCHS))", switch="off").facts
    known = record()[release(TORCH)]
    known.pop("__all__", None)
    assert facts == known


def test_public_signatures_are_native_ones(fresh: Fresh, public: dict[str, Any]) -> None:
    """In torch's module after activation, and in ours on any torch."""
    code = """
module = importlib.import_module(sys.argv[1])
tell(**{name: signature_of(getattr(module, name)) for name in sys.argv[2:]})
"""
    modules = ["torch_dcp_backport.state_dict"]
    if AFFECTED or release(TORCH) == NEWEST:
        modules.append("torch.distributed.checkpoint.state_dict")
    for module in modules:
        facts = fresh("import torch_dcp_backport\n" + SIGNATURES + code, module, *public).facts
        assert facts == public


def test_every_call_that_torch_2_6_takes_is_taken(fresh: Fresh) -> None:
    """Private names too, on any torch: others call them."""
    facts = fresh(
        SIGNATURES
        + f"""
from torch_dcp_backport.activation.replace import call_misfit, replacement_of
known = json.load(open({str(RECORD)!r}))[{LAST_AFFECTED!r}]
def parameter(name, kind, default):
    optional = {{}} if default is None else dict(default=default)
    return inspect.Parameter(name, inspect._ParameterKind[kind], **optional)
def stand_in(parameters):
    def function(): ...
    function.__signature__ = inspect.Signature([parameter(*one) for one in parameters])
    return function
misfits, unknown = {{}}, []
for target in TABLE.targets:
    dotted = f"{{target.module}}.{{target.name}}"
    if dotted in known:
        mine = replacement_of(target.module, target.name)
        positions = not (isinstance(mine, type) and target.name.startswith("_"))
        misfits[dotted] = call_misfit(stand_in(known[dotted]), mine, positions)
    elif not any(name.endswith(f".{{target.name}}") for name in known):  # torch 2.4 has it elsewhere
        unknown.append(dotted)
tell(misfits={{name: why for name, why in misfits.items() if why}}, checked=len(misfits), unknown=unknown)
"""
    ).facts
    assert facts["misfits"] == {}
    assert facts["unknown"] == []
    assert facts["checked"] > 33


def write_record() -> None:
    import torch.distributed.checkpoint.state_dict as torchs

    scope: dict[str, Any] = {}
    exec(SIGNATURES, scope)
    found = {"__all__": sorted(torchs.__all__), **scope["signatures"](scope["TORCHS"])}
    known = record() if RECORD.exists() else {}
    known[release(TORCH)] = found
    lines = []
    for version, names in sorted(known.items()):
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(names[name])}" for name in sorted(names))
        lines.append(f" {json.dumps(version)}: {{\n{rows}\n }}")
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    if os.environ.get("TORCH_DCP_BACKPORT") != "off":  # ours would record themselves
        env = {**os.environ, "TORCH_DCP_BACKPORT": "off"}
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=env).returncode)
    write_record()
