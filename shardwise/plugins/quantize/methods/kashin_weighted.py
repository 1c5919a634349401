"""Codes of Kashin's factors for the output error: coordinate descent under the Hessian of the layer's inputs.

The error of the layer's outputs is tr(E H Eᵀ) with E = W - U - Q V. Error feedback as in GPTQ needs a factor whose
columns are rounded once, in order. Here each column of U is corrected later by all of V, so columns are visited again
and again: a column of U moves to its best value given everything else, then each column of V does, for which H is
turned into V's basis, Q H Qᵀ. The gradient E H carries every change to the columns that follow, at once.

The first sweeps are soft, as in ``annealed``: a column takes the mean of its values under exp(-error / 2T), T low.
T is relative to the geometric mean of the Hessian's eigenvalues, the scale of the smallest possible error. Then hard
sweeps, each with a least-squares fit of the peaks of both factors under H.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.plugins.quantize.methods.gptq import inverse_factor
from shardwise.plugins.quantize.methods.kashin_codes import Pair, nearest_codes, signs_of
from shardwise.runtime.quantization.kashin import table_of
from shardwise.runtime.quantization.orthogonal import Basis

FIRST_DESCENT_TEMPERATURE, LAST_DESCENT_TEMPERATURE = 0.1, 0.006
METRIC_DAMPING = 0.01
METRIC_RIDGE = 1e-4
EQUAL = 1e-3
"""Differences from the identity that no weighting is worth."""
DESCENT_BLOCK = 64
"""Columns whose changes reach later blocks as one product."""


@dataclass(frozen=True)
class Sweeps:
    """How often columns are visited: ``soft`` sweeps, then ``hard`` ones.

    Attributes:
        columns: columns of each block that move; None for all. A dry run moves one.
    """

    soft: int = 6
    hard: int = 2
    columns: int | None = None


ALL_SWEEPS = Sweeps()


@dataclass(frozen=True)
class HessianMetric:
    """The damped Hessian in both bases, with mean diagonal 1.

    Attributes:
        sides: H for U and Q H Qᵀ for V, [in, in]; rows that Q mixes from the left do not change it.
        smallest: the geometric mean of H's eigenvalues.
    """

    sides: tuple[Tensor, Tensor]
    smallest: float


def metric_of(hessian: Tensor, inner: Basis) -> HessianMetric | None:
    """The metric of inputs with a Hessian [in, in] in the basis of the target.

    None for inputs of zeros, and for independent channels of equal size: the codes are searched for these already.
    Raises NotConverged for a Hessian without a Cholesky factor.
    """
    mean = hessian.diagonal().mean()
    if not bool(mean > 0):  # in a dry run conditions hold, so this one and the last lead to the sweeps
        return None
    whole = hessian / mean + METRIC_DAMPING * torch.eye(
        hessian.shape[0], dtype=hessian.dtype, device=hessian.device
    )
    # UᵀU = H⁻¹ makes the determinant of H the product of U's diagonal to the power -2: no eigenvalues are needed.
    smallest = float(torch.exp(-2 * inverse_factor(whole).diagonal().log().mean()))
    right = Basis(inner.right)
    # Q H Qᵀ, by the map of rows: H Q, transposed, and once more. Q and H are symmetric.
    metric = HessianMetric((whole, right(right(whole).T.contiguous())), smallest)
    equal = (1 + METRIC_DAMPING) * torch.eye(hessian.shape[0], dtype=hessian.dtype, device=hessian.device)
    return metric if bool(((whole - equal).abs() >= EQUAL).any()) else None


def weighted(target: Tensor, inner: Basis, metric: HessianMetric, pair: Pair, sweeps: Sweeps) -> Pair:
    """Improve codes of a target [rows, in] for the error of the layer's outputs."""
    means = [pair.values(0), pair.values(1)]
    for step in range(sweeps.soft):
        progress = step / max(sweeps.soft - 1, 1)
        temperature = (
            metric.smallest
            * FIRST_DESCENT_TEMPERATURE
            * (LAST_DESCENT_TEMPERATURE / FIRST_DESCENT_TEMPERATURE) ** progress
        )
        for side in (0, 1):
            table = table_of(pair.peaks[side])
            means[side] = _descend(target, inner, means, metric, side, table, temperature, sweeps.columns)
    for _ in range(sweeps.hard):
        for side in (0, 1):
            table = table_of(pair.peaks[side])
            means[side] = _descend(target, inner, means, metric, side, table, None, sweeps.columns)
            pair.codes[side] = nearest_codes(means[side], pair.peaks[side])
        # Peaks of both factors at once, after both have new codes. The next sweep starts from the exact values.
        pair.peaks = _fitted(target, inner, metric.sides[0], pair)
        means = [pair.values(0), pair.values(1)]
    return pair


