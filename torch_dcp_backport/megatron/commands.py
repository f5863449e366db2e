"""The command `convert SOURCE TARGET`."""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Optional

import torch

from torch_dcp_backport import transfer
from torch_dcp_backport.dist_checkpointing import CheckpointingException
from torch_dcp_backport.hf import CONFIG, Export
from torch_dcp_backport.megatron.convert import Converted, converted
from torch_dcp_backport.megatron.families import kinds
from torch_dcp_backport.megatron.families.towers import TOWERS
from torch_dcp_backport.transfer import Progress

HELP = """\
Convert Hugging Face files to a sharded checkpoint that megatron-core's
GPTModel.sharded_state_dict() loads, or such a checkpoint to files for
from_pretrained; with --ep a checkpoint to one whose optimizer loads in another
grid. One process, without a GPU and without building a model. Files
are mapped; weights in fp8 towards a checkpoint are held in memory, as the plan
says.
"""
CODES = "exit codes: 0 fine; 1 it does not fit, is damaged, or has no room; 2 wrong usage"
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
SIZE = re.compile(r"(\d+)([KMGT]?)B?")
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
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


def main(
    argv: list[str], prog: str, refused_root: Callable[[str, Sequence[str], Iterable[Path]], bool]
) -> int:
    """Run the command, and return its exit code.

    Args:
        refused_root: says that a folder is the root of a run, where a step is wanted; returns whether it is.
    """
    known = ", ".join((*kinds(), *TOWERS))
    epilog = "\n".join((*textwrap.wrap(f"values of model_type: {known}", COLUMNS), CODES))
    parser = argparse.ArgumentParser(
        prog=prog, description=HELP, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="SOURCE", type=Path, help="a model's folder, or a checkpoint's")
    parser.add_argument("target", metavar="TARGET", type=Path)
    parser.add_argument(
        "--like", metavar="MODEL", help="of a checkpoint: folder with config.json, tokenizer, ..."
    )
    parser.add_argument("--dtype", help="of files: what weights are cast to, such as bfloat16")
    parser.add_argument("--file-size", metavar="BYTES", help="of files: at most so many each, such as 2GB")
    parser.add_argument(
        "--ep",
        metavar="N",
        help="of a checkpoint with Megatron's distributed optimizer: write one for a grid with EP N",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what TARGET holds")
    parser.add_argument("--dry-run", action="store_true", help="only check, and say what would be written")
    args = parser.parse_args(argv)
    if not os.path.isfile(args.source / CONFIG) and refused_root(prog, argv, [args.source]):
        return 1
    wrong = wrong_usage(args)
    if wrong:
        print(f"{prog}: {wrong}", file=sys.stderr)
        return 2
    dtype = getattr(torch, args.dtype) if args.dtype else None
    size = bytes_of(args.file_size) if args.file_size else Export.file_bytes
    assert size is not None, "the usage is right"
    bar, began = Bar(), time.monotonic()
    transfer.configure(progress=bar)
    try:
        done = converted(
            args.source,
            args.target,
            args.like,
            Export(dtype, size, args.overwrite),
            args.dry_run,
            lambda plan: print("\n".join(plan_of(plan, args.source, args.target, args.dry_run)), flush=True),
            int(args.ep) if args.ep else None,
        )
    except CheckpointingException as error:
        bar.end()
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    finally:
        transfer.configure()
    what = amount(len(done.tensors), done.nbytes, len(done.files))
    if args.dry_run:
        print(f"{what} would be in {args.target}; nothing was written")
        return 0
    print(f"wrote  {args.target}: {what}, took {time.monotonic() - began:.1f} s")
    return 0


def wrong_usage(args: argparse.Namespace) -> str:
    """Return what is wrong with the options; an empty string where nothing is."""
    dtype = getattr(torch, args.dtype, None) if args.dtype else None
    if args.dtype and not isinstance(dtype, torch.dtype):
        return f"--dtype {args.dtype}: torch has no such dtype"
    if dtype is not None and not dtype.is_floating_point:
        return f"--dtype {args.dtype}: weights are floating-point numbers"
    if args.file_size and not bytes_of(args.file_size):
        return f"--file-size {args.file_size}: no size such as 2GB"
    if args.ep is not None and not (args.ep.isascii() and args.ep.isdigit() and int(args.ep)):
        return f"--ep {args.ep}: no number of parts, 1 or more"
    if args.ep and (args.source / CONFIG).is_file():
        return f"--ep is for a checkpoint, and {args.source} has a model's files, which have no optimizer"
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
        return f"{name} is for files alone, and {args.source} becomes a checkpoint: {why}"
    return ""


def bytes_of(text: str) -> Optional[int]:
    """Return the bytes that a text such as 2GB stands for; None where it is no such text."""
    match = SIZE.fullmatch(text.upper())
    return int(match[1]) * UNITS[match[2]] if match is not None else None


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
