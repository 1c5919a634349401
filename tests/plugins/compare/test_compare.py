"""Several runs on one page."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.cli.main import run as command
from shardwise.core.plan import Plan
from shardwise.plugins.compare.page import setting_differences
from shardwise.report.record import read_run
from shardwise.report.template import script
from tests.report.conftest import MakeRun


def test_runs_are_compared_on_one_page(
    plan: Plan, make_run: MakeRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folders = [make_run(plan, name="one"), make_run(replace(plan, line="other <line>"), name="two", steps=12)]
    recipe = folders[1] / "recipe.yaml"
    text = recipe.read_text(encoding="utf-8") + "batch_size: 8\noptimizer: {learning_rate: 0.5}\n"
    recipe.write_text(text, encoding="utf-8")
    first = (folders[0] / "recipe.yaml").read_text(encoding="utf-8") + "batch_size: 8\n"
    (folders[0] / "recipe.yaml").write_text(first, encoding="utf-8")
    page = tmp_path / "both.html"
    assert command(["report", *map(str, folders), "--out", str(page)]) == 0
    assert str(page) in capfd.readouterr().out
    html = page.read_text(encoding="utf-8")
    assert not re.search(r"https?:|\ssrc=|\{\{", html) and "default-src 'none'" in html
    assert re.findall(r"<script>(.*?)</script>", html, re.DOTALL) == [script()]
    assert "other &lt;line&gt;" in html and "loss, nats per token" in html
    runs = {folder.name: read_run(folder) for folder in folders}
    assert list(setting_differences(runs)) == [("optimizer.learning_rate", ["0.0003", "0.5"])]
    assert "<code>optimizer.learning_rate</code>" in html
    assert len(html) < 400_000


def test_too_many_runs_and_a_page_for_one_are_refused(
    plan: Plan, make_run: MakeRun, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = str(make_run(plan))
    assert command(["report", *[folder] * 7]) == 2
    assert command(["report", folder, "--out", "x.html"]) == 2
    assert len(capfd.readouterr().err.splitlines()) == 2
