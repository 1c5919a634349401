"""The trainer on rollouts: killed, stopped and rewound runs go on as if nothing had happened."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint.run_folder import write_job
from shardwise.core.errors import Preempted
from shardwise.hardware.cluster import cluster_of
from shardwise.jobs.planning import make_plan
from shardwise.model.blueprint import Batch
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS as SETTINGS_OF
from shardwise.technique import strategy_from
from shardwise.trainer.loop import Job, Trainer
from tests.harness.plans import NOTHING_TO_SEARCH
from tests.harness.pool import Pool
from tests.harness.tiers import quick
from tests.plugins.rollouts.rollout_runs import prompts, rollout_recipe

WORLD, UNIT = 2, 4
SETTINGS = {"precision": "fp32", "zero_stage": 3, "micro_batch_size": 3}
RUN = {
    "cluster": {"device": "cpu", "devices_per_node": WORLD},
    "checkpoint": {"every": UNIT},
    "strategy": NOTHING_TO_SEARCH | SETTINGS,
    "steps": 4 * UNIT,
}
KINDS: dict[str, dict[str, Any]] = {"grpo": {}, "ppo": {"epochs": 2, "minibatches": 2}}


class Killed(Exception):
    """In the place of a signal: nothing is saved."""


def rank_of(recipe: Recipe, plan: Any, folder: Path, what: str, at: int) -> tuple[str, list[int]]:
    """Train; at the ``at``-th step a rank is killed or asked to stop, or one loss is far too large."""
    trainer = Trainer(Job(recipe, plan, folder, torch.device("cpu")))
    positions: list[int] = []
    read = trainer.batches.at

    def noted(position: int) -> list[Batch]:
        batches = read(position)
        positions.append(position)
        if len(positions) == at and what == "kill":
            raise Killed
        if len(positions) == at and what == "stop":
            trainer.stopping._asked = True
        if position == at and what == "spike":
            for batch in batches:
                batch["advantages"] = batch["advantages"] * 1e4
                batch["labels"] = batch["labels"].where(batch["labels"] < 0, 255)
        return batches

    trainer.batches.at = noted  # type: ignore[method-assign]
    try:
        trainer.train()
    except (Killed, Preempted) as error:
        return type(error).__name__, positions
    return "finished", positions


def train(
    pool: Pool, recipe: Recipe, folder: Path, what: str = "", at: int = 0
) -> list[tuple[str, list[int]]]:
    folder.mkdir(exist_ok=True)
    plan = replace(make_plan(recipe, cluster_of(recipe.cluster)), strategy=strategy_from(SETTINGS))
    write_job(folder, recipe, plan)
    return pool.run(WORLD, rank_of, recipe, plan, folder, what, at)


def curve(folder: Path) -> list[tuple[Any, ...]]:
    """The last line of every step, bitwise."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    last = {line["step"]: line for line in lines}
    return [
        (step, line["loss"].hex(), line["grad_norm"].hex(), tuple(line["measures"].items()))
        for step, line in sorted(last.items())
    ]


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recipe]:
    source = prompts(tmp_path_factory.mktemp("prompts"))
    return {name: rollout_recipe(source, name, keys, **RUN) for name, keys in KINDS.items()}


@pytest.fixture(scope="module")
def whole(
    pool: Pool, recipes: dict[str, Recipe], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[tuple[Any, ...]]]:
    """The curve of an uninterrupted run by its name."""

    @functools.cache
    def curve_of(name: str) -> list[tuple[Any, ...]]:
        folder = tmp_path_factory.mktemp(name)
        assert train(pool, recipes[name], folder)[0][0] == "finished"
        trained = curve(folder)
        assert len(trained) == 4 * UNIT
        return trained

    return curve_of


@pytest.mark.parametrize("what", quick(["kill", "stop"], "kill"))
@pytest.mark.parametrize("name", quick(KINDS, "ppo"))
def test_an_interrupted_run_ends_bitwise_as_the_uninterrupted_one(
    pool: Pool, recipes: dict[str, Recipe], whole: Callable[[str], Any], tmp_path: Path, name: str, what: str
) -> None:
    """Interrupted within a rollout: a checkpoint is between two of them, and a stop waits for the end of its own."""
    interrupted = train(pool, recipes[name], tmp_path / "run", what, at=2 * UNIT + 2)
    assert interrupted[0][0] == {"kill": "Killed", "stop": "Preempted"}[what]
    saved = sorted(int(p.name[5:]) for p in (tmp_path / "run" / "checkpoints").glob("step-*"))
    if name == "ppo":
        assert saved[-1] == (2 * UNIT if what == "kill" else 3 * UNIT)
    assert train(pool, recipes[name], tmp_path / "run")[0][0] == "finished"
    assert curve(tmp_path / "run") == whole(name)


def test_evaluations_write_the_reward_of_held_out_prompts(
    pool: Pool, recipes: dict[str, Recipe], tmp_path: Path
) -> None:
    values = recipes["grpo"].model_dump(exclude_unset=True)
    data = {**values["data"], "held_out": 0.3}
    recipe = recipe_of(
        {**values, "data": data, "steps": UNIT, "evaluation": {"every": UNIT // 2}}, SETTINGS_OF
    )
    assert train(pool, recipe, tmp_path)[0][0] == "finished"
    lines = list(map(json.loads, (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()))
    evaluations = {line["step"]: line for line in lines if "metrics" in line}
    assert list(evaluations) == [UNIT // 2, UNIT]
    for line in evaluations.values():
        assert line["held_out_loss"] == pytest.approx(-line["metrics"]["reward"])
        assert 0 < line["metrics"]["completion_length"] <= 12


@pytest.mark.long
def test_a_rewind_leaves_out_whole_rollouts_and_makes_them_again(
    pool: Pool, recipes: dict[str, Recipe], tmp_path: Path
) -> None:
    guard = {"window": 4, "snapshot_every": UNIT}
    recipe = recipes["ppo"].model_copy(update={"guard": recipes["ppo"].guard.model_copy(update=guard)})
    (end, positions), *_ = train(pool, recipe, tmp_path, "spike", at=2 * UNIT + 1)
    events = [
        json.loads(line) for line in (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    (rewind,) = [event for event in events if event["event"] == "rewind"]
    assert end == "finished"
    assert rewind["to_step"] % UNIT == 0
    assert rewind["positions"][0] % UNIT == 0
    assert len(rewind["positions"]) % UNIT == 0
    assert rewind["positions"] == list(range(2 * UNIT, 3 * UNIT))
    assert positions[-1] == 5 * UNIT - 1
