"""The planned step as a memory snapshot, which PyTorch's memory viewer opens (core/memory_snapshot.py).

The allocations of the dry run are replayed through the model of the caching allocator, so blocks have the addresses and
segments that the plan's fragmentation was counted with. A frame of the viewer's stack names what a stack of Python
would lead to: the operation and the module, then the phase and the row of the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from shardwise.dryrun.allocator import CachingAllocator, MemoryBlock
from shardwise.dryrun.reading import category
from shardwise.dryrun.tracker import Allocation, Tracker
from shardwise.hardware.allocator_options import AllocatorOptions

SnapshotValues = dict[str, Any]

FIRST: SnapshotValues = {
    "action": "snapshot",
    "addr": 0,
    "size": 0,
    "stream": 0,
    "frames": [],
    "category": "unknown",
}
"""The first event: the viewer fails where there are categories, and none is unknown."""


def memory_snapshot(tracker: Tracker, options: AllocatorOptions) -> SnapshotValues:
    """The build and one step: every allocation and free of device memory, and the segments at the end."""
    allocations = [a for a in tracker.allocations if not a.on_host]
    events = sorted(
        [(a.born, i) for i, a in enumerate(allocations)]
        + [(a.died, i) for i, a in enumerate(allocations) if a.died is not None]
    )
    allocator = CachingAllocator(options)
    living: dict[int, tuple[MemoryBlock, Allocation]] = {}
    trace: list[SnapshotValues] = [FIRST]
    for _, index in events:
        allocation = allocations[index]
        if index in living:  # the second event of an allocation is its free
            block, _ = living.pop(index)
            trace += _freed(block, allocation, tracker)
            allocator.free(block)
            continue
        before = allocator.reserved
        block = allocator.allocate(allocation.size, allocation.stream)
        grown = allocator.reserved - before
        if grown and not options.expandable_segments:  # those grow at addresses that the model does not tell
            trace.append(_entry("segment_alloc", block.address, grown, allocation, tracker))
        living[index] = block, allocation
        trace.append(_entry("alloc", block.address, allocation.size, allocation, tracker))
    return {
        "device_traces": [trace],
        "segments": list(_segments(living.values(), allocator, options, tracker)),
        "allocator_settings": {"expandable_segments": options.expandable_segments},
        "external_annotations": [],
    }


def _freed(block: MemoryBlock, allocation: Allocation, tracker: Tracker) -> list[SnapshotValues]:
    actions = ("free_requested", "free_completed")
    return [_entry(action, block.address, allocation.size, allocation, tracker) for action in actions]


def _entry(action: str, address: int, size: int, allocation: Allocation, tracker: Tracker) -> SnapshotValues:
    entry = {"action": action, "addr": address, "size": size, "stream": allocation.stream}
    return entry | {
        "frames": _allocation_frames(allocation, tracker),
        "category": category(allocation, tracker),
    }


def _allocation_frames(allocation: Allocation, tracker: Tracker) -> list[SnapshotValues]:
    inner = {"name": allocation.operation, "filename": allocation.where or "outside of modules", "line": 0}
    outer = {"name": category(allocation, tracker), "filename": f"{allocation.phase} phase", "line": 0}
    return [inner, outer]


def _segments(
    living: Iterable[tuple[MemoryBlock, Allocation]],
    allocator: CachingAllocator,
    options: AllocatorOptions,
    tracker: Tracker,
) -> Iterator[SnapshotValues]:
    """All segments with their blocks, allocated and free."""
    owners = {block.address: allocation for block, allocation in living}
    for stream, small, first in allocator.segments([block for block, _ in living]):
        chain = [first]
        while (after := chain[-1].next) is not None:
            chain.append(after)
        blocks: list[SnapshotValues] = []
        for block in chain:
            if block.mapped:  # a hole of an expandable segment takes no memory
                owner = None if block.free else owners.get(block.address)
                blocks.append(_block_entry(block, owner, tracker))
        used = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
        yield {
            "address": first.address,
            "total_size": sum(block["size"] for block in blocks),
            "stream": stream,
            "segment_type": "small" if small else "large",
            "allocated_size": used,
            "active_size": used,
            "is_expandable": options.expandable_segments,
            "device": 0,
            "frames": [],
            "blocks": blocks,
        }


def _block_entry(block: MemoryBlock, owner: Allocation | None, tracker: Tracker) -> SnapshotValues:
    entry: SnapshotValues = {"address": block.address, "size": block.size, "requested_size": 0, "frames": []}
    if owner is None:
        return entry | {"state": "inactive"}
    return entry | {
        "state": "active_allocated",
        "requested_size": owner.size,
        "frames": _allocation_frames(owner, tracker),
    }
