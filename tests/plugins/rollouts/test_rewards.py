"""Rewards of the user's: called per batch, summed with weights, and refused with the sample named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from shardwise.core.errors import RecipeError
from shardwise.plugins.rollouts.rewards import Rewards, rewards_of
from shardwise.recipe.objective import ObjectiveSpec

HERE = __name__


def length(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    return [len(completion) for completion in completions]


def right(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str]) -> list[bool]:
    return [text == wanted for text, wanted in zip(completions, answer, strict=True)]


def broken(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    raise KeyError("solution")


def none_for_empty(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float | None]:
    return [1.0 if completion else None for completion in completions]


def not_finite(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    return [float("nan")] * len(completions)


def one(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    return [1.0]


def opened(*names: str, weights: tuple[float, ...] | None = None) -> Rewards:
    named = tuple(f"{HERE}:{name}" for name in names)
    return rewards_of(ObjectiveSpec(name="grpo", rewards=named, reward_weights=weights))


def test_several_rewards_are_summed_with_their_weights() -> None:
    rewards = opened("length", "right", weights=(0.5, 2))
    assert rewards.names == ["length", "right"]
    table = rewards.of(["a", "b"], ["xyz", "y"], {"answer": ["xyz", "z"]})
    assert table.tolist() == [[0.5 * 3 + 2, 3, 1], [0.5, 1, 0]]


def test_without_weights_they_count_alike() -> None:
    assert opened("length", "length").of(["a"], ["xyz"], {}).tolist() == [[6, 3, 3]]


REFUSED = [
    ("broken", r"the reward function failed \(objective.rewards: .*:broken\): KeyError: 'solution'"),
    ("none_for_empty", r"a reward is None .*: of the completion '' to 'second'; return a finite number"),
    ("not_finite", r"a reward is nan .*: of the completion 'xyz' to 'first'"),
    ("one", r"one number per completion .*: it returned 1 for 2 completions"),
]


@pytest.mark.parametrize(("name", "message"), REFUSED)
def test_a_fault_of_a_function_is_one_line_that_names_it(name: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as raised:
        opened(name).of(["first", "second"], ["xyz", ""], {})
    assert "\n" not in str(raised.value)


def test_a_function_that_is_not_there_is_refused() -> None:
    with pytest.raises(RecipeError, match="cannot be imported"):
        opened("missing")
