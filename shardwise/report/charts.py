"""Data of the charts that the page's script draws: series over steps with marks, and memory through a step.

The static pictures show the same (series.py, pictures.py). They stay where scripts do not run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from shardwise.core.counted import TOKENS, Units
from shardwise.core.errors import one_line
from shardwise.core.plan import Plan
from shardwise.core.run_files import StepRecord
from shardwise.report.notation import COLOURS, row_label, unit_for
from shardwise.report.pictures import ACCENT, INK, STACK, loss_title, page_colour, through_the_step
from shardwise.report.series import LINE_COLOURS, Mark, Series, compared_series, series_of, series_points

ChartValues = dict[str, Any]

MOST_DOTS = 60
"""Most points of a line that are drawn as dots."""


def series_charts(steps: Sequence[StepRecord], events: Sequence[Mark], units: Units = TOKENS) -> ChartValues:
    """Loss and every series of a run, with its events."""
    rest = [_series_chart(row, dict.fromkeys(row.values, steps)) for row in series_of(steps, units)]
    marks = [{"step": mark.step, "event": mark.event, "words": mark.words} for mark in events]
    return {"step": "step", "marks": marks, "charts": [_loss_chart(steps, units), *rest] if steps else []}


def compared_charts(runs: Mapping[str, Sequence[StepRecord]], units: Units = TOKENS) -> ChartValues:
    """A chart for each series, with a line for each run."""
    loss = loss_title(units)
    charts = [{**_series_chart(row, runs), "tall": row.title == loss} for row in compared_series(runs, units)]
    return {"step": "step", "marks": [], "charts": charts}


def timeline_chart(plan: Plan) -> ChartValues:
    """The worst rank's memory through one optimizer step by ledger row; ``charts`` is empty without a timeline."""
    ledgers, top = through_the_step(plan)
    if not ledgers or not plan.peak.bytes:
        return {"step": "allocation", "marks": [], "charts": []}
    unit = unit_for(plan.peak.bytes)
    places = list(range(len(ledgers)))
    lines = [
        _line_values(
            row_label(row), places, [getattr(ledger, row) / unit.size for ledger in ledgers], COLOURS[row]
        )
        for row in STACK
        if any(getattr(ledger, row) for ledger in ledgers)
    ]
    chart: ChartValues = {"title": f"memory, {unit.name}", "log": False, "tall": True, "stack": True}
    chart |= {
        "ticks": False,
        "lines": lines,
        "bands": list(_bands([sample.phase for sample in plan.timeline])),
    }
    highest = plan.peak.bytes / unit.size
    limit = plan.capacity_bytes
    chart["peak"] = {"at": top, "value": _six_digits(highest), "words": f"peak {unit.write(plan.peak.bytes)}"}
    near = limit <= 2 * plan.peak.bytes
    words = f"capacity {unit_for(limit).write(limit)}"
    chart["level"] = {"value": _six_digits(limit / unit.size) if near else None, "words": words}
    return {"step": "allocation", "marks": [], "charts": [chart]}


def _bands(phases: Sequence[str]) -> Iterator[ChartValues]:
    start = 0
    for phase, members in groupby(phases):
        end = start + len(list(members))
        yield {"name": one_line(phase), "from": start, "to": end}
        start = end


def _loss_chart(steps: Sequence[StepRecord], units: Units) -> ChartValues:
    lines = [_chart_line("training", steps, [step.loss for step in steps], INK)]
    if any(step.held_out_loss is not None for step in steps):
        lines.append(_chart_line("held-out", steps, [step.held_out_loss for step in steps], ACCENT))
    return {"title": loss_title(units), "log": False, "tall": True, "lines": lines}


def _series_chart(row: Series, runs: Mapping[str, Sequence[StepRecord]]) -> ChartValues:
    lines = [
        _chart_line(name, runs[name], values, LINE_COLOURS[index % len(LINE_COLOURS)])
        for index, (name, values) in enumerate(row.values.items())
    ]
    return {"title": row.title, "log": row.spans_decades(), "tall": False, "lines": lines}


def _chart_line(
    name: str, steps: Sequence[StepRecord], values: Sequence[float | None], colour: str
) -> ChartValues:
    """A line over the steps that have a value, with as many points as a picture of it has; dots where these are few."""
    x, y = series_points(steps, values)
    sparse = len(x) <= min(MOST_DOTS, len(steps) // 2)
    return _line_values(name, x.tolist(), y.tolist(), colour) | {"dots": sparse}


def _line_values(name: str, x: Sequence[int], y: Sequence[float], colour: str) -> ChartValues:
    return {
        "name": name,
        "colour": page_colour(colour),
        "dots": False,
        "x": x,
        "y": [_six_digits(v) for v in y],
    }


def _six_digits(value: float) -> float | None:
    """Six digits are enough to read; None for a value that is no number."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
