"""Learning-rate schedules are pure functions of the step with the right ends."""

from __future__ import annotations

import itertools

import pytest

from shardwise.core.sections import ScheduleSpec
from shardwise.engine.schedule import multiplier, warmup_steps

STEPS = 100


def rates(**values: object) -> list[float]:
    schedule = ScheduleSpec.model_validate(values)
    return [multiplier(schedule, step, STEPS) for step in range(STEPS)]


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_decays_to_the_floor_on_the_last_step(name: str) -> None:
    curve = rates(name=name, warmup=10, floor=0.1)
    assert curve[9] == 1.0
    assert curve[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(curve[9:]))


def test_warmup_rises_in_equal_steps_and_never_is_zero() -> None:
    curve = rates(warmup=4)
    assert curve[:4] == [0.25, 0.5, 0.75, 1.0]


def test_cosine_is_halfway_in_the_middle() -> None:
    assert multiplier(ScheduleSpec(warmup=0, floor=0.0), 49, 100) == pytest.approx(0.5)


def test_constant_stays() -> None:
    assert set(rates(name="constant", warmup=0)) == {1.0}


def test_warmup_as_a_fraction_and_beyond_the_run() -> None:
    assert warmup_steps(ScheduleSpec(warmup=0.03), 100) == 3
    assert warmup_steps(ScheduleSpec(warmup=500), 100) == 500
    assert all(0 < r <= 1 for r in rates(warmup=500))
