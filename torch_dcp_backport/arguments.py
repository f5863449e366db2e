"""The arguments of the commands `checkpoint ACTION` and `convert`, and what a command says on standard error.

Must never import torch: a help text, or an error in the usage, is there at once.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

#: Columns of a line on standard error.
COLUMNS = 100
#: What `--dtype` casts weights to.
DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
#: What becomes of an adapter in an export.
MERGE, ALONE = "merge", "alone"
#: Which metric is the better one.
MODES = ("min", "max")
#: Values of model_type that `convert` takes.
MODEL_TYPES = (
    *("qwen2", "qwen3", "llama", "qwen2_moe", "qwen3_moe", "mistral", "mixtral", "gemma2", "gemma3_text"),
    *("phi3", "glm", "glm4", "deepseek_v3", "gpt_oss", "qwen3_vl_moe_text"),
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3"),
)
SIZE = re.compile(r"(\d+)([KMGT]?)B?")
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}

CODES = "exit codes: 0 fine; 1 no good step, or one that cannot be removed; 2 wrong usage"
EXPORT_CODES = "exit codes: 0 fine; 1 damaged, no model, or no room for it; 2 wrong usage"
LOOK_CODES = "exit codes: 0 fine; 1 no checkpoint, or a damaged one; 2 wrong usage"
PIN_CODES = "exit codes: 0 done; 1 no step, or the mark cannot be written; 2 wrong usage"
DIFF_CODES = "exit codes: 0 the same; 1 they differ; 2 wrong usage, no checkpoint, or a damaged one"
CONVERT_CODES = "exit codes: 0 fine; 1 it does not fit, is damaged, or has no room; 2 wrong usage"
LISTS = """\
List the steps of a run, newest first: complete, or why not, and where uploaded. By default files are compared
with the manifest by their sizes alone; --verify reads all of them, and compares their checksums.
"""
PRUNES = """\
Remove all but the newest good steps of a run, and say of each step what becomes of it and why. Every byte of
what is to stay is read. What this package did not publish, or cannot read, is left alone and never counted.
What killed processes and failed removals left is removed first, and a step that lost its name put back.
"""
CONVERTS = """\
Convert Hugging Face files to a sharded checkpoint that megatron-core's
GPTModel.sharded_state_dict() loads, or such a checkpoint to files for
from_pretrained; with --ep a checkpoint to one whose optimizer loads in another
grid. One process, without a GPU and without building a model. Files
are mapped; weights in fp8 towards a checkpoint are held in memory, as the plan
says.
"""


class Refused(Exception):
    """A command does nothing, for a reason that it says.

    Args:
        text: the reason.
        code: the exit code.
    """

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


def say(prog: str, text: str) -> None:
    """Print an error under the command's name; a library's, as a command of one process would say it."""
    lines = in_a_command(f"{prog}: {text}").splitlines()
    print("\n".join(part for line in lines for part in wrapped(line)), file=sys.stderr)


def in_a_command(text: str) -> str:
    """Return an error of a library as a command says it, which has one rank, and options."""
    for library, command in (
        (r"Export\(overwrite=True\), --overwrite", "--overwrite"),
        (r"Export\(overwrite=True\)", "--overwrite"),
        (r"like= or --like", "--like"),
        (r"trust=True", "--trust"),
        (r"\b1 problem\(s\)(, |: |\.)", ""),
        (r"(?m)^(  )?rank 0: ", r"\1"),
    ):
        text = re.sub(library, command, text)
    return text


def wrapped(line: str) -> list[str]:
    """Return an error's line as lines that are not too long; words and paths stay whole."""
    how = {"subsequent_indent": "    ", "break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(line, COLUMNS, replace_whitespace=False, drop_whitespace=True, **how) or [line]  # type: ignore[arg-type]


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word that is most like another, as a question; "" if none is."""
    close = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are short lines."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        say(self.prog, message)
        self.exit(2)


def at_least(least: int, why: str) -> Callable[[str], int]:
    """Return a type of arguments: a number that is not smaller."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text}: no number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{text}: {why}")
        return value

    return number


def dtype(text: str) -> str:
    """The type of `--dtype`: the name of a floating-point dtype of torch."""
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(
            f"{text}: expected one of {', '.join(DTYPES)}{nearest(text, DTYPES)}"
        )
    return text


def size(text: str) -> int:
    """The type of `--file-size`: bytes, such as 2GB."""
    match = SIZE.fullmatch(text.upper())
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text}: no size such as 2GB")
    return int(match[1]) * UNITS[match[2]]


# --- checkpoint ---


def of_list(prog: str) -> Parser:
    parser = Parser(prog=prog, description=LISTS, epilog=CODES)
    parser.add_argument("root", metavar="ROOT", type=Path)
    parser.add_argument("--verify", action="store_true", help="read every file, and compare its checksum")
    parser.add_argument(
        "--best", action="store_true", help="only the good step with the best metric: its path"
    )
    parser.add_argument("--mode", choices=MODES, help="the better metric; by default min")
    add_json(parser)
    return parser


