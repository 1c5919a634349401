"""The training state of a checkpoint that is not a tensor.

Weights and optimizer state are in the checkpoint's shards. The learning rate follows from the step, and the order of
the data from the seed. Neither is stored, because a derived value cannot disagree with its source.

After a rewind the batches of the spike are skipped for good, so step s reads the s-th batch that is not skipped. The
state stores spans of skipped *positions*, which index the batches in the order of the data. The position of a step
follows from the step and these spans.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

from pydantic import model_validator

from shardwise.core.json_file import Finite, Size
from shardwise.engine.guard import GuardState


@dataclass(frozen=True)
class Best:
    """The evaluation with the best value of a metric (``checkpoint.best``), and after how many steps."""

    metric: str
    step: Size
    value: Finite


Span = tuple[Size, Size]
"""Positions from the first, inclusive, to the second, exclusive."""


@dataclass(frozen=True)
class TrainState:
    """Progress of a run.

    Attributes:
        step: optimizer steps done.
        tokens: valid targets trained on.
        rewinds: number of rewinds.
        left_out: positions that are never read again, as spans in order that do not touch.
        guard: the guard's memory.
        cursor: where the streams of the data are before the next step (data/streaming.py).
        best: the best evaluation so far, whose checkpoint is kept.
        capacity: the room that void steps have shown to be needed, relative to a balanced load; None before the first.
    """

    step: Size = 0
    tokens: Size = 0
    rewinds: Size = 0
    left_out: tuple[Span, ...] = ()
    guard: GuardState = field(default_factory=GuardState)
    cursor: tuple[str, ...] = ()
    best: Best | None = None
    capacity: Finite | None = None

    def position(self, index: int) -> int:
        """Position of the batch of step ``index`` (from 0) in the order of the data."""
        # Spans are in order, so ``index`` is a position in the data without the later ones.
        for start, end in self.left_out:
            if index >= start:
                index += end - start
        return index

    @model_validator(mode="after")
    def _checked(self) -> Self:
        # All bounds in one row must rise: then no span is empty, overlaps or touches the next.
        if any(a >= b for a, b in pairwise(number for span in self.left_out for number in span)):
            raise ValueError("spans are in order and do not touch")
        return self


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same positions as spans in order that do not touch."""
    whole: list[Span] = []
    for start, end in sorted(spans):
        if whole and start <= whole[-1][1]:
            whole[-1] = (whole[-1][0], max(end, whole[-1][1]))
        else:
            whole.append((start, end))
    return tuple(whole)
