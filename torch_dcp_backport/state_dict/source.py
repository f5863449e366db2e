"""The dict of a rank: described before anything moves, then read piece by piece.

The caller's dict is only read, and a mapping that makes its values on access is read as seldom as possible.
"""

from __future__ import annotations

import enum
import logging
import pickle
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import torch

from torch_dcp_backport import compat
from torch_dcp_backport.state_dict.destination import local_of
from torch_dcp_backport.transfer import Box, TensorInfo, has_slices, is_freed, part_of, spell_key, whole

Key = Hashable

logger = logging.getLogger(__name__)

#: Values made on access that are kept between the inventory and the transfer, in bytes altogether.
KEPT_BYTES = 4 * 2**20


class About(enum.Enum):
    """Keys of an inventory for facts about the whole dict."""

    #: The versions of the modules that wrote it: the dict's `_metadata`.
    METADATA = "metadata"
    #: Its values are made anew on every access.
    FLEETING = "fleeting"
    #: The values of its tensors, where they are few: as `inline.pack` makes them.
    VALUES = "values"


class Unusable(NamedTuple):
    """A tensor that cannot be loaded, in an inventory."""

    why: str


class Carried(NamedTuple):
    """A tensor without slices (sparse, quantized, a subclass), in an inventory: it travels with it."""

    value: torch.Tensor

    def __reduce__(self) -> tuple[Any, ...]:
        value = self.value.detach()
        return Carried, (value.cpu() if value.device.type != "cpu" else value,)


class StateSource:
    """The state dict of one load, as this rank holds it.

    A dict is read as it is now, whatever another thread does to it meanwhile. Of other mappings a value is
    looked at for the inventory, and read once more when it moves, unless it is still there: because the
    mapping holds it itself, or because it is small. A mapping with a method `get_slice(key)`, or with such
    slices for values (`get_shape()`, `get_dtype()` and an index of slices, as safetensors has them), is read
    slice by slice.
    """

    def __init__(self, state: Mapping[Any, Any], *, metadata: bool = False) -> None:
        self.is_dict = type(state) in (dict, OrderedDict)
        self.state = dict(state) if self.is_dict else state
        self.get_slice = None if self.is_dict else getattr(state, "get_slice", None)
        #: key -> value, of those read already: the kept ones, those read since the last `release`, those that
        #: the mapping may still hold.
        self.kept: dict[Key, Any] = {}
        self.window: dict[Key, Any] = {}
        self.alive: dict[Key, weakref.ref[Any]] = {}
        #: Keys of DTensors.
        self.spread: set[Key] = set()
        self.metadata = metadata_of(state) if metadata else None

    def __contains__(self, key: Key) -> bool:
        return key in self.state

    def read(self, key: Key) -> Any:
        """The value of a key, read now."""
        return self.state[key] if self.get_slice is None else self.get_slice(key)

    def inventory(self, whole_only: bool = True) -> dict[Key, Any]:
        """key -> TensorInfo, Carried or Unusable for tensors; everything else as it is.

        Args:
            whole_only: DTensors cannot be used, since other ranks cannot slice them.
        """
        inventory: dict[Key, Any] = {}
        room = KEPT_BYTES
        for key in list(self.state):
            value = self.read(key)
            inventory[key] = offer_of(value, whole_only)
            if isinstance(value, compat.DTensor):
                self.spread.add(key)
            if self.is_dict:
                continue
            nbytes = bytes_to_keep(value)
            if nbytes <= room:
                room -= nbytes
                self.kept[key] = value
            else:
                self.alive[key] = weakref.ref(value)
            del value
        if any(reference() is None for reference in self.alive.values()):
            inventory[About.FLEETING] = True
        if self.metadata is not None and (not whole_only or can_travel(self.metadata)):
            inventory[About.METADATA] = self.metadata
        return inventory

    def value(self, key: Key) -> Any:
        """The value of a key; until the next `release` it is the same object."""
        if self.is_dict:
            return self.state[key]
        for values in (self.kept, self.window):
            if key in values:
                return values[key]
        reference = self.alive.get(key)
        value = reference() if reference is not None else None
        if value is None:
            value = self.read(key)
        self.window[key] = value
        return value

    def piece(self, key: Key, box: Box, shape: tuple[int, ...]) -> torch.Tensor:
        """The part in a box of a tensor that has this shape, as a view where that can be.

        Of a DTensor, which is never read for other ranks, the local tensor.

        Raises:
            RuntimeError: the tensor has another shape by now.
        """
        value = self.value(key)
        sliced = is_slice(value)
        shape_now = tuple(value.get_shape()) if sliced else value.shape
        if shape_now != shape:
            raise RuntimeError(
                f"{spell_key(key)} was changed while it was read: it was {shape} and is {tuple(shape_now)}"
            )
        if sliced:
            part: torch.Tensor = value[box.within(whole(shape))]
            return part
        if isinstance(value, compat.DTensor):
            return compat.local_part(value.detach())
        return part_of(value.detach() if value.requires_grad else value, whole(shape), box)

    def tensor(self, key: Key) -> Any:
        """The value of a key for torch's own loading code: the whole tensor where it is a slice."""
        value = self.value(key)
        if not is_slice(value):
            return value
        shape = tuple(value.get_shape())
        return self.piece(key, whole(shape), shape)

    def release(self) -> None:
        """Forget the values that were read on access."""
        self.window.clear()


