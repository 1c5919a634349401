"""Odds ratio preference optimization (Hong et al. 2024, arXiv:2403.07691, equations 4 to 7): fine-tuning and preference
in one loss, without a reference.

    P = exp(log π(y) / |y|);  odds = P / (1 - P);  loss = -log P_chosen - λ log σ(log(odds_chosen / odds_rejected))
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from shardwise.model.blueprint import Batch
from shardwise.plugins.preferences.documents import Answers, PairObjective
from shardwise.recipe.sections import Recipe


class ORPO(PairObjective):
    def __init__(self, recipe: Recipe) -> None:
        assert recipe.objective is not None
        self.weight = recipe.objective.beta or 0.0

    def rewards(self, pairs: Answers, batch: Batch) -> Tensor:
        """λ log π(y) / |y|."""
        # A document of a padding sample has no targets and P = 1, whose odds are infinite.
        return self.weight * pairs.means.where(pairs.lengths > 0, -1.0)

    def losses(self, rewards: Tensor, pairs: Answers) -> Tensor:
        means = pairs.means.where(pairs.lengths > 0, -1.0)
        odds = means - log_one_minus_exp(means)
        return -means[..., 0] - self.weight * logsigmoid(odds[..., 0] - odds[..., 1])


def log_one_minus_exp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, without cancellation (Mächler 2012)."""
    least = torch.finfo(x.dtype).tiny
    near = torch.log((-torch.expm1(x)).clamp(min=least))
    far = torch.log1p(-torch.exp(x).clamp(max=0.5))
    return near.where(x > -0.6931471805599453, far)


def objective(recipe: Recipe) -> ORPO:
    """The recipe's objective."""
    return ORPO(recipe)
