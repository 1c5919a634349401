"""The allocations of a CPU profile as a memory snapshot (core/memory_snapshot.py).

PyTorch's own conversion (``profile_plot``) first derives the data flow between all operations, and fails where it finds
a contradiction, as in steps with several threads. The events of a profile have every allocation with its pointer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from torch.profiler import profile

from shardwise.hardware.kinds import HOST
from shardwise.runtime.torch_private_profiler import profiled_events

SnapshotEntry = dict[str, Any]

MOST_FRAMES = 24
"""Frames of a stack, the innermost ones."""

_CALL = re.compile(r"^(?P<filename>.+)\((?P<line>\d+)\): (?P<name>.+)$")


def allocations_of(profiled: profile) -> SnapshotEntry:
    """Every allocation and free within the profile, and one segment with the blocks that are live at its end.

    Pointers are far apart in a process, so each gets a place of its own in the segment. Another thread may note a free
    only after the same memory has been allocated again; that free belongs before the allocation.
    """
    changes = list(_changes(profiled))
    sizes: dict[int, int] = {}
    for pointer, size, _ in changes:
        sizes[pointer] = max(abs(size), sizes.get(pointer, 0))
    # Addresses in the segment, one pointer after the other, each with room for its largest allocation.
    pointers = sorted(sizes)
    ends = accumulate(sizes[pointer] for pointer in pointers)
    addresses = {pointer: end - sizes[pointer] for pointer, end in zip(pointers, ends, strict=True)}
    trace: list[SnapshotEntry] = []
    living: dict[int, SnapshotEntry] = {}
    early: Counter[int] = Counter()  # frees that are in the trace before their events
    for pointer, size, frames in changes:
        entry = {"addr": addresses[pointer], "size": abs(size), "stream": 0, "frames": frames}
        freed = None
        if size > 0:
            freed = living.get(pointer)
            if freed is not None:
                early[pointer] += 1
        elif early[pointer]:
            early[pointer] -= 1
        else:
            freed = living.pop(pointer, entry)  # of one that is older than the profile, the stack of its free
        if freed is not None:
            trace += [{"action": action, **freed} for action in ("free_requested", "free_completed")]
        if size > 0:
            living[pointer] = entry
            trace.append({"action": "alloc", **entry})
    left = [living[pointer] for pointer in sorted(living)]
    return {
        "device_traces": [trace],
        "segments": [_segment(left, sum(sizes.values()))] if sizes else [],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _changes(profiled: profile) -> Iterator[tuple[int, int, list[SnapshotEntry]]]:
    """Pointer, bytes (negative for a free) and stack of every allocation and free on the CPU."""
    for event in profiled_events(profiled):
        if event.tag.name == "Allocation" and event.extra_fields.device.type == HOST.torch_type:
            yield event.extra_fields.ptr, event.extra_fields.alloc_size, _frames(event)


def _segment(left: Sequence[SnapshotEntry], size: int) -> SnapshotEntry:
    """One segment of this size with these allocations, in the order of their places."""
    blocks: list[SnapshotEntry] = []
    end = 0
    for entry in left:
        blocks += _free_block(end, entry["addr"] - end)
        block = {"address": entry["addr"], "size": entry["size"], "requested_size": entry["size"]}
        blocks.append({**block, "state": "active_allocated", "frames": entry["frames"]})
        end = entry["addr"] + entry["size"]
    blocks += _free_block(end, size - end)
    used = sum(entry["size"] for entry in left)
    whole = {"address": 0, "total_size": size, "allocated_size": used, "active_size": used, "stream": 0}
    return whole | {"segment_type": "large", "device": 0, "frames": [], "blocks": blocks}


def _free_block(begin: int, size: int) -> list[SnapshotEntry]:
    block = {"address": begin, "size": size, "requested_size": 0, "state": "inactive", "frames": []}
    return [block] if size else []


def _frames(event: Any) -> list[SnapshotEntry]:
    """The operations and the functions around an event, the innermost first."""
    frames: list[SnapshotEntry] = []
    parent = event.parent
    while parent is not None and len(frames) < MOST_FRAMES:
        if (call := _CALL.match(parent.name)) is not None:
            frames.append({"name": call["name"], "filename": call["filename"], "line": int(call["line"])})
        else:
            frames.append({"name": parent.name, "filename": "", "line": 0})
        parent = parent.parent
    return frames
