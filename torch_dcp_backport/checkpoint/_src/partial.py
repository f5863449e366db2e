"""Loads of a part of a checkpoint, or under other names: `exclude=` and `rename=`.

Pure functions of names. Must never leave a key out without listing it.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Optional

from torch_dcp_backport.dist_checkpointing import (
    PARAMS,
    CheckpointingException,
    ShardedTensor,
    assigned,
    check,
)
from torch_dcp_backport.dist_checkpointing.training_state import GROUPS, MODEL, OPTIMIZER, STATE, filled

#: Before the names of parameters in the keys of a checkpoint.
OF_MODEL, OF_STATE = f"{MODEL}.", f"{OPTIMIZER}.{STATE}."


class Partial(NamedTuple):
    """The program's wishes of a load."""

    #: Patterns of names that are not loaded, as of `fnmatch`.
    exclude: tuple[str, ...] = ()
    #: Patterns of names in the checkpoint -> names of today; "*" in both stands for the same characters.
    rename: Mapping[str, str] = {}

    @property
    def is_whole(self) -> bool:
        """Whether all is loaded under its own name."""
        return not (self.exclude or self.rename)


WHOLE = Partial()


def checked(exclude: Any, rename: Any) -> Partial:
    """Return the wishes of a load.

    Raises:
        ValueError: no patterns; patterns of a renaming that do not fit each other.
    """
    patterns = (exclude,) if isinstance(exclude, str) else exclude
    if not isinstance(patterns, (list, tuple, set, frozenset)) or not all(map(is_text, patterns)):
        raise ValueError(f"exclude={exclude!r:.80}: expected patterns of names, such as ['*.lora_*']")
    renamed = {} if rename is None else rename
    if not isinstance(renamed, Mapping) or not all(map(is_text, (*renamed, *renamed.values()))):
        raise ValueError(
            f"rename={rename!r:.80}: expected a mapping of saved names to names of today, such as "
            "{'module.*': '*'}; a function is not offered"
        )
    for saved, name in renamed.items():
        if saved.count("*") != name.count("*"):
            raise ValueError(f"rename={{{saved!r}: {name!r}}}: both need the same number of *")
    return Partial(
        tuple(sorted(patterns)) if isinstance(patterns, (set, frozenset)) else tuple(patterns), renamed
    )


def is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def spelled(exclude: object, rename: object) -> dict[str, str]:
    """Return the wishes as ranks compare them. Never raises."""
    try:
        wanted = checked(exclude, rename)
    except Exception as error:
        return {
            "exclude": type(exclude).__name__,
            "rename": f"{type(rename).__name__} ({type(error).__name__})",
        }
    return {"exclude": ", ".join(wanted.exclude), "rename": str(dict(wanted.rename))}


def parts_of(key: str) -> tuple[str, str, str]:
    """Return what stands before a parameter's name in a key, the name, and what stands behind it."""
    if key.startswith(OF_STATE):
        name, dot, state = key[len(OF_STATE) :].rpartition(".")
        return OF_STATE, name, dot + state
    if key.startswith(OF_MODEL):
        return OF_MODEL, key[len(OF_MODEL) :], ""
    return "", key, ""


