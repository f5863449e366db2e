"""python -m torch_dcp_backport COMMAND, as a shell sees it. For what `run` runs there is test_run.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from interpreters import AFFECTED, ROOT, TORCH, Fresh

from torch_dcp_backport.__main__ import CHECKPOINT, COMMANDS, HELP

M = ("-m", "torch_dcp_backport")

# What a program sees of the world; the last line of its output is JSON.
PROGRAM = """
import json, os, sys
import torch_dcp_backport
print(json.dumps(dict(
    argv=sys.argv, name=__name__, path0=os.path.realpath(sys.path[0]), file=os.path.realpath(__file__),
    main=sys.modules["__main__"].__dict__ is globals(), torch="torch" in sys.modules,
    outcome=torch_dcp_backport.status().outcome, rank=os.environ.get("RANK"))))
if sys.argv[1:] == ["exit"]:
    sys.exit(7)
if sys.argv[1:] == ["die"]:
    raise KeyError("program's own")
"""


def test_status_as_text_and_as_json(fresh: Fresh) -> None:
    text = fresh("", *M, "status")
    assert (text.code, text.err) == (0, "")
    outcome = "pending" if AFFECTED else "not-needed"
    assert f": {outcome} (" in text.out
    data = json.loads(fresh("", *M, "status", "--json").out)
    assert (data["outcome"], data["torch_version"].partition("+")[0]) == (outcome, TORCH.partition("+")[0])
    assert data["fingerprint"] in text.out


def test_status_load_shows_what_training_would_see(fresh: Fresh) -> None:
    ended = fresh("", *M, "status", "--load", "--json")
    data = json.loads(ended.out)
    assert ended.code == 0
    assert data["outcome"] == ("applied" if AFFECTED else "not-needed")
    assert bool(data["replaced"]) is AFFECTED


def test_report_is_one_block_to_paste(fresh: Fresh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DCP_BACKPORT_STAGING_MIB", "16")
    ended = fresh("", *M, "report")
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.strip().splitlines()
    assert (lines[0], lines[-1]) == ("```", "```")
    assert f": {'applied' if AFFECTED else 'not-needed'} (" in lines[1]
    assert f"packages     torch {TORCH.partition('+')[0]}" in ended.out
    assert "gloo" in ended.out
    assert "TORCH_DCP_BACKPORT_STAGING_MIB=16" in ended.out
    assert "staging      16 MiB" in ended.out


def test_report_says_what_is_wrong_with_a_budget(fresh: Fresh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DCP_BACKPORT_STAGING_MIB", "16MiB")
    ended = fresh("", *M, "report")
    assert ended.code == 0
    assert "staging      TORCH_DCP_BACKPORT_STAGING_MIB='16MiB': expected a number of MiB" in ended.out


def test_report_works_where_torch_does_not(fresh: Fresh, tmp_path: Path) -> None:
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").write_text("raise OSError('libcudart is not there')\n")
    (tmp_path / "site" / "torch" / "version.py").write_text("__version__ = '2.6.0'\n")
    ended = fresh("", *M, "report", path=str(tmp_path / "site"))
    assert ended.code == 0
    assert "cannot be imported: OSError: libcudart is not there" in ended.out


def test_status_fails_where_the_fix_cannot_be_had(fresh: Fresh, tmp_path: Path) -> None:
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").write_text("raise AssertionError\n")
    (tmp_path / "site" / "torch" / "version.py").write_text("__version__ = '2.2.0'\n")
    ended = fresh("", *M, "status", path=str(tmp_path / "site"))
    assert ended.code == 1
    assert "2.2.0 is older than 2.4" in ended.out
    off = fresh("", *M, "status", path=str(tmp_path / "site"), switch="off")
    assert (off.code, off.err) == (0, "")


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["--help"], 0, "run -m MODULE"),
        (["-h"], 0, "TORCH_DCP_BACKPORT=strict"),
        ([], 2, "usage: python -m torch_dcp_backport"),
        (["parrot"], 2, "no command 'parrot'"),
        (["--version"], 0, "0."),
        (["-V"], 0, "0."),
        (["help"], 0, "run -m MODULE"),
        (["help", "status"], 0, "exit codes: 0 applied"),
        (["help", "run"], 0, "torchrun"),
        (["help", "doctor"], 0, "exit codes: 0 nothing to change"),
        (["help", "doctor", "train.py"], 0, "exit codes: 0 nothing to change"),
        (["help", "checkpoint"], 0, "checkpoint list ROOT"),
        (["help", "checkpoint", "list"], 0, "usage: python -m torch_dcp_backport checkpoint list"),
        (["help", "checkpoint", "parrot"], 2, "no action 'parrot': there are list, prune, pin"),
        (["chekpoint"], 2, "no command 'chekpoint'; did you mean checkpoint?"),
        (["checkpoint", "lst"], 2, "no action 'lst'; did you mean list?"),
        (["checkpoint", "prune", "run", "--keep", "0"], 2, "argument --keep: 0: keep at least 1"),
        (["convert", "a", "b", "--dtype", "bf16"], 2, "did you mean bfloat16?"),
        (["doctor"], 2, "name the program to look at, as in `doctor train.py`"),
        (["help", "parrot"], 2, "no command 'parrot'"),
        (["status", "--help"], 0, "exit codes: 0 applied"),
        (["status", "--parrot"], 2, "unrecognized arguments"),
        (["run", "--help"], 0, "torchrun"),
        (["run"], 2, "nothing to run"),
        (["run", "-m"], 2, "nothing to run"),
        (["run", "no_such.py"], 2, "no file no_such.py"),
        (["run", "-m", "no_such"], 2, "no module no_such"),
        (["run", "-m", "no_such.below"], 2, "no module no_such.below"),
        (["verify", "--help"], 0, "--backend NAME"),
        (["verify", "--world", "1"], 2, "give 2 or more"),
        (["verify", "--backend", "parrot"], 2, "--backend parrot: torch 2."),
    ],
)
def test_usage(fresh: Fresh, argv: list[str], code: int, says: str) -> None:
    ended = fresh("", *M, *argv, switch="off")
    assert ended.code == code
    assert says in (ended.err if code else ended.out)
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    "argv",
    [
        ["help"],
        *(["help", command] for command in COMMANDS),
        *(["help", "checkpoint", action.split()[0]] for action in CHECKPOINT),
        ["status", "--load"],
        ["status", "--load", "--verbose"],
    ],
    ids=" ".join,
)
def test_a_line_fits_into_80_columns(fresh: Fresh, monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ended = fresh("", *M, *argv)
    assert ended.code == 0
    links = ("https://", "torch.distributed.")  # names that cannot be broken
    assert [
        line for line in ended.out.splitlines() if len(line) > 80 and not line.strip().startswith(links)
    ] == []


def test_every_action_of_checkpoint_is_in_the_help(fresh: Fresh) -> None:
    from torch_dcp_backport.checkpoint.commands import ACTIONS

    assert [action.split()[0] for action in CHECKPOINT] == list(ACTIONS)
    assert all(f"checkpoint {action} " in HELP for action in CHECKPOINT)


def test_run_is_python_with_the_fix(fresh: Fresh, tmp_path: Path) -> None:
    script = tmp_path / "jobs" / "train.py"
    script.parent.mkdir()
    script.write_text("import beside\n" + PROGRAM)
    (script.parent / "beside.py").write_text("")
    plain = fresh("", "jobs/train.py", "--help", "-m", "x y").facts
    ours = fresh("", *M, "run", "jobs/train.py", "--help", "-m", "x y").facts
    assert ours == plain
    assert ours["argv"] == ["jobs/train.py", "--help", "-m", "x y"]
    assert ours["name"] == "__main__"
    assert ours["path0"] == str(script.parent.resolve())
    assert not ours["torch"]


def test_run_activates_a_program_that_does_not_know_us(fresh: Fresh, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "from torch.distributed.checkpoint.state_dict import set_model_state_dict\n"
        "import json, sys\nprint(json.dumps(set_model_state_dict.__globals__['__name__'].split('.')[0]))\n"
    )
    assert fresh("", *M, "run", "train.py").facts == ("torch_dcp_backport" if AFFECTED else "torch")
    assert fresh("", *M, "run", "train.py", switch="off").facts == "torch"


def test_run_module_is_python_m_with_the_fix(fresh: Fresh, tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "__init__.py").write_text("")
    (tmp_path / "job" / "__main__.py").write_text(PROGRAM)
    (tmp_path / "job" / "train.py").write_text(PROGRAM)
    for name in ("job", "job.train"):
        plain = fresh("", "-m", name, "--help", "a").facts
        assert fresh("", *M, "run", "-m", name, "--help", "a").facts == plain
        assert plain["argv"][1:] == ["--help", "a"]


def test_run_passes_exit_codes_and_errors_on(fresh: Fresh, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    assert fresh("", *M, "run", "train.py", "exit").code == 7
    assert fresh("", *M, "run", "-m", "train", "exit").code == 7
    died = fresh("", *M, "run", "train.py", "die")
    assert died.code == 1
    assert died.err.splitlines()[-1] == 'KeyError: "program\'s own"'


@pytest.mark.skipif(sys.version_info < (3, 11), reason="-P came with Python 3.11")
def test_run_trusts_no_folder_when_told_so(fresh: Fresh, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    plain = fresh("", "train.py", flags=("-P",)).facts
    assert fresh("", *M, "run", "train.py", flags=("-P",)).facts == plain


def test_run_below_torchrun(fresh: Fresh, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        PROGRAM.replace("print(", "open(os.environ['RANK'] + '.json', 'w').write(")
    )
    ended = fresh(
        "", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        *M, "run", "train.py", "--lr", "1",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    for rank in ("0", "1"):
        facts = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (facts["rank"], facts["argv"]) == (rank, ["train.py", "--lr", "1"])
        assert facts["outcome"] == ("pending" if AFFECTED else "not-needed")


BAD = (
    "TORCH_DCP_BACKPORT='1' is not one of off, auto, strict: auto (or unset) patches where torch needs it, "
    "strict raises where that is not possible"
)


def flat(text: str) -> str:
    """A text without its breaks of lines."""
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["status"], 2),
        (["status", "--load", "--json"], 2),
        (["report"], 0),
        (["--help"], 0),
        (["help"], 0),
        (["--version"], 0),
        (["run", "train.py"], 2),
        (["run", "-m", "train"], 2),
    ],
)
def test_a_bad_switch_is_told_and_not_died_of(
    fresh: Fresh, tmp_path: Path, argv: list[str], code: int
) -> None:
    (tmp_path / "train.py").write_text("raise AssertionError\n")
    ended = fresh("", *M, *argv, switch="1")
    assert (ended.code, "Traceback" in ended.err) == (code, False), ended.err
    if argv[0] in ("status", "report") and "--json" not in argv:
        assert BAD in flat(ended.out)
    if "--json" in argv:
        assert json.loads(ended.out)["outcome"] == "disabled"
        assert BAD in json.loads(ended.out)["reason"]
    if argv[0] == "run":
        assert ended.err.splitlines() == [f"python -m torch_dcp_backport run: {BAD}"]


def test_a_bad_switch_is_an_error_of_every_other_program(fresh: Fresh, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch_dcp_backport\n")
    for argv in (["train.py"], ["-m", "train"], ["-c", "import torch_dcp_backport", "status"]):
        ended = fresh("", *argv, switch="1")
        assert ended.code == 1
        assert ended.err.splitlines()[-1] == f"ValueError: {BAD}"


def test_the_installed_command_tells_a_bad_switch_too(fresh: Fresh, tmp_path: Path) -> None:
    (tmp_path / "torch-dcp-backport").write_text(
        "import sys\nfrom torch_dcp_backport.__main__ import console\nsys.exit(console())\n"
    )
    ended = fresh("", "torch-dcp-backport", "status", switch="1")
    assert (ended.code, ended.err) == (2, "")
    assert BAD in flat(ended.out)


def test_strict_without_a_torch_to_fix_is_told(fresh: Fresh) -> None:
    flags = ("-S",)
    ended = fresh("", *M, "status", switch="strict", flags=flags)
    assert (ended.code, ended.err) == (1, "")
    assert ": unsupported (" in ended.out
    ended = fresh("", *M, "run", "-c", "raise AssertionError", switch="strict", flags=flags)
    assert ended.code == 2
    assert ended.err.startswith("python -m torch_dcp_backport run: torch_dcp_backport: no torch was found")
    assert len(ended.err.splitlines()) == 1


@pytest.mark.skipif(not AFFECTED, reason="nothing is replaced here")
def test_status_load_tells_what_strict_refuses(fresh: Fresh, tmp_path: Path) -> None:
    """Torch's function replaced by another package, as soon as its module is there."""
    (tmp_path / "sitecustomize.py").write_text(
        "import torch.distributed.checkpoint.state_dict as b\n"
        "def shim(model, state, info): ...\n"
        "b._load_model_state_dict = shim\n"
    )
    ended = fresh("", *M, "status", "--load", switch="strict", path=str(tmp_path))
    assert (ended.code, "Traceback" in ended.err) == (1, False), ended.err
    assert ": conflict (" in ended.out


