"""benchmarks/scaling_law.py: its runs are valid, it goes on after a kill, and its prediction comes before the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_the_runs_of_every_sweep_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from benchmarks import scaling_law as sweeps

    for sweep in sweeps.SWEEPS.values():
        for steps in (*(steps for *_, steps in sweep.fitted), sweep.predicted[2]):
            sweeps.recipe(sweep, round((1 - sweeps.DECAY) * steps), schedule={"name": "constant"})
            for eighths in sweeps.BRANCHES:
                end = steps * eighths // 8
                made = sweeps.recipe(sweep, end, schedule=sweeps.decaying(end))
                assert made.schedule.decay == round(sweeps.DECAY * end) > 0
    full = sweeps.SWEEPS["full"]
    assert len(full.fitted) >= 5
    parameters = [sweeps.sized(sweeps.pattern(full), *shape).parameters for *shape, _ in full.fitted]
    assert 0.09e6 < parameters[0] < 0.12e6 and parameters == sorted(parameters)
    assert 5e6 < sweeps.sized(sweeps.pattern(full), *full.predicted[:2]).parameters < 7e6


@pytest.mark.long
def test_a_killed_sweep_goes_on(tmp_path: Path) -> None:
    script, out = ROOT / "benchmarks" / "scaling_law.py", tmp_path / "law.json"
    command = [
        sys.executable,
        str(script),
        "--sweep",
        "miniature",
        "--runs",
        str(tmp_path),
        "--results",
        str(out),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    points, prediction = tmp_path / "miniature" / "points.jsonl", tmp_path / "miniature" / "prediction.json"
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as running:
        limit = time.monotonic() + 300
        while not points.exists() or points.read_text(encoding="utf-8").count("\n") < 3:
            assert running.poll() is None and time.monotonic() < limit
            time.sleep(0.05)
        running.send_signal(signal.SIGKILL)
    before = points.read_text(encoding="utf-8").splitlines()
    assert not prediction.exists()
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=600)
    lines = points.read_text(encoding="utf-8").splitlines()
    assert lines[: len(before)] == before
    assert len({json.loads(line)["run"] for line in lines}) == len(lines) == 17
    assert prediction.stat().st_mtime < points.stat().st_mtime, "the predicted run was trained afterwards"
    values = json.loads(out.read_text(encoding="utf-8"))
    assert values["prediction"] == json.loads(prediction.read_text(encoding="utf-8"))
    assert abs(values["error"]) < 0.1
