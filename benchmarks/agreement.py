"""How far predicted seconds are off, and how well they order runs of equal work."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cases import Case


def factor_of(errors: Any) -> float:
    """The factor with the least median error (Rousseeuw 1984): runs that stall do not move it."""
    each = np.exp(-errors)
    return float(min(each, key=lambda factor: np.median(np.abs(factor / each - 1))))


def quality(cases: Sequence[Case], errors: Any) -> dict[str, Any]:
    """Of predictions with the logarithmic ``errors``, factors included."""
    size = np.abs(np.exp(errors) - 1)
    found = orders(cases, errors)
    low, middle, high = (float(each) for each in np.exp(-np.quantile(errors, (0.95, 0.5, 0.05))))
    row: dict[str, Any] = {
        "runs": len(cases),
        "median": float(np.median(size)),
        "p90": float(np.quantile(size, 0.9)),
        "bias": float(np.exp(np.median(errors)) - 1),
        "published over predicted": {"p5": low, "p50": middle, "p95": high},
    }
    if found:
        row |= {
            "groups": len(found),
            "spearman": statistics.median(each.spearman for each in found),
            "pairs": sum(each.right for each in found) / sum(each.pairs for each in found),
            "regret": statistics.median(each.regret for each in found),
            "worst regret": max(each.regret for each in found),
        }
    return row


@dataclass(frozen=True)
class Ordered:
    """How well one group of equal work is ordered.

    Attributes:
        pairs, right: of runs whose seconds differ, and those that are ordered rightly.
        regret: of the run that is predicted to be fastest, over the fastest.
    """

    spearman: float
    pairs: int
    right: int
    regret: float


def orders(cases: Sequence[Case], errors: Any, least: int = 5) -> list[Ordered]:
    """Each group of equal work with at least so many runs."""
    by_group: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for case, error in zip(cases, errors, strict=True):
        by_group[case.run.group].append((case.seconds, case.seconds * math.exp(error)))
    found = []
    for group in by_group.values():
        if len(group) >= least:
            true, guess = np.array(group).T
            signs = np.sign(true[:, None] - true) * np.sign(guess[:, None] - guess)
            spearman = float(np.corrcoef(_ranks(true), _ranks(guess))[0, 1])
            regret = float(true[np.argmin(guess)] / true.min() - 1)
            right, wrong = int(np.sum(signs > 0)) // 2, int(np.sum(signs < 0)) // 2
            found.append(Ordered(spearman, right + wrong, right, regret))
    return found


def _ranks(values: Any) -> Any:
    order = np.argsort(np.argsort(values, kind="stable"), kind="stable").astype(float)
    for value in set(values):
        order[values == value] = order[values == value].mean()
    return order
