"""Parts of text in a terminal: sections, columns without lines, lists of sentences, rows that stack.

A row that is wider than the terminal is stacked: its second part goes to the next line. So words are not cut, and no
column is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.core.errors import one_line

STACKED = 6
"""Columns by which the second part of a stacked row is indented."""

VERDICT_STYLES = {
    "chosen": "bold green",
    "fits": "green",
    "tight": "yellow",
    "does not fit": "red",
    "invalid": "dim",
}


def text_section(title: str, note: str, body: RenderableType) -> Iterator[RenderableType]:
    """A blank line, the title with a note, and the indented body."""
    yield ""
    yield Text.assemble((title, "bold"), (f"   {one_line(note)}" if note else "", "dim"))
    yield Padding(body, (0, 0, 0, 2))


def bulleted(listed: Iterable[str], style: str) -> Table:
    """Sentences as a bulleted list."""
    table = columns("left", "left")
    for sentence in listed:
        table.add_row(Text("•", "dim"), Text(one_line(sentence), style))
    return table


def stacked(rows: Sequence[tuple[Text, Text]], width: int) -> Iterator[RenderableType]:
    """Rows of two parts: the second parts in one column, or below the first where they do not fit next to it."""
    wide = max((first.cell_len for first, _ in rows), default=0) + 2
    for first, second in rows:
        if wide + second.cell_len <= width:
            padded = first.copy()
            padded.pad_right(wide - first.cell_len)
            yield Text.assemble(padded, second)
        else:
            yield from (first, Padding(second, (0, 0, 0, STACKED)))


def columns(*justify: str, titles: tuple[str, ...] = ()) -> Table:
    """A table without lines, with two blanks between columns. Only the last column wraps."""
    table = Table(box=None, show_header=bool(titles), padding=(0, 2, 0, 0), pad_edge=False)
    names = titles or ("",) * len(justify)
    for index, (name, side) in enumerate(zip(names, justify, strict=True)):
        table.add_column(
            Text(name, "dim" if index else "bold"),
            justify="right" if side == "right" else "left",
            no_wrap=index < len(justify) - 1,
            overflow="fold",
        )
    return table
