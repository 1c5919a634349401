"""The advised checkpoint interval: against a simulation, against the published rate, and in a plan."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from shardwise.dryrun.run import dry_run
from shardwise.hardware.cluster import cluster_of
from shardwise.model.open import blueprint_of
from shardwise.planner.checkpoint_interval import best_interval, effective_share
from shardwise.planner.search import plan_for
from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS, strategy_from
from tests.harness.plans import NOTHING_TO_SEARCH
from tests.harness.pool import Pool
from tests.harness.tiny_run import MODEL, saved


def simulated(interval: float, stall: float, restart: float, between: float, seed: int = 0) -> float:
    """Share of useful time over 40,000 segments. Failures also strike saves and restarts."""
    generator, clock, segments = random.Random(seed), 0.0, 40_000
    for _ in range(segments):
        needed = interval + stall
        while (failure := generator.expovariate(1 / between)) < needed:
            clock += failure
            while (again := generator.expovariate(1 / between)) < restart:
                clock += again
            clock += restart
        clock += needed
    return segments * interval / clock


@pytest.mark.parametrize(("stall", "restart", "between"), [(5.0, 60.0, 3600.0), (60.0, 300.0, 7200.0)])
def test_the_formula_is_what_a_simulation_finds(stall: float, restart: float, between: float) -> None:
    best = best_interval(stall, between)
    shares = {factor: simulated(factor * best, stall, restart, between) for factor in (0.3, 1.0, 3.0)}
    for factor, share in shares.items():
        assert share == pytest.approx(effective_share(factor * best, stall, restart, between), rel=0.01)
    assert shares[1.0] > max(shares[0.3], shares[3.0])


def test_no_other_interval_is_better() -> None:
    for stall in (0.1, 10.0, 500.0):
        best = best_interval(stall, 10_000.0)
        share = effective_share(best, stall, 100.0, 10_000.0)
        for factor in (0.9, 1.1):
            assert effective_share(factor * best, stall, 100.0, 10_000.0) < share


def test_nothing_is_left_of_a_run_that_fails_a_thousand_times_between_saves() -> None:
    """405B in fp32 on 16,384 devices with one save at the end."""
    assert effective_share(3e6, 60.0, 600.0, 3000.0) == 0.0


def test_youngs_formula_is_the_limit_of_short_saves() -> None:
    assert best_interval(1e-3, 1e5) == pytest.approx((2 * 1e-3 * 1e5) ** 0.5, rel=1e-3)


def test_a_plan_advises_an_interval_for_its_cluster() -> None:
    values = {
        "model": MODEL,
        "data": {"sequence_length": 8},
        "steps": 1_000_000,
        "batch_size": 16,
        "cluster": {"preset": "2xH100-80GB", "nodes": 8, "hours_between_failures": 1000},
        "strategy": NOTHING_TO_SEARCH | {"zero_stage": 1, "precision": "bf16"},
    }

    def said(**checkpoint: object) -> str:
        recipe = recipe_of({**values, "checkpoint": checkpoint}, SETTINGS)
        plan = plan_for(recipe, blueprint_of(recipe), cluster_of(recipe.cluster), compare=False)
        [sentence] = [reason for reason in plan.reasons if reason.startswith("checkpoint.every")]
        return sentence

    own = said(every=100)
    assert "a failure of one of 16 devices every 2 d 14 h" in own and "every 100 loses" in own
    every, shorter = (int(text.split()[1]) for text in (own, said(background=True)))
    assert shorter < every


def test_what_a_rank_saves_is_planned(pool: Pool, tmp_path: Path) -> None:
    """Against the files of two ranks, which share what both hold."""
    pool.run(2, saved, tmp_path, 3, 1, 1)
    [checkpoint] = tmp_path.glob("step-*")
    written = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    values = {"model": MODEL, "steps": 1, "batch_size": 4, "data": {"sequence_length": 8}}
    recipe = recipe_of(values | {"cluster": {"devices_per_node": 2}}, SETTINGS)
    strategy = strategy_from({"zero_stage": 3, "micro_batch_size": 2})
    planned = [
        dry_run(recipe, blueprint_of(recipe), strategy, cluster_of(recipe.cluster), rank=rank).saved_bytes
        for rank in (0, 1)
    ]
    headers = sum(_header(path) for path in checkpoint.glob("*.safetensors"))
    assert sum(planned) == pytest.approx(written - headers, rel=0.01)


def _header(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")
