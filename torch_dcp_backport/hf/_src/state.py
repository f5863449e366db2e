"""State dicts of DTensors and full tensors, saved as Hugging Face files and filled from them.

Collective. Knows the place of each rank's part in a tensor; must never know a model's layers.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import torch

from torch_dcp_backport import compat
from torch_dcp_backport.hf._src import adapters
from torch_dcp_backport.hf._src.adapters import Merged, MergedShare
from torch_dcp_backport.hf._src.apart import taken_apart
from torch_dcp_backport.hf._src.blocks import Part, Share, gaps
from torch_dcp_backport.hf._src.companions import ADAPTER_CONFIG
from torch_dcp_backport.hf._src.comparing import differ, equal_in
from torch_dcp_backport.hf._src.dequantised import as_held, quantisation_of
from torch_dcp_backport.hf._src.export import (
    Examined,
    Export,
    ExportTarget,
    Saved,
    checked,
    collect_everywhere,
    examined,
    export,
    exported,
    not_one,
    target_of,
    write_files,
)
from torch_dcp_backport.hf._src.files import ADAPTER_FILES
from torch_dcp_backport.hf._src.filling import fill_from_first, fill_here
from torch_dcp_backport.hf._src.format import CODES, encodable, is_plain
from torch_dcp_backport.hf._src.moving import bring_window
from torch_dcp_backport.hf._src.source import CONFIG, Configuration, Source
from torch_dcp_backport.hf._src.visibility import look, opened_together
from torch_dcp_backport.transfer import (
    SHOWN,
    Agreement,
    Call,
    Group,
    Layout,
    Problem,
    TensorInfo,
    Terms,
    groups_of,
    has_slices,
    is_freed,
    layout_of,
    spread_of,
    why_not_writable,
)

SAVE = "cannot save as Hugging Face weights"
SAVE_ADAPTER = "cannot save the adapter"
LOAD = "cannot load Hugging Face weights"


class HeldPart(NamedTuple):
    """This rank's part of a tensor, with the tensor's layout."""

    layout: Layout
    local: torch.Tensor

    @property
    def info(self) -> TensorInfo:
        """Shape and dtype of the full tensor."""
        return TensorInfo(self.layout.shape, self.local.dtype)


class Filled(NamedTuple):
    """The result of a load.

    Args:
        keys: keys whose tensors were filled.
        left: tensors of the files that the state dict does not have.
        tied: further key of a tensor -> the key under which the tensor was filled.
        bytes_read: bytes of tensors that this rank read of the files.
    """

    keys: tuple[str, ...]
    left: tuple[str, ...]
    tied: Mapping[str, str]
    bytes_read: int


def save_state_dict(
    state_dict: Mapping[str, torch.Tensor],
    folder: Union[str, Path],
    *,
    like: Union[str, Path, Mapping[str, object], Configuration],
    how: Optional[Export] = None,
    adapter: Optional[Union[Mapping[str, object], Configuration]] = None,
    adapter_name: Optional[str] = None,
    transposed: Optional[Mapping[str, bool]] = None,
    process_group: Group = None,
) -> Saved:
    """Write a model's state dict as a folder that `from_pretrained` opens. Collective.

    It runs in bounded memory: ranks on the first rank's machine that see the folder write their own parts,
    and other parts travel to the first rank. Until everything is on the disk the folder is as it was.

    Args:
        state_dict: HF key -> DTensor, or a tensor that every rank holds in full; the same keys on every rank.
            A tensor under two names (tied weights) is written once, under the first.
        folder: the folder for the model.
        like: the folder of a model whose config.json, tokenizer and the like are copied, or a configuration
            (of transformers, or a mapping). Only the first rank's is used.
        how: dtype, size of files, whether an older model is replaced; None is `Export()`.
        adapter: of a model that peft wraps, the adapter's configuration (peft's object, or a mapping): its
            LoRA is merged into the weights on their way. The adapter is held in full by every rank.
        adapter_name: the adapter that is merged, where the model has several; None is the only one.
        transposed: path of an adapted module -> whether its weight is (in, out), as a Conv1D's is. Without an
            entry the shapes decide; a square weight is refused if no other weight decides for it.
        process_group: the ranks that take part; None is all of them.

    Returns:
        The keys that were written, and the bytes of their tensors.

    Raises:
        RuntimeError: ranks hold different tensors, the names are not those of the class in config.json, the
            folder holds a model, the disk is full, ...; the same text on every rank. The folder is as it was.
        TransferError: a rank is gone, or the group's timeout is over. The folder is as it was, or has the new
            model; the error says which.

    Example:
        >>> import os
        >>> import torch
        >>> from torch_dcp_backport import hf
        >>> model = torch.nn.Linear(2, 2)
        >>> how = hf.Export(dtype=torch.bfloat16)
        >>> hf.save_state_dict(model.state_dict(), "model", like={"model_type": "linear"}, how=how)
        Saved(keys=('weight', 'bias'), nbytes=12, removed=())
        >>> sorted(os.listdir("model"))
        ['config.json', 'model.safetensors']
    """
    with Call(SAVE, "collect", groups_of(process_group)) as call:
        # 1. All ranks hold the same tensors, and ask for the same export.
        target = target_of(call, folder, like, how)
        held = held_of(call, state_dict)
        held, tied = agree_on_names(call, held)
        config: Optional[dict[str, Any]] = None
        with call.guard("adapter"):
            config = None if adapter is None else adapters.as_settings(adapter)
        common = {"how": repr(target.how), "folder": str(target.folder)}
        common["adapter"] = f"{adapter_name} {config_text(without_place(config))}"
        if transposed:
            common["transposed"] = str(sorted(transposed.items()))
        agreement = agree_on_state(call, held, common)
        # 2. Of a model that peft wraps: the tensors of the merged model. A rank merges its own blocks,
        # so it needs the thin matrices of the adapter whole: every rank gets them.
        plan: Optional[Merged] = None
        small: dict[str, torch.Tensor] = {}
        if config is not None:
            saved, (plan, held, tied) = held, merged_names(call, held, tied, config, adapter_name, transposed)
            call.agree_on_outcome()
            keys = [key for name in plan.changed for key in plan.needed(name)]
            thin = {key: saved[key].info for key in saved if key in set(keys)}
            small = collect_everywhere(call, agreement, share_of(call, saved, thin))
        # 3. Names and dtypes in the files, by the class in config.json.
        infos = {key: (part.info,) for key, part in held.items() if key not in tied}
        done = examined(call, target, infos, tied)
        # 4. This rank's blocks under these names. They are merged, and taken apart, as they move.
        named = {done.renamed.get(key, key): part for key, part in held.items() if key not in tied}
        share = share_of(call, named, done.held)
        if plan is not None:
            plan = plan.renamed(done.renamed)
            share = MergedShare(share.tensors, share.spreads, share.parts, share.relayed, plan, small)
        if done.cuts:
            share = taken_apart(share, done.tensors, done.cuts)
        call.agree_on_outcome()
        # 5. Two tensors that the class ties, and that are equal, are written once.
        if done.tied:
            doubles = doubles_of(call, done, share)
            call.agree_on_outcome()
            share = dataclasses.replace(share, tensors=without(share.tensors, doubles))
        # 6. Write.
        return export(call, agreement, share, done.target)


def save_adapter(
    state_dict: Mapping[str, torch.Tensor],
    folder: Union[str, Path],
    *,
    adapter: Union[Mapping[str, object], Configuration],
    name: str = "default",
    overwrite: bool = False,
    process_group: Group = None,
) -> Saved:
    """Write the adapter in a model's state dict, as `PeftModel.from_pretrained` opens it. Collective.

    Args:
        state_dict: the state dict of a model that peft wraps: HF key -> DTensor, or a tensor that every rank
            holds in full; the same keys on every rank.
        folder: the folder for the adapter.
        adapter: the adapter's configuration: peft's object, or a mapping.
        name: the adapter's name in the model.
        overwrite: whether an adapter, or a model, that the folder holds is replaced.
        process_group: the ranks that take part; None is all of them.

    Returns:
        The adapter's keys as written, and the bytes of their tensors.

    Raises:
        RuntimeError, TransferError: as `save_state_dict` does.

    Example:
        >>> import torch
        >>> from torch_dcp_backport import hf
        >>> path = "base_model.model.proj"
        >>> state_dict = {
        ...     f"{path}.base_layer.weight": torch.zeros(4, 4),
        ...     f"{path}.lora_A.default.weight": torch.ones(1, 4),
        ...     f"{path}.lora_B.default.weight": torch.ones(4, 1),
        ... }
        >>> config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["proj"]}
        >>> saved = hf.save_adapter(state_dict, "adapter", adapter=config)
        >>> saved.keys
        ('base_model.model.proj.lora_A.weight', 'base_model.model.proj.lora_B.weight')
    """
    with Call(SAVE_ADAPTER, "collect", groups_of(process_group)) as call:
        held, _ = agree_on_names(call, held_of(call, state_dict))
        config: dict[str, Any] = {}
        names: dict[str, str] = {}
        with call.guard("adapter"):
            config = adapters.as_settings(adapter)
        # The model that it adapts may be on the first rank's disk alone.
        rows = call.broadcast_object(
            "reading the model's vocabulary", adapters.vocabulary_of(config) if call.is_first else None
        )
        with call.guard("adapter"):
            infos = {key: part.info for key, part in held.items()}
            names = adapters.saved_names(infos, config, name, rows)
            if not names:
                raise ValueError(f"no tensor of an adapter {name!r}")
        common = {"folder": str(folder), "name": name, "overwrite": str(overwrite)}
        common["adapter"] = config_text(without_place(config))
        agreement = agree_on_state(call, held, common)
        own = {name: held[key] for name, key in names.items()}
        tensors = exported({name: (part.info,) for name, part in own.items()}, Export())
        share = share_of(call, own, tensors)
        # A single file: peft knows no index.
        how = checked(Export(file_bytes=2**62, overwrite=overwrite))
        text = config_text(config, indent=2).encode()
        target = ExportTarget(Path(folder), how, {ADAPTER_CONFIG: text}, None, ADAPTER_FILES, True)
        call.agree_on_outcome()
        bring = functools.partial(bring_window, call, agreement, share)
        return write_files(call, tensors, bring, target)


def without_place(config: Optional[Mapping[str, Any]]) -> dict[str, Any]:
    """Return an adapter's configuration without the place of its model, which may differ between machines."""
    return {key: value for key, value in (config or {}).items() if key != "base_model_name_or_path"}


