"""Routes of tokens to experts on other ranks, against loops in plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.runtime.parallel.dispatch import Room, routes
from shardwise.runtime.routed_rows import rows_of, sums_of


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_routes(data: st.DataObject) -> None:
    """The first pairs of each rank have rows, in their order; all others have none; the load is the largest count."""
    ranks, experts = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    index = data.draw(st.lists(st.integers(0, ranks * experts - 1), min_size=1, max_size=12))
    capacity = data.draw(st.integers(1, 12))
    pair, row, expert, most = routes(torch.tensor(index), ranks, experts, capacity)
    number = len(index)
    expected_pair, expected_expert = [number] * (ranks * capacity), [experts] * (ranks * capacity)
    expected_row, counts = [ranks * capacity] * number, [0] * ranks
    for position, chosen in enumerate(index):
        rank = chosen // experts
        if counts[rank] < capacity:
            there = rank * capacity + counts[rank]
            expected_pair[there], expected_expert[there], expected_row[position] = (
                position,
                chosen % experts,
                there,
            )
        counts[rank] += 1
    assert pair.tolist() == expected_pair
    assert expert.tolist() == expected_expert
    assert row.tolist() == expected_row
    assert int(most) == max(counts)


def test_tokens_sum_their_rows_and_nothing_else() -> None:
    """Rows without a token may hold anything, NaN as well."""
    index = torch.tensor([[0, 3], [1, 0], [3, 2]])
    pair, row, _, _ = routes(index.flatten(), 2, 2, 4)
    x = torch.randn(3, 5, dtype=torch.float64)
    source, row = pair.clamp(max=5) // 2, row.view(3, 2)
    rows = rows_of(x, source, row)
    rows[pair == 6] = torch.nan
    assert torch.equal(sums_of(rows, source, row), x + x)


def test_a_pair_without_a_row_adds_nothing() -> None:
    index = torch.tensor([[0], [0], [0]])
    pair, row, _, most = routes(index.flatten(), 2, 1, 2)
    x = torch.ones(3, 2)
    source, row = pair.clamp(max=2), row.view(3, 1)
    assert sums_of(rows_of(x, source, row), source, row).tolist() == [[1, 1], [1, 1], [0, 0]]
    assert int(most) == 3


def test_room_is_at_most_what_a_rank_can_get() -> None:
    """Eight tokens with two experts each, two experts a rank, four ranks: 16 rows are all that one can get."""
    room = Room(1.25)
    assert room.rows(16, 4, 16) == 5
    room.see(torch.tensor(1.2))
    room.see(torch.tensor(0.7))
    assert room.used is not None and float(room.used) == pytest.approx(1.2)
    assert "1.50 times" in room.enlarge(1.2) and room.factor == pytest.approx(1.65)
    room.factor = 100.0
    assert room.rows(16, 4, 16) == 16 and room.imbalance(1.0) == 4.0
