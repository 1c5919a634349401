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

from shardwise.core.errors import RecipeError, one_line
from shardwise.core.user_objects import resolve, without_folder

RewardFunction = Callable[..., Sequence[float]]

FUNCTIONS, MODEL = "rewards", "reward_model"
_SHOWN = 60
"""Characters of a completion in an error."""


@dataclass(frozen=True)
class Reward:
    """One reward; ``name`` is what the recipe names."""

    name: str
    weight: float
    function: RewardFunction

    def of(
        self, prompts: Sequence[str], completions: Sequence[str], fields: Mapping[str, Sequence[Any]]
    ) -> list[float]:
        """One number per completion.

        Raises:
            RecipeError: the function raises an error, or returns anything but finite numbers.
        """
        where = f"objective.{FUNCTIONS}: {self.name}"
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
                    why=f"of the completion {_shown(completion)} to {_shown(prompt)}",
                    fix="return a finite number for every completion",
                )
        return [float(value) for value in values]


class Rewards:
    """The rewards of a recipe."""

    def __init__(self, rewards: Sequence[Reward]) -> None:
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


def rewards_of(named: object, model: str | None) -> Rewards:
    """The rewards that a recipe names.

    Args:
        named: ``package.module:function``, a list of such names, or their weights by name; None for none.
        model: the folder of a trained reward model.

    Raises:
        RecipeError: there is none, one cannot be imported, or a weight is not a number.
    """
    weights = _weights(named)
    rewards = [
        Reward(name, weight, resolve(name, f"objective.{FUNCTIONS}")) for name, weight in weights.items()
    ]
    if model is not None:
        rewards.append(Reward(model, 1.0, _of_model(model)))
    if not rewards:
        raise RecipeError(
            "there is no reward",
            where=f"objective.{FUNCTIONS}",
            fix=f"name a function, package.module:function, or a trained {MODEL}",
        )
    return Rewards(rewards)


def _weights(named: object) -> dict[str, float]:
    if isinstance(named, Mapping):
        weights = dict(named)
    else:
        listed = [] if named is None else [named] if isinstance(named, str) else named
        weights = dict.fromkeys(listed, 1.0) if isinstance(listed, list | tuple) else {"": 1.0}
    for name, weight in weights.items():
        if not isinstance(name, str) or ":" not in name or not _is_finite(weight):
            raise RecipeError(
                "rewards are named functions with weights",
                where=f"objective.{FUNCTIONS}",
                why=f"there is {name!r}: {weight!r}",
                fix="write package.module:function, a list of them, or {package.module:function: 0.5}",
            )
    return {name: float(weight) for name, weight in weights.items()}


def _of_model(folder: str) -> RewardFunction:
    """The function of a trained reward model."""
    from shardwise.plugins.preferences.scoring import load_reward_model  # type: ignore[import-not-found]

    scored = load_reward_model(folder)
    return lambda prompts, completions, **_: scored(prompts, completions)


def _is_finite(value: object) -> bool:
    if isinstance(value, bool | None):
        return isinstance(value, bool)
    try:
        return math.isfinite(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return False


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + " …")
