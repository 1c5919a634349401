"""Phases of a step: what a run measures, and what of it is communication."""

from __future__ import annotations

import time

import pytest
import torch

from shardwise.core.run_files import PhasesRecord
from shardwise.engine.build import build
from shardwise.engine.phase import listening, phase
from shardwise.engine.step import step
from shardwise.engine.step_clock import PhaseClock
from shardwise.model.open import blueprint_of
from shardwise.recipe.load import recipe_of
from shardwise.technique import strategy_from
from shardwise.trainer.phase_stopwatch import BEFORE, PhaseStopwatch
from tests.harness.pool import Pool

SLOW = 0.5
"""Seconds: many times those of a step."""
MODEL = {"layers": 1, "width": 16, "heads": 2, "kv_heads": 2, "ffn": 32, "vocab": 256}


def test_a_phase_lasts_until_the_next_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = PhaseClock(torch.device("cpu"))
    with clock.over():
        for name, spent in (("forward", 1.0), ("backward", 3.0), ("forward", 1.0)):
            with phase(name):
                now[0] += spent
    found = clock.read()
    assert list(found) == ["setup", "forward", "backward"]
    assert found == {"setup": 0.0, "forward": 2.0, "backward": 3.0}


def phases_rank(steps: int, slow: int | None = None) -> tuple[PhasesRecord | None, list[float]]:
    """The phases of a run of ``steps`` steps, and the seconds of each step; another process disturbs step ``slow``."""
    recipe = recipe_of({"model": MODEL, "data": {"sequence_length": 8}, "steps": steps, "batch_size": 4})
    run = build(recipe, blueprint_of(recipe), strategy_from({"zero_stage": 3}), torch.device("cpu"))
    watch, ids, spent = PhaseStopwatch(run, first=0), torch.zeros((1, 8), dtype=torch.int64), []
    batches = [{"input_ids": ids, "labels": ids}] * 2
    for index in range(steps):
        begin = time.perf_counter()
        pause = SLOW if index == slow else 0.0
        with watch.over(index), listening(lambda name, wait=pause: time.sleep(wait)):  # type: ignore[misc]
            step(run, batches, 1e-3)
        spent.append(time.perf_counter() - begin)
    return watch.collect(), spent


def test_a_step_s_phases_and_its_communication(pool: Pool) -> None:
    (found, spent), (other, _) = pool.run(2, phases_rank, BEFORE + 6)
    assert found is not None and found.step == BEFORE + 1
    assert found.seconds.keys() == {"forward", "backward", "optimizer", "communication"}
    assert found.seconds["communication"] > 0
    assert found == other and found.ranks[0] == found.seconds, "all ranks have the seconds of all"
    assert len(found.ranks) == 2 and found.ranks[0] != found.ranks[1]
    # Phases and the communication of the next step: together neither much less nor more than these two steps.
    assert 0 < sum(found.seconds.values()) < spent[BEFORE] + spent[BEFORE + 1]


@pytest.mark.long
def test_phases_are_medians_as_the_step_is(pool: Pool) -> None:
    """A step that was disturbed moves neither: together the phases are no longer than the typical step."""
    for slow in (BEFORE, BEFORE + 2):  # the first one whose phases are timed, and one of communication
        found, spent = pool.run(2, phases_rank, BEFORE + 12, slow)[0]
        assert found is not None and found.steps == 12 - 3
        assert spent[slow] > 2 * SLOW
        assert sum(found.seconds.values()) < SLOW


def test_a_short_run_times_no_communication_or_nothing(pool: Pool) -> None:
    short, none = (pool.run(2, phases_rank, steps)[0][0] for steps in (BEFORE + 1, BEFORE))
    assert short is not None and "communication" not in short.seconds
    assert none is None
