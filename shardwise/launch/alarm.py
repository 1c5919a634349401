"""The watchdog of a rank: limits for the launcher, and the judge of a run that torchrun or srun has started.

Shardwise's launcher judges from outside (waiting.py). Under another launcher a thread of each rank publishes the
rank's marks in the job's store. Ranks 0 and 1 read the marks of all. When no rank makes progress for the limit, they
ask for evidence: every rank adds its stack. A rank that does not answer is stopped or holds its GIL. One line names the
culprit, and all ranks that can exit with 5. Under srun rank 0 serves the store; when its process is stopped, no rank
can judge, and the timeout of the collectives ends the run.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from shardwise.core import heartbeat
from shardwise.core.errors import RankError
from shardwise.launch.hang import Evidence, Quiet, culprit, stack_of
from shardwise.launch.placement import LAUNCHER
from shardwise.launch.process import TIMEOUT
from shardwise.launch.user_code import Frame
from shardwise.runtime.torch_private import copy_of_store, set_timeouts

# Two ranks watch, because one of them may be the rank that hangs.
_JUDGES = 2
_ANSWER_SECONDS = 1.0
_ASKED_KEY, _LINE_KEY = "asked", "line"


def watch(limit: float | None) -> None:
    """From now on, ``limit`` seconds without progress on any rank end the run; None for no watchdog.

    Call it on every rank when the first step is done. Collectives get more time than the watchdog.
    """
    if limit is None:
        return
    set_timeouts(max(TIMEOUT, timedelta(seconds=2 * limit)))
    heartbeat.own.watch(limit)
    if LAUNCHER not in os.environ:
        Alarm(limit).start()


_judging = threading.Event()


def leave_it_to_the_alarm() -> None:
    """Call it when this rank fails. While ranks are judged, their connections break, which is no news."""
    if _judging.is_set():
        time.sleep(60 * _ANSWER_SECONDS)


class Alarm(threading.Thread):
    """Ends this process with 5 when the ranks agree that one hangs. It stops when the heartbeat is not watched."""

    def __init__(self, limit: float) -> None:
        super().__init__(daemon=True, name="watchdog")
        self._limit = limit
        self._poll = min(max(limit / 20, 0.1), 5.0)
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._store = PrefixStore("watchdog", copy_of_store())

    def run(self) -> None:
        quiet = Quiet(time.monotonic())
        with suppress(RuntimeError):  # the store goes with the rank that serves it
            while heartbeat.own.read().limit:
                self._publish(None)
                if self._rank < _JUDGES:
                    quiet.look(time.monotonic(), (beat.marks for beat in self._all()))
                if quiet.seconds >= self._limit:
                    self._store.set(_ASKED_KEY, "")
                if self._store.check([_ASKED_KEY]):
                    self._answer(quiet.seconds)
                time.sleep(self._poll)

    def _publish(self, stack: Sequence[Frame] | None) -> None:
        """Tell the others how far this rank is, and where it stands once they ask."""
        beat = heartbeat.own.read()
        frames = None if stack is None else [[frame.file, frame.line, frame.function] for frame in stack]
        said = {"host": socket.gethostname(), "step": beat.step, "marks": beat.marks, "stack": frames}
        self._store.set(f"rank-{self._rank}", json.dumps(said))

    def _said(self, rank: int) -> dict[str, Any]:
        """What a rank has published; nothing before its first word."""
        name = f"rank-{rank}"
        return json.loads(self._store.get(name)) if self._store.check([name]) else {}

    def _all(self) -> list[Evidence]:
        """What the ranks have published; a rank without a stack counts as stopped."""
        said = [self._said(rank) for rank in range(self._world_size)]
        return [
            Evidence(
                rank,
                answer.get("step", 0),
                answer.get("marks", 0),
                stopped=answer.get("stack") is None,
                stack=tuple(Frame(*frame) for frame in answer.get("stack") or ()),
            )
            for rank, answer in enumerate(said)
        ]

    def _answer(self, quiet_seconds: float) -> None:
        """Publish this rank's stack, judge if it is this rank's office, and exit."""
        _judging.set()
        with suppress(RuntimeError):
            dump = _dump()
            print(dump, file=sys.stderr, flush=True)
            self._publish(stack_of(dump))
            time.sleep(self._poll + _ANSWER_SECONDS)
            if self._rank < _JUDGES:
                line = self._judge(quiet_seconds)
                if self._store.compare_set(_LINE_KEY, "", line).decode() == line:
                    print(line, file=sys.stderr, flush=True)
            self._store.wait([_LINE_KEY], timedelta(seconds=10 * _ANSWER_SECONDS))
        os._exit(RankError.exit_code)

    def _judge(self, quiet_seconds: float) -> str:
        worst = culprit(self._all())
        what = f"rank {worst.rank} hung" + (f" in step {worst.step}" if not worst.stopped else "")
        words = "it does not answer: it is stopped, or its GIL is held" if worst.stopped else worst.words()
        why = f"no progress for {max(quiet_seconds, self._limit):.0f} s, {words}"
        fix = "the stacks are on standard error; the same command resumes"
        host = self._said(worst.rank).get("host", "an unknown host")
        where = f"of {self._world_size}, on {host}, judged by rank {self._rank}"
        return RankError(what, where=where, why=why, fix=fix).line()


def _dump() -> str:
    """The stacks of all threads of this process."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
