"""The plan that `shardwise plan` shows without --full: one screen, with what costs time first."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from shardwise.core.answer import Alternative, Answer, Interval, RunCost
from shardwise.core.ledger import Ledger
from shardwise.core.plan import DiskSpace, HostMemory, Plan
from shardwise.core.units import GiB, MiB
from shardwise.report.tables import plan_text

LINES = 30
"""Of a screen."""


def answer(plan: Plan, unpin: tuple[str, ...] = (), **changed: Any) -> Answer:
    likely = Interval(55.0, 74.0, 195, "published runs")
    run = RunCost(108_000, 108_000 * plan.step.tokens, 8, 49.35, 2.5, likely)
    nearest = changed.pop("nearest", ())
    return Answer(replace(run, **changed), None, nearest, "memory does not bind", (), (), unpin=unpin)


def brief(plan: Plan, **options: Any) -> str:
    return plan_text(plan, width=80, answer=answer(plan, **options), brief=True)


def alternatives(plan: Plan) -> tuple[Alternative, ...]:
    """More than a screen has room for, and one that was not predicted."""
    row = replace(plan.candidates[0], verdict="fits", reason="", peak_is="estimated")
    names = (
        "compile",
        "activation_checkpointing",
        "offload",
        "loss",
        "master_weights",
        "zero_stage",
        "precision",
    )
    made = [
        Alternative(name, "1", "full", replace(row, step_seconds=1.7 + 0.1 * n), "why", ("loss x",) * (n % 2))
        for n, name in enumerate(names)
    ]
    return (*reversed(made), Alternative("tensor_parallel", "1", "", None, "not possible"))


@pytest.mark.parametrize(
    "costly", [(), ("the recipe pins strategy.offload: without it fits, −38 % step time",)]
)
def test_it_is_one_screen_and_names_the_options_for_the_rest(plan: Plan, costly: tuple[str, ...]) -> None:
    parts = {
        "matrix products": 1.0,
        "memory-bound": 0.3,
        "exposed communication": 0.2,
        "exposed offload": 0.1,
    }
    made = replace(
        plan,
        ledger=replace(plan.ledger, fragmentation=MiB),
        host=HostMemory(Ledger(optimizer_state=GiB), 64 * GiB),
        disk=DiskSpace(GiB),
        step=replace(plan.step, split={**parts, "waiting for the host": 0.001}),
    )
    text = brief(made, nearest=alternatives(plan), unpin=costly)
    assert len(text.splitlines()) <= LINES
    last = "--full shows the rest, --limits how far this goes, --top N of 4 strategies"
    assert text.splitlines()[-1] == last
    assert plan.reasons[0] not in text and plan.assumptions[0] not in text
    assert "4 others" in text and "waiting for the host" not in text
    full = plan_text(made, width=80, answer=answer(plan))
    assert plan.reasons[0] in full and "others" not in full and "waiting for the host" in full


def test_the_best_alternatives_come_first_and_each_has_its_figures(plan: Plan) -> None:
    rows = brief(plan, nearest=alternatives(plan)).partition("Alternatives")[2].splitlines()[1:6]
    assert [row.split()[0] for row in rows] == [
        "compile", "activation_checkpointing", "offload", "loss", "master_weights",
    ]  # fmt: skip
    assert re.fullmatch(r"  compile full +~ 69\.45 GiB +1\.70 s +\+3\.3 %  fits", rows[0])
    assert rows[1].endswith("fits, with loss x")
    short, pinned = alternatives(plan)[:2]
    assert short.candidate and pinned.candidate
    short = replace(short, candidate=replace(short.candidate, verdict="does not fit", step_seconds=1.0))
    pinned = replace(pinned, reason="the recipe pins zero_stage")
    rows = brief(plan, nearest=(short, pinned)).partition("Alternatives")[2].splitlines()[1:3]
    assert rows[0].endswith("fits, pinned, with loss x") and "does not fit" in rows[1]


def test_a_pin_that_costs_time_is_said_before_any_table(plan: Plan) -> None:
    said = "the recipe pins strategy.offload: without it fits, −3.1 % step time"
    for text in (
        brief(plan, unpin=(said,)),
        plan_text(plan, width=80, answer=answer(plan, (said,))),
    ):
        assert text.splitlines()[3] == said


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
    assert text.splitlines()[-1] == "--full shows the rest, --limits how far this goes"


@pytest.mark.parametrize(("seconds", "said"), [(1.61, True), (1.5, False)])
def test_a_faster_row_is_explained_where_the_model_cannot_tell(
    seconds: float, said: bool, plan: Plan
) -> None:
    """A row that fits and is 2 % faster is no error of the choice."""
    chosen, *_ = plan.candidates
    row = replace(chosen, step_seconds=seconds, verdict="fits", peak_bytes=60 * GiB)
    near = Alternative("zero_stage", "3", "2", row, "")
    with_row = replace(plan, candidates=(chosen, row))
    listed = plan_text(with_row, width=80, top=2, answer=answer(plan), brief=True)
    for text in (brief(with_row, nearest=(near,)), listed):
        assert ("within 3 % of the fastest, the plainer is chosen" in text) == said
