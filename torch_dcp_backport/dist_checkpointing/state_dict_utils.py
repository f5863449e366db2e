"""State dicts split into sharded values, common values and those that are not saved; and put together.

Works on copies of the structure: the caller's dicts and lists stay as they are.
"""

from __future__ import annotations

from argparse import Namespace
from collections import UserList, deque
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import is_dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional

import torch

from torch_dcp_backport.dist_checkpointing._src import sharded_tensor
from torch_dcp_backport.dist_checkpointing._src.adopt import adopted
from torch_dcp_backport.dist_checkpointing._src.table import ObjectRow, Row, RowTable
from torch_dcp_backport.dist_checkpointing.core import CheckpointingException
from torch_dcp_backport.dist_checkpointing.dict_utils import (
    Path,
    dict_list_map_outplace,
    extract_matching_values,
)
from torch_dcp_backport.dist_checkpointing.mapping import (
    CommonStateDict,
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
    apply_factory_merges,
    is_main_replica,
)
from torch_dcp_backport.transfer import Box


class Split(NamedTuple):
    """A sharded state dict, taken apart. No part shares a dict or a list with it."""

    #: The full structure, with factories built.
    built: ShardedStateDict
    tensors: list[ShardedTensor]
    objects: list[ShardedObject]
    #: The structure as it was passed, with factories.
    original: ShardedStateDict
    #: Tensors that no ShardedTensor describes, by path.
    plain: list[tuple[Path, torch.Tensor]]

    @property
    def parts(self) -> list[ShardedBase]:
        return [*self.tensors, *self.objects]

    @property
    def common(self) -> CommonStateDict:
        """The values that are neither sharded nor local, in their structure."""
        kept = kept_of(
            self.built,
            # First the class that most of them have: a check for an abstract class costs ten times as much.
            lambda value: not isinstance(value, (ShardedTensor, ShardedBase, LocalNonpersistentObject)),
        )
        return {} if kept is NOTHING else kept


#: Stands for a value that is not there.
NOTHING: Any = object()


def split(sharded_state_dict: Mapping[Any, Any]) -> Split:
    """Take a sharded state dict apart, and check each of its parts.

    Raises:
        CheckpointingException: a part contradicts itself, or is hidden in another value.
    """
    if not isinstance(sharded_state_dict, dict):
        raise CheckpointingException(f"expected a dict, got {type(sharded_state_dict).__name__}")
    original = structure_of(sharded_state_dict)
    built, leaves = original, leaves_of(original)
    others = (value for _, value in leaves if type(value) is not ShardedTensor)
    if any(isinstance(value, ShardedTensorFactory) for value in others):
        built = mapped(original, built_of)
        leaves = leaves_of(built)
    result = Split(built, [], [], original, [])
    for path, value in leaves:
        if isinstance(value, ShardedTensor):
            value.validate_metadata_integrity()
            result.tensors.append(value)
        elif isinstance(value, ShardedObject):
            value.validate_metadata_integrity()
            result.objects.append(value)
        elif isinstance(value, ShardedBase):
            raise CheckpointingException(f"a {type(value).__name__} built by another: {value.key}")
        elif isinstance(value, torch.Tensor):
            result.plain.append((path, value))
        elif (hidden := hidden_in(value)) is not None:
            what = getattr(hidden, "key", f"a {type(hidden).__name__}")
            name = ".".join(map(str, path))
            raise CheckpointingException(
                f"{what} is in a {type(value).__name__} at {name}; put it in a list or a dict"
            )
    return result


def row_of(part: ShardedTensor, is_folded: bool = True) -> Row:
    """Return the row of a tensor's part, which is all that other ranks need of it.

    Args:
        is_folded: a flattened range gets the row that a checkpoint has; else that of its box.
    """
    box, shape, original = Box(tuple(part.global_offset), part.box_size), tuple(part.global_shape), None
    run = part.flattened_range
    if run is not None and is_folded:
        assert part.axis_fragmentations is not None, "it was validated"
        original, shape = shape, sharded_tensor.folded_shape(tuple(part.axis_fragmentations), box.numel)
        box = sharded_tensor.folded(part.local_chunk_offset_in_global(), run.start, run.stop)
    main = is_main_replica(part.replica_id)
    return Row(part.key, part.dtype, shape, box.offset, box.size, main, part.mesh, original)


