"""Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290, equation 7).

    reward r = β (log π(y) - log π_ref(y));  loss = -log σ(r_chosen - r_rejected)

With label smoothing ε the loss is (1 - ε) and ε of both orders of the pair (conservative DPO, Mitchell 2023). RPO adds
the negative log-likelihood of the chosen answer per token (Pang et al. 2024, arXiv:2404.19733).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from shardwise.model.blueprint import Batch
from shardwise.plugins.preferences.documents import Answers, PairObjective
from shardwise.plugins.preferences.reference import REFERENCE_ROLE, ReferenceObjective
from shardwise.recipe.sections import Recipe


class DPO(ReferenceObjective, PairObjective):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        spec = recipe.objective
        assert spec is not None
        self.beta, self.smoothing = spec.beta or 0.0, spec.label_smoothing or 0.0
        self.nll_weight = spec.nll_weight or 0.0
        self.means = bool(spec.length_normalised)

    def rewards(self, pairs: Answers, batch: Batch) -> Tensor:
        ratios = pairs.sums
        if self.how:
            ratios = ratios - batch[REFERENCE_ROLE].to(ratios.dtype)
        return self.beta * (ratios / pairs.lengths.clamp(min=1) if self.means else ratios)

    def losses(self, rewards: Tensor, pairs: Answers) -> Tensor:
        losses = smoothed(rewards[..., 0] - rewards[..., 1], self.smoothing)
        return losses - self.nll_weight * pairs.means[..., 0] if self.nll_weight else losses


def smoothed(margin: Tensor, smoothing: float) -> Tensor:
    """-log σ(margin), with a share of the opposite order."""
    losses = -logsigmoid(margin)
    return (1 - smoothing) * losses - smoothing * logsigmoid(-margin) if smoothing else losses


def objective(recipe: Recipe) -> DPO:
    """The recipe's objective."""
    return DPO(recipe)
