"""What GRPO, RLOO and PPO have in common: where their batches come from, their reference, their measures."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwise.engine.run import Run
from shardwise.engine.sampling import Prompts, Repeated, Sampler, SamplingObjective
from shardwise.model.blueprint import Batch, Blueprint, ForwardOnly, LossSum, SampleShapes
from shardwise.plugins.preferences.reference import REFERENCE_ROLE, Referenced
from shardwise.plugins.rollouts.advantages import truncated_ratio
from shardwise.plugins.rollouts.endpoint import Endpoint
from shardwise.plugins.rollouts.generation import generate, rehearse
from shardwise.plugins.rollouts.rewards import rewards_of
from shardwise.plugins.rollouts.source import COLUMN, ROW, OverBatches, Rollouts, RolloutSpec, Tables
from shardwise.recipe.sections import DataSpec, Recipe
from shardwise.runtime.language_loss import tempered, valid_targets
from shardwise.runtime.measures import note
from shardwise.runtime.parallel.vocabulary import IGNORED


class RolloutObjective(Referenced, SamplingObjective):
    """Trains on the model's own completions of prompts.

    Attributes:
        values: names of the tensors [m, s] that a rollout adds to ids and labels.
        asked: the recipe's section.
    """

    counted = "completion tokens"
    values: tuple[str, ...] = ("sampled", "advantages")
    cancels = True

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        asked = recipe.objective
        assert asked is not None
        length = recipe.data.sequence_length
        self.spec = RolloutSpec(
            recipe.seed, recipe.batch_size, length, length - recipe.prompt_tokens, asked.group or 1,
            asked.temperature or 1.0, bool(asked.mask_truncated), asked.epochs or 1, asked.minibatches or 1,
        )  # fmt: skip
        self.asked = asked
        self.rewards = rewards_of(asked)
        self.beta = asked.beta or 0.0
        self.endpoint: Endpoint | None = None
        if asked.endpoint is not None:
            fixed = self.spec.completion, self.spec.temperature
            self.endpoint = Endpoint(asked.endpoint, asked.endpoint_model, *fixed)
            words = "whose weights do not follow training; its time and memory are not in the plan"
            self.plan_notes = (f"completions are from {asked.endpoint}, {words}",)
        if self.how:
            self.values = (*self.values, REFERENCE_ROLE)
        own = ("reward_deviation", "completion_length", "truncated", "entropy", "mismatch")
        self.measures = (*self.rewards.measures, *own, *("kl",) * bool(self.how))
        rows: SampleShapes = dict.fromkeys(("lengths", "ended", "present"), ((), torch.int64))
        rewards = (1 + len(self.rewards.rewards),)
        self._of_rows = {**rows, "rewards": (rewards, torch.float64), "deviation": ((), torch.float64)}
        self.per_token = frozenset((*self.values, COLUMN))
        self.per_sample = frozenset((*self._of_rows, ROW))

    def sample_shapes(self, shapes: SampleShapes, data: DataSpec) -> SampleShapes:
        values = dict.fromkeys(self.values, ((data.sequence_length,), torch.float32))
        return {**shapes, **values, **self._of_rows}

    @abstractmethod
    def of_tokens(self, blueprint: Blueprint, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Losses of tokens [m, s], and the number of targets; notes the measures."""

    def loss(self, blueprint: Blueprint, model: nn.Module, batch: Batch) -> LossSum:
        """In evaluation it is the negated reward, which training makes small."""
        losses, count = self.of_tokens(blueprint, model, batch)
        if model.training:
            return losses.where(batch["labels"] != IGNORED, 0).sum(), count
        return -(batch["rewards"][:, 0] * batch["present"]).sum(), batch["present"].sum()

    def corrected(self, losses: Tensor, policy: Tensor, batch: Batch) -> Tensor:
        """The policy's losses, weighted where other weights than the trained ones have sampled."""
        return losses if self.endpoint is None else losses * truncated_ratio(policy, batch["sampled"])

    def log_probabilities(self, blueprint: Blueprint, model: nn.Module, batch: Batch) -> Tensor:
        """Of the labels, at the temperature of sampling: [m, s]."""
        with tempered(blueprint.output(model), self.spec.temperature):
            return blueprint.log_probabilities(model, batch)

    def batches(self, sampler: Sampler, prompts: Prompts, folder: Path | None = None) -> Rollouts:
        return Rollouts(sampler, self.spec, prompts, self.rewards, self.added, self.endpoint, folder)

    def added(self, rollouts: Rollouts, tables: Tables) -> Tables:
        """The reference's log-probabilities of a rollout."""
        return {REFERENCE_ROLE: rollouts.computed(tables, self._referred)} if self.how else {}

    def _referred(self, passes: ForwardOnly, batches: Sequence[Batch]) -> list[Tensor | None]:
        """The reference's log-probabilities of micro-batches."""
        return self.by_reference(passes, batches, self.log_probabilities)

    def rehearse(self, run: Run, batch: Batch, repeated: Repeated) -> None:
        spec = self.spec

        def each(times: float) -> AbstractContextManager[None]:
            return repeated(times / spec.steps)

        rows = -(-spec.size // run.data_degree)
        prompt = spec.length - spec.completion
        if self.endpoint is None:
            rehearse(run, rows, prompt, spec.completion, spec.temperature, each)
        with each(run.context.micro_batches * spec.minibatches):
            for compute in self.passes():
                compute(run.passes, [batch])

    def warm_up(self, run: Run) -> None:
        if self.endpoint is None:
            uniform = torch.full((2, 4), 0.5, dtype=torch.float64)
            generate(run, [[0], [0]], uniform, [0], self.spec.temperature)

    def passes(self) -> list[OverBatches]:
        """The passes over a whole rollout before it is trained on."""
        return [self._referred] if self.how else []

    def note_rollout(self, batch: Batch, policy: Tensor) -> None:
        """Note the measures of a micro-batch, whose labels have the log-probabilities ``policy`` [m, s] now."""
        valid = batch["labels"] != IGNORED
        present = batch["present"]
        rows = (*batch["rewards"].unbind(1), batch["deviation"], batch["lengths"], 1 - batch["ended"])
        for name, values in zip(self.measures, rows, strict=False):
            note(name, (values * present).sum(), present.sum())
        for name, values in (("entropy", -batch["sampled"]), ("mismatch", (policy - batch["sampled"]).abs())):
            note(name, values.where(valid, 0).sum(), valid_targets(batch["labels"]))
