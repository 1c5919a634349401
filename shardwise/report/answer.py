"""The answer of a plan as text (core/answer.py): the run's hours and cost, what binds, the nearest alternatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from shardwise.core.answer import PINNED, TELLS, Alternative, Answer, DeviceTry, Interval
from shardwise.core.errors import one_line
from shardwise.core.plan import Candidate, Plan
from shardwise.core.units import (
    format_bytes,
    format_change,
    format_count,
    format_percent,
    format_seconds,
)
from shardwise.report.layout import VERDICT_STYLES, bulleted, columns, stacked, text_section
from shardwise.report.notation import peak_of, seconds

BRIEF_ALTERNATIVES = 5
"""Alternatives on a screen that has nothing else to say."""


def answer_sections(answer: Answer, width: int) -> Iterator[RenderableType]:
    """Sections of the terminal, at most ``width`` columns wide."""
    yield from text_section("The run", "", bulleted(run_sentences(answer), ""))
    yield from text_section("What binds", "", bulleted(answer.sentences(), ""))
    if answer.devices:
        yield from text_section("Devices", "the fewest that are enough", _devices(answer.devices))
    if answer.limits:
        yield from limit_rows(answer)
    if answer.nearest:
        yield ""
        yield _nearest_rows(answer, width)


def brief_answer(answer: Answer) -> Iterator[RenderableType]:
    """Hours, tokens and cost, with the time that 95 % of such runs took, on one line; the devices that were tried."""
    run = answer.run
    said = (
        f"{format_seconds(3600 * run.hours)} for {run.steps:,} step{'s' if run.steps > 1 else ''}"
        f" of {format_count(run.tokens)} {run.unit} in all"
    )
    if run.epochs is not None:
        said += f" (train counts those of {run.epochs:g} epoch{'s' if run.epochs != 1 else ''})"
    if run.likely_hours is not None:
        said += f"; P95 {format_seconds(3600 * run.likely_hours.p95)}"
    if run.cost is not None:
        said += f"; costs {money(run.cost)}"
    yield Text(said)
    if answer.devices:
        yield from text_section("Devices", "the fewest that are enough", _devices(answer.devices))


def best_alternatives(answer: Answer, plan: Plan, most: int) -> Iterator[RenderableType]:
    """The first alternatives, a line each: those that fit, the fastest first."""
    rank = {"fits": 0, "tight": 1}
    rows = [(alternative, other) for alternative in answer.nearest if (other := alternative.candidate)]
    rows.sort(key=lambda row: (rank.get(row[1].verdict, 2), row[1].step_seconds or math.inf))
    if not rows:
        return
    note = "the best with another value of one setting"
    if any(is_hardly_faster(other, plan) for _, other in rows[:most]):
        note = f"within {format_percent(TELLS)} of the fastest, the plainer is chosen"
    yield from ("", Text.assemble(("Alternatives", "bold"), (f"   {note}", "dim")))
    table = columns("left", "right", "right", "right", "left")
    for alternative, other in rows[:most]:
        name = Text(f"{alternative.setting} {one_line(alternative.other)}")
        time = format_change(other.step_seconds / plan.step.seconds - 1) if other.step_seconds else ""
        table.add_row(
            name, peak_of(other), seconds(other.step_seconds), time, _brief_verdict(alternative, other)
        )
    yield Padding(table, (0, 0, 0, 2))


def _brief_verdict(alternative: Alternative, other: Candidate) -> Text:
    """The verdict, with further settings that differ."""
    verdict = Text(one_line(other.verdict), VERDICT_STYLES.get(other.verdict, ""))
    if PINNED in alternative.reason:
        verdict.append(", pinned", "dim")
    if also := [words.partition(" (now ")[0] for words in alternative.also]:
        verdict.append(f", with {one_line(', '.join(also))}", "dim")
    return verdict


def is_hardly_faster(candidate: Candidate, plan: Plan) -> bool:
    """Whether a strategy fits and is faster, by less than can be told, and no pin forbids it."""
    least = plan.step.seconds * (1 - TELLS)
    faster = least <= candidate.step_seconds < plan.step.seconds
    return faster and candidate.verdict == "fits" and PINNED not in candidate.reason


def limit_rows(answer: Answer) -> Iterator[RenderableType]:
    """How far each quantity goes: the last value that fits with its peak, and what the next one needs."""
    table = columns("left", "right", "right", "left")
    for limit in answer.limits:
        fits = "none" if limit.fits is None else f"{limit.fits:,}"
        peak = format_bytes(limit.peak_bytes) if limit.peak_bytes else ""
        words = [limit.end(), *([f"with {limit.note}"] if limit.note else [])]
        table.add_row(Text(limit.quantity), fits, peak, Text(one_line("; ".join(words)), "dim"))
    yield from text_section("Limits", "what fits at this strategy, all else equal", table)


def run_sentences(answer: Answer) -> Iterator[str]:
    """Hours, tokens and cost; then how sure they and the peak are."""
    run = answer.run
    yield (
        f"{format_seconds(3600 * run.hours)} for {run.steps:,} step{'s' if run.steps > 1 else ''},"
        f" {format_count(run.tokens)} {run.unit}; without evaluations, checkpoints and failures"
    )
    if run.epochs is not None:
        yield f"shardwise train counts the steps of {run.epochs:g} epochs from the data; here they are not read"
    if run.cost is not None and run.price is not None:
        yield (
            f"costs {money(run.cost)}: {_hours_text(run.device_hours)} device-hours of {run.devices:,}"
            f" device{'s' if run.devices > 1 else ''} at {run.price:g} each"
        )
    if run.likely_hours is None:
        yield "no interval of the time: predictions of this device's seconds were compared with no runs"
    else:
        likely = run.likely_hours
        yield f"time: {_interval(likely, lambda hours: format_seconds(3600 * hours))}"
    if answer.peak is not None:
        yield f"memory: {_interval(answer.peak, format_bytes)}"


def _devices(tried: Sequence[DeviceTry]) -> RenderableType:
    """Every number that was planned, with its hours and cost."""
    table = columns("right", "right", "right", "left")
    for trial in tried:
        took = format_seconds(3600 * trial.hours) if trial.hours else "–"
        cost = "" if trial.cost is None else money(trial.cost)
        style = "bold green" if trial.verdict == "enough" else ""
        table.add_row(f"{trial.devices:,}", took, cost, Text(one_line(trial.verdict), style))
    return table


def _interval(interval: Interval, written: Callable[[float], str]) -> str:
    low, high = written(interval.p50), written(interval.p95)
    return f"P50 {low}, P95 {high}, as in {interval.runs} {interval.source}"


def _hours_text(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 99.5 else f"{hours:.3g}"


def money(cost: float) -> str:
    return f"{cost:,.0f}" if cost >= 99.5 else f"{cost:.2f}"


def _nearest_rows(answer: Answer, width: int) -> RenderableType:
    """A row for each setting."""
    rows = [(Text(f"  {change(alternative)}"), _verdict_text(alternative)) for alternative in answer.nearest]
    return Group(Text("Nearest alternatives", "bold"), *stacked(rows, width))


def change(alternative: Alternative) -> str:
    """The setting with the chosen value and the other one."""
    arrow = f" → {one_line(alternative.other)}" if alternative.candidate else ""
    return f"{alternative.setting} {one_line(alternative.chosen)}{arrow}"


def reason(alternative: Alternative) -> str:
    """Why not, with further settings that differ."""
    also = f"; with {', '.join(alternative.also)}" if alternative.also else ""
    return one_line(alternative.reason + also)


def _verdict_text(alternative: Alternative) -> Text:
    if alternative.candidate is None:
        return Text(reason(alternative), "dim")
    verdict = alternative.candidate.verdict
    return Text.assemble((verdict, VERDICT_STYLES.get(verdict, "")), f": {reason(alternative)}")
