"""A connection between two ranks, for bytes on the host, beside all process groups.

A group of all ranks would connect every rank with every other one; backends of accelerators keep memory of
the device for each peer. Must never be used by two threads at once.
"""

from __future__ import annotations

import datetime
from typing import Any, Optional

import torch
import torch.distributed as dist

from torch_dcp_backport import compat


class BrokenLink(Exception):
    """The other end is gone, has given up, or is too late."""


class Link:
    """This rank's end of a connection. Each end opens its own, in any order.

    An end that is closed breaks the connection: the other end finds out at its next message.
    """

    def __init__(self, name: str, source: int, target: int, seconds: float) -> None:
        """Connect, once the other end does.

        Args:
            name: the same at both ends; another one for each connection of a pair of ranks.
            source: the global rank that sends.
            target: the global rank that receives.
            seconds: the most that the other end may take to connect, and for each message.

        Raises:
            BrokenLink: the other end did not connect.
            RuntimeError: this torch has no gloo.
        """
        self.source = source
        self.target = target
        if not dist.is_gloo_available():
            raise RuntimeError("this torch has no gloo, which carries bytes between hosts")
        self.is_source = dist.get_rank() == source
        # torch's types do not have all that it exports.
        native: Any = dist
        prefix, limit = (
            f"torch_dcp_backport/link/{name}/{source}-{target}",
            datetime.timedelta(seconds=seconds),
        )
        self._pair: Optional[Any] = None
        try:
            store = native.PrefixStore(prefix, compat.default_store())
            self._pair = native.ProcessGroupGloo(store, 0 if self.is_source else 1, 2, limit)
        except RuntimeError as error:
            raise self._broken(error) from error

    def send(self, data: torch.Tensor) -> None:
        """Send bytes to the target; the next message may overwrite them once this returns.

        Raises:
            BrokenLink: they did not arrive.
        """
        self._move("send", data, 1)

    def receive(self, data: torch.Tensor) -> None:
        """Receive as many bytes from the source as it sends in one message.

        Raises:
            BrokenLink: they did not come.
        """
        self._move("recv", data, 0)

    def close(self) -> None:
        """End the connection. Does nothing a second time."""
        self._pair = None

    def _move(self, operation: str, data: torch.Tensor, other: int) -> None:
        try:
            if self._pair is None:
                raise RuntimeError("the connection is closed")
            getattr(self._pair, operation)([data], other, 0).wait()
        except RuntimeError as error:
            self.close()
            raise self._broken(error) from error

    def _broken(self, error: RuntimeError) -> BrokenLink:
        rank = self.target if self.is_source else self.source
        text = str(error).partition("\n")[0]
        return BrokenLink(f"rank {rank} gave up the copy, is gone or too late ({text})")
