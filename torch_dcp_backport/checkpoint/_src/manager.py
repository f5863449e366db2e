"""The base of checkpoint managers: the contents of saves and loads, and their folders.

Names, arguments and defaults are those of verl's `BaseCheckpointManager`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import logging
import os
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional, Protocol, Union

from torch import nn

from torch_dcp_backport.checkpoint._src import extra, partial, remote, store, together, uploads
from torch_dcp_backport.checkpoint._src.partial import WHOLE, Partial
from torch_dcp_backport.checkpoint._src.retention import Retention, keeping
from torch_dcp_backport.checkpoint._src.saves import Saves
from torch_dcp_backport.checkpoint._src.store import Shelf, checked_step
from torch_dcp_backport.checkpoint._src.together import (
    CANNOT_LOAD,
    CANNOT_SAVE,
    SaveArguments,
    place_in,
    writing_at,
    writing_in,
)
from torch_dcp_backport.checkpoint._src.uploads import Uploads
from torch_dcp_backport.dist_checkpointing import (
    PARAMS,
    CheckpointingException,
    Opened,
    Opening,
    SaveOptions,
    ShardedObject,
    begin,
    checked_bool,
    checked_seconds,
    digest_of,
    resolved,
    values,
    values_of,
)
from torch_dcp_backport.dist_checkpointing.core import HUGGING_FACE, Folder
from torch_dcp_backport.dist_checkpointing.mapping import ShardedStateDict
from torch_dcp_backport.dist_checkpointing.serialization import saving
from torch_dcp_backport.transfer import Attempt, Call, Group, TransferError, is_first, warn_on_first

logger = logging.getLogger("torch_dcp_backport.checkpoint")

# --- names ---


#: Objects: each rank's scheduler, where they differ; the common state has their number.
SCHEDULERS, SCHEDULERS_WORLD = "lr_schedulers", "lr_schedulers_world"
#: Common state: scheduler, number of ranks, contents, keys that are another key's tensor.
SCHEDULER, WORLD, SAVED, TIED = "lr_scheduler", "world", "contents", "tied"
#: Folders of adapters: ours, and that of verl's own workers, which write theirs after the checkpoint.
ADAPTER, VERL_ADAPTER = "adapter", "lora_adapter"


# --- the base of managers ---

CONTENTS = ("model", "optimizer", "extra")
#: Safetensors files beside the checkpoint, for other programs; never loaded here.
HF_MODEL = "hf_model"
#: Files of verl's own manager beside ours, or alone: of the contents named with it, or of all three.
VERL = "verl"
#: verl's setting for checkpoints of adapters alone, which not every manager offers.
LORA_ONLY = "save_lora_only"
#: The settings of a checkpoint_config; and verl's that change nothing here, with the values that ask for
#: nothing, and the reason.
SETTINGS = ("save_contents", "load_contents", "async_save", LORA_ONLY)
UNUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "mbridge_config": ((None, {}), "weights are converted by this package's own tables, not by mbridge"),
    "strict": ((None, True), "an export is complete, or an error"),
}


class Stateful(Protocol):
    """What is saved and loaded by a state: an optimizer, a schedule, a data loader, an object of yours."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take a state over."""


class Engine(Protocol):
    """What saves and loads a step: a checkpoint manager, or an engine with verl's methods."""

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Save a step: `local_path=`, `global_step=`, `max_ckpt_to_keep=`."""

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Load a step from its path."""


