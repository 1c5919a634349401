"""Every technique, alone and in pairs, trains as one plain process does.

The rows are made from the techniques' own settings (rows/), so a new technique is covered the day it is added to
``technique.ORDER``. `make test` trains every value; `make test-all` trains all pairs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.harness.covering import Row
from tests.harness.parity import Parity, Trial
from tests.rows.__main__ import current
from tests.rows.parity import ADAPTER_FACTORS, EXACT_FACTORS, PARITY_FACTORS, trial_of
from tests.rows.table import FILE, read

PARITY = [read(name) for name in ("exact", "fewer bits", "adapters", "compiled")]


@pytest.mark.long
def test_rows_are_up_to_date() -> None:
    assert FILE.read_text(encoding="utf-8") == current(), "run `make rows`"


def test_every_value_is_of_some_row_that_is_trained() -> None:
    """A pair that no rule allows is left out silently; a value without any row would be as well."""
    exact, fewer_bits, adapters, _ = PARITY
    asked = {(name, value) for name, values in PARITY_FACTORS.items() for value in values}
    assert asked <= held(exact.rows) | held(fewer_bits.rows)
    for table, factors in ((exact, EXACT_FACTORS), (adapters, ADAPTER_FACTORS)):
        assert held(table.few) == {(name, value) for name, values in factors.items() for value in values}


def held(rows: Iterable[Row]) -> set[tuple[str, Any]]:
    return {(name, value) for row in rows for name, value in row.items()}


@pytest.mark.parametrize("trial", [case for table in PARITY for case in table.cases(trial_of)])
def test_trains_as_one_plain_process(trial: Trial, parity: Parity) -> None:
    """Loss, gradient norm and weights, step by step: 1e-10 in fp64, 1e-5 in fp32, wider where bits are given up.

    Weights without a master copy in fp32 drift beyond the fixed bound within 20 steps: the noise between plain runs in
    the same precision judges them, together with a proof in fp64.
    """
    verdict = parity.verdict(trial)
    if not verdict.passed and trial.rounds_more:
        verdict = parity.verified(trial)
    assert verdict.passed, verdict