def _descend(
    target: Tensor,
    inner: Basis,
    means: list[Tensor],
    metric: HessianMetric,
    side: int,
    table: Tensor,
    temperature: float | None,
    steps: int | None = None,
) -> Tensor:
    """Values [rows, in] of one side after each column moved to its best value given the others, in order.

    ``steps`` is ``Sweeps.columns``. Without a temperature the sweep is hard.
    """
    hessian = metric.sides[side]
    error = target - means[0] - inner(means[1])
    if side == 1:
        error = inner(error)  # in V's basis
    # Transposed, [in, rows], so that a column of the factor is contiguous memory.
    gradient = (error @ hessian).T.contiguous()
    columns = means[side].T.contiguous()
    table = table.T.contiguous()
    curvatures = hessian.diagonal()
    for start in range(0, len(columns), DESCENT_BLOCK):
        stop = min(start + DESCENT_BLOCK, len(columns))
        before = columns[start:stop].clone()
        inside = hessian[start:stop, start:stop]
        for column in range(start, stop)[:steps]:
            optimum = columns[column] + gradient[column] / curvatures[column]
            # The output error is the curvature times the squared distance, so the temperature is divided by it.
            scaled = None if temperature is None else temperature / curvatures[column]
            new = _nearest_or_mean(optimum, table, scaled)
            gradient[start:stop].addr_(inside[column - start], new - columns[column], alpha=-1)
            columns[column] = new
        # Columns before ``start`` are not updated: each sweep computes its gradient anew.
        gradient[stop:].addmm_(hessian[stop:, start:stop], columns[start:stop] - before, alpha=-1)
    return columns.T.contiguous()


def _nearest_or_mean(optimum: Tensor, table: Tensor, temperature: Tensor | None) -> Tensor:
    """The nearest value of a table [values, rows] for each row, or at a temperature the mean of all."""
    distances = (optimum - table).square_()
    if temperature is None:
        return table.gather(0, distances.argmin(0, keepdim=True)).squeeze(0)
    return distances.div_(-2 * temperature).softmax(0).mul_(table).sum(0)


def _fitted(target: Tensor, inner: Basis, hessian: Tensor, pair: Pair) -> list[Tensor]:
    """Peaks of both factors by least squares under H, for each row; nearly those before where signs repeat.

    Rows are independent for one-sided maps; for two-sided ones the peaks stay.
    """
    if inner.left is not None:
        return pair.peaks
    widths = [peaks.shape[1] for peaks in pair.peaks]
    signs = [signs_of(codes, width) for codes, width in zip(pair.codes, widths, strict=True)]
    # A row of the weight is linear in its peaks: the sum of each peak times its signs, V's turned into U's basis.
    parts = torch.cat([signs[0], inner(signs[1])], 1)  # [rows, b_u + b_v, in]
    weighted_parts = parts @ hessian
    gram = weighted_parts @ parts.mT  # [rows, b_u + b_v, b_u + b_v]
    # Pulls towards the peaks of before, so that a singular gram has one solution.
    ridge = METRIC_RIDGE * torch.diag_embed(gram.diagonal(dim1=1, dim2=2))
    before = torch.cat(pair.peaks, 1).unsqueeze(2)
    peaks = torch.linalg.solve(gram + ridge, weighted_parts @ target.unsqueeze(2) + ridge @ before).squeeze(2)
    return [factor_peaks.contiguous() for factor_peaks in peaks.split(widths, 1)]
