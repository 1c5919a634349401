"""Log-probabilities of whole answers, and the batches of documents that they come from.

A sample has one row for each answer, or packed rows with several documents each, that attention keeps apart. Either
way an answer's log-probability is the sum over its targets, in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardwise.model.blueprint import (
    Batch,
    Blueprint,
    LossSum,
    SampleShapes,
    TrainingObjective,
)
from shardwise.recipe.sections import DataSpec
from shardwise.runtime.language_loss import with_auxiliary
from shardwise.runtime.measures import note
from shardwise.runtime.parallel.document_sums import document_sums, sequence_ranks

ROWS = ("input_ids", "labels", "counted")
"""Tensors of a sample with a row for each of its answers."""

TYPICAL_PAIR = 512
"""Tokens of a pair in a packed row, for the number of pairs in a plan."""


class Answers(NamedTuple):
    """Of every document: the sum of its targets' log-probabilities, and the number of its targets, [rows, d]."""

    sums: Tensor
    lengths: Tensor

    @property
    def means(self) -> Tensor:
        """Log-probability per target; 0 for documents without targets."""
        return self.sums / self.lengths.clamp(min=1)


def answer_sums(blueprint: Blueprint, model: nn.Module, batch: Batch, documents: int) -> Answers:
    """Log-probabilities of the documents of a batch. Every row has ``documents`` of them."""
    values = blueprint.log_probabilities(model, batch)
    document = batch.get("document")
    valid = batch["labels"] >= 0
    sums = document_sums(model, values, document, documents)
    return Answers(sums, document_sums(model, valid.to(values.dtype), document, documents))


class DocumentObjective(TrainingObjective):
    """Base of objectives on whole answers.

    Attributes:
        answers_per_unit: documents that make one unit of the loss: 2 of a pair, 1 of a labelled answer.
    """

    per_token = frozenset({"document", "counted"})
    per_sample = frozenset({"present", "margin"})
    counted = "answers"
    answers_per_unit = 1

    def sample_shapes(self, shapes: SampleShapes, data: DataSpec) -> SampleShapes:
        tokens: tuple[int, ...] = (data.sequence_length,)
        units = max(1, -(-data.sequence_length // TYPICAL_PAIR)) if data.packing else 1
        names = dict.fromkeys(ROWS, torch.int64)
        if data.packing:
            names |= {"document": torch.int64}
        elif self.answers_per_unit > 1:
            tokens = (self.answers_per_unit, *tokens)
        own = {name: (tokens, dtype) for name, dtype in names.items()}
        return {**shapes, **own, "present": ((units,), torch.int64)}

    def rows(self, batch: Batch) -> Batch:
        apart = batch["input_ids"].dim() == 3
        return {n: t.flatten(0, 1) if apart and n in ROWS else t for n, t in batch.items()}

    def count(self, blueprint: Blueprint, batch: Batch) -> Tensor:
        return batch["counted"].sum()

    def units(self, batch: Batch, documents: Tensor) -> Tensor:
        """Values of documents [rows, d] by unit: [m, units of a sample, answers_per_unit]."""
        return documents.view(*batch["present"].shape, self.answers_per_unit)

    def documents(self, batch: Batch) -> int:
        """Documents of a row."""
        return batch["present"].numel() * self.answers_per_unit // batch["input_ids"].shape[0]

    def answers(self, blueprint: Blueprint, model: nn.Module, batch: Batch) -> Answers:
        """Log-probabilities by unit, [m, units, answers_per_unit]."""
        sums, lengths = answer_sums(blueprint, model, batch, self.documents(batch))
        return Answers(self.units(batch, sums), self.units(batch, lengths))

    def losses_of(self, blueprint: Blueprint, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of every unit, [m, units], by one pass of the model."""
        raise NotImplementedError

    def loss(self, blueprint: Blueprint, model: nn.Module, batch: Batch) -> LossSum:
        """The sum over the units that are present; ranks that share a sequence count it once together.

        The auxiliary loss of routers is that of this pass; the reference's has none.
        """
        with blueprint.router_loss(model, batch["labels"]) as auxiliary:
            losses = self.losses_of(blueprint, model, batch)
        total = losses.where(batch["present"] > 0, 0).sum() / sequence_ranks(model)
        return with_auxiliary((total, self.count(blueprint, batch)), auxiliary())

    def note(self, batch: Batch, measures: Mapping[str, Tensor]) -> None:
        """Note values [m, units] of the units that are present."""
        present = batch["present"] > 0
        for name, values in measures.items():
            note(name, values.detach().where(present, 0).sum(), present.sum())


class PairObjective(DocumentObjective):
    """Base of objectives on pairs: what they do with the log-probabilities of both answers."""

    measures: tuple[str, ...] = (
        "accuracy",
        "reward_margin",
        "chosen_reward",
        "rejected_reward",
        "chosen_log_probability",
        "rejected_log_probability",
    )
    counted = "pairs"
    answers_per_unit = 2

    def rewards(self, pairs: Answers, batch: Batch) -> Tensor:
        """Rewards of both answers [m, units, 2]: the chosen one's shall be larger."""
        raise NotImplementedError

    def losses(self, rewards: Tensor, pairs: Answers) -> Tensor:
        """The loss of every pair [m, units]."""
        raise NotImplementedError

    def losses_of(self, blueprint: Blueprint, model: nn.Module, batch: Batch) -> Tensor:
        pairs = self.answers(blueprint, model, batch)
        rewards = self.rewards(pairs, batch)
        chosen, rejected = rewards.unbind(-1)
        self.note(
            batch,
            {
                "accuracy": (chosen > rejected).to(rewards.dtype),
                "reward_margin": chosen - rejected,
                "chosen_reward": chosen,
                "rejected_reward": rejected,
                "chosen_log_probability": pairs.sums[..., 0],
                "rejected_log_probability": pairs.sums[..., 1],
            },
        )
        return self.losses(rewards, pairs)
