"""Fit advice as text: printed by ``shardwise plan --explain``, and by ``shardwise plan`` if the plan does not fit."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwise.core.errors import one_line
from shardwise.core.fit_advice import FitAdvice
from shardwise.report.notation import seconds
from shardwise.report.tables import VERDICT_STYLES, columns, peak_of, section, sentences


def advice_table(advice: FitAdvice) -> RenderableType:
    """Every remedy with its figures, then the reasons for the advice."""
    parts = [*section("What fits", "remedies in the order in which they are tried", _outcomes(advice))]
    parts += section("Advice", "", sentences(advice.reasons, ""))
    return Group(*parts)


def _outcomes(advice: FitAdvice) -> Table:
    """A row per outcome: remedy, peak, step time, verdict, strategy or reason."""
    table, before = columns("left", "right", "right", "left", "left"), ""
    for outcome in advice.outcomes:
        found, name = outcome.candidate, outcome.remedy.name
        advised = outcome is advice.advised
        verdict = Text("advised" if advised else found.verdict, VERDICT_STYLES.get(found.verdict, ""))
        step = seconds(found.step_seconds) if found.step_seconds else "–"
        words = [found.line] if outcome.fits or not found.step_seconds else [found.line, found.reason]
        line = found.reason if found.verdict == "invalid" else ": ".join(words)
        shown = Text(one_line(line), "bold" if advised else "")
        table.add_row("" if name == before else name, peak_of(found), step, verdict, shown)
        before = name
    return table
