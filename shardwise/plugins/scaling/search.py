"""Golden-section search: the minimum of a function with one valley, in few evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable

_SHARE = (math.sqrt(5) - 1) / 2


def minimum(function: Callable[[float], float], low: float, high: float, tolerance: float = 1e-9) -> float:
    """Where ``function`` is least between ``low`` and ``high``, to ``tolerance``.

    Each step evaluates it once and keeps 0.618 of the interval: ``log(width / tolerance) / 0.48`` evaluations.
    """
    left = high - _SHARE * (high - low)
    right = low + _SHARE * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > tolerance:
        # The golden ratio makes the inner point that stays the other inner point of the new interval.
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _SHARE * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _SHARE * (high - low)
            at_right = function(right)
    return (low + high) / 2
