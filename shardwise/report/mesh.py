"""Picture of the mesh: one box per rank, in the order of ranks within nodes.

A box shows the part of the model on a rank (pipeline stage and tensor slice), its shard of that state, and its data
(samples, and part of each sequence). Boxes of one colour hold the same layers. Boxes with an equal last line read the
same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from shardwise.core.strategy import Layout
from shardwise.report.pictures import LINE, MUTED, STYLE, WIDE_INCHES, on

SHOWN_ROWS = 4
"""Most rows of a picture; with more, the first rows of the first and the last pipeline stages are drawn."""

HUES = ("#47639c", "#eda83e", "#1f8a5b", "#a777d8", "#6cc8ee", "#bd2f3d", "#93cc9c", "#727882")
"""Colours of pipeline stages, cyclic."""


def held(layout: Layout, rank: int) -> list[str]:
    """The state and the data of a rank, one line each; axes of degree 1 are left out."""

    divided = [(axis, degree) for axis, degree in layout.axes if degree > 1]
    divided.sort(key=lambda pair: pair[0].tokens)
    return [f"{axis.piece} {layout.coordinate(rank, axis) + 1}/{degree}" for axis, degree in divided] or [
        "everything"
    ]


@matplotlib.rc_context(STYLE)
def mesh(layout: Layout, devices_per_node: int, width: float = WIDE_INCHES) -> Figure:
    """Draw the state and data of every rank, a row of boxes for each node (or part of one)."""
    columns = min(devices_per_node, layout.world_size, 8 if width >= WIDE_INCHES else 2)
    rows = _shown_rows(layout, columns, devices_per_node)
    ranks = [rank for row in rows for rank in row]
    tall = 0.4 + 0.15 * max(len(held(layout, rank)) for rank in ranks)
    figure = Figure(figsize=(width, 0.35 + tall * len(rows)), layout="constrained")
    axes = figure.subplots()
    for row, members in enumerate(rows):
        node = members[0] // devices_per_node
        axes.text(-0.06, row + 0.45, f"node {node:,}", ha="right", va="center", color=MUTED, fontsize=8)
        for rank in members:
            _box(axes, layout, rank, rank - members[0], row)
    missing = layout.world_size - len(ranks)
    if missing > 0:
        axes.text(0, len(rows) + 0.2, f"and {missing:,} more ranks", color=MUTED, fontsize=8)
    axes.set_xlim(-0.5, columns)
    axes.set_ylim(len(rows) + (0.4 if missing > 0 else 0), -0.1)
    axes.set_axis_off()
    return figure


def _shown_rows(layout: Layout, columns: int, in_node: int) -> list[range]:
    """Rows of neighbouring ranks: all, else the first of every stage, else those of the first and last stages."""
    world = layout.world_size
    stages = layout.ranks(lambda axis: axis.stages)
    stride = world // stages  # axes of stages are the outermost
    every = list(islice(_rows_of_ranks(range(world), columns, in_node, world), SHOWN_ROWS + 1))
    if len(every) <= SHOWN_ROWS:
        return every
    stage_rows: list[range] = []
    for stage in range(stages):
        members = range(stage * stride, (stage + 1) * stride)
        stage_rows += islice(_rows_of_ranks(members, columns, in_node, world), max(1, SHOWN_ROWS // stages))
    # Two stages can share a row; draw each row once.
    rows = list(dict.fromkeys(stage_rows))
    half = SHOWN_ROWS // 2
    return rows if len(rows) <= SHOWN_ROWS else [*rows[:half], *rows[-half:]]


def _rows_of_ranks(ranks: range, columns: int, in_node: int, world: int) -> Iterator[range]:
    """The rows of ``ranks``. A row is part of one node; a node's first row starts with its first rank."""
    at = ranks.start
    while at < ranks.stop:
        node = at // in_node * in_node
        start = node + (at - node) // columns * columns
        at = min(start + columns, node + in_node, world)
        yield range(start, at)


def _pipeline_stage(layout: Layout, rank: int) -> int:
    return layout.number(rank, lambda axis: axis.stages)


def _box(axes: Any, layout: Layout, rank: int, column: int, row: int) -> None:
    colour = HUES[_pipeline_stage(layout, rank) % len(HUES)]
    shape = FancyBboxPatch(
        (column + 0.04, row + 0.04),
        0.92,
        0.86,
        boxstyle="round,pad=0,rounding_size=0.06",
        facecolor=colour,
        edgecolor=LINE,
        linewidth=0.8,
    )
    axes.add_patch(shape)
    text = "\n".join([f"rank {rank}", *held(layout, rank)])
    axes.text(column + 0.5, row + 0.47, text, ha="center", va="center", color=on(colour), fontsize=7)