def table_of(tensors: Iterable[ShardedTensor], objects: Iterable[ShardedObject]) -> RowTable:
    """Return this rank's table: the rows of its parts."""
    return RowTable(
        [row_of(part) for part in tensors],
        [
            ObjectRow(part.key, part.unique_key, tuple(part.global_shape), is_main_replica(part.replica_id))
            for part in objects
        ],
    )


def built_of(value: Any) -> Any:
    # A factory of Megatron's builds parts of Megatron's.
    return structure_of(value.build()) if isinstance(value, ShardedTensorFactory) else value


def is_branch(x: Any) -> bool:
    """Return whether a value is a branch of a structure; a Counter and the like are leaves, as a tuple is."""
    return type(x) in (dict, list)


def structure_of(x: Any) -> Any:
    """Return the same structure of plain dicts and lists, with parts of Megatron's as our own.

    Subclasses of dict and list (an OrderedDict) become plain where parts are in them, else they are values.
    """
    if isinstance(x, (dict, list)) and (is_branch(x) or hidden_in(x) is not None):
        items = x.items() if isinstance(x, dict) else enumerate(x)
        pairs = [(key, structure_of(value)) for key, value in items]
        return dict(pairs) if isinstance(x, dict) else [value for _, value in pairs]
    return adopted(x)


def mapped(x: Any, make: Callable[[Any], Any]) -> Any:
    """Return a structure with other leaves."""
    if not is_branch(x):
        return make(x)
    if isinstance(x, dict):
        return {key: mapped(value, make) for key, value in x.items()}
    return [mapped(value, make) for value in x]


def hidden_in(leaf: Any) -> Optional[Any]:
    """Return a part that a leaf hides, or None: it would be saved as an object of the common state."""
    left, seen = [leaf], set()
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            inner = list(value.values())
        elif isinstance(value, (list, tuple, Set, deque, UserList)):
            inner = list(value)
        elif isinstance(value, (Namespace, SimpleNamespace)) or is_dataclass(type(value)):
            inner = list(getattr(value, "__dict__", {}).values())
        else:
            continue
        for part in map(adopted, inner):
            if isinstance(part, (ShardedBase, LocalNonpersistentObject)):
                return part
        left += inner
    return None