def config_text(config: Any, indent: Optional[int] = None) -> str:
    """Return an adapter's configuration as JSON; sets in a fixed order."""

    def plain(value: Any) -> Any:
        if isinstance(value, (set, frozenset)):
            return sorted(value, key=str)
        return getattr(value, "value", None) or str(value)

    return json.dumps(config, indent=indent, sort_keys=True, default=plain)


def merged_names(
    call: Call,
    held: Mapping[str, HeldPart],
    tied: Mapping[str, str],
    config: Mapping[str, Any],
    adapter: Optional[str],
    transposed: Optional[Mapping[str, bool]],
) -> tuple[Merged, dict[str, HeldPart], dict[str, str]]:
    """Return (how an adapter is merged, the model's tensors by their HF keys, their ties).

    What cannot be merged is a problem of the call, the same on every rank.
    """
    plan = Merged({}, {}, {}, {})
    with call.guard("adapter"):
        plan = adapters.merged({key: part.info for key, part in held.items()}, config, adapter, transposed)
        first = {saved: name for name, saved in plan.names.items()}
        ties = {first[key]: first[same] for key, same in tied.items() if key in first and same in first}
        adapters.check_ties(plan, ties)
        return plan, {name: held[saved] for name, saved in plan.names.items()}, ties
    return plan, dict(held), dict(tied)


