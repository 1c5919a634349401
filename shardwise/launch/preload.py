"""Workers that import torch while the launcher still plans.

A worker needs three seconds to import torch and the training loop, and so does the planner. So ``preloaded_workers``
starts the workers of a local run first. Each imports its modules, and waits on a socket for its command: arguments,
environment, and the files that it inherits. Variables that a process reads when it starts are the same in both: the
launcher hands a command only to a worker whose variables are those of the command.

A worker that waits ends when its socket is closed. The launcher starts one in the usual way where none waits.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.core import heartbeat
from shardwise.launch.placement import STORE_SOCKET
from shardwise.launch.ranks import Command, Process, dying_with_parent

INHERITED = (heartbeat.HEARTBEAT_VARIABLE, STORE_SOCKET)
"""Variables with the number of a file descriptor, which differs in each process."""

WORKER = "shardwise.worker"
WAIT = "--wait"
"""Argument of a worker that gets its command at a socket, whose descriptor follows."""

_MOST_FILES = 8


@dataclass(frozen=True)
class _Waiting:
    """A worker that waits for its command. ``started_with``: variables that it has read at its start."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    started_with: Mapping[str, str]

    def end(self) -> None:
        self.control.close()
        self.process.kill()
        self.process.wait()


_waiting: list[_Waiting] = []


@contextlib.contextmanager
def preloaded_workers(count: int, variables: Mapping[str, str]) -> Iterator[None]:
    """Start ``count`` workers that wait for commands; those that got none by the end of the block are ended.

    Args:
        variables: of the environment that the commands will have.
    """
    try:
        with contextlib.suppress(OSError):  # the launcher says why no process starts
            _waiting.extend(_start_waiting(variables) for _ in range(count))
        yield
    finally:
        while _waiting:
            _waiting.pop().end()


def take(command: Command) -> Process | None:
    """A waiting worker that runs the command now; None if there is none for it."""
    for worker in _waiting:
        if all(command.environment.get(name) == value for name, value in worker.started_with.items()):
            _waiting.remove(worker)
            try:
                send(worker.control, command)
            except OSError:  # it ended; a new one says why in its log
                worker.end()
                return None
            worker.control.close()
            return worker.process
    return None


def _start_waiting(variables: Mapping[str, str]) -> _Waiting:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", WORKER, WAIT, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **variables},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            preexec_fn=dying_with_parent(),
        )
    return _Waiting(process, ours, variables)


def send(control: socket.socket, command: Command) -> None:
    """Send a command and its open files. Raises OSError if the process at the other end is gone."""
    files = [command.stdout, command.stderr, *command.inherited]
    given = {"arguments": command.arguments, "environment": dict(command.environment), "files": files}
    socket.send_fds(control, [b"."], files)
    control.sendall(json.dumps(given).encode() + b"\n")


def receive(control: socket.socket) -> Command | None:
    """The command that was sent, with the numbers that its files have in this process; None if none will be."""
    told, files, _, _ = socket.recv_fds(control, 1, _MOST_FILES)
    if not told:
        return None
    with control, control.makefile("r", encoding="utf-8") as lines:
        given = json.loads(lines.readline())
    here = {str(theirs): str(ours) for theirs, ours in zip(given["files"][2:], files[2:], strict=True)}
    environment: dict[str, str] = given["environment"]
    inherited = {name: here[environment[name]] for name in INHERITED if name in environment}
    return Command(tuple(given["arguments"]), environment | inherited, files[0], files[1], tuple(files[2:]))


def become(descriptor: int) -> Sequence[str] | None:
    """Wait for the command of this process; take its environment and output. Returns its arguments, None without one.

    Args:
        descriptor: of the socket at which the command arrives.
    """
    command = receive(socket.socket(fileno=descriptor))
    if command is None:
        return None
    os.environ.clear()
    os.environ.update(command.environment)
    for ours, number in ((command.stdout, 1), (command.stderr, 2)):
        os.dup2(ours, number)
        os.close(ours)
    return command.arguments
