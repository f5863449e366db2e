"""The command line: status, doctor, verify, report, checkpoint, convert, run.

Importing the package has activated it before. Parses and delegates; must never decide anything about torch
itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

import torch_dcp_backport
from torch_dcp_backport import Status
from torch_dcp_backport.activation import gate

PROG = "python -m torch_dcp_backport"

HELP = f"""\
usage: {PROG} COMMAND ...

The fix of torch.distributed.checkpoint.state_dict for torch >= 2.4, < 2.7.

  status [--json] [--load]   say what is decided for this environment, and why
  doctor PROGRAM             say what binds torch's functions too early in PROGRAM, and what to change
  verify ...                 load a model with stock torch and with the fix, and compare memory and values
  report                     print what a bug report needs, to be pasted
  checkpoint inspect DIR     say what a sharded checkpoint holds; `checkpoint verify DIR` reads all of it
  checkpoint list ROOT       say which steps of a run are good; `checkpoint prune ROOT` removes old ones
  checkpoint pin STEP        keep a step from being removed; `checkpoint unpin STEP` takes that back
  checkpoint diff A B        say in which keys, shapes, dtypes and values two steps differ
  checkpoint export DIR OUT  write the model of a checkpoint as files for from_pretrained
  convert SOURCE TARGET      Hugging Face files to a sharded checkpoint of Megatron's GPTModel, or back
  run SCRIPT ARGS...         run a script with the fix active, as `python SCRIPT ARGS...` would
  run -m MODULE ARGS...      run a module with the fix active, as `python -m MODULE ARGS...` would
  help [COMMAND]             this, or more about a command

TORCH_DCP_BACKPORT=auto      (default) fix where needed, warn where that is not possible
TORCH_DCP_BACKPORT=strict    raise where that is not possible, or where torch's functions were bound too early
TORCH_DCP_BACKPORT=off       leave torch alone

exit codes: 0 fine; 2 wrong usage, or another value of TORCH_DCP_BACKPORT; 141 if the output was closed early;
else as the command's help says
"""

RUN_HELP = f"""\
usage: {PROG} run SCRIPT ARGS...
       {PROG} run -m MODULE ARGS...
       {PROG} run -c CODE ARGS...
       {PROG} run - ARGS...

Activates torch_dcp_backport, then becomes what `python` with these arguments would run, as __main__.
Below torchrun: torchrun --nproc-per-node 8 -m torch_dcp_backport run train.py ARGS...

Covers this process, and what it forks. A process that the program starts anew, as torch.multiprocessing.spawn
and Ray do, is covered only if its own modules, or a sitecustomize.py on PYTHONPATH, have
`import torch_dcp_backport`.

