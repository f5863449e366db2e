"""The list of the names that are replaced in torch: where, since when, for which records in patches/.

Data only: everything else reads it. Must never import torch or the replacements themselves.
"""

from __future__ import annotations

from typing import NamedTuple

# Releases that get the replacements: FIRST <= release < FIXED_IN.
FIRST = (2, 4)
FIXED_IN = (2, 7)

STATE_DICT = "torch.distributed.checkpoint.state_dict"
CHECKPOINT = "torch.distributed.checkpoint"
FSDP = "torch.distributed.fsdp"
STATE_DICT_UTILS = "torch.distributed._state_dict_utils"
PLANNER = "torch.distributed.checkpoint.default_planner"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"
COLLECTIVES = "torch.distributed.checkpoint.utils"
LOADER = "torch.distributed.checkpoint.state_dict_loader"
TRAVERSE = "torch.distributed.checkpoint._traverse"
# FSDP2's records of parameters: torch 2.4 and 2.5, then 2.6.
SHARDS_2_4 = "torch.distributed._composable.fsdp._fsdp_param"
SHARDS = "torch.distributed.fsdp._fully_shard._fsdp_param"
FSSPEC = "torch.distributed.checkpoint._fsspec_filesystem"

# The records in patches/.
KEPT_ALIVE = "0001-full-tensor-kept-alive"
BAD_INPUT = "0002-bad-input-loads-or-hangs"
REPLACED = "0003-parameters-replaced-by-a-meta-load"
OVERWRITTEN = "0004-callers-dict-overwritten"
NEVER_FREED = "0005-model-never-freed"
OPTIMIZER = "0006-optimizer-load-fails-or-loses-values"
GATHERS_TO_ALL = "0007-full-get-gathers-to-every-rank"
LIVE_COPY = "0008-cpu-copy-is-the-live-state"
FORMATS = "0009-not-every-tensor-travels"
LOST_WRITE = "0010-failed-writer-thread-publishes-a-checkpoint"
OTHER_SHAPE = "0011-another-shape-loads-silently"
COORDINATOR = "0012-save-and-load-without-global-rank-0"
BY_KEY = "0013-load-by-key-fails-without-paths"
DELETED = "0014-failed-read-deletes-the-file"
STATEFUL = "0015-load-replaces-stateful-objects"
REMOTE = "0016-save-to-a-remote-storage-fails"
UNPICKLED = "0017-errors-that-cannot-be-pickled-hang"
COPIES = "0018-finished-saves-keep-their-tensors"
STALE = "0019-kept-state-dicts-go-stale"
OLD_NAMES = "0020-checkpoints-of-torch-2.3-do-not-load"
PARTIAL = "0021-one-part-of-a-sum-is-saved"
META = "0022-a-load-leaves-meta-tensors"
LOST_OBJECTS = "0023-a-partial-load-loses-objects"
NO_KEYS = "0024-a-load-of-all-keys-is-empty"

# The subject of each record, and the pull requests or issues that it names.
_PULL, _ISSUE = "https://github.com/pytorch/pytorch/pull/", "https://github.com/pytorch/pytorch/issues/"
RECORDS: dict[str, tuple[str, tuple[str, ...]]] = {
    KEPT_ALIVE: ("every rank keeps the full model alive", (_PULL + "142845",)),
    BAD_INPUT: ("bad input loads silently, half, or hangs", ()),
    REPLACED: ("a load from meta unties tied weights", (_ISSUE + "143181",)),
    OVERWRITTEN: ("the caller's dict is overwritten", ()),
    NEVER_FREED: ("a model is never freed", (_PULL + "149354",)),
    OPTIMIZER: ("loading an optimizer fails or loses values", (_PULL + "147730", _PULL + "165228")),
    GATHERS_TO_ALL: ("a full get gathers every tensor on every rank", ()),
    LIVE_COPY: ("the copy for an asynchronous save is the live state", (_PULL + "146852", _PULL + "156092")),
    FORMATS: (
        "tensors that are not contiguous arrive permuted, and float8 not at all",
        ("https://github.com/NVIDIA/physicsnemo/issues/1614",),
    ),
    LOST_WRITE: ("a checkpoint is published although a writer thread failed", (_ISSUE + "191391",)),
    OTHER_SHAPE: ("dcp.load into a tensor of another shape is silent", (_PULL + "141571",)),
    COORDINATOR: (
        "dcp.save and dcp.load fail in a group without global rank 0",
        (_PULL + "147675", _PULL + "155912", _PULL + "135045"),
    ),
    BY_KEY: ("a checkpoint that was saved unflattened does not load by key", (_PULL + "157940",)),
    DELETED: ("a failed read through fsspec deletes the file", (_PULL + "135541",)),
    STATEFUL: ("dcp.load replaces the caller's Stateful objects", (_PULL + "138575",)),
    REMOTE: ("dcp.save to a storage without files fails", (_PULL + "143046", _PULL + "144753")),
    UNPICKLED: ("an error that cannot be pickled hangs dcp.save and dcp.load", (_PULL + "177754",)),
    COPIES: ("a finished save keeps its tensors until a collection", (_PULL + "170431",)),
    STALE: ("a kept state dict goes stale with uneven shards", (_PULL + "163130",)),
    OLD_NAMES: ("torch 2.4 does not load checkpoints of torch 2.3", (_PULL + "134158",)),
    PARTIAL: ("of a DTensor with partial values one rank's part is saved", (_PULL + "163941",)),
    META: ("dcp.load leaves tensors on the meta device", (_PULL + "133256",)),
    LOST_OBJECTS: ("dcp.load puts None in the place of objects that a checkpoint lacks", ()),
    NO_KEYS: ("a load of all keys returns nothing", (_PULL + "150058",)),
}


