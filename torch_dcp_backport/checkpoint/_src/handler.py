"""Save and resume of a training: the engine's parts, the data loader's, the step folders of a run.

Names and arguments are those of verl's `CheckpointHandler`. Collective.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, Optional, TypeVar

from torch import nn

from torch_dcp_backport.checkpoint._src import (
    extra,
    manifest,
    partial,
    remote,
    retention,
    store,
    together,
    uploads,
    user_state,
    verl,
    watching,
)
from torch_dcp_backport.checkpoint._src.extra import MOST, data_state, has_state, resume
from torch_dcp_backport.checkpoint._src.manager import BaseCheckpointManager, Engine, Stateful
from torch_dcp_backport.checkpoint._src.policies import (
    PreservationPolicy,
    SavePolicy,
    metric_of,
    spelled_metric,
)
from torch_dcp_backport.checkpoint._src.retention import Retention, keeping
from torch_dcp_backport.checkpoint._src.saves import Saves
from torch_dcp_backport.checkpoint._src.store import Shelf
from torch_dcp_backport.checkpoint._src.together import CANNOT_SAVE, SaveArguments, writing_in
from torch_dcp_backport.checkpoint._src.uploads import Brought, Uploads
from torch_dcp_backport.checkpoint._src.watching import Mark, Watch
from torch_dcp_backport.dist_checkpointing import (
    CheckpointingException,
    begin,
    checked_bool,
    checked_seconds,
    values,
)
from torch_dcp_backport.dist_checkpointing.core import Folder
from torch_dcp_backport.transfer import Group

logger = logging.getLogger("torch_dcp_backport.checkpoint")

T = TypeVar("T")

ON_FAILURE = ("raise", "warn")
MODES = ("disable", "auto", "resume_path")
CANNOT_RESUME = "cannot resume"
LORA = "lora_train_meta.json"


class OrchestrationMode(Enum):
    """The process model of a training, as verl names it; only SPMD is offered."""

    SPMD = 0
    RAY = 1


class RootSteps(NamedTuple):
    """The steps of a root, as the first rank sees them."""

    #: The newest good step that no load has failed on, as (step, path); None where there is none.
    good: Optional[tuple[int, str]]
    #: Why others that this package published are not good, a text for each.
    faults: list[str]
    tracked: Optional[int]
    #: What is not ours among the steps, a text for each.
    others: Sequence[str] = ()
    #: Whether they have manifests: those of verl's own manager have none.
    is_ours: bool = True


class CheckpointHandler:
    """A handler that saves steps so that the newest good step is never lost, and resumes from it.

    Example:
        >>> import torch
        >>> from torch_dcp_backport.checkpoint import CheckpointHandler, FSDPCheckpointManager
        >>> model = torch.nn.Linear(2, 3)
        >>> manager = FSDPCheckpointManager(model, torch.optim.AdamW(model.parameters()))
        >>> handler = CheckpointHandler(manager, default_local_dir="run", max_ckpt_to_keep=2)
        >>> handler.load_checkpoint()  # there is none yet
        0
        >>> handler.save_checkpoint(step=10).name
        'global_step_10'
        >>> handler.load_checkpoint()
        10
    """

    def __init__(
        self,
        engine: Engine,
        train_dataloader: Optional[Stateful] = None,
        *,
        default_local_dir: Folder,
        max_ckpt_to_keep: Optional[int] = None,
        preserve: Optional[PreservationPolicy] = None,
        trash_dir: Optional[Folder] = None,
        save_policy: Optional[SavePolicy] = None,
        default_hdfs_dir: Optional[str] = None,
        resume_mode: str = "auto",
        resume_from_path: Optional[Folder] = None,
        exclude: Collection[str] = (),
        rename: Optional[Mapping[str, str]] = None,
        mode: OrchestrationMode = OrchestrationMode.SPMD,
        lora_train_meta: Optional[Mapping[str, object]] = None,
        on_data: str = "error",
        at_epoch_end: str = "next",
        verify: bool = True,
        trust: bool = False,
        on_upload: str = "raise",
        on_failure: str = "raise",
        save_timeout: Optional[float] = None,
        torch_metadata: bool = True,
        state: Optional[Mapping[str, Stateful]] = None,
        process_group: Group = None,
    ) -> None:
        """Remember what to save, and where. Not collective.

        Args:
            engine: a checkpoint manager, or anything with verl's `save_checkpoint(local_path=, global_step=,
                max_ckpt_to_keep=)` and `load_checkpoint(path)`; with `is_mp_src_rank_with_outputs()` and
                `get_data_parallel_rank()` where ranks share a data loader.
            train_dataloader: with `state_dict()` and `load_state_dict()`, as torchdata's StatefulDataLoader.
            default_local_dir: the root of all steps; every rank sees it.
            max_ckpt_to_keep: how many good steps to keep, by what is on disk; None keeps all.
            preserve: other steps that stay, in the place of max_ckpt_to_keep.
            trash_dir: a folder on the same disk that steps are moved into which are not kept; None removes
                them. Nothing is ever removed from it.
            save_policy: when `save_if_due` saves; the same on every rank.
            default_hdfs_dir: a URL of fsspec, such as s3://bucket/run, or a path: the first rank uploads each
                step to it in the background, and brings its newest step where `default_local_dir` has no
                good step.
            resume_mode: "disable" starts at step 0; "auto" takes the newest good step, or where there is none
                yet `resume_from_path`; "resume_path" takes `resume_from_path` and no other.
            resume_from_path: the folder of a step, with global_step_N in its path.
            exclude, rename: of a load from `resume_from_path`, as of the manager's `load_checkpoint`: a base
                model into a model with adapters. The run's own steps are loaded whole. "state.NAME" in
                exclude stands for an object of `state`.
            mode: only `OrchestrationMode.SPMD`: a handler on each rank.
            lora_train_meta: written to lora_train_meta.json, for verl's tools.
            on_data: what to do where the states of data loaders do not fit the ranks of today: "error", or
                "restart" the data.
            at_epoch_end: what a resume from an epoch's last step gives: "next", the next epoch, as for a loop
                that goes on with epoch `step // steps_per_epoch` (verl's); or "rest", the rest of the epoch,
                which has no batch, as for a loop that goes on with the epoch that it was in. Of torchdata's
                StatefulDataLoader; the state of another loader is given back as it was.
            verify: compare every file with its checksum before a step is loaded, and once it is uploaded.
            trust: take states of data loaders with objects of any class, which runs code in the file; else
                the save refuses them. For the rest see the manager's.
            on_upload: the outcome of a failed upload at the next save or `finish`: "raise", an error on every
                rank, or "warn", as with `on_failure="warn"`.
            on_failure: the outcome of a save that fails: "raise", an error on every rank; or "warn", an error
                in the log of every rank, None in the place of the step's folder, and one more in
                `failed_saves`. The same on every rank, which the first save or load compares.
            save_timeout: the most seconds that `finish`, the next save or a load waits for this rank's files
                of a save in the background, for uploads and for removals; then it fails, and what hangs is
                abandoned. Less than the timeout of the process group. None waits without end.
            torch_metadata: write torch's index into `.metadata` of each sharded checkpoint as well, as of
                `dist_checkpointing.save`; the same on every rank.
            state: further objects by name, such as an average of weights or a gradient scaler, each with
                `state_dict()` and `load_state_dict()`: saved in every step, and loaded from it. A step
                without one of them is an error; what only the step has is named in the log.
            process_group: the ranks that save and load together; None is the default group.

        Raises:
            ValueError: an option is unknown, or not supported yet.
        """
        if resume_mode not in MODES:
            raise ValueError(f"resume_mode={resume_mode!r}: expected one of {', '.join(MODES)}")
        if resume_mode == "resume_path" and resume_from_path is None:
            raise ValueError("resume_mode='resume_path' needs resume_from_path")
        if on_failure not in ON_FAILURE:
            raise ValueError(f"on_failure={on_failure!r}: expected {' or '.join(ON_FAILURE)}")
        if on_data not in ("error", "restart"):
            raise ValueError(f"on_data={on_data!r}: expected error or restart")
        if at_epoch_end not in ("next", "rest"):
            raise ValueError(f"at_epoch_end={at_epoch_end!r}: expected next or rest")
        if mode is not OrchestrationMode.SPMD and getattr(mode, "name", mode) != "SPMD":
            raise ValueError(
                f"mode={mode}: only SPMD is offered, a handler on each rank. Under Ray keep verl's own "
                "handler in the driver, and put FSDPCheckpointManager in the place of the workers' own "
                "manager: each of its folders is whole, or not there"
            )
        if train_dataloader is not None and not has_state(train_dataloader) and on_data != "restart":
            raise ValueError(
                "the data loader has no state_dict() and load_state_dict(): its data would start from the "
                "beginning after a resume (take torchdata's StatefulDataLoader, or say on_data='restart')"
            )
        if max_ckpt_to_keep is not None:
            checked_keep(max_ckpt_to_keep)
        if max_ckpt_to_keep is not None and preserve is not None:
            raise ValueError(f"max_ckpt_to_keep={max_ckpt_to_keep} and preserve={preserve}: give one of them")
        if preserve is not None and not isinstance(preserve, PreservationPolicy):
            raise ValueError(f"preserve={preserve!r}: expected a PreservationPolicy")
        if save_policy is not None and not isinstance(save_policy, SavePolicy):
            raise ValueError(f"save_policy={save_policy!r}: expected a SavePolicy")
        wanted = partial.checked(exclude, rename)
        if not wanted.is_whole and resume_from_path is None:
            raise ValueError("exclude and rename are of a load from resume_from_path, which is None")
        # Objects of `state` are this handler's own: the engine does not hear of them.
        is_of_engine = bool(others_of(wanted) or wanted.rename)
        if is_of_engine and not getattr(engine, "offers_partial_loads", False):
            raise ValueError(f"exclude and rename are not offered by {type(engine).__name__}")
        objects = [pattern for pattern in wanted.exclude if pattern.startswith("state.")]
        for pattern in objects:
            if not any(partial.fits(f"state.{name}", [pattern]) for name in state or {}):
                raise ValueError(f"exclude has {pattern!r}, and state has none of that name")
        self.partial = wanted
        self.state = user_state.check_names(state)
        self.engine: Any = engine
        self.train_dataloader: Any = train_dataloader
        # Absolute: the working directory may be another when a step is saved.
        self.default_local_dir = Path(default_local_dir).absolute()
        self.max_ckpt_to_keep = max_ckpt_to_keep
        self.preserve = preserve
        self.trash_dir = None if trash_dir is None else Path(trash_dir).absolute()
        if self.trash_dir is not None and store.is_step_or_root(self.trash_dir, self.default_local_dir):
            raise ValueError(f"trash_dir={trash_dir}: it is the root of the steps, or in a step")
        self.resume_mode = resume_mode
        self.resume_from_path = None if resume_from_path is None else Path(resume_from_path).absolute()
        self.on_data = on_data
        self.at_epoch_end = at_epoch_end
        self.verify = verify
        self.process_group = process_group
        self.trust = trust
        self.lora_train_meta = lora_train_meta
        self.default_hdfs_dir = default_hdfs_dir
        self._remote = None if default_hdfs_dir is None else remote.place_of(default_hdfs_dir)
        if self._remote is not None and remote.is_within(self._remote, self.default_local_dir):
            raise ValueError(f"default_hdfs_dir={default_hdfs_dir}: it is where steps are saved")
        self._uploads = Uploads(verify, on_upload)
        if on_failure == "warn":
            self._uploads.on_upload = "warn"
        self._retention = Retention()
        self.on_failure = on_failure
        self.save_timeout = checked_seconds("save_timeout", save_timeout)
        self.torch_metadata = checked_bool("torch_metadata", torch_metadata)
        #: Whether all ranks are known to have the same settings.
        self._is_compared = False
        #: The number of saves that failed, with `on_failure="warn"`; the same on every rank.
        self.failed_saves = 0
        self._saves = Saves(process_group, save_timeout)
        self._listed = Shelf(self.default_local_dir)
        self.save_policy = save_policy
        #: Whether a rank got a signal before the last `save_if_due`; the same on every rank.
        self.is_stopping = False
        #: The step that was saved last, of the state since the last load; None where there is none.
        self.last_saved: Optional[int] = None
        self._watch: Optional[Watch] = None
        self._saved_at = time.monotonic()
        #: The packed state of the data loader in a save after an exception; None takes the loader's own.
        self._loader_state: Optional[bytes] = None
        #: Steps that could not be loaded.
        self._distrusted: set[Path] = set()
        #: The step that was loaded last.
        self._believed: Optional[Path] = None

    @property
    def preservation(self) -> Optional[PreservationPolicy]:
        """The policy of today; None keeps all steps."""
        return keeping(self.max_ckpt_to_keep) if self.preserve is None else self.preserve

    def save_checkpoint(self, step: int, *, metric: Optional[float] = None) -> Optional[Path]:
        """Save a step; with a manager's `async_save`, begin to. Collective.

        Args:
            step: the number of the step, from which the folder's name is made; the same on every rank.
            metric: a number by which `PreservationPolicy(best=...)` compares steps, the same on every rank;
                NaN and infinity are not compared.

        Returns:
            The step's folder, which is complete. With `async_save` it is complete only after `finish`, with
            which the next save begins. None only with `on_failure="warn"`, where the save failed.

        Raises:
            CheckpointingException: the same on every rank; the steps saved before are as they were. With
                `async_save` also the failure of the save before; this save was not begun then.
        """
        path: Optional[Path] = None
        try:
            path = self._save(step, metric)
        except CheckpointingException as error:
            self._tolerate(error)
        self._saved_at = time.monotonic()
        return path

    def _tolerate(self, error: CheckpointingException) -> None:
        """Log and count the failure of a save, if that is what all ranks have chosen.

        Raises:
            CheckpointingException: the error.
        """
        # Ranks that differ in on_failure would differ in the outcome.
        if self.on_failure == "raise" or not error.is_agreed or not self._is_compared:
            raise error
        self.failed_saves += 1
        logger.error("the training goes on without it: %s", error)

    def _finish_last(self, publish: Callable[[], T]) -> Optional[T]:
        """Publish the save before; return None where it failed, and is not to be raised."""
        try:
            return publish()
        except CheckpointingException as error:
            self.last_saved = None
            self._tolerate(error)
        return None

    @property
    def settings(self) -> dict[str, str]:
        """The options that must be the same on every rank of any save and load."""
        return {
            "default_hdfs_dir": str(None if self._remote is None else self._remote.url),
            "on_failure": self.on_failure,
            "save_timeout": str(self.save_timeout),
            "torch_metadata": str(self.torch_metadata),
        }

    def save_if_due(self, step: int, *, metric: Optional[float] = None) -> Optional[Path]:
        """Save a complete step, if `save_policy` says so on any rank. Collective: call it after every step.

        Args:
            step, metric: as of `save_checkpoint`.

        Returns:
            The step's folder, as of `save_checkpoint`; None where the step is not saved.

        Raises:
            CheckpointingException: no policy, another policy or step on some rank, or the save failed; the
                same on every rank.
        """
        watch = self._watch
        due = watching.ask(self, watch, step, metric, (time.monotonic() - self._saved_at) / 60)
        self.is_stopping = due.is_stopping
        return self.save_checkpoint(step, metric=metric) if due.is_due else None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the loop of a training, as `save_policy` says: signals, and exceptions. Collective.

        Former handlers of the signals are called as well, and are back afterwards. After an exception, the
        last step that `save_if_due` was called for is saved, if all ranks leave the loop and the state is
        still that of the step: an exception within an optimizer's step, for example, saves nothing, which the
        log says. The exception goes on in any case.

        Raises:
            CheckpointingException: no policy, another one on some rank, or a rank is watching already; the
                same on every rank.

        Example:
            >>> import torch
            >>> from torch_dcp_backport.checkpoint import CheckpointHandler, FSDPCheckpointManager, SavePolicy
            >>> model = torch.nn.Linear(2, 3)
            >>> manager = FSDPCheckpointManager(model, torch.optim.AdamW(model.parameters()))
            >>> policy = SavePolicy(steps=100, on_exception=True)
            >>> handler = CheckpointHandler(manager, default_local_dir="run", save_policy=policy)
            >>> try:
            ...     with handler.watching():
            ...         for step in range(1, 200):
            ...             if step == 8:
            ...                 raise RuntimeError("no more data")
            ...             saved = handler.save_if_due(step)
            ... except RuntimeError:
            ...     print(handler.load_checkpoint())
            7
        """
        with watching.Watch(self) as watch:
            self._watch, self.is_stopping = watch, False
            try:
                yield
            finally:
                self._watch = None

    def save_last(self, mark: Mark) -> None:
        """Save the complete step of a mark, unless it is saved, and wait for it. Collective.

        Args:
            mark: the step's, which has the states that the exception came too late for.
        """
        if mark.step != self.last_saved:
            with extra.kept(self.device_kind):
                self.engine.load_rng_state(mark.random_state)
                self._loader_state = mark.loader
                try:
                    self._save(mark.step, mark.metric, is_last=True)
                finally:
                    self._loader_state = None
        self.finish()

    def publish_last(self, blocking: bool = True) -> bool:
        """Publish the save in the background; return whether none is left. Collective.

        Args:
            blocking: wait for it.

        Raises:
            CheckpointingException: it failed, so that its step does not count as saved; on every rank.
        """
        is_published = self._finish_last(lambda: self._saves.finish(blocking))
        return True if is_published is None else is_published

    def _save(self, step: int, metric: Any, *, is_last: bool = False) -> Path:
        """Save a step; with `is_last`, whatever became of uploads before."""
        root = self.default_local_dir
        rating: Optional[float] = None
        # What is no number is an error of every rank, below: also one that cannot be printed.
        with contextlib.suppress(Exception):
            rating = metric_of(metric)

        def track(final: Path) -> None:
            if metric is not None and rating is None:
                logger.warning("%s: metric=%s is compared with no other step's", final, metric)
            store.write_tracker(final.parent, step)

        def retire(final: Path) -> None:
            self._distrusted.discard(final)
            if self._believed is not None:
                retention.believe(self._believed)
                self._believed = None
            # The policy of today: the program may have another one than when a save in the background began.
            self._retention.retire(self.shelf, self.preservation, self._distrusted, self.trash_dir)

        then = (track, self.upload, retire)
        common = {
            **self.settings,
            **user_state.names_of(self.state),
            "metric": spelled_metric(metric),
            "max_ckpt_to_keep": str(self.max_ckpt_to_keep),
            "preserve": spelled_policy(self),
            "trash_dir": str(self.trash_dir),
        }
        self._finish_last(self._saves.wait_for_last)
        if not self._is_compared:
            with begin(CANNOT_SAVE, "save", self.process_group) as call:
                call.barrier("comparing options", must_agree=self.settings, so_far="nothing was written")
            self._is_compared = True
        with begin(CANNOT_SAVE, "save", self.process_group) as call:
            with call.guard() as wanted:
                try:
                    self._uploads.raise_failed()
                except CheckpointingException as error:
                    if not is_last:
                        raise
                    logger.error("%s", error)
                metric_of(metric)
                # The program may have changed it since, on some rank.
                str(self.preservation)
                number = store.checked_step(step)
                final = (root / store.name_of(number)).absolute()
                wanted.set(SaveArguments(final, number, self.shelf, common, rating, self.torch_metadata))
            with together.draft_of(call, wanted, then) as begun:
                self.write(begun.writing.draft, step)
        self._saves.publish(begun, then)
        self.last_saved = step
        return root / store.name_of(step)

    def finish(self, blocking: bool = True) -> bool:
        """Publish and upload the save in the background; return whether nothing is left. Collective.

        With `blocking`, it also waits until the steps that retention took are removed, and frees the memory
        that is kept for the next copy.

        Call it before the process ends, and with `blocking=False` now and then between saves.

        Args:
            blocking: wait for the save; else it is published only if every rank has written its part.

        Raises:
            CheckpointingException: the save failed; the same on every rank. Older steps are as they were.
        """
        is_published = self.publish_last(blocking)
        if self._remote is not None:
            with begin(together.CANNOT_UPLOAD, "upload", self.process_group) as call:
                is_settled = uploads.settle(call, self._uploads, blocking, self.save_timeout)
                is_published = is_settled and is_published
        if blocking:
            self._retention.settle(self.process_group, self.save_timeout)
        return is_published

    def upload(self, folder: Path) -> None:
        """Upload a step in the background, if the handler has a store. Runs on the first rank.

        Args:
            folder: the step's folder.
        """
        if self._remote is not None:
            self._uploads.add(folder, self._remote.below(folder.name).url)

    def is_uploaded(self, folder: Path) -> bool:
        """Return whether a step is in the handler's store; True without a store.

        Args:
            folder: the step's folder.
        """
        # It may have been uploaded to another store.
        return self._remote is None or store.uploaded_to(folder) == self._remote.below(folder.name).url

    def write(self, draft: Path, step: int) -> None:
        """Write a step's parts into a folder. Collective.

        Args:
            draft: the folder, which is not published yet.
            step: the number of the step.

        Raises:
            CheckpointingException: the data loader's state would not load again without `trust`.
        """
        self.engine.save_checkpoint(local_path=str(draft), global_step=step, max_ckpt_to_keep=None)
        rank, _ = together.place_in(self.process_group)
        if self.lora_train_meta is not None and rank == 0:
            text = json.dumps(self.lora_train_meta, ensure_ascii=False, indent=4)
            writing_in(draft).write(draft / LORA, text.encode())
        if self.is_data_source and has_state(self.train_dataloader):
            state = self._loader_state
            if state is None:
                state = values.dumps(self.train_dataloader.state_dict())
            reason = "" if self.trust else values.why_not_loadable(state)
            if len(state) > MOST:
                reason = f"it has {len(state)} bytes, where {MOST} are the most"
            if reason:
                raise CheckpointingException(f"the data loader's state would not load again: {reason}")
            writing_in(draft).write(draft / f"data_{self.data_rank}.pt", state)
        user_state.save(self.state, draft, self.trust, self.process_group)

    def load_checkpoint(self) -> int:
        """Load the step that `resume_mode` selects, and return its number; 0 where there is none. Collective.

        A step that fails on any rank is skipped, and logged, in favour of the step before it.

        Raises:
            CheckpointingException: there are steps and none of them could be loaded, or `resume_from_path`
                could not; the same on every rank.
        """
        self._finish_last(self._saves.wait)
        self.last_saved = None
        if isinstance(self.engine, BaseCheckpointManager):
            # A failed save of the engine itself is no fault of any step.
            self.engine.finish_saves()
        failures: dict[str, str] = {}
        absent, tried = list[str](), set[int]()
        while True:
            # Another process may have published since the last look, and its retention removed steps.
            steps, is_first = self.look(failures)
            if steps.good is None:
                brought = self.bring(tried)
                absent = brought.faults
                if brought.step is None:
                    break
                tried.add(brought.step)
                failures.pop(str(self.default_local_dir / store.name_of(brought.step)), None)
                continue
            step, path = steps.good
            try:
                self.load_step(Path(path), steps.is_ours)
            except user_state.UsersError:
                # Older steps may fit; but what the program asked for, it gets or hears of.
                raise
            except CheckpointingException as error:
                if self.resume_mode == "resume_path":
                    raise
                failures[path] = f"{path}: {error}"
                # The writer of a hidden one may have been about to replace it, and be done by now.
                if not is_hidden(path):
                    self._distrusted.add(Path(path).absolute())
                continue
            if is_first:
                log_loaded(steps, [*steps.faults, *absent, *failures.values()])
                for other, text in failures.items():
                    retention.distrust(Path(other), text)
                is_step = Path(path).parent == self.default_local_dir and not os.path.islink(path)
                is_step = is_step and not is_hidden(path)
                if is_step and not self.is_uploaded(Path(path)):
                    self.upload(Path(path))
            self._believed = Path(path)
            return step
        texts = [*steps.faults, *absent, *failures.values(), *steps.others]
        if texts:
            raise CheckpointingException(
                f"{CANNOT_RESUME}: no step in {self.default_local_dir} is good: {'; '.join(texts)}"
            )
        if self.resume_mode == "auto" and self.resume_from_path is not None:
            first = copy.copy(self)
            first.resume_mode = "resume_path"
            return first.load_checkpoint()
        return 0

    def look(self, failed: Collection[str] = ()) -> tuple[RootSteps, bool]:
        """Return the steps that the first rank sees, and whether this rank is the first. Collective.

        Args:
            failed: paths of steps that could not be loaded.
        """
        with begin(CANNOT_RESUME, "load", self.process_group) as call:
            common = {
                "default_local_dir": str(self.default_local_dir),
                "resume_mode": self.resume_mode,
                "resume_from_path": str(self.resume_from_path),
                "verify": str(self.verify),
                # Ranks with objects agree once more, on their names: an error names what the step lacks.
                "state": "objects" if self.state else "no objects",
                **self.settings,
            }
            steps = call.gather_object(
                "looking for steps", None, lambda _: self.find_steps(failed), must_agree=common
            )
            return steps, call.is_first

    def bring(self, tried: set[int]) -> Brought:
        """Bring the newest step of the store that was not tried yet. Collective.

        Args:
            tried: the steps that could not be loaded.

        Returns:
            The number of the step, None where there is none; and why others were not brought.
        """
        place = self._remote
        if place is None or self.resume_mode != "auto":
            return Brought(None, [])
        bring = functools.partial(uploads.bring_newest, place, self.default_local_dir, tried)
        with begin(CANNOT_RESUME, "load", self.process_group) as call:
            return together.waited_for(call, "bringing a step from the store", bring)

    def load_step(self, path: Path, is_ours: bool) -> None:
        """Load a step. Collective.

        Args:
            path: the step's folder.
            is_ours: whether it has a manifest, by which its files are verified.

        Raises:
            CheckpointingException: it could not be loaded; the same on every rank.
        """
        is_verified = self.verify and is_ours
        look = functools.partial(user_state.saved_worlds, path)
        group = self.process_group
        with together.reading(path, is_verified=is_verified, group=group, look=look) as worlds:
            self.read(path, worlds)

    def find_steps(self, failed: Collection[str] = ()) -> RootSteps:
        """Find the step to try; change nothing. Runs on the first rank.

        Args:
            failed: paths of steps that could not be loaded.
        """
        root = self.default_local_dir
        if self.resume_mode == "disable":
            return RootSteps(None, [], None)
        if self.resume_mode == "resume_path":
            given = Path(str(self.resume_from_path))
            path = store.located(given)
            step = store.examined(path, extract_step(given))
            is_ours = not (step.foreign == manifest.NotOurs.kind and verl.saved_world(path))
            if step.fault and is_ours:
                raise CheckpointingException(f"{path}: {step.fault}")
            return RootSteps((step.step, str(path)), [], None, is_ours=is_ours)
        if os.path.lexists(root) and not os.path.isdir(root):
            raise NotADirectoryError(f"{root} is no folder")
        good: Optional[tuple[int, str]] = None
        faults, others = list[str](), list[str]()
        for entry in self.shelf.readable():
            if str(entry.path) in failed:
                continue
            # A run of 10,000 steps: only the files of the newest good step are looked at.
            fault = entry.fault if good is not None else store.examined(entry.path, entry.step).fault
            if fault:
                texts = others if entry.foreign == manifest.NotOurs.kind else faults
                texts.append(f"{entry.path}: {fault}")
            elif good is None:
                good = entry.step, str(entry.path)
        return RootSteps(good, faults, store.tracked(root), others)

    def read(self, folder: Path, worlds: Optional[Mapping[str, int]] = None) -> None:
        """Load the parts of a step from a folder. Collective.

        Args:
            folder: the step's folder, or a copy of it.
            worlds: of `user_state.saved_worlds`, on every rank; None reads them.
        """
        if worlds is None:
            with begin(together.CANNOT_LOAD, "load", self.process_group) as call:
                worlds = call.gather_object(
                    "reading the names of the user's state", None, lambda _: user_state.saved_worlds(folder)
                )
        states = None
        if has_state(self.train_dataloader):
            # Before anything is loaded: an error here must not leave a loaded model.
            states = data_state(folder, self.data_rank, self.data_world, self.on_data, self.trust)
        wanted = self.partial if self.resume_mode == "resume_path" else partial.WHOLE
        names = [name for name in self.state if partial.fits(f"state.{name}", wanted.exclude)]
        objects = user_state.opened(self.state, folder, worlds, self.process_group, names)
        others = others_of(wanted)
        if others or wanted.rename:
            self.engine.load_checkpoint(str(folder), exclude=others, rename=wanted.rename)
        else:
            self.engine.load_checkpoint(str(folder))
        if objects.objects:
            # The engine has set the random generators: the code of objects may draw from them.
            with extra.kept(self.device_kind):
                user_state.load(objects, self.trust, self.process_group)
        if states is not None:
            resume(self.train_dataloader, states, self.at_epoch_end)

    @property
    def shelf(self) -> Shelf:
        """The steps of the root, which remembers what it has listed."""
        if self._listed.root != self.default_local_dir:
            self._listed = Shelf(self.default_local_dir)
        return self._listed

    @property
    def is_watched(self) -> bool:
        """Whether the handler is within `watching()`."""
        return self._watch is not None

    @property
    def device_kind(self) -> str:
        """The type of device that the engine draws random numbers on, as far as that is known."""
        model = getattr(self.engine, "model", None)
        return extra.device_type_of(model) if isinstance(model, nn.Module) else "cpu"

    @property
    def is_data_source(self) -> bool:
        asked = getattr(self.engine, "is_mp_src_rank_with_outputs", None)
        return True if asked is None else bool(asked())

    @property
    def data_rank(self) -> int:
        asked = getattr(self.engine, "get_data_parallel_rank", None)
        if asked is not None:
            return int(asked())
        return together.place_in(self.process_group)[0]

    @property
    def data_world(self) -> int:
        asked = getattr(self.engine, "get_data_parallel_size", None)
        if asked is not None:
            return int(asked())
        return together.place_in(self.process_group)[1]


