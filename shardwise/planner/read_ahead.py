"""Dry runs on all cores: forked processes work ahead in a list of tasks while this one asks for their results.

A dry run is Python on one core, and the planner often knows the next ones. ``ReadAhead`` forks processes that take
tasks from the list and send the results through pipes. This process does other tasks of the list while it waits.

A task that no child has done is done here. That is so after an error in a child, where a child cannot run PyTorch's
backward pass (with a CUDA device in use), and where processes cannot be forked. So results are those of one process.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Generic, TypeVar

import torch

from shardwise.core.collector import frozen
from shardwise.hardware.this_machine import usable_cores

T = TypeVar("T")
R = TypeVar("R")

MAX_CHILDREN = 3
"""Children at a time, of all lists together."""

CHILD_PATIENCE = 60.0
"""Seconds to wait for a child's task before it is done here."""

_FREE, _HERE = 0, 255
"""Marks of a task. Children mark theirs with their own number, from 1."""

_children: set[BaseProcess] = set()


class ReadAhead(Generic[T, R]):
    """Results of tasks that several processes do. ``close`` ends the children; results not yet taken are lost."""

    def __init__(
        self, run: Callable[[T], R], tasks: Sequence[T], prepare: Callable[[], object] = lambda: None
    ) -> None:
        """Start the children.

        Args:
            run: does a task, here or in a child. Its result is pickled.
            prepare: called in a child before its first task.
        """
        self._run = run
        self._tasks = list(tasks)
        self._prepare = prepare
        self._results: dict[int, R] = {}
        self._children: dict[Connection, tuple[int, BaseProcess]] = {}
        self._marks = mmap.mmap(-1, max(1, len(self._tasks)))
        # This process takes a core and a task.
        count = min(MAX_CHILDREN, usable_cores() - 1, len(self._tasks) - 1) - len(_children)
        if count > 0 and sys.platform == "linux" and not multiprocessing.current_process().daemon:
            self._fork(count)

    def __enter__(self) -> ReadAhead[T, R]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the children."""
        for connection in list(self._children):
            self._forget(connection, kill=True)

    def get(self, number: int) -> R:
        """The result of one task. Raises the error of ``run``."""
        until = time.monotonic() + CHILD_PATIENCE
        while number not in self._results:
            self._receive(0.0)
            if number in self._results:
                break
            if self._marks[number] == _FREE or time.monotonic() > until:
                mine = number
            elif (free := self._marks.find(bytes([_FREE]))) in range(len(self._tasks)):
                mine = free
            else:
                self._receive(max(0.0, until - time.monotonic()))
                continue
            self._marks[mine] = _HERE
            self._results[mine] = self._run(self._tasks[mine])
        return self._results[number]

    def _receive(self, seconds: float) -> None:
        """Take the results that arrive within so many seconds. Tasks of a child that ended are free again."""
        for connection in wait(list(self._children), seconds):
            assert isinstance(connection, Connection)
            try:
                number, result = connection.recv()
            except Exception:  # the end of the child, or a result that cannot be read
                self._forget(connection)
            else:
                self._results[number] = result

    def _forget(self, connection: Connection, kill: bool = False) -> None:
        mark, process = self._children.pop(connection)
        connection.close()
        if kill:
            process.kill()
        process.join()
        _children.discard(process)
        for number in range(len(self._tasks)):
            if self._marks[number] == mark and number not in self._results:
                self._marks[number] = _FREE

    def _fork(self, count: int) -> None:
        context = multiprocessing.get_context("fork")
        for mark in range(1, count + 1):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=self._work, args=(theirs, mark), daemon=True)
            try:
                with _forking():
                    process.start()
            except OSError:  # no memory or no process is left
                return
            theirs.close()
            self._children[ours] = mark, process
            _children.add(process)

    def _work(self, connection: Connection, mark: int) -> None:
        """Do free tasks, in a child; each begins at another one."""
        code = 1
        try:
            torch.set_num_threads(1)  # the parent's other threads do not exist here
            # Output of a child would mix with that of the parent.
            silence = os.open(os.devnull, os.O_WRONLY)
            for stream in (1, 2):
                os.dup2(silence, stream)
            sys.stdout = sys.stderr = os.fdopen(silence, "w")
            self._prepare()
            count = len(self._tasks)
            for number in ((mark + step) % count for step in range(count)):
                if self._marks[number] == _FREE:
                    self._marks[number] = mark
                    connection.send((number, self._run(self._tasks[number])))
            code = 0
        finally:
            os._exit(code)  # without the parent's exit handlers and buffered output


@contextmanager
def _forking() -> Iterator[None]:
    """Keep the garbage collector from writing to pages that a child shares."""
    with frozen(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of other threads: they only draw the progress
        yield
