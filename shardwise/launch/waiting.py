"""Waits for the ranks, and finds the one to blame when they fail or hang.

After a rank fails, its peers fail too, with a broken connection. A rank whose log ends with a broken connection is a
victim. The culprit is the first rank that failed for another reason, or that ended in the middle without an error; the
launcher waits up to a second for it. If all who ended timed out in a collective, a rank that still runs hangs.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.core.heartbeat import RUNNING
from shardwise.launch.hang import Evidence, Quiet, culprit, stack_of
from shardwise.launch.ranks import Rank
from shardwise.launch.stops import Stops

DUMP_SIGNAL = signal.SIGUSR2
"""Makes a rank write the stacks of its threads to its log (worker.py), even while its GIL is held."""

SETTLE_SECONDS = 1.0
"""How long to wait for the culprit after a victim has ended."""

GRACE_SECONDS = 5.0
"""Between SIGTERM and SIGKILL, for the other ranks after one has failed."""

DUMP_SECONDS = 1.0
"""How long to wait for the stacks."""

# Seconds between two looks at heartbeats; the end of a process is noticed at once.
_POLL = 0.1


@dataclass(frozen=True)
class Ended:
    """How a run ended badly: the rank to blame; where it hangs, and for how long, if it did not end by itself."""

    culprit: Rank
    hang: Evidence | None = None
    quiet_seconds: float = 0.0


def wait_for_ranks(ranks: Sequence[Rank], stops: Stops) -> Ended | None:
    """Wait until all ranks have ended well (None), or one has failed or hangs."""
    ends = _ended_ranks(ranks)
    quiet = Quiet(time.monotonic())
    failed: list[Rank] = []
    deadline = float("inf")
    well = 0
    while well + len(failed) < len(ranks):
        try:
            rank = ends.get(timeout=max(0.0, min(_POLL, deadline - time.monotonic())))
        except queue.Empty:
            if time.monotonic() >= deadline:
                break
            if not failed and _hangs(ranks, quiet, stops):
                return _hang(ranks, quiet.seconds)
            continue
        rank.code = rank.process.returncode
        if rank.ended_well:
            well += 1
            continue
        failed.append(rank)
        deadline = min(deadline, time.monotonic() + SETTLE_SECONDS)
        if not rank.is_victim:
            break
    return _blamed(ranks, failed)


def _ended_ranks(ranks: Sequence[Rank]) -> queue.SimpleQueue[Rank]:
    """Gets each rank when its process ends."""
    ends: queue.SimpleQueue[Rank] = queue.SimpleQueue()

    def wait(rank: Rank) -> None:
        rank.process.wait()
        ends.put(rank)

    for rank in ranks:
        waiter = threading.Thread(target=wait, args=(rank,), daemon=True)
        waiter.start()
        rank.threads.append(waiter)
    return ends


def _blamed(ranks: Sequence[Rank], failed: Sequence[Rank]) -> Ended | None:
    if not failed:
        return None
    if (own := next((rank for rank in failed if not rank.is_victim), None)) is not None:
        return Ended(own)
    if any(rank.timed_out for rank in failed) and (hang := _hang(ranks, 0.0)) is not None:
        return hang
    return Ended(failed[0])


def _hangs(ranks: Sequence[Rank], quiet: Quiet, stops: Stops) -> bool:
    beats = [rank.heartbeat.read() for rank in ranks]
    quiet.look(time.monotonic(), (beat.marks for beat in beats))
    limit = max(beat.limit for beat in beats)
    return (0 < limit <= quiet.seconds) or stops.out_of_patience(time.monotonic(), quiet.seconds)


def _hang(ranks: Sequence[Rank], quiet_seconds: float) -> Ended | None:
    """Read the stacks of the ranks that run, and judge; None if no rank runs."""
    running = [rank for rank in ranks if rank.code is None]
    if not running:
        return None
    evidence = _evidence(running)
    worst = culprit(evidence)
    return Ended(running[evidence.index(worst)], worst, quiet_seconds)


def _evidence(ranks: Sequence[Rank]) -> list[Evidence]:
    stopped = [rank.is_stopped() for rank in ranks]
    starts = [rank.log_size() for rank in ranks]
    beats = [rank.heartbeat.read() for rank in ranks]
    for rank, beat in zip(ranks, beats, strict=True):
        if beat.state == RUNNING:  # before, the signal would kill it
            rank.send_to_main_thread(DUMP_SIGNAL)
            rank.send(signal.SIGCONT)  # a stopped process gets its signals when it goes on
    dumps = _dumps(ranks, starts)
    return [
        Evidence(rank.rank, beat.step, beat.marks, was_stopped, stack_of(dump))
        for rank, beat, was_stopped, dump in zip(ranks, beats, stopped, dumps, strict=True)
    ]


def _dumps(ranks: Sequence[Rank], starts: Sequence[int]) -> list[str]:
    """What the logs say since ``starts``, as soon as all have grown and grow no more."""
    deadline = time.monotonic() + DUMP_SECONDS
    before: list[int] = []
    while time.monotonic() < deadline:
        time.sleep(_POLL)
        sizes = [rank.log_size() for rank in ranks]
        if sizes == before and all(size > start for size, start in zip(sizes, starts, strict=True)):
            break
        before = sizes
    return [rank.log_since(start) for rank, start in zip(ranks, starts, strict=True)]


def end(ranks: Sequence[Rank]) -> None:
    """End the ranks that still run: SIGTERM, then SIGKILL."""
    running = [rank for rank in ranks if rank.process.poll() is None]
    for rank in running:
        rank.send(signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    for rank in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        rank.send(signal.SIGKILL)
