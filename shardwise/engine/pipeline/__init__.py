"""Executes the schedules of pipeline parallelism."""

from __future__ import annotations

from typing import cast

from shardwise.core.plugins import SCHEDULES, require_plugin
from shardwise.engine.pipeline.executor import Pipelined
from shardwise.engine.run import ForwardBackward, LiveModel, OptimizerStep
from shardwise.technique.pipeline.place import Pipeline


def passes_of(live: LiveModel, update: OptimizerStep) -> ForwardBackward:
    """The forward and backward passes of a pipeline rank. Raises RecipeError if its schedule's plugin is missing."""
    place = live.options.place
    assert isinstance(place, Pipeline)
    if place.schedule in SCHEDULES:
        runtime = require_plugin(SCHEDULES[place.schedule], f"strategy.pipeline_schedule: {place.schedule}")
        return cast(ForwardBackward, runtime.passes_of(live, update, place))
    return Pipelined(live, update, place)
