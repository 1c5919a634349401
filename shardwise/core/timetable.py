"""A plan's schedule of passes with the seconds of every rank, and the bytes that a pass keeps.

The planner's step time and the pictures of the plan come from here, so the picture shows the plan. Other schedules are
simulated with the same seconds: a stage that is cut into several takes its time and keeps its bytes in equal parts, and
each half of a backward pass takes half of its time.

Seconds are per rank. Refused: seconds per stage, which the interleaved schedule would need if its stages differed; a
dry run counts a rank's phases as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import model_validator

from shardwise.core.json_file import CLOSED, PositiveInt, Seconds, Size
from shardwise.core.pipeline.schedule import (
    SCHEDULE_NAMES,
    Action,
    Played,
    in_flight,
    orders,
    play,
    step_time,
    steps,
)

KEY = "pipeline"
"""Of a plan's timetable in plan.json."""

STAGES_PER_RANK = 2
"""Stages on each rank of the interleaved schedule, where the plan's own has one."""


@dataclass(frozen=True)
class Timetable:
    """One pipeline through one optimizer step.

    Attributes:
        schedule: as core/pipeline/schedule.py calls it.
        forward: seconds that every rank computes forward for one micro-batch, of all its stages together.
        backward: the same backward.
        place: the rank of the pipeline that needs most memory.
        pass_bytes: activations that one pass of a micro-batch through one stage of that rank leaves for its backward
            pass.
        sending: seconds that a message between two ranks takes.
    """

    __pydantic_config__ = CLOSED

    schedule: str
    ranks: PositiveInt
    stages_per_rank: PositiveInt
    micro_batches: PositiveInt
    forward: tuple[Seconds, ...]
    backward: tuple[Seconds, ...]
    place: Size = 0
    pass_bytes: Size = 0
    sending: Seconds = 0.0

    @model_validator(mode="after")
    def _checked(self) -> Timetable:
        if self.schedule not in SCHEDULE_NAMES or not len(self.forward) == len(self.backward) == self.ranks:
            raise ValueError("its pipeline is not one of this version")
        return self

    def stages_of(self, schedule: str) -> int:
        """Stages on each rank under a schedule."""
        return max(STAGES_PER_RANK, self.stages_per_rank) if schedule == "interleaved" else 1

    def seconds(self, action: Action, stages_per_rank: int) -> float:
        """How long one pass takes where ranks have so many stages."""
        rank = action.stage % self.ranks
        if action.kind == "F":
            return self.forward[rank] / stages_per_rank
        return self.backward[rank] / stages_per_rank / (1 if action.kind == "B" else 2)

    def step_seconds(self, schedule: str) -> float:
        """How long the passes of a step take; under pipedream, of one of many."""
        stages_per_rank = self.stages_of(schedule)
        return step_time(
            schedule,
            self.ranks,
            stages_per_rank,
            self.micro_batches,
            lambda a: self.seconds(a, stages_per_rank),
            self.sending,
        )

    def waiting(self, schedule: str) -> float:
        """The share of all ranks' time in a step in which they wait."""
        busy = self.micro_batches * sum(f + b for f, b in zip(self.forward, self.backward, strict=True))
        return 1 - busy / (self.ranks * self.step_seconds(schedule))

    def in_flight(self, schedule: str) -> float:
        """How many micro-batches the rank at ``place`` holds the activations of; passes through a part count as one."""
        stages_per_rank = self.stages_of(schedule)
        count = self.micro_batches
        if schedule == "pipedream":
            count = max(count, self.ranks)  # it is never emptied, so steps of few micro-batches overlap
        return in_flight(orders(schedule, self.ranks, stages_per_rank, count)[self.place]) / stages_per_rank

    def held_bytes(self, schedule: str) -> int:
        """Bytes of these activations."""
        return round(self.in_flight(schedule) * self.pass_bytes * self.stages_per_rank)

    def played(self, schedule: str, count: int, number: int = 1) -> Played:
        """So many steps of ``count`` micro-batches each. One begins when the one before has ended on all ranks, but
        under pipedream, which has no end of a step."""
        stages_per_rank = self.stages_of(schedule)
        if schedule == "pipedream":
            return play(
                orders(schedule, self.ranks, stages_per_rank, count * number),
                lambda a: self.seconds(a, stages_per_rank),
                self.sending,
            )
        lists = orders(schedule, self.ranks, stages_per_rank, count)
        once = play(lists, lambda a: self.seconds(a, stages_per_rank), self.sending)
        more = steps(lists, number, count)
        return Played(
            tuple(
                tuple(
                    (action, start + once.end * (index // len(spans)), end + once.end * (index // len(spans)))
                    for index, action in enumerate(order)
                    for _, start, end in (spans[index % len(spans)],)
                )
                for order, spans in zip(more, once.spans, strict=True)
            )
        )
