"""The series of ``metrics.jsonl`` over steps, with the events of the run as marks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from shardwise.core.counted import TOKENS, Units
from shardwise.core.run_files import EVENTS, StepRecord
from shardwise.report.notation import COLOURS, measure_label, unit_for
from shardwise.report.pictures import ACCENT, INK, MUTED, STYLE, WIDE_INCHES, drawable, loss_title, thinned

MARKED = ("spike", "skipped", "torn", "rewind", "no way back", "gave up", "out of memory")
"""Events that are shown; overflows and single odd steps are ordinary."""

MOST_MARKS = 50
"""Most events in the table of a page, the last ones."""

LINE_COLOURS = (
    INK,
    ACCENT,
    *(COLOURS[row] for row in ("gradients", "optimizer_state", "activations", "temporaries")),
)


@dataclass(frozen=True)
class Series:
    """One row of the picture.

    Attributes:
        title: with its unit.
        values: by name, one for each step; None where there is none.
        logarithmic: whether the axis is.
        apart: whether each line has a chart of its own where runs are compared; else the first line is compared.
    """

    title: str
    values: Mapping[str, Sequence[float | None]]
    logarithmic: bool = False
    apart: bool = False

    def spans_decades(self) -> bool:
        """Whether a logarithmic axis helps: values differ by more than a factor of ten."""
        positive = [v for line in self.values.values() for v in line if v is not None and v > 0]
        return self.logarithmic and bool(positive) and max(positive) > 10 * min(positive)


@dataclass(frozen=True)
class Mark:
    """An event of a run: its step, its name, and what caused it in words."""

    step: int
    event: str
    words: str


def series_of(steps: Sequence[StepRecord], units: Units = TOKENS) -> list[Series]:
    """The series of ``steps``, without those that have no value."""
    memory = unit_for(max((step.peak_bytes or 0 for step in steps), default=1) or 1)
    sets = dict.fromkeys(name for step in steps for name in step.held_out_losses or ())
    named = {name: [(step.held_out_losses or {}).get(name) for step in steps] for name in sets}
    rows = [
        Series(loss_title(units).replace("loss", "loss of validation sets"), named, apart=True),
        *_measure_rows(steps),
        Series("gradient norm", {"": [step.grad_norm for step in steps]}, logarithmic=True),
        Series("learning rate", {"": [step.learning_rate for step in steps]}),
        *_throughput(steps, units),
        Series(
            f"peak memory of rank 0, {memory.name}",
            {"": [None if step.peak_bytes is None else step.peak_bytes / memory.size for step in steps]},
        ),
        Series(
            "load of the busiest rank, relative to a balanced one",
            {"": [step.load_imbalance for step in steps]},
        ),
        Series(
            "tokens of the busiest expert, relative to the mean",
            {"": [step.busiest_expert for step in steps]},
        ),
        Series("experts without a token", {"": [step.dead_experts for step in steps]}),
        Series("loss scale", {"": [step.loss_scale for step in steps]}, logarithmic=True),
    ]
    return [row for row in rows if any(value is not None for line in row.values.values() for value in line)]


def _measure_rows(steps: Sequence[StepRecord]) -> list[Series]:
    """A row for every measure, whatever the objective: of the batches trained on, and of the held-out data."""
    names = dict.fromkeys(name for step in steps for name in (*(step.measures or ()), *(step.metrics or ())))
    rows = []
    for name in names:
        lines = {
            "training": [(step.measures or {}).get(name) for step in steps],
            "held-out": [(step.metrics or {}).get(name) for step in steps],
        }
        lines = {key: line for key, line in lines.items() if any(value is not None for value in line)}
        title = measure_label(name)
        if "training" not in lines:
            rows.append(Series(f"{title}, held-out", {"": lines["held-out"]}))
        else:
            rows.append(Series(title, lines if len(lines) > 1 else {"": lines["training"]}))
    return rows


def _throughput(steps: Sequence[StepRecord], units: Units) -> list[Series]:
    """Of the tokens that are read and trained on; in two rows where units differ."""
    processed = [step.processed_per_second for step in steps]
    title = f"{units.read} per second"
    trained = [step.tokens_per_second for step in steps]
    if units.trained == units.read:
        return [Series(title, {"processed": processed, "trained on": trained})]
    rows = [Series(title, {"": processed})]
    # Targets that a user's loss counts may be anything.
    return (
        rows if units.trained == "targets" else [*rows, Series(f"{units.trained} per second", {"": trained})]
    )


def marks(folder: Path) -> list[Mark]:
    """The events of a run that stand out, in order; () where the file cannot be read."""
    events = []
    with suppress(OSError):
        for line in (folder / EVENTS).read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, TypeError, KeyError):
                event = json.loads(line)
                if event["event"] in MARKED:
                    events.append(Mark(int(event["step"]), str(event["event"]), _event_cause(event)))
    return events


def _event_cause(event: Mapping[str, Any]) -> str:
    """What caused an event: figures, the reason, and the text of its samples."""
    said = [
        f"{name.replace('_', ' ')} {_figure(event[name])}" for name in ("loss", "grad_norm") if name in event
    ]
    said += [str(event[name]) for name in ("why", "blame") if event.get(name)]
    if "to_step" in event:
        said.append(f"back to step {event['to_step']}")
    said += [f"“{text}”" for text in event.get("text", [])[:3]]
    return " · ".join(said)


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


@matplotlib.rc_context(STYLE)
def series_picture(
    steps: Sequence[StepRecord], events: Sequence[Mark], width: float = WIDE_INCHES, units: Units = TOKENS
) -> Figure:
    """A row for each series, with a line at every event."""
    return _picture({"": steps}, series_of(steps, units), events, width)


def compared_series(runs: Mapping[str, Sequence[StepRecord]], units: Units = TOKENS) -> list[Series]:
    """A row for each series, with a line for each run by name; the loss first."""
    rows: dict[str, Series] = {}
    for name, steps in runs.items():
        if not steps:
            continue
        for row in [Series(loss_title(units), {"": [step.loss for step in steps]}), *series_of(steps, units)]:
            filled = {key: line for key, line in row.values.items() if any(v is not None for v in line)}
            lines = filled if row.apart else {"": next(iter(filled.values()))}
            for key, line in lines.items():
                title = f"{row.title}: {key}" if key else row.title
                before = rows.get(title, Series(title, {}, row.logarithmic))
                rows[title] = Series(title, {**before.values, name: line}, row.logarithmic)
    return list(rows.values())


@matplotlib.rc_context(STYLE)
def compared_picture(
    runs: Mapping[str, Sequence[StepRecord]], width: float = WIDE_INCHES, units: Units = TOKENS
) -> Figure:
    """A row for each series, with a line for each run by name."""
    return _picture(runs, compared_series(runs, units), [], width)


def _picture(
    runs: Mapping[str, Sequence[StepRecord]], rows: Sequence[Series], events: Sequence[Mark], width: float
) -> Figure:
    figure = Figure(figsize=(width, 0.4 + 1.25 * max(1, len(rows))), layout="constrained")
    if not rows:
        figure.text(0.5, 0.5, "no step has finished yet", ha="center", color=MUTED)
        return figure
    every = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
    for axes, row in zip(every, rows, strict=True):
        _draw_series(axes, row, runs)
        for step in sorted({event.step for event in events}):
            axes.axvline(step, color=COLOURS["gradients"], linewidth=0.8, linestyle=(0, (2, 2)))
    every[-1].set_xlabel("optimizer step")
    every[-1].xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8 if width >= WIDE_INCHES else 4))
    return figure


FloatArray = np.ndarray[Any, Any]


def series_points(steps: Sequence[StepRecord], line: Sequence[float | None]) -> tuple[FloatArray, FloatArray]:
    """The steps that have a value, and the values: NaN for one that cannot be drawn; thinned where many."""
    points = [(step.step, value) for step, value in zip(steps, line, strict=True) if value is not None]
    values = np.array([drawable(value) for _, value in points], dtype=float)
    return thinned(np.array([step for step, _ in points], dtype=int), values)


def _draw_series(axes: Any, row: Series, runs: Mapping[str, Sequence[StepRecord]]) -> None:
    axes.set_title(row.title, loc="left", color=MUTED, fontsize=9)
    for index, (name, line) in enumerate(row.values.items()):
        steps = runs.get(name) or next(iter(runs.values()))
        x, y = series_points(steps, line)
        marker = "o" if len(y) < 3 else ""
        axes.plot(
            x,
            y,
            color=LINE_COLOURS[index % len(LINE_COLOURS)],
            linewidth=1.2,
            label=name,
            marker=marker,
            markersize=3,
        )
    if row.spans_decades():
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    if len(row.values) > 1 or row.apart:
        axes.legend(loc="best", ncols=len(row.values))
