"""The command line: status, verify, run, report. Importing the package has activated it before this starts.

Parses and delegates; must never decide anything about torch itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

import torch_dcp_backport
from torch_dcp_backport import program

PROG = "python -m torch_dcp_backport"

HELP = f"""\
usage: {PROG} COMMAND ...

The fix of torch.distributed.checkpoint.state_dict for torch >= 2.4, < 2.7.

  status [--json] [--load]   say what is decided for this environment, and why
  verify ...                 load a model with stock torch and with the fix, and compare memory and values
  report                     print what a bug report needs, to be pasted
  run SCRIPT ARGS...         run a script with the fix active, as `python SCRIPT ARGS...` would
  run -m MODULE ARGS...      run a module with the fix active, as `python -m MODULE ARGS...` would

`{PROG} COMMAND --help` says more.

TORCH_DCP_BACKPORT=auto      (default) fix where needed, warn where that is not possible
TORCH_DCP_BACKPORT=strict    raise where that is not possible, or where torch's functions were bound too early
TORCH_DCP_BACKPORT=off       leave torch alone

exit codes: 0 fine; 2 wrong usage; else as the command's help says
"""

RUN_HELP = f"""\
usage: {PROG} run SCRIPT ARGS...
       {PROG} run -m MODULE ARGS...

Activates torch_dcp_backport, then runs SCRIPT or MODULE as __main__ with ARGS, all of them untouched.
Below torchrun: torchrun --nproc-per-node 8 -m torch_dcp_backport run train.py ARGS...

Covers this process, and what it forks. A process that the program spawns anew, as
torch.multiprocessing.spawn does, is covered only if the program has `import torch_dcp_backport`.

exit code: the program's; 2 where there is nothing to run
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

STATUS_CODES = "exit codes: 0 applied, pending, not-needed, disabled; 1 unsupported, conflict; 2 wrong usage"


def console() -> int:
    """The installed command `torch-dcp-backport`, which is `python -m torch_dcp_backport`."""
    # There Python puts the working directory first, here the folder of the command.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()
    return main(sys.argv[1:])


def main(argv: list[str]) -> int:
    command, rest = (argv[0], argv[1:]) if argv else ("", [])
    if command == "status":
        return status(rest)
    if command == "verify":
        from torch_dcp_backport.regression.verify import main as verify

        return verify(rest)
    if command == "report":
        return report(rest)
    if command == "run":
        return run(rest)
    if command in ("-h", "--help"):
        print(HELP, end="")
        return 0
    if command == "--version":
        print(torch_dcp_backport.__version__)
        return 0
    if command:
        print(f"{PROG}: no command {command!r}\n", file=sys.stderr)
    print(HELP, end="", file=sys.stderr)
    return 2


def status(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"{PROG} status", description=STATUS_HELP, epilog=STATUS_CODES)
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.add_argument("--load", action="store_true", help="import torch's module first, as training does")
    args = parser.parse_args(argv)
    found = torch_dcp_backport.status()
    if args.load and found.outcome == "pending":
        import torch.distributed.checkpoint.state_dict  # noqa: F401

        found = torch_dcp_backport.status()
    print(json.dumps(found.to_dict(), indent=2) if args.json else found)
    return 1 if found.outcome in ("unsupported", "conflict") else 0


def report(argv: list[str]) -> int:
    argparse.ArgumentParser(prog=f"{PROG} report", description=REPORT_HELP, epilog=REPORT_CODES).parse_args(
        argv
    )
    from torch_dcp_backport.bug_report import compose

    print(compose())
    return 0


def run(argv: list[str]) -> int:
    """Become the program. Its SystemExit is ours."""
    if argv[:1] in (["-h"], ["--help"]):
        print(RUN_HELP, end="")
        return 0
    if torch_dcp_backport.status().outcome in ("pending", "applied"):
        program.SpawnNotice.post()
    try:
        program.run(argv)
    except program.Nothing as nothing:
        print(f"{PROG} run: {nothing}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
