"""The files of an export: written beside the target's files, and published all together or not at all.

Runs on one process; must never talk to other ranks, nor touch files that it did not write or replace.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple, Optional, Union

from torch_dcp_backport.hf._src.companions import ADAPTER_CONFIG, code_of, is_of_a_model, left_by, link_above
from torch_dcp_backport.hf._src.format import nbytes_of
from torch_dcp_backport.hf._src.source import CONFIG, INDEX, SINGLE
from torch_dcp_backport.hf._src.writing import Files
from torch_dcp_backport.publish import disk
from torch_dcp_backport.publish.drafts import InRoom, Move, Room, busy, rename_all
from torch_dcp_backport.transfer import TensorInfo

logger = logging.getLogger("torch_dcp_backport.hf")

#: Weight files of an older export of ours or of transformers, beside those that its index names. Other
#: programs take Mistral's own files, which are beside these, before those of transformers.
WEIGHTS = re.compile(
    r"model(-[0-9a-f]{8})?-\d{5}-of-\d{5}\.safetensors"
    r"|pytorch_model(-\d{5}-of-\d{5})?\.bin|pytorch_model\.bin\.index\.json"
    r"|consolidated(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|consolidated\.\d+\.pth"
    r"|tf_model\.h5|flax_model\.msgpack"
)
#: The weights of an adapter, which its config leads to.
ADAPTER, ADAPTERS = (
    "adapter_model.safetensors",
    (ADAPTER_CONFIG, "adapter_model.safetensors", "adapter_model.bin"),
)
#: What an index may name: a file of another name is a caller's, whatever an old index says.
NAMED = re.compile(r".+\.safetensors|pytorch_model.*\.bin")
#: Keys of config.json about a file or a run, not the model; a key that a config lacks is at its default.
NOT_THE_MODEL = frozenset(("dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache"))


class FileKind(NamedTuple):
    """The names of what is exported."""

    config: str
    #: The file of all weights, where they are in a single one.
    single: str


MODEL_FILES, ADAPTER_FILES = FileKind(CONFIG, SINGLE), FileKind(ADAPTER_CONFIG, ADAPTER)


def weights_in(folder: Path) -> list[str]:
    """Return the weight files of a model in a folder: those that `from_pretrained` reads, or read before."""
    named: set[str] = set()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        listed = map(str, json.loads((folder / INDEX).read_bytes()).get("weight_map", {}).values())
        named.update(name for name in listed if NAMED.fullmatch(name))
    names = os.listdir(folder) if folder.is_dir() else ()
    named |= {SINGLE, INDEX}
    if ADAPTER_CONFIG in names:
        # Whatever else is there, transformers opens the adapter, and the model that its config names.
        named.update(ADAPTERS)
    weights = sorted(name for name in names if name in named or WEIGHTS.fullmatch(name))
    return [name for name in weights if not os.path.isdir(folder / name)]


class ExportDraft(InRoom):
    """An export under way, in a hidden folder: in the target if that is there, else beside it.

    Until `switch` the target is as it was; a process that dies leaves only the hidden folder, which the next
    export into the same target clears away.
    """

    def __init__(
        self,
        target: Path,
        overwrite: bool,
        config: bytes = b"",
        *,
        kind: FileKind = MODEL_FILES,
        keeps_others: bool = False,
    ) -> None:
        """Make the hidden folder.

        Args:
            config: the config.json that the export will have.
            keeps_others: whether all other small files stay; else those that are known to belong to a model
                go with its older weights.

        Raises:
            FileExistsError: the target holds a model, or the config.json of another model, and must stay.
            BlockingIOError: another export into the same target is under way.
            OSError: the folder cannot be made.
        """
        self.kind = kind
        self.keeps_others = keeps_others
        self.overwrite = overwrite
        self.target = target = located(target)
        self.is_new = not os.path.lexists(target)
        if not self.is_new and not target.is_dir():
            raise NotADirectoryError(f"{target} is there, and no folder")
        replaced(target, overwrite, config)
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.parent / f".{target.name}.partial"
        self._beside = beside
        self._config = config
        self.stale: list[str] = []
        self.files = Files({}, 0)
        # A killed export may have left the target's config.json there, which has no other place.
        super().__init__(beside if self.is_new else target / ".partial", target, self._look)
        #: Names of the weight files: readers find the others by the last.
        self._weights: list[str] = []
        #: Names of the small files.
        self._small: list[str] = []
        #: Small files of an older model, and entries of the target that are no model's, once they are known.
        self._old: list[str] = []
        self._others: list[str] = []

    def restore(self) -> None:
        """Leave what was set aside: single files, which `_look` puts back."""

    def _look(self) -> None:
        """Look at the target again, now that no other export changes it."""
        if os.path.lexists(self.target) == self.is_new:
            raise busy(self.target, self.room.path)
        self.stale = replaced(self.target, self.overwrite, self._config)
        if not self.is_new and self._beside.is_dir():
            # Left by an export that died when there was no target; an export under way has it locked.
            with contextlib.suppress(OSError):
                Room(self._beside, self.target).leave()

    def reserve(
        self,
        tensors: Mapping[str, TensorInfo],
        file_bytes: int,
        shapes: Optional[Mapping[str, tuple[int, ...]]] = None,
    ) -> None:
        """Write all headers, and reserve room for all tensors.

        Args:
            shapes: as of `Files`.

        Raises:
            OSError: there is no room, the disk failed.
            ValueError: a dtype that safetensors does not have.
        """
        files = Files(tensors, file_bytes, single=self.kind.single, shapes=shapes)
        if any(name in self.stale for name in files.names) and len(files.names) > 1:
            # Names of its own: the old model stays complete until the new index takes its place.
            files = Files(tensors, file_bytes, os.urandom(4).hex(), shapes=shapes)
        self.files = files
        files.make(self.folder)
        self._weights = files.names
        if len(files.names) > 1:
            total = sum(map(nbytes_of, tensors.values()))
            index = {key: files.places[key][0] for key in tensors}
            value = {"metadata": {"total_size": total}, "weight_map": index}
            disk.write(self.folder / INDEX, json.dumps(value, indent=2).encode())
            self._weights.append(INDEX)

    def add(self, name: str, content: bytes) -> None:
        """Write a small file; its name is a path below the folder.

        Raises:
            FileExistsError: a link in the target leads to a file of another content.
        """
        link = link_above(self.target, name)
        if link is not None and same_content(self.target / name, content):
            return
        if link is not None:
            raise behind(link, name)
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        disk.write(self.folder / name, content)
        self._small.append(name)

    def spare(self) -> None:
        """Leave a caller's small files as they are, unless they are to be replaced. After the last `add`.

        Raises:
            FileExistsError: code that the model runs has the name of another file in the target.
        """
        if self.keeps_others:
            return
        own, spared, changed = code_of(self.folder), list[str](), list[str]()
        for name in self._small:
            there = self.target / name
            if name == self.kind.config or not there.is_file() or same_content(there, self.folder / name):
                continue
            if self.overwrite:
                if name not in own and not is_of_a_model(name):
                    changed.append(name)
                continue
            if name in own:
                raise FileExistsError(
                    f"{there} is not the model's code of this name; Export(overwrite=True) replaces it"
                )
            (changed if is_of_a_model(name) else spared).append(name)
        for name in spared:
            (self.folder / name).unlink()
        self._small = [name for name in self._small if name not in spared]
        if spared:
            what = "left as they were, though the model's folder has others"
            logger.warning("%s: %s: %s", self.target, what, ", ".join(spared))
        if changed:
            logger.warning("%s: replaced by the model's: %s", self.target, ", ".join(changed))

    def sync(self, synced: Collection[str] = ()) -> None:
        """Wait until everything is on the disk.

        Raises:
            OSError: the disk failed.
        """
        self.files.sync()
        super().sync({*synced, *self._weights, *self._small})

    def switch(self) -> None:
        """Put the weights in their place. A new folder appears at once, and complete.

        In an older folder the last rename is that of the file by which readers find the others: the index, or
        `model.safetensors`. If config.json or another small file changes, config.json is taken away before,
        and `finish` puts it back: without it there is no model, but with it new weights would be read with
        old numbers.

        Raises:
            OSError: the folder was changed meanwhile, ...; it is as it was.
        """
        self.files.close()
        if self.is_new:
            self.take_place()
            return
        for name in (*self._weights, *self._small):
            if (self.target / name).is_dir():
                raise IsADirectoryError(f"{self.target / name} is a folder")
            link = link_above(self.target, name)
            if link is not None:
                raise behind(link, name)
            above = (self.target / name).parent
            if os.path.lexists(above) and not above.is_dir():
                raise NotADirectoryError(f"{above} is there, and no folder")
        # Where no model is replaced, a caller may have put a tokenizer there before.
        if self.stale and not self.keeps_others:
            names = {*self._weights, *self._small, *self.stale}
            self._old, self._others = left_by(self.target, names)
        self.aside.mkdir(exist_ok=True)
        moves = [Move(self.folder / name, self.target / name) for name in self._weights]
        config = self.target / self.kind.config
        if self._changed() and config.exists():
            moves.insert(0, Move(config, self.aside / self.kind.config))
        rename_all(moves)

    def finish(self) -> list[str]:
        """Put the small files in their place; return the names of an older model's files that were removed.

        Raises:
            OSError: the folder was changed meanwhile, ...; it has the new weights, and maybe no config.json.
        """
        removed = []
        if self.is_new:
            disk.sync_folder(self.target.parent)
        else:
            disk.sync_folder(self.target)
            removed = [name for name in self.stale if name not in (*self._weights, *self._small)]
            # With two models in a folder readers may take either: files that lead to the old model go first.
            pointers = [name for name in (ADAPTER_CONFIG, SINGLE, INDEX) if name in removed]
            for name in pointers:
                os.unlink(self.target / name)
            changed = self._changed()
            # While there is no config.json: the new model must not be read with the old one's tokenizer.
            for name in self._old:
                self._remove(name)
            for name in changed:
                (self.target / name).parent.mkdir(parents=True, exist_ok=True)
                os.rename(self.folder / name, self.target / name)
            for folder in {self.target, *((self.target / name).parent for name in changed)}:
                disk.sync_folder(folder)
            for name in removed:
                if name not in pointers:
                    os.unlink(self.target / name)
            if self._old:
                logger.warning("%s: removed, of the older model: %s", self.target, ", ".join(self._old))
            if self._others:
                logger.warning("%s: left as they were: %s", self.target, ", ".join(self._others))
        self.leave()
        return removed + self._old

    def _remove(self, name: str) -> None:
        """Remove a small file, and the folders that it was alone in."""
        path = self.target / name
        path.unlink()
        with contextlib.suppress(OSError):
            while path.parent != self.target:
                path = path.parent
                path.rmdir()

    def discard(self) -> None:
        """Remove what was written. Does nothing after `finish`.

        Raises:
            OSError: something cannot be removed.
        """
        self.files.close()
        super().discard()

    def is_old_needed(self) -> bool:
        """Return whether the room alone has a config.json: an export was killed after it was taken away."""
        old = self.aside / self.kind.config
        return not self.is_new and old.is_file() and not os.path.lexists(self.target / self.kind.config)

    def _changed(self) -> list[str]:
        """Return all small files, config.json last, if any is not the same in the target; else none."""
        names = sorted(self._small, key=lambda name: (name == self.kind.config, name))
        if self._old:
            return names
        changed = [name for name in names if not same_content(self.target / name, self.folder / name)]
        return changed and names


def behind(link: Path, name: str) -> FileExistsError:
    return FileExistsError(f"{link} is a link, and an export writes nothing behind it ({name}): remove it")


def located(target: Path) -> Path:
    """Return an absolute path whose folders are no links; its last name may be a link."""
    if target.name in ("", ".."):
        return Path(os.path.realpath(target))
    return Path(os.path.realpath(target.parent)) / target.name


def replaced(target: Path, overwrite: bool, config: bytes = b"") -> list[str]:
    """Return the weight files that an export replaces.

    Raises:
        FileExistsError: there are some, or the config.json of another model, and they must stay.
    """
    stale = weights_in(target)
    if stale and not overwrite:
        raise FileExistsError(f"{target} holds {stale[0]}; Export(overwrite=True) replaces a model")
    if config and not overwrite and (target / CONFIG).is_file():
        # A caller may have put the model's own config.json there before, as transformers writes it.
        other = other_number((target / CONFIG).read_bytes(), config)
        if other:
            what = f"{target} holds the {CONFIG} of another model"
            raise FileExistsError(f"{what}: {other}; Export(overwrite=True) replaces it")
    return stale


def other_number(there: bytes, config: bytes) -> str:
    """Return the differences between two config.json as text; "" where they are of the same model."""
    try:
        present, expected = dict(json.loads(there)), dict(json.loads(config))
        names = (set(present) & set(expected)) - NOT_THE_MODEL
    except (ValueError, TypeError):
        return "it cannot be read"
    differing = [
        f"{name} (expected {expected[name]!r}, got {present[name]!r})"
        for name in sorted(names)
        if present[name] != expected[name] and not name.endswith("_token_id")
    ]
    return ", ".join(differing[:3])


def same_content(path: Path, other: Union[Path, bytes]) -> bool:
    return path.is_file() and path.read_bytes() == (other if isinstance(other, bytes) else other.read_bytes())
