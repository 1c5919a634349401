"""Predicted against measured seconds, in the page and in sentences."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.core.plan import Plan
from shardwise.core.run_files import Outcome, PhasesRecord, RankMemory
from shardwise.core.units import MiB
from shardwise.report.notation import peak_error
from shardwise.report.step_times import compared_phases, step_sentences

MEASURED = {"forward": 0.5, "backward": 1.0, "optimizer": 0.2, "communication": 0.3}
PREDICTED = {"forward": 0.4, "backward": 1.1, "optimizer": 0.2, "communication": 0.0}


def outcome(plan: Plan, measured: float) -> Outcome:
    return Outcome(
        (RankMemory(0, 1, 1),), plan.step.seconds, measured, plan.ledger, phases=PhasesRecord(4, MEASURED)
    )


def on_cpu(plan: Plan, *assumptions: str) -> Plan:
    return replace(
        plan, device="cpu", assumptions=assumptions, step=replace(plan.step, phases=PREDICTED, seconds=1.7)
    )


def test_every_phase_has_both_figures_and_the_error(plan: Plan) -> None:
    planned = on_cpu(plan)
    rows = {each.name: each for each in compared_phases(planned, outcome(planned, 2.0))}
    assert list(rows) == ["forward", "backward", "communication", "optimizer"]
    assert rows["forward"].error == "−20.0 %" and rows["backward"].error == "+10.0 %"
    assert rows["communication"].error == ""
    assert compared_phases(plan, outcome(plan, 2.0)) == []  # a plan of an older version


def test_a_large_error_offers_a_calibration_once(plan: Plan) -> None:
    planned = on_cpu(plan)
    said = list(step_sentences(planned, outcome(planned, 2.0)))
    assert said[0] == "step: 1.70 s predicted, 2.00 s measured (predicted 15.0 % too low)"
    assert "forward 400.0 ms/500.0 ms" in said[1] and "doctor --calibrate" in said[2]
    assert len(list(step_sentences(planned, outcome(planned, 1.7)))) == 2
    calibrated = on_cpu(plan, "seconds come from kernels measured on 2026-11-23")
    assert len(list(step_sentences(calibrated, outcome(calibrated, 2.0)))) == 2
    assert list(step_sentences(planned, None)) == []


def test_a_busy_machine_is_told_in_the_place_of_a_calibration(plan: Plan) -> None:
    planned = on_cpu(plan)
    said = list(step_sentences(planned, replace(outcome(planned, 2.0), other_cores=1.42)))
    assert said[2:] == [
        "other processes used 1.4 of this machine's cores meanwhile: idle, its steps are shorter"
    ]
    assert len(list(step_sentences(planned, replace(outcome(planned, 1.7), other_cores=1.42)))) == 2


@pytest.mark.parametrize(
    ("predicted", "measured", "words"),
    [
        (3.4 * MiB, 1.3 * MiB, "less than 4.00 MiB off"),
        (101 * MiB, 100 * MiB, "1.0 % too high"),
        (30 * MiB, 36 * MiB, "16.7 % too low"),
        (3.4 * MiB, 0, "–"),
    ],
)
def test_an_error_of_few_bytes_has_no_percentage(predicted: float, measured: float, words: str) -> None:
    assert peak_error(predicted, measured) == words
