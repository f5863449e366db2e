"""Errors inside `dcp.save` and `dcp.load` that cannot be pickled.

On torch >= 2.7, which is left as it is, these run where torch has the correction.
"""

from __future__ import annotations

import pickle
import threading
import traceback
from types import CodeType
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from packaging.version import Version
from torch.distributed.checkpoint import api as errors
from torch.distributed.checkpoint.api import CheckpointException

from torch_dcp_backport.dcp import collectives

TORCH = Version(torch.__version__).release[:2]
AFFECTED = (2, 4) <= TORCH < (2, 7)
open_upstream = pytest.mark.skipif(not AFFECTED, reason="torch >= 2.7 is left as it is, and has the defect")


class Locked(OSError):
    """Holds what pickle refuses."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Precise(Exception):
    """Is pickled, and needs other arguments when it is unpickled."""

    def __init__(self, text: str, *, code: int) -> None:
        super().__init__(text)
        self.code = code


class Bytes(UnicodeDecodeError):
    """Its built-in class is not made of a text."""

    def __init__(self, text: str) -> None:
        super().__init__("utf-8", b"1", 0, 1, text)
        self.lock = threading.Lock()


class Interrupted(KeyboardInterrupt):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Disguised(OSError):
    """Is unpickled as what is no error, which the ranks would take for a result."""

    def __reduce__(self) -> Any:
        return str, ("no error",)


class Leaving(OSError):
    """Ends whoever pickles it."""

    def __reduce__(self) -> Any:
        raise SystemExit(1)


class Untold(SyntaxError):
    """Cannot even be formatted."""

    def __init__(self, text: str) -> None:
        super().__init__(text, ("no space", 1, 2, threading.Lock()))


ERRORS = {
    "a lock": (lambda: Locked("no space"), OSError),
    "other arguments": (lambda: Precise("no space", code=5), Exception),
    "no text": (lambda: Bytes("no space"), RuntimeError),
    "no error": (lambda: Disguised("no space"), OSError),
    "an exit": (lambda: Leaving("no space"), OSError),
    "an interrupt": (lambda: Interrupted("no space"), KeyboardInterrupt),
    "an ordinary one": (lambda: PermissionError(13, "no space"), PermissionError),
}
# The step of a save or a load, and whether the coordinator alone takes it.
STEPS = {"plan": False, "global plan": True, "write": False, "finish": True, "read": False}


class Fault:
    """Raises at a step, on the last rank or on the coordinator."""

    def __init__(self, step: str, case: str) -> None:
        self.step, self.case = step, case
        self.rank = 0 if STEPS[step] else dist.get_world_size() - 1

    def at(self, step: str) -> None:
        if step == self.step and dist.get_rank() == self.rank:
            raise ERRORS[self.case][0]()


class Planner(dcp.DefaultSavePlanner):
    fault: ClassVar[Any] = None

    def create_local_plan(self) -> Any:
        self.fault.at("plan")
        return super().create_local_plan()

    def create_global_plan(self, plans: Any) -> Any:
        self.fault.at("global plan")
        return super().create_global_plan(plans)


class Writer(dcp.FileSystemWriter):
    fault: ClassVar[Any] = None

    def write_data(self, *args: Any) -> Any:
        self.fault.at("write")
        return super().write_data(*args)

    def finish(self, *args: Any, **kwargs: Any) -> None:
        self.fault.at("finish")
        super().finish(*args, **kwargs)


class Reader(dcp.FileSystemReader):
    fault: ClassVar[Any] = None

    def read_data(self, *args: Any) -> Any:
        self.fault.at("read")
        return super().read_data(*args)


def save_and_load(folder: str) -> None:
    dcp.save({"w": torch.ones(2)}, storage_writer=Writer(folder), planner=Planner())
    dcp.load({"w": torch.ones(2)}, storage_reader=Reader(folder))


def fail_at(api: Any, folder: str, step: str, case: str) -> None:
    fault = Planner.fault = Writer.fault = Reader.fault = Fault(step, case)
    with pytest.raises(CheckpointException) as caught:
        save_and_load(folder)
    assert list(caught.value.failures) == [fault.rank]
    error, stack = caught.value.failures[fault.rank]
    assert isinstance(error, ERRORS[case][1])
    assert "no space" in str(error)
    assert type(ERRORS[case][0]()).__name__ in str(caught.value), "the class is not named"
    assert any(frame.name == "at" for frame in stack)
    # The group is in step: nothing of the failed call is left over.
    fault.step = "none"
    save_and_load(folder)


@open_upstream
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("case", ERRORS)
def test_an_error_of_any_class_is_raised_on_every_rank(ranks, tmp_path, step, case):
    ranks(fail_at, str(tmp_path), step, case, world=2)


@open_upstream
@pytest.mark.parametrize("step", STEPS)
def test_an_error_that_stock_loses(fixed, tmp_path, step):
    # In a group of one rank, which cannot hang.
    fixed(fail_at, str(tmp_path), step, "a lock", world=1, broken=True)


class Frame(traceback.FrameSummary):
    """As later releases of Python 3.13 make them."""

    _code: CodeType


def fail_with_code_in_the_stack(api: Any, folder: str, step: str) -> None:
    extract = traceback.extract_tb

    def extract_with_code(*args: Any, **kwargs: Any) -> traceback.StackSummary:
        stack = extract(*args, **kwargs)
        frames = [Frame(frame.filename, frame.lineno, frame.name) for frame in stack]
        for frame in frames:
            frame._code = fail_at.__code__
        stack[:] = frames
        return stack

    errors.tb.extract_tb = extract_with_code
    try:
        fail_at(api, folder, step, "an ordinary one")
    finally:
        errors.tb.extract_tb = extract


@pytest.mark.skipif((2, 7) <= TORCH < (2, 13), reason="torch >= 2.7 is left as it is")
@pytest.mark.parametrize("step", STEPS)
def test_code_objects_in_a_stack_do_not_travel(ranks, tmp_path, step):
    ranks(fail_with_code_in_the_stack, str(tmp_path), step, world=2)


@open_upstream
def test_code_objects_fail_in_stock(fixed, tmp_path):
    fixed(fail_with_code_in_the_stack, str(tmp_path), "write", world=1, broken=True)


def fail_alone(folder: str) -> tuple[str, bool]:
    error = Locked("no space")

    class Alone(dcp.FileSystemWriter):
        def write_data(self, *args: Any) -> Any:
            raise error

    with pytest.raises(CheckpointException) as caught:
        dcp.save({"w": torch.ones(2)}, storage_writer=Alone(folder))
    return str(caught.value), caught.value.failures[0][0] is error


def test_without_a_group_the_error_itself_stays(tmp_path):
    text, same = fail_alone(str(tmp_path))
    assert "Locked: no space" in text
    assert same


def test_an_error_without_a_text_has_its_class() -> None:
    sent = collectives.portable_error(Untold("no space"))
    assert type(sent) is SyntaxError
    assert str(sent) == "Untold"
    assert type(pickle.loads(pickle.dumps(sent))) is SyntaxError
