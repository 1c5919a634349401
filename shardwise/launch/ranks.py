"""The ranks that a launcher has started: their processes, heartbeats and logs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil

from shardwise.core.errors import OutOfMemory, Preempted
from shardwise.core.heartbeat import RUNNING, Heartbeat

_CLEAN = {0, Preempted.exit_code}
BROKEN_CONNECTION = re.compile(
    r"gloo/|Connection (closed|reset|refused)|Broken pipe|Dist(Backend|Network|Store)Error"
    r"|ncclRemoteError|ncclSystemError|Watchdog caught"
)
_TIMED_OUT = re.compile(r"[Tt]imed out|Watchdog caught|collective operation timeout")
# Bytes of a log's end that are searched for an error, and that are read at most.
_TAIL_BYTES, _MOST_BYTES = 1 << 16, 1 << 20
_LAST_LINES = 20


class Process(Protocol):
    """A started worker; `subprocess.Popen` is one."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int, /) -> None: ...


@dataclass(frozen=True)
class Command:
    """A worker's arguments, environment, and the file descriptors of this process that it inherits."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    stdout: int
    stderr: int
    inherited: tuple[int, ...]


def dying_with_parent() -> Callable[[], None] | None:
    """A function for a worker to run between fork and exec: the kernel then kills it when the launcher ends.

    libc is loaded before the fork, so the function takes no lock that another thread may hold. None if not on Linux.
    """
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def bind() -> None:
        prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)

    return bind


@dataclass
class Rank:
    """One worker process. ``code`` is None while it runs."""

    rank: int
    process: Process
    heartbeat: Heartbeat
    log: Path
    log_start: int
    code: int | None = None
    threads: list[threading.Thread] = field(default_factory=list)

    def __str__(self) -> str:
        return f"pid {self.process.pid}, {self.log}"

    def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def send_to_main_thread(self, number: signal.Signals) -> None:
        """Like ``send``, but not to the thread of the kernel's choice, where the system can choose another."""
        if (tgkill := getattr(ctypes.CDLL(None), "tgkill", None)) is None:
            self.send(number)
        elif self.process.poll() is None:
            tgkill(self.process.pid, self.process.pid, number)

    def log_size(self) -> int:
        return self.log.stat().st_size

    def log_since(self, position: int) -> str:
        with self.log.open("rb") as file:
            file.seek(position)
            return file.read(_MOST_BYTES).decode("utf-8", "replace")

    def log_tail(self) -> list[str]:
        """The last lines of this process's output."""
        text = self.log_since(max(self.log_start, self.log_size() - _TAIL_BYTES))
        return [line for line in text.splitlines() if line.strip()]

    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped the process."""
        try:
            return psutil.Process(self.process.pid).status() in (
                psutil.STATUS_STOPPED,
                psutil.STATUS_TRACING_STOP,
            )
        except psutil.Error:
            return False

    @property
    def ended_well(self) -> bool:
        """Whether it ended with a clean code, and by itself: user code may end the process in the middle."""
        return self.code in _CLEAN and self.heartbeat.read().state != RUNNING

    @property
    def is_victim(self) -> bool:
        """Whether it ended because another rank ended or hung."""
        may_be = self.code == -signal.SIGABRT or ((self.code or 0) > 0 and self.code != OutOfMemory.exit_code)
        return may_be and self._says(BROKEN_CONNECTION)

    @property
    def timed_out(self) -> bool:
        """Whether a collective of it timed out, because another rank hangs."""
        return self._says(_TIMED_OUT)

    def _says(self, pattern: re.Pattern[str]) -> bool:
        lines = [*self.log_tail()[-_LAST_LINES:], self.heartbeat.read().line]
        return any(pattern.search(line) for line in lines)
