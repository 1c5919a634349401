"""The plan: a strategy, what it will cost, and why the others were not chosen. Numbers and words, no torch.

``peak.bytes`` is what one device must have: what the dry run counted plus the overhead of the device's
profile. ``allocated_bytes`` leaves out what the measurement cannot see (a driver's context, communicators) and
is what a run's measured peak is compared with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.core.ledger import Ledger, Peak
from shardwise.core.pipeline_plan import PipelinePlan
from shardwise.core.strategy import Layout, Strategy


@dataclass(frozen=True)
class StepEstimate:
    """One optimizer step: predicted time, and what was counted.

    Attributes:
        seconds: of one step, the slowest rank.
        tokens: targets of the global batch.
        flops: of one rank, recomputation included.
        traffic_bytes: sent by one rank, by mesh axis, ring convention.
        mfu: model FLOPs (no recomputation) of the world per second over its peak in the compute dtype.
        split: seconds by what they are spent on; overlapped communication is not in it.
    """

    seconds: float
    tokens: int
    flops: int
    traffic_bytes: Mapping[str, int]
    mfu: float
    split: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Candidate:
    """One strategy that was considered.

    Attributes:
        verdict: chosen | fits | tight (only by emptying the allocator's cache in every step) | does not fit | invalid.
        reason: one sentence.
    """

    strategy: Strategy
    line: str
    peak_bytes: int
    step_seconds: float
    verdict: str
    reason: str


@dataclass(frozen=True)
class TimelinePoint:
    """The ledger at one instant of the step."""

    phase: str
    ledger: Ledger


@dataclass(frozen=True)
class Plan:
    """What will be trained and what it will need.

    Attributes:
        line: the strategy in one line.
        reserve_bytes: part of the capacity that is left for what is neither counted nor in a table.
        worst_rank: the rank whose peak is given.
        allocated_bytes: predicted peak by rank, in the terms of the measurement (every rank that was dry-run).
        reasons: why this strategy, in sentences; and what was derived for this batch size.
        assumptions: what is taken from tables instead of being counted.
        host: host memory of a rank when it holds most, where that is another memory than the device's.
        host_capacity_bytes: host memory for each device of a node.
        layout: the mesh over all devices.
        devices_per_node: how many of them lie in one node.
        pipeline: what its pipeline is played with, where there is one.
        disk_bytes: what a rank reserves on a disk; whether there is as much is seen when the run is built.
    """

    strategy: Strategy
    line: str
    world_size: int
    cluster: str
    device: str
    capacity_bytes: int
    parameters: int
    peak: Peak
    worst_rank: int
    allocated_bytes: Mapping[int, int]
    step: StepEstimate
    micro_batches: int
    reserve_bytes: int = 0
    candidates: tuple[Candidate, ...] = ()
    reasons: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    timeline: tuple[TimelinePoint, ...] = ()
    host: Ledger = field(default_factory=Ledger)
    host_capacity_bytes: int = 0
    disk_bytes: int = 0
    layout: Layout = field(default_factory=lambda: Layout(()))
    devices_per_node: int = 1
    pipeline: PipelinePlan | None = None

    @property
    def fits(self) -> bool:
        on_device = self.peak.bytes <= self.capacity_bytes - self.reserve_bytes
        return on_device and self.host.total <= self.host_capacity_bytes

    def predicted_allocated(self, rank: int) -> int:
        """Predicted peak of ``rank``; one that was not dry-run holds no more than the nearest before it that was."""
        return self.allocated_bytes[max(known for known in self.allocated_bytes if known <= rank)]

    def as_dict(self) -> dict[str, Any]:
        """The object that ``plan --json`` prints and ``plan.json`` holds."""
        return {
            "strategy": dict(self.strategy.values),
            "line": self.line,
            "world_size": self.world_size,
            "layout": dict(self.layout.axes),
            "cluster": self.cluster,
            "devices_per_node": self.devices_per_node,
            "device": self.device,
            "fits": self.fits,
            "capacity_bytes": self.capacity_bytes,
            "reserve_bytes": self.reserve_bytes,
            "parameters": self.parameters,
            "peak": {
                "bytes": self.peak.bytes,
                "rank": self.worst_rank,
                "phase": self.peak.phase,
                "where": self.peak.where,
            },
            "ledger": self.peak.ledger.as_dict(),
            "allocated_bytes": {str(rank): size for rank, size in self.allocated_bytes.items()},
            "host": {
                "bytes": self.host.total,
                "capacity_bytes": self.host_capacity_bytes,
                "ledger": self.host.as_dict(),
            },
            "disk": {"bytes": self.disk_bytes},
            "step": {**vars(self.step), "tokens_per_second": self.step.tokens_per_second},
            "micro_batches": self.micro_batches,
            "pipeline": None if self.pipeline is None else dict(vars(self.pipeline)),
            "candidates": [{**vars(c), "strategy": dict(c.strategy.values)} for c in self.candidates],
            "reasons": list(self.reasons),
            "assumptions": list(self.assumptions),
            "timeline": [{"phase": p.phase, **p.ledger.as_dict()} for p in self.timeline],
        }

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1)


def plan_from(data: Mapping[str, Any]) -> Plan:
    """The plan that ``as_dict`` wrote. Raises KeyError or TypeError when it is not one."""
    peak = data["peak"]
    return Plan(
        strategy=Strategy(data["strategy"]),
        line=data["line"],
        world_size=data["world_size"],
        cluster=data["cluster"],
        device=data["device"],
        capacity_bytes=data["capacity_bytes"],
        reserve_bytes=data["reserve_bytes"],
        parameters=data["parameters"],
        peak=Peak(Ledger(**data["ledger"]), peak["phase"], peak["where"]),
        worst_rank=peak["rank"],
        allocated_bytes={int(rank): size for rank, size in data["allocated_bytes"].items()},
        step=StepEstimate(**{k: v for k, v in data["step"].items() if k != "tokens_per_second"}),
        micro_batches=data["micro_batches"],
        candidates=tuple(Candidate(**{**c, "strategy": Strategy(c["strategy"])}) for c in data["candidates"]),
        reasons=tuple(data["reasons"]),
        assumptions=tuple(data["assumptions"]),
        host=Ledger(**data["host"]["ledger"]),
        host_capacity_bytes=data["host"]["capacity_bytes"],
        disk_bytes=data["disk"]["bytes"],
        layout=Layout(tuple(data["layout"].items())),
        devices_per_node=data["devices_per_node"],
        pipeline=PipelinePlan.from_dict(data["pipeline"]) if data["pipeline"] is not None else None,
        timeline=tuple(
            TimelinePoint(point["phase"], Ledger(**{k: v for k, v in point.items() if k != "phase"}))
            for point in data["timeline"]
        ),
    )
