"""Trackers: each library reads back what it was given, without a network; one that fails is one warning."""

from __future__ import annotations

import csv
import json
import os
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from shardwise.plugins.trackers import csv_tracker as csv_module
from shardwise.trainer.tracking import Tracking, event_in_words, series

RUN = {
    "recipe": {"steps": 3, "optimizer": {"name": "adamw", "learning_rate": 0.5}, "adapter": None},
    "step": 0,
    "steps": 3,
}
SPIKE = {"event": "spike", "step": 2, "positions": [1], "loss": 9.0, "samples": [4], "text": ["<b>once</b>"]}


def step(number: int) -> dict[str, Any]:
    return {"step": number, "loss": 1.0 / number, "grad_norm": float("nan"), "skipped": number == 2}


def tracked(
    names: list[str], folder: Path, first: int = 1, steps: int = 3
) -> tuple[list[str], Callable[[], Path]]:
    """Run trackers through steps and a spike; (the warnings, the function that gives the folder of one)."""
    warnings: list[str] = []
    tracking = Tracking(names, folder, warnings.append)
    tracking.on_start(RUN | {"folder": str(folder), "step": first - 1})
    for number in range(first, steps + 1):
        tracking.on_step(step(number))
        if number == 2:
            tracking.on_event(SPIKE)
    tracking.on_save({"step": steps, "path": "checkpoints/step-3", "committed": True})
    tracking.on_end({"step": steps, "tokens": 0, "reason": "finished", "error": ""})
    return warnings, lambda: folder / "trackers" / names[0]


@pytest.fixture(autouse=True)
def _no_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_")):
            monkeypatch.delenv(name)


def test_csv(tmp_path: Path) -> None:
    warnings, folder = tracked(["csv"], tmp_path)
    assert warnings == []
    with (folder() / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], float(row["loss"]), row["skipped"]) for row in rows] == [
        ("1", 1.0, "0.0"), ("2", 0.5, "1.0"), ("3", pytest.approx(1 / 3), "0.0"),
    ]  # fmt: skip
    assert rows[0]["grad_norm"] == "", "not a number"
    with (folder() / "events.csv").open(newline="") as file:
        assert [(row["step"], row["event"]) for row in csv.DictReader(file)] == [
            ("2", "spike"),
            ("3", "checkpoint"),
        ]
    assert "<b>once</b>" in (folder() / "events.csv").read_text()
    # A number that csv has no column for adds one.
    more = csv_module.CsvTracker(folder(), {"step": 3})
    more.log(4, {"loss": 0.25, "held_out/code": 0.5})
    with (folder() / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["held_out/code"] or "" for row in rows] == ["", "", "", "0.5"]
    assert (rows[3]["step"], rows[3]["loss"], rows[0]["loss"]) == ("4", "0.25", "1.0")
    tracked(["csv"], tmp_path, first=2)  # resumed after step 1
    with (folder() / "metrics.csv").open(newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["1", "2", "3"]


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    warnings, folder = tracked(["tensorboard"], tmp_path)
    assert warnings == []
    found = EventAccumulator(str(folder())).Reload()
    assert [(each.step, each.value) for each in found.Scalars("loss")] == [
        (1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)),
    ]  # fmt: skip
    assert [(each.step, each.value) for each in found.Scalars("event/spike")] == [(2, 1.0)]
    [said] = found.Tensors("event/spike/text_summary")
    assert said.step == 2 and b"<b>once</b>" in said.tensor_proto.string_val[0]


