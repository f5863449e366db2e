#!/usr/bin/env python3
"""A training that is killed ten times at random, beside the same training undisturbed.

    make demo-resume          or: python3 tools/lanes.py run current -- python benchmarks/resume.py

Twice: resumed on the same four ranks (with dropout: every loss and the last step have to be the same bits),
and on 1 to 6 ranks, another number at each start (the losses differ by rounding, and the largest difference
is told). All ranks get SIGKILL at once, some of the time in the middle of a save. FSDP2, or DDP before torch
2.8, with gloo on the CPU; the model is a small decoder on pages of Python's own manual.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import os
import platform
import pydoc_data.topics
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

import numpy
import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
PATHS = [str(ROOT / name) for name in ("", "examples", "tests")]
sys.path += [path for path in PATHS if path not in sys.path]

from forks import Forks, Tell  # noqa: E402
from train_resume import parallel  # noqa: E402

from torch_dcp_backport.checkpoint import CheckpointHandler, FSDPCheckpointManager  # noqa: E402

LETTERS, WIDTH, LENGTH = 128, 48, 32
#: Rows of a step: every number of ranks from 1 to 6 divides it.
BATCH = 60
RANKS = 4
#: Seconds until a rank must have told something.
PATIENCE = 120.0
#: Of kills that wait for a save to begin; the others come in any step.
IN_A_SAVE = 0.3
#: A larger difference between losses on other numbers of ranks is no rounding.
ROUNDING = 1e-4


# --- on the ranks ---


class Model(nn.Module):
    """A decoder of two layers on single letters."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(LETTERS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            # A bias of keys has no gradient but rounding, which AdamW makes as large as any other: no biases.
            nn.TransformerEncoderLayer(
                WIDTH, 4, 4 * WIDTH, dropout, batch_first=True, norm_first=True, bias=False
            )
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, LETTERS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.embed(tokens) + self.places(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


class Batches:
    """Pieces of the manual in an order of its own; its state is the same on every rank."""

    def __init__(self) -> None:
        text = "".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
        letters = torch.tensor(list(text.encode("ascii", "replace"))[: 600 * (LENGTH + 1)])
        self.rows = letters.view(-1, LENGTH + 1)
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]

    def next(self) -> torch.Tensor:
        self.count += 1
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.count))
        return self.rows[order[:BATCH]]


@dataclass(frozen=True)
class Training:
    """What all starts of a training have in common."""

    folder: Path
    dropout: float
    steps: int
    every: int
    seed: int