def doubles_of(call: Call, done: Examined, share: Share) -> list[str]:
    """Return names of tensors that the class has once, and that are equal to one written under another name.

    Two different tensors under such names are a problem of the call: a reader takes one for both.
    """
    doubles = []
    for first, *others in done.tied:
        for key in others:
            is_alike = done.tensors[first] == done.tensors[key]
            if is_alike and not differ(call, share, first, key):
                doubles.append(key)
            elif call.is_first:
                call.problems.append(not_one(first, key))
    return doubles


def without(tensors: Mapping[str, TensorInfo], keys: Collection[str]) -> dict[str, TensorInfo]:
    return {key: info for key, info in tensors.items() if key not in keys}


def load_state_dict(
    state_dict: Mapping[str, torch.Tensor],
    folder: Union[str, Path, Source],
    *,
    files: str = "auto",
    process_group: Group = None,
) -> Filled:
    """Fill the tensors of a model's state dict from Hugging Face files, in place. Collective.

    If every rank sees the files, each reads the slices that it holds, and nothing else.

    Args:
        state_dict: HF key -> DTensor, or a tensor that every rank holds in full; the same keys on every rank.
            The tensors themselves are written.
        folder: a folder with config.json and safetensors files, or an `hf.Source`.
        files: "shared" (every rank reads), "rank0" (the first reads for all), or "auto": as they are seen.
        process_group: the ranks that take part; None is all of them.

    Returns:
        The keys that were filled, the tensors of the files that were left, and the bytes that this rank read.

    Raises:
        RuntimeError: a tensor that the files do not have, another shape, a torn file, ...; the same text on
            every rank, before anything was written.
        TransferError: a read or a copy failed, a rank is gone, or the group's timeout is over; tensors were
            written.

    Example:
        >>> import torch
        >>> from torch_dcp_backport import hf
        >>> saved, model = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        >>> _ = hf.save_state_dict(saved.state_dict(), "model", like={"model_type": "linear"})
        >>> hf.load_state_dict(model.state_dict(), "model")
        Filled(keys=('weight', 'bias'), left=(), tied={}, bytes_read=24)
        >>> torch.equal(model.weight, saved.weight)
        True
    """
    with Call(LOAD, "fill", groups_of(process_group)) as call:
        held = held_of(call, state_dict, is_written=True)
        dtypes = {key: part.info.dtype for key, part in held.items()}
        source = call.attempt(lambda seen: as_held(seen, dtypes), opened_together(call, folder, files))
        visibility = look(call, source, files)
        held, tied = agree_on_names(call, held)
        agreement = agree_on_state(call, held, {})
        filled: dict[str, str] = {}
        spare = [name for name in visibility.tensors if name not in held]
        absent = 0
        for keys in names_of(held, tied):
            present = [key for key in keys if key in visibility.tensors]
            for key in present:
                call.problems += misfits(key, held[key].info, visibility.tensors[key])
            if not present:
                # A model may lack as many names as the files have others: only those that an error shows get
                # a hint.
                hint = near(keys[0], spare) if absent < SHOWN else ""
                absent += 1
                call.problems.append(Problem("not in the files", keys[0], hint))
            elif visibility.source is not None and call.is_first:
                for key in present[1:]:
                    call.problems += other_values(call, visibility.source, key, present[0])
            filled.update(dict.fromkeys(keys, present[0] if present else ""))
        if call.problems and call.is_first and visibility.source is not None:
            method = quantisation_of(visibility.source.config)
            if method:
                what = "quantised weights, of which those in fp8 in blocks alone are read as they were"
                call.problems.append(Problem(what, CONFIG, method))
        tensors = {key: visibility.tensors[key] for key in held if filled[key] == key}
        share = share_of(call, held, tensors)
        call.agree_on_outcome()
        if visibility.is_shared:
            assert visibility.source is not None, "every rank reads"
            bytes_read = fill_here(call, visibility.source, share)
        else:
            bytes_read = fill_from_first(call, agreement, visibility.source, share)
        left = tuple(key for key in visibility.tensors if key not in held)
        others = {key: name for key, name in filled.items() if key != name}
        return Filled(tuple(tensors), left, others, bytes_read)


