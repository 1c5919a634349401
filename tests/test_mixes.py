"""Mixes of every way to divide a model, on four and eight processes: they train as one plain process does.

tests/test_agreement.py takes every setting in pairs; here two and three axes meet on one mesh in every row. Rows on
four processes cover all listed pairs that two axes allow (rows/mixes.py).
"""

from __future__ import annotations

from itertools import combinations

import pytest

from shardwise.technique import refuse_broken
from tests.harness.parity import Parity, Trial
from tests.rows.mixes import FURTHER, axes_of, further_trial, trial_of
from tests.rows.table import read

ROWS, LARGE = read("mixes"), read("mixes of three axes")


def test_there_are_enough_of_them_and_every_axis_meets_every_other() -> None:
    rows = [*ROWS.rows, *LARGE.rows]
    assert len(rows) >= 40
    axes = ("copies", "shards", "tensor", "sequence", "pipeline")
    met = {axes_of(row) for row in rows}
    assert all(any({a, b} <= some for some in met) for a, b in combinations(axes, 2))
    assert all(any(set(three) <= some for some in met) for three in combinations(axes[1:], 3))


@pytest.mark.parametrize("trial", [*ROWS.cases(trial_of), *LARGE.cases(trial_of)])
def test_trains_as_one_plain_process(trial: Trial, parity: Parity) -> None:
    verdict = parity.verdict(trial)
    assert verdict.passed, verdict


@pytest.mark.long  # of each setting, rows.json has every value in `make test`
@pytest.mark.parametrize("trial", [pytest.param(further_trial(*row), id=str(row)) for row in FURTHER])
def test_what_no_row_has_trains_as_one_plain_process(trial: Trial, parity: Parity) -> None:
    refuse_broken(trial.recipe, trial.world, str)
    verdict = parity.verdict(trial)
    assert verdict.passed, verdict
