"""Round to nearest: every weight takes the nearest level of its group, without data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from shardwise.core.scheme import Scheme
from shardwise.plugins.quantize.methods.base import InputStatistics, QuantizationMethod
from shardwise.plugins.quantize.methods.float8 import float8_weight
from shardwise.plugins.quantize.methods.nf4 import nf4_weight
from shardwise.plugins.quantize.methods.rounding import (
    REHEARSED,
    WHOLE_SEARCH,
    Search,
    absmax,
    clipped,
    in_groups,
    stored_dtype,
)
from shardwise.runtime.quantization.weights import QuantizedWeight


@dataclass(frozen=True)
class RoundToNearest(QuantizationMethod):
    """Integer levels, e4m3 or NF4, as the scheme says.

    Attributes:
        clip: search the range of integer levels for the least squared error; without, the largest weight is kept.
        symmetric: integer levels without zero points. 8-bit activations always have them.
        search: of the range.
    """

    name = "rtn"
    clip: bool = True
    symmetric: bool = True
    search: Search = WHOLE_SEARCH

    def quantize(self, weight: Tensor, scheme: Scheme, statistics: InputStatistics | None) -> QuantizedWeight:
        if scheme.kind == "float8":
            return float8_weight(weight, scheme)
        if scheme.kind == "nf4":
            return nf4_weight(weight, scheme)
        groups = in_groups(weight, scheme)
        symmetric = self.symmetric or scheme.activation_bits == 8
        dtype = stored_dtype(weight)
        if self.clip:
            levels = clipped(groups, scheme.bits, symmetric, dtype, search=self.search)
        else:
            levels = absmax(groups, scheme.bits, symmetric, dtype)
        return levels.weight(levels.codes(groups), scheme.activation_bits)

    def rehearsal(self) -> QuantizationMethod:
        return replace(self, search=REHEARSED)
