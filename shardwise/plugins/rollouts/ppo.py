"""PPO: several updates on one rollout, with clipped ratios and a value per token (Schulman et al. 2017,
arXiv:1707.06347).

The value is a linear head on the trained model's last hidden state (model/value_head.py). A completion's reward is
that of its last token, and every token is charged ``beta`` times its log-probability's distance from the reference's
(Ziegler et al. 2019, arXiv:1909.08593, eq. 2). Old log-probabilities are those that the training pass computes before
the first update, not those of sampling, so the first ratio is 1; ``mismatch`` says how far the two differ.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.model.blueprint import Batch, Blueprint, ForwardOnly
from shardwise.model.value_head import log_probabilities_and_values
from shardwise.plugins.preferences.reference import REFERENCE_ROLE
from shardwise.plugins.rollouts.advantages import (
    clipped_loss,
    clipped_value_loss,
    generalised_advantages,
    whitened,
)
from shardwise.plugins.rollouts.objective import RolloutObjective
from shardwise.plugins.rollouts.source import OverBatches, Rollouts, Tables
from shardwise.recipe.sections import Recipe
from shardwise.runtime.language_loss import tempered
from shardwise.runtime.measures import note
from shardwise.runtime.parallel.vocabulary import IGNORED

OLD, STATE, RETURNS = "old", "state", "returns"
"""Log-probabilities and values before the first update, and the returns that the values shall reach; [m, s]."""


class PPO(RolloutObjective):
    values = (*RolloutObjective.values, OLD, STATE, RETURNS)

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        asked = self.asked
        self._gamma, self._lambda = asked.discount or 1.0, asked.trace_decay or 0.0
        self._epsilon, self._value_epsilon = asked.epsilon or 0.0, asked.value_epsilon or 0.0
        self._value_weight = asked.value_weight or 0.0
        self._whiten = bool(asked.whiten)
        self.measures = (*self.measures, "clipped", "value_error")

    def added(self, rollouts: Rollouts, tables: Tables) -> Tables:
        tables = {**tables, **super().added(rollouts, tables)}
        old, state = rollouts.computed(tables, self._before_updates).unbind(1)
        valid = tables["labels"] != IGNORED
        last = valid & ~F.pad(valid[:, 1:], (0, 1))
        rewards = torch.zeros_like(old).masked_scatter(last, tables["rewards"][valid.any(1), 0].to(old))
        if self.how:
            rewards = rewards - self.beta * (old - tables[REFERENCE_ROLE])
        advantages, returns = generalised_advantages(rewards, state, valid, self._gamma, self._lambda)
        if self._whiten:
            advantages = whitened(advantages, valid)
        return {**tables, OLD: old, STATE: state, RETURNS: returns, "advantages": advantages}

    def passes(self) -> list[OverBatches]:
        return [*super().passes(), self._before_updates]

    def _before_updates(self, passes: ForwardOnly, batches: Sequence[Batch]) -> list[Tensor | None]:
        return passes.forward_only(batches, functools.partial(self._both, passes.blueprint))

    def _both(self, blueprint: Blueprint, model: nn.Module, batch: Batch) -> Tensor:
        """Log-probabilities of the labels, and values [m, 2, s]."""
        with tempered(blueprint.output(model), self.spec.temperature):
            return torch.stack(log_probabilities_and_values(blueprint, model, batch), 1)

    def of_tokens(self, blueprint: Blueprint, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        policy, state = self._both(blueprint, model, batch).unbind(1)
        given = (policy, batch[OLD], batch["advantages"], self._epsilon)
        valid = batch["labels"] != IGNORED
        errors = clipped_value_loss(state, batch[STATE], batch[RETURNS], self._value_epsilon)
        surrogate, clipped = clipped_loss(*given)
        losses = self.corrected(surrogate, batch[OLD], batch) + self._value_weight * errors
        self.note_rollout(batch, batch[OLD])
        noted = {"clipped": clipped, "value_error": errors}
        if self.how:
            noted["kl"] = batch[OLD] - batch[REFERENCE_ROLE]
        for name, values in noted.items():
            note(name, values.detach().where(valid, 0).sum(), valid.sum())
        return losses, valid.sum()


objective = PPO