class View:
    """A checkpoint as a partial load sees it: under today's names, without what is excluded."""

    def __init__(self, wanted: Partial, held: Iterable[str], today: Collection[str]) -> None:
        """Match the patterns.

        Args:
            wanted: the wishes.
            held: the keys of tensors in the checkpoint.
            today: the keys of tensors that any rank has.

        Raises:
            CheckpointingException: a pattern matches nothing; two saved names become the same name.
        """
        self.wanted = wanted
        rules = [(compiled(saved), saved, name) for saved, name in wanted.rename.items()]
        used = set[str]()
        #: Saved name of a parameter -> its name of today, where that is another one.
        self.new_names: dict[str, str] = {}
        #: Today's key -> the key in the checkpoint.
        self.saved: dict[str, str] = {}
        for key in held:
            before, name, after = parts_of(key)
            new = name
            for pattern, saved, replacement in rules if before else ():
                match = pattern.fullmatch(name)
                if match is not None:
                    used.add(saved)
                    new = filled_in(replacement, match.groups())
                    break
            if new != name:
                self.new_names[name] = new
            other = self.saved.setdefault(f"{before}{new}{after}", key)
            if other != key:
                raise CheckpointingException(f"rename makes the same name of {other} and {key}: {new}")
        #: Keys of either side that are not loaded.
        self.excluded = {key for key in {*self.saved, *today} if self.is_excluded(key)}
        idle = [saved for saved in wanted.rename if saved not in used]
        idle += [
            pattern for pattern in wanted.exclude if not any(matches(key, pattern) for key in self.excluded)
        ]
        if idle:
            raise CheckpointingException(
                f"no name in the checkpoint or the model fits {', '.join(map(repr, idle))} "
                "(a pattern is of whole names: '*' stands for any characters)"
            )
        with_states = {parts_of(key)[1] for key in self.saved if key.startswith(OF_STATE)}
        #: Keys of states of parameters that were saved, and not trained then: they begin anew.
        self.unfrozen = {
            key
            for key in today
            if key.startswith(OF_STATE)
            and key not in self.excluded
            and parts_of(key)[1] not in with_states
            and f"{OF_MODEL}{parts_of(key)[1]}" in self.saved
        }
        self.new_parameters = {parts_of(key)[1] for key in self.unfrozen}

    def is_excluded(self, key: str) -> bool:
        return any(matches(key, pattern) for pattern in self.wanted.exclude)

    @property
    def changes(self) -> bool:
        """Whether the load is another one than of the whole checkpoint under its own names."""
        return bool(self.unfrozen) or not self.wanted.is_whole

    @property
    def held(self) -> list[str]:
        """The keys that the load may read, under today's names."""
        return [key for key in self.saved if key not in self.excluded]

    def left_out(self) -> list[str]:
        """Return every key that is not loaded, of the checkpoint or of today."""
        return sorted({*self.excluded, *self.unfrozen})

    def selected(self, asked: Any) -> Any:
        """Return a sharded state dict without what is left out."""
        if not isinstance(asked, dict):
            return asked
        return {key: self.selected(part) for key, part in asked.items() if not self.is_left_out(part)}

    def is_left_out(self, part: Any) -> bool:
        return isinstance(part, ShardedTensor) and (part.key in self.excluded or part.key in self.unfrozen)

    def as_saved(self, asked: Any) -> Any:
        """Return a sharded state dict with the keys of the checkpoint."""
        if isinstance(asked, dict):
            return {key: self.as_saved(part) for key, part in asked.items()}
        if isinstance(asked, ShardedTensor) and asked.key in self.saved:
            return replace(asked, key=self.saved[asked.key])
        return asked

    def groups(self, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return saved param groups under today's names, without parameters whose states are excluded."""
        renamed = [
            {**group, PARAMS: [self.new_names.get(name, name) for name in group[PARAMS]]} for group in saved
        ]
        return [
            {**group, PARAMS: [name for name in group[PARAMS] if not self.is_excluded(f"{OF_STATE}{name}.")]}
            for group in renamed
        ]

    def check_groups(self, saved: Sequence[Mapping[str, Any]], today: Sequence[Mapping[str, Any]]) -> None:
        """Compare param groups as a whole load does.

        Raises:
            CheckpointingException: the options of saved groups cannot be given to the groups of today.
        """
        check(self.groups(saved), today)

    def plain(self, loaded: dict[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
        """Return what was loaded, with the values that are no tensors under today's names.

        Args:
            loaded: the result of the load.
            state: the state dicts of today.
        """
        result = dict(loaded)
        if MODEL in state:
            result[MODEL] = self.included(self.renamed(loaded.get(MODEL, {})), OF_MODEL)
        if OPTIMIZER in state:
            optimizer = loaded.get(OPTIMIZER, {})
            groups = list(assigned(self.groups(optimizer.get(GROUPS, [])), state[OPTIMIZER][GROUPS]))
            states = {
                name: self.included(values, f"{OF_STATE}{name}.")
                for name, values in self.renamed(optimizer.get(STATE, {})).items()
            }
            result[OPTIMIZER] = {**optimizer, STATE: states, GROUPS: groups}
        return result

    def renamed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return values by saved or by today's names by the latter: tensors stand under these already."""
        own = {name: value for name, value in values.items() if name not in self.new_names}
        moved = {self.new_names[name]: value for name, value in values.items() if name in self.new_names}
        return filled(own, moved)

    def included(self, values: Mapping[str, Any], before: str) -> dict[str, Any]:
        return {name: value for name, value in values.items() if not self.is_excluded(f"{before}{name}")}

    def completed(self, restored: dict[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
        """Return state dicts with today's values of what is left out."""
        kept: dict[str, Any] = {}
        if MODEL in state:
            kept[MODEL] = {
                name: value for name, value in state[MODEL].items() if self.is_excluded(f"{OF_MODEL}{name}")
            }
        if OPTIMIZER in state:
            states = {
                name: {
                    key: value for key, value in values.items() if self.keeps_state(f"{OF_STATE}{name}.{key}")
                }
                for name, values in state[OPTIMIZER].get(STATE, {}).items()
            }
            kept[OPTIMIZER] = {STATE: {name: values for name, values in states.items() if values}}
        return filled(restored, kept)

    def keeps_state(self, key: str) -> bool:
        """Return whether a state of an optimizer stays as it is today."""
        return parts_of(key)[1] in self.new_parameters or self.is_excluded(key)


def matches(key: str, pattern: str) -> bool:
    """Return whether a pattern is of a key, of its parameter's name, or of all of a parameter's states."""
    _, name, _ = parts_of(key)
    return fnmatch.fnmatchcase(key, pattern) or fnmatch.fnmatchcase(name, pattern)


def fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def compiled(pattern: str) -> re.Pattern[str]:
    return re.compile("(.*)".join(map(re.escape, pattern.split("*"))))


def filled_in(pattern: str, parts: Sequence[Optional[str]]) -> str:
    texts = pattern.split("*")
    return "".join(text + (part or "") for text, part in zip(texts, [*parts, ""]))
