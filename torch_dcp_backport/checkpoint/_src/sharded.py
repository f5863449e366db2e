"""The base of managers whose parts form one sharded checkpoint of `dist_checkpointing`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional, TypeVar

from torch_dcp_backport.checkpoint._src.layout import SAVED, SCHEDULER, SCHEDULERS, SCHEDULERS_WORLD
from torch_dcp_backport.checkpoint._src.manager import CONTENTS, BaseCheckpointManager
from torch_dcp_backport.checkpoint._src.store import checked_step
from torch_dcp_backport.checkpoint._src.together import CANNOT_LOAD, CANNOT_SAVE, place_in
from torch_dcp_backport.checkpoint._src.writing import writing_in
from torch_dcp_backport.dist_checkpointing import (
    PARAMS,
    CheckpointingException,
    SaveOptions,
    ShardedObject,
    begin,
    load_common_state_dict,
    resolved,
)
from torch_dcp_backport.dist_checkpointing.core import HUGGING_FACE
from torch_dcp_backport.dist_checkpointing.mapping import ShardedStateDict
from torch_dcp_backport.dist_checkpointing.serialization import begin_made, save_made
from torch_dcp_backport.dist_checkpointing.training_state import are_alike
from torch_dcp_backport.transfer import Topic, TransferError, at_first

logger = logging.getLogger("torch_dcp_backport.checkpoint")

Prepared = TypeVar("Prepared")


def spelled(error: Exception) -> str:
    """Return an error as text; the agreed errors of exports have all that there is to say."""
    is_plain = isinstance(error, (RuntimeError, CheckpointingException))
    return str(error) if is_plain and str(error) else f"{type(error).__name__}: {error}"


#: The entries of a schedule's state that have one value for each param group.
OF_GROUPS = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs")


def schedule_of(
    saved: Any, today: Any, groups: Sequence[Mapping[str, Any]], current: Sequence[Mapping[str, Any]]
) -> Any:
    """Return the saved state of a schedule with its rates at the places of today's param groups.

    A group takes the values of the saved group that its parameters were in; one of new parameters keeps its
    own.

    Args:
        saved: the state of the schedule in the checkpoint.
        today: that of the schedule of today.
        groups: the param groups in the checkpoint, under today's names; none where they are not known.
        current: the param groups of today.

    Raises:
        CheckpointingException: unlike rates of another number of groups, which are not known.
    """
    if not (isinstance(saved, Mapping) and isinstance(today, Mapping)):
        return saved
    result = dict(saved)
    place_of = {name: place for place, group in enumerate(groups) for name in group[PARAMS]}
    places = [next((place_of[name] for name in group[PARAMS] if name in place_of), None) for group in current]
    for key in OF_GROUPS:
        rates, own = saved.get(key), today.get(key)
        if not (isinstance(rates, list) and isinstance(own, list)):
            continue
        if len(rates) == len(groups) and len(own) == len(current):
            result[key] = [now if at is None else rates[at] for now, at in zip(own, places)]
        elif rates and all(rate == rates[0] for rate in rates):
            # One of a pipeline's stages has fewer groups than the whole model.
            result[key] = rates[:1] * len(own)
        elif len(rates) != len(own):
            raise CheckpointingException(
                f"the schedule: {key} has {len(own)} entries here, and {len(rates)} in the checkpoint: give "
                "the optimizer the param groups of then, or load without extra"
            )
    nested, own = saved.get("_schedulers"), today.get("_schedulers")
    if isinstance(nested, list) and isinstance(own, list) and len(nested) == len(own):
        result["_schedulers"] = [schedule_of(*pair, groups, current) for pair in zip(nested, own)]
    return result


class ShardedManager(BaseCheckpointManager):
    """Writes and reads a sharded state dict, with configuration and tokenizer beside it."""

    #: The content that the schedule belongs to.
    schedule_in = "extra"

    @property
    def has_model(self) -> bool:
        """Whether a save has the model, apart from "hf_model"."""
        return bool(self.should_save_model)

    def write_configuration(self, folder: Path) -> None:
        """Write the files that `from_pretrained` needs beside weights. Runs on the first rank.

        Args:
            folder: the folder for them, within the checkpoint.
        """
        raise NotImplementedError

    def agree_on_save(self, folder: Path, prepare: Callable[[], Prepared]) -> Prepared:
        """Return this rank's result of `prepare`. Collective.

        The first rank has written the configuration by then.

        Args:
            folder: the folder of the checkpoint.
            prepare: makes this rank's part; its error is raised on every rank.
        """
        with begin(CANNOT_SAVE, "save", self.process_group) as call:
            common = {
                "async_save": str(self.is_async),
                "save_contents": ", ".join(self.checkpoint_save_contents),
                "scheduler": type(self.lr_scheduler).__name__,
            }
            prepared = call.attempt(prepare)
            with at_first(call, Topic("writing the configuration"), common=common) as meeting:
                if meeting.decides:
                    self.write_configuration(folder / HUGGING_FACE)
        return prepared.value

    def try_hf_model(self, folder: Path, write: Callable[[], object]) -> None:
        """Write the files of "hf_model", for whose sake alone no step is lost. Collective.

        If they cannot be written, the step is saved without them, and the log has an error. If the step has
        nothing else of the model, the save fails.

        Args:
            folder: the folder of the checkpoint, for the log.
            write: writes the files.

        Raises:
            CheckpointingException: the step has no "model", either; on every rank.
            TransferError: a rank is gone, or the group's timeout is over.
        """
        failure: Optional[Exception] = None
        try:
            write()
        except TransferError:
            raise
        except CheckpointingException as error:
            if not error.is_agreed:
                # The first rank is gone: there is nothing more to agree on.
                raise
            failure = error
        except Exception as error:
            failure = error
        # Most errors are the same on every rank; what only a rank has must not leave the others in a save.
        with begin(CANNOT_SAVE, "save", self.process_group) as call:
            own = "" if failure is None else spelled(failure)
            with at_first(call, Topic("writing hf_model"), own) as meeting:
                if meeting.decides:
                    # Of the first rank that has any.
                    meeting.answer(next((text for text in meeting.heard.values() if text), ""))
        text = meeting.result
        if not text:
            return
        if not self.has_model:
            raise CheckpointingException(f"{CANNOT_SAVE}: no hf_model: {text}") from failure
        if self.place()[0] == 0:
            logger.error(
                "%s is saved without the hf_model that was asked for (`checkpoint export` may make it "
                "later): %s",
                folder.name,
                text,
            )

    def agree_on_schedule(self) -> ShardedStateDict:
        """Return the schedule to save: the first rank's, or each rank's own where they differ. Collective.

        The stages of a pipeline may have groups of their own, with other rates.
        """
        if self.lr_scheduler is None or self.schedule_in not in self.checkpoint_save_contents:
            return {}
        with begin(CANNOT_SAVE, "save", self.process_group) as call:
            state = call.attempt(lambda: resolved(self.lr_scheduler.state_dict(), SCHEDULER))
            if are_alike(call, state, Topic("comparing the schedules")):
                return {SCHEDULER: state.value}
        rank, world = self.place()
        own = ShardedObject(SCHEDULERS, state.value, (world,), (rank,))
        return {SCHEDULERS: own, SCHEDULERS_WORLD: world}

    def schedule_wanted(self, common: Mapping[str, Any]) -> ShardedStateDict:
        """Return the parts of a checkpoint that a load asks for to get the schedules: this rank's first.

        Args:
            common: the common state of the checkpoint.

        Raises:
            CheckpointingException: the schedules of another number of ranks, which differ.
        """
        saved_world, (rank, world) = common.get(SCHEDULERS_WORLD), self.place()
        wants = self.lr_scheduler is not None and self.schedule_in in self.checkpoint_load_contents
        if saved_world is None:
            return {}
        if saved_world != world and wants:
            raise CheckpointingException(
                f"{saved_world} ranks saved schedules that differ, and {world} ranks load: load on "
                f"{saved_world} ranks, or without {self.schedule_in}"
            )
        places = range(rank, saved_world, world)
        return {SCHEDULERS: [ShardedObject(SCHEDULERS, None, (saved_world,), (place,)) for place in places]}

    def schedule_in_load(self, loaded: Mapping[str, Any]) -> Any:
        """Return the state of this rank's schedule; None where the checkpoint has none.

        Args:
            loaded: the result of a load that asked for `schedule_wanted`.
        """
        own = loaded.get(SCHEDULERS)
        return own[0] if own else loaded.get(SCHEDULER)

    def save_state(
        self, make: Callable[[], ShardedStateDict], path: Path, step: int, schedule: ShardedStateDict
    ) -> None:
        """Save a state dict, with step and schedule, or with `async_save` begin to. Collective.

        Args:
            make: makes this rank's sharded state dict; its error is raised on every rank.
            path: the folder of the sharded checkpoint.
            step: the step of the training.
            schedule: the result of `agree_on_schedule`.
        """

        def made() -> ShardedStateDict:
            writing.make_folder(path)
            saved = [name for name in CONTENTS if name in self.checkpoint_save_contents]
            return {"step": checked_step(step), SAVED: saved, **make(), **schedule}

        writing = writing_in(path)
        options = SaveOptions(
            must_load=not self.trust,
            process_group=self.process_group,
            written=writing.notes_in(path),
            is_compared=True,
        )
        if self.is_async:
            writing.requests.append(begin_made(made, path, options))
        else:
            save_made(made, path, options)

    def agree_on_load(
        self, path: Path, names: Collection[str], prepare: Callable[[], Prepared]
    ) -> tuple[Mapping[str, Any], Prepared]:
        """Return named entries of the common state, once its contents are checked. Collective.

        Args:
            path: the folder of the sharded checkpoint.
            names: the keys of the entries.
            prepare: makes this rank's part of the load; its error is raised on every rank.

        Returns:
            The entries that the common state has, and this rank's result of `prepare`.
        """
        with begin(CANNOT_LOAD, "load", self.process_group) as call:
            prepared = call.attempt(prepare)
            same = {"folder": str(path), "load_contents": ", ".join(self.checkpoint_load_contents)}
            with at_first(call, Topic("reading what was saved"), common=same) as meeting:
                if meeting.decides:
                    state = load_common_state_dict(path, trust=self.trust)
                    self.check_contents(path, state)
                    meeting.answer({name: state[name] for name in names if name in state})
            return meeting.result, prepared.value

    def check_contents(self, path: Path, state: Mapping[str, Any]) -> None:
        """Refuse a checkpoint that lacks a content to load.

        Args:
            path: the folder of the sharded checkpoint, for the error.
            state: its common state.

        Raises:
            CheckpointingException: naming the content.
        """
        wanted = self.checkpoint_load_contents
        contents = self.contents_in(state)
        absent = [name for name in wanted if name not in contents]
        if absent:
            held = ", ".join(contents) or "nothing that this manager knows"
            raise CheckpointingException(f"{path} has no {', '.join(absent)}; it has {held}")
        has_schedule = SCHEDULER in state or SCHEDULERS_WORLD in state
        if self.schedule_in in wanted and self.lr_scheduler is not None and not has_schedule:
            raise CheckpointingException(f"{path} was saved without a scheduler; this manager has one")

    def contents_in(self, state: Mapping[str, Any]) -> Sequence[str]:
        """Return the contents of a checkpoint.

        Args:
            state: its common state.
        """
        return state.get(SAVED, ())  # type: ignore[no-any-return]

    def place(self) -> tuple[int, int]:
        """Return this rank in the manager's process group, and the number of ranks."""
        return place_in(self.process_group)
