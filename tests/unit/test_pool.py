"""Pools of ranks: one that a failed test forgets must not keep the session from its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FORGOTTEN = """
import sys
sys.path.insert(0, sys.argv[1])
from pool import OURS, Pool

if __name__ == "__main__":
    pools = [Pool(1, OURS), Pool(1, OURS)]
    for pool in pools:
        pool.go()
        pool.is_busy = False
    assert pools[0].is_stopped
    print(*(process.pid for pool in pools for process in pool.processes))
"""


def test_a_session_ends_with_pools_that_stand_still(tmp_path: Path) -> None:
    program = tmp_path / "forgotten.py"
    program.write_text(FORGOTTEN)
    tests = str(Path(__file__).parents[1])
    command = [sys.executable, str(program), tests]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert not [pid for pid in done.stdout.split() if os.path.exists(f"/proc/{pid}")]
