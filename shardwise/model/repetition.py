"""How the kinds of a model's blocks repeat themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Repetition(NamedTuple):
    """A model's number of blocks, and after how many of them their kinds repeat themselves.

    ``first``: blocks before those that do, such as the dense ones of a mixture.
    """

    blocks: int
    period: int
    first: int = 0


def repetition_of(kinds: Sequence[object]) -> Repetition | None:
    """The smallest period of a list of kinds, after the fewest first ones, at most half of all; None if it has none.

    The rest has the period at least twice, unless it is 1.
    """
    for first in range(len(kinds) // 2 + 1):
        rest = kinds[first:]
        for period in range(1, max(1, len(rest) // 2) + 1):
            # A list that equals itself shifted by the period repeats after it.
            if rest[period:] == rest[:-period]:
                return Repetition(len(kinds), period, first)
    return None
