"""ShardedTensors as values of `dcp.save` and `dcp.load`, by Megatron's names.

torch asks a value for its boxes from 2.6 on (`torch.distributed._checkpointable`); before, it would save the
box of one rank as the whole tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from torch_dcp_backport import compat
from torch_dcp_backport.dist_checkpointing.core import CheckpointingException
from torch_dcp_backport.dist_checkpointing.mapping import ShardedTensor


class Checkpointable(torch.Tensor):
    """A value of a state dict that tells torch's planners its boxes; no operation works on it."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func}: a {cls.__name__} only goes to dcp.save and dcp.load")


class CheckpointableShardedTensor(Checkpointable):
    """A box of a global tensor, as a value for `dcp.save` and `dcp.load`.

    Args:
        data: the box's values.
        sh_ten: describes the box; a load writes into its `data`.
    """

    _sh_ten: ShardedTensor

    @staticmethod
    def __new__(
        cls: type[CheckpointableShardedTensor], data: torch.Tensor, sh_ten: ShardedTensor
    ) -> CheckpointableShardedTensor:
        if not compat.has_checkpointables():
            raise CheckpointingException("dcp.save takes boxes of tensors from torch 2.6 on")
        sh_ten.validate_metadata_integrity()
        if sh_ten.flattened_range is not None or sh_ten.prepend_axis_num or sh_ten.data is None:
            raise CheckpointingException(
                f"{sh_ten.key}: flattened, with prepended axes, or without data "
                "(dist_checkpointing.save takes the first two)"
            )
        made: CheckpointableShardedTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, torch.Size(sh_ten.global_shape), dtype=sh_ten.dtype
        )
        return made

    def __init__(self, data: torch.Tensor, sh_ten: ShardedTensor) -> None:
        self._data = data
        self._sh_ten = sh_ten

    @classmethod
    def from_sh_ten(cls, sh_ten: ShardedTensor) -> CheckpointableShardedTensor:
        """Return the value for a box.

        Raises:
            CheckpointingException: the box contradicts itself, is of a kind that torch has not, or torch is
                older than 2.6.

        Example:
            >>> import torch
            >>> from torch_dcp_backport.dist_checkpointing import ShardedTensor
            >>> from torch_dcp_backport.dist_checkpointing.strategies.checkpointable import (
            ...     CheckpointableShardedTensor,
            ... )
            >>> part = ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, 1, 4))
            >>> if torch.__version__ >= "2.6":
            ...     assert CheckpointableShardedTensor.from_sh_ten(part).shape == (8,)
        """
        return cls(sh_ten.data, sh_ten)  # type: ignore[arg-type]

    @property
    def _chunk(self) -> ChunkStorageMetadata:
        part = self._sh_ten
        return ChunkStorageMetadata(torch.Size(part.global_offset), torch.Size(part.local_shape))

    def __create_write_items__(self, fqn: str, value: Any, index: Optional[int] = None) -> list[WriteItem]:
        chunk, part = self._chunk, self._sh_ten
        assert part.data is not None, "it was checked"
        properties = TensorProperties.create_from_tensor(part.data)
        data = TensorWriteData(chunk, properties, torch.Size(part.global_shape))
        return [WriteItem(MetadataIndex(fqn, chunk.offsets, index), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert self._sh_ten.data is not None, "it was checked"
        return self._sh_ten.data

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._sh_ten!r})"


class LocalShardsContainer(Checkpointable):
    """Several boxes of one global tensor on a rank, as a value for `dcp.save` and `dcp.load`.

    Args:
        local_shards: `CheckpointableShardedTensor`s of the same tensor.
    """

    @staticmethod
    def __new__(
        cls: type[LocalShardsContainer], local_shards: Sequence[CheckpointableShardedTensor]
    ) -> LocalShardsContainer:
        shapes = {(tuple(shard.shape), shard.dtype) for shard in local_shards}
        if len(shapes) != 1:
            raise CheckpointingException(f"boxes of one tensor are needed, got {sorted(map(str, shapes))}")
        first = local_shards[0]
        made: LocalShardsContainer = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, first.shape, dtype=first.dtype
        )
        return made

    def __init__(self, local_shards: Sequence[CheckpointableShardedTensor]) -> None:
        self._local_shards = list(local_shards)

    def __create_write_items__(self, fqn: str, value: Any) -> list[WriteItem]:
        return [
            item
            for number, shard in enumerate(self._local_shards)
            for item in shard.__create_write_items__(fqn, shard, number)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for shard in self._local_shards for chunk in shard.__create_chunk_list__()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for shard in self._local_shards:
            if torch.Size(shard._sh_ten.global_offset) == index.offset:
                return shard.__get_tensor_shard__(index)
        raise CheckpointingException(f"no such box on this rank: {index.fqn} at {index.offset}")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._local_shards!r})"
