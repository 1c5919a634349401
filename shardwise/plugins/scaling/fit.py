"""Fitting L(N, D) = E + A / N^alpha + B / D^beta to runs, with bootstrap intervals.

The objective is that of Hoffmann et al. 2022 (arXiv 2203.15556, equation 3): the sum over runs of the Huber loss, with
delta = 1e-3, of log L(N, D) - log(loss), from a grid of starts. A sum, not a mean: with a mean the optimizer stops too
early, which is one fault that Besiroglu et al. 2024 (arXiv 2404.10102) found in the published coefficients.

L-BFGS is replaced by Levenberg-Marquardt on reweighted squares, whose fixed points are the minima of the same
objective. It takes all starts, and then all bootstrap draws, as one batch: a thousand draws in about a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from shardwise.core.errors import DataError
from shardwise.plugins.scaling.law import FLOPS_PER_PARAMETER, FittedRange, ParametricLaw

DELTA = 1e-3
"""Huber's delta, on log loss."""
DRAWS = 1000
FEWEST_SIZES = 3
"""Distinct values of N, and of D, that five coefficients need."""
_ITERATIONS = 400
_CONVERGED = 1e-12
"""Relative decrease of the objective in one iteration."""
_FLATTEST, _STEEPEST = 0.01, 5.0
"""Least and greatest exponent. A flatter term falls by a tenth over five orders of magnitude, and so is a part of E; a
steeper one is a wall between two runs. The runs determine neither."""
_EXPONENTS = (0.1, 0.25, 0.4, 0.7, 1.2)
_FLOORS = (0.2, 0.6, 0.9)
"""Starts of E, as a share of the lowest loss."""
_SHARES = (0.3, 0.7)
"""Starts of A / N^alpha, as a share of the median loss above E."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class TrainedPoint:
    """A run at its end: parameters, tokens, loss in nats per token, and the run's name."""

    parameters: float
    tokens: float
    loss: float
    run: str = ""

    @property
    def flops(self) -> float:
        """6 N D."""
        return FLOPS_PER_PARAMETER * self.parameters * self.tokens


