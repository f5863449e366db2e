"""Retention of steps: those older than the newest good steps are hidden, then removed in a thread.

Runs on one rank but for `settle`. Must never remove the only good step, a step that is being uploaded, nor
anything that this package cannot prove to have published.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Optional

from torch_dcp_backport.checkpoint._src import manifest, store, together
from torch_dcp_backport.checkpoint._src.policies import PreservationPolicy
from torch_dcp_backport.checkpoint._src.saves import Background
from torch_dcp_backport.checkpoint._src.store import NOT_LOADED, ListedStep, Shelf
from torch_dcp_backport.dist_checkpointing import CheckpointingException, begin
from torch_dcp_backport.publish import disk
from torch_dcp_backport.transfer import Group

logger = logging.getLogger("torch_dcp_backport.checkpoint")

#: Seconds that a save waits for the removals of the save before.
PATIENCE = 10.0
CANNOT_REMOVE = "cannot remove steps that are not kept"
KEEP, LEAVE, REMOVE = "keep", "left alone", "remove"
PINNED = "pinned"


def keeping(count: Optional[int]) -> Optional[PreservationPolicy]:
    """Return the policy that keeps so many newest steps; None, which keeps all, where there is no number."""
    return PreservationPolicy(last=count) if count is not None and count > 0 else None


class StepVerdict(NamedTuple):
    """What retention does with a step, and why."""

    entry: ListedStep
    #: KEEP, LEAVE or REMOVE.
    action: str
    reason: str


def verdicts(
    listed: Sequence[ListedStep], policy: Optional[PreservationPolicy], fault_of: Callable[[ListedStep], str]
) -> list[StepVerdict]:
    """Return what becomes of each step by a policy.

    Damaged steps among the older are removed, too. Left alone, and never counted, is what this package did
    not publish, or cannot read. Nothing is removed that is newer than the newest good step, nor that step.

    Args:
        listed: newest first.
        policy: None keeps all.
        fault_of: returns why a step does not count as good, or ""; called until enough good steps are found.
    """
    fault_of = functools.lru_cache(maxsize=None)(fault_of)
    best = [] if policy is None else best_of(listed, policy, fault_of)
    last = 0 if policy is None else max(policy.last, 1)
    decided: list[StepVerdict] = []
    good = 0
    for entry in listed:
        action, reason = KEEP, "all are kept"
        if entry.foreign:
            action = LEAVE
            reason = entry.reason if entry.reason == entry.foreign else f"{entry.foreign}: {entry.reason}"
        elif policy is None:
            fault = fault_of(entry)
            reason = f"not counted: {fault}" if fault else reason
        elif good < last:
            if store.is_pinned(entry.path):
                reason = PINNED
            else:
                fault = fault_of(entry)
                good += not fault
                reason = f"not counted: {fault}" if fault else f"{good} of {last}"
        elif policy.every is not None and entry.step % policy.every == 0:
            reason = f"divisible by {policy.every}"
        elif entry.path in best:
            place = f"{best.index(entry.path) + 1} of the best {policy.best}"
            reason = f"{place}, with metric {entry.metric:g}"
        elif store.is_pinned(entry.path):
            # Asked only where it decides: of a run of 10,000 steps that stay, no save looks at each.
            reason = PINNED
        elif store.is_uploading(entry.path):
            reason = "being uploaded"
        else:
            action, reason = REMOVE, removal_of(policy)
        decided.append(StepVerdict(entry, action, reason))
    return decided


def best_of(
    listed: Sequence[ListedStep], policy: PreservationPolicy, fault_of: Callable[[ListedStep], str]
) -> list[Path]:
    """Return the paths of the good steps with the best metrics, the best first."""
    rated = [(entry.metric, entry) for entry in listed if entry.metric is not None and not entry.foreign]
    # Sorting leaves the newest of equal ones first.
    rated.sort(key=lambda pair: pair[0] if policy.mode == "min" else -pair[0])
    good = (entry.path for _, entry in rated if not fault_of(entry))
    return list(itertools.islice(good, policy.best))


def removal_of(policy: PreservationPolicy) -> str:
    """Return why a step is removed."""
    reasons = [f"older than the newest {max(policy.last, 1)} that are good"]
    reasons += [f"not divisible by {policy.every}"] if policy.every is not None else []
    reasons += [f"not of the best {policy.best}"] if policy.best else []
    return ", ".join(reasons)


class Retention:
    """Removes steps while training goes on."""

    def __init__(self) -> None:
        self._background = Background("removal of checkpoints")
        #: Paths of steps that were left alone, and said so.
        self._told: set[Path] = set()
        #: Hidden folders that could not be removed, and the paths that they had.
        self._left: list[tuple[Path, Path]] = []
        #: The hidden folder that is being removed.
        self._doing: Optional[Path] = None

    def retire(
        self,
        shelf: Shelf,
        policy: Optional[PreservationPolicy],
        distrusted: Collection[Path] = (),
        trash: Optional[Path] = None,
    ) -> None:
        """Hide the steps that are not kept, once those hidden before are removed; then remove them.

        Args:
            shelf: the steps of the run.
            policy: the steps that stay; None keeps all.
            distrusted: paths of steps that do not count as good.
            trash: the folder that they are moved into instead.
        """
        if not self.finish(PATIENCE):
            # The other ranks wait for this rank, and for no longer than their group's timeout.
            logger.warning("steps that are not kept are removed more slowly than others are saved")
        if policy is None:
            return

        def fault_of(entry: ListedStep) -> str:
            if entry.path in distrusted:
                return "it could not be loaded"
            return why_distrusted(entry.path) or store.examined(entry.path, entry.step).fault

        left, self._left = self._left, []
        for hidden, final in left:
            self._background.add(functools.partial(self._remove, hidden, final, shelf.root, is_told=True))
        decided = verdicts(shelf.listed(), policy, fault_of)
        self._tell(shelf, [verdict for verdict in decided if verdict.action == LEAVE])
        for entry in [verdict.entry for verdict in decided if verdict.action == REMOVE]:
            try:
                taken = hide(entry, trash)
            except OSError as error:
                # A step that cannot be hidden is no reason to keep the others.
                logger.error("%s", still_there(entry.path, error))
                continue
            if taken is None:
                # Gone, pinned, or saved again: the next save sees which.
                shelf.forget(entry)
            elif trash is not None:
                logger.info("%s is in the trash, as %s", entry.path, taken)
            else:
                self._background.add(functools.partial(self._remove, taken, entry.path, shelf.root))

    def _remove(self, hidden: Path, final: Path, root: Path, is_told: bool = False) -> str:
        """Remove a hidden folder, and its step's folder if that is empty; log once why it could not be."""
        self._doing = hidden
        failure = removed(hidden, final)
        store.remove_empty_parents(final, root)
        if failure:
            # No reason to fail the save: the next save and the next start try again, and a full disk is an
            # error by itself.
            self._left.append((hidden, final))
            if not is_told:
                logger.error("%s", still_there(hidden, failure))
        return ""

    def _tell(self, shelf: Shelf, left: Sequence[StepVerdict]) -> None:
        """Warn of steps that are left alone, each once."""
        new = [verdict for verdict in left if verdict.entry.path not in self._told]
        if new:
            self._told.update(verdict.entry.path for verdict in new)
            paths = [verdict.entry.path.relative_to(shelf.root) for verdict in new[:5]]
            names = [f"{path} ({verdict.reason})" for path, verdict in zip(paths, new)]
            more = f" and {len(new) - 5} more" if len(new) > 5 else ""
            logger.warning(
                "%s: not counted and left alone, as retention removes only what this package published: %s%s",
                shelf.root,
                ", ".join(names),
                more,
            )

    def finish(self, seconds: float) -> bool:
        """Wait until all hidden steps are removed, for so many seconds at most; return whether all are."""
        return self._background.wait(seconds)

    def settle(self, group: Group, timeout: Optional[float] = None) -> None:
        """Wait until all is removed. Collective: ranks with nothing to remove must not time out meanwhile.

        Args:
            timeout: the most seconds of the wait; None waits without end.

        Raises:
            CheckpointingException: steps are not removed by then; the same on every rank.
        """
        waiting = together.Waiting(timeout)

        def is_removed(_: Mapping[int, None]) -> bool:
            is_done = self.finish(waiting.seconds())
            if not is_done and waiting.is_over:
                dropped = self._background.give_up()
                text = f"not removed within {timeout:g} s: {self._doing}"
                more = f", and {dropped} more" if dropped else ""
                raise CheckpointingException(f"{text}{more}; the next start's first save goes on")
            return is_done

        with begin(CANNOT_REMOVE, "save", group) as call:
            is_settled = False
            while not is_settled:
                is_settled = call.gather_object(
                    "removing steps", None, is_removed, so_far="all steps are saved"
                )


