"""GRPO and PPO raise a reward that can be checked, from below 0.2 to above 0.8; a kill changes nothing.

A byte model without any training writes digits; the reward is their share.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.recipe.sections import Recipe
from tests.harness.killed_run import killed_and_whole
from tests.harness.pool import Pool
from tests.harness.tiers import quick
from tests.plugins.rollouts.rollout_runs import prompts, rollout_recipe, trained

MODEL = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 4, "ffn": 128, "vocab": 256}
KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "grpo": ({"group": 8}, 32),
    "ppo": ({"epochs": 2, "beta": 0.0}, 60),
}


def learning_recipe(folder: Path, name: str, **values: Any) -> Recipe:
    keys, steps = KINDS[name]
    rewards = {"rewards": ["tests.plugins.rollouts.rollout_runs:digits"], "reward_weights": [1.0]}
    return rollout_recipe(
        prompts(folder), name, {**keys, **rewards}, model=MODEL, batch_size=64, steps=steps, **values
    )


def rewards_of(lines: list[dict[str, Any]]) -> list[float]:
    return [line["measures"]["reward"] for line in lines]


@pytest.mark.parametrize("name", quick(KINDS, "grpo"))
def test_the_reward_rises(pool: Pool, tmp_path: Path, name: str) -> None:
    settings = {"precision": "fp32", "micro_batch_size": 64}
    steps = pool.run(1, trained, learning_recipe(tmp_path, name), settings)[0]
    rewards = [step["reward"] for step in steps]
    assert rewards[0] < 0.2
    assert rewards[-1] > 0.8
    assert all(step["mismatch"] < 1e-5 for step in steps)


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_a_run_of_the_command_that_is_killed_raises_it_too(tmp_path: Path, name: str) -> None:
    """Two ranks under ZeRO 3, killed once; the curve is that of the run that was not killed."""
    recipe = learning_recipe(tmp_path, name, checkpoint={"every": 10}, cluster={"devices_per_node": 2})
    pinned = ["strategy.zero_stage=3", "strategy.micro_batch_size=32", "strategy.precision=fp32"]
    killed, whole = map(rewards_of, killed_and_whole(recipe, tmp_path, pinned, step=10))
    assert killed == whole
    assert whole[0] < 0.2
    assert whole[-1] > 0.8
