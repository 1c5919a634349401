"""Values that cost seconds once: chosen where a run of enough steps gains more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.core.strategy import Strategy
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.planner import one_time
from shardwise.planner.one_time import with_one_time_costs
from shardwise.planner.predictor import Predictor
from shardwise.planner.quick import Quick
from shardwise.planner.search import plan_for
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS, strategy_from

MODEL = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 160, "vocab": 256, "context": 64}


def recipe(
    steps: int, objective: str = "seconds", model: dict[str, Any] | None = None, **strategy: object
) -> Recipe:
    values = {
        "model": model or MODEL,
        "data": {"sequence_length": 64},
        "steps": steps,
        "batch_size": 8,
        "cluster": {"device": "cpu", "devices_per_node": 1},
        "strategy": {"precision": "fp32", **strategy},
        "plan": {"objective": objective},
    }
    return recipe_of(values, SETTINGS)


PLAIN = Quick(strategy_from({"precision": "fp32"}), seconds=1.0, bytes=0, fits=True)


def tried(monkeypatch: pytest.MonkeyPatch, asked: Recipe, seconds: float, fits: bool = True) -> list[Any]:
    """Values of compile to confirm where compiled blocks take so many seconds and the plain ones one."""

    def figures(predictor: Predictor, strategy: Strategy, once: bool) -> Quick:
        return replace(PLAIN, strategy=strategy, seconds=seconds, fits=fits)

    monkeypatch.setattr(one_time, "quick_figures", figures)
    predictor = Predictor(asked, blueprint_of(asked), cluster_of(asked.cluster))
    return [each.values["compile"] for each in with_one_time_costs(predictor, PLAIN)]


@pytest.mark.parametrize(
    ("steps", "seconds", "expected"),
    [
        (890, 0.9, ["none"]),  # it saves 89 s, and costs 30 s
        (910, 0.9, ["block", "none"]),
        (100_000, 0.9995, ["none"]),
        (590, 0.1, ["none"]),  # no step can save more than 15 %: nothing is predicted
        (100_000, 1.1, ["none"]),
    ],
)
def test_a_run_of_enough_steps_gains_more(
    steps: int, seconds: float, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tried(monkeypatch, recipe(steps), seconds) == expected


def test_only_what_is_free_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tried(monkeypatch, recipe(10_000), 0.9, fits=False) == ["none"]
    assert tried(monkeypatch, recipe(10_000, objective="memory"), 0.9) == ["none"]
    assert tried(monkeypatch, recipe(10_000, compile="none"), 0.9) == ["none"]


def test_epochs_have_no_steps_until_the_data_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = recipe(1).model_copy(update={"steps": 0, "epochs": 3.0})
    assert tried(monkeypatch, asked, 0.1) == ["none"]


@pytest.mark.long
def test_a_long_run_is_compiled() -> None:
    """The plan says the assumption."""
    model = MODEL | {"width": 128, "ffn": 320}
    short, long = (recipe(steps, model=model) for steps in (10, 1_000_000))
    plans = [
        plan_for(each, blueprint_of(each), cluster_of(each.cluster), compare=False) for each in (short, long)
    ]
    assert [plan.strategy.values["compile"] for plan in plans] == ["none", "block"]
    assert plans[1].step.seconds < plans[0].step.seconds
    assert any(line.startswith("compile block is assumed to take 30 s") for line in plans[1].assumptions)