def held_of(
    call: Call, state_dict: Mapping[str, torch.Tensor], is_written: bool = False
) -> dict[str, HeldPart]:
    """Return this rank's part of every tensor; a value that is no tensor becomes a problem of the call."""
    held = {}
    with call.guard("state_dict"):
        for key, value in state_dict.items():
            with call.guard(encodable(str(key))):
                held[key] = part_held(key, value, is_written)
    return held


def part_held(key: object, value: object, is_written: bool) -> HeldPart:
    """Return this rank's part of a tensor.

    Raises:
        TypeError: the value is no tensor, or its key no text.
        ValueError: a tensor whose memory cannot be read, or written.
    """
    if not isinstance(key, str):
        raise TypeError(f"a key that is a {type(key).__name__}, and no text")
    if encodable(key) != key:
        raise ValueError("a name with half of a character (a surrogate), which no file can have")
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"a {type(value).__name__}, where a tensor is needed")
    held = unchecked(value)
    local = held.local
    if local.is_meta or not has_slices(local) or local.dtype not in CODES:
        raise ValueError(f"a {type(local).__name__} of {local.dtype} on {local.device} has no plain values")
    why_not = why_not_writable(local) if is_written else "its memory was freed" if is_freed(local) else ""
    if why_not:
        raise ValueError(why_not)
    return held


