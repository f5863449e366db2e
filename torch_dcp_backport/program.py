"""Become another program: `run SCRIPT` is `python SCRIPT`, in this process, where the fix is active already.

The program is __main__ until the process ends: threads and atexit handlers outlive its last line.
Must never import torch.
"""

from __future__ import annotations

import builtins
import importlib.util
import linecache
import os
import pkgutil
import runpy
import sys
import types
from collections.abc import Sequence
from importlib.machinery import BuiltinImporter, SourceFileLoader, SourcelessFileLoader

# They are imported when a process of that kind is started for the first time, and not before.
SPAWNING = ("multiprocessing.popen_spawn_posix", "multiprocessing.popen_forkserver")
NOT_REACHED = """\
torch_dcp_backport: run does not reach the processes that this program starts
by spawn or forkserver: put `import torch_dcp_backport` into the module of the
function that they run, or into a sitecustomize.py on PYTHONPATH"""


class Nothing(Exception):
    """The reason why there is no program to run."""


def run(argv: Sequence[str]) -> None:
    """Run the program that `python *argv` would run. Its errors, SystemExit included, are its own.

    Raises:
        Nothing: there is no such program.
    """
    what, rest = (argv[0], [*argv[1:]]) if argv else ("", [])
    if what[:2] in ("-m", "-c"):
        name, rest = (what[2:], rest) if what[2:] else (rest[0] if rest else "", rest[1:])
        if not name:
            raise Nothing(f"nothing to run after {what}")
        run_module(name, rest) if what[:2] == "-m" else run_text(name, "-c", rest)
    elif what == "-":
        run_text(sys.stdin.read(), "-", rest)
    elif what.startswith("-"):
        raise Nothing(
            f"{what}: an option of Python's goes before: python OPTIONS -m torch_dcp_backport run ..."
        )
    elif what:
        run_path(what, rest)
    else:
        raise Nothing("nothing to run: give a SCRIPT, or -m MODULE")


def run_module(name: str, args: list[str]) -> None:
    if not _exists(name):
        raise Nothing(f"no module {name}")
    sys.argv = ["-m", *args]  # `python -m` has put the working directory first in sys.path, for this one too
    _new_main()
    # `python -m` itself calls this; run_module() would take the name __main__ back at the end.
    vars(runpy)["_run_module_as_main"](name)


def run_path(path: str, args: list[str]) -> None:
    """Run a script, byte code, or the __main__ of a folder or a zip file."""
    if not os.path.exists(path):
        raise Nothing(f"no file {path}")
    sys.argv = [path, *args]
    file = os.path.join(os.getcwd(), path)  # absolute and not normalised, as Python's
    if pkgutil.get_importer(file) is not None:
        if getattr(sys.flags, "safe_path", False):
            sys.path.insert(0, "")
        sys.path[0] = file
        _new_main()
        vars(runpy)["_run_module_as_main"]("__main__", alter_argv=False)
        return
    _put_first(os.path.dirname(os.path.realpath(path)))
    loader: SourceFileLoader | SourcelessFileLoader
    try:
        if path.endswith(".pyc"):
            loader = SourcelessFileLoader("__main__", file)
            code = loader.get_code("__main__")
        else:
            loader = SourceFileLoader("__main__", file)
            code = loader.source_to_code(loader.get_data(file), file)
    except OSError as error:
        raise Nothing(f"{path} cannot be read: {error.strerror}") from None
    assert code is not None
    exec(code, _new_main(__file__=file, __cached__=None, __loader__=loader))


def run_text(text: str, option: str, args: list[str]) -> None:
    sys.argv = [option, *args]
    _put_first("")
    file: dict[str, object] = {"__file__": "<stdin>", "__cached__": None} if option == "-" else {}
    name = "<stdin>" if option == "-" else "<string>"
    if option == "-c":  # as Python does from 3.13 on
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    code = compile(text, name, "exec", dont_inherit=True)
    exec(code, _new_main(__loader__=BuiltinImporter, **file))


def _put_first(folder: str) -> None:
    """Put a folder where Python puts the program's, unless it was started with -P."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


def _new_main(**names: object) -> dict[str, object]:
    """The names of a new, empty __main__, which stays."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(module).update(names, __annotations__={}, __builtins__=builtins)
    return vars(module)


def _exists(module: str) -> bool:
    """Whether there is such a module. Errors from importing its parents are theirs."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            return False
        raise


class SpawnNotice:
    """A finder that finds nothing, and says once that a process is started without this package."""

    @classmethod
    def post(cls) -> None:
        """Add the notice, unless sitecustomize brings this package into every process."""
        if "torch_dcp_backport" not in vars(sys.modules.get("sitecustomize", cls)):
            sys.meta_path.insert(0, cls())

    def __init__(self) -> None:
        self._said = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in SPAWNING and not self._said:
            self._said = True  # and stays in the list: its caller is walking it right now
            print(NOT_REACHED, file=sys.stderr, flush=True)
