"""Integer levels: scales and zero points of a weight, the search for clipped ones, and codes.

A weight [out, in] is seen as groups [out, groups, size] that share a scale; one group is a scale per output channel.

    symmetric     w ≈ scale code,           code in [-2^(b-1), 2^(b-1) - 1], the ranges of compressed-tensors
    asymmetric    w ≈ scale (code - zero),  zero an integer of the same range

Scales are rounded to the dtype that is stored before codes are chosen, so no error is hidden in them. The stored dtype
is the weight's own if it has 16 bits, else fp32.

``absmax`` represents the largest weight of a group. ``clipped`` gives it up where that lowers the squared error: it
tries shrink factors of the range, coarse ones for all groups and then finer ones around each group's best. The factor
1 is among them, so its error is never above that of ``absmax``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwise.core.scheme import Scheme
from shardwise.plugins.quantize.methods.base import NotConverged
from shardwise.runtime.quantization.weights import IntWeight

COARSE: tuple[float, ...] = tuple(1 - 0.05 * step for step in range(18))
"""Shrink factors of the range, 1 to 0.15; the optimum of 4 bits is about 0.8 for a normal and 0.3 for a t2.5 weight."""
FINE_FACTORS: tuple[float, ...] = (-0.03, -0.02, -0.01, 0.01, 0.02, 0.03)
"""Differences from the best coarse factor."""
RANGE_CHUNK = 1 << 18
"""Weights whose ranges are searched at a time: their copies stay in the cache, and memory does not grow."""


@dataclass(frozen=True)
class Search:
    """Shrink factors of the range: ``coarse`` ones, and differences from the best of these."""

    coarse: Sequence[float] = COARSE
    fine: Sequence[float] = FINE_FACTORS


WHOLE_SEARCH = Search()
REHEARSED = Search(COARSE[:1], FINE_FACTORS[:2])
"""For a dry run: memory is the same from the third factor on."""


@dataclass(frozen=True)
class Levels:
    """The uniform levels of every group of a weight.

    Attributes:
        scale: [out, groups], fp32, positive, with values that the stored dtype represents.
        zero: [out, groups], fp32 integers, or None for symmetric levels.
        bits: bits per code.
        dtype: dtype in which the scale is stored.
    """

    scale: Tensor
    zero: Tensor | None
    bits: int
    dtype: torch.dtype

    def codes(self, groups: Tensor) -> Tensor:
        """Nearest codes of weights [out, groups, size], as fp32 integers."""
        return round_to_codes(groups, self.scale.unsqueeze(2), _column(self.zero), self.bits)

    def transposed(self) -> Levels:
        """The levels as [groups, out], so that those of one group are contiguous."""
        zero = None if self.zero is None else self.zero.T.contiguous()
        return replace(self, scale=self.scale.T.contiguous(), zero=zero)

    def rounded(self, groups: Tensor) -> Tensor:
        """The nearest level of every weight [out, groups, size]."""
        zero = 0.0 if self.zero is None else self.zero.unsqueeze(2)
        return self.codes(groups).sub_(zero).mul_(self.scale.unsqueeze(2))

    def weight(self, codes: Tensor, activation_bits: int = 16) -> IntWeight:
        """The quantized weight of codes [out, in] or [out, groups, size]. ``activation_bits``: of the scheme."""
        zero = None if self.zero is None else self.zero.to(torch.int8)
        codes = codes.flatten(1).to(torch.int8)
        return IntWeight(codes, self.scale.to(self.dtype), zero, self.bits, activation_bits)


def in_groups(weight: Tensor, scheme: Scheme) -> Tensor:
    """A weight [out, in] as groups [out, groups, size] in fp32.

    Raises NotConverged for weights that are not finite, and for input channels that are no multiple of the group.
    """
    columns = weight.shape[1]
    size = scheme.group or columns
    if columns % size:
        raise NotConverged(f"{columns} input channels are no multiple of the group of {size}")
    if not bool(weight.isfinite().all()):
        raise NotConverged("the weight has infinite or undefined values")
    return weight.detach().float().reshape(weight.shape[0], columns // size, size)


def stored_dtype(weight: Tensor) -> torch.dtype:
    """The dtype of a weight's scales."""
    return weight.dtype if weight.dtype in (torch.bfloat16, torch.float16) else torch.float32


