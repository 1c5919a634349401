"""A plan made by hand, for tests of its uses."""

from __future__ import annotations

import pytest

from shardwise.core.plan import Plan
from tests.harness.plans import small_plan


@pytest.fixture
def plan() -> Plan:
    """Of one process on a CPU that has room for twice as much."""
    return small_plan()
