"""The picture of a fitted scaling law: parabolas at equal FLOPs, and training curves with their envelope."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from shardwise.core.units import format_count
from shardwise.plugins.scaling.fit import TrainedPoint
from shardwise.plugins.scaling.isoflop import curves, envelope, isoflops
from shardwise.plugins.scaling.law import Law
from shardwise.report.pictures import ACCENT, INK, MUTED, STYLE, WIDE_INCHES


@matplotlib.rc_context(STYLE)
def scaling_picture(points: Sequence[TrainedPoint], law: Law, width: float = WIDE_INCHES) -> Figure:
    """Left: loss by size at equal FLOPs. Right: loss by FLOPs for each size, the envelope, and the law's optimum."""
    figure = Figure(figsize=(width, 0.42 * width), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _parabolas(left, points)
    _curves(right, points, law)
    for axes, label in ((left, "parameters"), (right, "training FLOPs (6ND)")):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(label)
        axes.yaxis.set_major_formatter("{x:.2f}")
        axes.yaxis.set_minor_formatter("{x:.2f}")
    left.set_ylabel("loss, nats per token")
    return figure


def _parabolas(axes: Any, points: Sequence[TrainedPoint]) -> None:
    budgets = isoflops(points)
    colours = _colours(len(budgets))
    for budget, colour in zip(budgets, colours, strict=True):
        sizes, losses = zip(*budget.sizes, strict=True)
        axes.plot(sizes, losses, "o", color=colour, markersize=4, label=f"{budget.flops:.1e} FLOPs")
        grid = np.geomspace(sizes[0], sizes[-1], 60)
        axes.plot(grid, np.exp(np.polyval(budget.parabola, np.log(grid))), color=colour, linewidth=1.2)
        if budget.optimum is not None:
            axes.plot(*budget.optimum, "*", color=INK, markersize=9)
    axes.set_title("IsoFLOP", loc="left", color=INK)
    if budgets:
        axes.legend(fontsize=7)


def _curves(axes: Any, points: Sequence[TrainedPoint], law: Law) -> None:
    lines = curves(points)
    for line, colour in zip(lines, _colours(len(lines)), strict=True):
        name = f"{format_count(line.parameters)} parameters"
        axes.plot(line.flops, line.losses, "o-", color=colour, markersize=3, linewidth=1.2, label=name)
    if lowest := envelope(points):
        flops = [point[0] for point in lowest]
        axes.plot(
            flops, [point[2] for point in lowest], color=INK, linewidth=2.2, alpha=0.35, label="envelope"
        )
        best = [law.optimum(budget) for budget in flops]
        losses = [law.loss(optimum.parameters, optimum.tokens) for optimum in best]
        axes.plot(flops, losses, "--", color=ACCENT, linewidth=1.4, label="law, compute-optimal")
    else:
        axes.plot([point.flops for point in points], [point.loss for point in points], "o", color=MUTED)
    axes.set_title("Training curves", loc="left", color=INK)
    axes.legend(fontsize=7)


def _colours(number: int) -> list[Any]:
    """From light to dark, all of them visible on white."""
    return [
        matplotlib.colormaps["viridis"](0.85 * (1 - index / max(1, number - 1))) for index in range(number)
    ]
