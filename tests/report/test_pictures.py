"""Pictures show what the plan and the run say, stand in a page, and leave matplotlib as it was."""

from __future__ import annotations

import json
import math
import re
import struct
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from typing import Any

import pytest
from matplotlib.figure import Figure

from shardwise.core.ledger import Ledger
from shardwise.core.plan import Plan, TimelinePoint
from shardwise.core.run_files import RankMemory, StepRecord
from shardwise.core.units import GiB
from shardwise.report.notation import COLOURS
from shardwise.report.pictures import (
    MAX_CURVE_POINTS,
    NARROW_INCHES,
    PICTURE_RANKS,
    STACK,
    ledger_bar,
    loss_curve,
    memory_timeline,
    peaks_by_rank,
    png,
    svg,
)
from shardwise.report.series import compared_picture, series_picture
from tests.harness.plans import with_rows


def step(number: int, loss: float = 2.0, **values: object) -> StepRecord:
    return StepRecord(number, loss, 1.0, 3e-4, 100, 1.0, 100.0, **values)  # type: ignore[arg-type]


def plot(figure: Figure) -> Any:
    """The first axes; matplotlib's types for their content are too wide to use."""
    return figure.axes[0]


def texts(figure: Figure) -> str:
    """All words in a figure, as its SVG has them."""
    return " | ".join(re.findall(r"<text[^>]*>([^<]*)<", svg(figure, "words")))


def parsed(element: str) -> ElementTree.Element:
    return ElementTree.fromstring(element.replace("<svg", '<svg xmlns:xlink="x"', 1))


# -- files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e301, 1.7e308])
def test_values_near_the_largest_float_are_marked_and_not_drawn(size: float) -> None:
    huge = [step(1, -size, held_out_loss=size), step(2, size, held_out_loss=-size), *map(step, range(3, 200))]
    assert "too large to draw" in texts(loss_curve(huge))
    assert "too large to draw" in texts(loss_curve(huge[:2]))
    for picture in (series_picture(huge, []), compared_picture({"a": huge, "b": huge[:2]})):
        assert "nan" not in svg(picture, "values")


def test_svg_is_an_element_for_a_page(plan: Plan) -> None:
    element = svg(memory_timeline(plan), 'Memory "of" <one> & all')
    assert parsed(element).get("aria-label") == 'Memory "of" <one> & all'
    assert not re.search(r"https?:|font-family|DejaVu|<style|<script|xmlns|#1b1f25", element)
    assert "var(--ink)" in element
    assert COLOURS["activations"] in element


def test_ids_of_two_pictures_do_not_meet(plan: Plan) -> None:
    found = [
        set(re.findall(r' id="([^"]*)"', element))
        for element in (
            svg(memory_timeline(plan), "memory"),
            svg(memory_timeline(plan, NARROW_INCHES), "memory"),
            svg(loss_curve([step(1), step(2)]), "loss"),
        )
    ]
    assert all(found)
    assert len(set.union(*found)) == sum(map(len, found))


def test_every_reference_has_its_target(plan: Plan) -> None:
    element = svg(memory_timeline(plan), "memory")
    targets = set(re.findall(r' id="([^"]*)"', element))
    assert (
        set(re.findall(r"url\(#([^)]*)\)", element)) | set(re.findall(r'href="#([^"]*)"', element)) == targets
    )


def test_png_is_an_image_of_that_width() -> None:
    image = png(loss_curve([step(1)], width=4.0), dots_per_inch=50)
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">I", image[16:20]) == (200,)


