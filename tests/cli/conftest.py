"""A plan that nobody has planned, for tests of what is done with one."""

from __future__ import annotations

import pytest

from shardwise.core.ledger import Ledger, Peak
from shardwise.core.plan import Plan, StepEstimate
from shardwise.core.units import GiB
from shardwise.technique import strategy_from


@pytest.fixture
def plan() -> Plan:
    """Of one process on a CPU that has room for twice as much."""
    return Plan(
        strategy=strategy_from({"micro_batch_size": 2}),
        line="fp32 · zero0×1 · mb2×ga2",
        world_size=1,
        cluster="1xcpu",
        device="cpu",
        capacity_bytes=4 * GiB,
        parameters=1000,
        peak=Peak(Ledger(activations=2 * GiB), "backward", "layers.0"),
        worst_rank=0,
        allocated_bytes={0: 2 * GiB},
        step=StepEstimate(0.1, 64, 1000, {}, 0.5),
        micro_batches=2,
    )
