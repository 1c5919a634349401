"""Optima that a training budget alone does not give: repeated data, and models that serve."""

from __future__ import annotations

import pytest

from shardwise.scaling.files import read_law
from shardwise.scaling.law import ParametricLaw, SizeAndTokens
from shardwise.scaling.repetition import TOKEN_DECAY, DataConstrained, effective
from shardwise.scaling.serving import serving_optimum


def law() -> ParametricLaw:
    found = read_law("besiroglu")
    assert isinstance(found, ParametricLaw)
    return found


def test_repeated_tokens_lose_value() -> None:
    """Muennighoff et al. 2023, section 1: up to four epochs are almost as good as new data;"""
    assert effective(1e9, 1e9, TOKEN_DECAY) == 1e9
    assert effective(4e9, 1e9, TOKEN_DECAY) == pytest.approx(3.72e9, rel=0.01)
    # No number of epochs is worth more than 1 + R_D* epochs of fresh tokens.
    assert effective(1e15, 1e9, TOKEN_DECAY) == pytest.approx((1 + TOKEN_DECAY) * 1e9)
    # After R_D* repetitions a token is worth 1 - 1/e of a fresh one, on average over the repetitions.
    repeated = effective((1 + TOKEN_DECAY) * 1e9, 1e9, TOKEN_DECAY) - 1e9
    assert repeated / (TOKEN_DECAY * 1e9) == pytest.approx(0.632, abs=0.001)


def test_scarce_data_is_repeated_and_moves_the_optimum_to_smaller_models() -> None:
    """Muennighoff et al. 2023, section 5: excess parameters lose value faster than repeated tokens."""
    flops = 1e22
    free = law().optimum(flops)
    assert DataConstrained(law(), 2 * free.tokens).optimum(flops) == free
    scarce = DataConstrained(law(), free.tokens / 8)
    best = scarce.optimum(flops)
    assert best.flops == pytest.approx(flops)
    assert best.parameters < free.parameters
    assert best.tokens > free.tokens
    lost = scarce.loss(best.parameters, best.tokens)
    assert lost > law().loss(free.parameters, free.tokens)
    assert lost < scarce.loss(free.parameters, free.tokens)


@pytest.mark.parametrize("served", [0.0, 1e12, 1e14])
def test_a_model_that_serves_is_smaller_and_trained_longer(served: float) -> None:
    """Sardana et al. 2024, figure 1: the more requests, the smaller the model and the longer its training."""
    trained = law().optimum(1e23)
    best = serving_optimum(law(), 1e23, served)
    assert law().loss(best.parameters, best.tokens) == pytest.approx(
        law().loss(trained.parameters, trained.tokens), rel=1e-9
    )
    total = best.flops + 2 * best.parameters * served
    if served == 0:
        assert best.parameters == pytest.approx(trained.parameters, rel=1e-4)
        return
    assert best.parameters < trained.parameters
    assert best.tokens > trained.tokens
    assert total < trained.flops + 2 * trained.parameters * served
    for other in (0.9, 1.1):  # a minimum
        tokens = law().tokens_for(other * best.parameters, law().loss(best.parameters, best.tokens))
        assert total <= 6 * other * best.parameters * tokens + 2 * other * best.parameters * served


def test_sardanas_example_of_a_served_model() -> None:
    """Sardana et al. 2024, figure 1: for two trillion served tokens, 7 instead of 13 billion parameters save 17 %
    of all FLOPs, 1.7e22. Their coefficients are Hoffmann's, with alpha 0.336 and beta 0.283."""
    hoffmann = ParametricLaw("hoffmann", "", E=1.69, A=406.4, B=410.7, alpha=0.336, beta=0.283)
    ratio = hoffmann.beta * hoffmann.B / (hoffmann.alpha * hoffmann.A)
    trained = SizeAndTokens(13e9, (13e9**hoffmann.alpha * ratio) ** (1 / hoffmann.beta))
    best = serving_optimum(hoffmann, trained.flops, 2e12)
    assert best.parameters == pytest.approx(7e9, rel=0.01)
    before = trained.flops + 2 * trained.parameters * 2e12
    saved = before - (best.flops + 2 * best.parameters * 2e12)
    assert saved == pytest.approx(1.7e22, rel=0.01)
    assert saved / before == pytest.approx(0.17, abs=0.005)
