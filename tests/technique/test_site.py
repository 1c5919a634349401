"""Hints of several techniques combine, in any order; modules are replaced in every place of a view."""

from __future__ import annotations

from itertools import permutations

import pytest
from torch import nn

from shardwise.technique.site import ModelView, PlanHints, StageView


@pytest.mark.parametrize(
    ("repetitions", "expected"), [((), 1), ((2, 3), 6), ((2, 4), 4), ((0, 2), 0), ((0, 0), 0)]
)
def test_repetitions_combine_to_their_least_common_multiple(
    repetitions: tuple[int, ...], expected: int
) -> None:
    """0 depends on the total depth, whatever the others are."""
    for order in permutations(repetitions):
        hints = PlanHints()
        for blocks in order:
            hints.repeats(blocks)
        assert hints.repeat_every == expected


def test_the_deepest_need_counts() -> None:
    for order in permutations((4, 1, 2)):
        hints = PlanHints()
        for blocks in order:
            hints.needs_depth(blocks)
        assert hints.min_depth == 4


def test_hints_of_two_sites_are_apart() -> None:
    first, second = PlanHints(), PlanHints()
    first.note("one", "two")
    assert (first.notes, second.notes) == (["one", "two"], [])


def test_replaced_modules_are_those_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.LayerNorm(2))
    view = ModelView(model, [StageView(model, [model[0]]), StageView(model, [model[1]])], [model[2]], None)
    block, norm = nn.Identity(), nn.Identity()
    view.replace({model[1]: block, model[2]: norm})
    assert list(model) == [view.blocks[0], block, norm]
    assert view.stages[1].blocks == [block] and view.head == [norm]
