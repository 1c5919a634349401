"""Quick figures of a strategy: sketched from composed counts (plan/sketch.py), else by its own shallow dry runs.

A rank that holds a stage has a share of the whole model's work, states and activations. Its technique says how long
stages of equal work wait for each other, and how many micro-batches are in flight (``Dividing.stretch``). That is an
estimate: embedding and head are on one rank each. It orders strategies with stages; quick predictions of their ranks
then decide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shardwise.core.strategy import Strategy
from shardwise.plan.compose_align import NotComposable
from shardwise.plan.lower_bound import least_state_bytes
from shardwise.plan.predict import Prediction
from shardwise.plan.predictor import Predictor
from shardwise.plan.sketch import Share, Sketch
from shardwise.technique import AXES, has_stages, layout_of, micro_batches, stretch, without_stages


@dataclass(frozen=True)
class Quick:
    """What the search compares.

    Attributes:
        bytes: of the device, without fragmentation.
        fits: whether that is within the budget, and the host's memory too.
        computing: seconds of the kernels of all passes alone.
        updating: seconds of the optimizer phase's kernels.
    """

    strategy: Strategy
    seconds: float
    bytes: int
    fits: bool
    computing: float = 0.0
    updating: float = 0.0


def quick_figures(predictor: Predictor, strategy: Strategy, once: bool = False) -> Quick:
    """The figures of a strategy that breaks no rule; ``once`` as in ``Predictor.predict``."""
    layout = layout_of(strategy, predictor.cluster.world_size)
    composing = not once or (predictor.composer is not None and predictor.composer.knows(strategy))
    if composing and predictor.sketcher is not None and not has_stages(layout):
        count = micro_batches(strategy, layout, predictor.recipe.batch_size)
        try:
            found = predictor.sketched(strategy, count)
        except NotComposable:
            pass
        else:
            return _judged(predictor, strategy, found, record=True)
    whole = predictor.predict(strategy, quick=True, once=once)
    return Quick(strategy, whole.step.seconds, whole.sum_bytes, predictor.might_fit(whole))


def figures_of_stages(predictor: Predictor, strategy: Strategy) -> Quick:
    """The same of stages of equal work, estimated. Raises NotComposable."""
    return _judged(predictor, strategy, sketch_of_stages(predictor, strategy), record=False)


def record_in_proportion(predictor: Predictor, strategy: Strategy, known: Prediction) -> None:
    """Record a strategy with stages: its estimate, times what another one's prediction is over its own estimate.

    Raises NotComposable.
    """
    other, found = (sketch_of_stages(predictor, each) for each in (known.strategy, strategy))
    size = found.bytes * (known.sum_bytes - known.peak.ledger.overhead) // other.bytes
    seconds = found.seconds * known.step.seconds / other.seconds
    scaled = replace(found, bytes=size, seconds=seconds, communicators=known.run.communicators)
    _judged(predictor, strategy, scaled, record=True)


def sketch_of_stages(predictor: Predictor, strategy: Strategy) -> Sketch:
    """A rank's share of the sketch of the strategy without stages, and without the communicators of stages.

    Raises NotComposable.
    """
    layout = layout_of(strategy, predictor.cluster.world_size)
    count = micro_batches(strategy, layout, predictor.recipe.batch_size)
    ranks = math.prod(layout.degree(axis.name) for axis in AXES if axis.stages)
    waits, flat = stretch(strategy, count), without_stages(strategy)
    here, there = _state_bytes(predictor, strategy), _state_bytes(predictor, flat)
    found = predictor.sketched(
        flat, count, Share(1 / ranks, 1 / ranks, waits.kept, waits.longer, here / there)
    )
    # A single group of shards has as many ranks with and without stages, so its part does not get smaller.
    size, host = found.bytes + int(here - there / ranks), int(found.host_bytes * here / there)
    return replace(found, bytes=size, host_bytes=host)


def _state_bytes(predictor: Predictor, strategy: Strategy) -> int:
    """Bytes of a rank's weights and optimizer state, at least."""
    layout = layout_of(strategy, predictor.cluster.world_size)
    counts = predictor.parameter_counts
    return least_state_bytes(counts, strategy, layout, predictor.recipe, predictor.cluster)


def _judged(predictor: Predictor, strategy: Strategy, found: Sketch, record: bool) -> Quick:
    overhead = predictor.cluster.device.overhead
    size = found.bytes + overhead.workspace_bytes + overhead.outside_allocator(found.communicators)
    over = size - predictor.budget_bytes
    excess = found.host_bytes - predictor.cluster.host_capacity_bytes
    if record:
        predictor.record_quick(strategy, size, found.seconds, over, excess)
    fits = over <= 0 and excess <= 0
    return Quick(strategy, found.seconds, size, fits, found.computing, found.updating)
