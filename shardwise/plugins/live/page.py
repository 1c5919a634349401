"""The page of a run while it trains: its first content, and its changes since.

Pictures take seconds to draw, on the machine that trains. So the whole page is made once, and again only when the plan
or the report is new. In between, the page asks for the head, the events and the series, which are text and numbers.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from shardwise.core.errors import ShardwiseError
from shardwise.core.run_files import EVENTS
from shardwise.core.units import format_seconds
from shardwise.report.charts import series_charts
from shardwise.report.page import head_values, page_values
from shardwise.report.record import RunRecord, StepLines, read_run
from shardwise.report.series import MOST_MARKS, marks
from shardwise.report.template import policy, rendered

_PAGE = ("plan.json", "report.json", "recipe.yaml")
_CHANGES = ("metrics.jsonl", EVENTS)

STALE = 60.0
"""Seconds without a step after which the page says so."""


class LiveRun:
    """One run's folder, read again at every call."""

    policy = policy(live=True)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lines = StepLines(folder / "metrics.jsonl")
        self._page = ("", "")

    def page(self) -> str:
        """The page as HTML. Raises DataError where the folder cannot be read."""
        whole = self._stamp(_PAGE)
        if self._page[0] != whole:
            run = self._read()
            self._page = whole, rendered("page.html", {**page_values(run), "live": whole}, live=True)
        return self._page[1]

    def now(self, stamp: str) -> str | None:
        """The changes since ``stamp``, as JSON; None if nothing. That no step has finished is one. Raises DataError."""
        whole = self._stamp(_PAGE)
        changed = f"{self._stamp(_CHANGES)}_{self._age() // STALE:.0f}"
        if stamp == f"{whole}.{changed}":
            return None
        run = self._read()
        events = marks(run.folder)
        head: dict[str, Any] = {**head_values(run)}
        if run.outcome is None and run.steps:
            head["unfinished"] = self._progress(run)
        return json.dumps(
            {
                "stamp": f"{whole}.{changed}",
                "whole": whole,
                "ended": run.outcome is not None,
                "parts": {
                    "head": rendered("head.html", head),
                    "events": rendered("events.html", {"events": events[-MOST_MARKS:]}),
                },
                "charts": {"series": series_charts(run.steps, events, run.plan.step.units)},
            }
        )

    def _read(self) -> RunRecord:
        return read_run(self.folder, self._lines.read())

    def _progress(self, run: RunRecord) -> str:
        """How far the run is, and when its last step was."""
        done = run.steps[-1].step
        spent = run.step_seconds or 0.0
        try:
            steps = run.settings().steps
        except ShardwiseError:
            return f"Step {done}."
        age = self._age()
        if age > max(STALE, 10 * spent):
            return f"Step {done} of {steps}. No step has finished for {format_seconds(age)}."
        return f"Step {done} of {steps}, {format_seconds((steps - done) * spent)} left."

    def _age(self) -> float:
        """Seconds since the last step was written; 0 before the first."""
        try:
            return max(0.0, time.time() - (self.folder / "metrics.jsonl").stat().st_mtime)
        except OSError:
            return 0.0

    def _stamp(self, names: tuple[str, ...]) -> str:
        """Changes when one of these files does."""
        stamps = []
        for name in names:
            try:
                status = (self.folder / name).stat()
                stamps.append(f"{status.st_mtime_ns:x}-{status.st_size:x}")
            except OSError:
                stamps.append("0")
        return "_".join(stamps)
