"""The plans of a save and a load: shapes that must fit, keys of older checkpoints, keys of a part of one.

Must never change the metadata: the storage reader has it too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, Optional

import torch
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

from torch_dcp_backport.compat import DTensor
from torch_dcp_backport.dcp.room import init_state_dict
from torch_dcp_backport.dcp.traverse import Path, traverse_state_dict_v_2_3

planners: Any = default_planner  # by attribute: other tools may replace its private names


def create_default_local_save_plan(state_dict: Mapping[str, Any], is_coordinator: bool) -> SavePlan:
    """Return a part to write for each value that this rank holds a part of.

    Raises:
        ValueError: a DTensor has partial values.
    """
    parts = []
    for key, value in state_dict.items():
        if is_here(value):
            check_whole(key, value)
            parts += planners._create_write_items(key, value)
    return SavePlan(parts)


def create_default_local_load_plan(
    state_dict: Mapping[str, Any], metadata: Metadata, strict: bool = True
) -> LoadPlan:
    """Return a request for each part of each value.

    Raises:
        RuntimeError: strict, and a key is not in the checkpoint.
        ValueError: a tensor has another shape there, or is a DTensor with partial values.
    """
    requests = []
    for key, value in state_dict.items():
        if key not in metadata.state_dict_metadata:
            if strict:
                raise RuntimeError(f"Missing key in checkpoint state_dict: {key}.")
            continue
        stored = metadata.state_dict_metadata[key]
        check_size(key, stored, value)
        if is_here(value):
            check_whole(key, value)
            requests += planners._create_read_items(key, stored, value)
    return LoadPlan(requests)


def is_here(value: object) -> bool:
    """Return whether this rank has a part of a value: of a DTensor the ranks of its mesh have."""
    return not isinstance(value, DTensor) or value.device_mesh.get_coordinate() is not None


def check_whole(key: str, value: object) -> None:
    """Raise a ValueError for a DTensor with partial values.

    The value is the sum (or another reduction) of all ranks' tensors, which a plan takes for replicas: one
    rank's tensor would be saved, and a load would write the value into all of them.
    https://github.com/pytorch/pytorch/pull/163941
    """
    if isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements):
        raise ValueError(
            f"{key} is a DTensor with partial values, {tuple(value.placements)}, which no checkpoint can "
            "hold: redistribute it to Replicate() or Shard() first, or take full_tensor()"
        )


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


class DefaultLoadPlanner:
    def set_up_planner(
        self: Any,
        state_dict: dict[str, Any],
        metadata: Optional[Metadata] = None,
        is_coordinator: bool = False,
    ) -> None:
        """Note what is to be loaded, by keys, and make room for it."""
        init_state_dict(state_dict)
        self.original_state_dict = state_dict
        if self.flatten_sharded_tensors:
            state_dict = planners._flatten_sharded_tensors(state_dict)
        if self.flatten_state_dict:
            state_dict, self.mappings = planners.flatten_state_dict(state_dict)
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self: Any) -> LoadPlan:
        """Return the requests of a load, by torch 2.3's keys where it wrote the checkpoint.

        https://github.com/pytorch/pytorch/pull/134158
        """
        if self.metadata is None:
            raise AssertionError("no metadata: set_up_planner comes first")
        stored = self.metadata.state_dict_metadata.keys()
        present = self.state_dict.keys() & stored
        if self.flatten_state_dict and len(present) < len(self.state_dict):
            # torch 2.3 saved no dict in which two values have one key.
            with contextlib.suppress(ValueError):
                values, paths = flattened_as_2_3(self.original_state_dict)
                # A key that is missing may be missing in a checkpoint of today's names, too.
                if len(values.keys() & stored) > len(present):
                    self.state_dict, self.mappings = values, paths
        plan: LoadPlan = planners.create_default_local_load_plan(
            self.state_dict, self.metadata, not self.allow_partial_load
        )
        return plan


def flattened_as_2_3(state_dict: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return the values and the paths of a nested state dict by torch 2.3's keys."""
    values: dict[str, Any] = {}
    paths: dict[str, Path] = {}

    def add(path: Path, value: Any) -> None:
        key = ".".join(map(str, path))
        if key in values:
            raise ValueError(f"duplicated flatten key {key}")
        values[key], paths[key] = value, path

    traverse_state_dict_v_2_3(state_dict, add)
    return values, paths


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
    """Return torch's class among those of a planner. Its name in the module may mean another by now."""
    name = EmptyStateDictLoadPlanner.__name__
    return next(
        kind
        for kind in type(planner).__mro__
        if (kind.__module__, kind.__qualname__.lstrip("_")) == (default_planner.__name__, name)
    )
