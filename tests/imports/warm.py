"""Run code in forks of an interpreter that has imported torch: nothing else is in them, and 2 s are saved.

For code whose first import that is not of the standard library is torch, or of torch. What it finds is what a
new interpreter would have after `import torch`.
"""

from __future__ import annotations

import ast
import atexit
import io
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, TimeoutError
from pathlib import Path
from types import ModuleType
from typing import Any

#: On sys.path of the interpreter that is forked, as its script's, and of no other.
FOLDER = str(Path(__file__).parent)
STDLIB = getattr(sys, "stdlib_module_names", None)


def begins_with_torch(code: str, folder: Path) -> bool:
    """Whether nothing happens before torch is imported but imports of the standard library.

    `folder`: where code finds modules of its own.
    """
    if STDLIB is None:  # Python 3.9
        return False
    for statement in ast.parse(code).body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            names = (
                [alias.name for alias in statement.names]
                if isinstance(statement, ast.Import)
                else [str(statement.module)]
            )
            for package in (name.partition(".")[0] for name in names):
                if package in STDLIB:
                    continue
                own = folder / f"{package}.py"
                return package == "torch" or (own.exists() and begins_with_torch(own.read_text(), folder))
        elif not (
            isinstance(statement, ast.FunctionDef)
            or (isinstance(statement, ast.Assign) and is_constant(statement.value))
        ):
            return False
    return False


def is_constant(value: ast.expr) -> bool:
    if isinstance(value, ast.Tuple):
        return all(map(is_constant, value.elts))
    return isinstance(value, ast.Constant)


class Interpreter:
    """The interpreter that is forked, as the tests see it. Threads may ask at the same time."""

    def __init__(self, root: Path) -> None:
        names = ("TORCH_DCP_BACKPORT", "PYTHONWARNINGS")
        env = {name: value for name, value in os.environ.items() if name not in names}
        env["PYTHONPATH"] = str(root)
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        self.lock = threading.Lock()
        self.numbers = itertools.count()
        self.waiting: dict[int, Future[int]] = {}
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            number, code = map(int, line.split())
            self.waiting.pop(number).set_result(code)
        for future in self.waiting.values():
            future.set_exception(RuntimeError("the interpreter that is forked is gone"))

    def tell(self, **request: Any) -> None:
        assert self.process.stdin is not None
        with self.lock:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()

    def run(
        self, code: str, argv: tuple[str, ...], env: dict[str, str], folder: Path, timeout: float
    ) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) of the code, as `python -c` would run it.

        Raises:
            TimeoutExpired: it did not end, and was killed.
        """
        number, future = next(self.numbers), Future[int]()
        self.waiting[number] = future
        out, err = folder / f"{number}.out", folder / f"{number}.err"
        self.tell(number=number, code=code, argv=argv, env=env, cwd=str(folder), out=str(out), err=str(err))
        try:
            ended = future.result(timeout)
        except TimeoutError:  # not the builtin one before Python 3.11
            self.tell(kill=number)
            future.result(30)
            raise subprocess.TimeoutExpired("code in a fork", timeout) from None
        found = ended, out.read_text(), err.read_text()
        out.unlink()
        err.unlink()
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


# --- in the interpreter that is forked ---


def serve() -> None:
    children: dict[int, int] = {}
    # Without a buffer, in which a line would wait unseen.
    requests = io.FileIO(0, closefd=False)
    while True:
        if select.select([requests], [], [], 0.02 if children else None)[0]:
            line = requests.readline()
            if not line:
                return
            request = json.loads(line)
            if "kill" in request:
                for pid in [pid for pid, number in children.items() if number == request["kill"]]:
                    os.kill(pid, signal.SIGKILL)
            else:
                pid = os.fork()
                if pid == 0:
                    live(request)
                children[pid] = request["number"]
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
            print(children.pop(pid), code, flush=True)


def live(request: dict[str, Any]) -> None:
    """A child's whole life; never returns."""
    code = 1
    try:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        for number, name in ((1, "out"), (2, "err")):
            file = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, number)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        sys.path[:] = [path for path in sys.path if path != FOLDER]
        more = request["env"]["PYTHONPATH"].split(os.pathsep)
        sys.path[:0] = ["", *(path for path in more if path not in sys.path)]
        sys.argv = ["-c", *request["argv"]]
        main = sys.modules["__main__"] = ModuleType("__main__")
        code = end_of(request["code"], main)
    finally:
        os._exit(code)


def end_of(code: str, main: ModuleType) -> int:
    """Run the code and what an interpreter does at its end; the exit code."""
    result = 0
    try:
        exec(compile(code, "<string>", "exec"), vars(main))
    except SystemExit as left:
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
        result = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException as error:
        trace = error.__traceback__
        sys.excepthook(type(error), error, trace and trace.tb_next)
        result = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return result


if __name__ == "__main__":
    import torch  # noqa: F401

    serve()
