"""GRPO: policy gradients with the mean reward of a group as baseline (Shao et al. 2024, arXiv:2402.03300).

On-policy: every rollout gives one update, so the ratio of policies is 1 and nothing is clipped. The loss is a sum over
tokens. It is divided by the number of tokens of the global batch, or by the number of tokens that its completions could
have had (``normalise: length``; Liu et al. 2025, arXiv:2503.20783), never by the length of each completion.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.model.blueprint import Batch, Blueprint, LossSum
from shardwise.plugins.rollouts.advantages import group_advantages, kl_divergence, policy_loss
from shardwise.plugins.rollouts.objective import RolloutKeys, RolloutObjective
from shardwise.plugins.rollouts.rewards import Rewards, rewards_of
from shardwise.plugins.rollouts.source import Rollouts, RolloutSpec, Tables
from shardwise.recipe.sections import Recipe
from shardwise.runtime.language_loss import token_log_probabilities, valid_targets
from shardwise.runtime.measures import note
from shardwise.runtime.parallel.vocabulary import IGNORED

NORMALISERS = ("tokens", "length")


class GroupPolicyGradient(RolloutObjective):
    """Policy gradients with advantages of whole completions, from the rewards of their group.

    Args:
        normalise: tokens or length.
    """

    def __init__(self, spec: RolloutSpec, rewards: Rewards, beta: float, normalise: str) -> None:
        super().__init__(spec, rewards, beta)
        if normalise not in NORMALISERS:
            where = "objective.normalise"
            raise RecipeError(f"normalise is {normalise!r}", where=where, fix="use tokens or length")
        self._by_length = normalise == "length"

    def of_group(self, rewards: Tensor) -> Tensor:
        """Advantages [n] of rewards [n]."""
        raise NotImplementedError

    def added(self, rollouts: Rollouts, tables: Tables) -> Tables:
        advantages = self.of_group(tables["rewards"][:, 0]).to(tables["sampled"].dtype)
        return {"advantages": advantages.unsqueeze(1).expand_as(tables["sampled"])}

    def count(self, blueprint: Blueprint, batch: Batch) -> Tensor:
        if self._by_length:
            return batch["present"].sum() * self.spec.completion
        return valid_targets(batch["labels"])

    def loss(self, blueprint: Blueprint, model: nn.Module, batch: Batch) -> LossSum:
        policy, valid = token_log_probabilities(blueprint, model, batch), batch["labels"] != IGNORED
        losses = policy_loss(policy, batch["advantages"])
        if self.beta:
            divergence = kl_divergence(policy, batch["reference_tokens"])
            losses = losses + self.beta * divergence
            note("kl", divergence.detach().where(valid, 0).sum(), valid.sum())
        self.note_rollout(batch, policy)
        return losses.where(valid, 0).sum(), self.count(blueprint, batch)


class GRPO(GroupPolicyGradient):
    """``scaled``: advantages are divided by the standard deviation of their group."""

    def __init__(
        self, spec: RolloutSpec, rewards: Rewards, beta: float, normalise: str, scaled: bool
    ) -> None:
        super().__init__(spec, rewards, beta, normalise)
        self._scaled = scaled

    def of_group(self, rewards: Tensor) -> Tensor:
        return group_advantages(rewards, self.spec.group, self._scaled)


def objective(recipe: Recipe, normalise: str = "tokens", scale_rewards: bool = True, **keys: Any) -> GRPO:
    """GRPO as a recipe asks for it."""
    read = RolloutKeys(**keys)
    spec, rewards = read.spec(recipe, least=2), rewards_of(read.rewards, read.reward_model)
    return GRPO(spec, rewards, read.beta, normalise, scale_rewards)
