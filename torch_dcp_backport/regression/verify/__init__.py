"""`python -m torch_dcp_backport verify`: real loads, and a get to rank 0, with stock torch and with the fix.

Imports torch only in the ranks, and downloads nothing. Exit code: 0 within budget, 1 not, 2 could not run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import traceback
from collections.abc import Sequence
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any

from torch_dcp_backport._version import __version__
from torch_dcp_backport.regression import launch
from torch_dcp_backport.regression.verify import place, report
from torch_dcp_backport.regression.verify.place import CannotRun
from torch_dcp_backport.regression.verify.progress import Steps

WORK = "torch_dcp_backport.regression.verify.work:"
LIMIT = 600.0  # seconds for one case
# A tiny model is smaller than the default staging budget, which would hide what the call needs.
TINY_STAGING = {"TORCH_DCP_BACKPORT_STAGING_MIB": "1"}
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
FIRST_STEPS = 2  # to look, and to write
RUN_STEPS = 2 * len(report.CASES)  # the cases of both sides


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        return verify(options)
    except BrokenPipeError:
        raise  # of standard output: the command's own affair
    except (CannotRun, launch.LaunchError) as error:
        print(f"verify could not run: {error}", file=sys.stderr)
    except Exception:  # exit code 1 is for a fix that is not within its budget
        traceback.print_exc()
    return 2


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m torch_dcp_backport verify", description=__doc__)
    made.add_argument(
        "--size",
        choices=("full", "tiny"),
        default="full",
        help="full is Qwen2.5-0.5B (default); tiny takes a minute or two, has a staging budget of 1 MiB, and "
        "shows no seconds",
    )
    made.add_argument("--world", type=int, default=4, help="ranks, at least 2 (default 4)")
    made.add_argument(
        "--device",
        metavar="TYPE",
        help="cpu, cuda or another accelerator's type (default: an accelerator that has a device for each "
        "rank, else cpu; the choice is printed)",
    )
    made.add_argument(
        "--backend",
        metavar="NAME",
        help="gloo, nccl, hccl or any other of torch.distributed, or one per device type as in "
        "cpu:gloo,cuda:nccl (default: torch's own for the device)",
    )
    made.add_argument(
        "--runs", type=int, default=1, help="how often both sides run; the picture has them all (default 1)"
    )
    made.add_argument("--plot", default="memory.png", metavar="FILE", help="the picture (default memory.png)")
    made.add_argument("--no-plot", action="store_true", help="no picture")
    made.add_argument("--json", metavar="FILE", help="everything that was measured")
    return made


def verify(options: argparse.Namespace) -> int:
    if options.world < 2:
        raise CannotRun(f"--world {options.world}: one rank has nothing to share, give 2 or more")
    if options.runs < 1:
        raise CannotRun(f"--runs {options.runs}: give 1 or more")
    if find_spec("torch") is None:
        raise CannotRun("torch is not installed for this Python")
    _check_writable("--json", options.json)
    _check_writable("--plot", None if options.no_plot else options.plot)
    library = all(find_spec(name) is not None for name in ("transformers", "safetensors"))
    total = FIRST_STEPS + options.runs * RUN_STEPS
    with TemporaryDirectory(prefix="dcp-backport-verify-") as folder, Steps(total, sys.stderr) as steps:
        runner = Runner(options.size, options.world, folder, library, steps)
        chosen = runner.choose(options.device, options.backend)
        if not library:
            _say("transformers and safetensors are not both here: a built-in model of the same shape")
            _say("instead, in torch.save files. `pip install transformers safetensors` brings them.")
        _say(f"device: {chosen.device} ({chosen.reason}), backend: {chosen.backend}")
        stock = runner.stock()
        fixed = runner.fixed(stock)
        runs = [(stock, fixed), *(runner.again(stock) for _ in range(1, options.runs))]
    about = {
        "version": __version__,
        "torch": stock.evidence["torch"],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "size": options.size,
        "runs": options.runs,
        "world": options.world,
        "device": chosen.device,
        "device_reason": chosen.reason,
        "backend": chosen.backend,
        "library": library,
        **runner.written,
    }
    faults = [
        f"run {number}, {fault}" if number > 1 else fault
        for number, (_, side) in enumerate(runs, 1)
        for fault in report.failures(side)
    ]
    is_timed = options.size != "tiny"
    table = report.table((stock, fixed), is_timed=is_timed)
    print(_headline(about), table, "", report.legend(chosen.device, is_timed=is_timed), "", sep="\n")
    if options.runs > 1:
        print(f"The table is the first of {options.runs} runs; all have to stay within the budget.\n")
    if options.json:
        document = report.document(runs, about, faults)
        with open(options.json, "w") as file:
            json.dump(document, file)
        print(f"measurements: {options.json}")
    if not options.no_plot:
        print(_draw(runs, about, options.plot))
    return _verdict(runs, faults, chosen.device)


def _check_writable(option: str, path: str | None) -> None:
    """Raise CannotRun now, and not after some minutes of work."""
    if path is None:
        return
    there = os.path.exists(path)
    try:
        open(path, "a").close()
    except OSError as error:
        raise CannotRun(f"{option} {path} cannot be written: {error.strerror}") from None
    if not there:
        os.remove(path)


class Runner:
    """The cases of each side, on the devices of `choose`; the first side also writes the checkpoint."""

    def __init__(self, size: str, world: int, folder: str, library: bool, steps: Steps) -> None:
        self.written: dict[str, Any] = {}
        self._world = world
        self._arguments = {"size": size, "folder": folder, "library": library}
        self._environment = {**OFFLINE, **(TINY_STAGING if size == "tiny" else {})}
        self._steps = steps
        self._place: place.Place

    def choose(self, device: str | None, backend: str | None) -> place.Place:
        """Choose the ranks' place; a rank looks: the parent of all ranks must not touch an accelerator."""
        look = launch.Job("devices", WORK + "look", 1, {"device": device}, seconds=LIMIT)
        (report,) = self._run(launch.STOCK, [look], preload=())["devices"]
        if report.ending != "finished":
            raise CannotRun(f"torch could not be asked for its devices and backends.\n{report}")
        self._place = place.choose(place.Seen(**report.result), self._world, device, backend)
        return self._place

    def stock(self) -> report.Side:
        write = launch.Job("write", WORK + "write", 1, self._arguments, seconds=LIMIT)
        reports = self._run(launch.STOCK, [write, *self._cases()])
        evidence = reports["write"][0].evidence
        fixed = " (it has the fix)" if evidence.get("fixed") == "yes" else ""
        return _side(f"torch {evidence.get('torch', '')} as it is{fixed}", reports)

    def fixed(self, stock: report.Side) -> report.Side:
        """Run the cases with the shim, or our functions by their own name where torch needs no shim."""
        native = stock.evidence["fixed"] == "yes"
        if native:
            _say("this torch needs no backport: compared with torch_dcp_backport.state_dict, called directly")
        side = _side(
            f"torch_dcp_backport.state_dict {__version__}"
            if native
            else f"with torch_dcp_backport {__version__}",
            self._run(launch.DIRECT if native else launch.PATCHED, self._cases()),
        )
        if side.evidence.get("code") != "torch_dcp_backport":
            raise CannotRun(
                f"the ranks of the backport ran the code of {side.evidence.get('code', 'nobody')}; "
                f"torch_dcp_backport.status() there: {side.evidence.get('outcome', 'unknown')}, because "
                f"{side.evidence.get('reason', 'the ranks did not say')}"
            )
        return side

    def again(self, stock: report.Side) -> report.Run:
        """Run the cases of both sides once more, on the same checkpoint."""
        other = _side(stock.label, self._run(launch.STOCK, self._cases()))
        return other, self.fixed(other)

    def _cases(self) -> list[launch.Job]:
        return [
            launch.Job(
                case.name,
                WORK + case.target,
                self._world,
                {
                    **self._arguments,
                    "device": self._place.device,
                    **({} if case.meta is None else {"meta": case.meta}),
                },
                self._place.backend,
                self._place.device,
                seconds=LIMIT,
            )
            for case in report.CASES
        ]

    def _run(
        self, way: launch.Way, jobs: list[launch.Job], preload: Sequence[str] | None = None
    ) -> dict[str, list[launch.RankReport]]:
        if preload is None:
            preload = ["transformers.models.qwen2.modeling_qwen2"] if self._arguments["library"] else []

        def done(job: launch.Job, reports: list[launch.RankReport]) -> None:
            self._steps.finish(f"{way.name}: {job.name}", ", ".join(sorted({r.ending for r in reports})))
            if job.name == "write":
                if reports[0].ending != "finished":
                    raise CannotRun(f"the checkpoint could not be written.\n{reports[0]}")
                self.written = reports[0].result

        def waiting(job: launch.Job) -> None:
            self._steps.waiting(f"{way.name}: {job.name}")

        return launch.run(
            way, jobs, preload=preload, environment=self._environment, done=done, waiting=waiting
        )


