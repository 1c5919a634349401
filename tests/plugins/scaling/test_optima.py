"""Optima where data is repeated; those of models that serve are in tests/plugins/scaling/test_budget_search.py."""

from __future__ import annotations

import pytest

from shardwise.plugins.scaling.files import read_law
from shardwise.plugins.scaling.law import ParametricLaw
from shardwise.plugins.scaling.repetition import TOKEN_DECAY, DataConstrained, effective


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
