"""`doctor PROGRAM`: the bindings of a program that are too early for the fix, and the changes that help.

The lower half runs as a script in a process of its own, where it executes the imports at the program's top
and nothing else of it. It must not import this package before the program has had its chance to.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

PACKAGE = "torch_dcp_backport"
TRIGGER = "torch.distributed.checkpoint.state_dict"
#: The most places that bind early in a text that is not --verbose.
SHOWN = 10
#: Set-up that imports depend on; it is executed where it stands alone on a line.
SET_UP = ("sys.path.", "sys.path[", "os.environ")
DESCRIPTION = """\
Say which imports of PROGRAM bind torch's functions before the fix is there, and what to change. For this it
runs the imports at the top level of PROGRAM, and with them the imported modules, in a process of its own.
It also runs lines there that change sys.path or os.environ, and evaluates the conditions of `if`. Nothing
else of PROGRAM runs. Imports inside functions run later in the program, and are not looked at.
"""
EPILOG = (
    "exit codes: 0 nothing to change; 1 something to change; 2 wrong usage, or PROGRAM could not be looked at"
)
WHICH = "name the program to look at, as in `doctor train.py` or `doctor -m package.module`"


def main(argv: list[str], prog: str) -> int:
    parser = argparse.ArgumentParser(prog=prog, description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.add_argument(
        "--verbose", action="store_true", help="every place that binds early, not the first ten"
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="PROGRAM is a module, as for python -m"
    )
    parser.add_argument("program", metavar="PROGRAM", nargs="?", help="a script")
    parser.add_argument(
        "args", metavar="ARGS", nargs=argparse.REMAINDER, help="what the program finds in sys.argv"
    )
    options = parser.parse_args(argv)
    if options.program is None:
        parser.error(WHICH)
    with TemporaryDirectory() as folder:
        result = os.path.join(folder, "result.json")
        kind = "-m" if options.module else ""
        command = [sys.executable, os.path.abspath(__file__), result, kind, options.program, *options.args]
        # strict would raise where this is to tell.
        done = subprocess.run(command, env={**os.environ, "TORCH_DCP_BACKPORT": "auto"}, stdout=sys.stderr)
        if not os.path.exists(result):
            print(
                f"{prog}: {options.program} could not be looked at (exit code {done.returncode})",
                file=sys.stderr,
            )
            return 2
        with open(result) as file:
            seen = json.load(file)
    seen["change"] = changes(seen, f"{'-m ' if options.module else ''}{options.program}")
    print(json.dumps(seen, indent=2) if options.json else text(seen, options.program, options.verbose))
    return 1 if seen["change"] else 0


def changes(seen: dict[str, Any], program: str) -> list[str]:
    """The advice, most important first; empty where nothing has to change."""
    outcome = seen["status"]["outcome"]
    if outcome in ("not-needed", "disabled"):
        return []
    if outcome != "applied":
        return [seen["status"]["reason"]]
    early, line = [place for place in seen["early"] if place["line"]], f"`import {PACKAGE}`"
    advice = []
    if early:
        verb = "move" if seen["activated"] else "put"
        advice.append(f"{verb} {line} above line {min(place['line'] for place in early)}")
    elif not seen["activated"]:
        advice.append(f"put {line} first in the program")
    if advice:
        advice[0] += f", or start it with python -m {PACKAGE} run {program}"
    if seen["processes"] and not seen["activated"]:
        advice.append(
            f"processes that it starts anew need {line} in their function's module, or in sitecustomize.py"
        )
    return advice


def text(seen: dict[str, Any], program: str, verbose: bool) -> str:
    from torch_dcp_backport.activation.status import row

    status = seen["status"]
    names = sum(map(len, status["replaced"].values()))
    lines = [
        f"{program}: ran {seen['imports']} of its top-level lines (imports, sys.path, os.environ)",
        *row("the fix", _where(seen["activated"])),
        *row("then", f"{status['outcome']}: {f'{names} names replaced' if names else status['reason']}"),
    ]
    shown = seen["early"] if verbose else seen["early"][:SHOWN]
    for place in shown:
        lines += row("bound early", f"{place['name']}, by {_where(place)}")
    if len(shown) < len(seen["early"]):
        lines += row("", f"and {len(seen['early']) - len(shown)} more (--verbose)")
    for place in seen["failed"]:
        lines += row("failed", f"{_where(place)}: {place['error']}")
    for place in seen["processes"]:
        lines += row("processes", _where(place))
    if seen["libraries"]:
        lines += row("libraries", ", ".join(f"{PACKAGE}.{name}" for name in seen["libraries"]))
    for advice in seen["change"] or [nothing_to_change(seen)]:
        lines += row("change", advice)
    return "\n".join(lines)


def nothing_to_change(seen: dict[str, Any]) -> str:
    """Return what the program can do without a change, or what becomes possible."""
    if seen["status"]["outcome"] != "not-needed":
        return "nothing"
    if seen["libraries"]:
        return "nothing; the program uses libraries of this package: keep it installed"
    return (
        "nothing; no use of this package's libraries was found: unless a function in another module does, "
        "you can remove `import torch_dcp_backport` and uninstall the package"
    )


def _where(place: dict[str, Any] | None) -> str:
    if place is None:
        return "is not imported by this program"
    return f"line {place['line']}: {place['text']}" if place["line"] else place["text"]


# --- in the process of its own ---------------------------------------------------------------


class Step(NamedTuple):
    """A statement that was executed, and the modules and names that it brought."""

    line: int
    text: str
    modules: frozenset[str]
    names: frozenset[str]
    error: str

    def place(self) -> dict[str, Any]:
        return {"line": self.line, "text": self.text}


BEFORE = {"line": 0, "text": "before the program's first line"}


class Visit:
    """A program whose imports are executed, one by one."""

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            self.tree = ast.parse(file.read(), path)
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__file__ = path
        self.names = vars(main)
        self.steps: list[Step] = []
        self._visit(self.tree.body)

    def _visit(self, body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, (ast.Import, ast.ImportFrom)) or _is_set_up(node):
                self._execute(node)
            elif isinstance(node, ast.If):
                self._visit(node.body if self._holds(node.test) else node.orelse)
            elif isinstance(node, ast.With):
                self._visit(node.body)
            elif isinstance(node, ast.Try):
                before = len(self.steps)
                self._visit(node.body)
                failed = any(step.error for step in self.steps[before:])
                self._visit(
                    [each for handler in node.handlers for each in handler.body] if failed else node.orelse
                )
                self._visit(node.finalbody)

    def _holds(self, test: ast.expr) -> bool:
        try:
            return bool(eval(compile(ast.Expression(test), "<test>", "eval"), self.names))
        except Exception:  # it needs a line that was not executed
            return False

    def _execute(self, node: ast.stmt) -> None:
        modules, names, error = set(sys.modules), set(self.names), ""
        try:
            exec(compile(ast.Module([node], []), self.names["__file__"], "exec"), self.names)
        except (Exception, SystemExit) as problem:
            error = f"{type(problem).__name__}: {problem}"
        new = frozenset(set(sys.modules) - modules), frozenset(set(self.names) - names)
        self.steps.append(Step(node.lineno, ast.unparse(node), *new, error))

    def origin_of(self, place: str) -> dict[str, Any]:
        """The statement behind an early binding such as `client.load` or `list in client.kept`."""
        dotted = place.rpartition(" ")[2]
        for step in self.steps:
            if dotted.startswith("__main__.") and dotted.split(".")[1] in step.names:
                return step.place()
            if any(dotted.startswith(f"{name}.") for name in step.modules - {"__main__"}):
                return step.place()
        return BEFORE

    def import_of(self, module: str) -> dict[str, Any] | None:
        return next((step.place() for step in self.steps if module in step.modules), None)

    def libraries(self) -> Iterator[str]:
        """Yield the names of this package's own modules that any line of the program imports or uses."""
        imports = [node for node in ast.walk(self.tree) if isinstance(node, ast.Import)]
        aliases = {alias.asname for node in imports for alias in node.names if alias.name == PACKAGE}
        for node in ast.walk(self.tree):
            names = [alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)]
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            if isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
                if isinstance(node.value, ast.Name) and node.value.id in aliases:
                    names = [f"{PACKAGE}.{node.attr}"]
            for name in names:
                if name.startswith(f"{PACKAGE}."):
                    yield name.split(".")[1]

    def processes(self) -> Iterator[dict[str, Any]]:
        """Yield the lines that start processes without the modules of this one."""
        for node in ast.walk(self.tree):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)
            if isinstance(node, (ast.Attribute, ast.Constant)) and name in ("spawn", "forkserver"):
                yield {"line": node.lineno, "text": f"{name} starts processes anew"}
        ray = self.import_of("ray")
        if ray is not None:
            yield {**ray, "text": f"{ray['text']}: Ray's workers are started anew"}


