"""Pictures of a plan and a run: matplotlib figures, as PNG files and as SVG for the page.

    loss_curve         training loss, held-out loss and learning rate over steps
    memory_timeline    the ledger through one optimizer step, its peak, the device's capacity
    peaks_by_rank      predicted and measured peaks, with the error
    ledger_bar         the ledger at the peak as one bar

Figures are made without pyplot, so there is no global state and no figure to close. In SVG the five theme colours
become CSS variables and text stays text. So a picture follows the page's light or dark scheme, and its text can be
searched and copied. No fonts are embedded. Every figure is drawn at its display width, once for desktops and once for
phones, because scaling in the browser would shrink the text.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from shardwise.core.counted import TOKENS, Units
from shardwise.core.errors import one_line
from shardwise.core.ledger import Ledger
from shardwise.core.plan import Plan
from shardwise.core.run_files import RankMemory, StepRecord
from shardwise.report.notation import COLOURS, MemoryUnit, by_size, deviation, row_label, unit_for

INK, MUTED, LINE, SHADE, BACKGROUND, ACCENT = "#1b1f25", "#68707d", "#dde1e6", "#f1f3f6", "#ffffff", "#0b6b88"
_VARIABLES = {INK: "ink", MUTED: "muted", LINE: "line", SHADE: "shade", BACKGROUND: "paper", ACCENT: "accent"}


def page_colour(colour: str) -> str:
    """A colour of a picture as the page's style sheet knows it: theme colours are its variables."""
    return f"var(--{_VARIABLES[colour]})" if colour in _VARIABLES else colour


WIDE_INCHES, NARROW_INCHES = 9.6, 3.9
"""Width in inches of the page's column on a desktop and on a phone."""

STACK = (
    "overhead",
    "parameters",
    "master_weights",
    "optimizer_state",
    "gradients",
    "activations",
    "communication",
    "temporaries",
    "fragmentation",
)
"""Ledger rows from the bottom of the timeline up: constant rows below changing rows."""

PICTURE_RANKS = 16
_HOLLOW = {"marker": "o", "markersize": 5, "markerfacecolor": BACKGROUND, "markeredgewidth": 1.5}

MAX_CURVE_POINTS = 900
"""Most points of a curve; with more, neighbours are merged into their extremes."""

LARGEST_DRAWN = 1e300
"""Sums of margins and ticks overflow a few decades above."""

STYLE: dict[str, Any] = {
    "font.size": 9.0,
    "font.family": ["DejaVu Sans"],
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": LINE,
    "axes.facecolor": "none",
    "axes.labelcolor": MUTED,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.unicode_minus": True,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "svg.fonttype": "none",
}


# -- files --------------------------------------------------------------------------------------------


def png(figure: Figure, dots_per_inch: int = 160) -> bytes:
    """The figure on white."""
    stream = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(stream, format="png", dpi=dots_per_inch, facecolor=BACKGROUND)
    return stream.getvalue()


def svg(figure: Figure, name: str) -> str:
    """The figure as a transparent `<svg>` element for HTML, in the page's colours and font.

    Args:
        name: text alternative of the picture; it also makes ids unique among several pictures.
    """
    stream = io.StringIO()
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": f"{name} {figure.get_figwidth()}"}):
        figure.savefig(stream, format="svg", transparent=True, metadata=metadata)
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    for pattern, instead in _FOR_THE_PAGE:
        text = re.sub(pattern, instead, text, flags=re.DOTALL)
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    return text.replace("<svg", f'<svg role="img" aria-label="{_attribute(name)}"', 1)


_FOR_THE_PAGE = (
    (r'(<svg[^>]*?) xmlns:xlink="[^"]*"', r"\1"),
    (r'(<svg[^>]*?) xmlns="[^"]*"', r"\1"),
    (r'(<svg[^>]*?) version="[^"]*"', r'\1 style="stroke-linejoin: round; stroke-linecap: butt"'),
    (r"\s*<defs>\s*<style.*?</style>\s*</defs>", ""),
    (r"<metadata>.*?</metadata>", ""),
    (r"font-family: [^;\"]*;? ?", ""),
    (r"font: ([\d.]+px) [^;\"]*", r"font-size: \1"),
    (r"font: (\w+) ([\d.]+px) [^;\"]*", r"font-weight: \1; font-size: \2"),
    (r' id="(?![mph][0-9a-f]{10}")[^"]*"', ""),
)
"""Parts of an `<svg>` file that an element within a page must not have: namespaces, global style, fonts."""


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")


