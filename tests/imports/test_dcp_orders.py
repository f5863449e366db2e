"""`dcp.save` in every order of imports, with what was bound early, and back, in fresh interpreters."""

from __future__ import annotations

from typing import Any

import pytest
from interpreters import AFFECTED, Fresh

affected = pytest.mark.skipif(not AFFECTED, reason="nothing is replaced")

# A subclass on a storage that fails in each thread but the caller's, which waits for that.
WRITER = """
import threading, torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
warnings.simplefilter("ignore", UserWarning)
warnings.simplefilter("ignore", FutureWarning)
failed = threading.Event()
class Full(FileSystem):
    def create_stream(self, path, mode):
        if "distcp" in path.name:
            if threading.current_thread() is threading.main_thread():
                failed.wait(30)
            else:
                failed.set()
                raise OSError(28, "No space left on device")
        return super().create_stream(path, mode)
class Mine(FileSystemWriter):
    def write_data(self, plan, planner):
        return super().write_data(plan, planner)
threading.excepthook = lambda args: None  # where stock ends
writer = Mine("saved", thread_count=2)
writer.fs = Full()
"""
# What was made of torch's classes before us is ours to serve as well.
SAVE = """
import os
def save():
    try:
        dcp.save({"a": torch.ones(2), "b": torch.ones(3)}, storage_writer=writer)
    except BaseException as error:
        return type(error).__name__, "No space left" in str(error), os.path.exists("saved/.metadata")
    return "saved", False, os.path.exists("saved/.metadata")
"""
AS_IT_SHOULD = ["CheckpointException", True, False]
AS_TORCH_DOES = ["saved", False, True]
LOOK = """
import torch_dcp_backport
result = save()
status = torch_dcp_backport.status()
tell(result=result, outcome=status.outcome, listed=status.out_of_reach,
     late=[name for name in status.late_bindings if not name.startswith("torch.")])
"""

ORDERS = {
    "us, torch": "import torch_dcp_backport" + WRITER,
    "torch, us": "import torch, torch_dcp_backport" + WRITER,
    "the package, us": "import torch.distributed.checkpoint, torch_dcp_backport" + WRITER,
    "a subclass and an object of it, us": WRITER + "import torch_dcp_backport",
    "torch's other module, us": "import torch.distributed.checkpoint.state_dict, torch_dcp_backport" + WRITER,
    "us, torch's other module": "import torch_dcp_backport, torch.distributed.checkpoint.state_dict" + WRITER,
    "ours directly": "import torch_dcp_backport.dcp" + WRITER,
    "us from the middle of the package": """
import torch, wrapt
M = "torch.distributed.checkpoint.filesystem"
wrapt.register_post_import_hook(lambda module: __import__("torch_dcp_backport"), M)
"""
    + WRITER,
}


