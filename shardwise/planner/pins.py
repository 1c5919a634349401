"""Strategies without one of the recipe's pins, to tell whether a pin makes the run slower than it has to be.

A pin is dropped in favour of the setting's default, if that makes no step slower. Where the strategy then needs too
much memory, settings that the recipe leaves free may give some back: where the states are, then a smaller micro-batch.
So the first strategy of a list that fits bounds the time that the planner would reach without the pin.

Settings that decide in which digits a step computes are not dropped: they change the training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from shardwise.core.strategy import Setting, Strategy
from shardwise.planner.predictor import Predictor
from shardwise.technique import (
    MICRO_BATCH_SIZE,
    ORDER,
    STATES,
    broken_rules,
    case_of,
    has_stages,
    layout_of,
)

MOST_TRIALS = 4
"""Strategies of a list that are predicted at most."""

_REPAIRS = 3
"""Rules that a changed setting may break, one after the other."""


def without_pins(predictor: Predictor, strategy: Strategy) -> Iterator[tuple[Strategy, ...]]:
    """For each pin that may cost time, strategies without it, the plainest first; ``strategy`` has all pins."""
    pinned = predictor.recipe.strategy
    for technique in ORDER:
        for setting in () if technique.rounds else technique.settings:
            if setting.key in pinned and (values := plainer(setting, strategy)):
                freed = predictor.possible(_with_pin_value(predictor, strategy, setting, values[0]))
                yield tuple(dict.fromkeys(freed))
    if MICRO_BATCH_SIZE.key in pinned:
        yield tuple(predictor.possible(_of_other_sizes(predictor, strategy)))


def plainer(setting: Setting[Any], strategy: Strategy) -> Sequence[object]:
    """Values that make a step no slower than the strategy's, memory aside; none where values have no such order."""
    values = list(dict.fromkeys((setting.default, *setting.candidates)))
    mine = strategy[setting]
    if not setting.ordered:
        return ()
    return values[: values.index(mine)] if mine in values else values[:1]


def _with_pin_value(
    predictor: Predictor, strategy: Strategy, setting: Setting[Any], value: object
) -> Iterator[Strategy]:
    """The strategy with this value; then with less memory by settings that the recipe leaves free."""
    changed = _repaired(predictor, strategy.with_values(**{setting.key: value}), setting)
    sizes = predictor.micro_batch_sizes(changed)  # the rank's share of the batch may be another
    sizes = [size for size in sizes if size <= strategy[MICRO_BATCH_SIZE]] or sizes[-1:]
    divided = _most_divided(predictor, changed)
    largest = {MICRO_BATCH_SIZE.key: sizes[0]}
    yield from (changed.with_values(**largest), divided.with_values(**largest))
    for size in dict.fromkeys((*sizes[1:2], sizes[-1])):
        yield divided.with_values(**{MICRO_BATCH_SIZE.key: size})


def _repaired(predictor: Predictor, strategy: Strategy, changed: Setting[Any]) -> Strategy:
    """The nearest strategy that breaks no rule and keeps the changed setting; the strategy itself if there is none."""
    repaired = strategy
    for _ in range(_REPAIRS):
        broken = next(broken_rules(repaired, predictor.cluster.world_size, predictor.recipe), None)
        if broken is None:
            return repaired
        if not broken.nearest or changed.key in broken.nearest:
            break
        repaired = repaired.with_values(**broken.nearest)
    return strategy


def _most_divided(predictor: Predictor, strategy: Strategy) -> Strategy:
    """The strategy with its states divided most, by the settings that the recipe leaves free."""
    cluster, recipe = predictor.cluster, predictor.recipe
    case = case_of(strategy, cluster.world_size, recipe, cluster.devices_per_node)
    for technique in ORDER:
        for setting in technique.settings if technique.part == STATES else ():
            values = list(technique.candidates(setting, case))
            if setting.key not in recipe.strategy and strategy[setting] in values:
                return strategy.with_values(**{setting.key: values[-1]})
    return strategy


def _of_other_sizes(predictor: Predictor, strategy: Strategy) -> Iterator[Strategy]:
    """Larger micro-batches, the largest that seems to fit first; with pipeline stages the nearest, which fill them."""
    size = strategy[MICRO_BATCH_SIZE]
    sizes = predictor.micro_batch_sizes(strategy, free=True)
    if has_stages(layout_of(strategy, predictor.cluster.world_size)):
        near = [other for other in sizes if size // 2 <= other <= 2 * size + 1 and other != size]
    else:
        near = [other for other in sizes if size < other <= size * _batch_headroom(predictor, strategy)]
    for other in near:
        yield strategy.with_values(**{MICRO_BATCH_SIZE.key: other})


def _batch_headroom(predictor: Predictor, strategy: Strategy) -> float:
    """How many times the micro-batch may be as large: all that is not a state grows with it."""
    known = predictor.candidates.get(strategy)
    least = predictor.least_bytes(strategy)
    if known is None or known.peak_bytes <= least:
        return 2.0
    return max(2.0, (predictor.budget_bytes - least) / (known.peak_bytes - least))
