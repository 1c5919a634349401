"""Experiment trackers: every metric of metrics.jsonl and every event, through each tracker's own library.

A tracker never ends or delays a run. Its library is imported before the first step; everything else happens in a thread
that reads a queue. One that fails is reported by one warning and left out from then on. Nothing needs a network: files
go into the run's folder unless the library's own environment variables name another place.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from shardwise.core.plugins import TRACKERS, require_plugin
from shardwise.trainer.hooks import Callback, Values

CLOSING_SECONDS = 60.0
"""How long the end of a run waits for the trackers."""

TRACKERS_FOLDER = "trackers"
"""In the folder of a run."""

_NOT_FIGURES = {"samples", "positions", "event", "step", "text"}


class RunTracker(ABC):
    """One tracker of one run. Its methods may raise anything; it is then left out."""

    @abstractmethod
    def __init__(self, folder: Path, run: Mapping[str, Any]) -> None:
        """Begin, or go on after ``run["step"]`` steps.

        Args:
            folder: for its files; need not exist.
            run: what ``Callback.on_start`` gets.
        """

    @abstractmethod
    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """The numbers of a step, by name."""

    @abstractmethod
    def mark(self, step: int, name: str, text: str) -> None:
        """An event at a step."""

    @abstractmethod
    def close(self, reason: str) -> None:
        """The end: finished, stopped, preempted or failed."""


class Tracking(Callback):
    """Passes what a run tells its callbacks on to trackers.

    Args:
        warn: gets the one sentence about a tracker that failed.
    """

    def __init__(self, names: Sequence[str], folder: Path, warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._warn = warn
        self._kinds: dict[str, type[RunTracker]] = {}
        self._open: dict[str, RunTracker] = {}
        # Tasks of the thread, in order; None ends it.
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="trackers", daemon=True)
        for name in names:
            self._guarded(name, partial(self._imported, name))

    def on_start(self, run: Values) -> None:
        self._thread.start()
        self._queue.put(lambda: self._begin(run))

    def on_step(self, step: Values) -> None:
        number = step["step"]
        numbers = series(step)
        self._each(lambda tracker: tracker.log(number, numbers))

    def on_save(self, saved: Values) -> None:
        self._each(lambda tracker: tracker.mark(saved["step"], "checkpoint", saved["path"]))

    def on_event(self, event: Values) -> None:
        words = event_in_words(event)
        self._each(lambda tracker: tracker.mark(event["step"], event["event"], words))

    def on_end(self, end: Values) -> None:
        self._each(lambda tracker: tracker.close(end["reason"]))
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(CLOSING_SECONDS)
            if self._thread.is_alive():
                self._warn(f"trackers have not ended after {CLOSING_SECONDS:.0f} s: {', '.join(self._open)}")

    def _imported(self, name: str) -> None:
        module = require_plugin(TRACKERS[name], "trackers")
        self._kinds[name] = module.open_tracker()

    def _begin(self, run: Values) -> None:
        for name in list(self._kinds):
            self._guarded(name, partial(self._opened, name, run))

    def _opened(self, name: str, run: Values) -> None:
        self._open[name] = self._kinds[name](self._folder / TRACKERS_FOLDER / name, run)

    def _each(self, do: Callable[[RunTracker], None]) -> None:
        def task() -> None:
            for name, tracker in list(self._open.items()):  # a copy: a tracker that fails is taken out
                self._guarded(name, partial(do, tracker))

        self._queue.put(task)

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            task()

    def _guarded(self, name: str, do: Callable[[], None]) -> None:
        """Run a tracker's code; at its first error it is left out."""
        try:
            do()
        except BaseException as error:  # a foreign library may raise anything, SystemExit too
            self._kinds.pop(name, None)
            self._open.pop(name, None)
            first = (str(error).strip().splitlines() or [""])[0]
            self._warn(f"tracker {name} stopped: {type(error).__name__}: {first}")


def series(step: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a step, without the step's own."""
    groups = {name: value for name, value in step.items() if isinstance(value, Mapping)}
    inner = {f"{name}/{key}": value for name, group in groups.items() for key, value in group.items()}
    return {
        name: float(value)
        for name, value in {**step, **inner}.items()
        if isinstance(value, int | float)
        and name != "step"
        and math.isfinite(value)  # bool is an int: 0 or 1
    }


def event_in_words(event: Mapping[str, Any]) -> str:
    """An event in a line: its figures, and the text of its samples."""
    figures = [f"{name} {value}" for name, value in event.items() if name not in _NOT_FIGURES]
    samples = [f"samples {event['samples'][:8]}"] if event.get("samples") else []
    return " · ".join([*figures, *samples, *event.get("text", [])[:3]])