def round_to_codes(values: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> Tensor:
    """round(values / scale + zero), clamped to the codes of ``bits``; fp32."""
    # Zero points are integers, so they can be added after rounding.
    codes = (values / scale).round_()
    if zero is not None:
        codes += zero
    return codes.clamp_(-(1 << bits - 1), (1 << bits - 1) - 1)


def absmax(groups: Tensor, bits: int, symmetric: bool, dtype: torch.dtype) -> Levels:
    """Levels that reach the largest weight of every group [out, groups, size], and 0."""
    return _levels_between(*_group_range(groups), bits, symmetric, dtype)


def clipped(
    groups: Tensor,
    bits: int,
    symmetric: bool,
    dtype: torch.dtype,
    importance: Tensor | None = None,
    search: Search = WHOLE_SEARCH,
) -> Levels:
    """Levels of least squared error among shrunken ranges; asymmetric ones are never worse than symmetric ones.

    Args:
        groups: [out, groups, size].
        bits: bits per code.
        symmetric: whether every zero point is 0.
        dtype: of the stored scale.
        search: factors to try.
        importance: weights of the squared errors. [in] for each input channel, such as the mean of its squared input;
            or [groups, size, size], the Hessian of each group, for the error of the group's own output.
    """
    return in_parts(groups, lambda part: _clipped(part, bits, symmetric, dtype, importance, search))


def in_parts(groups: Tensor, find: Callable[[Tensor], Levels]) -> Levels:
    """The levels of groups [out, groups, size], found for ``RANGE_CHUNK`` weights at a time."""
    levels = [find(part) for part in groups.split(max(1, RANGE_CHUNK // groups[0].numel()))]
    zeros = [part.zero for part in levels if part.zero is not None]
    scale = torch.cat([part.scale for part in levels])
    return Levels(scale, torch.cat(zeros) if zeros else None, levels[0].bits, levels[0].dtype)


def _clipped(
    groups: Tensor, bits: int, symmetric: bool, dtype: torch.dtype, importance: Tensor | None, search: Search
) -> Levels:
    low, high = _group_range(groups)
    zeros = torch.zeros_like(low)
    best = _Best(torch.full_like(low, torch.inf), torch.ones_like(low), zeros, torch.ones_like(low))
    # Asymmetric levels include the symmetric ones with zero point 0, so both are searched and the better one stays.
    for without_zero_points in (True,) if symmetric else (True, False):
        # A search of its own, since the fine factors are around this kind's best coarse one.
        candidate = _Best(torch.full_like(low, torch.inf), torch.ones_like(low), zeros, torch.ones_like(low))
        for shrink in _factors(candidate, search):
            levels = _levels_between(low * shrink, high * shrink, bits, without_zero_points, dtype)
            error = squared_error(groups, levels.rounded(groups), importance)
            candidate.keep(error, levels.scale, zeros if levels.zero is None else levels.zero, shrink)
        best.keep(candidate.error, candidate.scale, candidate.zero, candidate.factor)
    return Levels(best.scale, None if symmetric else best.zero, bits, dtype)


def squared_error(groups: Tensor, rounded: Tensor, importance: Tensor | None) -> Tensor:
    """Squared error of each group, [out, groups]; weighted as ``clipped`` says. ``rounded`` is overwritten."""
    difference = rounded.sub_(groups)
    if importance is None:
        return difference.square_().sum(2)
    if importance.dim() == 1:
        return difference.square_().mul_(importance.view(1, *groups.shape[1:])).sum(2)
    # d H dᵀ for each group: out o, group g, channels i and j of the group.
    products = torch.einsum("ogi,gij->ogj", difference, importance)
    return products.mul_(difference).sum(2)


@dataclass
class _Best:
    """The best levels so far of every group, all [out, groups]."""

    error: Tensor
    scale: Tensor
    zero: Tensor
    factor: Tensor

    def keep(self, error: Tensor, scale: Tensor, zero: Tensor, factor: Tensor) -> None:
        better = error < self.error
        for name, new in (("error", error), ("scale", scale), ("zero", zero), ("factor", factor)):
            setattr(self, name, torch.where(better, new, getattr(self, name)))


def _factors(best: _Best, search: Search) -> Iterable[Tensor]:
    """Coarse factors, then finer ones around the best so far of every group."""
    for factor in search.coarse:
        yield torch.full_like(best.factor, factor)
    # Read here and not above: by now the caller has kept the best of the coarse factors.
    around = best.factor
    for difference in search.fine:
        yield around + difference


def _group_range(groups: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest weight of every group, with 0 between them."""
    low, high = groups.aminmax(dim=2)
    return low.clamp(max=0), high.clamp(min=0)


def _levels_between(low: Tensor, high: Tensor, bits: int, symmetric: bool, dtype: torch.dtype) -> Levels:
    """Levels from ``low`` to ``high``."""
    smallest = -(1 << bits - 1)
    largest = (1 << bits - 1) - 1
    if symmetric:
        return Levels(stored_scale(torch.maximum(-low, high) / largest, dtype), None, bits, dtype)
    scale = stored_scale((high - low) / (largest - smallest), dtype)
    zero = (smallest - low / scale).round_().clamp_(smallest, largest)  # ``low`` gets the smallest code
    return Levels(scale, zero, bits, dtype)


def stored_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale that the dtype represents, in fp32. A group of zeros gets the smallest number.

    That is the smallest normal one, since kernels may flush others to 0. In fp16 they do not, and need them: scales of
    8 bits are below 6e-5 where all weights of a group are below 0.008.
    """
    limits = torch.finfo(dtype)
    least = limits.tiny * limits.eps if dtype == torch.float16 else limits.tiny
    return scale.to(dtype).float().clamp_(min=least)


def _column(zero: Tensor | None) -> Tensor | None:
    return None if zero is None else zero.unsqueeze(2)
