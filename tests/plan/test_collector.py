"""The garbage collector during a plan is as before afterwards, also after an error."""

from __future__ import annotations

import gc

import pytest

from shardwise.plan.collector import frozen


def test_what_exists_is_exempt_until_the_outermost_ends() -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    with pytest.raises(ValueError, match="plan"), frozen():
        assert gc.get_freeze_count() > before[1] and gc.get_threshold()[0] > before[0][0]
        with frozen():
            pass
        assert gc.get_freeze_count() > before[1] and gc.get_threshold()[0] > before[0][0]
        raise ValueError("plan")
    assert (gc.get_threshold(), gc.get_freeze_count()) == before
