"""A weight of two Kashin codes, without the method that finds them."""

from __future__ import annotations

import torch

from shardwise.runtime.quantization.kashin import Basis, Codes, KashinWeight
from shardwise.runtime.quantization.orthogonal import TRANSFORMS, Factor


def kashin_weight(rows: int, columns: int, widths: tuple[int, int]) -> KashinWeight:
    """Random codes with these numbers of bits."""
    generator = torch.Generator().manual_seed(0)

    def codes(width: int) -> Codes:
        numbers = torch.randint(2**width, (rows, columns), generator=generator, dtype=torch.uint8)
        return Codes(numbers, torch.rand(rows, width, generator=generator))

    inner = Basis(Factor(TRANSFORMS[0], 1, columns), None)
    return KashinWeight(codes(widths[0]), codes(widths[1]), inner, Basis(None, None))
