"""Run code in forks of interpreters that have executed its first imports: sooner, in the state of a new one.

Programs that begin alike share their beginning: leading imports of torch and of ours, what stands before and
between them included (imports of the standard library, functions, constants). Each is executed once, in an
interpreter that then waits and forks; the rest runs in a fork. Where ours is the first import, names that a
program has bound before make no difference: all with the same imports share an interpreter that has nothing
but these, and their whole text runs in the fork. A beginning that fails is not kept.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

#: On sys.path of the interpreters that are forked, as their script's, and of no other.
FOLDER = str(Path(__file__).parent)
STDLIB = getattr(sys, "stdlib_module_names", None)
SHARED = ("torch", "torch_dcp_backport")
SWITCH = "TORCH_DCP_BACKPORT"
# Interpreters that wait at a time, some 200 MiB each.
WAITING = 8
# Seconds in which an interpreter that waits has forked, or executed what it was asked to; the longest, an
# import of torch on a busy machine, takes 20.
ANSWERS = 120.0
# What torch stands on: a quarter of an import's time.
OTHERS = ("numpy", "sympy", "networkx")


def beginnings(code: str) -> list[int]:
    """How many statements of the code lead up to each import of torch or of ours that others may share."""
    counts: list[int] = []
    if STDLIB is None:  # Python 3.9
        return counts
    body = ast.parse(code).body
    for count, statement in enumerate(body, 1):
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            packages = packages_of(statement)
            if not packages <= {*STDLIB, *SHARED}:
                break
            if packages & {*SHARED}:
                counts.append(count)
        elif not is_quiet(statement):
            break
    return counts


def modules_after_ours(code: str) -> list[str]:
    """The modules of torch's and of ours that a program imports first; none where it begins with torch's."""
    modules: list[str] = []
    for count in beginnings(code)[:1]:
        statements = ast.parse(code).body
        for statement in statements[count - 1 :]:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                if not packages_of(statement) <= {*STDLIB, *SHARED}:
                    break
                modules += [name for name in modules_of(statement) if name.partition(".")[0] in SHARED]
            elif not is_quiet(statement):
                break
    return modules if modules[:1] == [SHARED[1]] else []


def begins_with_torch(code: str, folder: Path) -> bool:
    """Whether nothing happens before torch is imported but imports of the standard library.

    `folder`: where code finds modules of its own.
    """
    if STDLIB is None:
        return False
    for statement in ast.parse(code).body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            for package in sorted(packages_of(statement) - {*STDLIB}):
                own = folder / f"{package}.py"
                return package == "torch" or (own.exists() and begins_with_torch(own.read_text(), folder))
        elif not is_quiet(statement):
            return False
    return False


def packages_of(statement: ast.Import | ast.ImportFrom) -> set[str]:
    return {name.partition(".")[0] for name in modules_of(statement)}


def modules_of(statement: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(statement, ast.ImportFrom):
        return [str(statement.module)]
    return [alias.name for alias in statement.names]


def is_quiet(statement: ast.stmt) -> bool:
    """Whether a statement only binds a name."""
    if isinstance(statement, ast.Assign):
        return is_constant(statement.value)
    return isinstance(statement, ast.FunctionDef) and not statement.decorator_list


def is_constant(value: ast.expr) -> bool:
    if isinstance(value, ast.Tuple):
        return all(map(is_constant, value.elts))
    return isinstance(value, ast.Constant)


class Begun(NamedTuple):
    """An interpreter that waits, by what it has executed."""

    switch: str | None = None
    torch_first: bool = False
    text: str = ""
    #: Whether the text is that of no program, and has bound nothing in one.
    shared: bool = False


class Interpreters:
    """The interpreters that are forked, as the tests see them. Threads may ask at the same time.

    `variables`: of the environment of them all, beside this process's own.
    """

    def __init__(self, root: Path, **variables: str) -> None:
        self.root = root
        self.variables = variables
        self.folder = tempfile.TemporaryDirectory()
        self.lock = threading.Lock()
        self.numbers = iter(range(10**9))
        self.start()

    def start(self) -> None:
        """Start the first interpreter, of which all others are forks."""
        self.waiting: OrderedDict[Begun, str] = OrderedDict()
        self.failing: set[Begun] = set()
        # Read by all of them: its end says that the tests are gone.
        ours, self.life = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(ours), self.place()],
            env=self.environment(None),
            cwd=self.folder.name,
            pass_fds=[ours],
            stdout=subprocess.PIPE,
            start_new_session=True,  # so that `stop` reaches forks of forks
        )
        os.close(ours)
        assert self.process.stdout is not None
        self.first = self.process.stdout.readline().decode().strip()

    def place(self) -> str:
        return os.path.join(self.folder.name, str(next(self.numbers)))

    def environment(self, switch: str | None) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if name not in (SWITCH, "PYTHONWARNINGS")}
        env.update(self.variables, PYTHONPATH=str(self.root))
        return env if switch is None else {**env, SWITCH: switch}

    def run(
        self, code: str, argv: Sequence[str], env: dict[str, str], folder: Path, timeout: float, **later: str
    ) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) of the code, as `python -c` would run it.

        `later`: variables of its environment that no import looks at, such as a rank's.

        Raises:
            TimeoutExpired: it did not end, and was killed; or an interpreter did not answer, and all were
                replaced.
        """
        with self.lock:
            out, err = (folder / f"{next(self.numbers)}.{name}" for name in ("out", "err"))
            try:
                address, done = self.begun(code, env, folder)
                answer = self.ask(
                    address,
                    code=code,
                    done=done,
                    argv=argv,
                    env={**env, **later},
                    cwd=str(folder),
                    out=str(out),
                    err=str(err),
                )
                answer.settimeout(ANSWERS)
                said = answer.makefile()
                said.readline()
            except socket.timeout:  # not the builtin one before Python 3.10
                # Each later test would wait for it as long: this one fails, others have new interpreters.
                self.stop()
                self.start()
                raise subprocess.TimeoutExpired("an interpreter that waits", ANSWERS) from None
        with answer:
            answer.settimeout(timeout)
            try:
                ended = said.readline()
            except socket.timeout:
                raise subprocess.TimeoutExpired("code in a fork", timeout) from None
        found = int(ended), out.read_text(), err.read_text()
        out.unlink()
        err.unlink()
        return found

    def begun(self, code: str, env: dict[str, str], folder: Path) -> tuple[str, int]:
        """The address of the interpreter that has executed most of the code, and how many statements."""
        switch = env.get(SWITCH)
        key, address, done = Begun(), self.first, 0
        if begins_with_torch(code, folder):
            key = Begun(torch_first=True)
            address = self.further(address, key, "import torch", 0, 1) or address
        if env != self.environment(switch):
            return address, 0
        key = key._replace(switch=switch)
        modules = modules_after_ours(code)
        for number in range(len(modules)):
            text = "".join(f"import {module}\n" for module in modules[: number + 1])
            key = key._replace(text=text, shared=True)
            longer = self.further(address, key, text, number, number + 1)
            if longer is None:
                break
            address = longer
        if modules:
            return address, 0
        statements = ast.parse(code).body
        for count in beginnings(code):
            end = statements[count - 1].end_lineno
            if count < len(statements) and statements[count].lineno == end:
                break
            key = key._replace(text="\n".join(code.splitlines()[:end]))
            longer = self.further(address, key, code, done, count)
            if longer is None:
                break
            address, done = longer, count
        return address, done

    def further(self, address: str, key: Begun, code: str, done: int, count: int) -> str | None:
        """The address of the interpreter that has executed `key`, forked if there is none; None: failed."""
        if key in self.failing:
            return None
        if key in self.waiting:
            self.waiting.move_to_end(key)
            return self.waiting[key]
        new = self.place()
        with self.ask(
            address,
            code=code,
            done=done,
            count=count,
            hidden=key.shared or not key.text,
            env=self.environment(key.switch),
            place=new,
        ) as answer:
            answer.settimeout(ANSWERS)
            if answer.makefile().readline() != "begun\n":
                self.failing.add(key)
                return None
        self.waiting[key] = new
        spare = [key for key in self.waiting if key.text]
        if len(spare) > WAITING:
            self.ask(self.waiting.pop(spare[0]), end=True).close()
        return new

    def ask(self, address: str, **request: Any) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
        connection.sendall(json.dumps(request).encode() + b"\n")
        return connection

    def stop(self) -> None:
        """Kill all interpreters, and what runs in forks of them."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.end()

    def end(self) -> None:
        os.close(self.life)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def close(self) -> None:
        self.end()
        self.folder.cleanup()


# --- in the interpreters that are forked ---


class Waiting:
    """An interpreter that waits for requests, each of them answered by a fork."""

    def __init__(self, life: int, place: str) -> None:
        self.life = life
        self.main = ModuleType("__main__")
        self.said = {1: b"", 2: b""}
        self.listen(place)

    def listen(self, place: str) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(place)
        self.listener.listen(64)
        self.lives: dict[int, socket.socket] = {}

    def serve(self) -> NoReturn:
        ending = False
        while not (ending and not self.lives):
            # A fork's end is looked for again and again: signals would be what the code under test inherits.
            connections = {connection: pid for pid, connection in self.lives.items()}
            ready = select.select(
                [self.listener, self.life, *connections], [], [], 0.02 if self.lives else 5
            )[0]
            if self.life in ready:
                break
            for connection in ready:
                if connection is self.listener:
                    ending |= self.answer(self.listener.accept()[0])
                elif connection in connections:  # closed by the other end: it took too long
                    os.kill(connections[connection], signal.SIGKILL)
                    self.lives.pop(connections[connection]).close()
            with contextlib.suppress(ChildProcessError):
                while True:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                    if not pid:
                        break
                    ended = self.lives.pop(pid, None)
                    if ended is not None:
                        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
                        ended.sendall(b"%d\n" % code)
                        ended.close()
        for pid in self.lives:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)

    def answer(self, connection: socket.socket) -> bool:
        """Begin what a connection asks for; whether it is the end."""
        request = json.loads(connection.makefile().readline())
        if "end" in request:
            connection.close()
            return True
        pid = os.fork()
        if pid == 0:
            self.listener.close()
            for other in self.lives.values():
                other.close()
            if "place" in request:
                self.begin(request, connection)
            connection.close()
            os.close(self.life)
            self.live(request)
        if "place" in request:
            connection.close()
        else:
            connection.sendall(b"forked\n")
            self.lives[pid] = connection
        return False

    def begin(self, request: dict[str, Any], connection: socket.socket) -> NoReturn:
        """Execute some more statements in this fork, and wait for requests."""
        try:
            with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
                files = {1: out, 2: err}
                for number, file in files.items():
                    os.dup2(file.fileno(), number)
                enter(request["env"])
                hidden = ModuleType("__main__") if request["hidden"] else self.main
                execute(request["code"], hidden, request["done"], request["count"])
                flush()
                for number, file in files.items():
                    file.seek(0)
                    self.said[number] += file.read()
        except BaseException:
            os._exit(1)
        self.listen(request["place"])
        connection.sendall(b"begun\n")
        connection.close()
        self.serve()

    def live(self, request: dict[str, Any]) -> NoReturn:
        code = 1
        try:
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            for number, name in ((1, "out"), (2, "err")):
                file = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(file, number)
                os.write(number, self.said[number])
            enter(request["env"])
            os.chdir(request["cwd"])
            sys.argv = ["-c", *request["argv"]]
            code = end_of(request["code"], self.main, request["done"])
        finally:
            os._exit(code)


def enter(env: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    more = env["PYTHONPATH"].split(os.pathsep)
    sys.path[:0] = [path for path in ("", *more) if path not in sys.path]
    sys.argv = ["-c"]


def execute(code: str, main: ModuleType, done: int, count: int | None = None) -> None:
    """Run statements of the code, from the one after `done` on."""
    sys.modules["__main__"] = main
    program = ast.parse(code, "<string>")
    program.body = program.body[done:count]
    # A docstring stays one, a first string after it does not become one.
    exec(compile(program, "<string>", "exec"), vars(main))


def end_of(code: str, main: ModuleType, done: int) -> int:
    """Run the rest of the code and what an interpreter does at its end; the exit code."""
    result = 0
    try:
        execute(code, main, done)
    except SystemExit as left:
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
        result = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException as error:
        trace = error.__traceback__
        for _ in range(2):  # this function's own frame, and execute's
            trace = trace and trace.tb_next
        sys.excepthook(type(error), error, trace)
        result = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    flush()
    return result


def flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def load_libraries() -> None:
    """Load what torch's extension module stands on: half a second of an `import torch`, unseen by Python."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0], "lib")
    for name, mode in (
        ("libtorch_global_deps.so", ctypes.RTLD_GLOBAL),
        ("libtorch_python.so", ctypes.RTLD_LOCAL),
    ):
        with contextlib.suppress(OSError):  # a build without it, or that finds its own otherwise
            ctypes.CDLL(str(folder / name), mode)


def first() -> NoReturn:
    life, place = int(sys.argv[1]), sys.argv[2]
    sys.path[:] = [path for path in sys.path if path != FOLDER]
    load_libraries()
    for name in OTHERS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # A third of an import's time is the collector's, which finds nothing.
    gc.set_threshold(100_000, 50, 100)
    begun = Waiting(life, place)
    print(place, flush=True)
    begun.serve()


if __name__ == "__main__":
    first()
