"""Identity preference optimization (Azar et al. 2023, arXiv:2310.12036, equation 17).

    h = log π/π_ref of the chosen answer minus that of the rejected one, each per token;  loss = (h - 1 / (2 β))²

The mean over an answer's tokens is the authors' later correction: with sums the target would depend on the length.
Rewards are β log π/π_ref, as of DPO.
"""

from __future__ import annotations

from torch import Tensor

from shardwise.model.blueprint import Batch
from shardwise.plugins.preferences.documents import Answers, PairObjective
from shardwise.plugins.preferences.reference import REFERENCE_ROLE, ReferenceObjective
from shardwise.recipe.sections import Recipe


class IPO(ReferenceObjective, PairObjective):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        assert recipe.objective is not None and recipe.objective.beta
        self.beta = recipe.objective.beta

    def rewards(self, pairs: Answers, batch: Batch) -> Tensor:
        ratios = pairs.sums
        if self.how:
            ratios = ratios - batch[REFERENCE_ROLE].to(ratios.dtype)
        return self.beta * ratios / pairs.lengths.clamp(min=1)

    def losses(self, rewards: Tensor, pairs: Answers) -> Tensor:
        h = (rewards[..., 0] - rewards[..., 1]) / self.beta
        return (h - 1 / (2 * self.beta)).square()


def objective(recipe: Recipe) -> IPO:
    """The recipe's objective."""
    return IPO(recipe)
