"""Kashin quantization: W = (U + V Q) R, U and V with a few values per row (runtime/quantization/kashin.py).

The expansion is that of Merkulov et al. 2024 (arXiv:2404.09737), the transforms and the peaks ±c₁±...±c_b those of
Cherniuk et al. 2026 (arXiv:2609.11687). Both papers round each factor of an exact expansion on its own. Here the codes
of both are searched together, by annealing and alternation (kashin_codes.py). With statistics of the layer's inputs
they are then improved for the error of its outputs (kashin_weighted.py).

R makes rows look normal before anything is rounded, as in QuIP# and QuaRot, so that outliers cost nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwise.core.scheme import Scheme
from shardwise.plugins.quantize.methods.base import InputStatistics, NotConverged, QuantizationMethod
from shardwise.plugins.quantize.methods.expansion import check_convergence, expand
from shardwise.plugins.quantize.methods.kashin_codes import Pair, annealed, from_expansion, refit
from shardwise.plugins.quantize.methods.kashin_weighted import (
    ALL_SWEEPS,
    HessianMetric,
    Sweeps,
    metric_of,
    weighted,
)
from shardwise.runtime.quantization.kashin import Codes, KashinWeight
from shardwise.runtime.quantization.orthogonal import Basis, Factor

FIRST_PEAK = 0.68
"""The first peak at which annealing starts, in rows of mean square 1."""
RATIO = 0.25
"""Each further peak over the one before: a sign in each factor takes two bits of the residual."""
SEARCHED_WEIGHTS = 1 << 20
"""Weights that are searched at once: the search is row by row for one-sided maps."""


@dataclass(frozen=True)
class Kashin(QuantizationMethod):
    """Two factors with few values in random orthogonal bases.

    Attributes:
        steps: annealing steps; 0 starts from the rounded expansion of the papers instead.
        rounds: rounds of the alternating refit after that; with 0 steps and 0 rounds, the papers' order.
        sweeps: under the Hessian of the inputs, if their statistics are known.
        rotate: whether the weight is rotated before (R), which the first paper does not do.
        two_sided: rotate V on both sides (Q₁ V Q₂), as the first paper does for matrices.
        kind: dct or hadamard, the transform of Q and R.
        seed: of their signs.
    """

    name = "kashin"
    steps: int = 60
    rounds: int = 15
    sweeps: Sweeps = ALL_SWEEPS
    rotate: bool = True
    two_sided: bool = False
    kind: str = "dct"
    seed: int = 0

    def quantize(self, weight: Tensor, scheme: Scheme, statistics: InputStatistics | None) -> KashinWeight:
        if not bool(weight.isfinite().all()):
            raise NotConverged("the weight has infinite or undefined values")
        rows, columns = weight.shape
        left = Factor(self.kind, self.seed + 2, rows) if self.two_sided else None
        inner = Basis(Factor(self.kind, self.seed, columns), left)
        outer = Basis(Factor(self.kind, self.seed + 1, columns)) if self.rotate else Basis()
        target = outer(weight.detach().float())
        # Rows of mean square 1, as the temperatures and the first peaks expect; the peaks are scaled back at the end.
        scale = (target.norm(dim=1, keepdim=True) / math.sqrt(columns)).clamp(min=1e-30)
        target = target / scale
        check_convergence(target, inner)
        # A left factor mixes the rows, so they cannot be searched in parts.
        chunk = rows if self.two_sided else max(1, SEARCHED_WEIGHTS // columns)
        metric = None
        if statistics is not None:
            # The target multiplies the rotated inputs R x, whose Hessian is R H R; R is symmetric.
            metric = metric_of(outer(outer(statistics.hessian.float()).T), inner)
        pairs = [self._pair(part, inner, split_bits(scheme.bits), metric) for part in target.split(chunk)]
        codes = [self._stored(pairs, side, scale) for side in (0, 1)]
        return KashinWeight(codes[0], codes[1], inner, outer)

    def rehearsal(self) -> QuantizationMethod:
        return replace(
            self, steps=min(self.steps, 1), rounds=min(self.rounds, 1), sweeps=Sweeps(1, 1, columns=1)
        )

    def _pair(
        self, target: Tensor, inner: Basis, widths: tuple[int, int], metric: HessianMetric | None
    ) -> Pair:
        pair = self._searched(target, inner, widths)
        if metric is not None:
            pair = weighted(target, inner, metric, pair, self.sweeps)
        return Pair([codes.to(torch.uint8) for codes in pair.codes], pair.peaks)

    def _searched(self, target: Tensor, inner: Basis, widths: tuple[int, int]) -> Pair:
        if self.steps:
            # Equal peaks for all rows: annealing leaves the fit of each row to ``refit``.
            sizes = FIRST_PEAK * RATIO ** torch.arange(max(widths), device=target.device)
            peaks = [sizes[:width].repeat(target.shape[0], 1) for width in widths]
            pair = annealed(target, inner, peaks, self.steps)
        else:
            expansion = expand(target, inner, widths=widths, turn=max(widths))
            pair = from_expansion(target, inner, expansion, widths)
        return refit(target, inner, pair, self.rounds)

    def _stored(self, pairs: list[Pair], side: int, scale: Tensor) -> Codes:
        peaks = (torch.cat([pair.peaks[side] for pair in pairs]) * scale).half()
        if not bool(peaks.isfinite().all()):
            raise NotConverged("a peak is too large for fp16")
        return Codes(torch.cat([pair.codes[side] for pair in pairs]), peaks)


def split_bits(bits: int) -> tuple[int, int]:
    """Bits of U and of V: 8 = 4+4, 6 = 3+3, 4 = 2+2, 3 = 2+1."""
    return bits - bits // 2, bits // 2
