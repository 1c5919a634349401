"""Memory of a step at every moment that can be its peak, under names that dry runs of other settings share.

A moment is right after an allocation, or after the last free before the next one. It is named by the phase, the module
(its block numbered from the first or, in the second half, from the last) and the operation of the allocation, and how
often that operation ran there before. Dry runs with other depths, micro-batches or shards have moments of the same
names, so their memory can be compared moment by moment (planner/compose.py). In the clip and
the optimizer phase an operation is counted from the last one, because a list of all parameters holds most at its end.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from shardwise.core.cost import CountedCall
from shardwise.core.ledger import Ledger
from shardwise.dryrun.reading import category
from shardwise.dryrun.tracker import Allocation, Tracker

LEDGER_ROWS: tuple[str, ...] = tuple(field.name for field in fields(Ledger))
_FREED = " freed"
STEP_START = "start"
"""The name of the moment before the step."""

_BLOCK_NUMBER = re.compile(r"(?<=\.)\d+")

Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MemoryMoments:
    """Device memory of one rank, moment by moment, and what it calls.

    Attributes:
        names: of the moments, in order.
        passes: the micro-batch of each moment; -1 outside of micro-batches.
        bytes: [moment, row of the ledger], without the step's samples.
        calls: kernels, collectives and transfers of the step in order, each with its micro-batch.
    """

    names: tuple[str, ...]
    passes: npt.NDArray[np.int64]
    bytes: Bytes
    calls: tuple[tuple[int | None, CountedCall], ...]


def moments(tracker: Tracker, since: int, depth: int | None) -> MemoryMoments:
    """The moments of a step that began at ``since``, of a model of ``depth`` blocks."""
    allocations = [a for a in tracker.allocations if not a.on_host]
    levels = _levels_by_row(allocations, tracker)
    _take_samples_out(levels, allocations, since, tracker)
    born = {a.born: a for a in allocations if a.born > since}
    freed = {a.died for a in allocations if a.died is not None}
    workspaces = dict(tracker.workspaces)
    allocation_names = _allocation_names(born, depth)
    names = [STEP_START]
    passes = [-1]
    times = [since]
    micro_batch = -1  # of the last allocation: frees and collectives belong to it too
    for time in sorted({time for time in (*born, *freed, *workspaces) if time > since}):
        if time in born:
            running = born[time].micro_batch
            micro_batch = -1 if running is None else running
            name = allocation_names[time]
        elif time in freed:
            if names[-1].endswith(_FREED):
                times[-1] = time  # only the last of several frees in a row is a moment
                continue
            name = f"{names[-1]}{_FREED}"
        else:
            name = f"{names[-1]} sent"
        names.append(name)
        passes.append(micro_batch)
        times.append(time)
    bytes_ = levels[times]  # [moment, row of the ledger]
    # A collective's workspace exists only at its own time, so no allocation has it.
    bytes_[:, LEDGER_ROWS.index("communication")] += [workspaces.get(time, 0) for time in times]
    return MemoryMoments(tuple(names), np.array(passes), bytes_, tuple(tracker.calls))


def _levels_by_row(allocations: list[Allocation], tracker: Tracker) -> Bytes:
    """Bytes by row of the ledger at every time."""
    changes = np.zeros((tracker.now + 2, len(LEDGER_ROWS)), dtype=np.int64)  # [time, row]
    rows = [LEDGER_ROWS.index(category(a, tracker)) for a in allocations]
    sizes = np.array([a.size for a in allocations])
    # ``add.at`` adds up several changes at one index; ``changes[index] += sizes`` would keep the last one.
    np.add.at(changes, ([a.born for a in allocations], rows), sizes)
    freed = [index for index, a in enumerate(allocations) if a.died is not None]
    deaths = [a.died for a in allocations if a.died is not None]
    np.add.at(changes, (deaths, [rows[index] for index in freed]), -sizes[freed])
    return changes.cumsum(axis=0)


def _take_samples_out(levels: Bytes, allocations: list[Allocation], since: int, tracker: Tracker) -> None:
    """A step's samples are as many as the batch is large, whatever the micro-batch."""
    for allocation in allocations:
        if allocation.born <= since and "activations" in allocation.origin.tags:
            until = tracker.now + 2 if allocation.died is None else allocation.died
            levels[allocation.born : until, LEDGER_ROWS.index("activations")] -= allocation.size


def _allocation_names(born: dict[int, Allocation], depth: int | None) -> dict[int, str]:
    """The name of every allocation by its time."""
    operations = {
        time: (a.micro_batch, f"{a.phase}|{numbered(a.where, depth)}|{_operation(a)}")
        for time, a in born.items()
    }
    totals = Counter(operations.values())
    seen: Counter[tuple[int | None, str]] = Counter()
    names = {}
    for time in sorted(operations):
        operation = operations[time]
        count = seen[operation]
        if born[time].phase in ("clip", "optimizer"):
            count -= totals[operation]  # from the last one, which is -1
        names[time] = f"{operation[1]}|{count}"
        seen[operation] += 1
    return names


def _operation(allocation: Allocation) -> str:
    """The operation; a recomputed one has another name."""
    again = allocation.phase == "backward" and allocation.grad_enabled
    return f"{allocation.operation} again" if again else allocation.operation


def numbered(where: str, depth: int | None) -> str:
    """The module with its block numbered from the last, which is -1, if it is in the second half."""
    if depth is None:
        return where
    return _BLOCK_NUMBER.sub(
        lambda m: m[0] if 2 * int(m[0]) < depth else str(int(m[0]) - depth), where, count=1
    )
