"""What one change of the chosen strategy would cost: its neighbours, predicted and judged against it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from shardwise.core.errors import RecipeError
from shardwise.core.plan import Candidate
from shardwise.core.strategy import Strategy
from shardwise.core.units import format_bytes
from shardwise.plan.predict import Prediction
from shardwise.plan.predictor import UNKNOWN, Judgement, Predictor
from shardwise.plan.read_ahead import ReadAhead
from shardwise.technique import MICRO_BATCH_SIZE, SETTINGS, layout_of


def predict_neighbours(predictor: Predictor, chosen: Prediction) -> None:
    """Predict every strategy that differs from the chosen one in one setting; the predictor records them."""
    strategy = chosen.strategy
    changes: list[Mapping[str, object]] = [
        {s.key: value} for s in SETTINGS for value in (*s.candidates, *s.compared) if value != strategy[s]
    ]
    size, sizes = strategy[MICRO_BATCH_SIZE], predictor.micro_batch_sizes(strategy)
    changes += [{MICRO_BATCH_SIZE.key: near} for near in sizes if size // 2 <= near <= 2 * size + 1]
    possible = predictor.possible(strategy.with_values(**change) for change in changes)
    neighbours = [each for each in dict.fromkeys(possible) if each not in predictor.candidates]
    with ReadAhead(partial(_predicted, predictor, chosen), neighbours, predictor.quiet) as ahead:
        for number, neighbour in enumerate(neighbours):
            predictor.adopt(neighbour, ahead.get(number))


def _predicted(predictor: Predictor, chosen: Prediction, neighbour: Strategy) -> Judgement | None:
    """A neighbour's judgement; None for one that cannot be built here because a package is missing."""
    try:
        if predictor.may_fit(neighbour):
            ranks = _worst_of(predictor, neighbour, chosen)
            predictor.predict(neighbour, quick=True, ranks=ranks, once=True)
    except RecipeError:
        return None
    except Exception as error:  # of the model or a kernel, in a strategy that is only compared
        predictor.record_failure(neighbour, error)
    return predictor.judgement(neighbour)


def _worst_of(predictor: Predictor, strategy: Strategy, chosen: Prediction) -> list[int] | None:
    """The rank to predict: the chosen strategy's worst if both have the same mesh; None for all."""
    same = layout_of(strategy, predictor.cluster.world_size) == chosen.layout
    return [chosen.rank] if same and chosen.run.place is not None else None


def judged(predictor: Predictor, chosen: Prediction) -> tuple[Candidate, ...]:
    """All recorded candidates, compared with the chosen one: the chosen first, then those that fit by step time."""
    candidates = [_judged(predictor, each, chosen) for each in predictor.candidates.values()]
    order = ("chosen", "fits", "tight", "does not fit", UNKNOWN)
    candidates.sort(key=lambda c: (order.index(c.verdict), c.step_seconds, c.peak_bytes))
    return tuple(candidates)


def _judged(predictor: Predictor, candidate: Candidate, chosen: Prediction) -> Candidate:
    """The candidate with its final verdict and with its difference from the chosen one as the reason."""
    if candidate.strategy == chosen.strategy:
        return replace(candidate, verdict="chosen" if predictor.fits(chosen) else "does not fit")
    if candidate.verdict == "fits" and not predictor.replayed(candidate.strategy):
        candidate = _fragmented(predictor, candidate, chosen)
    if candidate.verdict not in ("fits", "tight"):
        return candidate
    time = candidate.step_seconds / chosen.step.seconds - 1
    memory = candidate.peak_bytes - chosen.peak.bytes
    sign = "+" if memory >= 0 else "-"
    about = "" if candidate.peak_is == "counted" else "about "
    reason = f"{time:+.0%} step time, {about}{sign}{format_bytes(abs(memory))}"
    if candidate.reason:
        reason += f"; {candidate.reason}"
    return replace(candidate, reason=reason)


def _fragmented(predictor: Predictor, candidate: Candidate, chosen: Prediction) -> Candidate:
    """The candidate with the chosen strategy's ratio of fragmentation to memory."""
    whole, tensors = chosen.peak.bytes, chosen.peak.bytes - chosen.peak.ledger.fragmentation
    peak = candidate.peak_bytes * whole // tensors
    over = peak - predictor.budget_bytes
    if over > 0:
        reason = f"{format_bytes(over)} too much, with as much fragmentation as the chosen strategy"
        return replace(candidate, peak_bytes=peak, verdict="does not fit", reason=reason, peak_is="estimated")
    return replace(candidate, peak_bytes=peak, peak_is="estimated")
