"""The load of a mixture's experts over a run, as a picture and in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from shardwise.core.run_files import ExpertsRecord
from shardwise.report.page_parts import picture
from shardwise.report.pictures import ACCENT, INK, MUTED, STYLE, WIDE_INCHES

MAX_NAMED = 12
"""Dead experts that are named; the others are counted."""


def experts_section(record: ExpertsRecord | None) -> dict[str, Any]:
    """What the page shows of experts; None for a model without them."""
    if record is None:
        return {"experts": None, "experts_words": []}
    shown = picture("Tokens of the experts of each layer", lambda w: experts_picture(record, w))
    return {"experts": shown, "experts_words": list(experts_sentences(record))}


@matplotlib.rc_context(STYLE)
def experts_picture(record: ExpertsRecord, width: float = WIDE_INCHES) -> Figure:
    """For each layer, the range of its experts' loads and the half of them in the middle."""
    figure = Figure(figsize=(width, 2.9), layout="constrained")
    axes = figure.subplots()
    least, lower, upper, most = np.percentile(record.load, (0, 25, 75, 100), axis=1)
    numbers = range(len(record.load))
    axes.vlines(numbers, least, most, color=MUTED)
    axes.vlines(numbers, lower, upper, color=ACCENT, linewidth=4)
    axes.axhline(1, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("layer with experts, from 0; thick: the half in the middle")
    axes.set_ylabel("tokens / mean")
    return figure


def experts_sentences(record: ExpertsRecord) -> Iterator[str]:
    """The busiest expert, and those without tokens."""
    known = [(layer, row) for layer, row in enumerate(record.load) if any(row)]
    at = {(layer, e): load for layer, row in known for e, load in enumerate(row)}
    if not at:
        yield "The model does not tell which experts its tokens go to."
        return
    layer, busiest = max(at, key=lambda pair: at[pair])
    yield (
        f"Mean of {record.steps:,} {'step' if record.steps == 1 else 'steps'}, relative to the mean of a layer: the"
        f" busiest expert is number {busiest} (from 0) of {record.layers[layer]}, with {at[layer, busiest]:.2f}."
    )
    dead = [f"{expert} of {record.layers[layer]}" for (layer, expert), load in at.items() if load == 0]
    if dead:
        more = f" and {len(dead) - MAX_NAMED:,} others" if len(dead) > MAX_NAMED else ""
        yield f"{len(dead):,} of {len(at):,} experts got no token: {', '.join(dead[:MAX_NAMED])}{more}."
    else:
        yield "Every expert got tokens."
