"""The ladder as text: what ``shardwise plan --explain`` prints below a plan, or a plan that does not fit by itself."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwise.core.errors import one_line
from shardwise.core.ladder import Ladder
from shardwise.report.notation import seconds
from shardwise.report.tables import VERDICT_STYLES, columns, peak_of, section, sentences


def ladder_table(ladder: Ladder) -> RenderableType:
    """Every rung with its figures, then how the advice was arrived at."""
    parts = [
        *section("The ladder", "what would fit, from what takes least to what takes most", _rungs(ladder))
    ]
    parts += section("So", "", sentences(ladder.reasons, ""))
    return Group(*parts)


def _rungs(ladder: Ladder) -> Table:
    table, before = columns("left", "right", "right", "left", "left"), ""
    for foothold in ladder.footholds:
        found, name = foothold.candidate, foothold.rung.name
        advised = foothold is ladder.advised
        verdict = Text("take this" if advised else found.verdict, VERDICT_STYLES.get(found.verdict, ""))
        took = seconds(found.step_seconds) if found.step_seconds else "–"
        told = [found.line] if foothold.fits or not found.step_seconds else [found.line, found.reason]
        line = found.reason if found.verdict == "invalid" else ": ".join(told)
        shown = Text(one_line(line), "bold" if advised else "")
        table.add_row("" if name == before else name, peak_of(found), took, verdict, shown)
        before = name
    return table
