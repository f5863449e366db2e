"""The common load: a plain model and all of its values in a dict, where nothing is left to do but to copy.

A plan finds the same, and takes longer for a small model than the copies do. Anything that is not known to be
right here goes the long way, which also says what is wrong.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional

import torch
from torch.nn.modules.module import _IncompatibleKeys

from torch_dcp_backport import compat
from torch_dcp_backport.state_dict.model.outline import Outline
from torch_dcp_backport.state_dict.model.places import is_complete, is_norm
from torch_dcp_backport.transfer import (
    Call,
    copy_to,
    has_values,
    is_freed,
    is_same_view,
    spell_key,
    why_not_writable,
)


class Copy(NamedTuple):
    """A value of the dict, and the model's own tensor."""

    key: str
    value: torch.Tensor
    live: torch.Tensor


def copies_of(outline: Outline, state: Mapping[Any, Any]) -> Optional[list[Copy]]:
    """Return the copies that are all of a load; None where other code or ranks take part, or one is wrong.

    Args:
        outline: of the model.
        state: what is loaded: FQN -> whole tensor.
    """
    info, entries = outline.info, outline.entries
    if info.broadcast_from_rank0 or info.fsdp_modules or len(entries) != len(state) or outline.user_loader:
        return None
    if type(state) not in (dict, OrderedDict) or any(
        place.has_hook or place.renames or (is_norm(place.module) and not is_complete(place, state))
        for place in outline.places
    ):
        return None
    copies = []
    for entry in entries:
        live: Any = entry.value
        value: Any = state.get(entry.fqn)
        if type(live) not in compat.PLAIN_TENSORS or type(value) not in compat.PLAIN_TENSORS:
            return None
        if not has_values(live) or not has_values(value) or live.shape != value.shape:
            return None
        # Nothing is written where a tensor is loaded from itself.
        if is_freed(value) or (why_not_writable(live) and not is_same_view(value, live)):
            return None
        copies.append(Copy(entry.fqn, value, live))
    # A wrapper's own tensor may have the name of one inside.
    return copies if len({copy.key for copy in copies}) == len(copies) else None


def copy_all(title: str, copies: list[Copy]) -> _IncompatibleKeys:
    """Copy in the order of load_state_dict(), which says what stays where two names have one memory."""
    with Call(title, "slice", ()) as call:
        with call.tally.phase("move"):
            for number, (key, value, live) in enumerate(copies):
                try:
                    copy_to(live.detach(), value.detach())
                except Exception as error:
                    before = f"{number} of {len(copies)} tensors were written before"
                    compat.add_note(error, f"{title}: {spell_key(key)}: {before}")
                    raise
        call.tally.tensors = len(copies)
        call.tally.close()
    return _IncompatibleKeys([], [])
