"""What the allocator loses to fragmentation, learnt from full dry runs of strategies that do not fit.

Estimates have no fragmentation. Of Gemma-3-1B on 24 GB, nine strategies in a row fitted by their estimates and not by
their full dry runs. So those after a failed one are expected to lose nearly as much.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from shardwise.core.strategy import Strategy
from shardwise.planner.predict import Prediction
from shardwise.planner.predictor import Predictor
from shardwise.planner.verdicts import Estimate
from shardwise.technique import MICRO_BATCH_SIZE, PARTS, SETTINGS, STATES, within

_LOST_BY_ALIKE, _LOST_BY_OTHERS = 0.9, 0.5
"""What a strategy loses to fragmentation, relative to the least that failed ones with the same loss and recomputation
lost, and to the least of all. Of Gemma-3-1B on 24 GB and of a 32B model in 8 tensor ranks, nine that failed had lost 21
to 28 %, and alike ones differed by up to 6 % of that."""


@dataclass
class LearnedFragmentation:
    """What failed strategies of one search lost.

    Attributes:
        lost: the least share of memory, by activations and loss.
        doubtful: estimates that would fit, but for the fragmentation of those that failed.
    """

    predictor: Predictor
    lost: dict[tuple[Strategy, ...], float] = field(default_factory=dict)
    doubtful: dict[Strategy, Estimate] = field(default_factory=dict)

    def learn(self, full: Prediction) -> None:
        """Remember the fragmentation of a strategy that does not fit, or is tight."""
        if full.run.replay is not None:
            share = full.run.replay.reserved / max(1, full.run.replay.allocated) - 1
            key = _activations_and_loss(full.strategy)
            self.lost[key] = min(share, self.lost.get(key, math.inf))

    def allows(self, estimate: Estimate) -> bool:
        """Whether an estimate fits, with the fragmentation of those that failed."""
        own = self.lost.get(_activations_and_loss(estimate.strategy))
        least = min(self.lost.values(), default=0.0)
        share = least * _LOST_BY_OTHERS if own is None else own * _LOST_BY_ALIKE
        share = 0.0 if estimate.exact else share
        needed = estimate.bytes + share * estimate.tensors  # nothing is lost of the context's memory
        fits = self.predictor.fits(estimate)
        if fits and needed > self.predictor.budget_bytes:
            self.doubtful[estimate.strategy] = estimate
        return fits and needed <= self.predictor.budget_bytes

    def doubtful_below(self, size: int) -> Iterator[Estimate]:
        """Doubtful estimates with smaller micro-batches, which leave less fragmentation; least memory first."""
        ordered = sorted(self.doubtful.values(), key=lambda estimate: (estimate.bytes, estimate.seconds))
        return (estimate for estimate in ordered if estimate.strategy[MICRO_BATCH_SIZE] < size)


def _activations_and_loss(strategy: Strategy) -> tuple[Strategy, ...]:
    plain = {s.key: s.default for s in SETTINGS if s.once or s is MICRO_BATCH_SIZE}
    strategy = strategy.with_values(**plain)
    return tuple(within(strategy, part) for part in PARTS if part != STATES)
