"""``plan A --vs B``: the figures of several plans side by side, and how each differs from the first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.core.answer import Answer
from shardwise.core.json_file import plain
from shardwise.core.ledger import CATEGORIES
from shardwise.core.plan import Plan

FigureKind = Literal["bytes", "seconds", "rate", "share", "hours", "cost"]


@dataclass(frozen=True)
class Compared:
    """One of the plans.

    Attributes:
        name: the recipe, or what the command line changes of the first one's.
    """

    name: str
    plan: Plan
    answer: Answer


@dataclass(frozen=True)
class Refused:
    """A further recipe that cannot be planned.

    Attributes:
        why: the line of its error.
    """

    name: str
    why: str


@dataclass(frozen=True)
class Figure:
    """One figure of all plans, the first plan's first.

    Attributes:
        key: of ``plan --json``.
        name: in the table; a part is indented below its sum.
    """

    key: str
    name: str
    kind: FigureKind
    values: tuple[float | None, ...]

    @property
    def changes(self) -> tuple[float | None, ...]:
        """How each further plan differs from the first, relative; None where one of them has no such figure, or 0."""
        first, *others = self.values
        return tuple(None if not first or other is None else other / first - 1 for other in others)


def compared_figures(compared: Sequence[Compared]) -> Iterator[Figure]:
    """All figures that at least one plan has: memory, time, rates, the run."""
    plans = [one.plan for one in compared]

    def figure(key: str, name: str, kind: FigureKind, values: Sequence[float | None]) -> Iterator[Figure]:
        if any(values):
            yield Figure(key, name, kind, tuple(values))

    yield from figure("peak.bytes", "peak of a device", "bytes", [plan.peak.bytes for plan in plans])
    for row in CATEGORIES:
        of_row = [plan.ledger.as_dict()[row] for plan in plans]
        yield from figure(f"ledger.{row}", f"  {row.replace('_', ' ')}", "bytes", of_row)
    yield from figure("host.bytes", "host memory of a rank", "bytes", [plan.host.bytes for plan in plans])
    yield from figure("step.seconds", "step", "seconds", [plan.step.seconds for plan in plans])
    for part in dict.fromkeys(part for plan in plans for part in plan.step.split):
        of_part = [plan.step.split.get(part, 0.0) for plan in plans]
        yield from figure(f"step.split.{part}", f"  {part}", "seconds", of_part)
    unit = plans[0].step.unit
    rates = [plan.step.tokens_per_second for plan in plans]
    yield from figure("step.tokens_per_second", f"{unit}/s", "rate", rates)
    yield from figure("step.mfu", "MFU", "share", [plan.step.mfu for plan in plans])
    runs = [one.answer.run for one in compared]
    yield from figure("run.hours", "hours of all steps", "hours", [run.hours for run in runs])
    yield from figure("run.cost", "cost", "cost", [run.cost for run in runs])


def versus_values(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """The list ``versus`` of ``plan --json``: every further plan, with its changes of the first one's figures."""
    rows = list(compared_figures(compared))

    def changes(index: int) -> Mapping[str, float]:
        return {row.key: change for row in rows if (change := row.changes[index]) is not None}

    return [
        {
            "name": other.name,
            "line": other.plan.line,
            "fits": other.plan.fits,
            "verdict": other.plan.verdict,
            "strategy": dict(other.plan.strategy.values),
            "world_size": other.plan.world_size,
            "capacity_bytes": other.plan.capacity_bytes,
            "peak": plain(other.plan.peak),
            "ledger": other.plan.ledger.as_dict(),
            "step": plain(other.plan.step),
            "run": other.answer.as_dict()["run"],
            "changes": changes(index),
        }
        for index, other in enumerate(compared[1:])
    ]
