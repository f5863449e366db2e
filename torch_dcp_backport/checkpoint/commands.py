"""The commands `checkpoint list | prune ROOT`, `pin | unpin | inspect | verify DIR` and `export DIR OUT`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Optional

import torch

from torch_dcp_backport.checkpoint._src import difference, exporting, manifest, retention, store
from torch_dcp_backport.checkpoint._src.exporting import export_checkpoint
from torch_dcp_backport.checkpoint._src.manifest import Manifest
from torch_dcp_backport.checkpoint._src.policies import MODES, PreservationPolicy
from torch_dcp_backport.checkpoint._src.retention import StepVerdict
from torch_dcp_backport.checkpoint._src.store import Step
from torch_dcp_backport.dist_checkpointing import CheckpointingException, inspection
from torch_dcp_backport.dist_checkpointing.core import CONFIG_FNAME, SHARDED
from torch_dcp_backport.hf import Export
from torch_dcp_backport.transfer import Line, Meter, configure, settings

CODES = "exit codes: 0 fine; 1 no good step, or one that cannot be removed; 2 wrong usage"
LISTS = """\
List the steps of a run, newest first: complete, or why not, and where uploaded. By default files are compared
with the manifest by their sizes alone; --verify reads all of them, and compares their checksums.
"""
PRUNES = """\
Remove all but the newest good steps of a run, and say of each step what becomes of it and why. Every byte of
what is to stay is read. What this package did not publish, or cannot read, is left alone and never counted.
What killed processes and failed removals left is removed first, and a step that lost its name put back.
"""
#: The options of these commands, and of `convert`, that take the argument behind them.
WITH_VALUE = (
    *("--keep", "--every", "--best", "--mode", "--trash"),
    *("--like", "--dtype", "--adapter", "--adapter-config", "--adapter-name", "--file-size", "--ep"),
)
#: Arguments that argparse takes for no option, in spite of their first letter.
NO_OPTION = re.compile(r"-|-\d+|-\d*\.\d+|-[^=]* .*", re.DOTALL)
#: Bytes that a shell gets as numbers where a word has one that a terminal does not show.
AS_NUMBERS = frozenset(range(256)) - frozenset(range(32, 127)) | frozenset(b"\\'!")
EXPORT_CODES = "exit codes: 0 fine; 1 damaged, no model, or no room for it; 2 wrong usage"


def list_steps(argv: list[str], prog: str) -> int:
    """Run `checkpoint list`."""
    parser = argparse.ArgumentParser(prog=prog, description=LISTS, epilog=CODES)
    parser.add_argument("root", metavar="ROOT", type=Path)
    parser.add_argument("--verify", action="store_true", help="read every file, and compare its checksum")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    args = parser.parse_args(argv)
    if refused_step(prog, argv, args.root):
        return 1
    steps = store.steps_in(args.root)
    nothing = f"no steps in {args.root}" if os.path.isdir(args.root) else f"there is no folder {args.root}"
    if args.verify:
        meter = Meter("verify", settings.progress() or Line())
        meter.expect(lambda: sum(nbytes_of(step) for step in steps))
        steps = [verified(step, meter) for step in steps]
    if args.json:
        listed = [as_dict(step, args.verify) for step in steps]
        print(json.dumps({"root": str(args.root), "steps": listed}, indent=2))
    else:
        lines = as_table(steps, args.verify) if steps else [nothing]
        print(inspection.printable("\n".join(lines)))
    return 0 if any(not step.fault for step in steps) else 1


def nbytes_of(step: Step) -> int:
    """Return the bytes that a look at the checksums of a step reads."""
    return 0 if step.fault or step.manifest is None else step.manifest.nbytes


def verified(step: Step, meter: Meter) -> Step:
    """Return a step with the faults that its checksums show."""
    if step.fault:
        return step
    before = meter.done
    fault = store.fault_by_checksums(step, meter.add)
    # A file that cannot be read is not there to be waited for.
    meter.add(nbytes_of(step) - (meter.done - before))
    return dataclasses.replace(step, fault=fault)


def prune(argv: list[str], prog: str) -> int:
    """Run `checkpoint prune`."""
    parser = argparse.ArgumentParser(prog=prog, description=PRUNES, epilog=CODES)
    parser.add_argument("root", metavar="ROOT", type=Path)
    parser.add_argument("--keep", type=int, required=True, metavar="N", help="how many good steps stay")
    parser.add_argument("--every", type=int, metavar="N", help="steps divisible by N stay, too")
    parser.add_argument("--best", type=int, default=0, metavar="N", help="the N best by metric stay, too")
    parser.add_argument("--mode", choices=MODES, default="min", help="the better metric; by default min")
    parser.add_argument("--trash", type=Path, metavar="DIR", help="move steps there, and remove none")
    parser.add_argument("--dry-run", action="store_true", help="only say what would become of each")
    args = parser.parse_args(argv)
    if args.keep < 1:
        print(f"{prog}: --keep {args.keep}: keep at least 1", file=sys.stderr)
        return 2
    try:
        policy = PreservationPolicy(args.keep, args.every, args.best, args.mode)
        trash = None if args.trash is None else args.trash.absolute()
        if trash is not None and store.is_step_or_root(trash, args.root.absolute()):
            raise ValueError(f"--trash {args.trash}: it is the root of the steps, or in a step")
    except ValueError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    verbs = {retention.REMOVE: "would remove"} if args.dry_run else {}

    seen: list[int] = []

    def report(verdict: StepVerdict) -> None:
        seen.append(verdict.entry.step)
        step, verb = verdict.entry.step, verbs.get(verdict.action, verdict.action)
        print(inspection.printable(f"{verb:<12}  {step:>10}  {verdict.reason}"))

    if refused_step(prog, argv, args.root):
        return 1
    if not os.path.isdir(args.root):
        return int(refused(prog, f"there is no folder {args.root}"))
    failures = retention.prune(args.root, policy, report, args.dry_run, trash)
    for failure in failures:
        print(inspection.printable(f"{prog}: {failure}"), file=sys.stderr)
    if not seen:
        # Known now alone: a step that lost its name has it back.
        return int(refused(prog, f"no steps in {args.root}"))
    return 0 if not failures and any(not step.fault for step in store.steps_in(args.root)) else 1


def pin(argv: list[str], prog: str) -> int:
    """Run `checkpoint pin`."""
    return mark(argv, prog, "Keep steps, whatever the policy of the run or of `checkpoint prune`.", store.pin)


def unpin(argv: list[str], prog: str) -> int:
    """Run `checkpoint unpin`."""
    return mark(argv, prog, "Leave pinned steps to the policies again.", store.unpin)


def mark(argv: list[str], prog: str, what: str, change: Callable[[Path], None]) -> int:
    """Change the pins of steps; return the exit code."""
    codes = "exit codes: 0 done; 1 no step, or the mark cannot be written; 2 wrong usage"
    parser = argparse.ArgumentParser(prog=prog, description=what, epilog=codes)
    parser.add_argument("steps", metavar="STEP", type=Path, nargs="+", help="the folder of a step")
    folders = parser.parse_args(argv).steps
    if refused_root(prog, argv, folders):
        return 1
    code = 0
    for folder in folders:
        try:
            change(folder)
        except (ValueError, OSError) as error:
            print(inspection.printable(f"{prog}: {error}"), file=sys.stderr)
            code = 1
    return code


def refused_root(prog: str, argv: Sequence[str], folders: Iterable[Path]) -> bool:
    """Say which of the folders is the root of a run, where a step is wanted; return whether there was any.

    Also of a folder that cannot be listed. Of a root without a step of ours, and of no folder, the command
    says what is wrong.

    Args:
        argv: the arguments of the command, which is shown with a step in the place of the root.
        folders: those of its arguments that should be steps, in their order.
    """
    folders = list(folders)
    for folder in folders:
        if holds_a_checkpoint(folder):
            continue
        steps = steps_of(prog, folder)
        if steps is None:
            return True
        if steps:
            text = f"{folder} is the root of {len(steps)} step(s): name one of them, such as {steps[0]}"
            return refused(prog, text, instead(prog, argv, folder, steps[0], folders.count(folder)))
    return False


def refused_step(prog: str, argv: Sequence[str], folder: Path) -> bool:
    """Say that a folder is a step or a checkpoint, where the root of a run is wanted; return whether it is.

    Also of a folder that cannot be listed.
    """
    steps = steps_of(prog, folder)
    if steps is None:
        return True
    if steps or not os.path.isdir(folder) or any(map(is_step_folder, os.listdir(folder))):
        return False
    path = Path(os.path.realpath(folder)) if ".." in folder.parts else folder.absolute()
    shelf = store.shelf_of(path)
    # A run may be in a folder that has the name of a step, and is none.
    if shelf is not None and any(
        map(holds_a_checkpoint, [path, *path.parents][: len(shelf.below.parts) + 1])
    ):
        root = shelf.root if folder.is_absolute() else Path(os.path.relpath(shelf.root))
        kind = "in a step" if shelf.below.parts else "a step"
        text = f"{folder} is {kind}, and the root of a run is wanted: {root}"
        return refused(prog, text, instead(prog, argv, folder, root))
    if holds_a_checkpoint(folder):
        text = f"{folder} is a checkpoint, and the root of a run is wanted: `checkpoint inspect` shows it"
        return refused(prog, text, line_of([*shlex.split(prog)[:-1], "inspect", as_argument(folder)]))
    return False


def is_step_folder(name: str) -> bool:
    return store.step_named(name) is not None


def steps_of(prog: str, folder: Path) -> Optional[list[Path]]:
    """Return the steps of ours in a folder, newest first; None where it cannot be listed, which is said."""
    try:
        return [entry.path for entry in store.Shelf(folder).listed() if not entry.foreign]
    except OSError as error:
        refused(prog, f"{folder} cannot be listed: {error.strerror}")
        return None


def instead(prog: str, argv: Sequence[str], folder: Path, other: Path, count: int = 1) -> str:
    """Return a command line with another folder in the place of one, where that stands first.

    Args:
        count: of so many arguments. A target of the same name stays.
    """
    places = [place for place in places_in(argv) if Path(argv[place]) == folder][:count]
    given = [as_argument(other) if place in places else text for place, text in enumerate(argv)]
    return line_of([*shlex.split(prog), *given])


def places_in(argv: Sequence[str]) -> list[int]:
    """Return the places of the arguments that are no options, and no values of options."""
    places, before, is_behind = [], "", False
    for place, text in enumerate(argv):
        is_option = text.startswith("-") and not NO_OPTION.fullmatch(text)
        if not is_behind and text == "--":
            is_behind = True
        elif is_behind or not (is_option or takes_a_value(before)):
            places.append(place)
        before = text
    return places


def takes_a_value(option: str) -> bool:
    """Return whether an option, which may be cut short, takes the argument behind it."""
    return len(option) > 2 and any(name.startswith(option) for name in WITH_VALUE)


def as_argument(folder: Path) -> str:
    """Return a folder as a command takes it: "-a" would be an option."""
    return f"./{folder}" if str(folder).startswith("-") else str(folder)


def line_of(words: Iterable[str]) -> str:
    """Return the line for a shell."""
    return " ".join(map(word_of, words))


def word_of(text: str) -> str:
    """Return an argument as a shell takes it, in letters that any terminal shows."""
    if inspection.printable(text) == text and "\n" not in text:
        return shlex.quote(text)
    letters = (f"\\{byte:03o}" if byte in AS_NUMBERS else chr(byte) for byte in os.fsencode(text))
    return f"$'{''.join(letters)}'"


def refused(prog: str, text: str, command: str = "") -> bool:
    """Say in one line why a command does nothing, and the command line that would; return True."""
    text = f"{prog}: {text}{f' ({command})' if command else ''}"
    print(inspection.printable(text).replace("\n", "\\n"), file=sys.stderr)
    return True


def holds_a_checkpoint(folder: Path) -> bool:
    """Return whether a folder has a file or folder that only a step, or a sharded checkpoint, has."""
    return any(os.path.lexists(folder / name) for name in (manifest.NAME, CONFIG_FNAME, ".metadata", SHARDED))


def inspect(argv: list[str], prog: str) -> int:
    """Run `checkpoint inspect`; of a step, on its sharded checkpoint."""
    if refused_root(prog, argv, [Path(argv[place]) for place in places_in(argv)]):
        return 1
    parts = [os.path.join(part, SHARDED) if os.path.isdir(Path(part, SHARDED)) else part for part in argv]
    return inspection.main(["inspect", *parts], prog.rpartition(" ")[0])


def verify(argv: list[str], prog: str) -> int:
    """Run `checkpoint verify`; of a step, compare every file with the manifest."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Read all of a step, or of a sharded checkpoint, and say whether it is what was saved.",
        epilog=inspection.CODES,
    )
    parser.add_argument("folder", metavar="DIR", type=Path)
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    args = parser.parse_args(argv)
    if refused_root(prog, argv, [args.folder]):
        return 1
    if not os.path.lexists(args.folder / manifest.NAME):
        return inspection.main(["verify", *argv], prog.rpartition(" ")[0])
    nbytes = 0
    meter = Meter("verify", settings.progress() or Line())
    try:
        content = manifest.read(args.folder)
        meter.expect(lambda: content.nbytes)
        wrong = manifest.wrong_checksums(args.folder, content, read=meter.add)
        problems = [*misnamed(args.folder, content), *wrong]
        meter.add(content.nbytes - meter.done)
        nbytes = content.nbytes
    except manifest.BadManifest as error:
        problems = [str(error)]
    if args.json:
        print(json.dumps({"folder": str(args.folder), "problems": problems, "bytes": nbytes}, indent=2))
    else:
        lines = [f"damaged: {len(problems)} problem(s)", *(f"  {problem}" for problem in problems)]
        print("\n".join(lines) if problems else f"whole: {len(content.files)} files, {nbytes:,} bytes")
    return 1 if problems else 0


