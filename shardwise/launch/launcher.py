"""Starts the ranks of this machine, and finds the rank that failed first.

torchrun is not used for local runs. It listens on all interfaces, exits with 1 after a clean stop, and names the wrong
rank after a third of the kills. Here the store listens on 127.0.0.1 only (rank 0 inherits the bound socket), and each
rank has its own log.

After a rank fails, its peers fail too, with a broken connection. A rank whose log ends with a broken connection is a
victim. The culprit is the first rank that failed for another reason; the launcher waits up to a second for it. The
other ranks get SIGTERM and, five seconds later, SIGKILL. On Linux the kernel kills the workers when the launcher dies.

A worker reports a failure by its exit code and the last ``error:`` line of its log. This module does not import torch,
because the command line imports it before it needs torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

from shardwise.core.errors import OutOfMemory, Preempted, RankError, ResourceError, ShardwiseError
from shardwise.launch.placement import LAUNCHER, LOOPBACK, STORE_SOCKET, launched_by

__all__ = ["launch", "launched_by", "run_ranks", "signal_name"]

WORKER = "shardwise.worker"
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that ask a run to save and stop, whether the launcher or a rank receives them."""

GRACE_SECONDS = 5.0
"""Between SIGTERM and SIGKILL, for the other ranks after one has failed."""

SETTLE_SECONDS = 1.0
"""How long to wait for the culprit after a victim has ended."""

_OURS = {kind.exit_code for kind in ShardwiseError.__subclasses__()}
_CLEAN = {0, Preempted.exit_code}
_BROKEN_CONNECTION = re.compile(
    r"gloo/|Connection (closed|reset|refused)|Broken pipe|Dist(Backend|Network|Store)Error"
    r"|ncclRemoteError|ncclSystemError|Watchdog caught"
)
_TAIL = 1 << 16


def launch(
    world_size: int,
    arguments: Sequence[str],
    log_folder: Path,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run ``python -m shardwise.worker ARGUMENTS`` on ranks 0 to ``world_size`` - 1.

    Rank 0's standard output is passed through. All output of rank R is appended to ``log_folder``/rank-R.log. SIGTERM,
    SIGINT and SIGUSR1 are passed on to all ranks. ``environment`` overrides the variables of this process. A failure is
    one line on standard error.

    Returns:
        0; 75 after the ranks saved and stopped; the culprit's code if it is one of Shardwise's, else 5; 128 + N if
        signal N stopped the ranks before they saved.

    Raises:
        ResourceError: the ranks cannot be started.
        OutOfMemory: a rank ran out of memory.
    """
    code, line = run_ranks(world_size, arguments, log_folder, environment, aloud=True)
    if line:
        print(line, file=sys.stderr, flush=True)
    return code


def run_ranks(
    world_size: int,
    arguments: Sequence[str],
    log_folder: Path,
    environment: Mapping[str, str] | None = None,
    *,
    aloud: bool = False,
) -> tuple[int, str]:
    """Like ``launch``, but returns the exit code and the error line ("" without one) instead of printing the line.

    Rank 0's output is passed through only if ``aloud``; its log always has it.
    """
    starting = _started(world_size, arguments, log_folder, environment or {}, aloud)
    with starting as ranks, _forwarding(ranks) as stops:
        culprit = _wait(ranks)
        _end(ranks)
    if culprit is None:
        return max(rank.code or 0 for rank in ranks), ""
    return _verdict(culprit, stops)


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


def start_process(command: Command) -> Process:
    """Start ``python -m WORKER`` in its own session, so that only the launcher receives Ctrl-C and passes it on."""
    return subprocess.Popen(
        [sys.executable, "-m", WORKER, *command.arguments],
        stdin=subprocess.DEVNULL,
        stdout=command.stdout,
        stderr=command.stderr,
        env=command.environment,
        pass_fds=command.inherited,
        start_new_session=True,
        preexec_fn=_dying_with_parent() if sys.platform == "linux" else None,
    )


spawner: Callable[[Command], Process] = start_process
"""Starts each worker. Tests replace it by a fork of a process that has imported torch."""


@dataclass
class _Rank:
    """One worker process. ``code`` is None while it runs."""

    rank: int
    process: Process
    log: Path
    log_start: int
    code: int | None = None
    threads: list[threading.Thread] = field(default_factory=list)

    def log_tail(self) -> list[str]:
        """The last lines of this process's output."""
        with self.log.open("rb") as file:
            file.seek(max(self.log_start, os.fstat(file.fileno()).st_size - _TAIL))
            text = file.read().decode("utf-8", "replace")
        return [line for line in text.splitlines() if line.strip()]

    @property
    def is_victim(self) -> bool:
        """Whether it ended because another rank ended."""
        may_be = self.code == -signal.SIGABRT or ((self.code or 0) > 0 and self.code != OutOfMemory.exit_code)
        return may_be and any(_BROKEN_CONNECTION.search(line) for line in self.log_tail()[-20:])


# ---- starting ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _started(
    world_size: int, arguments: Sequence[str], log_folder: Path, environment: Mapping[str, str], aloud: bool
) -> Iterator[list[_Rank]]:
    """Start the ranks; on leaving the block, kill the ones that still run."""
    ranks: list[_Rank] = []
    try:
        try:
            log_folder.mkdir(parents=True, exist_ok=True)
            with socket.create_server(("127.0.0.1", 0)) as store:
                shared = {**_shared_environment(world_size, store.getsockname()[1]), **environment}
                for rank in range(world_size):
                    heard, given = aloud and rank == 0, os.environ | shared
                    ranks.append(_start(rank, arguments, log_folder, given, store.fileno(), heard))
        except OSError as error:
            raise ResourceError(
                f"cannot start {world_size} processes",
                where=str(error.filename or log_folder),
                why=error.strerror or str(error),
            ) from error
        yield ranks
    finally:
        for each in ranks:
            _signal(each, signal.SIGKILL)
        for each in ranks:
            for thread in each.threads:
                thread.join()


