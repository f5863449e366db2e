"""How long a test waits before it takes something for hung: longer on a machine that has much to do."""

from __future__ import annotations

import os

#: Processes that run or wait for each processor, up to which limits are as they are written.
USUAL = 4.0
#: Limits are never longer than this many times: what hangs has to end.
MOST = 4.0


def factor() -> float:
    """Return by how much limits are longer now; a red test means a defect, not a busy machine."""
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return min(max(load / USUAL, 1.0), MOST)
