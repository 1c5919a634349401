"""Values that cost seconds once: chosen where a run of enough steps gains more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.core.strategy import Strategy
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.planner import predictor as predicting
from shardwise.planner.choose import choose_strategy
from shardwise.planner.one_time import with_one_time_costs
from shardwise.planner.predict import Prediction
from shardwise.planner.predictor import Predictor
from shardwise.planner.search import plan_for
from shardwise.planner.verdicts import Estimate
from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS, strategy_from

MODEL = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 160, "vocab": 256, "context": 64}


def predictor(
    steps: int, objective: str = "seconds", devices: int = 1, model: Any = MODEL, **strategy: object
) -> Predictor:
    values: dict[str, Any] = {
        "model": model,
        "data": {"sequence_length": 64},
        "steps": steps,
        "batch_size": 8,
        "cluster": {"device": "cpu", "devices_per_node": devices},
        "strategy": {"precision": "fp32", **strategy},
        "plan": {"objective": objective},
    }
    asked = recipe_of(values, SETTINGS)
    return Predictor(asked, blueprint_of(asked), cluster_of(asked.cluster))


ONE_SECOND = Estimate(strategy_from({"precision": "fp32"}), False, 1, 1, 1, 0, 1.0, {})


def tried(of: Predictor, best: Estimate = ONE_SECOND) -> list[tuple[str, float]]:
    """Values of compile to confirm, and the most seconds of their steps."""
    return [(each.values["compile"], most) for each, most in with_one_time_costs(of, best)]


def test_a_run_of_enough_steps_may_be_compiled() -> None:
    """Compiling takes 30 s and has to save three times as much. A step can save 15 % at most."""
    assert [kind for kind, _ in tried(predictor(590))] == ["none"]
    (kind, most), (plain, unlimited) = tried(predictor(900))
    assert (kind, plain, unlimited) == ("block", "none", float("inf"))
    assert most == pytest.approx(0.9)


def test_only_what_is_free_and_is_asked_for_is_compiled() -> None:
    epochs = predictor(1)
    epochs.recipe = epochs.recipe.model_copy(update={"steps": 0, "epochs": 3.0})
    for of in (predictor(10_000, objective="memory"), predictor(10_000, compile="none"), epochs):
        assert [kind for kind, _ in tried(of)] == ["none"]


@pytest.mark.parametrize(("seconds", "kinds"), [(0.9995, ["none"]), (0.5, ["block", "none"])])
def test_compiled_stages_are_dry_run_only_where_their_blocks_are_faster(
    seconds: float, kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def estimate(self: Predictor, strategy: Strategy, *, alone: bool) -> Estimate:
        return replace(ONE_SECOND, seconds=seconds if strategy.values["compile"] == "block" else 1.0)

    monkeypatch.setattr(Predictor, "estimate", estimate)
    staged = replace(ONE_SECOND, strategy=strategy_from({"precision": "fp32", "pipeline_parallel": 2}))
    assert [kind for kind, _ in tried(predictor(10_000, devices=2), staged)] == kinds


@pytest.mark.parametrize(("share", "kind"), [(0.5, "block"), (0.9, "none"), (1.1, "none")])
def test_compiled_blocks_are_chosen_where_the_run_gains(
    share: float, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a step's seconds compiled blocks need a share; 15 % less are needed to pay."""
    predict = predicting.predict_worst

    def stretched(
        recipe: Any, blueprint: Any, strategy: Strategy, cluster: Any, **options: Any
    ) -> Prediction:
        plain = predict(recipe, blueprint, strategy.with_values(compile="none"), cluster, **options)
        seconds = plain.step.seconds * (share if strategy.values["compile"] == "block" else 1.0)
        return replace(plain, strategy=strategy, step=replace(plain.step, seconds=seconds))

    of = predictor(1, micro_batch_size=8, activation_checkpointing="none", loss="logits")
    step = of.confirm(strategy_from({**of.recipe.strategy})).step.seconds
    of.recipe = of.recipe.model_copy(update={"steps": int(90 / (0.149 * step))})
    monkeypatch.setattr(predicting, "predict_worst", stretched)
    assert choose_strategy(of).strategy.values["compile"] == kind


@pytest.mark.long
def test_a_long_run_is_compiled() -> None:
    """The plan says the assumption."""
    plans = []
    for steps in (10, 1_000_000):
        asked = predictor(steps, model={**MODEL, "width": 128, "ffn": 320}).recipe
        plans.append(plan_for(asked, blueprint_of(asked), cluster_of(asked.cluster), compare=False))
    assert [plan.strategy.values["compile"] for plan in plans] == ["none", "block"]
    assert plans[1].step.seconds < plans[0].step.seconds
    assert any(line.startswith("compile block is assumed to take 30 s") for line in plans[1].assumptions)
