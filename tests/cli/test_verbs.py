"""``shardwise plan`` where it fits, with all of its options: what it prints and returns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli.main import run
from tests.harness.dry_runs import remembered_dry_runs

__all__ = ["remembered_dry_runs"]

pytestmark = pytest.mark.usefixtures("remembered_dry_runs")


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model: {layers: 1, width: 64, heads: 2, ffn: 128, vocab: 256, context: 32}\n"
        "data: {sequence_length: 32}\n"
        "steps: 1\nbatch_size: 1\n"
        "cluster: {device: h100}\n",
        encoding="utf-8",
    )
    return str(path)


def test_a_plan_that_fits(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    assert run(["plan", recipe, "--top", "1", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "\nfits · " in out and "chosen" in out and "--full shows" in out
    assert "<html" in page.read_text(encoding="utf-8")


def test_a_plan_that_fits_is_explained_when_asked(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", recipe, "--explain", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] is True
    assert plan["ladder"].keys() == {"advised", "reasons", "rungs"} and plan["ladder"]["rungs"]
