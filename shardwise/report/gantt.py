"""Pictures of pipelines: one schedule as a Gantt chart, and schedules side by side.

A row per rank, a bar per pass of a micro-batch, empty where the rank waits. What is drawn is a ``Played`` schedule:
the plan's, whose passes take what the dry run counted, or a run's, whose passes took what was measured.

Chosen: all charts of one figure share one time scale, so that a shorter schedule looks shorter. Refused: the passes of
one stage in one hue each, as papers with few stages draw them; the kind of a pass and its number say more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from shardwise.core.pipeline_schedule import Played
from shardwise.report.pictures import INK, PAPER, SHADE, STYLE, WIDE, on

SHOWN_LANES = 16
"""Ranks of a chart; of more, the first and the last ones."""

PASSES: dict[str, tuple[str, str]] = {
    "F": ("forward", "#47639c"),
    "B": ("backward", "#eda83e"),
    "I": ("backward, inputs", "#eda83e"),
    "W": ("backward, weights", "#1f8a5b"),
}
"""Kind of a pass -> its name and colour."""

NARROWEST = 0.04
"""Inches of a bar that has an edge."""

HATCHES = {"I": "////", "W": "\\\\\\\\"}
"""Of halves of backward passes, which would else look like others to who does not see colours."""


@dataclass(frozen=True)
class Chart:
    """One schedule to draw: its name, when everything begins and ends, and what to say beside the name.

    ``micro_batches`` are those of one optimizer step, after which their numbers begin again.
    """

    name: str
    played: Played
    micro_batches: int
    note: str = ""


@matplotlib.rc_context(STYLE)
def gantt(
    charts: Sequence[Chart],
    unit: str,
    width: float = WIDE,
    shared: bool = True,
    most: int = SHOWN_LANES,
    until: float = math.inf,
) -> Figure:
    """The schedules below each other.

    Args:
        unit: of time: what one slot or second of the schedules is called.
        shared: whether on one time scale, or each on its own.
        most: ranks of a chart; of more, the first and the last ones.
        until: where the time scale ends at the latest.
    """
    lanes = [_shown(len(chart.played.spans), most) for chart in charts]
    words = [_title(chart, width) for chart in charts]
    tall = [0.32 + 0.16 * len(title.splitlines()) + (0 if shared else 0.4) for title in words]
    heights = [space + 0.24 * len(rows) for space, rows in zip(tall, lanes, strict=True)]
    figure = Figure(figsize=(width, 0.75 + sum(heights)), layout="constrained")
    every = figure.subplots(len(charts), 1, squeeze=False, sharex=shared, height_ratios=heights)[:, 0]
    longest = min(until, max(chart.played.end for chart in charts))
    for axes, chart, rows, title in zip(every, charts, lanes, words, strict=True):
        axes.set_title(title, loc="left", color=INK, fontsize=9)
        end = longest if shared else chart.played.end
        _draw(axes, chart, rows, end, width)
        if not shared or axes is every[-1]:
            axes.set_xlabel(unit)
    kinds = {action.kind for chart in charts for spans in chart.played.spans for action, _, _ in spans}
    handles = [_patch(kind) for kind in "FBIW" if kind in kinds]
    columns = len(handles) if width >= WIDE else 2
    figure.legend(
        handles=handles, loc="outside upper left", ncols=columns, handlelength=1.6, handleheight=1.1
    )
    return figure


def _patch(kind: str) -> Patch:
    """A kind of pass in the legend."""
    name, colour = PASSES[kind]
    return Patch(facecolor=colour, edgecolor=PAPER, linewidth=0.5, hatch=HATCHES.get(kind), label=name)


def _title(chart: Chart, width: float) -> str:
    """The name and the note, below each other where the picture is narrow."""
    return f"{chart.name}{'   ' if width >= WIDE else chr(10)}{chart.note}".rstrip()


def _shown(ranks: int, most: int) -> list[int]:
    """The ranks that get a lane."""
    if ranks <= most:
        return list(range(ranks))
    half = most // 2
    return [*range(half), *range(ranks - half, ranks)]


def _bar(lane: int, start: float, stop: float, **how: Any) -> Rectangle:
    return Rectangle((start, lane - 0.43), stop - start, 0.86, **how)


def _draw(axes: Any, chart: Chart, rows: Sequence[int], end: float, width: float) -> None:
    ranks = len(chart.played.spans)
    inch = 0.85 * width / end
    for lane in range(len(rows)):
        axes.add_patch(_bar(lane, 0, end, facecolor=SHADE, linewidth=0, zorder=-1))
    for lane, rank in enumerate(rows):
        for action, start, stop in chart.played.spans[rank]:
            colour, hatch = PASSES[action.kind][1], HATCHES.get(action.kind)
            if start >= end:
                continue
            edge = 0.5 if (stop - start) * inch > NARROWEST else 0.0
            axes.add_patch(
                _bar(lane, start, stop, facecolor=colour, edgecolor=PAPER, linewidth=edge, hatch=hatch)
            )
            # A prime for each stage that the rank has before this one.
            number = str(action.micro_batch % chart.micro_batches + 1) + "′" * (action.stage // ranks)
            if stop <= end and (stop - start) * inch > 0.062 * len(number) + 0.015:
                # On a hatched bar, room for the number.
                box = {"facecolor": colour, "edgecolor": "none", "pad": 0.6} if hatch else None
                how = {"color": on(colour), "fontsize": 7, "bbox": box}
                axes.text((start + stop) / 2, lane + 0.03, number, ha="center", va="center", **how)
    axes.set_yticks(range(len(rows)), [f"stage {rank}" for rank in rows], color=INK, fontsize=8)
    axes.set_xlim(0, end)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
