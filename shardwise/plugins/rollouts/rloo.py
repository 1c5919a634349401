"""RLOO: REINFORCE with the mean reward of the others of a group as baseline (Ahmadian et al. 2024, arXiv:2402.14740).

Otherwise as grpo.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardwise.plugins.rollouts.advantages import leave_one_out_advantages
from shardwise.plugins.rollouts.grpo import GroupPolicyGradient
from shardwise.plugins.rollouts.objective import RolloutKeys
from shardwise.plugins.rollouts.rewards import rewards_of
from shardwise.recipe.sections import Recipe


class RLOO(GroupPolicyGradient):
    def of_group(self, rewards: Tensor) -> Tensor:
        return leave_one_out_advantages(rewards, self.spec.group)


def objective(recipe: Recipe, normalise: str = "tokens", **keys: Any) -> RLOO:
    """RLOO as a recipe asks for it."""
    read = RolloutKeys(**keys)
    return RLOO(read.spec(recipe, least=2), rewards_of(read.rewards, read.reward_model), read.beta, normalise)
