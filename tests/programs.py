"""Programs that a test runs as a user would."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from warm import Interpreters

SECONDS = 200


def blocks(page: Path, language: str) -> list[str]:
    """The texts of a page's blocks of a language."""
    return re.findall(rf"^ *```{language}\n(.*?)^ *```$", page.read_text(), re.DOTALL | re.MULTILINE)


def output_of(arguments: Sequence[str], folder: Path) -> str:
    """What `python ARGUMENTS...` prints in `folder`, its errors in between; it has to end well."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def output_of_code(interpreters: Interpreters, code: str, folder: Path, *argv: str, **later: str) -> str:
    """What a program prints in `folder`, and then its errors; it has to end well."""
    ended, out, err = interpreters.run(code, argv, interpreters.environment(None), folder, SECONDS, **later)
    assert ended == 0, out + err
    return out + err


def output_of_ranks(
    interpreters: Interpreters, program: Path, folder: Path, world: int, argv: Sequence[str] = ()
) -> str:
    """What the ranks of a program print, rank 0 first: what torchrun would start, without its imports."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def rank(number: int) -> str:
        mine = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        later = {**mine, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        texts = {name: str(value) for name, value in later.items()}
        return output_of_code(interpreters, program.read_text(), folder, *argv, **texts)

    with ThreadPoolExecutor(world) as executor:
        return "".join(executor.map(rank, range(world)))
