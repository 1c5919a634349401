"""Starts the ranks of this machine, and reports the rank that failed or hung.

torchrun is not used for local runs. It listens on all interfaces, exits with 1 after a clean stop, and names the wrong
rank after a third of the kills. Here the store listens on 127.0.0.1 only (rank 0 inherits the bound socket), and each
rank has its own log.

``waiting.py`` finds the rank to blame, ``verdict.py`` words it. The other ranks get SIGTERM and, five seconds later,
SIGKILL; after a hang SIGKILL at once. On Linux the kernel kills the workers when the launcher dies.

A worker reports its progress and the line of its failure through memory (core/heartbeat.py). This module does not
import torch, because the command line imports it before it needs torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from shardwise.core import heartbeat
from shardwise.core.errors import ResourceError
from shardwise.core.heartbeat import Heartbeat
from shardwise.launch import preload
from shardwise.launch.log_lines import SHOW_CURSOR, CursorState, LogLines
from shardwise.launch.placement import LAUNCHER, LOOPBACK_INTERFACE, STORE_SOCKET
from shardwise.launch.preload import WORKER
from shardwise.launch.ranks import Command, Process, Rank, dying_with_parent
from shardwise.launch.stops import forwarding
from shardwise.launch.verdict import verdict
from shardwise.launch.waiting import end, wait_for_ranks

_JOIN_SECONDS = 2.0
"""A process in an uninterruptible system call does not end even after SIGKILL."""


def run_ranks(
    world_size: int,
    arguments: Sequence[str],
    log_folder: Path,
    environment: Mapping[str, str] | None = None,
    *,
    aloud: bool = False,
    saves: bool = True,
) -> tuple[int, str]:
    """Run ``python -m shardwise.worker ARGUMENTS`` on ranks 0 to ``world_size`` - 1.

    All output of rank R is appended to ``log_folder``/rank-R.log. Rank 0's standard output is passed through if
    ``aloud``. Stop signals (``stops.py``) are passed on to all ranks. ``environment`` overrides the variables of this
    process. The line of a failure advises to resume if the ranks save checkpoints (``saves``).

    Returns:
        The exit code, and the error line ("" without one). The code is 0; 75 after the ranks saved and stopped; the
        code of the culprit's error line, or 5 without one and after a hang; 128 + N if signal N stopped the ranks
        before they saved.

    Raises:
        ResourceError: the ranks cannot be started.
        OutOfMemory: a rank ran out of memory.
    """
    starting = _started_ranks(world_size, arguments, log_folder, environment or {}, aloud)
    with starting as ranks, forwarding(ranks) as stops:
        ended = wait_for_ranks(ranks, stops)
        if ended is None or ended.hang is None:
            end(ranks)
    if ended is None:
        return max(rank.code or 0 for rank in ranks), ""
    return verdict(ended, stops.numbers, saves)


def start_process(command: Command) -> Process:
    """Start ``python -m WORKER`` in its own session, so that only the launcher receives Ctrl-C and passes it on.

    A worker that was started before (``preloaded_run``) takes the command.
    """
    return preload.take(command) or subprocess.Popen(
        [sys.executable, "-m", WORKER, *command.arguments],
        stdin=subprocess.DEVNULL,
        stdout=command.stdout,
        stderr=command.stderr,
        env=command.environment,
        pass_fds=command.inherited,
        start_new_session=True,
        preexec_fn=dying_with_parent(),
    )


spawner: Callable[[Command], Process] = start_process
"""Starts each worker. Tests replace it by a fork of a process that has imported torch."""


@contextlib.contextmanager
def preloaded_run(world_size: int) -> Iterator[None]:
    """Let the workers of a run on this machine import torch during the block, in which it is planned and launched."""
    if spawner is not start_process:
        yield
        return
    with preload.preloaded_workers(world_size, _process_environment(world_size)):
        yield


# ---- starting ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _started_ranks(
    world_size: int, arguments: Sequence[str], log_folder: Path, environment: Mapping[str, str], aloud: bool
) -> Iterator[list[Rank]]:
    """Start the ranks; on leaving the block, kill the ones that still run."""
    ranks: list[Rank] = []
    try:
        try:
            log_folder.mkdir(parents=True, exist_ok=True)
            with (
                socket.create_server(("127.0.0.1", 0)) as store,
                heartbeat.shared(world_size) as (slots, beats),
            ):
                ours = {**_shared_environment(world_size, store.getsockname()[1]), **environment}
                given = os.environ | ours
                for rank, beat in enumerate(beats):
                    files = {heartbeat.HEARTBEAT_VARIABLE: slots} | (
                        {STORE_SOCKET: store.fileno()} if rank == 0 else {}
                    )
                    log = log_folder / f"rank-{rank}.log"
                    ranks.append(_start_rank(rank, beat, arguments, log, given, files, aloud and rank == 0))
        except OSError as error:
            raise ResourceError(
                f"cannot start {world_size} processes",
                where=str(error.filename or log_folder),
                why=error.strerror or str(error),
            ) from error
        yield ranks
    finally:
        for worker in ranks:
            worker.send(signal.SIGKILL)
        for worker in ranks:
            for thread in worker.threads:
                thread.join(_JOIN_SECONDS)


def _shared_environment(world_size: int, port: int) -> dict[str, str]:
    return _process_environment(world_size) | {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        LAUNCHER: str(os.getpid()),
    }


def _process_environment(world_size: int) -> dict[str, str]:
    """Variables that a worker reads when it starts."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = {
        "PYTHONUNBUFFERED": "1",  # the log has all output of a killed rank
        "PYTHONFAULTHANDLER": "1",
    }
    defaults = {
        "OMP_NUM_THREADS": str(max(1, available // world_size)),
        "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE,
        "NCCL_SOCKET_IFNAME": LOOPBACK_INTERFACE,
        # glibc >= 2.35: huge pages for large blocks, 15 times fewer page faults. It keeps returning large frees at
        # once while memory is measured (trainer/meter.py), which tcmalloc and jemalloc do not.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }
    return given | {name: os.environ.get(name, value) for name, value in defaults.items()}


def _start_rank(
    rank: int,
    beat: Heartbeat,
    arguments: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    files: Mapping[str, int],
    heard: bool,
) -> Rank:
    """Start one rank.

    Args:
        files: file descriptors that it inherits, by the environment variable that tells the rank their number.
        heard: whether its output is passed through.
    """
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} | {name: str(file) for name, file in files.items()}
    with log.open("ab") as file:
        start = file.tell()
        reading, stdout = os.pipe() if heard else (None, file.fileno())
        command = Command(
            tuple(arguments), {**environment, **own}, stdout, file.fileno(), tuple(files.values())
        )
        try:
            process = spawner(command)
        finally:
            if heard:
                os.close(stdout)
    started = Rank(rank, process, beat, log, start)
    if reading is not None:
        reader = threading.Thread(target=_pass_through, args=(reading, log), daemon=True)
        reader.start()
        started.threads.append(reader)
    return started


def _pass_through(descriptor: int, log: Path) -> None:
    """Copy rank 0's output to standard output, and as plain lines to its log.

    It reads on when neither can be written any more, because a rank whose pipe is full waits for ever. A rank that was
    killed while it showed progress has hidden the terminal's cursor, which is shown again, on a line of its own.
    """
    lines, cursor = LogLines(), CursorState()
    with log.open("ab", buffering=0) as file, os.fdopen(descriptor):
        shown = logged = True
        while block := os.read(descriptor, 1 << 16):
            shown = shown and _write_block(1, block)
            cursor.take(block)
            logged = logged and _write_block(file.fileno(), lines.take(block))
        if logged:
            _write_block(file.fileno(), lines.rest())
        if shown and cursor.hidden:
            _write_block(1, SHOW_CURSOR + b"\n")


def _write_block(descriptor: int, block: bytes) -> bool:
    """Write all of a block; whether that was possible."""
    view = memoryview(block)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError:
        return False
    return True
