"""Reads from the tracker which block ran when and what it kept (core/block_times.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

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
    owners = {name: block for block, name in enumerate(blocks)}
    own = [
        (owner, allocation)
        for allocation in tracker.allocations
        if allocation.born > since
        and allocation.micro_batch == 0
        and not allocation.on_host
        and (owner := _block_of(allocation.where, owners)) is not None
    ]
    if not own:
        return None
    activations = [
        (block, allocation) for block, allocation in own if category(allocation, tracker) == "activations"
    ]
    runs = tuple(_runs(own, since))
    end = max(last for *_, last in runs) + 1
    return BlockTimes(
        len(blocks), end, runs, tuple(_kept_bytes(activations, len(blocks), since + end, since))
    )


def _block_of(module: str, owners: dict[str, int]) -> int | None:
    """The block that a module is in."""
    while module:
        if module in owners:
            return owners[module]
        module = module.rpartition(".")[0]
    return None


def _runs(own: Sequence[tuple[int, Allocation]], since: int) -> Iterator[BlockRun]:
    """Allocations of one block and kind in a row as one run."""
    running: tuple[int, RunKind] | None = None
    begin = last = 0
    for block, allocation in own:
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
        return "again" if allocation.called else "backward"
    return None


def _kept_bytes(
    activations: Sequence[tuple[int, Allocation]], blocks: int, end: int, since: int
) -> Iterator[KeptBytes]:
    """Each block's kept bytes as steps that differ by more than SMALLEST_CHANGE."""
    changes: list[dict[int, int]] = [{} for _ in range(blocks)]
    for block, allocation in activations:
        until = end if allocation.died is None else min(end, allocation.died)
        for event, size in ((allocation.born, allocation.size), (until, -allocation.size)):
            changes[block][event] = changes[block].get(event, 0) + size
    for block, mine in enumerate(changes):
        levels = []
        level = 0
        for event in sorted(mine):
            level += mine[event]
            levels.append((event, level))
        most = max((size for _, size in levels), default=0)
        steps: list[tuple[int, int]] = []
        for event, size in levels:
            if (
                not steps
                or abs(size - steps[-1][1]) > SMALLEST_CHANGE * most
                or (size == 0) != (steps[-1][1] == 0)
            ):
                steps.append((event, size))
        for (begin, size), (until, _) in pairwise([*steps, (end, 0)]):
            if size and until > begin:
                yield block, begin - since, until - since, size
