"""Checkpoints on the nodes' own disks or memory, each rank's part also at a rank of another node.

A resume takes the newest step of which every rank's part is whole at home or at a peer. Collective. Must
never use a part whose bytes are not those of its manifest, nor open a device's communicator for copies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import secrets
import socket
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import torch

from torch_dcp_backport.checkpoint._src import copies, manifest, node_folder, store
from torch_dcp_backport.checkpoint._src.manifest import BadManifest, Manifest
from torch_dcp_backport.checkpoint._src.node_folder import Contents, NodeFolder, Part
from torch_dcp_backport.checkpoint._src.together import CANNOT_LOAD, CANNOT_SAVE, Writing
from torch_dcp_backport.dist_checkpointing import (
    CheckpointingException,
    Loading,
    LoadOptions,
    OpenFiles,
    SaveOptions,
    ShardedObject,
    begin,
)
from torch_dcp_backport.dist_checkpointing.core import SHARDED, Folder
from torch_dcp_backport.dist_checkpointing.serialization import open_alone, saving
from torch_dcp_backport.dist_checkpointing.state_dict_utils import mapped, split
from torch_dcp_backport.dist_checkpointing.training_state import described, restored_of
from torch_dcp_backport.dist_checkpointing.validation import StrictHandling
from torch_dcp_backport.publish.drafts import OWNER, discarding
from torch_dcp_backport.transfer import (
    Attempt,
    BrokenLink,
    Call,
    Group,
    Link,
    Meter,
    Problem,
    Refusal,
    fail,
    settings,
    spell,
    warn_once,
)

logger = logging.getLogger("torch_dcp_backport.checkpoint")

ON_FAILURE = ("raise", "warn")
#: The most bytes of one message of a copy.
BLOCK = 8 * 2**20
#: So many texts of parts that are not whole go into an error or the log.
SHOWN = 5
ELSEWHERE = "load from the shared folder"


#: A part that is not what was saved: (the rank that saved it, the save, the node).
Torn = tuple[int, str, str]


class Copied(NamedTuple):
    """A copy to be made: ranks by their places in the group."""

    source: int
    target: int
    #: The rank that saved the part.
    owner: int


class Choice(NamedTuple):
    """A save that can be loaded: every rank's part is on some node."""

    step: int
    save: str
    #: The ranks whose part is not on their own node -> a node that has a copy.
    away: Mapping[int, str]


class Found(NamedTuple):
    """What the nodes have together."""

    choice: Optional[Choice]
    #: Newer saves, and why they cannot be loaded; and folders that are no parts.
    passed_over: Sequence[str]
    #: Why nothing older may be loaded in the place of a newer save; "" where nothing speaks against it.
    refused: str = ""
    #: The step of that save.
    refused_step: int = 0


class NearbyStep(NamedTuple):
    """The outcome of a load.

    Args:
        step: the step that was loaded.
        state: the state dict that was passed, its tensors filled in place, with the saved other values.
        copied_from: the node whose copy of this rank's part was taken; "" where the part was at home.
    """

    step: int
    state: Any
    copied_from: str = ""


