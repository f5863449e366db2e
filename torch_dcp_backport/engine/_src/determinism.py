"""Reproducible runs, as verl's `full_determinism` asks for them."""

from __future__ import annotations

import os
import random
import sys

import torch

#: Read by libraries when they begin; what is set already stays.
VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_DETERMINISTIC": "1", "FLASH_ATTENTION_DETERMINISTIC": "1",
}  # fmt: skip


def enable(seed: int) -> None:
    """Seed all random numbers of this process, and let torch take its deterministic algorithms."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    torch.manual_seed(seed)  # of all devices
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