class BaseCheckpointManager:
    """The base of managers, which save and load the parts of a training.

    Subclasses define `write` and `read`.
    """

    #: The contents that a save may be asked for.
    offered: tuple[str, ...] = (*CONTENTS, HF_MODEL)
    #: Whether `read` knows `partial`.
    offers_partial_loads = False
    #: Whether a save may have adapters of peft without the weights below them.
    offers_lora_only = False

    def __init__(
        self,
        model: Union[nn.Module, Sequence[nn.Module]],
        optimizer: Optional[Stateful],
        lr_scheduler: Optional[Stateful] = None,
        processing_class: Optional[object] = None,
        checkpoint_config: Optional[Union[Mapping[str, object], object]] = None,
        *,
        trust: bool = False,
        save_timeout: Optional[float] = None,
        torch_metadata: bool = True,
        process_group: Group = None,
    ) -> None:
        """Remember the parts. Not collective.

        Args:
            model: the model, or a list of this rank's chunks of it.
            optimizer: the optimizer; None where there is none.
            lr_scheduler: with `state_dict()` and `load_state_dict()`; None where there is none.
            processing_class: a tokenizer or processor; saved beside the model where it has `save_pretrained`.
            checkpoint_config: a mapping, or an object, with `save_contents` and `load_contents`: lists of
                "model", "optimizer", "extra" (scheduler and random states); all three by default. Without
                `load_contents` a load takes what `save_contents` names. To be saved
                also "hf_model": weights that `from_pretrained` opens. With `async_save=True` a save copies
                what this rank writes to the host, and writes it in a thread; see `finish`. A setting of
                another name is refused, unless it stands at its default in a dataclass; verl's that change
                nothing here are named in the log. With `save_lora_only=True` (verl's) managers of FSDP models
                save a model with adapters of peft without the frozen weights below them.
            trust: save and load objects of any class in the state of the scheduler and in options of the
                optimizer, which runs code in the file; else the save refuses them.
            save_timeout: the most seconds that a call waits for this rank's files of a save in the
                background, for uploads and for removals, as of `CheckpointHandler`; a handler has its own.
            torch_metadata: write torch's index into `.metadata` of each sharded checkpoint as well, as of
                `dist_checkpointing.save`; the same on every rank. A handler's False holds for its managers.
            process_group: the ranks that save and load together; None is the default group.

        Raises:
            ValueError: an unknown content or setting, or a setting without a value (OmegaConf's "???"); a
                `torch_metadata` that is no bool.
        """
        settings = resolved(checkpoint_config, "checkpoint_config")
        unused = unused_settings(settings)
        # A manager asks each for what it needs: these have more than the types above.
        self.model: Any = model
        self.optimizer: Any = optimizer
        self.lr_scheduler: Any = lr_scheduler
        self.processing_class: Any = processing_class
        self.checkpoint_config: Any = checkpoint_config
        self.process_group = process_group
        #: Whether a save leaves out the frozen weights below adapters.
        self.saves_lora_only = (
            checked_flag(LORA_ONLY, setting(settings, LORA_ONLY) or False) and self.may_have_adapters()
        )
        if self.saves_lora_only and not self.offers_lora_only:
            raise ValueError(
                f"checkpoint_config's {LORA_ONLY}=True is not offered: a checkpoint has the whole model; "
                "an engine's save_adapter(folder) has the adapters alone"
            )
        for text in unused:
            self.tell(text)
        self.checkpoint_save_contents = contents_of(settings, "save_contents", self.offered)
        #: A save of less than everything has to be resumed by the same configuration.
        self._loads_what_it_saves = setting(settings, "load_contents") is None
        asked = contents_of(settings, "load_contents", self.offered)
        if self._loads_what_it_saves:
            asked = tuple(name for name in self.checkpoint_save_contents if name in CONTENTS) or CONTENTS
        # verl's trainers load what they save: both lists name what is only saved.
        self.checkpoint_load_contents = tuple(content for content in asked if content in CONTENTS)
        if VERL in asked and not self.checkpoint_load_contents:
            self.checkpoint_load_contents = CONTENTS
        if asked and not self.checkpoint_load_contents:
            raise ValueError(
                f"load_contents={list(asked)}: {HF_MODEL!r} is not offered; there are {', '.join(CONTENTS)}"
            )
        self.trust = trust
        self.is_async = checked_flag("async_save", setting(settings, "async_save") or False)
        self.previous_global_step: Optional[int] = None
        self.save_timeout = checked_seconds("save_timeout", save_timeout)
        self.torch_metadata = checked_bool("torch_metadata", torch_metadata)
        self._saves = Saves(process_group, save_timeout)
        self._uploads = Uploads()
        self._retention = Retention()
        self._shelves: dict[tuple[Path, Path], Shelf] = {}
        #: The wishes of the load under way; and every key that the last load has left out.
        self.partial = WHOLE
        #: Of the folder that is loaded, as `seen_in` returned it on the first rank.
        self.seen: Any = None
        self.left_out: tuple[str, ...] = ()
        #: Whether anything was ever uploaded; the same on every rank.
        self._is_uploading = False

    def may_have_adapters(self) -> bool:
        """Return whether the model has adapters, or may have some that are not known here."""
        return True

    should_save_model = property(lambda self: "model" in self.checkpoint_save_contents)
    should_save_optimizer = property(lambda self: "optimizer" in self.checkpoint_save_contents)
    should_save_extra = property(lambda self: "extra" in self.checkpoint_save_contents)
    should_save_hf_model = property(lambda self: HF_MODEL in self.checkpoint_save_contents)
    should_load_model = property(lambda self: "model" in self.checkpoint_load_contents)
    should_load_optimizer = property(lambda self: "optimizer" in self.checkpoint_load_contents)
    should_load_extra = property(lambda self: "extra" in self.checkpoint_load_contents)

    def save_checkpoint(
        self,
        local_path: Folder,
        hdfs_path: Optional[str] = None,
        global_step: int = 0,
        max_ckpt_to_keep: Optional[int] = None,
    ) -> None:
        """Save into a folder, which gets its name only once it is complete. Collective.

        Args:
            local_path: every rank sees it. Below a folder that a handler is writing, it is written in place.
            hdfs_path: a URL of fsspec that the first rank uploads the folder to, in the background; an upload
                that failed is an error of the next save or of `finish`.
            global_step: the step of the training; 0 takes it from a global_step_N in the path, if any.
            max_ckpt_to_keep: how many good folders of the same name, below other global_step_N folders, to
                keep, by what is on disk; None keeps all.

        Raises:
            CheckpointingException: the same on every rank; older checkpoints are as they were.
        """
        if writing_at(local_path) is not None:
            if hdfs_path is not None:
                raise CheckpointingException("hdfs_path is the handler's here: give it default_hdfs_dir")
            self.write(Path(local_path), global_step)
            self.previous_global_step = global_step
            return
        step, url = global_step or step_in(local_path), ""
        self._saves.wait_for_last()
        with begin(CANNOT_SAVE, "save", self.process_group) as call:
            with call.guard() as wanted:
                self._uploads.raise_failed()
                if hdfs_path is not None:
                    place = remote.place_of(hdfs_path)
                    if remote.is_within(place, Path(local_path)):
                        raise ValueError(f"hdfs_path={hdfs_path}: it is where the folder is saved")
                    url = place.url
                # The working directory may change before the rest is written.
                final, common = (
                    Path(local_path).absolute(),
                    {
                        "hdfs_path": str(hdfs_path),
                        "save_timeout": str(self.save_timeout),
                        "torch_metadata": str(self.torch_metadata),
                    },
                )
                number, shelf, torch_metadata = checked_step(step), self._shelf_of(final), self.torch_metadata
                wanted.set(SaveArguments(final, number, shelf, common, torch_metadata=torch_metadata))

            def upload(final: Path) -> None:
                if url:
                    self._uploads.add(final, url=url)

            def retire(final: Path) -> None:
                # By position: a subclass may have another name for the number.
                self.ensure_checkpoint_capacity(final, max_ckpt_to_keep)

            with together.draft_of(call, wanted, (upload, retire)) as begun:
                self.write(begun.writing.draft, step)
        self._saves.publish(begun, (upload, retire))
        self._is_uploading = self._is_uploading or hdfs_path is not None
        self.previous_global_step = global_step

    def finish(self, blocking: bool = True) -> bool:
        """Publish and upload the save that `async_save` is writing. Collective.

        Args:
            blocking: wait for the save, and free the memory that is kept for the next one; else it is
                published only if every rank has written its part.

        Returns:
            True where nothing is left to publish or upload.

        Raises:
            CheckpointingException: the save or the upload failed; the same on every rank.
        """
        is_published = self.finish_saves(blocking)
        if blocking:
            self._retention.settle(self.process_group, self.save_timeout)
        return is_published

    def finish_saves(self, blocking: bool = True) -> bool:
        """Do as `finish`, and do not wait for the removal of older steps. Collective.

        Args:
            blocking: as of `finish`.

        Returns:
            As `finish`.

        Raises:
            CheckpointingException: as of `finish`.
        """
        is_published = self._saves.finish(blocking)
        if self._is_uploading:
            with begin(together.CANNOT_UPLOAD, "upload", self.process_group) as call:
                is_settled = uploads.settle(call, self._uploads, blocking, self.save_timeout)
                is_published = is_settled and is_published
        return is_published

    def load_checkpoint(
        self,
        local_path: Optional[Folder],
        hdfs_path: Optional[str] = None,
        del_local_after_load: bool = False,
        *,
        exclude: Collection[str] = (),
        rename: Optional[Mapping[str, str]] = None,
    ) -> None:
        """Load a checkpoint of `save_checkpoint`, on any number of ranks. Collective.

        Args:
            local_path: the same on every rank; None loads nothing.
            hdfs_path: the URL that it is brought from, if it is absent or incomplete.
            del_local_after_load: remove the folder that this load has brought from `hdfs_path`, once it is
                loaded. A folder that was here before the load stays, as does one that was pinned, and so do
                files that were put into it.
            exclude: patterns, as of `fnmatch`, of names of parameters and buffers that keep today's values,
                and so do their states in the optimizer; or of whole keys: "optimizer.state.head.*".
            rename: name in the checkpoint -> name of today; "*" in both stands for the same characters. The
                first that fits a name counts.

        `left_out` has every key that was not loaded afterwards, and the log of every rank names them.

        Raises:
            CheckpointingException: the same on every rank.
        """
        self._saves.wait()
        self.partial, self.left_out = WHOLE, ()
        common = {
            "hdfs_path": str(hdfs_path),
            "del_local_after_load": str(bool(del_local_after_load)),
            **partial.spelled(exclude, rename),
        }
        brought: Optional[store.Identity] = None
        with begin(CANNOT_LOAD, "load", self.process_group) as call:
            with call.guard() as folder:
                checked_flag("del_local_after_load", del_local_after_load)
                if isinstance(local_path, str) and "://" in local_path:
                    raise ValueError(f"local_path={local_path}: a folder is loaded; give a URL as hdfs_path")
                self.partial = self.checked_partial(local_path, exclude, rename)
                folder.set(None if local_path is None else Path(local_path))
            path, seen = together.located(call, folder, common, hdfs_path is not None, self.seen_in)
            if path is not None and hdfs_path is not None:
                bring = functools.partial(uploads.bring_if_needed, hdfs_path, path)
                brought = together.waited_for(call, "bringing it from the store", bring)
        if path is not None:
            is_verified = None if hdfs_path is None else False
            look, group = functools.partial(self.seen_in, path), self.process_group
            with together.reading(path, is_verified=is_verified, group=group, look=look) as seen_now:
                self.seen = seen if hdfs_path is None else seen_now
                self.read(path)
            if del_local_after_load and brought is not None and self.is_first:
                uploads.remove_brought(path, brought)

    def checked_partial(
        self, path: Optional[Folder], exclude: Collection[str], rename: Optional[Mapping[str, str]]
    ) -> Partial:
        """Return the wishes of a load.

        Args:
            path: the folder that is loaded.
            exclude, rename: as of `load_checkpoint`.

        Raises:
            ValueError: they are no patterns.
            CheckpointingException: they are not offered here; there is nothing to load.
        """
        wanted = partial.checked(exclude, rename)
        if wanted.is_whole:
            return wanted
        if path is None:
            raise CheckpointingException(
                "exclude and rename are of a load, and there is no path to load from"
            )
        if not self.offers_partial_loads:
            raise CheckpointingException(f"exclude and rename are not offered by {type(self).__name__}")
        return wanted

    def write(self, folder: Path, step: int) -> None:
        """Write the parts into a folder that may not be there yet. Collective.

        A part that is to be written in the background goes to the `requests` of `writing_in(folder)`.

        Args:
            folder: the folder; the same on every rank.
            step: the step of the training.
        """
        raise NotImplementedError

    def read(self, folder: Path) -> None:
        """Load the parts from a folder. Collective.

        Args:
            folder: the folder; the same on every rank.
        """
        raise NotImplementedError

    def seen_in(self, folder: Path) -> object:
        """Return what every rank has to know of a folder before `read`, which finds it as `seen`.

        Runs on the first rank, before any rank reads; what it raises is raised on every rank.

        Args:
            folder: the folder, whose files have the sizes in its manifest.
        """
        return None

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of the manager's ranks."""
        return is_first(self.process_group)

    def tell(self, text: str, about: Optional[Hashable] = None) -> None:
        """Log a warning that concerns every rank: on the first of the manager's ranks, once in its process.

        Args:
            text: the warning.
            about: what the warning is of, where its text differs from time to time.
        """
        warn_on_first(logger, text, self.process_group, about)

    def ensure_checkpoint_capacity(self, path: Path, keep: Optional[int]) -> None:
        """Remove the older checkpoints that retention does not keep. Runs on the first rank.

        Args:
            path: the newest checkpoint.
            keep: the number of good checkpoints to keep; None keeps all.
        """
        shelf = self._shelf_of(path)
        if shelf is not None:
            self._retention.retire(shelf, keeping(keep))

    def _shelf_of(self, path: Path) -> Optional[Shelf]:
        """Return the shelf of a path, which remembers what it has listed."""
        shelf = store.shelf_of(path)
        if shelf is None:
            return None
        return self._shelves.setdefault((shelf.root, shelf.below), shelf)

    def get_rng_state(self) -> dict[str, Any]:
        """Return the states of this rank's random generators."""
        return extra.rng_state(extra.device_type_of(self.model))

    def load_rng_state(self, rng_state: dict[str, Any]) -> None:
        """Set this rank's random generators.

        Args:
            rng_state: the result of `get_rng_state`.
        """
        extra.set_rng_state(rng_state, extra.device_type_of(self.model))


