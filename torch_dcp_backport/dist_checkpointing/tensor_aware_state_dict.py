"""A state dict for the local checkpoints of nvidia-resiliency-ext, by Megatron's name.

Its tensors can be taken out, and put back in: NVRx writes them to disks of the node, and sends them to other
nodes. Import this module where NVRx is installed; without it a state dict cannot be made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any, Optional, Union

import torch
import torch.distributed as dist

from torch_dcp_backport.dist_checkpointing._src.calls import as_problems_of, begin
from torch_dcp_backport.dist_checkpointing._src.sharded_tensor import data_shape
from torch_dcp_backport.dist_checkpointing.core import CheckpointingException
from torch_dcp_backport.dist_checkpointing.dict_utils import (
    dict_list_map_outplace,
    merge,
    nested_values,
)
from torch_dcp_backport.dist_checkpointing.exchange_utils import (
    BROADCAST,
    ShardDistribution,
    determine_main_replica_uniform_distribution,
    exchange_by_distribution,
)
from torch_dcp_backport.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
    apply_factory_merges,
)
from torch_dcp_backport.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from torch_dcp_backport.dist_checkpointing.utils import (
    ShardId,
    _sharded_object_id,
    _sharded_tensor_shard_id,
    shard_text,
    zip_strict,
)
from torch_dcp_backport.dist_checkpointing.validation import (
    StrictHandling,
    determine_global_metadata,
    parse_strict_flag,
    validate_integrity_and_strict_load,
    validate_sharding_integrity,
)
from torch_dcp_backport.transfer import DOUBTFUL, Group

ATOMIC, FULLY_PARALLEL = "atomic", "fully_parallel"
CANNOT_TAKE, CANNOT_GIVE = "cannot take the state dict apart", "cannot make the state dict"

_base: Any = object
HAVE_NVRX = False
try:
    _base = import_module("nvidia_resiliency_ext.checkpointing.local.base_state_dict").TensorAwareStateDict
    HAVE_NVRX = True
except (ImportError, AttributeError):
    pass


class NotHeld(CheckpointingException, AssertionError):
    """A state dict does not have what is asked for: a shard, or its tensors. Megatron asserts that it has."""


class MCoreTensorAwareStateDict(_base):  # type: ignore[misc]
    """A sharded state dict whose tensors can be taken out.

    Made by `from_state_dict`. A tensor that another rank of the group keeps has no data here.

    Args:
        common: the values that are not sharded.
        sharded_state_dict: the sharded parts.
    """

    def __init__(
        self, common: StateDict, sharded_state_dict: ShardedStateDict, is_hollow: bool = False
    ) -> None:
        self.common = common
        self.sharded_state_dict = sharded_state_dict
        self._is_hollow = is_hollow
        #: By number of a tensor that this rank keeps: the type of the device that it was on.
        self._devices: dict[int, str] = {}
        #: The numbers, among all tensors, of those that this rank keeps.
        self._kept = [number for number, part in enumerate(self._parts()) if part.data is not None]

    @classmethod
    def from_state_dict(
        cls,
        sharded_state_dict: ShardedStateDict,
        algo: str = FULLY_PARALLEL,
        parallelization_group: Group = None,
        cached_metadata: Optional[ShardDistribution] = None,
    ) -> tuple[MCoreTensorAwareStateDict, Optional[ShardDistribution]]:
        """Take a sharded state dict apart. Collective.

        Args:
            algo: "fully_parallel" keeps each shard on one rank of the group, "atomic" on each that has it.
            parallelization_group: the ranks that keep shards for each other; None is the default group.
            cached_metadata: the second result of an earlier call with the same shards.

        Returns:
            (the state dict, the distribution of the shards over the group; None with "atomic").

        Raises:
            ImportError: NVRx is not installed.
            CheckpointingException: another `algo`, or the parts of the ranks do not fit; the same on every
                rank.
        """
        if not HAVE_NVRX:
            raise ImportError("nvidia-resiliency-ext is not installed: pip install nvidia-resiliency-ext")

        def take() -> tuple[ShardedStateDict, StateDict]:
            _check(algo)
            sharded, common = save_preprocess(sharded_state_dict, False)
            # Copies of the descriptions: tensors are taken out of them.
            return dict_list_map_outplace(replace, sharded), common

        is_new = cached_metadata is None
        with begin(CANNOT_TAKE, "save") as call:
            made = call.attempt(take)
            alike = {"algo": str(algo), "cached_metadata": "None" if is_new else "a distribution"}
            call.barrier("taking the state dict apart", must_agree=alike)
        sharded, common = made.value
        if is_new:
            validate_sharding_integrity(determine_global_metadata(sharded)[1])
        distribution = cached_metadata
        with begin(CANNOT_TAKE, "save") as call:
            if algo == FULLY_PARALLEL and is_new and dist.is_initialized():
                shared = call.attempt(
                    as_problems_of(None, parallelization_group, determine_main_replica_uniform_distribution),
                    sharded,
                    parallelization_group,
                    True,
                )
                call.barrier("sharing out shards")
                distribution = shared.value
        if algo == FULLY_PARALLEL and distribution is not None:
            keep_own(sharded, distribution, parallelization_group)
        return cls(common, sharded), distribution

    @property
    def is_hollow(self) -> bool:
        """Whether the tensors were taken out, and not put back in."""
        return self._is_hollow

    @property
    def common_state_dict(self) -> StateDict:
        """The values that are not sharded."""
        return self.common

    def _parts(self) -> list[ShardedTensor]:
        return [part for part in nested_values(self.sharded_state_dict) if isinstance(part, ShardedTensor)]

    @property
    def _sharded_tensors(self) -> Iterator[ShardedTensor]:
        """The parts that this rank keeps."""
        parts = self._parts()
        return (parts[number] for number in self._kept)

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors that this rank keeps.

        Raises:
            AssertionError: they were taken out.
        """
        self._check_hollow(False)
        return (part.data for part in self._sharded_tensors if part.data is not None)

    def pop_tensors(self) -> list[torch.Tensor]:
        """Take the tensors out, and return them.

        Raises:
            AssertionError: they were taken out before.
        """
        tensors = list(self.tensors)
        for number, part, tensor in zip(self._kept, self._sharded_tensors, tensors):
            self._devices.setdefault(number, tensor.device.type)
            part.data = None
        self._is_hollow = True
        return tensors

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put tensors in, in the order in which `pop_tensors` returned them.

        Raises:
            AssertionError: there are tensors.
            ValueError: another number of tensors, or a tensor of another shape or dtype; nothing was put in.
        """
        self._check_hollow(True)
        pairs = zip_strict(self._sharded_tensors, tensor_data)
        for part, tensor in pairs:
            if (tuple(tensor.shape), tensor.dtype) != (data_shape(part), part.dtype):
                got, expected = f"{tuple(tensor.shape)} {tensor.dtype}", f"{data_shape(part)} {part.dtype}"
                raise ValueError(
                    f"not the tensor that was taken out: {part.key} (expected {expected}, got {got})"
                )
        for part, tensor in pairs:
            part.data = tensor
        self._is_hollow = False

    def init_tensors(self) -> None:
        """Put in new tensors with any values, of the shapes, dtypes and devices of those taken out.

        Raises:
            AssertionError: there are tensors.
        """
        self._check_hollow(True)
        for number, part in zip(self._kept, self._sharded_tensors):
            part.init_data(self._devices.pop(number))
        self._is_hollow = False

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Put copies on the CPU in the place of the tensors, which stay as they are.

        Args:
            non_blocking: do not wait for the copies: the caller has to.

        Raises:
            AssertionError: the tensors were taken out.
        """
        for number, part, tensor in zip(self._kept, self._sharded_tensors, list(self.tensors)):
            is_here = tensor.device.type == "cpu"
            if is_here and number in self._devices:
                continue  # a copy already
            self._devices[number] = tensor.device.type
            part.data = (
                tensor.detach().clone() if is_here else tensor.detach().to("cpu", non_blocking=non_blocking)
            )

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Bring the tensors to the devices that they were on.

        Args:
            non_blocking: do not wait for the copies; work on the same device does.

        Raises:
            AssertionError: the tensors were taken out.
        """
        for number, part, tensor in zip(self._kept, self._sharded_tensors, list(self.tensors)):
            kind = self._devices.pop(number, None)
            if kind is not None:
                part.data = tensor.to(kind, non_blocking=non_blocking)

    def to_state_dict(
        self,
        sharded_state_dict: ShardedStateDict,
        algo: str = ATOMIC,
        exchange_algo: str = BROADCAST,
        validate_access_integrity: bool = True,
        parallelization_group: Group = None,
        strict: Union[str, StrictHandling] = StrictHandling.ASSUME_OK_UNEXPECTED,
        return_mismatch_keys: bool = False,
    ) -> Any:
        """Return the state dict that a sharded state dict describes, from what the ranks keep. Collective.

        Args:
            sharded_state_dict: as for `dist_checkpointing.load`.
            algo: that of `from_state_dict`.
            exchange_algo: as for `exchange_by_distribution`.
            validate_access_integrity: whether the parts of all ranks are checked together.
            parallelization_group: the ranks that kept shards for each other.
            strict: what to do about missing and unexpected keys.
            return_mismatch_keys: return (the state dict, missing keys, unexpected keys).

        Raises:
            CheckpointingException: as `strict` says, or the parts of the ranks do not fit; the same on every
                rank. An AssertionError, too, where the tensors were taken out, or a shard is asked for that
                no rank keeps: also one of an unexpected key that `strict` lets pass, as in Megatron's.
        """

        def take() -> tuple[Any, StrictHandling]:
            self._check_hollow(False)
            _check(algo)
            return load_preprocess(sharded_state_dict or {}), parse_strict_flag(strict)

        with begin(CANNOT_GIVE, "load") as call:
            call.kind = NotHeld
            made = call.attempt(take)
            alike = {
                "algo": str(algo),
                "strict": str(getattr(strict, "value", strict)),
                "validate_access_integrity": str(bool(validate_access_integrity)),
            }
            call.barrier("reading the sharded state dict", must_agree=alike)
        (asked, local, factories), mode = made.value
        own = everyone = stored = None
        if validate_access_integrity or StrictHandling.requires_global_app_metadata(mode):
            own, everyone = determine_global_metadata(asked)
        if StrictHandling.requires_explicit_ckpt_mismatch_check(mode):
            stored = {part.key: part.without_data() for part in nested_values(self.sharded_state_dict)}
        with begin(CANNOT_GIVE, "load") as call:
            checked = call.attempt(
                validate_integrity_and_strict_load,
                asked,
                mode,
                validate_access_integrity,
                own,
                everyone,
                stored,
            )
            call.barrier("comparing keys")
            _, missing, unexpected = checked.value
        with begin(CANNOT_GIVE, "load") as call:
            call.kind = NotHeld
            values = call.attempt(
                as_problems_of(None, parallelization_group, self._exchanged),
                asked,
                algo,
                exchange_algo,
                parallelization_group,
            )
            filled = call.attempt(self._filled, asked, values)

            def put_together(filled: StateDict) -> Any:
                result = dict_list_map_outplace(lambda value: value, self.common)
                merge(result, local)
                return merge(result, apply_factory_merges(filled, factories))

            result = call.attempt(put_together, filled)
            call.barrier("looking for shards", so_far=DOUBTFUL)
        return (result.value, missing, unexpected) if return_mismatch_keys else result.value

    def _exchanged(
        self, asked: ShardedStateDict, algo: str, exchange_algo: str, group: Group
    ) -> Mapping[ShardId, Any]:
        """Return the tensors that this rank keeps, and those that others keep for it. Collective."""
        kept: dict[ShardId, Any] = {
            _sharded_tensor_shard_id(part): part.data for part in self._sharded_tensors
        }
        if algo == ATOMIC or not dist.is_initialized():
            return kept
        waiting = {
            _sharded_tensor_shard_id(part): part
            for part in nested_values(asked)
            if isinstance(part, ShardedTensor) and _sharded_tensor_shard_id(part) not in kept
        }
        # A shard comes from any rank that keeps it, also where other shards are asked for than were kept.
        anyone = ShardDistribution({}, set(), {}, {})
        return exchange_by_distribution(kept, waiting, anyone, group, exchange_algo)

    def _filled(self, asked: ShardedStateDict, tensors: Mapping[ShardId, Any]) -> Any:
        """Return the values of the asked shards, in their structure.

        Raises:
            NotHeld: one is not there, or is another.
        """
        objects = {
            _sharded_object_id(part): part.data
            for part in nested_values(self.sharded_state_dict)
            if isinstance(part, ShardedObject)
        }

        def value_of(part: Any) -> Any:
            is_tensor = isinstance(part, ShardedTensor)
            shard = _sharded_tensor_shard_id(part) if is_tensor else _sharded_object_id(part)
            known: Mapping[ShardId, Any] = tensors if is_tensor else objects
            if shard not in known:
                raise NotHeld(f"a shard that this rank does not have: {shard_text(shard)}")
            if is_tensor and tuple(known[shard].shape) != data_shape(part):
                got, expected = tuple(known[shard].shape), data_shape(part)
                raise NotHeld(
                    f"a shard of another shape: {shard_text(shard)} (expected {expected}, got {got})"
                )
            return known[shard]

        return dict_list_map_outplace(value_of, asked)

    def _check_hollow(self, expected: bool) -> None:
        if self._is_hollow is not expected:
            state = "are not there: they were taken out" if self._is_hollow else "are there"
            raise NotHeld(f"the tensors {state}")


def _check(algo: str) -> None:
    if algo not in (ATOMIC, FULLY_PARALLEL):
        raise CheckpointingException(f"algo={algo!r}: expected {ATOMIC!r} or {FULLY_PARALLEL!r}")


def keep_own(sharded: ShardedStateDict, distribution: ShardDistribution, group: Group) -> None:
    """Take away the data of tensors that another rank of the group keeps, in place."""
    place = dist.get_rank(group) if dist.is_initialized() else 0
    for part in nested_values(sharded):
        if not isinstance(part, ShardedTensor):
            continue
        if distribution.main_rank_for_shard.get(_sharded_tensor_shard_id(part)) != place:
            part.data = None
