"""What a plan's pipeline is played with: other schedules by the papers' formulas, and steps after each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.core.errors import DataError
from shardwise.core.json_file import parse_json, plain, text_of
from shardwise.core.pipeline.schedule import SCHEDULE_NAMES
from shardwise.core.timetable import Timetable


def even(schedule: str = "1f1b", ranks: int = 4, count: int = 8) -> Timetable:
    """Backward passes take twice as long as forward passes."""
    stages = 2 if schedule == "interleaved" else 1
    return Timetable(schedule, ranks, stages, count, (1.0,) * ranks, (2.0,) * ranks, 0, 1000 // stages)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_every_schedule_waits_and_holds_what_the_papers_say_whichever_is_planned(schedule: str) -> None:
    plan, p, m = even(schedule), 4, 8
    wait = {name: plan.waiting(name) for name in SCHEDULE_NAMES}
    assert wait["naive"] == pytest.approx((p - 1) / p)
    assert wait["gpipe"] == wait["1f1b"] == pytest.approx((p - 1) / (m + p - 1))
    assert wait["interleaved"] == pytest.approx((p - 1) / (2 * m + p - 1))
    assert wait["zero_bubble"] < wait["interleaved"] < wait["1f1b"]
    assert wait["pipedream"] == pytest.approx(0)
    assert {name: plan.held_bytes(name) for name in SCHEDULE_NAMES} == {
        "naive": 1000,
        "gpipe": 8000,
        "1f1b": 4000,
        "interleaved": 5500,  # 4 + 2·4 - 1 passes through halves of a stage
        "zero_bubble": 4000,
        "pipedream": 4000,
    }


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_steps_follow_each_other_and_only_pipedream_fills_the_pause(schedule: str) -> None:
    plan = even()
    once, twice = (plan.played(schedule, 8, number) for number in (1, 2))
    assert all(len(two) == 2 * len(one) for one, two in zip(once.spans, twice.spans, strict=True))
    whole = {action for spans in twice.spans for action, _, _ in spans}
    assert len(whole) == sum(map(len, twice.spans)), "every pass is another one"
    if schedule == "pipedream":
        assert twice.end == pytest.approx(once.end + plan.step_seconds(schedule))
        assert twice.end < 2 * once.end
    else:
        assert twice.end == pytest.approx(2 * once.end)
        begins = [start for spans in twice.spans for action, start, _ in spans if action.micro_batch >= 8]
        assert min(begins) == pytest.approx(once.end)


def test_it_is_read_back_and_another_shape_is_refused() -> None:
    plan = even()
    path = Path("plan.json")
    assert parse_json(text_of(plan), Timetable, path) == plan
    for wrong in ({"forward": [1.0]}, {"schedule": "dual-pipe"}):
        with pytest.raises(DataError, match="not one of this version"):
            parse_json(json.dumps(plain(plan) | wrong), Timetable, path)
