"""Runs a function on N ranks, each a fresh process with its own gloo group, in a few tens of milliseconds.

Importing torch costs seconds, forking a process that has imported it costs milliseconds. So one *template*
process imports everything once and forks every rank of every run: no state leaks from one test to the next,
and a test may kill its ranks. Refused: workers that live on between tests, which need their process groups
torn down and remade, and are gone once a test crashes one.

The template never runs torch code itself: thread pools and autograd's threads do not survive a fork.

    def total(start):                           # at module level, in any file
        tensor = torch.tensor(start + dist.get_rank())
        dist.all_reduce(tensor)
        return int(tensor)

    def test_total(pool):
        assert pool.run(4, total, 10) == [46, 46, 46, 46]

An exception on a rank is raised in the test, with its type and its trace; ranks that failed only because
another did are not blamed. A run that takes too long prints every rank's stack and raises TimeoutError.
"""
# ruff: noqa: S301 (pickles pass between this process and its own forks only)

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from ctypes import CDLL
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

T = TypeVar("T")

# Modules that ranks import. The template imports them once, so no rank spends the time.
_PRELOADED = (
    "pytest",
    "tests.harness.commands",
    "tests.harness.pool",
    "tests.harness.ranks",
    "matplotlib.figure",
    "rich.console",
    "shardwise.cli.main",
    "shardwise.model.native",
    "shardwise.planner.search",
    "shardwise.report.run",
    "shardwise.plugins.serve.samples",
    "shardwise.checkpoint.checkpoint",
    "shardwise.worker",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torchao.optim",
    "torchao.quantization",
    "transformers.models.llama.modeling_llama",
)
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_PLAIN = 0
"""Instead of a number of ranks: one process without a group."""

_GRACE = 10.0
"""Seconds that the other ranks have to notice that one has failed."""

_CONSEQUENCE = re.compile(r"gloo/|Connection (closed|reset)|DistNetworkError|DistStoreError")


class LostRank(RuntimeError):
    """A rank's process ended without an answer."""


@dataclass
class _Failure:
    rank: int
    error: BaseException
    trace: str

    @property
    def primary(self) -> bool:
        return not _CONSEQUENCE.search(self.trace)


