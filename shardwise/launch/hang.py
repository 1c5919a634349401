"""Which rank hangs, judged from outside: whether any rank makes progress, and where all stand when none does.

Ranks that train together stop together: when one hangs, its peers soon wait for it in a collective. So a run hangs when
no rank has made progress for the limit. A rank that saves or evaluates longer than that makes progress, and its peers
may wait. Only then are the stacks of all ranks read. The rank that hangs is, in this order: one that is stopped; one
that is not inside a collective; one inside a collective that the user's code called; and else the one furthest behind.
A single rank elsewhere than all others, at least two, did not enter the collective that they wait in.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from shardwise.launch.user_code import Frame, innermost_of_user

LONGEST_PAUSE = 1.0
"""Seconds that one look counts at most: a launcher that was suspended itself has not watched."""

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_THREAD = re.compile(r"^(Current thread|Thread) 0x")


class Quiet:
    """For how long no rank has made progress."""

    def __init__(self, now: float) -> None:
        self.seconds = 0.0
        self._seen: tuple[int, ...] = ()
        self._looked = now

    def look(self, now: float, marks: Iterable[int]) -> None:
        """Look at the marks of all ranks, at time ``now`` in seconds of a clock that does not go back."""
        seen = tuple(marks)
        passed = min(now - self._looked, LONGEST_PAUSE)
        self.seconds = self.seconds + passed if seen == self._seen else 0.0
        self._seen, self._looked = seen, now


class Standing(IntEnum):
    """Where a rank stands; the first that occurs is where the culprit stands."""

    STOPPED = 0
    ELSEWHERE = 1
    USERS_COLLECTIVE = 2
    UNCLEAR = 3
    """in the backward pass or in Shardwise's own code, which may wait for a collective in C++"""
    COLLECTIVE = 4


@dataclass(frozen=True)
class Evidence:
    """One rank of a run that hangs.

    Attributes:
        step, marks: of its heartbeat.
        stopped: whether its process is stopped, by SIGSTOP or a debugger.
        stack: of its main thread, innermost frame first; empty when it could not be read.
    """

    rank: int
    step: int = 0
    marks: int = 0
    stopped: bool = False
    stack: tuple[Frame, ...] = ()

    @property
    def standing(self) -> Standing:
        if self.stopped:
            return Standing.STOPPED
        inner = _inner(self.stack)
        caller = self._caller
        if any(frame.is_collective for frame in inner):
            users = caller is not None and caller.is_users
            return Standing.USERS_COLLECTIVE if users else Standing.COLLECTIVE
        in_backward = any(frame.function == "_engine_run_backward" for frame in inner)
        if self.stack and (in_backward or caller is None or caller.is_ours):
            return Standing.UNCLEAR
        return Standing.ELSEWHERE

    @property
    def _caller(self) -> Frame | None:
        """The innermost frame outside of torch and the standard library."""
        inner = _inner(self.stack)
        return self.stack[len(inner)] if len(inner) < len(self.stack) else None

    def words(self) -> str:
        """Where the rank is, for the error line."""
        if self.stopped:
            return "stopped by SIGSTOP" + (f" in {self._where()}" if self.stack else "")
        return f"in {self._where()}" if self.stack else "its stack cannot be read"

    def _where(self) -> str:
        innermost = self.stack[0]
        caller = self._caller
        users = innermost_of_user(self.stack)
        named = f"your code, {users}" if users else str(caller or innermost)
        return named if innermost in (users, caller) else f"{named}, inside {innermost}"


def _inner(stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """The innermost frames of torch and of the standard library, and what torch calls between its own."""
    others = (
        at
        for at, frame in enumerate(stack)
        if not (frame.is_torchs or frame.is_pythons or frame.intercepts_torch)
    )
    return stack[: next(others, len(stack))]


def culprit(evidence: Sequence[Evidence]) -> Evidence:
    """The rank that hangs, of at least one."""
    worst = min(rank.standing for rank in evidence)
    if worst >= Standing.USERS_COLLECTIVE and (alone := _elsewhere_than_all_others(evidence)) is not None:
        return alone
    suspects = [rank for rank in evidence if rank.standing == worst]
    behind = min(suspects, key=lambda rank: (rank.step, rank.marks))
    ahead = max(suspects, key=lambda rank: (rank.step, rank.marks))
    if worst == Standing.COLLECTIVE and len(evidence) == 2 and ahead.step > behind.step:
        return ahead  # it left out the collective of an earlier step, in which the other waits
    return behind


def _elsewhere_than_all_others(evidence: Sequence[Evidence]) -> Evidence | None:
    counts = Counter((rank.step, rank.stack) for rank in evidence)
    if len(counts) != 2 or max(counts.values()) < 2:
        return None
    alone = [rank for rank in evidence if counts[rank.step, rank.stack] == 1]
    return alone[0] if len(alone) == 1 else None


def stack_of(dump: str) -> tuple[Frame, ...]:
    """The stack to judge a rank by, in the text that faulthandler wrote of all its threads; () without any.

    The main thread comes last. While it is in the backward pass, a thread that runs a Python function of autograd on a
    device counts instead.
    """
    threads: list[list[Frame]] = []
    for line in dump.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (match := _FRAME.match(line)):
            threads[-1].append(Frame(match[1], int(match[2]), match[3]))
    if not threads:
        return ()
    *others, main = (tuple(thread) for thread in threads)
    if any(frame.function == "_engine_run_backward" for frame in _inner(main)):
        running = (thread for thread in others if any("torch/autograd/function" in f.file for f in thread))
        return next(running, main)
    return main
