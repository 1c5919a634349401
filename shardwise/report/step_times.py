"""Predicted against measured seconds of a step, in total, by phase and by rank, and what would bring them together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from shardwise.core.plan import Plan
from shardwise.core.run_files import Outcome, PhasesRecord
from shardwise.core.units import format_bytes
from shardwise.hardware.profiles import kind_named
from shardwise.report.notation import COLOURS, deviation, error_in_words, peak_error, seconds
from shardwise.report.pictures import BACKGROUND, INK, PICTURE_RANKS, STYLE, WIDE_INCHES

PHASE_NAMES = ("rollout", "forward", "backward", "communication", "optimizer")
"""Phases in the order of a step."""

_PHASE_COLOURS = {
    "rollout": COLOURS["temporaries"],
    "forward": COLOURS["parameters"],
    "backward": COLOURS["activations"],
    "communication": COLOURS["communication"],
    "optimizer": COLOURS["optimizer_state"],
}

APART = 0.1
"""Above this error of the step time, a calibration is offered."""


@dataclass(frozen=True)
class PhaseTime:
    """Predicted and measured seconds of one phase; None where they are not known apart."""

    name: str
    predicted: float | None
    measured: float | None

    @property
    def error(self) -> str:
        if not self.predicted or not self.measured:
            return ""
        return deviation(self.predicted, self.measured)


def compared_phases(plan: Plan, outcome: Outcome | None) -> list[PhaseTime]:
    """The phases that were timed; () for a run without a measured step, or a plan of an older version."""
    if outcome is None or outcome.phases is None or not plan.step.phases:
        return []
    measured, predicted = outcome.phases.seconds, plan.step.phases
    return [
        PhaseTime(name, predicted.get(name), measured.get(name))
        for name in PHASE_NAMES
        if predicted.get(name) or measured.get(name)
    ]


@matplotlib.rc_context(STYLE)
def time_by_rank(plan: Plan, phases: PhasesRecord, width: float = WIDE_INCHES) -> Figure:
    """The planned phases of a step, and below them those that every rank measured; of many ranks the slowest."""
    ranks: list[tuple[int, Mapping[str, float]]] = list(enumerate(phases.ranks or (phases.seconds,)))
    slowest = sorted(ranks, key=lambda pair: -sum(pair[1].values()))[:PICTURE_RANKS]
    rows = [
        ("planned", plan.step.phases),
        *((f"rank {rank}", phase_seconds) for rank, phase_seconds in sorted(slowest)),
    ]
    figure = Figure(figsize=(width, 0.75 + 0.3 * len(rows)), layout="constrained")
    axes = figure.subplots()
    names = [name for name in PHASE_NAMES if any(name in spent for _, spent in rows)]
    for row, (_, spent) in enumerate(rows):
        begin = 0.0
        for phase in names:
            length = spent.get(phase, 0.0)
            how: dict[str, Any] = {"color": _PHASE_COLOURS[phase], "edgecolor": BACKGROUND, "linewidth": 0.5}
            axes.barh([row], [length], 0.62, left=begin, label=phase if row == 0 else "", **how)
            begin += length
        axes.annotate(seconds(begin), (begin, row), (6, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], color=INK)
    axes.invert_yaxis()
    axes.grid(False)
    axes.set_xlim(0, (1.12 if width >= WIDE_INCHES else 1.22) * max(sum(spent.values()) for _, spent in rows))
    axes.set_xlabel("seconds")
    columns = len(names) if width >= WIDE_INCHES else 2
    figure.legend(loc="outside upper left", ncols=columns, handlelength=1, handleheight=1)
    return figure


def peak_sentences(outcome: Outcome | None) -> Iterator[str]:
    """One line with the peak memory of the rank that needed most."""
    if outcome is None or not outcome.worst.measured_peak_bytes:
        return
    planned, measured = outcome.worst.predicted_peak_bytes, outcome.worst.measured_peak_bytes
    sizes = f"{format_bytes(planned)} predicted, {format_bytes(measured)} measured"
    yield f"peak memory: {sizes} (predicted {peak_error(planned, measured)})"


def step_sentences(plan: Plan, outcome: Outcome | None) -> Iterator[str]:
    """One line with the step's seconds; one with the phases; one that tells of a busy host, or offers a calibration.

    The last one where the error is large.
    """
    if outcome is None or not outcome.measured_step_seconds:
        return
    spent, planned = outcome.measured_step_seconds, outcome.predicted_step_seconds
    yield f"step: {seconds(planned)} predicted, {seconds(spent)} measured (predicted {error_in_words(planned, spent)})"
    if phases := compared_phases(plan, outcome):
        yield "phases, predicted/measured: " + ", ".join(
            f"{phase.name} {seconds(phase.predicted or 0.0)}/{seconds(phase.measured or 0.0)}"
            for phase in phases
        )
    if abs(planned / spent - 1) <= APART:
        return
    if outcome.other_cores and kind_named(plan.device).is_host:
        busy = f"other processes used {outcome.other_cores:.1f} of this machine's cores meanwhile"
        yield f"{busy}: idle, its steps are shorter"
    elif offer := plan.calibration_offer:
        yield offer
