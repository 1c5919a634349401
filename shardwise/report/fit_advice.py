"""Fit advice as text: printed by ``shardwise plan --explain``, and by ``shardwise plan`` if the plan does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from shardwise.core.errors import one_line
from shardwise.core.fit_advice import FitAdvice
from shardwise.report.layout import VERDICT_STYLES, bulleted, stacked, text_section
from shardwise.report.notation import peak_of, seconds
from shardwise.report.tables import WIDEST_TABLE


def advice_table(advice: FitAdvice) -> RenderableType:
    """Every remedy with its figures, then the reasons for the advice."""
    return AdviceTable(advice)


@dataclass(frozen=True)
class AdviceTable:
    """Advice that rich can print."""

    advice: FitAdvice

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, WIDEST_TABLE)
        rows = Group(*stacked(list(_outcomes(self.advice)), width - 2))
        yield from text_section("What fits", "remedies in the order in which they are tried", rows)
        yield from text_section("Advice", "", bulleted(self.advice.reasons, ""))


def _outcomes(advice: FitAdvice) -> Iterator[tuple[Text, Text]]:
    """A row per outcome: remedy, peak and step time; then verdict, strategy or reason."""
    peaks = [peak_of(outcome.candidate) for outcome in advice.outcomes]
    names = [outcome.remedy.name for outcome in advice.outcomes]
    wide = max(map(cell_len, peaks))
    widest = max(map(cell_len, names))
    before = ""
    for outcome, peak, name in zip(advice.outcomes, peaks, names, strict=True):
        candidate = outcome.candidate
        advised = outcome is advice.advised
        verdict = Text("advised" if advised else candidate.verdict, VERDICT_STYLES.get(candidate.verdict, ""))
        step = seconds(candidate.step_seconds) if candidate.step_seconds else "–"
        words = (
            [candidate.line]
            if outcome.fits or not candidate.step_seconds
            else [candidate.line, candidate.reason]
        )
        line = candidate.reason if candidate.verdict == "invalid" else ": ".join(words)
        shown = Text.assemble(verdict, "  ", (one_line(line), "bold" if advised else ""))
        yield Text(f"{'' if name == before else name:{widest}}  {peak:>{wide}}  {step:>9}"), shown
        before = name
