"""Compute-optimal sizes read from training curves: the envelope, and parabolas at equal FLOPs.

Approaches 1 and 2 of Hoffmann et al. 2022 (arXiv 2203.15556, sections 3.1 and 3.2). A curve is the ends of all runs of
one size, such as the branches of one WSD run. Between its ends, log loss is interpolated on log FLOPs. Neither needs
the form of the law, so both check a fit of L(N, D).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.plugins.scaling.fit import TrainedPoint
from shardwise.plugins.scaling.law import log_log_fit

SLICES = 7
ENVELOPE_POINTS = 200


@dataclass(frozen=True)
class SizeCurve:
    """Losses of one size by FLOPs (6 N D), in ascending order."""

    parameters: float
    flops: NDArray[np.float64]
    losses: NDArray[np.float64]

    def covers(self, flops: float) -> bool:
        return bool(self.flops[0] <= flops <= self.flops[-1])

    def loss_at(self, flops: float) -> float:
        return float(np.exp(np.interp(np.log(flops), np.log(self.flops), np.log(self.losses))))


@dataclass(frozen=True)
class IsoFlop:
    """Losses of several sizes at equal FLOPs, and the parabola through them.

    Attributes:
        sizes: pairs of parameters and loss.
        parabola: coefficients of log loss in log parameters, highest power first.
        optimum: parameters and loss at the parabola's lowest point; None if it is not between the sizes.
    """

    flops: float
    sizes: tuple[tuple[float, float], ...]
    parabola: tuple[float, float, float]
    optimum: tuple[float, float] | None


def curves(points: Sequence[TrainedPoint]) -> list[SizeCurve]:
    """One curve for each size with at least two ends, by size."""
    by_size = defaultdict[float, list[TrainedPoint]](list)
    for point in points:
        by_size[point.parameters].append(point)
    lines = []
    for parameters, ends in sorted(by_size.items()):
        ends.sort(key=lambda end: end.tokens)
        if len({end.tokens for end in ends}) > 1:
            flops, losses = zip(*((end.flops, end.loss) for end in ends), strict=True)
            lines.append(SizeCurve(parameters, np.array(flops), np.array(losses)))
    return lines


def isoflops(points: Sequence[TrainedPoint], slices: int = SLICES) -> list[IsoFlop]:
    """Parabolas at budgets that at least three sizes cover, in ascending order (approach 2)."""
    lines = curves(points)
    # A fine grid finds the budgets that three sizes cover; a few of these, evenly spaced, get a parabola.
    grid = _budgets(lines, 40 * slices)
    budgets = [flops for flops in grid if len([line for line in lines if line.covers(flops)]) > 2]
    if not budgets:
        return []
    selected = np.unique(np.linspace(0, len(budgets) - 1, slices).round().astype(int))
    return [_parabola(budgets[index], lines) for index in selected]


def _parabola(flops: float, lines: Sequence[SizeCurve]) -> IsoFlop:
    sizes = tuple((line.parameters, line.loss_at(flops)) for line in lines if line.covers(flops))
    x, y = np.log(np.array(sizes)).T
    # Centred, since the powers of log N from a narrow range are nearly collinear.
    centre = x.mean()
    a, b, c = (float(value) for value in np.polyfit(x - centre, y, 2))
    optimum = None
    if a > 0:  # open at the top, so the vertex is a minimum
        vertex = centre - b / (2 * a)
        if x[0] <= vertex <= x[-1]:
            optimum = float(np.exp(vertex)), float(np.exp(c - b * b / (4 * a)))
    # The same polynomial in x instead of x - centre.
    parabola = a, b - 2 * a * float(centre), c - b * float(centre) + a * float(centre) ** 2
    return IsoFlop(flops, sizes, parabola, optimum)


def envelope(points: Sequence[TrainedPoint]) -> list[tuple[float, float, float]]:
    """The lowest loss of any size at each of many budgets: FLOPs, parameters, loss (approach 1)."""
    lines = curves(points)
    minima = []
    for flops in _budgets(lines, ENVELOPE_POINTS):
        loss, parameters = min((line.loss_at(flops), line.parameters) for line in lines if line.covers(flops))
        minima.append((flops, parameters, loss))
    return minima


def exponent(pairs: Sequence[tuple[float, float]]) -> float | None:
    """a in N ~ C^a from pairs of FLOPs and optimal parameters; None for fewer than two sizes."""
    if len({parameters for _, parameters in pairs}) < 2:
        return None
    return log_log_fit([flops for flops, _ in pairs], [parameters for _, parameters in pairs])[1]


def _budgets(lines: Sequence[SizeCurve], number: int) -> list[float]:
    """Budgets on a logarithmic scale that at least one curve covers."""
    if not lines:
        return []
    low = min(line.flops[0] for line in lines)
    high = max(line.flops[-1] for line in lines)
    grid = np.geomspace(low, high, number)
    return [float(flops) for flops in grid if any(line.covers(flops) for line in lines)]
