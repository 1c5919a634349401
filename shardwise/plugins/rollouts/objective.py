"""What GRPO, RLOO and PPO have in common: where their batches come from, their reference, their measures."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.errors import RecipeError
from shardwise.engine.run import Run
from shardwise.engine.sampling import Prompts, Repeated, SamplingObjective
from shardwise.model.blueprint import Batch, Blueprint, ForwardOnly, SampleShapes
from shardwise.plugins.preferences.reference import REFERENCE, Referenced
from shardwise.plugins.rollouts.generation import rehearse
from shardwise.plugins.rollouts.rewards import rewards_of
from shardwise.plugins.rollouts.source import OverBatches, Rollouts, RolloutSpec, Tables
from shardwise.recipe.sections import DataSpec, Recipe
from shardwise.runtime.language_loss import tempered, valid_targets
from shardwise.runtime.measures import note
from shardwise.runtime.parallel.vocabulary import IGNORED


class RolloutObjective(Referenced, SamplingObjective):
    """Trains on the model's own completions of prompts.

    Attributes:
        values: names of the tensors [m, s] that a rollout adds to ids and labels.
    """

    counted = "completion tokens"
    values: tuple[str, ...] = ("sampled", "advantages")

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        asked = recipe.objective
        assert asked is not None
        if recipe.data.packing:
            fix = "remove it: completions have rows of their own"
            raise RecipeError(
                "packing cannot be set here", where="data.packing", why="it is of given records", fix=fix
            )
        length = recipe.data.sequence_length
        self.spec = RolloutSpec(
            recipe.seed,
            recipe.batch_size,
            length,
            asked.completion_length or length // 2,
            asked.group or 1,
            asked.temperature or 1.0,
            bool(asked.mask_truncated),
            asked.epochs or 1,
            asked.minibatches or 1,
        )
        self.rewards, self.beta = rewards_of(asked), asked.beta or 0.0
        if self.how:
            self.values = (*self.values, REFERENCE)
        names = ("reward", *(f"reward/{name}" for name in self.rewards.names), "reward_deviation")
        own = ("completion_length", "truncated", "entropy", "mismatch", *("kl",) * bool(self.how))
        self.measures = (*names, *own)

    # ---- the model's view ---------------------------------------------------------------------------------

    @property
    def per_token(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(self.values)

    @property
    def per_sample(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(self._of_rows())

    def _of_rows(self) -> SampleShapes:
        rewards = (1 + len(self.rewards.rewards),)
        counts = dict.fromkeys(("lengths", "ended", "present"), ((), torch.int64))
        return {**counts, "rewards": (rewards, torch.float64), "deviation": ((), torch.float64)}

    def sample_shapes(self, shapes: SampleShapes, data: DataSpec) -> SampleShapes:
        values = dict.fromkeys(self.values, ((data.sequence_length,), torch.float32))
        return {**shapes, **values, **self._of_rows()}

    def log_probabilities(self, blueprint: Blueprint, model: nn.Module, batch: Batch) -> Tensor:
        """Of the labels, at the temperature of sampling: [m, s]."""
        with tempered(blueprint.output(model), self.spec.temperature):
            return blueprint.log_probabilities(model, batch)

    # ---- the batches --------------------------------------------------------------------------------------

    def batches(self, run: Run, prompts: Prompts) -> Rollouts:
        return Rollouts(run, self.spec, prompts, self.rewards, self.added)

    def added(self, rollouts: Rollouts, tables: Tables) -> Tables:
        """The reference's log-probabilities of a rollout."""
        return {REFERENCE: rollouts.computed(tables, self.reference_log_probabilities)} if self.how else {}

    def reference_log_probabilities(
        self, passes: ForwardOnly, batches: Sequence[Batch]
    ) -> list[Tensor | None]:
        """The reference's log-probabilities of micro-batches."""
        return self.by_reference(passes, batches, self.log_probabilities)

    def rehearse(self, run: Run, batch: Batch, repeated: Repeated) -> None:
        spec = self.spec

        def each(times: float) -> AbstractContextManager[None]:
            return repeated(times / spec.steps)

        rows, prompt = -(-spec.size // run.data_degree), spec.length - spec.completion
        rehearse(run, rows, prompt, spec.completion, spec.temperature, each)
        with each(run.context.micro_batches * spec.minibatches):
            for compute in self.passes():
                compute(run.passes, [batch])

    def passes(self) -> list[OverBatches]:
        """The passes over a whole rollout before it is trained on."""
        return [self.reference_log_probabilities] if self.how else []

    def note_rollout(self, batch: Batch, policy: Tensor) -> None:
        """Note the measures of a micro-batch, whose labels have the log-probabilities ``policy`` [m, s] now."""
        valid, present = batch["labels"] != IGNORED, batch["present"]
        names = ("reward", *(f"reward/{name}" for name in self.rewards.names))
        of_rows: dict[str, Any] = dict(zip(names, batch["rewards"].unbind(1), strict=True))
        of_rows |= {"reward_deviation": batch["deviation"], "completion_length": batch["lengths"]}
        of_rows["truncated"] = 1 - batch["ended"]
        for name, values in of_rows.items():
            note(name, (values * present).sum(), present.sum())
        tokens = {"entropy": -batch["sampled"], "mismatch": (policy - batch["sampled"]).abs()}
        for name, values in tokens.items():
            note(name, values.where(valid, 0).sum(), valid_targets(batch["labels"]))