@dataclass(frozen=True)
class Fit:
    """A fitted law and its bootstrap draws.

    Attributes:
        law: the fit to all points, with 95 % intervals.
        draws: one law for each bootstrap sample of the points.
        residual: median of |log loss predicted - log loss measured|.
    """

    law: ParametricLaw
    draws: tuple[ParametricLaw, ...]
    points: tuple[TrainedPoint, ...]
    residual: float

    def loss_interval(self, parameters: float, tokens: float) -> tuple[float, float]:
        """95 % interval of the predicted loss."""
        return interval([draw.loss(parameters, tokens) for draw in self.draws])

    def optimum_interval(self, flops: float) -> tuple[float, float]:
        """95 % interval of the compute-optimal number of parameters."""
        return interval([draw.optimum(flops).parameters for draw in self.draws])

    @property
    def undetermined(self) -> tuple[str, ...]:
        """Exponents whose 95 % interval reaches a limit of the search."""
        # The search clips exponents, so one at its limit is equal to it.
        intervals = ((key, self.law.intervals.get(key, ())) for key in ("alpha", "beta"))
        return tuple(key for key, ends in intervals if _FLATTEST in ends or _STEEPEST in ends)

    def exponent_interval(self) -> tuple[float, float]:
        """95 % interval of a in N ~ C^a."""
        return interval([draw.exponent for draw in self.draws])


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 2.5th and the 97.5th percentile."""
    low, high = np.percentile(np.asarray(values, dtype=np.float64), (2.5, 97.5))
    return float(low), float(high)


def fit_law(points: Sequence[TrainedPoint], *, draws: int = DRAWS, seed: int = 0, name: str = "fit") -> Fit:
    """Fit a law to the ends of runs; the bootstrap draws points with replacement.

    Raises:
        DataError: there are too few sizes, token counts or points for five coefficients, or an exponent of the best
            fit is the least or the greatest.
    """
    _refuse_too_few(points)
    problem = _Problem(
        np.log([point.parameters for point in points]),
        np.log([point.tokens for point in points]),
        np.log([point.loss for point in points]),
    )
    each_once = np.ones((1, len(points)))
    minima, objectives = problem.solve(problem.starts(), each_once)
    best = minima[np.argmin(objectives)]
    _refuse_limits(*best[3:])
    # A sample with replacement is a number of times for each point, (draws, P), so no points are copied.
    counts = np.random.default_rng(seed).multinomial(len(points), [1 / len(points)] * len(points), size=draws)
    # All draws start from the best fit: the grid has 150 starts, which each draw would have to search.
    drawn, _ = problem.solve(np.tile(best, (draws, 1)), counts.astype(np.float64))
    laws = tuple(problem.law(theta, name) for theta in drawn)
    residual = float(np.median(np.abs(problem.residuals(best[None])[0])))
    return Fit(_with_intervals(problem.law(best, name), laws, points), laws, tuple(points), residual)


def _refuse_too_few(points: Sequence[TrainedPoint]) -> None:
    sizes = len({point.parameters for point in points})
    lengths = len({point.tokens for point in points})
    if min(sizes, lengths) >= FEWEST_SIZES and len(points) > 5:
        return
    raise DataError(
        "too few runs to fit a law",
        where="shardwise fit",
        why=f"{len(points)} points with {sizes} sizes and {lengths} numbers of tokens;"
        f" at least 6, {FEWEST_SIZES} and {FEWEST_SIZES} are needed",
        fix="train more sizes, and branches of WSD runs for more numbers of tokens",
    )


def _refuse_limits(alpha: float, beta: float) -> None:
    for exponent, quantity in ((alpha, "parameters"), (beta, "tokens")):
        if exponent in (_FLATTEST, _STEEPEST):
            raise DataError(
                "the runs do not determine a law",
                where="shardwise fit",
                why=f"the best fit has the exponent {exponent:g} for {quantity}, the limit of the search",
                fix="train each size to several numbers of tokens, and compare runs of one recipe",
            )


def _with_intervals(
    law: ParametricLaw, draws: Sequence[ParametricLaw], points: Sequence[TrainedPoint]
) -> ParametricLaw:
    keys = ("E", "A", "B", "alpha", "beta")
    ranges = {
        quantity: (
            float(min(getattr(point, quantity) for point in points)),
            float(max(getattr(point, quantity) for point in points)),
        )
        for quantity in ("parameters", "tokens", "flops")
    }
    runs = len({point.run for point in points})
    return ParametricLaw(
        law.name,
        f"shardwise fit: {len(points)} points of {runs} runs",
        law.E,
        law.A,
        law.B,
        law.alpha,
        law.beta,
        fitted=FittedRange(**ranges),
        intervals={key: interval([getattr(draw, key) for draw in draws]) for key in keys} if draws else {},
    )


class _Problem:
    """The points, and batches of coefficients theta: log A', log B', log E, alpha, beta, where the logarithms of N and
    D are centred, so that the five columns of the Jacobian are not nearly collinear. Shapes: S coefficients, P points.
    """

    def __init__(self, log_n: Array, log_d: Array, log_loss: Array) -> None:
        self._centre = float(log_n.mean()), float(log_d.mean())
        self._n, self._d = log_n - self._centre[0], log_d - self._centre[1]
        self._loss = log_loss

    def starts(self) -> Array:
        """A grid over both exponents, E and the share of the loss that N explains: (S, 5)."""
        lowest = float(np.exp(self._loss.min()))
        median = float(np.exp(np.median(self._loss)))
        rows = []
        for alpha, beta, floor, share in product(_EXPONENTS, _EXPONENTS, _FLOORS, _SHARES):
            above = max(median - floor * lowest, 1e-6 * median)
            rows.append((share * above, (1 - share) * above, floor * lowest, alpha, beta))
        grid = np.array(rows)
        # Logarithms keep A, B and E positive without constraints.
        grid[:, :3] = np.log(grid[:, :3])
        return grid

    def law(self, theta: Array, name: str) -> ParametricLaw:
        a, b, e, alpha, beta = (float(value) for value in theta)
        # A' belongs to the centred log N: A / N^alpha = A' / exp(alpha (log N - centre)).
        scale_n = math.exp(a + alpha * self._centre[0])
        scale_d = math.exp(b + beta * self._centre[1])
        return ParametricLaw(name, "", math.exp(e), scale_n, scale_d, alpha, beta)

    def residuals(self, theta: Array) -> Array:
        """log L(N, D) - log loss: (S, P)."""
        return np.logaddexp.reduce(self._terms(theta), axis=0) - self._loss

    def _terms(self, theta: Array) -> Array:
        """Logarithms of the three terms of L: (3, S, P)."""
        a, b, e, alpha, beta = (column[:, None] for column in theta.T)
        floor = np.broadcast_to(e, (len(theta), len(self._n)))
        return np.stack([a - alpha * self._n, b - beta * self._d, floor])

    def _jacobian(self, theta: Array) -> Array:
        """Derivatives of the residuals: (S, P, 5)."""
        terms = self._terms(theta)
        # Each term's share of the loss, which is the derivative of log L by the logarithm of the term.
        of_n, of_d, of_e = np.exp(terms - np.logaddexp.reduce(terms, axis=0))
        return np.stack([of_n, of_d, of_e, -of_n * self._n, -of_d * self._d], axis=-1)

    def solve(self, theta: Array, counts: Array) -> tuple[Array, Array]:
        """Minima from each start, and their objectives.

        Args:
            theta: starts (S, 5).
            counts: how often each point counts (S, P), or (1, P) for all starts.
        """
        theta = theta.copy()
        damping = np.full(len(theta), 1e-3)
        objective = _huber(self.residuals(theta), counts)
        active = np.ones(len(theta), dtype=bool)
        for _ in range(_ITERATIONS):
            rows = np.flatnonzero(active)  # the starts that have not converged
            if not len(rows):
                break
            row_counts = counts if len(counts) == 1 else counts[rows]
            proposed = theta[rows] + self._step(theta[rows], row_counts, damping[rows])
            proposed[:, 3:] = proposed[:, 3:].clip(_FLATTEST, _STEEPEST)
            # A step too long may overflow; it is refused below, and the damping grows.
            with np.errstate(over="ignore", invalid="ignore"):
                new = _huber(self.residuals(proposed), row_counts)
            better = np.isfinite(new) & (new <= objective[rows])
            gain = objective[rows] - new
            done = (better & (gain <= _CONVERGED * objective[rows])) | (damping[rows] > 1e12)
            theta[rows[better]] = proposed[better]
            objective[rows[better]] = new[better]
            # Less damping is nearer to Gauss-Newton, more is a shorter step down the gradient.
            damping[rows] = np.where(better, np.maximum(damping[rows] / 5, 1e-12), damping[rows] * 4)
            active[rows[done]] = False
        return theta, objective

    def _step(self, theta: Array, counts: Array, damping: Array) -> Array:
        """Damped Gauss-Newton on squares that touch the Huber loss from above: (S, 5)."""
        residuals = self.residuals(theta)
        jacobian = self._jacobian(theta)
        # Huber's derivative over the residual: 1 within delta, and delta / |r| outside.
        weights = counts * np.minimum(1.0, DELTA / np.maximum(np.abs(residuals), 1e-300))
        weighted = jacobian * weights[..., None]
        hessian = np.einsum("spi,spj->sij", weighted, jacobian)
        diagonal = np.einsum("sii->si", hessian)
        # A term without a share in the loss has a row of zeros, and ``solve`` takes no singular matrix.
        floor = 1e-15 * diagonal.max(axis=1, keepdims=True) + 1e-300
        damped = hessian + np.eye(5) * (damping[:, None] * diagonal + floor)[:, None, :]
        gradient = np.einsum("spi,sp->si", weighted, residuals)
        step: Array = -np.linalg.solve(damped, gradient[..., None])[..., 0]
        return np.clip(step, -2.0, 2.0)


def _huber(residuals: Array, counts: Array) -> Array:
    """Sums of the Huber loss over points: (S,)."""
    size = np.abs(residuals)
    losses = np.where(size <= DELTA, 0.5 * residuals**2, DELTA * (size - 0.5 * DELTA))
    return (counts * losses).sum(axis=1)