def step_in(path: object) -> int:
    """Return the step in a path; 0 where it has none, or is no path."""
    parts = Path(path).parts if isinstance(path, (str, os.PathLike)) else ()
    matches = (store.STEP.fullmatch(part) for part in reversed(parts) if isinstance(part, str))
    return next((int(match[1]) for match in matches if match is not None), 0)


def unused_settings(config: Any) -> list[str]:
    """Return warnings of settings that change nothing here.

    A setting that is not known is refused: a misspelt name would change nothing, and say nothing. A later
    release's that stands at its default asks for nothing.

    Raises:
        ValueError: naming the setting and the nearest known one.
    """
    texts = []
    for name in names_in(config):
        if name in SETTINGS or name.startswith("_"):
            continue
        value = setting(config, name)
        if name not in UNUSED:
            nearest = difflib.get_close_matches(name, SETTINGS, 1)
            if nearest or not is_default(config, name, value):
                hint = f"; did you mean {nearest[0]}?" if nearest else ""
                raise ValueError(f"checkpoint_config has no {name}: there are {', '.join(SETTINGS)}{hint}")
            texts.append(f"checkpoint_config's {name}={value!r}, which is not known, has no effect here")
        elif value not in UNUSED[name][0]:
            texts.append(f"checkpoint_config's {name} changes nothing here: {UNUSED[name][1]}")
    return texts


