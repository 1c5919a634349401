"""``shardwise plan``: what its options change, the objects that --json has, and the line while it searches."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from shardwise.cli import plan as verb
from shardwise.cli.spinner import planning
from shardwise.core.errors import RecipeError
from shardwise.core.plan import Plan
from shardwise.jobs import planning as jobs

RECIPE = """model: {preset: tiny}
steps: 20
batch_size: 4
cluster: {device: cpu, price_per_device_hour: 0.5}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return path


@pytest.fixture
def asked(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The recipes that were planned."""
    seen: list[Any] = []

    def make(recipe: Any, cluster: Any, **how: Any) -> Plan:
        seen.append(recipe)
        return plan

    monkeypatch.setattr(jobs, "make_plan", make)
    return seen


def test_json_keeps_the_plans_keys_and_gains_the_answer(
    recipe: Path, plan: Plan, asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    verb.command(recipe, as_json=True)
    written = json.loads(capsys.readouterr().out)
    assert {key: written[key] for key in plan.as_dict()} == json.loads(json.dumps(plan.as_dict()))
    assert written["run"]["steps"] == 20 and written["run"]["cost"] == pytest.approx(20 * 0.1 / 3600 * 0.5)
    assert {"run", "interval", "nearest", "binding", "prices", "front", "origins"} <= written.keys()


@pytest.mark.parametrize("objective", ["seconds", "memory"])
def test_for_is_the_recipes_objective(recipe: Path, asked: list[Any], objective: str) -> None:
    verb.command(recipe, objective=verb.Objective(objective), as_json=True)
    assert [each.plan.objective for each in asked] == [objective]


def test_within_is_of_devices(recipe: Path, asked: list[Any]) -> None:
    with pytest.raises(RecipeError, match="--within needs --for devices"):
        verb.command(recipe, within=2.0)
    assert not asked


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_shows_in_a_terminal_only_and_is_cut_to_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that wraps could not be replaced by the next one."""
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown: dict[type, str] = {}
    for kind in (_Terminal, io.StringIO):
        stream = kind()
        monkeypatch.setattr(sys, "stderr", stream)
        with planning() as progress:
            progress("best so far " + "bf16 · zero3×8 · " * 9)
        shown[kind] = stream.getvalue()
    assert "best so far bf16" in shown[_Terminal] and shown[io.StringIO] == ""
    lines = [line.rpartition("m")[2] for line in shown[_Terminal].replace("\r", "\n").split("\n")]
    assert max(map(cell_len, lines)) <= 50
