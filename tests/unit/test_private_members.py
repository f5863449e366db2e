"""What the rooms use of torch's private members is listed, and asked for at start."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict  # patched before a test takes anything away

import torch_dcp_backport
from torch_dcp_backport import private_members
from torch_dcp_backport.private_members import EVERYWHERE, MEMBERS, OWN, MissingMember, asked_by

PACKAGE = Path(torch_dcp_backport.__file__).parent
PAGE = Path(__file__).resolve().parents[2] / "tools" / "private_page.py"
#: The shim's own: it stands on torch 2.4 to 2.6, which change no more. Programs of our tests.
CLOSED = ("activation", "dcp", "regression")
ROOMS = ("transfer", "state_dict", "dist_checkpointing", "checkpoint", "engine")
#: Private names of others: Python's, transformers', peft's, torchdata's; and the ends of words.
OTHERS = {
    *("_replace", "_make", "_asdict", "_fields", "_code", "_codecs", "_io", "_getframe", "_reconstruct"),
    *("_run_module_as_main", "_available"),
    *(
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_name_or_path",
        "_no_split_modules",
        "_config",
    ),
    *("_checkpoint_conversion_mapping", "_fix_state_dict_key_on_load", "_fix_state_dict_keys_on_save"),
    *("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "_tied_weights_keys", "_from_model_config"),
    *("_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected", "_token_id", "_scale_inv"),
    *("_num_yielded", "_snapshot", "_snapshot_step", "_steps_since_snapshot", "_iterator_finished"),
    *("_on_", "_world_size_", "_rank_", "_target_", "_NAMES", "_results_queue"),
}
#: Words in names and states that torch writes, which it reads in files of earlier releases too.
WRITTEN = {
    *("_flat_param", "_fqn_modifiers", "_metadata", "_orig_mod", "_fsdp_wrapped_module"),
    *("_checkpoint_wrapped_module", "_last_lr", "_schedulers", "_MEM_FORMAT_ENCODING", "_get_layout"),
}
TREES = {
    path: ast.parse(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0] not in CLOSED and path.name != "private_members.py"
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


def defined(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module of ours defines, in classes and on itself."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] * (ast.unparse(node.value) in ("self", "cls"))


def parts(tree: ast.Module) -> Iterator[str]:
    """Yield the private parts of what a module names: of attributes, imports and texts that are names."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "torch":
            names = [part for alias in node.names for part in f"{node.module}.{alias.name}".split(".")]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_dotted = node.value.startswith("torch.") and " " not in node.value
            names = node.value.split(".") if is_dotted or node.value.isidentifier() else []
        yield from filter(is_private, names)


OURS = {name for tree in TREES.values() for name in defined(tree)}
USED = {name for tree in TREES.values() for name in parts(tree)} - OURS - OTHERS - WRITTEN


def test_every_private_name_that_is_used_is_listed() -> None:
    listed = {part for member in MEMBERS for part in member.name.split(".") if is_private(part)}
    assert sorted(USED - listed) == [], "list them in private_members.py, or name their owner here"


def test_every_member_that_is_listed_is_used() -> None:
    texts = "\n".join(map(ast.unparse, TREES.values()))
    assert [member.name for member in MEMBERS if member.name.rpartition(".")[2] not in texts] == []


def test_each_is_listed_once_and_its_rooms_are_there() -> None:
    names = [member.name for member in MEMBERS]
    assert len(set(names)) == len(names)
    for member in MEMBERS:
        assert member.rooms == EVERYWHERE or set(member.rooms.split()) <= {*ROOMS}, member.name


def test_the_page_is_what_the_table_says() -> None:
    tool = SimpleNamespace(**runpy.run_path(str(PAGE)))
    assert tool.PATH.read_text() == tool.page(), "make private-page writes it anew"


def gone(name: str, patch: pytest.MonkeyPatch) -> None:
    """Take a member of torch's away."""
    path, _, last = name.rpartition(".")
    try:
        owner: Any = importlib.import_module(path)
    except ImportError:
        module, _, kind = path.rpartition(".")
        found = importlib.import_module(module)
        # torch 2.4 has it elsewhere.
        elsewhere = module.replace("torch.distributed.tensor", "torch.distributed._tensor")
        owner = getattr(found, kind, None) or getattr(importlib.import_module(elsewhere), kind)
    patch.setattr(
        private_members, "has", lambda of, member: (of, member) != (owner, last) and has(of, member)
    )
    patch.setattr(importlib.util, "find_spec", lambda wanted: None if wanted == name else find_spec(wanted))


has, find_spec = private_members.has, importlib.util.find_spec


@pytest.mark.parametrize("room", ROOMS)
def test_a_torch_without_a_member_is_one_error_that_names_it(room: str) -> None:
    private_members.require(room)
    names = [member.name for member in asked_by(room) if member.name.partition(".")[0] not in OWN]
    assert names
    for name in names:
        with pytest.MonkeyPatch.context() as patch:
            gone(name, patch)
            with pytest.raises(MissingMember) as failure:
                private_members.require(room)
        told = (
            f"torch_dcp_backport's {room} cannot be used: torch {torch.__version__} has no {name}, on which"
        )
        assert told in str(failure.value)
