"""The garbage collector is as before after a plan and after imports, also after an error."""

from __future__ import annotations

import gc

import pytest

from shardwise.core.collector import frozen, paused


def test_what_exists_is_exempt_until_the_outermost_ends() -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    with pytest.raises(ValueError, match="plan"), frozen():
        assert gc.get_freeze_count() > before[1] and gc.get_threshold()[0] > before[0][0]
        with frozen():
            pass
        assert gc.get_freeze_count() > before[1] and gc.get_threshold()[0] > before[0][0]
        raise ValueError("plan")
    assert (gc.get_threshold(), gc.get_freeze_count()) == before


def test_a_pause_ends_with_its_block_also_within_another() -> None:
    with pytest.raises(ValueError, match="import"), paused():
        with paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ValueError("import")
    assert gc.isenabled()
