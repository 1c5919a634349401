"""Choosing a strategy: of the whole space (planner/space.py), the one that is best by the recipe's objective and fits.

A search (planner/strategy_search.py) proposes the strategy that is best by composed estimates. It is then dry-run in
full, on every kind of rank, with its allocations replayed through the device's allocator. If it does not fit, the
choice is made again without it. Of two that differ by less than the model of time can tell, the plainer is chosen. A
strategy that fits only if the allocator empties its cache in every step is "tight": it is taken only when nothing else
fits.

Values of the last resort, such as offloading, are tried where nothing fits without them, or where they may save much:
with the states in host memory blocks may keep what they recompute otherwise. Then the plainest mesh alone is searched.
They are also tried as soon as the best strategy is tight, and taken where they are faster than that one.
"""

from __future__ import annotations

from contextlib import suppress

from shardwise.core.errors import RecipeError
from shardwise.core.strategy import Strategy
from shardwise.planner.predict import Prediction
from shardwise.planner.predictor import Predictor, without_one_time_costs
from shardwise.planner.space import Space, blocks_and_loss
from shardwise.planner.strategy_search import StrategySearch
from shardwise.technique import STATES, within

_LAST_RESORT_SAVES = 0.1
"""What a value of the last resort saves at least where others fit: the speeds of hosts differ most between machines."""


def choose_strategy(predictor: Predictor) -> Prediction:
    """The best strategy that fits, else a tight one, else the one that needs the least memory."""
    tight: Prediction | None = None
    refused: RecipeError | None = None
    for last_resort in (False,) if predictor.cluster.device.traits.is_host else (False, True):
        search = StrategySearch(predictor, Space(predictor.recipe, predictor.cluster, last_resort))
        for full in search.confirmed():
            # A strategy faster than the first tight one is faster than all that the search would look at next.
            offload_tried = last_resort or (tight is not None and full.retries > 0)
            chosen = full if offload_tried else _or_last_resort(search, full)
            if chosen.retries == 0:
                return chosen
            tight = tight or full
        if tight is not None:
            return tight
        refused = refused or search.refused
    too_large = [c for c in predictor.candidates.values() if c.verdict == "does not fit"]
    if refused is not None and not too_large:
        raise refused
    if not too_large:
        raise RecipeError("strategy: no combination of its free settings follows the rules on this cluster")
    return predictor.confirm(predictor.smallest())


def _or_last_resort(search: StrategySearch, full: Prediction) -> Prediction:
    """A strategy of the plainest mesh with states of the last resort, if it is faster by far; else ``full``.

    Where ``full`` is tight, it need only be faster: the time to empty the cache is not in the prediction.
    """
    predictor = search.predictor
    if predictor.cluster.device.traits.is_host or predictor.by_memory or predictor.composer is None:
        return full
    plain = predictor.estimate(without_one_time_costs(full.strategy))
    share = 1 - _LAST_RESORT_SAVES if full.retries == 0 else 1.0
    limit = share * plain.seconds
    if not (parts := search.faster_without_states(limit)):
        return full
    space = Space(predictor.recipe, predictor.cluster, last_resort=True)

    def is_near(strategy: Strategy) -> bool:
        """Whether its states are those of ``full``, but for values of the last resort."""
        alike = within(space.moved(full.strategy, space.origin_of(strategy)), STATES)
        changed = alike.differences(within(strategy, STATES))
        resorts = space.last_resorts(strategy)
        return blocks_and_loss(strategy) in parts and all(
            value in resorts[key] for key, (_, value) in changed.items()
        )

    faster = full
    with suppress(RecipeError):  # the model refuses: ``full`` fits all the same
        confirmed = StrategySearch(predictor, space, limit, is_near).confirmed()
        faster = next((other for other in confirmed if other.retries == 0), full)
    return faster if faster.step.seconds < share * full.step.seconds else full
