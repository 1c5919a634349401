"""``shardwise plan A --vs B``: which recipes are planned, and the table of their differences."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.main import run
from shardwise.cli.plan_versus import joined_options
from shardwise.core.ledger import Ledger
from shardwise.core.plan import HostMemory, Plan, StepEstimate
from shardwise.core.units import GiB
from shardwise.jobs import planning as jobs
from tests.harness.plans import with_rows

RECIPE = """model: {preset: tiny}
steps: 20
batch_size: 4
cluster: {device: cpu, price_per_device_hour: 0.5}
"""


@pytest.fixture
def plan(plan: Plan) -> Plan:
    split = {"matrix products": 1.244, "memory-bound": 0.391}
    return replace(plan, capacity_bytes=20 * GiB, step=StepEstimate(1.645, 131_072, 1, {}, 0.583, split))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return path


@pytest.fixture
def asked(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, bool]]:
    """The recipes that were planned, and whether with neighbours. A stage of ZeRO halves memory and doubles time."""
    seen: list[tuple[Any, bool]] = []

    def make(recipe: Any, cluster: Any, *, compare: bool, **_: Any) -> Plan:
        seen.append((recipe, compare))
        made = with_rows(plan, activations=8 * GiB, parameters=4 * GiB)
        if "zero_stage" in recipe.strategy:
            made = with_rows(plan, activations=2 * GiB, parameters=4 * GiB, communication=2 * GiB)
            made = replace(made, step=replace(plan.step, seconds=3.29, split={"memory-bound": 3.29}))
        if recipe.batch_size == 8:
            return replace(made, capacity_bytes=GiB, host=HostMemory(Ledger(), 0))
        return made

    monkeypatch.setattr(jobs, "make_plan", make)
    return seen


def test_overrides_after_the_option_are_its_own() -> None:
    line = ["A.yaml", "x=1", "--vs", "y=2", "z.w=3", "--json", "v=4", "--vs", "B.yaml", "u=5", "--vs=t=6"]
    assert joined_options(line) == [
        *("A.yaml", "x=1", "--vs", "y=2\nz.w=3", "--json", "v=4", "--vs", "B.yaml\nu=5", "--vs=t=6")
    ]
    assert joined_options(["--vs", "y=2", "A.yaml", "--vs"]) == ["--vs", "y=2", "A.yaml", "--vs"]


def test_a_table_has_a_column_for_each_plan_and_its_change(
    recipe: Path, asked: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    other = recipe.parent / "other.yaml"
    other.write_text(RECIPE.replace("steps: 20", "steps: 40"), encoding="utf-8")
    line = ["seed=1", "--vs", "strategy.zero_stage=3", "steps=10", "--vs", str(other), "seed=3"]
    assert run(["plan", str(recipe), *line]) == 0
    assert [(one.seed, one.steps, "zero_stage" in one.strategy) for one, _ in asked] == [
        (1, 20, False), (1, 10, True), (3, 40, False),
    ]  # fmt: skip
    assert not any(compared for _, compared in asked)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    cells = (re.match(r" *(.+?)  +(.*)", line) for line in text.splitlines())
    rows = {found[1]: found[2].split() for found in cells if found}
    assert "A  " + str(recipe) in text.replace("\n", "") and "B  strategy.zero_stage=3 steps=10" in text
    assert rows["peak of a device"] == ["12.00", "GiB", "8.00", "GiB", "−33", "%", "12.00", "GiB"]
    assert rows["activations"] == ["8.00", "GiB", "2.00", "GiB", "−75", "%", "8.00", "GiB"]
    assert rows["communication"] == ["–", "2.00", "GiB", "–"]
    assert rows["step"] == ["1.65", "s", "3.29", "s", "+100", "%", "1.65", "s"]
    assert rows["matrix products"] == ["1.24", "s", "–", "−100", "%", "1.24", "s"]
    assert rows["tokens/s"] == ["79,679", "39,840", "−50", "%", "79,679"]
    assert rows["MFU"] == ["58", "%", "58", "%", "58", "%"]
    assert rows["hours of all steps"][-2:] == ["+100", "%"] and rows["cost"][-2:] == ["+100", "%"]


def test_json_has_the_first_plan_and_the_changes_of_others(
    recipe: Path, asked: list[Any], plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", str(recipe), "--vs", "strategy.zero_stage=3", "--json"]) == 0
    assert [compared for _, compared in asked] == [True, False]
    written = json.loads(capsys.readouterr().out)
    assert written["line"] == plan.line and written["run"]["steps"] == 20
    [other] = written["versus"]
    assert other["name"] == "strategy.zero_stage=3" and other["fits"] and other["run"]["steps"] == 20
    assert other["step"]["seconds"] == 3.29 and other["ledger"]["communication"] == 2 * GiB
    assert other["changes"]["peak.bytes"] == pytest.approx(-1 / 3)
    assert other["changes"]["step.seconds"] == pytest.approx(1.0)
    assert "ledger.communication" not in other["changes"], "there is no share of nothing"


def test_the_exit_code_is_the_first_plans(
    recipe: Path, asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", str(recipe), "--vs", "batch_size=8"]) == 0
    assert "does not fit" in capsys.readouterr().out
    assert run(["plan", str(recipe), "batch_size=8", "--vs", "batch_size=4"]) == 7
    told = capsys.readouterr()
    assert told.err.startswith("error: does not fit") and "change" in told.out


def test_a_recipe_that_is_refused_does_not_end_the_comparison(
    recipe: Path, asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    impossible, possible = ["--vs", "strategy.tensor_parallel=3"], ["--vs", "strategy.zero_stage=1"]
    assert run(["plan", str(recipe), *impossible, *possible]) == 2
    told = capsys.readouterr()
    assert "B  strategy.zero_stage=1" in told.out and "+100" in told.out
    assert "\nstrategy.tensor_parallel=3\nerror: tensor_parallel cannot be 3" in told.err
    assert run(["plan", str(recipe), *impossible, *possible, "--json"]) == 2
    told = capsys.readouterr()
    assert "error: tensor_parallel cannot be 3" in told.err
    planned, refused = json.loads(told.out)["versus"]
    assert planned["name"] == "strategy.zero_stage=1"
    assert refused["name"] == "strategy.tensor_parallel=3" and refused["refused"].startswith("error: tensor_")
    assert run(["plan", str(recipe), "batch_size=8", *impossible, *possible]) == 7, (
        "the first plan's code wins"
    )
    asked.clear()
    assert run(["plan", str(recipe), *impossible, "--vs", "strategy.zro=1"]) == 2 and not asked
    assert run(["plan", str(recipe), "strategy.tensor_parallel=3", *possible]) == 2 and not asked


@pytest.mark.parametrize(
    "option", ["--limits", "--explain", "--for=devices", "--html=x.html", "--top=3", "--full"]
)
def test_it_has_no_other_output(
    recipe: Path, asked: list[Any], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", str(recipe), "--vs", "batch_size=8", option]) == 2
    assert "not with --vs" in capsys.readouterr().err and not asked
    assert run(["plan", str(recipe), "--vs", "batch_size=x"]) == 2
    assert run(["plan", str(recipe), "--vs", "nothere.yaml"]) == 2
