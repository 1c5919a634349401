"""Pictures of pipelines: one schedule as a Gantt chart, and schedules side by side.

A chart has a row per rank and a bar per pass of a micro-batch; gaps are idle time. It draws a ``Played`` schedule: the
plan's, with pass times from the dry run, or a run's, with measured pass times. All charts of a figure share one time
scale, so a shorter schedule looks shorter. Colours show the kind of a pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from shardwise.core.pipeline.schedule import Played
from shardwise.report.pictures import BACKGROUND, INK, SHADE, STYLE, WIDE_INCHES, on

SHOWN_LANES = 16
"""Most ranks in a chart; with more, the first and the last ones are drawn."""

PASS_COLOURS: dict[str, tuple[str, str]] = {
    "F": ("forward", "#47639c"),
    "B": ("backward", "#eda83e"),
    "I": ("backward, inputs", "#eda83e"),
    "W": ("backward, weights", "#1f8a5b"),
}
"""Kind of a pass -> its name and colour."""

NARROWEST = 0.04
"""Smallest width in inches of a bar with an edge."""

HATCHES = {"I": "////", "W": "\\\\\\\\"}
"""Hatches for halves of backward passes, which do not depend on colour vision."""


@dataclass(frozen=True)
class Chart:
    """One schedule to draw: its name, the times of its passes, and a note.

    ``micro_batches`` is the number per optimizer step, after which their numbers start again.
    """

    name: str
    played: Played
    micro_batches: int
    note: str = ""


@matplotlib.rc_context(STYLE)
def gantt(
    charts: Sequence[Chart],
    unit: str,
    width: float = WIDE_INCHES,
    shared: bool = True,
    most: int = SHOWN_LANES,
    until: float = math.inf,
) -> Figure:
    """Draw the schedules below each other.

    Args:
        unit: name of the time unit.
        shared: whether all charts share one time scale.
        most: most ranks in a chart; with more, the first and the last ones are drawn.
        until: latest end of the time scale.
    """
    lanes = [_lanes_shown(len(chart.played.spans), most) for chart in charts]
    words = [_gantt_title(chart, width) for chart in charts]
    tall = [0.32 + 0.16 * len(title.splitlines()) + (0 if shared else 0.4) for title in words]
    heights = [space + 0.24 * len(rows) for space, rows in zip(tall, lanes, strict=True)]
    figure = Figure(figsize=(width, 0.75 + sum(heights)), layout="constrained")
    every = figure.subplots(len(charts), 1, squeeze=False, sharex=shared, height_ratios=heights)[:, 0]
    longest = min(until, max(chart.played.end for chart in charts))
    for axes, chart, rows, title in zip(every, charts, lanes, words, strict=True):
        axes.set_title(title, loc="left", color=INK, fontsize=9)
        end = longest if shared else chart.played.end
        _draw_gantt(axes, chart, rows, end, width)
        if not shared or axes is every[-1]:
            axes.set_xlabel(unit)
    kinds = {action.kind for chart in charts for spans in chart.played.spans for action, _, _ in spans}
    handles = [_patch(kind) for kind in "FBIW" if kind in kinds]
    columns = len(handles) if width >= WIDE_INCHES else 2
    figure.legend(
        handles=handles, loc="outside upper left", ncols=columns, handlelength=1.6, handleheight=1.1
    )
    return figure


def _patch(kind: str) -> Patch:
    """A kind of pass in the legend."""
    name, colour = PASS_COLOURS[kind]
    return Patch(facecolor=colour, edgecolor=BACKGROUND, linewidth=0.5, hatch=HATCHES.get(kind), label=name)


def _gantt_title(chart: Chart, width: float) -> str:
    """The name and the note, on two lines if the picture is narrow."""
    return f"{chart.name}{'   ' if width >= WIDE_INCHES else chr(10)}{chart.note}".rstrip()


def _lanes_shown(ranks: int, most: int) -> list[int]:
    """The ranks that get a row."""
    if ranks <= most:
        return list(range(ranks))
    half = most // 2
    return [*range(half), *range(ranks - half, ranks)]


def _pass_bar(lane: int, start: float, stop: float, **how: Any) -> Rectangle:
    return Rectangle((start, lane - 0.43), stop - start, 0.86, **how)


def _draw_gantt(axes: Any, chart: Chart, rows: Sequence[int], end: float, width: float) -> None:
    ranks = len(chart.played.spans)
    inch = 0.85 * width / end
    for lane in range(len(rows)):
        axes.add_patch(_pass_bar(lane, 0, end, facecolor=SHADE, linewidth=0, zorder=-1))
    for lane, rank in enumerate(rows):
        for action, start, stop in chart.played.spans[rank]:
            colour = PASS_COLOURS[action.kind][1]
            hatch = HATCHES.get(action.kind)
            if start >= end:
                continue
            edge = 0.5 if (stop - start) * inch > NARROWEST else 0.0
            axes.add_patch(
                _pass_bar(
                    lane, start, stop, facecolor=colour, edgecolor=BACKGROUND, linewidth=edge, hatch=hatch
                )
            )
            # One prime for each earlier stage of the same rank.
            number = str(action.micro_batch % chart.micro_batches + 1) + "′" * (action.stage // ranks)
            if stop <= end and (stop - start) * inch > 0.062 * len(number) + 0.015:
                # A background for the number on a hatched bar.
                box = {"facecolor": colour, "edgecolor": "none", "pad": 0.6} if hatch else None
                how = {"color": on(colour), "fontsize": 7, "bbox": box}
                axes.text((start + stop) / 2, lane + 0.03, number, ha="center", va="center", **how)
    axes.set_yticks(range(len(rows)), [f"stage {rank}" for rank in rows], color=INK, fontsize=8)
    axes.set_xlim(0, end)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
