"""``verify`` of rollouts: strategies train on the plain process's completions as it does, and another loss fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.pool import Pool
from tests.harness.ranks import plain_rank, verified_rank
from tests.plugins.rollouts.rollout_runs import prompts, rollout_recipe

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"beta": 0.2}, {"zero_stage": 3, "precision": "fp64"}, {"beta": 0.21}),
    "rloo": ({"mask_truncated": False}, {"tensor_parallel": 2, "precision": "fp32"}, {"temperature": 1.1}),
    "ppo": ({"epochs": 2}, {"zero_stage": 3, "precision": "bf16"}, {"trace_decay": 0.5}),
}


@pytest.mark.long
def test_a_strategy_trains_as_the_plain_process_and_another_loss_does_not(pool: Pool, tmp_path: Path) -> None:
    source = prompts(tmp_path)
    right, wrong = [], []
    for name, (keys, settings, other) in CASES.items():
        folder = tmp_path / name
        folder.mkdir()
        strategy = {"micro_batch_size": 2, **settings}
        values = {"optimizer": {"learning_rate": 1e-3, "clip_norm": None}, "steps": 2}
        right.append((rollout_recipe(source, name, keys, **values), strategy, folder))
        wrong.append((rollout_recipe(source, name, {**keys, **other}, **values), strategy, folder))
    pool.run(1, plain_rank, right)
    for name, verdict in zip(CASES, pool.run(2, verified_rank, right)[0], strict=True):
        assert verdict.passed, (name, verdict.rows, verdict.proof)
        assert any("not proved: sampling" in note for note in verdict.notes)
    for name, verdict in zip(CASES, pool.run(2, verified_rank, wrong)[0], strict=True):
        assert not verdict.passed, (name, verdict.rows)


def test_completions_that_train_nothing_are_no_proof(pool: Pool, tmp_path: Path) -> None:
    recipe = rollout_recipe(
        prompts(tmp_path), "grpo", {"completion_length": 1, "mask_truncated": True}, steps=1
    )
    jobs = [(recipe, {"micro_batch_size": 2, "precision": "fp64"}, tmp_path)]
    pool.run(1, plain_rank, jobs)
    [[verdict]] = pool.run(1, verified_rank, jobs)
    assert "not proved: gradients, which are zero in all steps" in verdict.notes
    assert verdict.untrained == 1 and not verdict.passed


def test_equal_rewards_are_neither_a_failure_nor_a_proof(pool: Pool, tmp_path: Path) -> None:
    """The gradient is the rounding error of policy less reference, which another layout has not."""
    jobs, equal = [], {"rewards": [f"{rollout_recipe.__module__}:equal"], "reward_weights": None, "group": 3}
    for name, beta in (("with", 0.2), ("without", 0.0)):
        (folder := tmp_path / name).mkdir()
        recipe = rollout_recipe(prompts(tmp_path), "grpo", {**equal, "beta": beta}, steps=2)
        jobs.append((recipe, {"tensor_parallel": 2, "precision": "fp32", "micro_batch_size": 2}, folder))
    pool.run(1, plain_rank, jobs)
    for verdict in pool.run(2, verified_rank, jobs)[0]:
        assert verdict.untrained == 2 and verdict.compares_nothing and not verdict.passed
