"""How published runs become recipes, how counts are paired, and the measures of docs/reference/accuracy.md."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import calibrate
import counted
import published

from shardwise.core.cost import Kernel, StepCost
from shardwise.hardware.profiles import PROFILES

ROWS, LEFT_OUT = published.read("published_runs.csv")


def test_every_published_run_is_expressed_or_left_out_with_a_reason() -> None:
    lines = (published.DATA / "published_runs.csv").read_text(encoding="utf-8").splitlines()
    assert len(ROWS) + sum(LEFT_OUT.values()) == len(lines) - 1
    assert all(run.gpus == run.tensor * run.pipeline * run.sequence * run.data for run in ROWS)
    assert all(run.passes * run.micro_batch * run.data == run.batch for run in ROWS)


def test_korthikanti_s_175_billion_take_the_seconds_of_their_paper() -> None:
    """Table 5 of arXiv:2205.05198: 13.75 s a step with selective recomputation and 18.13 s with full."""
    some = [r for r in ROWS if r.source.startswith("Korthikanti") and r.name == "GPT 175B"]
    seconds = {str(run.settings["activation_checkpointing"]): run.seconds for run in some}
    assert seconds == {"none": pytest.approx(13.75, rel=0.01), "full": pytest.approx(18.13, rel=0.01)}


def test_two_sizes_in_one_count_and_one_in_the_other_are_paired_by_size() -> None:
    small, large = (Kernel("forward", "aten::mm", "bf16", calls, 10 * calls, 8) for calls in (2, 4))
    both = replace(small, calls=6, flops=30)
    line = counted.between(StepCost((small, large), ()), StepCost((both,), ()), 1.0)
    assert sum(k.calls for k in line.kernels) == 6
    assert sum(k.calls * k.flops for k in line.kernels) == 6 * 30
    with pytest.raises(ValueError, match="differ"):
        counted.between(StepCost((small,), ()), StepCost((both,), ()), 1.0)


def case(seconds: float, **changes: object) -> calibrate.Case:
    run = replace(ROWS[0], seconds=seconds, **changes)  # type: ignore[arg-type]
    return calibrate.Case(run, None, None, None)  # type: ignore[arg-type]


def test_order_and_regret_of_a_group() -> None:
    cases = [case(second) for second in (1.0, 2.0, 3.0, 4.0, 5.0)]
    guessed = np.array([2.0, 1.0, 3.0, 4.0, 5.0])
    [group] = calibrate.orders(cases, np.log(guessed / [1.0, 2.0, 3.0, 4.0, 5.0]))
    assert (group.pairs, group.right, group.regret) == (10, 9, 1.0)
    assert group.spearman == pytest.approx(1 - 6 * 2 / (5 * 24))
    assert calibrate.orders(cases[:4], np.zeros(4)) == []


def test_a_factor_is_that_of_most_runs() -> None:
    errors = -np.log(np.array([1.2, 1.21, 1.22, 1.19, 1.2, 9.0, 12.0, 30.0]))
    assert calibrate.factor_of(errors) == pytest.approx(1.2, rel=0.02)
    assert math.exp(-np.median(errors)) > 1.2


def test_a_run_that_its_source_shows_much_faster_is_dropped() -> None:
    assert calibrate.repeated([case(19.0), case(89.0), case(20.0)]) == {1}
    assert calibrate.repeated([case(19.0), case(89.0, micro_batch=2 * ROWS[0].micro_batch)]) == set()


def test_profiles_have_the_constants_of_the_committed_fit() -> None:
    fit = json.loads(calibrate.RESULTS.read_text(encoding="utf-8"))["constants"]
    h100, wide, a100 = (PROFILES[name] for name in ("H100-80GB", "H100-96GB", "A100-80GB"))
    assert {
        "efficiency.matmul, H100-80GB and H200": h100.efficiency.matmul,
        "efficiency.matmul, H100-96GB": wide.efficiency.matmul,
        "efficiency.matmul, A100": a100.efficiency.matmul,
        "efficiency.attention, H100": h100.efficiency.attention,
        "efficiency.attention, A100": a100.efficiency.attention,
        "launch.kernel_seconds": h100.launch.kernel,
        "overlap.interference": h100.interference,
        "tiles.inner": h100.tiles.inner,
    } == pytest.approx(fit, rel=0.05)
