"""Executes the schedules of pipeline parallelism."""

from __future__ import annotations

from typing import cast

from shardwise.core.plugins import SCHEDULES, require_plugin
from shardwise.engine.pipeline.executor import Pipelined
from shardwise.engine.run import ForwardBackward, LiveModel, OptimizerStep
from shardwise.technique.pipeline.place import Pipeline


def passes_of(live: LiveModel, update: OptimizerStep) -> ForwardBackward:
    """The forward and backward passes of a pipeline rank. Raises RecipeError if its schedule's plugin is missing."""
    pipeline = live.options.place
    assert isinstance(pipeline, Pipeline)
    if pipeline.schedule in SCHEDULES:
        runtime = require_plugin(
            SCHEDULES[pipeline.schedule], f"strategy.pipeline_schedule: {pipeline.schedule}"
        )
        return cast(ForwardBackward, runtime.passes_of(live, update, pipeline))
    return Pipelined(live, update, pipeline)