class Sources(StateSource):
    """Several dicts of one load; keys are `PartKey`s."""

    def __init__(self, parts: Iterable[StateSource]) -> None:
        super().__init__({})
        self.parts = list(parts)
        self.is_dict = all(part.is_dict for part in self.parts)

    def __contains__(self, key: Any) -> bool:
        return key.key in self.parts[key.part]

    def inventory(self, whole_only: bool = True) -> dict[Key, Any]:
        inventory: dict[Key, Any] = {}
        for number, part in enumerate(self.parts):
            offers = part.inventory(whole_only)
            if offers.pop(About.FLEETING, False):
                inventory[About.FLEETING] = True
            inventory.update((PartKey(number, key), offer) for key, offer in offers.items())
            self.spread.update(PartKey(number, key) for key in part.spread)
        return inventory

    def value(self, key: Any) -> Any:
        return self.parts[key.part].value(key.key)

    def release(self) -> None:
        for part in self.parts:
            part.release()


@dataclass(frozen=True)
class PartKey:
    """A key of one of several dicts that are loaded together."""

    part: int
    key: Key

    def __str__(self) -> str:
        return spell_key(self.key)


def metadata_of(state: Mapping[Any, Any]) -> Optional[dict[str, dict[str, Any]]]:
    """module name -> the module's facts about its state (`version`). A copy: loading code writes into it."""
    metadata = getattr(state, "_metadata", None)
    if not isinstance(metadata, Mapping):
        return None
    return {name: dict(value) for name, value in metadata.items() if isinstance(value, Mapping)}


def can_travel(metadata: Mapping[str, Any]) -> bool:
    try:
        pickle.dumps(metadata)
    except Exception:
        logger.warning("the state dict's _metadata cannot be pickled: modules load without their versions")
        return False
    return True


def offer_of(value: Any, whole_only: bool) -> Any:
    if is_slice(value):
        return TensorInfo(tuple(value.get_shape()), dtype_of(value))
    if not torch.is_tensor(value):
        return value
    if isinstance(value, compat.DTensor):
        if whole_only:
            return Unusable("a DTensor; a full state dict holds whole tensors, see DTensor.full_tensor()")
    elif value.is_meta:
        return Unusable("a tensor on the meta device, which holds no values")
    elif not has_slices(value):
        return Carried(value)
    elif is_freed(value):
        return Unusable("a tensor whose memory was freed")
    return TensorInfo(tuple(value.shape), value.dtype)


def is_slice(value: Any) -> bool:
    """Whether `value` stands for a tensor in a file and gives its parts, as safetensors' slices do."""
    return not torch.is_tensor(value) and hasattr(value, "get_shape") and hasattr(value, "get_dtype")


def dtype_of(value: Any) -> torch.dtype:
    name = value.get_dtype()
    if isinstance(name, torch.dtype):
        return name
    dtype = compat.STORED_DTYPES.get(str(name), getattr(torch, str(name), None))
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"a slice of the dtype {name!r}, which torch does not have")
    return dtype


def bytes_to_keep(value: Any) -> int:
    """The memory that keeping a value costs; 0 where it is no dense tensor."""
    local = local_of(value) if torch.is_tensor(value) else None
    return local.untyped_storage().nbytes() if local is not None and has_slices(local) else 0
