"""Simple preference optimization (Meng et al. 2024, arXiv:2405.14734, equation 6): no reference, and means per token.

reward r = β log π(y) / |y|;  loss = -log σ(r_chosen - r_rejected - γ)
"""

from __future__ import annotations

from torch import Tensor

from shardwise.model.blueprint import Batch
from shardwise.plugins.preferences.documents import Answers, PairObjective
from shardwise.plugins.preferences.dpo import smoothed
from shardwise.recipe.sections import Recipe


class SimPO(PairObjective):
    def __init__(self, recipe: Recipe) -> None:
        spec = recipe.objective
        assert spec is not None
        self.beta, self.margin = spec.beta or 0.0, spec.margin or 0.0
        self.smoothing, self.nll_weight = spec.label_smoothing or 0.0, spec.nll_weight or 0.0

    def rewards(self, pairs: Answers, batch: Batch) -> Tensor:
        return self.beta * pairs.means

    def losses(self, rewards: Tensor, pairs: Answers) -> Tensor:
        losses = smoothed(rewards[..., 0] - rewards[..., 1] - self.margin, self.smoothing)
        return losses - self.nll_weight * pairs.means[..., 0] if self.nll_weight else losses


def objective(recipe: Recipe) -> SimPO:
    """The recipe's objective."""
    return SimPO(recipe)
