"""A reward model: a score of an answer, read at its last token, that is larger for the chosen one.

    loss = -log σ(s_chosen - s_rejected - margin) + w (s_chosen + s_rejected)²

The first term is the model of Bradley and Terry (1952), with the margin of Llama 2 (Touvron et al. 2023, section
3.2.2) where the records have one. The second centers scores around 0 (Eisenstein et al. 2023, arXiv:2312.09244).
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from shardwise.model.blueprint import Batch, Blueprint
from shardwise.model.scalar_head import values
from shardwise.plugins.preferences.documents import DocumentObjective
from shardwise.recipe.sections import Recipe
from shardwise.runtime.parallel.document_sums import document_sums


class Reward(DocumentObjective):
    measures = ("accuracy", "reward_margin", "chosen_reward", "rejected_reward")
    counted = "pairs"
    answers_per_unit = 2

    def __init__(self, recipe: Recipe) -> None:
        assert recipe.objective is not None
        self.center_weight = recipe.objective.center_weight or 0.0

    def scores(self, blueprint: Blueprint, model: nn.Module, batch: Batch) -> Tensor:
        """The score at the one target of each document, by pair: [m, units, 2]."""
        last = values(blueprint, model, batch).where(batch["labels"] >= 0, 0)
        return self.units(batch, document_sums(model, last, batch.get("document"), self.documents(batch)))

    def losses_of(self, blueprint: Blueprint, model: nn.Module, batch: Batch) -> Tensor:
        scores = self.scores(blueprint, model, batch)
        chosen, rejected = scores.unbind(-1)
        losses = -logsigmoid(chosen - rejected - batch.get("margin", 0))
        if self.center_weight:
            losses = losses + self.center_weight * (chosen + rejected).square()
        self.note(
            batch,
            {
                "accuracy": (chosen > rejected).to(scores.dtype),
                "reward_margin": chosen - rejected,
                "chosen_reward": chosen,
                "rejected_reward": rejected,
            },
        )
        return losses


def objective(recipe: Recipe) -> Reward:
    """The recipe's objective."""
    return Reward(recipe)