def _shared_environment(world_size: int, port: int) -> dict[str, str]:
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONUNBUFFERED": "1",  # the log has all output of a killed rank
        "PYTHONFAULTHANDLER": "1",
        LAUNCHER: str(os.getpid()),
    }
    defaults = {
        "OMP_NUM_THREADS": str(max(1, available // world_size)),
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "NCCL_SOCKET_IFNAME": LOOPBACK,
    }
    return given | {name: os.environ.get(name, value) for name, value in defaults.items()}


def _start(
    rank: int,
    arguments: Sequence[str],
    log_folder: Path,
    environment: dict[str, str],
    store: int,
    heard: bool,
) -> _Rank:
    """Start one rank. Rank 0 inherits the socket ``store``. If ``heard``, its output is passed through."""
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} | ({STORE_SOCKET: str(store)} if rank == 0 else {})
    log = log_folder / f"rank-{rank}.log"
    with log.open("ab") as file:
        start, files = file.tell(), (store,) if rank == 0 else ()
        reading, stdout = os.pipe() if heard else (None, file.fileno())
        try:
            process = spawner(Command(tuple(arguments), environment | own, stdout, file.fileno(), files))
        finally:
            if heard:
                os.close(stdout)
    started = _Rank(rank, process, log, start)
    if reading is not None:
        reader = threading.Thread(target=_pass_through, args=(reading, log), daemon=True)
        reader.start()
        started.threads.append(reader)
    return started


def _dying_with_parent() -> Callable[[], None]:
    """Returns a function for a worker to run between fork and exec: the kernel then kills it when the launcher ends.

    libc is loaded before the fork, so the function takes no lock that another thread may hold.
    """
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def bind() -> None:
        prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)

    return bind


def _pass_through(descriptor: int, log: Path) -> None:
    """Copy rank 0's output to its log and to standard output, until the reader of standard output goes away."""
    open_end = True
    with log.open("ab", buffering=0) as file, os.fdopen(descriptor):
        while block := os.read(descriptor, 1 << 16):
            file.write(block)
            while open_end and block:
                try:
                    block = block[os.write(1, block) :]
                except OSError:
                    open_end = False


# ---- waiting ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _forwarding(ranks: list[_Rank]) -> Iterator[list[int]]:
    """Pass the signals in STOPPING on to the ranks; yields the list of signals received so far."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def forward(number: int, frame: FrameType | None) -> None:
        came.append(number)
        for rank in ranks:
            _signal(rank, signal.Signals(number))

    before = {number: signal.signal(number, forward) for number in STOPPING}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal(rank: _Rank, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        rank.process.send_signal(number)


def _wait(ranks: list[_Rank]) -> _Rank | None:
    """Wait until all ranks have ended well (None), or one has failed; returns the culprit."""
    ends: queue.SimpleQueue[_Rank] = queue.SimpleQueue()

    def wait(rank: _Rank) -> None:
        rank.process.wait()
        ends.put(rank)

    for rank in ranks:
        waiter = threading.Thread(target=wait, args=(rank,), daemon=True)
        waiter.start()
        rank.threads.append(waiter)
    failed: list[_Rank] = []
    deadline = float("inf")
    for _ in ranks:
        try:
            rank = ends.get(timeout=None if not failed else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        rank.code = rank.process.returncode
        if rank.code in _CLEAN:
            continue
        failed.append(rank)
        deadline = min(deadline, time.monotonic() + SETTLE_SECONDS)
        if not rank.is_victim:
            break
    return next((rank for rank in failed if not rank.is_victim), failed[0] if failed else None)


def _end(ranks: list[_Rank]) -> None:
    """End the ranks that still run: SIGTERM, then SIGKILL."""
    running = [rank for rank in ranks if rank.process.poll() is None]
    for rank in running:
        _signal(rank, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    for rank in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        _signal(rank, signal.SIGKILL)


# ---- the verdict ------------------------------------------------------------------------------------------


def _verdict(culprit: _Rank, stops: list[int]) -> tuple[int, str]:
    """The exit code and the error line. Raises OutOfMemory."""
    code = culprit.code or 0
    tail = culprit.log_tail()
    told = [line for line in tail if line.startswith("error: ")]
    if code in _OURS and told:
        return code, told[-1]
    if code == OutOfMemory.exit_code and not stops:
        raise OutOfMemory("out of memory", where=f"rank {culprit.rank}, {culprit.log}")
    place = f"pid {culprit.process.pid}, {culprit.log}"
    resume = "run the same command to go on from the last checkpoint"
    if -code in stops or code == OutOfMemory.exit_code:
        number = -code if -code in stops else stops[-1]
        what = f"stopped by {signal.Signals(number).name} before it could save"
        return 128 + number, RankError(what, where=place, fix=resume).line()
    what = f"rank {culprit.rank} was lost"
    if code < 0:
        error = RankError(what, where=place, why=f"killed by {signal_name(-code)}", fix=resume)
    else:
        why = f"it ended with exit code {code}" + (f", {tail[-1].strip()}" if tail else "")
        error = RankError(what, where=place, why=why, fix="see its log")
    return (code if code in _OURS else RankError.exit_code), error.line()


def signal_name(number: int) -> str:
    """The name of the signal that killed a process, and its usual cause."""
    hints = {signal.SIGKILL: " (the kernel does so when memory runs out)"}
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name + hints.get(signal.Signals(number), "")
    return f"signal {number}"
