"""Runs commands of the package in forks of the pool's template, as `python -m MODULE ARGUMENTS` would run them.

A command that trains starts Python 1 + N times, and each start imports torch: 3 to 5 seconds. A fork of a process that
has imported it starts in milliseconds. The command gets its own folder, environment and output, and ends with its own
exit code; so do the ranks that it launches, which are its children.

    def test_train(shell, tmp_path):
        done = shell.run("train", "recipe.yaml", "--out", "run", folder=tmp_path)
        assert done.returncode == 0, done.stderr

What a test of process starts checks needs a real process: torch not imported, closed pipes, torchrun, a killed rank.
Pictures of the command's report are blank: matplotlib would take half of the time of a run. tests/report/ draws them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import IO, Any

from shardwise.launch import launcher, preload
from shardwise.launch.launcher import WORKER
from shardwise.launch.ranks import Command
from tests.harness.pool import Pool, die_with

Done = subprocess.CompletedProcess[str]


class Shell:
    """Starts commands through the fork server of `pool`."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def run(self, *words: str, timeout: float = 120.0, **options: Any) -> Done:
        """Run `shardwise WORDS` to its end; `options` are those of `start`."""
        with self.start(*words, **options) as running:
            code = running.wait(timeout)
            return Done(words, code, running.stdout, running.stderr)

    def run_ranks(self, world_size: int, *words: str, **options: Any) -> list[Done]:
        """Run `shardwise WORDS` on ranks that find each other as torchrun's do; what each came to."""
        with self.start_ranks(world_size, *words, **options) as running:
            return _ended(words, running, time.monotonic() + 120.0)

    @contextlib.contextmanager
    def start_ranks(self, world_size: int, *words: str, **options: Any) -> Iterator[list[Running]]:
        """The ranks of `run_ranks`, which run during the block."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        world = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        shared = {
            **options.pop("environment", {}),
            **world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        with contextlib.ExitStack() as stack:
            yield [
                stack.enter_context(
                    self.start(
                        *words, environment={**shared, "RANK": str(r), "LOCAL_RANK": str(r)}, **options
                    )
                )
                for r in range(world_size)
            ]

    def start(
        self,
        *words: str,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        largest_file: int | None = None,
        ranks: int = 3,
    ) -> Running:
        """Start `shardwise WORDS` in `folder`.

        Args:
            environment: added to this process's.
            largest_file: bytes that a file may have, for the command and its ranks.
            ranks: processes that the command may start in all.
        """
        given = {**os.environ, **(environment or {})}
        where = str(folder or Path.cwd())
        return Running(self._pool, "shardwise", words, where, given, largest_file, ranks)


class Running:
    """A command that was started. Leaving its context kills it if it still runs."""

    def __init__(self, pool: Pool, module: str, words: tuple[str, ...], *surroundings: Any) -> None:
        self.returncode: int | None = None
        self._files = contextlib.ExitStack()
        self._out = self._files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        self._err = self._files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        files = (self._out.fileno(), self._err.fileno())
        self.pid, self._answer = pool.start(_command, module, words, *surroundings, files=files)

    def __enter__(self) -> Running:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.returncode is None:
            self.send_signal(signal.SIGKILL)
        self._answer.close()
        self._files.close()

    @property
    def stdout(self) -> str:
        return _text(self._out)

    @property
    def stderr(self) -> str:
        return _text(self._err)

    def send_signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def poll(self) -> int | None:
        """The exit code, or None while the command runs."""
        if self.returncode is None and self._answer.poll():
            self.returncode = self._pool_answer()
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        """The exit code; raises TimeoutError after `timeout` seconds."""
        if self.returncode is None and not self._answer.poll(timeout):
            raise TimeoutError(f"still running after {timeout:g} s: {self.stdout}{self.stderr}")
        code = self.poll()
        assert code is not None
        return code

    def _pool_answer(self) -> int:
        try:
            return int(Pool.answer(self._answer))
        except EOFError:
            return -signal.SIGKILL


def _ended(words: tuple[str, ...], ranks: list[Running], deadline: float) -> list[Done]:
    """How each rank ended. Each is closed at its end, because an open connection would keep its peers waiting."""
    done: dict[int, Done] = {}
    while len(done) < len(ranks):
        for rank, each in enumerate(ranks):
            if rank not in done and (code := each.poll()) is not None:
                done[rank] = Done(words, code, each.stdout, each.stderr)
                each.__exit__(None, None, None)
        if time.monotonic() > deadline:
            late = [each.stdout + each.stderr for rank, each in enumerate(ranks) if rank not in done]
            raise TimeoutError(f"ranks still run: {late}")
        time.sleep(0.01)
    return [done[rank] for rank in range(len(ranks))]


def _text(file: IO[bytes]) -> str:
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode()


# ---- in the command's process -----------------------------------------------------------------------------


def _command(
    module: str,
    words: tuple[str, ...],
    folder: str,
    environment: dict[str, str],
    largest_file: int | None,
    ranks: int,
    out: int,
    err: int,
) -> int:
    """The whole life of a command; returns its exit code."""
    from matplotlib import figure as matplotlib_figure  # the template has imported it; pytest need not

    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    sys.path.insert(0, folder)  # as `python -m` does
    os.chdir(folder)
    idle = [_Fork() for _ in range(ranks)]
    matplotlib_figure.Figure.savefig = _save_blank  # type: ignore[method-assign]

    def spawn(command: Command) -> _Fork:
        return idle.pop().begin(WORKER, command)

    launcher.spawner = spawn
    _run_in_forks(idle)
    return _as_main(module, words, environment, out, err)


def _save_blank(figure: object, stream: IO[Any], *, format: str, **options: Any) -> None:
    stream.write("<svg></svg>" if format == "svg" else b"")


def _run_in_forks(idle: list[_Fork]) -> None:
    """Let rank 0 of torchrun's ranks plan in a fork too."""
    from shardwise.cli import under_launcher

    def run(words: list[str], check: bool, text: bool, stdout: int | None, preexec_fn: object) -> Done:
        assert words[1] == "-m" and not check and text
        with tempfile.TemporaryFile() as file:
            output = file.fileno() if stdout else 1
            fork = idle.pop().begin(words[2], Command(tuple(words[3:]), dict(os.environ), output, 2, ()))
            return Done(words, fork.wait(), _text(file))

    under_launcher.subprocess = SimpleNamespace(  # type: ignore[assignment]
        run=run, PIPE=subprocess.PIPE, CompletedProcess=subprocess.CompletedProcess
    )


