"""Times the passes of one step of a pipeline, for the picture in the report.

It is the first step after those that run slower while memory is measured, or the last of a shorter run. Chosen: one
step of every run, without being asked, since it costs nothing (engine/spans.py). Refused: all steps, which would be a
file as long as the run for a picture of one; the price is that an odd step may be the one that is shown, so its number
stands beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from shardwise.engine.build import Run
from shardwise.engine.spans import Spans, recording
from shardwise.train.meter import EXACT_STEPS


class Stopwatch:
    """Of one rank's run. ``over`` is put around every step, ``collect`` called at the end, by all ranks."""

    def __init__(self) -> None:
        self._index = 0
        self._spans: Spans | None = None

    @contextmanager
    def over(self, run: Run, index: int, first: int) -> Iterator[None]:
        """Run step ``index`` of a run that went on, or began, at ``first``."""
        if run.pipeline is None or index != min(first + EXACT_STEPS, run.recipe.steps - 1):
            yield
            return
        with recording(run.device) as spans:
            yield
        self._index, self._spans = index, spans

    def collect(self, run: Run) -> dict[str, Any] | None:
        """What report.json says of it: seconds from the beginning of the first pass, of the ranks of one pipeline."""
        if run.pipeline is None or self._spans is None:
            return None
        rank, world = dist.get_rank(), dist.get_world_size()
        stride = run.layout.stride("pipeline")
        mine = self._spans.read() if rank % stride == 0 else []
        every: list[Any] = [mine] * world
        dist.all_gather_object(every, mine)
        first = min(begin for spans in every for _, begin, _ in spans)
        return {
            "step": self._index + 1,
            "ranks": [
                {
                    "rank": place * stride,
                    "spans": [
                        [action.kind, action.stage, action.micro_batch, begin - first, end - first]
                        for action, begin, end in every[place * stride]
                    ],
                }
                for place in range(run.pipeline.ranks)
            ],
        }
