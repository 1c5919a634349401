"""What a report says of the load of experts."""

from __future__ import annotations

import pytest

from shardwise.core.run_files import ExpertsRecord
from shardwise.report.experts import MAX_NAMED, experts_section, experts_sentences


def test_dead_experts_are_named_and_the_busiest() -> None:
    record = ExpertsRecord(
        7, ("layers.0.mlp.experts", "layers.1.mlp.experts"), ((1.0, 1.5, 0.0, 1.5), (0.5, 0.0, 0.5, 3.0))
    )
    busiest, dead = experts_sentences(record)
    assert "Mean of 7 steps" in busiest and "number 3 (from 0) of layers.1.mlp.experts, with 3.00" in busiest
    assert dead == "2 of 8 experts got no token: 2 of layers.0.mlp.experts, 1 of layers.1.mlp.experts."
    assert experts_section(record)["experts"] is not None
    assert experts_section(None) == {"experts": None, "experts_words": []}


@pytest.mark.parametrize(("dead", "more"), [(MAX_NAMED, ""), (MAX_NAMED + 3, " and 3 others.")])
def test_many_dead_experts_are_counted(dead: int, more: str) -> None:
    record = ExpertsRecord(1, ("a",), ((0.0,) * dead + (8.0,),))
    *_, words = experts_sentences(record)
    assert words.startswith(f"{dead} of {dead + 1} experts") and ("others" in words) == bool(more)
    assert words.endswith(more or f"{MAX_NAMED - 1} of a.")


def test_without_dead_experts_it_says_so() -> None:
    assert list(experts_sentences(ExpertsRecord(2, ("a",), ((0.5, 1.5),))))[1] == "Every expert got tokens."


def test_layers_without_counts_are_not_dead_and_one_expert_has_a_picture() -> None:
    assert "number 1 (from 0) of b" in next(
        iter(experts_sentences(ExpertsRecord(1, ("a", "b"), ((0.0, 0.0), (0.5, 1.5)))))
    )
    assert "got no token" not in " ".join(
        experts_sentences(ExpertsRecord(1, ("a", "b"), ((0.0, 0.0), (0.5, 1.5))))
    )
    assert len(list(experts_sentences(ExpertsRecord(1, ("a",), ((0.0, 0.0),))))) == 1
    assert experts_section(ExpertsRecord(1, ("a",), ((1.0,),)))["experts"] is not None
