"""The picture of memory against step time: every predicted strategy, those that no other beats in both, the capacity.

Labels say how a strategy differs from the chosen one. The chosen one and the front are labelled first, then others as
long as there is room: a label that would cover another one is left out, and its strategy is in the table of candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath

from shardwise.core.errors import one_line
from shardwise.core.plan import Candidate, Plan
from shardwise.report.notation import COLOURS, unit_for
from shardwise.report.pictures import ACCENT, INK, MUTED, STYLE, WIDE_INCHES

FAR = 2.5
"""A budget above this multiple of the largest peak is not drawn: the points would be one line at the bottom."""

FARTHEST_FACTOR = 3.0
"""Strategies with so many times the chosen one's time, or the larger of its memory and the capacity, are left out."""

_FONT = FontProperties(size=8)
_LABEL_HEIGHT, _LABEL_GAP, _POINT_RADIUS = 0.16, 0.08, 0.04
"""Height of a line, distance of a label from its point, and half the width of a point, in inches."""
_LINE_PARTS, _HAIR = 64, 0.01
"""Pieces of a line that labels do not cover, and half of its width in inches."""

_COLOURS = {"fits": ACCENT, "chosen": ACCENT, "tight": COLOURS["activations"]}


@matplotlib.rc_context(STYLE)
def memory_against_time(plan: Plan, front: Sequence[Candidate], width: float = WIDE_INCHES) -> Figure:
    """Peak memory over step time of all candidates that have both; ``front`` is joined by a line."""
    height = 4.2 if width >= WIDE_INCHES else 4.6
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    chosen = next((candidate for candidate in plan.candidates if candidate.strategy == plan.strategy), None)
    shown = list(_shown_candidates(plan))
    budget = plan.capacity_bytes - plan.reserve_bytes
    largest = max((c.peak_bytes for c in shown), default=1)
    far = budget > FAR * largest
    unit = unit_for(largest if far else max(largest, plan.capacity_bytes))
    on_front = [candidate for candidate in front if candidate in shown]
    if len(on_front) > 1:
        seconds = [candidate.step_seconds for candidate in on_front]
        sizes = [e.peak_bytes / unit.size for e in on_front]
        axes.plot(seconds, sizes, color=MUTED, linewidth=1, zorder=1)
    for candidate in shown:
        _draw_candidate(axes, candidate, candidate is chosen, unit.size)
    if not far:
        axes.axhline(budget / unit.size, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.margins(x=0.14, y=0.16)
    axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))
    axes.set_xlabel("seconds of a step")
    axes.set_ylabel(f"peak of a device, {unit.name}")
    first = [
        candidate
        for candidate in (chosen, *(candidate for candidate in on_front if candidate != chosen))
        if candidate is not None
    ]
    _legend(figure, shown)
    sketch = _Sketch(
        figure, axes, [(candidate.step_seconds, candidate.peak_bytes / unit.size) for candidate in shown]
    )
    sketch.avoid([(candidate.step_seconds, candidate.peak_bytes / unit.size) for candidate in on_front])
    words = f"{'budget' if plan.reserve_bytes else 'capacity'} {unit_for(budget).write(budget)}"
    start, end = axes.get_xlim()
    if far:
        axes.set_title(f"{words}, far above", loc="left", fontsize=_FONT.get_size(), color=INK)
    else:
        sketch.take(start, budget / unit.size, words, INK)
        sketch.avoid([(start, budget / unit.size), (end, budget / unit.size)])
    for candidate in [*first, *(candidate for candidate in shown if candidate not in first)]:
        text = "chosen" if candidate is chosen else differs(plan.line, candidate.line)
        sketch.take(
            candidate.step_seconds,
            candidate.peak_bytes / unit.size,
            text,
            INK if candidate in first else MUTED,
        )
    return figure


def differs(chosen: str, other: str) -> str:
    """The parts of a strategy's line that the chosen one has not, or those that it lacks."""
    mine, theirs = (one_line(line).split(" · ") for line in (chosen, other))
    added = [part for part in theirs if part not in mine]
    removed = [part for part in mine if part not in theirs]
    lost = removed[: max(0, len(removed) - len(added))]
    lacks = [f"{'not' if part.endswith('ed') else 'no'} {part}" for part in lost]
    return " · ".join([*added, *lacks]) or one_line(other)


