"""The plan that `shardwise plan` shows without --full: one screen, with what costs time first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.core.answer import Answer, Interval, RunCost
from shardwise.core.plan import Plan
from shardwise.core.units import GiB, MiB
from shardwise.report.tables import plan_text

LINES = 40
"""Of a terminal."""


def answer(plan: Plan, unpin: tuple[str, ...] = (), **changed: Any) -> Answer:
    likely = Interval(55.0, 74.0, 195, "published runs")
    run = RunCost(108_000, 108_000 * plan.step.tokens, 8, 49.35, 2.5, likely)
    return Answer(replace(run, **changed), None, (), "memory does not bind", (), (), unpin=unpin)


def brief(plan: Plan, **options: Any) -> str:
    return plan_text(plan, width=80, answer=answer(plan, **options), brief=True)


def test_it_fills_a_screen_and_names_the_option_for_the_rest(plan: Plan) -> None:
    many = replace(plan, candidates=(plan.candidates[0], *plan.candidates[1:] * 9))
    text = brief(many)
    assert len(text.splitlines()) <= LINES
    assert (
        text.splitlines()[-1]
        == "--full shows alternatives, reasons and sources; --top N shows N of 28 strategies"
    )
    assert plan.reasons[0] not in text and plan.assumptions[0] not in text
    full = plan_text(many, width=80, answer=answer(plan))
    assert plan.reasons[0] in full and len(full) > len(text)


def test_a_pin_that_costs_time_is_said_before_any_table(plan: Plan) -> None:
    said = "drop strategy.offload: fits, −3.1 % step time"
    for text in (
        brief(plan, unpin=(said,)),
        plan_text(plan, width=80, answer=answer(plan, (said,))),
    ):
        assert said in text.splitlines()[2:4]


def test_the_hours_name_the_samples_and_the_epochs_of_the_recipe(plan: Plan) -> None:
    assert "2 d 01 h for 108,000 steps of 14.16B tokens in all; P95 3 d 02 h; costs 987" in brief(plan)
    images = brief(plan, unit="samples", epochs=3.0, steps=1000, tokens=64_000, hours=0.5)
    assert "for 1,000 steps of 64.00K samples in all (train counts those of 3 epochs)" in " ".join(
        images.split()
    )


def test_a_time_of_assumed_speeds_says_so_first(plan: Plan) -> None:
    """Before a measurement, a CPU's seconds are a low figure per core."""
    here = replace(plan, device="cpu", cluster="2xcpu")
    offer = "run `shardwise doctor --calibrate` to measure this machine"
    assert offer in " ".join(brief(here, likely_hours=None).split())
    measured = replace(here, assumptions=("seconds were measured on 2026-11-28",))
    assert offer not in " ".join(brief(measured, likely_hours=None).split())
    assert offer not in brief(plan), "times of this device were compared with published runs"


def test_without_room_there_are_no_seconds_and_no_candidates(plan: Plan) -> None:
    text = brief(replace(plan, capacity_bytes=plan.peak.bytes - 512 * MiB))
    assert "does not fit: 512.0 MiB too much" in text
    assert "Time of a step" not in text and "Considered" not in text
    assert "--full shows alternatives" in text


@pytest.mark.parametrize(("seconds", "said"), [(1.61, True), (1.5, False)])
def test_a_faster_row_is_explained_where_the_model_cannot_tell(
    seconds: float, said: bool, plan: Plan
) -> None:
    """A row that fits and is 2 % faster is no error of the choice."""
    chosen, *_ = plan.candidates
    row = replace(chosen, step_seconds=seconds, verdict="fits", peak_bytes=60 * GiB)
    text = brief(replace(plan, candidates=(chosen, row)))
    assert ("within 3 % of the fastest, the plainer is chosen" in text) == said