def unchecked(value: torch.Tensor) -> HeldPart:
    """Return this rank's part of a tensor, without the checks of `part_held`."""
    local = compat.local_part(value) if isinstance(value, compat.DTensor) else value
    return HeldPart(layout_of(value), compat.arrived(local).detach())


def tied_names(held: Mapping[str, HeldPart]) -> dict[str, str]:
    """Return key -> the first key before it with the same memory on this rank."""
    first: dict[object, str] = {}
    tied = {}
    for key, (layout, local) in held.items():
        if has_slices(local) and local.numel():
            # A conjugate has the same memory, and other values.
            kind = layout, local.dtype, local.shape, local.stride(), local.is_conj(), local.is_neg()
            memory = local.device, local.data_ptr(), kind
            if first.setdefault(memory, key) != key:
                tied[key] = first[memory]
    return tied


def names_of(held: Mapping[str, HeldPart], tied: Mapping[str, str]) -> list[list[str]]:
    """Return the keys of each tensor, in the order of the state dict."""
    names: dict[str, list[str]] = {}
    for key in held:
        names.setdefault(tied.get(key, key), []).append(key)
    return list(names.values())


def agree_on_names(call: Call, held: Mapping[str, HeldPart]) -> tuple[dict[str, HeldPart], dict[str, str]]:
    """Return (the tensors in the first rank's order, its `tied_names`).

    The order decides the place of each tensor in files; a state dict that was built from a set has any order.
    Other ties on this rank are a problem of the call.
    """
    own = tied_names(held)
    unknown: dict[str, Optional[str]] = {key: None for key, part in held.items() if not part.local.numel()}
    order, agreed = call.broadcast_object("comparing names", (tuple(held), {**unknown, **own}))
    held = {key: held[key] for key in dict.fromkeys((*order, *held)) if key in held}
    own = tied_names(held)
    for key, part in held.items():
        if not part.local.numel() or agreed.get(key, "") is None or agreed.get(key) == own.get(key):
            continue
        mine, first = (f"the memory of {ties[key]}" if key in ties else "its own" for ties in (own, agreed))
        call.problems.append(Problem("tied on some ranks alone", key, mine, f"{first} as on the first rank"))
    return held, {key: name for key, name in agreed.items() if name is not None}


