"""Sampling: most likely, at random but repeatable, and never an id that the tokenizer does not know."""

from __future__ import annotations

import pytest
import torch

from shardwise.core.recipe import recipe_of
from shardwise.model.blueprint import blueprint_of
from shardwise.train.reference import reference_model
from shardwise.train.sample import next_token, sample

VALUES = {
    "model": {"layers": 1, "width": 16, "heads": 2, "kv_heads": 2, "ffn": 32, "vocab": 300},
    "steps": 1,
    "batch_size": 1,
}


def ids(seed: int, temperature: float = 5.0, vocab: int = 256) -> list[int]:
    blueprint = blueprint_of(recipe_of(VALUES))
    model = reference_model(blueprint, 0, torch.float32)
    options = {
        "tokens": 40,
        "context": 8,
        "vocab": vocab,
        "temperature": temperature,
        "top_k": None,
        "seed": seed,
    }
    return list(sample(blueprint, model, [65], **options))  # type: ignore[arg-type]


def test_repeatable_and_within_the_tokenizer() -> None:
    first = ids(1)
    assert first == ids(1) != ids(2)
    assert len(first) == 40 and max(first) < 256
    assert max(ids(1, vocab=300)) >= 256, "the model itself would take padded ids"


def test_temperature_zero_and_top_k() -> None:
    logits, generator = torch.tensor([0.0, 3.0, 2.9]), torch.Generator().manual_seed(0)
    assert next_token(logits, 0, None, generator) == 1
    assert {next_token(logits, 10.0, 2, generator) for _ in range(50)} == {1, 2}


@pytest.mark.parametrize("top_k", [None, 1, 1000])
def test_any_top_k(top_k: int | None) -> None:
    assert 0 <= next_token(torch.zeros(5), 1.0, top_k, torch.Generator()) < 5
