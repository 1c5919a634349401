"""GRPO: policy gradients with the mean reward of a group as baseline (Shao et al. 2024, arXiv:2402.03300).

On-policy: every rollout gives one update, so the ratio of policies is 1 and nothing is clipped. The loss is a sum over
tokens. It is divided by the number of tokens of the global batch, or by the number of tokens that its completions could
have had (``normalise: length``; Liu et al. 2025, arXiv:2503.20783), never by the length of each completion.
"""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn

from shardwise.model.blueprint import Batch, Blueprint
from shardwise.plugins.preferences.reference import REFERENCE
from shardwise.plugins.rollouts.advantages import group_advantages, kl_divergence, policy_loss
from shardwise.plugins.rollouts.objective import RolloutObjective
from shardwise.plugins.rollouts.source import Rollouts, Tables
from shardwise.recipe.sections import Recipe
from shardwise.runtime.language_loss import valid_targets
from shardwise.runtime.measures import note
from shardwise.runtime.parallel.vocabulary import IGNORED


class GroupPolicyGradient(RolloutObjective):
    """Policy gradients with advantages of whole completions, from the rewards of their group."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        assert recipe.objective is not None
        self._by_length = recipe.objective.normalise == "length"
        self._scaled = bool(recipe.objective.scale_rewards)

    @abstractmethod
    def of_group(self, rewards: Tensor) -> Tensor:
        """Advantages [n] of rewards [n]."""

    def added(self, rollouts: Rollouts, tables: Tables) -> Tables:
        advantages = self.of_group(tables["rewards"][:, 0]).to(tables["sampled"].dtype)
        spread = advantages.unsqueeze(1).expand_as(tables["sampled"])
        return {**super().added(rollouts, tables), "advantages": spread}

    def count(self, blueprint: Blueprint, batch: Batch) -> Tensor:
        if self._by_length:
            return batch["present"].sum() * self.spec.completion
        return valid_targets(batch["labels"])

    def of_tokens(self, blueprint: Blueprint, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        policy, valid = self.log_probabilities(blueprint, model, batch), batch["labels"] != IGNORED
        losses = self.corrected(policy_loss(policy, batch["advantages"]), policy, batch)
        if self.how:
            divergence = kl_divergence(policy, batch[REFERENCE])
            losses = losses + self.beta * divergence
            note("kl", divergence.detach().where(valid, 0).sum(), valid.sum())
        self.note_rollout(batch, policy.detach())
        return losses, self.count(blueprint, batch)


class GRPO(GroupPolicyGradient):
    def of_group(self, rewards: Tensor) -> Tensor:
        return group_advantages(rewards, self.spec.group, self._scaled)


def objective(recipe: Recipe) -> GRPO:
    """GRPO as a recipe asks for it."""
    return GRPO(recipe)
