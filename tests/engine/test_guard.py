"""The guard's decisions: outliers, spikes and their extent, and steps that its statistics exclude."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.json_file import checked, plain
from shardwise.engine.guard import LONGEST_SPIKE, Burst, GuardAction, GuardState, GuardVerdict, Seen, judge
from shardwise.engine.train_state import TrainState, merged
from shardwise.recipe.load import recipe_of
from shardwise.recipe.sections import GuardSpec
from shardwise.trainer.faults.recovery import ObservedStep, Recovery

SPEC = GuardSpec(window=16)
NAN = math.nan


def noise(count: int, seed: int = 0) -> list[tuple[float, float]]:
    """Losses around 3 and norms around 1, as a run has them."""
    generator = random.Random(seed)
    return [(3 + 0.1 * generator.gauss(0, 1), math.exp(0.15 * generator.gauss(0, 1))) for _ in range(count)]


def verdicts(
    steps: Iterable[tuple[float, float]], memory: GuardState | None = None, spec: GuardSpec = SPEC
) -> Iterator[tuple[GuardState, GuardVerdict]]:
    """Judge one step after the other; a step with a loss or norm that is not finite is a skipped one."""
    memory = memory or GuardState()
    for index, (loss, norm) in enumerate(steps):
        skipped = not (math.isfinite(loss) and math.isfinite(norm))
        memory, verdict = judge(spec, memory, Seen(index, loss, norm, skipped))
        yield memory, verdict


def events(steps: Iterable[tuple[float, float]]) -> dict[int, str]:
    return {index: v.event for index, (_, v) in enumerate(verdicts(steps)) if v.event}


def rewinds(steps: Iterable[tuple[float, float]]) -> list[tuple[int, int, int]]:
    """(index, first, last) of the first rewind only: the loop would go back there."""
    for index, (_, verdict) in enumerate(verdicts(steps)):
        if verdict.action is GuardAction.REWIND:
            return [(index, verdict.first, verdict.last)]
    return []


def put(steps: list[tuple[float, float]], at: int, *values: tuple[float, float]) -> list[tuple[float, float]]:
    return [*steps[:at], *values, *steps[at + len(values) :]]


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_spike(seed: int) -> None:
    assert rewinds(noise(500, seed)) == []


def test_a_falling_loss_is_no_spike_and_neither_is_a_constant_one() -> None:
    assert events([(6 * math.exp(-i / 50) + 2, 2.0) for i in range(300)]) == {}
    assert events([(2.0, 1.0)] * 100 + [(2.1, 1.5)] * 3) == {}


def test_one_high_norm_is_odd_and_no_spike() -> None:
    steps = put(noise(60), 40, (3.2, 30.0))
    assert events(steps) == {40: "odd"} and rewinds(steps) == []


def test_one_very_high_loss_is_a_spike() -> None:
    steps = put(noise(60), 40, (6.0, 2.0))
    assert events(steps) == {40: "spike"}
    assert rewinds(steps) == [(42, 40, 40)]


def test_a_burst_is_seen_to_its_end() -> None:
    burst = [(3.0, 100.0)] * 3 + noise(1) + [(4.5, 80.0)]
    steps = put(noise(60), 40, *burst)
    assert events(steps)[41] == "spike"
    assert rewinds(steps) == [(46, 40, 44)]


def test_a_loss_that_stays_up_is_taken_back_after_a_while() -> None:
    steps = put(noise(80), 40, *[(7.0, 1.0)] * 40)
    assert rewinds(steps) == [(40 + LONGEST_SPIKE - 1, 40, 40 + LONGEST_SPIKE - 1)]


def test_a_spike_at_the_very_end_is_not_left_in() -> None:
    memory = GuardState()
    for index, (loss, norm) in enumerate(put(noise(41), 40, (9.0, 1.0))):
        memory, verdict = judge(SPEC, memory, Seen(index, loss, norm, final=index == 40))
    assert verdict.action is GuardAction.REWIND and (verdict.first, verdict.last) == (40, 40)


@pytest.mark.parametrize("overflow", [False, True])
def test_a_spike_is_not_left_in_where_skipped_steps_end_the_run(overflow: bool) -> None:
    memory = GuardState()
    for index, (loss, norm) in enumerate(put(noise(43), 40, (9.0, 1.0), (3.0, NAN))[:42]):
        skipped = math.isnan(norm)
        memory, verdict = judge(
            SPEC, memory, Seen(index, loss, norm, skipped, overflow and skipped, final=index == 41)
        )
    assert verdict.action is GuardAction.REWIND and verdict.first == 40


def test_skipped_steps_do_not_put_a_rewind_off_for_good() -> None:
    spec = GuardSpec(skips=100)
    steps = put(noise(140), 70, (9.0, 1.0), *[(NAN, NAN)] * 60)
    first = next(i for i, (_, v) in enumerate(verdicts(steps, spec=spec)) if v.action is GuardAction.REWIND)
    assert first == 70 + LONGEST_SPIKE - 1


def test_nothing_is_a_spike_before_the_window_is_full() -> None:
    assert events(put(noise(60), SPEC.window - 1, (50.0, 1e6))) == {}
    assert events(put(noise(60), SPEC.window, (50.0, 1e6))) == {SPEC.window: "spike"}


def test_a_nan_is_one_skip_and_never_enters_the_statistics() -> None:
    """A rolling window that keeps it would call every step after it bad."""
    steps = put(noise(300), 100, (NAN, 1.0))
    assert events(steps) == {100: "skipped"}
    memory, _ = list(verdicts(steps))[-1]
    assert all(map(math.isfinite, memory.losses + memory.norms))
    assert len(memory.losses) == SPEC.window


def test_what_stands_out_does_not_enter_the_statistics() -> None:
    steps = put(noise(41), 40, (9.0, 500.0))
    before, after = list(verdicts(steps))[-2][0], list(verdicts(steps))[-1][0]
    assert (before.losses, before.norms) == (after.losses, after.norms)


def test_more_skips_in_a_row_than_allowed_end_the_run() -> None:
    steps = noise(20) + [(NAN, NAN)] * (SPEC.skips + 1)
    actions = [verdict.action for _, verdict in verdicts(steps)]
    assert actions == [GuardAction.GO_ON] * (20 + SPEC.skips) + [GuardAction.GIVE_UP]
    mended = noise(20) + [(NAN, 1.0)] * SPEC.skips + noise(1) + [(3.0, NAN)] * SPEC.skips
    assert all(verdict.action is GuardAction.GO_ON for _, verdict in verdicts(mended))


def test_overflows_of_the_loss_scale_count_nothing() -> None:
    memory = GuardState()
    for index in range(50):
        memory, verdict = judge(SPEC, memory, Seen(index, 3.0, math.inf, skipped=True, overflow=True))
        assert verdict.action is GuardAction.GO_ON and verdict.event == "overflow"
    assert memory == GuardState()


def test_a_torn_update_is_taken_back_at_once() -> None:
    memory, verdict = judge(SPEC, GuardState(), Seen(5, 3.0, NAN, skipped=False))
    assert (verdict.action, verdict.event, verdict.first, verdict.last) == (GuardAction.REWIND, "torn", 5, 5)
    assert memory.skips == 1


def test_a_level_that_could_not_be_undone_is_learned() -> None:
    memory, _ = list(verdicts(noise(40)))[-1]
    high = [(loss + 4, norm) for loss, norm in noise(60)]
    assert not any(verdict.event for _, verdict in verdicts(high, memory.forgetting()))


# ---- the state that survives ------------------------------------------------------------------------------

memories = st.builds(
    lambda pairs, skips, burst: GuardState(
        tuple(a for a, _ in pairs), tuple(b for _, b in pairs), skips, burst and Burst(*sorted(burst), True)
    ),
    st.lists(st.tuples(st.floats(-1e9, 1e9), st.floats(0, 1e9)), max_size=5),
    st.integers(0, 9),
    st.none() | st.tuples(st.integers(0, 99), st.integers(0, 99)),
)
spans = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=6).map(
    lambda pairs: merged((start, start + size) for start, size in pairs)
)


@given(spans, memories, st.integers(0, 9))
def test_the_state_comes_back_from_json(left_out: Any, memory: GuardState, rewinds: int) -> None:
    state = TrainState(7, 70, rewinds, left_out, memory)
    assert checked(json.dumps(plain(state)), TrainState) == state


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", 1.0),
        ("rewinds", -1),
        ("rewinds", True),
        ("left_out", [[3, 3]]),
        ("left_out", [[3, 5], [5, 6]]),
        ("left_out", [[4, 2]]),
        ("left_out", [1, 2]),
        ("left_out", {}),
        ("guard", None),
        ("guard", {"losses": [NAN], "norms": [1.0], "skips": 0, "burst": None}),
        ("guard", {"losses": [1.0], "norms": [], "skips": 0, "burst": None}),
        ("guard", {"losses": [], "norms": [], "skips": 0, "burst": {"first": 2, "last": 1, "spike": True}}),
        ("guard", {"losses": [], "norms": [], "skips": "0", "burst": None}),
    ],
)
def test_another_state_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ValueError):
        checked(json.dumps(plain(TrainState(3, 30)) | {key: value}), TrainState)


@given(spans)
def test_positions_are_those_that_are_not_left_out_in_order(left_out: Any) -> None:
    state = TrainState(left_out=left_out)
    gone = {place for start, end in left_out for place in range(start, end)}
    expected = [place for place in range(200) if place not in gone]
    assert [state.position(index) for index in range(100)] == expected[:100]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), max_size=8))
def test_merging_keeps_the_positions(pairs: list[tuple[int, int]]) -> None:
    given_spans = [(start, start + size) for start, size in pairs]
    found = merged(given_spans)
    assert {p for a, b in given_spans for p in range(a, b)} == {p for a, b in found for p in range(a, b)}
    assert all(a[1] < b[0] for a, b in pairwise(found))


@pytest.mark.parametrize("in_step", [True, False])
def test_stages_at_different_steps_are_judged_by_what_all_of_them_know(in_step: bool, tmp_path: Path) -> None:
    """PipeDream's stages have norms of their own, and must pause, save and give up together."""
    recipe = recipe_of({"model": {"preset": "tiny"}, "data": {}, "steps": 200, "batch_size": 4})
    run: Any = SimpleNamespace(recipe=recipe, synchronous=in_step, loss_scale=SimpleNamespace(active=False))
    nothing: Any = None
    recovery, state = Recovery(run, nothing, tmp_path, nothing, nothing, print), TrainState()
    for index in range(100):
        seen = ObservedStep(index, 2 + 0.01 * (index % 7), 1 + 0.01 * (index % 5), False, 1.0)
        state = recovery.see(replace(state, step=index), seen)
    for norm, skipped in ((50.0, False), (math.inf, True)):
        after = recovery.see(state, ObservedStep(100, 2.0, norm, skipped, 1.0))
        assert (after.guard.burst is None and not after.guard.skips) == (not in_step)
    after = recovery.see(state, ObservedStep(100, 50.0, 1.0, False, 1.0))
    assert after.guard.burst is not None
