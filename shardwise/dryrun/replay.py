"""The dry run's allocations, played to the caching allocator of the target: what it reserves, and whether it can.

Births and deaths are replayed in the order in which the tracker saw them, on the streams on which they were made
(FSDP2 gathers on one and reduces on another, so what a block frees in one pool does not serve the other). What
the build allocates comes first, then the workspaces of matrix products, then steps.

A first step leaves free blocks that the second finds, so steps are repeated until one reserves no more than the
one before it: that is what a long run reserves. The samples of a step are made anew for each, and what a step
leaves behind is freed before the next.

Without a limit the allocator never gives anything back, and what it reserves in the end is its peak. With one, it
empties its cache when the driver refuses, and may still find no room for an allocation though the sum of all
tensors is below the limit: out of memory by fragmentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.core.allocator_options import AllocatorOptions
from shardwise.dryrun.allocator import Block, CachingAllocator, OutOfMemoryError
from shardwise.dryrun.tracker import Allocation

STEPS = 4
"""At most so many steps are replayed. Llama-3-8B on 8 devices reserves no more after the second."""


@dataclass(frozen=True)
class Failure:
    """The allocation that found no room."""

    size: int
    phase: str
    where: str
    allocated: int
    reserved: int


@dataclass(frozen=True)
class Replay:
    """What the allocator did.

    Attributes:
        reserved: bytes of its segments when they were most.
        allocated: bytes of the blocks handed out when they were most: tensors and what rounding adds.
        steps: how many were replayed.
        retries: times that it emptied its cache in the last of them.
        failure: the allocation at which the replay ended, if one found no room.
    """

    reserved: int
    allocated: int
    steps: int
    retries: int
    failure: Failure | None = None


@dataclass(frozen=True)
class Trace:
    """What is replayed.

    Attributes:
        allocations: of build and one step.
        start: the tracker's time at which the step begins.
        workspaces: blocks that libraries take for good.
    """

    allocations: Sequence[Allocation]
    start: int
    workspaces: tuple[int, ...] = ()

    def replayed(self, options: AllocatorOptions, limit: int | None = None) -> Replay:
        """Play the build and steps to an allocator that may reserve ``limit`` bytes."""
        return _Player(self, CachingAllocator(options, limit)).play()


class _Player:
    """One replay. Events are (time, index of the allocation); an index says birth the first time in a step."""

    def __init__(self, trace: Trace, allocator: CachingAllocator) -> None:
        self._all, self._start, self._workspaces = trace.allocations, trace.start, trace.workspaces
        self._allocator = allocator
        self._blocks: dict[int, Block] = {}
        self._now: Allocation | None = None
        events = [(a.born, i) for i, a in enumerate(self._all)]
        events += [(a.died, i) for i, a in enumerate(self._all) if a.died is not None]
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
            for steps in range(1, STEPS + 1):
                before, retries = allocator.peak_reserved, allocator.retries
                if steps > 1:
                    self._between()
                self._run(self._step)
                retries = allocator.retries - retries
                if steps > 1 and allocator.peak_reserved == before and (retries == 0 or steps == STEPS):
                    break
        except OutOfMemoryError as problem:
            at = self._now
            phase, where = (at.phase, at.where) if at is not None else ("build", "")
            failure = Failure(problem.size, phase, where, problem.allocated, problem.reserved)
        return Replay(allocator.peak_reserved, allocator.peak_allocated, steps, retries, failure)

    def _run(self, events: list[int]) -> None:
        blocks, allocations = self._blocks, self._all
        allocate, free = self._allocator.allocate, self._allocator.free
        for index in events:
            block = blocks.pop(index, None)
            if block is not None:
                free(block)
                continue
            self._now = allocation = allocations[index]
            blocks[index] = allocate(allocation.size, allocation.stream)

    def _between(self) -> None:
        """From the end of a step to the start of the next: results are dropped, samples are made."""
        start = self._start
        for index in [i for i in self._blocks if self._all[i].born > start]:
            self._allocator.free(self._blocks.pop(index))
        self._run([i for i, a in enumerate(self._all) if a.born <= start and (a.died or 0) > start])