def _side(label: str, reports: dict[str, list[launch.RankReport]]) -> report.Side:
    return report.Side(label, {case.name: reports[case.name] for case in report.CASES})


def _headline(about: dict[str, Any]) -> str:
    model = "Qwen2ForCausalLM from transformers" if about["library"] else "a built-in model of Qwen2's shape"
    kind = "safetensors" if about["library"] else "torch.save"
    where = f"{about['cores']} CPU cores" if about["device"] == "cpu" else f"a {about['device']} device each"
    return (
        f"torch {about['torch']}, {model}, {about['parameters']:,} parameters in bfloat16,\n"
        f"{about['files']} {kind} files, {about['world']} ranks, {about['backend']} on {where}"
        + (f", {about['runs']} runs" if about["runs"] > 1 else "")
    )


def _draw(runs: Sequence[report.Run], about: dict[str, Any], path: str) -> str:
    if find_spec("matplotlib") is None:
        return "picture: none, matplotlib is not here (`pip install matplotlib`)"
    if not all(map(report.measured, runs)):
        return f"picture: none, {_unknown(about['device'])}"
    from torch_dcp_backport.regression.verify.plot import draw

    draw(runs, _headline(about), path)
    return f"picture: {path}"


def _unknown(device: str) -> str:
    """The reason why peaks are not known."""
    if device == "cpu":
        return "this system does not tell a process's memory (no /proc)"
    return f"torch.{device} does not tell what a process has allocated"


def _verdict(runs: Sequence[report.Run], faults: list[str], device: str) -> int:
    fixed = runs[0][1]
    if not all(map(report.measured, runs)):
        print(f"peaks are NOT known: {_unknown(device)}. Storages and values are.")
    if faults:
        print(f"FAILED ({fixed.label}):", *faults, sep="\n  ")
        cases = [reports for _, side in runs for reports in side.cases.values()]
        failed = [r for reports in cases for r in reports if r.ending != "finished"]
        print(*failed[:1], sep="\n")  # the others' output is in the JSON file
        return 1
    print(f"PASSED: {fixed.label} stayed within its budget on every rank, and every value is equal")
    return 0


def _say(text: str) -> None:
    print(text, flush=True)