class Pool:
    """Starts its template on first use; `close` ends it. Not for use by several threads at once."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._template: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def run(
        self, world_size: int, function: Callable[..., T], *arguments: object, timeout: float = 60.0
    ) -> list[T]:
        """`function(*arguments)` on ranks 0 to `world_size` - 1 of a new default group; results by rank.

        The function is a module-level one, found in the worker by its file. Arguments and results are
        pickled. The workers see this process's environment, working directory and `sys.path` as they are
        now. Raises what a rank raised, LostRank, or TimeoutError after `timeout` seconds.
        """
        if not 1 <= world_size <= self.world_size:
            raise ValueError(f"world size {world_size} is not within 1..{self.world_size}")
        if "<" in function.__qualname__:
            raise ValueError(f"{function.__qualname__} is not a module-level function")
        connections, pids, port = self._fork(world_size)
        try:
            for rank, connection in enumerate(connections):
                with contextlib.suppress(OSError):  # a rank that is gone already: seen when collecting
                    connection.send_bytes(_job(rank, world_size, port, timeout, function))
                    connection.send_bytes(pickle.dumps(arguments))
            return _collect(connections, pids, timeout)
        finally:
            for connection in connections:
                connection.close()  # tells the workers to exit

    def start(
        self, function: Callable[..., object], *arguments: object, files: Sequence[int]
    ) -> tuple[int, Connection]:
        """`function(*arguments, *descriptors)` in one process without a group; its pid, and where it `answer`s.

        `files` are descriptors, which that process inherits under other numbers.
        """
        control = self._start()
        mine, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(control, [bytes([_PLAIN])], [theirs.fileno(), *files])
            [pid] = _pids(control)
        connection = Connection(mine.detach())
        connection.send_bytes(_job(0, 0, 0, 0.0, function))
        connection.send_bytes(pickle.dumps(arguments))
        return pid, connection

    @staticmethod
    def answer(connection: Connection) -> Any:
        """What the function of `start` returned; raises what it raised, EOFError if it was killed."""
        kind, value, _ = pickle.loads(connection.recv_bytes())
        if kind != "result":
            raise value
        return value

    def close(self) -> None:
        if self._control is not None and self._template is not None:
            self._control.close()
            self._template.wait(timeout=10)
        self._control = self._template = None

    def _fork(self, world_size: int) -> tuple[list[Connection], list[int], int]:
        control = self._start()
        pairs = [socket.socketpair() for _ in range(world_size)]
        with socket.create_server(("127.0.0.1", 0)) as store:
            port = store.getsockname()[1]
            theirs = [store.fileno(), *(child.fileno() for _, child in pairs)]
            socket.send_fds(control, [bytes([world_size])], theirs)
            pids = _pids(control)
        for _, child in pairs:
            child.close()
        return [Connection(mine.detach()) for mine, _ in pairs], pids, port

    def _start(self) -> socket.socket:
        if self._control is None:
            self._control, theirs = socket.socketpair()
            with theirs:
                self._template = subprocess.Popen(
                    [sys.executable, "-m", "tests.harness.pool", str(theirs.fileno()), str(os.getpid())],
                    pass_fds=[theirs.fileno()],
                    env=os.environ | _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(sys.path)},
                )
        return self._control


def _pids(control: socket.socket) -> list[int]:
    answer = control.recv(4096)
    if not answer:
        raise RuntimeError("the pool's template process died; see stderr")
    return list(pickle.loads(answer))


def _job(rank: int, world_size: int, port: int, timeout: float, function: Callable[..., object]) -> bytes:
    file = function.__code__.co_filename
    where = (os.path.abspath(file), function.__module__, function.__qualname__)
    return pickle.dumps((rank, world_size, port, timeout, where, dict(os.environ), os.getcwd(), sys.path))


def _collect(connections: list[Connection], pids: list[int], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[_Failure] = []
    deadline = time.monotonic() + timeout
    while len(results) + len(failures) < len(connections):
        done = results.keys() | {failure.rank for failure in failures}
        pending = [c for rank, c in enumerate(connections) if rank not in done]
        ready = wait(pending, max(0.0, deadline - time.monotonic()))
        if not ready:
            _kill(pids, dump=not failures)
            if failures:
                break
            late = sorted(set(range(len(connections))) - done)
            raise TimeoutError(f"ranks {late} did not finish in {timeout:g} s; their stacks are on stderr")
        for connection in ready:
            rank = connections.index(connection)  # type: ignore[arg-type]
            answer = _receive(rank, connections[rank])
            if isinstance(answer, _Failure):
                failures.append(answer)
                deadline = min(deadline, time.monotonic() + _GRACE)
            else:
                results[rank] = answer[0]
    if failures:
        _kill(pids, dump=False)
        _raise(failures)
    return [results[rank] for rank in range(len(connections))]


def _receive(rank: int, connection: Connection) -> tuple[Any] | _Failure:
    try:
        kind, value, trace = pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        return _Failure(rank, LostRank(f"rank {rank} died"), "")
    return (value,) if kind == "result" else _Failure(rank, value, trace)


def _raise(failures: list[_Failure]) -> None:
    culprit = next((failure for failure in failures if failure.primary), failures[0])
    culprit.error.add_note(f"on rank {culprit.rank}:\n{culprit.trace}")
    for failure in failures:
        if failure is not culprit and failure.primary:
            culprit.error.add_note(f"rank {failure.rank} failed too:\n{failure.trace}")
    raise culprit.error


def _kill(pids: list[int], dump: bool) -> None:
    for number in [signal.SIGUSR1] * dump + [signal.SIGKILL]:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(0.3 * (number == signal.SIGUSR1))


# ---- in the template and its forks ------------------------------------------------------------------------


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however that happens."""
    if sys.platform == "linux":
        CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def _template(control: socket.socket) -> None:
    for name in _PRELOADED:
        with contextlib.suppress(ImportError):  # where one is broken, the test that needs it says so
            importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # a collection in a fork does not copy the pages of imported modules
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the workers
    me = os.getpid()
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1, 64)
        if not message:
            os._exit(0)  # torch's own shutdown takes a second
        pids = []
        for rank in [None] if message[0] == _PLAIN else range(message[0]):
            pid = os.fork()
            if pid == 0:
                _worker(me, control, fds, rank)
            pids.append(pid)
        for fd in fds:
            os.close(fd)
        control.send(pickle.dumps(pids))


