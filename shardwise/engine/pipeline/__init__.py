"""Executes the schedules of pipeline parallelism."""

from __future__ import annotations

from shardwise.engine.pipeline.executor import Pipelined
from shardwise.engine.pipeline.pipedream import PipeDream
from shardwise.engine.run import ForwardBackward, LiveModel, OptimizerStep
from shardwise.technique.pipeline.place import Pipeline


def passes_of(live: LiveModel, update: OptimizerStep) -> ForwardBackward:
    """The passes of a rank with a place in a pipeline."""
    place = live.options.place
    assert isinstance(place, Pipeline)
    if not place.endless:
        return Pipelined(live, update, place)
    return PipeDream(live, update, place, live.context.micro_batches)
