"""What a model is to get of a full state dict, as data; nothing is written yet."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional, Union

from torch_dcp_backport.state_dict.destination import FIRST
from torch_dcp_backport.state_dict.entries import Entry, is_meta
from torch_dcp_backport.state_dict.govern import Place

#: The stage of what the root's loading code looks at. FQN prefixes end with a point; a stage is never FIRST.
ROOT = "the model"
#: What gets a value: entries, or the load key that it has for loading code, where no entry has it.
Owner = Union[Sequence[Entry], str]


class Awaited(NamedTuple):
    """Stands in a state dict for what comes when the loading code that can look at it is about to run."""

    load_key: str
    stage: str


@dataclass
class ModelPlan:
    """What goes where, and what loading code finds when."""

    entries: list[Entry]
    places: list[Place]
    #: Key -> what the checkpoint offers.
    inventory: Mapping[Any, Any] = field(default_factory=dict)
    metadata: Optional[Mapping[str, dict[str, Any]]] = None
    #: FQN prefixes of the modules whose loading code looks at what is loaded, in load order.
    governors: list[str] = field(default_factory=list)
    #: Keys of the state dict that are not the model's: the load key, where loading code can look at it.
    unexpected: dict[Any, Optional[str]] = field(default_factory=dict)
    #: load key -> what loading code is to find there, of keys that are not the model's.
    extra: dict[str, Any] = field(default_factory=dict)
    #: Stage -> (key, owner) of what is read as it is, when its stage comes.
    raw: dict[str, list[tuple[Any, Owner]]] = field(default_factory=dict)
    #: load keys that may be missing: of frozen parameters, and of tensors that have another name.
    forgiven: set[str] = field(default_factory=set)
    #: All names of a tensor on meta, and those in the checkpoint: each gets its own, then one stays.
    untied: list[tuple[list[Entry], list[Entry]]] = field(default_factory=list)
    #: Stages that loading code has seen.
    done: list[str] = field(default_factory=list)

    @functools.cached_property
    def assigns(self) -> bool:
        """Whether load_state_dict() puts tensors into the modules instead of copying them."""
        return any(is_meta(entry.value) for entry in self.entries)

    def forgive(self, entries: Iterable[Entry]) -> None:
        """Let names be missing. Loading code finds them missing, as they are."""
        self.forgiven |= {entry.load_key for entry in entries}

    def read_as_it_is(self, stage: str, key: Any, owner: Owner) -> None:
        self.raw.setdefault(stage, []).append((key, owner))

    def take(self, owner: Owner, value: Any) -> None:
        """Give an owner its value."""
        if isinstance(owner, str):
            self.extra[owner] = value
            return
        # One object for all names of a shared parameter, so that it stays shared.
        for entry in owner:
            entry.settle(value)

    def stage_of_key(self, key: Any) -> str:
        """The stage of a key that is not the model's."""
        text = str(key)
        return next(prefix or ROOT for prefix in self.governors if text.startswith(prefix))


def stage_of(entry: Entry) -> str:
    """When an entry's value moves: first, or when its governor is about to look."""
    governor = entry.place.governor
    return FIRST if governor is None else governor or ROOT
