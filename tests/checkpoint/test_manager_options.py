"""Options that cannot be, reservations, and small functions."""

from __future__ import annotations

import dataclasses
import datetime
import signal
import time
import types
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from damaging import flip
from heard import heard
from trainer import Loader, Trainer

from torch_dcp_backport.checkpoint import (
    CheckpointHandler,
    MegatronCheckpointManager,
    SaveSignals,
    extract_step,
    find_latest_ckpt_path,
    get_checkpoint_tracker_filename,
    should_save_ckpt_esi,
)
from torch_dcp_backport.checkpoint._src import store
from torch_dcp_backport.checkpoint._src.expiry import EXPIRY
from torch_dcp_backport.dist_checkpointing import CheckpointingException
from torch_dcp_backport.transfer._src import once


@pytest.mark.parametrize(
    "options, text",
    [
        ({"resume_mode": "always"}, "expected one of disable, auto, resume_path"),
        ({"resume_mode": "resume_path"}, "needs resume_from_path"),
        ({"on_data": "guess"}, "expected error or restart"),
        ({"max_ckpt_to_keep": 0}, "keep at least 1"),
        ({"default_hdfs_dir": "nowhere://x"}, "nowhere://x cannot be reached: Protocol not known"),
        ({"on_upload": "shrug"}, "expected raise or warn"),
        ({"mode": "RAY"}, "only SPMD"),
    ],
)
def test_an_option_that_cannot_be(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        CheckpointHandler(None, Loader(), default_local_dir=tmp_path, **options)


def test_a_loader_without_a_state_is_refused_unless_asked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="its data would start from the beginning"):
        CheckpointHandler(None, [1, 2], default_local_dir=tmp_path)
    CheckpointHandler(None, [1, 2], default_local_dir=tmp_path, on_data="restart")


