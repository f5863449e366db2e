"""The plan of a load: shapes that must fit, and the keys of a checkpoint without a state dict.

Must never change the metadata: the storage reader has it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any, Optional

import torch
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from torch_dcp_backport.compat import DTensor

planners: Any = default_planner  # by attribute: other tools may replace its private names


def create_default_local_load_plan(
    state_dict: Mapping[str, Any], metadata: Metadata, strict: bool = True
) -> LoadPlan:
    """Return a request for each part of each value.

    Raises:
        RuntimeError: strict, and a key is not in the checkpoint.
        ValueError: a tensor has another shape there.
    """
    requests = []
    for key, value in state_dict.items():
        if key not in metadata.state_dict_metadata:
            if strict:
                raise RuntimeError(f"Missing key in checkpoint state_dict: {key}.")
            continue
        stored = metadata.state_dict_metadata[key]
        check_size(key, stored, value)
        # A DTensor on a mesh without this rank asks for nothing.
        if not isinstance(value, DTensor) or value.device_mesh.get_coordinate() is not None:
            requests += planners._create_read_items(key, stored, value)
    return LoadPlan(requests)


def check_size(key: str, stored: object, value: Any) -> None:
    """Raise a ValueError, in torch 2.6's words, for a tensor whose global shape is not the stored shape."""
    size = getattr(value, "size", None)
    if not isinstance(stored, TensorStorageMetadata) or not callable(size) or stored.size == size():
        return
    if not may_differ(value):
        raise ValueError(f"Size mismatch between saved {stored.size} and current: {size()} for {key}")


def may_differ(value: Any) -> bool:
    """Return whether Megatron-LM made this tensor and takes another shape.

    A padded vocabulary has another size on another number of ranks; Megatron fills the rest with zeros. Its
    planner checks shapes itself. It hides such tensors from torch's check, but not in the releases that were
    made for torch 2.4 and 2.5.
    https://github.com/NVIDIA/Megatron-LM/blob/core_r0.12.0/megatron/core/dist_checkpointing/strategies/torch.py
    """
    made_of = getattr(value, "mcore_sh_ten", None)
    if made_of is not None:
        return bool(made_of.allow_shape_mismatch)
    return hasattr(value, "prepend_axis_num")  # releases up to 0.7 have no mcore_sh_ten


class EmptyStateDictLoadPlanner:
    def _should_include_key(self: Any, key: str, metadata: Metadata) -> bool:
        """Return whether this key was asked for, or a key above it; a key without a path has none above."""
        if self.keys is None or key in self.keys:
            return True
        return any(name in self.keys for name in accumulate(path_of(key, metadata), "{}.{}".format))

    def set_up_planner(
        self: Any,
        state_dict: dict[str, Any],
        metadata: Optional[Metadata] = None,
        is_coordinator: bool = False,
    ) -> None:
        """Fill `state_dict` with room for what is to be loaded."""
        if state_dict or metadata is None:
            raise AssertionError("an empty state dict is filled, from the metadata of a checkpoint")
        for key, stored in metadata.state_dict_metadata.items():
            if self._should_include_key(key, metadata):
                room: Any = stored
                if isinstance(stored, TensorStorageMetadata):
                    room = torch.empty(stored.size, dtype=stored.properties.dtype)
                set_element(state_dict, path_of(key, metadata) or (key,), room)
        above: Any = super(own_class(self), self)
        above.set_up_planner(state_dict, metadata, is_coordinator)


def path_of(key: str, metadata: Metadata) -> tuple[Any, ...]:
    """Return the path of a key's value in the nested state dict; empty where it was not recorded."""
    paths = metadata.planner_data
    if not paths or key not in paths:
        return ()
    path: tuple[Any, ...] = paths[key]
    return path


def own_class(planner: Any) -> type[Any]:
    """Return torch's class among those of a planner. Its name in the module may stand for another by now."""
    name = EmptyStateDictLoadPlanner.__name__
    return next(
        kind
        for kind in type(planner).__mro__
        if (kind.__module__, kind.__qualname__.lstrip("_")) == (default_planner.__name__, name)
    )