def train(training: Training, rank: int, world: int, meeting: Path, tell: Tell) -> None:
    """Resume and train to the end, on one rank; the first rank tells each step."""
    torch.set_num_threads(1)
    # On other ranks each load says that random numbers are others; without dropout none are drawn.
    logging.getLogger("torch_dcp_backport").setLevel(logging.ERROR)
    limit = datetime.timedelta(seconds=PATIENCE)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=limit
    )
    torch.manual_seed(training.seed)
    model = parallel(Model(training.dropout))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, training.steps)
    batches = Batches()
    torch.manual_seed(training.seed + 1 + rank)  # dropout differs between ranks
    # A step has these states, too; a fork seeds Python's anew.
    random.seed(training.seed)
    numpy.random.seed(training.seed)
    handler = CheckpointHandler(
        FSDPCheckpointManager(model, optimizer, schedule),
        batches,
        default_local_dir=training.folder,
        max_ckpt_to_keep=2,
    )
    first = handler.load_checkpoint()
    tell("resumed", first, 0.0)
    for step in range(first + 1, training.steps + 1):
        rows = batches.next()[rank::world]
        logits = model(rows[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        dist.all_reduce(mean := loss.detach() / world)
        tell("step", step, mean.item())
        if step % training.every == 0 or step == training.steps:
            tell("saving", step, 0.0)
            handler.save_checkpoint(step)
            tell("saved", step, 0.0)
    tell("ended", training.steps, 0.0)


# --- starts and kills ---


@dataclass(frozen=True)
class Kill:
    """When all ranks get SIGKILL: a moment after the first message of a kind from a step on."""

    kind: str
    step: int
    seconds: float


@dataclass
class Start:
    """One start of a training, and how it ended."""

    world: int
    resumed: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    saved: int = 0
    #: Seconds of each message since the one before, by kind.
    seconds: dict[str, list[float]] = field(default_factory=dict)
    is_killed: bool = False
    #: A step was half written when the kill came.
    is_in_a_save: bool = False

    @property
    def last(self) -> int:
        return max(self.losses, default=self.resumed)

    def hear(self, kind: str, step: int, loss: float, seconds: float) -> None:
        self.seconds.setdefault(kind, []).append(seconds)
        if kind == "resumed":
            self.resumed = self.saved = step
        elif kind == "step":
            self.losses[step] = loss
        elif kind == "saved":
            self.saved = step


def start(training: Training, world: int, meeting: Path, kill: Optional[Kill]) -> Start:
    """Train until the kill, or to the end. The ranks are forks, which have torch already."""
    found, ended = Start(world), False
    forks = Forks(world, lambda rank, tell: train(training, rank, world, meeting, tell))
    try:
        while not (ended or found.is_killed):
            since = time.monotonic()
            messages = forks.heard(PATIENCE)
            if messages is None:
                sys.exit(f"the training on {world} ranks said nothing for {PATIENCE:g} s")
            if not messages:
                sys.exit(f"the training on {world} ranks failed; see above")
            for kind, step, loss in messages:
                found.hear(kind, step, loss, time.monotonic() - since)
                ended = ended or kind == "ended"
                if kill and not found.is_killed and kind == kill.kind and step >= kill.step:
                    time.sleep(kill.seconds)
                    found.is_killed = True
    finally:
        if not ended:
            forks.kill()
        for message in forks.end()[1]:  # what the first rank told before it was gone
            found.hear(*message, 0.0)
    found.is_in_a_save = found.is_killed and any(training.folder.glob(".*.tmp-*"))
    return found


def kills_of(chance: random.Random, count: int, training: Training, calm: Start) -> list[Kill]:
    """Moments over the whole training, in order, from the seconds that steps and saves of a calm one took."""
    saves = [step for step in range(1, training.steps) if step % training.every == 0]
    kills = []
    for step in sorted(chance.sample(range(2, saves[-1] + 1), count)):
        kind, after = ("saving", "saved") if chance.random() < IN_A_SAVE else ("step", "step")
        kills.append(Kill(kind, step, chance.uniform(0, statistics.median(calm.seconds[after]))))
    return kills


def line_of(number: int, found: Start) -> str:
    ending = (
        f"killed in step {found.last + 1}" + (", in a save" if found.is_in_a_save else "")
        if found.is_killed
        else f"ended with step {found.last}"
    )
    again = found.last - found.saved if found.is_killed else 0
    return f"{number:5d} {found.world:6d} {found.resumed:13d}  {ending:29s} {again:5d}"


def disturbed(training: Training, kills: list[Kill], worlds: list[int], meetings: Path) -> list[Start]:
    """Start, kill and start again, and print a line for each."""
    print("start  ranks  resumed from  ending                        again")
    starts: list[Start] = []
    for number, (world, kill) in enumerate(zip(worlds, [*kills, None])):
        found = start(training, world, meetings / f"{training.folder.name}-{number}", kill)
        print(line_of(number, found), flush=True)
        if starts and found.resumed < starts[-1].saved:
            sys.exit(f"step {starts[-1].saved} was saved, and {found.resumed} was resumed")
        starts.append(found)
    return starts


def worlds_of(chance: random.Random, count: int) -> list[int]:
    """Numbers of ranks from 1 to 6; no two starts after each other have the same."""
    worlds: list[int] = []
    while len(worlds) < count:
        worlds.append(chance.choice([world for world in range(1, 7) if world not in worlds[-1:]]))
    return worlds


# --- what came of it ---


def farthest(starts: list[Start], calm: Start) -> float:
    """The largest difference of any loss, also of steps that were trained again, from the calm training's."""
    return max(abs(loss - calm.losses[step]) for found in starts for step, loss in found.losses.items())


def differing(training: Training, calm: Training) -> str:
    """What `checkpoint diff` says of the last steps; empty if they are the same."""
    step = f"global_step_{training.steps}"
    command = [sys.executable, "-m", "torch_dcp_backport", "checkpoint", "diff"]
    done = subprocess.run(
        [*command, str(calm.folder / step), str(training.folder / step)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode == 0:
        return ""
    lines = done.stdout.strip().splitlines() or [f"exit code {done.returncode}"]
    return "\n".join(lines if len(lines) < 12 else [*lines[:10], "...", lines[-1]])


def machine() -> str:
    return f"torch {torch.__version__}, gloo, {os.cpu_count()} cores of {platform.machine()}"


def draw(runs: dict[str, tuple[list[Start], Start]], path: str) -> None:
    """Losses of the killed trainings over the calm ones, and how far they are from them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    blue, orange, black = "#0072B2", "#E69F00", "#000000"  # told apart by all eyes (Okabe and Ito)
    figure, axes = plt.subplots(
        2, len(runs), figsize=(12, 6.2), sharex=True, sharey="row", height_ratios=(3, 1), squeeze=False
    )
    for (name, (starts, calm)), (losses, apart) in zip(runs.items(), axes.T):
        losses.plot(
            list(calm.losses), list(calm.losses.values()), color=orange, linewidth=6, label="undisturbed"
        )
        for number, found in enumerate(starts):
            steps, values = list(found.losses), list(found.losses.values())
            label = "killed and resumed" if not number else None
            losses.plot(steps, values, color=blue, linewidth=1.4, label=label)
            off = [abs(value - calm.losses[step]) for step, value in found.losses.items()]
            apart.plot(steps, off, color=blue, linewidth=1.4)
        top = max(calm.losses.values())
        for is_in_a_save, mark, label in ((False, "x", "SIGKILL"), (True, "s", "SIGKILL in a save")):
            places = [
                found.last for found in starts if found.is_killed and found.is_in_a_save == is_in_a_save
            ]
            losses.plot(places, [top * 1.04] * len(places), mark, color=black, label=label, markersize=6)
        begins = [(found.resumed, found.world) for found in starts]
        for place, (step, world) in enumerate(begins):
            losses.annotate(
                str(world), (step, top * (1.09 + 0.04 * (place % 2))), ha="center", fontsize=8, color=blue
            )
        digit = {"marker": "$4$", "markeredgewidth": 0.2, "linestyle": "none"}
        losses.plot([], [], color=blue, label="ranks from here on", **digit)
        losses.set(title=name, ylim=(None, top * 1.2))
        losses.legend(loc="center right", frameon=False)
        losses.grid(alpha=0.25)
        apart.set(xlabel="step")
        apart.grid(alpha=0.25)
    axes[0][0].set_ylabel("loss, nats a letter")
    axes[1][0].set(ylabel="difference", ylim=(0, None))
    figure.suptitle(f"A decoder of two layers, killed with SIGKILL; {machine()}", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="of the models, kills and numbers of ranks")
    parser.add_argument("--kills", type=int, default=10, help="of each of the two trainings")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=4, help="steps between two saves")
    parser.add_argument("--plot", help="where to write a picture")
    args = parser.parse_args()
    if args.kills < 1 or args.steps <= args.every + args.kills:
        parser.error(f"{args.kills} kills do not fit into {args.steps} steps with a save every {args.every}")
    chance, began = random.Random(args.seed), time.monotonic()
    print(f"{machine()}; seed {args.seed}, {args.steps} steps, a save every {args.every}", flush=True)
    import torch._dynamo  # noqa: F401  # an optimizer's first step imports it: once here, not on each rank

    runs: dict[str, tuple[list[Start], Start]] = {}
    wrong: list[str] = []
    cases = {f"on {RANKS} ranks again": 0.1, "on 1 to 6 ranks": 0.0}
    with tempfile.TemporaryDirectory(prefix="resume-") as folder:
        for place, (name, dropout) in enumerate(cases.items()):
            options = (dropout, args.steps, args.every, args.seed)
            calm_one = Training(Path(folder) / f"calm-{place}", *options)
            killed = Training(Path(folder) / f"killed-{place}", *options)
            calm = start(calm_one, RANKS, Path(folder) / f"meeting-{place}", None)
            is_same = dropout > 0
            worlds = [RANKS] * (args.kills + 1) if is_same else worlds_of(chance, args.kills + 1)
            print(f"\n{name}:")
            starts = disturbed(killed, kills_of(chance, args.kills, killed, calm), worlds, Path(folder))
            runs[name] = starts, calm
            in_a_save = sum(found.is_in_a_save for found in starts)
            apart = farthest(starts, calm)
            print(f"{args.kills} kills, {in_a_save} in the middle of a save; no saved step lost")
            if is_same:
                difference = differing(killed, calm_one)
                print(f"losses: {'all the same bits' if apart == 0 else f'differ by up to {apart:.1e}'}")
                print(
                    f"last step: {difference or 'the same bits: model, optimizer, schedule, random states'}"
                )
                wrong += [name] if difference or apart else []
            else:
                print(f"losses: differ by at most {apart:.1e} from those of {RANKS} ranks undisturbed")
                wrong += [name] if apart > ROUNDING else []
    if args.plot:
        draw(runs, args.plot)
        print(f"\n{Path(args.plot).resolve()} shows it")
    print(f"{time.monotonic() - began:.0f} s")
    if wrong:
        sys.exit(f"not as undisturbed: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
