"""The table of combinations follows the rules and equals the page, and each pair has a row of a test that trains it.

Chosen: rows of existing tests, read off their parameters. Refused: a separate table of pairs, which would drift.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from docs import combinations, generate
from docs.combinations import UNTRAINED, WAYS, Example, verdicts
from shardwise.core.errors import RecipeError
from shardwise.dryrun.run import dry_run
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.technique import RULES, refuse_broken
from tests.harness.parity import Trial
from tests.rows import mixes, parity
from tests.rows.table import read

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "combinations.md"


def _parity() -> Iterator[Example]:
    for name in ("exact", "fewer bits", "adapters", "compiled"):
        yield from map(_example, map(parity.trial_of, read(name).rows))


def _mixes() -> Iterator[Example]:
    for name in ("mixes", "mixes of three axes"):
        yield from map(_example, map(mixes.trial_of, read(name).rows))
    yield from (_example(mixes.further_trial(*row)) for row in mixes.FURTHER)


def _example(trial: Trial) -> Example:
    return Example(trial.settings, trial.world, trial.recipe)


def _tensor() -> Iterator[Example]:
    module = importlib.import_module("tests.technique.test_tensor")
    yield from (_example(*row.values) for row in module.PARITY)


def _pipeline() -> Iterator[Example]:
    module = importlib.import_module("tests.technique.test_pipeline")
    yield from (_example(*row.values) for row in module.ROWS)


def _pipedream() -> Iterator[Example]:
    module = importlib.import_module("tests.plugins.pipeline.test_pipedream")
    for ranks, per_step, settings in (*module.ROWS, *module.LONG_ROWS):
        copies = settings.get("copies", 1)
        recipe = module.recipe(ranks, per_step, **settings)
        yield Example(recipe.strategy, ranks * copies, recipe)
    for settings, optimizer in module.MIXES:
        recipe = module.mixed(settings, optimizer)
        yield Example(recipe.strategy, 4, recipe)


SOURCES: Mapping[str, Callable[[], Iterator[Example]]] = {
    "tests/test_agreement.py, against one plain process": _parity,
    "tests/test_mixes.py": _mixes,
    "tests/technique/test_tensor.py": _tensor,
    "tests/technique/test_pipeline.py": _pipeline,
    "tests/plugins/pipeline/test_pipedream.py": _pipedream,
}


GIVE_BITS_UP = (
    *("bf16", "fp16", "fp8", "fp8_scaling row", "fp8_layers all", "adamw_8bit"),
    *("bf16 weights alone", "16-bit reduction", "16-bit buffers"),
)
"""Ways that a row trains within a wide tolerance; pipedream is held against steps of its own."""


def _is_exact(example: Example) -> bool:
    """Whether a row is held to the rounding of fp32 or fp64."""
    precise = example.value("precision") in ("fp32", "fp64")
    return precise and example.recipe.optimizer.name != "adamw_8bit"


@functools.cache
def trained() -> dict[tuple[str, str], str]:
    """Pairs that some row trains, and whose: of exact ways one that is held to exactness."""
    found: dict[tuple[str, str], str] = {}
    for source, examples in SOURCES.items():
        for example in examples():
            exact, held = _is_exact(example), [way.name for way in WAYS if way.within(example)]
            for index, one in enumerate(held):
                for other in held[index + 1 :]:
                    if exact or {one, other} & {*GIVE_BITS_UP, "pipedream"}:
                        found.setdefault((one, other), source)
    return found


def untrained() -> list[tuple[str, str]]:
    """Pairs that go together, and that no row has."""
    return [pair for pair, verdict in verdicts().items() if verdict.example and pair not in trained()]


@pytest.mark.long
def test_every_pair_that_goes_together_has_a_row_that_trains_both() -> None:
    """The rows are read off the tests; a row that is left out, or a new setting without one, is seen here."""
    assert untrained() == UNTRAINED


@pytest.mark.parametrize("pair", UNTRAINED, ids=str)
@pytest.mark.long
def test_what_no_row_trains_is_at_least_dry_run(pair: tuple[str, str]) -> None:
    example = verdicts()[pair].example
    assert example is not None
    cluster = cluster_of(example.recipe.cluster.model_copy(update={"devices_per_node": example.world}))
    run = dry_run(example.recipe, blueprint_of(example.recipe), example.strategy, cluster)
    assert run.peak.bytes > 0 and run.cost.flops > 0


def test_rows_break_no_rule() -> None:
    """Else a row would count as a test of settings that no recipe can have."""
    for source, examples in SOURCES.items():
        for example in examples():
            case = combinations.case_of(example)
            assert not [rule.reason for rule in RULES if rule.broken(case)], (source, example.settings)


def test_a_no_is_refused_with_its_reason_and_leads_to_what_works() -> None:
    """As the command refuses it; the nearest value, or the nearest of that, breaks no rule any more."""
    for pair, verdict in verdicts().items():
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
    for verdict in verdicts().values():
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