# -- loss ---------------------------------------------------------------------------------------------


def loss_title(units: Units) -> str:
    """The loss of tokens is in nats. That of an objective has no unit, and is a mean over what it counts."""
    if units == TOKENS:
        return "loss, nats per token"
    return "loss" if units.trained == "targets" else f"loss, mean over {units.trained}"


@matplotlib.rc_context(STYLE)
def loss_curve(steps: Sequence[StepRecord], width: float = WIDE_INCHES, units: Units = TOKENS) -> Figure:
    """Training loss (each step, and smoothed if there are many), validation loss, and the learning rate."""
    figure = Figure(figsize=(width, 4.3), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(4.5, 1))
    below.set_xlabel("optimizer step")
    below.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8 if width >= WIDE_INCHES else 4))
    above.set_title(loss_title(units), loc="left", color=MUTED, fontsize=9)
    below.set_title("learning rate", loc="left", color=MUTED, fontsize=9)
    if not steps:
        above.text(0.5, 0.5, "no step has finished yet", transform=above.transAxes, ha="center", color=MUTED)
        return figure
    number = np.array([step.step for step in steps])
    loss = np.array([drawable(step.loss) for step in steps])
    _draw_training(above, number, loss)
    held_out = [(s.step, s.held_out_loss) for s in steps if s.held_out_loss is not None]
    if held_out:
        at, values = zip(*held_out, strict=True)
        above.plot(
            at, [drawable(value) for value in values], color=ACCENT, linewidth=1, label="held-out", **_HOLLOW
        )
    _event_mark(above, [s.step for s in steps if s.skipped], "update skipped", "|")
    left_out = [s.step for s in steps if math.isnan(drawable(s.loss))]
    _event_mark(above, left_out, "not a number, or too large to draw", "x")
    above.legend(loc="upper right")
    rates = np.array([step.learning_rate for step in steps])
    below.plot(*thinned(number, rates), color=MUTED, linewidth=1.2)
    below.set_ylim(0, 1.15 * max(rates.max(), 1e-12))
    below.set_yticks([0, rates.max()], ["0", f"{rates.max():.1e}".replace("e-0", "e-").replace("-", "−")])
    return figure


def drawable(value: float) -> float:
    """The value, or NaN if it is no finite number or so large that matplotlib overflows."""
    return value if abs(value) < LARGEST_DRAWN else math.nan


def _draw_training(axes: Any, number: np.ndarray[Any, Any], loss: np.ndarray[Any, Any]) -> None:
    window = len(loss) // 40
    if window < 2:
        marker = "o" if len(loss) < 3 else ""
        axes.plot(number, loss, color=INK, linewidth=1.6, label="training", marker=marker, markersize=3)
        return
    axes.plot(*thinned(number, loss), color=INK, linewidth=0.6, alpha=0.4)
    axes.plot(*thinned(number, _smoothed(loss, window)), color=INK, linewidth=1.6, label="training")


def _smoothed(values: np.ndarray[Any, Any], window: int) -> np.ndarray[Any, Any]:
    """Mean over ``window`` neighbours, fewer at the ends; NaN where a value is NaN."""
    valid = np.isfinite(values)
    kernel = np.ones(window)
    sums = np.convolve(np.where(valid, values, 0.0), kernel, "same")
    counts = np.convolve(valid.astype(float), kernel, "same")
    return np.where(valid, sums / np.maximum(counts, 1), np.nan)


