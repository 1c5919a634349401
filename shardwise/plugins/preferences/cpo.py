"""Contrastive preference optimization (Xu et al. 2024, arXiv:2401.08417, equation 5): DPO as if the reference found all
answers equally likely, plus the negative log-likelihood of the chosen answer.

    reward r = β log π(y);  loss = -log σ(r_chosen - r_rejected) - w log π(y_chosen) / |y_chosen|

The likelihood is per token, so long answers do not outweigh the preference.
"""

from __future__ import annotations

from torch import Tensor

from shardwise.model.blueprint import Batch
from shardwise.plugins.preferences.documents import Answers, PairObjective
from shardwise.plugins.preferences.dpo import smoothed
from shardwise.recipe.sections import Recipe


class CPO(PairObjective):
    def __init__(self, recipe: Recipe) -> None:
        spec = recipe.objective
        assert spec is not None
        self.beta, self.smoothing = spec.beta or 0.0, spec.label_smoothing or 0.0
        self.nll_weight = spec.nll_weight or 0.0

    def rewards(self, pairs: Answers, batch: Batch) -> Tensor:
        return self.beta * pairs.sums

    def losses(self, rewards: Tensor, pairs: Answers) -> Tensor:
        losses = smoothed(rewards[..., 0] - rewards[..., 1], self.smoothing)
        return losses - self.nll_weight * pairs.means[..., 0]


def objective(recipe: Recipe) -> CPO:
    """The recipe's objective."""
    return CPO(recipe)
