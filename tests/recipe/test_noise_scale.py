"""The gradient noise scale from squared norms at two batch sizes, and the advice from it."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.core.run_files import GradientNoise
from shardwise.recipe.load import recipe_of
from shardwise.recipe.noise_scale import NoiseScale, batch_sentences, noise_scale
from shardwise.recipe.sections import Recipe
from shardwise.technique import SETTINGS

DIMENSIONS, MICRO, COUNT = 40, 16, 8


def measured(draws: int, variance: float, seed: int = 0) -> list[GradientNoise]:
    """Gradients of a true gradient of norm 1 with Gaussian noise of trace ``variance`` per token."""
    random = np.random.default_rng(seed)
    true = np.full(DIMENSIONS, DIMENSIONS**-0.5)
    found = []
    for _ in range(draws):
        noise = random.normal(0, (variance / DIMENSIONS / MICRO) ** 0.5, (COUNT, DIMENSIONS))
        each = true + noise
        small = float((each**2).sum(axis=1).mean())
        found.append(GradientNoise(MICRO, MICRO * COUNT, small, float((each.mean(axis=0) ** 2).sum())))
    return found


@pytest.mark.parametrize("variance", [30.0, 1000.0])
def test_the_estimate_is_the_ratio_of_noise_and_gradient(variance: float) -> None:
    found = noise_scale(measured(4000, variance))
    assert found is not None
    assert found.measurements == 2000
    assert found.variance == pytest.approx(variance, rel=0.02)
    assert found.gradient == pytest.approx(1.0, rel=0.06)
    assert found.tokens == pytest.approx(variance, rel=0.06)


def test_nothing_is_said_where_noise_hides_the_gradient() -> None:
    assert noise_scale([]) is None
    assert noise_scale([GradientNoise(16, 128, 8.0, 1.0)]) is None  # exactly 1 / B: no gradient at all
    assert noise_scale([GradientNoise(16, 128, np.inf, 1.0)]) is None  # overflowed in fp16


def recipe(batch: int, name: str = "adamw", rate: float = 1e-3, factory: str | None = None) -> Recipe:
    values = {
        "model": {"layers": 1, "width": 16, "heads": 2, "ffn": 32, "vocab": 256, "context": 16},
        "data": {"source": "none.txt", "sequence_length": 16},
        "steps": 10,
        "batch_size": batch,
        "optimizer": {"name": name, "learning_rate": rate, "factory": factory},
    }
    return recipe_of(values, SETTINGS)


def noise_of(tokens: float) -> NoiseScale:
    return NoiseScale(tokens, 1.0, tokens, 5, tokens)


def test_a_small_batch_is_advised_to_grow_with_the_rule_of_its_optimizer() -> None:
    """B_noise is 64 sequences of 16 tokens, and the batch has 16: 1.25 times the tokens, 5 times the steps."""
    said = batch_sentences(noise_of(1024), recipe(16), 256)
    assert "1.02K tokens, 64 sequences" in said[0]
    assert "1.25 times the fewest tokens and 5 times the fewest steps" in said[1]
    assert "batch_size=64 " in said[2] and "rule=sqrt" in said[2] and "learning rate 0.002" in said[2]
    said = batch_sentences(noise_of(1024), recipe(16, "sgd"), 256)
    assert "rule=linear" in said[2] and "learning rate 0.004" in said[2]


def test_a_large_batch_is_advised_to_shrink_and_a_near_one_to_stay() -> None:
    said = batch_sentences(noise_of(1024), recipe(256), 4096)
    assert "5 times the fewest tokens and 1.25 times the fewest steps" in said[1]
    assert "fewer tokens: batch_size=64 " in said[2] and "learning rate 0.0005" in said[2]
    assert "keep it" in batch_sentences(noise_of(1024), recipe(64), 1024)[-1]


def test_a_rule_without_a_solution_is_said() -> None:
    """k (1 - beta) would be 100 x 0.1."""
    said = batch_sentences(noise_of(16 * 1600), recipe(16), 256)
    assert "the square-root rule does not work for batch_size 1024" in said[2]


def test_the_rule_is_that_of_a_factory_s_optimizer() -> None:
    def rule(factory: str) -> str:
        return batch_sentences(noise_of(1024), recipe(16, factory=factory), 256)[2]

    assert "rule=linear (learning rate 0.004)" in rule("torch.optim:SGD")
    assert "rule=sqrt (learning rate 0.002)" in rule("torch.optim:Adafactor")
    unknown = rule("python:not_here")
    assert (
        "batch_size=64 " in unknown
        and "rule=sqrt if python:not_here is of Adam's kin, rule=linear" in unknown
    )
