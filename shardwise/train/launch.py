"""Starts the ranks of this machine, and says which one was to blame when they fall.

torchrun was not used for local runs: it listens on all interfaces, exits 1 after a clean stop, and names the
wrong rank in a third of the kills. Here the store listens on 127.0.0.1 alone (rank 0 inherits the bound
socket), every rank writes to a log of its own, and the launcher waits for processes instead of polling them.

When a rank ends badly its peers fail too, a moment later, with a broken connection. A rank whose log ends in
a broken connection is therefore a victim: the culprit is the first that ended for a reason of its own, for
which the launcher waits a second if it has to. The rest get SIGTERM and, five seconds later, SIGKILL. On
Linux the kernel kills the workers when the launcher dies, however it dies.

A worker's failure reaches the launcher as its exit code and the last ``error:`` line of its log; nothing else
is agreed between them. No torch here: the command line imports this file before it knows that it needs any.
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

from shardwise.core.errors import Preempted, RankError, ResourceError, ShardwiseError
from shardwise.train.placement import LAUNCHER, LOOPBACK, STORE_SOCKET, launched_by

__all__ = ["launch", "launched_by", "run_ranks", "signal_name"]

WORKER = "shardwise.train.worker"
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""What asks a run to save and stop, whether the launcher gets it or a rank."""

GRACE_SECONDS = 5.0
"""Between SIGTERM and SIGKILL, for the ranks that are left when one has failed."""

SETTLE_SECONDS = 1.0
"""How long a victim's culprit may take to end too."""

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
    reword: Callable[[int, str], str] | None = None,
) -> int:
    """Run ``python -m shardwise.train.worker ARGUMENTS`` on ranks 0 to ``world_size`` - 1; the exit code.

    Rank 0's standard output is passed through; everything that rank R writes is appended to
    ``log_folder``/rank-R.log. SIGTERM and SIGINT are passed on to all ranks. ``environment`` overrides this
    process's. A failure is told in one line on standard error, which ``reword`` may put otherwise, given the exit
    code and the line.

    Returns 0, or 75 when the ranks saved and stopped; the culprit's code when it is one of ours, else 5; and
    128 + N when signal N stopped the ranks before they could save. Raises ResourceError when the ranks cannot
    be started.
    """
    code, line = run_ranks(world_size, arguments, log_folder, environment, aloud=True)
    if line:
        print(line if reword is None else reword(code, line), file=sys.stderr, flush=True)
    return code


def run_ranks(
    world_size: int,
    arguments: Sequence[str],
    log_folder: Path,
    environment: Mapping[str, str] | None = None,
    *,
    aloud: bool = False,
) -> tuple[int, str]:
    """As ``launch``, without a word: the exit code, and the line of a failure, "" where there is none to tell.

    Unless ``aloud``, what rank 0 prints goes to its log alone, as that of all others does.
    """
    starting = _started(world_size, arguments, log_folder, environment or {}, aloud)
    with starting as ranks, _forwarding(ranks) as stops:
        culprit = _wait(ranks)
        _end(ranks)
    if culprit is None:
        return max(rank.code or 0 for rank in ranks), ""
    return _verdict(culprit, stops)


@dataclass
class _Rank:
    """One worker process. ``code`` is None while it runs."""

    rank: int
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int
    code: int | None = None
    threads: list[threading.Thread] = field(default_factory=list)

    def log_tail(self) -> list[str]:
        """The last lines that this process wrote."""
        with self.log.open("rb") as file:
            file.seek(max(self.log_start, os.fstat(file.fileno()).st_size - _TAIL))
            text = file.read().decode("utf-8", "replace")
        return [line for line in text.splitlines() if line.strip()]

    @property
    def is_victim(self) -> bool:
        """Whether it ended because another rank did."""
        may_be = self.code == -signal.SIGABRT or (self.code or 0) > 0
        return may_be and any(_BROKEN_CONNECTION.search(line) for line in self.log_tail()[-20:])


# ---- starting ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _started(
    world_size: int, arguments: Sequence[str], log_folder: Path, environment: Mapping[str, str], aloud: bool
) -> Iterator[list[_Rank]]:
    """The running ranks; none is left afterwards, whatever happens in between."""
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
        "PYTHONUNBUFFERED": "1",  # what a killed rank printed is in its log
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
    """``store`` is rank 0's to inherit. What it prints is passed through where it is ``heard``."""
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} | ({STORE_SOCKET: str(store)} if rank == 0 else {})
    log = log_folder / f"rank-{rank}.log"
    with log.open("ab") as file:
        start = file.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", WORKER, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if heard else file,
            stderr=file,
            env=environment | own,
            pass_fds=[store] if rank == 0 else [],
            start_new_session=True,  # Ctrl-C reaches the launcher, which passes it on once
            preexec_fn=_dying_with_parent() if sys.platform == "linux" else None,
        )
    started = _Rank(rank, process, log, start)
    if process.stdout is not None:
        reader = threading.Thread(target=_pass_through, args=(process.stdout.fileno(), log), daemon=True)
        reader.start()
        started.threads.append(reader)
    return started


def _dying_with_parent() -> Callable[[], None]:
    """What a worker runs between fork and exec, so that the kernel kills it when the launcher ends.

    The library is loaded beforehand; the call itself takes no lock that another thread may hold.
    """
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def bind() -> None:
        prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)

    return bind


def _pass_through(descriptor: int, log: Path) -> None:
    """Copy rank 0's output to ours and to its log. A reader of ours that goes away stops only the former."""
    open_end = True
    with log.open("ab", buffering=0) as file:
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
    """Pass on to the ranks what asks a run to save and stop; yields the list of what came."""
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
    """Until all ranks have ended well (None), or one has not and is the culprit."""
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
    """The exit code, and the line for standard error."""
    code = culprit.code or 0
    tail = culprit.log_tail()
    told = [line for line in tail if line.startswith("error: ")]
    if code in _OURS and told:
        return code, told[-1]
    place = f"pid {culprit.process.pid}, {culprit.log}"
    resume = "run the same command to go on from the last checkpoint"
    if -code in stops:
        what = f"stopped by {signal.Signals(-code).name} before it could save"
        return 128 - code, RankError(what, where=place, fix=resume).line()
    what = f"rank {culprit.rank} was lost"
    if code < 0:
        error = RankError(what, where=place, why=f"killed by {signal_name(-code)}", fix=resume)
    else:
        why = f"it ended with exit code {code}" + (f", {tail[-1].strip()}" if tail else "")
        error = RankError(what, where=place, why=why, fix="see its log")
    return (code if code in _OURS else RankError.exit_code), error.line()


def signal_name(number: int) -> str:
    """What a process was killed by, with what that tells."""
    hints = {signal.SIGKILL: " (the kernel does so when memory runs out)"}
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name + hints.get(signal.Signals(number), "")
    return f"signal {number}"
