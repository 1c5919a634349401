"""All that must survive a restart beside tensors.

Weights and optimizer state are in the checkpoint's shards. The learning rate follows from the step, the order
of the data from seed and position; neither is stored, for what is derived cannot disagree with its source.

Steps and data part company at the first rewind: the batches that led to a spike are left out for good, so step
s reads the s-th batch of those that are not. Which are left out is stored as spans of *positions* (batches in
the order of the data), and the position of a step is a function of the step and the spans alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, Self

from shardwise.train.guard import Memory

Span = tuple[int, int]
"""Positions from the first up to but without the second."""


@dataclass(frozen=True)
class TrainState:
    """Progress of a run.

    Attributes:
        step: optimizer steps done.
        tokens: valid targets trained on.
        rewinds: how often it went back.
        left_out: positions that are never read again: spans in order that do not touch.
        guard: what the guard remembers.
    """

    step: int = 0
    tokens: int = 0
    rewinds: int = 0
    left_out: tuple[Span, ...] = ()
    guard: Memory = field(default_factory=Memory)

    def position(self, index: int) -> int:
        """Where in the order of the data the batch of step ``index`` (from 0) stands."""
        for start, end in self.left_out:
            if index >= start:
                index += end - start
        return index

    def to_json(self) -> dict[str, Any]:
        spans = [list(span) for span in self.left_out]
        return {
            "step": self.step,
            "tokens": self.tokens,
            "rewinds": self.rewinds,
            "left_out": spans,
            "guard": self.guard.to_json(),
        }

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """Raises ValueError for all but what ``to_json`` writes."""
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or values.keys() != names:
            raise ValueError(f"a training state has the fields {', '.join(sorted(names))}")
        counts = {name: values[name] for name in ("step", "tokens", "rewinds")}
        if not all(type(value) is int and value >= 0 for value in counts.values()):
            raise ValueError("a training state holds whole numbers")
        return cls(**counts, left_out=_spans(values["left_out"]), guard=Memory.from_json(values["guard"]))


def _spans(values: Any) -> tuple[Span, ...]:
    if not isinstance(values, list) or not all(isinstance(v, list) and len(v) == 2 for v in values):
        raise ValueError("what is left out is a list of spans")
    numbers = [number for span in values for number in span]
    whole = all(type(number) is int and number >= 0 for number in numbers)
    if not whole or any(a >= b for a, b in pairwise(numbers)):
        raise ValueError("spans are whole numbers in order")
    return tuple((start, end) for start, end in values)


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same positions as spans in order that do not touch."""
    whole: list[Span] = []
    for start, end in sorted(spans):
        if whole and start <= whole[-1][1]:
            whole[-1] = (whole[-1][0], max(end, whole[-1][1]))
        else:
            whole.append((start, end))
    return tuple(whole)
