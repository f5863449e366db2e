#!/usr/bin/env python3
"""Build wheel and sdist, check what is inside, install the wheel into clean environments, use it from there.

    check_wheel.py PYTHON-WITH-TORCH

Runs in the lint lane (it has `build`, hatchling and mypy). What is sound is left in dist/.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAME = "torch-dcp-backport"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "dist"
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT))
        (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
        run(sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
        check_contents(wheel, sdist)
        check_requirements(wheel, Path(folder))
        check_without_torch(wheel, Path(folder))
        check_with_torch(wheel, Path(folder), sys.argv[1])
        shutil.copytree(out, ROOT / "dist", dirs_exist_ok=True)
    print(f"wheel and sdist are sound: dist/{wheel.name}, dist/{sdist.name}")
    return 0


def run(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, text=True, env=clean())
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}")
    return done.stdout


def clean() -> dict[str, str]:
    """Without what would put the checkout in front of the installed package."""
    ours = ("PYTHONPATH", "TORCH_DCP_BACKPORT")
    return {key: value for key, value in os.environ.items() if key not in ours}


def check_contents(wheel: Path, sdist: Path) -> None:
    """The wheel holds exactly the package as git knows it; nothing that Python runs at start-up."""
    tracked = run("git", "ls-files", "torch_dcp_backport").split()
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    if packed != set(tracked):
        raise SystemExit(f"wheel and git differ: {sorted(packed ^ set(tracked))}")
    (points,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("entry_points.txt"))
    sections = [line for line in zipfile.ZipFile(wheel).read(points).decode().splitlines() if line[:1] == "["]
    if sections != ["[console_scripts]"]:
        raise SystemExit(f"more than the command starts by itself: {sections}")
    if "torch_dcp_backport/py.typed" not in packed:
        raise SystemExit("the wheel is not typed: py.typed is missing")
    (described,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/METADATA"))
    links = re.findall(r"\]\(([^)]+)\)", zipfile.ZipFile(wheel).read(described).decode())
    relative = [link for link in links if "://" not in link]
    if relative or not links:
        raise SystemExit(f"a package index would show dead links: {relative}")
    with tarfile.open(sdist) as archive:
        inside = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    known = {name for name in run("git", "ls-files").split() if not name.startswith(".")} | {"PKG-INFO"}
    files = {name for name in inside if not any(other.startswith(f"{name}/") for other in inside)}
    if files - {".gitignore"} != known:
        raise SystemExit(f"sdist and git differ: {sorted((files - {'.gitignore'}) ^ known)}")


def installed(wheel: Path, env: Path) -> str:
    """The Python of a new environment with the wheel, without what it depends on."""
    venv.create(env, with_pip=True)
    python = str(env / "bin" / "python")
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel))
    return python


def check_requirements(wheel: Path, folder: Path) -> None:
    """docs/install.md: `pip wheel` makes the same wheel, and a line with its hash installs it, extras too."""
    env = folder / "requirements"
    venv.create(env, with_pip=True)
    pip = (str(env / "bin" / "python"), "-m", "pip")
    site = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own, other = (Path(run(python, "-c", site).strip()) for python in (pip[0], sys.executable))
    (own / "build.pth").write_text(f"{other}\n")  # hatchling
    run(
        *pip,
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder / "pip"),
        str(ROOT),
    )
    (made,) = (folder / "pip").iterdir()
    names = [set(zipfile.ZipFile(each).namelist()) for each in (made, wheel)]
    if made.name != wheel.name or names[0] != names[1]:
        raise SystemExit(f"pip makes another wheel: {made.name}, {sorted(names[0] ^ names[1])}")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    places = ("--no-index", "--find-links", str(wheel.parent), "--no-deps", "--force-reinstall")
    for source in (str(wheel), f"{NAME}=={wheel.name.split('-')[1]}"):
        (folder / "requirements.txt").write_text(f"{source} --hash=sha256:{digest}\n")
        run(*pip, "install", "--quiet", *places, "-r", str(folder / "requirements.txt"))
    for kind in ("--only-binary", "--no-binary"):  # by name, from the wheel and from the source archive
        run(*pip, "install", "--quiet", *places, "--no-build-isolation", kind, NAME, NAME)
    extras = (
        "import importlib.metadata as m; print(*m.metadata('torch-dcp-backport').get_all('Provides-Extra'))"
    )
    page = (ROOT / "docs" / "install.md").read_text()
    told = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    if sorted(told) != sorted(run(pip[0], "-c", extras, cwd=folder).split()):
        raise SystemExit(f"docs/install.md and the wheel have other extras: {told}")


def check_with_torch(wheel: Path, folder: Path, lane: str) -> None:
    """Beside the packages of a lane: nothing is in conflict, and all works from outside the tree."""
    env = folder / "torch"
    venv.create(env, with_pip=True)
    python = str(env / "bin" / "python")
    site = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own, other = (Path(run(one, "-c", site).strip()) for one in (python, lane))
    (own / "lane.pth").write_text(f"{other}\n")
    # By name, from a folder as the index, on a machine that has torch: what the package needs is there.
    run(python, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(wheel.parent), NAME)
    print(run(python, "-m", "pip", "check"), end="")
    command = str(Path(python).with_name("torch-dcp-backport"))
    status = run(command, "status", cwd=folder)
    if "applied" not in status and "pending" not in status:
        raise SystemExit(f"the installed command says:\n{status}")
    code = "import sys, torch_dcp_backport as t; print(t.status().outcome, sys.argv)"
    (folder / "program.py").write_text(code)
    program = run(command, "run", "-m", "program", "--lr", "1", cwd=folder)
    if not program.startswith("pending") or "'--lr', '1']" not in program:
        raise SystemExit(f"a program that the installed command runs says: {program}")
    check_verify(command, folder)
    sample = folder / "typed_client.py"
    sample.write_text((ROOT / "tests" / "typed_client.py").read_text())
    checker = ("-m", "mypy", "--strict", "--python-executable", python)
    print(run(sys.executable, *checker, sample.name, cwd=folder), end="")


def check_verify(command: str, folder: Path) -> None:
    """The main job: what it prints, what it writes, and on stderr how far it is."""
    where = ("--size", "tiny", "--device", "cpu", "--backend", "gloo")
    arguments = [command, "verify", *where, "--no-plot", "--json", "found.json"]
    done = subprocess.run(arguments, cwd=folder, env=clean(), capture_output=True, text=True)
    print(done.stdout)
    if done.returncode or "device: cpu (as asked), backend: gloo" not in done.stdout:
        raise SystemExit(done.stderr)
    found = json.loads((folder / "found.json").read_text())
    # The budget tells the two apart by the peak alone: nothing is kept by a load in place.
    stock = found["sides"]["stock"]["cases"]["load"][1]["result"]
    margin = found["budget"]["peak_margin_bytes"]
    if stock["storages"] != stock["shard"] or stock["peak"] <= stock["new"] + margin:
        raise SystemExit(f"rank 1 of stock torch, which loads in place: {stock}")
    # A step that takes long on a busy machine is told before its end as well.
    ended = [line for line in done.stderr.splitlines() if line.endswith(" finished")]
    steps = [line.partition("] ")[2].split()[0] for line in ended]
    # The devices, the files, and each case on both sides.
    most = 2 + sum(len(side["cases"]) for side in found["sides"].values())
    wanted = [f"{number}/{most}" for number in range(1, most + 1)]
    if steps != wanted or not done.stderr.endswith(": optimizer finished\n"):
        raise SystemExit(f"its steps are not told:\n{done.stderr}")


def check_without_torch(wheel: Path, folder: Path) -> None:
    """Without torch there is nothing to patch: the import warns, and says so."""
    python = installed(wheel, folder / "env")
    code = (
        "import torch_dcp_backport as t, importlib.metadata as m, sys;"
        "assert t.__version__ == m.version('torch-dcp-backport');"
        "assert t.status().outcome == 'unsupported', t.status();"
        "assert 'site-packages' in t.__file__; print(t.status())"
    )
    done = subprocess.run([python, "-W", "error::RuntimeWarning", "-c", code], cwd=folder, env=clean())
    if done.returncode:
        raise SystemExit("the installed wheel does not import")


if __name__ == "__main__":
    sys.exit(main())
