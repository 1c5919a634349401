"""Pictures of a run's pipeline: the planned step, a measured step, and all schedules side by side.

All data comes from ``plan.json`` and ``report.json``. The planned step is simulated with the seconds that the dry run
counted, as the planner does. The measured step is one step that every rank recorded. The other schedules are simulated
with the planned seconds. The bubble and the held activations cover the whole step, also if only its first micro-batches
are drawn.

Planned and measured steps share one time scale while both are readable on it, else each has its own: the times of
an unknown machine can be wrong by a large factor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure

from shardwise.core.pipeline.schedule import SCHEDULE_NAMES, Played
from shardwise.core.plan import Plan
from shardwise.core.run_files import PassesRecord
from shardwise.core.timetable import Timetable
from shardwise.core.units import format_bytes, format_percent
from shardwise.report.notation import percent_text
from shardwise.report.pictures import WIDE_INCHES
from shardwise.report.pipeline.gantt import Chart, gantt

Draw = Callable[[str, Callable[[float], Figure]], Any]
"""Takes a title and a function that draws at a width."""

SHOWN_MICRO_BATCHES = 32
"""Micro-batches of the planned and of the measured step that are drawn; of more, the first."""

COMPARED_MICRO_BATCHES, COMPARED_LANES = 8, 8
"""Of a step in the picture of all schedules."""

COMPARED_STEPS = 2
"""In the picture of all schedules: the pause between them is what pipedream does not have."""

READABLE = 4
"""How many times as long one step may be as the other on one time scale."""


def figures(plan: Plan, passes: PassesRecord | None) -> dict[str, Figure]:
    """The pictures of a run's folder, by the names of their files; none without a pipeline."""
    if plan.pipeline is None:
        return {}
    return {
        "pipeline.png": planned_and_measured(plan.pipeline, passes),
        "schedules.png": side_by_side(plan.pipeline),
    }


def pipeline_section(plan: Plan, passes: PassesRecord | None, picture: Draw) -> dict[str, Any]:
    """The section of the page: the planned step and the measured one, and all schedules; Nones without a pipeline."""
    pipeline = plan.pipeline
    if pipeline is None:
        return {"pipeline": None, "schedules": None, "measured_step": None, "held": ""}
    return {
        "pipeline": picture(
            "Passes of one step, rank by rank", lambda w: planned_and_measured(pipeline, passes, w)
        ),
        "schedules": picture("All schedules", lambda w: side_by_side(pipeline, w)),
        "measured_step": passes.step if passes else None,
        "held": held_in_words(pipeline),
    }


def planned_and_measured(
    pipeline: Timetable, passes: PassesRecord | None, width: float = WIDE_INCHES
) -> Figure:
    """One step as it was planned, and where there is one, as it was measured."""
    count = pipeline.micro_batches
    planned = pipeline.played(pipeline.schedule, count)
    charts = [_gantt_chart(f"planned · {pipeline.schedule}", planned, count)]
    if passes is not None:
        charts.append(_gantt_chart(f"measured · step {passes.step}", passes.played(), count))
    ends = [chart.played.end for chart in charts]
    shared = max(ends) <= READABLE * min(ends)
    scaled, unit, _ = _in_one_unit(charts)
    return gantt(scaled, unit, width=width, shared=shared)


def side_by_side(pipeline: Timetable, width: float = WIDE_INCHES) -> Figure:
    """Steps under every schedule, by the plan's seconds, with what ranks wait and hold."""
    count = min(pipeline.micro_batches, COMPARED_MICRO_BATCHES)
    # The naive schedule is so long that the others would look small next to it.
    compared = [name for name in SCHEDULE_NAMES if name != "naive" or name == pipeline.schedule]
    until = max(pipeline.played(name, count, COMPARED_STEPS).end for name in compared)
    charts = []
    for schedule in SCHEDULE_NAMES:
        stages_per_rank = pipeline.stages_of(schedule)
        name = f"{schedule}, {stages_per_rank} stages a rank" if stages_per_rank > 1 else schedule
        mine = " · this plan's" if schedule == pipeline.schedule else ""
        played = pipeline.played(schedule, count, COMPARED_STEPS)
        cut = f" · cut off at {format_percent(until / played.end)}" if played.end > until else ""
        charts.append(Chart(name + mine, played, count, _schedule_note(pipeline, schedule) + cut))
    scaled, unit, factor = _in_one_unit(charts)
    of = f" of {pipeline.micro_batches}" if count < pipeline.micro_batches else ""
    words = f"{unit}, {COMPARED_STEPS} steps of {count}{of} micro-batches"
    return gantt(scaled, words, width=width, most=COMPARED_LANES, until=until * factor)


def _schedule_note(pipeline: Timetable, schedule: str) -> str:
    """What ranks wait and hold under a schedule."""
    passes = pipeline.in_flight(schedule)
    bytes_held = f", {format_bytes(pipeline.held_bytes(schedule))}" if pipeline.pass_bytes else ""
    return f"waits {percent_text(pipeline.waiting(schedule), 1)} · {passes:g} in flight{bytes_held}"


def held_in_words(pipeline: Timetable) -> str:
    """The note on the schedules' names."""
    whose = f"rank {pipeline.place} of the pipeline, which needs most memory in this plan,"
    size = f", {format_bytes(pipeline.pass_bytes)} for a pass through a stage" if pipeline.pass_bytes else ""
    return (
        f"Next to each name: the share of time in which ranks wait, of all {pipeline.micro_batches} micro-batches of a"
        f" step, and the micro-batches whose activations {whose} holds at once{size}."
    )


def _gantt_chart(name: str, played: Played, count: int) -> Chart:
    """One step, cut off after the first micro-batches where there are many."""
    first = min(action.micro_batch for spans in played.spans for action, _, _ in spans)
    limit = first + SHOWN_MICRO_BATCHES
    kept = tuple(tuple(span for span in spans if span[0].micro_batch < limit) for spans in played.spans)
    note = f"waits {percent_text(played.bubble, 1)}"
    if count > SHOWN_MICRO_BATCHES:
        note += f" · the first {SHOWN_MICRO_BATCHES} of {count} micro-batches"
    return Chart(name, Played(kept), count, note)


def _in_one_unit(charts: Sequence[Chart]) -> tuple[list[Chart], str, float]:
    """The charts in seconds, or where all are short in thousandths; the unit, and how many of it make a second."""
    if max(chart.played.end for chart in charts) >= 1:
        return list(charts), "seconds", 1.0
    scaled = [
        Chart(
            chart.name,
            Played(tuple(tuple((a, 1e3 * b, 1e3 * e) for a, b, e in spans) for spans in chart.played.spans)),
            chart.micro_batches,
            chart.note,
        )
        for chart in charts
    ]
    return scaled, "milliseconds", 1e3
