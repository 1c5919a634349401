"""Pictures of pipelines and meshes show every pass at its time, and every rank with its state."""

from __future__ import annotations

import re
from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from shardwise.core.pipeline.schedule import SCHEDULE_NAMES, orders, play, steps
from shardwise.core.strategy import Layout
from shardwise.report.mesh import SHOWN_ROWS, held, mesh
from shardwise.report.pictures import NARROW_INCHES, WIDE_INCHES, png, svg
from shardwise.report.pipeline.gantt import PASS_COLOURS, SHOWN_LANES, Chart, gantt
from shardwise.technique import mesh_layout

SLOTS = {"F": 1, "B": 2, "I": 1, "W": 1}


def chart(schedule: str, ranks: int = 4, count: int = 8) -> Chart:
    lists = orders(schedule, ranks, 2 if schedule == "interleaved" else 1, count)
    return Chart(schedule, play(lists, lambda action: SLOTS[action.kind]), count)


def texts(figure: Figure) -> list[str]:
    """All words in a figure, as its SVG has them."""
    return re.findall(r"<text[^>]*>([^<]*)<", svg(figure, "words"))


def bars(axes: Any) -> list[tuple[str, float, float, float]]:
    """(colour, lane, start, length) of every bar that is a pass."""
    colours = {colour for _, colour in PASS_COLOURS.values()}
    shapes = [
        (to_hex(p.get_facecolor()), p.get_y() + p.get_height() / 2, p.get_x(), p.get_width())
        for p in axes.patches
    ]
    return [shape for shape in shapes if shape[0] in colours]


def rounded(bars: list[tuple[str, float, float, float]]) -> list[tuple[str, float, float, float]]:
    return sorted(
        (colour, round(lane, 6), round(start, 6), round(length, 6)) for colour, lane, start, length in bars
    )


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_a_bar_for_every_pass_where_it_lies(schedule: str) -> None:
    shown = chart(schedule)
    drawn = bars(gantt([shown], "slots").axes[0])
    wanted = [
        (PASS_COLOURS[action.kind][1], lane, start, end - start)
        for lane, spans in enumerate(shown.played.spans)
        for action, start, end in spans
    ]
    assert rounded(drawn) == rounded(wanted)


def test_schedules_side_by_side_share_one_scale() -> None:
    charts = [chart(name) for name in ("gpipe", "zero_bubble")]
    figure = gantt(charts, "slots")
    assert {axes.get_xlim() for axes in figure.axes} == {(0.0, charts[0].played.end)}
    words = texts(figure)
    assert {"gpipe", "zero_bubble", "stage 0", "stage 3", "slots", "backward, weights"} <= set(words)


def test_numbers_begin_again_with_every_step() -> None:
    lists = steps(orders("1f1b", 2, 1, 3), 2, 3)
    figure = gantt([Chart("1f1b", play(lists, lambda action: SLOTS[action.kind]), 3)], "slots")
    numbers = [text.get_text() for text in figure.axes[0].texts]
    assert set(numbers) == {"1", "2", "3"}
    assert len(numbers) == 2 * 2 * 2 * 3  # ranks, kinds, steps, micro-batches


def test_many_ranks_show_the_first_and_the_last() -> None:
    words = texts(gantt([chart("1f1b", ranks=24, count=2)], "slots"))
    lanes = [word for word in words if word.startswith("stage")]
    assert len(lanes) == SHOWN_LANES
    assert (lanes[0], lanes[-1]) == ("stage 0", "stage 23")


LAYOUT = mesh_layout({"pipeline": 2, "shard": 2, "sequence": 2, "tensor": 2})


def test_a_box_says_what_its_rank_holds() -> None:
    assert held(LAYOUT, 0) == ["stage 1/2", "slice 1/2", "shard 1/2", "tokens 1/2"]
    assert held(LAYOUT, 13) == ["stage 2/2", "slice 2/2", "shard 2/2", "tokens 1/2"]
    assert held(mesh_layout({}), 0) == ["everything"]
    assert len({tuple(held(LAYOUT, rank)) for rank in range(16)}) == 16


