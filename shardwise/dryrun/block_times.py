"""Reads from the tracker which block ran when and what it kept (core/block_times.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from shardwise.core.block_times import BlockRun, BlockTimes, KeptBytes, RunKind
from shardwise.dryrun.reading import category
from shardwise.dryrun.tracker import Allocation, Tracker

SMALLEST_CHANGE = 0.2
"""Changes of a block's kept bytes below this share of its most are left out."""


def block_times(tracker: Tracker, since: int, blocks: Sequence[str]) -> BlockTimes | None:
    """The first micro-batch of the step that began at ``since``; None if no block ran.

    Args:
        blocks: names of the rank's blocks, in order.
    """
    numbers = {name: block for block, name in enumerate(blocks)}
    in_blocks: list[tuple[int, Allocation]] = []
    for allocation in tracker.allocations:
        if allocation.born <= since or allocation.micro_batch != 0 or allocation.on_host:
            continue
        block = _block_of(allocation.where, numbers)
        if block is not None:
            in_blocks.append((block, allocation))
    if not in_blocks:
        return None
    activations = [
        (block, allocation)
        for block, allocation in in_blocks
        if category(allocation, tracker) == "activations"
    ]
    runs = tuple(_runs(in_blocks, since))
    end = max(last for *_, last in runs) + 1
    return BlockTimes(
        len(blocks), end, runs, tuple(_kept_bytes(activations, len(blocks), since + end, since))
    )


def _block_of(module: str, numbers: dict[str, int]) -> int | None:
    """The block that a module is in."""
    while module:
        if module in numbers:
            return numbers[module]
        module = module.rpartition(".")[0]
    return None


def _runs(in_blocks: Sequence[tuple[int, Allocation]], since: int) -> Iterator[BlockRun]:
    """Allocations of one block and kind in a row as one run."""
    running: tuple[int, RunKind] | None = None
    begin = last = 0
    for block, allocation in in_blocks:
        kind = _run_kind(allocation)
        if kind is None:
            continue
        if running != (block, kind):
            if running is not None:
                yield *running, begin, last
            running = (block, kind)
            begin = allocation.born - since
        last = allocation.born - since
    if running is not None:
        yield *running, begin, last


def _run_kind(allocation: Allocation) -> RunKind | None:
    if allocation.phase == "forward":
        return "forward"
    if allocation.phase == "backward":
        # A module's forward call within the backward phase is a recomputation.
        return "again" if allocation.called else "backward"
    return None


def _kept_bytes(
    activations: Sequence[tuple[int, Allocation]], blocks: int, end: int, since: int
) -> Iterator[KeptBytes]:
    """Each block's kept bytes as steps that differ by more than SMALLEST_CHANGE."""
    changes: list[dict[int, int]] = [{} for _ in range(blocks)]  # bytes by time, of each block
    for block, allocation in activations:
        until = end if allocation.died is None else min(end, allocation.died)
        for event, size in ((allocation.born, allocation.size), (until, -allocation.size)):
            changes[block][event] = changes[block].get(event, 0) + size
    for block, changes_of_block in enumerate(changes):
        times = sorted(changes_of_block)
        levels = list(zip(times, accumulate(changes_of_block[time] for time in times), strict=True))
        most = max((size for _, size in levels), default=0)
        steps: list[tuple[int, int]] = []
        for event, size in levels:
            if not steps:
                steps.append((event, size))
                continue
            shown = steps[-1][1]
            # A change from or to nothing is shown however small it is: there the bar begins or ends.
            if abs(size - shown) > SMALLEST_CHANGE * most or (size == 0) != (shown == 0):
                steps.append((event, size))
        for (begin, size), (until, _) in pairwise([*steps, (end, 0)]):
            if size and until > begin:
                yield block, begin - since, until - since, size
