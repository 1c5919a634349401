"""Choosing the next token: the options of a request, and one row of logits at a time.

The order is that of transformers: repetition penalty, temperature, top-k, top-p. Every request draws from a generator
of its own, on the CPU and in fp32, so what it writes does not depend on the device or on what else is in its batch (but
for rounding in the model). The price is a copy of one row of logits to the host per token, which ends there anyway:
somebody reads the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from shardwise.core.errors import RecipeError


@dataclass(frozen=True)
class Sampling:
    """How a request is continued.

    Attributes:
        tokens: how many at most.
        temperature: 0 takes the most likely token.
        top_k: sample among so many most likely tokens; None among all.
        top_p: sample among the fewest tokens that together are this likely.
        repetition_penalty: logits of tokens that were there are divided by it, negative ones multiplied
            (Keskar et al. 2019).
        stop: texts before which the answer ends.
        past_end: go on after the tokenizer's end-of-text.
        seed: of the draws.

    Raises RecipeError for a value out of range.
    """

    tokens: int = 200
    temperature: float = 0.8
    top_k: int | None = 40
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    past_end: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        whole = {"tokens": 1, "top_k": 1, "seed": 0}
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if name in whole and not (name == "top_k" and value is None):
                good = type(value) is int and value >= whole[name]
                _require(good, name, value, f"a whole number of at least {whole[name]}")
        _require(_within(self.temperature, 0, 1e6), "temperature", self.temperature, "from 0 to 1e6")
        _require(_within(self.top_p, 0, 1) and self.top_p > 0, "top_p", self.top_p, "above 0 and at most 1")
        penalty = self.repetition_penalty
        _require(_within(penalty, 0, 1e6) and penalty > 0, "repetition_penalty", penalty, "above 0")
        texts = isinstance(self.stop, tuple) and all(isinstance(text, str) and text for text in self.stop)
        _require(texts, "stop", self.stop, "texts that are not empty")
        _require(isinstance(self.past_end, bool), "past_end", self.past_end, "true or false")


OPTIONS = tuple(field.name for field in fields(Sampling))


def _within(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _require(good: bool, name: str, value: object, wanted: str) -> None:
    if not good:
        raise RecipeError(f"{name} is {value!r}", where=name, fix=f"give it {wanted}")


def choose(logits: Tensor, before: Sequence[int], how: Sampling, generator: torch.Generator) -> int:
    """One token id from the logits [vocab] of the last position, on the CPU; ``before`` are the ids up to there."""
    scores = logits.float()
    if how.repetition_penalty != 1:
        seen = torch.tensor(sorted({token for token in before if token < scores.numel()}), dtype=torch.int64)
        old = scores[seen]
        penalty = how.repetition_penalty
        scores = scores.index_copy(0, seen, torch.where(old > 0, old / penalty, old * penalty))
    if how.temperature == 0:
        return int(scores.argmax())
    scores = scores / how.temperature
    if how.top_k is not None and how.top_k < scores.numel():
        scores = scores.masked_fill(scores < scores.topk(how.top_k).values[-1], -torch.inf)
    shares = scores.softmax(0)
    if how.top_p < 1:
        ordered, places = shares.sort(descending=True, stable=True)
        beyond = ordered.cumsum(0) - ordered >= how.top_p  # what is more likely is enough without it
        shares = shares.index_fill(0, places[beyond], 0.0)
    return int(torch.multinomial(shares, 1, generator=generator))