def misnamed(folder: Path, content: Manifest) -> Iterator[str]:
    """Yield that a step folder holds another step than its name says."""
    step = store.step_named(folder.absolute().name)
    if step is not None and step != content.step:
        yield f"it is named {folder.absolute().name}, and its manifest is of step {content.step}"


def export(argv: list[str], prog: str) -> int:
    """Run `checkpoint export`."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Write the model of a checkpoint as a folder that from_pretrained opens.",
        epilog=EXPORT_CODES,
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="a step, or what a manager wrote")
    parser.add_argument("target", metavar="OUT", type=Path)
    parser.add_argument(
        "--like", metavar="MODEL", help="folder with config.json, tokenizer, ...; by default DIR's"
    )
    parser.add_argument("--dtype", help="what weights are cast to, such as bfloat16; by default as saved")
    parser.add_argument("--overwrite", action="store_true", help="replace a model that OUT holds")
    parser.add_argument(
        "--trust", action="store_true", help="read files of verl's own manager, which runs what they say"
    )
    parser.add_argument(
        "--adapter",
        choices=(exporting.MERGE, exporting.ALONE),
        default=exporting.MERGE,
        help="of a model with a LoRA of peft: the merged model, or the adapter in peft's own format",
    )
    parser.add_argument(
        "--adapter-config", metavar="FOLDER", help="with adapter_config.json; by default the checkpoint's"
    )
    parser.add_argument("--adapter-name", metavar="NAME", help="of several adapters the one that is written")
    parser.add_argument("--progress", action="store_true", help="a bar on standard error; needs tqdm")
    args = parser.parse_args(argv)
    if refused_root(prog, argv, [args.folder]):
        return 1
    if args.progress:
        configure(progress="tqdm")
    dtype = getattr(torch, args.dtype, None) if args.dtype else None
    if args.dtype and not isinstance(dtype, torch.dtype):
        print(f"{prog}: --dtype {args.dtype}: torch has no such dtype", file=sys.stderr)
        return 2
    try:
        saved = export_checkpoint(
            args.folder,
            args.target,
            like=args.like,
            how=Export(dtype, overwrite=args.overwrite),
            trust=args.trust,
            adapter=args.adapter,
            adapter_config=args.adapter_config,
            adapter_name=args.adapter_name,
        )
    except CheckpointingException as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    print(f"{len(saved.keys)} tensors, {saved.nbytes:,} bytes in {args.target}")
    return 0


def as_dict(step: Step, is_verified: bool) -> dict[str, object]:
    content = step.manifest
    facts: dict[str, object] = {"step": step.step, "path": str(step.path), "fault": step.fault}
    # Of the checks that were made, the last.
    facts.update(checked="checksums" if is_verified else "sizes", left_alone=step.foreign or None)
    facts["pinned"] = store.is_pinned(step.path)
    if content is not None:
        facts["metric"] = content.metric
        facts.update(bytes=content.nbytes, ranks=content.world, made_at=content.made_at)
        facts["uploaded"] = store.uploaded_to(step.path) or None
    return facts


def as_table(steps: Sequence[Step], is_verified: bool) -> list[str]:
    """Return the lines of a table of steps, with what is to be said of a step below it."""
    rows: list[Sequence[str]] = [("step", "size", "age", "state", "uploaded", "pinned", "metric")]
    rows += [row_of(step, is_verified) for step in steps]
    heading, *lines = inspection.table(rows)
    together = [heading]
    for step, line in zip(steps, lines):
        together.append(line)
        for text in remarks_on(step):
            together += textwrap.wrap(
                text,
                inspection.COLUMNS,
                initial_indent="    ",
                subsequent_indent="      ",
                break_long_words=False,
                break_on_hyphens=False,
            )
    return together


def row_of(step: Step, is_verified: bool) -> tuple[str, ...]:
    content = step.manifest
    state = step.foreign or "damaged" if step.fault else "verified" if is_verified else "complete"
    if content is None:
        return str(step.step), "-", "-", state, "-", "-", "-"
    uploaded = "yes" if store.uploaded_to(step.path) else "now" if store.is_uploading(step.path) else "-"
    return (
        str(step.step),
        inspection.amount(content.nbytes),
        spelled_age(time.time() - content.made_at),
        state,
        uploaded,
        "yes" if store.is_pinned(step.path) else "-",
        "-" if content.metric is None else f"{content.metric:.6g}",
    )


def remarks_on(step: Step) -> Iterator[str]:
    """Yield what the cells of a step's row do not say."""
    if step.fault:
        yield step.fault
    if retention.why_distrusted(step.path):
        yield "it could not be loaded before"
    url = store.uploaded_to(step.path)
    if url:
        yield f"uploaded to {url}"


