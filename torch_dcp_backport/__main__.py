"""The command line: status, doctor, verify, report, checkpoint, convert, run.

Importing the package has activated it before. Parses and delegates; must never decide anything about torch
itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable

import torch_dcp_backport
from torch_dcp_backport import Status, arguments
from torch_dcp_backport.activation import gate

PROG = "python -m torch_dcp_backport"

# What `checkpoint` does, by its actions with what each takes.
CHECKPOINT = {
    "list ROOT": "the steps of a run, and which of them are good",
    "prune ROOT": "remove old steps",
    "pin STEP": "keep a step from being removed",
    "unpin STEP": "take that back",
    "inspect DIR": "what a sharded checkpoint holds",
    "diff A B": "the keys, shapes, types and values that differ",
    "verify DIR": "read all of it, and compare checksums",
    "export DIR OUT": "write its model for from_pretrained",
}
ACTIONS_HELP = "".join(f"  checkpoint {action:<15} {does}\n" for action, does in CHECKPOINT.items())

# The same in README, CONTRIBUTING and docs: tests/unit/test_pages.py.
ABOUT = """\
torch_dcp_backport corrects torch.distributed.checkpoint inside a running
program on torch 2.4, 2.5 and 2.6: full state dicts of FSDP2 models load and
save without running out of memory, hanging or losing values. On torch 2.7 or
newer it patches nothing, and the backport ends when no project pins an older
torch. The package also has libraries that a program imports by name, for torch
2.4 and newer: sharded checkpoints, checkpoint managers, Hugging Face and
Megatron weights, and an FSDP2 training engine; they stay useful after the
backport.
"""

HELP = f"""\
usage: {PROG} COMMAND ...

{ABOUT}
Is it on?
  status [--load]            what is decided for this environment, and why
  doctor PROGRAM             which imports of PROGRAM come too early
  verify                     memory and values with stock torch and with the fix
  report                     a text for a bug report

Start a program with the fix on, as `python` would start it:
  run SCRIPT ARGS...
  run -m MODULE ARGS...

Checkpoints and weights:
{ACTIONS_HELP}  convert SOURCE TARGET      Hugging Face files to a checkpoint for Megatron's
                             GPTModel, or back

  help [COMMAND]             this text, or more about a command

TORCH_DCP_BACKPORT=auto    (default) patch where needed, warn where that is not
                           possible
TORCH_DCP_BACKPORT=strict  raise where that is not possible, or where torch's
                           functions were bound too early
TORCH_DCP_BACKPORT=off     leave torch alone

exit codes: 0 fine; 2 wrong usage, or another value of TORCH_DCP_BACKPORT;
141 if the output was closed early; others: see the command's help
"""

RUN_HELP = f"""\
usage: {PROG} run SCRIPT ARGS...
       {PROG} run -m MODULE ARGS...
       {PROG} run -c CODE ARGS...
       {PROG} run - ARGS...

Switch the fix on, then run what `python` with these arguments would run.

With torchrun:
  torchrun --nproc-per-node 8 -m torch_dcp_backport run train.py ARGS...

This reaches the process itself and the processes that it forks. It does not
reach processes that the program starts anew, as torch.multiprocessing.spawn
and Ray do. Put `import torch_dcp_backport` into their modules for these, or
into a sitecustomize.py on PYTHONPATH.

exit code: the program's; 2 if there is nothing to run, or if
TORCH_DCP_BACKPORT has a value that is not known, or asks for an error
"""

STATUS_HELP = """\
Say what torch_dcp_backport decided for this environment, and why. Without --load torch is not imported, and a
torch that needs the fix shows as `pending`.
"""

REPORT_HELP = """\
Print one block of text for a bug report: the status with torch's module imported, the versions of torch and
of packages that call it, the devices, and this package's environment variables. Nothing is sent anywhere.
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
        action = rest[1:2] if rest[0] == "checkpoint" else []
        command, rest = rest[0], [*action, "--help"]
        argv = [command, *rest]
    if command == "run" and rest[:1] not in (["-h"], ["--help"]):
        return run(rest)  # its output and errors are the program's
    try:
        try:
            return COMMANDS[command](rest) if command in COMMANDS else usage(argv)
        except SystemExit as ended:  # a parser's
            return int(ended.code or 0)
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
        return no_such(PROG, "command", argv[0], COMMANDS)
    print(HELP, end="", file=sys.stderr)
    return 2


def status(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"{PROG} status", description=STATUS_HELP, epilog=STATUS_CODES)
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.add_argument("--load", action="store_true", help="import torch's module first, as training does")
    parser.add_argument("--verbose", action="store_true", help="every replaced name and every defect")
    args = parser.parse_args(argv)
    code = 0
    if args.load and torch_dcp_backport.status().outcome == "pending":
        try:
            import torch.distributed.checkpoint.state_dict  # noqa: F401
        except Exception as error:  # torch's own, or that of strict, which the status tells too
            print(f"{PROG} status: {type(error).__name__}: {error}", file=sys.stderr)
            code = 1
    seen = current()
    text = seen.explain() if args.verbose else str(seen)
    print(json.dumps(seen.to_dict(), indent=2) if args.json else text)
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
    reason = f"{failure}. `import torch_dcp_backport` raises this ValueError"
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
    prog = f"{PROG} checkpoint"
    if argv[:1] in ([], ["-h"], ["--help"]):
        print(f"usage: {prog} ACTION ...\n\n{ACTIONS_HELP}", file=sys.stdout if argv else sys.stderr)
        print(f"more: {PROG} help checkpoint ACTION", file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    action, rest = argv[0], argv[1:]
    if action not in arguments.CHECKPOINT:
        return no_such(prog, "action", action, arguments.CHECKPOINT)
    args = arguments.CHECKPOINT[action](f"{prog} {action}").parse_args(rest)
    from torch_dcp_backport.checkpoint import commands

    return commands.main(action, args, f"{prog} {action}")


def no_such(prog: str, what: str, word: str, known: Iterable[str]) -> int:
    close = arguments.nearest(word, known) or f": there are {', '.join(known)} ({PROG} help)"
    arguments.say(prog, f"no {what} {word!r}{close}")
    return 2


def convert(argv: list[str]) -> int:
    prog = f"{PROG} convert"
    args = arguments.of_convert(prog).parse_args(argv)
    from torch_dcp_backport.checkpoint.commands import check_steps
    from torch_dcp_backport.megatron import commands

    return commands.main(args, prog, check_steps)


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
