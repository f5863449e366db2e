"""The command `convert SOURCE TARGET`."""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

import torch

from torch_dcp_backport import transfer
from torch_dcp_backport.dist_checkpointing import CheckpointingException
from torch_dcp_backport.hf import Export
from torch_dcp_backport.megatron.convert import Converted, convert
from torch_dcp_backport.transfer.progress import Progress

HELP = """\
Convert Hugging Face files (Qwen2, Qwen2.5, Qwen3, their sparse models, Llama) to a sharded checkpoint that
GPTModel.sharded_state_dict() of megatron-core loads, or such a checkpoint to files for from_pretrained.
One process, without a GPU and without building a model, in bounded memory.
"""
CODES = "exit codes: 0 fine; 1 it does not fit, is damaged, or has no room; 2 wrong usage"
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
SIZE = re.compile(r"(\d+)([KMGT]?)B?")
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class Lines:
    """Progress on stderr: a single line that is rewritten on a terminal, else a line every ten seconds."""

    def __init__(self) -> None:
        self.began = self.printed = time.monotonic()
        self.is_terminal = sys.stderr.isatty()

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        is_over = progress.done >= progress.total
        if not is_over and now - self.printed < (0.5 if self.is_terminal else 10):
            return
        self.printed = now
        rate = progress.done / max(now - self.began, 1e-3) / 1e6
        share = 100 * progress.done // max(progress.total, 1)
        text = f"{share:3d} % of {progress.total:,} bytes, {rate:,.0f} MB/s"
        print(f"\r{text}" if self.is_terminal else text, end="", file=sys.stderr, flush=True)
        if is_over or not self.is_terminal:
            print(file=sys.stderr, flush=True)


def main(argv: list[str], prog: str) -> int:
    """Run the command, and return its exit code."""
    parser = argparse.ArgumentParser(prog=prog, description=HELP, epilog=CODES)
    parser.add_argument("source", metavar="SOURCE", type=Path, help="a model's folder, or a checkpoint's")
    parser.add_argument("target", metavar="TARGET", type=Path)
    parser.add_argument(
        "--like", metavar="MODEL", help="of a checkpoint: folder with config.json, tokenizer, ..."
    )
    parser.add_argument("--dtype", help="of files: what weights are cast to, such as bfloat16")
    parser.add_argument("--file-size", metavar="BYTES", help="of files: at most so many each, such as 2GB")
    parser.add_argument("--overwrite", action="store_true", help="replace what TARGET holds")
    parser.add_argument("--dry-run", action="store_true", help="only check, and say what would be written")
    args = parser.parse_args(argv)
    dtype = getattr(torch, args.dtype, None) if args.dtype else None
    size = SIZE.fullmatch(args.file_size.upper()) if args.file_size else None
    if args.dtype and not isinstance(dtype, torch.dtype):
        print(f"{prog}: --dtype {args.dtype}: torch has no such dtype", file=sys.stderr)
        return 2
    if args.file_size and size is None:
        print(f"{prog}: --file-size {args.file_size}: no size such as 2GB", file=sys.stderr)
        return 2
    how = Export(dtype, overwrite=args.overwrite)
    if size is not None:
        how = Export(dtype, max(1, int(size[1]) * UNITS[size[2]]), args.overwrite)
    transfer.configure(progress=Lines())
    try:
        done = convert(args.source, args.target, like=args.like, how=how, dry_run=args.dry_run)
    except CheckpointingException as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    finally:
        transfer.configure()
    if args.dry_run:
        print("\n".join(plan_of(done)))
    verb = "would be in" if args.dry_run else "in"
    print(f"{len(done.tensors)} tensors, {done.nbytes:,} bytes {verb} {args.target}")
    return 0


def plan_of(done: Converted) -> list[str]:
    """Return the lines of a dry run; tensors of the same name in several layers share a line."""
    alike: dict[str, list[str]] = {}
    for key in done.tensors:
        alike.setdefault(NUMBER.sub("*", key), []).append(key)
    rows = []
    for name, keys in alike.items():
        info = done.tensors[keys[0]]
        shape = "x".join(map(str, info.shape))
        count = f"{len(keys)} of " if len(keys) > 1 else ""
        rows.append((name, f"{count}{shape}", str(info.dtype).partition(".")[2]))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    lines += [f"{name}: {nbytes:,} bytes" for name, nbytes in done.files.items()]
    reasons: dict[str, list[str]] = {}
    for key, why in done.left.items():
        reasons.setdefault(why, []).append(key)
    lines += [
        f"left alone, {why}: {keys[0]}" + (f" and {len(keys) - 1} more" if len(keys) > 1 else "")
        for why, keys in reasons.items()
    ]
    return lines