def test_status_load_tells_that_torch_cannot_be_imported(fresh: Fresh, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart is not there')\n")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.6.0'\n")
    ended = fresh("", *M, "status", "--load", path=str(tmp_path))
    assert ended.code == 1
    assert ended.err == "python -m torch_dcp_backport status: OSError: libcudart is not there\n"


@pytest.mark.parametrize("argv", [["--help"], ["status"], ["report"], ["help", "verify"]])
def test_a_reader_that_leaves_gets_no_traceback(argv: list[str], tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *M, *argv]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, env=env, cwd=tmp_path)
    os.close(writing)
    assert done.stderr == ""
    assert done.returncode in (141, 0)  # argparse keeps this from us where it prints help


def test_verify_needs_a_run(fresh: Fresh) -> None:
    ended = fresh("", *M, "verify", "--size", "tiny", "--runs", "0")
    assert (ended.code, ended.err) == (2, "verify could not run: --runs 0: give 1 or more\n")


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_verify_looks_first_whether_it_can_write(fresh: Fresh, tmp_path: Path, option: str) -> None:
    ended = fresh("", *M, "verify", "--size", "tiny", option, "no/such/place")
    assert ended.code == 2
    assert ended.err.splitlines() == [
        f"verify could not run: {option} no/such/place cannot be written: No such file or directory"
    ]
    assert list(tmp_path.iterdir()) == []


