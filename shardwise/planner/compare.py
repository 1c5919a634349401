"""What one change of the chosen strategy would cost: its neighbours, estimated and judged against it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.core.answer import TELLS, pinned_in_words
from shardwise.core.errors import RecipeError
from shardwise.core.plan import Candidate
from shardwise.core.strategy import Setting, Strategy
from shardwise.core.units import format_bytes, format_change, format_more_bytes
from shardwise.planner.counts import NotComposable
from shardwise.planner.lower_bound import divides_states_alike
from shardwise.planner.pins import MOST_TRIALS, without_pins
from shardwise.planner.predict import Prediction
from shardwise.planner.predictor import Predictor
from shardwise.planner.verdicts import UNKNOWN, Estimate
from shardwise.technique import MICRO_BATCH_SIZE, ORDER, Technique, case_of, has_stages
from shardwise.technique.base import Dividing

_FRAGMENTATION = 1.1
"""Memory with fragmentation, of an estimate that has none."""


def estimate_neighbours(predictor: Predictor, chosen: Prediction) -> None:
    """Estimate every strategy that differs from the chosen one in one setting; the predictor records them.

    Also strategies without one of the recipe's pins (planner/pins.py), for each pin up to the first that surely fits.
    """
    known = predictor.estimate(chosen.strategy)
    for trials in _trials(predictor, chosen.strategy):
        for trial in trials[:MOST_TRIALS]:
            estimate = _estimate(predictor, trial, known)
            if estimate is not None and estimate.bytes * _FRAGMENTATION <= predictor.budget_bytes:
                break


def _estimate(predictor: Predictor, neighbour: Strategy, known: Estimate) -> Estimate | None:
    """None for one that takes too much by its lower bound, or that cannot be built here."""
    try:
        if not (divides_states_alike(neighbour, known.strategy) or predictor.may_fit(neighbour)):
            return None
        try:
            estimate = predictor.relative(neighbour, known)
        except NotComposable:
            return predictor.estimate(neighbour)
        faster = estimate.seconds < known.seconds * (1 - TELLS) and predictor.fits(estimate)
        free = not predictor.recipe.strategy.keys() & known.strategy.differences(neighbour).keys()
        if faster and free and has_stages(predictor.layout(neighbour)):
            return predictor.estimate(neighbour)  # dry runs of its ranks: a proportion may promise too much
        return estimate
    except RecipeError:
        return None
    except Exception as error:  # of the model or a kernel, in a strategy that is only compared
        predictor.verdicts.fail(neighbour, error)
        return None


def _trials(predictor: Predictor, strategy: Strategy) -> Iterator[Sequence[Strategy]]:
    """Lists of strategies: a neighbour alone, or several without one pin."""
    dropped = [trials for trials in without_pins(predictor, strategy) if trials]
    known = {trials[0] for trials in dropped}
    yield from ([neighbour] for neighbour in _neighbours(predictor, strategy) if neighbour not in known)
    yield from dropped


def _neighbours(predictor: Predictor, strategy: Strategy) -> Iterator[Strategy]:
    """Strategies with one setting at another value that break no rule."""
    changes: list[Mapping[str, object]] = [
        {s.key: value}
        for technique in ORDER
        for s in technique.settings
        for value in _near_values(predictor, strategy, technique, s)
        if value != strategy[s] and not {value, strategy[s]} <= set(s.alike)
    ]
    size = strategy[MICRO_BATCH_SIZE]
    sizes = predictor.micro_batch_sizes(strategy)
    changes += [{MICRO_BATCH_SIZE.key: near} for near in sizes if size // 2 <= near <= 2 * size + 1]
    possible = predictor.possible(strategy.with_values(**change) for change in changes)
    yield from (neighbour for neighbour in dict.fromkeys(possible) if neighbour != strategy)


def _near_values(
    predictor: Predictor, strategy: Strategy, technique: Technique, setting: Setting[Any]
) -> Iterator[object]:
    """Values that a setting is compared with: the search's own, the nearest degrees of an axis, the last resort."""
    cluster = predictor.cluster
    case = case_of(strategy, cluster.world_size, predictor.recipe, cluster.devices_per_node)
    values = technique.candidates(setting, case)
    mine = strategy[setting]
    yield from (value for value in values if value in setting.candidates)
    yield from setting.compared
    if not isinstance(technique, Dividing):  # a division's last resort needs that of other settings
        yield from setting.last_resort[:1]
    elif isinstance(mine, int):
        twice = () if cluster.world_size % (2 * case.model_ranks) else (2 * mine,)
        listed = values or (1, mine, *twice)  # some models are divided only if the recipe asks for it
        divided = [
            value
            for value in listed
            if isinstance(value, int)
            and predictor.layout(strategy.with_values(**{setting.key: value})) != predictor.layout(strategy)
        ]
        yield from (*sorted(d for d in divided if d < mine)[-1:], *sorted(d for d in divided if d > mine)[:1])


def compared_candidates(predictor: Predictor, chosen: Prediction) -> tuple[Candidate, ...]:
    """All recorded candidates, compared with the chosen one: the chosen first, then those that fit by step time."""
    candidates = [_final_verdict(predictor, candidate, chosen) for candidate in predictor.candidates.values()]
    order = ("chosen", "fits", "tight", "does not fit", UNKNOWN)
    candidates.sort(key=lambda c: (order.index(c.verdict), c.step_seconds, c.peak_bytes))
    return tuple(candidates)


def _final_verdict(predictor: Predictor, candidate: Candidate, chosen: Prediction) -> Candidate:
    """The candidate with its final verdict and with its difference from the chosen one as the reason.

    A strategy without a pin says which one.
    """
    if candidate.strategy == chosen.strategy:
        return replace(
            candidate,
            verdict="chosen" if predictor.fits(predictor.estimate(chosen.strategy)) else "does not fit",
        )
    if candidate.verdict == "fits" and candidate.peak_is == "estimated":
        candidate = _with_fragmentation(predictor, candidate, chosen)
    if candidate.verdict not in ("fits", "tight"):
        return candidate
    time = candidate.step_seconds / chosen.step.seconds - 1
    memory = candidate.peak_bytes - chosen.peak.bytes
    about = "" if candidate.peak_is == "counted" else "about "
    reason = f"{format_change(time)} step time, {about}{format_more_bytes(memory)}"
    if candidate.reason:
        reason += f"; {candidate.reason}"
    changed = chosen.strategy.differences(candidate.strategy)
    if pins := [key for key in changed if key in predictor.recipe.strategy]:
        reason += f"; {pinned_in_words(pins)}"
    return replace(candidate, reason=reason)


def _with_fragmentation(predictor: Predictor, candidate: Candidate, chosen: Prediction) -> Candidate:
    """The candidate with the chosen strategy's ratio of fragmentation to memory."""
    whole = chosen.peak.bytes
    tensors = chosen.peak.bytes - chosen.peak.ledger.fragmentation
    peak = candidate.peak_bytes * whole // tensors
    over = peak - predictor.budget_bytes
    if over > 0:
        reason = f"{format_bytes(over)} too much, with as much fragmentation as the chosen strategy"
        return replace(candidate, peak_bytes=peak, verdict="does not fit", reason=reason, peak_is="estimated")
    return replace(candidate, peak_bytes=peak, peak_is="estimated")
