"""Which block runs when under each kind of activation checkpointing, and what it keeps."""

from __future__ import annotations

import functools
from itertools import pairwise

import pytest

from shardwise.core.block_times import BlockTimes
from shardwise.dryrun.run import dry_run
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.plugins.checkpointing.recursive import passes
from shardwise.recipe.load import recipe_of
from shardwise.report.blocks import blocks_through_time
from shardwise.report.pictures import NARROW_INCHES, png, svg
from shardwise.technique import strategy_from

BLOCKS = 6
LONG = pytest.mark.long


@functools.cache
def times_of(kind: str) -> BlockTimes:
    model = {"layers": BLOCKS, "width": 16, "heads": 2, "ffn": 24, "vocab": 256}
    values = {"model": model, "data": {"sequence_length": 8}, "steps": 1, "batch_size": 1}
    recipe = recipe_of({**values, "cluster": {"devices_per_node": 1}})
    strategy = strategy_from({"activation_checkpointing": kind, "micro_batch_size": 1})
    found = dry_run(recipe, blueprint_of(recipe), strategy, cluster_of(recipe.cluster)).blocks
    assert found is not None and found.blocks == BLOCKS
    return found


def blocks(times: BlockTimes, kind: str) -> list[int]:
    return [block for block, each, _, _ in times.runs if each == kind]


@pytest.mark.parametrize(
    ("kind", "again"),
    [
        pytest.param("none", [], marks=LONG),
        ("full", [5, 4, 3, 2, 1, 0]),
        pytest.param("every:3", [3, 0], marks=LONG),
        ("sqrt", [4, 5, 2, 3, 0, 1]),  # segments of two, each from its start
    ],
)
def test_blocks_run_in_the_order_of_their_technique(kind: str, again: list[int]) -> None:
    times = times_of(kind)
    assert blocks(times, "forward") == list(range(BLOCKS))
    assert list(dict.fromkeys(blocks(times, "backward"))) == list(range(BLOCKS))[::-1]
    assert blocks(times, "again") == again
    assert all(begin <= end for _, _, begin, end in times.runs)


@pytest.mark.parametrize("inputs", [1, pytest.param(2, marks=LONG)])
def test_recursive_runs_as_often_as_griewank_and_walther_say(inputs: int) -> None:
    """Their t(l, s) counts passes. Each block's own run is not among them, nor the end of the first sweep."""
    times = times_of(f"recursive:{inputs}")
    forward = [block for block, kind, _, _ in times.runs if kind != "backward"]
    assert len(forward) == passes(BLOCKS, inputs) + BLOCKS + 1
    assert times.forward_runs == len(forward) / BLOCKS


def test_what_is_kept_shrinks_with_what_is_run_again() -> None:
    most = {kind: times_of(kind).most_kept for kind in ("recursive:1", "full", "sqrt")}
    assert most["recursive:1"] < most["full"] < most["sqrt"]
    full = times_of("full")
    for block in range(BLOCKS):
        mine = [kept for kept in full.kept if kept[0] == block]
        waiting, *_, last = mine
        assert last[2] <= full.end and all(first[2] <= second[1] for first, second in pairwise(mine))
        assert max(size for *_, size in mine) > 3 * waiting[3], "its activations, for its backward pass alone"


@LONG
def test_without_checkpointing_a_block_keeps_all_until_its_backward_pass() -> None:
    none = times_of("none")
    starts = {block: begin for block, kind, begin, _ in none.runs if kind == "forward"}
    ends = {block: end for block, kind, _, end in none.runs if kind == "backward"}
    assert none.most_kept > 1.5 * times_of("sqrt").most_kept
    for block in range(BLOCKS):
        mine = [kept for kept in none.kept if kept[0] == block]
        assert mine[0][1] >= starts[block] and mine[-1][2] >= ends[block] - 40


def test_the_picture_has_one_chart_for_each() -> None:
    every = {kind: times_of(kind) for kind in ("full", "sqrt", "recursive:1")}
    figure = blocks_through_time(every)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[1].startswith("sqrt   2 runs forward per block · keeps ") and "the first" in titles[2]
    assert len({axes.get_xlim() for axes in figure.axes[:3]}) == 1
    assert png(blocks_through_time(every, NARROW_INCHES)).startswith(b"\x89PNG")
    assert len(svg(blocks_through_time({"": every["sqrt"]}), "blocks")) < 20_000