exit code: the program's; 2 where there is nothing to run, or where TORCH_DCP_BACKPORT says not to go on
"""

STATUS_HELP = """\
Say what torch_dcp_backport decided for this environment and why. Torch is not imported for this unless --load
is given, so that a torch that needs the fix shows as `pending`.
"""

REPORT_HELP = """\
Print one block of text for a bug report: the status with torch's module imported, versions of torch and of
the packages that call it, devices, and our environment variables. Nothing is sent anywhere.
"""

REPORT_CODES = "exit codes: 0 printed; 2 wrong usage"

STATUS_CODES = """\
exit codes: 0 applied, pending, not-needed, disabled; 1 unsupported, conflict, or torch cannot be imported;
2 wrong usage, or another value of TORCH_DCP_BACKPORT
"""

CLOSED = 128 + 13  # a shell's exit code for a command that SIGPIPE ended


def console() -> int:
    """The installed command `torch-dcp-backport`, which is `python -m torch_dcp_backport`."""
    # There Python puts the working directory first, here the folder of the command.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()
    return main(sys.argv[1:])


def main(argv: list[str]) -> int:
    command, rest = (argv[0], argv[1:]) if argv else ("", [])
    if command == "help" and rest:
        command, rest = rest[0], ["--help"]
        argv = [command, *rest]
    if command == "run" and rest[:1] not in (["-h"], ["--help"]):
        return run(rest)  # its output and errors are the program's
    try:
        try:
            return COMMANDS[command](rest) if command in COMMANDS else usage(argv)
        finally:
            if sys.stdout is not None:  # closed by the caller
                sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more at exit, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED


def usage(argv: list[str]) -> int:
    if argv and argv[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if argv and argv[0] in ("-V", "--version"):
        print(torch_dcp_backport.__version__)
        return 0
    if argv:
        print(f"{PROG}: no command {argv[0]!r}\n", file=sys.stderr)
    print(HELP, end="", file=sys.stderr)
    return 2


def status(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"{PROG} status", description=STATUS_HELP, epilog=STATUS_CODES)
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.add_argument("--load", action="store_true", help="import torch's module first, as training does")
    args = parser.parse_args(argv)
    code = 0
    if args.load and torch_dcp_backport.status().outcome == "pending":
        try:
            import torch.distributed.checkpoint.state_dict  # noqa: F401
        except Exception as error:  # torch's own, or that of strict, which the status tells too
            print(f"{PROG} status: {type(error).__name__}: {error}", file=sys.stderr)
            code = 1
    seen = current()
    print(json.dumps(seen.to_dict(), indent=2) if args.json else seen)
    if isinstance(torch_dcp_backport._failure, ValueError):
        return 2
    return 1 if seen.outcome in ("unsupported", "conflict") else code


def current() -> Status:
    """The status of this process, and where the import failed on the switch or a package, that."""
    failure = torch_dcp_backport._failure
    if isinstance(failure, ImportError):
        return Status("unsupported", str(failure), os.environ.get(gate.VARIABLE) or "auto", None)
    if not isinstance(failure, ValueError):
        return torch_dcp_backport.status()
    reason = f"{failure}. Until then `import torch_dcp_backport` raises this ValueError"
    return Status("disabled", reason, os.environ[gate.VARIABLE], None)


def doctor(argv: list[str]) -> int:
    from torch_dcp_backport.doctor import main as doctor

    return doctor(argv, f"{PROG} doctor")


def verify(argv: list[str]) -> int:
    from torch_dcp_backport.regression.verify import main as verify

    return verify(argv)


def report(argv: list[str]) -> int:
    argparse.ArgumentParser(prog=f"{PROG} report", description=REPORT_HELP, epilog=REPORT_CODES).parse_args(
        argv
    )
    from torch_dcp_backport.bug_report import compose

    print(compose(current))
    return 0


def checkpoint(argv: list[str]) -> int:
    from torch_dcp_backport.checkpoint.commands import ACTIONS

    parser = argparse.ArgumentParser(prog=f"{PROG} checkpoint", epilog="`ACTION --help` says more")
    parser.add_argument("action", choices=ACTIONS)
    action = parser.parse_args(argv[:1]).action
    return ACTIONS[action](argv[1:], f"{PROG} checkpoint {action}")


def convert(argv: list[str]) -> int:
    from torch_dcp_backport.megatron.commands import main as convert

    return convert(argv, f"{PROG} convert")


def run(argv: list[str]) -> int:
    """Become the program. Its SystemExit is ours."""
    if argv[:1] in (["-h"], ["--help"]):
        print(RUN_HELP, end="")
        return 0
    from torch_dcp_backport import program

    failure = torch_dcp_backport._failure
    if failure is not None:
        print(f"{PROG} run: {failure}", file=sys.stderr)
        return 2
    if torch_dcp_backport.status().outcome in ("pending", "applied"):
        program.SpawnNotice.post()
    try:
        program.run(argv)
    except program.Nothing as nothing:
        print(f"{PROG} run: {nothing}", file=sys.stderr)
        return 2
    return 0


COMMANDS = {
    "status": status,
    "doctor": doctor,
    "verify": verify,
    "report": report,
    "checkpoint": checkpoint,
    "convert": convert,
    "run": run,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
