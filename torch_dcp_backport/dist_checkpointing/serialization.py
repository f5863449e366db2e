"""Save and load of sharded state dicts.

Signatures, positional order and results are those of megatron.core.dist_checkpointing.serialization.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Optional, Union

import torch.distributed as dist

from torch_dcp_backport.dist_checkpointing._src import commit, report
from torch_dcp_backport.dist_checkpointing._src import load as engine
from torch_dcp_backport.dist_checkpointing._src.calls import begin
from torch_dcp_backport.dist_checkpointing._src.files import OpenFiles
from torch_dcp_backport.dist_checkpointing._src.load import Opened
from torch_dcp_backport.dist_checkpointing._src.loading import Loading, PlanRefused, agree_on_load
from torch_dcp_backport.dist_checkpointing._src.metadata import Stored
from torch_dcp_backport.dist_checkpointing._src.offers import either_order, refusing
from torch_dcp_backport.dist_checkpointing._src.options import (
    CONTENT_METADATA,
    LOADS_THE_REST,
    LoadOptions,
    SaveOptions,
    checked_bool,
)
from torch_dcp_backport.dist_checkpointing._src.save import save_at_once, save_in_background
from torch_dcp_backport.dist_checkpointing.core import SHARDED_BACKEND, CheckpointingException, Folder
from torch_dcp_backport.dist_checkpointing.inspection import problems_of_digests
from torch_dcp_backport.dist_checkpointing.mapping import (
    CommonStateDict,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
)
from torch_dcp_backport.dist_checkpointing.state_dict_utils import split
from torch_dcp_backport.dist_checkpointing.strategies.async_utils import AsyncRequest
from torch_dcp_backport.dist_checkpointing.strategies.base import (
    refuse_strategies,
    sharing_groups,
)
from torch_dcp_backport.dist_checkpointing.validation import (
    StrictHandling,
    check_digests,
    parse_strict_flag,
    read_digests,
)
from torch_dcp_backport.transfer import NOTHING, Attempt, Group, gc_context

__getattr__ = refusing(__name__, "get_default_save_common_strategy", ": the common state needs no strategy")

#: Key -> tensor, and unique key -> object, without data: the parts of a checkpoint.
CkptShardedMetadata = dict[str, ShardedBase]

CANNOT_LOAD = "cannot load the checkpoint"


@either_order(
    "validate_access_integrity",
    "async_sharded_save",
    "preprocess_common_before_consistancy_check",
    "content_metadata",
    "async_strategy",
    "verify_integrity",
)
def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: Folder,
    sharded_strategy: Optional[object] = None,
    common_strategy: Optional[object] = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Optional[Callable[[CommonStateDict], StateDict]] = None,
    content_metadata: Optional[dict[str, Any]] = None,
    *,
    balanced: bool = True,
    process_group: Group = None,
    verify_integrity: bool = False,
    strict_common: bool = False,
    async_strategy: Optional[str] = None,
    torch_metadata: bool = True,
) -> Optional[AsyncRequest]:
    """Save a sharded state dict. Collective.

    The order of the arguments is that of megatron-core up to 0.18. A bool in the place of `common_strategy`
    stands for the order from 0.19 on, which has none: `validate_access_integrity, async_sharded_save,
    preprocess_common_before_consistancy_check, content_metadata, async_strategy, verify_integrity`.

    Every rank writes one file; values that several ranks hold are written once. An older checkpoint in the
    folder is unmade first, so that a save that fails leaves none.

    Args:
        sharded_state_dict: nested dicts and lists of ShardedTensors, ShardedObjects and factories; of other
            values (the common state) those of the first rank are saved.
        checkpoint_dir: a folder that every rank sees; it has to be there.
        sharded_strategy, common_strategy: there is one format; None, its name, or a strategy for it.
        validate_access_integrity: check that every element has one main replica among the ranks, and warn
            where their common states differ.
        async_sharded_save: only plan, and copy this rank's share to the host; return a request for an
            `AsyncCallsQueue`, which writes beside the training and makes the checkpoint later. Changes of the
            tensors after this call are not saved. The memory of the copy is kept for the next save.
        preprocess_common_before_consistancy_check: turns the common state into the state that is compared
            between ranks, for values that are each rank's own.
        content_metadata: saved with the common state, for `load_content_metadata`.
        balanced: let any rank that holds a replica write it, by bytes; else the main replica's.
        process_group: the ranks that save together; None is the default group.
        verify_integrity: save the SHA-256 of every file as well (`integrity.json`).
        strict_common: common states that differ are an error.
        async_strategy: None or "mcore": the request's queue is this package's `AsyncCallsQueue`. "nvrx" is an
            error with `async_sharded_save`: NVRx's queue writes in another process.
        torch_metadata: write torch's index into `.metadata` as well. False leaves it out: the file is a
            fraction as long, and torch's and Megatron's own readers refuse the checkpoint. The same on every
            rank.

    Returns:
        None, or the request of a save in the background.

    Raises:
        CheckpointingException: the same on every rank. It says whether an older checkpoint was touched.

    Example:
        >>> import os, torch
        >>> from torch_dcp_backport import dist_checkpointing
        >>> os.mkdir("step_1")
        >>> weight = dist_checkpointing.ShardedTensor.from_rank_offsets("w", torch.arange(4))
        >>> dist_checkpointing.save({"w": weight, "step": 1}, "step_1")
        >>> dist_checkpointing.load_plain_tensors("step_1")["w"]
        tensor([0, 1, 2, 3])
    """
    options = SaveOptions(
        validate_access_integrity=validate_access_integrity,
        preprocess_common_before_consistancy_check=preprocess_common_before_consistancy_check,
        content_metadata=content_metadata,
        balanced=balanced,
        process_group=process_group,
        verify_integrity=verify_integrity,
        compare_common=validate_access_integrity or strict_common,
        strict_common=strict_common,
        torch_metadata=torch_metadata,
    )
    requests: list[AsyncRequest] = []
    with saving(checkpoint_dir, options, requests if async_sharded_save else None) as state:
        refuse_strategies(sharded_strategy, common_strategy, called="save")
        if async_sharded_save:
            refuse_processes(async_strategy)
        state.set(sharded_state_dict)
    return requests[0] if requests else None


def refuse_processes(async_strategy: Optional[str]) -> None:
    """Refuse saves in the background by another program than this package's queue.

    Raises:
        CheckpointingException: naming it.
    """
    if async_strategy not in (None, "mcore"):
        raise CheckpointingException(
            f"async_strategy={async_strategy!r} writes in another process with a queue of its own: "
            "pass async_strategy='mcore', and the request to the AsyncCallsQueue of strategies.async_utils"
        )


@contextlib.contextmanager
def saving(
    checkpoint_dir: Folder, options: SaveOptions, requests: Optional[list[AsyncRequest]] = None
) -> Iterator[Attempt[ShardedStateDict]]:
    """Save the state dict that is set in the context; what fails there is raised on every rank. Collective.

        with saving(folder, options) as state:
            state.set({"w": part, "step": 1})

    Args:
        checkpoint_dir, options: of the save.
        requests: gets the request of a save in the background, which is begun at the end of the context; None
            saves there at once.

    Returns:
        The attempt to make this rank's state dict, to be set.

    Raises:
        CheckpointingException: as `save`.
    """
    clock = report.Clock()
    with gc_context(), options.begin() as call:
        with call.guard() as state:
            yield state
        if requests is None:
            save_at_once(call, state, checkpoint_dir, options, clock)
        else:
            save = save_in_background(call, state, checkpoint_dir, options, clock)
            requests.append(
                AsyncRequest(save.write, (), [save.commit], abandon_fns=(save.abandon,), stop_fn=save.stop)
            )


@either_order("validate_access_integrity", "strict", "verify_integrity", "process_group")
def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: Folder,
    sharded_strategy: Optional[object] = None,
    common_strategy: Optional[object] = None,
    validate_access_integrity: bool = True,
    strict: Union[str, StrictHandling] = StrictHandling.ASSUME_OK_UNEXPECTED,
    *,
    trust: bool = False,
    process_group: Group = None,
    verify_integrity: bool = False,
    read_together: bool = False,
) -> Any:
    """Load the values that a sharded state dict describes, saved by any number of ranks. Collective.

    The order of the arguments is that of megatron-core up to 0.18. A bool in the place of `common_strategy`
    stands for the order from 0.19 on, which has none: `validate_access_integrity, strict, verify_integrity,
    process_group`.

    Args:
        sharded_state_dict: as for `save`. A part whose `data` is there is written in place, cast to its dtype
            if that has every value of the saved one; a part whose `data` is None gets a tensor on the CPU.
            Other values of the dict are ignored.
        checkpoint_dir: a checkpoint of `save`, of Megatron ("torch_dist"), or of torch's own `dcp.save`.
        sharded_strategy: None, the name of the one format, or a strategy for it. With one from
            `strategies.fully_parallel` the ranks of its group read together: a part that several of them
            want is read by one rank, and sent to the others.
        common_strategy: None, the name of the one format, or a strategy for it.
        validate_access_integrity: check that the ranks together load every element of every tensor.
        strict: what to do about missing and unexpected keys: a `StrictHandling` or its value.
        trust: make objects of any class, which runs what the file says.
        process_group: the ranks that load together; None is the default group.
        verify_integrity: compare every file with its SHA-256 before anything is loaded; the ranks share them.
        read_together: let all ranks of `process_group` read together, as with a strategy from
            `strategies.fully_parallel`; a group that such a strategy names is used in its place. The same on
            every rank.

    Returns:
        The common state merged with the loaded values; with `return_*` (it, missing keys, unexpected keys).

    Raises:
        CheckpointingException: the same on every rank. It says whether something may have been written: only
            where a checksum turned out to be wrong, a disk failed, or a factory's merge did. With
            `ASSUME_OK_UNEXPECTED`, what cannot be planned is an error of torch's `CheckpointException`, too.

    Example:
        >>> import os, torch
        >>> from torch_dcp_backport import dist_checkpointing
        >>> os.mkdir("step_1")
        >>> weight = dist_checkpointing.ShardedTensor.from_rank_offsets("w", torch.arange(4))
        >>> dist_checkpointing.save({"w": weight, "step": 1}, "step_1")
        >>> new = torch.zeros(4, dtype=torch.int64)
        >>> wanted = dist_checkpointing.ShardedTensor.from_rank_offsets("w", new)
        >>> dist_checkpointing.load({"w": wanted}, "step_1")["step"]
        1
        >>> new
        tensor([0, 1, 2, 3])
    """
    read_together_in = sharing_groups(sharded_strategy)
    if read_together and not read_together_in and dist.is_initialized():
        read_together_in = (process_group,)
    options = LoadOptions(
        validate_access_integrity=validate_access_integrity,
        strict=strict,
        trust=trust,
        process_group=process_group,
        read_together_in=read_together_in,
        verify_integrity=verify_integrity,
        advice=LOADS_THE_REST,
    )
    with loading(checkpoint_dir, options) as load:
        refuse_strategies(sharded_strategy, common_strategy, called="load")
        try:
            checked_bool("read_together", read_together)
        except ValueError as error:
            raise CheckpointingException(str(error)) from None
        load.ask(sharded_state_dict)
    return load.result


class LoadUnderWay:
    """A load whose checkpoint is open: what it asks for, and then its result."""

    def __init__(self, opened: Attempt[Opened], asked: Attempt[ShardedStateDict]) -> None:
        self._opened: Optional[Attempt[Opened]] = opened
        self._asked = asked
        #: As `load` returns it, after the context.
        self.result: Any = None

    @property
    def checkpoint(self) -> Opened:
        """The checkpoint, within the context.

        Raises:
            RuntimeError: the load is over.
        """
        if self._opened is None:
            raise RuntimeError("the load is over: its checkpoint is open within the context alone")
        return self._opened.value

    def ask(self, sharded_state_dict: ShardedStateDict) -> None:
        """Say what is loaded."""
        self._asked.set(sharded_state_dict)

    def end(self, result: Any) -> None:
        """Keep the result alone."""
        self._opened, self._asked = None, Attempt()
        self.result = result


@contextlib.contextmanager
def loading(
    checkpoint_dir: Folder, options: LoadOptions, opened: Optional[Attempt[Opened]] = None
) -> Iterator[LoadUnderWay]:
    """Load what is asked for in the context; what fails there is raised on every rank. Collective.

        with loading(folder, options) as load:
            load.ask({"w": part})
        step = load.result["step"]

    Args:
        checkpoint_dir, options: of the load.
        opened: the attempt to open the checkpoint on this rank, by an `Opening` of all ranks; None opens it.

    Returns:
        The load, with the open checkpoint in the context, and the result after it.

    Raises:
        CheckpointingException: as `load`.
    """
    # Objects that only the load needs are gone when the collector may look at them.
    with gc_context(), _loading(checkpoint_dir, options, opened) as load:
        yield load


@contextlib.contextmanager
def _loading(
    checkpoint_dir: Folder, options: LoadOptions, opened: Optional[Attempt[Opened]]
) -> Iterator[LoadUnderWay]:
    clock = report.Clock()
    with begin(CANNOT_LOAD, "load", options.process_group, is_alone=options.is_alone) as call:
        with call.guard() as folder:
            folder.set(Path(checkpoint_dir))
        with call.guard() as same:
            mode = parse_strict_flag(options.strict)
            # It decides on what the ranks do together.
            same.set({"strict": mode.value, "verify_integrity": str(bool(options.verify_integrity))})
        if opened is None:
            checkpoint = engine.open_together(call, folder, same)
        else:
            # A problem of this rank with it is one of this call.
            checkpoint = call.attempt(lambda own: own, opened)
        if options.verify_integrity:
            digests = read_digests(call, folder.value)
            check_digests(call, folder.value, digests, checkpoint.value.holds.ends)
        with call.guard() as asked:
            load = LoadUnderWay(checkpoint, asked)
            yield load
        with contextlib.ExitStack() as held:
            # A rank that could not open the checkpoint comes to "planning", where the others wait.
            with call.guard() as own:
                files = held.enter_context(OpenFiles(checkpoint.value.folder))
                own.set(Loading(call, checkpoint.value, files, split(asked.value), mode, options))
            if mode is StrictHandling.ASSUME_OK_UNEXPECTED:
                call.kind = PlanRefused
            missing = agree_on_load(call, own, NOTHING if opened is None else same)
            call.kind = CheckpointingException
            loaded: Loading = own.value
            result: Any = loaded.read()
        reader = loaded.reader
        report.close(call.tally, loaded.records, reader.bytes_read, len(reader.names), clock.stop())
    if StrictHandling.requires_returning_mismatch_keys(mode):
        result = result, missing, loaded.unexpected
    load.end(result)


def load_common_state_dict(checkpoint_dir: Folder, *, trust: bool = False) -> StateDict:
    """Return the common state of a checkpoint. Not collective.

    Args:
        checkpoint_dir: the folder of a checkpoint.
        trust: make objects of any class, which runs what the file says.

    Raises:
        CheckpointingException: no checkpoint, or its common state cannot be read.

    Example:
        >>> import os, torch
        >>> from torch_dcp_backport import dist_checkpointing
        >>> os.mkdir("step_1")
        >>> weight = dist_checkpointing.ShardedTensor.from_rank_offsets("w", torch.arange(4))
        >>> dist_checkpointing.save({"w": weight, "step": 1}, "step_1")
        >>> dist_checkpointing.load_common_state_dict("step_1")["step"]
        1
    """
    return open_alone(checkpoint_dir).common_state(trust)  # type: ignore[no-any-return]


def open_alone(checkpoint_dir: Folder) -> Opened:
    folder = Path(checkpoint_dir)
    return engine.opened(folder, engine.small_files(folder))


def load_tensors_metadata(
    checkpoint_dir: Folder, sharded_strategy: Optional[object] = None
) -> dict[str, ShardedTensor]:
    """Return the tensors of a checkpoint, without data. Not collective.

    Args:
        checkpoint_dir: the folder of a checkpoint.
        sharded_strategy: None, the name of the one format, or a strategy for it; it changes nothing.

    Returns:
        key -> the full global tensor; its `data` is None.

    Raises:
        CheckpointingException: no checkpoint.

    Example:
        >>> import os, torch
        >>> from torch_dcp_backport import dist_checkpointing
        >>> os.mkdir("step_1")
        >>> weight = dist_checkpointing.ShardedTensor.from_rank_offsets("w", torch.arange(4))
        >>> dist_checkpointing.save({"w": weight, "step": 1}, "step_1")
        >>> tensor = dist_checkpointing.load_tensors_metadata("step_1")["w"]
        >>> tensor.global_shape, tensor.dtype
        ((4,), torch.int64)
    """
    refuse_strategies(sharded_strategy)
    return tensors_in(open_alone(checkpoint_dir))


def tensors_in(checkpoint: Opened) -> dict[str, ShardedTensor]:
    return {key: full_tensor_of(key, stored) for key, stored in checkpoint.holds.tensors.items()}


def full_tensor_of(key: str, stored: Stored) -> ShardedTensor:
    """Describe a full tensor; a tensor of flattened ranges as a single range, as Megatron has it."""
    shape = stored.shape if stored.original is None else stored.original
    run = None if stored.original is None else slice(0, math.prod(shape))
    nothing, single = (0,) * len(shape), (1,) * len(shape)
    return ShardedTensor(key, None, stored.dtype, shape, shape, nothing, single, flattened_range=run)


def load_sharded_metadata(
    checkpoint_dir: Folder,
    sharded_strategy: Optional[object] = None,
    common_strategy: Optional[object] = None,
) -> dict[str, ShardedBase]:
    """Return the tensors of `load_tensors_metadata`, and the objects by their unique keys. Not collective.

    Args:
        checkpoint_dir: the folder of a checkpoint.
        sharded_strategy: None, the name of the one format, or a strategy for it; it changes nothing.
        common_strategy: as `sharded_strategy`.

    Returns:
        key -> ShardedTensor, and unique key -> ShardedObject; without data. The common state is one of these
        objects, under the key that Megatron from 0.19 on stores it.

    Raises:
        CheckpointingException: no checkpoint.

    Example:
        >>> import os
        >>> from torch_dcp_backport import dist_checkpointing
        >>> os.mkdir("step_1")
        >>> state = dist_checkpointing.ShardedObject("rng", {"seed": 7}, (1,), (0,))
        >>> dist_checkpointing.save({"rng": state}, "step_1")
        >>> list(dist_checkpointing.load_sharded_metadata("step_1"))
        ['rng/shard_0_1', 'common_state/shard_0_1']
    """
    refuse_strategies(sharded_strategy, common_strategy)
    return parts_in(open_alone(checkpoint_dir))


def parts_in(checkpoint: Opened) -> dict[str, ShardedBase]:
    """Return what `load_sharded_metadata` does."""
    parts: dict[str, ShardedBase] = dict(tensors_in(checkpoint))
    keys = [key for key in checkpoint.holds.objects if "/shard_" in key]
    if checkpoint.common is not None:
        keys.append(engine.COMMON_STATE)
    parts.update((key, ShardedObject.empty_from_unique_key(key)) for key in keys)
    return parts


def load_plain_tensors(checkpoint_dir: Folder, *, process_group: Group = None) -> StateDict:
    """Return all tensors of a checkpoint, in full, on every rank, with the common state. Collective.

    Args:
        checkpoint_dir: the folder of a checkpoint.
        process_group: the ranks that load together; None is the default group.

    Returns:
        key -> tensor on the CPU; and the entries of the common state, as Megatron's function returns them.

    Raises:
        CheckpointingException: as `load`.

    Example:
        >>> import os, torch
        >>> from torch_dcp_backport import dist_checkpointing
        >>> os.mkdir("step_1")
        >>> weight = dist_checkpointing.ShardedTensor.from_rank_offsets("w", torch.arange(4))
        >>> dist_checkpointing.save({"w": weight, "step": 1}, "step_1")
        >>> dist_checkpointing.load_plain_tensors("step_1")["w"]
        tensor([0, 1, 2, 3])
    """
    options = LoadOptions(validate_access_integrity=False, process_group=process_group)
    with loading(checkpoint_dir, options) as load:
        load.ask(dict(tensors_in(load.checkpoint)))
    return load.result  # type: ignore[no-any-return]


def load_content_metadata(
    checkpoint_dir: Optional[Folder] = None, *, preloaded_state_dict: Optional[StateDict] = None
) -> Optional[dict[str, Any]]:
    """Return the `content_metadata` that was passed to `save`; None where none was. Not collective.

    Args:
        checkpoint_dir: the folder of a checkpoint.
        preloaded_state_dict: the common state of the checkpoint; with it no file is read.

    Raises:
        ValueError: neither a folder nor a state dict.
        CheckpointingException: no checkpoint.

    Example:
        >>> import os
        >>> from torch_dcp_backport import dist_checkpointing
        >>> os.mkdir("step_1")
        >>> dist_checkpointing.save({"step": 1}, "step_1", content_metadata={"sharding": "dp"})
        >>> dist_checkpointing.load_content_metadata("step_1")
        {'sharding': 'dp'}
    """
    if preloaded_state_dict is None:
        if checkpoint_dir is None:
            raise ValueError("pass checkpoint_dir or preloaded_state_dict")
        preloaded_state_dict = load_common_state_dict(checkpoint_dir)
    content: Optional[dict[str, Any]] = preloaded_state_dict.get(CONTENT_METADATA)
    return content


def get_default_save_sharded_strategy(backend: str = SHARDED_BACKEND, version: int = 1) -> Any:
    """Return the only strategy, a `TorchDistSaveShardedStrategy`; `save` does the same without it.

    Raises:
        CheckpointingException: another format.
    """
    # The strategies stand on this module.
    from torch_dcp_backport.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    refuse_strategies((backend, version))
    return TorchDistSaveShardedStrategy(backend, version)


def get_default_load_sharded_strategy(checkpoint_dir: Optional[Folder] = None) -> Any:
    """Return the only strategy, a `TorchDistLoadShardedStrategy`; `load` does the same without it.

    Args:
        checkpoint_dir: a folder that has to hold a checkpoint; None looks at none. Not collective.

    Raises:
        CheckpointingException: the folder holds no checkpoint.
    """
    from torch_dcp_backport.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

    if checkpoint_dir is not None:
        open_alone(checkpoint_dir)
    return TorchDistLoadShardedStrategy()


def remove_sharded_tensors(checkpoint_dir: Folder, key_prefix: str) -> None:
    """Remove tensors and objects whose keys begin with a prefix, and their files. Not collective.

    Files that hold other records are kept, and keep their size.

    Args:
        checkpoint_dir: the folder of a checkpoint of this package.
        key_prefix: the first characters of the keys.

    Raises:
        CheckpointingException: no checkpoint of this room (others are not rewritten); files that are not
            what was saved, which new digests would hide.

    Example:
        >>> import os, torch
        >>> from torch_dcp_backport import dist_checkpointing
        >>> os.mkdir("step_1")
        >>> describe = dist_checkpointing.ShardedTensor.from_rank_offsets
        >>> state = {key: describe(key, torch.ones(2)) for key in ("model.w", "optimizer.w")}
        >>> dist_checkpointing.save(state, "step_1")
        >>> dist_checkpointing.remove_sharded_tensors("step_1", "optimizer.")
        >>> list(dist_checkpointing.load_tensors_metadata("step_1"))
        ['model.w']
    """
    checkpoint = open_alone(checkpoint_dir)
    if not checkpoint.holds.is_ours:
        raise CheckpointingException(f"{checkpoint_dir} was not saved by this package, and is not rewritten")
    for problem in problems_of_digests(checkpoint):
        raise CheckpointingException(f"{checkpoint_dir}: {problem}")
    commit.forget(checkpoint.folder, checkpoint.holds, lambda key: key.startswith(key_prefix))
