"""Policy gradients with the rewards of a group as baseline: its mean in GRPO (Shao et al. 2024, arXiv:2402.03300), the
mean of the others in RLOO (Ahmadian et al. 2024, arXiv:2402.14740).

On-policy: every rollout gives one update, so the ratio of policies is 1 and nothing is clipped. The loss is a sum over
tokens. It is divided by the number of tokens of the global batch, or by the number of tokens that its completions could
have had (``normalise: length``; Liu et al. 2025, arXiv:2503.20783), never by the length of each completion.
"""

from __future__ import annotations

from torch import Tensor, nn

from shardwise.model.blueprint import Batch, Blueprint
from shardwise.plugins.preferences.reference import REFERENCE_ROLE
from shardwise.plugins.rollouts.advantages import group_advantages, kl_divergence, policy_loss
from shardwise.plugins.rollouts.objective import RolloutObjective
from shardwise.plugins.rollouts.source import Rollouts, Tables
from shardwise.runtime.language_loss import valid_targets
from shardwise.runtime.measures import note
from shardwise.runtime.parallel.vocabulary import IGNORED


class GroupPolicyGradient(RolloutObjective):
    """Policy gradients with advantages of whole completions, from the rewards of their group."""

    def added(self, rollouts: Rollouts, tables: Tables) -> Tables:
        how = bool(self.asked.scale_rewards), self.asked.name == "rloo"
        advantages = group_advantages(tables["rewards"][:, 0], self.spec.group, *how)
        spread = advantages.to(tables["sampled"]).unsqueeze(1).expand_as(tables["sampled"])
        return {**super().added(rollouts, tables), "advantages": spread}

    def count(self, blueprint: Blueprint, batch: Batch) -> Tensor:
        if self.asked.normalise == "length":
            completions = batch["present"].sum() * self.spec.completion
            # Of ranks that divide the tokens of a row, the one with the first token counts it.
            return completions * (batch["positions"] == 0).any() if "positions" in batch else completions
        return valid_targets(batch["labels"])

    def has_signal(self, batch: Batch) -> bool:
        return bool(batch["advantages"].where(batch["labels"] != IGNORED, 0).any())

    def of_tokens(self, blueprint: Blueprint, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        policy = self.log_probabilities(blueprint, model, batch)
        valid = batch["labels"] != IGNORED
        losses = self.corrected(policy_loss(policy, batch["advantages"]), policy, batch)
        if self.how:
            divergence = kl_divergence(policy, batch[REFERENCE_ROLE])
            losses = losses + self.beta * divergence
            note("kl", divergence.detach().where(valid, 0).sum(), valid.sum())
        self.note_rollout(batch, policy.detach())
        return losses, self.count(blueprint, batch)


objective = GroupPolicyGradient