def spelled_age(seconds: float) -> str:
    """Return an age in the unit that suits it."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(0.0, seconds):.0f} s"


def diff(argv: list[str], prog: str) -> int:
    """Run `checkpoint diff`."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Compare two steps, or two sharded checkpoints: keys, shapes, dtypes, bits of values.",
        epilog="exit codes: 0 the same; 1 they differ; 2 wrong usage, no checkpoint, or a damaged one",
    )
    parser.add_argument("a", metavar="A", type=Path)
    parser.add_argument("b", metavar="B", type=Path)
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    args = parser.parse_args(argv)
    if refused_root(prog, argv, [args.a, args.b]):
        return 2
    meter = Meter("diff", settings.progress() or Line())
    try:
        found = list(difference.differences(args.a, args.b, meter))
        compared = difference.counted((args.a, args.b))
    except (CheckpointingException, OSError) as error:
        print(inspection.printable(f"{prog}: {error}"), file=sys.stderr)
        return 2
    if args.json:
        entries = [entry._asdict() for entry in found]
        print(json.dumps({"a": str(args.a), "b": str(args.b), "differences": entries}, indent=2))
    elif found:
        rows = [
            ("key", "difference", "A", "B"),
            *((entry.key, entry.kind, entry.a, entry.b) for entry in found),
        ]
        print(inspection.printable("\n".join([*inspection.table(rows), f"{len(found)} differences"])))
    else:
        print(f"the same: {compared}")
    return 1 if found else 0


ACTIONS = {
    "list": list_steps,
    "prune": prune,
    "pin": pin,
    "unpin": unpin,
    "inspect": inspect,
    "diff": diff,
    "verify": verify,
    "export": export,
}