@pytest.mark.parametrize(
    "config", [{"save_contents": ["modle"]}, {"load_contents": "hf_model"}, {"load_contents": ["modle"]}]
)
def test_contents_that_are_not_offered(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is not offered; there are model, optimizer, extra"):
        Trainer(tmp_path, config=config)


@dataclasses.dataclass
class Verls:
    """As verl's CheckpointConfig."""

    _target_: str = ""
    save_contents: Any = ("model", "optimizer", "extra")
    load_contents: Any = ("model", "optimizer", "extra")
    async_save: bool = False
    mbridge_config: Any = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Misspelt(Verls):
    asnyc_save: bool = True


class Named(NamedTuple):
    save_contents: Any = ("model",)
    asnyc_save: bool = True


class Slotted:
    __slots__ = ("asnyc_save", "save_contents")


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"save_content": ["model"]}, "no save_content: .*did you mean save_contents"),
        ({"asnyc_save": True}, "no asnyc_save: .*did you mean async_save"),
        (
            {"load_contents": ["model"], "contents": ["model"]},
            "there are save_contents, .* save_lora_only",
        ),
        (types.SimpleNamespace(loadcontents=["model"]), "did you mean load_contents"),
        (Misspelt(), "did you mean async_save"),
        (Named(), "did you mean async_save"),
        (Slotted(), "did you mean async_save"),
    ],
)
def test_a_setting_that_is_misspelt_is_refused(tmp_path: Path, config: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Trainer(tmp_path, config=config)


class Known(NamedTuple):
    save_contents: Any = ("model",)


def test_the_settings_of_a_named_tuple_are_taken(tmp_path: Path) -> None:
    assert Trainer(tmp_path, config=Known()).manager.checkpoint_save_contents == ("model",)


def test_verls_own_settings_are_known_and_unused_ones_said_once(tmp_path: Path, caplog) -> None:
    once.forget()
    Trainer(tmp_path, config=Verls())
    assert "changes nothing here" not in caplog.text
    for _ in range(2):
        Trainer(tmp_path, config=Verls(mbridge_config={"memory_efficient": True}))
    assert caplog.text.count("mbridge_config changes nothing here") == 1


@dataclasses.dataclass
class Later(Verls):
    """As verl 0.9's CheckpointConfig, and one after it."""

    strict: bool = True
    save_lora_only: bool = False
    brand_new: Any = dataclasses.field(default_factory=lambda: ["a"])


def test_a_later_release_s_settings_at_their_defaults_are_taken(tmp_path: Path, caplog) -> None:
    once.forget()
    Trainer(tmp_path, config=Later())
    assert caplog.text.count("here") == 1
    assert "checkpoint_config's brand_new=['a'], which is not known, has no effect here" in caplog.text
    Trainer(tmp_path, config=Later(strict=False))
    assert "strict changes nothing here: an export is complete, or an error" in caplog.text
    with pytest.raises(ValueError, match="checkpoint_config has no brand_new"):
        Trainer(tmp_path, config=Later(brand_new=["b"]))
    # Without a class nothing is known of a default.
    with pytest.raises(ValueError, match="checkpoint_config has no brand_new"):
        Trainer(tmp_path, config={"brand_new": ["a"]})
    with pytest.raises(ValueError, match="save_lora_only=2: expected True or False"):
        Trainer(tmp_path, config={"save_lora_only": 2})


def test_adapters_alone_are_not_saved(tmp_path: Path) -> None:
    """Of a model without any, that asks for nothing; of Megatron's nothing is known."""
    Trainer(tmp_path, config={"save_lora_only": True})
    with pytest.raises(ValueError, match=r"save_lora_only=True is not offered: .* save_adapter\(folder\)"):
        MegatronCheckpointManager(
            model=torch.nn.Linear(2, 2), checkpoint_config={"save_lora_only": True, "strict": True}
        )


def told_of_unused(api: Any, folder: Path) -> list[str]:
    with heard("checkpoint") as said:
        for _ in range(2):
            Trainer(folder, config=Verls(mbridge_config={"memory_efficient": True}))
            MegatronCheckpointManager(model=torch.nn.Linear(2, 2), bridge=object())
    return said


def test_what_changes_nothing_is_said_by_the_first_rank_alone(ranks, tmp_path: Path) -> None:
    first, other = ranks(told_of_unused, tmp_path, world=2)
    assert len(first) == 2
    assert "mbridge_config changes nothing here" in first[0]
    assert "bridge: changes nothing here" in first[1]
    assert other == []


def test_verls_own_arguments_of_megatrons_manager(caplog) -> None:
    once.forget()
    model = torch.nn.Linear(2, 2)
    MegatronCheckpointManager(model=model, bridge=None, provider=None, peft_cls=None)
    assert "changes nothing" not in caplog.text
    for _ in range(2):
        MegatronCheckpointManager(model=model, bridge=object(), use_dist_checkpointing=False)
    assert caplog.text.count("bridge, use_dist_checkpointing=False: changes nothing here") == 1
    with pytest.raises(TypeError, match="lr_scheduler"):
        MegatronCheckpointManager(model=model, lr_scheduler=None)  # type: ignore[call-arg]


def test_the_newest_step_by_its_checksums(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    for step in (3, 4):
        trainer.handler.save_checkpoint(step)
    flip(tmp_path / "global_step_4" / "data_0.pt")
    assert find_latest_ckpt_path(tmp_path) == str(tmp_path / "global_step_4")
    assert find_latest_ckpt_path(tmp_path, verify=True) == str(tmp_path / "global_step_3")
    for step in (5, 6):
        for name in ("actor", "critic"):
            trainer.manager.save_checkpoint(tmp_path / "parts" / f"global_step_{step}" / name, None, step)
    flip(tmp_path / "parts" / "global_step_6" / "critic" / "dist_ckpt" / "__0_0.distcp")
    assert str(find_latest_ckpt_path(tmp_path / "parts")).endswith("6")
    assert str(find_latest_ckpt_path(tmp_path / "parts", verify=True)).endswith("5")


def test_steps_of_others_are_named_in_one_line_of_a_resume(tmp_path: Path, caplog) -> None:
    trainer = Trainer(tmp_path)
    trainer.handler.save_checkpoint(3)
    for step in (1, 2, 9):
        (tmp_path / f"global_step_{step}").mkdir()
    assert Trainer(tmp_path).handler.load_checkpoint() == 3
    (said,) = [record for record in caplog.records if "did not save" in record.message]
    assert said.levelname == "WARNING"
    assert "global_step_9: no manifest.json" in said.message
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_an_empty_root_and_disable_start_at_0(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "new")
    assert trainer.handler.load_checkpoint() == 0
    trainer.handler.save_checkpoint(4)
    assert Trainer(tmp_path / "new", resume_mode="disable").handler.load_checkpoint() == 0
    assert Trainer(tmp_path / "new").handler.load_checkpoint() == 4


@pytest.mark.parametrize("tracker", ["9", "3", "four", None])
def test_the_tracker_is_not_believed(tmp_path: Path, tracker: str | None) -> None:
    trainer = Trainer(tmp_path)
    for step in (3, 4):
        trainer.handler.save_checkpoint(step)
    path = Path(get_checkpoint_tracker_filename(tmp_path))
    assert path.read_text() == "4"
    path.unlink()
    if tracker is not None:
        path.write_text(tracker)
    assert Trainer(tmp_path).handler.load_checkpoint() == 4
    assert find_latest_ckpt_path(tmp_path) == str(tmp_path / "global_step_4")


def test_a_path_names_its_step(tmp_path: Path) -> None:
    assert extract_step("runs/global_step_12/actor") == 12
    with pytest.raises(CheckpointingException, match="no global_step_N"):
        extract_step("runs/12")
    assert find_latest_ckpt_path(None) is None
    assert find_latest_ckpt_path(tmp_path) is None


@pytest.mark.parametrize("name", EXPIRY)
def test_a_reservation_that_ends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not should_save_ckpt_esi(100)
    monkeypatch.setenv(name, str(time.time() + 300))
    assert should_save_ckpt_esi(250)
    assert not should_save_ckpt_esi(200)
    assert should_save_ckpt_esi(200, redundant_time=60)
    monkeypatch.setenv(name, str(time.time() - 1))
    assert not should_save_ckpt_esi(250)
    monkeypatch.setenv(name, "soon")
    assert not should_save_ckpt_esi(250)


def test_a_root_whose_name_is_that_of_a_draft_is_a_root(tmp_path: Path) -> None:
    root = tmp_path / ".runs.tmp-12345678"
    trainer = Trainer(root)
    trainer.handler.save_checkpoint(1)
    trainer.manager.save_checkpoint(root / "alone", global_step=2)
    assert store.examined(root / "alone", 2).fault == ""
    assert {path.name for path in root.iterdir()} == {"global_step_1", "alone", store.TRACKER}
    assert Trainer(root).handler.load_checkpoint() == 1


@pytest.mark.parametrize("keep", [1, 2])
def test_what_was_resumed_and_follows_outlives_a_damaged_newer_step(tmp_path: Path, keep: int) -> None:
    trainer = Trainer(tmp_path)
    for step in (5, 10):
        trainer.handler.save_checkpoint(step)
    shard = next((tmp_path / "global_step_10").rglob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[-300] ^= 1
    shard.write_bytes(content)
    resumed = Trainer(tmp_path, max_ckpt_to_keep=keep)
    assert resumed.handler.load_checkpoint() == 5
    assert resumed.handler.save_checkpoint(6).is_dir()
    assert Trainer(tmp_path).handler.load_checkpoint() == 6
    assert (tmp_path / "global_step_5").is_dir() == (keep == 2)


def test_a_run_that_went_back_goes_on_from_there(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    for step in (5, 10):
        trainer.handler.save_checkpoint(step)
    options = {"resume_mode": "resume_path", "resume_from_path": tmp_path / "global_step_5"}
    back = Trainer(tmp_path, max_ckpt_to_keep=1, **options)
    assert back.handler.load_checkpoint() == 5
    assert back.handler.save_checkpoint(6).is_dir()
    assert Trainer(tmp_path).handler.load_checkpoint() == 6


@pytest.mark.parametrize("step", [-1, 7.0, True, None, "7"])
def test_a_step_that_is_no_number_is_refused(tmp_path: Path, step: Any) -> None:
    with pytest.raises(CheckpointingException, match="expected a whole number from 0 on"):
        Trainer(tmp_path).handler.save_checkpoint(step)
    assert not list(tmp_path.iterdir())


def test_a_step_may_be_a_number_of_numpy(tmp_path: Path) -> None:
    Trainer(tmp_path).handler.save_checkpoint(numpy.int64(7))
    assert Trainer(tmp_path).handler.load_checkpoint() == 7


class Odd:
    """Of a class that no load makes unasked."""


def scheduler(trainer: Trainer, state: Any) -> None:
    trainer.schedule.odd = state


def options(trainer: Trainer, state: Any) -> None:
    trainer.optimizer.param_groups[0]["odd"] = state


def loader(trainer: Trainer, state: Any) -> None:
    trainer.loader.position = state


@pytest.mark.parametrize("where", [scheduler, options, loader])
def test_what_would_not_load_is_refused_by_the_save(tmp_path: Path, where: Any) -> None:
    trainer = Trainer(tmp_path, max_ckpt_to_keep=1)
    trainer.handler.save_checkpoint(1)
    where(trainer, Odd())
    with pytest.raises(CheckpointingException, match=r"would not load again: .*Odd"):
        trainer.handler.save_checkpoint(2)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["global_step_1"]
    trainer.manager.trust = trainer.handler.trust = True
    trainer.handler.save_checkpoint(2)
    assert Trainer(tmp_path, trust=True).handler.trust
    assert trainer.handler.load_checkpoint() == 2


def test_values_of_python_that_are_harmless_come_back(tmp_path: Path) -> None:
    harmless = [
        frozenset({1}),
        range(3),
        slice(1, 2),
        datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
        datetime.timedelta(3),
        Decimal("1.5"),
        {1, 2},
        1 + 2j,
    ]
    trainer = Trainer(tmp_path)
    trainer.loader.position = harmless  # type: ignore[assignment]
    trainer.handler.save_checkpoint(1)
    trainer.loader.position = 0
    trainer.handler.load_checkpoint()
    assert trainer.loader.position == harmless


def test_a_root_that_is_no_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(CheckpointingException, match="is no folder"):
            Trainer(tmp_path / name).handler.load_checkpoint()


def test_a_manager_alone_finds_what_lost_its_name(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.manager.save_checkpoint(tmp_path / "actor", global_step=1)
    (tmp_path / "actor").rename(tmp_path / ".actor.was-00000000")
    trainer.manager.load_checkpoint(tmp_path / "actor")
    trainer.handler.save_checkpoint(3)
    (tmp_path / "global_step_3").rename(tmp_path / ".global_step_3.was-00000000")
    options = {"resume_mode": "resume_path", "resume_from_path": tmp_path / "global_step_3"}
    assert Trainer(tmp_path, **options).handler.load_checkpoint() == 3


def test_reservations_that_are_over_do_not_hide_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP", "1")
    monkeypatch.setenv("SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP", str(time.time() + 30))
    assert should_save_ckpt_esi(1, 60)


def test_signals_are_watched_once(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with SaveSignals() as signals, pytest.raises(RuntimeError, match="watched already"):
        signals.__enter__()
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.parametrize("contents", [["model"], ["optimizer", "model"], ["extra"]])
@pytest.mark.parametrize("of", ["handler", "manager"])
def test_a_save_of_less_is_resumed_by_the_same_configuration(
    tmp_path: Path, contents: list[str], of: str
) -> None:
    trainer, again = (Trainer(tmp_path, config={"save_contents": contents}) for _ in range(2))
    trainer.train(1, 3)
    if of == "handler":
        trainer.handler.save_checkpoint(2)
        assert again.handler.load_checkpoint() == 2
    else:
        trainer.manager.save_checkpoint(str(tmp_path / "global_step_2"), global_step=2)
        again.manager.load_checkpoint(str(tmp_path / "global_step_2"))
    if "model" in contents:
        assert all(map(torch.equal, trainer.model.parameters(), again.model.parameters()))


def test_what_a_step_has_beyond_save_contents_is_named(tmp_path: Path) -> None:
    Trainer(tmp_path).handler.save_checkpoint(1)
    with heard("checkpoint") as said:
        assert Trainer(tmp_path, config={"save_contents": ["model"]}).handler.load_checkpoint() == 1
    assert any("has optimizer, extra, too, which is not loaded" in text for text in said)
    with heard("checkpoint") as said:
        asked = {"save_contents": ["model"], "load_contents": ["model"]}
        assert Trainer(tmp_path, config=asked).handler.load_checkpoint() == 1
    assert said == []
