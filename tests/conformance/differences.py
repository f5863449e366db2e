"""The table of deliberate differences from native torch: which scenarios, and why.

What ours gives there is pinned in recorded/ours-*.json; everything else must equal native torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Difference(NamedTuple):
    """One reason, and the scenarios it explains."""

    reason: str
    #: fnmatch patterns of scenario keys.
    scenarios: tuple[str, ...]
    #: The record in patches/ that it belongs to.
    record: str = ""
    #: Releases whose own core, outside the two modules, gives another result; () for all releases.
    core_of: tuple[str, ...] = ()


#: Values of a param group that are tuples and that native torch gives back as lists.
TUPLES = ("betas", "etas", "step_sizes")


def kept_tuples(result: Any, inside: bool = False) -> Any:
    """A native result with the tuples of param groups as tuples: loading must not change their type."""
    if isinstance(result, dict):
        if inside and list(result) == ["[]"]:
            return {"()": result["[]"]}
        return {key: kept_tuples(one, key.rpartition(".")[2] in TUPLES) for key, one in result.items()}
    return [kept_tuples(one, inside) for one in result] if isinstance(result, list) else result


FULL = "full_state_dict"
BROADCAST = f"{FULL}+broadcast_from_rank0"

DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "missing keys have no prefix of a wrapper, as in the errors about them",
        (
            f"load hooks/drops_a_misfit ddp {FULL}+strict=False*",
            "load hooks/drops_a_misfit ddp strict=False*",
            "set model, other keys/load_keys ddp * strict=False",
            "deprecated/modules_as_keys ddp*",
        ),
        "0002-bad-input-loads-or-hangs",
    ),
    Difference(
        "missing and unexpected keys are found before any write, the same on every rank",
        (f"set model, other keys/load_keys * {FULL}*",),
        "0002-bad-input-loads-or-hangs",
    ),
    Difference(
        "one clear RuntimeError on every rank, where torch hangs or raises whatever comes first",
        (
            "bad input/bad_input a meta tensor *",
            "bad input/dict_on_rank0_alone fsdp2",
            f"bad input/sharded_given_as_full {BROADCAST}",
            f"set optimizer, other keys/load_part no state of one parameter * {BROADCAST}",
        ),
        "0002-bad-input-loads-or-hangs",
    ),
    Difference(
        "set_state_dict works where rank 0 alone has the dicts; torch waits for ranks that left",
        (f"get and set state/both* {BROADCAST}*",),
        "0002-bad-input-loads-or-hangs",
    ),
    Difference(
        "existing parameters stay the same objects, tied ones stay tied",
        ("shared/tied_meta *", "shared/shared_*", "shared/one_name_of_two *", "meta/optimizer_after_meta *"),
        "0003-parameters-replaced-by-a-meta-load",
    ),
    Difference(
        "the caller's dict is left as it is",
        ("caller's dict/left_as_it_was *",),
        "0004-callers-dict-overwritten",
    ),
    Difference(
        "a stateless optimizer (SGD) and gradients that are present do not matter",
        (
            f"set optimizer/load* {FULL}* sgd",
            f"set optimizer/load_with_gradients * {FULL}*",
            "set optimizer/load plain flatten_optimizer_state_dict sgd",
            "several optimizers/adam_and_stateless *",
        ),
        "0006-optimizer-load-fails-or-loses-values",
    ),
    Difference(
        "nested states keep integer keys and empty dicts",
        ("set optimizer/load* nested", f"set optimizer/load_extras * {FULL}*"),
        "0006-optimizer-load-fails-or-loses-values",
    ),
    Difference(
        "every param group keeps its values, whichever groups are empty",
        ("set optimizer, groups/load_groups *empty*",),
        "0006-optimizer-load-fails-or-loses-values",
    ),
    Difference(
        "saved param groups of another pipeline stage take no value from this stage's",
        ("dcp, programs/pipeline -",),
        "0006-optimizer-load-fails-or-loses-values",
    ),
    Difference(
        "a value that only one side's param groups have is neither lost nor fatal",
        ("set optimizer/load_scheduled *", "set optimizer/load_before_scheduler *"),
        "0006-optimizer-load-fails-or-loses-values",
    ),
    Difference(
        "a get before the first step gives counters at 0 and no weight decay",
        ("get optimizer/get_fresh *",),
        "0006-optimizer-load-fails-or-loses-values",
    ),
    Difference(
        "a get gives first states of parameters that never had a gradient, where they train as none would",
        ("get optimizer/get_partly_initialised *", "partly used/get_partly_used adam *"),
        "0006-optimizer-load-fails-or-loses-values",
    ),
    Difference(
        "a part of a parameter's states is an error; torch mixes it with what was there, or trains without",
        tuple(
            f"set optimizer, other keys/load_part no {part} of one parameter * {options}"
            for part in ("step", "moment")
            for options in ("-", FULL, BROADCAST)
        ),
        "0006-optimizer-load-fails-or-loses-values",
    ),
    Difference(
        "a parameter whose state a get leaves out starts from nothing; torch fails, or waits",
        ("partly used/set_partly_used *",),
        "0006-optimizer-load-fails-or-loses-values",
    ),
    Difference(
        "states of parameters that are frozen since are loaded",
        ("frozen/frozen_since *",),
        "0006-optimizer-load-fails-or-loses-values",
    ),
    Difference(
        "a saved group that is split gives its values to both, in torch to the last only",
        ("groups cut otherwise/split_group *",),
        "0006-optimizer-load-fails-or-loses-values",
    ),
    Difference(
        "loaded states are new tensors, whatever shares memory with the old ones",
        (f"shared memory/* {FULL}*",),
        "0006-optimizer-load-fails-or-loses-values",
    ),
    Difference(
        "states that only the checkpoint has arrive on every rank, laid out as their parameter",
        (f"optimizers from elsewhere/grown_states * {FULL}*",),
        "0006-optimizer-load-fails-or-loses-values",
    ),
    Difference(
        "flat, numbered and partly initialised state dicts load with full tensors",
        (
            f"set optimizer/load * flatten_optimizer_state_dict+{FULL} adam",
            "set optimizer/load_numbers *",
            "set optimizer/load_partly_initialised *",
        ),
        "0006-optimizer-load-fails-or-loses-values",
    ),
    Difference(
        "a compiled FSDP1 model's optimizer loads from rank 0",
        (f"set optimizer/load compile(fsdp1) {BROADCAST}*",),
        "0006-optimizer-load-fails-or-loses-values",
    ),
    Difference(
        "bytes travel, whatever the dtype and memory format",
        ("set model/load_strided_source *", "set model, dtypes/load_each_dtype float8_e4m3fn *"),
        "0009-not-every-tensor-travels",
    ),
    Difference(
        "loading code and shared names see the model as it was; torch >= 2.7 writes FSDP2's shards before",
        (
            f"load hooks/sees * fsdp2 {BROADCAST}*",
            f"exact/tied_values_differ reversed fsdp2 {BROADCAST}*",
        ),
    ),
    Difference(
        "a set does not miss keys that get leaves out or names twice, and finds names inside DDP",
        (
            "load hooks/old_batch_norm ddp *",
            "exact/two_names_in_one_module *",
            f"exact/frozen_left_out * {BROADCAST}*",
        ),
        "0002-bad-input-loads-or-hangs",
    ),
    Difference(
        "_IncompatibleKeys holds lists, as torch declares it; here torch gives two empty dicts",
        ("bad input/set_state_dict_without_model *",),
    ),
    Difference(
        "FSDP2 wraps no parameter of an integer or bool dtype (torch 2.7.1 neither)",
        ("set model, dtypes/load_each_dtype int*", "set model, dtypes/load_each_dtype bool *"),
        core_of=("2.4", "2.5", "2.6"),
    ),
    Difference(
        "Rprop's own step takes no DTensors (torch 2.15's does)",
        ("get optimizer/get fsdp2 * rprop", "set optimizer/load* fsdp2 * rprop"),
        core_of=("2.4", "2.5", "2.6"),
    ),
    Difference(
        "an uneven shard of TP lies in memory with another stride",
        ("meshes/uneven_tp *",),
        core_of=("2.4", "2.5", "2.6"),
    ),
    Difference(
        "torch 2.4's FSDP2 refuses every state dict on a mesh of two dimensions",
        (
            "* hsdp *",
            "* hsdp",
            "*model/* fsdp2+tp *",
            "set model/load_own fsdp2+tp",
            "get and set state/both fsdp2+tp *",
            "meshes/size_one_axes *",
            "meshes/three_dimensions *",
            "dcp, programs/training fsdp2+tp *",
        ),
        core_of=("2.4",),
    ),
    Difference(
        "torch 2.4 has no _distribute_tensors",
        ("helpers/distribute",),
        core_of=("2.4",),
    ),
    Difference(
        "torch 2.4 has no strided shard: refused, where stock torch gives permuted tensors without a word",
        ("*optimizer/* fsdp2+tp *",),
        core_of=("2.4",),
    ),
    Difference(
        "FSDP2 shards dimension 0 only (torch 2.6 came with shard_placement_fn)",
        ("meshes/other_dimension *",),
        core_of=("2.4", "2.5"),
    ),
    Difference(
        "optimizers take no named parameters (since torch 2.6)",
        ("one value/named_groups *",),
        core_of=("2.4", "2.5"),
    ),
)
