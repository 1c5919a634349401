"""The picture of blocks over time: which block runs forward, again and backward, and the activations that it keeps.

One row for each block, the first at the bottom; time is in the order of the dry run's events. Kept activations are the
background of a row, darker where the block keeps more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator

from shardwise.core.block_times import BlockTimes
from shardwise.core.units import format_bytes, format_percent
from shardwise.report.notation import COLOURS
from shardwise.report.pictures import INK, MUTED, SHADE, STYLE, WIDE_INCHES

RUNS = {
    "forward": ("forward", COLOURS["parameters"]),
    "again": ("forward again", COLOURS["temporaries"]),
    "backward": ("backward", COLOURS["gradients"]),
}
"""Kind of a run -> its name and colour."""

LEVELS = 5
"""Shades of kept activations."""

_KEPT = COLOURS["activations"]

Box = tuple[float, float, float, float]
"""Left, bottom, right, top."""


@matplotlib.rc_context(STYLE)
def blocks_through_time(every: Mapping[str, BlockTimes], width: float = WIDE_INCHES) -> Figure:
    """A chart for each named one; all have one scale of time and of kept bytes.

    One that takes far longer than all others is cut off, and its title says so.
    """
    columns = 2 if len(every) > 1 and width >= WIDE_INCHES else 1
    rows = -(-len(every) // columns)
    tall = [0.65 + min(1.9, 0.75 + 0.035 * times.blocks) for times in every.values()]
    figure = Figure(figsize=(width, 0.5 + rows * max(tall)), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=len(every) > 1).ravel()
    most = max((size for times in every.values() for *_, size in times.kept), default=1)
    ends = sorted(times.end for times in every.values())
    until = min(ends[-1], 1.3 * ends[-2]) if len(ends) > 1 else ends[-1]
    for panel, (name, times) in zip(axes, every.items(), strict=False):
        _draw_blocks(panel, times, most, until)
        if name:
            panel.set_title(_blocks_title(name, times, until, width), loc="left", color=INK, fontsize=9)
    for panel in axes[len(every) :]:
        panel.set_visible(False)
    seen = {kind for times in every.values() for _, kind, _, _ in times.runs}
    handles = [Patch(color=colour, label=name) for kind, (name, colour) in RUNS.items() if kind in seen]
    handles.append(Patch(color=_KEPT, alpha=0.55, label="activations kept"))
    wide = len(handles) if width >= WIDE_INCHES else 2
    figure.legend(handles=handles, loc="outside upper left", ncols=wide, handlelength=1, handleheight=1)
    return figure


def _blocks_title(name: str, times: BlockTimes, until: float, width: float) -> str:
    runs = times.forward_runs
    note = f"{runs:.3g} {'run' if runs == 1 else 'runs'} forward per block · keeps {format_bytes(times.most_kept)}"
    if times.end > until:
        note += f" · the first {format_percent(until / times.end)}"
    return f"{name}{'   ' if width >= WIDE_INCHES else chr(10)}{note}"


def _draw_blocks(axes: Any, times: BlockTimes, most: int, until: float) -> None:
    shades: dict[int, list[Box]] = {}
    for block, begin, end, size in times.kept:
        shades.setdefault(max(1, round(LEVELS * size / most)), []).append(
            (begin, block - 0.46, end, block + 0.46)
        )
    for level, boxes in shades.items():
        _add_boxes(axes, boxes, facecolor=_KEPT, alpha=0.12 + 0.6 * level / LEVELS)
    shortest = until / 400
    for kind, (_, colour) in RUNS.items():
        runs = [
            (b, block - 0.3, max(e, b + shortest), block + 0.3) for block, k, b, e in times.runs if k == kind
        ]
        _add_boxes(axes, runs, facecolor=colour)
    axes.set_xlim(0, until)
    axes.set_ylim(-0.7, times.blocks - 0.3)
    axes.set_xticks([])
    axes.set_facecolor(SHADE)
    axes.grid(False)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    axes.set_ylabel("block", color=MUTED)
    axes.spines["bottom"].set_visible(False)


def _add_boxes(axes: Any, boxes: Sequence[Box], **how: Any) -> None:
    """All boxes as one path, which takes a tenth of the space of single ones."""
    if not boxes:
        return
    points, codes = [], []
    for left, bottom, right, top in boxes:
        points += [(left, bottom), (right, bottom), (right, top), (left, top), (left, bottom)]
        codes += [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    axes.add_patch(PathPatch(Path(points, codes), linewidth=0, **how))
