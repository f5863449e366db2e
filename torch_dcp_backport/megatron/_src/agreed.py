"""The agreement of ranks before anything moves: which rank holds what, and every problem.

Reads values only where two tensors have to be equal.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import NamedTuple, Optional

from torch_dcp_backport.hf import (
    CONFIG,
    Export,
    ExportTarget,
    Part,
    Share,
    Source,
    Visibility,
    differ,
    equal_in,
    examined,
    exported,
)
from torch_dcp_backport.megatron._src import computing
from torch_dcp_backport.megatron._src.cuts import Holding
from torch_dcp_backport.megatron._src.model import (
    Layers,
    Local,
    Models,
    ModelShard,
    Parallel,
    chunks_of,
    describe,
    unwrapped,
)
from torch_dcp_backport.megatron._src.names import EMBED, HEAD, VALUE_HEADS
from torch_dcp_backport.megatron._src.plan import (
    COPIED,
    Head,
    Spreading,
    check_files,
    copy_of,
    head_of,
    layer_number,
    left_alone,
)
from torch_dcp_backport.megatron._src.shape import Shape, shape_of
from torch_dcp_backport.megatron.families.table import digest_of
from torch_dcp_backport.transfer import (
    Agreement,
    Attempt,
    Call,
    Problem,
    TensorInfo,
    Terms,
    part_of,
    span_of,
    whole,
)

logger = logging.getLogger("torch_dcp_backport.megatron")
HEAD_OF_ITS_OWN = Problem(
    "a head of its own",
    HEAD,
    "other values",
    f"the values of {EMBED}, since config.json says tie_word_embeddings=true",
)


class GivenModules(NamedTuple):
    """The caller's description of this rank's modules."""

    models: Models
    parallel: Optional[Parallel] = None
    layers: Optional[Layers] = None
    #: Whether a model that computes otherwise than config.json says is warned of.
    compares: bool = True


class Agreed(NamedTuple):
    """A load or a save that can begin."""

    agreement: Agreement
    local: Local
    spreading: Spreading
    share: Share
    #: HF tensors of the files that no parameter wants -> why.
    left: Mapping[str, str]
    #: The folder of a save; None where there is none.
    target: Optional[ExportTarget] = None


def agree_on_load(
    call: Call, given: Attempt[GivenModules], visibility: Visibility, value_head: bool
) -> Agreed:
    """Fit this rank's modules to the files.

    Args:
        given: the attempt to make this rank's.

    Raises:
        RuntimeError: some rank has problems; on every rank, before anything was written.
    """
    local, shape, agreement = _describe_to_all(
        call, given, visibility.config, {"value_head": bool(value_head)}
    )
    spreading = Spreading(agreement.tables, shape, head_of(shape, visibility.tensors, value_head))
    left: dict[str, str] = {}
    if not spreading.problems:
        call.problems += shared_memory(local, spreading)
        check_files(visibility.tensors, spreading)
        left = left_alone(visibility.tensors, spreading)
        if visibility.source is not None and call.is_first:
            with call.guard(HEAD):
                call.problems += other_copies(visibility.source, shape, left, spreading.head)
    call.problems += spreading.problems
    call.agree_on_outcome()
    tensors = {key: info for key, info in visibility.tensors.items() if key in spreading.spreads}
    return Agreed(agreement, local, spreading, share_of(local, spreading, tensors), left)


def agree_on_save(
    call: Call,
    given: Attempt[GivenModules],
    config: object,
    how: Attempt[Export],
    target: Optional[ExportTarget] = None,
) -> Agreed:
    """Fit the ranks' modules to one another, and to the class in the target's config.json.

    Args:
        given: as of `agree_on_load`.
        config: the content of config.json, or the attempt to make it.
        target: None where tensors go to no folder.

    Raises:
        RuntimeError: some rank has problems: layers that no rank holds, another shape than config.json says,
            a tied head with other values than the embedding; on every rank.
        TransferError: a rank is gone, or the group's timeout is over.
    """
    local, shape, agreement = _describe_to_all(call, given, config, call.attempt(dataclasses.asdict, how))
    head = head_held(shape, [table.note for table in agreement.tables])
    spreading = Spreading(agreement.tables, shape, head)
    tensors: dict[str, TensorInfo] = {}
    if not spreading.problems:
        spreading.problems += spreading.faults()
    call.problems += spreading.problems
    call.agree_on_outcome()
    say_of_prediction(call, spreading)
    # A tied head is a copy of the embedding, which is what files have.
    written = {key: spreading.infos(key) for key in spreading.spreads if key != HEAD or not shape.tied}
    if target is not None:
        if shape.towers:
            call.problems.append(of_a_tower(shape))
        call.agree_on_outcome()
        target = target._replace(shapes=shape.folded(written))
        export = examined(call, target, written, is_named=True)
        target, tensors = export.target, export.tensors
    else:
        with call.guard():
            tensors = exported(written, how.value)
    call.agree_on_outcome()
    if shape.tied and HEAD in spreading.spreads:
        info = tensors[EMBED]
        both = share_of(local, spreading, {EMBED: info, HEAD: info})
        if differ(call, both, EMBED, HEAD) and call.is_first:
            call.problems.append(HEAD_OF_ITS_OWN)
        call.agree_on_outcome()
    return Agreed(agreement, local, spreading, share_of(local, spreading, tensors), {}, target)


def _describe_to_all(
    call: Call, given: Attempt[GivenModules], config: object, options: object
) -> tuple[Local, Shape, Agreement]:
    """Describe this rank's modules to all ranks; config.json and options must be the same everywhere.

    Args:
        config, options: mappings, or the attempts to make them.
    """
    shape = call.attempt(shape_of, config, key=CONFIG)
    local = call.attempt(
        lambda own, numbers: describe(call, own.models, numbers, own.parallel, own.layers),
        given,
        shape,
    )
    said = config if isinstance(config, Attempt) else Attempt(config)
    call.attempt(lambda own, numbers, values: _compare(call, own, numbers, values), given, shape, said)
    agreement = call.agree_on_wants(terms=call.attempt(_terms_of, local, shape, options))
    return local.value, shape.value, agreement


def _compare(call: Call, given: GivenModules, shape: Shape, config: Mapping[str, object]) -> None:
    """Compare the models' own configurations with config.json: problems of the call, or one warning."""
    others: dict[str, None] = {}
    for model in chunks_of(given.models):
        module, style = unwrapped(call, model)
        if style.name == "mcore":
            call.problems += computing.misplaced(module, shape)
            others.update(dict.fromkeys(computing.computed_otherwise(module, shape, config)))
    if others and given.compares:
        call.warn_once(
            logger,
            f"the model computes otherwise than {CONFIG} says, so its outputs are not those of the files' "
            f"model: {'; '.join(others)}. compare=False would not say it",
        )