def of_prune(prog: str) -> Parser:
    parser = Parser(prog=prog, description=PRUNES, epilog=CODES)
    count = at_least(0, "0 or more")
    parser.add_argument("root", metavar="ROOT", type=Path)
    parser.add_argument(
        "--keep",
        type=at_least(1, "keep at least 1"),
        required=True,
        metavar="N",
        help="how many good steps stay",
    )
    parser.add_argument(
        "--every", type=at_least(1, "1 or more"), metavar="N", help="steps divisible by N stay, too"
    )
    parser.add_argument("--best", type=count, default=0, metavar="N", help="the N best by metric stay, too")
    parser.add_argument("--mode", choices=MODES, default="min", help="the better metric; by default min")
    parser.add_argument("--trash", type=Path, metavar="DIR", help="move steps there, and remove none")
    parser.add_argument("--dry-run", action="store_true", help="only say what would become of each")
    return parser


def of_pin(prog: str) -> Parser:
    return of_marks(prog, "Keep steps, whatever the policy of the run or of `checkpoint prune`.")


def of_unpin(prog: str) -> Parser:
    return of_marks(prog, "Leave pinned steps to the policies again.")


def of_marks(prog: str, what: str) -> Parser:
    parser = Parser(prog=prog, description=what, epilog=PIN_CODES)
    parser.add_argument("steps", metavar="STEP", type=Path, nargs="+", help="the folder of a step")
    return parser


def of_inspect(prog: str) -> Parser:
    parser = Parser(
        prog=prog,
        description="Print what a sharded checkpoint, or that of a step, holds: keys, shapes, dtypes, bytes.",
        epilog=LOOK_CODES,
    )
    parser.add_argument("folder", metavar="DIR", type=Path)
    add_json(parser)
    return parser


def of_diff(prog: str) -> Parser:
    parser = Parser(
        prog=prog,
        description="Compare two steps, or two sharded checkpoints: keys, shapes, dtypes, bits of values.",
        epilog=DIFF_CODES,
    )
    parser.add_argument("a", metavar="A", type=Path)
    parser.add_argument("b", metavar="B", type=Path)
    add_json(parser)
    return parser


def of_verify(prog: str) -> Parser:
    parser = Parser(
        prog=prog,
        description="Read all of a step, or of a sharded checkpoint, and say whether it is what was saved.",
        epilog=LOOK_CODES,
    )
    parser.add_argument("folder", metavar="DIR", type=Path)
    add_json(parser)
    return parser


def of_export(prog: str) -> Parser:
    parser = Parser(
        prog=prog,
        description="Write the model of a checkpoint as a folder that from_pretrained opens.",
        epilog=EXPORT_CODES,
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="a step, or what a manager wrote")
    parser.add_argument("target", metavar="OUT", type=Path)
    parser.add_argument(
        "--like", metavar="MODEL", help="folder with config.json, tokenizer, ...; by default DIR's"
    )
    parser.add_argument(
        "--dtype", type=dtype, help="what weights are cast to, such as bfloat16; by default as saved"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a model that OUT holds")
    parser.add_argument(
        "--trust", action="store_true", help="read files of verl's own manager, which runs what they say"
    )
    parser.add_argument(
        "--adapter",
        choices=(MERGE, ALONE),
        default=MERGE,
        help="of a model with a LoRA of peft: the merged model, or the adapter in peft's own format",
    )
    parser.add_argument(
        "--adapter-config", metavar="FOLDER", help="with adapter_config.json; by default the checkpoint's"
    )
    parser.add_argument("--adapter-name", metavar="NAME", help="of several adapters the one that is written")
    parser.add_argument("--progress", action="store_true", help="a bar on standard error; needs tqdm")
    return parser


def add_json(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="as one JSON object")


#: The actions of `checkpoint`, and the parser of each.
CHECKPOINT: dict[str, Callable[[str], Parser]] = {
    "list": of_list,
    "prune": of_prune,
    "pin": of_pin,
    "unpin": of_unpin,
    "inspect": of_inspect,
    "diff": of_diff,
    "verify": of_verify,
    "export": of_export,
}


# --- convert ---


def of_convert(prog: str) -> Parser:
    known = textwrap.wrap(f"values of model_type: {', '.join(MODEL_TYPES)}", 80)
    parser = Parser(
        prog=prog,
        description=CONVERTS,
        epilog="\n".join((*known, CONVERT_CODES)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SOURCE", type=Path, help="a model's folder, or a checkpoint's")
    parser.add_argument("target", metavar="TARGET", type=Path)
    parser.add_argument(
        "--like", metavar="MODEL", help="of a checkpoint: folder with config.json, tokenizer, ..."
    )
    parser.add_argument("--dtype", type=dtype, help="of files: what weights are cast to, such as bfloat16")
    parser.add_argument(
        "--file-size", type=size, metavar="BYTES", help="of files: at most so many each, such as 2GB"
    )
    parser.add_argument(
        "--ep",
        type=at_least(1, "no number of parts, 1 or more"),
        metavar="N",
        help="of a checkpoint with Megatron's distributed optimizer: write one for a grid with EP N",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what TARGET holds")
    parser.add_argument("--dry-run", action="store_true", help="only check, and say what would be written")
    return parser
