"""A plan and the folder of a run, as large runs write them, without planning or training anything."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.core.ledger import Ledger
from shardwise.core.plan import (
    Candidate,
    DiskSpace,
    HostMemory,
    Plan,
    PlannedPeak,
    StepEstimate,
    TimelinePoint,
)
from shardwise.core.strategy import Strategy
from shardwise.core.units import GiB, MiB
from shardwise.technique import mesh_layout

STRATEGY = Strategy({"precision": "bf16", "zero_stage": 3, "micro_batch_size": 1})
LAYOUT = mesh_layout({"shard": 8})

PEAK = Ledger(
    parameters=2420 * MiB,
    master_weights=3829 * MiB,
    gradients=3829 * MiB,
    optimizer_state=7658 * MiB,
    activations=44154 * MiB,
    temporaries=2505 * MiB,
    communication=4008 * MiB,
    overhead=2712 * MiB,
)


def _timeline() -> tuple[TimelinePoint, ...]:
    """Up through the forward pass, down through the backward pass; without overhead, as dry runs write it."""
    points = list[TimelinePoint]()
    for index in range(60):
        phase = "forward" if index < 25 else "backward" if index < 55 else "optimizer"
        rise = index / 25 if index < 25 else max(0.0, (55 - index) / 30)
        kept = replace(PEAK, overhead=0, temporaries=0, communication=0)
        points.append(TimelinePoint(phase, replace(kept, activations=round(PEAK.activations * rise))))
    return tuple(points)


def _candidate(line: str, peak: int, seconds: float, verdict: str, reason: str) -> Candidate:
    return Candidate(STRATEGY, f"bf16 · {line}", peak, seconds, verdict, reason)


@pytest.fixture
def plan() -> Plan:
    return example_plan()


def example_plan() -> Plan:
    """A plan of Llama-3-8B on eight GPUs."""
    peak = PlannedPeak(PEAK.total, 0, "backward", "layers.31.mlp")
    return Plan(
        strategy=STRATEGY,
        line="bf16 · zero3×8 · mb1×ga2",
        world_size=8,
        cluster="8xH100-80GB",
        device="H100-80GB",
        capacity_bytes=81_000 * MiB,
        parameters=8_030_261_248,
        peak=peak,
        ledger=PEAK,
        allocated_bytes={0: peak.bytes - 2648 * MiB},
        step=StepEstimate(
            seconds=1.645,
            tokens=131_072,
            flops=984_028_547_121_152,
            traffic_bytes={"control": 35, "shard": 112_423_657_472},
            mfu=0.583,
            split={"matrix products": 1.244, "memory-bound": 0.391, "exposed communication": 0.01},
        ),
        micro_batches=2,
        reserve_bytes=0,
        host=HostMemory(Ledger(), 0),
        disk=DiskSpace(0),
        pipeline=None,
        candidates=(
            Candidate(STRATEGY, "bf16 · zero3×8 · mb1×ga2", peak.bytes, 1.645, "chosen", ""),
            Candidate(
                STRATEGY,
                "bf16 · zero2×8 · mb1×ga2",
                79 * GiB,
                1.568,
                "fits",
                "−5 % step time, about +9.6 GiB",
                "estimated",
            ),
            Candidate(
                STRATEGY,
                "bf16 · zero0×8 · mb1×ga2",
                90 * GiB,
                0.0,
                "does not fit",
                "weights alone: 90 GiB",
                "at least",
            ),
            Candidate(
                STRATEGY, "bf16 · zero3×8 · mb2×ga1", 107 * GiB, 1.561, "does not fit", "28 GiB too much"
            ),
        ),
        reasons=("micro_batch_size 1, because micro_batch_size 2 needs 107.4 GiB",),
        assumptions=("seconds are a roofline over the profile's peaks",),
        timeline=_timeline(),
        layout=LAYOUT,
        devices_per_node=8,
    )


MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Writes the folder of a run of ``plan``; ``finished=False`` leaves it as it is while it trains."""

    def make(plan: Plan, *, name: str = "example", **options: Any) -> Path:
        return write_run(tmp_path / name, plan, **options)

    return make


def write_run(folder: Path, plan: Plan, *, steps: int = 30, finished: bool = True, sample: str = "") -> Path:
    """The files of a run."""
    folder.mkdir()
    (folder / "recipe.yaml").write_text("model:\n  preset: llama-3-8b\nsteps: 30\n", encoding="utf-8")
    (folder / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            line = {
                "step": step,
                "loss": 1.4 + 4 * math.exp(-step / 10),
                "grad_norm": 0.8,
                "learning_rate": 3e-4 * min(1.0, step / 5),
                "tokens": plan.step.tokens,
                "seconds": 1.8,
                "tokens_per_second": plan.step.tokens / 1.8,
                "skipped": step == 7,
            }
            file.write(json.dumps(line | ({"held_out_loss": 1.6} if step % 10 == 0 else {})) + "\n")
    if finished:
        (folder / "report.json").write_text(json.dumps(_report(plan, steps, sample)), encoding="utf-8")
    return folder


def _report(plan: Plan, steps: int, sample: str) -> dict[str, object]:
    predicted = plan.allocated_bytes[0]
    measured = [predicted / (1.02 - 0.01 * rank) for rank in range(plan.world_size)]
    return {
        "ranks": [
            {
                "rank": rank,
                "predicted_peak_bytes": predicted,
                "measured_peak_bytes": round(size),
                "measured_reserved_bytes": round(1.02 * size),
            }
            for rank, size in enumerate(measured)
        ],
        "predicted_step_seconds": plan.step.seconds,
        "measured_step_seconds": 1.79,
        "ledger": plan.ledger.as_dict(),
        "held_out_loss": 1.5213,
        "parameters": plan.parameters,
        "tokens": steps * plan.step.tokens,
        "seconds": 60.0,
        "sample": sample or None,
        "device": plan.device,
        "world_size": plan.world_size,
    }
