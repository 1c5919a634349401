"""What GRPO, RLOO and PPO have in common: the keys of their section, where their batches come from, their measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.core.errors import RecipeError
from shardwise.engine.run import LiveModel
from shardwise.engine.sampling import Prompts, SamplingObjective
from shardwise.model.blueprint import Batch, SampleShapes
from shardwise.plugins.rollouts.rewards import Rewards
from shardwise.plugins.rollouts.source import Advantages, Rollouts, RolloutSpec
from shardwise.recipe.sections import Recipe
from shardwise.runtime.language_loss import valid_targets
from shardwise.runtime.measures import note
from shardwise.runtime.parallel.vocabulary import IGNORED


@dataclass(frozen=True)
class RolloutKeys:
    """The keys that all three objectives read.

    Attributes:
        rewards: ``package.module:function``, a list of them, or their weights by name.
        reward_model: the folder of a trained reward model.
        completion_length: the most tokens of a completion; prompts have the rest of ``data.sequence_length``.
        completions: per prompt.
        temperature: divides the logits, when sampling and in training.
        mask_truncated: completions that do not end within their length are left out of the loss.
        generated_rows: completions that a rank generates at a time; null for all of its share.
        beta: of the KL divergence from the reference; 0 for none.
    """

    completion_length: int
    rewards: Any = None
    reward_model: str | None = None
    completions: int = 8
    temperature: float = 1.0
    mask_truncated: bool = True
    generated_rows: int | None = None
    beta: float = 0.0

    def spec(self, recipe: Recipe, least: int, epochs: int = 1, minibatches: int = 1) -> RolloutSpec:
        """Raises RecipeError if the numbers do not fit.

        Args:
            least: completions per prompt.
        """
        length, batch = recipe.data.sequence_length, recipe.batch_size * minibatches
        _require(self.completions >= least, "completions", self.completions, f"at least {least}")
        fits = batch % self.completions == 0
        _require(fits, "completions", self.completions, f"a divisor of the {batch} completions of a rollout")
        room = 0 < self.completion_length < length
        _require(room, "completion_length", self.completion_length, f"below data.sequence_length, {length}")
        _require(self.temperature > 0, "temperature", self.temperature, "above 0; sampling needs it")
        return RolloutSpec(
            recipe.seed,
            recipe.batch_size,
            length,
            self.completion_length,
            self.completions,
            self.temperature,
            self.mask_truncated,
            self.generated_rows,
            epochs,
            minibatches,
        )


def _require(good: bool, key: str, value: object, wanted: str) -> None:
    if not good:
        raise RecipeError(f"{key} is {value!r}", where=f"objective.{key}", fix=f"use a number {wanted}")


class RolloutObjective(SamplingObjective, Advantages):
    """Trains on the model's own completions of prompts.

    Attributes:
        unit: optimizer steps per rollout.
        per_token: names of the tensors [m, s] of a micro-batch, besides ids and labels.
    """

    per_token: tuple[str, ...] = ("sampled", "advantages")

    def __init__(self, spec: RolloutSpec, rewards: Rewards, beta: float) -> None:
        self.spec, self.rewards, self.beta = spec, rewards, beta
        self.unit = spec.steps

    def batches(self, live: LiveModel, prompts: Prompts) -> Rollouts:
        count = self.spec.size // self.spec.group
        return Rollouts(
            live, self.spec, lambda n: prompts.records(n, count), prompts.tokenizer, self.rewards, self
        )

    def sample_shapes(self, sequence_length: int) -> SampleShapes:
        a_token = ((sequence_length,), torch.float32)
        a_row = dict.fromkeys(("lengths", "ended", "present"), ((), torch.int64))
        rewards = {
            "rewards": ((1 + len(self.rewards.rewards),), torch.float64),
            "deviation": ((), torch.float64),
        }
        return {**dict.fromkeys(self.per_token, a_token), **a_row, **rewards}

    @property
    def measures(self) -> tuple[str, ...]:
        """The names that ``note_rollout`` notes."""
        rewards = ("reward", *(f"reward/{name}" for name in self.rewards.names), "reward_deviation")
        return (*rewards, "completion_length", "truncated", "entropy", "mismatch", *("kl",) * (self.beta > 0))

    def note_rollout(self, batch: Batch, policy: Tensor) -> None:
        """Note the measures of a micro-batch, whose labels have these log-probabilities [m, s] now."""
        present, policy = batch["present"], policy.detach()
        rows, tokens = present.sum(), valid_targets(batch["labels"])
        columns = {"reward": 0} | {f"reward/{name}": 1 + i for i, name in enumerate(self.rewards.names)}
        for name, column in columns.items():
            note(name, (batch["rewards"][:, column] * present).sum(), rows)
        note("reward_deviation", (batch["deviation"] * present).sum(), rows)
        note("completion_length", (batch["lengths"] * present).sum(), rows)
        note("truncated", ((1 - batch["ended"]) * present).sum(), rows)
        note("entropy", -batch["sampled"].where(batch["labels"] != IGNORED, 0).sum(), tokens)
        note("mismatch", (policy - batch["sampled"]).abs().where(batch["labels"] != IGNORED, 0).sum(), tokens)