def why_distrusted(folder: Path) -> str:
    """Return that a step could not be loaded before, if it could not."""
    return "it could not be loaded" if os.path.lexists(folder / NOT_LOADED) else ""


def distrust(folder: Path, reason: str) -> None:
    """Record, for later processes too, that a step could not be loaded."""
    if os.path.islink(folder):
        # What a link leads to is somebody's, and retention does not count it in any case.
        return
    try:
        disk.publish(folder / NOT_LOADED, reason.encode(errors="backslashreplace"))
    except FileNotFoundError:
        # Retention has removed the step meanwhile.
        return
    except OSError:
        logger.exception("%s: it will be taken for good after a restart", folder)


def believe(folder: Path) -> None:
    """Remove the record that a step could not be loaded, once it was."""
    with contextlib.suppress(OSError):
        (folder / NOT_LOADED).unlink()


def hide(entry: ListedStep, trash: Optional[Path] = None) -> Optional[Path]:
    """Hide a step, and return its new name; None where it is gone, or stays.

    It stays while it is being uploaded, and if it is no longer what was listed: another process pinned it, or
    saved the step again, which makes it the newest; or its manifest was damaged.

    Args:
        entry: the step.
        trash: the folder that it is moved into; None hides it where it is.
    """
    hiding = store.hide(entry.path, functools.partial(is_as_listed, entry), trash)
    if hiding.why:
        logger.warning("%s stays: it %s", entry.path, hiding.why)
    return hiding.hidden