class NearbyCheckpoints:
    """Steps of a training on the nodes themselves, for frequent saves and quick resumes.

    Each rank saves its own part into a folder of its node, and a copy of it on the next node. They load on as
    many ranks, with the same layout, as saved them: save to a shared folder as well, now and then.

    Example:
        >>> import torch
        >>> from torch_dcp_backport.checkpoint import NearbyCheckpoints
        >>> nearby = NearbyCheckpoints("node", run="a", keep=2)
        >>> weight = torch.arange(3.0)
        >>> nearby.save({"weight": weight, "seen": 640}, step=10)
        True
        >>> nearby.latest()
        10
        >>> state = {"weight": torch.zeros(3)}
        >>> loaded = nearby.load(state)
        >>> loaded.step, loaded.state["seen"], state["weight"]
        (10, 640, tensor([0., 1., 2.]))
    """

    def __init__(
        self,
        folder: Folder,
        *,
        run: str,
        ranks_per_node: Optional[int] = None,
        node: Optional[str] = None,
        replicas: int = 1,
        keep: int = 2,
        on_failure: str = "raise",
        trust: bool = False,
        timeout: float = 600.0,
        process_group: Group = None,
    ) -> None:
        """Remember where to save. Not collective.

        Args:
            folder: a folder of this node, such as one in /dev/shm or on a local disk; ranks of one node have
                the same one, and ranks of two nodes must not see each other's.
            run: the name of the training, the same on every rank and after each restart. A folder with parts
                of another run is refused.
            ranks_per_node: the number of ranks in a row that are one node; by default ranks with the same
                `node` are.
            node: the name of this rank's node; by default the name of the host.
            replicas: the number of other nodes that get a copy of each part, the next ones in the order of
                their first ranks; 0 for none.
            keep: how many whole steps stay on the nodes. A save needs room for `keep` + 1.
            on_failure: the outcome of a save that fails: "raise", an error on every rank; or "warn", an error
                in the log, and False in the place of True.
            trust: take objects of any class, which runs what the files say; else the save refuses them.
            timeout: the most seconds that a copy may stand still.
            process_group: the ranks that save and load together, by any backend; None is the default group.

        Raises:
            ValueError: an option has no such value.
        """
        for name, value, least in (
            ("ranks_per_node", 1 if ranks_per_node is None else ranks_per_node, 1),
            ("replicas", replicas, 0),
            ("keep", keep, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r}: expected a whole number from {least} on")
        if not isinstance(run, str) or not run:
            raise ValueError(f"run={run!r}: expected a name")
        if on_failure not in ON_FAILURE:
            raise ValueError(f"on_failure={on_failure!r}: expected {' or '.join(ON_FAILURE)}")
        if ranks_per_node is not None and node is not None:
            raise ValueError(f"ranks_per_node={ranks_per_node} and node={node!r}: give one of them")
        if not timeout > 0:
            raise ValueError(f"timeout={timeout!r}: expected seconds")
        # Absolute: the working directory may be another when a step is saved.
        self.folder = Path(folder).absolute()
        self.run = run
        self.ranks_per_node = ranks_per_node
        self.node = node
        self.replicas = replicas
        self.keep = keep
        self.on_failure = on_failure
        self.trust = trust
        self.timeout = timeout
        self.process_group = process_group
        self._here = NodeFolder(self.folder, run)
        #: Node -> its ranks, by their places in the group; empty before the first call.
        self._nodes: Mapping[str, Sequence[int]] = {}
        #: Whether all ranks have the same options.
        self._is_configured = False
        #: Whether a save has removed what killed processes left.
        self._is_cleaned = False
        #: Connections to other ranks, kept from call to call.
        self._links: dict[tuple[int, int], Link] = {}
        #: The last save, while its copies are not whole.
        self._incomplete = ""
        #: Saves that the next one gives up before it writes: not published by all ranks, or in its way.
        self._given_up: set[str] = set()
        #: Saves of which a part was torn where no copy was whole: they count for none of the steps kept.
        self._distrusted: set[str] = set()

    def save(self, state: Mapping[str, Any], step: int) -> bool:
        """Save this rank's part of a step, and copy it to a peer. Collective.

        Args:
            state: nested dicts and lists of tensors, DTensors, ShardedTensors and ShardedObjects, of which
                this rank's own part is saved, and of any other values.
            step: the number of the step; the same on every rank.

        Returns:
            Whether every part and every copy is whole; False only with `on_failure="warn"`.

        Raises:
            CheckpointingException: the same on every rank, also where a folder has parts of another run. The
                steps before are as they were.
        """
        try:
            with begin(CANNOT_SAVE, "save", self.process_group) as call:
                try:
                    self._save(call, state, step)
                except BaseException:
                    # The other end may be in the middle of a copy.
                    self._close_links()
                    raise
        except CheckpointingException as error:
            # Ranks that differ in on_failure would differ in the outcome.
            if self.on_failure == "raise" or not error.is_agreed or not self._is_configured:
                raise
            logger.error("the training goes on without it: %s", error)
            return False
        return True

    def latest(self) -> Optional[int]:
        """Return the newest step that the nodes have together; None where they have none. Collective.

        Sizes of files are compared, and no checksums: a load may find that it has to take an older step.

        Raises:
            CheckpointingException: a folder cannot be read, or has parts of another run; ranks differ; the
                same on every rank.
        """
        with begin(CANNOT_LOAD, "load", self.process_group) as call:
            found = self._found(call)
            if call.is_first and found.refused:
                logger.warning("%s", found.refused)
        return None if found.choice is None else found.choice.step

    def load(self, state: Mapping[str, Any], *, newer_than: Optional[int] = None) -> Optional[NearbyStep]:
        """Load the newest step of which every rank's part is whole on some node. Collective.

        A part that is not at home is brought there from a peer first. Nothing is written into the state
        before every rank has its part, and has compared it with the state.

        Args:
            state: as for `save`; its tensors are written in place.
            newer_than: the step that was loaded from a shared folder, the same on every rank: where the
                newest whole step here is not above it, nothing is loaded.

        Returns:
            None where the nodes have no such step.

        Raises:
            CheckpointingException: the newest step was saved by another number of ranks, or with another
                layout; a folder has parts of another run; parts cannot be brought; the same on every rank.
        """
        with begin(CANNOT_LOAD, "load", self.process_group) as call:
            try:
                choice = self._brought(call, newer_than)
            except BaseException:
                self._close_links()
                raise
            if choice is None:
                return None
            place = self._here.place_of(position(call), choice.save) / SHARDED
            with OpenFiles(place) as files:
                loading = call.attempt(self._opened, call, files, state)
                so_far = f"nothing was changed; {ELSEWHERE}"
                call.barrier("comparing the state with what was saved", so_far=so_far)
                loaded = loading.value.read()
        copied_from = choice.away.get(position(call), "")
        return NearbyStep(choice.step, restored_of(state, loaded), copied_from)

    # --- the nodes ---

    def _introduced(self, call: Call) -> None:
        """Agree on the nodes and their folders; in the first call alone."""
        if self._nodes:
            return
        own = position(call)
        name = self.node or socket.gethostname()
        if self.ranks_per_node is not None:
            name = f"node {own // self.ranks_per_node}"
        common = {"ranks_per_node": str(self.ranks_per_node), **self._settings()}
        nodes: Mapping[str, Sequence[int]] = call.gather_object(
            "looking at the nodes",
            (name, str(self.folder)),
            lambda said: nodes_of(list(said.values())),
            must_agree=common,
        )
        self._is_configured = True
        if len(nodes) == 1 and call.is_first and self.replicas:
            warn_once(
                logger,
                f"all ranks are on one node ({name}): no part is copied, and none outlives the node",
            )
        elif self.replicas >= len(nodes) > 1:
            what, expected = "too few nodes", f"at least {self.replicas + 1}"
            call.problems.append(Problem(what, f"replicas={self.replicas}", str(len(nodes)), expected))
        is_leader, token = own == nodes[name][0], secrets.token_hex(8)
        with call.guard():
            if is_leader:
                # A folder that is another run's is not touched, nor is any other node's then.
                self._here.contents()
        call.barrier("looking into the folders")
        # Ranks that see a folder of another node's would keep both copies of a part on one disk.
        with call.guard(str(self.folder)):
            if is_leader:
                self._here.sign(name, token)
        tokens = call.all_gather_object("signing the folders", (name, token) if is_leader else None)
        leader = call.ranks[nodes[name][0]]
        others = {said[1]: said[0] for said in tokens.values() if said is not None and said[0] != name}
        with call.guard(str(self.folder)):
            for other in self._here.signed_by(list(others)) if is_leader else ():
                what = "two nodes have the same folder, which must be each node's own"
                call.problems.append(Problem(what, str(self.folder), f"{name} and {others[other]}"))
            if not self._here.signed_by([tokens[leader][1]]):
                what = f"not the folder that rank {leader} of the same node, {name}, has under this name"
                call.problems.append(Problem(what, str(self.folder)))
        call.barrier("comparing the folders")
        self._nodes = nodes

    def _settings(self) -> dict[str, str]:
        return {
            "run": self.run,
            "replicas": str(self.replicas),
            "keep": str(self.keep),
            "on_failure": self.on_failure,
            "trust": str(self.trust),
        }

    def _is_leader(self, call: Call) -> bool:
        """Whether this rank is the first of its node: it alone lists the folder and removes from it."""
        return any(ranks[0] == position(call) for ranks in self._nodes.values())

    # --- a save ---

    def _save(self, call: Call, state: Mapping[str, Any], step: int) -> None:
        self._introduced(call)
        own = position(call)
        asked = call.attempt(lambda: (store.checked_step(step), settings.staging_bytes()))
        common = call.attempt(lambda known: {"step": str(known[0]), **self._settings()}, asked)
        leading = self._here if self._is_leader(call) else None
        # The other ranks of a node write once they have heard of the beginning.
        if leading is not None and not self._is_cleaned:
            with call.guard(str(self.folder)):
                leading.clean()
                self._is_cleaned = True
        self._give_up(leading)
        order = call.attempt(lambda: 1 if leading is None else leading.contents().next_order)
        numbers = call.attempt(lambda known, next_order: (known[1], next_order), asked, order)

        def named_save(numbers_by_rank: Mapping[int, tuple[int, int]]) -> tuple[str, int, int]:
            budgets, orders = zip(*numbers_by_rank.values())
            return f"step_{asked.value[0]}.{secrets.token_hex(4)}", max(orders), min(budgets)

        save, newest, budget = call.gather_object("beginning to save", numbers, named_save, must_agree=common)
        so_far = f"step {step} was not saved nearby; the steps before are as they were"
        place = self._here.place_of(own, save)
        content = Manifest(asked.value[0], len(call.ranks), time.time(), newest, {})
        written = call.attempt(self._written, place, own, content, state)
        with contextlib.ExitStack() as stack:
            if written.error is None:
                stack.enter_context(discarding(written.value[0]))
            # Where the disks have no room beside an incomplete save, none after it could be written.
            self._given_up = {self._incomplete} - {""}
            call.barrier("writing", so_far=so_far)
            self._given_up = {save}
            with call.guard(place.name):
                store.publish(*written.value)
            call.barrier("publishing", so_far=so_far)
        # Whole or not, the save before it is no longer the newest at home.
        self._given_up = {self._incomplete} - {""}
        self._give_up(leading)
        self._incomplete = save
        wanted = [Copied(source, target, source) for source, target in peers(self._nodes, self.replicas)]
        broken = list[str]()
        for error in self._copy(call, wanted, save, save, block_of(budget, wanted)).values():
            if isinstance(error, BrokenLink):
                broken.append(str(error))
            else:
                call.record(call.problem_of(error, save), error)
        so_far = f"step {step} is on the ranks' own nodes alone: not all copies of it are whole"
        held = call.attempt(self._here.saves_of, own)

        def oldest_kept(held_by_rank: Mapping[int, Any]) -> int:
            refuse_broken({rank: texts for rank, (_, texts) in held_by_rank.items()})
            # A save that was killed has parts on some ranks alone: it counts for none of the steps kept.
            whole = set.intersection(*(set(saves) for saves, _ in held_by_rank.values()))
            good = [(order, save) for order, save in whole if save not in self._distrusted]
            kept = sorted(good, reverse=True)[: self.keep]
            return kept[-1][0] if len(kept) == self.keep else 0

        own_saves = call.attempt(lambda saves: (saves, broken), held)
        oldest = call.gather_object("copying", own_saves, oldest_kept, so_far=so_far)
        self._incomplete = ""
        if leading is not None:
            told(leading.retire(before=oldest))

    def _give_up(self, leading: Optional[NodeFolder]) -> None:
        """Remove the parts of saves that are to be given up.

        Args:
            leading: the folder, on the rank that removes from it.
        """
        if leading is not None:
            for save in self._given_up:
                told(leading.give_up(save))
        if self._incomplete in self._given_up:
            self._incomplete = ""
        self._given_up = set()

    def _written(
        self, place: Path, owner: int, content: Manifest, state: Mapping[str, Any]
    ) -> tuple[store.StepDraft, set[str]]:
        """Write this rank's part into a draft; return it, and the files that are on disk."""
        draft = store.StepDraft(place)
        with discarding(draft), draft.explaining():
            writing = Writing(draft.folder, "")
            # First: it proves whose the draft is, if this process is killed.
            writing.write(
                draft.folder / node_folder.PART,
                node_folder.described(owner, place.name, content.world, self.run),
            )
            path = draft.folder / SHARDED
            writing.make_folder(path)
            options = SaveOptions(
                validate_access_integrity=False,
                must_load=not self.trust,
                is_alone=True,
                written=functools.partial(writing.note, path),
            )
            with saving(path, options) as part:
                part.set(self._own_part(state))
            files = writing.noted()
            synced = set(files)
            for name in manifest.paths_in(draft.folder):
                if name not in files and name != OWNER:
                    files[name] = manifest.entry_of(draft.folder / name)
            manifest.write(draft.folder, dataclasses.replace(content, files=files))
        return draft, synced

    def _own_part(self, state: Mapping[str, Any]) -> Any:
        """Return a state with the parts that this rank has, each as the only one of its kind.

        Raises:
            CheckpointingException: two tensors have the same key, and only one of them could be saved.
        """

        def main(leaf: Any) -> Any:
            return dataclasses.replace(leaf, replica_id=0) if isinstance(leaf, ShardedObject) else leaf

        part = mapped(described(state, self.process_group), main)
        known: dict[tuple[object, ...], torch.Tensor] = {}
        for tensor in split(part).tensors:
            if tensor.data is not None and tensor.data.numel():
                run = tensor.flattened_range
                place = tensor.key, tensor.global_offset, None if run is None else run.start
                if known.setdefault(place, tensor.data).data_ptr() != tensor.data.data_ptr():
                    raise CheckpointingException(f"two tensors of one rank have the key {tensor.key}")
        return part

    # --- copies ---

    def _copy(
        self,
        call: Call,
        wanted: Sequence[Copied],
        save: str,
        name: str,
        block: int,
        is_load: bool = False,
    ) -> dict[Copied, Exception]:
        """Make this rank's copies, all at the same time; return the errors.

        Args:
            name: of the connections that are not open yet; the same on every rank.
            is_load: as of `copies.take`.
        """
        own, failed = position(call), dict[Copied, Exception]()
        # One after the other: a rank that waits for one end in the store could not offer another meanwhile.
        for copy in in_turns(wanted):
            if own in (copy.source, copy.target):
                try:
                    self._connect(call, copy, name)
                except Exception as error:
                    failed[copy] = error

        def make(copy: Copied) -> None:
            place, link = self._here.place_of(copy.owner, save), self._links[ends_of(call, copy)]
            try:
                if copy.source == own:
                    copies.give(link, place, block, Meter("copy", settings.progress()))
                else:
                    copies.take(link, place, copy.owner, self.run, block, is_load)
            except Exception as error:
                failed[copy] = error

        mine = [copy for copy in wanted if own in (copy.source, copy.target) and copy not in failed]
        if mine:
            # No thread sees the process group: each has a connection of its own.
            with ThreadPoolExecutor(len(mine)) as pool:
                list(pool.map(make, mine))
        return failed

    def _connect(self, call: Call, copy: Copied, name: str) -> None:
        ends = ends_of(call, copy)
        if ends not in self._links:
            self._links[ends] = Link(name, *ends, self.timeout)

    def _close_links(self) -> None:
        for link in self._links.values():
            link.close()
        self._links = {}

    # --- a load ---

    def _found(
        self, call: Call, torn: Collection[Torn] = (), newer_than: Union[Attempt[int], int, None] = None
    ) -> Found:
        """Return what the nodes have together, but for parts that are known to be torn."""
        self._introduced(call)
        leads = self._is_leader(call)
        contents = call.attempt(lambda: self._here.contents() if leads else None)
        common = call.attempt(lambda known: {"newer_than": str(known), **self._settings()}, newer_than)

        def found_on_nodes(contents_by_rank: Mapping[int, Any]) -> Found:
            leaders = {node: call.ranks[ranks[0]] for node, ranks in self._nodes.items()}
            by_node = {node: contents_by_rank[rank] for node, rank in leaders.items()}
            return found_in(by_node, self._nodes, torn)

        return call.gather_object("looking for steps", contents, found_on_nodes, must_agree=common)

    def _brought(self, call: Call, newer_than: Optional[int]) -> Optional[Choice]:
        """Return the newest save of which every rank has its whole part at home now.

        None where there is none, or its step is not above `newer_than`: a save before it does not count.
        """
        torn, texts = set[Torn](), list[str]()
        least = None if newer_than is None else call.attempt(checked_bound, newer_than)
        while True:
            found = self._found(call, torn, least)
            step = found.refused_step if found.choice is None else found.choice.step
            is_old = least is not None and step <= least.value
            if found.refused and not is_old:
                fail(call, [(call.ranks[0], Problem(found.refused))])
            if found.choice is None or is_old:
                texts += found.passed_over
                if call.is_first and texts:
                    than = "" if least is None else f" and above step {least.value}"
                    logger.warning("no step is whole on the nodes together%s: %s", than, some(texts))
                return None
            new = self._torn(call, found.choice)
            if not new:
                self._distrusted.update(save for _, save, _ in torn if save != found.choice.save)
                if call.is_first:
                    tell(found, [*texts, *found.passed_over])
                return found.choice
            texts += [f"{save}: the part of rank {owner} on {node} is torn" for owner, save, node in new]
            torn.update(new)
            self._close_links()

    def _torn(self, call: Call, choice: Choice) -> Sequence[Torn]:
        """Bring the parts that are not at home, and read the others; return those that are torn, on any rank.

        Raises:
            CheckpointingException: a part cannot be brought, though it is whole.
        """
        own, torn, broken = position(call), list[Torn](), list[str]()
        if own not in choice.away:
            place = self._here.place_of(own, choice.save)
            try:
                if next(manifest.wrong_checksums(place, manifest.read(place)), ""):
                    torn.append((own, choice.save, home_of(self._nodes, own)))
            except BadManifest:
                torn.append((own, choice.save, home_of(self._nodes, own)))
        wanted = [
            Copied(holder_of(self._nodes, node, owner), owner, owner) for owner, node in choice.away.items()
        ]
        budget = call.attempt(settings.staging_bytes)
        name, least = call.gather_object(
            "bringing parts home", budget, lambda budgets: (secrets.token_hex(4), min(budgets.values()))
        )
        block = block_of(least, wanted)
        for copy, error in self._copy(call, wanted, choice.save, name, block, is_load=True).items():
            if isinstance(error, BrokenLink):
                # The other end knows why, unless it is gone.
                broken.append(str(error))
            elif isinstance(error, BadManifest) or (copy.source == own and isinstance(error, OSError)):
                torn.append((copy.owner, choice.save, choice.away[copy.owner]))
            else:
                call.record(call.problem_of(error, choice.save), error)

        def torn_anywhere(said_by_rank: Mapping[int, tuple[list[Torn], list[str]]]) -> list[Torn]:
            every = [entry for said, _ in said_by_rank.values() for entry in said]
            if not every:
                refuse_broken({rank: texts for rank, (_, texts) in said_by_rank.items()})
            return sorted(set(every))

        return call.gather_object("comparing the parts", (torn, broken), torn_anywhere)

    def _opened(self, call: Call, files: OpenFiles, state: Mapping[str, Any]) -> Loading:
        """Compare this rank's part with a state; the problems are the call's."""
        opened, parts = open_alone(files.folder), split(self._own_part(state))
        options = LoadOptions(validate_access_integrity=False, trust=self.trust)
        loading = Loading(call, opened, files, parts, StrictHandling.RAISE_ALL, options)
        own = loading.described()
        try:
            loading.unfold(loading.decided({call.rank: own})[1])
        except Refusal as refusal:
            call.problems += [problem for _, problem in refusal.findings]
        return loading


def checked_bound(newer_than: object) -> int:
    """Return the step that a load has to be above.

    Raises:
        ValueError: it is no step.
    """
    try:
        return store.checked_step(newer_than)
    except ValueError:
        raise ValueError(f"newer_than={newer_than!r}: expected a whole number from 0 on") from None


def position(call: Call) -> int:
    """Return this rank's place in the group."""
    return call.ranks.index(call.rank)


def nodes_of(said: Sequence[tuple[str, str]]) -> dict[str, list[int]]:
    """Return node -> its ranks, in the order of their first ranks.

    Args:
        said: (node, folder) of each rank, by its place in the group.

    Raises:
        Refusal: ranks of one node have different folders.
    """
    nodes: dict[str, list[int]] = {}
    for rank, (node, folder) in enumerate(said):
        ranks = nodes.setdefault(node, [])
        ranks.append(rank)
        expected = said[ranks[0]][1]
        if folder != expected:
            what = f"another folder than rank {ranks[0]} of the same node, {node}"
            raise Refusal([(rank, Problem(what, "folder", folder, expected))])
    return nodes


def peers(nodes: Mapping[str, Sequence[int]], replicas: int) -> list[tuple[int, int]]:
    """Return (rank, the rank that gets a copy of its part): at the same place on each of the next nodes.

    On a node with fewer ranks, some get several. On a single node there are none.
    """
    order = list(nodes.values())
    return [
        (rank, following[place % len(following)])
        for number, ranks in enumerate(order)
        for shift in range(1, min(replicas, len(order) - 1) + 1)
        for following in [order[(number + shift) % len(order)]]
        for place, rank in enumerate(ranks)
    ]


def in_turns(wanted: Sequence[Copied]) -> list[Copied]:
    """Return copies in the order in which all ranks open their connections, one at a time.

    In each turn a rank has one at most, so that no rank waits for a long row of others.
    """
    busy, turns = dict[int, set[int]](), dict[Copied, int]()
    for copy in wanted:
        taken = busy.setdefault(copy.source, set()), busy.setdefault(copy.target, set())
        turn = next(turn for turn in itertools.count() if not any(turn in others for others in taken))
        for others in taken:
            others.add(turn)
        turns[copy] = turn
    return sorted(wanted, key=lambda copy: turns[copy])


def ends_of(call: Call, copy: Copied) -> tuple[int, int]:
    """Return the global ranks of the source and the target."""
    return call.ranks[copy.source], call.ranks[copy.target]


def home_of(nodes: Mapping[str, Sequence[int]], rank: int) -> str:
    return next(node for node, ranks in nodes.items() if rank in ranks)


def holder_of(nodes: Mapping[str, Sequence[int]], node: str, owner: int) -> int:
    """Return the rank of a node that sends a part to its owner; the ranks of a node share the work."""
    place = list(nodes[home_of(nodes, owner)]).index(owner)
    return nodes[node][place % len(nodes[node])]


def found_in(
    by_node: Mapping[str, Contents], nodes: Mapping[str, Sequence[int]], torn: Collection[Torn] = ()
) -> Found:
    """Return the newest save of which every part is on some node.

    Args:
        by_node: what each node's folder has.
        torn: parts that are not taken.
    """
    world = sum(map(len, nodes.values()))
    home = {rank: node for node, ranks in nodes.items() for rank in ranks}
    holders: dict[str, dict[int, list[str]]] = {}
    example: dict[str, Part] = {}
    for node, contents in by_node.items():
        for part in contents.parts:
            if (part.owner, part.save, node) not in torn:
                example[part.save] = part
                holders.setdefault(part.save, {}).setdefault(part.owner, []).append(node)
    passed_over: list[str] = []
    faults = [f"{node}: {fault}" for node, contents in by_node.items() for fault in contents.faults]
    for save in sorted(holders, key=lambda save: (example[save].order, save), reverse=True):
        part, places = example[save], holders[save]
        if part.world != world:
            what = f"step {part.step} was saved nearby by {part.world} ranks, and {world} ranks are here"
            refused = f"{what}: a part loads on its own rank alone; {ELSEWHERE}"
            return Found(None, passed_over, refused, part.step)
        absent = [rank for rank in home if rank not in places]
        if absent:
            passed_over.append(f"{save}: no node has a whole part of {spell(absent)}")
            continue
        away = {rank: places[rank][0] for rank, node in home.items() if node not in places[rank]}
        return Found(Choice(part.step, save, away), [*passed_over, *faults])
    return Found(None, [*passed_over, *faults])


def block_of(budget: int, wanted: Sequence[Copied]) -> int:
    """Return the bytes of one message: the buffers of any rank's copies together fit into a budget."""
    ends = Counter(rank for copy in wanted for rank in (copy.source, copy.target))
    return max(min(budget // max(ends.values(), default=1), BLOCK), 1)


def refuse_broken(texts_by_rank: Mapping[int, Sequence[str]]) -> None:
    """Raise the broken connections of all ranks, where no rank knows a better reason.

    Raises:
        Refusal: there are some.
    """
    findings = [(rank, Problem(text)) for rank, texts in texts_by_rank.items() for text in texts]
    if findings:
        raise Refusal(findings)


def tell(found: Found, passed_over: Sequence[str]) -> None:
    """Log which step is taken, which newer ones are not, and whose parts come from which node."""
    choice = found.choice
    assert choice is not None, "it was found"
    if passed_over:
        logger.warning("going on from step %d; passed over: %s", choice.step, some(passed_over))
    for node in dict.fromkeys(choice.away.values()):
        ranks = [rank for rank, other in choice.away.items() if other == node]
        text = "step %d: %s had no whole part at home; the copies on %s were taken"
        logger.warning(text, choice.step, spell(ranks), node)


def told(failures: Sequence[str]) -> None:
    """Log what could not be removed: no reason to fail a save."""
    for failure in failures:
        logger.error("a part of a step still takes its room on the disk: %s", failure)


def some(texts: Sequence[str]) -> str:
    """Return the first few of some texts, and how many more there are."""
    more = f"; and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return "; ".join(texts[:SHOWN]) + more
