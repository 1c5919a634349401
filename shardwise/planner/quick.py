"""Quick figures of a strategy: sketched from composed counts (planner/sketch.py), else by its own shallow dry runs.

A rank of a pipeline stage has a share of the whole model's work, states and activations. Its technique says how long
stages of equal work wait for each other, and how many micro-batches are in flight (``Dividing.stretch``). That is an
estimate: embedding and head are on one rank each. It orders strategies with stages; quick predictions of their ranks
then decide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from shardwise.core.errors import RecipeError
from shardwise.core.plan import Candidate
from shardwise.core.strategy import Strategy
from shardwise.planner.compose_align import NotComposable
from shardwise.planner.lower_bound import least_state_bytes
from shardwise.planner.predict import Prediction
from shardwise.planner.predictor import Predictor
from shardwise.planner.sketch import Share, Sketch
from shardwise.planner.worst_rank import EVERY_RANK
from shardwise.technique import (
    MICRO_BATCH_SIZE,
    has_stages,
    layout_of,
    micro_batches,
    stretch,
    without_stages,
)

UNSURE = 0.4
"""Relative error of memory that is estimated in proportion. Of 405B weights on 32 stages it was 35 %: which moment is
the highest depends on how much the micro-batches in flight hold."""

_NEAR = 0.05
"""The search for the smallest strategy ends where no other can need so much less memory, relative to it."""


@dataclass(frozen=True)
class Quick:
    """What the search compares.

    Attributes:
        bytes: of the device, without fragmentation.
        fits: whether that is within the budget, and the host's memory too.
        computing: seconds of the kernels of all passes alone.
        updating: seconds of the optimizer phase's kernels.
        overhead: bytes of the device beyond tensors.
    """

    strategy: Strategy
    seconds: float
    bytes: int
    fits: bool
    computing: float = 0.0
    updating: float = 0.0
    overhead: int = 0


def quick_figures(predictor: Predictor, strategy: Strategy, once: bool = False) -> Quick:
    """The figures of a strategy that breaks no rule; ``once`` as in ``Predictor.predict``."""
    layout = layout_of(strategy, predictor.cluster.world_size)
    composing = not once or (predictor.composer is not None and predictor.composer.knows(strategy))
    if composing and predictor.sketcher is not None and not has_stages(layout):
        count = micro_batches(strategy, layout, predictor.recipe.batch_size)
        try:
            sketch = predictor.sketched(strategy, count)
        except NotComposable:
            pass
        else:
            return _sketched_figures(predictor, strategy, sketch, record=True)
    return figures_from(predictor, predictor.predict(strategy, quick=True, once=once))


def smallest(predictor: Predictor, candidates: Sequence[Candidate]) -> Strategy:
    """The strategy that needs the least memory, of candidates whose bytes may be lower bounds.

    Of candidates with equal bounds only the last, which recomputes most, is predicted.
    """
    last = {candidate.peak_bytes: candidate.strategy for candidate in candidates}
    sizes: dict[Strategy, int] = {}
    for least, strategy in sorted(last.items(), key=lambda item: item[0]):
        if min(sizes.values(), default=math.inf) <= least * (1 + _NEAR):
            break
        with suppress(RecipeError):  # it cannot be built
            bound = predictor.judgement(strategy).replayed is None
            sizes[strategy] = quick_figures(predictor, strategy).bytes if bound else least
    return min(sizes, key=lambda size: sizes[size], default=last[min(last)])


def figures_from(predictor: Predictor, prediction: Prediction) -> Quick:
    """The figures of a prediction."""
    fits, overhead = predictor.might_fit(prediction), prediction.peak.ledger.overhead
    return Quick(prediction.strategy, prediction.step.seconds, prediction.sum_bytes, fits, overhead=overhead)


def figures_of_stages(predictor: Predictor, strategy: Strategy) -> Quick:
    """The same of pipeline stages of equal work, estimated. Raises NotComposable."""
    return _sketched_figures(predictor, strategy, sketch_of_stages(predictor, strategy), record=False)


def figures_in_proportion(predictor: Predictor, strategy: Strategy, known: Quick) -> Quick | None:
    """The estimate of a strategy with pipeline stages, times another one's figures over its estimate; recorded.

    None where ranks have to be dry-run: in small worlds, without stages, where the strategy cannot be composed, and
    where it is not sure whether it fits.
    """
    world_size = predictor.cluster.world_size
    pair = (known.strategy, strategy)
    if world_size <= EVERY_RANK or not all(has_stages(layout_of(each, world_size)) for each in pair):
        return None
    try:
        with predictor.reading_ahead([strategy], lambda asked: [asked[MICRO_BATCH_SIZE]]):
            other, found = (sketch_of_stages(predictor, each) for each in pair)
    except NotComposable:
        return None
    size = found.bytes * (known.bytes - known.overhead) // other.bytes
    if abs(size + known.overhead - predictor.budget_bytes) < UNSURE * predictor.budget_bytes:
        return None
    seconds = found.seconds * known.seconds / other.seconds
    scaled = replace(found, bytes=size, seconds=seconds)
    return _sketched_figures(predictor, strategy, scaled, record=True, overhead=known.overhead)


def sketch_of_stages(predictor: Predictor, strategy: Strategy) -> Sketch:
    """A rank's share of the sketch of the strategy without pipeline stages, and without their communicators.

    Raises NotComposable.
    """
    layout = layout_of(strategy, predictor.cluster.world_size)
    count = micro_batches(strategy, layout, predictor.recipe.batch_size)
    ranks = layout.ranks(lambda axis: axis.stages)
    waits, flat = stretch(strategy, count), without_stages(strategy)
    copies = layout_of(flat, predictor.cluster.world_size).state_copies
    # A rank's share of states in proportion to the model without stages: 1 where a single group shards over all ranks.
    held = layout.state_copies / copies
    share = Share(1 / ranks, 1 / ranks, waits.kept, waits.longer, held, layout)
    sketch = predictor.sketched(flat, count, share)
    counts = predictor.parameter_counts
    states = least_state_bytes(counts, strategy, layout, predictor.recipe, predictor.cluster)
    size = sketch.bytes + int(states * (1 - 1 / (held * ranks)))
    return replace(sketch, bytes=size, host_bytes=int(sketch.host_bytes * held))


def _sketched_figures(
    predictor: Predictor, strategy: Strategy, sketch: Sketch, record: bool, overhead: int | None = None
) -> Quick:
    if overhead is None:
        profile = predictor.cluster.device.overhead
        overhead = profile.workspace_bytes + profile.outside_allocator(sketch.communicators)
    size = sketch.bytes + overhead
    over = size - predictor.budget_bytes
    excess = sketch.host_bytes - predictor.cluster.host_capacity_bytes
    if record:
        predictor.record_quick(strategy, size, sketch.seconds, over, excess)
    fits = over <= 0 and excess <= 0
    return Quick(strategy, sketch.seconds, size, fits, sketch.computing, sketch.updating, overhead)