@affected
@pytest.mark.parametrize("switch", ["auto", "strict"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_failed_thread_is_an_error_in_every_order(fresh: Fresh, order: str, switch: str) -> None:
    ended = fresh(ORDERS[order] + SAVE + LOOK, switch=switch)
    assert ended.facts == {"result": AS_IT_SHOULD, "outcome": "applied", "listed": [], "late": []}
    assert "torch_dcp_backport" not in ended.err


@affected
def test_stock_publishes(fresh: Fresh) -> None:
    assert fresh(WRITER + SAVE + "tell(result=save())").facts == {"result": AS_TORCH_DOES}


@affected
def test_deactivate_restores_by_identity_and_activate_works_again(fresh: Fresh) -> None:
    facts = fresh(
        WRITER
        + SAVE
        + """
from torch_dcp_backport.activation.table import TABLE
def world():
    found = {}
    for t in served(TABLE.targets):
        if t.provider and t.module in sys.modules:
            *cls, name = t.name.split(".")
            holder = getattr(sys.modules[t.module], *cls) if cls else sys.modules[t.module]
            found[t.name] = vars(holder)[name]
    return found
"""
        + """
import torch_dcp_backport
on = world()
torch_dcp_backport.deactivate()
stock = world()
homes = sorted({origin(value) for value in stock.values()})
off = save()
os.remove("saved/.metadata")
again = torch_dcp_backport.activate()
ours = world()
second = save()
torch_dcp_backport.deactivate()
restored = all(world()[name] is value for name, value in stock.items())
tell(homes=homes, off=off, second=second, restored=restored, late=again.out_of_reach,
     changed=sum(on[name] is not stock[name] for name in on))
"""
    ).facts
    assert facts["homes"] == ["torch"]
    assert facts["off"] == AS_TORCH_DOES
    assert facts["second"] == AS_IT_SHOULD
    assert facts["restored"]
    assert facts["changed"] >= 6


EARLY = (
    WRITER
    + """
import torch.distributed.checkpoint.default_planner as planners
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan as plan
write = FileSystemWriter.write_data
class Other:
    write_data = FileSystemWriter.write_data
kept = [FileSystemWriter.write_data]
bound = writer.write_data
own = FileSystemWriter("saved").write_data
"""
)


@affected
def test_methods_bound_early_are_rebound_or_listed(fresh: Fresh) -> None:
    facts: Any = fresh(
        EARLY
        + """
def activate():
    import torch_dcp_backport
found = caught(activate)
import torch_dcp_backport, torch.distributed.checkpoint.state_dict
status = torch_dcp_backport.status()
ours = FileSystemWriter.write_data
held = [write is ours, Other.write_data is kept[0], kept[0] is ours, own.__func__ is ours]
tell(found=found, held=held, listed=status.out_of_reach,
     late=[name for name in status.late_bindings if not name.startswith("torch.")])
"""
    ).facts
    assert facts["held"] == [True, False, False, False]
    assert {"__main__.Other.write_data", "__main__.write"} <= set(facts["late"])
    assert facts["listed"] == ["method in __main__.own"]
    ((category, text, _),) = facts["found"]
    assert category == "LateImportWarning"
    assert "__main__.Other.write_data" in text


@affected
def test_methods_bound_early_are_refused_when_strict(fresh: Fresh) -> None:
    ended = fresh(EARLY + "import torch_dcp_backport", switch="strict")
    assert ended.code == 1
    assert "method in __main__.own" in ended.err.splitlines()[-1]


@affected
@pytest.mark.parametrize("trigger", ["", ".state_dict"])
def test_somebody_elses_method_is_left_alone(fresh: Fresh, trigger: str) -> None:
    facts = fresh(
        f"""
        import functools
        import torch.distributed.checkpoint{trigger}
        from torch.distributed.checkpoint import filesystem, utils
        def wrapped(function):
            @functools.wraps(function)
            def wrapper(*args, **kwargs):
                return function(*args, **kwargs)
            return wrapper
        filesystem._FileSystemWriter.write_data = theirs = wrapped(filesystem._FileSystemWriter.write_data)
        def activate():
            import torch_dcp_backport
        found = caught(activate)
        import torch_dcp_backport
        ours = "torch_dcp_backport" in utils._DistWrapper.gather_object.__code__.co_filename
        same = [filesystem._FileSystemWriter.write_data is theirs, not ours]
        tell(found=found, outcome=torch_dcp_backport.status().outcome, same=same)
        """
    ).facts
    (text,) = (text for category, text, _ in facts["found"] if category == "BackportWarning")
    assert "left out, as other code had replaced it: " in text
    assert "filesystem._FileSystemWriter.write_data (replaced by __main__)" in text
    assert facts["outcome"] == "applied"
    # The others are ours.
    assert facts["same"] == [True, False]


def test_one_thread_is_torchs_own_loop_in_the_callers(fresh: Fresh) -> None:
    facts = fresh(
        """
        import threading, torch, torch_dcp_backport, torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import filesystem
        warnings.simplefilter("ignore")
        calls = []
        loop = filesystem._write_files_from_queue
        def seen(*args, **kwargs):
            threads = threading.current_thread() is threading.main_thread(), threading.active_count()
            calls.append([*threads, kwargs["file_queue"].qsize()])
            return loop(*args, **kwargs)
        filesystem._write_files_from_queue = seen
        writer = dcp.FileSystemWriter("saved", single_file_per_rank=False)
        dcp.save({"a": torch.ones(2), "b": torch.ones(3)}, storage_writer=writer)
        tell(calls=calls)
        """
    ).facts
    assert facts["calls"] == [[True, 1, 2]]


CLASSES = {
    "as it is": "",
    "reloaded": "importlib.reload(planners)",
    "a subclass in its place": """
class Mine(planners._EmptyStateDictLoadPlanner):
    pass
planners._EmptyStateDictLoadPlanner = loader._EmptyStateDictLoadPlanner = Mine
""",
    "a function in its place": """
stock = planners._EmptyStateDictLoadPlanner
planners._EmptyStateDictLoadPlanner = lambda *args, **kwargs: stock(*args, **kwargs)
""",
}


@pytest.mark.parametrize("how", CLASSES)
def test_a_load_by_key_whatever_the_name_of_torchs_class_stands_for(fresh: Fresh, how: str) -> None:
    facts = fresh(
        """
import importlib, torch, torch_dcp_backport, torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.default_planner as planners
from torch.distributed.checkpoint import state_dict_loader as loader
warnings.simplefilter("ignore")
dcp.save({"a": torch.ones(3)}, checkpoint_id="saved")
"""
        + CLASSES[how]
        + """
loaded = loader._load_state_dict_from_keys({"a"}, checkpoint_id="saved")
tell(loaded={key: value.tolist() for key, value in loaded.items()})
"""
    ).facts
    assert facts["loaded"] == {"a": [1, 1, 1]}


def test_planner_data_that_is_no_mapping(fresh: Fresh) -> None:
    facts = fresh(
        """
        import torch, torch_dcp_backport, torch.distributed.checkpoint.state_dict
        from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
        from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata, TensorProperties
        stored = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([2]), [])
        state = {}
        _EmptyStateDictLoadPlanner().set_up_planner(state, Metadata({"a": stored}, planner_data=("x",)))
        tell(shapes={key: list(value.shape) for key, value in state.items()})
        """
    ).facts
    assert facts["shapes"] == {"a": [2]}


def test_the_hints_of_a_method(fresh: Fresh) -> None:
    facts = fresh(
        """
        import torch_dcp_backport, typing, torch.distributed.checkpoint.state_dict
        from torch.distributed.checkpoint import FileSystemWriter
        tell(hints=sorted(typing.get_type_hints(FileSystemWriter.write_data)))
        """
    ).facts
    assert {"plan", "planner", "return"} <= set(facts["hints"])


@affected
@pytest.mark.parametrize("threads", [1, 2])
def test_a_file_that_was_not_written_is_an_error(fresh: Fresh, threads: int) -> None:
    facts = fresh(
        f"threads = {threads}"
        """
import os, queue, torch, torch_dcp_backport, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
warnings.simplefilter("ignore")
class Empty(FileSystem):
    def create_stream(self, path, mode):
        if "distcp" in path.name:
            raise queue.Empty
        return super().create_stream(path, mode)
writer = dcp.FileSystemWriter("saved", thread_count=threads)
writer.fs = Empty()
try:
    dcp.save({"a": torch.ones(2), "b": torch.ones(3)}, storage_writer=writer)
    error = ""
except dcp.api.CheckpointException as caught:
    error = str(caught)
tell(error=error, published=os.path.exists("saved/.metadata"))
"""
    ).facts
    assert "was not written" in facts["error"]
    assert not facts["published"]


@affected
def test_an_interrupt_waits_for_the_files_that_are_being_written(fresh: Fresh) -> None:
    facts = fresh(
        """
        import os, signal, threading, time, torch, torch_dcp_backport, torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.filesystem import FileSystem
        warnings.simplefilter("ignore")
        open_files, begun = set(), threading.Event()
        class Slow(FileSystem):
            def create_stream(self, path, mode):
                stream = super().create_stream(path, mode)
                if "distcp" in path.name and threading.current_thread() is not threading.main_thread():
                    open_files.add(path)
                    begun.set()
                    time.sleep(2)
                    open_files.discard(path)
                elif "distcp" in path.name:
                    begun.wait(30)
                return stream
        writer = dcp.FileSystemWriter("saved", single_file_per_rank=False, thread_count=2)
        writer.fs = Slow()
        # A shell starts what runs in the background with interrupts ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        def interrupt():
            begun.wait(30)
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=interrupt).start()
        try:
            dcp.save({"a": torch.ones(2), "b": torch.ones(3)}, storage_writer=writer)
            error = ""
        except BaseException as caught:
            error = f"{type(caught).__name__}: {caught}"
        tell(error=error, still_open=len(open_files), published=os.path.exists("saved/.metadata"))
        """
    ).facts
    assert "KeyboardInterrupt" in facts["error"]
    assert facts["still_open"] == 0
    assert not facts["published"]


def test_a_load_without_a_process_group_keeps_objects_and_warns_as_torch_does(fresh: Fresh) -> None:
    """Bound by name before us, with the reader by position as before torch 2.3."""
    facts = fresh(
        """
        import torch, torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import load
        import torch_dcp_backport
        class Trainer:
            step = 0
            def state_dict(self):
                return {"step": self.step}
            def load_state_dict(self, state):
                self.step = state["step"]
        def loaded(*args, **kwargs):
            kept = {"trainer": Trainer(), "w": torch.zeros(2)}
            trainer = kept["trainer"]
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                load(kept, *args, **kwargs)
            texts = [w for w in found if "the intent is to load in a single process" in str(w.message)]
            return [kept["trainer"] is trainer, trainer.step, kept["w"].tolist(), len(texts)]
        warnings.simplefilter("ignore")
        saved = Trainer()
        saved.step = 4
        dcp.save({"trainer": saved, "w": torch.ones(2)}, checkpoint_id="saved")
        tell(by_name=loaded(checkpoint_id="saved"), by_position=loaded(dcp.FileSystemReader("saved")))
        """
    ).facts
    assert facts == {"by_name": [True, 4, [1, 1], 1], "by_position": [True, 4, [1, 1], 1]}
