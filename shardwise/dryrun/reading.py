"""Read the tracker's records: the ledger at any time, the peak of every phase, the timeline.

An allocation belongs to the first tag in ``tracker.TAGS`` that its storage ever had. Untagged allocations are
classified by lifetime. An allocation of a forward pass (or of a recomputation, where autograd is on) that is alive at
the end of the phase was saved for the backward pass: it is an activation. All others are temporaries, or communication
if a collective of the model sent or returned them.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.core.ledger import Ledger, Peak, ledger_from
from shardwise.dryrun.tracker import EXCHANGED, TAGS, Allocation, Tracker


@dataclass(frozen=True)
class LedgerPoint:
    """One point of the timeline."""

    time: int
    phase: str
    ledger: Ledger


def category(allocation: Allocation, tracker: Tracker) -> str:
    """The ledger row of one allocation."""
    if allocation.origin.gathered:
        return "parameters"
    for tag in TAGS:
        if tag in allocation.origin.tags:
            # A reduced buffer that outlives the backward pass is a gradient, even before it is in ``.grad``.
            if tag == "communication" and allocation.phase == "backward":
                return "gradients" if _outlives_phase(allocation, tracker) else tag
            return tag
    passing = "communication" if EXCHANGED in allocation.origin.tags else "temporaries"
    if allocation.phase == "backward":
        # A backward pass runs without autograd, except where it computes a forward pass again.
        return "activations" if allocation.grad_enabled else passing
    if allocation.phase != "forward":
        return passing
    return "activations" if _outlives_phase(allocation, tracker) else passing


def _outlives_phase(allocation: Allocation, tracker: Tracker) -> bool:
    return allocation.died is None or allocation.died > _phase_end(allocation.born, tracker)


def _phase_end(time: int, tracker: Tracker) -> int:
    starts = [start for start, _ in tracker.phases]
    index = bisect_right(starts, time)
    return starts[index] if index < len(starts) else tracker.now


def highest(tracker: Tracker, since: int = 0, on_host: bool = False) -> dict[str, tuple[int, int]]:
    """The highest level of device memory (or host memory) in every phase since a time: (bytes, time)."""
    changes = _byte_changes(tracker, on_host)
    best: dict[str, tuple[int, int]] = {}
    starts = [start for start, _ in tracker.phases]
    workspaces = {} if on_host else dict(tracker.workspaces)
    total = 0  # from the beginning of the build, also where the peak is looked for only later
    for time in range(1, tracker.now + 1):
        total += changes.get(time, 0)
        if time < since:
            continue
        phase = tracker.phases[bisect_right(starts, time) - 1][1]
        now = total + workspaces.get(time, 0)
        if now > best.get(phase, (-1, 0))[0]:
            best[phase] = (now, time)
    return best


def peaks(tracker: Tracker, since: int = 0, on_host: bool = False) -> dict[str, Peak]:
    """The peak of device memory (or host memory) in every phase since a time."""
    workspaces = {} if on_host else dict(tracker.workspaces)
    names = _module_names(tracker, on_host)
    return {
        phase: Peak(
            ledger_at(tracker, time, on_host).plus(communication=workspaces.get(time, 0)),
            phase,
            _latest(names, time),
        )
        for phase, (_, time) in highest(tracker, since, on_host).items()
    }


def peaks_of_passes(tracker: Tracker, entries: Sequence[tuple[int, str]], count: int) -> tuple[Peak, ...]:
    """The peaks of the first, second and last of ``count`` passes of each kind and pipeline stage; () for other orders.

    Each of these peaks is linear in the number of micro-batches. The peak of a phase is not linear: with more
    micro-batches it may move to another pass.

    Args:
        entries: when passes began, and their phases.
        count: micro-batches.
    """
    chosen = _chosen_passes([name for _, name in entries], count)
    if not chosen:
        return ()
    starts = [time for time, _ in entries]
    after = min((start for start, _ in tracker.phases if start > starts[-1]), default=tracker.now + 1)
    levels = _device_levels(tracker)
    names = _module_names(tracker)
    workspaces = dict(tracker.workspaces)
    bounds = [*starts, after]  # pass n is from bounds[n] to bounds[n + 1]
    passes = []
    for number in chosen:
        time = max(range(bounds[number], bounds[number + 1]), key=lambda moment: levels[moment])
        ledger = ledger_at(tracker, time).plus(communication=workspaces.get(time, 0))
        passes.append(Peak(ledger, entries[number][1], _latest(names, time)))
    return tuple(passes)


def _chosen_passes(phases: Sequence[str], count: int) -> list[int]:
    """The first, second and last pass of each kind and pipeline stage, by number in order.

    Either every stage makes ``count`` forward passes in a row, and then every stage its backward passes; or the last
    stage's own passes take turns, one forward and one backward.
    """
    if count < 2 or len(phases) % (2 * count):
        return []
    stages = len(phases) // (2 * count)
    before = (stages - 1) * count  # passes of the stages before the last
    in_turns = before * ["forward"] + count * ["forward", "backward"] + before * ["backward"]
    # The first pass of each kind and stage, and the distance to the next pass of the same.
    if list(phases) == stages * count * ["forward"] + stages * count * ["backward"]:
        firsts = [(first, 1) for first in range(0, len(phases), count)]
    elif list(phases) == in_turns:
        last_stage = range(before, before + 2 * count)
        firsts = [(first, 1) for first in range(0, len(phases), count) if first not in last_stage]
        firsts += [(before, 2), (before + 1, 2)]
    else:
        return []
    return [first + stride * number for first, stride in firsts for number in (0, 1, count - 1)]


def _device_levels(tracker: Tracker) -> list[int]:
    """Bytes of device memory at every time."""
    changes = _byte_changes(tracker)
    workspaces = dict(tracker.workspaces)
    totals = itertools.accumulate(changes.get(time, 0) for time in range(tracker.now + 1))
    return [total + workspaces.get(time, 0) for time, total in enumerate(totals)]


def _module_names(tracker: Tracker, on_host: bool = False) -> dict[int, str]:
    """The module of every allocation in device memory, or in host memory, by when it began."""
    return {a.born: (a.where or f"the loss ({a.operation})") for a in _allocations(tracker, on_host)}


def _latest(names: dict[int, str], time: int) -> str:
    """The name of the newest allocation at ``time``."""
    while time > 0:
        if time in names:
            return names[time]
        time -= 1
    return ""


def _allocations(tracker: Tracker, on_host: bool) -> list[Allocation]:
    """Allocations in device memory, or in host memory."""
    return [a for a in tracker.allocations if a.on_host == on_host]


def _byte_changes(tracker: Tracker, on_host: bool = False) -> dict[int, int]:
    changes: dict[int, int] = {}
    for a in _allocations(tracker, on_host):
        changes[a.born] = changes.get(a.born, 0) + a.size
        if a.died is not None:
            changes[a.died] = changes.get(a.died, 0) - a.size
    return changes


def ledger_at(tracker: Tracker, time: int, on_host: bool = False) -> Ledger:
    """Bytes by category of all allocations alive at ``time``, in device memory or in host memory."""
    rows: dict[str, int] = {}
    for a in _allocations(tracker, on_host):
        if a.lives_at(time):
            row = category(a, tracker)
            rows[row] = rows.get(row, 0) + a.size
    return ledger_from(rows)


def timeline(tracker: Tracker, since: int, points: int = 200) -> list[LedgerPoint]:
    """The device's ledger over time: at most ``points`` samples, each the peak of its interval."""
    changes = _byte_changes(tracker)
    span = max(1, -(-(tracker.now - since + 1) // points))  # times in an interval
    rows = {a: category(a, tracker) for a in _allocations(tracker, on_host=False)}
    by_time: dict[int, list[tuple[str, int]]] = {}
    for a in rows:
        by_time.setdefault(a.born, []).append((rows[a], a.size))
        if a.died is not None:
            by_time.setdefault(a.died, []).append((rows[a], -a.size))
    starts = [start for start, _ in tracker.phases]
    current: dict[str, int] = {}  # bytes by row of the ledger
    samples: list[LedgerPoint] = []
    best: LedgerPoint | None = None  # of the interval so far
    for time in range(1, tracker.now + 1):
        for row, size in by_time.get(time, ()):
            current[row] = current.get(row, 0) + size
        if time < since or (time not in changes and time != tracker.now):
            continue
        ledger_total = sum(current.values())
        if best is None or ledger_total > best.ledger.total:
            phase = tracker.phases[bisect_right(starts, time) - 1][1]
            best = LedgerPoint(time, phase, ledger_from(current))
        if (time - since) % span == span - 1 or time == tracker.now:
            samples.append(best)
            best = None
    return samples
