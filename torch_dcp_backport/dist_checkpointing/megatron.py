"""`install()`: this room answers `megatron.core.dist_checkpointing`, for programs that import Megatron's.

Nothing is replaced in Megatron's modules: an import of that package, or of a module in it, gets ours. Only
before Megatron's own is imported; all modules or none. Importing this module changes nothing.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Sequence
from types import FunctionType, ModuleType
from typing import Any, Optional

logger = logging.getLogger("torch_dcp_backport.dist_checkpointing")

ROOM = str(__package__)
MEGATRON = "megatron.core.dist_checkpointing"
#: Modules of Megatron -> why they are not answered.
NOT_OFFERED = {
    "strategies.resharding": "flattened tensors are loaded on any grid without it",
    "strategies.tensorstore": "only the format torch_dist is read",
    "strategies.two_stage": "load with FullyParallelLoadStrategyWrapper reads together",
    "strategies.zarr": "only the format torch_dist is read",
}
#: Modules that touch no file, and come from Megatron: they rename shards.
MEGATRONS_OWN = ("gpt_checkpoint_interop",)
#: Modules of this room.
OURS = (
    "core",
    "dict_utils",
    "exchange_utils",
    "mapping",
    "optimizer",
    "serialization",
    "state_dict_utils",
    "strategies",
    "strategies.async_utils",
    "strategies.base",
    "strategies.cached_metadata_filesystem_reader",
    "strategies.checkpointable",
    "strategies.common",
    "strategies.filesystem_async",
    "strategies.fully_parallel",
    "strategies.nvrx",
    "strategies.state_dict_saver",
    "strategies.torch",
    "tensor_aware_state_dict",
    "utils",
    "validation",
)
#: Imports NVRx where that is installed, so only when a program asks for it.
LATE = ("tensor_aware_state_dict",)

_lock = threading.Lock()


def install() -> None:
    """Have this room answer `megatron.core.dist_checkpointing` and its modules, until `remove`.

    Call it before anything imports megatron-core, on every rank. A second call changes nothing.

    Raises:
        RuntimeError: Megatron's own package is imported already; the error names the modules that hold its
            functions. Nothing was changed.
        ImportError: a module of this room cannot be imported; nothing was changed.

    Example:
        >>> import sys
        >>> from torch_dcp_backport.dist_checkpointing import megatron
        >>> megatron.install()
        >>> megatron.remove()
        >>> "megatron.core.dist_checkpointing" in sys.modules
        False
    """
    with _lock:
        if _finder in sys.meta_path:
            return
        _refuse_if_late()
        for name in ("", *OURS):
            if name in LATE:
                if importlib.util.find_spec(f"{ROOM}.{name}") is None:
                    raise ImportError(f"{ROOM} has no module {name}", name=f"{ROOM}.{name}")
            else:
                _ours(name)
        sys.meta_path.insert(0, _finder)
        try:
            # Another thread may have imported it meanwhile.
            _refuse_if_late()
        except RuntimeError:
            sys.meta_path.remove(_finder)
            raise


def remove() -> None:
    """Undo `install`: a later import of `megatron.core.dist_checkpointing` gets Megatron's own.

    Modules of Megatron that were imported in between keep this room's functions, and a warning names them.
    """
    with _lock:
        if _finder not in sys.meta_path:
            return
        sys.meta_path.remove(_finder)
        room = sys.modules[ROOM]
        for name in _imported():
            del sys.modules[name]
            own = name[len(MEGATRON) + 1 :]
            if own in MEGATRONS_OWN:
                room.__dict__.pop(own, None)
        above = sys.modules.get(MEGATRON.rpartition(".")[0])
        if above is not None and above.__dict__.get(MEGATRON.rpartition(".")[2]) is room:
            delattr(above, MEGATRON.rpartition(".")[2])
        kept = _holders(ROOM, ("megatron.",))
    if kept:
        logger.warning("%s", f"these modules were imported with this room's functions, and keep them: {kept}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers imports of Megatron's package with modules of this room."""

    def find_spec(
        self, fullname: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        package, _, name = fullname.partition(f"{MEGATRON}.")
        if fullname == MEGATRON or (not package and name in OURS):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=fullname == MEGATRON)
        if package or not name:
            return None
        if name in MEGATRONS_OWN:
            above: Any = sys.modules[MEGATRON.rpartition(".")[0]]
            folders = [os.path.join(folder, MEGATRON.rpartition(".")[2]) for folder in above.__path__]
            spec = importlib.machinery.PathFinder.find_spec(fullname, folders)
            if spec is not None:
                return spec
        # With None, Python would look for it in this room's folder, and make its modules a second time.
        why = NOT_OFFERED.get(name, "this package has no such module")
        raise ModuleNotFoundError(f"{fullname} is not offered by {ROOM}: {why}", name=fullname)

    def exec_module(self, module: ModuleType) -> None:
        # Python takes what is there by this name afterwards: the module itself, which keeps its own name.
        sys.modules[module.__name__] = _ours(module.__name__[len(MEGATRON) + 1 :])


_finder = _Finder()


def _ours(name: str) -> ModuleType:
    return importlib.import_module(f"{ROOM}.{name}" if name else ROOM)


def _imported() -> list[str]:
    """Return the names of Megatron's package and its modules, as far as they are imported."""
    return [name for name in list(sys.modules) if name == MEGATRON or name.startswith(f"{MEGATRON}.")]


def _refuse_if_late() -> None:
    if _imported():
        raise RuntimeError(
            f"too late: {MEGATRON} is imported already, and these modules hold its functions: "
            f"{_holders(MEGATRON) or MEGATRON}. Call install() before anything imports megatron"
        )


def _holders(package: str, among: tuple[str, ...] = ("",)) -> str:
    """Return the names of the modules outside a package that hold its modules, functions or classes."""
    names = []
    for name, module in sorted(sys.modules.items()):
        if name == package or name.startswith((f"{package}.", f"{MEGATRON}.")) or not name.startswith(among):
            continue
        if isinstance(module, ModuleType) and any(
            _is_of(package, value) for value in list(vars(module).values())
        ):
            names.append(name)
    return ", ".join(names)


def _is_of(package: str, value: object) -> bool:
    # By their types alone: an object may run code when it is asked for its class.
    kind, made_in = type(value), None
    if issubclass(kind, ModuleType):
        made_in = getattr(value, "__name__", None)
    elif issubclass(kind, (FunctionType, type)):
        made_in = getattr(value, "__module__", None)
    else:
        return False
    return isinstance(made_in, str) and f"{made_in}.".startswith(f"{package}.")
