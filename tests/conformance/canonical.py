"""Results of a scenario as plain JSON: key order, types, layouts, dtypes, hashes of values.

Two results are equal exactly where a user could not tell them apart by these.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

try:
    from torch.distributed.tensor import DTensor
except ImportError:  # torch 2.4
    from torch.distributed._tensor import DTensor


def canonical(value: Any) -> Any:
    """`value` as JSON; ranks' results can be joined by `joined`."""
    if isinstance(value, ShardedTensor):
        return {
            "ShardedTensor": str(list(value.size())),
            **{str(one.metadata.shard_offsets): spell_tensor(one.tensor) for one in value.local_shards()},
        }
    if isinstance(value, torch.Tensor):
        return spell_tensor(value)
    if isinstance(value, Mapping):
        result = {spell_key(key): canonical(one) for key, one in value.items() if not is_newer(key)}
        if type(value) is not dict:
            result["(type)"] = type(value).__name__
        if hasattr(value, "_metadata"):
            # Versions of the modules; load_state_dict() reads them.
            result["(metadata)"] = sorted(value._metadata)
        return result
    if isinstance(value, (list, tuple)):
        kind = "" if type(value) in (list, tuple) else type(value).__name__
        opening, closing = "[]" if isinstance(value, list) else "()"
        return {f"{kind}{opening}{closing}": [canonical(one) for one in value]}
    if isinstance(value, (set, frozenset)):
        return {"set": sorted(map(str, value))}
    if isinstance(value, io.BytesIO):
        return f"BytesIO {value.getvalue().hex()}"
    return f"{type(value).__name__} {value}"


def is_newer(key: object) -> bool:
    """A value that the param groups of newer releases' optimizers have."""
    return str(key).endswith("decoupled_weight_decay")


def spell_key(key: object) -> str:
    return key if isinstance(key, str) else f"({type(key).__name__}) {key}"


def spell_tensor(value: torch.Tensor) -> str:
    words = []
    if type(value) not in (torch.Tensor, DTensor):
        words.append(type(value).__name__)
    words += [str(value.dtype).replace("torch.", ""), str(list(value.shape)), value.device.type]
    local = value.detach()
    if isinstance(value, DTensor):
        words.append(f"mesh{list(value.device_mesh.mesh.shape)}")
        words += [spell_placement(one) for one in value.placements]
        local = value._local_tensor.detach()
        words.append(f"local{list(local.shape)}")
    if local.numel() and not local.is_contiguous():
        words.append(f"stride{list(local.stride())}")
    if value.requires_grad:
        words.append("grad")
    words.append(hash_of(local))
    return " ".join(words)


def spell_placement(placement: Any) -> str:
    name = type(placement).__name__.lstrip("_")
    factor = getattr(placement, "split_factor", None)
    inner = [str(one) for one in (getattr(placement, "dim", None), factor) if one is not None]
    return f"{name}({','.join(inner)})"


def hash_of(tensor: torch.Tensor) -> str:
    if tensor.is_meta:
        return "meta"
    flat = tensor.contiguous().view(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return hashlib.sha256(data).hexdigest()[:12]


def joined(ranks: list[Any]) -> Any:
    """Results of all ranks as one: what they have in common once, the rest by rank."""
    if all(one == ranks[0] and order_of(one) == order_of(ranks[0]) for one in ranks):
        return ranks[0]
    if all(isinstance(one, dict) and list(one) == list(ranks[0]) for one in ranks):
        return {key: joined([one[key] for one in ranks]) for key in ranks[0]}
    return {"(ranks)": ranks}


def order_of(value: Any) -> Any:
    """The order of all keys; dicts that differ by it alone compare equal."""
    if isinstance(value, dict):
        return [(key, order_of(one)) for key, one in value.items()]
    return [order_of(one) for one in value] if isinstance(value, list) else None


def same(one: Any, other: Any) -> bool:
    return bool(one == other and order_of(one) == order_of(other))


def difference(expected: Any, got: Any, path: str = "") -> list[str]:
    """Where two results differ, in words."""
    if same(expected, got):
        return []
    if isinstance(expected, dict) and isinstance(got, dict):
        found = [f"{path}/{key}: missing" for key in expected if key not in got]
        found += [f"{path}/{key}: not expected, {got[key]}" for key in got if key not in expected]
        for key in expected:
            if key in got:
                found += difference(expected[key], got[key], f"{path}/{key}")
        return found or [f"{path}: order of keys {list(got)}, expected {list(expected)}"]
    return [f"{path}: {got}, expected {expected}"]
