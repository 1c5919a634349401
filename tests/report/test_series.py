"""Every series of a run on its page, and marks with their cause."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.core.counted import Units
from shardwise.core.identity import STARTS, Start, append, starts
from shardwise.core.plan import Plan
from shardwise.core.run_files import StepRecord
from shardwise.report.charts import series_charts
from shardwise.report.page import render_page
from shardwise.report.pictures import svg
from shardwise.report.record import read_run
from shardwise.report.series import MARKED, Mark, marks, series_of, series_picture
from tests.report.conftest import MakeRun

EVENTS = [
    {"event": "odd", "step": 3, "positions": [2], "samples": [5]},
    {
        "event": "spike",
        "step": 12,
        "loss": 9.25,
        "grad_norm": 41.0,
        "positions": [11],
        "text": ["<b>aaaa</b>"],
    },
    {"event": "rewind", "step": 14, "positions": [10, 11], "to_step": 10, "rewinds": 1, "samples": []},
    {"event": "gave up", "step": 20, "positions": [], "why": "3 rewinds", "blame": "layers.3 is NaN"},
]


def step(number: int, **values: object) -> StepRecord:
    return StepRecord(number, 2.0 / number, 10.0**number, 3e-4, 100, 1.0, 100.0, **values)  # type: ignore[arg-type]


def test_what_is_missing_has_no_row() -> None:
    plain = [row.title for row in series_of([step(1), step(2)])]
    assert plain == ["gradient norm", "learning rate", "tokens per second"]
    whole = series_of([step(1, loss_scale=2.0, peak_bytes=3 << 20, processed_per_second=900.0)])
    assert [row.title for row in whole][3:] == ["peak memory of rank 0, MiB", "loss scale"]
    assert whole[3].values == {"": [3.0]} and whole[2].values["processed"] == [900.0]


def test_marks_say_what_caused_them(tmp_path: Path) -> None:
    lines = [json.dumps(event) for event in EVENTS]
    (tmp_path / "events.jsonl").write_text("\n".join([*lines, "half a li"]), encoding="utf-8")
    assert marks(tmp_path) == [
        Mark(12, "spike", "loss 9.25 · grad norm 41 · “<b>aaaa</b>”"),
        Mark(14, "rewind", "back to step 10"),
        Mark(20, "gave up", "3 rewinds · layers.3 is NaN"),
    ]
    assert marks(tmp_path / "none") == []


def test_the_events_that_are_marked_are_events_that_are_written() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/files.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in MARKED)


def test_the_picture_has_a_line_per_series_and_a_mark_per_event() -> None:
    steps = [step(number, processed_per_second=900.0) for number in range(1, 9)]
    figure = series_picture(steps, [Mark(3, "spike", ""), Mark(5, "rewind", "")])
    assert [len(axes.lines) for axes in figure.axes] == [3, 3, 4]
    assert figure.axes[0].get_yscale() == "log" and figure.axes[1].get_yscale() == "linear"
    assert "no step has finished yet" in svg(series_picture([], []), "none")


def test_the_page_shows_series_events_and_how_the_run_was_started(plan: Plan, make_run: MakeRun) -> None:
    folder = make_run(plan)
    (folder / "events.jsonl").write_text(json.dumps(EVENTS[1]) + "\n", encoding="utf-8")
    start = Start(
        "2026-11-24T03:00:00+00:00", "shardwise train <r>.yaml", "node7", "abc-dirty", {"torch": "2.13"}
    )
    append(folder, start)
    page = render_page(read_run(folder))
    assert "Every series" in page and "gradient norm" in page
    assert "loss 9.25 · grad norm 41 · “&lt;b&gt;aaaa&lt;/b&gt;”" in page
    for words in ("2026-11-24T03:00:00+00:00 on node7, commit abc-dirty", "shardwise train &lt;r&gt;.yaml"):
        assert words in page
    assert "Started" not in render_page(read_run(make_run(plan, name="unknown")))


def test_this_process_names_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/shardwise", "train", "a b.yaml"])
    now = Start.now(tmp_path)
    assert now.command == "shardwise train 'a b.yaml'" and {"Python", "torch"} <= now.versions.keys()
    monkeypatch.setattr("sys.argv", ["/lib/shardwise/__main__.py", "plan"])
    assert Start.now(tmp_path).command == "shardwise plan"
    append(tmp_path, now)
    with (tmp_path / STARTS).open("a") as file:
        file.write('{"time": 3}\nno json\n')
    assert starts(tmp_path) == [now]


def test_samples_of_a_module_are_no_tokens_and_its_loss_has_no_unit() -> None:
    steps = [step(1, processed_per_second=64.0, held_out_losses={"more": 1.0}), step(2)]
    rows = {row.title: row.values for row in series_of(steps, Units("samples", "targets"))}
    assert rows["samples per second"] == {"": [64.0, None]}
    assert "loss of validation sets" in rows and not any("token" in title for title in rows)
    assert series_charts(steps, [], Units("samples", "targets"))["charts"][0]["title"] == "loss"


def test_measures_of_any_objective_have_a_row_and_its_loss_is_no_cross_entropy(
    plan: Plan, make_run: MakeRun
) -> None:
    """Of the batches, and of the held-out data where an evaluation has measured it."""
    steps = [
        step(1, measures={"accuracy": 0.5, "kl": 0.0}),
        step(
            2, measures={"accuracy": 0.75, "kl": 0.1}, metrics={"accuracy": 1.0, "f1": 0.9}, held_out_loss=0.6
        ),
    ]
    rows = {row.title: row.values for row in series_of(steps, Units("tokens", "pairs"))}
    assert rows["accuracy"] == {"training": [0.5, 0.75], "held-out": [None, 1.0]}
    assert rows["kl"] == {"": [0.0, 0.1]} and rows["f1, held-out"] == {"": [None, 0.9]}
    assert rows["pairs per second"] == {"": [100.0, 100.0]}
    pairs = replace(plan, step=replace(plan.step, counted="pairs"))
    page = " ".join(render_page(replace(read_run(make_run(pairs)), steps=tuple(steps))).split())
    assert "loss, mean over pairs" in page and "accuracy 1 f1 0.9" in page and "200 pairs" in page
    assert "nats" not in page and "perplexity" not in page
    assert "nats per token" in render_page(read_run(make_run(plan, name="tokens")))
