"""What the planner chooses freely for known models and clusters: ``python benchmarks/choices.py [--only TEXT]``.

A row has the chosen plan, its runner-up, and the fastest published run of the same model on as many devices, where
benchmarks/data/published_runs.csv has one. Plans are predictions: none of these clusters was available to this
project. Writes benchmarks/results/choices.json after every row; a row that is there is not planned again.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.core.units import format_bytes
from shardwise.hardware.cluster import cluster_of
from shardwise.jobs.planning import make_plan
from shardwise.recipe.load import recipe_of
from shardwise.technique import SETTINGS

RESULTS = Path(__file__).parent / "results" / "choices.json"


@dataclass(frozen=True)
class Case:
    """A model, a cluster, sequences of ``length`` tokens, ``batch`` of them a step; the published run in words."""

    model: str
    cluster: str
    length: int
    batch: int
    published: str = "none in the table"

    @property
    def name(self) -> str:
        return f"{self.model}, {self.cluster}, {self.batch:,} × {self.length:,} tokens"


TORCHTITAN = "torchtitan, bf16, FSDP2, selective checkpointing, no compile"
CASES = (
    Case("llama-3.2-1b", "8xA100-80GB", 4096, 64),
    Case("llama-3-8b", "8xH100-80GB", 8192, 8, f"{TORCHTITAN}: 7,380 tokens/s per GPU (95 GiB)"),
    Case("llama-3-8b", "64xH100-80GB", 8192, 64, f"{TORCHTITAN}: 5,097 tokens/s per GPU (95 GiB)"),
    Case(
        "llama-3-70b",
        "64xH100-80GB",
        8192,
        128,
        "Megatron, fp8, tensor 4, pipeline 8: 1,621 tokens/s per GPU",
    ),
    Case("llama-3-70b", "8xH100-80GB", 4096, 32),
    Case(
        "llama-3-405b",
        "16384xH100-80GB",
        8192,
        2048,
        "Llama 3 paper, bf16, tensor 8, pipeline 16, data 128: 400 TFLOP/s per GPU",
    ),
    Case("llama-3-8b", "16xH100-80GB", 131072, 16),
    Case("llama-3-8b", "1xRTX4090-24GB", 4096, 8),
)


def planned(case: Case) -> dict[str, Any]:
    recipe = recipe_of(
        {
            "model": {"preset": case.model, "context": case.length},
            "data": {"sequence_length": case.length},
            "batch_size": case.batch,
            "steps": 1000,
            "cluster": {"preset": case.cluster},
            "strategy": {"precision": "bf16"},
        },
        SETTINGS,
    )
    cluster = cluster_of(recipe.cluster)
    began = time.perf_counter()
    plan = make_plan(recipe, cluster, compare=True)
    seconds = time.perf_counter() - began
    others = [
        each
        for each in plan.candidates
        if each.verdict not in ("chosen", "does not fit") and each.step_seconds
    ]
    runner_up = min(others, key=lambda each: each.step_seconds or 0.0, default=None)
    return {
        "chosen": plan.line,
        "fits": plan.fits,
        "peak": format_bytes(plan.peak.bytes),
        "step_seconds": plan.step.seconds,
        "tokens_per_second_per_device": plan.step.tokens_per_second / plan.world_size,
        "tflops_per_device": plan.step.model_flops / plan.step.seconds / plan.world_size / 1e12,
        "runner_up": None if runner_up is None else runner_up.line,
        "runner_up_seconds": None if runner_up is None else runner_up.step_seconds,
        "published": case.published,
        "planning_seconds": round(seconds, 1),
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    """What the documentation shows."""
    lines = [
        "| case | chosen, and its runner-up | peak | step | tokens/s, TFLOP/s per device | fastest published |",
        "|---|---|---:|---:|---:|---|",
    ]
    for name, row in rows.items():
        chosen = row["chosen"] if row["fits"] else f"nothing fits; least memory: {row['chosen']}"
        second = f"<br>then {row['runner_up']}: {row['runner_up_seconds']:.2f} s" if row["runner_up"] else ""
        speed = f"{row['tokens_per_second_per_device']:,.0f}, {row['tflops_per_device']:.0f}"
        cells = (name, chosen + second, row["peak"], f"{row['step_seconds']:.2f} s", speed, row["published"])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--again", action="store_true", help="also plan cases that are there")
    given = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    if RESULTS.exists():
        rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    for case in CASES:
        if given.only in case.name and (given.again or case.name not in rows):
            rows[case.name] = planned(case)
            print(case.name, rows[case.name], flush=True)
            ordered = {each.name: rows[each.name] for each in CASES if each.name in rows}
            RESULTS.write_text(
                json.dumps({"rows": ordered, "table": table(ordered)}, indent=1) + "\n", encoding="utf-8"
            )


if __name__ == "__main__":
    main()