def is_default(config: Any, name: str, value: Any) -> bool:
    """Return whether a field of a dataclass has its default; of other objects no default is known."""
    if not dataclasses.is_dataclass(config):
        return False
    entry = next(entry for entry in dataclasses.fields(config) if entry.name == name)
    if entry.default_factory is not dataclasses.MISSING:
        return bool(value == entry.default_factory())
    return entry.default is not dataclasses.MISSING and bool(value == entry.default)


def names_in(config: Any) -> list[str]:
    """Return the names of the settings in a config: a dataclass, a mapping or another object."""
    if config is None:
        return []
    if dataclasses.is_dataclass(config):
        return [entry.name for entry in dataclasses.fields(config)]
    # A DictConfig of OmegaConf has `keys`, and is no Mapping of Python's.
    if hasattr(config, "keys"):
        return list(map(str, config.keys()))
    if isinstance(config, tuple):
        return list(getattr(config, "_fields", ()))
    slots = [name for kind in type(config).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*getattr(config, "__dict__", ()), *slots]


def contents_of(config: Any, name: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the contents that a setting of a config lists; `CONTENTS` where it is not set.

    Raises:
        ValueError: a content that no checkpoint has.
    """
    listed: Optional[Union[str, Iterable[str]]] = resolved(setting(config, name), name)
    if listed is None:
        return CONTENTS
    if isinstance(listed, Mapping) or not isinstance(listed, Iterable):
        raise ValueError(f"{name}={listed!r}: expected a list of {', '.join(known)}")
    contents = (listed,) if isinstance(listed, str) else tuple(listed)
    unknown = [content for content in contents if content not in known]
    if unknown:
        raise ValueError(
            f"{name}={list(contents)}: {unknown[0]!r} is not offered; there are {', '.join(known)}"
        )
    return contents


def checked_flag(name: str, value: Any) -> bool:
    """Return an option that is on or off; of verl's also 1 and 0.

    Raises:
        ValueError: any other value: the text "False" would be true.
    """
    if isinstance(value, (bool, int)) and value in (True, False):
        return bool(value)
    raise ValueError(f"{name}={value!r}: expected True or False")


def setting(config: Any, name: str) -> Any:
    """Return a setting of a config; None where it is not set."""
    if config is None:
        return None
    if dataclasses.is_dataclass(config) or not hasattr(config, "get"):
        return getattr(config, name, None)
    return config.get(name)


# --- the base of managers with one sharded checkpoint ---


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

    def save_settings(self) -> dict[str, str]:
        """Return what must be the same on every rank of a save."""
        return {
            "async_save": str(self.is_async),
            "save_contents": ", ".join(self.checkpoint_save_contents),
            LORA_ONLY: str(self.saves_lora_only),
            "scheduler": type(self.lr_scheduler).__name__,
        }

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
            # Of the first rank that has any.
            text = call.gather_object(
                "writing hf_model", own, lambda texts: next((text for text in texts.values() if text), "")
            )
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

    def agree_on_save(
        self, call: Call, folder: Path, plain: Attempt[Any], saves_schedule: bool = True
    ) -> tuple[bool, ShardedStateDict]:
        """Write the configuration, and compare the ranks' parts and schedules, in one agreement. Collective.

        The stages of a pipeline may have groups of their own, with other rates.

        Args:
            call: with the problems of ranks that could not make their part of the save.
            folder: the folder of the checkpoint.
            plain: values of this rank that are compared with the other ranks'; or the attempt to make them.
            saves_schedule: whether the schedule is a part of what is saved.

        Returns:
            Whether all ranks have the same plain values; and the schedule to save, the first rank's, or each
            rank's own where they differ.

        Raises:
            CheckpointingException: ranks differ in a setting, or one has a problem; the same on every rank.
        """
        saves_schedule = saves_schedule and self.schedule_in in self.checkpoint_save_contents
        scheduler = self.lr_scheduler if saves_schedule else None
        with call.guard() as schedule:
            schedule.set(None if scheduler is None else resolved(scheduler.state_dict(), SCHEDULER))
        with call.guard() as digests:
            digests.set((digest_alike(plain.value), digest_alike(schedule.value)))

        def configured(digests_by_rank: Mapping[int, tuple[bytes, bytes]]) -> tuple[bool, bool]:
            self.write_configuration(folder / HUGGING_FACE)
            parts, schedules = zip(*digests_by_rank.values())
            return len(set(parts)) == 1, len(set(schedules)) == 1

        are_parts_alike, are_schedules_alike = call.gather_object(
            "writing the configuration", digests, configured, must_agree=self.save_settings()
        )
        if schedule.value is None:
            return are_parts_alike, {}
        if are_schedules_alike:
            return are_parts_alike, {SCHEDULER: schedule.value}
        rank, world = self.place()
        own = ShardedObject(SCHEDULERS, schedule.value, (world,), (rank,))
        return are_parts_alike, {SCHEDULERS: own, SCHEDULERS_WORLD: world}

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

    @contextlib.contextmanager
    def saving_state(self, path: Path, step: int, schedule: ShardedStateDict) -> Iterator[dict[str, Any]]:
        """Save the parts that are added in the context, and the schedule. Collective.

        What fails in the context is raised on every rank. With `async_save` the save is begun.

        Args:
            path: the folder of the sharded checkpoint.
            step: the step of the training.
            schedule: of `agree_on_save`.
        """
        writing = writing_in(path)
        options = SaveOptions(
            must_load=not self.trust,
            process_group=self.process_group,
            written=functools.partial(writing.note, path),
            compare_common=True,
            torch_metadata=self.torch_metadata and writing.torch_metadata,
        )
        with saving(path, options, writing.requests if self.is_async else None) as state:
            writing.make_folder(path)
            saved = [name for name in CONTENTS if name in self.checkpoint_save_contents]
            parts = {"step": checked_step(step), SAVED: saved}
            yield parts
            state.set({**parts, **schedule})

    def agree_on_load(
        self, call: Call, path: Path, names: Collection[str], plain: Optional[Attempt[Any]] = None
    ) -> tuple[Mapping[str, Any], bool, Attempt[Opened]]:
        """Open the checkpoint, check its contents, and compare the ranks' parts, all at once. Collective.

        Args:
            call: with the problems of ranks that could not make their part of the load.
            path: the folder of the sharded checkpoint.
            names: the keys of the entries that are returned.
            plain: values of this rank that are compared with the other ranks'.

        Returns:
            The named entries that the common state has; whether all ranks have the same plain values; and
            the checkpoint, for `loading`.

        Raises:
            CheckpointingException: it cannot be opened, or lacks a content, or a rank has a problem; the same
                on every rank.
        """
        same = {"folder": str(path), "load_contents": ", ".join(self.checkpoint_load_contents)}
        opening = Opening(Attempt(path))

        def checked_entries(digests: Mapping[int, bytes]) -> tuple[Mapping[str, Any], bool, Any]:
            content = opening.read()
            state = opening.opened_from(content).common_state(self.trust)
            self.check_contents(path, state)
            entries = {name: state[name] for name in names if name in state}
            return entries, len(set(digests.values())) == 1, content

        digest = call.attempt(digest_alike, plain)
        entries, are_alike, content = call.gather_object(
            "reading what was saved", digest, checked_entries, must_agree=same
        )
        return entries, are_alike, call.attempt(opening.opened_from, content)

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
        more = [name for name in contents if name not in wanted]
        if self._loads_what_it_saves and more:
            logger.warning(
                "%s has %s, too, which is not loaded: without load_contents a load takes save_contents=%s",
                path,
                ", ".join(more),
                list(self.checkpoint_save_contents),
            )
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


def digest_alike(value: Any) -> bytes:
    """Return the same bytes for equal values: nested dicts and lists of others."""
    with values.naming_too_deep(value):
        return digest_of(values_of(value))
