"""Schedules against the papers' formulas, counted in slots."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from shardwise.core.pipeline.schedule import SCHEDULE_NAMES, Action, Played, in_flight, needs, orders, play

SLOTS = {"F": 1, "B": 2, "I": 1, "W": 1}
GRID = [(ranks, count) for ranks in (1, 2, 3, 4, 8) for count in (1, 2, 3, 5, 8, 16, 19)]


def played(schedule: str, ranks: int, count: int, stages_per_rank: int = 1) -> Played:
    """In slots of one whole forward pass of a rank."""
    lists = orders(schedule, ranks, stages_per_rank, count)
    return play(lists, lambda action: SLOTS[action.kind] / stages_per_rank)


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
@pytest.mark.parametrize(("ranks", "count"), GRID)
def test_every_pass_is_done_once_on_its_rank(schedule: str, ranks: int, count: int) -> None:
    per_rank = 3 if schedule == "interleaved" else 1
    lists = orders(schedule, ranks, per_rank, count)
    halves = {"F", "I", "W"} if schedule == "zero_bubble" else {"F", "B"}
    wanted = {Action(k, s, m) for k in halves for s in range(ranks * per_rank) for m in range(count)}  # type: ignore[arg-type]
    assert Counter(action for order in lists for action in order) == Counter(wanted)
    assert all(action.stage % ranks == rank for rank, order in enumerate(lists) for action in order)


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
@pytest.mark.parametrize(("ranks", "count"), GRID)
def test_nothing_begins_before_what_it_needs_has_arrived(schedule: str, ranks: int, count: int) -> None:
    per_rank = 2 if schedule == "interleaved" else 1
    shown = play(orders(schedule, ranks, per_rank, count), lambda a: SLOTS[a.kind], sending=0.25)
    spans = {action: (start, end) for rank in shown.spans for action, start, end in rank}
    for action, (start, _) in spans.items():
        for before in needs(action, ranks * per_rank, schedule == "zero_bubble"):
            apart = (before.stage - action.stage) % ranks != 0
            assert spans[before][1] + 0.25 * apart <= start
    for rank in shown.spans:
        assert all(before[2] <= after[1] for before, after in pairwise(rank))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "count"), GRID)
def test_bubble_of_gpipe_and_1f1b(schedule: str, ranks: int, count: int) -> None:
    """(K-1)/(M+K-1) of the time: Huang et al. 2019, section 2.3; Narayanan et al. 2021, section 2.2.1."""
    assert played(schedule, ranks, count).bubble == pytest.approx((ranks - 1) / (count + ranks - 1))


@pytest.mark.parametrize(("ranks", "count"), GRID)
def test_naive_pipelines_have_one_rank_at_work(ranks: int, count: int) -> None:
    assert played("naive", ranks, count).bubble == pytest.approx(1 - 1 / ranks)


@pytest.mark.parametrize("per_rank", [2, 3, 4])
@pytest.mark.parametrize(("ranks", "rounds"), [(2, 1), (2, 4), (4, 1), (4, 3), (8, 2)])
def test_interleaving_divides_the_bubble(ranks: int, rounds: int, per_rank: int) -> None:
    """(p-1)/(v M) of the ideal time (Narayanan et al. 2021, section 2.2.2), for multiples of p micro-batches."""
    count = ranks * rounds
    ideal = 3 * count
    assert played("interleaved", ranks, count, per_rank).end - ideal == pytest.approx(
        3 * (ranks - 1) / per_rank
    )


@pytest.mark.parametrize(("ranks", "count"), [(r, c) for r, c in GRID if c >= r])
def test_zero_bubble_leaves_a_third(ranks: int, count: int) -> None:
    """(p-1)(F+I-W) instead of (p-1)(F+I+W) (Qi et al. 2023, table 2), and no more in flight than 1f1b's first rank."""
    assert played("1f1b", ranks, count).end - 3 * count == 3 * (ranks - 1)
    assert played("zero_bubble", ranks, count).end - 3 * count == ranks - 1
    assert max(in_flight(order) for order in orders("zero_bubble", ranks, 1, count)) <= ranks


@pytest.mark.parametrize(("ranks", "count"), GRID)
def test_micro_batches_in_flight(ranks: int, count: int) -> None:
    flying = {
        s: [in_flight(order) for order in orders(s, ranks, 1, count)] for s in ("naive", "gpipe", "1f1b")
    }
    assert flying["naive"] == [1] * ranks
    assert flying["gpipe"] == [count] * ranks
    assert flying["1f1b"] == [min(count, ranks - rank) for rank in range(ranks)]


def test_pipedream_never_waits_once_it_is_full() -> None:
    """In the long run every rank computes all the time, where 1f1b waits in every step."""
    steps, ranks, count = 50, 4, 8
    endless = played("pipedream", ranks, steps * count)
    assert endless.end == 3 * (steps * count + ranks - 1)
    assert endless.end < steps * played("1f1b", ranks, count).end


def test_a_schedule_in_which_ranks_wait_for_each_other_is_refused() -> None:
    stuck = [[Action("F", 0, 0), Action("B", 0, 0)], [Action("B", 1, 0), Action("F", 1, 0)]]
    with pytest.raises(ValueError, match="wait for each other"):
        play(stuck, lambda action: 1)


def test_unknown_and_impossible_schedules() -> None:
    with pytest.raises(ValueError, match="no such schedule"):
        orders("2f2b", 2, 1, 2)
    with pytest.raises(ValueError, match="one stage per rank"):
        orders("gpipe", 2, 2, 2)
