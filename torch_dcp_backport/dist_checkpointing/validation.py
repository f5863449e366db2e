"""Missing and unexpected keys of a load, and the check of all ranks' parts together.

Names are those of megatron.core.dist_checkpointing.validation. An error is raised on every rank, in the same
words, before anything was touched.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Optional, Union

import torch.distributed as dist

from torch_dcp_backport.dist_checkpointing._src import integrity
from torch_dcp_backport.dist_checkpointing._src.adopt import adopted
from torch_dcp_backport.dist_checkpointing._src.calls import begin
from torch_dcp_backport.dist_checkpointing._src.offers import refusing
from torch_dcp_backport.dist_checkpointing._src.table import findings_of
from torch_dcp_backport.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    Folder,
    maybe_load_config,
    no_checkpoint,
    no_folder,
)
from torch_dcp_backport.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from torch_dcp_backport.dist_checkpointing.mapping import (
    CommonStateDict,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
)
from torch_dcp_backport.dist_checkpointing.state_dict_utils import split, table_of
from torch_dcp_backport.transfer import Call, Group, Problem, Refusal

logger = logging.getLogger("torch_dcp_backport.dist_checkpointing")

__getattr__ = refusing(
    __name__,
    "_compute_file_hash _compute_shards_access _determine_missing_and_unexpected_keys "
    "_validate_common_state_dict _validate_objects_for_key _validate_sharding_for_key "
    "validate_sharded_objects_handling",
)

INTEGRITY_FNAME = integrity.NAME
#: The first words are Megatron's, which programs look for.
UNEXPECTED = "Unexpected keys, not in the checkpoint"
MISSING = "Missing keys, in the checkpoint, and loaded by no rank"


class StrictHandling(Enum):
    """The ways of a load with keys that are not those of the checkpoint.

    Unexpected keys are asked for on this rank and not in the checkpoint; missing keys are in the checkpoint
    and asked for on no rank.
    """

    #: An unexpected key is an error; missing keys are not looked for.
    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    LOG_UNEXPECTED = "log_unexpected"
    LOG_ALL = "log_all"
    RAISE_UNEXPECTED = "raise_unexpected"
    RAISE_ALL = "raise_all"
    RETURN_UNEXPECTED = "return_unexpected"
    RETURN_ALL = "return_all"
    IGNORE_ALL = "ignore_all"

    @staticmethod
    def requires_explicit_ckpt_mismatch_check(val: StrictHandling) -> bool:
        """Return whether the keys are compared with those of the checkpoint."""
        return val != StrictHandling.ASSUME_OK_UNEXPECTED

    @staticmethod
    def requires_global_app_metadata(val: StrictHandling) -> bool:
        """Return whether the keys of all ranks are needed."""
        return val in (StrictHandling.LOG_ALL, StrictHandling.RAISE_ALL, StrictHandling.RETURN_ALL)

    @staticmethod
    def requires_returning_mismatch_keys(val: StrictHandling) -> bool:
        """Return whether a load returns (state dict, missing keys, unexpected keys)."""
        return val in (StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL)

    @property
    def raises(self) -> bool:
        return self in (
            StrictHandling.ASSUME_OK_UNEXPECTED,
            StrictHandling.RAISE_UNEXPECTED,
            StrictHandling.RAISE_ALL,
        )

    @property
    def logs(self) -> bool:
        return self in (StrictHandling.LOG_UNEXPECTED, StrictHandling.LOG_ALL)


def parse_strict_flag(strict: Union[str, StrictHandling]) -> StrictHandling:
    """Return the mode of a name.

    Raises:
        ValueError: no such mode.
    """
    if isinstance(strict, StrictHandling):
        return strict
    # Megatron's own enum has the same values.
    value = getattr(strict, "value", strict)
    try:
        return StrictHandling(value)
    except ValueError:
        names = ", ".join(mode.value for mode in StrictHandling)
        raise ValueError(f"strict={strict!r}: expected one of {names}") from None


def verify_checkpoint(checkpoint_dir: Folder) -> None:
    """Check that a folder is a checkpoint.

    Raises:
        CheckpointingException: it is none.
    """
    if not os.path.isdir(checkpoint_dir):
        raise CheckpointingException(no_folder(checkpoint_dir))
    config: Optional[CheckpointingConfig] = maybe_load_config(checkpoint_dir)
    if config is None:
        raise CheckpointingException(no_checkpoint(checkpoint_dir))


def verify_checkpoint_and_load_strategy(
    checkpoint_dir: Folder, sharded_strategy: Any = None, common_strategy: Any = None
) -> tuple[Any, Any]:
    """Check that a folder is a checkpoint of the only format; return the strategies as they are.

    Raises:
        CheckpointingException: it is none.
    """
    verify_checkpoint(checkpoint_dir)
    return sharded_strategy, common_strategy


def validate_integrity_and_strict_load(
    sharded_state_dict: ShardedStateDict,
    strict: Union[str, StrictHandling],
    validate_access_integrity: bool,
    local_metadata: Optional[Iterable[ShardedBase]] = None,
    global_metadata: Optional[Iterable[Iterable[ShardedBase]]] = None,
    ckpt_sharded_metadata: Optional[Mapping[str, ShardedBase]] = None,
) -> tuple[ShardedStateDict, set[str], set[str]]:
    """Compare a sharded state dict with the parts that a checkpoint holds.

    Args:
        local_metadata: the parts of this rank; by default those of the state dict.
        global_metadata: those of each rank.
        ckpt_sharded_metadata: the parts that the checkpoint holds.

    Returns:
        (the state dict without unexpected parts, missing keys, unexpected keys).

    Raises:
        CheckpointingException: as `strict` says, or the ranks together do not cover a tensor.
    """
    mode = parse_strict_flag(strict)
    all_parts = None if global_metadata is None else [list(parts) for parts in global_metadata]
    missing: set[str] = set()
    unexpected: set[str] = set()
    if StrictHandling.requires_explicit_ckpt_mismatch_check(mode):
        if ckpt_sharded_metadata is None:
            raise CheckpointingException(f"strict={mode.value} needs the checkpoint's metadata")
        known = {part.key for part in ckpt_sharded_metadata.values()}
        own = local_metadata if local_metadata is not None else split(sharded_state_dict).parts
        unexpected = {part.key for part in own} - known
        if StrictHandling.requires_global_app_metadata(mode):
            if all_parts is None:
                raise CheckpointingException(f"strict={mode.value} needs the metadata of all ranks")
            missing = known - {part.key for parts in all_parts for part in parts}
        sharded_state_dict = adjust_non_strict_load(sharded_state_dict, unexpected)
        if mode is StrictHandling.IGNORE_ALL:
            missing, unexpected = set(), set()
        if mode.raises or mode.logs:
            maybe_report_missing_and_unexpected_keys(missing, unexpected, mode.raises)
    if validate_access_integrity:
        if all_parts is None:
            raise CheckpointingException("validate_access_integrity needs the metadata of all ranks")
        validate_sharding_integrity(all_parts)
    return sharded_state_dict, missing, unexpected


def adjust_non_strict_load(
    sharded_state_dict: ShardedStateDict, sharded_keys_to_remove: set[str]
) -> ShardedStateDict:
    """Return the state dict without parts of these keys."""

    def is_removed(value: Any) -> bool:
        return isinstance(value, ShardedBase) and value.key in sharded_keys_to_remove

    _, kept = extract_matching_values(sharded_state_dict, is_removed)
    return kept  # type: ignore[return-value]


def maybe_report_missing_and_unexpected_keys(
    missing_keys: set[str], unexpected_keys: set[str], raise_error: bool = True
) -> None:
    """Raise or log the keys that are missing or unexpected, where there are any.

    Args:
        raise_error: whether to raise; else the keys are logged as a warning.

    Raises:
        CheckpointingException: with both lists.
    """
    if not (missing_keys or unexpected_keys):
        return
    text = mismatch_text(missing_keys, unexpected_keys)
    if raise_error:
        raise CheckpointingException(text)
    logger.warning("%s", text)


def mismatch_text(missing_keys: set[str], unexpected_keys: set[str]) -> str:
    parts = []
    if unexpected_keys:
        parts.append(f"{UNEXPECTED}: {', '.join(sorted(unexpected_keys))}")
    if missing_keys:
        parts.append(f"{MISSING}: {', '.join(sorted(missing_keys))}")
    return "; ".join(parts)


def validate_sharding_integrity(
    global_metadata: Iterable[Iterable[ShardedBase]], common_state_dict: Optional[CommonStateDict] = None
) -> None:
    """Check that every element of every tensor, and every object, has one main copy.

    Args:
        global_metadata: the parts of each rank.

    Raises:
        CheckpointingException: naming keys, cells and ranks.
    """
    tables = {}
    for rank, parts in enumerate(global_metadata):
        known = list(parts)
        tables[rank] = table_of(
            [part for part in known if isinstance(part, ShardedTensor)],
            [part for part in known if isinstance(part, ShardedObject)],
        )
    findings = findings_of(tables)
    if findings:
        raise CheckpointingException(str(Refusal(findings)))


def determine_global_metadata(
    sharded_state_dict: ShardedStateDict, process_group: Group = None
) -> tuple[list[ShardedBase], list[list[ShardedBase]]]:
    """Return (this rank's parts, those of each rank), without their values. Collective.

    Args:
        process_group: the ranks whose parts make one checkpoint; None is the default group. With a group that
            is none of torch's, torch's own functions are called with it.
    """
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        mine = [adopted(part).without_data() for part in nested_values(sharded_state_dict)]
        all_parts: list[Any] = [None] * dist.get_world_size(group=process_group)
        dist.all_gather_object(all_parts, mine, group=process_group)
        return mine, all_parts
    with begin("cannot gather what is sharded", "save", process_group) as call:
        local = call.attempt(lambda: [part.without_data() for part in split(sharded_state_dict).parts])
        parts_by_rank = call.all_gather_object("gathering", local)
        return local.value, [parts_by_rank[rank] for rank in sorted(parts_by_rank)]


def save_integrity_manifest(checkpoint_dir: Folder) -> None:
    """Save the SHA-256 of every file in a folder, as `save(verify_integrity=True)` does. Not collective.

    Raises:
        OSError: a file cannot be read, or the list cannot be written.
    """
    integrity.write_all(Path(checkpoint_dir))


def verify_integrity_manifest(checkpoint_dir: Folder, process_group: Group = None) -> None:
    """Compare every file of a checkpoint with its SHA-256; the ranks share the files. Collective.

    Raises:
        CheckpointingException: there are no digests, or a file is missing or not what was saved; the same on
            every rank.
    """
    with begin("the checkpoint is not the one that was saved", "load", process_group) as call:
        folder = Path(checkpoint_dir)
        check_digests(call, folder, read_digests(call, folder))
        call.barrier("comparing digests")


def read_digests(call: Call, folder: Path) -> integrity.Digests:
    """Return the digests of a checkpoint, which the first rank reads. Collective.

    Raises:
        CheckpointingException: there are none; the same on every rank.
    """

    def read(_: Mapping[int, None]) -> integrity.Digests:
        try:
            return integrity.read(folder)
        except integrity.Unknown as error:
            raise CheckpointingException(str(error)) from None

    return call.gather_object("reading digests", None, read)


def check_digests(call: Call, folder: Path, digests: integrity.Digests, needed: Iterable[str] = ()) -> None:
    """Record the problems of this rank's part of the files, for the next agreement.

    Args:
        needed: files that the list has to name.
    """
    ranks = call.ranks
    place = ranks.index(call.rank)
    with call.guard():
        if not place:
            call.problems += integrity.unlisted(digests, {*needed, *integrity.named_in(folder)})
        for name in sorted(digests)[place :: len(ranks)]:
            call.problems += integrity.problem_of(folder, name, digests[name])


def unexpected_problems(keys: Iterable[str]) -> list[Problem]:
    return [Problem(UNEXPECTED, key) for key in sorted(set(keys))]