def is_as_listed(entry: ListedStep, path: Path) -> bool:
    """Return whether a step, now at `path`, is still the save that it was listed as."""
    now = store.listed_of(path, entry.step)
    return (now.identity, now.foreign) == (entry.identity, entry.foreign)


def removed(hidden: Path, final: Path) -> str:
    """Remove a hidden folder that was at `final`; return why it could not be removed, or ""."""
    disk.step(f"remove {hidden.name}")
    return next(iter(store.removed(hidden, final)), "")


def still_there(folder: Path, reason: object) -> str:
    return f"a step that is not kept still takes its room on the disk: {folder}: {reason}"


def remove(entry: ListedStep, trash: Optional[Path] = None) -> str:
    """Hide a step, and remove it, unless it goes to the trash; return why it could not be removed, or ""."""
    try:
        hidden = hide(entry, trash)
    except OSError as error:
        return f"{entry.path}: {error}"
    failure = "" if hidden is None or trash is not None else removed(hidden, entry.path)
    return failure and f"{hidden}: {failure}"


def prune(
    root: Path,
    policy: PreservationPolicy,
    report: Callable[[StepVerdict], None],
    is_dry: bool = False,
    trash: Optional[Path] = None,
) -> list[str]:
    """Remove the steps that retention would, and report every step; return why some could not be removed.

    A step counts as good once all its bytes were read. What killed processes and failed removals left in the
    root is removed first, as a start does.
    """

    def fault_of(entry: ListedStep) -> str:
        step = store.examined(entry.path, entry.step)
        if step.fault or step.manifest is None:
            return step.fault
        return why_distrusted(entry.path) or next(manifest.wrong_checksums(step.path, step.manifest), "")

    shelf = Shelf(root)
    failures = [] if is_dry else shelf.clean()
    for verdict in verdicts(shelf.listed(), policy, fault_of):
        report(verdict)
        if verdict.action == REMOVE and not is_dry:
            failures.append(remove(verdict.entry, trash))
    return [failure for failure in failures if failure]
