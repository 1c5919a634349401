"""Pairwise coverage: few rows in which every pair of values of two factors occurs at least once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]


def covering_rows(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool] = lambda row: True
) -> list[Row]:
    """Greedy rows over all combinations that ``allowed`` accepts; deterministic."""
    names = list(factors)
    rows = [
        row for values in product(*factors.values()) if allowed(row := dict(zip(names, values, strict=True)))
    ]
    missing = {pair for row in rows for pair in _pairs(row)}
    chosen: list[Row] = []
    while missing:
        best = max(rows, key=lambda row: sum(pair in missing for pair in _pairs(row)))
        chosen.append(best)
        missing -= set(_pairs(best))
    return chosen


def _pairs(row: Row) -> list[tuple[tuple[str, Any], tuple[str, Any]]]:
    return list(combinations(row.items(), 2))