class Target(NamedTuple):
    """A name in a module of torch; the provider has the replacement under the same name."""

    module: str
    name: str  # with a dot a method: "class.method"
    since: tuple[int, int]  # the first torch release whose module has the name, or FIRST
    records: tuple[str, ...]  # files in patches/, without .md
    until: tuple[int, int] = FIXED_IN  # the first torch release whose own is left alone
    provider: str = ""  # where it is not the table's

    @property
    def is_independent(self) -> bool:
        """Return whether the rest of the set works beside torch's own of this name.

        Torch's public functions find our internals in their module; DCP's functions are fixes of their own.
        """
        return bool(self.provider) or (self.module == STATE_DICT and self.name.startswith(("get_", "set_")))

    def serves(self, release: tuple[int, int], preview: bool) -> bool:
        """Return whether it is replaced in this torch, if it exists. A preview may lack some of its names."""
        return release < self.until or (preview and release == self.until)


class TargetSet(NamedTuple):
    """A coherent set: all of it is replaced, or none."""

    provider: str  # our package that has the replacements
    owner: str  # the top-level package that must have defined what is replaced
    entrances: tuple[str, ...]  # torch imports none of the targets' modules without one of these
    trigger: str  # the module whose import completes the set
    targets: tuple[Target, ...]
    optional: tuple[str, ...] = ()  # modules that are left out where they cannot be imported

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(target.module for target in self.targets))


# The public names, and the private ones too: a function bound before activation in a place that cannot be
# reached (a closure, a partial) is still torch's own, but finds these through the module's globals.
# Where no record is named, torch's own would do, but works only with other parts of torch's own.
_NAMES: dict[str, tuple[str, ...]] = {
    "StateDictOptions": (),
    "get_state_dict": (NEVER_FREED, OPTIMIZER, GATHERS_TO_ALL),
    "get_model_state_dict": (NEVER_FREED, GATHERS_TO_ALL),
    "get_optimizer_state_dict": (NEVER_FREED, OPTIMIZER, GATHERS_TO_ALL),
    "set_state_dict": (KEPT_ALIVE, BAD_INPUT, REPLACED, OVERWRITTEN, NEVER_FREED, OPTIMIZER, FORMATS),
    "set_model_state_dict": (KEPT_ALIVE, BAD_INPUT, REPLACED, OVERWRITTEN, NEVER_FREED, FORMATS),
    "set_optimizer_state_dict": (KEPT_ALIVE, BAD_INPUT, OVERWRITTEN, NEVER_FREED, OPTIMIZER, FORMATS),
    "_EXTRA_STATE": (),
    "_StateDictInfo": (),
    "_flatten_optim_state_dict": (OPTIMIZER,),
    "_gc_context": (),
    "_get_fqns": (NEVER_FREED,),
    "_get_model_state_dict": (GATHERS_TO_ALL,),
    "_get_optim_state_dict": (OPTIMIZER, GATHERS_TO_ALL),
    "_init_optim_state": (OPTIMIZER,),
    "_iterate_valid_model_state": (),
    "_load_model_state_dict": (KEPT_ALIVE, BAD_INPUT, REPLACED, OVERWRITTEN),
    "_load_optim_state_dict": (KEPT_ALIVE, BAD_INPUT, OVERWRITTEN, OPTIMIZER),
    "_maybe_full_or_cpu_state_dict": (GATHERS_TO_ALL,),
    "_patch_model_state_dict": (NEVER_FREED,),
    "_patch_optimizer_state_dict": (NEVER_FREED,),
    "_split_optim_state_dict": (OPTIMIZER,),
    "_state_dict_fn": (),
    "_unflatten_model_state_dict": (),
    "_unflatten_optim_state_dict": (OPTIMIZER,),
    "_verify_options": (NEVER_FREED,),
    "_verify_state_dict": (BAD_INPUT,),
}
# Left to torch on purpose: the mutable set _patched_state_dict, which the _patch_* functions fill. With a
# second set calls recurse without end.