def leaves_of(x: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """Return (path, value) of every leaf in nested dicts and lists."""
    if is_branch(x):
        items = x.items() if isinstance(x, dict) else enumerate(x)
        return [leaf for key, value in items for leaf in leaves_of(value, (*path, key))]
    return [(path, x)]


def kept_of(x: Any, keeps: Callable[[Any], bool]) -> Any:
    """Return the structure with some leaves only; NOTHING where it had leaves and none is left.

    A list of which only a part is left is a dict from place to value.
    """
    if not is_branch(x):
        return x if keeps(x) else NOTHING
    items = x.items() if isinstance(x, dict) else enumerate(x)
    kept = {key: part for key, value in items for part in [kept_of(value, keeps)] if part is not NOTHING}
    if x and not kept:
        return NOTHING
    return list(kept.values()) if isinstance(x, list) and len(kept) == len(x) else kept


def assembled(asked: Any, common: Any, loaded: Mapping[int, Any]) -> Any:
    """Return the result of a load: the checkpoint's common values, and the values of the parts asked for.

    A list keeps its places, with NOTHING for values that are left out: `closed_up` takes that away.

    Args:
        asked: a structure; its leaves that are neither sharded nor local do not count.
        common: the common values of the checkpoint; NOTHING where there are none.
        loaded: id of a sharded part -> its value; without parts that are left out.
    """
    if is_branch(asked) and isinstance(asked, dict):
        result = dict(common) if isinstance(common, dict) else {}
        for key, value in asked.items():
            part = assembled(value, result.get(key, NOTHING), loaded)
            if part is not NOTHING:
                result[key] = part
        return result if result or not asked or isinstance(common, dict) else NOTHING
    if is_branch(asked):
        known = dict(enumerate(common)) if isinstance(common, list) else common
        # A list of which only a part is common, by place; another dict stood where a list is asked for.
        known = known if isinstance(known, dict) and all(isinstance(place, int) for place in known) else {}
        places = [*range(len(asked)), *(place for place in known if place not in range(len(asked)))]
        parts = [
            assembled(asked[place] if place < len(asked) else None, known.get(place, NOTHING), loaded)
            for place in places
        ]
        is_there = any(part is not NOTHING for part in parts)
        return parts if is_there or not asked or isinstance(common, list) else NOTHING
    if isinstance(asked, LocalNonpersistentObject):
        return asked.unwrap()
    return loaded.get(id(asked), NOTHING) if isinstance(asked, ShardedBase) else common


def closed_up(x: Any) -> Any:
    """Return the structure without NOTHING in its lists."""
    if not is_branch(x):
        return x
    if isinstance(x, dict):
        return {key: closed_up(value) for key, value in x.items()}
    return [closed_up(value) for value in x if value is not NOTHING]


def factories_of(x: Any) -> Any:
    """Return the structure with its factories only; a list keeps its places as a dict."""
    kept = kept_of(x, lambda value: isinstance(value, ShardedTensorFactory))
    return {} if kept is NOTHING else kept


def merged(loaded: StateDict, original: ShardedStateDict) -> StateDict:
    """Return the loaded values, with the state dict's factories applied to the values of each."""

    def lenient(factory: ShardedTensorFactory) -> ShardedTensorFactory:
        def merge(parts: Any) -> Any:
            return NOTHING if parts is NOTHING else factory.merge_fn(closed_up(parts))

        return replace(factory, merge_fn=merge)

    factories = dict_list_map_outplace(lenient, factories_of(original))
    return closed_up(apply_factory_merges(loaded, factories))  # type: ignore[no-any-return]


def save_preprocess(
    sharded_state_dict: ShardedStateDict,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: Optional[Callable[[CommonStateDict], StateDict]] = None,
) -> tuple[ShardedStateDict, CommonStateDict]:
    """Return (the sharded parts, the common part) of a state dict, as `save` would write them.

    Args:
        validate_access_integrity: check each part by itself in any case; the parts of all ranks together
            are checked by `save`.
        preprocess_common_before_consistancy_check: applied to a copy by `save`'s comparison of ranks.
    """
    parts = split(sharded_state_dict)
    sharded, _ = extract_matching_values(parts.built, lambda value: isinstance(value, ShardedBase))
    return sharded, parts.common  # type: ignore[return-value]


def load_preprocess(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict, ShardedStateDict]:
    """Return (the sharded parts with factories built, the values that are not saved, the factories)."""
    parts = split(sharded_state_dict)
    sharded, rest = extract_matching_values(parts.built, lambda value: isinstance(value, ShardedBase))
    local, _ = extract_matching_values(rest, lambda value: isinstance(value, LocalNonpersistentObject))
    unwrapped = dict_list_map_outplace(lambda value: value.unwrap(), local)
    return sharded, unwrapped, factories_of(parts.original)  # type: ignore[return-value]


def filter_out_empty_flatten_tensor(sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
    """Return the state dict without flattened ranges that have no elements; `load` and `save` take them."""

    def is_kept(value: Any) -> bool:
        run = adopted(value).flattened_range if isinstance(adopted(value), ShardedTensor) else None
        return run is None or run.start != run.stop

    kept, _ = extract_matching_values(sharded_state_dict, is_kept)
    return kept  # type: ignore[return-value]