def other_values(call: Call, source: Source, key: str, first: str) -> list[Problem]:
    """Return a problem where the files have different values under two names of the same tensor."""
    with call.guard(key):
        if not equal_in(source, key, first):
            what = "another value under a second name of the same tensor"
            how = "make the model with tie_word_embeddings=False, or give it a second parameter"
            return [Problem(what, key, "other values", f"those of {first}; if they are two, {how}")]
    return []


def agree_on_state(call: Call, held: Mapping[str, HeldPart], options: Mapping[str, str]) -> Agreement:
    """Compare the tensors that the ranks hold.

    Raises:
        RuntimeError: some rank has problems, or another tensor than the first rank; on every rank.
    """
    kinds = {part.local.device.type for part in held.values()}
    common = {key: text_of(part) for key, part in held.items()}
    device = kinds.pop() if len(kinds) == 1 else ""
    return call.agree_on_wants(terms=Terms(device=device, common={**options, **common}))


def text_of(held: HeldPart) -> str:
    shape, mesh, placements = held.layout.shape, held.layout.mesh, held.layout.placements
    text = f"{held.local.dtype} {shape}"
    return f"{text}, placements {placements} on the mesh {mesh.signature}" if mesh else text


def share_of(call: Call, held: Mapping[str, HeldPart], tensors: Mapping[str, TensorInfo]) -> Share:
    """Return the blocks of tensors that the ranks hold, and this rank's memory of its own."""
    ranks = call.ranks
    spreads = {}
    parts: dict[str, list[Part]] = {}
    for key in tensors:
        layout, local = held[key]
        boxes = {rank: box for rank in ranks for box in (layout.box(rank),) if box is not None and box.numel}
        spreads[key] = spread_of(layout.shape, {rank: (box,) for rank, box in boxes.items()})
        call.problems += gaps(key, spreads[key])
        if call.rank in boxes:
            parts[key] = [Part(boxes[call.rank], local)]
    # The ranks agreed on the dtypes that they hold.
    return Share(tensors, spreads, parts, {key: held[key].info.dtype for key in tensors})


def near(key: str, names: Iterable[str]) -> str:
    """Return what to do about a tensor that has another name in the files, or is there in parts; else ""."""
    own = key.split(".")

    def is_near(name: str) -> bool:
        parts = name.split(".")
        short, long = sorted((name, key), key=len)
        # A longer name; the same parts in another order; another name of one module; or experts, each by
        # itself.
        if "." in short and long.endswith(f".{short}"):
            return True
        if len(parts) == len(own):
            return sorted(parts) == sorted(own) or (parts[-1] == own[-1] and is_like(parts, own))
        folder = parts[: len(own) - 1]
        return len(parts) > len(own) > 1 and parts[len(folder)] == "0" and is_like(folder, own[:-1])

    def is_like(parts: Sequence[str], own: Sequence[str]) -> bool:
        differ = [pair for pair in zip(parts, own) if pair[0] != pair[1]]
        # The number of another layer is no name.
        return not differ or (len(differ) == 1 < len(own) - 1 and not "".join(differ[0]).isdecimal())

    name = next(filter(is_near, names), None)
    return f"there is {name}: hf.opened(folder, model) reads files as from_pretrained does" if name else ""


def misfits(key: str, info: TensorInfo, stored: TensorInfo) -> list[Problem]:
    """Return the problems that keep a tensor of the files from being loaded."""
    if info.shape != stored.shape:
        return [Problem("wrong shape", key, f"{stored.shape} in the files", f"{info.shape}")]
    if info.dtype != stored.dtype and not (is_plain(info.dtype) and is_plain(stored.dtype)):
        return [Problem("wrong dtype", key, f"{stored.dtype} in the files", f"{info.dtype}")]
    return []