# Helpers that state_dict.py imports by name, so that both modules hold them.
_SHARED: tuple[tuple[str, tuple[int, int], tuple[str, ...]], ...] = (
    ("_broadcast_state_dict", (2, 4), (KEPT_ALIVE, BAD_INPUT, FORMATS)),
    ("_distribute_state_dict", (2, 5), (KEPT_ALIVE, BAD_INPUT)),
    ("_gather_state_dict", (2, 4), (GATHERS_TO_ALL,)),
    ("_offload_state_dict_to_cpu", (2, 4), (LIVE_COPY,)),
)
# Helpers that other modules of torch import by name; they are rebound as late bindings.
_HELPERS: tuple[tuple[str, tuple[int, int], tuple[str, ...]], ...] = (
    *_SHARED,
    ("_check_state_dict_similarity", (2, 4), (LIVE_COPY,)),
    ("_copy_state_dict", (2, 4), (LIVE_COPY,)),
    ("_create_cpu_state_dict", (2, 4), (LIVE_COPY,)),
    ("_distribute_tensors", (2, 5), (KEPT_ALIVE,)),
)

# The names that dcp.save and dcp.load use, without checkpoint.state_dict.
_DCP: tuple[tuple[str, str, tuple[str, ...], tuple[int, int]], ...] = (
    (PLANNER, "create_default_local_save_plan", (PARTIAL,), FIXED_IN),
    (PLANNER, "create_default_local_load_plan", (OTHER_SHAPE, PARTIAL), FIXED_IN),
    (PLANNER, "DefaultLoadPlanner.set_up_planner", (META, LOST_OBJECTS), FIXED_IN),
    (PLANNER, "DefaultLoadPlanner.create_local_plan", (OLD_NAMES,), (2, 5)),
    (PLANNER, "_EmptyStateDictLoadPlanner._should_include_key", (BY_KEY,), FIXED_IN),
    (PLANNER, "_EmptyStateDictLoadPlanner.set_up_planner", (BY_KEY,), FIXED_IN),
    (FILESYSTEM, "_FileSystemWriter.write_data", (LOST_WRITE, REMOTE), FIXED_IN),
    (FILESYSTEM, "_FileSystemWriter.finish", (REMOTE,), FIXED_IN),
    (COLLECTIVES, "_all_gather_keys", (COORDINATOR,), (2, 5)),
    (COLLECTIVES, "_DistWrapper.all_gather_object", (UNPICKLED,), FIXED_IN),
    (COLLECTIVES, "_DistWrapper.broadcast_object", (COORDINATOR, UNPICKLED), FIXED_IN),
    (COLLECTIVES, "_DistWrapper.gather_object", (COORDINATOR, UNPICKLED), FIXED_IN),
    (COLLECTIVES, "_DistWrapper.scatter_object", (COORDINATOR, UNPICKLED), FIXED_IN),
    (LOADER, "load", (STATEFUL,), (2, 6)),
    (LOADER, "_load_state_dict_from_keys", (NO_KEYS,), FIXED_IN),
    (TRAVERSE, "traverse_state_dict", (COPIES,), FIXED_IN),
    (SHARDS_2_4, "FSDPParam.reset_sharded_param", (STALE,), (2, 6)),
    (FSSPEC, "FileSystem.create_stream", (DELETED,), FIXED_IN),
)

TABLE = TargetSet(
    provider="torch_dcp_backport.state_dict",
    owner="torch",
    entrances=(FSDP, CHECKPOINT, STATE_DICT_UTILS),
    optional=(SHARDS_2_4, FSSPEC, SHARDS),
    trigger=STATE_DICT,
    targets=(
        *(Target(STATE_DICT_UTILS, *helper) for helper in _HELPERS),
        *(
            Target(module, name, FIRST, records, until, "torch_dcp_backport.dcp")
            for module, name, records, until in _DCP
        ),
        Target(TRAVERSE, "traverse_state_dict_v_2_3", (2, 5), (COPIES,), provider="torch_dcp_backport.dcp"),
        Target(SHARDS, "FSDPParam.reset_sharded_param", (2, 6), (STALE,), provider="torch_dcp_backport.dcp"),
        *(Target(STATE_DICT, *helper) for helper in _SHARED),
        *(Target(STATE_DICT, name, FIRST, records) for name, records in _NAMES.items()),
    ),
)

# The targets that torch itself has decorated: the releases that added a layer. More are another tool's.
DECORATED: dict[str, tuple[tuple[int, int], ...]] = {
    "_gc_context": (FIRST,),
    "_get_fqns": (FIRST,),
    "load": (FIRST, FIRST),
    "FileSystem.create_stream": (FIRST,),
    **dict.fromkeys(("_get_model_state_dict", "_load_model_state_dict"), ((2, 5),)),
    **dict.fromkeys(("_get_optim_state_dict", "_load_optim_state_dict"), ((2, 5),)),
}
