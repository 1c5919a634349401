"""Learning-rate scaling: the values derived for another batch size, and the limits of the rules."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.errors import RecipeError
from shardwise.recipe.load import dump_recipe, parse_recipe, recipe_of
from shardwise.recipe.lr_scaling import scaled, scaling_sentences
from shardwise.recipe.sections import OptimizerSpec, Recipe
from tests.harness.optimizers import FACTORIES, StartWeights, name_of


def recipe(
    batch: int, rule: str | None, from_batch: int = 256, warmup: float = 0.03, **optimizer: Any
) -> Recipe:
    scaling = None if rule is None else {"from_batch": from_batch, "rule": rule}
    return recipe_of(
        {
            "model": {"preset": "tiny"},
            "steps": 100,
            "batch_size": batch,
            "optimizer": {"learning_rate": 3e-4, "scale_learning_rate": scaling, **optimizer},
            "schedule": {"warmup": warmup},
        }
    )


def test_without_a_rule_nothing_is_derived() -> None:
    plain = recipe(1024, None)
    assert scaled(plain) is plain.optimizer
    assert list(scaling_sentences(plain)) == []


def test_linear_scales_the_rate_alone() -> None:
    found = scaled(recipe(1024, "linear"))
    assert found.learning_rate == pytest.approx(1.2e-3)
    assert (found.betas, found.epsilon) == ((0.9, 0.95), 1e-8)


def test_sqrt_scales_rate_betas_and_epsilon() -> None:
    found = scaled(recipe(1024, "sqrt"))
    assert found.learning_rate == pytest.approx(6e-4)
    assert found.betas == (0.6, 0.8)
    assert found.epsilon == 5e-9


def test_a_smaller_batch_remembers_longer() -> None:
    assert scaled(recipe(64, "sqrt")).betas == (0.975, 0.9875)


@pytest.mark.parametrize("rule", ["linear", "sqrt"])
def test_the_batch_it_was_tuned_for_changes_nothing(rule: str) -> None:
    plain = recipe(256, rule)
    assert scaled(plain) == plain.optimizer.model_copy(update={"scale_learning_rate": None})


@given(
    st.integers(1, 10_000),
    st.integers(1, 10_000),
    st.floats(0.01, 0.999),
    st.floats(0.01, 0.999),
)
def test_sqrt_is_refused_exactly_beyond_the_largest_batch_it_names(
    batch: int, start: int, first: float, second: float
) -> None:
    def attempt(size: int) -> OptimizerSpec | str:
        try:
            return scaled(recipe(size, "sqrt", start, betas=[first, second]))
        except RecipeError as error:
            return error.line()

    found = attempt(batch)
    if isinstance(found, OptimizerSpec):
        assert all(0 <= beta < 1 for beta in found.betas)
        assert found.learning_rate == pytest.approx(3e-4 * math.sqrt(batch / start))
        return
    named = largest_named(found)
    assert named < batch
    smaller = attempt(max(1, named))
    if isinstance(smaller, str):  # the other beta refuses that too, and names a smaller one
        assert largest_named(smaller) < max(1, named)
        smaller = attempt(max(1, largest_named(smaller)))
    assert isinstance(smaller, OptimizerSpec) or largest_named(smaller) == 0, (
        "no batch works with such a beta"
    )


def largest_named(refusal: str) -> int:
    named = re.search(r"the largest batch_size that works is (\d+)$", refusal)
    assert named, refusal
    return int(named[1])


def test_the_largest_batch_is_exact_in_decimals() -> None:
    """256 / (1 - 0.9) is 2560; in binary 1 - 0.9 is a little less than a tenth, and 2560 would pass."""
    assert scaled(recipe(2559, "sqrt")).betas[0] > 0
    with pytest.raises(RecipeError, match=r"batch_size that works is 2559"):
        recipe(2560, "sqrt")


def test_what_was_derived_is_said_in_one_sentence() -> None:
    assert next(scaling_sentences(recipe(1024, "linear"))) == (
        "learning rate 0.0003 × 4 = 0.0012 (linear, batch 1024 from 256)"
    )
    assert list(scaling_sentences(recipe(1024, "sqrt"))) == [
        "learning rate 0.0003 × √4 = 0.0006 (sqrt, batch 1024 from 256); betas [0.9, 0.95] → [0.6, 0.8];"
        " epsilon 1e-08 → 5e-09"
    ]


def test_advice_where_the_rule_does_not_suit_the_optimizer_or_nothing_warms_up() -> None:
    [linear] = advice(recipe(1024, "linear"))
    assert "rule: sqrt" in linear
    [cold] = advice(recipe(1024, "sqrt", warmup=0))
    assert "schedule.warmup" in cold
    assert advice(recipe(128, "sqrt", warmup=0)) == []


def test_the_resolved_recipe_keeps_what_was_written() -> None:
    """What a run writes down and reads again is scaled once."""
    first = recipe(1024, "sqrt")
    again = parse_recipe(dump_recipe(first), ())
    assert again == first
    assert "scale_learning_rate: {from_batch: 256, rule: sqrt}" in dump_recipe(first)
    assert scaled(again) == scaled(first)


# ---- optimizers of libraries ------------------------------------------------------------------------------


def advice(of: Recipe) -> list[str]:
    return [sentence for sentence in scaling_sentences(of) if sentence.startswith("advice: ")]


@pytest.mark.parametrize(
    ("factory", "adaptive"),
    [
        *(
            (f"torch.optim:{name}", True)
            for name in ("AdamW", "Adam", "Adagrad", "Adafactor", "NAdam", "RMSprop")
        ),
        *((f"torch.optim:{name}", False) for name in ("SGD", "ASGD")),
        (FACTORIES["Muon"], True),
        (name_of(StartWeights), False),
    ],
)
def test_the_rule_that_suits_an_optimizer_of_a_library_is_known(factory: str, adaptive: bool) -> None:
    """An Adam is not told to use the rule of SGD, nor SGD that of Adam."""
    suits, other = ("sqrt", "linear") if adaptive else ("linear", "sqrt")
    assert not [line for line in advice(recipe(1024, suits, factory=factory)) if "use rule" in line]
    [line] = advice(recipe(1024, other, factory=factory))
    assert f"for {factory} use rule: {suits}" in line and "for adamw" not in line


@pytest.mark.parametrize("factory", ["torch.optim:LBFGS", "python:not_here"])
def test_of_an_optimizer_that_cannot_be_tried_nothing_is_claimed(factory: str) -> None:
    [line] = advice(recipe(1024, "sqrt", factory=factory))
    assert line.startswith(f"advice: {factory} could not be tried") and "sqrt" in line and "linear" in line


def test_sqrt_scales_betas_and_epsilon_of_an_adam_of_torch() -> None:
    """Those of the recipe's arguments, or its own, so that the same values train the same with ``name: adamw``."""
    own = scaled(recipe(1024, "sqrt", factory="torch.optim:AdamW"))
    assert own.arguments == {"betas": (0.6, 0.996), "eps": 5e-9}
    arguments = {"betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}
    found = scaled(recipe(1024, "sqrt", factory="torch.optim:AdamW", arguments=arguments))
    assert found.arguments == {"betas": (0.6, 0.8), "eps": 5e-7, "weight_decay": 0.1}
    assert scaled(recipe(1024, "linear", factory="torch.optim:AdamW")).arguments == {}
    assert "betas [0.9, 0.999] → [0.6, 0.996]; epsilon 1e-08 → 5e-09" in next(
        scaling_sentences(recipe(1024, "sqrt", factory="torch.optim:AdamW"))
    )
    with pytest.raises(RecipeError, match=r"batch_size that works is 2559") as caught:
        recipe(2560, "sqrt", factory="torch.optim:AdamW")
    assert "optimizer.arguments" not in str(caught.value.where)


def test_of_others_it_is_said_that_decay_rates_stay() -> None:
    for factory in ("torch.optim:RMSprop", FACTORIES["Muon"]):
        assert scaled(recipe(1024, "sqrt", factory=factory)).arguments == {}
        [line] = advice(recipe(1024, "sqrt", factory=factory))
        assert f"decay rates and epsilon too; those of {factory} are unchanged" in line
        assert advice(recipe(256, "sqrt", factory=factory)) == []
