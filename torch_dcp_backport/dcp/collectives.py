"""The collectives of `dcp.save` and `dcp.load`, for errors of any class, in a group of any ranks.

Must never give the group what another rank cannot unpickle: that rank would fail, and the others wait for it.
Ranks of torch.distributed's functions for objects are global, that of the coordinator is its group's.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import traceback
from collections.abc import Mapping
from typing import Any, Optional

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException, _is_wrapped_exception


def all_gather_keys(local_dict: Mapping[Any, Any], group: Optional[dist.ProcessGroup] = None) -> list[Any]:
    """Return the keys of all ranks of the group, sorted."""
    keys: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(keys, list(local_dict.keys()), group=group)
    return sorted(set(itertools.chain.from_iterable(keys)))


class DistWrapper:
    def broadcast_object(self: Any, object: Any) -> Any:
        """Return the coordinator's object."""
        if not self.use_dist:
            return object
        held = [portable(object)]
        dist.broadcast_object_list(object_list=held, group=self.group, src=global_coordinator(self))
        return held[0]

    def all_gather_object(self: Any, object: Any) -> list[Any]:
        """Return every rank's object."""
        if not self.use_dist:
            return [object]
        held: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(held, portable(object), group=self.group)
        return held

    def gather_object(self: Any, object: Any) -> Optional[list[Any]]:
        """Return every rank's object on the coordinator, None on other ranks."""
        if not self.use_dist:
            return [object]
        held = [None] * dist.get_world_size(self.group) if self.is_coordinator else None
        dist.gather_object(
            obj=portable(object), object_gather_list=held, dst=global_coordinator(self), group=self.group
        )
        return held

    def scatter_object(self: Any, object_list: Optional[list[Any]]) -> Any:
        """Return this rank's object out of the coordinator's list."""
        if not self.use_dist:
            assert object_list is not None
            return object_list[0]
        held = [None]
        given = [portable(each) for each in object_list or []] if self.is_coordinator else None
        dist.scatter_object_list(
            scatter_object_output_list=held,
            scatter_object_input_list=given,
            src=global_coordinator(self),
            group=self.group,
        )
        return held[0]


def global_coordinator(wrapper: Any) -> int:
    if wrapper.group is None or wrapper.rank < 0:  # all ranks, or not a rank of the group
        return int(wrapper.coordinator_rank)
    return dist.get_global_rank(wrapper.group, wrapper.coordinator_rank)


def portable(value: Any) -> Any:
    """Return the value; of errors, as torch passes them between ranks, such as every rank can unpickle."""
    if isinstance(value, CheckpointException):
        step, failures = value.args
        return CheckpointException(step, {rank: portable(failure) for rank, failure in failures.items()})
    if not _is_wrapped_exception(value):
        return value
    error, stack = value
    return portable_error(error), portable_stack(stack)


def portable_error(error: BaseException) -> BaseException:
    """Return the error, or where it cannot be pickled another of the closest built-in class, with its text.

    It may hold a lock or a stream, its class may need other arguments than the text, and what is unpickled
    may be no error: the ranks would take that for a result.
    """
    # Code of the error's class runs here, which may raise whatever it likes: the other ranks wait.
    with contextlib.suppress(BaseException):
        if isinstance(pickle.loads(pickle.dumps(error)), BaseException):
            return error
    text = type(error).__name__
    with contextlib.suppress(BaseException):
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
    kind: type[BaseException] = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
    try:
        return kind(text)
    except TypeError:  # such as UnicodeDecodeError
        return RuntimeError(text)


def portable_stack(stack: traceback.StackSummary) -> traceback.StackSummary:
    """Return the stack without the code objects that Python keeps in it from 3.13 on.

    https://github.com/pytorch/pytorch/pull/177754
    """
    frame: Any
    for frame in stack:
        if getattr(frame, "_code", None) is not None:
            frame._code = None
    return stack
