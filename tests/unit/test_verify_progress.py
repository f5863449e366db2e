"""What `verify` says on stderr while it runs."""

from __future__ import annotations

import io
import itertools
from types import SimpleNamespace

import pytest

from torch_dcp_backport.regression.verify import progress
from torch_dcp_backport.regression.verify.progress import Steps


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock is five seconds after the last one."""
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=itertools.count(100.0, 5.0).__next__))


def screen(text: str) -> str:
    """What is left on a line that was rewritten."""
    shown = ""
    for part in text.split("\r"):
        shown = part + shown[len(part) :]
    return shown.rstrip()


def test_without_a_terminal_each_finished_step_is_a_line() -> None:
    stream = io.StringIO()
    with Steps(2, stream) as steps:
        for name in ("write", "load"):
            steps.waiting(name)
            steps.finish(name, "finished")
    assert stream.getvalue().splitlines() == ["[ 10 s] 1/2 write finished", "[ 20 s] 2/2 load finished"]


def test_without_a_terminal_a_long_step_is_told_every_20_s() -> None:
    stream = io.StringIO()
    with Steps(1, stream) as steps:
        for _ in range(9):
            steps.waiting("write")
    # The clock goes on by 5 s at each look.
    assert stream.getvalue().splitlines() == ["[ 25 s] 1/1 write ...", "[ 50 s] 1/1 write ..."]


def test_a_terminal_has_one_line_that_is_gone_at_the_end() -> None:
    stream = Terminal()
    with Steps(2, stream) as steps:
        steps.waiting("a step with a long name")
        steps.finish("a step with a long name", "finished")
        assert screen(stream.getvalue()) == ""
        steps.waiting("load")
        steps.waiting("load")
        assert screen(stream.getvalue()) == "[ 15 s] 2/2 load ..."
    assert screen(stream.getvalue()) == ""
    assert "\n" not in stream.getvalue()


def test_what_ends_the_run_leaves_a_terminal_clean() -> None:
    stream = Terminal()

    def fail() -> None:
        with Steps(2, stream) as steps:
            steps.waiting("load")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert screen(stream.getvalue()) == ""


def test_a_narrow_terminal_is_not_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "12")
    stream = Terminal()
    Steps(2, stream).waiting("load")
    assert len(screen(stream.getvalue())) == 11
