"""Plans side by side as text: ``shardwise plan A --vs B``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from shardwise.core.errors import one_line
from shardwise.core.units import format_bytes, format_change, format_percent, format_seconds
from shardwise.core.versus import Compared, Figure, FigureKind, compared_figures
from shardwise.report.answer import money
from shardwise.report.layout import columns

WRITTEN: Mapping[FigureKind, Callable[[float], str]] = {
    "bytes": format_bytes,
    "seconds": format_seconds,
    "rate": lambda rate: f"{rate:,.0f}" if rate >= 99.5 else f"{rate:.3g}",
    "share": format_percent,
    "hours": lambda hours: format_seconds(3600 * hours),
    "cost": money,
}

ALIKE = 5e-4
"""Relative changes that would read 0.0 %."""


MOST_OTHERS = 2
"""Further plans in one table, which has 80 columns then."""


def versus_table(compared: Sequence[Compared]) -> RenderableType:
    """The strategy and the verdict of each plan, then a row per figure with a column per plan and its change."""
    names = [_name(index) for index in range(len(compared))]
    rows = list(compared_figures(compared))
    parts: list[RenderableType] = [*_headings(names, compared)]
    for start in range(1, len(compared), MOST_OTHERS):
        parts += ["", _comparison_table(names, rows, range(start, min(start + MOST_OTHERS, len(compared))))]
    return Group(*parts)


def _name(index: int) -> str:
    """A letter, as columns of a spreadsheet have: A, B, …, Z, AA."""
    before, letter = divmod(index, 26)
    return (_name(before - 1) if before else "") + chr(ord("A") + letter)


def _comparison_table(names: Sequence[str], rows: Sequence[Figure], others: range) -> RenderableType:
    """The first plan, and some others."""
    titles = ["", names[0], *chain.from_iterable((names[other], "change") for other in others)]
    table = columns(*("left", *("right",) * (len(titles) - 1)), titles=tuple(titles))
    for row in rows:
        cells = [WRITTEN[row.kind](value) if value else "–" for value in row.values]
        changes = ["", *("" if change is None else _change(change) for change in row.changes)]
        pairs = chain.from_iterable((Text(cells[other]), Text(changes[other], "dim")) for other in others)
        table.add_row(Text(row.name, "dim" if row.name.startswith(" ") else ""), cells[0], *pairs)
    return table


def _headings(names: Sequence[str], compared: Sequence[Compared]) -> Iterator[RenderableType]:
    for name, one in zip(names, compared, strict=True):
        plan = one.plan
        yield Text.assemble((f"{name}  ", "bold"), (one_line(one.name), "dim"))
        verdict = Text(one_line(plan.verdict), "bold green" if plan.fits else "bold red")
        yield Padding(Text(one_line(plan.line), "bold"), (0, 0, 0, 3))
        yield Padding(verdict, (0, 0, 0, 3))


def _change(change: float) -> str:
    return "" if abs(change) < ALIKE else format_change(change)
