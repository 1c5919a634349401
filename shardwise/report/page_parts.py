"""Parts of the page that several sections have: cards, bars, pictures in two widths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from markupsafe import Markup
from matplotlib.figure import Figure

from shardwise.report.pictures import NARROW_INCHES, WIDE_INCHES, svg


@dataclass(frozen=True)
class Card:
    """One headline figure; the note may have several lines."""

    title: str
    value: str
    note: str


@dataclass(frozen=True)
class Bar:
    """One row of a table with a bar. ``percent`` is its length relative to the longest bar; hollow means predicted."""

    name: str
    value: str
    share: str
    percent: float
    colour: str = "var(--muted)"
    hollow: bool = False


@dataclass(frozen=True)
class Picture:
    """One picture in the widths of a desktop and of a phone."""

    wide: Markup
    narrow: Markup


def picture(name: str, draw: Callable[[float], Figure]) -> Picture:
    """A figure, drawn in both widths."""
    # The only markup that is not escaped: matplotlib has escaped the texts in its SVG.
    return Picture(Markup(svg(draw(WIDE_INCHES), name)), Markup(svg(draw(NARROW_INCHES), name)))
