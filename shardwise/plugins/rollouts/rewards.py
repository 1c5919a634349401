"""Rewards of completions: functions of the user's, and trained reward models, with weights.

A function is called once per batch as ``function(prompts, completions, **fields)``. It takes lists of texts, and the
other fields of the records as lists under their names; it returns one number per completion.

A reward model reads the sampled tokens if its tokenizer is that of the prompts, with what the chat template writes
after the end of an answer, because it was trained to score there; else the texts, by its own tokenizer.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint.run_folder import RECIPE
from shardwise.core.errors import DataError, RecipeError, ShardwiseError, one_line, shorten
from shardwise.core.paths import no_folder, path_of
from shardwise.core.user_objects import resolve, without_folder
from shardwise.data.tokenizer import Tokenizer
from shardwise.launch.user_code import place_in
from shardwise.recipe.objective import ObjectiveSpec


@dataclass(frozen=True)
class RewardInput:
    """n completions of prompts, as tokens without padding; a completion has the token that ended it.

    Attributes:
        closings: what a chat template writes after that token.
    """

    prompts: Sequence[Sequence[int]]
    tokens: Sequence[Sequence[int]]
    fields: Mapping[str, Sequence[Any]]
    tokenizer: Tokenizer
    closings: Sequence[Sequence[int]]

    @functools.cached_property
    def texts(self) -> tuple[list[str], list[str]]:
        """Prompts and completions."""
        cuts = self.tokenizer
        known = ([token for token in own if token < cuts.vocab] for own in self.tokens)
        return [cuts.decode(prompt) for prompt in self.prompts], [cuts.decode(own) for own in known]


RewardFunction = Callable[[RewardInput], Sequence[float]]


@dataclass(frozen=True)
class NamedReward:
    """One reward; ``name`` is what the recipe names."""

    name: str
    weight: float
    function: RewardFunction
    key: str = "rewards"

    def of(self, given: RewardInput) -> list[float]:
        """One number per completion. Raises RecipeError if the function fails, or returns anything but numbers."""
        where = f"objective.{self.key}: {self.name}"
        try:
            values = list(self.function(given)) if given.tokens else []
        except ShardwiseError:
            raise
        except Exception as error:  # whatever the user's own code raises
            why = f"{type(error).__name__}: {one_line(str(error))}"
            where = f"{where}{place_in(error)}"
            fix = f"the trace is in logs/rank-{dist.get_rank()}.log" if dist.is_initialized() else ""
            raise RecipeError("the reward function failed", where=where, why=why, fix=fix) from error
        if len(values) != len(given.tokens):
            why = f"it returned {len(values)} for {len(given.tokens)} completions"
            raise RecipeError("a reward function returns one number per completion", where=where, why=why)
        for value, prompt, completion in zip(values, *given.texts, strict=True):
            with suppress(TypeError, ValueError, OverflowError):
                if math.isfinite(value):
                    continue
            why = f"of the completion {shorten(completion, 60)!r} to {shorten(prompt, 60)!r}"
            fix = "return a finite number for every completion"
            raise RecipeError(f"a reward is {value!r}", where=where, why=why, fix=fix)
        return [float(value) for value in values]


@dataclass(frozen=True)
class Rewards:
    """The rewards of a recipe."""

    rewards: Sequence[NamedReward]

    @property
    def measures(self) -> list[str]:
        """Names of the columns of ``of`` in metrics."""
        names = (str(without_folder(reward.name)).rpartition(":")[2] for reward in self.rewards)
        return ["reward", *(f"reward/{name}" for name in names)]

    def of(self, given: RewardInput) -> Tensor:
        """fp64 [n, 1 + rewards]: the weighted sum, and every reward before its weight."""
        columns = [reward.of(given) for reward in self.rewards]
        rewards = torch.tensor(columns, dtype=torch.float64).T
        weights = torch.tensor([reward.weight for reward in self.rewards], dtype=torch.float64)
        return torch.cat([(rewards * weights).sum(1, keepdim=True), rewards], 1)


def rewards_of(spec: ObjectiveSpec) -> Rewards:
    """The rewards that a recipe names. Raises RecipeError if one cannot be imported, called or opened."""
    named = spec.rewards or ()
    weights = spec.reward_weights or (1.0,) * len(named)
    rewards = list(map(NamedReward, map(str, map(without_folder, named)), weights, map(_of_function, named)))
    if spec.reward_model is not None:
        rewards.append(NamedReward(spec.reward_model, 1.0, _model_reward(spec.reward_model), "reward_model"))
    return Rewards(rewards)


def _of_function(name: str) -> RewardFunction:
    function = resolve(name, "objective.rewards")
    why = "" if callable(function) else f"its type is {type(function).__name__}"
    if any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):
        why = "it is async, and nothing awaits it; call asyncio.run in a plain function"
    if why:
        where = f"objective.rewards: {without_folder(name)}"
        raise RecipeError("a reward must be a function that returns numbers", where=where, why=why)
    return lambda given: function(*map(list, given.texts), **given.fields)


def _model_reward(folder: str) -> RewardFunction:
    """The score of a trained reward model, whose weights are read when it is first asked, in fp32 on the host."""
    from shardwise.plugins.preferences.scoring import load_reward_model, require_scores

    path = path_of(folder)
    where = f"objective.reward_model: {folder}"
    if not any((path / name).is_file() for name in (RECIPE, "config.json")):
        why = f"it has neither {RECIPE} nor config.json" if path.is_dir() else no_folder(path)
        raise RecipeError("not the folder of a reward model", where=where, why=why)

    with _naming_its_key():
        require_scores(path)

    @functools.cache
    def model() -> Any:
        with _naming_its_key():
            return load_reward_model(path)

    return lambda given: model()(_documents(given, model().tokenizer, folder)).tolist()


@contextmanager
def _naming_its_key() -> Iterator[None]:
    """Errors of a reward model name objective.reward_model and not model.hf."""
    try:
        yield
    except ShardwiseError as error:
        error.where = f"objective.reward_model: {error.where.removeprefix('model.hf: ')}"
        raise


def _documents(given: RewardInput, own: Tokenizer | None, folder: str) -> list[list[int]]:
    """Prompts with their completions in tokens of a reward model, as those that it was trained on."""
    theirs = given.tokenizer
    where = f"objective.reward_model: {folder}"
    if own is None:
        fix = "copy the files of its tokenizer into its folder"
        raise DataError("the reward model has no tokenizer", where=where, fix=fix)
    if own.fingerprint == theirs.fingerprint:
        whole = zip(given.prompts, given.tokens, given.closings, strict=True)
        return [[*p, *t, *(closing if t[-1] in theirs.ends else ())] for p, t, closing in whole]
    lost = theirs.special & set[int]().union(*given.prompts) - {theirs.begin}
    if lost:
        why = f"it is not data.tokenizer, and does not have its tag {theirs.shown(sorted(lost)[:1])} of the prompts"
        fix = "give a reward model with the tokenizer of the prompts, or prompts without tags"
        raise RecipeError("the reward model has another tokenizer", where=where, why=why, fix=fix)
    ends = [[own.separator] if tokens[-1:] and tokens[-1] in theirs.ends else [] for tokens in given.tokens]
    texts = zip(*given.texts, ends, strict=True)
    return [[*own.begun(own.encode(prompt + completion)), *end] for prompt, completion, end in texts]
