"""A run of the command that is killed once and goes on, and the same run without a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from shardwise.recipe.sections import Recipe

ROOT = Path(__file__).parents[2]


def killed_and_whole(
    recipe: Recipe, folder: Path, pinned: list[str], step: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines of the metrics of both runs. The first is killed when the checkpoint of ``step`` is there."""
    file = folder / "recipe.json"
    file.write_text(recipe.model_dump_json(exclude_none=True), encoding="utf-8")

    def started(out: str) -> subprocess.Popen[bytes]:
        line = [sys.executable, "-m", "shardwise", "train", str(file), *pinned, "--out", str(folder / out)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(line, cwd=ROOT, env=environment, start_new_session=True)

    killed = started("killed")
    while not (folder / "killed" / "checkpoints" / f"step-{step}").exists():
        assert killed.poll() is None
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert started("killed").wait() == 0
    assert started("whole").wait() == 0
    return _lines(folder / "killed"), _lines(folder / "whole")


def _lines(run: Path) -> list[dict[str, Any]]:
    """The last line of every step."""
    text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    last = {line["step"]: line for line in map(json.loads, text.splitlines())}
    return [line for _, line in sorted(last.items())]
