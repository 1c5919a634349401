"""The picture of peers.py: tokens per second and peak memory of every contender, by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from shardwise.core.units import MiB
from shardwise.report.pictures import ACCENT, INK, MUTED, STYLE, WIDE_INCHES


@matplotlib.rc_context(STYLE)
def peer_picture(rows: Sequence[Mapping[str, Any]], width: float = WIDE_INCHES) -> Figure:
    """Bars of each contender that ended; those of this package are in the accent colour.

    Args:
        rows: with ``task``, ``contender``, ``tokens_per_second`` and ``peak_bytes``; others are left out.
        width: in inches.
    """
    ended = [row for row in rows if "failed" not in row]
    tasks = list(dict.fromkeys(row["task"] for row in ended))
    counts = [sum(row["task"] == task for row in ended) for task in tasks]
    figure = Figure(figsize=(width, 0.32 * sum(counts) + 0.6 * len(tasks) + 0.4), layout="constrained")
    grid = figure.subplots(len(tasks), 2, squeeze=False, gridspec_kw={"height_ratios": counts or None})
    for line, task in zip(grid, tasks, strict=True):
        some = [row for row in ended if row["task"] == task][::-1]
        names = [row["contender"] for row in some]
        colours = [ACCENT if name.startswith("Shardwise") else MUTED for name in names]
        line[0].barh(names, [row["tokens_per_second"] for row in some], color=colours)
        line[1].barh(names, [row["peak_bytes"] / MiB for row in some], color=colours)
        line[1].set_yticklabels([])
        line[0].set_title(f"{task}: tokens/s", loc="left", color=INK)
        line[1].set_title("peak memory, MiB", loc="left", color=INK)
    return figure
