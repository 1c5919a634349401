"""attempts.jsonl: each interruption with its cause and its cost."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shardwise.core.attempts import ATTEMPTS, Attempts, interruptions


def metrics(folder: Path, steps: int, at: float) -> None:
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": n + 1}) + "\n" for n in range(steps)) + '{"step": 9')
    os.utime(path, (at, at))


def test_every_interruption_has_its_cause_and_its_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, 105.0, 130.0, 140.0, 150.0, 200.0, 212.0, 260.0])
    monkeypatch.setattr("time.time", lambda: next(clock))
    run = Attempts(tmp_path)
    run.began()
    run.training(0)
    metrics(tmp_path, 7, 129.0)
    run.ended("rank 1 was lost")
    run.began()  # at 140
    run.training(5)
    metrics(tmp_path, 12, 180.0)
    run.began()  # at 200: the launcher was killed, and the metrics are of 180
    run.training(10)
    run.ended("")
    first, second = interruptions(tmp_path)
    assert (first.reached, first.resumed, first.repeated, first.cause) == (7, 5, 2, "rank 1 was lost")
    assert first.seconds == 150 - 130
    assert (second.reached, second.resumed, second.repeated) == (12, 10, 2)
    assert second.cause.startswith("killed") and second.seconds == 212 - 180


def test_a_finished_run_that_is_extended_was_not_interrupted(tmp_path: Path) -> None:
    run = Attempts(tmp_path)
    for step in (0, 4):
        run.began()
        run.training(step)
        metrics(tmp_path, 4 + step, 1.0)
        run.ended("")
    assert interruptions(tmp_path) == ()


@pytest.mark.parametrize("content", ["", "not json\n", "[1]\n{}\n", '{"event": "training", "time": "x"}\n'])
def test_what_cannot_be_read_is_left_out(content: str, tmp_path: Path) -> None:
    assert interruptions(tmp_path) == ()
    (tmp_path / ATTEMPTS).write_text(content)
    (tmp_path / "metrics.jsonl").write_text(content)
    run = Attempts(tmp_path)
    run.began()
    run.training(0)
    run.began()
    run.training(0)
    assert len(interruptions(tmp_path)) <= 2


def test_a_full_disk_does_not_stop_a_run(tmp_path: Path) -> None:
    (tmp_path / ATTEMPTS).symlink_to("/dev/full")
    Attempts(tmp_path).ended("x")
