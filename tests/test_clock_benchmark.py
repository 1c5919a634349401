"""The benchmark of step times: medians over rounds, the planner's choice against its rivals, and a restart."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def calibrations() -> list[str]:
    """The machine's calibrations; the last one is in use."""
    return ["calibration 0"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, calibrations: list[str]) -> Any:
    """The benchmark with runs that take the seconds of a table, and its results in a folder of their own."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module: Any = importlib.import_module("clock_here")
    monkeypatch.setattr(module, "tables", lambda suite: calibrations[-1])
    monkeypatch.setattr(module, "calibrate", lambda: calibrations.append(f"calibration {len(calibrations)}"))
    suite = replace(
        module.CPU, cases=module.CPU.cases[1:3], choices=module.CPU.choices[1:2], rivals=(), folder=tmp_path
    )
    monkeypatch.setattr(module, "CPU", suite)
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
    found = json.loads(clock.CPU.summary.read_text())
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
    rows = [json.loads(line) for line in clock.CPU.runs.read_text().splitlines()]
    assert [row["calibration"] for row in rows] == ["calibration 1"] * 3 + ["calibration 2"] * 3
    calibrations.append("another calibration")
    assert len(ran(clock, monkeypatch, "--rounds", "1")) == 3
    assert len(clock.CPU.runs.read_text().splitlines()) == 3


def test_a_round_that_was_interrupted_keeps_its_calibration(
    clock: Any, monkeypatch: pytest.MonkeyPatch, calibrations: list[str]
) -> None:
    ran(clock, monkeypatch, "--rounds", "1")
    lines = clock.CPU.runs.read_text().splitlines(keepends=True)
    clock.CPU.runs.write_text("".join(lines[:2]))
    assert len(ran(clock, monkeypatch, "--rounds", "1")) == 1
    assert calibrations == ["calibration 0", "calibration 1"]


@pytest.mark.parametrize(
    ("device", "fewest", "axes"),
    [
        ("cpu", 30, {"zero_stage", "replicate", "tensor_parallel", "sequence_parallel", "pipeline_parallel"}),
        ("H100-80GB", 20, {"activation_checkpointing", "compile", "loss", "offload", "precision"}),
    ],
)
def test_recipes_of_the_cases_are_sound_and_cover_every_axis(
    monkeypatch: pytest.MonkeyPatch, device: str, fewest: int, axes: set[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    clock: Any = importlib.import_module("clock_here")
    suite = clock.CPU if device == "cpu" else clock.gpu_suite(device)
    assert len({case.name for case in suite.every}) == len(suite.every) and len(suite.cases) >= fewest
    assert {key for case in suite.cases for key in case.settings} >= axes
    for case in suite.every:
        clock.recipe_of(case.recipe(), clock.SETTINGS)
