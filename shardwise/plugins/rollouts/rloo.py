"""RLOO: REINFORCE with the mean reward of the others of a group as baseline (Ahmadian et al. 2024, arXiv:2402.14740).

Otherwise as grpo.py.
"""

from __future__ import annotations

from torch import Tensor

from shardwise.plugins.rollouts.advantages import leave_one_out_advantages
from shardwise.plugins.rollouts.grpo import GroupPolicyGradient
from shardwise.recipe.sections import Recipe


class RLOO(GroupPolicyGradient):
    def of_group(self, rewards: Tensor) -> Tensor:
        return leave_one_out_advantages(rewards, self.spec.group)


def objective(recipe: Recipe) -> RLOO:
    """RLOO as a recipe asks for it."""
    return RLOO(recipe)
