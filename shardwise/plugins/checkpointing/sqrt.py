"""``sqrt``: segments of about sqrt(n) blocks, each recomputed from its first input (Chen et al. 2016)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from shardwise.runtime.recompute.segments import Segment


def wrapped(blocks: Sequence[nn.Module], number: int | None = None) -> list[nn.Module]:
    """Wrappers of the n blocks, in segments of floor(sqrt(n)) blocks."""
    length = max(1, math.isqrt(len(blocks)))
    starts = range(0, len(blocks), length)
    return [member for start in starts for member in Segment(blocks[start : start + length]).members]