class _Fork:
    """A child that waits to be told what to run; to the launcher, a process.

    It is forked before anything of torch runs: threads do not survive a fork.
    """

    def __init__(self) -> None:
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self._told, theirs = socket.socketpair()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._told.close()
            _wait_and_run(parent, theirs)
        theirs.close()

    def begin(self, module: str, command: Command) -> _Fork:
        self._told.sendall(module.encode() + b"\n")
        preload.send(self._told, command)
        return self

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
            time.sleep(0.005)
        return code

    def send_signal(self, sig: int, /) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


def _wait_and_run(parent: int, told: socket.socket) -> None:
    """Never returns: the command's stack is below."""
    code = 1
    try:
        die_with(parent)
        os.setsid()
        if module := _line(told):
            command = preload.receive(told)
            assert command is not None
            files = command.stdout, command.stderr
            code = _as_main(module, command.arguments, dict(command.environment), *files)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _line(told: socket.socket) -> str:
    """The next line, without reading beyond it; "" at the end."""
    read = b""
    while (letter := told.recv(1)) not in (b"", b"\n"):
        read += letter
    return read.decode()


def _as_main(module: str, words: tuple[str, ...], environment: dict[str, str], out: int, err: int) -> int:
    """What `python -m MODULE WORDS` does after its start; the exit code."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", buffering=1, closefd=False, errors="backslashreplace")
    faulthandler.enable(sys.stderr)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = words
    tempfile.tempdir = None  # TMPDIR may be another
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code: Any = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else 0 if code is None else 1
