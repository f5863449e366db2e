#!/usr/bin/env python3
"""What the registry has that the lane `newest` does not have yet: say it, or try it and take it.

    python3 tools/newest.py look
    python3 tools/newest.py take -- COMMAND ARG...

`look` asks the registry for the newest releases that can be installed together, and warns with a list of
those that are newer than the pins in tools/newest.txt. It never fails: without an answer it says so. `take`
runs the command with the lane made of these, and writes them into tools/newest.txt where it succeeds.

Needs Python >= 3.9 with venv, nothing else.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent))

import lanes

PINS = lanes.ROOT / "tools" / "newest.txt"
#: Seconds that the registry may take.
LIMIT = 120
LINE = "#" * 100


class NoAnswer(Exception):
    """The registry did not say what is newest."""


def read(text: str) -> dict[str, str]:
    """Package -> version, of lines `package==version`."""
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", text, re.MULTILINE))


def number(version: str) -> tuple[int, ...]:
    """A release as numbers, of which the newer one is greater."""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


def resolved(names: list[str]) -> dict[str, str]:
    """The newest releases that the registry has and that can be installed together.

    Raises:
        NoAnswer: no network, or an index that does not answer as one.
    """
    try:
        command = [lanes.uv_made(), "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
        command += ["--python", sys.executable, "-"]
        done = subprocess.run(command, input="\n".join(names), capture_output=True, text=True, timeout=LIMIT)
    except (OSError, subprocess.SubprocessError) as error:
        raise NoAnswer(str(error)) from error
    if done.returncode:
        raise NoAnswer(done.stderr.strip()[-500:])
    versions = read(done.stdout)
    missing = [name for name in names if name not in versions]
    if missing:
        raise NoAnswer(f"its answer has no {', '.join(missing)}")
    return {name: versions[name] for name in names}


def newer(pins: Mapping[str, str], found: Mapping[str, str]) -> dict[str, str]:
    """Package -> version, of what is newer than its pin."""
    return {name: found[name] for name in pins if number(found[name]) > number(pins[name])}


def look(pins: Mapping[str, str]) -> str:
    """What to say of the registry's releases."""
    try:
        found = resolved([*pins])
    except NoAnswer as problem:
        return f"{LINE}\nWARNING: nobody knows whether the lane newest is the newest: {problem}\n{LINE}"
    raised = newer(pins, found)
    older = [f"{name} {found[name]}" for name in pins if number(found[name]) < number(pins[name])]
    lines = [f"  {name} {pins[name]} -> {version}" for name, version in raised.items()]
    if older:
        lines.append(f"  and offers {', '.join(older)}, older than the pins: an index of another kind?")
    if not lines:
        return "The lane newest is the registry's newest."
    head = "WARNING: the registry has other releases than those that the lane newest was last good with:"
    return "\n".join(
        (LINE, head, *lines, "To try them, and to pin them if all passes: make newest-take", LINE)
    )


def take(pins: Mapping[str, str], command: list[str]) -> int:
    """Run a command with the registry's newest releases, and make them the pins where it succeeds."""
    try:
        raised = newer(pins, resolved([*pins]))
    except NoAnswer as problem:
        print(f"the registry did not say what is newest: {problem}", file=sys.stderr)
        return 1
    if not raised:
        print("the lane newest is the registry's newest")
        return 0
    text = "".join(f"{name}=={version}\n" for name, version in {**pins, **raised}.items())
    with TemporaryDirectory() as folder:
        tried = Path(folder, "newest.txt")
        tried.write_text(text)
        code = subprocess.run(command, env={**os.environ, lanes.NEWEST: str(tried)}).returncode
    if code:
        print(f"not taken: the command failed with {', '.join(text.split())}", file=sys.stderr)
        return code
    PINS.write_text(text)
    print(f"{PINS.name}: {', '.join(text.split())}")
    if "torch" in raised:
        print(f"The lane current has {lanes.torch_of('current')}: raise it in tools/lanes.py with a release.")
    return 0


def main(argv: list[str]) -> int:
    pins = read(PINS.read_text())
    if argv == ["look"]:
        print(look(pins))
        return 0
    if argv[:2] == ["take", "--"] and argv[2:]:
        return take(pins, argv[2:])
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