def _worker(parent: int, control: socket.socket, fds: list[int], rank: int | None) -> None:
    """The whole life of one rank of one run, or of a plain process. Never returns: the template's stack is below."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        die_with(parent)
        control.close()
        if rank is None:
            _serve(Connection(fds[0]), _call, fds[1:])
            return
        listen, mine = fds[0], fds[1 + rank]
        for fd in fds:
            if fd != mine and (fd != listen or rank != 0):
                os.close(fd)
        _serve(Connection(mine), _execute, listen)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _serve(connection: Connection, execute: Callable[[Any, bytes, Any], Any], files: Any) -> None:
    try:
        job = pickle.loads(connection.recv_bytes())
        value = execute(job, connection.recv_bytes(), files)
        answer = pickle.dumps(("result", value, ""))
    except BaseException as error:
        connection.send_bytes(_pickled(error))
        return  # at once: the closed sockets tell the other ranks
    connection.send_bytes(answer)
    with contextlib.suppress(EOFError, ConnectionResetError):
        connection.recv_bytes()  # rank 0 holds the store: leave when everyone has answered


def _pickled(error: BaseException) -> bytes:
    trace = traceback.format_exc()
    try:
        answer = pickle.dumps(("failed", error, trace))
        pickle.loads(answer)
    except Exception:
        return pickle.dumps(("failed", RuntimeError(f"{type(error).__name__}: {error}"), trace))
    return answer


def _call(job: Any, arguments: bytes, files: list[int]) -> Any:
    function = _find_for(job)
    return function(*pickle.loads(arguments), *files)


def _execute(job: Any, arguments: bytes, listen: int) -> Any:
    from datetime import timedelta

    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    rank, world_size, port, timeout, *_ = job
    function = _find_for(job)
    limit = timedelta(seconds=timeout)
    store = TCPStore(
        "127.0.0.1",
        port,
        world_size,
        is_master=rank == 0,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=listen if rank == 0 else None,
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    value = function(*pickle.loads(arguments))
    if dist.is_initialized():  # the function may have ended it
        dist.barrier()
        dist.destroy_process_group()
    return value


def _find_for(job: Any) -> Any:
    """The job's function, in the surroundings of the test."""
    *_, where, environment, folder, path = job
    os.environ.clear()
    os.environ.update(environment | _ENVIRONMENT | {"GLOO_SOCKET_IFNAME": _LOOPBACK})
    os.chdir(folder)
    sys.path[:] = path
    return _find(*where)


def _find(file: str, module_name: str, qualname: str) -> Any:
    """The function, from a module loaded under the name that the test run knows it by (for pickling)."""
    module = sys.modules.get(module_name)
    if module is None or os.path.abspath(module.__file__ or "") != file:
        with contextlib.suppress(ImportError):  # the package of an installed module; test folders are none
            importlib.import_module(module_name.rpartition(".")[0] or "sys")
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    found: Any = module
    for name in qualname.split("."):
        found = getattr(found, name)
    return found


if __name__ == "__main__":
    die_with(int(sys.argv[2]))
    _template(socket.socket(fileno=int(sys.argv[1])))
