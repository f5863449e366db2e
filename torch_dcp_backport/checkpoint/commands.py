"""The commands `checkpoint list | prune ROOT`, `pin | unpin | inspect | verify DIR` and `export DIR OUT`.

Their arguments are in `arguments`, which is there without torch.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import textwrap
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from torch_dcp_backport.arguments import Refused, say
from torch_dcp_backport.checkpoint._src import difference, manifest, retention, store
from torch_dcp_backport.checkpoint._src.exporting import export_checkpoint
from torch_dcp_backport.checkpoint._src.manifest import Manifest
from torch_dcp_backport.checkpoint._src.policies import PreservationPolicy
from torch_dcp_backport.checkpoint._src.retention import StepVerdict
from torch_dcp_backport.checkpoint._src.store import Step
from torch_dcp_backport.dist_checkpointing import CheckpointingException, inspection
from torch_dcp_backport.dist_checkpointing.core import CONFIG_FNAME, SHARDED
from torch_dcp_backport.hf import Export
from torch_dcp_backport.transfer import Line, Meter, configure, settings


def list_steps(args: Namespace, prog: str) -> int:
    """Run `checkpoint list`."""
    if args.mode is not None and not args.best:
        raise Refused(f"--mode {args.mode} needs --best", code=2)
    check_root(args.root)
    steps = store.steps_in(args.root)
    if not steps:
        raise Refused(f"no steps in {args.root}")
    if args.verify:
        meter = Meter("verify", settings.progress() or Line())
        meter.expect(lambda: sum(nbytes_of(step) for step in steps))
        steps = [verified(step, meter) for step in steps]
    if args.best:
        steps = [best_step(args.root, steps, args.mode or "min")]
    if args.json:
        listed = [as_dict(step, args.verify) for step in steps]
        print(json.dumps({"root": str(args.root), "steps": listed}, indent=2))
    elif args.best:
        print(inspection.printable(str(steps[0].path)))
    else:
        print(inspection.printable("\n".join(as_table(steps, args.verify))))
    return 0 if any(not step.fault for step in steps) else 1


def best_step(root: Path, steps: Iterable[Step], mode: str) -> Step:
    """Return the good step with the best metric, as `PreservationPolicy(best=1)` finds it.

    Raises:
        Refused: no good step has a metric.
    """
    step_at = {step.path: step for step in steps}

    def fault_of(entry: store.ListedStep) -> str:
        step = step_at.get(entry.path)
        # A step that was published since the others were looked at.
        return "it is new" if step is None else step.fault

    best = retention.best_of(store.Shelf(root).listed(), PreservationPolicy(best=1, mode=mode), fault_of)
    if not best:
        raise Refused(f"no good step in {root} has a metric: save_checkpoint(step, metric=...) gives it one")
    return step_at[best[0]]


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


def prune(args: Namespace, prog: str) -> int:
    """Run `checkpoint prune`."""
    policy = PreservationPolicy(args.keep, args.every, args.best, args.mode)
    trash = None if args.trash is None else args.trash.absolute()
    if trash is not None and store.is_step_or_root(trash, args.root.absolute()):
        raise Refused(f"--trash {args.trash}: it is the root of the steps, or in a step", code=2)
    verbs = {retention.REMOVE: "would remove"} if args.dry_run else {}

    seen: list[int] = []

    def report(verdict: StepVerdict) -> None:
        seen.append(verdict.entry.step)
        step, verb = verdict.entry.step, verbs.get(verdict.action, verdict.action)
        print(inspection.printable(f"{verb:<12}  {step:>10}  {verdict.reason}"))

    check_root(args.root)
    failures = retention.prune(args.root, policy, report, args.dry_run, trash)
    for failure in failures:
        say(prog, inspection.printable(failure))
    if not seen:
        # Known now alone: a step that lost its name has it back.
        raise Refused(f"no steps in {args.root}")
    return 0 if not failures and any(not step.fault for step in store.steps_in(args.root)) else 1


def pin(args: Namespace, prog: str) -> int:
    """Run `checkpoint pin`."""
    return mark(args, prog, store.pin)


def unpin(args: Namespace, prog: str) -> int:
    """Run `checkpoint unpin`."""
    return mark(args, prog, store.unpin)


def mark(args: Namespace, prog: str, change: Callable[[Path], None]) -> int:
    """Change the pins of steps; return the exit code."""
    check_steps(args.steps)
    code = 0
    for folder in args.steps:
        try:
            if not os.path.lexists(folder):
                raise ValueError(f"there is no folder {folder}")
            change(folder)
        except (ValueError, OSError) as error:
            say(prog, inspection.printable(str(error)))
            code = 1
    return code


def check_steps(folders: Iterable[Path], code: int = 1) -> None:
    """Check that folders may be steps or checkpoints.

    Of a root without a step of ours, and of no folder, the command says what is wrong.

    Raises:
        Refused: one of them is the root of a run, or cannot be listed.
    """
    for folder in folders:
        if holds_a_checkpoint(folder):
            continue
        steps = steps_of(folder, code)
        if steps:
            text = f"{folder} is the root of {len(steps)} step(s): name one of them, such as {steps[0]}"
            raise Refused(text, code)


def check_root(folder: Path) -> None:
    """Check that a folder may be the root of a run.

    Raises:
        Refused: it is a step or a checkpoint, is none, or cannot be listed.
    """
    steps = steps_of(folder)
    if not os.path.isdir(folder):
        raise Refused(f"{folder} is a file" if os.path.exists(folder) else f"there is no folder {folder}")
    if steps or any(map(is_step_folder, os.listdir(folder))):
        return
    path = Path(os.path.realpath(folder)) if ".." in folder.parts else folder.absolute()
    shelf = store.shelf_of(path)
    # A run may be in a folder that has the name of a step, and is none.
    if shelf is not None and any(
        map(holds_a_checkpoint, [path, *path.parents][: len(shelf.below.parts) + 1])
    ):
        root = shelf.root if folder.is_absolute() else Path(os.path.relpath(shelf.root))
        kind = "in a step" if shelf.below.parts else "a step"
        raise Refused(f"{folder} is {kind}, and the root of a run is wanted: {root}")
    if holds_a_checkpoint(folder):
        raise Refused(
            f"{folder} is a checkpoint, and the root of a run is wanted: `checkpoint inspect` shows it"
        )


def is_step_folder(name: str) -> bool:
    return store.step_named(name) is not None


def steps_of(folder: Path, code: int = 1) -> list[Path]:
    """Return the steps of ours in a folder, newest first.

    Raises:
        Refused: it cannot be listed.
    """
    try:
        return [entry.path for entry in store.Shelf(folder).listed() if not entry.foreign]
    except OSError as error:
        raise Refused(f"{folder} cannot be listed: {error.strerror}", code) from None


def holds_a_checkpoint(folder: Path) -> bool:
    """Return whether a folder has a file or folder that only a step, or a sharded checkpoint, has."""
    return any(os.path.lexists(folder / name) for name in (manifest.NAME, CONFIG_FNAME, ".metadata", SHARDED))


def inspect(args: Namespace, prog: str) -> int:
    """Run `checkpoint inspect`; of a step, on its sharded checkpoint."""
    check_steps([args.folder])
    sharded = args.folder / SHARDED
    folder = sharded if os.path.isdir(sharded) else args.folder
    return inspection.look(folder, False, args.json, functools.partial(say, prog))


def verify(args: Namespace, prog: str) -> int:
    """Run `checkpoint verify`; of a step, compare every file with the manifest."""
    check_steps([args.folder])
    if not os.path.lexists(args.folder / manifest.NAME):
        return inspection.look(args.folder, True, args.json, functools.partial(say, prog))
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


def export(args: Namespace, prog: str) -> int:
    """Run `checkpoint export`."""
    check_steps([args.folder])
    if args.progress:
        configure(progress="tqdm")
    dtype = getattr(torch, args.dtype) if args.dtype else None
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
        raise Refused(inspection.printable(str(error))) from error
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


def diff(args: Namespace, prog: str) -> int:
    """Run `checkpoint diff`."""
    check_steps([args.a, args.b], code=2)
    meter = Meter("diff", settings.progress() or Line())
    try:
        found = list(difference.differences(args.a, args.b, meter))
        compared = difference.counted((args.a, args.b))
    except (CheckpointingException, OSError) as error:
        raise Refused(inspection.printable(str(error)), code=2) from error
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


#: What a JSON object says of the arguments of an action that did nothing.
NAMED = ("root", "folder", "a", "b")


def main(action: str, args: Namespace, prog: str) -> int:
    """Run an action of `checkpoint`, and return its exit code; why it does nothing is said, in JSON, too."""
    try:
        return ACTIONS[action](args, prog)
    except Refused as refused:
        say(prog, inspection.printable(str(refused)))
        if getattr(args, "json", False):
            named = {name: str(getattr(args, name)) for name in NAMED if hasattr(args, name)}
            told = {"list": ("steps", []), "verify": ("problems", [str(refused)])}
            more = dict([told[action]]) if action in told else {}
            print(json.dumps({**named, **more, "reason": str(refused)}))
        return refused.code


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