def logged(raw: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format (blocks of 32 KiB), which starts 7 bytes into its file."""
    at, begun = 7, b""
    raw = bytes(7) + raw
    while at + 7 <= len(raw):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", raw, at)
        piece = raw[at + 7 : at + 7 + length]
        at += 7 + length
        begun = piece if kind in (1, 2) else begun + piece  # whole or first; else middle or last
        if kind in (1, 4):
            yield begun


@pytest.mark.long
def test_wandb(tmp_path: Path) -> None:
    """Offline, as without a key. What `wandb sync` would upload is read from the file of the run."""
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    warnings, folder = tracked(["wandb"], tmp_path)
    assert warnings == []
    [path] = folder().glob("wandb/offline-run-*/*.wandb")
    rows: list[dict[str, Any]] = []
    for data in logged(path.read_bytes()[7:]):
        record = Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            rows.append(
                {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            )
    assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == [
        (1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)),
    ]  # fmt: skip
    [spike] = [row for row in rows if "event/spike" in row]
    assert spike["step"] == 2 and "<b>once</b>" in spike["event"]


@pytest.mark.long
def test_mlflow(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    warnings, folder = tracked(["mlflow"], tmp_path)
    assert warnings == []
    client = MlflowClient((folder() / "mlruns").resolve().as_uri())
    run = client.get_run((folder() / "run_id").read_text())
    assert run.data.params["optimizer.learning_rate"] == "0.5" and run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(each.step, each.value) for each in history] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert "<b>once</b>" in run.data.tags["event.2.spike"]
    assert [each.step for each in client.get_metric_history(run.info.run_id, "event/spike")] == [2]


@pytest.mark.long
def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    warnings, _ = tracked(["trackio"], tmp_path)
    assert warnings == []
    rows = SQLiteStorage.get_logs("shardwise", tmp_path.name)
    assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == [
        (1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)),
    ]  # fmt: skip
    [spike] = [row for row in rows if "event/spike" in row]
    assert spike["step"] == 2 and "<b>once</b>" in spike["event"]


class Library(ModuleType):
    """Stands for wandb and trackio: notes what opens a run, and gives another name where one is taken."""

    def __init__(self) -> None:
        super().__init__("library")
        self.Settings = dict
        self.opened: list[dict[str, Any]] = []

    def init(self, **settings: Any) -> SimpleNamespace:
        taken = settings["resume"] == "never" and settings["name"] in {run["name"] for run in self.opened}
        settings["name"] += f"-{len(self.opened)}" if taken else ""
        self.opened.append(settings)
        nothing = dict.fromkeys(("log", "finish", "define_metric"), lambda *_, **__: None)
        return SimpleNamespace(name=settings["name"], summary={}, **nothing)


@pytest.mark.parametrize(("name", "key"), [("wandb", "id"), ("trackio", "name")])
def test_a_new_run_continues_none_and_a_resumed_one_its_own(
    name: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders of one name, and a folder that is deleted and trained into again."""
    library = Library()
    monkeypatch.setitem(sys.modules, name, library)
    for folder in (tmp_path / "a" / "tuned", tmp_path / "b" / "tuned"):
        tracked([name], folder)
    tracked([name], tmp_path / "a" / "tuned", first=3)
    tracked([name], tmp_path / "b" / "tuned", first=3)
    shutil.rmtree(tmp_path / "a")
    tracked([name], tmp_path / "a" / "tuned")
    one, other, one_resumed, other_resumed, again = (run[key] for run in library.opened)
    assert (one_resumed, other_resumed) == (one, other) and len({one, other, again}) == 3


def test_one_that_fails_is_one_warning_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(csv_module.CsvTracker):
        def log(self, step: int, numbers: Any) -> None:
            raise SystemExit("no\nspace")

    monkeypatch.setattr("shardwise.plugins.trackers.tensorboard_tracker.open_tracker", lambda: Failing)
    warnings, _ = tracked(["tensorboard", "csv"], tmp_path)
    assert warnings == ["tracker tensorboard stopped: SystemExit: no"]
    assert len((tmp_path / "trackers" / "csv" / "metrics.csv").read_text().splitlines()) == 4


def test_one_that_cannot_begin_or_be_imported_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trackers").write_text("in the way")
    warnings, _ = tracked(["csv"], tmp_path)
    assert len(warnings) == 1 and warnings[0].startswith("tracker csv stopped: ")
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    warnings, _ = tracked(["wandb"], tmp_path)
    assert warnings == [
        "tracker wandb stopped: ModuleNotFoundError: import of wandb halted; None in sys.modules"
    ]


def test_one_that_hangs_does_not_hold_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(csv_module.CsvTracker):
        def log(self, step: int, numbers: Any) -> None:
            time.sleep(30)

    monkeypatch.setattr(csv_module, "CsvTracker", Hanging)
    monkeypatch.setattr("shardwise.trainer.tracking.CLOSING_SECONDS", 0.1)
    began = time.monotonic()
    warnings, _ = tracked(["csv"], tmp_path)
    assert time.monotonic() - began < 10
    assert warnings == ["trackers have not ended after 0 s: csv"]


def test_numbers_and_words_of_a_run() -> None:
    noise = {"gradient_noise": {"batch_square": 2.0}}
    assert series({**step(2), **noise, "path": "x"}) == {
        "loss": 0.5, "skipped": 1.0, "gradient_noise/batch_square": 2.0,
    }  # fmt: skip
    assert event_in_words(SPIKE) == "loss 9.0 · samples [4] · <b>once</b>"
    assert event_in_words({"event": "no way back", "step": 3, "positions": [], "samples": []}) == ""
