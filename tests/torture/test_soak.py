"""The soak of benchmarks/soak.py in two minutes: a run under random faults ends bitwise as without any."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks/soak.py"


@pytest.mark.long
def test_a_run_under_faults_ends_bitwise_as_without_any(tmp_path: Path) -> None:
    result = tmp_path / "soak.json"
    where = ["--folder", str(tmp_path / "soak"), "--result", str(result)]
    command = [sys.executable, str(SOAK), "--minutes", "1.5", "--steps", "600", "--seed", "5", *where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.read_text(encoding="utf-8"))
    assert found["bitwise_equal"] and sum(found["faults"].values()) >= 1, found
    assert found["interruptions"] >= 1 and found["codes"]["0"] == 1, found
