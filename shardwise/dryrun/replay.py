"""Replay the dry run's allocations through the target's caching allocator: reserved bytes, retries, OOM.

Allocations and frees are replayed in the order of the tracker, on their streams. FSDP2 all-gathers on one stream and
reduces on another, so memory freed in one pool does not serve the other. The build comes first, then the workspaces
of matrix products, then steps.

The first step leaves free blocks that the second step reuses. So steps repeat until a step reserves no more than the
step before it: a long run reserves this amount. Each step creates its samples anew, and the results of a step are
freed before the next.

Without a limit the allocator never returns memory, and its final reserved size is the peak. With a limit it empties
its cache when the driver refuses. An allocation may still fail although the sum of all tensors is below the limit:
OOM by fragmentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.dryrun.allocator import CachingAllocator, MemoryBlock, OutOfMemoryError
from shardwise.dryrun.tracker import Allocation
from shardwise.hardware.allocator_options import AllocatorOptions

REPLAYED_STEPS = 4
"""Most steps that are replayed. Llama-3-8B on 8 devices reserves no more after the second."""


@dataclass(frozen=True)
class Failure:
    """The allocation that failed."""

    size: int
    phase: str
    where: str
    allocated: int
    reserved: int


@dataclass(frozen=True)
class Replay:
    """Result of a replay.

    Attributes:
        reserved: peak bytes of all segments.
        allocated: peak bytes of allocated blocks: tensors and their rounding.
        steps: number of replayed steps.
        retries: number of times that the allocator emptied its cache in the last step.
        failure: the failed allocation that ended the replay, if any.
    """

    reserved: int
    allocated: int
    steps: int
    retries: int
    failure: Failure | None = None


@dataclass(frozen=True)
class Trace:
    """Input of a replay.

    Attributes:
        allocations: those of the build and of one step.
        start: the tracker's time at the start of the step.
        workspaces: sizes of blocks that libraries allocate and never free.
    """

    allocations: Sequence[Allocation]
    start: int
    workspaces: tuple[int, ...] = ()

    def replayed(self, options: AllocatorOptions, limit: int | None = None) -> Replay:
        """Replay the build and steps with an allocator that may reserve ``limit`` bytes."""
        return _Player(self, CachingAllocator(options, limit)).play()


class _Player:
    """One replay. Events are (time, index of an allocation): the first of an index allocates, the second frees."""

    def __init__(self, trace: Trace, allocator: CachingAllocator) -> None:
        self._allocations = trace.allocations
        self._start = trace.start
        self._workspaces = trace.workspaces
        self._allocator = allocator
        self._blocks: dict[int, MemoryBlock] = {}
        self._now: Allocation | None = None
        # Times of a tracker are distinct, except those of bytes that libraries keep, which begin at the first time.
        events = [(a.born, i) for i, a in enumerate(self._allocations)]
        events += [(a.died, i) for i, a in enumerate(self._allocations) if a.died is not None]
        events.sort()
        self._build = [i for time, i in events if time <= self._start]
        self._step = [i for time, i in events if time > self._start]

    def play(self) -> Replay:
        steps = retries = 0
        failure: Failure | None = None
        allocator = self._allocator
        try:
            self._run(self._build)
            for size in self._workspaces:
                allocator.allocate(size)
            for steps in range(1, REPLAYED_STEPS + 1):
                reserved_before = allocator.peak_reserved
                retries = allocator.retries
                if steps > 1:
                    self._between()
                self._run(self._step)
                retries = allocator.retries - retries
                # A step that empties the cache leaves other free blocks to the next one, so the replay goes on.
                if steps > 1 and allocator.peak_reserved == reserved_before and retries == 0:
                    break
        except OutOfMemoryError as problem:
            if self._now is None:
                phase, where = "build", ""
            else:
                phase, where = self._now.phase, self._now.where
            failure = Failure(problem.size, phase, where, problem.allocated, problem.reserved)
        return Replay(allocator.peak_reserved, allocator.peak_allocated, steps, retries, failure)

    def _run(self, events: list[int]) -> None:
        # Locals, because this loop runs for every allocation of every step.
        blocks = self._blocks
        allocations = self._allocations
        allocate, free = self._allocator.allocate, self._allocator.free
        for index in events:
            block = blocks.pop(index, None)
            if block is not None:
                free(block)
                continue
            self._now = allocation = allocations[index]
            blocks[index] = allocate(allocation.size, allocation.stream)

    def _between(self) -> None:
        """Between two steps: free the results of the last step, allocate the samples of the next."""
        start = self._start
        for index in [i for i in self._blocks if self._allocations[i].born > start]:
            self._allocator.free(self._blocks.pop(index))
        # Samples are there before a step and freed within it.
        samples = [i for i, a in enumerate(self._allocations) if a.born <= start and (a.died or 0) > start]
        self._run(samples)
