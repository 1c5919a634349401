"""The benchmark of step times: medians over rounds, the planner's choice against its rivals, and a restart."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import clock_here
import pytest


@pytest.fixture
def calibrations() -> list[str]:
    """The machine's calibrations; the last one is in use."""
    return ["calibration 0"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, calibrations: list[str]) -> Any:
    """The benchmark with runs that take the seconds of a table, and its results in a folder of their own."""
    module: Any = clock_here
    monkeypatch.setattr(module, "RUNS", tmp_path / "runs.jsonl")
    monkeypatch.setattr(module, "SUMMARY", tmp_path / "summary.json")
    monkeypatch.setattr(module, "tables", lambda: calibrations[-1])
    monkeypatch.setattr(module, "calibrate", lambda: calibrations.append(f"calibration {len(calibrations)}"))
    monkeypatch.setattr(module, "CASES", module.CASES[1:3])
    monkeypatch.setattr(module, "CHOICES", module.CHOICES[1:2])
    monkeypatch.setattr(module, "RIVALS", ())
    monkeypatch.setattr(module, "RUNS_PER_CALIBRATION", 3)
    return module


def ran(clock: Any, monkeypatch: pytest.MonkeyPatch, *options: str) -> list[str]:
    """The cases that one start of the benchmark trains: in 2.0 s, then in 1.0 s, and so on; all planned as 1.2 s."""
    names = list[str]()

    def run(case: Any) -> dict[str, Any]:
        names.append(case.name)
        same = {"strategy": "plain" if case.name.endswith("choice") else case.name, "line": case.name}
        spent = {"predicted_seconds": 1.2, "measured_seconds": 1.0 + len(names) % 2, "predicted_phases": {}}
        return {"case": case.name, "work": case.work, "measured_phases": {"forward": 0.5}} | same | spent

    monkeypatch.setattr(clock, "run", run)
    monkeypatch.setattr(sys, "argv", ["clock_here.py", *options])
    clock.main()
    return names


def test_rounds_are_medians_and_a_choice_has_its_regret(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ran(clock, monkeypatch, "--rounds", "3")
    assert len(names) == 9 and names[:3] == names[3:6]
    found = json.loads(clock.SUMMARY.read_text())
    # Seconds alternate over three cases, so over three rounds they are 2, 1, 2; 1, 2, 1; and 2, 1, 2.
    assert [row["measured_seconds"] for row in found["rows"]] == [2.0, 1.0]
    assert found["median_error"] == pytest.approx((0.4 + 0.2) / 2) and found["worst_error"] == pytest.approx(
        0.4
    )
    [choice] = found["choices"]
    assert choice["strategies"] == 3 and choice["regret"] == pytest.approx(1.0)
    assert "| 2.000 s |" in found["table"]


def test_a_second_start_goes_on(clock: Any, monkeypatch: pytest.MonkeyPatch, calibrations: list[str]) -> None:
    assert ran(clock, monkeypatch, "--minutes", "-1") == []
    assert len(ran(clock, monkeypatch, "--rounds", "1")) == 3
    assert len(ran(clock, monkeypatch, "--rounds", "2")) == 3
    rows = [json.loads(line) for line in clock.RUNS.read_text().splitlines()]
    assert [row["calibration"] for row in rows] == ["calibration 1"] * 3 + ["calibration 2"] * 3
    calibrations.append("another calibration")
    assert len(ran(clock, monkeypatch, "--rounds", "1")) == 3
    assert len(clock.RUNS.read_text().splitlines()) == 3


def test_a_group_of_runs_that_was_interrupted_keeps_its_calibration(
    clock: Any, monkeypatch: pytest.MonkeyPatch, calibrations: list[str]
) -> None:
    ran(clock, monkeypatch, "--rounds", "1")
    lines = clock.RUNS.read_text().splitlines(keepends=True)
    clock.RUNS.write_text("".join(lines[:2]))
    assert len(ran(clock, monkeypatch, "--rounds", "1")) == 1
    assert calibrations == ["calibration 0", "calibration 1"]


def test_recipes_of_the_cases_are_sound_and_cover_every_axis() -> None:
    every = (*clock_here.CASES, *clock_here.CHOICES, *clock_here.RIVALS)
    assert len({case.name for case in every}) == len(every) and len(clock_here.CASES) >= 30
    keys = {key for case in clock_here.CASES for key in case.settings}
    assert keys >= {"zero_stage", "replicate", "tensor_parallel", "sequence_parallel", "pipeline_parallel"}
    for case in every:
        clock_here.recipe_of(case.recipe(), clock_here.SETTINGS)