def test_without_pyplot_and_without_a_trace() -> None:
    code = """
import sys, matplotlib
before = matplotlib.rcParams.copy()
from shardwise.report.pictures import loss_curve, png
png(loss_curve([]))
sys.exit("matplotlib.pyplot" in sys.modules or "torch" in sys.modules or before != matplotlib.rcParams.copy())
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- loss ---------------------------------------------------------------------------------------------


def test_loss_shows_held_out_points_and_skipped_updates() -> None:
    steps = [step(n, 3 - n / 10, held_out_loss=2.5 if n == 5 else None, skipped=n == 3) for n in range(1, 9)]
    figure = loss_curve(steps)
    training, held_out, skipped = plot(figure).lines
    assert list(training.get_ydata()) == [s.loss for s in steps]
    assert list(zip(*held_out.get_data(), strict=True)) == [(5, 2.5)]
    assert list(skipped.get_xdata()) == [3]
    assert "training | held-out | update skipped" in texts(figure)


def test_loss_breaks_where_it_is_no_number() -> None:
    figure = loss_curve([step(1, 3.0), step(2, math.nan), step(3, math.inf), step(4, 2.0)])
    line, mark = plot(figure).lines
    assert [math.isnan(y) for y in line.get_ydata()] == [False, True, True, False]
    assert list(mark.get_xdata()) == [2, 3]
    assert "not a number" in texts(figure)


def test_loss_that_never_was_a_number() -> None:
    figure = loss_curve([step(n, math.nan) for n in range(1, 200)])
    *curves, marks = plot(figure).lines
    assert all(math.isnan(y) for curve in curves for y in curve.get_ydata())
    assert list(marks.get_xdata()) == list(range(1, 200))
    assert "not a number" in texts(figure)


def test_many_steps_are_merged_and_keep_the_extremes() -> None:
    losses = [2.0 + 0.1 * math.sin(n) for n in range(50_000)]
    losses[31_415] = 9.0
    figure = loss_curve([step(n + 1, loss) for n, loss in enumerate(losses)])
    raw, smooth = plot(figure).lines
    assert len(raw.get_xdata()) <= MAX_CURVE_POINTS
    assert (max(raw.get_ydata()), min(raw.get_ydata())) == (9.0, min(losses))
    assert max(smooth.get_ydata()) < 2.2
    assert len(svg(figure, "loss")) < 150_000


def test_no_step_yet() -> None:
    assert "no step has finished yet" in texts(loss_curve([]))


# -- memory -------------------------------------------------------------------------------------------


def test_timeline_reaches_exactly_the_peak(plan: Plan) -> None:
    figure = memory_timeline(plan)
    axes = plot(figure)
    stack = max(path.vertices[:, 1].max() for area in axes.collections for path in area.get_paths())
    assert stack == pytest.approx(plan.peak.bytes / 2**30)
    assert axes.lines[0].get_ydata() == [pytest.approx(plan.peak.bytes / 2**30)]
    words = texts(figure)
    assert "peak 69.45 GiB" in words
    assert "capacity 79.10 GiB" in words
    assert "forward | backward" in words


def test_timeline_counts_overhead_once(plan: Plan) -> None:
    """Whether the timeline came with or without it."""
    overhead = plan.ledger.overhead
    with_it = [TimelinePoint(p.phase, p.ledger.plus(overhead=overhead)) for p in plan.timeline]
    assert svg(memory_timeline(plan), "m") == svg(
        memory_timeline(replace(plan, timeline=tuple(with_it))), "m"
    )


def test_capacity_far_above_is_told_in_words(plan: Plan) -> None:
    figure = memory_timeline(replace(plan, capacity_bytes=8 * plan.capacity_bytes))
    assert "far above" in texts(figure)
    assert plot(figure).get_ylim()[1] < 100


def test_stack_names_every_row_once() -> None:
    assert sorted(STACK) == sorted(COLOURS)


def test_no_timeline(plan: Plan) -> None:
    assert "no timeline" in texts(memory_timeline(replace(plan, timeline=())))


def test_ranks_show_both_sizes_and_the_error() -> None:
    gib = 2**30
    figure = peaks_by_rank([RankMemory(0, 98 * gib, 100 * gib), RankMemory(1, 51 * gib, 50 * gib)])
    widths = [[bar.get_width() for bar in bars] for bars in plot(figure).containers]
    assert widths == [[98, 51], [100, 50]]
    words = texts(figure)
    assert "100.0 GiB\u2002−2.0 %" in words
    assert "50.0 GiB\u2002+2.0 %" in words


def test_of_many_ranks_those_that_hold_most() -> None:
    figure = peaks_by_rank([RankMemory(rank, 100, rank + 1) for rank in range(64)])
    words = texts(figure)
    assert f"rank {64 - PICTURE_RANKS}" in words
    assert "rank 0" not in words


def test_a_rank_that_was_not_measured() -> None:
    assert "–" in texts(peaks_by_rank([RankMemory(0, 0, 0)]))


def test_ledger_bar_is_as_long_as_the_peak(plan: Plan) -> None:
    figure = ledger_bar(plan.ledger, plan.capacity_bytes)
    bars = [bar for bars in plot(figure).containers for bar in bars]
    assert sum(bar.get_width() for bar in bars[:-1]) == pytest.approx(plan.peak.bytes / 2**30)
    assert sum(bar.get_width() for bar in bars) == pytest.approx(plan.capacity_bytes / 2**30)
    assert "activations 43.12 GiB" in texts(figure)


def test_ledger_bar_of_nothing() -> None:
    figure = ledger_bar(Ledger(), 0)
    assert not plot(figure).containers
    assert "free" not in texts(figure)


def test_a_plan_that_does_not_fit_has_nothing_free(plan: Plan) -> None:
    short = replace(plan, capacity_bytes=plan.peak.bytes - 512 * 2**20)
    words = texts(ledger_bar(short.ledger, short.capacity_bytes))
    assert "activations 43.12 GiB" in words and "free" not in words
    figure = memory_timeline(short)
    peak, capacity = (line.get_ydata()[0] for line in plot(figure).lines)
    assert capacity == pytest.approx(short.capacity_bytes / 2**30) and capacity < peak
    assert peak < plot(figure).get_ylim()[1]
    assert "capacity 68.95 GiB" in texts(figure)


def test_words_from_outside_are_words(plan: Plan) -> None:
    """Neither mathematics, which `$` would start, nor markup."""
    words = "<b>$x_{$ & \x00\ud800"
    points = tuple(TimelinePoint(words, p.ledger) for p in plan.timeline)
    strange = replace(plan, timeline=points, peak=replace(plan.peak, phase=words, where=words))
    root = parsed(svg(memory_timeline(strange), json.dumps(words)))
    assert "<b>$x_{$ &" in " ".join(root.itertext())


def test_fragmentation_lies_above_what_is_held(plan: Plan) -> None:
    """It is known at the peak only. Below the weights it lifted them there, like a spike of weights."""
    lost = with_rows(plan, parameters=4 * GiB, activations=2 * GiB, fragmentation=8 * GiB)
    points = [replace(point, ledger=replace(lost.ledger, fragmentation=0)) for point in plan.timeline]
    figure = memory_timeline(replace(lost, timeline=tuple(points)))
    weights = figure.axes[0].collections[0].get_paths()[0].vertices
    assert weights[:, 1].max() == pytest.approx(4.0)