def _shown_candidates(plan: Plan) -> Iterator[Candidate]:
    """Candidates with a time and a peak within FARTHEST_FACTOR."""
    most = max(plan.peak.bytes, plan.capacity_bytes)
    for candidate in plan.candidates:
        if (
            0 < candidate.step_seconds <= FARTHEST_FACTOR * plan.step.seconds
            and 0 < candidate.peak_bytes <= FARTHEST_FACTOR * most
        ):
            yield candidate


def _draw_candidate(axes: Any, candidate: Candidate, chosen: bool, size: float) -> None:
    colour = _COLOURS.get(candidate.verdict, COLOURS["gradients"])
    style = {"marker": "*", "markersize": 13} if chosen else {"marker": "o", "markersize": 5}
    hollow = {} if candidate.peak_is == "counted" else {"markerfacecolor": "none"}
    point = candidate.step_seconds, candidate.peak_bytes / size
    axes.plot([point[0]], [point[1]], color=colour, linestyle="", zorder=3, **style, **hollow)


def _legend(figure: Figure, shown: Sequence[Candidate]) -> None:
    """The verdicts that there are; hollow points are estimates."""
    handles = []
    for words, colour in (
        ("fits", ACCENT),
        ("tight", _COLOURS["tight"]),
        ("does not fit", COLOURS["gradients"]),
    ):
        if any(
            ("fits" if candidate.verdict == "chosen" else candidate.verdict) == words for candidate in shown
        ):
            handles.append(_legend_mark(words, color=colour))
    if any(candidate.peak_is != "counted" for candidate in shown):
        handles.append(_legend_mark("estimated, or a bound", color=MUTED, markerfacecolor="none"))
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=len(handles) if figure.get_figwidth() >= WIDE_INCHES else 2,
    )


def _legend_mark(words: str, **style: Any) -> Any:
    return matplotlib.lines.Line2D([], [], marker="o", markersize=5, linestyle="", label=words, **style)


class _Sketch:
    """The boxes that labels and points take, in inches, once the layout is settled."""

    def __init__(self, figure: Figure, axes: Any, points: Sequence[tuple[float, float]]) -> None:
        figure.draw_without_rendering()
        self._texts: set[str] = set()
        self._axes = axes
        self._dpi = figure.dpi
        inside = axes.get_window_extent()
        self._wide, self._high = inside.width / self._dpi, inside.height / self._dpi
        self.boxes = [
            (x - _POINT_RADIUS, y - _POINT_RADIUS, x + _POINT_RADIUS, y + _POINT_RADIUS)
            for x, y in (self._inches(*at) for at in points)
        ]

    def avoid(self, line: Sequence[tuple[float, float]]) -> None:
        """Keep labels from a line through these points."""
        for (x, y), (right, top) in pairwise(self._inches(*at) for at in line):
            for part in (number / _LINE_PARTS for number in range(_LINE_PARTS + 1)):
                at = x + part * (right - x), y + part * (top - y)
                self.boxes.append((at[0] - _HAIR, at[1] - _HAIR, at[0] + _HAIR, at[1] + _HAIR))

    def take(self, x: float, y: float, text: str, colour: str) -> None:
        """Write a label next to a point, on the first side where it covers nothing; nowhere if there is none.

        A text is written once.
        """
        if text in self._texts:
            return
        self._texts.add(text)
        left, low = self._inches(x, y)
        length = TextToPath().get_text_width_height_descent(text, _FONT, ismath=False)[0] / 72
        for right in (True, False):
            for above in (_LABEL_GAP, -_LABEL_HEIGHT - _LABEL_GAP, -_LABEL_HEIGHT / 2):
                start = left + _LABEL_GAP if right else left - _LABEL_GAP - length
                box = (start, low + above, start + length, low + above + _LABEL_HEIGHT)
                inside = box[0] >= 0 and box[2] <= self._wide and box[1] >= 0 and box[3] <= self._high
                if inside and not any(_boxes_overlap(box, other) for other in self.boxes):
                    self.boxes.append(box)
                    label = self._axes.annotate(
                        text,
                        (x, y),
                        (72 * (start - left), 72 * (above + 0.04)),
                        textcoords="offset points",
                        color=colour,
                        fontsize=_FONT.get_size(),
                        va="bottom",
                    )
                    label.set_in_layout(False)  # what the layout gives room to would move the points again
                    return

    def _inches(self, x: float, y: float) -> tuple[float, float]:
        """A point's distance from the lower left corner of the axes."""
        right, up = self._axes.transData.transform((x, y)) - self._axes.get_window_extent().p0
        return right / self._dpi, up / self._dpi


def _boxes_overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
