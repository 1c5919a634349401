"""The table of combinations follows the rules, equals the page, and names tests that train them."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import generate
from shardwise.core.errors import RecipeError
from shardwise.dryrun.run import dry_run
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.technique import RULES, refuse_broken
from tests import combinations

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "combinations.md"
UNTESTED = [("hybrid", "pipedream")]
"""Pairs that combine and that no row trains; a test dry-runs them.

Hybrid sharding of an asynchronous pipeline needs eight processes, and its test has four.
"""


def test_every_pair_that_goes_together_has_a_row_that_trains_both() -> None:
    """The rows are read off the tests; a row that is left out, or a new setting without one, is seen here."""
    assert combinations.untested() == UNTESTED


@pytest.mark.parametrize("pair", UNTESTED, ids=str)
@pytest.mark.long
def test_what_no_row_trains_is_at_least_dry_run(pair: tuple[str, str]) -> None:
    example = combinations.verdicts()[pair].example
    assert example is not None
    cluster = cluster_of(example.recipe.cluster.model_copy(update={"devices_per_node": example.world}))
    run = dry_run(example.recipe, blueprint_of(example.recipe), example.strategy, cluster)
    assert run.peak.bytes > 0 and run.cost.flops > 0


def test_rows_break_no_rule() -> None:
    """Else a row would count as a test of settings that no recipe can have."""
    for source, examples in combinations.SOURCES.items():
        for example in examples():
            case = combinations.case_of(example)
            assert not [rule.reason for rule in RULES if rule.broken(case)], (source, example.settings)


def test_a_no_is_refused_with_its_reason_and_leads_to_what_works() -> None:
    """As the command refuses it; the nearest value, or the nearest of that, breaks no rule any more."""
    for pair, verdict in combinations.verdicts().items():
        if not verdict.rules:
            continue
        refused = verdict.refused
        asked = refused.recipe.model_copy(update={"strategy": dict(refused.settings)})
        with pytest.raises(RecipeError) as caught:
            refuse_broken(asked, refused.world, lambda key: f"strategy.{key}")
        assert any(rule.reason in str(caught.value) for rule in verdict.rules), pair
        near = combinations.nearest(refused)
        assert near is None or near.settings != refused.settings, pair


def test_a_yes_is_accepted_as_the_command_checks_it() -> None:
    for verdict in combinations.verdicts().values():
        if verdict.example is not None:
            example = verdict.example
            asked = example.recipe.model_copy(update={"strategy": dict(example.settings)})
            refuse_broken(asked, example.world, lambda key: f"strategy.{key}")


def test_every_rule_is_on_the_page_once() -> None:
    """Under a number where it forbids a pair, else in the second list."""
    assert {id(rule) for rule in RULES} == {
        id(rule) for rule in (*combinations.noted(), *combinations.other_rules())
    }
    assert not {id(rule) for rule in combinations.noted()} & {id(rule) for rule in combinations.other_rules()}


def test_the_page_shows_what_rules_and_rows_say() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert generate.filled(text) == text, "run `make docs`"