WITHOUT_TORCH = """
import json, sys
from torch_dcp_backport.__main__ import main
code = main(sys.argv[1:])
print()
print(json.dumps([code, "torch" in sys.modules]))
"""


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["help"], 0),
        (["chekpoint"], 2),
        *((["help", command], 0) for command in COMMANDS),
        *((["checkpoint", action.split()[0], "--help"], 0) for action in CHECKPOINT),
        *((["checkpoint", action.split()[0], "--parrot"], 2) for action in CHECKPOINT),
        (["checkpoint"], 2),
        (["checkpoint", "lst"], 2),
        (["checkpoint", "prune", "run", "--keep", "none"], 2),
        (["checkpoint", "export", "a", "b", "--dtype", "bf16"], 2),
        (["convert", "a"], 2),
        (["convert", "a", "b", "--ep", "0"], 2),
        (["convert", "a", "b", "--file-size", "much"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_help_and_wrong_usage_need_no_torch(fresh: Fresh, argv: list[str], code: int) -> None:
    ended = fresh(WITHOUT_TORCH, *argv)
    assert ended.facts == [code, False]
    assert [line for line in ended.err.splitlines() if len(line) > 100] == []


def test_the_arguments_are_those_of_the_libraries() -> None:
    """Which need torch: so they stand in `arguments`, too."""
    import torch

    from torch_dcp_backport import arguments
    from torch_dcp_backport.checkpoint._src import exporting, policies
    from torch_dcp_backport.checkpoint.commands import ACTIONS
    from torch_dcp_backport.megatron.families import kinds
    from torch_dcp_backport.megatron.families.towers import TOWERS

    assert set(arguments.MODEL_TYPES) == {*kinds(), *TOWERS}
    assert (arguments.MERGE, arguments.ALONE) == (exporting.MERGE, exporting.ALONE)
    assert arguments.MODES == policies.MODES
    assert list(arguments.CHECKPOINT) == list(ACTIONS) == [action.split()[0] for action in CHECKPOINT]
    assert all(getattr(torch, name).is_floating_point for name in arguments.DTYPES)


def test_an_error_of_a_library_is_said_as_a_command_would(capsys: pytest.CaptureFixture[str]) -> None:
    from torch_dcp_backport import arguments

    text = (
        "cannot export: 1 problem(s), nothing was changed.\n  rank 0: out holds a model; "
        "Export(overwrite=True) replaces it, and name a folder with like= or --like: trust=True\n"
        f"  rank 0: {'word ' * 40}"
    )
    arguments.say("prog", text)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        "prog: cannot export: nothing was changed.",
        "  out holds a model; --overwrite replaces it, and name a folder with --like: --trust",
    ]
    assert max(map(len, lines)) <= arguments.COLUMNS
