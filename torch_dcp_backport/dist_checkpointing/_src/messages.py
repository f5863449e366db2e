"""What the trainer's thread and the process that writes tell each other. Must never import torch."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from torch_dcp_backport.dist_checkpointing._src.body import Output, Places

#: A message: its kind, and a number: of bytes that were written, or of bytes that follow.
MESSAGE = struct.Struct("<cQ")
MOVED, DONE, FAILED = b"m", b"d", b"f"
ORDER = b"o"


class Order(NamedTuple):
    """What the process writes."""

    #: Of the memory.
    nbytes: int
    places: Places
    objects: Sequence[bytes]
    #: Without the records' places.
    output: Output
