"""Rewards of completions: functions of the user's, and trained reward models, with weights.

A function is called once per batch as ``function(prompts, completions, **fields)``. It takes lists of texts, and the
other fields of the records as lists under their names; it returns one number per completion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.core.errors import RecipeError, one_line, shorten
from shardwise.core.paths import path_of
from shardwise.core.user_objects import resolve, without_folder
from shardwise.recipe.objective import ObjectiveSpec

RewardFunction = Callable[..., Sequence[float]]


@dataclass(frozen=True)
class NamedReward:
    """One reward; ``name`` is what the recipe names."""

    name: str
    weight: float
    function: RewardFunction

    def of(
        self, prompts: Sequence[str], completions: Sequence[str], fields: Mapping[str, Sequence[Any]]
    ) -> list[float]:
        """One number per completion. Raises RecipeError if the function fails, or returns anything but numbers."""
        where = f"objective.rewards: {self.name}"
        try:
            values = list(self.function(list(prompts), list(completions), **fields))
        except Exception as error:  # whatever the user's own code raises
            why = f"{type(error).__name__}: {one_line(str(error))}"
            raise RecipeError("the reward function failed", where=where, why=why) from error
        if len(values) != len(completions):
            why = f"it returned {len(values)} for {len(completions)} completions"
            raise RecipeError("a reward function returns one number per completion", where=where, why=why)
        for value, prompt, completion in zip(values, prompts, completions, strict=True):
            if not _is_finite(value):
                raise RecipeError(
                    f"a reward is {value!r}",
                    where=where,
                    why=f"of the completion {shorten(completion, 60)!r} to {shorten(prompt, 60)!r}",
                    fix="return a finite number for every completion",
                )
        return [float(value) for value in values]


class Rewards:
    """The rewards of a recipe."""

    def __init__(self, rewards: Sequence[NamedReward]) -> None:
        self.rewards = rewards

    @property
    def names(self) -> list[str]:
        """Short ones, for metrics."""
        return [str(without_folder(reward.name)).rpartition(":")[2] for reward in self.rewards]

    def of(
        self, prompts: Sequence[str], completions: Sequence[str], fields: Mapping[str, Sequence[Any]]
    ) -> Tensor:
        """fp64 [n, 1 + rewards]: the weighted sum, and every reward before its weight."""
        columns = [reward.of(prompts, completions, fields) for reward in self.rewards]
        each = torch.tensor(columns, dtype=torch.float64).T
        weights = torch.tensor([reward.weight for reward in self.rewards], dtype=torch.float64)
        return torch.cat([(each * weights).sum(1, keepdim=True), each], 1)


def rewards_of(spec: ObjectiveSpec) -> Rewards:
    """The rewards that a recipe names. Raises RecipeError if one cannot be imported or opened."""
    named = spec.rewards or ()
    weights = spec.reward_weights or (1.0,) * len(named)
    rewards = [
        NamedReward(name, weight, resolve(name, "objective.rewards"))
        for name, weight in zip(named, weights, strict=True)
    ]
    if spec.reward_model is not None:
        rewards.append(NamedReward(spec.reward_model, 1.0, _of_model(spec.reward_model)))
    return Rewards(rewards)


def _of_model(folder: str) -> RewardFunction:
    """The function of a trained reward model."""
    from shardwise.plugins.preferences.scoring import load_reward_model, scores

    model = load_reward_model(path_of(folder))
    return lambda prompts, completions, **_: scores(
        model, [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    ).tolist()


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False
