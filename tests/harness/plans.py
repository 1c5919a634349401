"""Plans made by hand, for tests of their uses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.core.ledger import Ledger
from shardwise.core.plan import DiskSpace, HostMemory, Plan, PlannedPeak, StepEstimate
from shardwise.core.units import GiB
from shardwise.technique import layout_of, strategy_from

NOTHING_TO_SEARCH: dict[str, Any] = {
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "sequence_parallel": 1,
    "micro_batch_size": 1,
    "activation_checkpointing": "none",
    "offload": "none",
    "loss": "logits",
    "compile": "none",
    "zero_stage": 0,
    "replicate": 1,
    "precision": "fp32",
    "optimizer_in_backward": False,
}
"""Pins of a recipe whose plan is one dry run, for tests of something else than the choice."""


def small_plan() -> Plan:
    """One process on a CPU with room for twice as much."""
    return Plan(
        strategy=strategy_from({"micro_batch_size": 2}),
        line="fp32 · zero0×1 · mb2×ga2",
        world_size=1,
        cluster="1xcpu",
        device="cpu",
        capacity_bytes=4 * GiB,
        reserve_bytes=0,
        parameters=1000,
        peak=PlannedPeak(2 * GiB, 0, "backward", "layers.0"),
        ledger=Ledger(activations=2 * GiB),
        allocated_bytes={0: 2 * GiB},
        step=StepEstimate(0.1, 64, 1000, {}, 0.5, {}),
        micro_batches=2,
        candidates=(),
        reasons=(),
        assumptions=(),
        timeline=(),
        host=HostMemory(Ledger(), 0),
        disk=DiskSpace(0),
        layout=layout_of(strategy_from({}), 1),
        devices_per_node=1,
        pipeline=None,
    )


def with_rows(plan: Plan, **rows: int) -> Plan:
    """The plan with this ledger at its peak, in the forward phase."""
    ledger = Ledger(**rows)
    return replace(plan, ledger=ledger, peak=replace(plan.peak, bytes=ledger.total, phase="forward"))
