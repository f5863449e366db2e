"""The lane of a transfer: the kind of messages that carries it, by what they cost on its backend.

Pure functions of what all ranks know: every rank chooses the same.
"""

from __future__ import annotations

import enum
import logging

logger = logging.getLogger("torch_dcp_backport.transfer")

#: Backends whose point-to-point messages cost a rank no memory for each peer, and whose start is cheap.
MESSENGERS = frozenset({"gloo", "mpi"})
#: Backends of accelerators. NCCL keeps buffers for every peer of a communicator, outside torch's allocator,
#: as long as the communicator lives (https://github.com/NVIDIA/nccl/issues/1685). The others follow it.
COLLECTIVE = frozenset({"nccl", "xccl", "ccl", "hccl", "mccl", "cncl", "eccl", "ucc"})
#: Backends whose messages move nothing. torch has one for dry runs: one process plays any rank of any world.
SILENT = frozenset({"fake"})

_unknown: set[str] = set()


class Lane(enum.Enum):
    """A kind of messages."""

    #: To each rank what it lacks, and nothing else.
    MESSAGES = "messages"
    #: From one rank to all the same bytes, of which each keeps its parts.
    BROADCAST = "broadcast"
    #: From all ranks to all the same bytes, of which each keeps its parts, or nothing.
    ALL_GATHER = "all-gather"


def is_collective(backend: str) -> bool:
    """Whether transfers are to make no point-to-point messages where collectives can do the same.

    Args:
        backend: as the process group names it. One that is not known may keep buffers for every peer, as NCCL
            does; what it has are collectives.
    """
    if backend in MESSENGERS:
        return False
    if backend not in COLLECTIVE and backend not in _unknown:
        _unknown.add(backend)
        logger.debug("the backend %r is not known: transfers in its groups use collectives alone", backend)
    return True


def lane_of(backend: str, *, senders: int, wanted_by: int = 0) -> Lane:
    """The lane of a transfer.

    A broadcast brings each rank more than its parts. It costs the sender no more than its parts to each rank
    would, the model once; the sender packs each tensor once, not once for each rank, and no rank gets buffers
    for a peer.

    Args:
        backend: of the device that the messages are on.
        senders: ranks that have something that another one wants.
        wanted_by: ranks that want all of it; 0 where each wants parts of its own.
    """
    if is_collective(backend):
        if senders == 1:
            return Lane.BROADCAST
        # Parts between many and many: each rank has few peers, and a collective would bring all bytes to all.
        return Lane.ALL_GATHER if wanted_by else Lane.MESSAGES
    return Lane.ALL_GATHER if senders > 1 and wanted_by > 1 else Lane.MESSAGES