def _is_set_up(node: ast.stmt) -> bool:
    return isinstance(node, (ast.Expr, ast.Assign)) and ast.unparse(node).startswith(SET_UP)


def look(path: str) -> dict[str, Any]:
    known = PACKAGE in sys.modules  # sitecustomize
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        visit = Visit(path)
        activated = BEFORE if known else visit.import_of(PACKAGE)
        package = importlib.import_module(PACKAGE)
        if package.status().outcome == "pending":
            importlib.import_module(TRIGGER)
        status = package.status()
    # What activation itself needs is no library that the program uses.
    loaded = [
        name.split(".")[1] for step in visit.steps for name in step.modules if name.startswith(f"{PACKAGE}.")
    ]
    own = ("state_dict", "transfer") if status.outcome != "not-needed" else ()
    used = {*visit.libraries(), *(name for name in loaded if name not in own)}
    early = [*status.late_bindings, *status.out_of_reach]
    return {
        "imports": len(visit.steps),
        "activated": activated,
        "early": [{"name": name, **visit.origin_of(name)} for name in early if not name.startswith("torch.")],
        "failed": [{**step.place(), "error": step.error} for step in visit.steps if step.error],
        "processes": list(visit.processes()),
        "libraries": [name for name in package._ROOMS if name in used],
        "status": status.to_dict(),
    }


def probe(result: str, kind: str, program: str, *args: str) -> None:
    # `python -m` and `python SCRIPT` have the program's folder first; this script has our package's there.
    sys.path[0] = os.getcwd() if kind else os.path.dirname(os.path.realpath(program))
    sys.argv = [program, *args]
    path = program
    if kind:
        spec = importlib.util.find_spec(program)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{program}.__main__")
        if spec is None or spec.origin is None:
            raise SystemExit(f"no module {program}")
        path = spec.origin
    try:
        seen = look(path)
    except (OSError, SyntaxError, ValueError) as error:
        raise SystemExit(f"{path}: {error}") from None
    with open(result, "w") as file:
        json.dump(seen, file)


if __name__ == "__main__":
    probe(*sys.argv[1:])
