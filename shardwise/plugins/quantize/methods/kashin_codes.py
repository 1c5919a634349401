"""Codes of Kashin's two factors: nearest sums of peaks, fitted peaks, and the search for good pairs of codes.

``refit`` alternates: U takes the codes nearest to W - Q V, V those nearest to Qᵀ(W - U), with peaks fitted to each. It
ends in a local optimum. Each correction is a little larger than needed (over-relaxation), which passes many bad ones:
the error of normal weights falls from 0.116 to 0.107. ``annealed`` begins with uncertain codes instead, as
deterministic annealing does (Rose 1998): an entry is the mean of its 2^b values under exp(-distance² / 2T), and T falls
from half of the row's mean square to 1.5 % of it. While T is high, codes of both factors agree on the large part of W;
with falling T they take sides.

All matrices have rows of mean square 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.plugins.quantize.methods.expansion import Expansion
from shardwise.runtime.quantization.kashin import kashin_values, table_of

Map = Callable[[Tensor], Tensor]
FIRST_CODE_TEMPERATURE, LAST_CODE_TEMPERATURE = 0.5, 0.015
FIRST_INERTIA = 0.2
RELAXATION = 0.25
"""Share of a factor's correction that is added to it, before the first round; it falls to 0 in the last one."""
LLOYD = 3
"""Rounds of Lloyd's iteration."""
PEAKS_RIDGE = 1e-4
"""Pull towards the peaks before, relative to the number of columns."""


@dataclass
class Pair:
    """Codes [rows, columns] and peaks [rows, b] of U and of V."""

    codes: list[Tensor]
    peaks: list[Tensor]

    def values(self, side: int) -> Tensor:
        return kashin_values(self.codes[side], self.peaks[side])


def nearest_codes(values: Tensor, peaks: Tensor) -> Tensor:
    """The code of the nearest value for each entry [rows, columns], int64."""
    table, order = table_of(peaks).sort(1)  # [rows, 2^b]
    # The rank of the nearest value is the number of midpoints below the entry: no [rows, columns, 2^b] distances.
    rank = torch.zeros_like(values, dtype=torch.int64)
    for midpoint in ((table[:, 1:] + table[:, :-1]) / 2).split(1, 1):
        rank += values > midpoint
    # Usual tables ascend with the code, so that ranks are codes and the gather is not needed.
    ascending = torch.arange(table.shape[1], device=order.device)
    if bool((order == ascending).all()):
        return rank
    return order.gather(1, rank)


def fitted(values: Tensor, peaks: Tensor, rounds: int = LLOYD) -> Tensor:
    """Peaks after some rounds of Lloyd's iteration: nearest codes, then least squares for the peaks of each row."""
    width = peaks.shape[1]
    columns = values.shape[1]
    # Two peaks whose signs agree in a whole row make the normal equations singular; the ridge keeps the old peaks then.
    ridge = PEAKS_RIDGE * columns * torch.eye(width, dtype=peaks.dtype, device=peaks.device)
    for _ in range(rounds):
        signs = signs_of(nearest_codes(values, peaks), width)  # [rows, b, columns]
        right = signs @ values.unsqueeze(2) + PEAKS_RIDGE * columns * peaks.unsqueeze(2)
        peaks = torch.linalg.solve(signs @ signs.mT + ridge, right).squeeze(2)
    return peaks


def from_expansion(target: Tensor, basis: Map, expansion: Expansion, widths: tuple[int, int]) -> Pair:
    """Codes of an expansion: U's nearest to its sums of steps, then V's nearest to the rest of the target.

    The peaks start as the absolute values of the first steps.
    """
    peaks = [expansion.u_steps[:, : widths[0]], expansion.v_steps[:, : widths[1]]]
    peaks[0] = fitted(expansion.u, peaks[0], 4 * LLOYD)
    codes = nearest_codes(expansion.u, peaks[0])
    rest = basis(target - kashin_values(codes, peaks[0]))
    peaks[1] = fitted(rest, peaks[1], 4 * LLOYD)
    return Pair([codes, nearest_codes(rest, peaks[1])], peaks)


def refit(target: Tensor, basis: Map, pair: Pair, rounds: int) -> Pair:
    """Take each factor's nearest codes given the other, ``rounds`` times."""
    for round_number in range(1, rounds + 1):
        relaxation = RELAXATION * (1 - round_number / rounds)
        for side in (0, 1):
            # Each side's share of the target, in its own basis. Q is its own inverse, so one map serves both.
            rest = target - basis(pair.values(1)) if side == 0 else basis(target - pair.values(0))
            pair.peaks[side] = fitted(rest, pair.peaks[side])
            # The codes of before with the new peaks: the correction is what they still miss.
            rest += relaxation * (rest - pair.values(side))
            pair.codes[side] = nearest_codes(rest, pair.peaks[side])
    return pair


def annealed(target: Tensor, basis: Map, peaks: list[Tensor], steps: int) -> Pair:
    """Codes of both factors by deterministic annealing with fixed peaks; ``refit`` finishes them.

    A share of an entry's mean, its inertia, is added to its next target, falling from 0.2 to 0: both factors would
    otherwise swing between two halves of the weight.
    """
    means = [torch.zeros_like(target), torch.zeros_like(target)]
    tables = [table_of(peak) for peak in peaks]
    for step in range(steps):
        progress = step / max(steps - 1, 1)
        temperature = FIRST_CODE_TEMPERATURE * (LAST_CODE_TEMPERATURE / FIRST_CODE_TEMPERATURE) ** progress
        inertia = FIRST_INERTIA * (1 - progress)
        means[0] = _mean(target - basis(means[1]) + inertia * means[0], tables[0], temperature)
        means[1] = _mean(basis(target - means[0]) + inertia * means[1], tables[1], temperature)
    return Pair([nearest_codes(mean, peak) for mean, peak in zip(means, peaks, strict=True)], peaks)


def _mean(values: Tensor, table: Tensor, temperature: float) -> Tensor:
    """The mean of each entry's possible values under exp(-(value - entry)² / 2T)."""
    table = table.T.unsqueeze(2)  # [2^b, rows, 1]: softmax over a short last dimension is slow
    # The square of the entry is the same for all of its values, and softmax does not see it.
    logits = (values * table).sub_(table.square() / 2).div_(temperature)
    return logits.softmax(0).mul_(table).sum(0)


def signs_of(codes: Tensor, width: int) -> Tensor:
    """Signs [rows, b, columns] of codes, the first peak's first; fp32."""
    shifts = torch.arange(width - 1, -1, -1, device=codes.device).view(1, -1, 1)
    return (codes.unsqueeze(1) >> shifts & 1).float() * 2 - 1
