"""Sampling: the options of a request, and the choice of the next token from one row of logits.

The order is that of transformers: repetition penalty, temperature, top-k, top-p. Every request has its own generator,
on the CPU and in fp32. So its text does not depend on the device or on the other requests of its batch, except for
rounding in the model. This copies one row of logits to the host per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.core.errors import RecipeError
from shardwise.runtime.accumulation import at_least_fp32


@dataclass(frozen=True)
class Sampling:
    """Sampling options of a request.

    Attributes:
        tokens: largest number of new tokens.
        temperature: 0 takes the most likely token.
        top_k: sample from the k most likely tokens; None from all.
        top_p: sample from the smallest set of tokens with this total probability.
        repetition_penalty: positive logits of earlier tokens are divided by it, negative ones multiplied
            (Keskar et al. 2019).
        stop: stop texts; the answer ends before the first of them.
        past_end: continue after a token that ends an answer.
        seed: seed of the generator, of 64 bits.

    Raises:
        RecipeError: a value is out of range.
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
            name = field.name
            value = getattr(self, field.name)
            if name in whole and not (name == "top_k" and value is None):
                good = (
                    type(value) is int and value >= whole[name] and not (name == "seed" and value >= 1 << 64)
                )
                below = " and below 2^64" if name == "seed" else ""
                _require_option(good, name, value, f"a whole number of at least {whole[name]}{below}")
        _require_option(_in_range(self.temperature, 0, 1e6), "temperature", self.temperature, "from 0 to 1e6")
        _require_option(
            _in_range(self.top_p, 0, 1) and self.top_p > 0, "top_p", self.top_p, "above 0 and at most 1"
        )
        penalty = self.repetition_penalty
        _require_option(_in_range(penalty, 0, 1e6) and penalty > 0, "repetition_penalty", penalty, "above 0")
        texts = isinstance(self.stop, tuple) and all(isinstance(text, str) and text for text in self.stop)
        _require_option(texts, "stop", self.stop, "texts that are not empty")
        _require_option(isinstance(self.past_end, bool), "past_end", self.past_end, "true or false")


OPTIONS = tuple(field.name for field in fields(Sampling))


def _in_range(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _require_option(good: bool, name: str, value: object, wanted: str) -> None:
    if not good:
        raise RecipeError(f"{name} is {value!r}", where=name, fix=f"use {wanted}")


_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def choose_token(logits: Tensor, before: Sequence[int], how: Sampling, generator: torch.Generator) -> int:
    """Choose a token id from the logits [vocab] of the last position, on the CPU; ``before`` are the ids so far."""
    scores = logits.float()
    if how.repetition_penalty != 1:
        seen = torch.tensor(sorted({token for token in before if token < scores.numel()}), dtype=torch.int64)
        old = scores[seen]
        penalty = how.repetition_penalty
        penalised = torch.where(old > 0, old / penalty, old * penalty).clamp(-_LARGEST, _LARGEST)
        scores = scores.index_copy(0, seen, penalised)
    if how.temperature == 0:
        return int(scores.argmax())
    scores = (scores - scores.max()) / max(how.temperature, _SMALLEST)  # the largest is 0 at any temperature
    if how.top_k is not None and how.top_k < scores.numel():
        scores = scores.masked_fill(scores < scores.topk(how.top_k).values[-1], -torch.inf)
    shares = scores.softmax(0)
    if how.top_p < 1:
        ordered, places = shares.sort(descending=True, stable=True)
        beyond = ordered.cumsum(0) - ordered >= how.top_p  # the more likely tokens reach top_p without it
        shares = shares.index_fill(0, places[beyond], 0.0)
    return int(torch.multinomial(shares, 1, generator=generator))


def uniforms(seed: int, step: int, rows: Sequence[tuple[int, int]], length: int) -> Tensor:
    """Uniform numbers in [0, 1), fp64 [n, length], for rows (prompt, sample) of a step.

    From a counter-based generator (Philox), so a row depends neither on other rows nor on the order of the calls.
    """
    streams = (np.random.Philox(key=[seed, step], counter=[0, 0, *row]) for row in rows)
    return torch.from_numpy(np.stack([np.random.Generator(stream).random(length) for stream in streams]))


def sampled(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [n], and their log-probabilities [n] in fp32 (fp64 for fp64), of logits [n, v].

    Args:
        uniform: fp64 [n], in [0, 1).
    """
    logs = at_least_fp32(logits).log_softmax(-1)
    cumulative = logs.double().exp().cumsum(-1)
    aimed = uniform.unsqueeze(1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, aimed, right=True).clamp(max=logits.shape[1] - 1)
    return tokens.squeeze(1), logs.gather(1, tokens).squeeze(1)
