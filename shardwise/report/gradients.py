"""What fp16 loses of a step's gradients with loss scaling, and would lose without, as a picture and in words.

The histogram is that of Micikevicius et al. 2018 (arXiv 1710.03740, figure 3), for gradients of weights. A value of the
step as it was computed, divided by the loss scale, is the value without scaling.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from shardwise.core.run_files import GradientHistogram
from shardwise.report.notation import COLOURS
from shardwise.report.page_parts import picture
from shardwise.report.pictures import ACCENT, INK, MUTED, SHADE, STYLE, WIDE_INCHES

SMALLEST_EXPONENT, SMALLEST_NORMAL_EXPONENT, LARGEST_EXPONENT = -24, -14, 16
"""Exponents of fp16: of its smallest number, of its smallest number with all digits, and beyond its largest."""


def gradients_section(histogram: GradientHistogram | None) -> dict[str, Any]:
    """What the page shows of gradients by size in fp16; None without loss scaling."""
    if histogram is None or not any(histogram.counts):
        return {"gradients": None, "underflow": []}
    shown = picture("Gradients of a step by exponent", lambda w: gradient_picture(histogram, w))
    return {"gradients": shown, "underflow": list(gradient_sentences(histogram))}


@matplotlib.rc_context(STYLE)
def gradient_picture(histogram: GradientHistogram, width: float = WIDE_INCHES) -> Figure:
    """Shares of the values by exponent, as they were computed and without the loss scale."""
    figure = Figure(figsize=(width, 2.9), layout="constrained")
    axes = figure.subplots()
    whole = sum(histogram.counts) or 1
    shares = [100 * count / whole for count in histogram.counts]
    exponents = [histogram.lowest + index for index in range(len(shares) + 1)]
    shift = round(math.log2(histogram.loss_scale))
    unscaled = [exponent - shift for exponent in exponents]
    drawn = (
        (unscaled, COLOURS["gradients"], "without loss scaling"),
        (exponents, ACCENT, f"as computed, times {histogram.loss_scale:,.0f}"),
    )
    for edges, colour, name in drawn:
        axes.stairs(shares, edges, fill=True, color=colour, alpha=0.6, label=name)
    nonzero = [index for index, share in enumerate(shares) if share > 0]
    shown = [edges[index] for edges in (unscaled, exponents) for index in (nonzero[0], nonzero[-1] + 1)]
    left = min([SMALLEST_EXPONENT - 4, *shown])
    right = max([LARGEST_EXPONENT + 3, *shown])
    axes.axvspan(left - 1, SMALLEST_EXPONENT, color=SHADE, zorder=-2)
    axes.axvspan(LARGEST_EXPONENT, right + 1, color=SHADE, zorder=-2)
    for limit, words in (
        (SMALLEST_EXPONENT, "lost below"),
        (SMALLEST_NORMAL_EXPONENT, "full digits above"),
        (LARGEST_EXPONENT, "overflows above"),
    ):
        axes.axvline(limit, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
        label = f"{words} $2^{{{limit}}}$" if width >= WIDE_INCHES else f"$2^{{{limit}}}$"
        axes.text(
            limit,
            1.02,
            label,
            transform=axes.get_xaxis_transform(),
            ha="center",
            color=MUTED,
            fontsize=8,
            parse_math=True,
        )
    axes.set_xlim(left - 1, right + 1)
    axes.set_xlabel("exponent of a gradient, base 2")
    axes.set_ylabel("% of the values")
    figure.legend(
        loc="outside lower left", ncols=2 if width >= WIDE_INCHES else 1, handlelength=1, handleheight=1
    )
    return figure


def gradient_sentences(histogram: GradientHistogram) -> Iterator[str]:
    """The share that is lost with and without the scale."""
    total = sum(histogram.counts) + histogram.zeros + histogram.non_finite
    shift = math.log2(histogram.loss_scale)
    below = _below(histogram.counts, SMALLEST_EXPONENT - histogram.lowest + shift)
    yield (
        f"Step {histogram.step}: without loss scaling {_percent(below, total)} of the gradients would be below"
        f" fp16's smallest number and become 0; with a scale of {histogram.loss_scale:,.0f},"
        f" {_percent(histogram.zeros, total)} are 0, embeddings of absent tokens among them."
    )
    if histogram.non_finite:
        yield f"{histogram.non_finite:,} values overflowed, so the update was skipped."


def _below(counts: Sequence[int], limit: float) -> int:
    return sum(counts[: max(0, math.floor(limit))])


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2g} %" if whole else "0 %"
