"""Verdicts within rounding noise: differences, skipped updates, and steps that are left out."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest

from shardwise.core.json_file import read_json, text_of
from shardwise.verify.verdict import FACTOR, PlainRuns, TrainedStep, Verdict, judged

UNIT = 2.0**-11


def steps(*values: tuple[float, float]) -> tuple[TrainedStep, ...]:
    """Steps of (loss, gradient norm); an infinite norm is a skipped update."""
    return tuple(TrainedStep(loss, norm, norm == inf) for loss, norm in values)


PLAIN = steps((4.0, inf), (4.0, 2.0), (3.0, 8.0), (2.0, 1.0))
NOISY = steps((4.0, inf), (4.0, 2.002), (3.0, 7.0), (2.1, 1.1))
RUNS = PlainRuns(PLAIN, (NOISY, PLAIN), {"w": 0.01, "b": 0.2}, UNIT)


def verdict(seen: tuple[TrainedStep, ...], parameters: dict[str, float] | None = None) -> Verdict:
    return judged(seen, parameters or {"w": 0.0, "b": 0.0}, RUNS, "fp16", 1e-5)


def test_a_run_that_skips_as_the_plain_process_does_passes() -> None:
    """The norm of the skipped step is infinite in both; that of an unstable step is as far off as the noise."""
    found = verdict(steps((4.0, inf), (4.0, 2.001), (3.0, 6.5), (2.05, 1.05)), {"w": 0.012, "b": 0.3})
    assert found.passed and found.skipped == (1, 1) and found.compared == 4
    assert found.max_gradient_norm_difference < 0.2


@pytest.mark.parametrize(
    ("seen", "parameters", "quantity"),
    [
        (steps((4.05, inf), (4.0, 2.0), (3.0, 8.0), (2.0, 1.0)), {"w": 0.0}, "loss"),
        (steps((nan, inf), (4.0, 2.0), (3.0, 8.0), (2.0, 1.0)), {"w": 0.0}, "loss"),
        (steps((4.0, inf), (4.0, 2.0), (3.0, 8.0), (2.0, inf)), {"w": 0.0}, None),
        (steps((4.0, inf), (4.0, 6.0), (3.0, 8.0), (2.0, 1.0)), {"w": 0.0}, "gradient norm"),
        (PLAIN, {"w": 0.05, "b": 0.0}, "parameters"),
        (PLAIN, {"w": 0.03, "b": 0.0}, None),
    ],
    ids=["loss", "nan", "one skip more", "norm", "parameter", "within"],
)
def test_what_noise_does_not_explain_fails(
    seen: tuple[TrainedStep, ...], parameters: dict[str, float], quantity: str | None
) -> None:
    found = verdict(seen, parameters)
    assert found.passed == (quantity is None)
    assert [name for name, difference, limit in found.rows if difference > limit] == [quantity] * (
        quantity is not None
    )


def test_the_first_step_is_judged_by_the_noise_of_the_first_steps() -> None:
    """All runs start alike, so a small difference there is not excused by the chaos of later steps."""
    runs = replace(RUNS, steps=PLAIN[1:], repeats=(NOISY[1:],))
    calm = replace(runs, repeats=(steps((4.0, 2.002), (3.0, 8.0), (2.1, 1.1)),))
    seen = steps((4.0, 2.1), (3.0, 8.0), (2.0, 1.0))
    assert not judged(seen, {}, calm, "fp16", 1e-5).passed
    assert judged(seen, {}, runs, "fp16", 1e-5).passed


def test_a_norm_that_noise_makes_jump_is_not_judged() -> None:
    """Where plain runs differ by more than a quarter, no difference is beyond four times the noise."""
    wild = replace(RUNS, repeats=(steps((4.0, inf), (4.0, 2.0), (3.0, 5.0), (2.0, 1.0)),))
    seen = steps((4.0, inf), (4.0, 2.0), (3.0, 80.0), (2.0, 1.0))
    assert judged(seen, {}, wild, "fp16", 1e-5).passed and not judged(seen, {}, RUNS, "fp16", 1e-5).passed


def test_after_another_skip_nothing_is_compared() -> None:
    """The runs made different numbers of updates from there on; the loss before that update is the last to compare."""
    seen = steps((4.0, 2.0), (9.0, 2.0), (9.0, 8.0), (9.0, 1.0))
    found = verdict(seen, {"w": 1.0})
    assert found.passed and found.compared == 0 and found.max_parameter_difference == 0.0
    assert not verdict((TrainedStep(5.0, 2.0), *seen[1:]), {"w": 1.0}).passed


def test_skipping_on_and_on_fails() -> None:
    assert not verdict(steps(*[(4.0, inf)] * 4)).passed


def test_noise_below_the_spacing_of_numbers_allows_that_spacing() -> None:
    silent = PlainRuns(PLAIN, (PLAIN,), {"w": 0.0}, UNIT)
    seen = steps((4.0, inf), (4.0, 2.0 * (1 + UNIT / 2)), (3.0, 8.0), (2.0, 1.0))
    assert judged(seen, {"w": UNIT}, silent, "fp16", 1e-5).passed
    assert not judged(seen, {"w": UNIT * FACTOR}, silent, "fp16", 1e-5).passed


def test_a_proof_that_fails_fails_the_verdict() -> None:
    proof = Verdict(1e-4, 1e-4, 1e-4, "w", 1e-10, 4, precision="fp64", notes=("precision: fp64 for fp16",))
    near = verdict(PLAIN)
    assert near.passed and not replace(near, proof=proof).passed and replace(near, proof=proof).agrees


def test_a_verdict_is_read_as_it_was_written(tmp_path: Path) -> None:
    proof = Verdict(inf, 1e-14, 1e-14, "w", 1e-10, 4, ("k",), "fp64", notes=("precision: fp64 for fp16",))
    whole = replace(verdict(PLAIN), proof=proof)
    (tmp_path / "verify.json").write_text(text_of(whole), encoding="utf-8")
    assert read_json(tmp_path / "verify.json", Verdict) == whole
    shown = json.loads(json.dumps(whole.as_dict()))
    assert shown["passed"] is False and shown["proof"]["passed"] is False
    assert shown["proof"]["notes"] == ["precision: fp64 for fp16"]
