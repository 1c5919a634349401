"""A run's folder, read back as values: recipe, plan, a line per step, and the report that ends it.

A run may be read while it trains. Then `report.json` is not there yet, and the last line of `metrics.jsonl`
may be incomplete; both are normal. A file that cannot be read, or has unexpected content, is a DataError with file
and line, so that no page is made from half of a file.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from shardwise.core.answer import Answer
from shardwise.core.attempts import Interruption, interruptions
from shardwise.core.errors import DataError
from shardwise.core.fit_advice import FitAdvice
from shardwise.core.json_file import decoded, parse_json, read_bytes, read_json, read_text
from shardwise.core.notebook_html import notebook_card
from shardwise.core.paths import path_of
from shardwise.core.plan import Plan, read_plan
from shardwise.core.run_files import Outcome, StepRecord
from shardwise.core.units import format_bytes, format_seconds
from shardwise.recipe.load import parse_recipe
from shardwise.recipe.sections import Recipe
from shardwise.technique import AXES, SETTINGS

_THEME = (
    "max-width:26em;--ink:currentColor;--muted:gray;--line:rgba(128,128,128,.3);--shade:rgba(128,128,128,.1);"
    "--paper:transparent;--accent:#2a93b5"
)
"""The colours of a picture in a notebook, whose scheme is not known."""

SETTLING_STEPS = 3
"""First steps, which are slower while memory is measured: left out of typical figures."""


@dataclass(frozen=True, repr=False)
class RunRecord:
    """The files of a run.

    Attributes:
        folder: of the run; only a name when ``planned_only``.
        recipe: the resolved recipe as YAML.
        steps: one record per step that was not undone.
        outcome: None while the run trains, or when it did not reach its end.
        planned_only: there is a plan and no run.
        interruptions: ends of the run before its last step, after which it was started again.
        answer, advice: of a plan without a run.
    """

    folder: Path
    recipe: str
    plan: Plan
    steps: tuple[StepRecord, ...]
    outcome: Outcome | None
    planned_only: bool = False
    interruptions: tuple[Interruption, ...] = ()
    answer: Answer | None = None
    advice: FitAdvice | None = None

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def settings(self) -> Recipe:
        """The recipe as an object. Raises RecipeError."""
        file = self.folder / "recipe.yaml"
        return parse_recipe(self.recipe, SETTINGS, str(file), file)

    def __repr__(self) -> str:
        loss = f", loss {self.steps[-1].loss:.4f}" if self.steps else ""
        held_out = "" if self.held_out_loss is None else f", held-out loss {self.held_out_loss:.4f}"
        return f"<RunRecord {self.folder}: {self.plan.line}, {len(self.steps)} steps{loss}{held_out}>"

    def _repr_html_(self) -> str:
        """The run in a notebook: measured and predicted memory, and the loss over the steps."""
        from shardwise.report.pictures import NARROW_INCHES, loss_curve, svg  # matplotlib takes a second

        facts = [f"{len(self.steps):,} steps"]
        if self.outcome is not None:
            worst = self.outcome.worst
            sizes = f"{format_bytes(worst.measured_peak_bytes)} measured, {format_bytes(worst.predicted_peak_bytes)}"
            facts.append(f"peak of a device: {sizes} predicted")
        if spent := self.step_seconds:
            planned = format_seconds(self.plan.step.seconds)
            rate = f"{self.plan.step.tokens / spent:,.0f} {self.plan.step.unit}/s"
            facts.append(f"step: {format_seconds(spent)} measured, {planned} predicted; {rate}")
        if self.held_out_loss is not None:
            facts.append(f"held-out loss {self.held_out_loss:.4f}")
        facts.append(f"page: {self.folder / 'report.html'}")
        drawn = svg(loss_curve(self.steps, NARROW_INCHES, self.plan.step.units), f"Loss of {self.name}")
        return notebook_card(self.name, self.plan.line, facts, more=f'<div style="{_THEME}">{drawn}</div>')

    @property
    def step_seconds(self) -> float | None:
        """Typical time of a step: from the report, or the median of the steps so far without the first few."""
        if self.outcome is not None and self.outcome.measured_step_seconds is not None:
            return self.outcome.measured_step_seconds
        return _typical([step.seconds for step in self.steps])

    @property
    def tokens_per_second(self) -> float | None:
        """Typical rate of the targets that were trained on; the plan counts padding too."""
        return _typical([step.tokens_per_second for step in self.steps])

    @property
    def counted(self) -> str:
        """What the loss of a step is divided by, in a word."""
        return self.plan.step.units.trained

    @property
    def held_out_loss(self) -> float | None:
        """The validation loss: from the report, or the newest so far."""
        if self.outcome is not None and self.outcome.held_out_loss is not None:
            return self.outcome.held_out_loss
        return next((s.held_out_loss for s in reversed(self.steps) if s.held_out_loss is not None), None)


def _typical(values: list[float]) -> float | None:
    """The median after the first few steps, or of all when there are no more."""
    return statistics.median(values[SETTLING_STEPS:] or values) if values else None


def read_run(folder: Path, steps: tuple[StepRecord, ...] | None = None) -> RunRecord:
    """Read the folder of a run, finished or not. ``steps`` are those of its metrics, where they are known.

    Raises:
        DataError: it is not the folder of a run, or a file cannot be read or has unexpected content.
    """
    folder = path_of(folder)
    recipe, plan, report = folder / "recipe.yaml", folder / "plan.json", folder / "report.json"
    missing = [path.name for path in (recipe, plan) if not path.exists()]
    if missing:
        why = f"it has no {missing[0]}" if folder.is_dir() else "there is no such folder"
        fix = "give the folder that train --out had"
        raise DataError("not the folder of a run", where=str(folder), why=why, fix=fix)
    return RunRecord(
        folder=folder,
        recipe=read_text(recipe),
        plan=read_plan(plan, SETTINGS, AXES),
        steps=StepLines(folder / "metrics.jsonl").read() if steps is None else steps,
        outcome=read_json(report, Outcome) if report.exists() else None,
        interruptions=interruptions(folder),
    )


class StepLines:
    """The records of ``metrics.jsonl``, which may grow between two calls of ``read``.

    A line whose step is not above the one before follows a rewind: it undoes all records from its step on. Text after
    the last newline is still being written, and may end in half a character: it is left for the next call.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._steps: list[StepRecord] = []
        self._read = self._lines = self._inode = 0

    def read(self) -> tuple[StepRecord, ...]:
        """One record per step that was not undone; () while no step has been made. Raises DataError."""
        if not self._path.exists():
            self._steps = []
            return ()
        status = self._path.stat()
        if status.st_ino != self._inode or status.st_size < self._read:  # a resume has written it anew
            self._steps = []
            self._read = 0
            self._lines = 0
            self._inode = status.st_ino
        if status.st_size > self._read:
            self._add(read_bytes(self._path)[self._read :])
        return tuple(self._steps)

    def _add(self, raw: bytes) -> None:
        whole = raw[: raw.rfind(b"\n") + 1]
        for line in decoded(whole, self._path).split("\n")[:-1]:
            self._lines += 1
            if line.strip():
                record = parse_json(line, StepRecord, self._path, self._lines)
                while self._steps and self._steps[-1].step >= record.step:
                    self._steps.pop()
                self._steps.append(record)
        self._read += len(whole)
