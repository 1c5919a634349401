"""Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv:2402.01306, equation 8): answers with a label.

    reward r = log π(y) - log π_ref(y)
    loss = w_d (1 - σ(β (r - z)))  of a desirable answer,  w_u (1 - σ(β (z - r)))  of an undesirable one

z estimates the KL divergence of the policy from the reference: the mean reward of *mismatched* answers, which belong to
other prompts, at least 0 and without a gradient. The paper takes it over a micro-batch. Here it is over the step's
global batch, known before the first pass, so the loss does not depend on how the batch is divided.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from shardwise.data.unpaired import MISMATCHED
from shardwise.model.blueprint import Batch, Blueprint, ForwardOnly, SampleShapes
from shardwise.plugins.preferences.reference import REFERENCE_ROLE, ReferenceObjective
from shardwise.recipe.sections import DataSpec, Recipe
from shardwise.runtime.measures import note

_KL, _ROWS = "kl", ("input_ids", "labels", "document", "positions")


class KTO(ReferenceObjective):
    measures = (
        "chosen_reward",
        "rejected_reward",
        "chosen_log_probability",
        "rejected_log_probability",
        "kl",
    )
    per_token = ReferenceObjective.per_token | {MISMATCHED + name for name in _ROWS}
    per_sample = ReferenceObjective.per_sample | {
        "desirable", _KL, MISMATCHED + "starts", MISMATCHED + REFERENCE_ROLE
    }  # fmt: skip
    whole_step = True

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        spec = recipe.objective
        assert spec is not None
        self.beta = spec.beta or 0.0
        self.desirable, self.undesirable = spec.desirable_weight or 0.0, spec.undesirable_weight or 0.0

    def sample_shapes(self, shapes: SampleShapes, data: DataSpec) -> SampleShapes:
        shapes = super().sample_shapes(shapes, data)
        mismatched = {
            MISMATCHED + name: shapes[name] for name in (*_ROWS, "starts", REFERENCE_ROLE) if name in shapes
        }
        return {**shapes, **mismatched, "desirable": shapes["present"]}

    def precomputed(self) -> Mapping[str, Callable[[Batch], Batch]]:
        names = super().precomputed()
        return {**names, **{MISMATCHED + name: _mismatched for name in names}}

    def annotated(self, batch: Batch, frozen: Mapping[str, nn.Module]) -> Batch:
        """The reference of the answers; ``before_step`` has that of the mismatched ones."""
        return batch if REFERENCE_ROLE in batch else super().annotated(batch, frozen)

    def before_step(self, passes: ForwardOnly, batches: Sequence[Batch]) -> Sequence[Batch]:
        batches, mismatched = super().before_step(passes, batches), list(map(_mismatched, batches))
        trained = passes.forward_only(mismatched, functools.partial(self.of_reference, passes.blueprint))
        theirs = self._reference_sums(passes, mismatched)
        total = torch.zeros(2, dtype=torch.float64, device=batches[0]["input_ids"].device)
        for batch, ours, reference in zip(batches, trained, theirs, strict=True):
            if ours is not None and reference is not None:
                present = (batch["present"] > 0).unsqueeze(-1)
                differences = (ours - reference.to(ours.dtype)).where(present, 0)
                total += torch.stack([differences.double().sum(), present.double().sum()])
        total = passes.global_sum(total)
        kl = (total[0] / total[1].clamp(min=1)).clamp(min=0)
        return [{**batch, _KL: kl} for batch in batches]

    def _reference_sums(self, passes: ForwardOnly, mismatched: Sequence[Batch]) -> Sequence[Tensor | None]:
        """Log-probabilities of the mismatched answers by the reference."""
        if self.how == "precomputed":
            return [batch[REFERENCE_ROLE] for batch in mismatched]
        return self.by_reference(passes, mismatched, self.of_reference)

    def losses_of(self, blueprint: Blueprint, model: nn.Module, batch: Batch) -> Tensor:
        sums = self.answers(blueprint, model, batch).sums
        rewards = (sums - batch[REFERENCE_ROLE].to(sums.dtype)).squeeze(-1)
        good = batch["desirable"] > 0
        kl = batch[_KL].to(rewards.dtype)
        losses = (self.desirable * torch.sigmoid(self.beta * (kl - rewards))).where(
            good, self.undesirable * torch.sigmoid(self.beta * (rewards - kl))
        )
        self._note(batch, self.beta * rewards, sums.squeeze(-1), good, kl)
        return losses

    def _note(self, batch: Batch, rewards: Tensor, sums: Tensor, good: Tensor, kl: Tensor) -> None:
        present = batch["present"] > 0
        for name, which in (("chosen", present & good), ("rejected", present & ~good)):
            note(f"{name}_reward", rewards.detach().where(which, 0).sum(), which.sum())
            note(f"{name}_log_probability", sums.detach().where(which, 0).sum(), which.sum())
        note("kl", kl * present.sum(), present.sum())


def _mismatched(batch: Batch) -> Batch:
    """The mismatched answers of a batch as a batch."""
    theirs = {name.removeprefix(MISMATCHED): t for name, t in batch.items() if name.startswith(MISMATCHED)}
    unchanged: Batch = {name: batch[name] for name in ("present", "positions") if name in batch}
    return {**unchanged, **theirs}


def objective(recipe: Recipe) -> KTO:
    """The recipe's objective."""
    return KTO(recipe)