@pytest.mark.parametrize("width", [WIDE_INCHES, NARROW_INCHES])
def test_every_rank_of_a_small_mesh_is_drawn(width: float) -> None:
    columns = 8 if width == WIDE_INCHES else 2
    words = texts(mesh(LAYOUT, 8, width))
    ranks = [word for word in words if word.startswith("rank")]
    assert len(set(ranks)) == len(ranks) == min(16, columns * SHOWN_ROWS)
    assert ("node 1" in words) and ("node 0" in words)


def boxes(figure: Figure) -> list[tuple[int, int, int]]:
    """(rank, column, row) of every box of a mesh."""
    axes: Any = figure.axes[0]
    words = [text for text in axes.texts if text.get_text().startswith("rank")]
    at = [text.get_position() for text in words]
    return [(int(text.get_text().split()[1]), int(x), int(y)) for text, (x, y) in zip(words, at, strict=True)]


def nodes(figure: Figure) -> list[int]:
    """The node label of every row."""
    axes: Any = figure.axes[0]
    words = [text.get_text() for text in axes.texts]
    return [int(word.split()[1].replace(",", "")) for word in words if word.startswith("node")]


def staged(stages: int, shards: int) -> Layout:
    return mesh_layout({"pipeline": stages, "shard": shards})


def assert_in_place(figure: Figure, in_node: int, columns: int) -> None:
    """Every rank once, no two in one place, neighbours next to each other, and a row within the node it names."""
    drawn = boxes(figure)
    assert len({rank for rank, _, _ in drawn}) == len(drawn)
    assert len({(column, row) for _, column, row in drawn}) == len(drawn)
    rows = [[each for each in drawn if each[2] == row] for row in range(len(nodes(figure)))]
    assert sum(map(len, rows)) == len(drawn)
    for node, row in zip(nodes(figure), rows, strict=True):
        assert [column for _, column, _ in row] == list(range(len(row))), "from the left, without a gap"
        assert len(row) <= columns
        assert {rank // in_node for rank, _, _ in row} == {node}
        assert [rank - row[0][0] for rank, _, _ in row] == list(range(len(row)))


@pytest.mark.parametrize(
    ("stages", "shards", "in_node"),
    [
        (4, 2, 8),  # four stages in one row
        (2, 6, 4),  # a stage ends within a node, and within a row
        (1, 24, 12),  # a row and a half in a node
        (4, 6, 12),
        (1, 12, 3),
        (1, 1, 8),
    ],
)
def test_rows_hold_every_rank_once_whatever_stages_and_nodes(stages: int, shards: int, in_node: int) -> None:
    figure = mesh(staged(stages, shards), in_node)
    assert sorted(rank for rank, _, _ in boxes(figure)) == list(range(stages * shards))
    assert_in_place(figure, in_node, 8)
    assert not [word for word in texts(figure) if "more" in word]


@pytest.mark.parametrize(
    ("stages", "shards", "in_node", "width"),
    [
        (4, 6, 8, NARROW_INCHES),
        (2, 6, 4, NARROW_INCHES),
        (3, 16, 8, WIDE_INCHES),
        (8, 12, 12, WIDE_INCHES),
        (8, 3, 12, NARROW_INCHES),
    ],
)
def test_what_is_left_out_is_counted(stages: int, shards: int, in_node: int, width: float) -> None:
    figure = mesh(staged(stages, shards), in_node, width)
    drawn = {rank for rank, _, _ in boxes(figure)}
    assert_in_place(figure, in_node, 8 if width == WIDE_INCHES else 2)
    assert len(nodes(figure)) <= SHOWN_ROWS
    assert 0 in drawn
    assert drawn & set(range((stages - 1) * shards, stages * shards)), "of the last stage"
    assert f"and {stages * shards - len(drawn)} more ranks" in texts(figure)


def test_a_large_mesh_shows_its_first_and_last_stages() -> None:
    layout = mesh_layout({"pipeline": 16, "shard": 128, "tensor": 8})
    words = texts(mesh(layout, 8))
    assert {"rank 0", "rank 1024", "rank 15360", "node 1,920", "and 16,352 more ranks"} <= set(words)
    assert png(mesh(layout, 8)).startswith(b"\x89PNG")