def _terms_of(local: Local, shape: Shape, options: Mapping[str, object]) -> Terms:
    common = {name: repr(value) for name, value in options.items()}
    common.update((f"{name} of {CONFIG}", repr(value)) for name, value in shape.described.items())
    # Each process has tables of its own.
    common[f"the table of {shape.kind}"] = digest_of(shape.family)
    return Terms(local.device, f"{local.shard}", note=local.shard, common=common)


def share_of(local: Local, spreading: Spreading, tensors: Mapping[str, TensorInfo]) -> Share:
    """Return the blocks that each rank holds of the tensors, and this rank's memory of its own."""
    parts: dict[str, list[Part]] = {}
    for param in local.shard.params:
        holding = spreading.holding(local.shard, param)
        for cut in holding.cuts if holding is not None else ():
            memory = cut.in_tensor(part_of(local.memory[param.name], whole(param.shape), cut.at))
            parts.setdefault(cut.key, []).append(Part(cut.box, memory))
    held = {key: {param.dtype for _, param in spreading.holders[key]} for key in tensors}
    relayed = {key: next(iter(dtypes)) for key, dtypes in held.items() if len(dtypes) == 1}
    return Share(tensors, spreading.spreads, parts, relayed)


def shared_memory(local: Local, spreading: Spreading) -> list[Problem]:
    """Return problems for parameters of this rank that lie in the same memory: a load would write both."""
    problems = []
    spans: list[tuple[str, int, int, str, Optional[Holding]]] = []
    for param in local.shard.params:
        memory = local.memory[param.name]
        if memory.is_contiguous() and memory.numel():
            holding = spreading.holding(local.shard, param)
            spans.append((str(memory.device), *span_of(memory), param.name, holding))
    spans.sort(key=lambda span: span[:3])
    for (device, _, stop, name, first), (other_device, start, _, other_name, second) in zip(spans, spans[1:]):
        # A tied head may be the embedding itself.
        if device == other_device and start < stop and first != second:
            problems.append(
                Problem("the same memory", f"{name} and {other_name}", expected="one tensor", got="two")
            )
    return problems


def head_held(shape: Shape, shards: list[ModelShard]) -> Head:
    """Return the head that the ranks hold, by its rows."""
    rows = {param.shape[:1] for shard in shards for param in shard.params if param.role.cut == "head"}
    if rows == {(1,)} and shape.vocab > 1:
        return Head(VALUE_HEADS[0], True)
    return Head(None if shape.tied and not rows else HEAD)


def other_copies(source: Source, shape: Shape, left: Mapping[str, str], head: Head) -> list[Problem]:
    """Return problems for what is left in the files as a copy of another tensor, and has other values."""
    problems = []
    if HEAD in left and shape.tied and not head.is_value and not equal_in(source, HEAD, EMBED):
        problems.append(HEAD_OF_ITS_OWN)
    for key, why in left.items():
        original = copy_of(key, shape)
        if why == COPIED and original in source.tensors and not equal_in(source, key, original):
            problems.append(Problem("other values than its original", key, expected=f"those of {original}"))
    return problems


def of_a_tower(shape: Shape) -> Problem:
    """Return the problem of an export of a text tower alone."""
    what = (
        "a text tower alone is no model that from_pretrained opens: gather_hf returns its tensors, to be put "
        "beside those of the other towers"
    )
    return Problem(what, CONFIG, f"model_type {shape.towers}")


def say_of_prediction(call: Call, spreading: Spreading) -> None:
    """Say once that an export goes without the layers of multi-token prediction that config.json has."""
    shape = spreading.shape
    if shape.predicted and not any(layer_number(key) >= shape.layers for key in spreading.spreads):
        call.warn_once(
            logger,
            f"config.json has {shape.predicted} layer(s) of multi-token prediction, and no rank holds them: "
            "the export goes without them",
        )