def others_of(wanted: partial.Partial) -> list[str]:
    """Return the patterns of `exclude` that stand for no objects of `state`."""
    return [pattern for pattern in wanted.exclude if not pattern.startswith("state.")]


def checked_keep(count: object) -> None:
    """Refuse a number of steps to keep that is none.

    Raises:
        ValueError: it is no whole number from 1 on.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"max_ckpt_to_keep={count!r}: keep at least 1, a whole number, or None for all")


def spelled_policy(handler: CheckpointHandler) -> str:
    """Return what a handler keeps as ranks compare it. Never raises."""
    try:
        return str(handler.preservation)
    except Exception as error:
        return f"{type(error).__name__} for {handler.max_ckpt_to_keep!r:.60}"


def log_loaded(steps: RootSteps, skipped: Sequence[str]) -> None:
    """Log what was passed over for the step that was loaded, and where that is."""
    assert steps.good is not None, "it was loaded"
    step, path = steps.good
    log_skipped(skipped, step, steps.tracked)
    if steps.others:
        logger.warning("passed over, as this package did not save it: %s", some(steps.others))
    if is_hidden(path):
        text = "%s is read where it is: a save that replaces %s was killed, or is under way"
        logger.warning(text, path, store.name_given(Path(path)))


def log_skipped(failures: Sequence[str], step: int, tracked: Optional[int]) -> None:
    """Log the steps that were skipped, and a tracker by which other programs would take another step."""
    for failure in failures:
        logger.error("%s; going on from step %d", failure, step)
    if tracked is not None and tracked != step:
        logger.warning("going on from step %d; %s says %d", step, store.TRACKER, tracked)


def is_hidden(path: str) -> bool:
    """Return whether a path is that of a step which lost its name to a save that was to replace it."""
    return store.name_given(Path(path)) != Path(path)


def some(texts: Sequence[str]) -> str:
    """Return the first few of some texts, and how many more there are."""
    return ", ".join(texts[:5]) + (f" and {len(texts) - 5} more" if len(texts) > 5 else "")


def extract_step(path: Folder) -> int:
    """Return the step in a path's global_step_N.

    Args:
        path: a path; the last of its parts that is such a name counts.

    Raises:
        CheckpointingException: the path has none.

    Example:
        >>> from torch_dcp_backport.checkpoint import extract_step
        >>> extract_step("run/global_step_40/actor")
        40
    """
    for part in reversed(Path(path).parts):
        match = store.STEP.fullmatch(part)
        if match is not None:
            return int(match[1])
    raise CheckpointingException(f"{path}: no global_step_N in it")


def get_checkpoint_tracker_filename(root_path: Folder) -> str:
    """Return the path of the file that names the newest step of a root.

    Args:
        root_path: the root of the steps.

    Example:
        >>> from torch_dcp_backport.checkpoint import get_checkpoint_tracker_filename
        >>> get_checkpoint_tracker_filename("run")
        'run/latest_checkpointed_iteration.txt'
    """
    return str(Path(root_path) / store.TRACKER)
