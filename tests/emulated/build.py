"""Compile the emulated accelerator, once for each torch, into the cache folder of tools/lanes.py.

Needs g++ and Python's headers; without them nothing here may be skipped, so it raises.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

from tools.lanes import cache_dir, locked

SOURCE = Path(__file__).with_name("fakegpu.cpp")
NAME = "fakegpu_native"


def library() -> ModuleType:
    """The compiled module; compiled first if this source was not yet, for this torch and this Python."""
    path = compiled()
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def compiled() -> Path:
    """The path of the shared library."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    flags = compiler_flags()
    text = "\n".join((SOURCE.read_text(), torch.__version__, suffix, *flags))
    folder = cache_dir() / f"emulated-{torch.__version__}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    path = folder / f"{NAME}{suffix}"
    with locked(folder.with_name(f"{folder.name}.lock")):
        if not path.exists():
            folder.mkdir(exist_ok=True)
            compile_to(path, flags)
    return path


def compiler_flags() -> tuple[str, ...]:
    root = Path(torch.__file__).parent
    # pybind11 shares its types only among modules that were compiled alike.
    names = ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")
    values = {name: getattr(torch._C, f"_PYBIND11_{name}", None) for name in names}
    return (
        *("-O1", "-w", "-std=c++17", "-fPIC", "-shared"),
        f"-DTORCH_EXTENSION_NAME={NAME}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f'-DPYBIND11_{name}="{value}"' for name, value in values.items() if value),
        f"-I{root / 'include'}",
        f"-I{root / 'include/torch/csrc/api/include'}",
        f"-I{sysconfig.get_path('include')}",
        f"-L{root / 'lib'}",
        f"-Wl,-rpath,{root / 'lib'}",
    )


def compile_to(path: Path, flags: tuple[str, ...]) -> None:
    if shutil.which("g++") is None:
        raise RuntimeError("tests/emulated compiles its device: it needs g++ on PATH, and there is none")
    half_made = path.with_suffix(".half-made")
    libraries = ("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python")
    command = ["g++", str(SOURCE), *flags, *libraries, "-o", str(half_made)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        headers = sysconfig.get_path("include")
        raise RuntimeError(f"g++ failed, with Python's headers in {headers}:\n{done.stdout}")
    os.replace(half_made, path)
