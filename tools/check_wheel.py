#!/usr/bin/env python3
"""Build wheel and sdist, check what is inside, install the wheel into a clean environment, import it.

Runs in the lint lane (it has `build` and hatchling). Touches nothing in the checkout.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "dist"
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT))
        (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
        run(sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
        check_contents(wheel, sdist)
        check_install(wheel, Path(folder))
    print("wheel and sdist are sound")
    return 0


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}")
    return done.stdout


def check_contents(wheel: Path, sdist: Path) -> None:
    """The wheel holds exactly the package as git knows it; nothing that Python runs at start-up."""
    tracked = run("git", "ls-files", "torch_dcp_backport").split()
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    if packed != set(tracked):
        raise SystemExit(f"wheel and git differ: {sorted(packed ^ set(tracked))}")
    if "torch_dcp_backport/py.typed" not in packed:
        raise SystemExit("the wheel is not typed: py.typed is missing")
    with tarfile.open(sdist) as archive:
        inside = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    for name in ("README.md", "LICENSE", "CHANGELOG.md", "patches/README.md", "tests/unit/test_gate.py"):
        if name not in inside:
            raise SystemExit(f"the sdist lacks {name}")


def check_install(wheel: Path, folder: Path) -> None:
    """Without torch there is nothing to patch: the import warns, and says so."""
    env = folder / "env"
    venv.create(env, with_pip=True)
    python = str(env / "bin" / "python")
    run(python, "-m", "pip", "install", "--quiet", "packaging>=21", "wrapt>=1.16")
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel))
    code = (
        "import torch_dcp_backport as t, importlib.metadata as m, sys;"
        "assert t.__version__ == m.version('torch-dcp-backport');"
        "assert t.status().outcome == 'unsupported', t.status();"
        "assert 'site-packages' in t.__file__; print(t.status())"
    )
    clean = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TORCH_DCP_BACKPORT")
    }
    done = subprocess.run([python, "-W", "error::RuntimeWarning", "-c", code], cwd=folder, env=clean)
    if done.returncode:
        raise SystemExit("the installed wheel does not import")


if __name__ == "__main__":
    sys.exit(main())
