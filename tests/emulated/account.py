"""What one rank did on the emulated accelerator: broken rules, communicators, peers, bytes.

It never judges: strict.py says what is a violation, promises.py what a case may open and send.
"""

from __future__ import annotations

import traceback
from collections import Counter

#: Frames of the package that a violation's text names.
FRAMES = 4


class Account:
    def __init__(self) -> None:
        self.violations: list[str] = []
        #: Names of the communicators that this rank is in.
        self.communicators: list[str] = []
        #: (communicator, peer): NCCL keeps buffers for each that it sends to, and for each that it receives
        #: from, on 8 H100 64 and 320 MiB (https://github.com/NVIDIA/nccl/issues/1685).
        self.sends_to: set[tuple[str, int]] = set()
        self.receives_from: set[tuple[str, int]] = set()
        #: Bytes that this rank gave to operations, by their kinds.
        self.sent: Counter[str] = Counter()

    def violation(self, text: str) -> None:
        package = [
            f"{frame.filename.partition('/torch_dcp_backport/')[2]}:{frame.lineno}"
            for frame in traceback.extract_stack()
            if "/torch_dcp_backport/" in frame.filename and "/tests/" not in frame.filename
        ]
        where = " < ".join(reversed(package[-FRAMES:]))
        self.violations.append(f"{text} [{where}]" if where else text)

    def reset_traffic(self) -> None:
        """Forget peers and bytes, as those of a preparation; not communicators, nor violations."""
        self.sends_to.clear()
        self.receives_from.clear()
        self.sent.clear()


#: Of this process.
account = Account()
