"""The ledger's arithmetic."""

from __future__ import annotations

import pytest

from shardwise.core.ledger import CATEGORIES, Ledger, ledger_from


def test_nine_rows_that_sum_to_the_total() -> None:
    assert len(CATEGORIES) == 9
    assert Ledger(parameters=3, overhead=4).total == 7
    assert (Ledger(parameters=3) + Ledger(parameters=1, gradients=2)) == Ledger(parameters=4, gradients=2)


def test_unknown_rows_are_refused() -> None:
    with pytest.raises(TypeError):
        ledger_from({"other": 1})


def test_extrapolation_is_linear_and_never_negative() -> None:
    shallow, deeper = Ledger(activations=10, temporaries=8), Ledger(activations=14, temporaries=7)
    assert shallow.extrapolated(deeper, 3) == Ledger(activations=22, temporaries=5)
    far = shallow.extrapolated(deeper, 20)
    assert far.total == 18 + 20 * 3
    assert min(far.as_dict().values()) >= 0
