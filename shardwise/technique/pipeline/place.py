"""A rank's place in a pipeline: its stages and communicators, and the ranks that a plan has to look at."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardwise.core.pipeline.schedule import Order, in_flight, orders, step_time
from shardwise.core.strategy import Axis
from shardwise.core.timetable import Timetable
from shardwise.technique.place import Place, RankTime, Reduced, Shortcut, Stretch, WholeStep

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from shardwise.model.stage import Stage

_FULL = 4
"""Micro-batches for each rank after which every further one takes a schedule as long as its passes take."""


@functools.lru_cache(maxsize=1024)
def stretch_of(schedule: str, ranks: int, stages_per_rank: int, count: int) -> Stretch:
    """The schedule played with passes forward that take half as long as those backward."""
    played = min(count, _FULL * ranks)
    lengths = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    spent = step_time(
        schedule, ranks, stages_per_rank, played, lambda action: lengths[action.kind] / stages_per_rank
    )
    longer = (spent + 3.0 * (count - played)) / (3.0 * count)  # 3: both passes of a micro-batch
    flying = in_flight(orders(schedule, ranks, stages_per_rank, played)[0])
    return Stretch(longer, flying / (ranks * stages_per_rank))


Channel = tuple[bool, bool]
"""Whether messages go forward, and whether from the last rank round to the first or back."""

PIPELINE_AXIS = Axis("pipeline", position=0, piece="stage", stages=True)

FEW = 3
"""Micro-batches in flight in a quick prediction of a pipeline in which more are."""


@dataclass(frozen=True)
class Pipeline(Place):
    """One rank's place in a pipeline.

    Attributes:
        schedule: as core/pipeline/schedule.py calls it.
        stages_per_rank: the number of stages on each rank.
        held: this rank's stages, by number: stage s is on rank s % ranks.
        blocks: blocks of the model in every stage.
        kinds: what their blocks are in every stage, where they are not all alike.
        channels: the groups of this rank's pipeline for messages forward and backward, and round the end.
        tied: names of parameters that the first and the last stage share; () on a rank that holds none.
        tied_group: the ranks that hold the same shard of those; None on a rank that holds none.
        stage_group: the ranks of this stage, where stages are at different steps; None where all are at one.
        vertical_sync: whether a micro-batch uses the same version of the weights on all stages.
    """

    schedule: str
    ranks: int
    stages_per_rank: int
    rank: int
    held: Mapping[int, Stage]
    blocks: tuple[int, ...]
    channels: Mapping[Channel, ProcessGroup]
    tied: tuple[str, ...] = ()
    tied_group: ProcessGroup | None = None
    stage_group: ProcessGroup | None = None
    vertical_sync: bool = False
    kinds: tuple[object, ...] = ()
    axis: str = PIPELINE_AXIS.name

    @property
    def group(self) -> ProcessGroup:
        return self.channels[True, False]

    @property
    def verdict_group(self) -> ProcessGroup | None:
        return self.stage_group

    @property
    def splits_backward(self) -> bool:
        return self.schedule == "zero_bubble"

    def owns(self, parameter: str) -> bool:
        """A tied parameter belongs to the first stage."""
        return self.rank == 0 or parameter not in self.tied

    def order(self, count: int) -> Order:
        """The actions of this rank for ``count`` micro-batches."""
        return orders(self.schedule, self.ranks, self.stages_per_rank, count)[self.rank]

    def in_flight(self, count: int) -> int | None:
        """Micro-batches whose activations it holds at once; None where it holds parts of them."""
        return in_flight(self.order(count)) if self.stages_per_rank == 1 else None

    @property
    def endless(self) -> bool:
        """Whether stages are at different steps at the same time."""
        return self.schedule == "pipedream"

    # -- planning -----------------------------------------------------------------------------------

    @property
    def depth(self) -> int | None:
        counts = {self.blocks[stage] for stage in self.held}
        return counts.pop() if len(counts) == 1 else None

    def kind(self, rank: int) -> object:
        """Ranks of one kind differ at most in micro-batches in flight: (blocks per stage, has embedding, has head)."""
        stage_kinds = (self.kinds or self.blocks)[rank :: self.ranks]
        return stage_kinds, rank == 0, rank == self.ranks - 1

    def ranks_to_probe(self, every: bool) -> Sequence[int]:
        """The first rank of every kind: a later one has no more micro-batches in flight than the first."""
        if every:
            return range(self.ranks)
        kinds: dict[object, int] = {}
        for rank in range(self.ranks):
            kinds.setdefault(self.kind(rank), rank)
        return tuple(kinds.values())

    def stand_in(self, rank: int, probed: Collection[int]) -> int:
        """The nearest of the same kind, or the nearest."""
        same = [other for other in probed if self.kind(other) == self.kind(rank)]
        return min(same or probed, key=lambda other: abs(other - rank))

    def reduced(self, to: Reduced) -> Pipeline:
        after = to.ranks_after
        return self if after is None else replace(self, ranks=min(self.ranks, self.rank + 1 + after))

    def without_groups(self) -> Pipeline:
        return replace(self, channels={}, tied_group=None, stage_group=None)

    def shortcut(self, micro_batches: int) -> Shortcut | None:
        """All micro-batches that are in flight, extrapolated where they are many.

        In a pipeline that is ever full: the same rank with fewer ranks after it, which is full with fewer
        micro-batches. In others: fewer micro-batches. Two such runs differ by one micro-batch in flight.
        """
        flying = self.in_flight(micro_batches)
        if flying is None:
            return self._of_fewer(micro_batches)
        if self.endless or flying <= FEW:
            return None
        shorter = self.reduced(Reduced(ranks_after=FEW - 1)).in_flight(micro_batches)
        if shorter is not None and shorter < flying:
            return Shortcut(Reduced(ranks_after=FEW - 1), Reduced(ranks_after=FEW - 2), 1 + flying - shorter)
        return Shortcut(Reduced(micro_batches=FEW), Reduced(micro_batches=FEW - 1), 1 + flying - FEW)

    def _of_fewer(self, count: int) -> Shortcut | None:
        """The same where a rank holds parts of micro-batches, if all forward passes come before the backward ones.

        On the last rank, the passes of its last stage take turns, so that stage holds one micro-batch at a time. There
        the shorter run has three micro-batches: its second backward pass must not be the last, which reduces gradients.
        """
        kinds = [action.kind for action in self.order(count)]
        first_come = kinds.index("B") == kinds.count("F")
        one_at_a_time = self.rank == self.ranks - 1 and count <= self.ranks
        few = FEW if first_come else FEW + 1
        if count <= few or not (first_come or one_at_a_time):
            return None
        return Shortcut(Reduced(micro_batches=few), Reduced(micro_batches=few - 1), 1 + count - few)

    def combined(
        self, times: Sequence[RankTime], micro_batches: int, worst: int, pass_bytes: int
    ) -> WholeStep:
        """The schedule, played with the passes of each rank and the messages between them; then the other work of the
        slowest rank: communication that is not part of every pass, and the update.
        """
        timetable = Timetable(
            schedule=self.schedule,
            ranks=self.ranks,
            stages_per_rank=self.stages_per_rank,
            micro_batches=micro_batches,
            forward=tuple(rank_time.forward / micro_batches for rank_time in times),
            backward=tuple(rank_time.backward / micro_batches for rank_time in times),
            place=worst,
            pass_bytes=pass_bytes,
            sending=max(rank_time.sending for rank_time in times),
        )
        passes = zip(times, timetable.forward, timetable.backward, strict=True)
        other = max(
            rank_time.step - micro_batches * (forward + backward) for rank_time, forward, backward in passes
        )
        seconds = timetable.step_seconds(self.schedule) + other
        return WholeStep(seconds, "waiting for other stages", timetable)
