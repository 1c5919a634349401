"""Verdicts within rounding noise: differences, skipped updates, and what noise leaves incomparable."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest

from shardwise.core.json_file import read_json, text_of
from shardwise.verifier.verdict import (
    ALL_PARAMETERS,
    FACTOR,
    LOOSEST,
    SMALLEST_LIMIT,
    PlainRuns,
    TrainedStep,
    Verdict,
    judge_run,
    misalignments,
)

UNIT, TARGETS = 2.0**-11, 256


def steps(*values: tuple[float, float]) -> tuple[TrainedStep, ...]:
    """Steps of (loss, gradient norm); an infinite norm is a skipped update."""
    return tuple(TrainedStep(loss, norm, norm == inf) for loss, norm in values)


PLAIN = steps((4.0, 3.0), (4.0, inf), (3.0, 2.0), (2.0, 1.0))
NOISY = steps((4.0, 3.0), (4.0, inf), (3.0, 2.02), (2.02, 1.015))
FIRSTS = steps((4.0002, 3.003), (3.9999, 2.998))
QUIET = {"w": 0.01, "b": 0.3, ALL_PARAMETERS: 0.001}
RUNS = PlainRuns(PLAIN[0], PLAIN, FIRSTS, (NOISY, PLAIN), QUIET, QUIET, UNIT, TARGETS)
ALIKE = {"w": 0.0, "b": 0.0, ALL_PARAMETERS: 0.0}


def verdict(
    seen: tuple[TrainedStep, ...] = PLAIN,
    gradients: dict[str, float] = ALIKE,
    parameters: dict[str, float] = ALIKE,
    runs: PlainRuns = RUNS,
) -> Verdict:
    return judge_run(seen, gradients, parameters, runs, "fp16", 1e-5)


def beyond(found: Verdict) -> list[str]:
    return [name for name, difference, limit in found.rows if difference > limit]


def test_a_run_within_the_noise_passes() -> None:
    """The norm of the skipped step is infinite in both, and left out."""
    seen = steps((4.0005, 3.01), (4.0005, inf), (3.01, 2.05), (2.05, 1.04))
    found = verdict(
        seen, {"w": 0.03, "b": 9.0, ALL_PARAMETERS: 0.0}, {"w": 0.03, "b": 9.0, ALL_PARAMETERS: 0.0}
    )
    assert found.passed and found.skipped == (1, 1) and found.unskipped == 0
    assert found.counted is not None and found.compared == 4
    assert vars(found.counted) == {
        "loss": (4, 4),
        "gradient_norm": (3, 3),
        "gradients": (1, 2),  # an error of 10 % in b is within four times its noise
        "parameters": (1, 2),
    }


@pytest.mark.parametrize(
    ("seen", "gradients", "parameters", "quantity"),
    [
        (steps((4.002, 3.0), *[(s.loss, s.grad_norm) for s in PLAIN[1:]]), {}, {}, "loss"),
        (steps((4.0, 3.02), *[(s.loss, s.grad_norm) for s in PLAIN[1:]]), {}, {}, "gradient norm"),
        (steps((4.0, 3.0), (4.0, inf), (3.0, 2.2), (2.0, 1.0)), {}, {}, "gradient norm"),
        (steps((4.0, 3.0), (4.0, inf), (nan, 2.0), (2.0, 1.0)), {}, {}, "loss"),
        (PLAIN, {"w": 0.05}, {}, "gradients"),
        (PLAIN, {ALL_PARAMETERS: 0.01}, {}, "gradients"),
        (PLAIN, {"w": inf}, {}, "gradients"),
        (PLAIN, {}, {"w": 0.05}, "parameters"),
        (PLAIN, {}, {"w": 0.03}, None),
        (PLAIN, {}, {"b": 0.9}, None),
    ],
)
def test_what_noise_does_not_explain_fails(
    seen: tuple[TrainedStep, ...],
    gradients: dict[str, float],
    parameters: dict[str, float],
    quantity: str | None,
) -> None:
    found = verdict(seen, ALIKE | gradients, ALIKE | parameters)
    assert found.agrees == (quantity is None)
    assert beyond(found) == [quantity] * (quantity is not None)


def test_the_first_step_is_judged_by_the_noise_of_first_steps() -> None:
    """All runs start alike, so a small difference there is not excused by its growth in later steps."""
    off = steps((4.0, 3.05), (4.0, inf), (3.0, 2.0), (2.0, 1.0))
    later = steps((4.0, 3.0), (4.0, inf), (3.0, 2.033), (2.0, 1.0))
    assert not verdict(off).passed and verdict(later).passed


def test_a_norm_that_noise_makes_jump_is_not_judged() -> None:
    """Four times its noise would pass an error of 10 %: it is counted as not compared."""
    wild = replace(RUNS, repeats=(steps((4.0, 3.0), (4.0, inf), (3.0, 2.0), (2.0, 1.1)),))
    seen = steps((4.0, 3.0), (4.0, inf), (3.0, 2.0), (2.0, 80.0))
    found = verdict(seen, runs=wild)
    assert found.passed and found.counted is not None and found.counted.gradient_norm == (1, 3)
    assert not verdict(seen).passed
    assert max(limit for _, _, limit in found.rows) <= LOOSEST


@pytest.mark.parametrize(("jumps", "passes"), [(0, True), (2, True), (3, False)])
def test_a_tenth_of_the_steps_may_jump(jumps: int, passes: bool) -> None:
    """Not the first, and not to NaN or infinity."""
    plain = steps(*[(4.0, 2.0)] * 20)
    runs = replace(RUNS, first=plain[0], steps=plain, firsts=plain[:2], repeats=(plain,))
    seen = steps(*[(4.0, 2.0)] * (20 - jumps), *[(4.0, 3.0)] * jumps)
    found = verdict(seen, runs=runs)
    assert found.passed == passes and found.counted is not None
    assert found.counted.gradient_norm == (20 - min(jumps, 2), 20)
    assert not verdict(steps((4.0, 3.0), *[(4.0, 2.0)] * 19), runs=runs).passed
    assert not verdict(steps(*[(4.0, 2.0)] * 19, (nan, 2.0)), runs=runs).passed


def test_an_error_of_ten_percent_is_beyond_every_limit() -> None:
    """Of a norm it is 9.1 % of the larger value."""
    assert LOOSEST < 1 - 1 / 1.1
    assert misalignments({"w": (1.1, 1.21, 1.0)})["w"] > LOOSEST


def test_misalignments() -> None:
    """10 % too long, orthogonal, opposite, both zero, only the other one zero, not a number."""
    found = misalignments(
        {
            "long": (1.1, 1.21, 1.0),
            "orthogonal": (0.0, 4.0, 1.0),
            "opposite": (-2.0, 2.0, 2.0),
            "still": (0.0, 0.0, 0.0),
            "moved": (0.0, 1.0, 0.0),
            "broken": (nan, nan, 1.0),
        }
    )
    assert found.pop(ALL_PARAMETERS) == inf
    assert found == pytest.approx(
        {"long": 0.1, "orthogonal": 1.0, "opposite": 2.0, "still": 0.0, "moved": inf, "broken": inf}
    )
    assert misalignments({"a": (1.1, 1.21, 1.0), "b": (1.0, 1.0, 1.0)})[ALL_PARAMETERS] == pytest.approx(0.05)
    assert misalignments({}) == {ALL_PARAMETERS: 0.0}


@pytest.mark.parametrize("skipped", [0, 3, 4])
def test_other_skips_than_the_plain_process_fail_if_they_are_many(skipped: int) -> None:
    """Compared are runs with the same skips; what the plain process skipped by itself is counted."""
    found = replace(verdict(), skipped=(skipped, 1))
    assert found.agrees == (skipped == 0) and found.skips_on == (skipped > 2)


def test_an_update_by_a_gradient_that_is_not_finite_fails() -> None:
    seen = (TrainedStep(4.0, 3.0), TrainedStep(4.0, inf, False), *PLAIN[2:])
    found = verdict(seen)
    assert found.unskipped == 1 and not found.agrees and beyond(found) == []


def test_parameters_that_agree_in_all_repeats_are_allowed_the_least() -> None:
    silent = replace(RUNS, gradients=ALIKE, parameters=ALIKE)
    within = {"w": 0.9 * SMALLEST_LIMIT, "b": 0.0, ALL_PARAMETERS: 0.0}
    assert verdict(gradients=within, runs=silent).passed
    assert not verdict(gradients={**within, "w": 1.1 * SMALLEST_LIMIT}, runs=silent).passed
    assert verdict(parameters={**within, "w": 0.9 * FACTOR * UNIT}, runs=silent).passed
    assert not verdict(parameters={**within, "w": 1.1 * FACTOR * UNIT}, runs=silent).passed


def test_a_proof_that_fails_fails_the_verdict() -> None:
    proof = Verdict(1e-4, 1e-4, 1e-4, "w", 1e-10, 4, precision="fp64", notes=("precision: fp64 for fp16",))
    near = verdict()
    assert near.passed and not replace(near, proof=proof).passed and replace(near, proof=proof).agrees


def test_a_verdict_is_read_as_it_was_written(tmp_path: Path) -> None:
    proof = Verdict(inf, 1e-14, 1e-14, "w", 1e-10, 4, ("k",), "fp64", notes=("precision: fp64 for fp16",))
    whole = replace(verdict(), proof=proof)
    (tmp_path / "verify.json").write_text(text_of(whole), encoding="utf-8")
    assert read_json(tmp_path / "verify.json", Verdict) == whole
    shown = json.loads(json.dumps(whole.as_dict()))
    assert shown["passed"] is False and shown["proof"]["passed"] is False
    assert shown["proof"]["notes"] == ["precision: fp64 for fp16"]
