"""The environment for a bug report, as text to paste. Nothing of the user's own is in it.

Must work where torch does not.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Iterator

from torch_dcp_backport.activation import gate
from torch_dcp_backport.activation.status import Status

#: The packages that take part, and those that call the functions that we replace.
PACKAGES = (
    "torch",
    "numpy",
    "accelerate",
    "lightning",
    "lightning-fabric",
    "torchtune",
    "torchtitan",
    "transformers",
    "verl",
    "vllm",
    "sglang",
    "torch-npu",
    "habana-torch-plugin",
)
#: The beginning of all our switches.
PREFIX = gate.VARIABLE


def compose(status: Callable[[], Status]) -> str:
    """The report. Imports torch's module, as training does, so that the status is final."""
    devices = devices_of_torch()
    switches = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(PREFIX)]
    lines = [
        "```",
        status().explain(),
        "",
        f"python       {platform.python_version()} ({sys.implementation.name}), {platform.platform()}",
        f"packages     {', '.join(versions())}",
        *devices,
        f"switches     {', '.join(switches) or 'none set'}",
        "```",
    ]
    return "\n".join(lines)


def devices_of_torch() -> list[str]:
    try:
        import torch
        import torch.distributed.checkpoint.state_dict
    except Exception as error:
        return [f"torch        cannot be imported: {type(error).__name__}: {error}"]
    backends = [
        name
        for name in ("gloo", "nccl", "mpi", "ucc")
        if getattr(torch.distributed, f"is_{name}_available", bool)()
    ]
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return [
        f"backends     {', '.join(backends)}",
        f"CUDA         {torch.version.cuda or 'none'}; {', '.join(names) or 'no device'}",
        f"staging      {staging()}",
    ]


def staging() -> str:
    """The budget that transfers will have, or its error."""
    # Not at the head: a report has to be possible where torch cannot be imported.
    from torch_dcp_backport.transfer import settings

    try:
        return f"{settings.staging_bytes() / settings.MIB:g} MiB"
    except ValueError as error:
        return str(error)


def versions() -> Iterator[str]:
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield f"{name} {importlib.metadata.version(name)}"