def thinned(
    x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """About `MAX_CURVE_POINTS` of the points or fewer: the lowest and the highest of each group of neighbours."""
    if len(x) <= MAX_CURVE_POINTS:
        return x, y
    kept = set[int]()
    for part in np.array_split(np.arange(len(x)), MAX_CURVE_POINTS // 2):
        values = y[part]
        finite = np.isfinite(values)
        kept.add(int(part[np.argmin(np.where(finite, values, np.inf))]))
        kept.add(int(part[np.argmax(np.where(finite, values, -np.inf))]))
    index = np.array(sorted(kept))
    return x[index], y[index]


def _event_mark(axes: Any, steps: Sequence[int], name: str, marker: str) -> None:
    """A mark at the bottom of the picture for each of ``steps``."""
    if steps:
        foot = axes.get_xaxis_transform()
        heights = [0.03] * len(steps)
        colour = COLOURS["gradients"]
        axes.plot(
            steps, heights, marker, transform=foot, color=colour, markersize=6, label=name, clip_on=False
        )


# -- memory -------------------------------------------------------------------------------------------


@matplotlib.rc_context(STYLE)
def memory_timeline(plan: Plan, width: float = WIDE_INCHES) -> Figure:
    """The worst rank's memory through one optimizer step by ledger row, its peak, and the capacity."""
    wide = width >= WIDE_INCHES
    figure = Figure(figsize=(width, 4.0 if wide else 4.4), layout="constrained")
    axes = figure.subplots()
    ledgers, top = through_the_step(plan)
    if not ledgers or not plan.peak.bytes:
        axes.text(0.5, 0.5, "this plan holds no timeline", transform=axes.transAxes, ha="center", color=MUTED)
        return figure
    peak = plan.peak.bytes
    capacity = plan.capacity_bytes
    unit = unit_for(peak)
    rows = [row for row in STACK if any(getattr(ledger, row) for ledger in ledgers)]
    heights = [[getattr(ledger, row) / unit.size for ledger in ledgers] for row in rows]
    areas = axes.stackplot(range(len(ledgers)), heights, colors=[COLOURS[row] for row in rows], linewidth=0)
    axes.set_ylim(0, (1.12 * max(peak, capacity) if capacity <= 2 * peak else 1.25 * peak) / unit.size)
    axes.set_xlim(0, max(1, len(ledgers) - 1))
    axes.set_xticks([])
    axes.set_xlabel("one optimizer step, in the order of allocations")
    axes.set_ylabel(unit.name)
    _shade_phases(axes, [point.phase for point in plan.timeline], width)
    _mark_peak(axes, top, len(ledgers), peak / unit.size, unit)
    _draw_capacity(axes, capacity, peak, unit)
    location, columns = ("outside right upper", 1) if wide else ("outside lower left", 2)
    visible = [index for index, height in enumerate(heights) if max(height) * unit.size > peak / 1000][::-1]
    handles, names = [areas[index] for index in visible], [row_label(rows[index]) for index in visible]
    figure.legend(handles, names, loc=location, ncols=columns, handlelength=1, handleheight=1)
    return figure


def through_the_step(plan: Plan) -> tuple[list[Ledger], int]:
    """(the ledger at every point, with the profile's overhead; the index of the peak).

    The timeline comes from the dry run. The highest point uses the peak's own ledger, which also includes memory that
    lives only within one operation.
    """
    points = [point.ledger for point in plan.timeline]
    if not points:
        return [], 0
    if not any(ledger.overhead for ledger in points):
        points = [ledger.plus(overhead=plan.ledger.overhead) for ledger in points]
    same_phase = [i for i, point in enumerate(plan.timeline) if point.phase == plan.peak.phase]
    top = max(same_phase or range(len(points)), key=lambda index: points[index].total)
    points[top] = plan.ledger
    return points, top


def _shade_phases(axes: Any, phases: Sequence[str], width: float) -> None:
    """Alternate the background by phase, and name each phase that is wide enough above it."""
    start = 0
    for index, (phase, members) in enumerate(groupby(phases)):
        end = start + len(list(members))
        if index % 2 == 0:
            axes.axvspan(start, min(end, len(phases) - 1), color=SHADE, zorder=-2, linewidth=0)
        name = one_line(phase)
        if (end - start) / len(phases) * width * 0.75 > 0.065 * len(name):
            middle, above = (start + end) / 2, axes.get_xaxis_transform()
            axes.text(middle, 1.015, name, transform=above, ha="center", color=MUTED, fontsize=8)
        start = end


def _mark_peak(axes: Any, top: int, points: int, height: float, unit: MemoryUnit) -> None:
    axes.plot([top], [height], "o", color=INK, markersize=5, clip_on=False)
    left = top > points / 2
    axes.annotate(
        f"peak {height:.{unit.decimals}f} {unit.name}",
        (top, height),
        xytext=(-8 if left else 8, 4),
        textcoords="offset points",
        ha="right" if left else "left",
        weight="bold",
    )


def _draw_capacity(axes: Any, capacity: int, peak: int, unit: MemoryUnit) -> None:
    """A dashed line at the capacity; only words if the line would flatten the rest of the picture."""
    words = f"capacity {unit_for(capacity).write(capacity)}"
    if capacity <= 2 * peak:
        axes.axhline(capacity / unit.size, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        left = axes.get_yaxis_transform()
        axes.annotate(words, (0, capacity / unit.size), (4, 4), xycoords=left, textcoords="offset points")
    else:
        axes.text(0.005, 0.96, f"{words}, far above", transform=axes.transAxes, color=MUTED)


@matplotlib.rc_context(STYLE)
def peaks_by_rank(ranks: Sequence[RankMemory], width: float = WIDE_INCHES) -> Figure:
    """Predicted and measured peak of every rank, with the error.

    With more than `PICTURE_RANKS` ranks, those with the highest peaks.
    """
    most = sorted(ranks, key=lambda rank: -rank.measured_peak_bytes)[:PICTURE_RANKS]
    shown = sorted(most, key=lambda rank: rank.rank)
    figure = Figure(figsize=(width, 0.75 + 0.4 * len(shown)), layout="constrained")
    axes = figure.subplots()
    unit = unit_for(max((max(r.predicted_peak_bytes, r.measured_peak_bytes) for r in shown), default=1))
    rows = np.arange(len(shown))
    predicted = [rank.predicted_peak_bytes / unit.size for rank in shown]
    measured = [rank.measured_peak_bytes / unit.size for rank in shown]
    axes.barh(rows - 0.17, predicted, 0.28, color=BACKGROUND, edgecolor=MUTED, linewidth=1, label="predicted")
    axes.barh(rows + 0.17, measured, 0.32, color=ACCENT, label="measured")
    for row, rank in zip(rows, shown, strict=True):
        error = deviation(rank.predicted_peak_bytes, rank.measured_peak_bytes)
        size = unit.write(rank.measured_peak_bytes)
        longest = max(predicted[row], measured[row])
        text = f"{size}\u2002{error}" if width >= WIDE_INCHES else error
        axes.annotate(text, (longest, row), (6, 0), textcoords="offset points", va="center")
    axes.set_yticks(rows, [f"rank {rank.rank}" for rank in shown])
    axes.invert_yaxis()
    axes.grid(False)
    axes.set_xlabel(unit.name)
    axes.set_xlim(0, (1.22 if width >= WIDE_INCHES else 1.3) * max([*predicted, *measured, 1e-9]))
    figure.legend(loc="outside upper left", ncols=2, handlelength=1, handleheight=1)
    return figure


@matplotlib.rc_context(STYLE)
def ledger_bar(ledger: Ledger, capacity: int, width: float = WIDE_INCHES) -> Figure:
    """The ledger as one bar, largest row first, and the free memory."""
    figure = Figure(figsize=(width, 0.95), layout="constrained")
    axes = figure.subplots()
    unit = unit_for(ledger.total)
    start, whole = 0.0, max(ledger.total, capacity if capacity <= 2 * ledger.total else 0) / unit.size
    for row, size in by_size(ledger):
        length = size / unit.size
        axes.barh([0], [length], 0.8, left=start, color=COLOURS[row], edgecolor=BACKGROUND, linewidth=1)
        for text in _that_fits(
            f"{row_label(row)} {unit.write(size)}", row_label(row), inches=length / whole * width
        ):
            axes.text(
                start + length / 2, 0, text, ha="center", va="center", color=on(COLOURS[row]), fontsize=8
            )
        start += length
    if start < whole:
        axes.barh(
            [0], [whole - start], 0.8, left=start, color="none", edgecolor=MUTED, linewidth=1, linestyle=":"
        )
        for text in _that_fits(
            f"free {unit.write(capacity - ledger.total)}", "free", (whole - start) / whole * width
        ):
            axes.text((start + whole) / 2, 0, text, ha="center", va="center", color=MUTED, fontsize=8)
    axes.set_xlim(0, whole or 1)
    axes.set_yticks([])
    axes.grid(False)
    axes.set_xlabel(unit.name)
    return figure


def _that_fits(long: str, short: str, inches: float) -> Iterator[str]:
    """The longer of two texts that fits in ``inches``; nothing if neither fits."""
    yield from [text for text in (long, short) if 0.072 * len(text) + 0.1 < inches][:1]


def on(colour: str) -> str:
    """Near-black or near-white: the one with more contrast on ``colour`` in both schemes."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#101318" if 0.299 * red + 0.587 * green + 0.114 * blue > 135 else "#fdfdfd"
