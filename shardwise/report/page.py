"""A run as one self-contained HTML page: no other files, no network requests, one script of its own.

This module computes the values; `page.html` lays them out. The template engine escapes every text of a run (names,
reasons, the recipe, generated text). Only the pictures drawn here are inserted as markup.

Pictures are inline SVG in two widths. They stay sharp and follow the reader's light or dark scheme. The script replaces
those of the series and of the memory through a step by charts with hover and zoom (charts.py, page.js).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from shardwise.core.counted import TOKENS
from shardwise.core.errors import ShardwiseError
from shardwise.core.identity import starts
from shardwise.core.plan import Plan
from shardwise.core.plugins import plugin
from shardwise.core.run_files import Outcome
from shardwise.core.units import MiB, format_bytes, format_count, format_rate
from shardwise.hardware.profiles import kind_named
from shardwise.recipe.noise_scale import batch_sentences, noise_scale
from shardwise.report.answer_page import answer_values, run_card
from shardwise.report.blocks import blocks_through_time
from shardwise.report.charts import series_charts, timeline_chart
from shardwise.report.experts import experts_section
from shardwise.report.gradients import gradients_section
from shardwise.report.loss_card import loss_card
from shardwise.report.mesh import mesh
from shardwise.report.notation import (
    COLOURS,
    by_size,
    deviation,
    error_in_words,
    of_capacity,
    peak_error,
    peak_of,
    percent_text,
    row_label,
    seconds,
    tokens_rate,
    unit_for,
)
from shardwise.report.page_parts import Bar, Card, Picture, picture
from shardwise.report.pictures import ledger_bar, loss_curve, memory_timeline, peaks_by_rank
from shardwise.report.pipeline.pictures import pipeline_section
from shardwise.report.record import RunRecord
from shardwise.report.series import MOST_MARKS, marks, series_picture
from shardwise.report.step_times import compared_phases, step_sentences, time_by_rank
from shardwise.report.template import rendered

SHOWN_SITES = 12
"""Allocation sites that are shown; the others are in a list that opens."""

TABLE_RANKS = 64
"""Most rows in the table of ranks; with more ranks, those with the highest peaks are shown."""


def render_page(run: RunRecord) -> str:
    """The page of a run, finished or not, or of a plan alone, as HTML."""
    return rendered("page.html", page_values(run))


def page_values(run: RunRecord) -> dict[str, Any]:
    """Everything that the template reads."""
    plan, outcome, units = run.plan, run.outcome, run.plan.step.units
    ranks, events = outcome.ranks if outcome else (), [] if run.planned_only else marks(run.folder)
    return {
        **head_values(run),
        "live": "",
        "planned_only": run.planned_only,
        "answer": answer_values(run.plan, run.answer, run.advice),
        "peaks": picture("Predicted and measured peak of every rank", lambda w: peaks_by_rank(ranks, w))
        if ranks
        else None,
        "ranks": _rank_rows(outcome) if outcome else [],
        "all_ranks": len(ranks),
        "reserved": any(rank.measured_reserved_bytes for rank in ranks),
        "place": plan.peak.in_words,
        "total": unit_for(plan.peak.bytes).write(plan.peak.bytes),
        "peak": of_capacity(plan.peak.bytes, plan.capacity_bytes),
        "unseen": _unseen(plan),
        "bar": picture("The ledger at the peak", lambda w: ledger_bar(plan.ledger, plan.capacity_bytes, w)),
        "ledger": _ledger_rows(plan),
        **_sites(plan),
        "timeline": picture("Memory through one optimizer step", lambda w: memory_timeline(plan, w)),
        "has_timeline": bool(plan.timeline),
        "blocks": _blocks_picture(plan),
        "mesh": picture("Who holds what", lambda w: mesh(plan.layout, plan.devices_per_node, w))
        if plan.world_size > 1
        else None,
        **pipeline_section(plan, outcome.passes if outcome else None, picture),
        "times": _time_rows(run),
        "phases": compared_phases(plan, outcome),
        **_measured_phases(run),
        "offer": next((s for s in step_sentences(plan, outcome) if "doctor" in s), ""),
        "seconds": lambda spent: seconds(spent or 0.0),
        "split": _split_rows(plan),
        "traffic": _traffic_rows(plan),
        "loss": picture("Loss and learning rate", lambda w: loss_curve(run.steps, w, units)),
        "written": outcome,
        **gradients_section(outcome.gradients if outcome else None),
        **experts_section(outcome.experts if outcome else None),
        "series": picture("Series of the run", lambda w: series_picture(run.steps, events, w, units))
        if run.steps
        else None,
        "charts": {
            "series": series_charts(run.steps, events, units),
            "timeline": timeline_chart(plan),
        },
        "events": events[-MOST_MARKS:],
        "starts": [start.sentences() for start in starts(run.folder)],
        "interruptions": _interruption_rows(run),
        # A run is planned without comparing candidates.
        "candidates": [
            (c, peak_of(c), seconds(c.step_seconds)) for c in plan.candidates if len(plan.candidates) > 1
        ],
        "reasons": (*plan.reasons, *plan.departures),
        "standing": _standing(run),
        "batch_size": _batch_size_advice(run),
        "assumptions": [*(run.answer.sources() if run.answer else ()), *plan.assumptions],
        "recipe": run.recipe,
    }


def head_values(run: RunRecord) -> dict[str, Any]:
    """What the head of the page reads: name, strategy, facts, and the headline figures."""
    return {
        "name": run.name,
        "line": run.plan.line,
        "facts": list(_facts(run)),
        "unfinished": None if run.outcome else _progress_note(run),
        "cards": [
            _peak_card(run),
            _speed_card(run),
            run_card(run.answer) or loss_card(run),
            *_mfu_card(run),
        ],
    }


def _standing(run: RunRecord) -> list[str]:
    """The run against its scaling law; nothing where the recipe or the law cannot be read."""
    laws = plugin("scaling.report.standing")
    if laws is None:
        return []
    try:
        recipe = run.settings()
        standing = laws.standing_of(recipe, run.plan)
    except ShardwiseError:
        return []
    return list(laws.standing_sentences(standing, run.outcome)) if standing else []


def _batch_size_advice(run: RunRecord) -> list[str]:
    """The gradient noise scale and its advice; nothing where the run has not measured it, or has no readable recipe."""
    measured = [step.gradient_noise for step in run.steps if step.gradient_noise is not None]
    noise = noise_scale(measured)
    if noise is None:
        return []
    try:
        recipe = run.settings()
    except ShardwiseError:
        return []
    units = run.plan.step.units
    words = (units.trained, "sequences" if units == TOKENS else "samples")
    return batch_sentences(noise, recipe, noise.batch_tokens, words)


# -- the head -----------------------------------------------------------------------------------------


def _facts(run: RunRecord) -> Iterator[str]:
    trained = run.outcome.trained_parameters if run.outcome else None
    partly = trained is not None and trained < run.plan.parameters
    yield f"{format_count(run.plan.parameters)} parameters" + (
        f", {format_count(trained or 0)} trained" if partly else ""
    )
    yield run.plan.cluster
    if run.planned_only:
        tokens = f" of {format_count(run.plan.step.tokens)} {run.plan.step.unit}"
        yield f"{run.answer.run.steps:,} steps{tokens}" if run.answer else f"steps{tokens}"
        return
    yield f"{len(run.steps)} steps"
    if skipped := sum(step.skipped for step in run.steps):
        yield f"{skipped} skipped update{'s' if skipped > 1 else ''}"
    if number := len(run.interruptions):
        yield f"{number} interruption{'s' if number > 1 else ''}"
    if run.steps and (rewinds := run.steps[-1].rewinds):
        yield f"{rewinds} rewind{'s' if rewinds > 1 else ''}"
    if run.steps:
        # Count the same steps for both: the outcome's seconds cover only the last process of a resumed run, and its
        # tokens include the run that this one started from.
        yield f"{format_count(sum(step.tokens for step in run.steps))} {run.counted}"
        yield f"{seconds(sum(step.seconds for step in run.steps))} in steps"
    elif run.outcome:
        yield f"{format_count(run.outcome.tokens)} {run.counted}"
        yield seconds(run.outcome.seconds)
    else:
        yield f"0 {run.counted}"


def _progress_note(run: RunRecord) -> str:
    if run.planned_only:
        fault = "" if run.plan.fits else f" It {run.plan.verdict}."
        return f"A plan: nothing has been trained. Every figure is predicted.{fault}"
    at = f"after step {run.steps[-1].step}" if run.steps else "before its first step has finished"
    return f"Read {at}: the run is in progress, or ended early. Its final measurements are missing."


def _peak_card(run: RunRecord) -> Card:
    plan, outcome = run.plan, run.outcome
    if run.planned_only:
        return Card(
            "Predicted peak", format_bytes(plan.peak.bytes), f"of {format_bytes(plan.capacity_bytes)}"
        )
    if outcome is None:
        return Card("Predicted peak", format_bytes(plan.predicted_allocated(plan.peak.rank)), "of a rank")
    worst = outcome.worst
    error = peak_error(worst.predicted_peak_bytes, worst.measured_peak_bytes)
    note = f"of rank {worst.rank}\npredicted {format_bytes(worst.predicted_peak_bytes)}, {error}"
    return Card("Measured peak", format_bytes(worst.measured_peak_bytes), note)


def _speed_card(run: RunRecord) -> Card:
    step = run.plan.step
    measured = run.step_seconds
    if not measured:
        return Card("Throughput", tokens_rate(step.tokens_per_second, step.unit), "predicted")
    error = error_in_words(step.seconds, measured)
    note = f"{seconds(measured)} per step\npredicted {seconds(step.seconds)}, {error}"
    trained = run.tokens_per_second
    processed = step.tokens / measured
    counts = step.units.trained
    if trained is not None and counts != "targets" and (counts != "tokens" or trained < 0.95 * processed):
        note += f"\n{tokens_rate(trained, counts)} trained on"
    return Card("Throughput", tokens_rate(processed, step.unit), note)


def _mfu_card(run: RunRecord) -> Iterator[Card]:
    """Measured MFU: the planned FLOPs over the measured time. None where the peak of the CPU is only assumed."""
    step = run.plan.step
    measured = run.step_seconds
    predicted = percent_text(step.mfu, 1)
    if not measured:
        yield Card("MFU", predicted, "predicted")
    elif not kind_named(run.plan.device).is_host or not run.plan.calibration_offer:
        yield Card("MFU", percent_text(step.mfu * step.seconds / measured, 1), f"predicted {predicted}")


def _interruption_rows(run: RunRecord) -> list[dict[str, str]]:
    """Interruptions; the time lost is with the repetition of steps."""
    step_seconds = run.step_seconds or 0.0
    return [
        {
            "reached": str(interruption.reached),
            "cause": interruption.cause,
            "resumed": str(interruption.resumed),
            "repeated": str(interruption.repeated),
            "lost": seconds(interruption.seconds + interruption.repeated * step_seconds),
        }
        for interruption in run.interruptions
    ]


# -- memory -------------------------------------------------------------------------------------------


def _rank_rows(outcome: Outcome) -> list[dict[str, str]]:
    """Predicted, measured and error by rank; of many ranks those with the highest peaks, in rank order."""
    most = sorted(outcome.ranks, key=lambda rank: -rank.measured_peak_bytes)[:TABLE_RANKS]
    unit = unit_for(max(max(rank.predicted_peak_bytes, rank.measured_peak_bytes) for rank in most))
    return [
        {
            "rank": str(rank.rank),
            "predicted": unit.write(rank.predicted_peak_bytes),
            "measured": unit.write(rank.measured_peak_bytes),
            "error": deviation(rank.predicted_peak_bytes, rank.measured_peak_bytes),
            "reserved": unit.write(rank.measured_reserved_bytes) if rank.measured_reserved_bytes else "–",
        }
        for rank in sorted(most, key=lambda rank: rank.rank)
    ]


def _unseen(plan: Plan) -> str | None:
    """The memory that the plan counts and a measurement of allocated memory does not see; None if there is none."""
    lost = plan.ledger.fragmentation
    outside = plan.peak.bytes - plan.predicted_allocated(plan.peak.rank) - lost
    parts = [f"{format_bytes(outside)} of it (context, communicators)"] if outside > 0 else []
    parts += [f"{format_bytes(lost)} (fragmentation)"] if lost else []
    return " and ".join(parts) or None


def _ledger_rows(plan: Plan) -> list[Bar]:
    rows = by_size(plan.ledger)
    peak = plan.peak.bytes
    unit = unit_for(peak)
    longest = max((size for _, size in rows), default=1)
    return [
        Bar(row_label(row), unit.write(size), percent_text(size, peak), 100 * size / longest, COLOURS[row])
        for row, size in rows
    ]


def _blocks_picture(plan: Plan) -> Picture | None:
    """The picture of blocks over time; None for a plan of an earlier version, or a rank without blocks."""
    times = plan.blocks
    if times is None or times.blocks < 2:
        return None
    return picture("Blocks through one micro-batch", lambda w: blocks_through_time({"": times}, w))


def _sites(plan: Plan) -> dict[str, Any]:
    """Rows of the allocation sites at the peak: those that are shown at once, and the others."""
    unit = unit_for(plan.peak.bytes)
    largest = max((site.bytes for site in plan.sites), default=1)
    rows = [
        {
            "site": site.module or (site.row and f"outside of modules, {site.phase}") or "smaller sites",
            "operation": _operation_in_words(site.operation),
            "row": row_label(site.row),
            "tensors": f"{site.tensors:,}",
            "size": unit.write(site.bytes),
            "share": percent_text(site.bytes, plan.peak.bytes),
            "percent": 100 * site.bytes / largest,
            "colour": COLOURS.get(site.row, "var(--muted)"),
        }
        for site in plan.sites
    ]
    return {"sites": rows[:SHOWN_SITES], "more_sites": rows[SHOWN_SITES:]}


def _operation_in_words(operation: str) -> str:
    """An operation of the dispatcher without its overload; what kernels fill is allocated by kinds of ``empty``."""
    name = operation.removeprefix("aten::").partition(".")[0]
    return "outputs of kernels" if name.startswith(("empty", "new_empty")) else name


# -- time ---------------------------------------------------------------------------------------------


def _time_rows(run: RunRecord) -> list[Bar]:
    predicted = run.plan.step.seconds
    measured = run.step_seconds
    longest = max(predicted, measured or 0.0)
    rows = [Bar("predicted", seconds(predicted), "", 100 * predicted / longest, "none", hollow=True)]
    if measured:
        error = deviation(predicted, measured)
        rows.append(Bar("measured", seconds(measured), error, 100 * measured / longest, "var(--accent)"))
    return rows


def _measured_phases(run: RunRecord) -> dict[str, Any]:
    """The picture of measured seconds by phase and rank, and the step that they are of."""
    phases = run.outcome.phases if run.outcome else None
    if phases is None or not run.plan.step.phases:
        return {"by_rank": None, "phases_of": None}
    shown = picture("Seconds of a step by phase and rank", lambda w: time_by_rank(run.plan, phases, w))
    return {"by_rank": shown, "phases_of": phases}


def _split_rows(plan: Plan) -> list[Bar]:
    split = plan.step.split
    whole = sum(split.values())
    longest = max(split.values(), default=0.0) or 1.0
    return [
        Bar(part, seconds(spent), percent_text(spent, whole), 100 * spent / longest)
        for part, spent in split.items()
    ]


def _traffic_rows(plan: Plan) -> Sequence[tuple[str, str, str]]:
    """Axis, bytes per step and rank, and the average rate, to compare with the link."""
    rows = sorted(plan.step.traffic_bytes.items(), key=lambda pair: -pair[1])
    return [
        (axis, format_bytes(sent), format_rate(sent / plan.step.seconds, "B") if sent >= MiB else "–")
        for axis, sent in rows
        if sent
    ]
