"""What an open page of a run is told."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from shardwise.core.plan import Plan
from shardwise.plugins.live.page import LiveRun
from shardwise.recipe.installed import recipe_file
from tests.report.conftest import write_run


def test_an_open_page_says_that_a_run_no_longer_steps(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file changes when a run is killed."""
    folder = write_run(tmp_path / "run", plan, steps=20, finished=False)
    (folder / "recipe.yaml").write_bytes(recipe_file(Path("llama-3-8b-8xh100.yaml")).read_bytes())
    live = LiveRun(folder)
    news = json.loads(live.now("") or "")
    assert " left." in news["parts"]["head"] and live.now(news["stamp"]) is None
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 150)
    later = json.loads(live.now(news["stamp"]) or "")
    assert "No step has finished for" in later["parts"]["head"] and live.now(later["stamp"]) is None
