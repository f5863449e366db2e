"""The command `convert SOURCE TARGET`."""

from __future__ import annotations

import os
import re
import sys
import textwrap
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from torch_dcp_backport import transfer
from torch_dcp_backport.arguments import Refused, say
from torch_dcp_backport.dist_checkpointing import CheckpointingException
from torch_dcp_backport.dist_checkpointing.inspection import printable
from torch_dcp_backport.hf import CONFIG, Export
from torch_dcp_backport.megatron.convert import Converted, converted
from torch_dcp_backport.transfer import Progress

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
COLUMNS = 80
CELLS = 30
FORMS = {"huggingface": "Hugging Face files", "checkpoint": "sharded checkpoint"}


class Bar:
    """Progress on stderr: a bar that is drawn again on a terminal, else a line every ten seconds."""

    def __init__(self) -> None:
        self.began = self.printed = time.monotonic()
        self.is_terminal = sys.stderr.isatty()
        self.is_open = False

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        is_over = progress.done >= progress.total
        if not is_over and now - self.printed < (0.5 if self.is_terminal else 10):
            return
        self.printed = now
        whole = max(progress.total, 1)
        rate = in_bytes(int(progress.done / max(now - self.began, 1e-3)))
        cells = ("#" * (CELLS * progress.done // whole)).ljust(CELLS, ".")
        text = f"[{cells}] {100 * progress.done // whole:3d} % of {in_bytes(progress.total)}, {rate}/s"
        self.is_open = self.is_terminal and not is_over
        if self.is_terminal:
            # Over the text before, which may be longer.
            text = "\r" + text.ljust(COLUMNS - 1)
        print(text, end="" if self.is_open else "\n", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leave a line that is half drawn, before something else is said."""
        if self.is_open:
            print(file=sys.stderr, flush=True)


def main(args: Namespace, prog: str, check_steps: Callable[[Iterable[Path]], None]) -> int:
    """Run the command, and return its exit code.

    Args:
        check_steps: raises `Refused` of a folder that is the root of a run, where a step is wanted.
    """
    bar = Bar()
    try:
        if not os.path.isfile(args.source / CONFIG):
            check_steps([args.source])
        check_usage(args)
        convert(args, bar)
    except (Refused, CheckpointingException) as error:
        bar.end()
        say(prog, printable(str(error)))
        return getattr(error, "code", 1)
    finally:
        transfer.configure()
    return 0


def convert(args: Namespace, bar: Bar) -> None:
    """Convert, and print what was done.

    Raises:
        CheckpointingException: it does not fit, is damaged, or has no room.
    """
    dtype = getattr(torch, args.dtype) if args.dtype else None
    size, began = args.file_size or Export.file_bytes, time.monotonic()
    transfer.configure(progress=bar)
    done = converted(
        args.source,
        args.target,
        args.like,
        Export(dtype, size, args.overwrite),
        args.dry_run,
        lambda plan: print("\n".join(plan_of(plan, args.source, args.target, args.dry_run)), flush=True),
        args.ep,
    )
    what = amount(len(done.tensors), done.nbytes, len(done.files))
    if args.dry_run:
        print(f"{what} would be in {args.target}; nothing was written")
    else:
        print(f"wrote  {args.target}: {what}, took {time.monotonic() - began:.1f} s")


def check_usage(args: Namespace) -> None:
    """Check that the options are of this conversion.

    Raises:
        Refused: naming the option.
    """
    if args.ep and (args.source / CONFIG).is_file():
        text = f"--ep is for a checkpoint, and {args.source} has a model's files, which have no optimizer"
        raise Refused(text, code=2)
    # Whatever its value is: one that is the default is an option that is ignored, too.
    given = [
        (name, why)
        for name, value, why in (
            ("--like", args.like, "a checkpoint keeps what is beside the files that it is made of"),
            ("--dtype", args.dtype, "a checkpoint keeps the dtypes of the files"),
            ("--file-size", args.file_size, "the files of a checkpoint have the sizes of its tensors"),
        )
        if value
    ]
    if given and (args.ep or (args.source / CONFIG).is_file()):
        name, why = given[0]
        raise Refused(f"{name} is for files alone, and {args.source} becomes a checkpoint: {why}", code=2)


def in_bytes(count: int) -> str:
    """Return a number of bytes in a unit in which it has few digits."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def amount(tensors: int, nbytes: int, files: int) -> str:
    where = f" in {counted(files, 'file')}" if files else ""
    return f"{counted(tensors, 'tensor')}, {in_bytes(nbytes)}{where}"


def counted(count: int, name: str) -> str:
    return f"{count:,} {name}" + ("" if count == 1 else "s")


def plan_of(plan: Converted, source: Path, target: Path, is_detailed: bool) -> list[str]:
    """Return the lines on what was found and what will be done; a dry run has every tensor and file."""
    found = plan.source
    memory = "mapped files alone"
    if plan.memory:
        memory = f"{in_bytes(plan.memory)} in one process, beside mapped files"
    lines = [
        f"found  {source}: {FORMS[found.form]} of a {found.kind} model,",
        f"       {amount(found.tensors, found.nbytes, found.files)}",
        f"does   {target}: {FORMS[plan.to]},",
        f"       {amount(len(plan.tensors), plan.nbytes, len(plan.files))}",
        f"memory {memory}",
    ]
    if is_detailed:
        lines += details_of(plan)
    reasons: dict[str, list[str]] = {}
    for key, why in plan.left.items():
        reasons.setdefault(why, []).append(key)
    for why, keys in reasons.items():
        more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        lines += textwrap.wrap(f"left   {keys[0]}{more}: {why}", COLUMNS, subsequent_indent=" " * 7)
    return lines


def details_of(plan: Converted) -> Iterator[str]:
    """Yield a line for each tensor and file; tensors of the same name in several layers share a line."""
    alike: dict[str, list[str]] = {}
    for key in plan.tensors:
        alike.setdefault(NUMBER.sub("*", key), []).append(key)
    for name, keys in alike.items():
        info = plan.tensors[keys[0]]
        count = f"{len(keys)} of " if len(keys) > 1 else ""
        facts = f"{count}{'x'.join(map(str, info.shape))} {str(info.dtype).partition('.')[2]}"
        room = COLUMNS - 2 - len(name) - 2
        yield f"  {name}  {facts.rjust(room)}" if len(facts) <= room else f"  {name}\n{facts.rjust(COLUMNS)}"
    for name, nbytes in plan.files.items():
        yield f"  {name}  {in_bytes(nbytes).rjust(COLUMNS - 4 - len(name))}"
