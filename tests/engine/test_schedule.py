"""Learning-rate schedules are pure functions of the step with the right ends."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.errors import RecipeError
from shardwise.engine.schedule import learning_rate, multiplier
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import ScheduleSpec

STEPS = 100


def rates(**values: object) -> list[float]:
    schedule = ScheduleSpec.model_validate(values)
    return [multiplier(schedule, step, STEPS) for step in range(STEPS)]


SHAPES = ("sqrt", "linear", "cosine")
FALLING = [
    {"name": "cosine"},
    {"name": "linear"},
    *({"name": "wsd", "decay_shape": shape} for shape in SHAPES),
]


@pytest.mark.parametrize("asked", FALLING)
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_the_step_after_the_last_would_reach_the_floor(asked: dict[str, Any], floor: float) -> None:
    """So that the last update has a rate above 0 even where the floor is 0."""
    schedule = ScheduleSpec.model_validate({**asked, "warmup": 10, "floor": floor})
    curve = [multiplier(schedule, step, STEPS) for step in range(STEPS + 1)]
    assert curve[9] == 1.0
    assert curve[-1] == pytest.approx(floor, abs=1e-12) and curve[-2] > floor
    assert all(a >= b for a, b in itertools.pairwise(curve[9:]))


@pytest.mark.parametrize("asked", [*FALLING, {"name": "wsd"}])
def test_decays_are_those_of_transformers(asked: dict[str, Any]) -> None:
    """From the end of the warmup on; a warmup of transformers begins with a rate of 0."""
    name, shape = asked["name"], asked.get("decay_shape", "sqrt")
    optimization = pytest.importorskip("transformers.optimization")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    if name == "wsd":
        theirs = optimization.get_wsd_schedule(
            optimizer,
            10,
            30,
            num_stable_steps=60,
            min_lr_ratio=0.0,
            decay_type=shape.replace("sqrt", "1-sqrt"),
        )
    else:
        theirs = getattr(optimization, f"get_{name}_schedule_with_warmup")(optimizer, 10, STEPS)
    ours = rates(**asked, warmup=10, floor=0.0, **({"decay": 30} if name == "wsd" else {}))
    [rate] = theirs.lr_lambdas
    assert ours[10:] == pytest.approx([rate(step) for step in range(10, STEPS)])


def test_warmup_rises_in_equal_steps_and_never_is_zero() -> None:
    curve = rates(warmup=4)
    assert curve[:4] == [0.25, 0.5, 0.75, 1.0]


def test_cosine_is_halfway_in_the_middle() -> None:
    assert multiplier(ScheduleSpec(warmup=0, floor=0.0), 50, 100) == pytest.approx(0.5)


def test_constant_stays() -> None:
    assert set(rates(name="constant", warmup=0)) == {1.0}


def test_warmup_as_a_fraction_and_beyond_the_run() -> None:
    assert ScheduleSpec(warmup=0.03).warmup_steps(100) == 3
    assert ScheduleSpec(warmup=500).warmup_steps(100) == 500
    assert all(0 < r <= 1 for r in rates(warmup=500))


# ---- warmup-stable-decay ----------------------------------------------------------------------------------


def test_wsd_warms_up_stays_and_falls_by_one_minus_sqrt() -> None:
    curve = rates(name="wsd", warmup=10, decay=20, floor=0.1)
    assert curve[:2] == [0.1, 0.2]
    assert set(curve[9:81]) == {1.0}
    assert curve[81] == pytest.approx(0.1 + 0.9 * (1 - (1 / 20) ** 0.5))
    assert curve[85] == pytest.approx(0.1 + 0.9 / 2)  # a quarter of the decay is half the way
    assert curve[99] == pytest.approx(0.1 + 0.9 * (1 - (19 / 20) ** 0.5))
    assert all(a > b for a, b in itertools.pairwise(curve[80:]))


@pytest.mark.parametrize(
    ("shape", "quarter", "half"),
    [
        ("sqrt", 1 / 2, 1 - math.sqrt(1 / 2)),
        ("linear", 3 / 4, 1 / 2),
        ("cosine", (2 + math.sqrt(2)) / 4, 1 / 2),
    ],
)
def test_shapes_of_the_decay_in_closed_form(shape: str, quarter: float, half: float) -> None:
    curve = rates(name="wsd", warmup=10, decay=20, floor=0.0, decay_shape=shape)
    assert (curve[80], curve[85], curve[90]) == (1.0, pytest.approx(quarter), pytest.approx(half))


@pytest.mark.parametrize(
    ("decay", "steps", "expected"),
    [
        (None, 100, 10),
        (None, 550, 55),
        (0.07, 100, 7),
        (0.001, 100, 1),
        (50, 550, 50),
        (0, 100, 0),
        (0.0, 9, 0),
    ],
)
def test_decay_in_steps(decay: float | None, steps: int, expected: int) -> None:
    assert ScheduleSpec(name="wsd", decay=decay).decay_steps(steps) == expected


def test_wsd_without_a_decay_is_constant() -> None:
    assert rates(name="wsd", warmup=5, decay=0) == rates(name="constant", warmup=5)


schedules = st.builds(
    ScheduleSpec,
    name=st.sampled_from(["cosine", "linear", "constant", "wsd"]),
    warmup=st.integers(0, 40) | st.floats(0, 0.5, exclude_max=True),
    decay=st.none() | st.integers(0, 40) | st.floats(0, 0.5, exclude_max=True),
    decay_shape=st.none() | st.sampled_from(SHAPES),
    floor=st.floats(0, 1),
)


@given(schedules, st.integers(100, 1000))
def test_every_schedule_rises_then_never_rises_and_stays_within_floor_and_peak(
    schedule: ScheduleSpec, steps: int
) -> None:
    curve = [multiplier(schedule, step, steps) for step in range(steps)]
    warmup = schedule.warmup_steps(steps)
    assert all(a < b for a, b in itertools.pairwise(curve[:warmup]))
    assert all(a >= b for a, b in itertools.pairwise(curve[max(0, warmup - 1) :]))
    assert all(schedule.floor - 1e-12 <= rate <= 1 and rate > 0 for rate in curve[warmup:])
    moves = schedule.name != "constant" and (schedule.name != "wsd" or schedule.decay_steps(steps))
    assert multiplier(schedule, steps, steps) == pytest.approx(schedule.floor if moves else 1.0)


@given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 300), st.integers(0, 300))
def test_before_its_decay_wsd_does_not_depend_on_the_length(
    warmup: int, decay: int, stable: int, longer: int
) -> None:
    schedule = ScheduleSpec(name="wsd", warmup=warmup, decay=decay)
    steps = warmup + stable + decay
    for step in range(warmup + stable):
        assert multiplier(schedule, step, steps) == multiplier(schedule, step, steps + longer)


def test_the_rate_of_a_step_is_the_scaled_peak_times_the_schedule() -> None:
    values = {
        "model": {"preset": "tiny"},
        "steps": 100,
        "batch_size": 64,
        "optimizer": {"learning_rate": 1e-3, "scale_learning_rate": {"from_batch": 16, "rule": "linear"}},
        "schedule": {"name": "wsd", "warmup": 10, "decay": 10, "floor": 0.0},
    }
    recipe = recipe_of(values)
    last = 4e-3 * (1 - math.sqrt(9 / 10))
    assert [learning_rate(recipe, step) for step in (0, 50, 99)] == pytest.approx([4e-4, 4e-3, last])


def returns_nan(step: int, steps: int) -> float:
    return math.nan


def returns_infinity(step: int, steps: int) -> float:
    return math.inf


def returns_a_negative_number(step: int, steps: int) -> float:
    return -1.0


@pytest.mark.parametrize("function", [returns_nan, returns_infinity, returns_a_negative_number])
def test_a_function_that_returns_no_share_of_the_peak_is_refused(function: Callable[..., float]) -> None:
    schedule = ScheduleSpec(factory=f"{__name__}:{function.__name__}")
    with pytest.raises(RecipeError, match=r"failed at step 3 .* no fraction of the peak"):
        multiplier(schedule, 3, STEPS)
