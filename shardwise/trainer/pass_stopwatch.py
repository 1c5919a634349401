"""Times the passes of one step on ranks that hold different blocks, for the picture in the report.

The step is the first one after the steps whose memory is measured, because those are slower; in a shorter run it is the
last step. Timing costs nothing (engine/pass_timing.py), so every run does it. One step is enough for a picture. The
report shows its number, because a single step may be unusual.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from shardwise.core.run_files import PassesRecord, RankPasses
from shardwise.engine.pass_timing import Spans, recording
from shardwise.engine.run import Run
from shardwise.trainer.meter import EXACT_STEPS


class Stopwatch:
    """Times one step of a run on one rank. The run starts, or resumes, after ``first`` steps."""

    def __init__(self, run: Run, first: int) -> None:
        self._run = run
        self._index = min(first + EXACT_STEPS, run.recipe.steps - 1)
        self._spans: Spans | None = None

    @contextmanager
    def over(self, index: int) -> Iterator[None]:
        """Enclose the step ``index``, counted from 0."""
        if self._run.options.place is None or index != self._index:
            yield
            return
        with recording(self._run.device) as spans:
            yield
        self._spans = spans

    def collect(self) -> PassesRecord | None:
        """The passes of one copy's ranks, in seconds from the first; None if all hold equal blocks. Collective."""
        run = self._run
        place = run.options.place
        if place is None or self._spans is None:
            return None
        # Ranks 0, stride, 2 stride, ... hold the parts of the first copy of the model, which the report shows.
        stride = run.layout.stride(place.axis)
        passes = self._spans.read() if dist.get_rank() % stride == 0 else []
        by_rank: list[Any] = [passes] * dist.get_world_size()
        dist.all_gather_object(by_rank, passes)
        start = min(begin for spans in by_rank for _, begin, _ in spans)
        ranks: list[RankPasses] = []
        for rank in range(0, place.ranks * stride, stride):
            spans = tuple(
                (action.kind, action.stage, action.micro_batch, begin - start, end - start)
                for action, begin, end in by_rank[rank]
            )
            ranks.append(RankPasses(rank, spans))
        return PassesRecord(self._index + 1, tuple(ranks))
