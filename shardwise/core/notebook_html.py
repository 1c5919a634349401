"""HTML of plans and runs for the cells of a notebook: a title, facts, and a table with bars.

It has no scripts and no style sheet, and takes its colours from the notebook, light or dark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

BarRow = tuple[str, str, float]
"""Name, value, and length of the bar as a share of the longest."""


def notebook_card(
    title: str, line: str, facts: Sequence[str], rows: Iterable[BarRow] = (), more: str = ""
) -> str:
    """The HTML of one object.

    Args:
        line: below the title, in a fixed-width font.
        more: further HTML, already escaped.
    """
    said = "".join(f"<li>{escape(fact)}</li>" for fact in facts)
    table = "".join(_bar_row(*row) for row in rows)
    return (
        f'<div style="max-width:42em"><b>{escape(title)}</b><br><code>{escape(line)}</code>'
        f'<ul style="margin:.4em 0">{said}</ul>'
        + (f'<table style="width:100%;border-collapse:collapse">{table}</table>' if table else "")
        + f"{more}</div>"
    )


def _bar_row(name: str, value: str, share: float) -> str:
    bar = f'<div style="width:{100 * share:.1f}%;height:.6em;background:currentColor;opacity:.45"></div>'
    cell = 'style="text-align:{};padding:.1em .6em;white-space:nowrap"'
    return (
        f"<tr><td {cell.format('left')}>{escape(name)}</td>"
        f'<td style="width:50%;text-align:left">{bar}</td>'
        f"<td {cell.format('right')}>{escape(value)}</td></tr>"
    )
